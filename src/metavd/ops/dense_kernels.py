"""Triton kernels of what follows the convolutions: biases, noise, losses, posteriors. `dense` makes operators of them.

All tensors are contiguous, clients first. Sums are taken in a fixed order, without atomics, as in `kernels`.

Shape letters: C clients, S draws, B rows, O units, K classes, N weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernels import inward, polar
from .launch import kernel

_BLOCK = 1024
_LANES = 32
"""Programs that share a client's weights."""
_ROWS = 64
_COLUMNS = 32


@kernel()
def _bend(x, bias, y, rows, O, slope, BLOCK: tl.constexpr):
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    here = at < rows * O
    client = tl.program_id(1).to(tl.int64)
    value = tl.load(x + client * rows * O + at, mask=here, other=0.0)
    value += tl.load(bias + client * O + at % O, mask=here, other=0.0)
    tl.store(y + client * rows * O + at, tl.where(value > 0, value, value * slope), mask=here)


@kernel()
def _unbend(g, y, gx, gb, rows, O, slope, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    client = tl.program_id(1).to(tl.int64)
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & (cols < O)[None, :]
        at = (client * rows + row)[:, None] * O + cols[None, :]
        steep = tl.load(g + at, mask=here, other=0.0)
        steep = tl.where(tl.load(y + at, mask=here, other=0.0) > 0, steep, steep * slope)
        tl.store(gx + at, steep, mask=here)
        total += tl.sum(steep, 0)
    tl.store(gb + client * O + cols, total, mask=cols < O)


@kernel()
def _gauss(
    mean, bias, var, keys, y, eps, S, each, O, tiny, slope, SHARED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One draw: y = bend(mean + bias + sqrt(var + tiny) eps), eps as in `rng.normal`."""
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    here = at < each
    draw = tl.program_id(1).to(tl.int64)
    client = tl.program_id(2).to(tl.int64)
    radius, angle = polar(tl.load(keys + client * S + draw), at // 2)
    drawn = radius * tl.where(at % 2 == 0, tl.cos(angle), tl.sin(angle))
    to = (client * S + draw) * each + at
    given = client * each + at if SHARED else to
    value = tl.load(mean + given, mask=here, other=0.0) + tl.load(bias + client * O + at % O, mask=here, other=0.0)
    value += tl.sqrt(tl.load(var + given, mask=here, other=0.0) + tiny) * drawn
    tl.store(eps + to, drawn, mask=here)
    tl.store(y + to, tl.where(value > 0, value, value * slope), mask=here)


@kernel()
def _gauss_slope(
    g, y, eps, var, gm, gv, gb, S, rows, O, tiny, slope,
    SHARED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    client = tl.program_id(1).to(tl.int64)
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & (cols < O)[None, :]
        by_mean = tl.zeros((ROWS, COLUMNS), tl.float32)
        by_std = tl.zeros((ROWS, COLUMNS), tl.float32)
        for draw in range(S):
            at = ((client * S + draw) * rows + row)[:, None] * O + cols[None, :]
            steep = tl.load(g + at, mask=here, other=0.0)
            steep = tl.where(tl.load(y + at, mask=here, other=0.0) > 0, steep, steep * slope)
            noisy = steep * tl.load(eps + at, mask=here, other=0.0)
            if SHARED:
                by_mean += steep
                by_std += noisy
            else:
                std = tl.sqrt(tl.load(var + at, mask=here, other=1.0) + tiny)
                tl.store(gm + at, steep, mask=here)
                tl.store(gv + at, 0.5 * noisy / std, mask=here)
                total += tl.sum(steep, 0)
        if SHARED:
            at = (client * rows + row)[:, None] * O + cols[None, :]
            std = tl.sqrt(tl.load(var + at, mask=here, other=1.0) + tiny)
            tl.store(gm + at, by_mean, mask=here)
            tl.store(gv + at, 0.5 * by_std / std, mask=here)
            total += tl.sum(by_mean, 0)
    tl.store(gb + client * O + cols, total, mask=cols < O)


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
def _entropy(logits, y, mask, loss, S, B, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
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
def _entropy_slope(
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


@triton.jit
def _clamped(value, low, high):
    """Clamp; a NaN stays one."""
    return tl.where(value < low, low, tl.where(value > high, high, value))


@kernel()
def _variance(stored, out, offset, low, high, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(stored + at, mask=at < count, other=0.0)
    tl.store(out + at, tl.exp(offset + _clamped(value, low, high)), mask=at < count)


@kernel()
def _variance_slope(g, var, stored, out, low, high, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    steep = tl.load(g + at, mask=here, other=0.0) * tl.load(var + at, mask=here, other=0.0)
    tl.store(out + at, inward(steep, tl.load(stored + at, mask=here, other=0.0), low, high), mask=here)


@triton.jit
def _minus_log_alpha(stored, weight, at, here, offset, low, high, tiny):
    value = _clamped(tl.load(stored + at, mask=here, other=0.0), low, high)
    theta = tl.load(weight + at, mask=here, other=1.0)
    return tl.log(theta * theta + tiny) - (offset + value)


@kernel()
def _kl(stored, weight, sums, offset, low, high, tiny, scale, size, LANES: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(lane * BLOCK, size, LANES * BLOCK):
        at = first + tl.arange(0, BLOCK)
        here = at < size
        x = _minus_log_alpha(stored, weight, client * size + at, here, offset, low, high, tiny)
        # softplus(x) = max(x, 0) + log1p(exp(-|x|)), where log(1 + e) alone would lose a small e.
        e = tl.exp(-tl.abs(x))
        u = 1.0 + e
        log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
        total += tl.where(here, tl.maximum(x, 0.0) + log1p, 0.0)
    tl.store(sums + client * LANES + lane, 0.5 * scale * tl.sum(total, 0))


@kernel()
def _kl_slope(g, stored, weight, out, offset, low, high, tiny, scale, size, BLOCK: tl.constexpr):
    client = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    at += client * size
    x = _minus_log_alpha(stored, weight, at, here, offset, low, high, tiny)
    steep = -0.5 * scale * tl.load(g + client) / (1.0 + tl.exp(-x))
    tl.store(out + at, inward(steep, tl.load(stored + at, mask=here, other=0.0), low, high), mask=here)


def bend(x: Tensor, bias: Tensor, slope: float) -> Tensor:
    """Leaky ReLU of x + bias: (C, B, O), (C, O)."""
    C, B, O = x.shape
    y = torch.empty_like(x)
    _bend[(triton.cdiv(B * O, _BLOCK), C)](x, bias, y, B, O, slope, BLOCK=_BLOCK)
    return y


def unbend(g: Tensor, y: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """Gradients of `bend` by x and bias, from its answer y."""
    C, B, O = y.shape
    gx, gb = torch.empty_like(y), y.new_empty(C, O)
    _unbend[(triton.cdiv(O, _COLUMNS), C)](g, y, gx, gb, B, O, slope, ROWS=_ROWS, COLUMNS=_COLUMNS)
    return gx, gb


def gauss(mean: Tensor, bias: Tensor, var: Tensor, keys: Tensor, tiny: float, slope: float) -> tuple[Tensor, Tensor]:
    """Draw: mean and var (C, S or 1, B, O), bias (C, O), keys (C, S) -> the answers and the normals (C, S, B, O)."""
    C, shared, B, O = mean.shape
    S = keys.shape[1]
    y = mean.new_empty(C, S, B, O)
    eps = torch.empty_like(y)
    _gauss[(triton.cdiv(B * O, _BLOCK), S, C)](
        mean, bias, var, keys, y, eps, S, B * O, O, tiny, slope, SHARED=shared < S, BLOCK=_BLOCK
    )  # fmt: skip
    return y, eps


def gauss_slope(
    g: Tensor, y: Tensor, eps: Tensor, var: Tensor, tiny: float, slope: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `gauss` by mean, var and bias."""
    C, S, B, O = y.shape
    gm, gv, gb = torch.empty_like(var), torch.empty_like(var), var.new_empty(C, O)
    _gauss_slope[(triton.cdiv(O, _COLUMNS), C)](
        g, y, eps, var, gm, gv, gb, S, B, O, tiny, slope, SHARED=var.shape[1] < S, ROWS=_ROWS, COLUMNS=_COLUMNS
    )  # fmt: skip
    return gm, gv, gb


def _tile(K: int) -> dict[str, int]:
    columns = triton.next_power_of_2(K)
    return {"ROWS": max(1, min(_ROWS, 8192 // columns)), "COLUMNS": columns}


def entropy(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Cross-entropy (C,) of the mean over the draws of logits (C, S, B, K), over real rows; y and mask (C, B)."""
    C, S, B, K = logits.shape
    loss = logits.new_empty(C)
    _entropy[(C,)](logits, y, mask, loss, S, B, K, **_tile(K))
    return loss


def entropy_slope(g: Tensor, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Gradient of `entropy` by the logits; g (C,)."""
    C, S, B, K = logits.shape
    out = torch.empty_like(logits)
    tile = _tile(K)
    _entropy_slope[(triton.cdiv(B, tile["ROWS"]), C)](
        g, logits, y, mask, out, S, B, K, ALL=triton.next_power_of_2(B), **tile
    )  # fmt: skip
    return out


def variance(stored: Tensor, offset: float, low: float, high: float) -> Tensor:
    """Return exp(offset + clamp(stored)), of any shape."""
    out = torch.empty_like(stored)
    _variance[(triton.cdiv(out.numel(), _BLOCK),)](stored, out, offset, low, high, out.numel(), BLOCK=_BLOCK)
    return out


def variance_slope(g: Tensor, var: Tensor, stored: Tensor, low: float, high: float) -> Tensor:
    """Gradient of `variance`, of which `variational.inward` lets pass what leads inside."""
    out = torch.empty_like(stored)
    _variance_slope[(triton.cdiv(out.numel(), _BLOCK),)](g, var, stored, out, low, high, out.numel(), BLOCK=_BLOCK)
    return out


def kl(stored: Tensor, weight: Tensor, place: tuple[float, float, float, float], scale: float) -> Tensor:
    """Return scale times the sum of 1/2 log(1 + 1/alpha) a client: (C, N), (C, N) -> (C,).

    log alpha = offset + clamp(stored) - log(weight^2 + tiny); `place` is offset, low, high and tiny.
    """
    C, size = stored.shape
    sums = stored.new_empty(C, _LANES)
    _kl[(_LANES, C)](stored, weight, sums, *place, scale, size, LANES=_LANES, BLOCK=_BLOCK)
    return sums.sum(1)


def kl_slope(
    g: Tensor, stored: Tensor, weight: Tensor, place: tuple[float, float, float, float], scale: float
) -> Tensor:
    """Gradient of `kl` by stored, of which `variational.inward` lets pass what leads inside; g (C,)."""
    C, size = stored.shape
    out = torch.empty_like(stored)
    _kl_slope[(triton.cdiv(size, _BLOCK), C)](g, stored, weight, out, *place, scale, size, BLOCK=_BLOCK)
    return out
