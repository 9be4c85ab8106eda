"""The paper's 17 result tables as data: every number, what is doubtful about it, and the run that gives ours.

The numbers stand in `tables.toml`. A cell is a row and a column of a table; it holds one or more figures (test and
unseen accuracy and their gap, say), which all come from one run. Its settings are what `metavd.run` takes, so two
cells with equal settings share a run, in whatever tables they stand.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from ... import methods
from ...errors import SpecError
from ...evaluate.figures import GAP, SPARSITY, Column
from ...evaluate.figures import get as _get
from ...schema import nearest

_MNIST = re.compile("(?<!fe)mnist")

MEASURES: dict[str, Column] = {
    "test": _get("accuracy").column("test", heading="test"),
    "unseen": _get("accuracy").column("unseen", heading="unseen"),
    "gap": GAP,
    "ece": _get("ece_flat").column("unseen")._replace(title="ECE %"),
    "mce": _get("mce_flat").column("unseen")._replace(title="MCE %"),
    "sparsity": SPARSITY,
    "classes": Column("classes per client", ("classes", "mean")),
}
"""What the paper's figures measure, and where ours stand in a result. Accuracy is the clients' mean weighted by their
training rows, the gap unseen less test; calibration is over all class probabilities in ten bins, on unseen clients;
sparsity is of the layer that is pruned or dropped."""


@dataclass(frozen=True)
class PaperFigure:
    """One number of the paper."""

    name: str
    """Of `MEASURES`."""
    value: float
    """nan in a table that is not the paper's."""
    sd: float | None
    """Over clients, where the paper gives it."""
    mark: str
    """Why the number is doubtful; empty if nothing is known against it."""


@dataclass(frozen=True, eq=False)
class Cell:
    """A row and a column of a table."""

    table: str
    row: str
    column: str
    figures: tuple[PaperFigure, ...]
    settings: Mapping[str, Any]
    """Fields of the experiment and options of the method, all but the seed. A cell without a method needs no training:
    its figure is a property of the partition."""

    @property
    def name(self) -> str:
        """For messages: "T8 FedAvg 0.5"."""
        return f"{self.table} {self.row} {self.column}"


@dataclass(frozen=True, eq=False)
class PaperTable:
    """One table of the paper."""

    name: str
    title: str
    place: str
    figures: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    notes: tuple[str, ...]
    """What is doubtful about the table as a whole."""
    doubts: Mapping[str, tuple[str, ...]]
    """What is doubtful about a row, by its label."""
    cells: tuple[Cell, ...]
    """Column by column."""
    alone: bool = False
    """Whether there are no numbers of the paper to set beside ours."""
    stands_for: str = ""
    """The paper's table whose runs these are on other data."""


@cache
def _content() -> dict[str, Any]:
    return tomllib.loads((resources.files(__package__) / "tables.toml").read_text(encoding="utf-8"))


@cache
def tables() -> dict[str, PaperTable]:
    """Return all tables by name, T1 to T17.

    >>> tables()["T8"].cells[0].figures[0]
    PaperFigure(name='test', value=80.73, sd=None, mark='')
    """
    shared = ("common", "data", "names", "options", "doubts")
    return {name: _table(name, values) for name, values in _content().items() if name not in shared and name[0] == "T"}


@cache
def extras() -> dict[str, PaperTable]:
    """Return tables that are not the paper's: A1, A2 and so on, our own, and M4 for T4, see `_on_mnist`.

    >>> list(extras()), extras()["M5"].columns
    (['A1', 'A2', 'A3', 'A4', 'M4', 'M5', 'M10', 'M14', 'M15'], ('b', 'c', 'd'))
    """
    own = {name: replace(_table(name, values), alone=True) for name, values in _content().items() if name[0] == "A"}
    stand_ins = {f"M{name[1:]}": name for name, table in tables().items()
                 if any("femnist" in cell.settings["data"] for cell in table.cells)}  # fmt: skip
    return own | {name: _on_mnist(name, instead) for name, instead in stand_ins.items()}


def _on_mnist(name: str, instead: str) -> PaperTable:
    """Return a table of FEMNIST with MNIST by writer in its place: the same runs, and none of the paper's numbers."""
    values = _content()[instead]
    shared, title = values.get("settings", {}), values["title"]
    kept = [column for column in values["columns"] if "femnist" in column.get("data", shared.get("data", ""))]
    no_number = [math.nan] * len(values["figures"])
    changed = values | {
        "title": title.replace("FEMNIST", "MNIST by writer") if "FEMNIST" in title else f"{title}, MNIST for FEMNIST",
        "place": f"in place of {instead}",
        "settings": _by_writer(shared),
        "columns": [_by_writer(column) for column in kept],
        "rows": {row: [no_number] * len(kept) for row in values["rows"]},
        "marks": (),
        "notes": [
            "FEMNIST could not be had; these are the same runs on digits of MNIST by writer, 10 classes in place of "
            "62, so that their numbers cannot be set beside the paper's"
        ],
    }
    return replace(_table(name, changed), alone=True, stands_for=instead)


def _by_writer(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings or a column with MNIST in place of FEMNIST."""
    return {
        key: value.replace("femnist", "mnist") if isinstance(value, str) else value for key, value in settings.items()
    }


def get(name: str) -> PaperTable:
    """Return the table of a name, or say which there are."""
    every = tables() | extras()
    known = {table.lower(): table for table in every}
    if str(name).lower() not in known:
        raise SpecError(f"the paper has no table {name!r}; choose from {', '.join(every)}")
    return every[known[str(name).lower()]]


Labels = Sequence[str] | None
"""Rows or columns that are asked for; None: all."""


def cells(name: str, rows: Labels = None, columns: Labels = None) -> list[Cell]:
    """Return the cells of a table, all or those of some rows and columns, named as the table names them."""
    wanted = within([name], rows, columns)[get(name).name]
    return [cell for cell in get(name).cells if cell.row in wanted[0] and cell.column in wanted[1]]


def within(names: Sequence[str], rows: Labels = None, columns: Labels = None) -> dict[str, tuple[list[str], list[str]]]:
    """Return the rows and columns that are meant of each table: those that it has of what is asked of all of them.

    A word that no table knows is refused, and a table of which nothing is meant is left out.
    """
    tables = [get(name) for name in names]
    by_row = _spelled(tables, "row", [table.rows for table in tables], rows)
    by_column = _spelled(tables, "column", [table.columns for table in tables], columns)
    found = {
        table.name: (of_rows, of_columns)
        for table, of_rows, of_columns in zip(tables, by_row, by_column, strict=True)
        if of_rows and of_columns
    }
    if not found:
        asked = " in a column of ".join(", ".join(words or ["any"]) for words in (rows, columns))
        raise SpecError(f"{_told(tables)} no row of {asked}; 'metavd paper list {names[0]}' shows what a table has")
    return found


def _spelled(
    tables: Sequence[PaperTable], what: str, labels: Sequence[Sequence[str]], asked: Labels
) -> list[list[str]]:
    """Return which labels of each table are asked for, as the table spells them."""
    everything = list(dict.fromkeys(label for some in labels for label in some))
    known = {label.lower() for label in everything}
    for word in asked or ():
        if word.lower() not in known:
            raise SpecError(f"{_told(tables)} no {what} {word!r}; {nearest(word, everything)}")
    words = None if asked is None else {word.lower() for word in asked}
    return [[label for label in some if words is None or label.lower() in words] for some in labels]


def _told(tables: Sequence[PaperTable]) -> str:
    names = [table.name for table in tables]
    return f"table {names[0]} has" if len(names) == 1 else f"tables {', '.join(names)} have"


def _table(name: str, values: Mapping[str, Any]) -> PaperTable:
    marks = {(mark["row"], mark["column"], mark["figure"]): mark["reason"] for mark in values.get("marks", ())}

    def figures(row: str, column: str, numbers: Sequence[Any]) -> Iterator[PaperFigure]:
        for figure, number in zip(values["figures"], numbers, strict=True):
            value, sd = number if isinstance(number, list) else (number, None)
            yield PaperFigure(figure, value, sd, marks.get((row, column, figure), ""))

    made = []
    for index, column in enumerate(values["columns"]):
        for row, groups in values["rows"].items():
            numbers = groups[index]
            settings = _trained(values, column, row) if values.get("trained", True) else _dealt(column, row)
            made.append(
                Cell(name, row, column["label"], tuple(figures(row, column["label"], numbers)), settings),
            )
    return PaperTable(
        name=name,
        title=values["title"],
        place=values["place"],
        figures=tuple(values["figures"]),
        rows=tuple(values["rows"]),
        columns=tuple(column["label"] for column in values["columns"]),
        notes=tuple(values.get("notes", ())),
        doubts={row: _doubts(row) for row in values["rows"]},
        cells=tuple(made),
    )


def _trained(values: Mapping[str, Any], column: Mapping[str, Any], row: str) -> dict[str, Any]:
    """Settings of a run."""
    content, method = _content(), "+".join(_parts(row))
    own = dict(values.get("settings", {})) | {key: value for key, value in column.items() if key != "label"}
    known = methods.options_of(method)
    options: dict[str, Any] = {}
    for source in (content["options"], values.get("options", {})):
        for part in ("all", *method.split("+")):
            options |= {key: value for key, value in source.get(part, {}).items() if key in known}
    dealt = content["data"][_MNIST.sub("femnist", own["data"])]
    return {"method": method, **content["common"], **dealt, **own, **options}


def _dealt(column: Mapping[str, Any], row: str) -> dict[str, Any]:
    """Settings of a partition, where there is nothing to train."""
    data = row.lower().replace("-", "")
    who = {key: value for key, value in _content()["data"][data].items() if key in {"clients", "unseen"}}
    return {"data": data, "partition": column["partition"], **who}


def _parts(row: str) -> list[str]:
    """Return the parts of the method in a row's label, which is its name but for capitals and the paper's own words."""
    names = _content()["names"]
    return [names.get(part, part) for part in row.lower().split("+")]


def _doubts(row: str) -> tuple[str, ...]:
    parts = set(_parts(row))
    return tuple(text for key, text in _content()["doubts"].items() if set(key.split("+")) <= parts)
