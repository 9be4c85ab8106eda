"""MNIST, Fashion-MNIST and EMNIST: idx files, gzipped or not, and QMNIST's file of who wrote which digit.

An idx file: 2 zero bytes | type | number of axes | each axis as a big-endian 32-bit number | the values
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..source import Source, SourceError
from . import npz
from .cache import Note, cached, log
from .files import (
    GIB,
    FileError,
    Plan,
    Report,
    Stream,
    attempt,
    choice,
    join,
    need_folder,
    open_stream,
    open_zip,
    size_of,
    source,
    unpack_limit,
    zip_member,
)

MAX_VALUES = 4 * GIB
TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
SPLITS = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}
"""EMNIST's, and their numbers of classes."""
WRITERS = ("auto", "yes", "no")
_NPZ = "mnist_by_writer.npz"


class _Files(NamedTuple):
    """One dataset's four files: images and labels of the train and of the test half."""

    train_x: Path
    train_y: Path
    test_x: Path
    test_y: Path


def load_mnist(root: Path | str, *, writers: str = "auto", cache: Path | None = None, note: Note = log) -> Source:
    """Return MNIST from idx files, with QMNIST's writers as clients if its files are there, or mnist_by_writer.npz.

    Args:
        root: the folder that holds the files, or MNIST/raw/, mnist/ or mnist_by_writer.npz.
        writers: "yes" asks for them, "no" leaves them out, "auto" takes them if they are there.
        cache: folder for the cached copy; None reads the files.
        note: told why a copy could not be kept.
    """
    return cached(plan_mnist(root, writers=writers), cache, note)


def load_fashion_mnist(root: Path | str, *, cache: Path | None = None, note: Note = log) -> Source:
    """Return Fashion-MNIST from idx files in root, FashionMNIST/raw/ or fashion-mnist/."""
    return cached(plan_fashion_mnist(root), cache, note)


def load_emnist(
    root: Path | str,
    *,
    split: str = "byclass",
    upright: bool = True,
    cache: Path | None = None,
    note: Note = log,
) -> Source:
    """Return one split of EMNIST from idx files in root, EMNIST/raw/ or emnist/, or from NIST's gzip.zip.

    Args:
        root: the folder, or gzip.zip.
        split: byclass, bymerge, balanced, letters, digits or mnist.
        upright: NIST stores the pictures transposed; True turns them to be read, as MNIST's and FEMNIST's are.
        cache: folder for the cached copy; None reads the files.
        note: told why a copy could not be kept.
    """
    return cached(plan_emnist(root, split=split, upright=upright), cache, note)


def plan_mnist(root: Path | str, *, writers: str = "auto") -> Plan:
    """Find MNIST's files."""
    root = need_folder(root)
    choice("writers", writers, WRITERS)
    path = root if root.name == _NPZ else root / _NPZ
    if path.is_file() and writers != "no":
        return _plan_npz(path)
    folders = (".", "MNIST/raw", "mnist", "MNIST", "mnist/raw", "raw")
    files = _find(root, folders, "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte",
                  "t10k-labels-idx1-ubyte")  # fmt: skip
    if files is None and path.is_file():
        return _plan_npz(path, writers=False)
    if files is None:
        raise SourceError(
            f"{root}: there is no {_NPZ} and no train-images-idx3-ubyte (.gz or not) in this folder or in MNIST/raw; "
            "`metavd data fetch mnist` gets them."
        )
    names = [f"qmnist-{half}-labels-idx2-int" for half in ("train", "test")]
    places = (files.train_x.parent, root, root / "QMNIST/raw", root / "qmnist")
    lists = [next((f for place in places for f in _either(place, name)), None) for name in names]
    if writers == "yes" and None in lists:
        raise SourceError(f"{root}: writers are asked for, but there is no {names[lists.index(None)]} (.gz or not).")
    known = None if writers == "no" or lists[0] is None or lists[1] is None else (lists[0], lists[1])
    if writers == "auto" and known is None and any(lists):
        raise SourceError(f"{root}: there is no {names[lists.index(None)]}, but the other half of the writers is here.")
    return _plan(_Set("mnist", files, 10, 0.1307, 0.3081, writers=known))


def plan_fashion_mnist(root: Path | str) -> Plan:
    """Find Fashion-MNIST's files."""
    root = need_folder(root)
    folders = ("FashionMNIST/raw", "fashion-mnist", "fashion_mnist", "fashion", "fashion-mnist/data/fashion", ".")
    files = _find(root, folders, "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte",
                  "t10k-labels-idx1-ubyte")  # fmt: skip
    if files is None:
        raise SourceError(
            f"{root}: there is no train-images-idx3-ubyte (.gz or not) in FashionMNIST/raw or fashion-mnist; "
            "`metavd data fetch fashion-mnist` gets them."
        )
    return _plan(_Set("fashion-mnist", files, 10, 0.5, 0.5))


def plan_emnist(root: Path | str, *, split: str = "byclass", upright: bool = True) -> Plan:
    """Find EMNIST's files."""
    root = need_folder(root)
    choice("split", split, tuple(SPLITS))
    names = [f"emnist-{split}-{half}-{what}" for half in ("train", "test")
             for what in ("images-idx3-ubyte", "labels-idx1-ubyte")]  # fmt: skip
    folders = (".", "EMNIST/raw", "emnist", "EMNIST", "gzip", "emnist/gzip", "EMNIST/raw/gzip")
    files = None if root.is_file() else _find(root, folders, *names)
    base = 1 if split == "letters" else 0  # letters are numbered from 1
    if files is not None:
        return _plan(_Set("emnist", files, SPLITS[split], 0.1307, 0.3081, upright=upright, base=base))
    zips = [root / name for name in ("gzip.zip", "emnist.zip", "EMNIST/raw/gzip.zip", "emnist/gzip.zip")]
    for archive in [root] if root.suffix == ".zip" else zips:
        if archive.is_file() and _holds(archive, f"gzip/{names[0]}.gz"):
            inside = _Files(*(archive / f"gzip/{name}.gz" for name in names))
            return _plan(
                _Set("emnist", inside, SPLITS[split], 0.1307, 0.3081, upright=upright, base=base, archive=archive)
            )
    raise SourceError(
        f"{root}: there is no {names[0]} (.gz or not) and no gzip.zip in this folder or in EMNIST/raw; "
        "`metavd data fetch emnist` gets them."
    )


# Finding


def _either(folder: Path, name: str) -> list[Path]:
    return [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]


def _holds(archive: Path, name: str) -> bool:
    with open_zip(archive) as members:
        return name in members.NameToInfo


def _find(root: Path, folders: tuple[str, ...], *names: str) -> _Files | None:
    for folder in folders:
        found = [next(iter(_either(root / folder, name)), None) for name in names]
        if any(found):
            for name, path in zip(names, found, strict=True):
                if path is None:
                    raise FileError(root / folder / name, "this file (.gz or not) is missing beside the others.")
            return _Files(*(path for path in found if path is not None))
    return None


# Reading


class _Set(NamedTuple):
    """What the four datasets differ in."""

    name: str
    files: _Files
    num_classes: int
    mean: float
    std: float
    writers: tuple[Path, Path] | None = None
    upright: bool = False
    base: int = 0
    """The first label."""
    archive: Path | None = None


def _plan(these: _Set) -> Plan:
    files, writers, archive = these.files, these.writers, these.archive
    place = archive or files.train_x.parent

    def half(images: Path, labels: Path, report: Report) -> tuple[np.ndarray, np.ndarray] | None:
        x = attempt(report, read_idx, images, 3, ">u1", archive)
        y = attempt(report, read_idx, labels, 1, ">u1", archive)
        if x is None or y is None:
            return None
        return attempt(report, _fitting, these, (images, x), (labels, y))

    def read(report: Report) -> Source | None:
        train, held = half(files.train_x, files.train_y, report), half(files.test_x, files.test_y, report)
        if train is None or held is None:
            return None
        (x, y), (test_x, test_y) = train, held
        if x.shape[1:] != test_x.shape[1:]:
            report(FileError(files.test_x, f"images are {_by(test_x)}, but the train images are {_by(x)}."))
            return None
        client = None
        if writers is not None:
            who = attempt(report, _writers, writers[0], y)
            test_who = attempt(report, _writers, writers[1], test_y, more=True)
            if who is None or test_who is None:
                return None
            client = np.concatenate([who, test_who])
        test = np.repeat([False, True], [len(y), len(test_y)])
        labels = np.concatenate([y, test_y]).astype(np.int64) - these.base
        pictures = join([x, test_x])
        if these.upright:
            pictures = np.ascontiguousarray(pictures.transpose(0, 2, 1))
        return attempt(
            report, source, place, these.name, pictures, labels, client=client, test=test,
            num_classes=these.num_classes, mean=[these.mean], std=[these.std],
        )  # fmt: skip

    paths = (archive,) if archive else (*files, *(writers or ()))
    options = {"upright": these.upright, "base": these.base, "train": files.train_x.name}
    return Plan(these.name, place, paths, read, options)


def _by(x: np.ndarray) -> str:
    return " x ".join(str(length) for length in x.shape[1:])


def _fitting(
    these: _Set, pictures: tuple[Path, np.ndarray], answers: tuple[Path, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    (images, x), (labels, y) = pictures, answers
    base, num_classes = these.base, these.num_classes
    if len(x) != len(y):
        raise FileError(labels, f"it has {len(y)} labels, but {images.name} has {len(x)} images.")
    bad = (y < base) | (y >= base + num_classes)
    if bad.any():
        row = int(bad.argmax())
        raise FileError(
            labels,
            f"row {row} has label {y[row]}, but labels must be {base} to {base + num_classes - 1}.",
            8 + row,  # in the unpacked file
        )
    return x, y


def _writers(path: Path, y: np.ndarray, more: bool = False) -> np.ndarray:
    """Return who wrote each digit; the digits themselves stand in the first column, so a wrong file is seen.

    QMNIST's test file lists 60,000 digits, of which MNIST's are the first: `more` lets it be longer.
    """
    table = read_idx(path, 2, ">i4")
    if table.shape[1] < 3 or len(table) < len(y) or (len(table) > len(y) and not more):
        raise FileError(path, f"the list has shape {table.shape}, but it must have a row for each of {len(y)} digits.")
    table = table[: len(y)]
    wrong = table[:, 0] != y
    if wrong.any():
        row = int(wrong.argmax())
        raise FileError(
            path, f"row {row} is a {table[row, 0]}, but the image is a {y[row]}; the list belongs to other images.",
            12 + row * 4 * table.shape[1],
        )  # fmt: skip
    if (table[:, 2] < 0).any():
        raise FileError(path, f"row {int((table[:, 2] < 0).argmax())} has a writer below 0.")
    return table[:, 2].astype(np.int64)


def read_idx(path: Path, axes: int | None = None, dtype: str | None = None, archive: Path | None = None) -> np.ndarray:
    """Return an idx file's values, or say where it is wrong; bytes are counted in the unpacked file.

    Args:
        path: the file; with `archive`, archive / member.
        axes: how many it must have.
        dtype: which type it must have, as in `TYPES`.
        archive: a zip archive that holds it.
    """
    if archive is not None:
        name = path.relative_to(archive).as_posix()
        with open_zip(archive) as members:
            if name not in members.NameToInfo:
                raise FileError(archive, f"the archive has no {name}.")
            info = members.getinfo(name)
            # The member is gzipped itself, so it has two sizes to be checked, and this one is the outer.
            with zip_member(archive, members, info, MAX_VALUES) as raw:
                return _parse(Stream(path, raw, info.file_size, MAX_VALUES + 64), info.file_size, axes, dtype)
    size = size_of(path)
    with open_stream(path, MAX_VALUES + 64) as stream:
        return _parse(stream, size, axes, dtype)


def _parse(stream: Stream, size: int, axes: int | None, dtype: str | None) -> np.ndarray:
    path = stream.path
    head = stream.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in TYPES or not 1 <= head[3] <= 4:
        raise FileError(path, f"this is no idx file: it begins with {head.hex(' ') or 'nothing'}.", 0)
    kind, count = np.dtype(TYPES[head[2]]), head[3]
    if (axes is not None and count != axes) or (dtype is not None and kind != np.dtype(dtype)):
        raise FileError(
            path,
            f"the file has {count} axes of type {kind.name}, but it must have {axes} of {np.dtype(dtype).name}.",
            2,
        )
    lengths = stream.read(4 * count)
    if len(lengths) < 4 * count:
        raise FileError(path, "the file ends inside its header.", 4 + len(lengths))
    shape = struct.unpack(f">{count}I", lengths)
    start, wanted = 4 + 4 * count, math.prod(shape) * kind.itemsize
    limit = unpack_limit(size, MAX_VALUES) if stream.packed else MAX_VALUES
    if 0 in shape or wanted > limit or (not stream.packed and start + wanted != size):
        holds = f"; the file holds {size - start}" if not stream.packed else ""
        raise FileError(path, f"the header declares shape {shape}, which takes {wanted} bytes{holds}.", 4)
    data = stream.read(wanted)
    if len(data) < wanted:
        raise FileError(path, f"the values end after {len(data)} of {wanted} bytes.", start + len(data))
    rest = stream.end()
    if rest:
        raise FileError(path, f"there are {rest} bytes after the last value.", start + wanted)
    return np.frombuffer(data, kind).astype(kind.newbyteorder("="), copy=False).reshape(shape)


def _plan_npz(path: Path, *, writers: bool = True) -> Plan:
    def read(report: Report) -> Source | None:
        found = attempt(report, npz.read, path)
        if found is None:
            return None
        if found.x.ndim != 3 or found.x.dtype != np.uint8:
            report(FileError(path, f"images are {found.x.dtype} of shape {found.x.shape}, but must be grey bytes."))
            return None
        return attempt(
            report, source, path, "mnist", found.x, found.y, client=found.client if writers else None,
            test=found.test, num_classes=10, mean=[0.1307], std=[0.3081],
        )  # fmt: skip

    return Plan("mnist", path, (path,), read, {"writers": writers, "layout": "npz"})
