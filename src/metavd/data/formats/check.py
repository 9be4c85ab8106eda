"""What a path holds: which dataset, how many rows, classes and clients, which values, and what is wrong and where."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..partition import some
from ..source import Source, SourceError
from ..table import described
from . import cifar, npz
from .files import FileError, Reported, Unread, need_folder, open_stream, read_bytes
from .idx import read_idx
from .images import SUFFIXES, open_picture
from .leaf import read_shard
from .registry import FORMATS, OWN, Info
from .table import JSON, read_cells
from .table import SUFFIXES as TABLES

_COLUMNS = 20
"""Columns of a table that are described."""
_ARCHIVES = (".tar.gz", ".tar", ".tgz", ".zip")
MAX_PROBLEMS = 20
"""How many are written out; all are counted."""


@dataclass(frozen=True)
class Finding:
    """One dataset, or one of its files, that could be read."""

    name: str
    """The format's name in `FORMATS`, or what kind of file it is."""
    place: Path
    rows: int
    said: tuple[str, ...]
    """What the rows are, and what else there is to say."""

    def __str__(self) -> str:
        return f"{self.name} at {self.place}: {'; '.join(self.said)}."


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
        all_found = _all_found(path, report) if path.is_dir() or path.name.endswith(_ARCHIVES) else []
        if not all_found and not report.problems:
            all_found = [("folder", FORMATS["folder"].find(path))] if path.is_dir() else list(_of_file(path, report))
    except SourceError as error:
        report.problems.append(error)
        return report
    for name, unread in all_found:
        try:
            data = unread.read(report.problems.append)
        except Reported:
            continue
        except SourceError as error:
            report.problems.append(error)
        except MemoryError:
            report.problems.append(SourceError(f"{unread.place}: the dataset does not fit into memory."))
        else:
            report.findings.append(_described(name, unread.place, data))
            report.notes.extend(f"{unread.place}: {note}" for note in _notes(unread, data))
    return report


def _finding(
    name: str, place: Path, x: np.ndarray, y: np.ndarray | None = None, *, like: str = "", clients: int | None = None,
    test: np.ndarray | None = None, more: tuple[str, ...] = (),
) -> Finding:  # fmt: skip
    """Return the numbers of rows and labels; `like` is the type where x is none but a stand-in."""
    said = [f"{len(x):,} rows of {like or f'{x.dtype} ' + (' x '.join(map(str, x.shape[1:])) or 'numbers')}"]
    if test is not None:
        said.append(f"{int(test.sum()):,} of them test rows")
    if y is not None:
        counts = np.unique(y, return_counts=True)[1]
        least, most = (counts.min(), counts.max()) if len(counts) else (0, 0)
        said.append(f"{len(counts)} classes of {least:,} to {most:,} rows")
    said.append("no clients of their own" if clients is None else f"{clients:,} clients")
    low, high = (0.0, 255.0) if like else (float(x.min()), float(x.max()))
    said.append(f"values {low:g} to {high:g}")
    return Finding(name, place, len(x), (*said, *more))


def _described(name: str, place: Path, data: Source) -> Finding:
    """Return a loaded dataset's numbers."""
    people = None if data.client is None else len(np.unique(data.client))
    more: tuple[str, ...] = ()
    if data.x.ndim == 4:
        # Row by row blocks: a float64 copy of the whole may not fit.
        blocks = np.array_split(data.x, max(1, data.x.nbytes // (64 << 20)))
        sums = np.sum([block.sum((0, 2, 3), dtype=np.float64) for block in blocks], 0)
        means = sums / (data.x.size // data.x.shape[1]) * data.scale
        more = (f"channel means {', '.join(f'{mean:.4f}' for mean in means)}",)
    like = "text" if data.x.dtype.kind == "S" else ""
    return _finding(name, place, data.x, data.y, like=like, clients=people, test=data.test, more=more)


def _notes(unread: Unread, data: Source) -> Iterator[str]:
    """Yield what is no fault but good to know."""
    single = 0 if data.client is None else int((np.unique(data.client, return_counts=True)[1] == 1).sum())
    if single:
        yield f"{single} clients have one row only, too few to train and to test on."
    if missing := data.num_classes - len(np.unique(data.y)):
        yield f"{missing} of {data.num_classes} classes have no row."
    # Nothing but LEAF's numbering of its shards would show that one is missing.
    shards = [match for path in unread.files if (match := re.fullmatch(r"(all_data_)(\d{1,6})(.*\.json)", path.name))]
    numbers = {int(match[2]) for match in shards}
    if gap := next((f"{m[1]}{n}{m[3]}" for m in shards for n in range(int(m[2])) if n not in numbers), None):
        yield f"{gap} is missing between the numbers of the other files."
    known = {key for keys in npz.KEYS.values() for key in keys}
    other = sorted(set(npz.keys(unread.place)) - known) if unread.place.suffix == ".npz" else []
    if other:
        yield f"{', '.join(other[:8])} in it is not read."


# What a folder or an archive holds


def _all_found(root: Path, report: Report) -> list[tuple[str, Unread]]:
    """Return every dataset that root holds by the names of its files; one that is incomplete is a problem."""
    found: list[tuple[str, Unread]] = []
    taken: set[Path] = set()
    for name in FORMATS:
        if name in OWN:
            continue
        try:
            unread = _found_by(FORMATS[name], root)
        except FileError as error:
            report.problems.append(error)
        except SourceError as error:  # of a package that cannot be imported
            report.notes.append(str(error))
        else:
            # MNIST's and Fashion-MNIST's files have the same names.
            if unread is not None and unread.files[0] not in taken:
                taken.update(unread.files)
                found.append((name, unread))
    others = [path for path in sorted(root.glob("*.npz")) if path not in taken]
    return [*found, *(("npz", FORMATS["npz"].find(path)) for path in others)]


def _found_by(info: Info, root: Path) -> Unread | None:
    """Return a dataset under the first of its variants that is here."""
    for options in info.variants if info.files else ():
        try:
            return info.find(root, **options)
        except FileError:
            raise
        except SourceError:
            continue
    return None


# What a single file is


def _of_file(path: Path, report: Report) -> Iterator[tuple[str, Unread]]:
    """Yield a file that is a dataset; of one that is a part of one the report is told."""
    version = next((version for version in cifar.VERSIONS if path.name in version.files), None)
    suffix = path.suffix.lower()
    if path.name.endswith(_ARCHIVES):
        raise FileError(path, "this archive's name is none of a known dataset's.")
    if suffix == ".npz":
        yield "npz", FORMATS["npz"].find(path)
    elif version is not None and (not version.pickled or path.parent.name == version.folder):
        batch = cifar.parse(path, read_bytes(path), version)
        report.findings.append(_finding(f"a file of {version.name}", path, batch.x, batch.y))
    elif suffix == ".json":
        users = read_shard(path)
        labels = np.concatenate([np.empty(0, np.int64), *(user.y for user in users)])
        kinds = "/".join(sorted({user.kind for user in users}))
        report.findings.append(_finding("a LEAF shard", path, labels, labels, clients=len(users), like=kinds))
    elif suffix in TABLES:
        report.findings.append(_table(path))
    elif suffix in SUFFIXES:
        report.findings.append(_finding("a picture", path, np.asarray(open_picture(path))[None]))
    else:
        with open_stream(path) as stream:
            known = "idx" in path.name or stream.read(2) == b"\0\0"
        if not known:
            raise FileError(path, "this is no file of a known format.", 0)
        values = read_idx(path)
        report.findings.append(_finding("an idx file", path, values, values if values.ndim == 1 else None))


def _table(path: Path) -> Finding:
    """Describe a table by its columns, and say how a run takes it."""
    cells = read_cells(path)
    columns = described(cells)
    text = path.suffix.lower() in JSON or "text" in cells
    how = f"--data text:{path}" if text else f"--data table:{path} --set label=COLUMN client=COLUMN"
    rows = len(next(iter(cells.values())))
    said = (f"{rows:,} rows", f"columns {some(columns, _COLUMNS)}", f"for a run, {how}")
    return Finding("a table", path, rows, said)
