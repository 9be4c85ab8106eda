"""What a path holds: which dataset, how many rows, classes and clients, which values, and what is wrong and where."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..source import Source, SourceError
from . import cifar, npz
from .files import MAX_FILE, FileError, Plan, need_folder, open_stream, read_bytes
from .idx import read_idx
from .images import SUFFIXES, open_picture
from .leaf import read_shard
from .registry import FORMATS, OWN, Info

MAX_PROBLEMS = 20
"""How many are written out; all are counted."""


@dataclass(frozen=True)
class Problem:
    """One fault."""

    message: str
    path: Path | None = None
    offset: int | None = None


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

    def __str__(self) -> str:
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


@dataclass(frozen=True)
class Report:
    """What `check` found."""

    path: Path
    findings: tuple[Finding, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether something was found and nothing is wrong with it."""
        return bool(self.findings) and not self.problems

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings]
        lines += [f"wrong: {problem.message}" for problem in self.problems[:MAX_PROBLEMS]]
        if len(self.problems) > MAX_PROBLEMS:
            lines.append(f"wrong: and {len(self.problems) - MAX_PROBLEMS} more faults.")
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def check(path: Path | str) -> Report:
    """Say what a file or a folder holds. Everything is read, and reading goes on after a fault."""
    path = Path(path)
    try:
        need_folder(path)
        return _check_file(path) if not path.is_dir() else _check_folder(path)
    except SourceError as error:
        return Report(path, (), (_problem(error),))


def _problem(error: SourceError) -> Problem:
    if isinstance(error, FileError):
        return Problem(str(error), error.path, error.offset)
    return Problem(str(error))


def describe(name: str, place: Path, data: Source) -> Finding:
    """Return a loaded dataset's numbers."""
    counts = np.bincount(data.y, minlength=data.num_classes)
    counts = counts[counts > 0]
    axes = (0, *range(2, data.x.ndim))
    # Row by row blocks: a float64 copy of the whole may not fit.
    blocks = np.array_split(np.arange(len(data.x)), max(1, data.x.nbytes // (64 << 20)))
    sums = sum((data.x[block[0] : block[-1] + 1].sum(axes, dtype=np.float64) for block in blocks), np.zeros(1))
    means = np.asarray(sums) / (len(data.x) * int(np.prod(data.x.shape[2:]))) * data.scale
    return Finding(
        name=name,
        place=place,
        rows=len(data.y),
        classes=len(counts),
        clients=None if data.client is None else len(np.unique(data.client)),
        test_rows=None if data.test is None else int(data.test.sum()),
        shape=data.x.shape[1:],
        dtype=str(data.x.dtype),
        low=float(data.x.min()),
        high=float(data.x.max()),
        smallest_class=int(counts.min()),
        largest_class=int(counts.max()),
        means=tuple(float(mean) for mean in means) if data.x.ndim == 4 else (),
    )


# A folder


def _check_folder(root: Path) -> Report:
    findings: list[Finding] = []
    problems: list[Problem] = []
    notes: list[str] = []
    plans = list(_plans(root, problems))
    for info, plan in plans:
        _read(info.name, plan, findings, problems, notes)
    if not plans and not problems:
        try:
            info = FORMATS["folder"]
            _read(info.name, info.plan(root), findings, problems, notes)
        except SourceError as error:
            problems.append(_problem(error))
    return Report(root, tuple(findings), tuple(problems), tuple(notes))


def _plans(root: Path, problems: list[Problem]) -> list[tuple[Info, Plan]]:
    """Return every dataset that root holds by the names of its files; one that is incomplete is a problem."""
    found: list[tuple[Info, Plan]] = []
    taken: set[Path] = set()
    for info in FORMATS.values():
        if info.name in OWN or not info.files:
            continue
        for options in info.variants:
            try:
                plan = info.plan(root, **options)
            except FileError as error:
                problems.append(_problem(error))
                break
            except SourceError:
                continue  # it is not here
            else:
                if plan.files[0] not in taken:  # MNIST's and Fashion-MNIST's files have the same names
                    taken.update(plan.files)
                    found.append((info, plan))
                break
    for path in sorted(root.glob("*.npz")):
        if path not in taken:
            found.append((FORMATS["npz"], FORMATS["npz"].plan(path)))
    return found


def _read(name: str, plan: Plan, findings: list[Finding], problems: list[Problem], notes: list[str]) -> None:
    faults: list[Problem] = []
    data = None
    try:
        data = plan.read(lambda error: faults.append(_problem(error)))
    except SourceError as error:
        faults.append(_problem(error))
    except MemoryError:
        faults.append(Problem(f"{plan.place}: the dataset does not fit into memory."))
    problems.extend(faults)
    if data is None:
        return
    findings.append(describe(name, plan.place, data))
    if data.client is not None:
        single = int((np.unique(data.client, return_counts=True)[1] == 1).sum())
        if single:
            notes.append(f"{plan.place}: {single} clients have one row only, too few to train and to test on.")
    missing = data.num_classes - len(np.unique(data.y))
    if missing:
        notes.append(f"{plan.place}: {missing} of {data.num_classes} classes have no row.")
    gaps = _gaps(plan.files)
    if gaps:
        notes.append(f"{plan.place}: {gaps[0]} is missing between the numbers of the other files.")
    if plan.place.suffix == ".npz":
        other = set(npz.keys(plan.place)) - {key for keys in npz.KEYS.values() for key in keys}
        if other:
            notes.append(f"{plan.place}: {', '.join(sorted(other)[:8])} in it is not read.")


def _gaps(files: tuple[Path, ...]) -> list[str]:
    """Return names that LEAF's numbering of its shards leaves out; nothing else would show that one is missing."""
    found = [re.fullmatch(r"(all_data_)(\d{1,6})(.*\.json)", path.name) for path in files]
    numbers = {int(match[2]) for match in found if match is not None}
    last = next((match for match in reversed(found) if match is not None), None)
    if last is None or len(numbers) == max(numbers) + 1:
        return []
    return [f"{last[1]}{number}{last[3]}" for number in range(max(numbers)) if number not in numbers]


# A single file


def _check_file(path: Path) -> Report:
    findings: list[Finding] = []
    problems: list[Problem] = []
    notes: list[str] = []
    layout = cifar.layout_of(path)
    name = path.name
    with open_stream(path, MAX_FILE) as stream:
        head = stream.read(2)
    if layout is not None:
        batch = cifar.parse(path, read_bytes(path, cifar.MAX_BATCH), layout)
        findings.append(_table(f"a file of {layout.name}", path, batch.x, batch.y))
    elif name.endswith((".tar.gz", ".tar", ".tgz")) or path.suffix == ".zip":
        matched = False
        for info in FORMATS.values():
            if info.name.startswith(("cifar", "emnist")):
                for options in info.variants:
                    try:
                        plan = info.plan(path, **options)
                    except SourceError:
                        continue
                    matched = True
                    _read(info.name, plan, findings, problems, notes)
                    break
        if not matched:
            problems.append(Problem(f"{path}: this archive's name is none of a known dataset's.", path))
    elif path.suffix == ".npz":
        _read("npz", FORMATS["npz"].plan(path), findings, problems, notes)
    elif path.suffix == ".json":
        users = read_shard(path)
        rows = sum(len(user.y) for user in users)
        labels = np.concatenate([user.y for user in users]) if rows else np.empty(0, np.int64)
        counts = np.unique(labels, return_counts=True)[1]
        kinds = sorted({user.kind for user in users})
        findings.append(
            Finding("a LEAF shard", path, rows, len(counts), len(users), None, (), "/".join(kinds), 0, 255,
                    int(counts.min(initial=rows)), int(counts.max(initial=0)))
        )  # fmt: skip
    elif path.suffix.lower() in SUFFIXES:
        picture = open_picture(path)
        pixels = np.asarray(picture)
        findings.append(_table("a picture", path, pixels[None], None))
    elif "idx" in name or head == b"\0\0":
        values = read_idx(path)
        findings.append(_table("an idx file", path, values, values if values.ndim == 1 else None))
    else:
        problems.append(Problem(f"{path}: this is no file of a known format.", path, 0))
    return Report(path, tuple(findings), tuple(problems), tuple(notes))


def _table(name: str, path: Path, x: np.ndarray, y: np.ndarray | None) -> Finding:
    counts = None if y is None else np.unique(y, return_counts=True)[1]
    return Finding(
        name=name,
        place=path,
        rows=len(x),
        classes=None if counts is None else len(counts),
        clients=None,
        test_rows=None,
        shape=x.shape[1:],
        dtype=str(x.dtype),
        low=float(x.min()),
        high=float(x.max()),
        smallest_class=None if counts is None else int(counts.min()),
        largest_class=None if counts is None else int(counts.max()),
    )
