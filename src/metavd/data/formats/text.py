"""Your own texts: CSV or JSON lines, with labels or as speeches of which each next character is predicted.

{"text": "great film", "label": "good", "client": "ann"}
{"text": "Speak, speak.", "client": "All"}                      with task=next-character
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..source import Source, SourceError
from ..table import Cells, column_name, flags_of
from ..text import LABEL, NEXT, TASKS, VOCABULARIES, labelled, speeches
from .files import FileError, Plan, choice, plain, read_bytes
from .registry import dataset
from .table import SUFFIXES, need_file, read_anew, read_cells

JSON = (".jsonl", ".ndjson", ".json")
_OPTIONS = {
    "text": "the column with the texts; text if not given",
    "label": "the column with the classes; label if not given",
    "client": "the column that says whose a text is; client if not given and there is one",
    "test": "the column that says train or test; test or split if not given and there is one",
    "task": "label, or next-character: predict each next character of a client's texts, the last fifth for testing",
    "vocabulary": "word, character or byte; word for labels and character for the next character if not given",
    "length": "tokens of a row; 0: 64 words, 80 characters or 256 bytes",
    "stride": "of next-character: every so many characters are a row",
    "least": "rows that a client must have to be there",
    "name": "what the dataset is called; the file's name if not given",
}


@dataset("text", "your own texts: CSV or JSON lines with text, label and client", options=_OPTIONS)
def plan_text(root: Path | str, *, text: str = "", label: str = "", client: str = "", test: str = "",
              task: str = LABEL, vocabulary: str = "", length: int = 0, stride: int = 1, least: int = 1,
              name: str = "") -> Plan:  # fmt: skip
    """Find the file; it is read anew every time, because the vocabulary depends on who trains."""
    path = need_file(root)
    called = name or path.stem
    choice("task", task, TASKS)
    if vocabulary:
        choice("vocabulary", vocabulary, VOCABULARIES)
    for what, value, low in (("length", length, 0), ("stride", stride, 1), ("least", least, 1)):
        if not low <= value <= 1 << 16:
            raise SourceError(f"{what} is {value}, but it must be a whole number from {low} to {1 << 16}.")

    def made(cells: Cells) -> Source:
        texts, who = columns_of(cells, called, text or None, client or None)
        if task == NEXT:
            if label:
                raise SourceError(f"label is {label!r}, but with task={NEXT} the next character is the label.")
            return speeches(texts, who, vocabulary=vocabulary or "character", length=length, stride=stride, name=called)
        classes = column_name(cells, label or None, ("label",), "label", called, needed=True)
        split = column_name(cells, test or None, ("test", "split"), "test", called)
        flags = None if split is None else flags_of(cells[split], split, called)
        labels = cells[str(classes)]
        return labelled(texts, labels, who, vocabulary=vocabulary or "word", length=length, test=flags, name=called)

    return read_anew(called, path, lambda: large_enough(made(read_texts(path)), least))


def large_enough(source: Source, least: int) -> Source:
    """Return the source without clients that have too few rows; the others keep their names."""
    if source.client is None or least <= 1:
        return source
    counts = np.bincount(source.client, minlength=len(source.client_names))
    kept = counts >= least
    if not kept.any():
        raise SourceError(f"{source.name}: no client has {least} rows; the largest has {counts.max()}, lower least.")
    rows = kept[source.client]
    place = np.cumsum(kept) - 1
    names = tuple(name for name, keep in zip(source.client_names, kept, strict=True) if keep)
    return replace(
        source, x=source.x[rows], y=source.y[rows], client=place[source.client[rows]], client_names=names,
        test=None if source.test is None else source.test[rows],
    )  # fmt: skip


def columns_of(
    cells: Cells, name: str, text: str | None = None, client: str | None = None
) -> tuple[list[str], list[str] | None]:
    """Return the texts, and whose they are where a column says so."""
    column = column_name(cells, text, ("text",), "text", name, needed=True)
    owner = column_name(cells, client, ("client",), "client", name)
    texts = [_text(cell, row, str(column), name) for row, cell in enumerate(cells[str(column)])]
    return texts, None if owner is None else [str(each) for each in cells[owner]]


def _text(cell: Any, row: int, column: str, name: str) -> str:
    if not isinstance(cell, str):
        raise SourceError(f"{name}: row {row} of {column!r} is {type(cell).__name__}, but it must be a text.")
    return cell


def read_texts(path: Path) -> Cells:
    """Return the columns of a CSV, TSV, Parquet or JSON-lines file."""
    if path.suffix.lower() not in (*JSON, *SUFFIXES, ".parquet"):
        raise FileError(path, "the name must end in .csv, .tsv, .jsonl or .parquet.")
    return _json_lines(path) if path.suffix.lower() in JSON else read_cells(path)


def _json_lines(path: Path) -> Cells:
    data = read_bytes(path)
    columns: dict[str, list[Any]] = {}
    count = 0
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise FileError(path, f"line {number} is no JSON ({plain(error)}); each line must be one object.") from None
        if not isinstance(row, dict) or (columns and row.keys() != columns.keys()):
            keys = f"the keys {', '.join(columns)} as the first line does" if columns else "an object with a text"
            raise FileError(path, f"line {number} must hold {keys}.")
        for key, value in row.items():
            columns.setdefault(key, []).append(value)
        count += 1
    if not count:
        raise FileError(path, "the file is empty; it must have one JSON object per line.")
    return columns
