"""CIFAR-10 and CIFAR-100: the binary and the python version, from a folder or from the original .tar.gz.

A binary record is 1 label byte (CIFAR-10) or a coarse and a fine one (CIFAR-100), then 1,024 red, green and blue bytes,
row by row. The python version is a pickled dict with the same bytes in `data`; see `plainpickle`. The binary files
carry no counts, so a file that was cut between two records looks whole: the official counts are asked for, unless
`subset` says that somebody cut it on purpose.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..source import Source, SourceError
from . import files, plainpickle
from .files import MIB, FileError, Plan, Report, attempt, check_labels, choice, each, need_folder, read_bytes, refuse
from .registry import PHOTOS, dataset

PIXELS = 3 * 32 * 32
MAX_BATCH = 256 * MIB
MAX_ARCHIVE = 512 * MIB


@dataclass(frozen=True)
class _Layout:
    """One version of one dataset: where its files are and what a record looks like."""

    name: str
    folder: str
    archives: tuple[str, ...]
    names: tuple[str, ...]
    """The train files and, last, the test file."""
    pickled: bool
    labels: tuple[tuple[str, int], ...]
    """What labels a record has, in their order, and how many classes they tell apart."""
    chosen: int = -1
    """Which of those labels is used."""


def _layouts(name: str, folders: tuple[str, str], names: tuple[str, ...], *labels: tuple[str, int]) -> list[_Layout]:
    stem = name.replace("cifar", "cifar-")
    binary = tuple(f"{each}.bin" for each in names)
    return [
        _Layout(name, folder, (f"{stem}-{version}.tar.gz", f"{stem}-{version}.tar"), files, version == "python", labels)
        for folder, version, files in zip(folders, ("binary", "python"), (binary, names), strict=True)
    ]


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_CIFAR10 = _layouts("cifar10", ("cifar-10-batches-bin", "cifar-10-batches-py"), (*_BATCHES, "test_batch"),
                    ("labels", 10))  # fmt: skip
_CIFAR100 = _layouts("cifar100", ("cifar-100-binary", "cifar-100-python"), ("train", "test"),
                     ("coarse_labels", 20), ("fine_labels", 100))  # fmt: skip

# ImageNet's for CIFAR-10 and its own for CIFAR-100, as the paper's code has them.
_MOMENTS = {
    "cifar10": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar100": ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)),
}
_SUBSET = "accept another number of records than the official one"


class Batch(NamedTuple):
    """One file's rows."""

    x: np.ndarray
    y: np.ndarray


@dataset(
    "cifar10",
    "60,000 photographs, 32 x 32 pixels, 10 classes; binary or python version, folder or archive",
    options={"subset": _SUBSET},
    defaults=PHOTOS,
)
def plan_cifar10(root: Path | str, *, subset: bool = False) -> Plan:
    """Find CIFAR-10's files."""
    return _plan(need_folder(root), _CIFAR10, subset, {"subset": subset})


@dataset(
    "cifar100",
    "60,000 photographs, 32 x 32 pixels, 100 classes; binary or python version, folder or archive",
    options={"labels": "fine (100 classes) or coarse (20)", "subset": _SUBSET},
    defaults=PHOTOS,
)
def plan_cifar100(root: Path | str, *, labels: str = "fine", subset: bool = False) -> Plan:
    """Find CIFAR-100's files."""
    choice("labels", labels, ("fine", "coarse"))
    layouts = [replace(layout, chosen=("coarse", "fine").index(labels)) for layout in _CIFAR100]
    return _plan(need_folder(root), layouts, subset, {"labels": labels, "subset": subset})


def _plan(root: Path, layouts: list[_Layout], subset: bool, options: dict[str, object]) -> Plan:
    place, layout = _find(root, layouts)
    paths = tuple(place / name for name in layout.names) if place.is_dir() else (place,)

    def read(report: Report) -> Source | None:
        batches = _from_folder(paths, layout, report) if place.is_dir() else _from_archive(place, layout, report)
        if batches is None:
            return None
        counts = [len(batch.y) for batch in batches]
        for name, count in zip(layout.names, counts, strict=True):
            official = 10_000 if name == layout.names[-1] else 50_000 // (len(counts) - 1)
            if count != official and not subset:  # a fault of the whole, so that `check` may still say what is there
                report(
                    FileError(
                        place / name if place.is_dir() else place,
                        f"{name} holds {count} records, but the official file has {official}; fetch it again, or say "
                        "subset=True if it is a part on purpose.",
                    )
                )
        test = np.repeat([False] * (len(counts) - 1) + [True], counts)
        y = np.concatenate([batch.y for batch in batches])
        x = [batch.x for batch in batches]
        batches.clear()
        mean, std = _MOMENTS[layout.name]
        classes = layout.labels[layout.chosen][1]
        return files.source(
            place, layout.name, files.join(x), y, test=test, num_classes=classes, mean=mean, std=std, augment=True
        )

    return Plan(layout.name, place, paths, read, {**options, "layout": layout.folder})


def _find(root: Path, layouts: list[_Layout]) -> tuple[Path, _Layout]:
    if root.is_file():
        for layout in layouts:
            if root.name in layout.archives:
                return root, layout
        raise FileError(root, f"this is none of {', '.join(a for layout in layouts for a in layout.archives)}.")
    for layout in layouts:  # the folder itself, by its name or by what it holds
        if root.name == layout.folder or all(os.path.lexists(root / name) for name in layout.names):
            return root, layout
    for found, kinds in ((Path.is_dir, "folder"), (Path.is_file, "archives")):
        for layout in layouts:
            for name in (layout.folder,) if kinds == "folder" else layout.archives:
                for path in (root / name, root / layout.name / name):
                    if found(path):
                        return path, layout
    wanted = " or ".join(f"{layout.folder}/ or {layout.archives[0]}" for layout in layouts)
    raise SourceError(f"{root}: there is no {wanted} in this folder; `metavd data fetch {layouts[0].name}` gets one.")


def _from_folder(paths: tuple[Path, ...], layout: _Layout, report: Report) -> list[Batch] | None:
    return each(report, lambda path: parse(path, read_bytes(path, MAX_BATCH), layout), paths)


def _from_archive(path: Path, layout: _Layout, report: Report) -> list[Batch] | None:
    batches = {}
    for name, data in files.tar_files(path, layout.names, member_limit=MAX_BATCH, limit=MAX_ARCHIVE):
        batches[name] = attempt(report, parse, Path(f"{path}:{name}"), data, layout)
    for name in layout.names:
        refuse(name not in batches, path, f"the archive has no readable {name}; fetch it again.")
    found = [batches[name] for name in layout.names]
    return None if None in found else found  # type: ignore[return-value]


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
    columns = len(layout.labels)
    record = columns + PIXELS
    whole, rest = divmod(len(data), record)
    refuse(not data, path, f"the file is empty, but it must hold records of {record} bytes.", 0)
    what = f"the file ends inside record {whole}, after {rest} of its {record} bytes; fetch it again."
    refuse(rest, path, what, whole * record)
    table = np.frombuffer(data, np.uint8).reshape(whole, record)
    for column, (_, count) in enumerate(layout.labels):  # CIFAR-100's coarse byte is checked even if it is not used
        check_labels(path, table[:, column], 0, count, partial(_byte, record, column))
    y = table[:, range(columns)[layout.chosen]].astype(np.int64)
    return Batch(table[:, columns:].reshape(whole, 3, 32, 32), y)


def _byte(record: int, column: int, row: int) -> int:
    return row * record + column


def _pickled(path: Path, data: bytes, layout: _Layout) -> Batch:
    try:
        content = plainpickle.loads(data)
    except plainpickle.PickleError as error:
        raise FileError(path, error.what, error.offset) from None
    key, count = layout.labels[layout.chosen]
    lacks = not isinstance(content, dict) or not {"data", key} <= set(content)
    refuse(lacks, path, f"the pickle must be a dict with 'data' and {key!r}, but it is not.")
    x, labels = content["data"], content[key]
    found = f"{x.dtype} of shape {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
    right = isinstance(x, np.ndarray) and x.dtype == np.uint8 and x.ndim == 2 and x.shape[1] == PIXELS and len(x)
    refuse(not right, path, f"'data' is {found}, but it must be uint8 of shape (rows, {PIXELS}).")
    if isinstance(labels, list) and all(type(label) is int for label in labels):
        # One that does not fit is no label, and is told below with its row.
        labels = np.array([label if -(2**31) < label < 2**31 else -1 for label in labels], np.int64)
    right = isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind in "iu"
    refuse(not right, path, f"{key!r} must be a list of whole numbers.")
    refuse(len(labels) != len(x), path, f"{key!r} has {len(labels)} entries, but 'data' has {len(x)} rows.")
    check_labels(path, labels, 0, count)
    return Batch(x.reshape(len(x), 3, 32, 32), labels.astype(np.int64))
