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

from ..data import collection, prepare
from ..data.domains import resize
from ..data.formats import npz
from ..data.formats.cache import Note, log
from ..data.formats.files import FileError, fail, listing, need_folder
from ..data.formats.folder import scan
from ..data.formats.images import SUFFIXES, check_size, pictures
from ..data.formats.table import need_file, read_cells
from ..data.formats.text import columns_of
from ..data.partition import some
from ..data.source import Columns, Domain, Source, SourceError, named
from ..data.table import flags_of, words_of
from ..data.text import NEXT
from ..errors import UserError


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
        return list(named(self.client or ())[0])


Given = str | Source | tuple[ArrayLike, ArrayLike | None]
"""A text such as folder:mine, a source, or the two arrays x and y (None: no labels)."""


def blank(source: Source) -> Source:
    """Return what a model takes: the source without its rows."""
    if source.prepare is not None and not isinstance(source.prepare, Columns) and not source.prepare.learnt:
        raise UserError(
            f"{source.name} is a table or texts, which a simulation takes, but a federation of sites does not"
        )
    return replace(
        source, x=source.x[:0].copy(), y=source.y[:0].copy(), test=None, client=None, client_names=(),
        domain=None if source.domain is None else source.domain[:0].copy(),
    )  # fmt: skip


def described(takes: Source) -> dict[str, Any]:
    """Return what a model takes in plain values, as a file or a message holds it."""
    return {
        "name": takes.name, "shape": list(takes.x.shape[1:]), "dtype": str(takes.x.dtype),
        "num_classes": takes.num_classes, "mean": takes.mean, "std": takes.std, "scale": takes.scale,
        "augment": takes.augment, "classes": takes.classes, "tokens": takes.tokens,
        "prepare": takes.prepare.plain() if takes.prepare is not None and takes.prepare.learnt else None,
        "domains": [asdict(domain) for domain in takes.domains],
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
        domain=none if domains else None, domains=domains, classes=tuple(values.get("classes", ())),
        tokens=values.get("tokens", 0), prepare=prepare.restored(values.get("prepare")),
    )  # fmt: skip


def class_names(source: Source) -> list[str]:
    """Return the K classes' names: those that the source knows, or each one's number in its dataset."""
    counts = [domain.num_classes for domain in source.domains] or [source.num_classes]
    return list(source.classes) or [str(label) for count in counts for label in range(count)]


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
        raise UserError(f"{what}, but must be {right}")
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
        classes: the names of its K classes. Labels that are texts are found by them, all others by their numbers.
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
    y: np.ndarray | None = None
    client: ArrayLike | None = None
    test = files = None
    if part is not None and part.name == "npz":
        path = npz.npz_file(need_folder(Path(part.path).expanduser()))
        x, y, client, test = npz.read(path, part.options.get("channels", "auto"), labelled=False)
    elif part is not None and part.name == "folder":
        like = _part(data, number or 0)
        options = (like.options if like is not None and like.name == "folder" else {}) | part.options
        x, labels, client, test, files = _folder(Path(part.path).expanduser(), options, takes)
    elif part is not None and part.name in ("table", "text"):
        x, labels, client, test = _prepared(part, _part(data, 0), takes)
    elif isinstance(given, tuple):
        x, y = np.asarray(given[0]), None if given[1] is None else np.asarray(given[1])
    else:
        found = given if isinstance(given, Source) else collection.load(given, root, note).sources[0]
        x, y, client, test = found.x, found.y, found.client, found.test
        if client is not None and found.client_names:
            client = [found.client_names[number] for number in client]
        labels = [found.classes[label] for label in y] if found.classes else None
    if y is not None and y.dtype.kind in "OSU":
        labels = [words_of(each) for each in y.tolist()]
    if labels is not None:
        place = name if part is None else part.path or name
        y = _numbers(labels, classes[first : first + look.num_classes], place)
    x = fit(x, takes, name)
    if y is not None:
        y = _fitting(y, len(x), look.num_classes, name) + first
    who = None if client is None else [str(each) for each in _beside(client, len(x), "iuOU", "client", name).tolist()]
    held = None if test is None else _beside(test, len(x), "b", "test", name)
    return Samples(name, x, y, who, held, files, number)


def _prepared(part: collection.Part, like: collection.Part | None, takes: Source) -> tuple[Any, ...]:
    """Read a table or texts, and prepare their rows by what the model has learnt; labels and clients may be missing."""
    if takes.prepare is None or takes.prepare.plain()["kind"] != part.name:
        raise UserError(f"{part.path} is given as a {part.name}, but the model was trained on rows of another kind")
    options = (like.options if like is not None and like.name == part.name else {}) | part.options
    path = need_file(part.path)
    cells = read_cells(path)

    def column(what: str, *usual: str) -> Any:
        return next((cells[name] for name in (str(options.get(what)), *usual) if name in cells), None)

    content = cells if part.name == "table" else columns_of(cells, path.stem, options.get("text"), None)[0]
    try:
        x = takes.prepare.rows(content)
    except SourceError as error:
        raise FileError(path, str(error)) from None
    labels, client, split = column("label", "label"), column("client", "client"), column("test", "test", "split")
    if options.get("task") == NEXT:
        labels = None
    labels = None if labels is None else [words_of(each) for each in labels]
    who = None if client is None else [words_of(each) for each in client]
    return x, labels, who, None if split is None else flags_of(split, "test", path.stem)


def fit(x: Any, takes: Source, name: str = "x") -> np.ndarray:
    """Return rows in the shape and type that the model takes: images are resized, anything else must be right.

    A model of a table takes a DataFrame or a mapping of columns too, and one of texts a list of them.
    """
    if takes.prepare is not None and not (isinstance(x, np.ndarray) and x.dtype.kind in "uif"):
        x = takes.prepare.rows(x)
    x, like = np.asarray(x), takes.x
    if takes.tokens:
        return _ids(x, takes, name)
    wanted = "uint8, 0 to 255" if like.dtype == np.uint8 else "a float type"
    is_float = np.issubdtype(x.dtype, np.floating)
    if not is_float if like.dtype != np.uint8 else x.dtype != np.uint8:
        raise UserError(f"{name} holds {x.dtype}, but the model was trained on {wanted}; store the rows like that")
    if like.ndim == 4 and x.ndim == 3:
        x = x[:, None]
    row = "x".join(str(length) for length in like.shape[1:])
    if x.ndim != like.ndim or (x.ndim == 2 and x.shape[1] != like.shape[1]) or 0 in x.shape:
        raise UserError(f"{name} has shape {x.shape}, but the model takes at least one row of {row} numbers")
    if is_float:
        with np.errstate(over="ignore"):  # what does not fit into float32 is reported below, with its row
            x = x.astype(np.float32, copy=False)
        if not np.isfinite(x).all():
            bad = int((~np.isfinite(x)).reshape(len(x), -1).any(1).argmax())
            raise UserError(
                f"{name} holds a number in row {bad} that is not a finite float32; drop such rows or mend them"
            )
    if x.shape[1:] == like.shape[1:]:
        return np.asarray(x)
    if x.dtype != np.uint8 or x.shape[1] not in (1, like.shape[1]):
        why = (
            "only uint8 images can be resized" if x.dtype != np.uint8 else "only grey images can be given more channels"
        )
        raise UserError(f"{name} has shape {x.shape}, but the model takes rows of {row} numbers, and {why}")
    return resize(x, *like.shape[1:])


def _ids(x: np.ndarray, takes: Source, name: str) -> np.ndarray:
    """Return token ids that the model knows."""
    length = takes.x.shape[1]
    if x.dtype.kind not in "iu" or x.shape[1:] != (length,) or not len(x):
        raise UserError(
            f"{name} has type {x.dtype} and shape {x.shape}, but the model takes rows of {length} token ids"
        )
    bad = x[(x < 0) | (x >= takes.tokens)]
    if len(bad):
        raise UserError(f"{name} holds the token id {bad[0]}, but the model knows 0 to {takes.tokens - 1}")
    known: np.ndarray = x.astype(takes.x.dtype)
    return known


def _one(text: str) -> collection.Part:
    parts = collection.parse(text)
    if len(parts) > 1:
        raise UserError(f"the data {text!r} names {len(parts)} datasets, but a client's rows come from one; name one")
    return parts[0]


def _fitting(y: np.ndarray, rows: int, num_classes: int, name: str) -> np.ndarray:
    """Return labels as whole numbers, or say which row's is none of the model's classes."""
    if y.shape != (rows,) or not np.issubdtype(y.dtype, np.integer):
        raise UserError(f"{name} has labels of shape {y.shape} and type {y.dtype}, but needs {rows} whole numbers")
    bad = (y < 0) | (y >= num_classes)
    if bad.any():
        row = int(bad.argmax())
        raise UserError(
            f"{name} has label {y[row]} in row {row}, but the model knows the classes 0 to {num_classes - 1}"
        )
    return y.astype(np.int64)


def _beside(value: ArrayLike, rows: int, kinds: str, what: str, name: str) -> np.ndarray:
    """Return what stands beside the rows, one value per row, or say that it does not."""
    array = np.asarray(value, object if isinstance(value, list) else None)
    if array.shape != (rows,) or array.dtype.kind not in kinds:
        right = "true or false" if kinds == "b" else "a whole number"
        now = f"{what} of shape {array.shape} and type {array.dtype}"
        raise UserError(f"{name} has {now}, but needs {right} for each of its {rows} rows")
    return array


def _numbers(labels: Sequence[str], known: Sequence[str], place: str) -> np.ndarray:
    """Return the model's numbers of classes by name."""
    unknown = sorted(set(labels) - set(known))
    if unknown:
        raise UserError(f"{place} has a class {unknown[0]!r}, but the model knows {some(known)}")
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
    x = pictures(paths, check_size(options.get("size")), options.get("channels") or channels, fail)
    return x, labels, client, test, [str(path.relative_to(root)) for path in paths]
