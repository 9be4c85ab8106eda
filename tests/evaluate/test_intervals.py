"""Student's interval over seeds and the bootstrap over clients: references, coverage, edges."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from metavd.evaluate import intervals
from metavd.evaluate.intervals import bootstrap, bounds, interval, resampled


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


# --- bootstrap -------------------------------------------------------------------------------------------------------


def test_bootstrap_covers():
    """95 % intervals of the mean of 60 skewed clients cover it in about 95 % of cases (percentiles: a little less)."""
    clients = np.random.RandomState(0).beta(5, 2, (400, 60))
    found = [bootstrap(row, seed=i, resamples=400) for i, row in enumerate(clients)]
    assert np.mean([low <= 5 / 7 <= high for low, high in found]) == pytest.approx(0.94, abs=0.03)


def test_bootstrap_is_scipys():
    """Parity: scipy.stats.bootstrap with percentiles, to the error of drawing."""
    values = np.random.RandomState(1).rand(40)
    wanted = stats.bootstrap((values,), np.mean, n_resamples=20_000, method="percentile").confidence_interval
    assert bootstrap(values, resamples=20_000) == pytest.approx([wanted.low, wanted.high], abs=4e-3)


def test_replicates_are_weighted_means_of_drawn_clients():
    """Closed form: the same draws, one by one; all figures of a resampling share its clients."""
    source = np.random.RandomState(2)
    values, weights = source.rand(7, 2), source.randint(0, 9, (7, 2)).astype(float)
    found = resampled(values, weights, resamples=30, seed=5)
    who = np.random.RandomState(5).randint(0, 7, (30, 7))
    wanted = [[np.average(values[row, f], weights=weights[row, f]) for f in range(2)] for row in who]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_bootstrap_is_a_function_of_the_seed(monkeypatch):
    """The same twice, also in small portions; another seed is another draw; NumPy's own generator is left alone."""
    values = np.random.RandomState(0).rand(30)
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    found = bootstrap(values)
    assert found == bootstrap(values)
    assert found != bootstrap(values, seed=1)
    monkeypatch.setattr(intervals, "_CELLS", 100)
    assert bootstrap(values) == pytest.approx(found, rel=1e-12)
    assert np.array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def test_bootstrap_narrows_with_the_root_of_the_clients():
    """Law: sixteen times the clients, a quarter of the width."""
    source = np.random.RandomState(0)
    widths = [np.ptp(bootstrap(source.rand(count))) for count in (100, 1600)]
    assert widths[0] / widths[1] == pytest.approx(4, rel=0.25)


def test_weights_of_clients():
    """Law: a weight of 0 takes a client out of the mean, equal weights are no weights."""
    values = np.array([0.2, 0.4, 0.9, 0.5])
    assert bootstrap(values, np.full(4, 7.0)) == pytest.approx(bootstrap(values))
    assert bootstrap(values, np.array([1.0, 1.0, 0.0, 0.0])) == pytest.approx([0.2, 0.4])


def test_bootstrap_edges():
    """One client, or no weight, has no interval; equal clients have no width; a level outside (0, 1) is an error."""
    assert bootstrap([0.5]) is None
    assert bootstrap([]) is None
    assert bootstrap([0.5, 0.7], [0, 0]) is None
    assert bootstrap([0.5, 0.5]) == [0.5, 0.5]
    assert bounds(np.array([np.nan, 1.0, 2.0]), 0.5) == [1.25, 1.75]
    with pytest.raises(ValueError, match=r"level is 0"):
        bootstrap([1, 2], level=0)
