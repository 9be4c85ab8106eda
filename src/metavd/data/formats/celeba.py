"""CelebA: the original layout, LEAF's lists with the same pictures, or celeba32.npz.

    img_align_celeba/000001.jpg ...          identity_CelebA.txt: "000001.jpg 2880"
    list_attr_celeba.txt: the number of pictures, the 40 names of attributes, then "000001.jpg -1 1 ..."

A client is a celebrity. Those with fewer than `least` pictures (5, as in LEAF) are left out. LEAF resizes to 84 x 84
and the released code from there to 32 x 32; here the picture is resized once, which differs by a rounding. LEAF's lists
and celeba32.npz only know the attribute Smiling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ...schema import nearest
from ..source import Source, SourceError
from . import npz
from .files import Report, Unread, choice, each, find, listing, need_folder, read_text, refuse, source
from .images import SIZE, Size, check_size, pictures, resize
from .leaf import FILE, Shards, collect, find_shards, read_shards
from .registry import PHOTOS, dataset

LAYOUTS = ("auto", "leaf", "original", "npz")
_NPZ = "celeba32.npz"
_ATTR, _IDENTITY, _PICTURES = "list_attr_celeba.txt", "identity_CelebA.txt", "img_align_celeba"
_HERE = (".", "celeba", "CelebA", "Anno", "celeba/Anno", "CelebA/Anno", "raw", "data/raw", "celeba/raw",
         "celeba/data/raw", "leaf/data/celeba/data/raw", "data/celeba/data/raw")  # fmt: skip
_LEAF_SIDE = 84
_LOOK = {"num_classes": 2, "mean": [0.5], "std": [0.5]}


@dataset(
    "celeba",
    "faces of celebrities, an attribute as label; original layout, LEAF's lists or celeba32.npz",
    options={
        "attribute": "which of the 40 attributes is the label",
        "size": SIZE,
        "least": "celebrities with fewer images are left out",
        "layout": " or ".join(LAYOUTS),
    },
    defaults={**PHOTOS, "partition": "natural"},
    variants=({"least": 1},),
)
def find_celeba(
    root: Path | str, *, attribute: str = "Smiling", size: Size = 32, least: int = 5, layout: str = "auto"
) -> Unread:
    """Find CelebA's files; "auto" is the first layout that is there and has the attribute."""
    root = need_folder(root)
    choice("layout", layout, LAYOUTS)
    if isinstance(least, bool) or not isinstance(least, int) or least < 1:
        raise SourceError(f"least is {least!r}, but it must be a whole number of pictures, at least 1.")
    pair, others = check_size(size), attribute != "Smiling"
    only = f"it only knows Smiling; the attribute {attribute!r} needs {_ATTR} and {_PICTURES}/."
    # Lists that somebody made on purpose come before the files that they were made from.
    shards = find_shards(root, "celeba") if layout == "leaf" or (layout == "auto" and not others) else None
    if shards is not None:
        refuse(others, shards.folder, only)
        return _find_leaf(root, shards, pair)
    attr = find(root, _HERE, [_ATTR]) if layout in ("auto", "original") else None
    if attr is not None:
        return _find_original(root, attr[0], attribute=attribute, size=pair, least=least)
    path = root if root.name == _NPZ else root / _NPZ
    if layout in ("auto", "npz") and path.is_file():
        refuse(others, path, only)
        return npz.found_in(path, "celeba", lambda found: _from_npz(path, found, pair), size=pair)
    names = {"leaf": "LEAF's celeba/all_data/*.json", "original": f"{_ATTR} with {_PICTURES}/", "npz": _NPZ}
    what = f"there is no {names.get(layout, ' or '.join(names.values()))} in this folder"
    raise SourceError(f"{root}: {what}; see https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html.")


def _pictures(root: Path) -> Path | None:
    folders = (root / base / _PICTURES for base in (*_HERE, "Img", "celeba/Img", "CelebA/Img"))
    # Kaggle's archive holds the folder twice.
    return next((path for folder in folders for path in (folder / _PICTURES, folder) if path.is_dir()), None)


def _find_original(root: Path, attr: Path, *, attribute: str, size: tuple[int, int] | None, least: int) -> Unread:
    identity, folder = find(root, _HERE, [_IDENTITY]), _pictures(root)
    if identity is None or folder is None:
        what = f"no {_IDENTITY}" if identity is None else f"no folder {_PICTURES} with CelebA's pictures"
        raise SourceError(f"{root}: there is {what} beside {_ATTR}, but CelebA needs all three.")

    def read(report: Report) -> Source:
        reads = (partial(_attribute, attr, attribute), partial(_table, identity[0], _lines(identity[0]), None, 1, 2))
        labels, people = each(report, lambda read: read(), reads)
        missing = next((name for name in labels if name not in people), None)
        refuse(missing, identity[0], f"there is no identity for {missing}, which {attr.name} lists.")
        person, count = np.unique([people[name] for name in labels], return_counts=True)
        keep = set(person[count >= least].tolist())
        names = sorted(name for name in labels if people[name] in keep)
        refuse(not names, identity[0], f"nobody has {least} pictures, the least that is asked for.")
        x = pictures([folder / name for name in names], size, 3, report)
        y, client = (np.array([table[name] for name in names]) for table in (labels, people))
        return source(folder, "celeba", x, y, client=client, **_LOOK)

    files = (attr, *identity, *listing(folder))
    return Unread("celeba", folder, files, read, {"attribute": attribute, "size": size, "least": least})


def _attribute(path: Path, attribute: str) -> dict[str, int]:
    """Return {picture: 0 or 1} of one attribute."""
    lines = _lines(path)
    (_, _, count), (_, start, names) = (next(lines, (0, 0, [])) for _ in range(2))
    odd = len(count) != 1 or not count[0].isdecimal() or not names
    refuse(odd, path, "line 1 must be the number of pictures and line 2 the names of the attributes.", 0)
    hint = nearest(attribute, names, f"the first are {', '.join(names[:5])}.")
    refuse(attribute not in names, path, f"there is no attribute {attribute!r}; {hint}", start)
    column = names.index(attribute) + 1
    found = _table(path, lines, {"1": 1, "-1": 0}, column, len(names) + 1)
    refuse(str(len(found)) != count[0], path, f"line 1 says {count[0][:12]} pictures, but {len(found)} are listed.", 0)
    return found


def _lines(path: Path) -> Iterator[tuple[int, int, list[str]]]:
    """Yield (line, byte, words) of the lines that are not empty."""
    offset = 0
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if words := line.split():
            yield number, offset, words
        offset += len(line.encode()) + 1


def _table(
    path: Path, lines: Iterator[tuple[int, int, list[str]]], values: dict[str, int] | None, column: int, columns: int
) -> dict[str, int]:
    """Return {picture: value} of one column: one of the values, or any number where there are none."""
    right = "1 or -1" if values else "a number"
    found: dict[str, int] = {}
    for number, offset, words in lines:
        many = f"line {number} has {len(words)} words, but it must have {columns}."
        refuse(len(words) != columns, path, many, offset)
        name, word = words[0], words[column]
        known = word in values if values else word.isascii() and word.isdecimal() and len(word) <= 12
        refuse(not known, path, f"line {number} has {word[:40]!r}, but it must be {right}.", offset)
        _check_name(path, name, f"line {number}", offset)
        refuse(name in found, path, f"line {number} lists {name} a second time.", offset)
        found[name] = values[word] if values else int(word)
    return found


def _check_name(path: Path, name: str, where: str, offset: int | None = None) -> None:
    wrong = name in ("", ".", "..") or any(letter in name for letter in "/\\\0:")
    refuse(wrong, path, f"{where} names {name[:80]!r}, but it must be a file in {_PICTURES}.", offset)


def _find_leaf(root: Path, shards: Shards, size: tuple[int, int] | None) -> Unread:
    folder = _pictures(root if root.is_dir() else root.parent)

    def read(report: Report) -> Source:
        users = read_shards(shards, report)
        if users.rows[0][1].kind != FILE:  # FederatedScope's shards hold the pixels themselves
            whole = collect(shards.folder, "celeba", users, (3, _LEAF_SIDE, _LEAF_SIDE), _LOOK)
            return replace(whole, x=resize(whole.x, size))
        if folder is None:
            raise SourceError(f"{root}: the lists name pictures, but there is no folder {_PICTURES} here.")
        for path, user in users.rows:
            for name in user.x:
                _check_name(path, name, f"user {user.name!r}")
        x = pictures([folder / name for _, user in users.rows for name in user.x], size, 3, report)
        return source(shards.folder, "celeba", x, users.labels(), client=users.clients(), test=users.test, **_LOOK)

    files = (*shards.files, *(listing(folder) if folder else ()))
    return Unread("celeba", shards.folder, files, read, {"size": size, "layout": "leaf"})


def _from_npz(path: Path, found: npz.Content, size: tuple[int, int] | None) -> Source:
    right = found.x.ndim == 4 and found.x.dtype == np.uint8 and found.client is not None
    refuse(not right, path, "it must hold uint8 images in colour, a label and a client of each.")
    return source(path, "celeba", resize(found.x, size), found.y, client=found.client, test=found.test, **_LOOK)
