"""How many bytes a client's parameters take on the wire.

A masked layer's weights and spreads travel without their masked entries. The mask itself travels down, as bits or as
the positions of the fewer kind, whichever is smaller; up it need not, since the server made it. These are the bytes
of `codec.encode` without its header: 144 bytes, and 75 per entry, or 120 where the entry is packed.
"""

from __future__ import annotations

from typing import NamedTuple

from ..tree import Params
from . import masks
from .codec import stored_bytes


class Traffic(NamedTuple):
    """Bytes of one client's exchange in one round."""

    down: int
    up: int
    dense: int
    """One direction without masks."""


def traffic(params: Params, *, half: bool = False) -> Traffic:
    """Count the bytes of a client's exchange, given what it received or sent back (the shapes are the same).

    >>> import torch
    >>> traffic({"fc.weight": torch.ones(8, 4), "fc.mask": torch.tensor([[1.0, 0, 0, 0]] * 8)})
    Traffic(down=36, up=32, dense=128)
    """
    dense = up = down = 0
    for name, value in params.items():
        if masks.is_mask(name):
            down += masks.smallest(int(value.count_nonzero()), value.numel())[1]
            continue
        count, size = value.numel(), stored_bytes(value.dtype, half=half)
        dense += count * size
        mask = masks.mask_of(name, value.shape, params)
        if mask is not None and count:
            # A mask per input unit stands for that unit's whole column of weights.
            count = count // mask.numel() * int(mask.count_nonzero())
        up += count * size
    return Traffic(up + down, up, dense)


def sparsity(params: Params) -> dict[str, float]:
    """Return the share of masked weights in the masked layers, and in the whole model (spreads not counted)."""
    masked = layer_weights = model_weights = 0.0
    for name, value in params.items():
        layer, _, part = name.rpartition(".")
        if part in {"mask", "keep", "logvar", "logalpha"}:
            continue
        model_weights += value.numel()
        mask = params.get(f"{layer}.mask") if part != "bias" else None
        if mask is not None:
            layer_weights += value.numel()
            masked += value.numel() * (1.0 - float(mask.mean()))
    return {"layer": masked / layer_weights if layer_weights else 0.0, "model": masked / max(model_weights, 1.0)}
