"""Calibration: reference implementations, closed forms, a predictor that is calibrated by construction, temperature."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize
from sklearn.calibration import calibration_curve
from sklearn.metrics import log_loss
from torchmetrics.functional.classification import binary_calibration_error, multiclass_calibration_error

from metavd.evaluate.calibration import (
    HOTTEST,
    classwise,
    ece_classwise,
    ece_flat,
    ece_mass,
    ece_top1,
    flat,
    mass,
    mce_classwise,
    mce_flat,
    mce_mass,
    mce_top1,
    plain,
    reliability,
    scaled,
    temperature,
    top1,
)
from metavd.evaluate.scores import nll

# --- references ------------------------------------------------------------------------------------------------------


def below_one(probs, dtype):
    """Return probabilities with 1 a hair lower: torchmetrics gives p = 1 a bin of its own, beyond the last."""
    return torch.from_numpy(np.minimum(np.asarray(probs, dtype), np.nextafter(dtype(1), dtype(0))))


def binary(conf, target, bins, norm):
    target = torch.from_numpy(np.asarray(target, np.int64))
    return binary_calibration_error(below_one(conf, np.float64), target, bins, norm).item()


@pytest.mark.parametrize("bins", [1, 8, 10, 15])
def test_top1_is_torchmetrics(case, bins):
    """Parity: MulticlassCalibrationError, l1 and max, in its single precision, and its binary twin in double."""
    probs, y = case
    given = below_one(probs, np.float32), torch.from_numpy(y), probs.shape[1], bins
    exact = np.asarray(probs, np.float64).max(1), probs.argmax(1) == y, bins
    for figure, norm in ((ece_top1, "l1"), (mce_top1, "max")):
        assert figure(probs, y, bins) == pytest.approx(multiclass_calibration_error(*given, norm).item(), abs=2e-6)
        assert figure(probs, y, bins) == pytest.approx(binary(*exact, norm), abs=1e-12)


@pytest.mark.parametrize("bins", [1, 8, 10])
def test_flat_is_torchmetrics_on_flattened_probabilities(case, bins):
    """Parity: BinaryCalibrationError of all N K one-versus-rest questions."""
    probs, y = case
    asked = probs.ravel(), np.eye(probs.shape[1])[y].ravel(), bins
    assert ece_flat(probs, y, bins) == pytest.approx(binary(*asked, "l1"), abs=1e-12)
    assert mce_flat(probs, y, bins) == pytest.approx(binary(*asked, "max"), abs=1e-12)


def test_classwise_is_torchmetrics_class_by_class(case):
    """Parity: the mean, and the largest, of BinaryCalibrationError over classes."""
    probs, y = case
    each = [[binary(probs[:, k], y == k, 15, norm) for k in range(probs.shape[1])] for norm in ("l1", "max")]
    assert ece_classwise(probs, y) == pytest.approx(np.mean(each[0]), abs=1e-12)
    assert mce_classwise(probs, y) == pytest.approx(np.max(each[1]), abs=1e-12)
    assert classwise(probs, y).count.sum(1).tolist() == [len(y)] * probs.shape[1]


@pytest.mark.parametrize(("samples", "bins"), [(150, 15), (45, 15), (60, 5), (30, 30)])
def test_equal_mass_is_sklearn(samples, bins):
    """Parity: calibration_curve(strategy="quantile"), where no confidences are equal and bins divide the samples."""
    rng = np.random.RandomState(samples)
    probs, y = rng.dirichlet(np.ones(3), samples), rng.randint(0, 3, samples)
    true, pred = calibration_curve(probs.argmax(1) == y, probs.max(1), n_bins=bins, strategy="quantile")
    found = mass(probs, y, bins)
    np.testing.assert_allclose(found.accuracy, true, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.confidence, pred, rtol=0, atol=1e-12)
    assert ece_mass(probs, y, bins) == pytest.approx(np.abs(true - pred).mean(), abs=1e-12)
    assert mce_mass(probs, y, bins) == pytest.approx(np.abs(true - pred).max(), abs=1e-12)


# --- bins ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bins", [1, 7, 15, 700])
def test_equal_mass_bins_hold_equal_counts(case, bins):
    """Law: counts differ by at most one, also among ties; edges rise from 0 to 1; nothing is lost."""
    probs, y = case
    found = mass(probs, y, bins)
    assert found.count.max() - found.count.min() <= 1
    assert found.count.sum() == len(y)
    assert (found.edges[0], found.edges[-1], len(found.edges)) == (0, 1, bins + 1)
    assert (np.diff(found.edges) >= 0).all()
    assert (found.count * found.accuracy).sum() == pytest.approx((np.asarray(probs).argmax(1) == y).sum())


def test_equal_mass_does_not_depend_on_the_order_of_ties():
    """Law: rows of equal confidence may be right first or wrong first; one bin's edge goes through them."""
    probs = np.array([[0.6, 0.4]] * 4 + [[0.9, 0.1]] * 2)
    for y in ([0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0], [0, 1, 0, 1, 0, 0]):
        found = mass(probs, np.array(y), 2)
        assert found.accuracy.tolist() == pytest.approx([1 / 2, (1 / 2 + 2) / 3])
        assert ece_mass(probs, np.array(y), 2) == pytest.approx(0.5 * 0.1 + 0.5 * abs(2.5 - 2.4) / 3)


def test_equal_mass_of_fewer_rows_than_bins():
    """Every row has a bin of its own, the rest are empty and err by nothing."""
    probs, y = np.array([[0.9, 0.1], [0.3, 0.7]]), np.array([0, 0])
    found = mass(probs, y, 4)
    assert found.count.tolist() == [1, 1, 0, 0]
    assert found.edges.tolist() == [0, 0.9, 1, 1, 1]
    assert ece_mass(probs, y, 4) == pytest.approx((0.7 + 0.1) / 2)


def test_classwise_by_hand():
    """Closed form: two classes, complementary probabilities: both classes have the same gaps."""
    probs, y = np.array([[0.9, 0.1], [0.9, 0.1], [0.2, 0.8]]), np.array([0, 1, 1])
    found = classwise(probs, y, 2)
    assert found.count.tolist() == [[1, 2], [2, 1]]
    assert found.accuracy.tolist() == [[0, 0.5], [0.5, 1]]
    assert ece_classwise(probs, y, 2) == pytest.approx((1 * 0.2 + 2 * 0.4) / 3)
    assert mce_classwise(probs, y, 2) == pytest.approx(0.4)


@pytest.mark.parametrize("kind", [top1, mass, classwise, flat])
def test_no_rows_have_empty_diagrams(kind):
    """Without rows every bin is empty and nothing errs."""
    found = kind(np.zeros((0, 3)), np.zeros(0, int))
    assert not found.count.any()
    assert not found.confidence.any()
    assert np.isfinite(found.edges).all()


def test_a_diagram_as_plain_data():
    """A JSON file can hold it: lists of Python numbers under the diagram's names."""
    told = plain(top1(np.array([[0.9, 0.1]]), np.array([0]), 2))
    assert told == {"edges": [0, 0.5, 1], "count": [0, 1], "confidence": [0, 0.9], "accuracy": [0, 1]}
    assert {type(value) for values in told.values() for value in values} <= {int, float}


@pytest.mark.parametrize("classes", [2, 10])
def test_calibrated_predictor_has_no_calibration_error(classes):
    """Labels drawn from the predicted probabilities: all errors vanish like 1/sqrt(N); labels from elsewhere: not."""
    rng = np.random.RandomState(0)
    probs = rng.dirichlet(np.full(classes, 0.3), 200_000)  # every bin is well filled
    y = (rng.rand(200_000)[:, None] > probs.cumsum(1)).sum(1).clip(max=classes - 1)
    for figure in (ece_top1, ece_mass, ece_classwise, ece_flat):
        assert figure(probs, y) < 0.006
    assert mce_mass(probs, y) < 0.02
    assert mce_flat(probs, y) < 0.05
    sure = probs**3 / (probs**3).sum(1, keepdims=True)
    assert min(ece_top1(sure, y), ece_mass(sure, y)) > 0.05
    assert min(ece_flat(sure, y), ece_classwise(sure, y)) > 0.02


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
    probs[: samples // 2] = probs[0]  # ties
    kinds = (ece_top1, mce_top1), (ece_mass, mce_mass), (ece_classwise, mce_classwise), (ece_flat, mce_flat)
    for expected, maximum in kinds:
        assert 0 <= expected(probs, y, bins) <= maximum(probs, y, bins) + 1e-12 <= 1 + 2e-12
        assert expected(probs[mixed], y[mixed], bins) == pytest.approx(expected(probs, y, bins), abs=1e-12)
    assert top1(probs, y, bins).count.sum() == samples
    assert flat(probs, y, bins).count.sum() == samples * classes


# --- temperature -----------------------------------------------------------------------------------------------------


def test_temperature_one_is_the_identity(case):
    """Law: T = 1 changes no probability."""
    probs, _ = case
    np.testing.assert_allclose(scaled(probs, 1.0), np.asarray(probs, np.float64), rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize("T", [0.05, 0.5, 3.0, 20.0])
def test_scaling_is_division_of_logits(T):
    """Closed form: softmax(z / T), up to sums of 1 and with the same predicted class."""
    logits = 5 * np.random.RandomState(0).randn(50, 6)
    probs = torch.from_numpy(logits).softmax(-1).numpy()
    found = scaled(probs, T)
    np.testing.assert_allclose(found, torch.from_numpy(logits / T).softmax(-1), rtol=1e-9, atol=1e-15)
    assert np.array_equal(found.argmax(1), probs.argmax(1))


def test_scaling_keeps_probabilities(case):
    """Law: rows sum to 1 at any temperature, also where a probability is 0 or 1; heat makes answers less sure."""
    probs, _ = case
    for T in (0.05, 0.9, 20.0):
        found = scaled(probs, T)
        assert ((found >= 0) & (found <= 1)).all()
        np.testing.assert_allclose(found.sum(1), 1, rtol=1e-12)
    assert (scaled(probs, 2.0).max(1) <= np.asarray(probs, np.float64).max(1) + 1e-6).all()


@pytest.mark.parametrize("factor", [0.4, 1.0, 2.5])
def test_temperature_finds_what_was_done_to_a_calibrated_model(factor):
    """Law: labels from softmax(z), answers softmax(factor z): T = factor, and scaling mends the calibration."""
    rng = np.random.RandomState(0)
    logits = torch.from_numpy(2 * rng.randn(50_000, 5))
    true = logits.softmax(-1).numpy()
    y = (rng.rand(50_000)[:, None] > true.cumsum(1)).sum(1).clip(max=4)
    probs = (factor * logits).softmax(-1).numpy()
    T = temperature(probs, y)
    assert pytest.approx(factor, rel=0.03) == T
    assert ece_top1(scaled(probs, T), y) < 0.01
    assert nll(scaled(probs, T), y) <= nll(probs, y) + 1e-12


@pytest.mark.parametrize("seed", range(5))
def test_temperature_is_the_minimum_that_scipy_finds(seed):
    """Parity: scipy's bounded minimisation of scikit-learn's log loss over log T."""
    rng = np.random.RandomState(seed)
    probs, y = rng.dirichlet(np.full(4, 0.5), 40), rng.randint(0, 4, 40)
    probs[range(20), y[:20]] += 1  # right often enough for a minimum inside the bounds
    probs /= probs.sum(1, keepdims=True)

    def loss(log_t):
        return log_loss(y, torch.from_numpy(np.log(probs) / math.exp(log_t)).softmax(-1).numpy(), labels=range(4))

    best = optimize.minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-9})
    assert temperature(probs, y) == pytest.approx(math.exp(best.x), rel=1e-5)


def test_temperature_of_extremes():
    """All right asks for cold, all wrong for heat, both bounded; silence and indifference leave 1."""
    rng = np.random.RandomState(0)
    probs = rng.dirichlet(np.ones(3), 20)
    right = probs.argmax(1)
    assert temperature(probs, right) == pytest.approx(1 / HOTTEST)
    assert temperature(probs, probs.argmin(1)) == pytest.approx(HOTTEST)
    assert temperature(np.zeros((0, 3)), np.zeros(0, int)) == 1.0
    assert temperature(np.full((5, 4), 0.25), np.arange(5) % 4) == 1.0
    assert temperature(np.eye(3)[[0, 1]], np.array([1, 0])) == pytest.approx(HOTTEST)
    assert temperature(np.ones((3, 1)), np.zeros(3, int)) == 1.0
    assert math.isnan(temperature(np.array([[np.nan, 1.0]]), np.array([0])))


def test_temperature_never_makes_held_out_rows_less_likely(case):
    """Law: T = 1 is among the choices, so the likelihood of the rows it was fitted on cannot fall."""
    probs, y = case
    T = temperature(probs, y)
    assert 1 / HOTTEST <= T <= HOTTEST
    assert nll(scaled(probs, T), y) <= nll(scaled(probs, 1.0), y) + 1e-9
