"""Krum: believe the clients whose whole answers have close neighbours, and nobody else.

Shape letters: C clients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import tree
from ...errors import SpecError
from ...tree import Params
from .catalogue import Ballot, Rule, rule


def squared_distances(moves: Params) -> Tensor:
    """Return (C, C): between whole answers, all entries together."""
    # By differences, not by products: beside a huge answer those of the others would be lost in rounding.
    parts = [torch.cdist(each, each, compute_mode="donot_use_mm_for_euclid_dist").square()
             for each in (value.flatten(1) for value in moves.values())]  # fmt: skip
    return torch.stack(parts).sum(0)


def scores(moves: Params, weight: Tensor, liars: int) -> Tensor:
    """Return (C,): the sum of squared distances to the C - liars - 2 nearest others, infinite for who has no weight."""
    count = len(weight)
    distances = squared_distances(moves).fill_diagonal_(torch.inf)
    near = distances.topk(min(max(count - liars - 2, 1), max(count - 1, 1)), largest=False).values.sum(1)
    return torch.where(weight > 0, near, torch.inf)


def _best(ballot: Ballot, liars: int, number: int) -> Ballot:
    """Count the votes of the best clients alone; the others move nothing, not even what is their own."""
    score = scores(ballot.moves, ballot.weight, liars)
    places = score.topk(min(max(number, 1), len(score)), largest=False).indices
    chosen = torch.zeros_like(ballot.weight).index_fill(0, places, 1.0)
    return ballot._replace(votes=tree.scaled(ballot.votes, chosen), trust=ballot.trust * chosen)


def _needed(liars: int = 1, *_: int) -> int:
    return 2 * liars + 3


def _check(name: str, liars: int) -> None:
    if liars < 0:
        raise SpecError(f"aggregate is {name}:{liars}, but the number of liars must be at least 0, such as {name}:1")


@rule("krum", "the one client whose answer has the closest neighbours", example="krum:1", least=_needed)
def krum(liars: int = 1) -> Rule:
    """Take the answer of one client.

        consensus = x_k,    k = argmin_i sum_{j near i} |x_i - x_j|^2        over the C - liars - 2 nearest j

    Distances are between whole answers, what is a client's own among them. Blanchard et al., NeurIPS 2017: with
    C >= 2 liars + 3, how far the chosen one is from the honest mean is bounded by how far honest ones lie apart.
    """
    _check("krum", liars)
    return lambda ballot: _best(ballot, liars, 1)


@rule("multi-krum", "the mean of the clients whose answers have the closest neighbours", example="multi-krum:1",
      least=_needed)  # fmt: skip
def multi_krum(liars: int = 1, number: int = 0) -> Rule:
    """Take the mean of the answers of `number` clients, those with Krum's lowest scores; see `krum`.

        consensus = sum_{k chosen} v_k x_k / sum_{k chosen} v_k

    number = 0: C - liars - 2, as many as each is compared with. Votes by precision count among the chosen.
    """
    _check("multi-krum", liars)
    if number < 0:
        raise SpecError(f"aggregate is multi-krum:{liars}:{number}, but the number of clients must be at least 0")
    return lambda ballot: _best(ballot, liars, number or len(ballot.weight) - liars - 2)
