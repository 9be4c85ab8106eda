"""Several datasets as one: label spaces side by side under one head, images brought to one shape.

Shape letters: n rows, c channels, h height, w width, D domains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .partition import Federation, PartitionError, federate
from .source import Domain, Source, SourceError

_ROWS = 4096
"""Images resized at a time."""


def resize(images: np.ndarray, channels: int, height: int, width: int) -> np.ndarray:
    """Bring uint8 images (n, c, h, w) to another size (bilinear, smoothed when shrinking) and channel count."""
    if images.shape[1] not in (1, channels):
        raise SourceError(f"images with {images.shape[1]} channels cannot be brought to {channels}; only grey ones can")
    import torch  # noqa: PLC0415 (takes a second, and few images are resized)
    from torch.nn import functional  # noqa: PLC0415

    result = np.empty((len(images), channels, height, width), np.uint8)
    for start in range(0, len(images), _ROWS):
        part = images[start : start + _ROWS]
        if part.shape[2:] != (height, width):
            values = torch.from_numpy(np.ascontiguousarray(part)).float()
            values = functional.interpolate(values, (height, width), mode="bilinear", antialias=True)
            part = values.round().clamp(0, 255).to(torch.uint8).numpy()
        result[start : start + _ROWS] = part
    return result


def _need_bytes(source: Source, what: str) -> None:
    if source.x.ndim != 4 or source.x.dtype != np.uint8:
        raise SourceError(f"{source.name} holds no uint8 images, so it cannot be {what}")


def reshape(source: Source, size: int = 0, channels: int = 0) -> Source:
    """Return the source with square images of another side and with more channels; 0 leaves them as they are."""
    if not size and not channels:
        return source
    _need_bytes(source, "brought to another image_size or number of channels")
    height, width = (size, size) if size else source.x.shape[-2:]
    channels = channels or source.x.shape[1]
    if source.x.shape[1:] == (channels, height, width):
        return source
    return replace(source, x=resize(source.x, channels, height, width))


def merge(sources: Sequence[Source], size: int = 0, channels: int = 0) -> Source:
    """Return one source: rows one after another, labels offset in the order of the list, every domain's own look.

    Images become square with the side of the largest (or `size`) and as many channels as the most colourful has (or
    `channels`).
    """
    for source in sources:
        _need_bytes(source, "merged with other datasets")
    if len({source.name for source in sources}) < len(sources):
        raise SourceError(f"{'+'.join(source.name for source in sources)} names a dataset twice; each may stand once")
    channels = channels or max(source.x.shape[1] for source in sources)
    side = size or max(max(source.x.shape[2:]) for source in sources)
    offsets = np.cumsum([0, *(source.num_classes for source in sources)])
    names = [source.name for source in sources]
    domains = tuple(
        Domain(source.name, source.mean, source.std, source.scale, source.augment, int(first), source.num_classes)
        for source, first in zip(sources, offsets, strict=False)
    )
    tested = [np.zeros(len(source.y), bool) if source.test is None else source.test for source in sources]
    return Source(
        name="+".join(names),
        x=np.concatenate([resize(source.x, channels, side, side) for source in sources]),
        y=np.concatenate([source.y + first for source, first in zip(sources, offsets, strict=False)]),
        num_classes=int(offsets[-1]),
        test=np.concatenate(tested) if any(source.test is not None for source in sources) else None,
        client=None,
        mean=(0.0,),
        std=(1.0,),
        scale=1.0,
        augment=any(source.augment for source in sources),
        domain=np.concatenate([np.full(len(source.y), d, np.int64) for d, source in enumerate(sources)]),
        domains=domains,
        classes=_classes(sources),
    )


def _classes(sources: Sequence[Source]) -> tuple[str, ...]:
    """Return the classes' names one dataset after another, numbers where one has no names; none if none has any."""
    if not any(source.classes for source in sources):
        return ()
    return tuple(
        name for source in sources for name in source.classes or (str(label) for label in range(source.num_classes))
    )


def _shares(total: int, parts: int) -> list[int]:
    """Split a number evenly, the remainder to the last."""
    return [*[total // parts] * (parts - 1), total - total // parts * (parts - 1)]


def federate_domains(
    sources: Sequence[Source],
    partition: str = "dirichlet:0.5",
    *,
    clients: int,
    unseen: int = 0,
    valid_clients: int = 0,
    kind: str = "mixed",
    size: int = 0,
    channels: int = 0,
    **settings: Any,
) -> Federation:
    """Decide who holds which row of several datasets.

    Each dataset is dealt by itself: by its natural owners where it knows them, else by `partition`. kind="mixed" gives
    client u the u-th share of every dataset (the released code's type 0); kind="separate" gives every client one
    dataset, the clients being divided evenly among them (type 2).
    """
    count = len(sources)
    if kind == "mixed":
        takes = [(clients, unseen, valid_clients)] * count
    else:
        takes = list(zip(*(_shares(each, count) for each in (clients, unseen, valid_clients)), strict=True))
        if min(take[0] for take in takes) < 1:
            raise PartitionError(f"{clients} clients cannot be divided among {count} datasets; use at least {count}")
    ways = [partition if source.client is None else "natural" for source in sources]
    parts = [
        federate(source, way, clients=own, unseen=new, valid_clients=watched, **settings)
        for source, way, (own, new, watched) in zip(sources, ways, takes, strict=True)
    ]
    starts = np.cumsum([0, *(len(source.y) for source in sources)])

    def rows(split: str) -> tuple[np.ndarray, ...]:
        held = [[block + start for block in getattr(part, split)] for part, start in zip(parts, starts, strict=False)]
        if kind == "mixed":
            return tuple(np.concatenate(blocks) for blocks in zip(*held, strict=True))
        ends = [(0, own, own + new, own + new + watched) for own, new, watched in takes]
        groups = [[blocks[end[i] : end[i + 1]] for blocks, end in zip(held, ends, strict=True)] for i in range(3)]
        return tuple(block for group in groups for blocks in group for block in blocks)

    return Federation(
        source=merge(sources, size, channels),
        train=rows("train"),
        valid=rows("valid"),
        test=rows("test"),
        num_clients=clients,
        num_unseen=unseen,
        num_valid=valid_clients,
        server=np.concatenate([part.server + start for part, start in zip(parts, starts, strict=False)]),
    )
