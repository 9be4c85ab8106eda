"""Triton kernels of the cross-entropy over draws. `loss` makes operators of them.

All tensors are contiguous, clients first. Sums are taken in a fixed order, without atomics.

Shape letters: C clients, S draws, B rows, K classes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import kernel

_ROWS = 64


@triton.jit
def _mean_logits(logits, client, row, col, S, B, K):
    """Mean over the draws, and minus infinity where there is no class."""
    here = (row < B)[:, None] & (col < K)[None, :]
    total = tl.where((col < K)[None, :] & (row >= 0)[:, None], 0.0, float("-inf"))
    for draw in range(S):
        at = ((client * S + draw) * B + row)[:, None] * K + col[None, :]
        total += tl.load(logits + at, mask=here, other=0.0)
    return total / S


@kernel()
def _cross_entropy(logits, y, mask, loss, S, B, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    client = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS,), tl.float32)
    real = tl.zeros((ROWS,), tl.float32)
    for first in range(0, B, ROWS):
        row = first + tl.arange(0, ROWS)
        x = _mean_logits(logits, client, row, col, S, B, K)
        top = tl.max(x, 1)
        label = tl.load(y + client * B + row, mask=row < B, other=0)
        picked = tl.sum(tl.where(col[None, :] == label[:, None], x, 0.0), 1)
        weight = tl.load(mask + client * B + row, mask=row < B, other=0.0)
        total += weight * (top + tl.log(tl.sum(tl.exp(x - top[:, None]), 1)) - picked)
        real += weight
    tl.store(loss + client, tl.sum(total, 0) / tl.maximum(tl.sum(real, 0), 1.0))


@kernel()
def _cross_entropy_slope(
    g, logits, y, mask, out, S, B, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALL: tl.constexpr
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    col = tl.arange(0, COLUMNS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    every = tl.arange(0, ALL)
    real = tl.sum(tl.load(mask + client * B + every, mask=every < B, other=0.0), 0)
    x = _mean_logits(logits, client, row, col, S, B, K)
    e = tl.exp(x - tl.max(x, 1)[:, None])
    label = tl.load(y + client * B + row, mask=row < B, other=0)
    gap = e / tl.sum(e, 1)[:, None] - tl.where(col[None, :] == label[:, None], 1.0, 0.0)
    share = tl.load(mask + client * B + row, mask=row < B, other=0.0) / tl.maximum(real, 1.0) / S
    steep = tl.load(g + client) * share[:, None] * gap
    here = (row < B)[:, None] & (col < K)[None, :]
    for draw in range(S):
        at = ((client * S + draw) * B + row)[:, None] * K + col[None, :]
        tl.store(out + at, steep, mask=here)


def _tile(K: int) -> dict[str, int]:
    columns = triton.next_power_of_2(K)
    rows = max(1, min(_ROWS, 8192 // columns))
    # Of a full tile four warps would hold more than fits their registers.
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": 8 if rows * columns > 4096 else 4}


def cross_entropy(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Cross-entropy (C,) of the mean over the draws of logits (C, S, B, K), over real rows; y and mask (C, B)."""
    C, S, B, K = logits.shape
    loss = logits.new_empty(C)
    _cross_entropy[(C,)](logits, y, mask, loss, S, B, K, **_tile(K))
    return loss


def cross_entropy_slope(g: Tensor, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Gradient of `cross_entropy` by the logits; g (C,)."""
    C, S, B, K = logits.shape
    out = torch.empty_like(logits)
    tile = _tile(K)
    _cross_entropy_slope[(triton.cdiv(B, tile["ROWS"]), C)](
        g, logits, y, mask, out, S, B, K, ALL=triton.next_power_of_2(B), **tile
    )  # fmt: skip
    return out
