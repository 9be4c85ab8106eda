"""Runs that differ only in their seed are one group: one name, one colour, one row, on all of a page.

Where clients were left out by name, each in turn, who it was is like another seed: one group holds them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .. import methods
from ..data.collection import SHOWN
from ..data.partition import NAMED
from ..runs.settings import RUNTIME, SETTINGS
from .read import PARTS, FinishedRun, ReportError

BASELINE = "fedavg"
_ASIDE = RUNTIME | {"seed"}
"""Settings that do not decide what is computed, and the seed."""
_CLIENTS = (
    "data", "partition", "test_rows", "domains", "image_size", "channels", "clients", "unseen", "valid", "test_share",
    "server_share",
)  # fmt: skip
"""Settings that, with the seed and the data's content, decide who holds which row."""
_COLOURS = (
    "#3b7dd8", "#e07b2a", "#2e9e6b", "#d1495b", "#8b62c9", "#1aa3b8", "#c49a00", "#d867a8", "#a0694b", "#7aa52c",
    "#5b5fd6",
)  # fmt: skip
"""Of middle lightness, so that they show on light and on dark pages."""
_GREY = "#858d99"
_MARKERS = "os^DvPX<>ph"
_Place = tuple[int, str]
"""A run's place in its group: its seed, and who was left out by name."""
Dash = Literal["-", "--", ":", "-."]
_DASHES: tuple[Dash, ...] = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Style:
    """How a group is drawn, in every figure alike."""

    colour: str
    marker: str
    dash: Dash


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of one method and one setting, by seed and by who was left out."""

    index: int
    name: str
    method: str
    runs: tuple[FinishedRun, ...]
    look: Style

    def numbers(self, *path: str) -> list[float]:
        """Return a figure of every run that has it."""
        return [value for run in self.runs if (value := run.number(*path)) is not None]

    @property
    def left_out(self) -> list[str]:
        """The clients that were left out by name in some of the runs and not in others."""
        found = dict.fromkeys(left_out(run) for run in self.runs)
        return sorted(found) if len(found) > 1 else []


def left_out(run: FinishedRun) -> str:
    """Return the clients that a run was told by name to leave out; nothing where it was told their number."""
    unseen = run.config.get("unseen")
    return unseen.removeprefix(NAMED) if isinstance(unseen, str) else ""


def group(runs: Sequence[FinishedRun], baseline: str | None = None) -> tuple[list[Group], list[str]]:
    """Sort runs into groups, in the catalogue's order, and say which runs were left out.

    The baseline, fedavg or what is asked for, is grey.
    """
    made: dict[tuple[Any, ...], dict[_Place, FinishedRun]] = {}
    notes = []
    for run in runs:
        known = settings(run) | ({"unseen": NAMED} if left_out(run) else {})
        what, place = tuple(sorted((key, repr(value)) for key, value in known.items())), (run.seed, left_out(run))
        same = made.setdefault(what, {})
        if place in same:
            notes.append(f"{run.folder} repeats {same[place].folder} (same settings and seed) and is left out")
        same.setdefault(place, run)
    if baseline is not None and baseline not in {run.method for run in runs}:
        there = ", ".join(dict.fromkeys(run.method for run in runs))
        raise ReportError(f"--baseline is {baseline!r}, but no run here has that method; there are {there}")
    order = {name: place for place, name in enumerate(methods.NAMES)}
    sets = sorted(made.values(), key=lambda same: order.get(_first(same).method, len(order)))
    names = _names([_first(same) for same in sets])
    colours = iter(range(len(sets)))
    groups = []
    for index, (same, name) in enumerate(zip(sets, names, strict=True)):
        method = _first(same).method
        look = Style(_GREY, "o", "-") if method == (baseline or BASELINE) else _look(next(colours))
        groups.append(Group(index, name, method, tuple(same[place] for place in sorted(same)), look))
    return groups, notes


def parts(groups: Sequence[Group]) -> dict[str, str]:
    """Return the groups of clients that some run has, unseen ones only where there are any, with their names."""
    return {
        part: name
        for part, name in PARTS.items()
        if part == "test" or any(any(g.numbers(part, "clients")) for g in groups)
    }


def _look(place: int) -> Style:
    """Return the place-th look; colours come again with another dash."""
    cycle = len(_COLOURS)
    return Style(_COLOURS[place % cycle], _MARKERS[place % cycle], _DASHES[place // cycle % len(_DASHES)])


def _first(same: Mapping[_Place, FinishedRun]) -> FinishedRun:
    return same[min(same)]


def settings(run: FinishedRun) -> dict[str, Any]:
    """Return what decides the run's numbers but for the seed; a folder without config.toml has only its result."""
    # A run from before there was a setting is one of those that leave it at its default.
    unused = {name for name, each in SETTINGS.items() if each.later and run.config.get(name) == each.default}
    found = {key: value for key, value in run.config.items() if key not in _ASIDE | unused}
    return {"method": run.method, "data": run.data, "rounds": run.result["rounds"], **found}


def differing(runs: Sequence[FinishedRun]) -> list[str]:
    """Return the settings that are not the same in all runs, in the order of the files."""
    each = [settings(run) for run in runs]
    keys = dict.fromkeys(key for one in each for key in one)
    return [key for key in keys if len({repr(one.get(key)) for one in each}) > 1]


def _names(runs: Sequence[FinishedRun]) -> list[str]:
    """Name groups by method and, where that is not enough, by what differs between those of one method."""
    shared = [key for key in ("data", "partition", "clients", "rounds") if key in differing(runs)]
    names: list[str] = []
    for run in runs:
        alike = [other for other in runs if other.method == run.method]
        keys = dict.fromkeys([*shared, *(key for key in differing(alike) if key != "content")])
        known = settings(run)
        said = ", ".join(f"{key}={known[key]}" for key in list(keys)[:3] if key in known)
        name = f"{run.method} ({said})" if said else run.method
        count = sum(other == name or other.startswith(f"{name} #") for other in names)
        names.append(f"{name} #{count + 1}" if count else name)
    return names


def federation(run: FinishedRun) -> tuple[Any, ...]:
    """Return a value that two runs share exactly if client 3 of the one is client 3 of the other, with the same rows.

    It holds the settings that decide it, and the sizes of all clients as a check. A run whose settings or clients are
    unknown shares its clients with nobody.
    """
    if not run.config or not run.clients:
        return (str(run.folder.resolve()),)
    content = str(run.config.get("content", "")).partition("/")[0]  # behind the slash: the user's own network
    decided = tuple(repr(run.config.get(key, 0.0 if key == "server_share" else None)) for key in _CLIENTS)
    sizes = tuple((client.number, client.unseen, client.train_size, client.test_size) for client in run.clients)
    return (run.seed, content, decided, sizes)


def tasks(groups: Sequence[Group]) -> int:
    """Return how many different tasks groups solve: data, its content, and how it is dealt, seeds aside."""
    return len({
        (str(run.config.get("content", "")).partition("/")[0], *_dealt(run, group.left_out))
        for group in groups
        for run in group.runs
        if run.config
    })  # fmt: skip


def _dealt(run: FinishedRun, away: Sequence[str]) -> Iterator[str]:
    """Yield how a run's data are dealt; `away` are those who are left out in turn."""
    return (repr(away if away and key == "unseen" else run.config.get(key)) for key in _CLIENTS[:-1])


@dataclass(frozen=True, eq=False)
class Gain:
    """What clients have from a method over the baseline: (P,) sizes, points of accuracy, and who never trained."""

    group: Group
    size: list[int]
    points: list[float]
    unseen: list[bool]
    names: list[str]
    """Empty where clients have numbers only, or are too many to show."""


def baseline_of(groups: Sequence[Group], baseline: str | None) -> str | None:
    """Return the method that others are set against; None where it was not run."""
    wanted = baseline or BASELINE
    return wanted if any(group.method == wanted for group in groups) else None


def gains(groups: Sequence[Group], baseline: str) -> tuple[list[Gain], list[str]]:
    """Return each group's gains, client by client, where the baseline was run on the very same clients."""
    references = {federation(run): run for group in groups if group.method == baseline for run in group.runs}
    found, notes = [], []
    for group in groups:
        if group.method == baseline:
            continue
        gain = Gain(group, [], [], [], [])
        for run in group.runs:
            reference = references.get(federation(run))
            if reference is None:
                continue
            before = {client.number: client.figures.get("accuracy", math.nan) for client in reference.clients}
            for client in run.clients:
                points = 100 * (client.figures.get("accuracy", math.nan) - before[client.number])
                if math.isfinite(points):
                    gain.size.append(client.train_size)
                    gain.points.append(points)
                    gain.unseen.append(client.unseen)
                    if client.name and len(run.clients) <= SHOWN:
                        gain.names.append(client.name)
        if gain.points:
            found.append(gain)
        else:
            notes.append(
                f"{group.name} is not set against {baseline}: no run of both has the same data, clients and seed."
            )
    return found, notes
