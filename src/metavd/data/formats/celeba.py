"""CelebA: the original layout, LEAF's lists with the same pictures, or celeba32.npz.

    img_align_celeba/000001.jpg ...          identity_CelebA.txt: "000001.jpg 2880"
    list_attr_celeba.txt: the number of pictures, the 40 names of attributes, then "000001.jpg -1 1 ..."

A client is a celebrity. Those with fewer than `least` pictures (5, as in LEAF) are left out. LEAF resizes to 84 x 84
and the released code from there to 32 x 32; here the picture is resized once, which differs by a rounding.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..source import Source, SourceError
from . import npz
from .cache import Note, cached, log
from .files import FileError, Plan, Report, attempt, choice, listing, need_folder, numbered, read_bytes, source
from .images import Size, Stack, check_size, resize
from .leaf import Shards, Users, collect, find_shards, read_shards

LAYOUTS = ("auto", "leaf", "original", "npz")
_NPZ = "celeba32.npz"
_ATTR, _IDENTITY, _PICTURES = "list_attr_celeba.txt", "identity_CelebA.txt", "img_align_celeba"
_HERE = (".", "celeba", "CelebA", "Anno", "celeba/Anno", "CelebA/Anno", "raw", "data/raw", "celeba/raw",
         "celeba/data/raw", "leaf/data/celeba/data/raw", "data/celeba/data/raw")  # fmt: skip
_LEAF_SIDE = 84


def load_celeba(
    root: Path | str,
    *,
    attribute: str = "Smiling",
    size: Size = 32,
    least: int = 5,
    layout: str = "auto",
    cache: Path | None = None,
    note: Note = log,
) -> Source:
    """Return CelebA, one attribute as the label and the celebrity as the client.

    Args:
        root: the folder that holds the files, or celeba/ with them; see above.
        attribute: any of the 40, such as "Male"; LEAF's lists and celeba32.npz only know "Smiling".
        size: one side of the square pictures, (height, width), or None for as they are.
        least: celebrities with fewer pictures are left out (original layout; LEAF has done so itself).
        layout: "leaf", "original", "npz", or "auto": the first of them that is there and has the attribute.
        cache: folder for the cached copy; None reads the files.
        note: told why a copy could not be kept.
    """
    return cached(plan_celeba(root, attribute=attribute, size=size, least=least, layout=layout), cache, note)


def plan_celeba(
    root: Path | str, *, attribute: str = "Smiling", size: Size = 32, least: int = 5, layout: str = "auto"
) -> Plan:
    """Find CelebA's files."""
    root = need_folder(root)
    choice("layout", layout, LAYOUTS)
    if isinstance(least, bool) or not isinstance(least, int) or least < 1:
        raise SourceError(f"least is {least!r}, but it must be a whole number of pictures, at least 1.")
    pair = check_size(size)
    # Lists that somebody made on purpose come before the files that they were made from.
    if layout in ("auto", "leaf") and (layout == "leaf" or attribute == "Smiling"):
        shards = find_shards(root, "celeba")
        if shards is not None:
            return _plan_leaf(root, shards, attribute, pair)
    if layout in ("auto", "original"):
        attr = _first(root, _ATTR)
        if attr is not None:
            return _plan_original(root, attr, attribute=attribute, size=pair, least=least)
    if layout in ("auto", "npz"):
        path = root if root.name == _NPZ else root / _NPZ
        if path.is_file():
            return _plan_npz(path, attribute, pair)
    what = {"leaf": "LEAF's celeba/all_data/*.json", "original": _ATTR, "npz": _NPZ}.get(
        layout, f"{_ATTR} with {_PICTURES}/, LEAF's celeba/all_data/*.json or {_NPZ}"
    )
    raise SourceError(
        f"{root}: there is no {what} in this folder; see https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html."
    )


def _first(root: Path, name: str) -> Path | None:
    return next((root / base / name for base in _HERE if (root / base / name).exists()), None)


def _pictures(root: Path) -> Path:
    extra = ("Img", "celeba/Img", "CelebA/Img")
    for base in (*_HERE, *extra):
        folder = root / base / _PICTURES
        inner = folder / _PICTURES  # Kaggle's archive holds the folder twice
        if inner.is_dir():
            return inner
        if folder.is_dir():
            return folder
    raise SourceError(f"{root}: there is no folder {_PICTURES} with CelebA's pictures here.")


# Original


def _plan_original(root: Path, attr: Path, *, attribute: str, size: tuple[int, int] | None, least: int) -> Plan:
    identity = _first(root, _IDENTITY)
    if identity is None:
        raise SourceError(f"{root}: there is no {_IDENTITY} beside {_ATTR}; without it nobody is a client.")
    folder = _pictures(root)
    files = (attr, identity, *listing(folder))

    def read(report: Report) -> Source | None:
        labels = attempt(report, read_attribute, attr, attribute)
        people = attempt(report, read_identity, identity)
        if labels is None or people is None:
            return None
        missing = next((name for name in labels if name not in people), None)
        if missing is not None:
            report(FileError(identity, f"there is no identity for {missing}, which {attr.name} lists."))
            return None
        person, count = np.unique([people[name] for name in labels], return_counts=True)
        keep = set(person[count >= least].tolist())
        names = sorted(name for name in labels if people[name] in keep)
        if not names:
            report(FileError(identity, f"nobody has {least} pictures, the least that is asked for."))
            return None
        x = _decode([folder / name for name in names], size, report)
        if x is None:
            return None
        return _source(folder, x, np.array([labels[n] for n in names]), np.array([people[n] for n in names]))

    return Plan("celeba", folder, files, read, {"attribute": attribute, "size": size, "least": least})


def read_attribute(path: Path, attribute: str) -> dict[str, int]:
    """Return {picture: 0 or 1} of one attribute."""
    lines = _lines(path)
    head = [next(lines, (0, 0, [])) for _ in range(2)]
    (_, _, count), (_, start, names) = head
    if len(count) != 1 or not count[0].isdigit() or not names:
        raise FileError(path, "line 1 must be the number of pictures and line 2 the names of the attributes.", 0)
    if attribute not in names:
        close = difflib.get_close_matches(attribute, names, n=3, cutoff=0.5) or names[:5]
        raise FileError(path, f"there is no attribute {attribute!r}; did you mean {' or '.join(close)}?", start)
    column = names.index(attribute) + 1
    found: dict[str, int] = {}
    for number, offset, words in lines:
        if len(words) != len(names) + 1:
            raise FileError(path, f"line {number} has {len(words)} words, but it must have {len(names) + 1}.", offset)
        _new(path, words[0], found, number, offset)
        if words[column] not in ("1", "-1"):
            raise FileError(path, f"line {number} has {words[column][:40]!r}, but it must be 1 or -1.", offset)
        found[words[0]] = int(words[column] == "1")
    if len(found) != int(count[0][:12]):
        raise FileError(path, f"line 1 says {count[0][:12]} pictures, but {len(found)} are listed.", 0)
    return found


def read_identity(path: Path) -> dict[str, int]:
    """Return {picture: celebrity}."""
    found: dict[str, int] = {}
    for number, offset, words in _lines(path):
        if len(words) != 2 or not words[1].isascii() or not words[1].isdigit() or len(words[1]) > 12:
            raise FileError(path, f"line {number} must be the name of a picture and a number.", offset)
        _new(path, words[0], found, number, offset)
        found[words[0]] = int(words[1])
    return found


def _lines(path: Path) -> Iterator[tuple[int, int, list[str]]]:
    """Yield (line, byte, words) of the lines that are not empty."""
    offset = 0
    for number, line in enumerate(read_bytes(path).split(b"\n"), 1):
        try:
            words = line.decode().split()
        except UnicodeDecodeError as error:
            raise FileError(path, f"line {number} is no UTF-8 text.", offset + error.start) from None
        if words:
            yield number, offset, words
        offset += len(line) + 1


def _new(path: Path, name: str, found: dict[str, int], number: int, offset: int) -> None:
    _plain_name(path, name, f"line {number}", offset)
    if name in found:
        raise FileError(path, f"line {number} lists {name} a second time.", offset)


def _plain_name(path: Path, name: str, where: str, offset: int | None = None) -> str:
    if name in ("", ".", "..") or any(letter in name for letter in "/\\\0:"):
        raise FileError(path, f"{where} names {name[:80]!r}, but it must be a file in {_PICTURES}.", offset)
    return name


# LEAF


def _plan_leaf(root: Path, shards: Shards, attribute: str, size: tuple[int, int] | None) -> Plan:
    if attribute != "Smiling":
        raise SourceError(f"{shards.folder}: LEAF's lists only know Smiling; use layout='original' for another.")
    try:
        folder: Path | None = _pictures(root if root.is_dir() else root.parent)
    except SourceError:
        folder = None  # FederatedScope's shards hold the pixels themselves
    files = (*shards.files, *(listing(folder) if folder else ()))

    def read(report: Report) -> Source | None:
        users = read_shards(shards, report)
        if users is None:
            return None
        if users.rows[0][1].kind != "file":
            return _leaf_pixels(shards, users, size, report)
        if folder is None:
            report(SourceError(f"{root}: the lists name pictures, but there is no folder {_PICTURES} here."))
            return None
        paths = []
        for path, user in users.rows:
            for name in user.x:
                if attempt(report, _plain_name, path, name, f"user {user.name!r}") is None:
                    return None
                paths.append(folder / name)
        y = np.concatenate([user.y for _, user in users.rows])
        names = np.repeat(numbered([user.name for _, user in users.rows]), [len(user.y) for _, user in users.rows])
        x = _decode(paths, size, report)
        return None if x is None else _source(shards.folder, x, y, names, users.test)

    return Plan("celeba", shards.folder, files, read, {"size": size, "layout": "leaf"})


def _leaf_pixels(shards: Shards, users: Users, size: tuple[int, int] | None, report: Report) -> Source | None:
    wanted = _LEAF_SIDE * _LEAF_SIDE * 3
    for path, user in users.rows:
        width = np.asarray(user.x).shape[1]
        if width != wanted:
            report(FileError(path, f"a row of user {user.name!r} has {width} numbers, but it must have {wanted}."))
            return None
    whole = collect(shards.folder, "celeba", users, (3, _LEAF_SIDE, _LEAF_SIDE), num_classes=2, mean=0.5, std=0.5)
    return replace(whole, x=resize(whole.x, size))


# Both and npz


def _decode(paths: list[Path], size: tuple[int, int] | None, report: Report) -> np.ndarray | None:
    stack = Stack(len(paths), size, channels=3)
    for path in paths:
        attempt(report, stack.add, path)
    return stack.x if stack.full else None


def _source(place: Path, x: np.ndarray, y: np.ndarray, client: np.ndarray, test: np.ndarray | None = None) -> Source:
    return source(place, "celeba", x, y, client=client, test=test, num_classes=2, mean=[0.5], std=[0.5])


def _plan_npz(path: Path, attribute: str, size: tuple[int, int] | None) -> Plan:
    if attribute != "Smiling":
        raise FileError(path, f"it only knows Smiling; the attribute {attribute!r} needs {_ATTR} and {_PICTURES}/.")

    def read(report: Report) -> Source | None:
        found = attempt(report, npz.read, path)
        if found is None:
            return None
        if found.x.ndim != 4 or found.x.dtype != np.uint8 or found.client is None:
            report(FileError(path, "it must hold uint8 images in colour, a label and a client of each."))
            return None
        assert found.y is not None  # or else `read` would have refused the file
        return _source(path, resize(found.x, size), found.y, found.client, found.test)

    return Plan("celeba", path, (path,), read, {"size": size, "layout": "npz"})
