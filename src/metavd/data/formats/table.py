"""Your own table: CSV with a line of names, or Parquet.

    age,city,diagnosis,hospital
    63,Leeds,benign,north
    ,York,malignant,south

What a cell without a value looks like, and how columns become numbers, is said in `data.table`. pyarrow is imported for
Parquet alone.
"""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..source import Source, SourceError
from ..table import Cells, table
from .files import FileError, Plan, plain, read_text
from .registry import dataset

SUFFIXES = {".csv": ",", ".tsv": "\t"}
_COLUMNS = {
    "label": "the column with the classes; label, target, class or y if not given",
    "client": "the column that says whose a row is; client if not given and there is one",
    "test": "the column that says train or test; test or split if not given and there is one",
    "drop": "columns that are not used, commas between",
    "categories": "columns of numbers that are names, such as a postal code, commas between",
    "name": "what the dataset is called; the file's name if not given",
}


@dataset("table", "your own table: a CSV or Parquet file with columns for label and client", options=_COLUMNS)
def plan_table(root: Path | str, *, label: str = "", client: str = "", test: str = "", drop: str = "",
               categories: str = "", name: str = "") -> Plan:  # fmt: skip
    """Find the file; it is read anew every time, because what is learnt of it depends on who trains."""
    path = need_file(root)
    called = name or path.stem

    def made() -> Source:
        return table(
            read_cells(path), label or None, client or None, test=test or None, drop=listed(drop),
            categories=listed(categories), name=called,
        )  # fmt: skip

    return read_anew(called, path, made)


def read_anew(name: str, path: Path, made: Callable[[], Source]) -> Plan:
    """Plan a file of which no copy is kept; every fault names the file, in place of the dataset."""

    def read(_: Any) -> Source:
        try:
            return made()
        except FileError:
            raise
        except SourceError as error:
            raise FileError(path, str(error).removeprefix(f"{name}: ")) from None

    return Plan(name, path, (path,), read, keep=False)


def listed(text: str) -> list[str]:
    """Split a list of columns."""
    return [word.strip() for word in text.split(",") if word.strip()]


def need_file(root: Path | str) -> Path:
    """Return the path of a file, or say that there is none."""
    path = Path(root).expanduser()
    if not path.exists():
        raise SourceError(f"{path}: there is no such file; name the one that holds the rows.")
    if path.is_dir():
        raise SourceError(f"{path}: this is a folder, but one file with all rows is needed.")
    return path


def read_cells(path: Path) -> Cells:
    """Return the columns of a CSV, TSV or Parquet file."""
    if path.suffix.lower() == ".parquet":
        return _parquet(path)
    if path.suffix.lower() not in SUFFIXES:
        raise FileError(path, "the name must end in .csv, .tsv or .parquet.")
    return _csv(path, SUFFIXES[path.suffix.lower()])


def _csv(path: Path, delimiter: str) -> Mapping[str, list[str]]:
    text = read_text(path, "utf-8-sig")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    lines: list[list[str]] = []
    try:
        for line in reader:
            if line:
                lines.append(line)
                if len(line) != len(lines[0]):
                    what = f"line {reader.line_num} has {len(line)} cells, but the first line names {len(lines[0])}"
                    raise FileError(path, f"{what} columns.")
    except csv.Error as error:
        raise FileError(path, f"line {reader.line_num} is no CSV ({plain(error)}).") from None
    if len(lines) < 2:
        what = "the file is empty" if not lines else "the file names columns, but has no row"
        raise FileError(path, f"{what}; it must have a line of names and one for each row.")
    names = [name.strip() for name in lines[0]]
    if len(set(names)) < len(names) or "" in names:
        raise FileError(path, "the first line must name every column, each with a name of its own.")
    return dict(zip(names, (list(column) for column in zip(*lines[1:], strict=True)), strict=True))


def _parquet(path: Path) -> Cells:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise SourceError(
            "a .parquet file needs the package pyarrow; install it with pip install 'metavd[parquet]'."
        ) from None
    try:
        found: Cells = parquet.read_table(path).to_pydict()
    except Exception as error:  # pyarrow raises kinds of its own
        raise FileError(path, f"this is no readable Parquet file ({plain(error)}).") from None
    return found
