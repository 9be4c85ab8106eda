"""Clipping: no client moves the server farther than the median client does.

Shape letters: C clients.
"""

from __future__ import annotations

import torch

from ... import tree
from ...errors import SpecError
from .catalogue import Ballot, Rule, rule
from .coordinates import weighted_median


@rule("clip", "moves longer than the median client's are shortened to that; before another rule: clip+median")
def clip(factor: float = 1.0) -> Rule:
    """Shorten every answer's difference to what was sent to the median length of the round, times a factor.

        x_i <- x_i min(1, factor median_j |x_j| / |x_i|)        lengths over the whole answer; the median by weight

    What is a client's own is shortened with the rest.
    """
    if not factor > 0:
        raise SpecError(f"aggregate is clip:{factor:g}, but the factor must be above 0, such as clip:1.5")

    def count(ballot: Ballot) -> Ballot:
        length = tree.norms(ballot.moves)
        limit = factor * weighted_median(length, ballot.weight)
        scale = torch.where(length > limit, limit / length, 1.0)
        return ballot._replace(moves=tree.scaled(ballot.moves, scale))

    return count
