"""Entropy and AUROC: reference implementations, bounds, ties."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score, roc_curve

from metavd.evaluate.uncertainty import auroc, entropy, fpr95


def test_entropy_is_scipys(case):
    """Parity: scipy.stats.entropy in nats, 0 log 0 = 0; between 0 and log K."""
    probs = np.asarray(case[0], np.float64)
    found = entropy(case[0])
    np.testing.assert_allclose(found, stats.entropy(probs, axis=1), rtol=1e-6, atol=1e-12)
    assert ((found >= 0) & (found <= math.log(probs.shape[1]) + 1e-6)).all()
    assert found.dtype == np.float64


def test_entropy_of_nothing_and_of_a_diverged_row():
    """No rows have no entropies; a row that is not finite has none either, and is seen."""
    assert entropy(np.zeros((0, 3))).shape == (0,)
    assert np.isnan(entropy(np.array([[0.5, np.inf], [0.5, 0.5]]))).tolist() == [True, False]


@given(st.integers(0, 10_000), st.integers(2, 60), st.sampled_from([1, 2, 5, 10**9]))
def test_auroc_is_sklearns(seed, samples, levels):
    """Parity: roc_auc_score, without ties (many levels), with some, and with nothing but ties (one level)."""
    rng = np.random.RandomState(seed)
    score, positive = rng.randint(0, levels, samples) / 7, rng.rand(samples) < 0.4
    positive[:2] = True, False
    assert auroc(score, positive) == pytest.approx(roc_auc_score(positive, score), abs=1e-12)
    assert auroc(-score, positive) == pytest.approx(1 - roc_auc_score(positive, score), abs=1e-12)


def test_auroc_by_hand():
    """Perfect separation is 1, reversed 0, ties a half; of 4 pairs, 2 won and 1 tied make 2.5 / 4."""
    kinds = np.array([False, False, True, True])
    assert auroc(np.array([1, 2, 3, 4]), kinds) == 1.0
    assert auroc(np.array([4, 3, 2, 1]), kinds) == 0.0
    assert auroc(np.ones(4), kinds) == 0.5
    assert auroc(np.array([1, 3, 3, 2]), kinds) == 2.5 / 4


def test_auroc_edges():
    """One kind alone, or nothing, has no area; a score that is no number is seen; infinities are scores."""
    assert auroc(np.arange(3), np.ones(3, bool)) is None
    assert auroc(np.arange(3), np.zeros(3, bool)) is None
    assert auroc(np.zeros(0), np.zeros(0, bool)) is None
    told = auroc(np.array([0.0, np.nan]), np.array([True, False]))
    assert told is not None
    assert math.isnan(told)
    assert auroc(np.array([0.0, np.inf]), np.array([False, True])) == 1.0


def test_auroc_depends_on_order_alone():
    """Law: a rising function of the score changes nothing."""
    rng = np.random.RandomState(0)
    score, positive = rng.rand(50), rng.rand(50) < 0.5
    assert auroc(np.exp(5 * score), positive) == auroc(score, positive)


@given(st.integers(0, 10_000), st.integers(2, 200), st.sampled_from([1, 2, 5, 10**9]))
def test_fpr95_is_where_sklearns_curve_reaches_95_percent(seed, samples, levels):
    """Parity: the first point of roc_curve, "known" being positive and certainty its score, with a rate of 0.95."""
    rng = np.random.RandomState(seed)
    score, unknown = rng.randint(0, levels, samples) / 7, rng.rand(samples) < 0.4
    unknown[:2] = True, False
    false, true, _ = roc_curve(~unknown, -score, drop_intermediate=False)
    # A count of known rows times 0.95 may be whole: compared as counts, so that rounding decides nothing.
    known = (~unknown).sum()
    reached = np.round(true * known).astype(int) * 100 >= 95 * known
    assert fpr95(score, unknown) == pytest.approx(false[reached.argmax()], abs=1e-12)


def test_fpr95_by_hand():
    """Of 20 known scores 1 to 20, 19 pass up to 19; of the unknown ones 19 passes, 19.5 and 30 do not."""
    score, unknown = np.append(np.arange(1, 21), [19, 19.5, 30]), np.arange(23) >= 20
    assert fpr95(score, unknown) == pytest.approx(1 / 3)
    assert fpr95(score, np.zeros(23, bool)) is None
    assert fpr95(score, np.ones(23, bool)) is None
    assert math.isnan(fpr95(np.where(unknown, np.nan, score), unknown))
