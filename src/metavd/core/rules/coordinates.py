"""Rules that look at one weight at a time: the answers in order of their size, the votes of the outer ones not counted.

Shape letters: C clients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...errors import SpecError
from ...tree import Params
from .catalogue import Ballot, Rule, rule

Recount = Callable[[Tensor, Tensor], Tensor]
"""(votes up to and with each answer (C, ...), their sum (1, ...)) of answers in order -> how many of them count."""


def _slack(total: Tensor, count: int) -> Tensor:
    """Votes that a sum of so many may be wrong by: no answer may count because of rounding alone."""
    return 8 * count * torch.finfo(total.dtype).eps * total


def _before(upto: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(upto[:1]), upto[:-1]])


def recounted(values: Tensor, votes: Tensor, recount: Recount) -> Tensor:
    """Return the votes (C, ...) of values (C, ...) that still count, by their places in the order of the values."""
    order = values.argsort(dim=0, stable=True)
    upto = votes.expand_as(values).gather(0, order).cumsum(0)
    return torch.zeros_like(upto).scatter(0, order, recount(upto, upto[-1:]))


def middle(upto: Tensor, total: Tensor) -> Tensor:
    """Count the answer at which half of the votes is reached; two of them, by a half each, where it falls between."""
    half, slack, before = total / 2, _slack(total, len(upto)), _before(upto)
    lower = (upto >= half - slack) & (before < half - slack)
    upper = (upto > half + slack) & (before <= half + slack)
    return (lower.to(upto.dtype) + upper.to(upto.dtype)) / 2


def weighted_median(values: Tensor, votes: Tensor) -> Tensor:
    """Return the median over clients: (C, ...) values, (C, ...) or (C, 1, ...) votes -> (...)."""
    chosen = recounted(values, votes, middle)
    # A value that does not count may be infinite, and 0 times that is not 0.
    return torch.where(chosen > 0, chosen * values, torch.zeros_like(values)).sum(0)


def within(share: float) -> Recount:
    """Count the votes between the lowest and the highest share of them; an answer on the border counts in part."""

    def recount(upto: Tensor, total: Tensor) -> Tensor:
        low, high = share * total, (1 - share) * total
        inside = torch.minimum(upto, high) - torch.maximum(_before(upto), low)
        return torch.where(inside > _slack(total, len(upto)), inside, torch.zeros_like(inside))

    return recount


def _everywhere(recount: Recount) -> Rule:
    def count(ballot: Ballot) -> Ballot:
        votes: Params = {name: recounted(ballot.moves[name], value, recount) for name, value in ballot.votes.items()}
        return ballot._replace(votes=votes)

    return count


@rule("median", "of every weight the middle answer, by votes")
def median() -> Rule:
    """Take the weighted median of every weight.

        consensus = argmin_z sum_i v_i |x_i - z|        the midpoint where that is an interval

    It stays within the honest answers, weight by weight, while liars have less than half of the votes.
    """
    return _everywhere(middle)


@rule("trimmed", "of every weight the mean without the lowest and the highest share of votes", example="trimmed:0.2")
def trimmed(share: float = 0.1) -> Rule:
    """Take the trimmed mean of every weight.

        consensus = sum_i u_i x_i / sum_i u_i,    u_i = the part of client i's votes that lies between share and
                                                        1 - share of all, the answers in order of their size

    Of C clients that count alike, the share C lowest and highest are left out. It stays within the honest answers,
    weight by weight, while liars have at most that share of the votes. share = 0 is the mean.
    """
    if not 0 <= share < 0.5:
        raise SpecError(f"aggregate is trimmed:{share:g}, but the share must lie between 0 and 0.5, such as 0.2")
    return _everywhere(within(share))
