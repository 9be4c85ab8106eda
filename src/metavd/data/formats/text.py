"""Your own texts: CSV or JSON lines, with labels or as speeches of which each next character is predicted.

{"text": "great film", "label": "good", "client": "ann"}
{"text": "Speak, speak.", "client": "All"}                      with task=next-character
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ..source import Source, SourceError
from ..table import Cells, column_name, flags_of
from ..text import LABEL, NEXT, TASKS, VOCABULARIES, labelled, speeches
from .files import Unread, choice
from .registry import dataset
from .table import CLIENT, NAME, TEST, read_anew


@dataset(
    "text",
    "your own texts: CSV or JSON lines with text, label and client",
    options={
        "text": "the column with the texts; text if not given",
        "label": "the column with the classes; label if not given",
        "client": CLIENT.replace("a row", "a text"),
        "test": TEST,
        "task": "label, or next-character: predict each next character of a client's texts, the last fifth for testing",
        "vocabulary": "word, character or byte; word for labels and character for the next character if not given",
        "length": "tokens of a row; 0: 64 words, 80 characters or 256 bytes",
        "stride": "of next-character: every so many characters are a row",
        "least": "rows that a client must have to be there",
        "name": NAME,
    },
)
def find_text(root: Path | str, *, text: str = "", label: str = "", client: str = "", test: str = "",
              task: str = LABEL, vocabulary: str = "", length: int = 0, stride: int = 1, least: int = 1,
              name: str = "") -> Unread:  # fmt: skip
    """Find the file; it is read anew every time, because the vocabulary depends on who trains."""
    choice("task", task, TASKS)
    if vocabulary:
        choice("vocabulary", vocabulary, VOCABULARIES)
    for what, value, low in (("length", length, 0), ("stride", stride, 1), ("least", least, 1)):
        if not low <= value <= 1 << 16:
            raise SourceError(f"{what} is {value}, but it must be a whole number from {low} to {1 << 16}.")

    def made(cells: Cells, called: str) -> Source:
        texts, who = columns_of(cells, called, text or None, client or None)
        if task == NEXT and label:
            raise SourceError(f"label is {label!r}, but with task={NEXT} the next character is the label.")
        if task == NEXT:
            return speeches(texts, who, vocabulary=vocabulary or "character", length=length, stride=stride, name=called)
        classes = column_name(cells, label or None, ("label",), "label", called, needed=True)
        split = column_name(cells, test or None, ("test", "split"), "test", called)
        flags = None if split is None else flags_of(cells[split], split, called)
        labels = cells[str(classes)]
        return labelled(texts, labels, who, vocabulary=vocabulary or "word", length=length, test=flags, name=called)

    return read_anew(root, name, lambda cells, called: large_enough(made(cells, called), least))


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
    column = str(column_name(cells, text, ("text",), "text", name, needed=True))
    owner = column_name(cells, client, ("client",), "client", name)
    for row, cell in enumerate(cells[column]):
        if not isinstance(cell, str):
            what = f"row {row} of {column!r} is {type(cell).__name__}, but it must be a text."
            raise SourceError(f"{name}: {what}")
    return list(cells[column]), None if owner is None else [str(each) for each in cells[owner]]
