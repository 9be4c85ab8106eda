"""What a study searches and how it is judged: read and checked here, before anything heavy is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .. import methods
from ..errors import SpecError
from ..runs.settings import RUNTIME, SETTINGS, Experiment, content, with_settings
from ..schema import Value, meant, nearest

METRICS = ("nll", "accuracy")
"""Figures that a trial may be judged by, on validation rows."""
SAMPLERS = ("tpe", "random")
BY = ("rows", "clients")
"""Validate on held-out rows of the clients that train, or on clients that do not."""
VALID = 0.2
"""Share held out where none is asked for."""
FIELDS = ("cohort", "model", "width")
"""Fields that may be searched. The others say what the task is; trials with different ones cannot be compared."""
_NOT_SEARCHED = frozenset({"server_share"})
"""Options that decide who holds which row."""


@dataclass(frozen=True)
class Dimension:
    """One searched setting: a list of values, or a range."""

    name: str
    values: tuple[Value, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def __str__(self) -> str:
        if self.values:
            return ",".join(map(str, self.values))
        return f"{self.low}..{self.high}{':log' if self.log else ''}"


@dataclass(frozen=True)
class Plan:
    """What is searched and how it is judged; `plan` makes one and checks it."""

    experiment: Experiment
    """All that is fixed; the rest is resolved for each trial."""
    space: tuple[Dimension, ...]
    seeds: int = 1
    metric: str = "nll"
    by: str = "rows"
    sampler: str = "tpe"
    prune: bool = True

    def texts(self) -> dict[str, str]:
        """Return the space as it would be written after --search."""
        return {one.name: str(one) for one in self.space}


class Watcher:
    """Whoever wants to know how a study goes on; this one does not."""

    def start(self, plan: Plan, rounds: int, done: int, total: int) -> None:
        """A study of so many trials begins, or goes on with `done` of them behind it."""

    def step(self, number: int, round: int, value: float) -> None:
        """A trial was looked at; not told of trials in other processes."""

    def trial(self, line: Mapping[str, Any]) -> None:
        """A trial is over; `line` is its entry in trials.json."""

    def note(self, text: str) -> None:
        """Something happened that a person should know."""


def plan(
    experiment: Experiment,
    search: Mapping[str, str] | None = None,
    *,
    seeds: int = 1,
    metric: str = "nll",
    by: str = "rows",
    sampler: str = "tpe",
    prune: bool = True,
) -> Plan:
    """Return what a study shall do, or say in one sentence what is wrong with it.

    Args:
        experiment: the method, the data and all that is fixed. Options that it sets leave the paper's search space.
        search: setting -> "LOW..HIGH", "LOW..HIGH:log" or "A,B,C"; changes the paper's space or adds to it. Nothing:
            the values that the option itself offers.
        seeds: how many seeds, from the experiment's on, a trial is averaged over; each has its own partition.
        metric: "nll" or "accuracy", of the validation rows.
        by: "rows" scores the participating clients, "clients" some that are taken out of training.
        sampler: "tpe" learns from earlier trials, "random" does not.
        prune: stop a trial that is worse than the median of the finished ones at the same round.
    """
    for name, value, known in (("metric", metric, METRICS), ("by", by, BY), ("sampler", sampler, SAMPLERS)):
        if value not in known:
            raise SpecError(f"{name} is {value!r}; {nearest(str(value), known)}")
    if seeds < 1:
        raise SpecError(f"seeds is {seeds}, but must be at least 1")
    check_patience(experiment)
    experiment = replace(experiment, valid=experiment.valid or VALID)
    with_settings(experiment, {"seed": experiment.seed + seeds - 1})
    return Plan(experiment, space(experiment, search or {}), seeds, metric, by, sampler, prune)


def check_patience(experiment: Experiment) -> None:
    """Refuse early stopping in a search."""
    if experiment.patience:
        raise SpecError(
            f"patience is {experiment.patience}, but a trial is scored after all its rounds; leave it out here, and "
            "set it when you run the best configuration"
        )


def space(experiment: Experiment, search: Mapping[str, str]) -> tuple[Dimension, ...]:
    """Return the method's own space without what is set, changed by `search` or added to."""
    found = {
        option.name: Dimension(option.name, option.search)
        for option in methods.options_of(experiment.method).values()
        if option.search and option.name not in experiment.options
    }
    found |= {name: dimension(experiment, name, text) for name, text in search.items()}
    if not found:
        raise SpecError(
            f"nothing is left to search for {experiment.method}: every setting of the paper's space is fixed; name one "
            "with --search, for example --search lr=0.001..0.1:log"
        )
    return tuple(found.values())


def dimension(experiment: Experiment, name: str, text: str) -> Dimension:
    """Read what is to be searched: LOW..HIGH, LOW..HIGH:log, or A,B,C; nothing: what the option itself offers.

    >>> dimension(Experiment(), "lr", "0.001..0.1:log")
    Dimension(name='lr', values=(), low=0.001, high=0.1, log=True)
    """
    options = {key: each for key, each in methods.options_of(experiment.method).items() if key not in _NOT_SEARCHED}
    if name not in options and name not in FIELDS:
        if name in _NOT_SEARCHED or name in SETTINGS:
            raise SpecError(
                f"{name} cannot be searched, because trials that differ in it cannot be compared; fix it with --set"
            )
        close = meant(name, options | {key: SETTINGS[key] for key in FIELDS})
        raise SpecError(f"there is no setting {name!r} to search for {experiment.method}; {close}")

    if not text:
        known = options.get(name)
        values = known and (known.search or known.offered)
        if not values:
            raise SpecError(f"{name} offers no values of its own to search; write --search {name}=LOW..HIGH or =A,B,C")
        return Dimension(name, values)

    def typed(word: str) -> Any:
        checked = with_settings(experiment, {name: word.strip()})
        return checked.options[name] if name in options else getattr(checked, name)

    low, dots, rest = text.partition("..")
    if not dots:
        values = tuple(typed(word) for word in text.split(","))
        if len(set(values)) < max(2, len(values)):
            raise SpecError(
                f"--search {name}={text} must name at least two values, each once; --set fixes a setting at one value"
            )
        return Dimension(name, values)
    high, colon, scale = rest.partition(":")
    ends = (typed(low), typed(high))
    if (colon and scale != "log") or isinstance(ends[0], str | bool) or type(ends[0]) is not type(ends[1]):
        raise SpecError(f"--search {name}={text} must be LOW..HIGH of numbers, LOW..HIGH:log, or values with commas")
    if ends[0] >= ends[1] or (colon and ends[0] <= 0):
        raise SpecError(f"--search {name}={text} must have {'0 < ' if colon else ''}LOW < HIGH")
    return Dimension(name, (), *ends, bool(colon))


def name_of(plan: Plan) -> str:
    """Return hex digits that name what is asked, so that the same command finds its study again."""
    asked = {key: value for key, value in content(plan.experiment).items() if key not in RUNTIME}
    text = json.dumps([asked, plan.texts(), plan.seeds, plan.metric, plan.by], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:6]
