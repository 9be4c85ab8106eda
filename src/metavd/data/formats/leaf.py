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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..source import Source, SourceError
from . import files
from .files import GIB, FileError, Plan, Report, attempt, listing, need_folder, numbered, plain, refuse
from .registry import WRITERS, dataset

MAX_SHARD = 4 * GIB
FEMNIST_CLASSES = 62
_TWEET = 4
"""Where the text stands in a row of Sent140, after mood, date, query and user."""
_SIDE = 28
_SAYS = {"unit": "pixels 0 to 1", "either": "pixels 0 and 1", "byte": "pixels 0 to 255", "file": "names of files",
         "speech": "speeches", "tweet": "tweets"}  # fmt: skip
SPEECH, TWEET = "speech", "tweet"
SPLIT = {"split": "read LEAF's own train/ and test/ even beside all_data/"}


class User(NamedTuple):
    """One user's rows in one shard."""

    name: str
    x: np.ndarray | list[str]
    """(n, d) bytes, or names of picture files."""
    y: np.ndarray
    kind: str
    """What the pixels were: "unit" 0 to 1, "byte" 0 to 255, "either" if all are 0 or 1, "file" for names.

    "speech" for texts whose labels are their next characters, "tweet" for Sent140's.
    """


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
def plan_femnist(root: Path | str, *, split: bool = False) -> Plan:
    """Find FEMNIST's shards."""
    shards = need_shards(root, "femnist", split)

    def read(report: Report) -> Source | None:
        users = read_shards(shards, report)
        look = {"num_classes": FEMNIST_CLASSES, "mean": [0.1307], "std": [0.3081]}
        return None if users is None else collect(shards.folder, "femnist", users, (1, _SIDE, _SIDE), look)

    return Plan("femnist", shards.folder, shards.files, read, {"split": split})


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
        whole = _jsons(folder / "all_data")
        train, test = _jsons(folder / "train"), _jsons(folder / "test")
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


def read_shards(shards: Shards, report: Report) -> Users | None:
    """Read all shards; a user may stand in one train and one test shard, and else only once."""
    rows: list[tuple[Path, User]] = []
    flags: list[np.ndarray] = []
    seen: dict[tuple[str, bool], Path] = {}
    whole = True
    for path, flag in zip(shards.files, shards.test or (False,) * len(shards.files), strict=True):
        users = attempt(report, read_shard, path)
        whole &= users is not None
        for user in users or ():
            other = seen.setdefault((user.name, flag), path)
            if other != path:
                whole = False
                report(FileError(path, f"user {user.name!r} already stands in {other.name}; remove one of the two."))
            if len(user.y):
                rows.append((path, user))
                flags.append(np.full(len(user.y), flag))
    if not whole:
        return None
    if not rows:
        raise SourceError(f"{shards.folder}: no user of these shards has a row.")
    _check_kinds(rows)
    return Users(rows, np.concatenate(flags) if shards.test else None)


def _check_kinds(rows: Sequence[tuple[Path, User]]) -> None:
    named = any(user.kind in ("file", SPEECH, TWEET) for _, user in rows)
    telling = [(path, user) for path, user in rows if named or user.kind != "either"]
    for path, user in telling:
        first = telling[0][1]
        has = f"user {user.name!r} has {_SAYS[user.kind]}, but user {first.name!r} has {_SAYS[first.kind]}"
        refuse(user.kind != first.kind, path, f"{has}; all must have the same.")


def collect(folder: Path, name: str, users: Users, shape: tuple[int, ...], look: dict[str, Any]) -> Source:
    """Return the source of users whose rows are pixels, (c, h, w) of channels last in the file."""
    unit = not any(user.kind == "byte" for _, user in users.rows)
    channels, height, width = shape
    parts = []
    for path, user in users.rows:
        words = user.kind in ("file", SPEECH, TWEET)
        has = _SAYS[user.kind] if words else f"{np.shape(user.x)[1]} numbers"
        wanted = channels * height * width
        what = f"a row of user {user.name!r} holds {has}, but it must hold {wanted} pixels."
        refuse(words or np.shape(user.x)[1] != wanted, path, what)
        pixels = np.asarray(user.x)
        if user.kind == "either" and unit:
            pixels = pixels * np.uint8(255)
        parts.append(pixels.reshape(-1, height, width, channels).transpose(0, 3, 1, 2))
    y, client = users.labels(), users.clients()
    users.rows.clear()
    return files.source(folder, name, files.join(parts), y, client=client, test=users.test, **look)


def read_shard(path: Path) -> list[User]:
    """Return the users of one JSON file, in its order."""
    text = files.read_text(path, MAX_SHARD)
    try:
        content = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        end = " (the file ends here)" if error.pos >= len(text.rstrip()) else ""
        what = f"this is no JSON{end}: {plain(error.msg).lower()}."
        raise FileError(path, what, len(text[: error.pos].encode())) from None
    except RecursionError:
        raise FileError(path, "the JSON is nested too deeply to be LEAF's.") from None
    except _NotFiniteError as error:
        raise FileError(path, f"the JSON holds {error}, but pixels and labels must be finite numbers.") from None
    except ValueError:  # a number of thousands of digits
        raise FileError(path, "the JSON holds a number too long to be one of LEAF's.") from None
    del text
    return _users(path, content)


def _users(path: Path, content: Any) -> list[User]:
    _sound(path, content, "this is no LEAF shard")
    content = content if isinstance(content, dict) else {}
    names, counts, rows = (content.get(key) for key in ("users", "num_samples", "user_data"))
    _sound(path, rows, "user_data is wrong")
    if not (isinstance(names, list) and isinstance(counts, list) and isinstance(rows, dict)):
        raise FileError(path, "this is no LEAF shard: it must have the lists users and num_samples, and user_data.")
    refuse(any(not isinstance(name, str) for name in names), path, "users must be a list of names.")
    twice, few = _twice(names), f"num_samples has {len(counts)} entries, but there are {len(names)} users."
    refuse(twice is not None, path, f"user {twice!r} stands in the list of users twice.")
    refuse(len(counts) != len(names), path, few)
    listed = set(names)
    for name, user in rows.items():
        # LEAF's own split leaves users behind that it dropped, with no rows.
        empty = isinstance(user, User) and len(user.y) == 0
        refuse(name not in listed and not empty, path, f"user_data holds {name!r}, who is not among the users.")
    return [_user(path, name, rows.get(name), count) for name, count in zip(names, counts, strict=True)]


def _user(path: Path, name: str, user: Any, count: Any) -> User:
    _sound(path, user, f"user {name!r}")
    if not isinstance(user, User):
        raise FileError(path, f"user {name!r} must have rows x and labels y in user_data.")
    what = f"user {name!r} has {len(user.y)} rows, but num_samples says {str(count)[:40]}."
    refuse(type(count) is not int or count != len(user.y), path, what)
    return user._replace(name=name)


def _sound(path: Path, value: Any, whose: str) -> None:
    if isinstance(value, _Fault):
        raise FileError(path, f"{whose}: {value.what}")


def _twice(words: Iterable[str]) -> str | None:
    """Return the first word, by order, that stands there more than once."""
    return min((word for word, count in Counter(words).items() if count > 1), default=None)


class _Fault(NamedTuple):
    """What is wrong with an object, told when the user's name is known."""

    what: str


class _NotFiniteError(Exception):
    """NaN or Infinity, which Python's reader would let pass."""


def _no_constant(word: str) -> float:
    raise _NotFiniteError(word)


def _object(pairs: list[tuple[str, Any]]) -> Any:
    """Turn a user's rows into arrays as soon as they are read: as Python numbers a shard would take a gigabyte."""
    content = dict(pairs)
    if len(content) != len(pairs):
        return _Fault(f"the key {(_twice(key for key, _ in pairs) or '')[:80]!r} stands there twice.")
    if "x" not in content or "y" not in content:
        return content
    return _speech(content["x"], content["y"]) or _rows(content["x"], content["y"])


def _speech(x: Any, y: Any) -> User | None:
    """Return a role's rows, texts and the characters that follow them; None where they are something else."""
    if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y) or not y:
        return None
    spoken = all(isinstance(label, str) and len(label) == 1 for label in y) and all(isinstance(t, str) for t in x)
    return User("", x, np.array(y, "U1"), SPEECH) if spoken else None


def _rows(x: Any, y: Any) -> User | _Fault:
    """Return a user without a name yet."""
    if not isinstance(x, list) or not isinstance(y, list):
        return _Fault("x and y must be lists.")
    if len(x) != len(y):
        return _Fault(f"x has {len(x)} rows, but y has {len(y)}.")
    for row, label in enumerate(y):
        # LEAF writes CelebA's labels as 0.0 and 1.0.
        if type(label) not in (int, float) or not 0 <= label < 2**31 or int(label) != label:
            return _Fault(f"row {row} has label {str(label)[:40]}, but labels must be whole numbers from 0.")
    labels = np.array(y, np.int64)
    if all(isinstance(row, str) for row in x):
        return User("", x, labels, "file" if x else "either")
    if all(isinstance(row, list) and len(row) >= _TWEET + 1 and isinstance(row[_TWEET], str) for row in x):
        return User("", [row[_TWEET] for row in x], labels, TWEET)
    return _pixels(x, labels)


def _pixels(x: list[Any], labels: np.ndarray) -> User | _Fault:
    try:
        values = np.array(x)
    except (ValueError, OverflowError):
        return _Fault("its rows differ in length, but all must have the same number of pixels.")
    if values.dtype.kind not in "iuf" or values.ndim < 2 or 0 in values.shape:
        return _Fault("every row of x must be a list of numbers or the name of a file.")
    values = values.reshape(len(x), -1)
    bad = ~((values >= 0) & (values <= 255))
    unit = bool(values.max() <= 1)
    if not unit and values.dtype.kind == "f":
        bad |= values != np.floor(values)
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        found = f"pixel {column} of row {row} is {values[row, column]:g}"
        return _Fault(f"{found}, but pixels must be 0 to 1, or whole numbers 0 to 255.")
    if unit and not bool(((values == 0) | (values == 1)).all()):
        return User("", np.rint(values * 255).astype(np.uint8), labels, "unit")
    return User("", values.astype(np.uint8), labels, "either" if unit else "byte")
