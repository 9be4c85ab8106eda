"""MNIST, Fashion-MNIST and EMNIST: idx files, gzipped or not, and QMNIST's file of who wrote which digit.

An idx file: 2 zero bytes | type | number of axes | each axis as a big-endian 32-bit number | the values
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np

from ..source import Source, SourceError
from . import files as shared
from . import npz
from .files import GIB, Plan, Report, Stream, choice, need_folder, open_zip, refuse, source
from .registry import PHOTOS, WRITERS, dataset

MAX_VALUES = 4 * GIB
TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
SPLITS = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}
"""EMNIST's, and their numbers of classes."""
LISTS = ("auto", "yes", "no")
_NPZ = "mnist_by_writer.npz"
_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataset(
    "mnist",
    "70,000 handwritten digits, 28 x 28 pixels; idx files with QMNIST's writers, or mnist_by_writer.npz",
    options={"writers": " or ".join(LISTS)},
    defaults=WRITERS,
)
def plan_mnist(root: Path | str, *, writers: str = "auto") -> Plan:
    """Find MNIST's files; QMNIST's writers ("auto": if they are there) are the clients."""
    root = need_folder(root)
    choice("writers", writers, LISTS)
    path = root if root.name == _NPZ else root / _NPZ
    if path.is_file() and writers != "no":
        return _plan_npz(path, writers=True)
    files = _find(root, (".", "MNIST/raw", "mnist", "MNIST", "mnist/raw", "raw"), _NAMES)
    if files is None and path.is_file():
        return _plan_npz(path, writers=False)
    if files is None:
        raise SourceError(
            f"{root}: there is no {_NPZ} and no {_NAMES[0]} (.gz or not) in this folder or in MNIST/raw; "
            "`metavd data fetch mnist` gets them."
        )
    names = [f"qmnist-{half}-labels-idx2-int" for half in ("train", "test")]
    places = (files[0].parent, root, root / "QMNIST/raw", root / "qmnist")
    lists = [next((found for place in places for found in _either(place, name)), None) for name in names]
    missing = next((name for name, found in zip(names, lists, strict=True) if found is None), None)
    if missing and writers == "yes":
        raise SourceError(f"{root}: writers are asked for, but there is no {missing} (.gz or not).")
    if missing and writers == "auto" and any(lists):
        raise SourceError(f"{root}: there is no {missing}, but the other half of the writers is here.")
    known = () if missing or writers == "no" else tuple(found for found in lists if found is not None)
    return _plan("mnist", (*files, *known), 10, (0.1307, 0.3081))


@dataset(
    "fashion-mnist",
    "70,000 articles of clothing, 28 x 28 pixels, 10 classes; idx files",
    defaults=PHOTOS,
)
def plan_fashion_mnist(root: Path | str) -> Plan:
    """Find Fashion-MNIST's files."""
    root = need_folder(root)
    folders = ("FashionMNIST/raw", "fashion-mnist", "fashion_mnist", "fashion", "fashion-mnist/data/fashion", ".")
    files = _find(root, folders, _NAMES)
    if files is None:
        raise SourceError(
            f"{root}: there is no {_NAMES[0]} (.gz or not) in FashionMNIST/raw or fashion-mnist; "
            "`metavd data fetch fashion-mnist` gets them."
        )
    return _plan("fashion-mnist", files, 10, (0.5, 0.5))


@dataset(
    "emnist",
    "handwritten letters and digits, 28 x 28 pixels, 10 to 62 classes by split; idx files or NIST's gzip.zip",
    options={"split": " or ".join(SPLITS), "upright": "turn the images, which NIST stores transposed"},
    defaults=PHOTOS,
    variants=tuple({"split": split} for split in SPLITS),
)
def plan_emnist(root: Path | str, *, split: str = "byclass", upright: bool = True) -> Plan:
    """Find EMNIST's files."""
    root = need_folder(root)
    choice("split", split, tuple(SPLITS))
    names = tuple(f"emnist-{split}-{half}-{what}" for half in ("train", "test")
                  for what in ("images-idx3-ubyte", "labels-idx1-ubyte"))  # fmt: skip
    folders = (".", "EMNIST/raw", "emnist", "EMNIST", "gzip", "emnist/gzip", "EMNIST/raw/gzip")
    files, archive = None if root.is_file() else _find(root, folders, names), None
    zips = [root / name for name in ("gzip.zip", "emnist.zip", "EMNIST/raw/gzip.zip", "emnist/gzip.zip")]
    for path in [root] if root.suffix == ".zip" else zips:
        if files is None and path.is_file() and _holds(path, f"gzip/{names[0]}.gz"):
            archive, files = path, tuple(path / f"gzip/{name}.gz" for name in names)
    if files is None:
        raise SourceError(
            f"{root}: there is no {names[0]} (.gz or not) and no gzip.zip in this folder or in EMNIST/raw; "
            "`metavd data fetch emnist` gets them."
        )
    first = 1 if split == "letters" else 0  # letters are numbered from 1
    return _plan("emnist", files, SPLITS[split], (0.1307, 0.3081), upright=upright, first=first, archive=archive)


# Finding


def _either(folder: Path, name: str) -> list[Path]:
    return [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]


def _holds(archive: Path, name: str) -> bool:
    with open_zip(archive) as members:
        return name in members.NameToInfo


def _find(root: Path, folders: tuple[str, ...], names: tuple[str, ...]) -> tuple[Path, ...] | None:
    for folder in folders:
        found = [_either(root / folder, name) for name in names]
        if any(found):
            for name, paths in zip(names, found, strict=True):
                refuse(not paths, root / folder / name, "this file (.gz or not) is missing beside the others.")
            return tuple(paths[0] for paths in found)
    return None


# Reading


def _plan(
    name: str,
    files: tuple[Path, ...],
    num_classes: int,
    moments: tuple[float, float],
    *,
    upright: bool = False,
    first: int = 0,
    archive: Path | None = None,
) -> Plan:
    """Plan images and labels of the train and of the test half, and perhaps the writers of both.

    `first` is the first label's number.
    """
    place = archive or files[0].parent
    axes = dict(zip(files, (3, 1, 3, 1, 2, 2), strict=False))

    def read(report: Report) -> Source | None:
        found = shared.each(
            report, lambda path: read_idx(path, axes[path], ">i4" if axes[path] == 2 else ">u1", archive), files
        )
        if found is None:
            return None
        x, y, test_x, test_y, *tables = found
        for at in (0, 2):
            _check_half(files[at : at + 2], found[at], found[at + 1], first, num_classes)
        sides = [" x ".join(map(str, part.shape[1:])) for part in (test_x, x)]
        refuse(sides[0] != sides[1], files[2], f"images are {sides[0]}, but the train images are {sides[1]}.")
        # QMNIST's test file lists 60,000 digits, of which MNIST's are the first.
        who = [_writers(files[4 + half], table, (y, test_y)[half], more=half == 1) for half, table in enumerate(tables)]
        found.clear()
        pictures = shared.join([x, test_x])
        return source(
            place, name, np.ascontiguousarray(pictures.transpose(0, 2, 1)) if upright else pictures,
            np.concatenate([y, test_y]).astype(np.int64) - first, client=np.concatenate(who) if who else None,
            test=np.repeat([False, True], [len(y), len(test_y)]), num_classes=num_classes,
            mean=moments[:1], std=moments[1:],
        )  # fmt: skip

    options = {"upright": upright, "base": first, "train": files[0].name}
    return Plan(name, place, (archive,) if archive else files, read, options)


def _check_half(paths: tuple[Path, ...], x: np.ndarray, y: np.ndarray, first: int, num_classes: int) -> None:
    images, labels = paths
    refuse(len(x) != len(y), labels, f"it has {len(y)} labels, but {images.name} has {len(x)} images.")
    shared.check_labels(labels, y, first, num_classes, lambda row: 8 + row)  # in the unpacked file


def _writers(path: Path, table: np.ndarray, y: np.ndarray, *, more: bool) -> np.ndarray:
    """Return who wrote each digit; the digits themselves stand in the first column, so a wrong file is seen.

    `more` lets the list be longer than the digits.
    """
    wrong = table.shape[1] < 3 or len(table) < len(y) or (len(table) > len(y) and not more)
    refuse(wrong, path, f"the list has shape {table.shape}, but it must have a row for each of {len(y)} digits.")
    table = table[: len(y)]
    other, below = table[:, 0] != y, table[:, 2] < 0
    row = int(other.argmax())
    what = f"row {row} is a {table[row, 0]}, but the image is a {y[row]}; the list belongs to other images."
    refuse(other.any(), path, what, 12 + row * 4 * table.shape[1])
    refuse(below.any(), path, f"row {below.argmax()} has a writer below 0.")
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
            refuse(name not in members.NameToInfo, archive, f"the archive has no {name}.")
            info = members.getinfo(name)
            # The member is gzipped itself, so it has two sizes to be checked, and this one is the outer.
            with shared.zip_member(archive, members, info, MAX_VALUES) as raw:
                return _parse(Stream(path, raw, info.file_size, MAX_VALUES + 64), info.file_size, axes, dtype)
    size = shared.size_of(path)
    with shared.open_stream(path, MAX_VALUES + 64) as stream:
        return _parse(stream, size, axes, dtype)


def _parse(stream: Stream, size: int, axes: int | None, dtype: str | None) -> np.ndarray:
    path = stream.path
    head = stream.read(4)
    known = len(head) == 4 and head[:2] == b"\0\0" and head[2] in TYPES and 1 <= head[3] <= 4
    refuse(not known, path, f"this is no idx file: it begins with {head.hex(' ') or 'nothing'}.", 0)
    kind, count = np.dtype(TYPES[head[2]]), head[3]
    other = (axes is not None and count != axes) or (dtype is not None and kind != np.dtype(dtype))
    wanted = f"{axes} of {np.dtype(dtype).name}"
    refuse(other, path, f"the file has {count} axes of type {kind.name}, but it must have {wanted}.", 2)
    lengths = stream.read(4 * count)
    refuse(len(lengths) < 4 * count, path, "the file ends inside its header.", 4 + len(lengths))
    shape = struct.unpack(f">{count}I", lengths)
    start, needed = 4 + 4 * count, math.prod(shape) * kind.itemsize
    limit = shared.unpack_limit(size, MAX_VALUES) if stream.packed else MAX_VALUES
    wrong = 0 in shape or needed > limit or (not stream.packed and start + needed != size)
    holds = "" if stream.packed else f"; the file holds {size - start}"
    refuse(wrong, path, f"the header declares shape {shape}, which takes {needed} bytes{holds}.", 4)
    data = stream.read(needed)
    refuse(len(data) < needed, path, f"the values end after {len(data)} of {needed} bytes.", start + len(data))
    rest = stream.end()
    refuse(rest, path, f"there are {rest} bytes after the last value.", start + needed)
    return np.frombuffer(data, kind).astype(kind.newbyteorder("="), copy=False).reshape(shape)


def _plan_npz(path: Path, *, writers: bool) -> Plan:
    def read(_: Report) -> Source:
        found = npz.read(path)
        wrong = found.x.ndim != 3 or found.x.dtype != np.uint8
        refuse(wrong, path, f"images are {found.x.dtype} of shape {found.x.shape}, but must be grey bytes.")
        return source(
            path, "mnist", found.x, found.y, client=found.client if writers else None, test=found.test,
            num_classes=10, mean=[0.1307], std=[0.3081],
        )  # fmt: skip

    return Plan("mnist", path, (path,), read, {"writers": writers, "layout": "npz"})
