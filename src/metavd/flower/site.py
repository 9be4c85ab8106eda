"""A client's own rows: read where they are, and never sent.

A site is told in its node config what it holds: data="npz:rows.npz", or anything else that `metavd data check` knows.
A site says once what its rows are like (`look`): shape, type, number of classes, mean and standard deviation. From
everybody's looks the server makes what the model takes (`agree`), and every site then reads its rows accordingly, so
that all use the same numbers. For demonstrations and simulation a node may hold a share of a dataset instead, by its
partition-id; who holds which row is then decided as in the simulator.

Shape letters: n rows, K classes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from ..container import read_json
from ..data import collection
from ..data.cohort import Pool, pool
from ..data.formats import npz
from ..data.formats.files import fail, need_folder
from ..data.formats.folder import scan
from ..data.formats.images import check_size, pictures
from ..data.partition import Federation, federate
from ..data.source import Columns, Source, moments
from ..runs.settings import Experiment, content
from ..runs.setup import channels_last, deal
from ..serve.samples import blank, class_names, samples
from .config import FederationError, NodeConfig
from .message import cleaned

SITES = "sites"
"""Name of the data of a run whose sites have their own."""
_LONGEST = 1 << 22
_MOST_CLASSES = 100_000
_MOST_TOKENS = 1_000_000
_LARGEST_ROW = 1 << 26
_LARGEST_SCALE = 1e3
_FAR = 1e9
_STRANGE = 100.0
"""Times that a site's numbers may be larger than those of the median site."""


@dataclass(frozen=True, eq=False)
class Site:
    """Rows on a device, and which client of the pool this node is."""

    pool: Pool
    index: int


@dataclass(frozen=True)
class Look:
    """What a site says of its rows: numbers, and the names of its classes where it has names for them."""

    rows: int
    shape: tuple[int, ...]
    dtype: str
    classes: int
    """The largest label + 1."""
    names: tuple[str, ...]
    """Sorted; empty where labels are numbers."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float
    augment: bool
    tokens: int = 0
    """Of rows of token ids: the largest + 1."""


def look(told: NodeConfig) -> Look | None:
    """Return what the rows of a node are like; None of a share, which the server knows already."""
    if not told.data:
        if told.partition_id < 0:
            raise FederationError(
                "this node has no data; start it with --data npz:rows.npz (flower-supernode: with --node-config "
                "'data=\"npz:rows.npz\"'), or with a partition-id"
            )
        return None
    text = told.data
    parts = collection.parse(text)
    if len(parts) > 1:
        raise FederationError(f"data is {text!r}, which names {len(parts)} datasets, but a site holds one; name one")
    names: tuple[str, ...] = ()
    if parts[0].name == "npz":
        path, options = npz.npz_file(need_folder(Path(parts[0].path).expanduser())), dict(parts[0].options)
        numbers = options.pop("kind", "auto") == "numbers" or "features" in npz.keys(path)
        found = npz.read(path, **options)
        x, y, test = found.x, found.y, found.test
        if x.ndim == 2 and x.dtype.kind in "iu" and not numbers:
            return Look(
                rows=len(x), shape=x.shape[1:], dtype="int32", classes=0 if y is None else int(y.max()) + 1, names=(),
                mean=(0.0,), std=(1.0,), scale=1.0, augment=False, tokens=int(x.max()) + 1,
            )  # fmt: skip
    elif parts[0].name == "folder":
        rows, split = scan(need_folder(Path(parts[0].path).expanduser()))
        size, channels = check_size(parts[0].options.get("size")), parts[0].options.get("channels")
        x = pictures([row.path for row in rows], size, channels, fail)
        names = tuple(sorted({row.label for row in rows}))
        y = np.array([names.index(row.label) for row in rows])
        test = np.array([row.test for row in rows]) if split else None
    else:
        source = _numbers(collection.load(text, told.root).sources[0], text)
        shape, dtype = source.x.shape[1:], str(source.x.dtype)
        return Look(
            rows=len(source.y), shape=shape, dtype=dtype, classes=source.num_classes, names=(), mean=source.mean,
            std=source.std, scale=source.scale, augment=source.augment,
        )  # fmt: skip
    x = x[:, None] if x.ndim == 3 else x
    x = x if x.dtype == np.uint8 else x.astype(np.float32)
    scale = 1 / 255 if x.dtype == np.uint8 else 1.0
    mean, std = moments(x if test is None else x[~test])
    count = len(names) or (0 if y is None else int(y.max()) + 1)
    return Look(
        rows=len(x), shape=x.shape[1:], dtype=str(x.dtype), classes=count, names=names, scale=scale,
        mean=tuple(value * scale for value in mean), std=tuple(value * scale for value in std),
        augment=bool(parts[0].options.get("augment")),
    )  # fmt: skip


def _numbers(source: Source, text: str) -> Source:
    """Refuse tables and texts: what their columns and words become is learnt of everybody's rows, which nobody sees."""
    if not isinstance(source.prepare, Columns | None):
        raise FederationError(
            f"data is {text!r}, whose columns or words would be learnt on all sites' rows, which no site may see; give "
            "every site an npz with numbers or token ids that were made by one rule"
        )
    return source


def write_look(found: Look | None) -> str:
    """Write a look for a message."""
    return "" if found is None else json.dumps(asdict(found))


def read_look(text: object, most: float = 1e9) -> Look | None:
    """Read a look that a site sent and that may claim so many rows, or say what no honest site says."""
    if not text:
        return None
    try:
        if len(str(text)) > _LONGEST:
            raise ValueError(f"it has {len(str(text))} characters")
        values = read_json(str(text))
        lists = {name: tuple(values[name]) for name in ("shape", "names", "mean", "std")}
        found = Look(**{**values, **lists})
        _check(found, most)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FederationError(f"what the site says of its rows cannot be read ({cleaned(error)})") from None
    return found


def _check(look: Look, most: float) -> None:
    """Refuse numbers that are none, too large or too many."""

    def whole(name: str, value: object, low: int, high: float) -> None:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{name} is {value!r:.40}, but must be a whole number from {low} to {high:g}")

    whole("rows", look.rows, 1, most)
    whole("classes", look.classes, 0, _MOST_CLASSES)
    whole("tokens", look.tokens, 0, _MOST_TOKENS)
    if not 1 <= len(look.shape) <= 4:
        raise ValueError(f"shape has {len(look.shape)} axes, but must have 1 to 4")
    for each in look.shape:
        whole("an axis of shape", each, 1, _LARGEST_ROW)
    if math.prod(look.shape) > _LARGEST_ROW:
        raise ValueError(f"a row has {math.prod(look.shape)} numbers, but may have {_LARGEST_ROW}")
    if not isinstance(look.dtype, str) or np.dtype(look.dtype).kind not in "uifb":
        raise ValueError(f"dtype is {look.dtype!r:.40}, but must be one of numbers")
    for name, values in (("mean", look.mean), ("std", look.std)):
        if len(values) not in {1, look.shape[0]}:
            raise ValueError(f"{name} has {len(values)} numbers, but a row has {look.shape[0]} channels")
        if not all(type(each) in {int, float} and abs(each) <= _FAR for each in values):
            raise ValueError(f"{name} holds something that is no number from -{_FAR:g} to {_FAR:g}")
    if len(look.mean) != len(look.std) or min(look.std) < 0:
        raise ValueError("std must have as many numbers as mean, and none below 0")
    if type(look.scale) not in {int, float} or not 1 / _FAR <= look.scale <= _LARGEST_SCALE:
        raise ValueError(f"scale is {look.scale!r:.40}, but must be a number above 0, at most {_LARGEST_SCALE:g}")
    if len(look.names) > _MOST_CLASSES or list(look.names) != sorted({cleaned(each) for each in look.names}):
        raise ValueError("its classes' names are not sorted, each once, of at most 200 printable characters")
    if type(look.augment) is not bool:
        raise ValueError("augment must be true or false")


def misfits(looks: Mapping[str, Look], classes: int = 0) -> dict[str, str]:
    """Return the sites whose rows cannot go with the others', by name, and why: most sites decide.

    Where no form of rows has more sites than every other, nobody is a misfit; `agree` then says what differs.
    """
    forms = Counter(_form(each) for each in looks.values()).most_common(2)
    if len(forms) > 1 and forms[0][1] == forms[1][1]:
        return {}
    usual = {name: each for name, each in looks.items() if _form(each) == forms[0][0]}
    length = np.median([_reach(each) for each in usual.values()])
    found = {}
    for name, each in looks.items():
        if name not in usual:
            found[name] = (
                f"{name} has rows of shape {each.shape} and type {each.dtype}, but most sites of {forms[0][0][0]} and "
                f"{forms[0][0][1]}"
            )
        elif classes and not each.names and each.classes > classes:
            found[name] = f"{name} has label {each.classes - 1}, but classes is {classes}"
        elif len(usual) > 2 and _reach(each) > _STRANGE * max(length, 1e-9):  # of two, neither is the strange one
            found[name] = f"{name} has rows {_reach(each) / max(length, 1e-9):.3g} times as large as the others'"
    return {} if len(found) == len(looks) else found


def _form(look: Look) -> tuple[tuple[int, ...], str, bool, float]:
    return look.shape, "token ids" if look.tokens else look.dtype, bool(look.names), look.scale


def _reach(look: Look) -> float:
    """Return the largest number that a site's mean and spread speak of."""
    return max(abs(mean) + std for mean, std in zip(look.mean, look.std, strict=True))


def check_fit(look: Look, takes: Source, classes: Sequence[str]) -> None:
    """Refuse a site whose rows the model of a run that is under way does not take."""
    shape, dtype = takes.x.shape[1:], str(takes.x.dtype)
    if (look.shape, look.dtype) != (shape, dtype):
        raise FederationError(f"it has rows of shape {look.shape} and type {look.dtype}, but the run {shape}, {dtype}")
    if look.tokens > takes.tokens:
        raise FederationError(f"it has the token id {look.tokens - 1}, but the run knows {takes.tokens} ids")
    if look.classes > len(classes) or not set(look.names) <= set(classes):
        raise FederationError(f"it has classes that are none of the {len(classes)} of the run")


def agree(looks: Mapping[str, Look], classes: int = 0) -> tuple[Source, list[str]]:
    """Return what the model takes, from what all sites said of their rows, and the names of the classes.

        mean = sum_i n_i m_i / n,    std^2 = sum_i n_i (s_i^2 + m_i^2) / n - mean^2

    Sites must agree on shape and type. Those whose labels have names are joined by name.
    """
    everyone = sorted(looks.items())
    first_name, first = everyone[0]
    for name, each in everyone:
        if (each.shape, each.dtype, bool(each.names)) != (first.shape, first.dtype, bool(first.names)):
            raise FederationError(
                f"{first_name} has rows of shape {first.shape} and type {first.dtype}, but {name} of {each.shape} and "
                f"{each.dtype}; bring them to one form"
            )
    names = sorted({name for _, each in everyone for name in each.names})
    found = len(names) or max(each.classes for _, each in everyone)
    if classes and (names or classes < found):
        why = f"the sites name {len(names)}" if names else f"a site has label {found - 1}"
        raise FederationError(f"classes is {classes}, but {why}; use 0 to take the sites' word")
    count = classes or found
    if count < 2:
        raise FederationError("the sites have one class only, but a model needs two; say how many with classes")
    rows = np.array([each.rows for _, each in everyone], np.float64)[:, None]
    mean, std = (np.array([getattr(each, part) for _, each in everyone]) for part in ("mean", "std"))
    pooled = (rows * mean).sum(0) / rows.sum()
    spread = np.sqrt(np.maximum((rows * (std**2 + mean**2)).sum(0) / rows.sum() - pooled**2, 0.0))
    spread = np.where(spread > 0, spread, 1.0)  # a constant channel is only centred
    if len({(each.mean, each.std) for _, each in everyone}) == 1:
        pooled, spread = mean[0], np.where(std[0] > 0, std[0], 1.0)
    none = np.empty(0, np.int64)
    takes = Source(
        name=SITES, x=np.empty((0, *first.shape), first.dtype), y=none, num_classes=count, test=None, client=None,
        mean=tuple(pooled.tolist()), std=tuple(spread.tolist()), scale=first.scale,
        augment=all(each.augment for _, each in everyone), tokens=max(each.tokens for _, each in everyone),
    )  # fmt: skip
    return takes, names or [str(label) for label in range(count)]


def fingerprint(site: Site) -> bytes:
    """Return a hash of a site's rows and labels, by which the site itself notices that they are others."""
    found, source = hashlib.sha256(), site.pool.federation.source
    for part in (source.x, source.y):
        found.update(np.ascontiguousarray(part).data)
    return found.hexdigest().encode()


def shared(text: str) -> tuple[collection.Collection, Source, list[str]]:
    """Return a dataset that nodes hold shares of, what a model of it takes, and the names of its classes."""
    data = collection.load(text)
    if len(data.sources) > 1:
        raise FederationError(f"data is {text!r}, but a federation trains on one dataset; name one")
    source = _numbers(data.sources[0], text)
    return data, replace(blank(source), name=text), class_names(source)


def settle(told: NodeConfig, e: Experiment, takes: Source, classes: Sequence[str]) -> Site:
    """Read a node's rows as the run wants them."""
    if told.data:
        return Site(_pool(_own(told, e, takes, classes), replace(e, device=told.device)), 0)
    if e.data == SITES:
        raise FederationError(
            "the run has no dataset to take a share of; start this node with --node-config 'data=\"npz:rows.npz\"'"
        )
    held = _dealt(json.dumps(content(replace(e, device=told.device))), told.root)
    index, count = told.partition_id, len(held.federation.train)
    if not 0 <= index < count:
        raise FederationError(
            f"partition-id is {index}, but the run deals {e.data} to {count} nodes; use 0 to {count - 1}"
        )
    return Site(held, index)


@lru_cache(maxsize=2)
def _dealt(description: str, root: str) -> Pool:
    """Deal a dataset to all nodes; once in a process, because a simulated one answers for many of them."""
    e = Experiment(**json.loads(description))
    return _pool(deal(e, collection.load(e.data, root)), e)


def _pool(federation: Federation, e: Experiment) -> Pool:
    return pool(federation, e.device, getattr(torch, e.dtype), channels_last=channels_last(e))


def _own(told: NodeConfig, e: Experiment, takes: Source, classes: Sequence[str]) -> Federation:
    text, who = told.data, told.client
    rows = samples(text, takes, classes, data=text, root=told.root)
    if rows.y is None:
        raise FederationError(f"{text} has no labels, but a client trains on labelled rows")
    kept = np.ones(len(rows.y), bool)
    if who:
        if who not in rows.clients():
            raise FederationError(f"client is {who!r}, but {text} holds {', '.join(rows.clients()[:8]) or 'none'}")
        kept = np.array([each == who for each in rows.client or ()])
    test = None if rows.test is None else rows.test[kept]
    source = replace(takes, x=rows.x[kept], y=rows.y[kept], test=test)
    return federate(
        source, "iid", clients=1, test_rows="consistent", valid=e.valid, test_share=e.test_share, seed=e.seed
    )
