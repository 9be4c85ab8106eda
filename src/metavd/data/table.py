"""Tables: columns of numbers and of texts, with gaps, as rows of numbers.

    a number    (value - mean) / standard deviation, 0 where it is missing, and an input more that says so
    a text      one input for each category, and one for rare and unknown ones; a missing one is a category like others

Means, deviations, and which categories have an input are learnt on training rows. What a column is (numbers or texts),
which classes there are and who the clients are is read off the whole table: none of that is a statistic of its rows.

Shape letters: n rows, d columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from .partition import some
from .source import Source, SourceError, named, refuse

LEAST = 5
"""Training rows that a category needs for an input of its own."""
MOST = 100
"""Inputs that a column of categories has at most, the most frequent ones."""
MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
"""Texts that stand for no value, in any case of their letters."""
_SHOWN = 6

Cells = Mapping[str, Sequence[Any]]
"""The columns of a table by name: texts, numbers, or None where there is no value."""


@dataclass(frozen=True)
class StoredColumn:
    """A column as it is stored: its name, and the texts that its numbers stand for; none of a column of numbers."""

    name: str
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Learnt:
    """A column as it was learnt on training rows."""

    name: str
    kept: tuple[str, ...] | None
    """Categories with an input of their own; None of a column of numbers."""
    mean: float = 0.0
    std: float = 1.0
    gaps: bool = False
    """Whether a training row lacks the number, so that an input says where it is missing."""

    @property
    def inputs(self) -> list[str]:
        """The names of its inputs."""
        if self.kept is None:
            return [self.name, f"{self.name} missing"][: 1 + self.gaps]
        return [f"{self.name}={text or 'missing'}" for text in self.kept] + [f"{self.name}=other"]


@dataclass(frozen=True)
class Table:
    """How a table's rows are prepared; without `columns` nothing is learnt yet."""

    stored: tuple[StoredColumn, ...] = ()
    columns: tuple[Learnt, ...] = ()
    left_out: tuple[str, ...] = ()
    """Columns that say nothing: all training rows are alike, or no category is frequent enough."""

    @property
    def learnt(self) -> bool:
        """Whether the columns were learnt."""
        return bool(self.columns)

    @property
    def inputs(self) -> list[str]:
        """The names of the numbers that a network takes."""
        return [name for column in self.columns for name in column.inputs]

    def learn(self, source: Source, rows: np.ndarray) -> Source:
        """Learn every column from training rows, and return the source with all its rows as numbers."""
        found = [_learn(column, source.x[rows, place]) for place, column in enumerate(self.stored)]
        columns = tuple(column for column in found if column is not None)
        left_out = tuple(each.name for each, column in zip(self.stored, found, strict=True) if column is None)
        what = "every column is alike in all training rows, so there is nothing to learn from."
        refuse(not columns, source.name, what)
        places = {column.name: place for place, column in enumerate(self.stored)}
        parts = [
            _inputs(column, _unpacked(self.stored[places[column.name]], source.x[:, places[column.name]]))
            for column in columns
        ]
        return replace(source, x=np.concatenate(parts, 1), prepare=Table((), columns, left_out))

    def rows(self, content: Any) -> np.ndarray:
        """Return the rows of a table of the same columns; others are not looked at."""
        cells = cells_of(content)
        parts = []
        for column in self.columns:
            if column.name not in cells:
                raise SourceError(
                    f"there is no column {column.name!r}, which the model was trained with; the columns are "
                    f"{', '.join(map(str, cells))}."
                )
            values = [_value(each) for each in cells[column.name]]
            held = _numbers(column.name, values) if column.kept is None else np.array(_words(values), object)
            parts.append(_inputs(column, held))
        return np.concatenate(parts, 1)

    def plain(self) -> dict[str, Any]:
        """Return the columns in plain values."""
        return {"kind": "table", "columns": [asdict(column) for column in self.columns], "left_out": self.left_out}

    @staticmethod
    def restored(values: Mapping[str, Any]) -> Table:
        """Return what `plain` wrote."""
        columns = (
            Learnt(**{**each, "kept": None if each["kept"] is None else tuple(each["kept"])})
            for each in values["columns"]
        )
        return Table((), tuple(columns), tuple(values["left_out"]))

    def says(self) -> list[str]:
        """Say how many columns became how many inputs, and what was left out."""
        numbers = [column for column in self.columns if column.kept is None]
        words = [column for column in self.columns if column.kept is not None]
        gaps = sum(column.gaps for column in numbers)
        counted = [
            (len(numbers), "of numbers" + (f" ({gaps} with gaps)" if gaps else "")),
            (len(words), "of categories"),
        ]
        parts = [f"{count} column{'s' * (count != 1)} {what}" for count, what in counted if count]
        verb = "makes" if len(self.columns) == 1 else "make"
        inputs = f"{len(self.inputs)} input{'s' * (len(self.inputs) != 1)}"
        text = f"table: {' and '.join(parts)} {verb} {inputs}, learnt on training rows"
        if self.left_out:
            text += f"; {some(self.left_out, _SHOWN)} left out, since training rows do not tell them apart"
        return [text]


def table(
    content: Any,
    label: str | None = None,
    client: str | None = None,
    *,
    test: str | None = None,
    drop: Sequence[str] = (),
    categories: Sequence[str] = (),
    name: str = "table",
) -> Source:
    """Return a source from a table: a DataFrame, or a mapping of columns.

    Args:
        content: the columns by name; texts, numbers, and None or NaN where there is no value.
        label: the column with the classes; `label`, `target`, `class` or `y` by default.
        client: the column that says whose a row is; `client` by default, where there is one.
        test: the column that says which rows are for testing (train/test, 0/1, true/false); `test` or `split` likewise.
        drop: columns that are not to be used.
        categories: columns of numbers that are names, such as a postal code.
        name: how messages and reports call it.
    """
    cells = cells_of(content)
    rows = len(next(iter(cells.values()), ()))
    refuse(not rows, name, "the table has no rows.")
    label = column_name(cells, label, ("label", "target", "class", "y"), "label", name, needed=True)
    client = column_name(cells, client, ("client",), "client", name)
    test = column_name(cells, test, ("test", "split"), "test", name)
    for column in (*drop, *categories):
        column_name(cells, column, (), "drop or categories", name)
    used = [column for column in cells if column not in {label, client, test, *drop}]
    refuse(not used, name, "beside label and client there is no column to learn from.")
    classes, y = classes_of(cells[str(label)], str(label), name)
    who = None if client is None else _names(cells[client], client, name)
    stored, x = [], np.empty((rows, len(used)), np.float64)
    for place, column in enumerate(used):
        values = [_value(each) for each in cells[column]]
        if column not in categories and all(value is None or _is_number(value) for value in values):
            stored.append(StoredColumn(column))
            x[:, place] = _numbers(column, values)
        else:
            texts, x[:, place] = named(_words(values))
            stored.append(StoredColumn(column, texts))
    known, owner = ((), None) if who is None else named(who)
    return Source(
        name=name, x=x, y=y, num_classes=len(classes), test=None if test is None else flags_of(cells[test], test, name),
        client=owner, mean=(0.0,), std=(1.0,), scale=1.0, augment=False, classes=classes, client_names=known,
        prepare=Table(tuple(stored)),
    )  # fmt: skip


# Columns


def cells_of(content: Any) -> Cells:
    """Return the columns of a DataFrame, a mapping, or a list of rows that are mappings."""
    if isinstance(content, Mapping):
        return {str(key): list(values) for key, values in content.items()}
    if hasattr(content, "columns") and hasattr(content, "__getitem__"):
        return {str(key): np.asarray(content[key], object).tolist() for key in content.columns}
    raise SourceError(f"a table is {type(content).__name__}, but it must be a DataFrame or a mapping of columns.")


def column_name(
    cells: Cells, given: str | None, usual: Sequence[str], what: str, name: str, *, needed: bool = False
) -> str | None:
    """Return the column that is meant, or say which there are."""
    found = given if given is not None else next((column for column in usual if column in cells), None)
    if found is None and not needed:
        return None
    if found is None or found not in cells:
        shown = ", ".join(list(cells)[:12]) + (" ..." if len(cells) > 12 else "")
        asked = f"there is no column {given!r}" if given is not None else f"no column is called {' or '.join(usual)}"
        raise SourceError(f"{name}: {asked}; the columns are {shown}, name one with {what}=COLUMN.")
    return found


def classes_of(values: Sequence[Any], column: str, name: str) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the classes' names and each row's class; every row must have one, and there must be few."""
    words = _names(values, column, name)
    known, y = named(words)
    refuse(len(known) < 2, name, f"every row has label {known[0]!r}, but there must be at least 2 classes.")
    what = f"the column {column!r} has {len(known)} different values in {len(words)} rows, which are no classes"
    refuse(len(known) > max(2, len(words) // 2), name, f"{what}; name another with label=COLUMN.")
    return known, y


def flags_of(values: Sequence[Any], column: str, name: str) -> np.ndarray:
    """Return which rows are for testing."""
    words = {"train": False, "test": True, "0": False, "1": True, "false": False, "true": True}
    flags = []
    for row, value in enumerate(values):
        word = _word(value).lower()
        if word not in words:
            raise SourceError(f"{name}: row {row} of {column!r} is {word!r}, but it must be train or test, or 0 or 1.")
        flags.append(words[word])
    refuse(all(flags), name, "every row is a test row, but some must be left to train on.")
    return np.array(flags)


def _names(values: Sequence[Any], column: str, name: str) -> list[str]:
    words = [words_of(value) for value in values]
    row = words.index("") if "" in words else None
    refuse(row is not None, name, f"row {row} has no value in the column {column!r}, but every row needs one.")
    return words


def _value(cell: Any) -> Any:
    """Return a cell as a text or a number, None where it has no value."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return None
    if isinstance(cell, str):
        return None if cell.strip().lower() in MISSING else cell.strip()
    return cell.item() if isinstance(cell, np.generic) else cell


def described(cells: Cells) -> list[str]:
    """Say of every column what it holds: the range of numbers, or how many different texts, and what is missing."""
    said = []
    for name, column in cells.items():
        values = [_value(cell) for cell in column]
        known = [value for value in values if value is not None]
        gaps = f", {len(values) - len(known)} missing" if len(known) < len(values) else ""
        if known and all(map(_is_number, known)):
            low, high = min(map(float, known)), max(map(float, known))
            said.append(f"{name} ({low:g} to {high:g}{gaps})")
        else:
            said.append(f"{name} ({len(set(map(str, known)))} different texts{gaps})")
    return said


def _is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return "_" not in value
    return isinstance(value, int | float)


def _numbers(column: str, values: Sequence[Any]) -> np.ndarray:
    """(n,) numbers, NaN where there is none."""
    for row, value in enumerate(values):
        if value is not None and not (_is_number(value) and math.isfinite(float(value))):
            raise SourceError(
                f"row {row} of the column {column!r} is {str(value)[:40]!r}, but it must be a finite number."
            )
    return np.array([math.nan if value is None else float(value) for value in values])


def _word(value: Any) -> str:
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, float) and value == int(value) else str(value)


def _words(values: Sequence[Any]) -> list[str]:
    return [_word(value) for value in values]


def words_of(cell: Any) -> str:
    """Return a cell as a class or a client is named by it."""
    return _word(_value(cell))


def _unpacked(column: StoredColumn, values: np.ndarray) -> np.ndarray:
    """Return stored numbers as they are, or as the texts that they stand for."""
    return np.array(column.texts, object)[values.astype(np.int64)] if column.texts else values


# Learning


def _learn(column: StoredColumn, values: np.ndarray) -> Learnt | None:
    """Return what training rows say of a column; None where they are all alike."""
    if not column.texts:
        known = values[~np.isnan(values)]
        gaps = len(known) < len(values)
        std = float(known.std()) if len(known) else 0.0
        if std == 0.0 and (not gaps or not len(known)):
            return None
        return Learnt(column.name, None, float(known.mean()), std or 1.0, gaps)
    counts = np.bincount(values.astype(np.int64), minlength=len(column.texts))
    frequent = [int(code) for code in np.argsort(-counts, kind="stable")[:MOST] if counts[code] >= LEAST]
    if not frequent or counts[frequent[0]] == len(values):
        return None
    return Learnt(column.name, tuple(column.texts[code] for code in sorted(frequent)))


def _inputs(column: Learnt, values: np.ndarray) -> np.ndarray:
    """(n,) values of a column -> (n, inputs) numbers."""
    if column.kept is None:
        missing = np.isnan(values)
        scaled = np.where(missing, 0.0, (values - column.mean) / column.std)
        return np.stack([scaled, missing][: 1 + column.gaps], 1).astype(np.float32)
    hits = np.stack([values == text for text in column.kept], 1)
    return np.concatenate([hits, ~hits.any(1, keepdims=True)], 1).astype(np.float32)
