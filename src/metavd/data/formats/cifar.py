"""CIFAR-10 and CIFAR-100: the binary and the python version, from a folder or from the original .tar.gz.

A binary record is 1 label byte (CIFAR-10) or a coarse and a fine one (CIFAR-100), then 1,024 red, green and blue bytes,
row by row. The python version is a pickled dict with the same bytes in `data`; see `plainpickle`. The binary files
carry no counts, so a file that was cut between two records looks whole: the official counts are asked for, unless
`subset` says that somebody cut it on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..source import Source, SourceError
from . import files, plainpickle
from .files import MIB, FileError, Report, Unread, check_labels, choice, each, find, need_folder, read_bytes, refuse
from .registry import PHOTOS, dataset

PIXELS = 3 * 32 * 32
MAX_BATCH = 256 * MIB
"""Bytes of a file in an archive."""


@dataclass(frozen=True)
class Version:
    """One version of one dataset: where its files are and what a record looks like."""

    name: str
    folder: str
    archive: str
    """Perhaps gzipped."""
    files: tuple[str, ...]
    """The train files and, last, the test file."""
    labels: tuple[tuple[str, int], ...]
    """What labels a record has, in their order, and how many classes they tell apart."""

    @property
    def pickled(self) -> bool:
        """Whether this is the python version."""
        return not self.files[0].endswith(".bin")


_TEN, _HUNDRED = (("labels", 10),), (("coarse_labels", 20), ("fine_labels", 100))
_BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
_BINARY = tuple(f"{batch}.bin" for batch in _BATCHES)
VERSIONS = (
    Version("cifar10", "cifar-10-batches-bin", "cifar-10-binary.tar", _BINARY, _TEN),
    Version("cifar10", "cifar-10-batches-py", "cifar-10-python.tar", _BATCHES, _TEN),
    Version("cifar100", "cifar-100-binary", "cifar-100-binary.tar", ("train.bin", "test.bin"), _HUNDRED),
    Version("cifar100", "cifar-100-python", "cifar-100-python.tar", ("train", "test"), _HUNDRED),
)

# ImageNet's for CIFAR-10 and its own for CIFAR-100, as the paper's code has them.
_MOMENTS = {
    "cifar10": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar100": ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)),
}
_SUBSET = "accept another number of records than the official one"


_WHAT = "60,000 photographs, 32 x 32 pixels, {} classes; binary or python version, folder or archive"


class FileRows(NamedTuple):
    """One file's rows."""

    x: np.ndarray
    y: np.ndarray


@dataset("cifar10", _WHAT.format(10), options={"subset": _SUBSET}, defaults=PHOTOS)
def find_cifar10(root: Path | str, *, subset: bool = False) -> Unread:
    """Find CIFAR-10's files."""
    return _found("cifar10", need_folder(root), 0, subset=subset)


@dataset(
    "cifar100",
    _WHAT.format(100),
    options={"labels": "fine (100 classes) or coarse (20)", "subset": _SUBSET},
    defaults=PHOTOS,
)
def find_cifar100(root: Path | str, *, labels: str = "fine", subset: bool = False) -> Unread:
    """Find CIFAR-100's files."""
    choice("labels", labels, ("fine", "coarse"))
    return _found("cifar100", need_folder(root), ("coarse", "fine").index(labels), subset=subset)


def _found(name: str, root: Path, chosen: int, *, subset: bool) -> Unread:
    """Return what is to be read: the rows, with the chosen one of their labels."""
    version, place, paths = _find(name, root)

    def read(report: Report) -> Source:
        batches = each(report, lambda path: parse(path, read_bytes(path), version, chosen), paths)
        if not paths:
            batches = _from_archive(place, version, chosen, report)
        counts = [len(batch.y) for batch in batches]
        for file, count in zip(version.files, counts, strict=True):
            official = 10_000 if file == version.files[-1] else 50_000 // (len(counts) - 1)
            if count != official and not subset:  # a fault of the whole, so that `check` may still say what is there
                what = f"{file} holds {count} records, but the official file has {official}; fetch it again, or say "
                report(FileError(place / file if paths else place, f"{what}subset=True if it is a part on purpose."))
        test = np.repeat([False] * (len(counts) - 1) + [True], counts)
        y = np.concatenate([batch.y for batch in batches])
        x = [batch.x for batch in batches]
        batches.clear()
        mean, std = _MOMENTS[name]
        return files.source(
            place, name, files.join(x), y, test=test, num_classes=version.labels[chosen][1], mean=mean, std=std,
            augment=True,
        )  # fmt: skip

    options = {"chosen": chosen, "subset": subset, "layout": version.folder}
    return Unread(name, place, paths or (place,), read, options)


def _find(name: str, root: Path) -> tuple[Version, Path, tuple[Path, ...]]:
    """Return which version is there, its folder or archive, and of a folder its files."""
    versions = [version for version in VERSIONS if version.name == name]
    if root.is_file():
        for version in versions:
            if root.name in (version.archive, f"{version.archive}.gz"):
                return version, root, ()
        raise SourceError(f"{root}: this is none of {', '.join(f'{version.archive}.gz' for version in versions)}.")
    for version in versions:  # the folder itself may have another name, but then all must be in it
        if all((root / file).is_file() for file in version.files):
            return version, root, tuple(root / file for file in version.files)
    for version in versions:
        paths = find(root, (version.folder, f"{name}/{version.folder}"), version.files)
        if paths is not None:
            return version, paths[0].parent, paths
    for version in versions:
        archive = find(root, (".", name), (version.archive,))
        if archive is not None:
            return version, archive[0], ()
    wanted = " or ".join(f"{version.folder}/ or {version.archive}.gz" for version in versions)
    raise SourceError(f"{root}: there is no {wanted} in this folder; `metavd data fetch {name}` gets one.")


def _from_archive(path: Path, version: Version, chosen: int, report: Report) -> list[FileRows]:
    def read(member: tuple[str, bytes]) -> tuple[str, FileRows]:
        return member[0], parse(Path(f"{path}:{member[0]}"), member[1], version, chosen)

    batches = dict(each(report, read, files.tar_files(path, version.files, MAX_BATCH)))
    for name in version.files:
        refuse(name not in batches, path, f"the archive has no readable {name}; fetch it again.")
    return [batches[name] for name in version.files]


def parse(path: Path, data: bytes, version: Version, chosen: int = -1) -> FileRows:
    """Return one file's rows; `path` is only how messages call it."""
    if version.pickled:
        return _pickled(path, data, *version.labels[chosen])
    first = len(version.labels)
    whole, rest = divmod(len(data), first + PIXELS)
    refuse(not data, path, f"the file is empty, but it must hold records of {first + PIXELS} bytes.", 0)
    what = f"the file ends inside record {whole}, after {rest} of its {first + PIXELS} bytes; fetch it again."
    refuse(rest, path, what, len(data) - rest)
    table = np.frombuffer(data, np.uint8).reshape(whole, first + PIXELS)
    for column, (_, count) in enumerate(version.labels):  # CIFAR-100's coarse byte is checked even if it is not used
        check_labels(path, table[:, column], range(count), column, first + PIXELS)
    y = table[:, range(first)[chosen]].astype(np.int64)
    return FileRows(table[:, first:].reshape(whole, 3, 32, 32), y)


def _pickled(path: Path, data: bytes, key: str, count: int) -> FileRows:
    try:
        content = plainpickle.loads(data)
    except plainpickle.PickleError as error:
        raise FileError(path, error.what, error.offset) from None
    lacks = not isinstance(content, dict) or not {"data", key} <= set(content)
    refuse(lacks, path, f"the pickle must be a dict with 'data' and {key!r}, but it is not.")
    x, labels = content["data"], content[key]
    found = f"{x.dtype} of shape {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
    right = isinstance(x, np.ndarray) and x.dtype == np.uint8 and x.ndim == 2 and x.shape[1] == PIXELS and len(x)
    refuse(not right, path, f"'data' is {found}, but it must be uint8 of shape (rows, {PIXELS}).")
    if isinstance(labels, list) and all(type(label) is int for label in labels):
        # One that does not fit is no label, and is told below with its row.
        labels = np.array([label if -(2**31) < label < 2**31 else -1 for label in labels], np.int64)
    right = isinstance(labels, np.ndarray) and labels.shape == x.shape[:1] and labels.dtype.kind in "iu"
    refuse(not right, path, f"{key!r} must be a list of {len(x)} whole numbers, one for each row of 'data'.")
    check_labels(path, labels, range(count))
    return FileRows(x.reshape(len(x), 3, 32, 32), labels.astype(np.int64))
