"""Conformal sets: closed forms, laws, and MAPIE as a second implementation."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import betabinom
from sklearn.model_selection import StratifiedShuffleSplit

from metavd.errors import SpecError, UserError
from metavd.evaluate import conformal
from metavd.evaluate.conformal import METHODS, Rule, calibrate, covered, crossed, needed, quantile, scores, sets, size


def world(rows: int, classes: int, seed: int, sharp: float = 0.4) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities and labels that come true with just those probabilities."""
    rng = np.random.RandomState(seed)
    probs = rng.dirichlet(np.full(classes, sharp), rows)
    return probs, (probs.cumsum(1) < rng.uniform(size=(rows, 1))).sum(1).clip(max=classes - 1)


# Closed forms

ROW = np.array([[0.2, 0.5, 0.25, 0.05]])


def test_scores_by_hand():
    """Of one row: 1 - p; sums down the ranks; those with a penalty beyond the second rank; those less half of p."""
    np.testing.assert_allclose(scores(ROW, "lac"), [[0.8, 0.5, 0.75, 0.95]])
    np.testing.assert_allclose(scores(ROW, "aps"), [[0.95, 0.5, 0.75, 1.0]])
    np.testing.assert_allclose(scores(ROW, "raps", penalty=0.1, free=2), [[1.05, 0.5, 0.75, 1.2]])
    np.testing.assert_allclose(scores(ROW, "aps", u=np.array([0.5])), [[0.85, 0.25, 0.625, 0.975]])


def test_equal_probabilities_are_ranked_in_the_order_of_classes():
    np.testing.assert_allclose(scores(np.full((1, 4), 0.25), "aps"), [[0.25, 0.5, 0.75, 1.0]])


@pytest.mark.parametrize(
    ("coverage", "rows", "k"), [(0.9, 9, 9), (0.9, 10, 10), (0.9, 19, 18), (0.55, 99, 55), (0.07, 99, 7), (0.9, 8, 9)]
)
def test_the_place_of_the_quantile_by_hand(coverage, rows, k):
    """ceil((n + 1) coverage) of the decimal that was written: as floats, 100 * 0.55 and 100 * 0.07 lie above 55, 7."""
    assert conformal.place(coverage, rows) == k
    assert quantile(np.arange(1.0, rows + 1)[::-1], coverage) == (k if k <= rows else math.inf)


def test_sets_by_hand():
    """Nine rows with scores 0.1 to 0.9, coverage 0.5: the fifth, 0.5; a class is in with p >= 0.5, and the first is."""
    of_label = np.arange(1, 10) / 10
    probs = np.stack([1 - of_label, of_label], 1)
    rule = calibrate(probs, np.zeros(9, int), 0.5)
    assert rule == Rule("lac", 0.5, 9, pytest.approx(0.5))
    asked = np.array([[0.5, 0.5, 0.0], [0.6, 0.3, 0.1], [0.4, 0.3, 0.3]])
    assert sets(asked, rule).tolist() == [[True, True, False], [True, False, False], [True, False, False]]
    assert sets(asked, rule, empty=True)[2].tolist() == [False, False, False]
    assert (covered(sets(asked, rule), np.array([1, 1, 0])), size(sets(asked, rule))) == (2 / 3, 4 / 3)


# Laws


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.99])
def test_with_too_few_rows_a_set_is_whole_and_one_more_is_enough(coverage):
    probs, y = world(needed(coverage), 5, 0)
    few = calibrate(probs[1:], y[1:], coverage) if len(y) > 1 else None
    assert calibrate(probs, y, coverage).enough
    if few is not None:
        assert not few.enough
        assert sets(probs, few).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("coverage", [0.6, 0.9])
def test_coverage_is_within_its_binomial_interval(method, coverage):
    """Hits among N new rows are beta-binomial: Beta(k, n + 1 - k) is the coverage given n calibration rows.

    Exactly so where scores have no ties and no class is added: LAC, and the randomised APS and RAPS.
    """
    rows, new = 300, 4000
    probs, y = world(rows + new, 6, 1)
    u = np.random.RandomState(2).uniform(size=rows + new)  # LAC leaves it alone
    old, fresh = slice(rows), slice(rows, None)
    rule = calibrate(probs[old], y[old], coverage, method, penalty=0.1, free=2, u=u[old])
    hits = covered(sets(probs[fresh], rule, u=u[fresh], empty=True), y[fresh]) * new
    k = conformal.place(coverage, rows)
    low, high = betabinom.interval(0.999, new, k, rows + 1 - k)
    assert low <= hits <= high
    # Without random numbers, and with the most probable class, the coverage is no smaller.
    plain = calibrate(probs[old], y[old], coverage, method, penalty=0.1, free=2)
    assert covered(sets(probs[fresh], plain), y[fresh]) * new >= low


def test_coverage_holds_for_a_model_that_is_wrong():
    """Probabilities of other rows say nothing of the labels; the sets grow, and hold the label all the same."""
    probs, y = world(4300, 6, 3)
    useless = np.roll(probs, 1, axis=0)
    rule = calibrate(useless[:300], y[:300], 0.9)
    low, _ = betabinom.interval(0.999, 4000, conformal.place(0.9, 300), 301 - conformal.place(0.9, 300))
    inside = sets(useless[300:], rule)
    assert covered(inside, y[300:]) * 4000 >= low
    assert size(inside) > size(sets(probs[300:], calibrate(probs[:300], y[:300], 0.9)))


@pytest.mark.parametrize("method", METHODS)
def test_sets_shrink_as_coverage_falls(method):
    """A set for less is part of the set for more, row by row."""
    probs, y = world(400, 6, 4)
    nested = [sets(probs[200:], calibrate(probs[:200], y[:200], c, method)) for c in (0.95, 0.9, 0.7, 0.5)]
    for more, less in pairwise(nested):
        assert not (less & ~more).any()
        assert size(less) < size(more)


def test_raps_without_a_penalty_is_aps():
    probs, y = world(400, 6, 5)
    aps, raps = (calibrate(probs[:200], y[:200], 0.8, method, penalty=0.0) for method in ("aps", "raps"))
    assert raps.threshold == aps.threshold
    np.testing.assert_array_equal(sets(probs[200:], raps), sets(probs[200:], aps))


def test_a_penalty_bounds_the_largest_sets():
    probs, y = world(2000, 20, 6)
    widest = [
        sets(probs[1000:], calibrate(probs[:1000], y[:1000], 0.9, "raps", penalty=penalty, free=2)).sum(1).max()
        for penalty in (0.0, 0.5)
    ]
    assert widest[1] < widest[0]


def test_rows_without_an_answer_are_not_covered_and_get_every_class():
    probs, y = world(20, 3, 7)
    broken = probs.copy()
    broken[:5] = np.nan
    assert not calibrate(broken, y, 0.9).enough
    assert sets(broken, calibrate(probs, y, 0.5, "aps"))[:5].all()


@pytest.mark.parametrize("coverage", [0, 1, 1.5, -0.1, float("nan")])
def test_a_coverage_that_is_none(coverage):
    with pytest.raises(SpecError, match=f"coverage is {coverage}, but must lie between 0 and 1"):
        calibrate(*world(20, 3, 0), coverage)


def test_other_wrong_input_is_one_sentence():
    probs, y = world(20, 3, 0)
    with pytest.raises(SpecError, match="conformal is 'top', but must be lac or aps or raps"):
        calibrate(probs, y, 0.9, "top")
    with pytest.raises(UserError, match="there are no calibration rows"):
        calibrate(probs[:0], y[:0], 0.9)
    with pytest.raises(UserError, match="the rule is not randomised, but u is given"):
        sets(probs, calibrate(probs, y, 0.9, "aps"), u=np.zeros(20))
    with pytest.raises(UserError, match="the rule is randomised, but u is not given"):
        sets(probs, calibrate(probs, y, 0.9, "aps", u=np.zeros(20)))


# Measured on the rows themselves


def test_measured_coverage_lies_within_its_interval():
    """Law: of 200 clients with 100 rows, each half of 50 covers Beta(46, 5) of the other, 46 / 51 in the mean.

    So many labels of 20,000 lie in LAC's sets within four standard deviations of the beta-binomial; sets without random
    numbers cover no less.
    """
    wanted = betabinom(50, 46, 5)
    for kind in METHODS:
        inside = [crossed(*world(100, 8, 500 + client), 0.9, kind, seed=client)[0] for client in range(200)]
        share, margin = np.concatenate(inside).mean(), 4 * wanted.std() / np.sqrt(400) / 50
        assert share > 46 / 51 - margin
        if kind == "lac":
            assert share < 46 / 51 + margin


def test_halves_calibrate_each_other():
    """Parity: what two calibrations by hand give; every row is in one half, and no row in its own calibration."""
    probs, y = world(31, 6, 2)
    inside, sizes = crossed(probs, y, 0.8, "raps", seed=5)
    half = np.random.RandomState(5).permutation(31) < 15
    for part in (half, ~half):
        made = sets(probs[part], calibrate(probs[~part], y[~part], 0.8, "raps"))
        np.testing.assert_array_equal(made[np.arange(part.sum()), y[part]], inside[part])
        np.testing.assert_array_equal(made.sum(1), sizes[part])
    with pytest.raises(UserError, match="there are 1 rows"):
        crossed(probs[:1], y[:1], 0.8)


def test_measured_coverage_of_lac_is_mapie_s():
    """MAPIE, given each half, makes the same sets; it may leave one empty where ours holds the first class."""
    probs, y = world(80, 5, 12)
    inside, sizes = crossed(probs, y, 0.9, seed=3)
    half = np.random.RandomState(3).permutation(80) < 40
    for part in (half, ~half):
        _, theirs = mapie("lac", 0.9, probs[~part], y[~part], probs[part])
        filled = theirs | ((theirs.sum(1) == 0)[:, None] & (np.arange(5) == probs[part].argmax(1)[:, None]))
        np.testing.assert_array_equal(filled.sum(1), sizes[part])
        np.testing.assert_array_equal(filled[np.arange(40), y[part]], inside[part])


# Parity with MAPIE


class Said:
    """A classifier that was fitted elsewhere: a row is its own probabilities."""

    def __init__(self, classes: int) -> None:
        self.classes_ = np.arange(classes)

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def fit(self, x, y):  # noqa: ARG002
        return self

    def predict_proba(self, x):
        return np.asarray(x)

    def predict(self, x):
        return np.asarray(x).argmax(1)


def mapie(method, coverage, probs, y, asked, **how):
    """Return MAPIE's object and its sets (N, K)."""
    classification = pytest.importorskip("mapie.classification")
    made = classification.SplitConformalClassifier(
        Said(probs.shape[1]), confidence_level=coverage, conformity_score=method, prefit=True, random_state=SEED
    )
    made.conformalize(probs, y)
    _, found = made.predict_set(asked, conformity_score_params=how)
    return made._mapie_classifier, found[:, :, 0]


SEED = 11
LEVELS = pytest.mark.parametrize("coverage", [0.5, 0.75, 0.9, 0.95])


def drawn(rows: int) -> np.ndarray:
    """MAPIE begins its stream anew for calibration and for prediction."""
    return np.random.RandomState(SEED).uniform(size=rows)


@LEVELS
def test_lac_is_mapie_s(coverage):
    """MAPIE's sets may be empty."""
    probs, y = world(500, 5, 8)
    theirs, inside = mapie("lac", coverage, probs[:200], y[:200], probs[200:])
    rule = calibrate(probs[:200], y[:200], coverage)
    assert rule.threshold == theirs.conformity_score_function_.quantiles_[0]
    np.testing.assert_array_equal(sets(probs[200:], rule, empty=True), inside)


@LEVELS
def test_randomised_aps_is_mapie_s(coverage):
    """MAPIE drops the last class where (sum - threshold) / p > u, which is sum - u p > threshold."""
    probs, y = world(500, 5, 9)
    theirs, inside = mapie("aps", coverage, probs[:200], y[:200], probs[200:], include_last_label="randomized")
    rule = calibrate(probs[:200], y[:200], coverage, "aps", u=drawn(200))
    assert rule.threshold == pytest.approx(theirs.conformity_score_function_.quantiles_[0], abs=1e-12)
    np.testing.assert_array_equal(sets(probs[200:], rule, u=drawn(300), empty=True), inside)


@LEVELS
def test_sets_of_aps_without_random_numbers_are_mapie_s(coverage):
    """MAPIE's scores are randomised in any case; from its threshold on, `include_last_label=False` is our rule."""
    probs, y = world(500, 5, 10)
    theirs, inside = mapie("aps", coverage, probs[:200], y[:200], probs[200:], include_last_label=False)
    rule = Rule("aps", coverage, 200, float(theirs.conformity_score_function_.quantiles_[0]))
    np.testing.assert_array_equal(sets(probs[200:], rule), inside)


@LEVELS
def test_raps_is_mapie_s_at_its_penalty_and_rank(coverage):
    """MAPIE chooses penalty and rank on some of the rows; with its choice, threshold and sets are ours."""
    probs, y = world(1000, 8, 12)
    theirs, inside = mapie("raps", coverage, probs[:600], y[:600], probs[600:], include_last_label=False)
    chosen = theirs.conformity_score_function_
    penalty, free = float(chosen.lambda_star), int(chosen.k_star[0])
    assert penalty > 0
    rest, _ = next(StratifiedShuffleSplit(1, test_size=chosen.size_raps, random_state=SEED).split(probs[:600], y[:600]))
    rule = calibrate(probs[rest], y[rest], coverage, "raps", penalty=penalty, free=free, u=drawn(len(rest)))
    assert rule.threshold == pytest.approx(chosen.quantiles_[0], abs=1e-12)
    np.testing.assert_array_equal(sets(probs[600:], rule._replace(randomised=False)), inside)
