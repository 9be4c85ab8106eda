"""What a path holds: which dataset, how many rows, classes and clients, which values, and what is wrong and where."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..source import Source, SourceError
from ..table import Cells, described
from . import cifar, npz
from .files import MAX_FILE, FileError, Plan, need_folder, open_stream, read_bytes
from .idx import read_idx
from .images import SUFFIXES, open_picture
from .leaf import read_shard
from .registry import FORMATS, OWN, Info
from .table import SUFFIXES as TABLES
from .text import JSON, read_texts

_COLUMNS = 20
"""Columns of a table that are described."""
MAX_PROBLEMS = 20
"""How many are written out; all are counted."""


@dataclass(frozen=True)
class Finding:
    """One dataset, or one of its files, that could be read."""

    name: str
    """The format's name in `FORMATS`, or what kind of file it is."""
    place: Path
    rows: int
    classes: int | None
    """How many occur."""
    clients: int | None
    test_rows: int | None
    shape: tuple[int, ...]
    """Of one row."""
    dtype: str
    low: float
    high: float
    smallest_class: int | None = None
    largest_class: int | None = None
    means: tuple[float, ...] = ()
    """Per channel, scaled as the network sees it before normalising."""

    text: str = ""
    """What else there is to say, in place of values' ranges: of a table, whose cells are of many kinds."""

    def __str__(self) -> str:
        if self.text:
            return f"{self.name} at {self.place}: {self.text}."
        words = [f"{self.name} at {self.place}: {self.rows:,} rows of {self.dtype} "
                 f"{' x '.join(str(length) for length in self.shape) or 'numbers'}"]  # fmt: skip
        if self.test_rows is not None:
            words.append(f"{self.test_rows:,} of them test rows")
        if self.classes is not None:
            words.append(f"{self.classes} classes of {self.smallest_class:,} to {self.largest_class:,} rows")
        words.append("no clients of their own" if self.clients is None else f"{self.clients:,} clients")
        words.append(f"values {self.low:g} to {self.high:g}")
        if self.means:
            words.append(f"channel means {', '.join(f'{mean:.4f}' for mean in self.means)}")
        return "; ".join(words) + "."


@dataclass
class Report:
    """What `check` found."""

    path: Path
    findings: list[Finding] = field(default_factory=list)
    problems: list[SourceError] = field(default_factory=list)
    """A `FileError` among them knows its path and its byte."""
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether something was found and nothing is wrong with it."""
        return bool(self.findings) and not self.problems

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings]
        lines += [f"wrong: {problem}" for problem in self.problems[:MAX_PROBLEMS]]
        if len(self.problems) > MAX_PROBLEMS:
            lines.append(f"wrong: and {len(self.problems) - MAX_PROBLEMS} more faults.")
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def check(path: Path | str) -> Report:
    """Say what a file or a folder holds. Everything is read, and reading goes on after a fault."""
    path = Path(path)
    report = Report(path)
    try:
        need_folder(path)
        (_check_folder if path.is_dir() else _check_file)(path, report)
    except SourceError as error:
        report.problems.append(error)
    return report


def _finding(
    name: str, place: Path, x: np.ndarray, y: np.ndarray | None, *, means: tuple[float, ...] = (),
    clients: int | None = None, test_rows: int | None = None, like: str | None = None,
) -> Finding:  # fmt: skip
    """Return the numbers of rows and labels; `like` is the type where x is none but a stand-in."""
    counts = None if y is None else np.unique(y, return_counts=True)[1]
    return Finding(
        name, place, len(x), None if counts is None else len(counts), clients, test_rows, x.shape[1:],
        like or str(x.dtype), 0 if like else float(x.min()), 255 if like else float(x.max()),
        None if counts is None else int(counts.min(initial=len(x))),
        None if counts is None else int(counts.max(initial=0)), means,
    )  # fmt: skip


# A folder


def _check_folder(root: Path, report: Report) -> None:
    plans = _plans(root, report)
    for info, plan in plans:
        _read(info.name, plan, report)
    if not plans and not report.problems:
        _read("folder", FORMATS["folder"].plan(root), report)


def _plans(root: Path, report: Report) -> list[tuple[Info, Plan]]:
    """Return every dataset that root holds by the names of its files; one that is incomplete is a problem."""
    found: list[tuple[Info, Plan]] = []
    taken: set[Path] = set()
    for name in FORMATS:
        if name in OWN:
            continue
        try:
            info = FORMATS[name]
            plan = _plan(info, root)
        except FileError as error:
            report.problems.append(error)
        except SourceError as error:  # of a package that cannot be imported
            report.notes.append(str(error))
        else:
            if plan is not None and plan.files[0] not in taken:  # MNIST's and Fashion-MNIST's files have the same names
                taken.update(plan.files)
                found.append((info, plan))
    others = [path for path in sorted(root.glob("*.npz")) if path not in taken]
    return [*found, *((FORMATS["npz"], FORMATS["npz"].plan(path)) for path in others)]


def _plan(info: Info, root: Path) -> Plan | None:
    """Return a dataset under the first of its variants that is here."""
    for options in info.variants if info.files else ():
        try:
            return info.plan(root, **options)
        except FileError:
            raise
        except SourceError:
            continue
    return None


def _read(name: str, plan: Plan, report: Report) -> None:
    try:
        data = plan.read(report.problems.append)
    except SourceError as error:
        report.problems.append(error)
        return
    except MemoryError:
        report.problems.append(SourceError(f"{plan.place}: the dataset does not fit into memory."))
        return
    if data is not None:
        report.findings.append(describe(name, plan.place, data))
        report.notes.extend(f"{plan.place}: {note}" for note in _notes(plan, data))


def describe(name: str, place: Path, data: Source) -> Finding:
    """Return a loaded dataset's numbers."""
    people = None if data.client is None else len(np.unique(data.client))
    tested = None if data.test is None else int(data.test.sum())
    if data.x.dtype.kind == "S":
        return _finding(name, place, data.x, data.y, clients=people, test_rows=tested, like="text")
    axes = (0, *range(2, data.x.ndim))
    # Row by row blocks: a float64 copy of the whole may not fit.
    blocks = np.array_split(np.arange(len(data.x)), max(1, data.x.nbytes // (64 << 20)))
    sums = sum((data.x[block[0] : block[-1] + 1].sum(axes, dtype=np.float64) for block in blocks), np.zeros(1))
    means = np.asarray(sums) / (len(data.x) * int(np.prod(data.x.shape[2:]))) * data.scale
    return _finding(
        name, place, data.x, data.y,
        means=tuple(float(mean) for mean in means) if data.x.ndim == 4 else (), clients=people, test_rows=tested,
    )  # fmt: skip


def _notes(plan: Plan, data: Source) -> list[str]:
    """Return what is no fault but good to know."""
    notes = []
    single = 0 if data.client is None else int((np.unique(data.client, return_counts=True)[1] == 1).sum())
    if single:
        notes.append(f"{single} clients have one row only, too few to train and to test on.")
    missing = data.num_classes - len(np.unique(data.y))
    if missing:
        notes.append(f"{missing} of {data.num_classes} classes have no row.")
    gap = _gap(plan.files)
    if gap:
        notes.append(f"{gap} is missing between the numbers of the other files.")
    known = {key for keys in npz.KEYS.values() for key in keys}
    other = sorted(set(npz.keys(plan.place)) - known) if plan.place.suffix == ".npz" else []
    if other:
        notes.append(f"{', '.join(other[:8])} in it is not read.")
    return notes


def _gap(files: tuple[Path, ...]) -> str | None:
    """Return a name that LEAF's numbering of its shards leaves out; nothing else would show that one is missing."""
    found = [match for path in files if (match := re.fullmatch(r"(all_data_)(\d{1,6})(.*\.json)", path.name))]
    numbers = {int(match[2]) for match in found}
    lost = next((number for number in range(max(numbers, default=0)) if number not in numbers), None)
    return None if lost is None else f"{found[-1][1]}{lost}{found[-1][3]}"


# A single file


def _check_file(path: Path, report: Report) -> None:
    layout = cifar.layout_of(path)
    with open_stream(path, MAX_FILE) as stream:
        head = stream.read(2)
    if layout is not None:
        batch = cifar.parse(path, read_bytes(path, cifar.MAX_BATCH), layout)
        report.findings.append(_finding(f"a file of {layout.name}", path, batch.x, batch.y))
    elif path.name.endswith((".tar.gz", ".tar", ".tgz", ".zip")):
        _check_archive(path, report)
    elif path.suffix == ".npz":
        _read("npz", FORMATS["npz"].plan(path), report)
    elif path.suffix == ".json":
        users = read_shard(path)
        labels = np.concatenate([np.empty(0, np.int64), *(user.y for user in users)])
        kinds = "/".join(sorted({user.kind for user in users}))
        report.findings.append(_finding("a LEAF shard", path, labels, labels, clients=len(users), like=kinds))
    elif path.suffix.lower() in (*TABLES, ".parquet", *JSON):
        report.findings.append(_table(path, read_texts(path)))
    elif path.suffix.lower() in SUFFIXES:
        report.findings.append(_finding("a picture", path, np.asarray(open_picture(path))[None], None))
    elif "idx" in path.name or head == b"\0\0":
        values = read_idx(path)
        report.findings.append(_finding("an idx file", path, values, values if values.ndim == 1 else None))
    else:
        report.problems.append(FileError(path, "this is no file of a known format.", 0))


def _table(path: Path, cells: Cells) -> Finding:
    """Describe a table by its columns, and say how a run takes it."""
    rows, columns = len(next(iter(cells.values()))), described(cells)
    more = f" and {len(columns) - _COLUMNS} more" if len(columns) > _COLUMNS else ""
    text = f"{rows:,} rows; columns {', '.join(columns[:_COLUMNS])}{more}"
    if path.suffix.lower() in JSON or "text" in cells:
        how = f"--data text:{path}"
    else:
        how = f"--data table:{path} --set label=COLUMN client=COLUMN"
    return Finding(
        "a table", path, rows, None, None, None, (len(columns),), "cells", 0, 0, text=f"{text}; for a run, {how}"
    )


def _check_archive(path: Path, report: Report) -> None:
    for name in FORMATS:
        if name.startswith(("cifar", "emnist")):
            try:
                plan = _plan(FORMATS[name], path)
            except FileError:
                continue  # an archive of another name
            if plan is not None:
                _read(name, plan, report)
                return
    report.problems.append(FileError(path, "this archive's name is none of a known dataset's."))
