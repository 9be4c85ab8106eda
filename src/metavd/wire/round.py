"""A round's answers, judged against each other: how far each one goes, and whether it goes the others' way.

    size_i  = |d_i| / median_{j != i} |d_j|                   d = answer - received, over everything but masks
    along_i = cos(d_i, sum_{j != i} d_j / |d_j|)              directions count alike, however far an answer goes

Sites differ, so an honest answer may be long or point elsewhere; one that is long *and* points back is neither.

Shape letters: C answers, D numbers of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch

from ..tree import Params
from .masks import is_mask

FEWEST = 4
"""Answers that a round needs before one of them can stand out."""


class Standing(NamedTuple):
    """How an answer stands beside the others of its round."""

    size: float
    along: float


def standings(answers: Sequence[tuple[Params, Params]]) -> list[Standing]:
    """Return how each of (received, answer) stands; of fewer than four, all alike.

    >>> zero, step = {"w": torch.zeros(2)}, {"w": torch.tensor([1.0, 0.0])}
    >>> standings([(zero, step)] * 4 + [(zero, {"w": torch.tensor([-20.0, 0.0])})])[-1]
    Standing(size=20.0, along=-1.0)
    """
    count = len(answers)
    if count < FEWEST:
        return [Standing(1.0, 1.0)] * count
    gram = torch.zeros(count, count, dtype=torch.float64)
    for name in (each for each in answers[0][0] if not is_mask(each)):
        # One entry at a time: (C, D) of it in float64, whose squares of float32 do not overflow.
        d = torch.stack(
            [(answer[name].double() - received[name].detach().cpu().double()).flatten() for received, answer in answers]
        )
        gram += d @ d.T
    length = gram.diagonal().clamp_min(0).sqrt()
    safe = torch.where(length > 0, length, 1.0)
    cosine = gram / safe[:, None] / safe
    found = []
    for i in range(count):
        others = [j for j in range(count) if j != i]
        usual = median(float(length[j]) for j in others)
        toward = float(cosine[i, others].sum())
        whole = float(cosine[others][:, others].sum().clamp_min(0).sqrt())
        size = float(length[i]) / usual if usual > 0 else 1.0
        found.append(Standing(size, toward / whole if whole > 0 else 0.0))
    return found
