"""How far predicted probabilities are from what comes true, and the temperature that corrects them.

    ECE = sum_b n_b / n |acc_b - conf_b|        MCE = max_b |acc_b - conf_b|

Four ways to make bins stand side by side, because the paper's is not the usual one:

| name | what is binned | bins |
|---|---|---|
| `top1` | the probability of the predicted class | 15 of equal width |
| `mass` | the same | 15 of equal counts |
| `classwise` | every class's probability by itself, one versus the rest | 15 of equal width for each class |
| `flat` | all N K class probabilities together, one versus the rest; the paper's | 10 of equal width |

Most of N K probabilities are near 0 and right, which makes `flat` and `classwise` about 2/K of `top1`; see section 8
of the facts. With few samples per bin every ECE is too large, and the fewer the larger: compare only equal
sample counts.
NumPy, float64, fractions in [0, 1].

Shape letters: N samples, K classes, M bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec

import numpy as np

from .scores import checked, correct, one_hot

P = ParamSpec("P")
BINS = 15
"""Of a reliability diagram, where nothing else is said."""


@dataclass(frozen=True, eq=False)  # equality of arrays has no truth value
class Reliability:
    """A reliability diagram's numbers; bin j covers [edges[j], edges[j + 1]), the last one also its upper edge.

    `classwise` has an axis K before the bins. Bins of equal counts begin at their smallest member; equal members may
    belong to two of them.
    """

    edges: np.ndarray
    """(M + 1,)"""
    count: np.ndarray
    """(M,) samples in each bin."""
    confidence: np.ndarray
    """(M,) mean predicted probability; 0 in an empty bin."""
    accuracy: np.ndarray
    """(M,) share that came true; 0 in an empty bin."""


def plain(bins: Reliability) -> dict[str, list[Any]]:
    """Return a diagram as lists of numbers, for a JSON file."""
    return {name: value.tolist() for name, value in vars(bins).items()}


def reliability(conf: np.ndarray, correct: np.ndarray, bins: int) -> Reliability:
    """Sort predictions into equal-width bins: bin j = [j/M, (j+1)/M), and 1 belongs to the last one."""
    conf = np.asarray(conf, np.float64)
    edges, index = equal_width(conf, bins)
    return _tally(edges, index, conf, correct, (bins,))


def equal_width(conf: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the edges (M + 1,) of equal-width bins, and each prediction's bin."""
    # j / bins rounds once, so 0.3 starts bin 3 of 10; j * 0.1 would not.
    edges = np.arange(bins + 1) / bins
    return edges, np.minimum(np.searchsorted(edges[1:], conf, side="right"), bins - 1)


def top1(probs: np.ndarray, y: np.ndarray, bins: int = BINS) -> Reliability:
    """Return the reliability of the predicted class's probability."""
    return reliability(checked(probs).max(1), correct(probs, y), bins)


def mass(probs: np.ndarray, y: np.ndarray, bins: int = BINS) -> Reliability:
    """Return the reliability of the predicted class's probability, in bins whose counts differ by at most one.

    An edge may have to go through predictions of equal confidence. Each of them then counts as right by the share of
    right ones among them, so that the figure does not depend on the order of rows. With N < M the last bins are empty.
    """
    conf, right = checked(probs).max(1), correct(probs, y)
    conf, place, count = np.unique(conf, return_inverse=True, return_counts=True)
    right = np.bincount(place, weights=right, minlength=len(conf)) / count
    conf, right = np.repeat(conf, count), np.repeat(right, count)
    size = np.full(bins, len(conf) // bins)
    size[: len(conf) % bins] += 1
    edges = np.append(conf, 1.0)[np.append(0, size.cumsum())]  # a bin's first member, or 1 where none is left
    edges[0] = 0
    return _tally(edges, np.repeat(np.arange(bins), size), conf, right, (bins,))


def classwise(probs: np.ndarray, y: np.ndarray, bins: int = BINS) -> Reliability:
    """Return the reliability of every class's probability by itself, one versus the rest: (K, M)."""
    conf = checked(probs)
    edges, index = equal_width(conf, bins)
    return _tally(edges, index + bins * np.arange(conf.shape[1]), conf, one_hot(conf, y), (conf.shape[1], bins))


def flat(probs: np.ndarray, y: np.ndarray, bins: int = 10, *, released: bool = False) -> Reliability:
    """Return the reliability of all N K class probabilities, one versus the rest.

    `released=True` leaves out probabilities of 1 and more, as the released code does: its bins end below 1, so that
    it never sees its surest predictions.
    """
    conf, target = checked(probs).ravel(), one_hot(probs, y).ravel()
    # Not `conf < 1`: a nan must stay and be seen.
    kept = ~(conf >= 1) if released else np.ones(len(conf), bool)
    return reliability(conf[kept], target[kept], bins)


def expected_error(bins: Reliability) -> float:
    """Return sum_b n_b/n |acc_b - conf_b|; of `classwise`, this is the mean over classes."""
    # Everything may have been dropped from a released diagram; nothing then errs.
    return float((bins.count * _gap(bins)).sum() / max(bins.count.sum(), 1))


def maximum_error(bins: Reliability) -> float:
    """Return max_b |acc_b - conf_b|."""
    return float(_gap(bins).max())


def _errors(name: str, diagram: Callable[P, Reliability]) -> tuple[Callable[P, float], Callable[P, float]]:
    """Return the functions ece_NAME and mce_NAME of what the diagram is made of."""

    def expected(*args: P.args, **options: P.kwargs) -> float:
        """Return the expected calibration error of the diagram of that name: sum_b n_b/n |acc_b - conf_b|."""
        return expected_error(diagram(*args, **options))

    def maximum(*args: P.args, **options: P.kwargs) -> float:
        """Return the largest calibration error of a bin of the diagram of that name: max_b |acc_b - conf_b|."""
        return maximum_error(diagram(*args, **options))

    for kind, error in (("ece", expected), ("mce", maximum)):
        error.__name__ = error.__qualname__ = f"{kind}_{name}"
    return expected, maximum


ece_top1, mce_top1 = _errors("top1", top1)
ece_mass, mce_mass = _errors("mass", mass)
ece_classwise, mce_classwise = _errors("classwise", classwise)
ece_flat, mce_flat = _errors("flat", flat)


# --- temperature -----------------------------------------------------------------------------------------------------

HOTTEST = 20.0
"""Where `temperature` stops, and at one part in 20: all-right rows ask for T = 0, all-wrong ones for infinity."""
_LOG_FLOOR = float(np.log(np.finfo(np.float32).tiny))
"""A softmax in single precision holds nothing smaller; without it a probability of 0 would stay 0 at any heat."""


def scaled(probs: np.ndarray, temperature: float) -> np.ndarray:
    """Return p_k^(1/T) / sum_j p_j^(1/T): T > 1 makes answers less sure, and the predicted class stays.

    The same as dividing logits by T, since log p and the logits differ by a constant of the row.
    """
    weight: np.ndarray = np.exp(_log(probs) / temperature)
    weight /= weight.sum(1, keepdims=True)
    return weight


def temperature(probs: np.ndarray, y: np.ndarray) -> float:
    """Return the T in [1/20, 20] with the least negative log-likelihood of held-out rows; 1 where there are none.

        with b = 1/T, z = log p:    d NLL / db = mean_n (E_p(b)[z_n] - z_n,label),   rising in b

    so that halving finds the only root. Rows that say nothing of T (uniform answers) leave it at 1. A handful of rows
    that the model answers rightly sends T to its lower end: a client needs some tens of rows for a T of its own.
    """
    if not len(y):
        return 1.0
    logs = _log(probs)
    if np.isnan(logs).any():
        return np.nan
    label = np.take_along_axis(logs, np.asarray(y)[:, None], 1).mean()
    low, high = -np.log(HOTTEST), np.log(HOTTEST)  # of log T, so that T = 1 is tried first
    for _ in range(50):  # 6 / 2^50: as fine as float64 tells log T
        middle = (low + high) / 2
        weight = np.exp(logs * np.exp(-middle))
        slope = ((weight * logs).sum(1) / weight.sum(1)).mean() - label
        if slope == 0:
            break
        low, high = (low, middle) if slope < 0 else (middle, high)
    return float(np.exp(middle))


def _log(probs: np.ndarray) -> np.ndarray:
    """Return log p, the largest of a row 0."""
    sound = checked(probs)
    with np.errstate(divide="ignore"):
        logs: np.ndarray = np.maximum(np.log(sound), _LOG_FLOOR)
    logs -= logs.max(1, keepdims=True)
    return logs


def _tally(
    edges: np.ndarray, index: np.ndarray, conf: np.ndarray, true: np.ndarray, shape: tuple[int, ...]
) -> Reliability:
    def total(values: np.ndarray | None) -> np.ndarray:
        weights = None if values is None else np.asarray(values, np.float64).ravel()
        return np.bincount(index.ravel(), weights, minlength=math.prod(shape)).reshape(shape)

    count = total(None)
    some = np.maximum(count, 1)
    return Reliability(edges, count, total(conf) / some, total(true) / some)


def _gap(bins: Reliability) -> np.ndarray:
    gap: np.ndarray = np.abs(bins.accuracy - bins.confidence)
    return gap
