"""CIFAR-10 and CIFAR-100: the binary and the python version, from a folder or from the original .tar.gz.

A binary record is 1 label byte (CIFAR-10) or a coarse and a fine one (CIFAR-100), then 1,024 red, green and blue bytes,
row by row. The python version is a pickled dict with the same bytes in `data`; see `plainpickle`. The binary files
carry no counts, so a file that was cut between two records looks whole: the official counts are asked for, unless
`subset` says that somebody cut it on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..source import Source, SourceError
from . import plainpickle
from .cache import Note, cached, log
from .files import (
    MIB,
    FileError,
    Plan,
    Report,
    attempt,
    choice,
    exists,
    first_folder,
    join,
    need_folder,
    read_bytes,
    source,
    tar_files,
)

PIXELS = 3 * 32 * 32
MAX_BATCH = 256 * MIB
MAX_ARCHIVE = 512 * MIB


@dataclass(frozen=True)
class _Layout:
    """One version of one dataset: where its files are and what a record looks like."""

    name: str
    folder: str
    archives: tuple[str, ...]
    train: tuple[str, ...]
    test: str
    per_file: int
    """Official records a train file; the test file has 10,000."""
    pickled: bool
    coarse: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.train, self.test)

    @property
    def num_classes(self) -> int:
        return 10 if self.name == "cifar10" else (20 if self.coarse else 100)

    @property
    def label_bytes(self) -> int:
        return 1 if self.name == "cifar10" else 2


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_CIFAR10 = (
    _Layout("cifar10", "cifar-10-batches-bin", ("cifar-10-binary.tar.gz", "cifar-10-binary.tar"),
            tuple(f"{name}.bin" for name in _BATCHES), "test_batch.bin", 10_000, False),
    _Layout("cifar10", "cifar-10-batches-py", ("cifar-10-python.tar.gz", "cifar-10-python.tar"),
            _BATCHES, "test_batch", 10_000, True),
)  # fmt: skip
_CIFAR100 = (
    _Layout("cifar100", "cifar-100-binary", ("cifar-100-binary.tar.gz", "cifar-100-binary.tar"),
            ("train.bin",), "test.bin", 50_000, False),
    _Layout("cifar100", "cifar-100-python", ("cifar-100-python.tar.gz", "cifar-100-python.tar"),
            ("train",), "test", 50_000, True),
)  # fmt: skip

# ImageNet's for CIFAR-10 and its own for CIFAR-100, as the paper's code has them.
_MOMENTS = {
    "cifar10": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar100": ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)),
}


class Batch(NamedTuple):
    """One file's rows."""

    x: np.ndarray
    y: np.ndarray


def load_cifar10(root: Path | str, *, subset: bool = False, cache: Path | None = None, note: Note = log) -> Source:
    """Return CIFAR-10 from the files below root: binary or python version, folder or archive.

    Args:
        root: the folder that holds cifar-10-batches-bin, cifar-10-batches-py, cifar-10-binary.tar.gz or
            cifar-10-python.tar.gz, one of those folders, or one of those archives.
        subset: accept another number of records than the official one.
        cache: folder for the cached copy; None reads the files.
        note: told why a copy could not be kept.
    """
    return cached(plan_cifar10(root, subset=subset), cache, note)


def load_cifar100(
    root: Path | str,
    *,
    labels: str = "fine",
    subset: bool = False,
    cache: Path | None = None,
    note: Note = log,
) -> Source:
    """Return CIFAR-100, likewise; `labels` are "fine" (100 classes) or "coarse" (20)."""
    return cached(plan_cifar100(root, labels=labels, subset=subset), cache, note)


def plan_cifar10(root: Path | str, *, subset: bool = False) -> Plan:
    """Find CIFAR-10's files."""
    return _plan(need_folder(root), _CIFAR10, subset, {"subset": subset})


def plan_cifar100(root: Path | str, *, labels: str = "fine", subset: bool = False) -> Plan:
    """Find CIFAR-100's files."""
    choice("labels", labels, ("fine", "coarse"))
    layouts = tuple(replace(layout, coarse=labels == "coarse") for layout in _CIFAR100)
    return _plan(need_folder(root), layouts, subset, {"labels": labels, "subset": subset})


def _plan(root: Path, layouts: tuple[_Layout, ...], subset: bool, options: dict[str, object]) -> Plan:
    place, layout = _find(root, layouts)
    files = tuple(place / name for name in layout.names) if place.is_dir() else (place,)

    def read(report: Report) -> Source | None:
        batches = _from_folder(place, layout, report) if place.is_dir() else _from_archive(place, layout, report)
        if batches is None:
            return None
        for name, batch in batches.items():
            if not subset:  # a fault of the whole, so that `check` may still say what is there
                attempt(report, _official, place, layout, name, len(batch.y))
        counts = [len(batches[name].y) for name in layout.names]
        test = np.repeat([False] * len(layout.train) + [True], counts)
        y = np.concatenate([batches[name].y for name in layout.names])
        x = join([batches.pop(name).x for name in layout.names])
        mean, std = _MOMENTS[layout.name]
        return source(
            place, layout.name, x, y, test=test, num_classes=layout.num_classes, mean=mean, std=std, augment=True
        )

    return Plan(layout.name, place, files, read, {**options, "layout": layout.folder})


def _find(root: Path, layouts: tuple[_Layout, ...]) -> tuple[Path, _Layout]:
    if root.is_file():
        for layout in layouts:
            if root.name in layout.archives:
                return root, layout
        raise FileError(root, f"this is none of {', '.join(a for layout in layouts for a in layout.archives)}.")
    for layout in layouts:  # the folder itself, by its name or by what it holds
        if root.name == layout.folder or all(exists(root / name) for name in layout.names):
            return root, layout
    for layout in layouts:
        folder = first_folder(root, [layout.folder, f"{layout.name}/{layout.folder}"])
        if folder is not None:
            return folder, layout
    for layout in layouts:
        for archive in layout.archives:
            for path in (root / archive, root / layout.name / archive):
                if path.is_file():
                    return path, layout
    wanted = " or ".join(f"{layout.folder}/ or {layout.archives[0]}" for layout in layouts)
    raise SourceError(f"{root}: there is no {wanted} in this folder; `metavd data fetch {layouts[0].name}` gets one.")


def _official(place: Path, layout: _Layout, name: str, count: int) -> None:
    official = 10_000 if name == layout.test else layout.per_file
    if count != official:
        path = place / name if place.is_dir() else place
        raise FileError(
            path,
            f"{name} holds {count} records, but the official file has {official}; fetch it again, or say subset=True "
            "if it is a part on purpose.",
        )


def _from_folder(folder: Path, layout: _Layout, report: Report) -> dict[str, Batch] | None:
    batches = {}
    for name in layout.names:
        path = folder / name
        data = attempt(report, read_bytes, path, MAX_BATCH)
        batch = None if data is None else attempt(report, parse, path, data, layout)
        if batch is not None:
            batches[name] = batch
    return batches if len(batches) == len(layout.names) else None


def _from_archive(path: Path, layout: _Layout, report: Report) -> dict[str, Batch] | None:
    batches = {}

    def walk() -> None:
        for name, data in tar_files(path, layout.names, member_limit=MAX_BATCH, limit=MAX_ARCHIVE):
            batch = attempt(report, parse, Path(f"{path}:{name}"), data, layout)
            if batch is not None:
                batches[name] = batch
        missing = [name for name in layout.names if name not in batches]
        if missing:
            raise FileError(path, f"the archive has no readable {missing[0]}; fetch it again.")

    attempt(report, walk)
    return batches if len(batches) == len(layout.names) else None


def parse(path: Path, data: bytes, layout: _Layout) -> Batch:
    """Return one file's rows; `path` is only how messages call it."""
    return _pickled(path, data, layout) if layout.pickled else _binary(path, data, layout)


def layout_of(path: Path) -> _Layout | None:
    """Return which of CIFAR's files this is, by its name (and that of its folder), or None."""
    for layout in (*_CIFAR10, *_CIFAR100):
        if path.name in layout.names and (not layout.pickled or path.parent.name == layout.folder):
            return layout
    return None


def _binary(path: Path, data: bytes, layout: _Layout) -> Batch:
    record = layout.label_bytes + PIXELS
    whole, rest = divmod(len(data), record)
    if rest or not whole:
        raise FileError(
            path,
            f"the file ends inside record {whole}, after {rest} of its {record} bytes; fetch it again."
            if data
            else f"the file is empty, but it must hold records of {record} bytes.",
            whole * record,
        )
    table = np.frombuffer(data, np.uint8).reshape(whole, record)
    for column in range(layout.label_bytes):  # CIFAR-100's coarse byte is checked even if it is not used
        limit = 10 if layout.name == "cifar10" else (20, 100)[column]
        _check_labels(path, table[:, column], limit, partial(_place, record, column))
    y = table[:, 0 if layout.coarse else layout.label_bytes - 1].astype(np.int64)
    return Batch(table[:, layout.label_bytes :].reshape(whole, 3, 32, 32), y)


def _place(record: int, column: int, row: int) -> int:
    return row * record + column


def _pickled(path: Path, data: bytes, layout: _Layout) -> Batch:
    try:
        content = plainpickle.loads(data)
    except plainpickle.PickleError as error:
        raise FileError(path, error.what, error.offset) from None
    key = "labels" if layout.name == "cifar10" else ("coarse_labels" if layout.coarse else "fine_labels")
    for word in ("data", key):
        if not isinstance(content, dict) or word not in content:
            raise FileError(path, f"the pickle has no {word!r}, but it must be a dict with 'data' and {key!r}.")
    x, labels = content["data"], content[key]
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != PIXELS or not len(x):
        found = f"{x.dtype} of shape {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
        raise FileError(path, f"'data' is {found}, but it must be uint8 of shape (rows, {PIXELS}).")
    if isinstance(labels, list) and all(type(label) is int for label in labels):
        # One that does not fit is no label, and is told below with its row.
        labels = np.array([label if -(2**31) < label < 2**31 else -1 for label in labels], np.int64)
    if not isinstance(labels, np.ndarray) or labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise FileError(path, f"{key!r} must be a list of whole numbers.")
    if len(labels) != len(x):
        raise FileError(path, f"{key!r} has {len(labels)} entries, but 'data' has {len(x)} rows.")
    _check_labels(path, labels, layout.num_classes, None)
    return Batch(x.reshape(len(x), 3, 32, 32), labels.astype(np.int64))


def _check_labels(path: Path, labels: np.ndarray, limit: int, offset: Callable[[int], int] | None) -> None:
    bad = (labels < 0) | (labels >= limit)
    if bad.any():
        row = int(bad.argmax())
        raise FileError(
            path,
            f"record {row} has label {labels[row]}, but labels must be 0 to {limit - 1}; fetch the file again.",
            None if offset is None else offset(row),
        )
