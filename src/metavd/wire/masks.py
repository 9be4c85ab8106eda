"""Which entries a mask covers, and how the mask itself is packed.

A mask holds one 0 or 1 per weight, or one per input unit, which then stands for all weights that leave that unit. It
is packed as one bit per entry, or as the positions (4 bytes each) of those it keeps or of those it drops, whichever is
smallest; so a mask that keeps everything, or nothing, takes no bytes.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..tree import Params

Way = Literal["bits", "kept", "dropped"]

POSITION = torch.int32
MOST = 1 << 31
"""Entries of a mask, all of whose positions such a number can hold."""


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


def smallest(kept: int, count: int) -> tuple[Way, int]:
    """Return how a mask is packed that keeps so many of its entries, and how many bytes that takes.

    >>> smallest(1021, 1024), smallest(500, 1024), smallest(0, 1024)
    (('dropped', 12), ('bits', 128), ('kept', 0))
    """
    sizes: dict[Way, int] = {
        "dropped": POSITION.itemsize * (count - kept), "kept": POSITION.itemsize * kept, "bits": (count + 7) // 8,
    }  # fmt: skip
    way = min(sizes, key=lambda way: sizes[way])
    return way, sizes[way]


def pack(mask: Tensor) -> tuple[Way, Tensor]:
    """Pack a mask of zeros and ones: bits as uint8, or positions as int32."""
    kept = mask.detach().cpu().reshape(-1).numpy() > 0
    way, _ = smallest(int(kept.sum()), kept.size)
    if way == "bits":
        return way, torch.from_numpy(np.packbits(kept, bitorder="little"))
    return way, torch.from_numpy(np.flatnonzero(kept == (way == "kept")).astype(np.int32))


def unpack(way: str, packed: Tensor, count: int) -> Tensor:
    """Return a mask as booleans (count,); ValueError says what is wrong with it."""
    if packed.dim() != 1 or packed.dtype != (torch.uint8 if way == "bits" else POSITION):
        raise ValueError(f"{packed.dtype} of shape {tuple(packed.shape)} cannot be its {way}")
    if way == "bits":
        if len(packed) != (count + 7) // 8:
            raise ValueError(f"{count} bits do not take {len(packed)} bytes")
        bits = np.unpackbits(packed.numpy(), bitorder="little")
        if bits[count:].any():
            raise ValueError("bits are set beyond its end")
        return torch.from_numpy(bits[:count].astype(bool))
    positions = packed.numpy()
    if len(positions) and (positions[0] < 0 or positions[-1] >= count or (positions[1:] <= positions[:-1]).any()):
        raise ValueError("its positions do not ascend or lie outside of it")
    kept = np.full(count, way == "dropped")
    kept[positions] = way == "kept"
    return torch.from_numpy(kept)
