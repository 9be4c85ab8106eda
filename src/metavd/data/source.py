"""Datasets as arrays, before anybody owns a row.

A `Source` pools all rows of a dataset, train and test together, and says how its numbers are normalised. Who holds
which row is decided in `partition`. A new file format is one function that plans its reading and one entry in
`formats.registry`; `arrays` checks what it read, so that a reader only has to read.

Shape letters: n rows, c channels, h height, w width, d features, K classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from ..errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class SourceError(UserError):
    """What is wrong with a dataset, in one sentence that says what would be right."""


def refuse(wrong: object, name: str, what: str) -> None:
    """Raise `SourceError` if something is wrong with a dataset of that name."""
    if wrong:
        raise SourceError(f"{name}: {what}")


class Prepare(Protocol):
    """How the rows of a source become what a network takes."""

    @property
    def learnt(self) -> bool:
        """Whether the rows are prepared already, by what is held here."""

    def learn(self, source: Source, rows: np.ndarray) -> Source:
        """Return the source prepared by what its rows of these numbers say; no other row is looked at."""

    def rows(self, content: Any) -> np.ndarray:
        """Return new rows as the network takes them."""

    def plain(self) -> dict[str, Any]:
        """Return what was learnt in plain values, with its `kind`."""

    def says(self) -> list[str]:
        """Say what was chosen, for people."""


@dataclass(frozen=True)
class Domain:
    """One of several datasets in a merged source: how its rows are normalised, and which labels are its own."""

    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float
    augment: bool
    first_class: int
    num_classes: int


@dataclass(frozen=True, eq=False)  # equality of arrays has no truth value, so a source equals only itself
class Source:
    """One dataset, its rows pooled."""

    name: str
    x: np.ndarray
    """(n, c, h, w) uint8 or float32 images, (n, d) features, or (n, L) token ids; before `prepare`, what that takes."""
    y: np.ndarray
    """(n,) int64 labels 0..K-1."""
    num_classes: int
    test: np.ndarray | None
    """(n,) bool, the rows that the dataset's authors keep for testing; None if they made no split."""
    client: np.ndarray | None
    """(n,) int64, who a row comes from by nature (a writer, a person); None if nobody."""
    mean: tuple[float, ...]
    """One per channel, or a single one, of `x * scale`."""
    std: tuple[float, ...]
    scale: float
    """What takes the stored numbers to about [0, 1]: 1/255 for photographs."""
    augment: bool
    """Whether crops and flips leave the label as it is (photographs yes, handwriting no)."""
    domain: np.ndarray | None = None
    """(n,) int64, which of `domains` a row comes from; None where there is one dataset only."""
    domains: tuple[Domain, ...] = ()
    """The merged datasets; each has its own mean, std, scale and augment for its rows."""
    classes: tuple[str, ...] = ()
    """The names of the K classes; empty where they have numbers only."""
    client_names: tuple[str, ...] = ()
    """The name of each owner, by its number in `client`; empty where owners have numbers only."""
    tokens: int = 0
    """How many token ids there are, where rows hold ids, which are kept as integers; 0 where they hold numbers."""
    prepare: Prepare | None = None
    """How `x` becomes what a network takes, learnt on training rows; None where it is that already."""

    @cached_property
    def fingerprint(self) -> str:
        """12 hex digits that name the content, rows in their order, so that two datasets are never mixed up."""
        digest = hashlib.sha256()
        for array in (self.x, self.y, self.test, self.client):
            if array is not None:
                digest.update(f"{array.dtype}{array.shape}".encode())
                digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        digest.update(repr((self.num_classes, self.mean, self.std, self.scale, self.augment)).encode())
        # What has none of these keeps the fingerprint that it always had.
        if self.classes or self.client_names or self.tokens:
            digest.update(repr((self.classes, self.client_names, self.tokens)).encode())
        if self.prepare is not None:
            digest.update(repr(self.prepare).encode())
        return digest.hexdigest()[:12]


def arrays(
    x: ArrayLike, y: ArrayLike, client: ArrayLike | None = None, test: ArrayLike | None = None, name: str = "arrays",
    *, num_classes: int | None = None, mean: Sequence[float] | None = None, std: Sequence[float] | None = None,
    scale: float | None = None, augment: bool = False, classes: Sequence[str] = (), client_names: Sequence[str] = (),
    kind: str = "auto", tokens: int | None = None,
) -> Source:  # fmt: skip
    """Return a source from arrays in memory, or say in one sentence why they are none.

    Args:
        x: (n, h, w) or (n, c, h, w) images, uint8 or any float; (n, d) features, any float; or (n, L) token ids, any
            integers. float64 becomes float32.
        y: (n,) integer labels 0..K-1, or the classes' names. Other numbers are refused, not renumbered: a silent
            renumbering of two files need not be the same one. Names are numbered in their order, and kept.
        client: (n,) non-negative integers, or names, who a row comes from.
        test: (n,) bool, the official test rows.
        name: how messages and reports call the dataset.
        num_classes: K, if some class may have no row; by default the largest label + 1, and every class must occur.
        mean: per channel, after scaling; by default measured on the rows that are not test rows.
        std: likewise.
        scale: by default 1/255 for uint8 and 1 for floats.
        augment: whether crops and flips leave the label as it is.
        classes: the K classes' names, where y has numbers.
        client_names: the name of each owner, by its number in `client`.
        kind: what (n, d) integers are: "tokens", which are kept as integers for a network with an embedding, or
            "numbers", which are features; "auto" takes integers for tokens.
        tokens: how many token ids there are; by default the largest + 1.

    >>> arrays(np.zeros((3, 8, 8), np.uint8), [0, 1, 1]).x.shape
    (3, 1, 8, 8)
    """
    x, ids = _rows_of(x, kind, tokens, name)
    y, classes = _by_name(y, classes)
    client, client_names = (None, ()) if client is None else _by_name(client, client_names)
    refuse(len(classes) == 1, name, f"every row has label {str(*classes[:1])!r}, but there must be at least 2 classes.")
    if classes and num_classes is None:
        num_classes = len(classes)
    y = _labels(y, len(x), num_classes, name)
    client = None if client is None else _clients(client, len(x), name)
    _check_names(classes, num_classes or 0, "classes", name)
    _check_names(client_names, 0 if client is None else int(client.max()) + 1, "client_names", name)
    test = None if test is None else _flags(test, len(x), name)
    prepare = Columns() if mean is None and std is None and x.ndim == 2 and not ids else None
    mean, std, scale = ((0.0,), (1.0,), 1.0) if ids else _look(x, test, (mean, std, scale), name)
    return Source(
        name, x, y, int(y.max()) + 1 if num_classes is None else num_classes, test, client, mean, std, scale, augment,
        classes=classes, client_names=client_names, prepare=prepare, tokens=(tokens or int(x.max()) + 1) if ids else 0,
    )  # fmt: skip


KINDS = ("auto", "tokens", "numbers")


def _rows_of(value: ArrayLike, kind: str, tokens: int | None, name: str) -> tuple[np.ndarray, bool]:
    """Return images, features or token ids, and whether they are ids."""
    x = _array(value, "x", name)
    refuse(kind not in KINDS, name, f"kind is {kind!r}, but it must be {' or '.join(KINDS)}.")
    whole = x.ndim == 2 and x.dtype.kind in "iu"
    what = f"x has type {x.dtype} and shape {x.shape}, but tokens are (rows, length) integers."
    refuse(kind == "tokens" and not whole, name, what)
    if whole and kind != "numbers":
        return _token_ids(x, tokens, name), True
    return _images_or_features(x.astype(np.float32) if whole else x, name), False


def _look(
    x: np.ndarray, test: np.ndarray | None, given: tuple[Sequence[float] | None, Sequence[float] | None, float | None],
    name: str,
) -> tuple[tuple[float, ...], tuple[float, ...], float]:  # fmt: skip
    """Return mean, standard deviation and scale; what is not given is measured on the rows that are not test rows."""
    mean, std, scale = given
    if scale is None:
        scale = 1 / 255 if x.dtype == np.uint8 else 1.0
    refuse(not (np.isfinite(scale) and scale > 0), name, f"scale is {scale}, but it must be a positive number.")
    if mean is None or std is None:
        measured = moments(x if test is None else x[~test])
        mean = [value * scale for value in measured[0]] if mean is None else mean
        # A constant channel is only centred.
        std = [value * scale or 1.0 for value in measured[1]] if std is None else std
    return _per_channel(mean, x.shape[1], "mean", name), _per_channel(std, x.shape[1], "std", name), float(scale)


def _token_ids(x: np.ndarray, tokens: int | None, name: str) -> np.ndarray:
    """Return ids in a type that torch knows."""
    refuse(0 in x.shape, name, f"x has shape {x.shape}, but no axis may be empty.")
    high = (1 << 31) - 1 if tokens is None else tokens - 1
    bad = ((x < 0) | (x > high)).any(1)
    refuse(bad.any(), name, f"row {bad.argmax()} of x holds a token id that is none of 0 to {high}.")
    return x if x.dtype == np.uint8 else x.astype(np.int32)


def named(values: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the names that occur, numbers by their size and then all others by their letters, and each one's place.

    The order depends on nothing but the names.

    >>> named(["10", "9", "sketch", "9"])
    (('9', '10', 'sketch'), array([1, 0, 2, 0]))
    """
    known = sorted(set(values), key=lambda name: (not _is_number(name), int(name) if _is_number(name) else 0, name))
    place = {name: number for number, name in enumerate(known)}
    return tuple(known), np.array([place[name] for name in values], np.int64)


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 19


def _by_name(values: ArrayLike, names: Sequence[str]) -> tuple[ArrayLike, tuple[str, ...]]:
    """Return numbers and the names that they stand for, where texts were given."""
    array = np.asarray(values) if not isinstance(values, list) or all(isinstance(v, str) for v in values) else None
    if array is None or array.ndim != 1 or not len(array) or array.dtype.kind not in "UO":
        return values, tuple(names)
    if not all(isinstance(value, str) for value in array.tolist()):
        return values, tuple(names)
    known, numbers = named(array.tolist())
    return numbers, known


def _check_names(names: Sequence[str], least: int, what: str, name: str) -> None:
    odd = len(set(names)) != len(names) or any(not isinstance(each, str) or not each.strip() for each in names)
    refuse(odd, name, f"{what} must be different texts, none of them empty.")
    refuse(0 < len(names) < least, name, f"{what} has {len(names)} names, but {least} are needed.")


DIGITS_MEAN = 0.305260
DIGITS_STD = 0.376049
"""Of all 1,797 x 64 pixels after division by 16; too little hangs on them to leave test rows out."""


def digits() -> Source:
    """Return scikit-learn's 1,797 handwritten digits, 8 x 8 pixels of 0..16, which come with the installation."""
    table = _digits()
    x, y = table[:, :-1].reshape(-1, 8, 8).astype(np.uint8), table[:, -1].astype(np.int64)
    return arrays(x, y, name="digits", mean=[DIGITS_MEAN], std=[DIGITS_STD], scale=1 / 16)


def _digits() -> np.ndarray:
    """Return a row per digit: its pixels, then its class.

    scikit-learn 1.9. Its file is read without it, because to import it takes a third of the time in which a run starts.
    """
    found = find_spec("sklearn")
    for folder in (found.submodule_search_locations or ()) if found else ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.exists():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits  # noqa: PLC0415

    pixels, classes = load_digits(return_X_y=True)
    return np.column_stack([pixels, classes])


def transform(
    source: Source, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Callable[..., Tensor]:
    """Return the function that takes stored rows (..., c, h, w) or (..., d) to what a network sees.

        (x * scale - mean) / std,  or token ids as they are, in int64

    Leading axes are free, so a batch, a client's batches and a cohort's all pass through the same function. Rows of a
    merged source need their domains (...) too, each of which has its own numbers.
    """
    import torch  # noqa: PLC0415 (takes a second, and datasets are listed, read and checked without it)

    if source.tokens:
        return lambda rows, _=None: rows.to(torch.int64)
    dtype = dtype or torch.float32
    # Images carry their channel before two more axes, features on the last one.
    shape = (-1, 1, 1) if source.x.ndim == 4 else (-1,)
    looks = source.domains or (source,)
    width = max(len(look.mean) for look in looks)

    def table(values: list[tuple[float, ...]]) -> Tensor:
        rows = [row * width if len(row) == 1 else row for row in values]
        return torch.tensor(rows, dtype=dtype, device=device).reshape(len(rows), *shape)

    mean, std = table([look.mean for look in looks]), table([look.std for look in looks])
    scale = torch.tensor([look.scale for look in looks], dtype=dtype, device=device)
    scale = scale.reshape(-1, *[1] * len(shape))

    def normalise(rows: Tensor, domain: Tensor | None = None) -> Tensor:
        chosen = (scale[0], mean[0], std[0]) if domain is None else (scale[domain], mean[domain], std[domain])
        by, minus, over = (value.to(rows.device) for value in chosen)
        return (rows.to(dtype) * by - minus) / over

    return normalise


def _array(value: ArrayLike, what: str, name: str) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError as error:
        raise SourceError(f"{name}: {what} has rows of different shapes, but all must be alike.") from error


def _images_or_features(value: ArrayLike, name: str) -> np.ndarray:
    x = _array(value, "x", name)
    odd = x.dtype != np.uint8 and not np.issubdtype(x.dtype, np.floating)
    refuse(odd, name, f"x has type {x.dtype}, but it must be uint8 or a float type.")
    right = "(rows, features), (rows, height, width) or (rows, channels, height, width)"
    refuse(x.ndim not in (2, 3, 4), name, f"x has shape {x.shape}, but it must be {right}.")
    refuse(0 in x.shape, name, f"x has shape {x.shape}, but no axis may be empty.")
    if x.ndim == 3:
        x = x[:, None]
    last = x.ndim == 4 and x.shape[1] not in (1, 3, 4) and x.shape[3] in (1, 3, 4)
    refuse(last, name, f"x has shape {x.shape}, which looks like channels last; use x.transpose(0, 3, 1, 2).")
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):  # a float64 too large for float32 is reported below, with its row
            x = x.astype(np.float32, copy=False)
        bad = ~np.isfinite(x).reshape(len(x), -1).all(1)
        what = f"row {bad.argmax()} of x holds a value that is not a finite float32 number"
        refuse(bad.any(), name, f"{what}; drop such rows or fill them in.")
    return x


def _rows(value: ArrayLike, length: int, what: str, name: str) -> np.ndarray:
    array = _array(value, what, name)
    right = f"x has {length} rows, so it must be ({length},)"
    refuse(array.shape != (length,), name, f"{what} has shape {array.shape}, but {right}.")
    return array


def _integers(value: ArrayLike, length: int, what: str, name: str) -> np.ndarray:
    array = _rows(value, length, what, name)
    if not np.issubdtype(array.dtype, np.integer):
        remedy = f"{what}.astype(int)" if array.dtype.kind in "bf" else f"np.unique({what}, return_inverse=True)[1]"
        raise SourceError(f"{name}: {what} has type {array.dtype}, but it must hold integers, such as {remedy}.")
    return array


def _labels(value: ArrayLike, length: int, num_classes: int | None, name: str) -> np.ndarray:
    y = _integers(value, length, "y", name)
    remedy = "np.unique(y, return_inverse=True)[1] gives labels without gaps from 0"
    few = num_classes is not None and num_classes < 2
    refuse(few, name, f"num_classes is {num_classes}, but it must be at least 2.")
    bad = y < 0 if num_classes is None else (y < 0) | (y >= num_classes)
    row, end = int(bad.argmax()), "" if num_classes is None else f" to {num_classes - 1}"
    refuse(bad.any(), name, f"row {row} has label {y[row]}, but labels must run from 0{end}; {remedy}.")
    present = np.unique(y)
    refuse(len(present) < 2, name, f"every row has label {present[0]}, but there must be at least 2 classes.")
    if num_classes is None and len(present) != int(present[-1]) + 1:
        gap = int((present != np.arange(len(present))).argmax())
        row = int((y > gap).argmax())
        what = f"row {row} has label {y[row]}, but no row has label {gap}"
        raise SourceError(f"{name}: {what}; {remedy}, or pass num_classes if that class is only empty.")
    return y.astype(np.int64, copy=False)


def _clients(value: ArrayLike, length: int, name: str) -> np.ndarray:
    client = _integers(value, length, "client", name)
    bad = (client < 0) | (client > np.iinfo(np.int64).max)
    row = int(bad.argmax())
    refuse(bad.any(), name, f"row {row} has client {client[row]}, but client ids must be 0 to 2^63 - 1.")
    return client.astype(np.int64, copy=False)


def _flags(value: ArrayLike, length: int, name: str) -> np.ndarray:
    test = _rows(value, length, "test", name)
    what = f"test has type {test.dtype}, but it must be bool, such as test.astype(bool)."
    refuse(test.dtype != np.bool_, name, what)
    refuse(test.all(), name, "every row is a test row, but some must be left to train on.")
    return test


def moments(x: np.ndarray) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation per channel of images, per column of features.

    Channel by channel, and a channel of bytes through its histogram: a float64 copy of a dataset may not fit.
    """
    means, stds = [], []
    for values in (x[:, channel] for channel in range(x.shape[1])):
        if values.dtype == np.uint8:
            count = np.bincount(values.ravel(), minlength=256)
            level = np.arange(256, dtype=np.float64)
            mean = float((count * level).sum() / count.sum())
            variance = float((count * (level - mean) ** 2).sum() / count.sum())
        else:
            mean = float(values.mean(dtype=np.float64))
            variance = float(values.var(dtype=np.float64))
        means.append(mean)
        stds.append(variance**0.5)
    return means, stds


@dataclass(frozen=True)
class Columns:
    """(n, d) numbers, each column centred and divided by its own standard deviation; a constant one only centred.

    What is learnt are the source's mean and standard deviation, which travel with it as those of pictures do.
    """

    learnt = False

    def learn(self, source: Source, rows: np.ndarray) -> Source:
        """Measure training rows."""
        mean, std = moments(source.x[rows])
        return replace(
            source,
            mean=tuple(value * source.scale for value in mean),
            std=tuple(value * source.scale or 1.0 for value in std),
            prepare=None,
        )

    def rows(self, content: Any) -> np.ndarray:
        """Refuse: plain numbers are normalised where they are used."""
        raise SourceError(f"x is {type(content).__name__}, but it must be an array of numbers.")

    def plain(self) -> dict[str, Any]:
        """Return nothing that would have to be kept."""
        return {"kind": "columns"}

    def says(self) -> list[str]:
        """Say nothing: the same is done for every array."""
        return []


def _per_channel(values: Sequence[float], channels: int, what: str, name: str) -> tuple[float, ...]:
    result = tuple(float(value) for value in values)
    many = len(result) not in (1, channels)
    refuse(many, name, f"{what} has {len(result)} numbers, but it must have 1 or {channels}.")
    right = "positive" if what == "std" else "finite"
    for value in result:
        wrong = not np.isfinite(value) or (what == "std" and value <= 0)
        refuse(wrong, name, f"{what} holds {value}, but it must be {right}.")
    return result
