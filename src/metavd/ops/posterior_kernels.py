"""Triton kernels of a posterior's spread: its clamp, its variance, its KL. `posterior` makes operators of them.

All tensors are contiguous, clients first. Sums are taken in a fixed order, without atomics.

Shape letters: C clients, N weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import kernel

_BLOCK = 1024
_LANES = 32
"""Programs that share a client's weights."""


@triton.jit
def inward(slope, position, low, high):
    """The rule of `posterior.outward`: nothing leads out of the bounds, or along them."""
    return tl.where(tl.where(slope < 0, position >= high, position <= low), 0.0, slope)


@kernel()
def _gate(slope, x, out, low, high, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    value = tl.load(slope + at, mask=here, other=0.0)
    position = tl.load(x + at, mask=here, other=0.0)
    tl.store(out + at, inward(value, position, low, high), mask=here)


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


def gate(slope: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    """Return the slope where it does not lead x further out of its bounds, else 0."""
    slope, x = slope.contiguous(), x.contiguous()
    out = torch.empty_like(slope)
    _gate[(triton.cdiv(out.numel(), _BLOCK),)](slope, x, out, low, high, out.numel(), BLOCK=_BLOCK)
    return out


def variance(stored: Tensor, offset: float, low: float, high: float) -> Tensor:
    """Return exp(offset + clamp(stored)), of any shape."""
    out = torch.empty_like(stored)
    _variance[(triton.cdiv(out.numel(), _BLOCK),)](stored, out, offset, low, high, out.numel(), BLOCK=_BLOCK)
    return out


def variance_slope(g: Tensor, var: Tensor, stored: Tensor, low: float, high: float) -> Tensor:
    """Gradient of `variance`, of which `posterior.inward` lets pass what leads inside."""
    out = torch.empty_like(stored)
    _variance_slope[(triton.cdiv(out.numel(), _BLOCK),)](g, var, stored, out, low, high, out.numel(), BLOCK=_BLOCK)
    return out


def kl(stored: Tensor, weight: Tensor, place: tuple[float, float, float, float], scale: float) -> Tensor:
    """Return scale times the sum of 1/2 log(1 + 1/alpha) per client: (C, N), (C, N) -> (C,).

    log alpha = offset + clamp(stored) - log(weight^2 + tiny); `place` is offset, low, high and tiny.
    """
    C, size = stored.shape
    sums = stored.new_empty(C, _LANES)
    _kl[(_LANES, C)](stored, weight, sums, *place, scale, size, LANES=_LANES, BLOCK=_BLOCK)
    return sums.sum(1)


def kl_slope(
    g: Tensor, stored: Tensor, weight: Tensor, place: tuple[float, float, float, float], scale: float
) -> Tensor:
    """Gradient of `kl` by stored, of which `posterior.inward` lets pass what leads inside; g (C,)."""
    C, size = stored.shape
    out = torch.empty_like(stored)
    _kl_slope[(triton.cdiv(size, _BLOCK), C)](g, stored, weight, out, *place, scale, size, BLOCK=_BLOCK)
    return out
