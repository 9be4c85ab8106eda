"""LEAF's JSON shards: FEMNIST with its pixels, and the lists of users that CelebA shares with it.

    {"users": ["f0000_14", ...], "num_samples": [141, ...],
     "user_data": {"f0000_14": {"x": [[784 numbers], ...], "y": [52, ...]}, ...}}

Pixels are floats 0 to 1, as LEAF writes them, or whole numbers 0 to 255, as others do; which of the two is decided for
the whole dataset and checked for every user. (The released code casts to bytes without looking, which turns LEAF's
floats into black pictures.) Shards are read in the order of their names, and a client's id is the place of its name
among all names, so that neither depends on the machine.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..source import Source, SourceError
from . import files
from .files import FileError, Report, Unread, each, listing, need_folder, numbered, plain, reading, refuse
from .registry import WRITERS, dataset

FEMNIST_CLASSES = 62
_TEXT = 4
"""Where the text stands in a row of Sent140, after mood, date, query and user."""
_SIDE = 28
SPLIT = {"split": "read LEAF's own train/ and test/ even beside all_data/"}

# What a user's rows are, as sentences call it. EITHER says nothing of the scale: all pixels are 0 or 1.
UNIT, EITHER, BYTE = "pixels 0 to 1", "pixels 0 and 1", "pixels 0 to 255"
FILE, SPEECH, TWEET = "names of files", "speeches", "tweets"


class User(NamedTuple):
    """One user's rows in one shard."""

    name: str
    x: np.ndarray | list[str]
    """(n, d) bytes, or texts."""
    y: np.ndarray
    kind: str
    """One of the six above."""


class Shards(NamedTuple):
    """Which JSON files make a dataset, and which of them are test rows."""

    folder: Path
    files: tuple[Path, ...]
    test: tuple[bool, ...] | None


class Users(NamedTuple):
    """All users' rows, in the order of the shards, and which are test rows."""

    rows: list[tuple[Path, User]]
    test: np.ndarray | None

    def labels(self) -> np.ndarray:
        """(n,) of all rows."""
        return np.concatenate([user.y for _, user in self.rows])

    def names(self) -> list[str]:
        """(n) the name of each row's user."""
        return [user.name for _, user in self.rows for _ in user.y]

    def clients(self) -> np.ndarray:
        """(n,) the place of each row's user among the sorted names."""
        return np.repeat(numbered([user.name for _, user in self.rows]), [len(user.y) for _, user in self.rows])


@dataset(
    "femnist",
    "handwriting of 3,550 writers, 28 x 28 pixels, 62 classes; LEAF's JSON shards",
    options=SPLIT,
    defaults=WRITERS,
)
def find_femnist(root: Path | str, *, split: bool = False) -> Unread:
    """Find FEMNIST's shards."""
    shards = need_shards(root, "femnist", split)

    def read(report: Report) -> Source:
        look = {"num_classes": FEMNIST_CLASSES, "mean": [0.1307], "std": [0.3081]}
        return collect(shards.folder, "femnist", read_shards(shards, report), (1, _SIDE, _SIDE), look)

    return Unread("femnist", shards.folder, shards.files, read, {"split": split})


# Finding


def need_shards(root: Path | str, name: str, split: bool) -> Shards:
    """Return a dataset's shards, or say how they are made."""
    shards = find_shards(need_folder(root), name, split)
    if shards is None:
        raise SourceError(
            f"{root}: there are no LEAF shards ({name}/all_data/*.json) in this folder; make them with LEAF's "
            f"data/{name}/preprocess.sh."
        )
    return shards


def find_shards(root: Path, name: str, split: bool = False) -> Shards | None:
    """Return the JSON files below root in the folders that LEAF and FederatedScope use."""
    if root.is_file():
        return Shards(root, (root,), None) if root.suffix == ".json" else None
    bases = (".", "data", "raw", name, f"{name}/data", f"{name}/raw", f"leaf/data/{name}/data", f"data/{name}/data")
    for base in bases:
        folder = root / base
        whole, train, test = (_jsons(folder / part) for part in ("all_data", "train", "test"))
        if whole and not (split and train and test):
            return Shards(folder / "all_data", whole, None)
        if train and test:
            return Shards(folder, train + test, (False,) * len(train) + (True,) * len(test))
        own = _jsons(folder) if base != "." or root.name in (name, "all_data") else ()
        if own:
            return Shards(folder, own, None)
    return None


def _jsons(folder: Path) -> tuple[Path, ...]:
    return tuple(path for path in listing(folder) if path.suffix == ".json") if folder.is_dir() else ()


# Reading


def read_shards(shards: Shards, report: Report) -> Users:
    """Read all shards; a user may stand in one train and one test shard, and else only once."""
    rows: list[tuple[Path, User]] = []
    flags: list[np.ndarray] = []
    seen: dict[tuple[str, bool], Path] = {}
    read = each(report, read_shard, shards.files)
    for path, flag, users in zip(shards.files, shards.test or (False,) * len(read), read, strict=True):
        for user in users:
            other = seen.setdefault((user.name, flag), path)
            what = f"user {user.name!r} already stands in {other.name}; remove one of the two."
            refuse(other != path, path, what)
            if len(user.y):
                rows.append((path, user))
                flags.append(np.full(len(user.y), flag))
    if not rows:
        raise SourceError(f"{shards.folder}: no user of these shards has a row.")
    texts = any(user.kind in (FILE, SPEECH, TWEET) for _, user in rows)
    telling = [(path, user) for path, user in rows if texts or user.kind != EITHER]
    for path, user in telling:
        first = telling[0][1]
        has = f"user {user.name!r} has {user.kind}, but user {first.name!r} has {first.kind}"
        refuse(user.kind != first.kind, path, f"{has}; all must have the same.")
    return Users(rows, np.concatenate(flags) if shards.test else None)


def collect(folder: Path, name: str, users: Users, shape: tuple[int, ...], look: dict[str, Any]) -> Source:
    """Return the source of users whose rows are pixels, (c, h, w) of channels last in the file."""
    unit = all(user.kind != BYTE for _, user in users.rows)
    channels, height, width = shape
    wanted, parts = channels * height * width, []
    for path, user in users.rows:
        texts, numbers = isinstance(user.x, list), np.shape(user.x)[-1]
        has = f"a row of user {user.name!r} holds {user.kind if texts else f'{numbers} numbers'}"
        refuse(texts or numbers != wanted, path, f"{has}, but it must hold {wanted} pixels.")
        pixels = np.asarray(user.x)
        if user.kind == EITHER and unit:
            pixels = pixels * np.uint8(255)
        parts.append(pixels.reshape(-1, height, width, channels).transpose(0, 3, 1, 2))
    y, client = users.labels(), users.clients()
    users.rows.clear()
    return files.source(folder, name, files.join(parts), y, client=client, test=users.test, **look)


def read_shard(path: Path) -> list[User]:
    """Return the users of one JSON file, in its order."""
    text = files.read_text(path)
    with reading(path):
        try:
            content = json.loads(text, object_hook=_object)
        except json.JSONDecodeError as error:
            offset = len(text[: error.pos].encode())
            raise FileError(path, f"this is no JSON, or it is cut off: {plain(error.msg).lower()}.", offset) from None
    del text
    keys = ("users", "num_samples", "user_data")
    names: Any
    counts: Any
    names, counts, rows = (content.get(key) for key in keys) if isinstance(content, dict) else (None,) * 3
    lists = isinstance(names, list) and isinstance(counts, list) and all(isinstance(name, str) for name in names)
    if not lists or len(names) != len(counts) or not isinstance(rows, dict):
        raise FileError(path, "this is no LEAF shard: it must have users and num_samples, alike long, and user_data.")
    listed = set(names)
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    refuse(twice is not None, path, f"user {twice!r} stands in the list of users twice.")
    for name, user in rows.items():
        # LEAF's own split leaves users behind that it dropped, with no rows.
        empty = isinstance(user, User) and len(user.y) == 0
        refuse(name not in listed and not empty, path, f"user_data holds {name!r}, who is not among the users.")
    return [_user(path, name, rows.get(name), count) for name, count in zip(names, counts, strict=True)]


def _user(path: Path, name: str, user: Any, count: Any) -> User:
    refuse(isinstance(user, ValueError), path, f"user {name!r}: {user}")
    if not isinstance(user, User):
        raise FileError(path, f"user {name!r} must have rows x and labels y in user_data.")
    what = f"user {name!r} has {len(user.y)} rows, but num_samples says {str(count)[:40]}."
    refuse(type(count) is not int or count != len(user.y), path, what)
    return user._replace(name=name)


def _object(content: dict[str, Any]) -> Any:
    """Turn a user's rows into arrays as soon as they are read: as Python numbers a shard would take a gigabyte.

    What is wrong with them is returned, and told when the user's name is known.
    """
    try:
        return _rows(content["x"], content["y"]) if "x" in content and "y" in content else content
    except ValueError as fault:
        return fault


def _rows(x: Any, y: Any) -> User:
    """Return a user without a name yet."""
    if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
        sizes = " and ".join(str(len(v)) if isinstance(v, list) else type(v).__name__ for v in (x, y))
        raise ValueError(f"x and y must be lists with an entry for each row, but they are {sizes}.")
    texts = bool(x) and all(isinstance(row, str) for row in x)
    if texts and all(isinstance(label, str) and len(label) == 1 for label in y):
        return User("", x, np.array(y, "U1"), SPEECH)
    for row, label in enumerate(y):
        # LEAF writes CelebA's labels as 0.0 and 1.0.
        if type(label) not in (int, float) or not 0 <= label < 2**31 or int(label) != label:
            raise ValueError(f"row {row} has label {str(label)[:40]}, but labels must be whole numbers from 0.")
    labels = np.array(y, np.int64)
    if texts or not x:
        return User("", x, labels, FILE if x else EITHER)
    if all(isinstance(row, list) and len(row) > _TEXT and isinstance(row[_TEXT], str) for row in x):
        return User("", [row[_TEXT] for row in x], labels, TWEET)
    return User("", *_pixels(x, labels))


def _pixels(x: list[Any], labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, str]:
    try:
        values = np.array(x)
    except (ValueError, OverflowError):
        raise ValueError("its rows differ in length, but all must have the same number of pixels.") from None
    if values.dtype.kind not in "iuf" or values.ndim < 2 or 0 in values.shape:
        raise ValueError("every row of x must be a list of numbers or the name of a file.")
    values = values.reshape(len(x), -1)
    unit = not bool((values > 1).any())  # not of max(), which is NaN where one is
    bad = ~((values >= 0) & (values <= 255) & (unit | (values == np.floor(values))))
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        found = f"pixel {column} of row {row} is {values[row, column]:g}"
        raise ValueError(f"{found}, but pixels must be 0 to 1, or whole numbers 0 to 255.")
    if unit and not bool(((values == 0) | (values == 1)).all()):
        return np.rint(values * 255).astype(np.uint8), labels, UNIT
    return values.astype(np.uint8), labels, EITHER if unit else BYTE
