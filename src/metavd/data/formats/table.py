"""Your own rows in one file: CSV or TSV with a line of names, JSON lines, or Parquet.

    age,city,diagnosis,hospital                                      {"text": "great film", "label": "good"}
    63,Leeds,benign,north
    ,York,malignant,south

What a cell without a value looks like, and how columns become numbers, is said in `data.table`. pyarrow is imported for
Parquet alone.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...extras import need
from ..source import Source, SourceError
from ..table import Cells, table
from .files import FileError, Unread, plain, read_bytes, read_text, reading, refuse
from .registry import dataset

JSON = (".jsonl", ".ndjson", ".json")
SUFFIXES = (".csv", ".tsv", ".parquet", *JSON)
CLIENT = "the column that says whose a row is; client if not given and there is one"
TEST = "the column that says train or test; test or split if not given and there is one"
NAME = "what the dataset is called; the file's name if not given"


@dataset(
    "table",
    "your own table: a CSV or Parquet file with columns for label and client",
    options={
        "label": "the column with the classes; label, target, class or y if not given",
        "client": CLIENT,
        "test": TEST,
        "drop": "columns that are not used, commas between",
        "categories": "columns of numbers that are names, such as a postal code, commas between",
        "name": NAME,
    },
)
def find_table(root: Path | str, *, label: str = "", client: str = "", test: str = "", drop: str = "",
               categories: str = "", name: str = "") -> Unread:  # fmt: skip
    """Find the file; it is read anew every time, because what is learnt of it depends on who trains."""
    without, words = ([word.strip() for word in text.split(",") if word.strip()] for text in (drop, categories))

    def made(cells: Cells, called: str) -> Source:
        return table(
            cells, label or None, client or None, test=test or None, drop=without, categories=words, name=called
        )

    return read_anew(root, name, made)


def read_anew(root: Path | str, name: str, made: Callable[[Cells, str], Source]) -> Unread:
    """Return what is to be read of a file, without a copy of it; every fault names the file, not the dataset."""
    path = need_file(root)
    called = name or path.stem

    def read(_: Any) -> Source:
        try:
            return made(read_cells(path), called)
        except FileError:
            raise
        except SourceError as error:
            raise FileError(path, str(error).removeprefix(f"{called}: ")) from None

    return Unread(called, path, (path,), read, keep=False)


def need_file(root: Path | str) -> Path:
    """Return the path of a file, or say that there is none."""
    path = Path(root).expanduser()
    if not path.exists():
        raise SourceError(f"{path}: there is no such file; name the one that holds the rows.")
    if path.is_dir():
        raise SourceError(f"{path}: this is a folder, but one file with all rows is needed.")
    return path


def read_cells(path: Path) -> Cells:
    """Return the columns of a CSV, TSV, JSON-lines or Parquet file."""
    suffix = path.suffix.lower()
    refuse(suffix not in SUFFIXES, path, "the name must end in .csv, .tsv, .jsonl or .parquet.")
    if suffix == ".parquet":
        return _parquet(path)
    return _json_lines(path) if suffix in JSON else _csv(path, "," if suffix == ".csv" else "\t")


def _csv(path: Path, delimiter: str) -> Cells:
    reader = csv.reader(io.StringIO(read_text(path, "utf-8-sig"), newline=""), delimiter=delimiter, strict=True)
    lines: list[list[str]] = []
    try:
        for line in filter(None, reader):
            lines.append(line)
            if len(line) != len(lines[0]):
                what = f"line {reader.line_num} has {len(line)} cells, but the first line names {len(lines[0])}"
                raise FileError(path, f"{what} columns.")
    except csv.Error as error:
        raise FileError(path, f"line {reader.line_num} is no CSV ({plain(error)}).") from None
    refuse(not lines, path, "the file is empty; it must have a line of names and one for each row.")
    refuse(len(lines) < 2, path, "the file names columns, but has no row; it must have a line for each.")
    names = [name.strip() for name in lines[0]]
    odd = len(set(names)) < len(names) or "" in names
    refuse(odd, path, "the first line must name every column, each with a name of its own.")
    return dict(zip(names, (list(column) for column in zip(*lines[1:], strict=True)), strict=True))


def _json_lines(path: Path) -> Cells:
    columns: dict[str, list[Any]] = {}
    for number, line in enumerate(read_bytes(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise FileError(path, f"line {number} is no JSON ({plain(error)}); each line must be one object.") from None
        if not isinstance(row, dict) or not row or (columns and row.keys() != columns.keys()):
            keys = f"the keys {', '.join(columns)} as the first line does" if columns else "an object with a text"
            raise FileError(path, f"line {number} must hold {keys}.")
        for key, value in row.items():
            columns.setdefault(key, []).append(value)
    refuse(not columns, path, "the file is empty; it must have one JSON object per line.")
    return columns


def _parquet(path: Path) -> Cells:
    parquet = need("pyarrow.parquet", "parquet", "a .parquet file", SourceError)
    with reading(path):
        found: Cells = parquet.read_table(path).to_pydict()
    return found
