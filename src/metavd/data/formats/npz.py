"""NumPy's .npz with a dataset in it: images or features, labels, and perhaps clients and a split.

    images | features | x                    uint8 or float: (n, h, w), (n, h, w, c), (n, c, h, w) or (n, d)
    label | labels | y                       (n,) whole numbers from 0
    client | clients | writer | user         (n,) whole numbers, optional
    test | official_test | is_official_test  (n,) bool, optional
    split                                    (n,) 0 or 1, or "train" and "test", optional

What an array's header declares is compared with what the archive holds before NumPy takes any memory for it, and
nothing is ever unpickled. Other arrays in the file are not looked at.
"""

from __future__ import annotations

import math
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..source import KINDS, Source, SourceError
from .files import FileError, Unread, choice, need_folder, open_zip, plain, refuse, source, zip_member
from .registry import dataset

KEYS = {
    "x": ("images", "features", "x"),
    "y": ("label", "labels", "y"),
    "client": ("client", "clients", "writer", "user"),
    "test": ("test", "official_test", "is_official_test", "split"),
}
CHANNELS = ("auto", "first", "last")


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
def find_npz(
    root: Path | str, *, channels: str = "auto", name: str | None = None, augment: bool = False, kind: str = "auto"
) -> Unread:
    """Find an .npz file, which root is or holds as its only one."""
    choice("channels", channels, CHANNELS)
    choice("kind", kind, KINDS)
    path = npz_file(need_folder(root))

    def made(found: Content) -> Source:
        as_numbers = kind == "auto" and "features" in keys(path)
        return source(
            path, name or path.stem, found.x, found.y, client=found.client, test=found.test, augment=augment,
            kind="numbers" if as_numbers else kind,
        )  # fmt: skip

    return found_in(path, name or path.stem, made, channels, augment=augment, kind=kind)


def found_in(
    path: Path, name: str, made: Callable[[Content], Source], channels: str = "auto", **options: Any
) -> Unread:
    """Return what is to be read: a dataset in one .npz, made of what that holds."""
    return Unread(name, path, (path,), lambda _: made(read(path, channels)), {"channels": channels, **options})


def npz_file(root: Path) -> Path:
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
        for part, names in KEYS.items():
            present = [key for key in names if key in members]
            refuse(len(present) > 1, path, f"it holds both {' and '.join(map(repr, present[:2]))}, but one is needed.")
            if present:
                found[part] = _array(path, archive, members[present[0]])
            elif part == "x" or (part == "y" and labelled):
                held = ", ".join(sorted(members)[:8]) or "nothing"
                raise FileError(path, f"it holds {held}, but it must hold {' or '.join(names)}.")
    y = found.get("y")
    if y is not None and y.ndim == 2 and y.shape[1] == 1:  # one column is common; two are refused by their shape
        y = y[:, 0]
    flags = _flags(path, found["test"]) if "test" in found else None
    return Content(_channels_first(path, found["x"], channels), y, found.get("client"), flags)


def keys(path: Path) -> list[str]:
    """Return the names of the arrays in a file."""
    with open_zip(path) as archive:
        return sorted(name.removesuffix(".npy") for name in archive.namelist())


def _channels_first(path: Path, x: np.ndarray, channels: str) -> np.ndarray:
    if x.ndim == 4 and channels == "auto":
        first, last = x.shape[1] in (1, 3, 4), x.shape[3] in (1, 3, 4)
        what = f"images have shape {x.shape}, which does not tell where the channels are"
        refuse(first == last, path, f"{what}; pass channels='first' or 'last'.")
        channels = "first" if first else "last"
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if x.ndim == 4 and channels == "last" else x


def _flags(path: Path, flags: np.ndarray) -> np.ndarray:
    if flags.dtype.kind not in "USiu":
        return flags  # bool, or a type that `arrays` refuses
    train, test = (0, 1) if flags.dtype.kind in "iu" else (np.asarray(word, flags.dtype) for word in ("train", "test"))
    bad = ~((flags == train) | (flags == test)).reshape(-1)
    row = int(bad.argmax())
    what = f"row {row} of the split is {plain(str(flags.reshape(-1)[row]))!r}, but it must be 0 or 1, or train or test."
    refuse(bad.any(), path, what)
    return np.asarray(flags == test)


def _array(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """Return one array, of numbers or texts and not empty."""
    with zip_member(path, archive, info) as member, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 2's headers need a second look, which is no news
        old = np.lib.format.read_magic(member) == (1, 0)
        shape, _, dtype = getattr(np.lib.format, f"read_array_header_{1 if old else 2}_0")(member)
        start, wanted = member.tell(), math.prod(shape) * dtype.itemsize
    what = f"{info.filename} has shape {shape} and type {plain(str(dtype))}"
    plainly = "; save it with .astype(str), or numbers with .astype(int) or .astype(float)" * (dtype.kind == "O")
    odd = dtype.kind not in "biufUS" or dtype.subdtype is not None or not 1 <= len(shape) <= 4 or wanted == 0
    right = f"numbers or texts in 1 to 4 axes, none empty, are read, and nothing pickled{plainly}"
    refuse(odd or min(shape) < 0, path, f"{what}, but only {right}.", info.header_offset)
    held = f"which takes {wanted} bytes, but it holds {info.file_size - start}"
    refuse(start + wanted != info.file_size, path, f"{what}, {held}.", info.header_offset)
    with zip_member(path, archive, info) as member:
        array: np.ndarray = np.lib.format.read_array(member, allow_pickle=False)
        member.read(1)  # to the end, where the checksum is compared
    return array
