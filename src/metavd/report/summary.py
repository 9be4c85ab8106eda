"""Figures of groups with their uncertainty, as rows of tables.

Over several seeds: mean ± half width of the 95 % interval (Student's t). Of one seed: its value and, where the run
has one, the 95 % bootstrap interval over its clients. The two answer different questions, so each cell says which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..evaluate.figures import EPSILON, SECONDS, SENT, Column, get, headline, number
from .groups import Group, left_out, parts


def columns(part: str) -> tuple[Column, ...]:
    """Return the headline figures of a group of clients."""
    return tuple(figure.column(part) for figure in headline(wide=True))


def headline_columns(groups: Sequence[Group]) -> tuple[Column, ...]:
    """Return the columns of the first table: the groups of clients that there are, what it cost, and epsilon if any."""
    private = (EPSILON,) if any(group.numbers(*EPSILON.path) for group in groups) else ()
    return (*(column for part in parts(groups) for column in columns(part)), SENT, SECONDS, *private)


class Estimate(NamedTuple):
    """A figure and its 95 % interval, in the column's unit."""

    value: float
    low: float | None = None
    high: float | None = None
    over: str = ""
    """What the interval is over: seeds, clients, or nothing."""


def estimate(group: Group, column: Column) -> Estimate | None:
    """Return a group's figure with its interval; None where no run has it."""
    found = column.cell(run.result for run in group.runs)
    if found is None:
        return None
    mean, half = found
    if half is not None:
        return Estimate(mean, mean - half, mean + half, "seeds")
    bounds = _bounds(group.runs[0].result, column) if len(group.runs) == 1 else None
    return Estimate(mean, *bounds, "clients") if bounds else Estimate(mean)


def _bounds(result: Mapping[str, Any], column: Column) -> tuple[float, float] | None:
    pair: Any = result
    for key in (column.path[0], "intervals", column.path[-1]):
        pair = pair.get(key) if isinstance(pair, Mapping) else None
    if not isinstance(pair, list) or len(pair) != 2:
        return None
    low, high = (number(bound) for bound in pair)
    return None if low is None or high is None else (low * column.factor, high * column.factor)


NOTHING = "\N{EN DASH}"


class CellText(NamedTuple):
    """A cell as text: the figure, its interval, and whether it is the best of its column."""

    value: str
    interval: str
    best: bool


def cell(found: Estimate | None, column: Column, *, best: bool = False) -> CellText:
    """Write "91.2" and "± 0.8", or "91.2" and "89.1 – 93.0"."""
    if found is None:
        return CellText(NOTHING, "", best=False)
    text = ""
    if found.low is not None and found.high is not None:
        low, high = f"{found.low:.{column.digits}f}", f"{found.high:.{column.digits}f}"
        text = f"± {found.high - found.value:.{column.digits}f}" if found.over == "seeds" else f"{low} {NOTHING} {high}"
    return CellText(f"{found.value:.{column.digits}f}", text, best)


def rows(groups: Sequence[Group], wanted: Sequence[Column]) -> list[list[CellText]]:
    """Return one row for each group; the best of a column is marked."""
    made = [_cells([estimate(group, column) for group in groups], column) for column in wanted]
    return [[cells[line] for cells in made] for line in range(len(groups))]


def _cells(found: Sequence[Estimate | None], column: Column) -> list[CellText]:
    # What the table shows decides, so that two figures that look the same are marked alike.
    shown = [None if each is None else round(each.value, column.digits) for each in found]
    known = {value for value in shown if value is not None}
    best = (max if column.better > 0 else min)(known) if column.better and len(known) > 1 else math.nan
    return [cell(each, column, best=value == best) for each, value in zip(found, shown, strict=True)]


def away(groups: Sequence[Group]) -> list[str]:
    """Return the clients that were left out in turn, in some group."""
    return sorted({name for group in groups for name in group.left_out})


def away_rows(groups: Sequence[Group]) -> list[list[CellText]]:
    """Return, for each group, the accuracy on each client that was left out in turn, and its mean over them."""
    shown = get("accuracy").column("unseen")
    columns = [
        rows(
            [replace(group, runs=tuple(run for run in group.runs if left_out(run) == name)) for group in groups],
            [shown],
        )
        for name in away(groups)
    ]
    return [[column[place][0] for column in columns] for place in range(len(groups))] if columns else []


def domain_columns(groups: Sequence[Group]) -> list[tuple[str, tuple[Column, ...]]]:
    """Return, for each dataset of those that a run joined, the columns of its accuracies."""
    found = [run.result.get("domains") for group in groups for run in group.runs]
    names = dict.fromkeys(name for domains in found if isinstance(domains, Mapping) for name in domains)
    shown = get("accuracy").column()
    return [
        (name, tuple(shown._replace(title=kind, path=("domains", name, part)) for part, kind in parts(groups).items()))
        for name in names
    ]
