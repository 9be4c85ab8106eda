"""MNIST, Fashion-MNIST and EMNIST: idx files, gzipped or not, and QMNIST's file of who wrote which digit.

An idx file: 2 zero bytes | type | number of axes | each axis as a big-endian 32-bit number | the values
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from ..source import Source, SourceError
from . import files as shared
from . import npz
from .files import Report, Unread, choice, each, find, need_folder, refuse, source
from .registry import PHOTOS, WRITERS, dataset

TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
SPLITS = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}
"""EMNIST's, and their numbers of classes."""
LISTS = ("auto", "yes", "no")
_NPZ = "mnist_by_writer.npz"
_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_DIGITS: dict[str, Any] = {"num_classes": 10, "mean": [0.1307], "std": [0.3081]}


@dataset(
    "mnist",
    "70,000 handwritten digits, 28 x 28 pixels; idx files with QMNIST's writers, or mnist_by_writer.npz",
    options={"writers": " or ".join(LISTS)},
    defaults=WRITERS,
)
def find_mnist(root: Path | str, *, writers: str = "auto") -> Unread:
    """Find MNIST's files; QMNIST's writers ("auto": if they are there) are the clients."""
    root = need_folder(root)
    choice("writers", writers, LISTS)
    path = root if root.name == _NPZ else root / _NPZ
    files = find(root, (".", "MNIST/raw", "mnist", "MNIST", "mnist/raw", "raw"), _NAMES)
    if path.is_file() and (files is None or writers != "no"):
        return npz.found_in(path, "mnist", lambda found: _from_npz(path, found, writers), writers=writers)
    if files is None:
        raise _missing(root, "mnist", f"{_NPZ} and no {_NAMES[0]} (.gz or not)", "MNIST/raw")
    names = [f"qmnist-{half}-labels-idx2-int" for half in ("train", "test")]
    places = (str(files[0].parent.absolute()), ".", "QMNIST/raw", "qmnist")
    lists = [path for name in names for path in find(root, places, [name]) or ()]
    if len(lists) < 2 and (writers == "yes" or (writers == "auto" and lists)):
        missing = next(name for name in names if not any(path.name.startswith(name) for path in lists))
        raise SourceError(f"{root}: there is no {missing} (.gz or not), but the writers need both lists.")
    return _found("mnist", (*files, *(lists if writers != "no" else ())), **_DIGITS)


@dataset(
    "fashion-mnist",
    "70,000 articles of clothing, 28 x 28 pixels, 10 classes; idx files",
    defaults=PHOTOS,
)
def find_fashion_mnist(root: Path | str) -> Unread:
    """Find Fashion-MNIST's files."""
    folders = ("FashionMNIST/raw", "fashion-mnist", "fashion_mnist", "fashion", "fashion-mnist/data/fashion", ".")
    files = find(need_folder(root), folders, _NAMES)
    if files is None:
        raise _missing(root, "fashion-mnist", f"{_NAMES[0]} (.gz or not)", "FashionMNIST/raw")
    return _found("fashion-mnist", files, num_classes=10, mean=[0.5], std=[0.5])


@dataset(
    "emnist",
    "handwritten letters and digits, 28 x 28 pixels, 10 to 62 classes by split; idx files or NIST's gzip.zip",
    options={"split": " or ".join(SPLITS), "upright": "turn the images, which NIST stores transposed"},
    defaults=PHOTOS,
    variants=tuple({"split": split} for split in SPLITS),
)
def find_emnist(root: Path | str, *, split: str = "byclass", upright: bool = True) -> Unread:
    """Find EMNIST's files."""
    root = need_folder(root)
    choice("split", split, tuple(SPLITS))
    names = tuple(f"emnist-{split}-{half}-{what}" for half in ("train", "test")
                  for what in ("images-idx3-ubyte", "labels-idx1-ubyte"))  # fmt: skip
    folders = (".", "EMNIST/raw", "emnist", "EMNIST", "gzip", "emnist/gzip", "EMNIST/raw/gzip")
    files, archive = find(root, folders, names), None
    zips = [root / name for name in ("gzip.zip", "emnist.zip", "EMNIST/raw/gzip.zip", "emnist/gzip.zip")]
    for path in [root] if root.suffix == ".zip" else zips:
        if files is None and path.is_file() and f"gzip/{names[0]}.gz" in npz.keys(path):
            archive, files = path, tuple(path / f"gzip/{name}.gz" for name in names)
    if files is None:
        raise _missing(root, "emnist", f"{names[0]} (.gz or not) and no gzip.zip", "EMNIST/raw")
    first = 1 if split == "letters" else 0  # letters are numbered from 1
    look = {**_DIGITS, "num_classes": SPLITS[split]}
    return _found("emnist", files, first=first, upright=upright, archive=archive, **look)


def _missing(root: Path | str, name: str, what: str, folder: str) -> SourceError:
    where = f"in this folder or in {folder}; `metavd data fetch {name}` gets them."
    return SourceError(f"{root}: there is no {what} {where}")


def _from_npz(path: Path, found: npz.Content, writers: str) -> Source:
    wrong = found.x.ndim != 3 or found.x.dtype != np.uint8
    refuse(wrong, path, f"images are {found.x.dtype} of shape {found.x.shape}, but must be grey bytes.")
    client = None if writers == "no" else found.client
    return source(path, "mnist", found.x, found.y, client=client, test=found.test, **_DIGITS)


def _found(
    name: str, files: tuple[Path, ...], *, upright: bool = False, first: int = 0, archive: Path | None = None,
    **look: Any,
) -> Unread:  # fmt: skip
    """Return what is to be read: images and labels of both halves, and perhaps the writers.

    `first` is the first label's number.
    """
    place = archive or files[0].parent
    axes = dict(zip(files, (3, 1, 3, 1, 2, 2), strict=False))

    def read(report: Report) -> Source:
        found = each(report, lambda path: read_idx(path, axes[path], archive), files)
        for images, labels, x, y in zip(files[:4:2], files[1:4:2], found[:4:2], found[1:4:2], strict=True):
            refuse(len(x) != len(y), labels, f"it has {len(y)} labels, but {images.name} has {len(x)} images.")
            right = range(first, first + look["num_classes"])
            shared.check_labels(labels, y, right, 8, 1)  # bytes of the unpacked file
        x, y, test_x, test_y, *tables = found
        sides = [" x ".join(map(str, part.shape[1:])) for part in (test_x, x)]
        refuse(sides[0] != sides[1], files[2], f"images are {sides[0]}, but the train images are {sides[1]}.")
        # QMNIST's test file lists 60,000 digits, of which MNIST's are the first.
        who = [_writers(files[4 + half], table, (y, test_y)[half], more=half == 1) for half, table in enumerate(tables)]
        found.clear()
        pictures = shared.join([x, test_x])
        return source(
            place, name, np.ascontiguousarray(pictures.transpose(0, 2, 1)) if upright else pictures,
            np.concatenate([y, test_y]).astype(np.int64) - first, client=np.concatenate(who) if who else None,
            test=np.repeat([False, True], [len(y), len(test_y)]), **look,
        )  # fmt: skip

    options = {"upright": upright, "base": first, "train": files[0].name}
    return Unread(name, place, (archive,) if archive else files, read, options)


def _writers(path: Path, table: np.ndarray, y: np.ndarray, *, more: bool) -> np.ndarray:
    """Return who wrote each digit; the digits themselves stand in the first column, so a wrong file is seen.

    `more` lets the list be longer than the digits.
    """
    wrong = table.shape[1] < 3 or len(table) < len(y) or (len(table) > len(y) and not more)
    refuse(wrong, path, f"the list has shape {table.shape}, but it must have a row for each of {len(y)} digits.")
    table = table[: len(y)]
    other = table[:, 0] != y
    row = int(other.argmax())
    what = f"row {row} is a {table[row, 0]}, but the image is a {y[row]}; the list belongs to other images."
    refuse(other.any(), path, what, 12 + row * 4 * table.shape[1])
    return table[:, 2].astype(np.int64)


def read_idx(path: Path, axes: int | None = None, archive: Path | None = None) -> np.ndarray:
    """Return an idx file's values, or say where it is wrong; bytes are counted in the unpacked file.

    Args:
        path: the file; with `archive`, archive / member.
        axes: how many it must have: 1 or 3 of bytes, 2 of 32-bit numbers.
        archive: a zip archive that holds it.
    """
    if archive is None:
        data = shared.read_bytes(path)
    else:
        with shared.open_zip(archive) as members:
            info = members.getinfo(path.relative_to(archive).as_posix())
            with shared.zip_member(archive, members, info) as raw:  # which is gzipped itself
                data = shared.Stream(path, raw, info.file_size).rest()
    count = data[3] if len(data) > 3 and data[:2] == b"\0\0" and data[2] in TYPES else 0
    refuse(not 1 <= count <= 4, path, f"this is no idx file: it begins with {data[:4].hex(' ') or 'nothing'}.", 0)
    kind, start = np.dtype(TYPES[data[2]]), 4 + 4 * count
    wanted = np.dtype(">i4" if axes == 2 else ">u1")
    other = axes is not None and (count, kind) != (axes, wanted)
    refuse(other, path, f"the file has {count} axes of type {kind.name}, but it must have {axes} of {wanted.name}.", 2)
    refuse(len(data) < start, path, "the file ends inside its header.", len(data))
    shape = struct.unpack_from(f">{count}I", data, 4)
    needed, held = math.prod(shape) * kind.itemsize, len(data) - start
    what = f"the header declares shape {shape}, which takes {needed} bytes, but {held} follow; fetch it again."
    refuse(needed != held or not needed, path, what, 4)
    return np.frombuffer(data, kind, offset=start).astype(kind.newbyteorder("="), copy=False).reshape(shape)
