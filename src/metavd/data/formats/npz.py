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

from ..source import Source, SourceError
from .cache import Note, cached, log
from .files import GIB, FileError, Plan, Report, attempt, choice, need_folder, open_zip, plain, source, zip_member

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


def load_npz(
    root: Path | str,
    *,
    channels: str = "auto",
    name: str | None = None,
    augment: bool = False,
    cache: Path | None = None,
    note: Note = log,
) -> Source:
    """Return the dataset of an .npz file; mean and standard deviation are measured on its train rows.

    Args:
        root: the file, or a folder that holds exactly one.
        channels: whether they come "first" or "last" in images of four axes; "auto" sees it where it can be seen.
        name: what the dataset is called; the name of the file by default.
        augment: whether crops and flips leave the label as it is.
        cache: folder for the cached copy; None reads the file.
        note: told why a copy could not be kept.
    """
    return cached(plan_npz(root, channels=channels, name=name, augment=augment), cache, note)


def plan_npz(root: Path | str, *, channels: str = "auto", name: str | None = None, augment: bool = False) -> Plan:
    """Find an .npz file."""
    choice("channels", channels, CHANNELS)
    path = find_npz(need_folder(root))

    def read_all(report: Report) -> Source | None:
        found = attempt(report, read, path, channels)
        if found is None:
            return None
        return attempt(
            report, source, path, name or path.stem, found.x, found.y, client=found.client, test=found.test,
            augment=augment,
        )  # fmt: skip

    return Plan(name or path.stem, path, (path,), read_all, {"channels": channels, "augment": augment})


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
        found: dict[str, tuple[str, np.ndarray] | None] = {}
        for part, keys in KEYS.items():
            present = [key for key in keys if key in members]
            if len(present) > 1:
                raise FileError(path, f"it holds both {present[0]!r} and {present[1]!r}, but only one can be meant.")
            if not present and (part == "x" or (part == "y" and labelled)):
                held = ", ".join(sorted(members)[:8]) or "nothing"
                raise FileError(path, f"it holds {held}, but it must hold {' or '.join(keys)}.")
            found[part] = (present[0], _array(path, archive, members[present[0]])) if present else None
    x, y, client = (None if found[part] is None else found[part][1] for part in ("x", "y", "client"))  # type: ignore[index]
    assert x is not None
    # Labels of one column are common; two columns are refused by their shape.
    y = y[:, 0] if y is not None and y.ndim == 2 and y.shape[1] == 1 else y
    return Content(_channels_first(path, x, channels), y, client, _flags(path, found["test"]))


def keys(path: Path) -> list[str]:
    """Return the names of the arrays in a file."""
    with open_zip(path) as archive:
        return sorted(info.filename.removesuffix(".npy") for info in archive.infolist())


def _channels_first(path: Path, x: np.ndarray, channels: str) -> np.ndarray:
    if x.ndim != 4:
        return x
    if channels == "auto":
        first, last = x.shape[1] in (1, 3, 4), x.shape[3] in (1, 3, 4)
        if first == last:
            raise FileError(
                path, f"images have shape {x.shape}, which does not tell where the channels are; pass "
                "channels='first' or 'last'."
            )  # fmt: skip
        channels = "first" if first else "last"
    return x if channels == "first" else np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def _flags(path: Path, entry: tuple[str, np.ndarray] | None) -> np.ndarray | None:
    if entry is None:
        return None
    key, flags = entry
    if flags.dtype.kind in "US":
        known = [np.asarray(word, flags.dtype) for word in ("train", "test")]
        train, test = flags == known[0], flags == known[1]
    elif flags.dtype.kind in "iu":
        train, test = flags == 0, flags == 1
    else:
        return flags  # bool, or a type that `arrays` refuses
    bad = ~(train | test)
    if bad.any():
        row = int(bad.reshape(-1).argmax())
        value = flags.reshape(-1)[row]
        raise FileError(
            path, f"row {row} of {key!r} is {plain(str(value))!r}, but it must be 0 or 1, or train or test."
        )
    return np.asarray(test)


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
        target = array.view(np.uint8)
        at = 0
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
        raise FileError(
            path, f"{info.filename} has no readable header ({plain(error)}); save it again.", info.header_offset
        ) from None
    lengths = tuple(int(length) for length in shape)
    if dtype.hasobject or dtype.kind not in "biufUS" or dtype.subdtype is not None:
        raise FileError(
            path, f"{info.filename} has type {plain(str(dtype))}, but only numbers are read, and nothing pickled.",
            info.header_offset,
        )  # fmt: skip
    if not 1 <= len(lengths) <= 4 or any(length < 1 for length in lengths) or dtype.itemsize == 0:
        raise FileError(
            path, f"{info.filename} has shape {lengths}, but it must have 1 to 4 axes, none empty.", info.header_offset
        )
    return lengths, bool(fortran), dtype
