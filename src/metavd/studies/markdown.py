"""Pages in Markdown: their tables, and how they become files."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from ..container import write_atomic
from ..errors import UserError


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]], text: Collection[int] = (0,)) -> list[str]:
    """Return the lines of a table; columns of `text` are words, on the left, the others numbers, on the right.

    >>> markdown_table(["method", "", "MB"], [["fedavg", "", "1.3"]])
    ['| method | | MB |', '|---|---:|---:|', '| fedavg |  | 1.3 |']
    """
    head = "|" + "".join(f" {each} |" if each else " |" for each in heads)
    sides = "|" + "".join("---|" if place in text else "---:|" for place in range(len(heads)))
    return [head, sides, *(f"| {' | '.join(row)} |" for row in rows)]


def write(path: str | Path, page: str) -> None:
    """Write a page, whole or not at all; its folder is made."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(path), page.encode())
    except OSError as error:
        raise UserError(f"cannot write the page {path}: {error.strerror}") from None
