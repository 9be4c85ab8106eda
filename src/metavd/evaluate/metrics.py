"""How good, and how honest, predicted probabilities are. NumPy, float64, fractions in [0, 1].

Two calibration errors stand side by side, because the paper's is not the usual one: `ece_top1` looks at the
probability of the predicted class only (15 bins), `ece_flat` at all N K class probabilities one versus the rest (10
bins), which makes it about 2/K of the former; see section 8 of the facts.

A row with a number that is not finite is no prediction: it counts as wrong, and every other figure becomes nan,
so that a diverged model cannot look calibrated.

Shape letters: N samples, K classes, M bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

SMALLEST = 1e-12
"""A label's probability counts as at least this in `nll`: one impossible label costs 27.6, not infinity."""


@dataclass(frozen=True, eq=False)  # equality of arrays has no truth value
class Reliability:
    """A reliability diagram's numbers; bin j covers [edges[j], edges[j + 1]), the last one also its upper edge."""

    edges: np.ndarray
    """(M + 1,)"""
    count: np.ndarray
    """(M,) samples in each bin."""
    confidence: np.ndarray
    """(M,) mean predicted probability; 0 in an empty bin."""
    accuracy: np.ndarray
    """(M,) share that came true; 0 in an empty bin."""


@dataclass(frozen=True, eq=False)
class ClientResult:
    """What one client's personalised model answered on the client's test rows."""

    client: int
    train_size: int
    probs: np.ndarray
    """(N, K)"""
    y: np.ndarray
    """(N,)"""


def accuracy(probs: np.ndarray, y: np.ndarray) -> float:
    """Return the share of rows whose largest probability is the label's."""
    return float(_correct(probs, y).mean())


def nll(probs: np.ndarray, y: np.ndarray) -> float:
    """Return the mean of -log max(p_label, 1e-12)."""
    of_label = np.take_along_axis(_checked(probs), np.asarray(y)[:, None], 1)
    return float(-np.log(np.clip(of_label, SMALLEST, None)).mean())


def brier(probs: np.ndarray, y: np.ndarray) -> float:
    """Return the mean of sum_k (p_k - [k = label])^2: 0 for a perfect model, 2 for one that is surely wrong."""
    return float(((_checked(probs) - _one_hot(probs, y)) ** 2).sum(1).mean())


def reliability(conf: np.ndarray, correct: np.ndarray, bins: int) -> Reliability:
    """Sort predictions into equal-width bins: bin j = [j/M, (j+1)/M), and 1 belongs to the last one."""
    conf = np.asarray(conf, np.float64)
    # j / bins rounds once, so 0.3 starts bin 3 of 10; j * 0.1 would not.
    edges = np.arange(bins + 1) / bins
    index = np.minimum(np.searchsorted(edges[1:], conf, side="right"), bins - 1)
    count = np.bincount(index, minlength=bins)
    safe = np.maximum(count, 1)
    return Reliability(
        edges=edges,
        count=count,
        confidence=np.bincount(index, weights=conf, minlength=bins) / safe,
        accuracy=np.bincount(index, weights=np.asarray(correct, np.float64), minlength=bins) / safe,
    )


def top1(probs: np.ndarray, y: np.ndarray, bins: int = 15) -> Reliability:
    """Return the reliability of the predicted class's probability."""
    return reliability(_checked(probs).max(1), _correct(probs, y), bins)


def flat(probs: np.ndarray, y: np.ndarray, bins: int = 10, *, released: bool = False) -> Reliability:
    """Return the reliability of all N K class probabilities, one versus the rest.

    `released=True` leaves out probabilities of 1 and more, as the released code does: its bins end below 1, so that
    it never sees its surest predictions.
    """
    conf, target = _checked(probs).ravel(), _one_hot(probs, y).ravel()
    # Not `conf < 1`: a nan must stay and be seen.
    kept = ~(conf >= 1) if released else np.ones(len(conf), bool)
    return reliability(conf[kept], target[kept], bins)


def ece_top1(probs: np.ndarray, y: np.ndarray, bins: int = 15) -> float:
    """Return the expected calibration error of the predicted class: sum_b n_b/N |acc_b - conf_b|."""
    return _expected(top1(probs, y, bins))


def mce_top1(probs: np.ndarray, y: np.ndarray, bins: int = 15) -> float:
    """Return the largest calibration error of a bin of the predicted class: max_b |acc_b - conf_b|."""
    return _maximum(top1(probs, y, bins))


def ece_flat(probs: np.ndarray, y: np.ndarray, bins: int = 10, *, released: bool = False) -> float:
    """Return the paper's expected calibration error, over all N K class probabilities."""
    return _expected(flat(probs, y, bins, released=released))


def mce_flat(probs: np.ndarray, y: np.ndarray, bins: int = 10, *, released: bool = False) -> float:
    """Return the paper's maximum calibration error, over all N K class probabilities."""
    return _maximum(flat(probs, y, bins, released=released))


_RELEASED_BATCH = 100


def batch_accuracy(probs: np.ndarray, y: np.ndarray) -> float:
    """Return the mean over batches of 100 rows of their accuracies, a short last batch counting as a whole one.

    That is how the released code tests a client; it differs from `accuracy` for clients with more than 100 rows.
    """
    starts = range(0, len(y), _RELEASED_BATCH)
    return float(np.mean([accuracy(probs[s : s + _RELEASED_BATCH], y[s : s + _RELEASED_BATCH]) for s in starts]))


def summarize(results: Sequence[ClientResult], *, released: bool = False) -> dict[str, Any]:
    """Return the figures of a group of clients.

        accuracy = sum_i n_i acc_i / sum_i n_i,   n_i the *training* size (the paper's headline number)

    `accuracy_pooled` weights every test row alike, `accuracy_uniform` every client; `worst_client` is the lowest client
    accuracy. All other figures are pooled over test rows. Clients without test rows have no say. Where nobody has
    test rows, the figures are None and the counts 0; `accuracy` is also None where nobody has training rows.
    released=True takes a client's accuracy by `batch_accuracy` and leaves p = 1 out of the flat calibration error.
    """
    tested = [result for result in results if len(result.y)]
    figures = ("nll", "brier", "ece_top1", "ece_flat", "mce_top1", "mce_flat")
    if not tested:
        names = ("accuracy", "accuracy_pooled", "accuracy_uniform", "worst_client", *figures)
        return {**dict.fromkeys(names), "clients": 0, "samples": 0}
    accuracy_of = batch_accuracy if released else accuracy
    each = np.array([accuracy_of(result.probs, result.y) for result in tested])
    weight = np.array([result.train_size for result in tested], np.float64)
    probs = np.concatenate([np.asarray(result.probs, np.float64) for result in tested])
    y = np.concatenate([result.y for result in tested])
    by_class, by_prediction = flat(probs, y, released=released), top1(probs, y)
    return {
        "accuracy": float((weight * each).sum() / weight.sum()) if weight.any() else None,
        "accuracy_pooled": accuracy(probs, y),
        "accuracy_uniform": float(each.mean()),
        "worst_client": float(each.min()),
        "nll": nll(probs, y),
        "brier": brier(probs, y),
        "ece_top1": _expected(by_prediction),
        "ece_flat": _expected(by_class),
        "mce_top1": _maximum(by_prediction),
        "mce_flat": _maximum(by_class),
        "clients": len(tested),
        "samples": len(y),
    }


def of_classes(results: Sequence[ClientResult], first: int, count: int) -> list[ClientResult]:
    """Keep each client's rows whose label is one of `count` classes from `first` on: one domain of several."""
    kept = []
    for result in results:
        rows = (result.y >= first) & (result.y < first + count)
        kept.append(ClientResult(result.client, result.train_size, result.probs[rows], result.y[rows]))
    return kept


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float | None]:
    """Return mean and half width of Student's confidence interval over independent repetitions (seeds).

        t_{n-1, (1+level)/2} s / sqrt(n),   s^2 = sum (v - mean)^2 / (n - 1)

    One value has no width: None.
    """
    if not 0 < level < 1:
        raise ValueError(f"level is {level}, but it must lie between 0 and 1.")
    if len(values) == 0:
        raise ValueError("An interval needs at least one value, but there is none.")
    array = np.asarray(values, np.float64)
    count = len(array)
    if count == 1:
        return float(array[0]), None
    half = stdtrit(count - 1, (1 + level) / 2) * array.std(ddof=1) / np.sqrt(count)
    return float(array.mean()), float(half)


def _checked(probs: np.ndarray) -> np.ndarray:
    """Return float64 probabilities in which a row with any number that is not finite is nan altogether."""
    result = np.array(probs, np.float64)
    result[~np.isfinite(result).all(axis=1)] = np.nan
    return result


def _correct(probs: np.ndarray, y: np.ndarray) -> np.ndarray:
    checked = _checked(probs)
    right: np.ndarray = (checked.argmax(1) == y) & ~np.isnan(checked[:, 0])
    return right


def _one_hot(probs: np.ndarray, y: np.ndarray) -> np.ndarray:
    same: np.ndarray = np.arange(np.shape(probs)[1]) == np.asarray(y)[:, None]
    return same.astype(np.float64)


def _gap(bins: Reliability) -> np.ndarray:
    gap: np.ndarray = np.abs(bins.accuracy - bins.confidence)
    return gap


def _expected(bins: Reliability) -> float:
    # Everything may have been dropped from a released diagram; nothing then errs.
    return float((bins.count * _gap(bins)).sum() / max(bins.count.sum(), 1))


def _maximum(bins: Reliability) -> float:
    return float(_gap(bins).max())
