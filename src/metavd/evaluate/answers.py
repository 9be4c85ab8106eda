"""What clients' personalised models answered on test rows, joined, with what is known of each row.

Shape letters: C clients, N samples (the rows of all clients, one client after the other), K classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from . import calibration, scores, uncertainty
from .calibration import Reliability


@dataclass(frozen=True, eq=False)  # equality of arrays has no truth value
class ClientResult:
    """What one client's personalised model answered on the client's test rows."""

    client: int
    train_size: int
    probs: np.ndarray
    """(N, K)"""
    y: np.ndarray
    """(N,)"""
    known: np.ndarray | None = None
    """(K,) bool: the client has training rows of the class. None where nobody looked."""
    information: np.ndarray | None = None
    """(N,) mutual information of label and weights, see `core.predict`; None where the method makes no draws."""


@dataclass(frozen=True, eq=False)
class Answers:
    """The answers of one client or more, each with at least one test row; figures are taken from these."""

    clients: Sequence[ClientResult]
    released: bool = False
    """Whether figures are taken as the released code takes them."""

    @cached_property
    def probs(self) -> np.ndarray:
        """(N, K) in float64."""
        return np.concatenate([np.asarray(each.probs, np.float64) for each in self.clients])

    @cached_property
    def y(self) -> np.ndarray:
        """(N,) labels."""
        return np.concatenate([each.y for each in self.clients])

    @cached_property
    def test_size(self) -> np.ndarray:
        """(C,) test rows of each client."""
        return np.array([len(each.y) for each in self.clients])

    @cached_property
    def train_size(self) -> np.ndarray:
        """(C,) training rows of each client."""
        return np.array([each.train_size for each in self.clients], np.float64)

    @cached_property
    def right(self) -> np.ndarray:
        """(N,) bool: the largest probability is the label's."""
        return scores.correct(self.probs, self.y)

    @cached_property
    def surprise(self) -> np.ndarray:
        """(N,) -log of the label's probability."""
        return scores.surprise(self.probs, self.y)

    @cached_property
    def squared_error(self) -> np.ndarray:
        """(N,) sum over classes of the squared distance from the truth."""
        return scores.squared_error(self.probs, self.y)

    @cached_property
    def entropy(self) -> np.ndarray:
        """(N,) in nats."""
        return uncertainty.entropy(self.probs)

    @cached_property
    def information(self) -> np.ndarray | None:
        """(N,) mutual information of label and weights; None where a client has none."""
        return _joined([each.information for each in self.clients])

    @cached_property
    def unknown(self) -> np.ndarray | None:
        """(N,) bool: the client has no training row of the label; None where nobody looked."""
        return _joined([None if each.known is None else ~each.known[each.y] for each in self.clients])

    def diagram(self, name: str) -> Reliability:
        """Return the reliability diagram `top1`, `mass`, `classwise` or `flat`, see `calibration`."""
        if name not in self._diagrams:
            make = {"top1": calibration.top1, "mass": calibration.mass, "classwise": calibration.classwise}
            self._diagrams[name] = (
                calibration.flat(self.probs, self.y, released=self.released)
                if name == "flat"
                else make[name](self.probs, self.y)
            )
        return self._diagrams[name]

    @cached_property
    def _diagrams(self) -> dict[str, Reliability]:
        return {}

    def one_by_one(self) -> Iterator[Answers]:
        """Yield the answers of each client by itself."""
        return (Answers([each], self.released) for each in self.clients)


def _joined(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Join what all clients have; None where one of them has none."""
    there = [part for part in parts if part is not None]
    return np.concatenate(there) if len(there) == len(parts) else None
