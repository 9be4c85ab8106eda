"""Datasets as arrays, before anybody owns a row.

A `Source` pools all rows of a dataset, train and test together, and says how its numbers are normalised. Who holds
which row is decided in `partition`. A new file format is one function that plans its reading and one entry in
`formats.registry`; `arrays` checks what it read, so that a reader only has to read.

Shape letters: n rows, c channels, h height, w width, d features, K classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from ..errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class SourceError(UserError):
    """What is wrong with a dataset, in one sentence that says what would be right."""


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
    """(n, c, h, w) uint8 or float32 images, or (n, d) features."""
    y: np.ndarray
    """(n,) int64 labels 0..K-1."""
    num_classes: int
    test: np.ndarray | None
    """(n,) bool, the rows that the dataset's authors keep for testing; None if they made no split."""
    client: np.ndarray | None
    """(n,) int64, who a row comes from by nature (a writer, a person); None if nobody."""
    mean: tuple[float, ...]
    """One a channel, or a single one, of `x * scale`."""
    std: tuple[float, ...]
    scale: float
    """What takes the stored numbers to about [0, 1]: 1/255 for photographs."""
    augment: bool
    """Whether crops and flips leave the label as it is (photographs yes, handwriting no)."""
    domain: np.ndarray | None = None
    """(n,) int64, which of `domains` a row comes from; None where there is one dataset only."""
    domains: tuple[Domain, ...] = ()
    """The merged datasets; each has its own mean, std, scale and augment for its rows."""

    @cached_property
    def fingerprint(self) -> str:
        """12 hex digits that name the content, rows in their order, so that two datasets are never mixed up."""
        digest = hashlib.sha256()
        for array in (self.x, self.y, self.test, self.client):
            if array is not None:
                digest.update(f"{array.dtype}{array.shape}".encode())
                digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        digest.update(repr((self.num_classes, self.mean, self.std, self.scale, self.augment)).encode())
        return digest.hexdigest()[:12]


def arrays(
    x: ArrayLike,
    y: ArrayLike,
    client: ArrayLike | None = None,
    test: ArrayLike | None = None,
    name: str = "arrays",
    *,
    num_classes: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    scale: float | None = None,
    augment: bool = False,
) -> Source:
    """Return a source from arrays in memory, or say in one sentence why they are none.

    Args:
        x: (n, h, w) or (n, c, h, w) images or (n, d) features, uint8 or any float; float64 becomes float32.
        y: (n,) integer labels 0..K-1. Other labels are refused, not renumbered: a silent renumbering of two files
            need not be the same one.
        client: (n,) non-negative integers, who a row comes from.
        test: (n,) bool, the official test rows.
        name: how messages and reports call the dataset.
        num_classes: K, if some class may have no row; by default the largest label + 1, and every class must occur.
        mean: per channel, after scaling; by default measured on the rows that are not test rows.
        std: likewise.
        scale: by default 1/255 for uint8 and 1 for floats.
        augment: whether crops and flips leave the label as it is.

    >>> arrays(np.zeros((3, 8, 8), np.uint8), [0, 1, 1]).x.shape
    (3, 1, 8, 8)
    """
    x = _images_or_features(x, name)
    y = _labels(y, len(x), num_classes, name)
    client = None if client is None else _clients(client, len(x), name)
    test = None if test is None else _flags(test, len(x), name)
    if scale is None:
        scale = 1 / 255 if x.dtype == np.uint8 else 1.0
    if not (np.isfinite(scale) and scale > 0):
        raise SourceError(f"{name}: scale is {scale}, but it must be a positive number.")
    if mean is None or std is None:
        measured = moments(x if test is None else x[~test])
        mean = [value * scale for value in measured[0]] if mean is None else mean
        # A constant channel is only centred.
        std = [value * scale or 1.0 for value in measured[1]] if std is None else std
    return Source(
        name=name,
        x=x,
        y=y,
        num_classes=int(y.max()) + 1 if num_classes is None else num_classes,
        test=test,
        client=client,
        mean=_per_channel(mean, x.shape[1], "mean", name),
        std=_per_channel(std, x.shape[1], "std", name),
        scale=float(scale),
        augment=augment,
    )


DIGITS_MEAN = 0.305260
DIGITS_STD = 0.376049
"""Of all 1,797 x 64 pixels after division by 16; too little hangs on them to leave test rows out."""


def digits() -> Source:
    """Return scikit-learn's 1,797 handwritten digits, 8 x 8 pixels of 0..16, which come with the installation."""
    # Importing scikit-learn takes longer than everything else here, and only this dataset needs it.
    from sklearn.datasets import load_digits  # noqa: PLC0415

    data = load_digits()
    return arrays(
        data.images.astype(np.uint8),
        data.target.astype(np.int64),
        name="digits",
        mean=[DIGITS_MEAN],
        std=[DIGITS_STD],
        scale=1 / 16,
    )


def transform(
    source: Source, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Callable[..., Tensor]:
    """Return the function that takes stored rows (..., c, h, w) or (..., d) to what a network sees.

        (x * scale - mean) / std

    Leading axes are free, so a batch, a client's batches and a cohort's all pass through the same function. Rows of a
    merged source need their domains (...) too, each of which has its own numbers.
    """
    import torch  # noqa: PLC0415 (takes a second, and datasets are listed, read and checked without it)

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
    if x.dtype != np.uint8 and not np.issubdtype(x.dtype, np.floating):
        raise SourceError(f"{name}: x has type {x.dtype}, but it must be uint8 or a float type.")
    if x.ndim not in (2, 3, 4):
        raise SourceError(
            f"{name}: x has shape {x.shape}, but it must be (rows, features), (rows, height, width) "
            "or (rows, channels, height, width)."
        )
    if 0 in x.shape:
        raise SourceError(f"{name}: x has shape {x.shape}, but no axis may be empty.")
    if x.ndim == 3:
        x = x[:, None]
    if x.ndim == 4 and x.shape[1] not in (1, 3, 4) and x.shape[3] in (1, 3, 4):
        raise SourceError(
            f"{name}: x has shape {x.shape}, which looks like channels last; use x.transpose(0, 3, 1, 2)."
        )
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):  # a float64 too large for float32 is reported below, with its row
            x = x.astype(np.float32, copy=False)
        bad = ~np.isfinite(x).reshape(len(x), -1).all(1)
        if bad.any():
            raise SourceError(
                f"{name}: row {bad.argmax()} of x holds a value that is not a finite float32 number; "
                "drop such rows or fill them in."
            )
    return x


def _rows(value: ArrayLike, length: int, what: str, name: str) -> np.ndarray:
    array = _array(value, what, name)
    if array.shape != (length,):
        raise SourceError(
            f"{name}: {what} has shape {array.shape}, but x has {length} rows, so it must be ({length},)."
        )
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
    if num_classes is not None and num_classes < 2:
        raise SourceError(f"{name}: num_classes is {num_classes}, but it must be at least 2.")
    bad = y < 0 if num_classes is None else (y < 0) | (y >= num_classes)
    if bad.any():
        row = int(bad.argmax())
        end = "" if num_classes is None else f" to {num_classes - 1}"
        raise SourceError(f"{name}: row {row} has label {y[row]}, but labels must run from 0{end}; {remedy}.")
    present = np.unique(y)
    if len(present) < 2:
        raise SourceError(f"{name}: every row has label {present[0]}, but there must be at least 2 classes.")
    if num_classes is None and len(present) != int(present[-1]) + 1:
        gap = int((present != np.arange(len(present))).argmax())
        row = int((y > gap).argmax())
        raise SourceError(
            f"{name}: row {row} has label {y[row]}, but no row has label {gap}; "
            f"{remedy}, or pass num_classes if that class is only empty."
        )
    return y.astype(np.int64, copy=False)


def _clients(value: ArrayLike, length: int, name: str) -> np.ndarray:
    client = _integers(value, length, "client", name)
    bad = (client < 0) | (client > np.iinfo(np.int64).max)
    if bad.any():
        row = int(bad.argmax())
        raise SourceError(f"{name}: row {row} has client {client[row]}, but client ids must be 0 to 2^63 - 1.")
    return client.astype(np.int64, copy=False)


def _flags(value: ArrayLike, length: int, name: str) -> np.ndarray:
    test = _rows(value, length, "test", name)
    if test.dtype != np.bool_:
        raise SourceError(f"{name}: test has type {test.dtype}, but it must be bool, such as test.astype(bool).")
    if test.all():
        raise SourceError(f"{name}: every row is a test row, but some must be left to train on.")
    return test


def moments(x: np.ndarray) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation per channel of images, or over everything of features.

    Channel by channel, and a channel of bytes through its histogram: a float64 copy of a dataset may not fit.
    """
    channels = [x[:, channel] for channel in range(x.shape[1])] if x.ndim == 4 else [x]
    means, stds = [], []
    for values in channels:
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


def _per_channel(values: Sequence[float], channels: int, what: str, name: str) -> tuple[float, ...]:
    result = tuple(float(value) for value in values)
    if len(result) not in (1, channels):
        raise SourceError(f"{name}: {what} has {len(result)} numbers, but it must have 1 or {channels}.")
    wrong = [value for value in result if not np.isfinite(value) or (what == "std" and value <= 0)]
    if wrong:
        right = "positive" if what == "std" else "finite"
        raise SourceError(f"{name}: {what} holds {wrong[0]}, but it must be {right}.")
    return result
