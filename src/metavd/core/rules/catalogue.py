"""What a rule is given and returns, and every rule by name.

Shape letters: C clients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ...errors import SpecError
from ...registry import Registry
from ...schema import nearest, numbers
from ...tree import Params

MEAN = "mean"


class Ballot(NamedTuple):
    """One round's answers, as differences to what was sent, and how much each of them counts."""

    moves: Params
    """(C, ...) answer - sent: of the weights that all share, and of what is the client's own (its spreads)."""
    votes: Params
    """(C, ...), or (C, 1, ...) where all weights of an entry count alike: of the shared entries alone; at least 0."""
    weight: Tensor
    """(C,) the clients' shares, which sum to 1."""
    trust: Tensor
    """(C,) from 0 to 1: how far what is a client's own follows its move. Nothing of that is mixed with others'."""


Rule = Callable[[Ballot], Ballot]


class RuleEntry(NamedTuple):
    """A rule that can be asked for by name."""

    name: str
    text: str
    """What it does, in one line."""
    build: Callable[..., Rule]
    """The numbers after its name -> the rule; their types are those of its parameters."""
    example: str
    least: Callable[..., int]
    """The same numbers, as far as they are given -> clients that a cohort must have for the rule to mean something."""


RULES: Registry[RuleEntry] = Registry(
    "metavd.aggregations", [f"{__package__}.{name}" for name in ("mean", "coordinates", "krum", "distance", "clip")]
)
"""Every rule by name."""
Build = TypeVar("Build", bound=Callable[..., Rule])


def rule(
    name: str, text: str, *, example: str = "", least: Callable[..., int] = lambda *_: 1
) -> Callable[[Build], Build]:
    """Register a rule: a function of the numbers after its name that returns what turns a ballot into another."""

    def register(build: Build) -> Build:
        RULES.add(name, RuleEntry(name, text, build, example or name, least), build.__module__)
        return build

    return register


def consensus(moves: Params, votes: Params) -> Params:
    """Return sum_i v_i x_i / sum_i v_i of all entries with votes: (C, ...) -> (...); 0 where nobody has one."""
    result = {}
    for name, value in votes.items():
        total = value.sum(0)
        # A move that does not count may be infinite, and 0 times that is not 0.
        counted = torch.where(value > 0, value * moves[name], torch.zeros_like(moves[name])).sum(0)
        result[name] = torch.where(total > 0, counted / torch.where(total > 0, total, 1.0), torch.zeros_like(counted))
    return result


# --- names -----------------------------------------------------------------------------------------------------------


def _parts(text: str) -> list[tuple[RuleEntry, str]]:
    """Split `clip+median` into its rules, each with its own text."""
    found = []
    for part in text.split("+"):
        name = part.partition(":")[0]
        if name not in RULES:
            told = [f"aggregate is {text!r}, but there is no rule {name!r}", nearest(name, list(RULES)), *RULES.broken]
            raise SpecError("; ".join(told))
        found.append((RULES[name], part))
    return found


def parse(text: str) -> Rule | None:
    """Return the rule that a text names, such as trimmed:0.2 or clip+median; None for the plain mean."""
    rules = [
        entry.build(*numbers(part, entry.build, f"aggregate is {text!r}", entry.example))
        for entry, part in _parts(text)
    ]
    return None if text == MEAN else lambda ballot: reduce(lambda so_far, each: each(so_far), rules, ballot)


def check(text: str) -> str:
    """Return a rule's text, or say in one sentence what is wrong with it."""
    parse(text)
    return text


def check_cohort(text: str, cohort: int) -> None:
    """Say in one sentence that a rule needs more clients in a round than there are."""
    for entry, part in _parts(text):
        least = entry.least(*numbers(part, entry.build, f"aggregate is {text!r}", entry.example))
        if cohort < least:
            raise SpecError(f"aggregate is {text!r}, which needs a cohort of at least {least}, but cohort is {cohort}")
