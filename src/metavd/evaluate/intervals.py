"""How sure a figure is: Student's interval over seeds, the bootstrap and the signed-rank test over clients.

Clients are the units that were sampled. Rows of one client share its model and its data, so that an interval over
rows would be far too narrow; resampling whole clients keeps what they share.

Shape letters: C clients, F figures, R resamplings.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_CELLS = 1_000_000
"""Size of the largest array that `resampled` makes: its memory does not grow with the number of clients."""


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float | None]:
    """Return mean and half width of Student's confidence interval over independent repetitions (seeds).

        t_{n-1, (1+level)/2} s / sqrt(n),   s^2 = sum (v - mean)^2 / (n - 1)

    One value has no width: None.
    """
    _check(level)
    if len(values) == 0:
        raise ValueError("An interval needs at least one value, but there is none.")
    array = np.asarray(values, np.float64)
    count = len(array)
    if count == 1:
        return float(array[0]), None
    from scipy.special import stdtrit  # noqa: PLC0415 (no round needs it, and a run begins sooner)

    half = stdtrit(count - 1, (1 + level) / 2) * array.std(ddof=1) / np.sqrt(count)
    return float(array.mean()), float(half)


def resampled(values: np.ndarray, weights: np.ndarray, *, resamples: int = 1000, seed: int = 0) -> np.ndarray:
    """Return R bootstrap replicates of weighted means: (C, F) values and weights -> (R, F).

        mean_rf = sum_c n_rc w_cf v_cf / sum_c n_rc w_cf,   n_r: how often each client was drawn, C with replacement

    All figures of a resampling share its clients. nan where those who were drawn have no weight together. The numbers
    come from a generator of this function alone, by seed.
    """
    values, weights = (np.asarray(array, np.float64) for array in (values, weights))
    count = len(values)
    terms = np.concatenate([values * weights, weights], 1)
    source = np.random.RandomState(seed)
    step = max(1, _CELLS // max(count, 1))
    parts = []
    for first in range(0, resamples, step):
        rows = min(step, resamples - first)
        who = source.randint(0, count, (rows, count)) + count * np.arange(rows)[:, None]
        often = np.bincount(who.ravel(), minlength=rows * count).reshape(rows, count)
        parts.append(often.astype(np.float64) @ terms)
    top, bottom = np.split(np.concatenate(parts), 2, axis=1)
    means: np.ndarray = np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom > 0)
    return means


def bounds(replicates: np.ndarray, level: float = 0.95) -> list[float] | None:
    """Return [low, high], the middle `level` of one figure's replicates (R,); None where it is never defined."""
    _check(level)
    known = replicates[~np.isnan(replicates)]
    return np.quantile(known, [(1 - level) / 2, (1 + level) / 2]).tolist() if len(known) else None


def bootstrap(
    values: Sequence[float] | np.ndarray,
    weights: Sequence[float] | np.ndarray | None = None,
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> list[float] | None:
    """Return [low, high], the percentile bootstrap interval of a weighted mean over clients.

    One client alone tells nothing about others: None.
    """
    _check(level)
    if len(values) < 2:
        return None
    column = np.asarray(values, np.float64)[:, None]
    weight = np.ones_like(column) if weights is None else np.asarray(weights, np.float64)[:, None]
    return bounds(resampled(column, weight, resamples=resamples, seed=seed)[:, 0], level)


def signed_rank(differences: np.ndarray) -> float:
    """Return the two-sided p-value of Wilcoxon's signed-rank test that differences lie around 0.

    Those of 0 say nothing; where all are, p is 1.
    """
    from scipy.stats import wilcoxon  # noqa: PLC0415 (half a second, which no run needs before its first round)

    told = differences[differences != 0]
    return float(wilcoxon(told).pvalue) if len(told) else 1.0


def _check(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level is {level}, but it must lie between 0 and 1.")
