"""Do two methods differ on the same clients? A paired test, from what stores keep of every client.

Runs with one seed have the same clients with the same rows, so that the difference of two methods is taken client by
client, weighted as the headline accuracy is:

    d = mean over seeds of sum_i n_i (a_i - b_i) / sum_i n_i,      n_i client i's training rows

The interval is a bootstrap over the clients of every seed, the p-value Wilcoxon's signed-rank test over all clients.
Both say how sure it is that these trained models differ. Whether the methods do, another training may tell: how many
seeds have d's sign stands beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..evaluate.intervals import bounds, resampled, signed_rank
from .lines import Line


class Pair(NamedTuple):
    """How much better the first method is than the second, in accuracy."""

    difference: float
    low: float
    high: float
    p: float
    """Of Wilcoxon's signed-rank test, two-sided."""
    seeds: int
    agree: int
    """Seeds whose difference has the sign of the mean."""

    @property
    def clear(self) -> bool:
        """Whether the interval over clients leaves out 0 and every seed says the same."""
        return (self.low > 0 or self.high < 0) and self.agree == self.seeds

    def __str__(self) -> str:
        p = "p < 0.001" if self.p < 0.001 else f"p = {self.p:.3f}"
        seeds = f", {self.agree} of {self.seeds} seeds" if self.seeds > 1 else ""
        numbers = (f"{round(100 * value, 1) + 0.0:+.1f}" for value in (self.difference, self.low, self.high))
        return "{} [{}, {}]".format(*numbers) + f" {p}{seeds}"


def pair(first: Sequence[Line], second: Sequence[Line], part: str = "test") -> Pair | None:
    """Compare two methods' runs on their `test` or `unseen` clients; None where they share no seed and its clients."""
    ours, theirs = _by_seed(first, part), _by_seed(second, part)
    shared = [seed for seed in ours if seed in theirs and ours[seed].same_clients(theirs[seed])]
    if not shared:
        return None
    # Rounded, so that equal differences of counts are equal: their ranks are.
    differences = [np.round(ours[seed].accuracy - theirs[seed].accuracy, 12) for seed in shared]
    weights = [ours[seed].train for seed in shared]
    means = [float((d * w).sum() / w.sum()) for d, w in zip(differences, weights, strict=True)]
    replicates = [
        resampled(d[:, None], w[:, None], seed=number)[:, 0]
        for number, (d, w) in enumerate(zip(differences, weights, strict=True))
    ]
    mean, (low, high) = float(np.mean(means)), bounds(np.mean(replicates, axis=0)) or (0.0, 0.0)
    agree = sum(bool(np.sign(each) == np.sign(mean)) for each in means)
    return Pair(mean, low, high, signed_rank(np.concatenate(differences)), len(means), agree)


class _Clients(NamedTuple):
    """What a store keeps of a run's clients, see `paper.digest`."""

    train: np.ndarray
    rows: np.ndarray
    right: np.ndarray

    @property
    def accuracy(self) -> np.ndarray:
        share: np.ndarray = self.right / self.rows
        return share

    def same_clients(self, other: _Clients) -> bool:
        return np.array_equal(self.train, other.train) and np.array_equal(self.rows, other.rows)


def _by_seed(lines: Sequence[Line], part: str) -> dict[int, _Clients]:
    found = {}
    for line in lines:
        kept: Mapping[str, Any] | None = ((line.get("result") or {}).get("clients") or {}).get(part)
        if kept and len(kept["rows"]) > 1:
            train, rows, right = (np.asarray(kept[name], np.float64) for name in _Clients._fields)
            tested = rows > 0
            if train[tested].any():
                found[int(line["seed"])] = _Clients(train[tested], rows[tested], right[tested])
    return found
