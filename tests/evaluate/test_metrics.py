"""Laws of `evaluate.metrics`: closed forms, calibration of a predictor that is calibrated by construction, averages."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from metavd.evaluate.metrics import (
    ClientResult,
    accuracy,
    brier,
    ece_flat,
    ece_top1,
    flat,
    interval,
    mce_flat,
    mce_top1,
    nll,
    reliability,
    summarize,
    top1,
)

PROBS = np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.4, 0.35, 0.25]])
Y = np.array([0, 1, 0])


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


@pytest.mark.parametrize("classes", [2, 10])
def test_calibrated_predictor_has_no_calibration_error(classes):
    """Labels drawn from the predicted probabilities: both errors vanish like 1/sqrt(N); labels from elsewhere: not."""
    rng = np.random.RandomState(0)
    probs = rng.dirichlet(np.full(classes, 0.3), 200_000)  # every bin is well filled
    y = (rng.rand(200_000)[:, None] > probs.cumsum(1)).sum(1).clip(max=classes - 1)
    assert ece_top1(probs, y) < 0.005
    assert ece_flat(probs, y) < 0.005
    assert mce_flat(probs, y) < 0.05
    sure = probs**3 / (probs**3).sum(1, keepdims=True)
    assert ece_top1(sure, y) > 0.05
    assert ece_flat(sure, y) > 0.02


def test_flat_error_is_about_two_kths_of_top1():
    """Section 8's rule of thumb for an overconfident model of 100 classes: flat ECE = (2 to 2.5) top-1 ECE / K."""
    rng = np.random.RandomState(1)
    logits = rng.randn(20_000, 100) * 1.2
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    y = (rng.rand(20_000)[:, None] > probs.cumsum(1)).sum(1).clip(max=99)
    sharp = np.exp(2.5 * logits)
    sharp /= sharp.sum(1, keepdims=True)
    assert 1.5 < ece_flat(sharp, y) * 100 / ece_top1(sharp, y) < 3


def test_one_is_counted():
    """A p of 1 belongs to the last bin; the released code dropped it, together with its part of the total."""
    probs = np.array([[1.0, 0.0], [1.0, 0.0], [0.95, 0.05]])
    y = np.array([0, 1, 0])
    assert top1(probs, y).count.tolist() == [0] * 14 + [3]
    assert ece_top1(probs, y) == pytest.approx(abs(2 / 3 - 2.95 / 3))
    assert flat(probs, y).count.tolist() == [3] + [0] * 8 + [3]
    # [0, .1): 0, 0, .05 with targets 0, 1, 0; [.9, 1]: 1, 1, .95 with targets 1, 0, 1
    assert ece_flat(probs, y) == pytest.approx((abs(1 - 0.05) + abs(2 - 2.95)) / 6)
    assert flat(probs, y, released=True).count.tolist() == [3] + [0] * 8 + [1]
    assert ece_flat(probs, y, released=True) == pytest.approx((abs(1 - 0.05) + abs(1 - 0.95)) / 4)
    assert mce_flat(probs, y, released=True) == pytest.approx(0.95 / 3)


def test_released_without_anything_left():
    """Only p = 1, all dropped: nothing errs, and nothing is divided by nothing."""
    assert (ece_flat(np.ones((2, 1)), np.zeros(2, int), released=True), mce_flat(np.ones((2, 1)), [0, 0])) == (0, 0)


def test_bins_are_half_open():
    """Bin j of 10 is [j/10, (j+1)/10): an edge belongs to the bin above it, exactly, for all ten edges."""
    edges = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    assert reliability(edges, np.ones(10), 10).count.tolist() == [1] * 10
    below = np.nextafter(edges[1:], 0)
    assert reliability(below, np.ones(9), 10).count.tolist() == [1] * 9 + [0]
    assert reliability(np.array([1.0, 1.0000001]), np.ones(2), 10).count.tolist() == [0] * 9 + [2]


def test_reliability_by_hand():
    """Counts, mean confidence and accuracy of each bin; an empty bin holds zeros and errs by nothing."""
    bins = reliability(np.array([0.1, 0.2, 0.9]), np.array([0, 1, 1]), 4)
    assert bins.edges.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert bins.count.tolist() == [2, 0, 0, 1]
    assert bins.confidence.tolist() == pytest.approx([0.15, 0, 0, 0.9])
    assert bins.accuracy.tolist() == [0.5, 0, 0, 1]


def test_calibration_errors_by_hand():
    """ECE is the count-weighted mean of the bins' gaps, MCE the largest gap."""
    probs = np.array([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.6, 0.4]])
    y = np.array([0, 1, 0, 0])
    assert ece_top1(probs, y) == pytest.approx(0.5 * 0.4 + 0.5 * 0.4)
    assert ece_top1(probs, y, bins=1) == pytest.approx(0)
    assert mce_top1(probs, np.array([1, 1, 0, 0])) == pytest.approx(0.9)


@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(2, 6), st.integers(1, 20))
def test_calibration_is_bounded_and_ordered(seed, samples, classes, bins):
    """0 <= ECE <= MCE <= 1, no matter how samples are ordered; every probability falls into exactly one bin."""
    rng = np.random.RandomState(seed)
    probs = rng.dirichlet(np.full(classes, 0.3), samples)
    y = rng.randint(0, classes, samples)
    mixed = rng.permutation(samples)
    for expected, maximum in ((ece_top1, mce_top1), (ece_flat, mce_flat)):
        assert 0 <= expected(probs, y, bins) <= maximum(probs, y, bins) + 1e-12 <= 1 + 2e-12
        assert expected(probs[mixed], y[mixed], bins) == pytest.approx(expected(probs, y, bins), abs=1e-12)
    assert top1(probs, y, bins).count.sum() == samples
    assert flat(probs, y, bins).count.sum() == samples * classes


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_diverged_model_cannot_look_good(bad):
    """A row that is not finite counts as wrong, and no figure but accuracy stays a number."""
    probs = np.array([[1.0, 0.0], [0.3, bad], [bad, bad]])
    y = np.array([0, 0, 0])
    assert accuracy(probs, y) == pytest.approx(1 / 3)
    for figure in (nll, brier, ece_top1, mce_top1, ece_flat, mce_flat):
        assert math.isnan(figure(probs, y))
    assert math.isnan(ece_flat(probs, y, released=True))


def test_float32_is_computed_in_float64():
    """Single-precision inputs give the same figures as their exact double-precision values."""
    rng = np.random.RandomState(0)
    probs = rng.dirichlet(np.ones(5), 1000).astype(np.float32)
    y = rng.randint(0, 5, 1000)
    for figure in (nll, brier, ece_top1, ece_flat):
        assert figure(probs, y) == figure(probs.astype(np.float64), y)


def result(client, train_size, correct, wrong):
    """Return a client with so many right and wrong answers, each with confidence 0.8."""
    probs = np.tile([0.8, 0.2], (correct + wrong, 1))
    return ClientResult(client, train_size, probs, np.repeat([0, 1], [correct, wrong]))


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
    rng = np.random.RandomState(0)
    results = [ClientResult(i, i + 1, rng.dirichlet(np.ones(4), 5 + i), rng.randint(0, 4, 5 + i)) for i in range(6)]
    probs, y = np.concatenate([r.probs for r in results]), np.concatenate([r.y for r in results])
    told = summarize(results)
    for figure in (nll, brier, ece_top1, ece_flat, mce_top1, mce_flat):
        assert told[figure.__name__] == figure(probs, y)
    assert told["accuracy_pooled"] == accuracy(probs, y)
    assert summarize(results[::-1])["accuracy"] == pytest.approx(told["accuracy"])


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


@pytest.mark.parametrize("level", [0.5, 0.95, 0.99])
def test_interval_is_students(level):
    """Mean and half width equal SciPy's t interval."""
    values = [0.61, 0.64, 0.6, 0.7]
    mean, half = interval(values, level)
    low, high = stats.t.interval(level, 3, loc=np.mean(values), scale=stats.sem(values))
    assert half is not None
    assert (mean - half, mean + half) == pytest.approx((low, high))


def test_interval_of_two_values():
    """Closed form: t_{1, .975} = 12.7062, s / sqrt(2) = half the distance."""
    assert interval([1.0, 3.0]) == pytest.approx((2.0, 12.706204736432095))


def test_interval_covers():
    """95 % intervals of normal samples cover the mean in about 95 % of cases."""
    draws = np.random.RandomState(0).randn(4000, 5)
    covered = [abs(mean) <= half for mean, half in (interval(row) for row in draws) if half is not None]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.012)


def test_interval_edges():
    """One value has no width; none, or a level outside (0, 1), is an error."""
    assert interval([0.5]) == (0.5, None)
    assert interval([0.5, 0.5]) == (0.5, 0.0)
    with pytest.raises(ValueError, match="at least one value"):
        interval([])
    with pytest.raises(ValueError, match=r"level is 95"):
        interval([1, 2], level=95)
