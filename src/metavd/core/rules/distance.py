"""The geometric median: whole answers count the less the farther they lie from the consensus.

Shape letters: C clients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import tree
from ...errors import SpecError
from ...tree import Params
from .catalogue import Ballot, Rule, consensus, rule
from .coordinates import weighted_median

_SMOOTH = 1e-6
"""Of the median distance from the start: below it an answer counts no more for being closer."""


def _distances(moves: Params, centre: Params) -> Tensor:
    """Return (C,): how far each answer lies from a centre."""
    return tree.norms({name: moves[name] - value for name, value in centre.items()})


@rule("geometric-median", "answers count less the farther they lie from the consensus (Weiszfeld)")
def geometric_median(steps: int = 32) -> Rule:
    """Take the geometric median of whole answers, by so many of Weiszfeld's steps from the coordinate-wise median.

        consensus = argmin_z sum_i w_i |x_i - z|,        z <- sum_i u_i x_i / sum_i u_i,   u_i = v_i / |x_i - z|

    with |.| smoothed to sqrt(|.|^2 + nu^2). It stays near the honest answers while liars have less than half of the
    weight. Pillutla et al., IEEE Transactions on Signal Processing, 2022. What is a client's own follows its move by
    min(1, u_i / (w_i sum_j u_j)).
    """
    if steps < 1:
        raise SpecError(f"aggregate is geometric-median:{steps}, but it takes at least 1 step")

    def count(ballot: Ballot) -> Ballot:
        moves, weight = ballot.moves, ballot.weight
        centre = {name: weighted_median(moves[name], votes) for name, votes in ballot.votes.items()}
        far = _distances(moves, centre)
        smooth = _SMOOTH * weighted_median(far, weight) + torch.finfo(far.dtype).tiny
        votes = ballot.votes
        for _ in range(steps):
            close = 1.0 / torch.hypot(_distances(moves, centre), smooth)
            close = close / (weight * close).sum()
            votes = tree.scaled(ballot.votes, close)
            centre = consensus(moves, votes)
        return ballot._replace(votes=votes, trust=ballot.trust * close.clamp(max=1.0))

    return count
