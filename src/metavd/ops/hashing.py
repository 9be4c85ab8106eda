"""Random numbers as a hash of a key: SplitMix64's finaliser, and standard normals made of its bits.

The same integers on a CPU and on a GPU; normals agree to rounding.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from . import device

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLY_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLY_2 = 0x94D049BB133111EB - (1 << 64)
_LOW_32 = 0xFFFFFFFF


_PIECE = 1 << 22
"""Most normals that are drawn at once."""


def mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser of int64 numbers."""
    if device.has_kernels(z):
        return _Mix.apply(z)
    # Torch shifts arithmetically, so the sign bits are masked away.
    for shift, factor in ((30, _MULTIPLY_1), (27, _MULTIPLY_2), (31, 1)):
        # In place: for many numbers at once, fresh memory costs more than the arithmetic.
        shifted = z >> shift
        shifted &= (1 << 64 - shift) - 1
        shifted ^= z
        z = shifted if factor == 1 else shifted.mul_(factor)
    return z


def bits(keys: Tensor, count: int, first: int = 0) -> Tensor:
    """Return `count` times 64 random bits per key, from number `first` on, (*keys.shape, count)."""
    index = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=keys.device).mul_(GOLDEN)
    return mix(keys[..., None] + index)


def normals(keys: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return `count` standard normals per key, (*keys.shape, count).

    Box-Muller: the two halves of one hash give a radius and an angle, and those two numbers.
    """
    if dtype == torch.float32 and device.has_kernels(keys):
        return _Normals.apply(keys, count)
    if count > _PIECE:  # a table of many clients, whose bits would take several times its memory
        return torch.cat(
            [_boxed(keys, min(_PIECE, count - first), dtype, first) for first in range(0, count, _PIECE)], -1
        )
    return _boxed(keys, count, dtype)


def _boxed(keys: Tensor, count: int, dtype: torch.dtype, first: int = 0) -> Tensor:
    """Return `count` normals from number `first` on, an even one."""
    half = bits(keys, (count + 1) // 2, first // 2)
    radius = (-2.0 * torch.log((((half >> 32) & _LOW_32).to(dtype) + 1.0) * 2.0**-32)).clamp(min=0.0).sqrt()
    angle = (half & _LOW_32).to(dtype) * (2.0 * math.pi * 2.0**-32)
    pairs = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], -1)
    return pairs.flatten(-2)[..., :count]


_kernels = partial(device.kernels, "hashing")


class _Mix(Function):
    @staticmethod
    def forward(z: Tensor) -> Tensor:
        mixed: Tensor = _kernels().mix(z)
        return mixed

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> None:  # noqa: ARG004
        return None

    @staticmethod
    def vmap(info: Any, in_dims: Any, z: Tensor) -> Any:
        # Applied, not launched: there may be a vmap around this one.
        return _Mix.apply(*device.aligned(info, in_dims, z)), 0


class _Normals(Function):
    @staticmethod
    def forward(keys: Tensor, count: int) -> Tensor:
        drawn: Tensor = _kernels().normal(keys, count)
        return drawn

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None]:  # noqa: ARG004
        return None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, keys: Tensor, count: int) -> Any:
        return _Normals.apply(*device.aligned(info, in_dims, keys), count), 0
