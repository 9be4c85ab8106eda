"""Pictures in folders: class/picture, or client/class/picture; below train/ and test/ if both are there.

Names of folders are the classes and the clients, numbered in the order of the names, so that nothing depends on the
machine. Hidden files and notes (text, tables) are passed over; any other file that is no picture is an error, because
data that is silently left out is worse.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..source import Source
from .files import FileError, Report, Unread, choice, listing, need_folder, refuse, source
from .images import SIZE, SUFFIXES, Size, check_size, pictures
from .registry import dataset

NOTES = {".txt", ".md", ".csv", ".tsv", ".json", ".xml", ".html", ".db", ".ini", ".yaml", ".yml"}
NAMES = {"readme", "license", "licence", "copying", "changelog", "authors"}
_VALIDATION = {"val", "valid", "validation", "dev"}


class Row(NamedTuple):
    """One picture and whose it is."""

    path: Path
    label: str
    client: str | None
    test: bool


class Pictures(NamedTuple):
    """All pictures below a folder."""

    rows: list[Row]
    split: bool


def _channels(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


@dataset(
    "folder",
    "your own pictures: class/picture or client/class/picture, perhaps below train/ and test/",
    options={
        "size": SIZE,
        "channels": ("1 for grey, 3 for colour, none to see which", _channels),
        "name": "what the dataset is called; the folder's name if not given",
        "augment": "whether crops and flips leave the label as it is",
    },
)
def find_folder(
    root: Path | str, *, size: Size = None, channels: int | None = None, name: str | None = None, augment: bool = False
) -> Unread:
    """Find the pictures; without a size they must all be alike."""
    root = need_folder(root)
    choice("channels", channels, (None, 1, 3))
    pair = check_size(size)
    rows, split = scan(root)
    called = name or root.resolve().name
    files = tuple(row.path for row in rows)

    def read(report: Report) -> Source:
        x = pictures(files, pair, channels, report)
        client = None if rows[0].client is None else [row.client or "" for row in rows]
        test = np.array([row.test for row in rows]) if split else None
        # In the order of the letters, so that a folder's classes keep the numbers that they always had.
        classes, y = np.unique([row.label for row in rows], return_inverse=True)
        return source(root, called, x, y, client=client, test=test, augment=augment, classes=classes.tolist())

    return Unread(called, root, files, read, {"size": pair, "channels": channels, "augment": augment})


def scan(root: Path) -> Pictures:
    """Return the pictures in the order of their names, with classes and clients by the folders' names."""
    refuse(not root.is_dir(), root, "this is a file, but a folder of pictures is needed.")
    names = {path.name for path in _folders(root)}
    odd = min(names & _VALIDATION, default=None)
    what = f"there is {odd} beside train, but only train and test are read; move it into train or out."
    refuse("train" in names and odd, root, what)
    split = names == {"train", "test"}
    rows = [row for part in (("train", "test") if split else (".",)) for row in _half(root / part, part == "test")]
    refuse(not rows, root, "there is no picture at class/picture or client/class/picture in this folder.")
    mixed = len({row.client is None for row in rows}) > 1
    refuse(mixed, root, "train has clients and test has none, or the reverse; both must be alike.")
    labels = {row.label for row in rows}
    missing = min(labels - {row.label for row in rows if not row.test}, default=None)
    refuse(missing, root, f"test has a class {missing!r}, but train has none.")
    lower: dict[str, str] = {}
    for label in sorted(labels):
        other = lower.setdefault(label.casefold(), label)
        refuse(other != label, root, f"the classes {other!r} and {label!r} differ only in case; rename one.")
    return Pictures(rows, split)


def _half(root: Path, test: bool) -> list[Row]:
    rows: list[Row] = []
    first: tuple[bool, Path] | None = None
    for outer in _folders(root):
        inner, pictures = _folders(outer, alone=False), _pictures(outer)
        refuse(not inner and not pictures, outer, "there is no picture in this folder; remove it or fill it.")
        if inner and pictures:
            raise FileError(pictures[0], f"this picture lies beside the folder {inner[0].name}; move one of the two.")
        deep, other = first = first or (bool(inner), outer)
        what = f"it holds {'folders' if inner else 'pictures'}, but {other} does not"
        refuse(deep != bool(inner), outer, f"{what}; all must be class/picture, or all client/class/picture.")
        rows.extend(Row(path, outer.name, None, test) for path in pictures)
        for label in inner:
            for below in _folders(label, alone=False):
                raise FileError(below, "this folder is too deep; pictures must be at client/class/picture.")
            # A client need not have every class, so an empty one is no fault here.
            rows.extend(Row(path, label.name, outer.name, test) for path in _pictures(label))
    return rows


def _folders(folder: Path, *, alone: bool = True) -> list[Path]:
    """Return the folders in a folder; `alone` refuses pictures beside them."""
    found = listing(folder)
    for path in found if alone else ():
        stray = not path.is_dir() and path.suffix.lower() in SUFFIXES
        refuse(stray, path, "this picture is in no class; put it into a folder that is named after its class.")
    return [path for path in found if path.is_dir()]


def _pictures(folder: Path) -> list[Path]:
    pictures = []
    for path in listing(folder):
        suffix = path.suffix.lower()
        if path.is_dir() or (suffix not in SUFFIXES and (suffix in NOTES or path.name.lower() in NAMES)):
            continue
        what = f"files of type {path.suffix}" if suffix else "files without a type in their name"
        refuse(suffix not in SUFFIXES, path, f"{what} are not read; convert it to PNG or JPEG, or remove it.")
        pictures.append(path)
    return pictures
