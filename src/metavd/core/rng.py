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

from ..ops import hashing


def _signed(value: int) -> int:
    """Wrap a Python integer to 64 bits, as the tensor arithmetic does."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def key(seed: int, device: torch.device | str | None = None) -> Tensor:
    """Return the key of a run."""
    return hashing.mix(torch.tensor(seed, dtype=torch.int64, device=device) + hashing.GOLDEN)


def fold(parent: Tensor, *tags: int | Tensor) -> Tensor:
    """Derive a key from a parent and one or more integers; different tags give unrelated keys."""
    child = parent
    for tag in tags:
        step = (tag + 1) * hashing.GOLDEN
        child = hashing.mix(child * 3 + (_signed(step) if isinstance(step, int) else step))
    return child


def split(parent: Tensor, count: int) -> Tensor:
    """Return `count` keys, shape (*key.shape, count)."""
    return fold(parent[..., None], torch.arange(count, device=parent.device))


def bits(parent: Tensor, shape: Sequence[int]) -> Tensor:
    """Return 64 random bits per element."""
    return hashing.bits(parent, math.prod(shape)).reshape((*parent.shape, *shape))


def uniform(parent: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return draws from the open interval (0, 1), on a grid of 2^-23 that float32 holds exactly."""
    high = (bits(parent, shape) >> 41) & ((1 << 23) - 1)
    return (high.to(dtype) + 0.5) * 2.0**-23


def normal(parent: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return standard normal draws (Box-Muller: the two halves of one hash give a radius and an angle)."""
    return hashing.normals(parent, math.prod(shape), dtype).reshape((*parent.shape, *shape))


def exponential(parent: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return draws from the exponential distribution with mean 1."""
    return -torch.log(uniform(parent, shape, dtype))


def permutation(parent: Tensor, count: int) -> Tensor:
    """Return a random order of 0..count-1, shape (*key.shape, count)."""
    return torch.argsort(bits(parent, [count]), dim=-1, stable=True)
