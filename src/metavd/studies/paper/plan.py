"""Which runs the paper's tables need, and which of them the store has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ..lines import identity, read, stands
from ..tuned import Tuned, told_of
from .protocol import PAPER, Protocol, settings_of, tuned_for
from .tables import Cell, Labels, cells, within

_MIDDLE = "dirichlet:0.5"
"""The partition that every table of accuracies has, and that methods are tuned for."""


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """A run that one or more cells need."""

    id: str
    settings: Mapping[str, Any]
    cells: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Needed:
    """Runs by whether the store has them, in the order in which a stop leaves the most: see `_urgency`."""

    done: tuple[PlannedRun, ...]
    missing: tuple[PlannedRun, ...]


def store_file(store: str | Path, scale: str = "full") -> Path:
    """Return the file of a scale's lines; smoke runs have one of their own."""
    path = Path(store)
    return path if scale == "full" else path.with_name(f"{path.stem}.{scale}{path.suffix}")


def needed(
    names: Sequence[str],
    store: str | Path,
    *,
    how: Protocol = PAPER,
    rows: Labels = None,
    columns: Labels = None,
    retry: bool = False,
    note: Callable[[str], None] | None = None,
) -> Needed:
    """Say which runs the tables need and which the store lacks; `retry` counts those that failed as lacking."""
    chosen = _chosen(names, rows, columns)
    users: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for cell, seed in sorted(product(chosen, how.seeds), key=_urgency):
        settings = settings_of(cell, seed, how)
        users.setdefault(identity(settings, how.scale), (settings, []))[1].append(cell.name)
    lines = read(store_file(store, how.scale), how.scale, note)
    runs = [PlannedRun(key, settings, tuple(who)) for key, (settings, who) in users.items()]
    there = {key for key, line in lines.items() if stands(line, retry=retry)}
    return Needed(tuple(run for run in runs if run.id in there), tuple(run for run in runs if run.id not in there))


def _chosen(names: Sequence[str], rows: Labels, columns: Labels) -> list[Cell]:
    return [cell for name, part in within(names, rows, columns).items() for cell in cells(name, *part)]


def _urgency(run: tuple[Cell, int]) -> tuple[bool, int]:
    """Sort runs: columns at the partition that settings were tuned at come first, seed by seed, then the others."""
    cell, seed = run
    partition = str(cell.settings["partition"])
    return (partition.startswith("dirichlet:") and partition != _MIDDLE, seed)


def tuned_told(
    names: Sequence[str],
    *,
    how: Protocol = PAPER,
    rows: Labels = None,
    columns: Labels = None,
) -> list[str]:
    """Say of every method and its data which tuned settings the tables' runs have; nothing where none are asked for."""
    if how.tuned is None:
        return []
    users: dict[tuple[str, str, str | None], tuple[Tuned | None, dict[str, None]]] = {}
    for cell in _chosen(names, rows, columns):
        asked = {**cell.settings, "test_rows": how.test_rows}
        if "method" in asked and "variant" not in asked:
            found = tuned_for(asked, how)
            key = (asked["method"], asked["data"], None if found is None else found.name)
            users.setdefault(key, (found, {}))[1][asked["partition"]] = None
    return [
        told_of(method, data, list(partitions), how.test_rows, found)
        for (method, data, _), (found, partitions) in users.items()
    ]
