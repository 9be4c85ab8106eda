"""A client's own rows: read where they are, and never sent.

A site is told in its node config what it holds: data="npz:rows.npz", or anything else that `metavd data check` knows.
A site says once what its rows are like (`look`): shape, type, number of classes, mean and standard deviation. From
everybody's looks the server makes what the model takes (`agree`), and every site then reads its rows accordingly, so
that all use the same numbers. For demonstrations and simulation a node may hold a share of a dataset instead, by its
partition-id; who holds which row is then decided as in the simulator.

Shape letters: n rows, K classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data import collection
from ..data.cohort import Pool, pool
from ..data.formats import npz
from ..data.formats.files import need_folder
from ..data.formats.folder import scan
from ..data.formats.images import Stack, check_size
from ..data.partition import Federation, federate
from ..data.source import Source, moments
from ..runs.run import channels_last, deal
from ..runs.settings import Experiment, content
from ..serve.samples import blank, class_names, samples
from .config import FederationError

SITES = "sites"
"""Name of the data of a run whose sites have their own."""


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


def look(node: Mapping[str, Any]) -> Look | None:
    """Return what the rows of a node are like; None of a share, which the server knows already."""
    if "data" not in node:
        if "partition-id" not in node:
            raise FederationError(
                "this node has no data; start it with --node-config 'data=\"npz:rows.npz\"', or with a partition-id"
            )
        return None
    text, root = str(node["data"]), str(node.get("root", "data"))
    parts = collection.parse(text)
    if len(parts) > 1:
        raise FederationError(f"data is {text!r}, which names {len(parts)} datasets, but a site holds one; name one")
    names: tuple[str, ...] = ()
    if parts[0].name == "npz":
        found = npz.read(npz.find_npz(need_folder(Path(parts[0].path).expanduser())), **parts[0].options)
        x, y, test = found.x, found.y, found.test
    elif parts[0].name == "folder":
        rows, split = scan(need_folder(Path(parts[0].path).expanduser()))
        stack = Stack(len(rows), check_size(parts[0].options.get("size")), parts[0].options.get("channels"))
        for row in rows:
            stack.add(row.path)
        names = tuple(sorted({row.label for row in rows}))
        x, y = stack.x, np.array([names.index(row.label) for row in rows])
        test = np.array([row.test for row in rows]) if split else None
    else:
        source = collection.load(text, root).sources[0]
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


def write_look(found: Look | None) -> str:
    """Write a look for a message."""
    return "" if found is None else json.dumps(asdict(found))


def read_look(text: object) -> Look | None:
    """Read a look that a site sent, or say that it is none."""
    if not text:
        return None
    try:
        values = json.loads(str(text))
        lists = {name: tuple(values[name]) for name in ("shape", "names", "mean", "std")}
        found = Look(**{**values, **lists})
        np.dtype(found.dtype)
        numbers = (found.rows, found.classes, found.scale, *found.shape, *found.mean, *found.std)
        if not all(isinstance(each, int | float) and np.isfinite(each) for each in numbers) or min(found.shape) < 1:
            raise ValueError("a number in it is none")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FederationError(f"what the site says of its rows cannot be read ({error})") from None
    return found


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
        augment=all(each.augment for _, each in everyone),
    )  # fmt: skip
    return takes, names or [str(label) for label in range(count)]


def shared(text: str, root: str = "data") -> tuple[collection.Collection, Source, list[str]]:
    """Return a dataset that nodes hold shares of, what a model of it takes, and the names of its classes."""
    data = collection.load(text, root)
    if len(data.sources) > 1:
        raise FederationError(f"data is {text!r}, but a federation trains on one dataset; name one")
    source = data.sources[0]
    return data, replace(blank(source), name=text), class_names(text, source)


def settle(node: Mapping[str, Any], e: Experiment, takes: Source, classes: Sequence[str]) -> Site:
    """Read a node's rows as the run wants them."""
    device = str(node.get("device", "cpu"))
    if "data" in node:
        return Site(_pool(_own(node, e, takes, classes), replace(e, device=device)), 0)
    if e.data == SITES:
        raise FederationError(
            "the run has no dataset to take a share of; start this node with --node-config 'data=\"npz:rows.npz\"'"
        )
    held = _dealt(json.dumps(content(replace(e, device=device))), str(node.get("root", "data")))
    index, count = int(node["partition-id"]), len(held.federation.train)
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


def _own(node: Mapping[str, Any], e: Experiment, takes: Source, classes: Sequence[str]) -> Federation:
    text = str(node["data"])
    rows = samples(text, takes, classes, data=text, root=str(node.get("root", "data")))
    if rows.y is None:
        raise FederationError(f"{text} has no labels, but a client trains on labelled rows")
    kept = np.ones(len(rows.y), bool)
    if "client" in node:
        who = str(node["client"])
        if who not in rows.clients():
            raise FederationError(f"client is {who!r}, but {text} holds {', '.join(rows.clients()[:8]) or 'none'}")
        kept = np.array([each == who for each in rows.client or ()])
    test = None if rows.test is None else rows.test[kept]
    source = replace(takes, x=rows.x[kept], y=rows.y[kept], test=test)
    return federate(
        source, "iid", clients=1, test_rows="consistent", valid=e.valid, test_share=e.test_share, seed=e.seed
    )
