"""How many bytes a client's parameters take on the wire.

A masked layer's weights and spreads travel without their masked entries. The mask itself travels down, as bits or as
the positions of the fewer kind, whichever is smaller; up it need not, since the server made it. These are the bytes
of `codec.encode` without its header: 144 bytes, and 75 per entry, or 120 where the entry is packed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..core.posterior import Posterior, entries
from ..tree import Params
from . import masks


class Traffic(NamedTuple):
    """Bytes of one client's exchange in one round, or of several clients together."""

    down: int
    up: int
    dense: int
    """One direction without masks."""


def traffic(params: Params) -> Traffic:
    """Count the bytes of a client's exchange, given what it received or sent back (the shapes are the same).

    >>> import torch
    >>> traffic({"fc.weight": torch.ones(8, 4), "fc.mask": torch.tensor([[1.0, 0, 0, 0]] * 8)})
    Traffic(down=36, up=32, dense=128)
    """
    return together({name: value[None] for name, value in params.items()})()


def together(params: Params) -> Callable[[], Traffic]:
    """Count the bytes of C clients' exchanges (C, ...); return what waits for the device and tells their sum.

    It holds no weights: what the masks of all clients keep is counted at once.
    """
    told = {name: value.flatten(1).count_nonzero(1) for name, value in params.items() if masks.is_mask(name)}
    one = {name: value.new_empty(value.shape[1:], device="meta") for name, value in params.items()}
    clients = len(next(iter(params.values()), ()))  # some methods send nothing

    def counted() -> Traffic:
        kept = {name: value.tolist() for name, value in told.items()}
        dense = up = down = 0
        for name, value in one.items():
            if masks.is_mask(name):
                down += sum(masks.smallest(each, value.numel())[1] for each in kept[name])
                continue
            count, size = value.numel(), value.dtype.itemsize
            dense += clients * count * size
            mask = masks.mask_of(name, value.shape, one)
            if mask is None or not count:
                up += clients * count * size
            else:  # a mask per input unit stands for that unit's whole column of weights
                up += count // mask.numel() * sum(kept[f"{name.rpartition('.')[0]}.mask"]) * size
        return Traffic(up + down, up, dense)

    return counted


def sparsity(params: Params, posterior: Posterior | None = None) -> dict[str, float]:
    """Return the share of masked weights in the masked layers, and in the whole model (a posterior's not counted)."""
    spreads: set[str] = set()
    if posterior is not None:
        weights = {layer: tuple(params[f"{layer}.weight"].shape) for layer in posterior.layers}
        spreads = {name for _, name, _ in entries(posterior, weights)}
    masked = layer_weights = model_weights = 0.0
    for name, value in params.items():
        layer, _, part = name.rpartition(".")
        if masks.is_mask(name) or name in spreads:
            continue
        model_weights += value.numel()
        mask = params.get(f"{layer}.mask") if part != "bias" else None
        if mask is not None:
            layer_weights += value.numel()
            masked += value.numel() * (1.0 - float(mask.mean()))
    return {"layer": masked / layer_weights if layer_weights else 0.0, "model": masked / max(model_weights, 1.0)}
