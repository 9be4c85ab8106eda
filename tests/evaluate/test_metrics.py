"""Scores and summaries: reference implementations, closed forms, averages over clients, figures that do not exist."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, roc_auc_score

from metavd.evaluate.figures import figures, of_clients
from metavd.evaluate.metrics import (
    ClientResult,
    accuracy,
    bootstrap,
    brier,
    client_figures,
    diagrams,
    ece_classwise,
    ece_flat,
    ece_mass,
    ece_top1,
    entropy,
    gap_interval,
    mce_classwise,
    mce_flat,
    mce_mass,
    mce_top1,
    nll,
    of_classes,
    scaled,
    summarize,
    temperature,
    tempered,
    top1,
)

POOLED = (
    nll, brier, ece_top1, ece_mass, ece_classwise, ece_flat, mce_top1, mce_mass, mce_classwise, mce_flat
)  # fmt: skip
PROBS = np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.4, 0.35, 0.25]])
Y = np.array([0, 1, 0])


def test_scores_are_sklearns(case):
    """Parity: accuracy_score, log_loss (at our floor of 1e-12) and brier_score_loss, not halved for two classes."""
    probs, y = np.asarray(case[0], np.float64), case[1]
    labels = range(probs.shape[1])
    exact = probs / probs.sum(1, keepdims=True)  # single precision sums to 1 too roughly for scikit-learn
    floored = np.maximum(exact, 1e-12)
    assert accuracy(*case) == accuracy_score(y, probs.argmax(1))
    assert nll(*case) == pytest.approx(log_loss(y, floored, labels=labels), rel=1e-7, abs=1e-11)
    wanted = brier_score_loss(y, exact, labels=labels, scale_by_half=False)
    assert brier(*case) == pytest.approx(wanted, rel=1e-6, abs=1e-12)


def test_scores_of_no_rows():
    """A mean over nothing is no number, and no warning either."""
    for score in (accuracy, nll, brier):
        assert math.isnan(score(np.zeros((0, 3)), np.zeros(0, int)))


def test_scores_by_hand():
    """Accuracy, log loss and Brier score of three rows, written out."""
    assert accuracy(PROBS, Y) == pytest.approx(2 / 3)
    assert nll(PROBS, Y) == pytest.approx(-(math.log(0.7) + math.log(0.3) + math.log(0.4)) / 3)
    rows = [0.3**2 + 0.2**2 + 0.1**2, 0.1**2 + 0.7**2 + 0.6**2, 0.6**2 + 0.35**2 + 0.25**2]
    assert brier(PROBS, Y) == pytest.approx(sum(rows) / 3)


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_ignorance_has_closed_forms(classes):
    """Uniform probabilities cost log K and 1 - 1/K, whatever the labels."""
    probs = np.full((7, classes), 1 / classes)
    y = np.arange(7) % classes
    assert nll(probs, y) == pytest.approx(math.log(classes))
    assert brier(probs, y) == pytest.approx(1 - 1 / classes)


def test_extremes():
    """A sure and right model scores 0, 0, 0; a sure and wrong one 2 and the clipped -log 1e-12, never infinity."""
    y = np.array([0, 1, 1])
    right, wrong = np.eye(2)[y], np.eye(2)[1 - y]
    assert (nll(right, y), brier(right, y), ece_top1(right, y), ece_flat(right, y)) == (0, 0, 0, 0)
    assert nll(wrong, y) == pytest.approx(-math.log(1e-12))
    assert (brier(wrong, y), ece_top1(wrong, y), mce_top1(wrong, y), ece_flat(wrong, y)) == (2, 1, 1, 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_diverged_model_cannot_look_good(bad):
    """A row that is not finite counts as wrong, and no figure but accuracy stays a number."""
    probs = np.array([[1.0, 0.0], [0.3, bad], [bad, bad]])
    y = np.array([0, 0, 0])
    assert accuracy(probs, y) == pytest.approx(1 / 3)
    for figure in POOLED:
        assert math.isnan(figure(probs, y))
    assert math.isnan(ece_flat(probs, y, released=True))


def test_float32_is_computed_in_float64():
    """Single-precision inputs give the same figures as their exact double-precision values."""
    rng = np.random.RandomState(0)
    probs = rng.dirichlet(np.ones(5), 1000).astype(np.float32)
    y = rng.randint(0, 5, 1000)
    for figure in (*POOLED, accuracy):
        assert figure(probs, y) == figure(probs.astype(np.float64), y)
    assert np.array_equal(entropy(probs), entropy(probs.astype(np.float64)))


def result(client, train_size, correct, wrong):
    """Return a client with so many right and wrong answers, each with confidence 0.8."""
    probs = np.tile([0.8, 0.2], (correct + wrong, 1))
    return ClientResult(client, train_size, probs, np.repeat([0, 1], [correct, wrong]))


def federation(clients=6, seed=0, classes=4, *, draws=True):
    """Return clients of different sizes that know some classes only, with or without draws."""
    rng = np.random.RandomState(seed)
    made = []
    for i in range(clients):
        probs, y = rng.dirichlet(np.ones(classes), 5 + i), rng.randint(0, classes, 5 + i)
        information = rng.rand(5 + i) if draws else None
        made.append(ClientResult(i, i + 1, probs, y, rng.rand(classes) < 0.6, information))
    return made


def pooled(results):
    return np.concatenate([r.probs for r in results]), np.concatenate([r.y for r in results])


def test_summary_has_three_accuracies():
    """Weights are training sizes, test rows, or one each; a client without test rows has no say."""
    results = [result(0, 30, 4, 0), result(1, 10, 3, 3), result(2, 1000, 0, 0)]
    told = summarize(results)
    assert told["accuracy"] == pytest.approx((30 * 1.0 + 10 * 0.5) / 40)
    assert told["accuracy_pooled"] == pytest.approx(7 / 10)
    assert told["accuracy_uniform"] == pytest.approx(0.75)
    assert told["worst_client"] == 0.5
    assert (told["clients"], told["samples"]) == (2, 10)
    assert told["nll"] == pytest.approx(-(7 * math.log(0.8) + 3 * math.log(0.2)) / 10)
    assert told["ece_top1"] == pytest.approx(0.1)
    assert told["mce_top1"] == pytest.approx(0.1)


def test_summary_pools_all_other_figures():
    """Every pooled figure equals the function of that name on the joined rows."""
    results = federation()
    probs, y = pooled(results)
    told = summarize(results)
    for figure in POOLED:
        assert told[figure.__name__] == figure(probs, y)
    assert told["accuracy_pooled"] == accuracy(probs, y)
    assert told["entropy"] == entropy(probs).mean()
    assert summarize(results[::-1])["accuracy"] == pytest.approx(told["accuracy"])
    assert tuple(told) == (*figures(), "intervals", "clients", "samples")


def test_summary_of_uncertainty():
    """Parity: roc_auc_score of wrong answers, and of rows whose label the client has no training row of."""
    results = federation()
    probs, y = pooled(results)
    information = np.concatenate([r.information for r in results])
    unknown = np.array([not r.known[label] for r in results for label in r.y])
    told = summarize(results)
    for name, what in (("wrong", probs.argmax(1) != y), ("unknown", unknown)):
        assert told[f"auroc_{name}"] == pytest.approx(roc_auc_score(what, entropy(probs)))
        assert told[f"auroc_{name}_information"] == pytest.approx(roc_auc_score(what, information))
    assert told["mutual_information"] == pytest.approx(information.mean())
    assert told["unknown_share"] == unknown.mean()


def test_what_is_not_there_is_none():
    """Without draws, without a look at training rows, with all classes known, with no wrong answer: None, not 0."""
    results = federation(draws=False)
    told = summarize(results)
    assert told["mutual_information"] is told["auroc_wrong_information"] is told["auroc_unknown_information"] is None
    assert told["auroc_unknown"] is not None
    blind = summarize([replace(r, known=None) for r in results])
    assert blind["auroc_unknown"] is blind["unknown_share"] is None
    versed = summarize([replace(r, known=np.ones(4, bool)) for r in results])
    assert (versed["auroc_unknown"], versed["unknown_share"]) == (None, 0.0)
    assert summarize([replace(r, y=r.probs.argmax(1)) for r in results])["auroc_wrong"] is None
    mixed = [replace(results[0], information=np.zeros(5)), *results[1:]]
    assert summarize(mixed)["mutual_information"] is None, "some draws are no draws of all"


def test_the_lower_end_of_clients():
    """The worst client and NumPy's 10th percentile; of one client, itself."""
    told = summarize([result(i, 1, i, 20 - i) for i in range(21)])
    assert (told["worst_client"], told["percentile_10"]) == (0.0, pytest.approx(0.1))
    assert summarize([result(0, 1, 3, 1)])["percentile_10"] == 0.75


def test_summary_has_intervals_over_clients():
    """Each mean's interval is `bootstrap` of the clients' means with that mean's weights, and holds the mean."""
    results = federation(20)
    told = summarize(results)
    each = {figure: np.array([figure(r.probs, r.y) for r in results]) for figure in (accuracy, nll, brier)}
    rows = np.array([len(r.y) for r in results])
    wanted = {
        "accuracy": (each[accuracy], np.array([r.train_size for r in results])),
        "accuracy_pooled": (each[accuracy], rows),
        "accuracy_uniform": (each[accuracy], np.ones(20)),
        "nll": (each[nll], rows),
        "brier": (each[brier], rows),
    }
    assert set(told["intervals"]) == set(wanted)
    for name, (values, weights) in wanted.items():
        low, high = told["intervals"][name]
        assert [low, high] == pytest.approx(bootstrap(values, weights))
        assert low < told[name] < high


def test_one_client_has_no_intervals():
    """One client tells nothing of others; without training rows the weighted accuracy has no interval either."""
    assert set(summarize([result(0, 5, 3, 1)])["intervals"].values()) == {None}
    told = summarize([result(0, 0, 3, 1), result(1, 0, 1, 3)])["intervals"]
    assert told["accuracy"] is None
    assert told["accuracy_uniform"] == [0.25, 0.75]


def test_interval_of_the_gap():
    """Two groups of the same kind: the interval holds 0; far apart: it does not; with one client: there is none."""
    rng = np.random.RandomState(0)

    def group(share):
        return [result(i, 10, *((k := rng.binomial(50, share)), 50 - k)) for i in range(30)]

    low, high = gap_interval(group(0.7), group(0.7))
    assert low < 0 < high
    low, high = gap_interval(group(0.9), group(0.6))
    assert -0.35 < low < high < -0.25
    assert gap_interval(group(0.5), [result(0, 1, 1, 0), result(1, 1, 0, 0)]) is None


def test_released_summary_takes_batch_means():
    """Closed form: 150 rows, the last 50 all wrong: (1 + 0) / 2 instead of 100 / 150; pooled figures stay."""
    told = summarize([result(0, 1, 100, 50)], released=True)
    assert told["accuracy"] == 0.5
    assert told["accuracy_pooled"] == pytest.approx(2 / 3)
    both = [result(0, 1, 100, 50), result(1, 1, 130, 20)]
    plain, batches = (summarize(both, released=released)["intervals"] for released in (False, True))
    assert batches["accuracy_pooled"] == plain["accuracy_pooled"]
    assert batches["accuracy_uniform"] != plain["accuracy_uniform"]


def test_a_client_s_own_figures():
    """A client's line holds the figures of a group that is this client alone; None where it has no test rows."""
    for one in federation():
        told, alone = client_figures(one), summarize([one])
        assert told == {name: pytest.approx(alone[name]) for name in told}
    assert set(client_figures(result(0, 3, 0, 0)).values()) == {None}
    assert tuple(client_figures(result(0, 3, 0, 0))) == tuple(told) == tuple(each.name for each in of_clients())


def test_diagrams_are_plain_and_hold_every_row():
    """The bins that the calibration errors are made of, as JSON; nothing where nobody has rows."""
    results = federation()
    probs, y = pooled(results)
    told = diagrams([*results, replace(results[0], probs=probs[:0], y=y[:0])])
    assert json.loads(json.dumps(told)) == told
    assert told["top1"]["count"] == top1(probs, y).count.tolist()
    assert {name: sum(bins["count"]) for name, bins in told.items()} == {
        "top1": len(y), "mass": len(y), "flat": probs.size
    }  # fmt: skip
    assert diagrams([result(0, 1, 0, 0)]) is None


def test_tempered_answers_take_each_client_s_temperature():
    """Each client's answers are scaled by what its own validation rows ask for; without any they stay."""
    results = federation(3)
    held = [replace(r, probs=r.probs[::-1], y=r.y) for r in results]
    held[1] = replace(held[1], probs=held[1].probs[:0], y=held[1].y[:0])
    found = tempered(results, held[::-1])
    for i in (0, 2):
        wanted = scaled(results[i].probs, temperature(held[i].probs, held[i].y))
        assert np.array_equal(found[i].probs, wanted)
        assert found[i].information is None, "it is not that of the scaled answers"
    assert found[1] is results[1]
    assert tempered(results, []) == results


def test_domains_keep_what_belongs_to_their_rows():
    """of_classes cuts probabilities, labels and information alike, and leaves what is the client's."""
    results = federation()
    for part, whole in zip(of_classes(results, 1, 2), results, strict=True):
        rows = [i for i, label in enumerate(whole.y) if label in (1, 2)]
        for name in ("probs", "y", "information"):
            assert np.array_equal(getattr(part, name), getattr(whole, name)[rows])
        assert (part.client, part.train_size, part.known is whole.known) == (whole.client, whole.train_size, True)


@pytest.mark.parametrize(("clients", "rows", "classes"), [(130, 77, 100), (10_000, 2, 62)])
def test_many_clients_are_cheap(clients, rows, classes):
    """The paper's federation, and ten thousand tiny clients: within seconds, in some times the answers' memory."""
    rng = np.random.RandomState(0)
    probs = rng.dirichlet(np.ones(classes), (clients, rows))
    y, known, information = rng.randint(0, classes, (clients, rows)), rng.rand(clients, classes) < 0.5, rng.rand(rows)
    results = [ClientResult(i, 9, probs[i], y[i], known[i], information) for i in range(clients)]
    tracemalloc.start()
    summarize(results)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * probs.nbytes
    began = time.process_time()  # of this process alone: others may use the machine
    summarize(results)
    assert time.process_time() - began < 3


def test_equal_clients_have_one_accuracy():
    """With equal sizes everywhere the three averages are the same number."""
    told = summarize([result(i, 5, i, 4 - i) for i in range(5)])
    assert told["accuracy"] == pytest.approx(told["accuracy_pooled"]) == pytest.approx(told["accuracy_uniform"])


@pytest.mark.parametrize("results", [[], [result(0, 10, 0, 0)]])
def test_summary_of_nothing(results):
    """Without test rows there are no figures, and the keys are the same as with some."""
    told = summarize(results)
    assert (told.pop("clients"), told.pop("samples")) == (0, 0)
    assert set(told.values()) == {None}
    assert {*told, "clients", "samples"} == set(summarize([result(0, 1, 1, 0)]))


def test_summary_without_training_rows():
    """If no tested client has training rows, the weighted accuracy does not exist; the others do."""
    told = summarize([result(0, 0, 3, 1)])
    assert told["accuracy"] is None
    assert told["accuracy_pooled"] == 0.75
