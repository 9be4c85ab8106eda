"""Datasets that other libraries hold: Hugging Face's `datasets` and torchvision's, by what they can do.

Neither is imported, so neither is a dependency; anything that has rows and answers in the same way will do.

    from_huggingface(load_dataset("cifar10"))                     a DatasetDict with train and test, or one Dataset
    from_torchvision(CIFAR10("data"), CIFAR10("data", train=False))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ..source import Source, SourceError, arrays
from .files import plain
from .images import Size, Stack, check_size, open_picture

_IMAGES = ("image", "img", "images", "pixel_values", "x", "features")
_LABELS = ("label", "labels", "fine_label", "character", "target", "y")


def from_huggingface(
    dataset: Any,
    *,
    image: str | None = None,
    label: str | None = None,
    client: str | None = None,
    test: Any = None,
    size: Size = None,
    channels: int | None = None,
    name: str = "huggingface",
    **options: Any,
) -> Source:
    """Return a source from a `datasets.Dataset`, or a `DatasetDict` with train and perhaps test.

    Args:
        dataset: rows by number, each a dict; `column_names` and `features` as in `datasets`.
        image: the column with pictures or features; found among the usual names by default.
        label: the column with labels, whole numbers or a ClassLabel; likewise.
        client: the column that says whose a row is, numbers or names; none by default.
        test: the test rows, if they are another dataset.
        size: to which pictures are resized; see `images`.
        channels: 1 or 3; None sees which.
        name: what the dataset is called.
        options: passed to `arrays` (mean, std, augment, num_classes).
    """
    if hasattr(dataset, "keys"):
        if "train" not in dataset:
            raise SourceError(f"{name}: the splits are {', '.join(map(str, dataset.keys()))}, but train must be there.")
        dataset, test = dataset["train"], dataset["test"] if "test" in dataset and test is None else test
    halves = [half for half in (dataset, test) if half is not None]
    image = _column("image", image, _IMAGES, halves, name)
    label = _column("label", label, _LABELS, halves, name)
    if client is not None:
        _column("client", client, (), halves, name)

    def values(column: str) -> Iterator[Any]:
        """Yield one column, row by row: whole columns of pictures would be decoded at once."""
        return (half[number][column] for half in halves for number in range(len(half)))

    names = getattr((getattr(dataset, "features", None) or {}).get(label), "names", None)
    if names and "num_classes" not in options:
        options |= {"num_classes": len(names), "classes": [str(each) for each in names]}
    x = _pictures(values(image), sum(map(len, halves)), size, channels, name)
    who = None if client is None else list(values(client))
    return _source(x, list(values(label)), who, halves, name=name, **options)


def from_torchvision(
    train: Any,
    test: Any = None,
    *,
    size: Size = None,
    channels: int | None = None,
    client: Sequence[Any] | np.ndarray | None = None,
    name: str | None = None,
    **options: Any,
) -> Source:
    """Return a source from torchvision's datasets, or any with `len` and (picture, label) by number.

    Where a dataset keeps its raw bytes (`data` and `targets`, as MNIST and CIFAR do), those are taken and its
    `transform` is not applied: normalisation and augmentation belong to the source. Other datasets are asked row by
    row, with their transform; give it none that is random.

    Args:
        train: the train rows.
        test: the test rows, if there are any.
        size: to which pictures are resized; see `images`.
        channels: 1 or 3; None sees which.
        client: whose each row is, train rows first; numbers or names.
        name: what the dataset is called; its class by default.
        options: passed to `arrays` (mean, std, augment, num_classes).
    """
    name = name or type(train).__name__.lower()
    halves = [half for half in (train, test) if half is not None]
    raw = [pair for half in halves if (pair := _raw(half)) is not None]
    y: list[Any] = []
    rows: Iterable[Any] = _pairs(halves, y, name)
    if len(raw) == len(halves):
        rows = chain.from_iterable(x for x, _ in raw)
        y = [label for _, labels in raw for label in labels]
    if len(raw) == len(halves) and size is None and channels is None and len({x.shape[1:] for x, _ in raw}) == 1:
        x = _first_channels(np.concatenate([x for x, _ in raw]), name)
    else:
        x = _pictures(rows, sum(map(len, halves)), size, channels, name)
    return _source(x, y, None if client is None else list(client), halves, name=name, **options)


def _source(
    x: np.ndarray, y: list[Any], client: list[Any] | None, halves: list[Any], *, name: str, **options: Any
) -> Source:
    """Return the source of rows that come from a train and perhaps a test half; clients are numbers or names."""
    labels = np.asarray(y)
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        row = next((i for i, v in enumerate(y) if isinstance(v, bool) or not isinstance(v, int | np.integer)), 0)
        raise SourceError(f"{name}: row {row} has label {plain(str(y[row]))}, but labels must be whole numbers from 0.")
    who = None if client is None else np.asarray(client)
    if who is not None and who.dtype.kind not in "iu":
        who = np.array([str(value) for value in client or ()])
    test = np.repeat([False, True], [len(half) for half in halves]) if len(halves) == 2 else None
    return arrays(x, labels, who, test, name, **options)


def _column(what: str, given: str | None, usual: Sequence[str], halves: Sequence[Any], name: str) -> str:
    """Return the column that is meant, which both halves must have."""
    columns = [_columns(half, name) for half in halves]
    found = given if given is not None else next((column for column in usual if column in columns[0]), None)
    if found is None or found not in columns[0]:
        asked = f"no column {given!r}" if given is not None else f"no column for the {what} among the usual names"
        raise SourceError(f"{name}: there is {asked}; the columns are {', '.join(columns[0])}, pass {what}=....")
    if found not in columns[-1]:
        raise SourceError(f"{name}: the test rows have no column {found!r}, but the train rows do.")
    return found


def _columns(half: Any, name: str) -> list[str]:
    found = getattr(half, "column_names", None) or half[0]
    if not isinstance(found, dict | list | tuple):
        raise SourceError(f"{name}: a row is {type(found).__name__}, but it must be a dict of columns.")
    return list(found)


def _raw(dataset: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the bytes and labels that a dataset keeps, if it keeps them as they are."""
    data, targets = getattr(dataset, "data", None), getattr(dataset, "targets", getattr(dataset, "labels", None))
    if data is None or targets is None:
        return None
    try:
        x, y = np.asarray(data), np.asarray(targets)
    except ValueError:
        return None
    usable = x.dtype == np.uint8 and x.ndim in (3, 4) and y.ndim == 1 and len(x) == len(y) == len(dataset)
    return (x, y) if usable else None


def _first_channels(x: np.ndarray, name: str) -> np.ndarray:
    if x.ndim != 4 or x.shape[3] not in (1, 3, 4):
        return x
    if x.shape[1] in (1, 3, 4):
        raise SourceError(f"{name}: images have shape {x.shape}, which does not tell where the channels are.")
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def _pairs(halves: Sequence[Any], y: list[Any], name: str) -> Iterator[Any]:
    for half in halves:
        for number in range(len(half)):
            row = half[number]
            if not isinstance(row, tuple | list) or len(row) < 2:
                raise SourceError(f"{name}: row {number} must be (picture, label).")
            y.append(row[1])
            yield row[0]


def _pictures(rows: Iterable[Any], count: int, size: Size, channels: int | None, name: str) -> np.ndarray:
    """Return one array of rows that may be Pillow's pictures, encoded files, arrays or tensors."""
    pair = check_size(size)
    stack = Stack(count, pair, channels)
    values: list[np.ndarray] = []
    for number, row in enumerate(rows):
        place = Path(f"{name}[{number}]")
        value = row["bytes"] if isinstance(row, dict) and row.get("bytes") is not None else row  # not decoded yet
        if isinstance(value, bytes):
            value = open_picture(place, value)
        if hasattr(value, "getbands"):
            stack.add(place, value)
            continue
        value = _numbers(value, place)
        if value.dtype != np.uint8 or value.ndim not in (2, 3):
            values.append(value.astype(np.float32) if value.dtype.kind == "f" else value)
            continue
        value = value[None] if value.ndim == 2 else _first_channels(value[None], name)[0]
        if pair is None and channels in (None, len(value)):
            stack.put(place, value)
        else:
            from PIL import Image  # noqa: PLC0415 (only if something has to change)

            flat = value[0] if len(value) == 1 else value.transpose(1, 2, 0)
            stack.add(place, Image.fromarray(np.ascontiguousarray(flat)))
    if values and len(values) == count:
        row = next((i for i, value in enumerate(values) if value.shape != values[0].shape), None)
        if row is not None:
            has = f"row {row} has shape {values[row].shape}, but row 0 has {values[0].shape}"
            raise SourceError(f"{name}: {has}; all must be alike.")
        return np.stack(values)
    if values or not stack.full:
        raise SourceError(f"{name}: all rows must be pictures, or all must be arrays of numbers.")
    return stack.x


def _numbers(value: Any, place: Path) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise SourceError(f"{place}: this row is no picture and no array ({plain(error)}).") from None
    if array.dtype.kind not in "uif":
        raise SourceError(f"{place}: this row is {type(value).__name__}, but it must be a picture or an array.")
    return array
