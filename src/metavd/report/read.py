"""Runs' folders as checked values, so that whoever draws them need not doubt them.

A folder that holds no finished run is no run; a part that is missing or damaged is left out and noted. All texts that
came from files are made printable here, and are still foreign: the page escapes them.

Shape letters: C clients, N participating clients, K classes, M bins.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..data.collection import SHOWN
from ..errors import SpecError, UserError
from ..evaluate.calibration import Reliability
from ..evaluate.figures import LARGEST, number, of_clients
from ..runs.details import LIMIT
from ..runs.settings import from_toml
from ..runs.store import Store, StoreError

PARTS = {"test": "participating", "unseen": "unseen"}
"""Groups of clients, by their names in files, with their names for people."""
_DEPTH = 4
"""Folders below a named one that are searched for runs: METHOD/seed-S/baseline, and one to spare."""
_NOT_RUNS = ("checkpoint", "best")


class ReportError(UserError):
    """Nothing that a page can be made of; the text says what would be right."""


@dataclass(frozen=True)
class Client:
    """A line of clients.csv."""

    number: int
    unseen: bool
    train_size: int
    test_size: int
    figures: Mapping[str, float]
    """Only those that are defined."""
    name: str = ""
    """Empty where clients have numbers only."""


@dataclass(frozen=True, eq=False)
class Doubt:
    """A histogram of entropies: edges (M + 1,), and how many (M,) right and wrong answers."""

    edges: np.ndarray
    right: np.ndarray
    wrong: np.ndarray


@dataclass(frozen=True, eq=False)
class LayerRates:
    """Dropout rates of a layer: edges (M + 1,), and how many (N, M) a client has."""

    edges: np.ndarray
    clients: np.ndarray


@dataclass(frozen=True, eq=False)
class Details:
    """details.json; what a method or a folder does not have is empty or None."""

    reliability: Mapping[str, Reliability] = field(default_factory=dict)
    entropy: Mapping[str, Doubt] = field(default_factory=dict)
    labels: np.ndarray | None = None
    """(C, K) training rows of each class."""
    rates: Mapping[str, LayerRates] = field(default_factory=dict)
    embeddings: np.ndarray | None = None
    """(N, E)"""


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """One finished run."""

    folder: Path
    method: str
    data: str
    seed: int
    result: Mapping[str, Any]
    config: Mapping[str, Any]
    config_text: str
    rounds: Sequence[Mapping[str, Any]]
    clients: Sequence[Client]
    details: Details
    notes: tuple[str, ...]
    """What is missing."""

    def number(self, *path: str) -> float | None:
        """Return a number of the result, ("test", "accuracy"); None where there is none."""
        return number(self.result, *path)

    def class_name(self, label: int) -> str:
        """Return what a class is called: its name where the run knows it, or its number."""
        names = self.result.get("names")
        known = names.get("classes") if isinstance(names, Mapping) else None
        return str(known[label]) if isinstance(known, list) and label < len(known) else str(label)

    def client_names(self) -> list[str]:
        """Return the names of the participating clients where there are few enough to show them; else nothing."""
        names = [client.name for client in self.clients if not client.unseen]
        return names if all(names) and len(self.clients) <= SHOWN else []

    def labels_of(self, client: Client) -> np.ndarray | None:
        """Return (K,) training rows of each class, of a client that details.json has."""
        labels = self.details.labels
        # Of a sample the file has some clients only, but their numbers are those among all.
        known = int(self.number("sampled", "test", "of") or sum(not each.unseen for each in self.clients))
        row = client.number if not client.unseen else client.number - known
        if labels is None or row >= LIMIT:
            return None
        row += min(known, LIMIT) if client.unseen else 0
        return labels[row] if row < len(labels) else None


def printable(value: Any) -> Any:
    r"""Return a JSON value whose texts hold no character that a page or a picture cannot show.

    >>> printable({"a\x00": ["b\ud800", 3]})
    {'a�': ['b�', 3]}
    """
    if isinstance(value, str):
        return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in value)
    if isinstance(value, Mapping):
        return {printable(key): printable(each) for key, each in value.items()}
    return [printable(each) for each in value] if isinstance(value, list) else value


def read_runs(folders: Sequence[Path]) -> tuple[list[FinishedRun], list[str]]:
    """Return the finished runs in and below folders, and notes on what could not be used."""
    found: dict[Path, Path] = {}
    for folder in folders:
        below = list(_run_folders(folder))
        if not below:
            what = "is no folder" if not folder.is_dir() else "holds no run"
            raise ReportError(f"{folder} {what}; name the --out folder of metavd run or metavd compare")
        for each in below:
            found.setdefault(each.resolve(), each)
    runs, notes = [], []
    for folder in found.values():
        try:
            runs.append(read_run(folder))
        except ReportError as error:
            notes.append(str(error))
    if not runs:
        more = f" (and {len(notes) - 1} more like it)" if len(notes) > 1 else ""
        raise ReportError(notes[0] + more)
    return runs, notes


def _run_folders(folder: Path) -> Iterator[Path]:
    for place, below, files in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        below[:] = sorted(each for each in below if each not in _NOT_RUNS and not each.startswith("."))
        if depth >= _DEPTH:
            below.clear()
        if {"config.toml", "result.json"} & set(files) and "model.json" not in files:  # which a personalised model has
            yield Path(place)


def read_run(folder: Path) -> FinishedRun:
    """Read one folder; ReportError where it holds no finished run."""
    store = Store(folder)
    try:
        result = printable(store.read_result())
        if not isinstance(result["method"], str) or not isinstance(result["data"], str):
            raise StoreError(f"{store.result} is damaged (method and data must be texts); run it again with --resume")
    except (StoreError, RecursionError) as error:
        raise ReportError(str(error)) from None
    notes: list[str] = []

    def part(path: Path, read: Callable[[], _T], empty: _T) -> _T:
        if not path.exists():
            notes.append(f"{path} is missing; what needs it is left out")
            return empty
        try:
            return read()
        except _DAMAGE as error:
            notes.append(f"{path} is damaged ({printable(str(error))}); what needs it is left out")
            return empty

    return FinishedRun(
        folder=folder,
        method=result["method"],
        data=result["data"],
        seed=int(number(result, "seed") or 0),
        result=result,
        config=part(store.config, lambda: printable(from_toml(store.config)), {}),
        config_text=part(store.config, lambda: printable(store.config.read_text()), ""),
        rounds=part(store.rounds, lambda: _rounds(store), []),
        clients=part(store.clients, lambda: _clients(store), []),
        details=part(store.details, lambda: _details(json.loads(store.details.read_text())), Details()),
        notes=tuple(dict.fromkeys(notes)),
    )


_T = TypeVar("_T")
_DAMAGE = (OSError, SpecError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)
"""What reading a spoilt file may raise: whatever it is, the part is left out and the file is named."""


def _rounds(store: Store) -> list[dict[str, Any]]:
    records = store.read_rounds()
    numbers = [record["round"] for record in records]
    if not records or not all(type(each) is int for each in numbers) or numbers != sorted(set(numbers)):
        raise ValueError("its rounds do not count upwards")
    return records


def _clients(store: Store) -> list[Client]:
    names = [figure.name for figure in of_clients()]
    clients: list[Client] = []
    for line in store.read_clients():
        if None in line or None in line.values():
            raise ValueError(f"line {len(clients) + 2} has not as many fields as the first")
        sizes = [int(line[name]) for name in ("client", "unseen", "train_size", "test_size")]
        figures = {name: float(line[name]) for name in names if line.get(name)}
        defined = {name: value for name, value in figures.items() if abs(value) < LARGEST}
        name = printable(line.get("name") or "")
        clients.append(Client(sizes[0], bool(sizes[1]), sizes[2], sizes[3], defined, name))
    if len({client.number for client in clients}) != len(clients):
        raise ValueError("a client stands in it twice")
    return clients


def _details(value: Mapping[str, Any]) -> Details:
    """Check everything that is drawn: kinds, shapes, signs, and edges that ascend."""
    return Details(
        reliability=_by_part(value["reliability"], lambda part: _binned(Reliability, part["top1"])),
        entropy=_by_part(value["entropy"], partial(_binned, Doubt)),
        labels=None if value["labels"] is None else _counts(value["labels"], 2),
        rates={
            printable(str(layer)): LayerRates(
                _edges(each["edges"]), _counts(each["clients"], 2, len(each["edges"]) - 1)
            )
            for layer, each in (value["rates"] or {}).items()
        },
        embeddings=None if value["embeddings"] is None else _array(value["embeddings"], 2),
    )


def _by_part(value: Mapping[str, Any], read: Callable[[Any], _T]) -> dict[str, _T]:
    return {part: read(value[part]) for part in PARTS if value[part] is not None}


def _binned(kind: Callable[..., _T], value: Mapping[str, Any]) -> _T:
    """Check edges, and what lies between them by the names that a kind of histogram has."""
    edges, *rest = (each.name for each in fields(kind))  # type: ignore[arg-type]
    checked = _edges(value[edges])
    return kind(checked, *(_counts(value[name], 1, len(checked) - 1) for name in rest))


def _edges(value: Any) -> np.ndarray:
    edges = _array(value, 1)
    if len(edges) < 2 or not (np.diff(edges) > 0).all():
        raise ValueError("the edges of its bins do not ascend")
    return edges


def _counts(value: Any, axes: int, width: int | None = None) -> np.ndarray:
    counts = _array(value, axes, width)
    if (counts < 0).any():
        raise ValueError("it counts below zero")
    return counts


def _array(value: Any, axes: int, width: int | None = None) -> np.ndarray:
    array = np.asarray(value, np.float64)
    if array.ndim != axes or (width is not None and array.shape[-1] != width) or not (np.abs(array) < LARGEST).all():
        raise ValueError("its numbers have not the expected shape")
    return array
