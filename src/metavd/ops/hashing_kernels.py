"""Triton kernels of keyed random numbers. `hashing` makes operators of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import kernel

_BLOCK = 1024
"""Pairs of normal numbers of one program."""


@triton.jit
def mixed(z):
    """SplitMix64's finaliser, as in `hashing.mix`."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@kernel()
def _hash(z, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, mixed(tl.load(z + at, mask=at < count, other=0)), mask=at < count)


@triton.jit
def polar(key, pair):
    """Box-Muller, as in `hashing.normals`: pair i of a key hashes key + (i + 1) golden into a radius and an angle."""
    z = mixed(key + (pair + 1) * -7046029254386353131)
    radius = -2.0 * tl.log((((z >> 32) & 0xFFFFFFFF).to(tl.float32) + 1.0) * 2.3283064365386963e-10)
    return tl.sqrt(tl.maximum(radius, 0.0)), (z & 0xFFFFFFFF).to(tl.float32) * 1.4629180792671596e-09


@kernel()
def _normal(keys, out, rows, count, half, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    index = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    radius, angle = polar(tl.load(keys + row, mask=row < rows, other=0), index)
    at = out + row * count + 2 * index
    tl.store(at, radius * tl.cos(angle), mask=(row < rows) & (index < half))
    tl.store(at + 1, radius * tl.sin(angle), mask=(row < rows) & (2 * index + 1 < count))


def mix(z: Tensor) -> Tensor:
    """Return SplitMix64's finaliser of every number."""
    flat = z.contiguous()
    out = torch.empty_like(flat)
    if flat.numel():
        _hash[(triton.cdiv(flat.numel(), 256),)](flat, out, flat.numel(), BLOCK=256)
    return out


def normal(keys: Tensor, count: int) -> Tensor:
    """Return `count` float32 standard normals per key, those of `hashing.normals` to rounding: (*keys.shape, count)."""
    flat = keys.reshape(-1).contiguous()
    out = torch.empty(len(flat), count, dtype=torch.float32, device=keys.device)
    half = (count + 1) // 2
    if len(flat):
        # Of many keys with few numbers each, as many as fill a program. A grid has room for few blocks in its second
        # direction: those of one key.
        block = min(triton.next_power_of_2(half), _BLOCK)
        grid = (triton.cdiv(len(flat), _BLOCK // block), triton.cdiv(half, block))
        _normal[grid](flat, out, len(flat), count, half, ROWS=_BLOCK // block, BLOCK=block)
    return out.reshape(*keys.shape, count)
