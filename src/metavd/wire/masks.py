"""Which entries a mask covers, and how the mask itself is written.

A mask holds one 0 or 1 a weight, or one an input unit, which then stands for all weights that leave that unit. It is
written as one bit an entry, or as the positions (4 bytes each) of those it keeps or of those it drops, whichever is
smallest; so a mask that keeps everything, or nothing, takes no bytes.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..tree import Params

Written = Literal["bits", "kept", "dropped"]

POSITION = 4
"""Bytes of a position."""


def is_mask(name: str) -> bool:
    """Return whether an entry is a mask: "mask" leaves weights out, "keep" (see `emit.kept`) only marks zeros."""
    return name.rpartition(".")[2] in {"mask", "keep"}


def mask_of(name: str, shape: torch.Size | tuple[int, ...], params: Params) -> Tensor | None:
    """Return the mask that covers an entry: weights and spreads of its layer, never biases.

    >>> params = {"fc.mask": torch.ones(8)}
    >>> [mask_of(name, (4, 8), params) is not None for name in ("fc.weight", "fc.bias", "fc.mask", "out.weight")]
    [True, False, False, False]
    """
    layer, _, part = name.rpartition(".")
    mask = None if part in {"bias", "mask", "keep"} else params.get(f"{layer}.mask")
    if mask is None or tuple(shape) == tuple(mask.shape):
        return mask
    return mask if mask.dim() == 1 and len(shape) > 1 and shape[1] == len(mask) else None


def cover(mask: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    """Return which entries of an array of this shape the mask keeps, as booleans (...)."""
    kept = mask > 0
    if tuple(shape) == tuple(mask.shape):
        return kept
    return kept.reshape(1, -1, *[1] * (len(shape) - 2)).expand(tuple(shape))


def smallest(kept: int, count: int) -> tuple[Written, int]:
    """Return how a mask is written that keeps so many of its entries, and how many bytes that takes.

    >>> smallest(1021, 1024), smallest(500, 1024), smallest(0, 1024)
    (('dropped', 12), ('bits', 128), ('kept', 0))
    """
    sizes: dict[Written, int] = {
        "dropped": POSITION * (count - kept), "kept": POSITION * kept, "bits": (count + 7) // 8,
    }  # fmt: skip
    written = min(sizes, key=lambda way: sizes[way])
    return written, sizes[written]


def write(mask: Tensor) -> tuple[Written, bytes]:
    """Write a mask of zeros and ones."""
    kept = mask.detach().cpu().reshape(-1).numpy() > 0
    written, _ = smallest(int(kept.sum()), kept.size)
    if written == "bits":
        return written, np.packbits(kept, bitorder="little").tobytes()
    return written, np.flatnonzero(kept == (written == "kept")).astype("<u4").tobytes()


def read(written: str, data: bytes, count: int) -> Tensor:
    """Read a mask as booleans (count,); ValueError says what is wrong with it."""
    if written == "bits":
        if len(data) != (count + 7) // 8:
            raise ValueError(f"{count} bits do not take {len(data)} bytes")
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        if bits[count:].any():
            raise ValueError("bits are set beyond its end")
        return torch.from_numpy(bits[:count].astype(bool))
    if len(data) % POSITION:
        raise ValueError(f"{len(data)} bytes are no whole number of positions")
    positions = np.frombuffer(data, "<u4").astype(np.int64)
    if len(positions) and (positions[-1] >= count or (np.diff(positions) <= 0).any()):
        raise ValueError("its positions do not ascend or lie outside of it")
    kept = np.full(count, written == "dropped")
    kept[positions] = written == "kept"
    return torch.from_numpy(kept)
