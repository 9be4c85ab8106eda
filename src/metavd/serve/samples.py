"""Rows that come to a trained model: read from where people have them, and made to fit what the model takes.

A training set must hold every class; the few rows of one client rarely do, and rows to be answered may have no labels
at all. So these rows are not a `Source` of their own. A `Source` without rows stands here for what a model takes: the
shape and type of its inputs, their normalisation, its domains.

Shape letters: n rows, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ..data import collection
from ..data.domains import resize
from ..data.formats import npz
from ..data.formats.cache import Note, log
from ..data.formats.files import FileError, listing, need_folder
from ..data.formats.folder import scan
from ..data.formats.images import SUFFIXES, Stack, check_size
from ..data.source import Domain, Source, SourceError
from ..runs.store import StoreError


class UseError(StoreError):
    """Why a trained model cannot be used like this, in one sentence that says what would be right."""


class Samples(NamedTuple):
    """Rows as a model takes them, not yet normalised."""

    name: str
    """As they were asked for."""
    x: np.ndarray
    y: np.ndarray | None
    """(n,) the run's class numbers, if the rows are labelled."""
    client: list[str] | None
    """(n) who a row comes from, if anybody."""
    test: np.ndarray | None
    """(n,) bool, rows that are not to be adapted on."""
    files: list[str] | None
    """(n) where a row was read from, if it has a file of its own."""
    domain: int | None
    """Which of the model's domains the rows belong to."""

    def clients(self) -> list[str]:
        """Return who is there: numbers in their order, then names in theirs."""
        return sorted(
            set(self.client or ()), key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name)
        )


Given = str | Source | tuple[ArrayLike, ArrayLike | None]
"""A text such as folder:mine, a source, or the two arrays x and y (None: no labels)."""


def blank(source: Source) -> Source:
    """Return what a model takes: the source without its rows."""
    return replace(
        source, x=source.x[:0].copy(), y=source.y[:0].copy(), test=None, client=None,
        domain=None if source.domain is None else source.domain[:0].copy(),
    )  # fmt: skip


def described(takes: Source) -> dict[str, Any]:
    """Return what a model takes in plain values, as a file or a message holds it."""
    return {
        "name": takes.name, "shape": list(takes.x.shape[1:]), "dtype": str(takes.x.dtype),
        "num_classes": takes.num_classes, "mean": takes.mean, "std": takes.std, "scale": takes.scale,
        "augment": takes.augment, "domains": [asdict(domain) for domain in takes.domains],
    }  # fmt: skip


def restored(values: Mapping[str, Any]) -> Source:
    """Return what `described` wrote."""
    domains = tuple(
        Domain(**{**each, "mean": tuple(each["mean"]), "std": tuple(each["std"])}) for each in values["domains"]
    )
    none = np.empty(0, np.int64)
    return Source(
        name=values["name"], x=np.empty((0, *values["shape"]), values["dtype"]), y=none,
        num_classes=values["num_classes"], test=None, client=None, mean=tuple(values["mean"]),
        std=tuple(values["std"]), scale=values["scale"], augment=values["augment"],
        domain=none if domains else None, domains=domains,
    )  # fmt: skip


def class_names(data: str, source: Source) -> list[str]:
    """Return the K classes' names: of a folder those of its folders, of all others their numbers from 0."""
    counts = [domain.num_classes for domain in source.domains] or [source.num_classes]
    names: list[str] = []
    for number, count in enumerate(counts):
        part = _part(data, number)
        place = Path(part.path).expanduser() if part is not None and part.name == "folder" else None
        found = sorted({row.label for row in scan(place).rows}) if place is not None and place.is_dir() else []
        names += found if len(found) == count else [str(label) for label in range(count)]
    return names


def _part(data: str, number: int) -> collection.Part | None:
    """Return one of the datasets that a run names; None if its data were handed over in Python."""
    try:
        return collection.parse(data)[number]
    except (SourceError, IndexError):
        return None


def domain_number(takes: Source, name: str | None) -> int | None:
    """Return which domain is meant, or say which there are; None where the model has one dataset only."""
    names = [domain.name for domain in takes.domains]
    if name is None and not names:
        return None
    if name not in names:
        what = "the rows' domain is not given" if name is None else f"domain is {name!r}"
        right = f"one of {', '.join(names)}" if names else f"left out, because the model knows {takes.name} alone"
        raise UseError(f"{what}, but must be {right}")
    return names.index(name)


def samples(
    given: Given,
    takes: Source,
    classes: Sequence[str],
    *,
    data: str = "",
    domain: str | None = None,
    root: Path | str = "data",
    note: Note = log,
) -> Samples:
    """Return the rows that are given, as the model takes them.

    Args:
        given: what `data.collection.load` takes, one dataset only, and also an .npz without labels and a folder with
            pictures directly in it; or a source, or arrays.
        takes: what the model takes, see `blank`.
        classes: the names of its K classes. A folder's classes are found by their names, all others by their numbers.
        data: what the model was trained on; a folder is read with the same options as the one that it was.
        domain: of a model of several datasets, which of them the rows are like; by default that of the same name.
        root: where the files of datasets are.
        note: told what a person should know.
    """
    name, part = (given, _one(given)) if isinstance(given, str) else (getattr(given, "name", "the arrays"), None)
    if domain is None and part is not None and part.name in {each.name for each in takes.domains}:
        domain = part.name
    number = domain_number(takes, domain)
    look = takes if number is None else takes.domains[number]
    first = 0 if number is None else takes.domains[number].first_class
    labels: list[str] | None = None
    client: ArrayLike | None = None
    test = files = None
    if part is not None and part.name == "npz":
        path = npz.find_npz(need_folder(Path(part.path).expanduser()))
        x, y, client, test = npz.read(path, part.options.get("channels", "auto"), labelled=False)
    elif part is not None and part.name == "folder":
        like = _part(data, number or 0)
        options = (like.options if like is not None and like.name == "folder" else {}) | part.options
        x, labels, client, test, files = _folder(Path(part.path).expanduser(), options, takes)
        y = None if labels is None else _numbers(labels, classes[first : first + look.num_classes], part.path)
    elif isinstance(given, tuple):
        x, y = np.asarray(given[0]), None if given[1] is None else np.asarray(given[1])
    else:
        found = given if isinstance(given, Source) else collection.load(given, root, note).sources[0]
        x, y, client, test = found.x, found.y, found.client, found.test
    x = fit(x, takes, name)
    if y is not None:
        y = _fitting(y, len(x), look.num_classes, name) + first
    who = None if client is None else [str(each) for each in _beside(client, len(x), "iuO", "client", name).tolist()]
    held = None if test is None else _beside(test, len(x), "b", "test", name)
    return Samples(name, x, y, who, held, files, number)


def fit(x: ArrayLike, takes: Source, name: str = "x") -> np.ndarray:
    """Return rows in the shape and type that the model takes: images are resized, anything else must be right."""
    x, like = np.asarray(x), takes.x
    wanted = "uint8, 0 to 255" if like.dtype == np.uint8 else "a float type"
    is_float = np.issubdtype(x.dtype, np.floating)
    if not is_float if like.dtype != np.uint8 else x.dtype != np.uint8:
        raise UseError(f"{name} holds {x.dtype}, but the model was trained on {wanted}; store the rows like that")
    if like.ndim == 4 and x.ndim == 3:
        x = x[:, None]
    row = "x".join(str(length) for length in like.shape[1:])
    if x.ndim != like.ndim or (x.ndim == 2 and x.shape[1] != like.shape[1]) or 0 in x.shape:
        raise UseError(f"{name} has shape {x.shape}, but the model takes at least one row of {row} numbers")
    if is_float:
        with np.errstate(over="ignore"):  # what does not fit into float32 is reported below, with its row
            x = x.astype(np.float32, copy=False)
        if not np.isfinite(x).all():
            bad = int((~np.isfinite(x)).reshape(len(x), -1).any(1).argmax())
            raise UseError(
                f"{name} holds a number in row {bad} that is not a finite float32; drop such rows or mend them"
            )
    if x.shape[1:] == like.shape[1:]:
        return x
    if x.dtype != np.uint8 or x.shape[1] not in (1, like.shape[1]):
        why = (
            "only uint8 images can be resized" if x.dtype != np.uint8 else "only grey images can be given more channels"
        )
        raise UseError(f"{name} has shape {x.shape}, but the model takes rows of {row} numbers, and {why}")
    return resize(x, *like.shape[1:])


def _one(text: str) -> collection.Part:
    parts = collection.parse(text)
    if len(parts) > 1:
        raise UseError(f"the data {text!r} names {len(parts)} datasets, but a client's rows come from one; name one")
    return parts[0]


def _fitting(y: np.ndarray, rows: int, num_classes: int, name: str) -> np.ndarray:
    """Return labels as whole numbers, or say which row's is none of the model's classes."""
    if y.shape != (rows,) or not np.issubdtype(y.dtype, np.integer):
        raise UseError(f"{name} has labels of shape {y.shape} and type {y.dtype}, but needs {rows} whole numbers")
    bad = (y < 0) | (y >= num_classes)
    if bad.any():
        row = int(bad.argmax())
        raise UseError(
            f"{name} has label {y[row]} in row {row}, but the model knows the classes 0 to {num_classes - 1}"
        )
    return y.astype(np.int64)


def _beside(value: ArrayLike, rows: int, kinds: str, what: str, name: str) -> np.ndarray:
    """Return what stands beside the rows, one a row, or say that it does not."""
    array = np.asarray(value, object if isinstance(value, list) else None)
    if array.shape != (rows,) or array.dtype.kind not in kinds:
        right = "true or false" if kinds == "b" else "a whole number"
        now = f"{what} of shape {array.shape} and type {array.dtype}"
        raise UseError(f"{name} has {now}, but needs {right} for each of its {rows} rows")
    return array


def _numbers(labels: Sequence[str], known: Sequence[str], place: str) -> np.ndarray:
    """Return the model's class numbers of folders' names."""
    unknown = sorted(set(labels) - set(known))
    if unknown:
        shown = ", ".join(known[:12]) + (f" and {len(known) - 12} more" if len(known) > 12 else "")
        raise UseError(f"{place} has a class {unknown[0]!r}, but the model knows {shown}")
    return np.array([known.index(label) for label in labels], np.int64)


def _folder(place: Path, options: Mapping[str, Any], takes: Source) -> tuple[Any, ...]:
    """Read client/class/picture, class/picture, or pictures that lie in the folder itself and have no labels."""
    root = need_folder(place)
    loose = (
        [path for path in listing(root) if path.suffix.lower() in SUFFIXES and path.is_file()] if root.is_dir() else []
    )
    labels = client = test = None
    if loose:
        folders = [path for path in listing(root) if path.is_dir()]
        if folders:
            raise FileError(loose[0], f"this picture lies beside the folder {folders[0].name}; move one of the two.")
        paths = loose
    else:
        rows, split = scan(root)
        paths, labels = [row.path for row in rows], [row.label for row in rows]
        client = None if rows[0].client is None else [row.client for row in rows]
        test = np.array([row.test for row in rows]) if split else None
    channels = takes.x.shape[1] if takes.x.ndim == 4 and takes.x.shape[1] in (1, 3) else None
    stack = Stack(len(paths), check_size(options.get("size")), options.get("channels") or channels)
    for path in paths:
        stack.add(path)
    return stack.x, labels, client, test, [str(path.relative_to(root)) for path in paths]
