"""Random numbers as a pure function of a key, the same under a loop, vmap, a CUDA graph or a remote client.

A key is an int64 tensor. `fold` derives one key from another, `bits` hashes (key, i) with SplitMix64's finaliser,
and the distributions are transforms of those bits. No generator is advanced anywhere, so a result depends on
(seed, round, client, step) alone and never on the order or the place of execution. float32 and float64 draws of one
key agree to rounding.

    S keys, n elements of the requested shape: every function returns (*key.shape, *shape).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops import fused

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLY_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLY_2 = 0x94D049BB133111EB - (1 << 64)
_LOW_32 = 0xFFFFFFFF


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser; torch shifts arithmetically, so the sign bits are masked away."""
    if z.is_cuda and fused.ready():
        return fused.mix(z)
    for shift, factor in ((30, _MULTIPLY_1), (27, _MULTIPLY_2), (31, 1)):
        # In place: for many numbers at once, fresh memory costs more than the arithmetic.
        shifted = z >> shift
        shifted &= (1 << 64 - shift) - 1
        shifted ^= z
        z = shifted if factor == 1 else shifted.mul_(factor)
    return z


def _signed(value: int) -> int:
    """Wrap a Python integer to 64 bits, as the tensor arithmetic does."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def key(seed: int, device: torch.device | str | None = None) -> Tensor:
    """Return the key of a run."""
    return _mix(torch.tensor(seed, dtype=torch.int64, device=device) + _GOLDEN)


def fold(parent: Tensor, *tags: int | Tensor) -> Tensor:
    """Derive a key from a parent and one or more integers; different tags give unrelated keys."""
    child = parent
    for tag in tags:
        child = _mix(child * 3 + (_signed((tag + 1) * _GOLDEN) if isinstance(tag, int) else (tag + 1) * _GOLDEN))
    return child


def split(parent: Tensor, count: int) -> Tensor:
    """Return `count` keys, shape (*key.shape, count)."""
    return fold(parent[..., None], torch.arange(count, device=parent.device))


def bits(parent: Tensor, shape: Sequence[int]) -> Tensor:
    """Return 64 random bits an element."""
    count = math.prod(shape)
    index = torch.arange(1, count + 1, dtype=torch.int64, device=parent.device).mul_(_GOLDEN)
    return _mix(parent[..., None] + index).reshape((*parent.shape, *shape))


def uniform(parent: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return draws from the open interval (0, 1), on a grid of 2^-23 that float32 holds exactly."""
    high = (bits(parent, shape) >> 41) & ((1 << 23) - 1)
    return (high.to(dtype) + 0.5) * 2.0**-23


def normal(parent: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return standard normal draws (Box-Muller: the two halves of one hash give a radius and an angle)."""
    count = math.prod(shape)
    if parent.is_cuda and dtype == torch.float32 and fused.ready():
        return fused.normals(parent, count).reshape((*parent.shape, *shape))
    half = bits(parent, [(count + 1) // 2])
    radius = (-2.0 * torch.log((((half >> 32) & _LOW_32).to(dtype) + 1.0) * 2.0**-32)).clamp(min=0.0).sqrt()
    angle = (half & _LOW_32).to(dtype) * (2.0 * math.pi * 2.0**-32)
    pairs = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], -1)
    return pairs.flatten(-2)[..., :count].reshape((*parent.shape, *shape))


def exponential(parent: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return draws from the exponential distribution with mean 1."""
    return -torch.log(uniform(parent, shape, dtype))


def permutation(parent: Tensor, count: int) -> Tensor:
    """Return a random order of 0..count-1, shape (*key.shape, count)."""
    return torch.argsort(bits(parent, [count]), dim=-1, stable=True)
