"""Triton kernels of a clipped step, and of rows whose number only the device knows. `step` makes operators of them.

Sums are taken in a fixed order, without atomics.

Shape letters: C clients.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import kernel

_BLOCK = 1024


@kernel()
def _lengths(slopes, sizes, out, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the squares of a lane's blocks of all of a client's entries."""
    lane = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(len(slopes)):
        size = sizes[i]
        for first in range(lane * BLOCK, size, LANES * BLOCK):
            at = first + tl.arange(0, BLOCK)
            value = tl.load(slopes[i] + client * size + at, mask=at < size, other=0.0)
            total += value * value
    tl.store(out + client * LANES + lane, tl.sum(total, 0))


@kernel()
def _descend(starts, slopes, ends, sizes, squares, moving, lr, limit, CLIP: tl.constexpr, SOME: tl.constexpr,
             LANES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    lane = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    rate = lr
    if CLIP:
        norm = tl.sqrt(tl.sum(tl.load(squares + client * LANES + tl.arange(0, LANES)), 0))
        scale = limit / (norm + 1e-6)
        # A NaN must not pass for 1.
        rate = tl.where(scale > 1.0, lr, lr * scale)
    for i in tl.static_range(len(slopes)):
        size = sizes[i]
        for first in range(lane * BLOCK, size, LANES * BLOCK):
            at = first + tl.arange(0, BLOCK)
            here = at < size
            slope = tl.load(slopes[i] + client * size + at, mask=here, other=0.0)
            start = tl.load(starts[i] + client * size + at, mask=here, other=0.0)
            if SOME:
                here = at < tl.where(tl.load(moving + client) > 0, size, 0)
            tl.store(ends[i] + client * size + at, start - rate * slope, mask=here)


@kernel()
def _gather(number, sources, outs, sizes, BLOCK: tl.constexpr):
    first = tl.load(number)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for i in tl.static_range(len(sources)):
        here = at < sizes[i]
        tl.store(outs[i] + at, tl.load(sources[i] + first * sizes[i] + at, mask=here, other=0), mask=here)


_LANES = 32
"""Programs that share a client's parameters."""


def descend(
    starts: list[Tensor], slopes: list[Tensor], lr: float, clip: float | None, here: Tensor | None = None, *,
    in_place: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Take a clipped step of every client: entries (C, ...) of all kinds, one norm per client over all of them.

    In place, clients may stay where they are: those whose number in `here` (C,) is 0.
    """
    clients = len(starts[0])
    starts, slopes = ([value.contiguous() for value in values] for values in (starts, slopes))
    ends = [value.detach() if in_place else torch.empty_like(value) for value in starts]
    sizes = tuple(value.numel() // clients for value in starts)
    grid = (_LANES, clients)
    squares = torch.empty(clients, _LANES, dtype=torch.float32, device=starts[0].device)
    if clip is not None:
        _lengths[grid](tuple(slopes), sizes, squares, LANES=_LANES, BLOCK=_BLOCK)
    _descend[grid](
        tuple(starts), tuple(slopes), tuple(ends), sizes, squares, squares if here is None else here, lr, clip or 0.0,
        CLIP=clip is not None, SOME=here is not None, LANES=_LANES, BLOCK=_BLOCK,
    )  # fmt: skip
    return ends


def gathered(values: list[Tensor], number: Tensor) -> list[Tensor]:
    """Return values[i][number] of contiguous tensors, where the number (1,) is known to the device alone."""
    outs = [value.new_empty(value.shape[1:]) for value in values]
    sizes = tuple(out.numel() for out in outs)
    _gather[(triton.cdiv(max(sizes), _BLOCK),)](number, tuple(values), tuple(outs), sizes, BLOCK=_BLOCK)
    return outs
