"""Sets of classes that hold the right one as often as is asked: split conformal prediction.

Rows that the model has not learnt from give scores of their labels, small where the model did well; a new row's set is
every class whose score is no larger than a threshold, an order statistic of those scores:

    threshold = the k-th smallest of n scores,  k = ceil((n + 1) coverage)        coverage <= P(label in set)

for rows that are exchangeable with the n, however wrong the model is. With k > n only the whole label set keeps the
promise. Of a row with probabilities p_1 >= p_2 >= ... (equal ones in the order of classes), the class of rank r scores

| method | score | paper |
|---|---|---|
| `lac` | 1 - p_r | Sadinle, Lei and Wasserman, JASA 2019 |
| `aps` | p_1 + ... + p_r - u p_r | Romano, Sesia and Candes, NeurIPS 2020 |
| `raps` | the same + penalty max(0, r - free) | Angelopoulos, Bates, Jordan and Malik, ICLR 2021 |

u is uniform, one number per row, and comes from the caller, who has it from a key; without it u = 0, nothing is random,
and the coverage is rather too high than too low. NumPy, float64, fractions in [0, 1].

Shape letters: N samples, K classes.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from ..errors import SpecError, UserError
from .scores import checked, one_hot

METHODS = ("lac", "aps", "raps")
PENALTY, FREE = 0.01, 5
"""Of RAPS: what a rank costs, and how many cost nothing.

Those of the notebook imagenet-raps beside Angelopoulos and Bates' introduction (arXiv 2107.07511), for 1,000 classes.
The paper of RAPS, and MAPIE, choose both on rows kept for that: `free` as the rank within which the label lies as often
as the coverage asks, `penalty` as the one of 0.001, 0.01, 0.1, 0.2, 0.5 with the smallest sets.
"""
_ROUNDING = 1e-9
"""Sums of probabilities in another order differ by less; it makes sets larger, never smaller."""


class Rule(NamedTuple):
    """What a client's calibration rows decide: which scores are small enough."""

    method: str
    coverage: float
    rows: int
    """How many calibration rows there were."""
    threshold: float
    """The largest score of a class in the set; infinite where the rows are too few for the coverage."""
    penalty: float = PENALTY
    free: int = FREE
    randomised: bool = False
    """Whether scores have a random part, which a set's must then have too."""

    @property
    def enough(self) -> bool:
        """Whether there were rows enough for sets that are not whole."""
        return self.threshold < math.inf


def check(coverage: float, method: str, penalty: float | None = None, free: int | None = None) -> None:
    """Refuse a coverage, a method, a penalty or a rank that there is not, before anything is computed."""
    if not 0 < coverage < 1:  # also refuses nan
        raise SpecError(f"coverage is {coverage}, but must lie between 0 and 1, both excluded, such as 0.9")
    if method not in METHODS:
        raise SpecError(f"conformal is {method!r}, but must be {' or '.join(METHODS)}")
    for name, value in (("penalty", penalty), ("free", free)):
        if value is not None and method != "raps":
            raise SpecError(f"{name} is {value}, but only raps has one; conformal is {method}")
    if penalty is not None and not 0 <= penalty < math.inf:
        raise SpecError(f"penalty is {penalty}, but must be a number from 0")
    if free is not None and free < 0:
        raise SpecError(f"free is {free}, but must be a whole number from 0")


def place(coverage: float, rows: int) -> int:
    """Return k = ceil((n + 1) coverage); larger than n where the rows are too few."""
    # As the decimal that was written: 100 times the float 0.55 is a hair above 55, and its ceiling 56.
    return math.ceil((rows + 1) * Fraction(str(float(coverage))))


def needed(coverage: float) -> int:
    """Return the fewest calibration rows whose sets need not be whole: ceil(coverage / (1 - coverage))."""
    share = Fraction(str(float(coverage)))
    return math.ceil(share / (1 - share))


def quantile(values: np.ndarray, coverage: float) -> float:
    """Return the k-th smallest of n scores, k = ceil((n + 1) coverage), or infinity where k > n.

    A nan counts as infinite: a row that was not answered was not covered either.
    """
    k = place(coverage, len(values))
    return float(np.sort(np.where(np.isnan(values), np.inf, values))[k - 1]) if k <= len(values) else math.inf


def scores(
    probs: np.ndarray, method: str, *, penalty: float = PENALTY, free: int = FREE, u: np.ndarray | None = None
) -> np.ndarray:
    """Return (N, K) every class's score; `u` (N,) are the uniform numbers of APS and RAPS, by default 0."""
    sound = checked(probs)
    if method == "lac":
        return 1 - sound
    order = np.argsort(-sound, axis=1, kind="stable")
    total = np.take_along_axis(sound, order, 1).cumsum(1)
    if method == "raps":
        total += penalty * np.maximum(0, np.arange(1, sound.shape[1] + 1) - free)
    result = np.empty_like(total)
    np.put_along_axis(result, order, total, 1)
    return result if u is None else result - np.asarray(u)[:, None] * sound


def calibrate(
    probs: np.ndarray,
    y: np.ndarray,
    coverage: float,
    method: str = "lac",
    *,
    penalty: float = PENALTY,
    free: int = FREE,
    u: np.ndarray | None = None,
) -> Rule:
    """Return the rule for sets that hold the label of a row like these with the probability `coverage` or more.

    Args:
        probs: (N, K) the model's answers to rows that it has not learnt from.
        y: (N,) their labels.
        coverage: above 0, below 1.
        method: lac, aps or raps.
        penalty: what RAPS adds for every rank beyond `free`.
        free: how many ranks cost nothing.
        u: (N,) uniform numbers from a key of yours, for the randomised variants of APS and RAPS. LAC has none.
    """
    check(coverage, method)
    if not len(y):
        raise UserError("there are no calibration rows, but sets need at least one; hold some labelled rows out")
    every = scores(probs, method, penalty=penalty, free=free, u=u)
    of_label = np.take_along_axis(every, np.asarray(y)[:, None], 1)[:, 0]
    randomised = u is not None and method != "lac"
    return Rule(method, coverage, len(y), quantile(of_label, coverage), penalty, free, randomised)


def sets(probs: np.ndarray, rule: Rule, *, u: np.ndarray | None = None, empty: bool = False) -> np.ndarray:
    """Return (N, K) bool, which classes are in a row's set.

    The most probable class is in every set unless `empty` allows sets without any: a set of none is of no use, and one
    class more can only raise the coverage. A row with a number that is not finite gets every class. A randomised rule
    needs `u`, fresh uniform numbers, one per row.
    """
    if rule.randomised != (u is not None and rule.method != "lac"):
        raise UserError(
            f"the rule is {'' if rule.randomised else 'not '}randomised, but u is {'' if u is not None else 'not '}"
            "given; pass u to both calibrate and sets, or to neither"
        )
    every = scores(probs, rule.method, penalty=rule.penalty, free=rule.free, u=u)
    inside: np.ndarray = ~(every > rule.threshold + _ROUNDING)  # not <=: a nan is in
    return inside if empty else inside | (one_hot(probs, checked(probs).argmax(1)) > 0)


def crossed(
    probs: np.ndarray, y: np.ndarray, coverage: float, method: str = "lac", *, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Measure sets on the rows themselves: dealt into halves by the seed, each half calibrates the other's sets.

    Returns (N,) bool, whether a row's label is in its set, and (N,) how many classes are. Two rows at least.
    """
    if len(y) < 2:
        raise UserError(f"there are {len(y)} rows, but halves of them need at least 2")
    half = np.random.RandomState(seed).permutation(len(y)) < len(y) // 2
    inside, sizes = np.zeros(len(y), bool), np.zeros(len(y), np.int64)
    for part in (half, ~half):
        made = sets(probs[part], calibrate(probs[~part], y[~part], coverage, method))
        inside[part] = np.take_along_axis(made, np.asarray(y)[part][:, None], 1)[:, 0]
        sizes[part] = made.sum(1)
    return inside, sizes


def covered(inside: np.ndarray, y: np.ndarray) -> float:
    """Return the share of rows whose label is in their set."""
    return float(np.take_along_axis(inside, np.asarray(y)[:, None], 1).mean()) if len(y) else np.nan


def size(inside: np.ndarray) -> float:
    """Return the mean number of classes in a set."""
    return float(inside.sum(1).mean()) if len(inside) else np.nan
