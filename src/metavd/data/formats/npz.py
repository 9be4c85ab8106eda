"""NumPy's .npz with a dataset in it: images or features, labels, and perhaps clients and a split.

    images | features | x                    uint8 or float: (n, h, w), (n, h, w, c), (n, c, h, w) or (n, d)
    label | labels | y                       (n,) whole numbers from 0
    client | clients | writer | user         (n,) whole numbers, optional
    test | official_test | is_official_test  (n,) bool, optional
    split                                    (n,) 0 or 1, or "train" and "test", optional

The arrays are read here and not by `np.load`: what their headers declare is compared with what the archive holds
before any memory is taken, and nothing is ever unpickled. Other arrays in the file are not looked at.
"""

from __future__ import annotations

import math
import warnings
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ..source import KINDS, Source, SourceError
from .files import GIB, FileError, Plan, Report, choice, need_folder, open_zip, plain, source, zip_member
from .registry import dataset

KEYS = {
    "x": ("images", "features", "x"),
    "y": ("label", "labels", "y"),
    "client": ("client", "clients", "writer", "user"),
    "test": ("test", "official_test", "is_official_test", "split"),
}
CHANNELS = ("auto", "first", "last")
MAX_ARRAY = 16 * GIB
_MAX_HEADER = 10_000


class Content(NamedTuple):
    """What an archive holds, images with their channels first."""

    x: np.ndarray
    y: np.ndarray | None
    """None only where `read` was told that there may be no labels."""
    client: np.ndarray | None
    test: np.ndarray | None


@dataset(
    "npz",
    "your own arrays: images or features, label, and perhaps client and split, in one .npz",
    options={
        "channels": " or ".join(CHANNELS),
        "name": "what the dataset is called; the file's name if not given",
        "augment": "whether crops and flips leave the label as it is",
        "kind": "what rows of integers are: tokens, numbers, or auto: numbers if the array is called features",
    },
)
def plan_npz(
    root: Path | str, *, channels: str = "auto", name: str | None = None, augment: bool = False, kind: str = "auto"
) -> Plan:
    """Find an .npz file, which root is or holds as its only one."""
    choice("channels", channels, CHANNELS)
    choice("kind", kind, KINDS)
    path = find_npz(need_folder(root))
    called = name or path.stem

    def read_all(_: Report) -> Source:
        found = read(path, channels)
        as_numbers = kind == "auto" and "features" in keys(path)
        return source(
            path, called, found.x, found.y, client=found.client, test=found.test, augment=augment,
            kind="numbers" if as_numbers else kind,
        )  # fmt: skip

    return Plan(called, path, (path,), read_all, {"channels": channels, "augment": augment, "kind": kind})


def find_npz(root: Path) -> Path:
    """Return the file itself, or the only .npz of a folder."""
    if not root.is_dir():
        return root
    found = sorted(root.glob("*.npz"))
    if len(found) != 1:
        many = f"{len(found)} .npz files, {found[0].name} first" if found else "no .npz file"
        raise SourceError(f"{root}: there is {many} in this folder, but one must be named.")
    return found[0]


def read(path: Path, channels: str = "auto", *, labelled: bool = True) -> Content:
    """Return the arrays of a file; with labelled=False it need not have any labels."""
    with open_zip(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        found: dict[str, np.ndarray] = {}
        named: dict[str, str] = {}
        for part, keys in KEYS.items():
            present = [key for key in keys if key in members]
            if len(present) > 1:
                raise FileError(path, f"it holds both {present[0]!r} and {present[1]!r}, but only one can be meant.")
            if present:
                named[part], found[part] = present[0], _array(path, archive, members[present[0]])
            elif part == "x" or (part == "y" and labelled):
                held = ", ".join(sorted(members)[:8]) or "nothing"
                raise FileError(path, f"it holds {held}, but it must hold {' or '.join(keys)}.")
    y = found.get("y")
    if y is not None and y.ndim == 2 and y.shape[1] == 1:  # one column is common; two are refused by their shape
        y = y[:, 0]
    flags = _flags(path, named["test"], found["test"]) if "test" in found else None
    return Content(_channels_first(path, found["x"], channels), y, found.get("client"), flags)


def keys(path: Path) -> list[str]:
    """Return the names of the arrays in a file."""
    with open_zip(path) as archive:
        return sorted(info.filename.removesuffix(".npy") for info in archive.infolist())


def _channels_first(path: Path, x: np.ndarray, channels: str) -> np.ndarray:
    if x.ndim == 4 and channels == "auto":
        first, last = x.shape[1] in (1, 3, 4), x.shape[3] in (1, 3, 4)
        if first == last:
            what = f"images have shape {x.shape}, which does not tell where the channels are"
            raise FileError(path, f"{what}; pass channels='first' or 'last'.")
        channels = "first" if first else "last"
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if x.ndim == 4 and channels == "last" else x


def _flags(path: Path, key: str, flags: np.ndarray) -> np.ndarray:
    if flags.dtype.kind not in "USiu":
        return flags  # bool, or a type that `arrays` refuses
    train, test = (0, 1) if flags.dtype.kind in "iu" else (np.asarray(word, flags.dtype) for word in ("train", "test"))
    bad = ~((flags == train) | (flags == test)).reshape(-1)
    if bad.any():
        value = plain(str(flags.reshape(-1)[bad.argmax()]))
        raise FileError(path, f"row {bad.argmax()} of {key!r} is {value!r}, but it must be 0 or 1, or train or test.")
    return np.asarray(flags == test)


def _array(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    with zip_member(path, archive, info, MAX_ARRAY) as member:
        shape, fortran, dtype = _header(path, info, member)
        start, count = member.tell(), math.prod(shape)
        wanted = count * dtype.itemsize
        if start + wanted != info.file_size:
            raise FileError(
                path,
                f"{info.filename} declares shape {shape} and type {dtype}, which takes {wanted} bytes, but it holds "
                f"{info.file_size - start}.",
                info.header_offset,
            )
        array = np.empty(count, dtype)
        # In place and in pieces: the checksum is compared at the end of the member.
        target, at = array.view(np.uint8), 0
        while at < wanted and (piece := member.read(min(wanted - at, 1 << 22))):
            target[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        if at < wanted:
            raise FileError(path, f"{info.filename} ends after {at} of {wanted} bytes.", info.header_offset)
        member.read(1)
    return array.reshape(shape, order="F" if fortran else "C")


def _header(path: Path, info: zipfile.ZipInfo, member: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 2's headers need a second look, which is no news
            version = np.lib.format.read_magic(member)
            reader = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
            shape, fortran, dtype = reader(member, max_header_size=_MAX_HEADER)
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError, OverflowError) as error:
        fault = f"{info.filename} has no readable header ({plain(error)}); save it again."
        raise FileError(path, fault, info.header_offset) from None
    lengths, what = tuple(int(length) for length in shape), None
    if dtype.hasobject or dtype.kind not in "biufUS" or dtype.subdtype is not None:
        what = f"has type {plain(str(dtype))}, but only numbers are read, and nothing pickled."
    elif not 1 <= len(lengths) <= 4 or any(length < 1 for length in lengths) or dtype.itemsize == 0:
        what = f"has shape {lengths}, but it must have 1 to 4 axes, none empty."
    if what is not None:
        raise FileError(path, f"{info.filename} {what}", info.header_offset)
    return lengths, bool(fortran), dtype
