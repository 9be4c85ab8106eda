"""Scores of single predictions, and their means. NumPy, float64.

A row with a number that is not finite is no prediction: it counts as wrong, and every other figure becomes nan, so
that a diverged model cannot look calibrated. The mean over no rows is nan.

Shape letters: N samples, K classes.
"""

from __future__ import annotations

import numpy as np

SMALLEST = 1e-12
"""A label's probability counts as at least this in `nll`: one impossible label costs 27.6, not infinity."""


def accuracy(probs: np.ndarray, y: np.ndarray) -> float:
    """Return the share of rows whose largest probability is the label's; of equal ones the first counts."""
    return _mean(correct(probs, y))


def nll(probs: np.ndarray, y: np.ndarray) -> float:
    """Return the mean of -log max(p_label, 1e-12)."""
    return _mean(surprise(probs, y))


def brier(probs: np.ndarray, y: np.ndarray) -> float:
    """Return the mean of sum_k (p_k - [k = label])^2: 0 for a perfect model, 2 for one that is surely wrong."""
    return _mean(squared_error(probs, y))


_RELEASED_BATCH = 100


def batch_accuracy(probs: np.ndarray, y: np.ndarray) -> float:
    """Return the accuracy as the released code tests a client, see `batch_mean`."""
    return batch_mean(correct(probs, y))


def batch_mean(values: np.ndarray) -> float:
    """Return the mean over batches of 100 rows of their means, a short last batch counting as a whole one.

    It differs from the mean over rows for clients with more than 100 of them.
    """
    starts = range(0, len(values), _RELEASED_BATCH)
    return float(np.mean([values[start : start + _RELEASED_BATCH].mean() for start in starts]))


def correct(probs: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return (N,) bool: the largest probability is the label's."""
    sound = checked(probs)
    right: np.ndarray = (sound.argmax(1) == y) & ~np.isnan(sound[:, 0])
    return right


def surprise(probs: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return (N,) -log max(p_label, 1e-12)."""
    of_label = np.take_along_axis(checked(probs), np.asarray(y)[:, None], 1)[:, 0]
    cost: np.ndarray = -np.log(np.maximum(of_label, SMALLEST))
    return cost


def squared_error(probs: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return (N,) sum_k (p_k - [k = label])^2."""
    total: np.ndarray = ((checked(probs) - one_hot(probs, y)) ** 2).sum(1)
    return total


def checked(probs: np.ndarray) -> np.ndarray:
    """Return float64 probabilities in which a row with any number that is not finite is nan altogether."""
    result = np.asarray(probs, np.float64)
    sound = np.isfinite(result).all(axis=1, keepdims=True)
    return result if sound.all() else np.where(sound, result, np.nan)


def one_hot(probs: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return (N, K) 1 for the label, 0 for the rest."""
    same: np.ndarray = np.arange(np.shape(probs)[1]) == np.asarray(y)[:, None]
    return same.astype(np.float64)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else np.nan
