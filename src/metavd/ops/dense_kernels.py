"""Triton kernels of what follows a linear layer's product: bias, noise, leaky ReLU. `dense` makes operators of them.

All tensors are contiguous, clients first. Sums are taken in a fixed order, without atomics.

Shape letters: C clients, S draws, B rows, O units.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .hashing_kernels import polar
from .launch import kernel

_BLOCK = 1024
_ROWS = 64
_COLUMNS = 32


@kernel()
def _bias_leaky_relu(x, bias, y, rows, O, slope, BLOCK: tl.constexpr):
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    here = at < rows * O
    client = tl.program_id(1).to(tl.int64)
    value = tl.load(x + client * rows * O + at, mask=here, other=0.0)
    value += tl.load(bias + client * O + at % O, mask=here, other=0.0)
    tl.store(y + client * rows * O + at, tl.where(value > 0, value, value * slope), mask=here)


@kernel()
def _bias_leaky_relu_slope(g, y, gx, gb, rows, O, slope, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
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
def _noisy(
    mean, bias, var, keys, y, eps, S, each, O, tiny, slope, SHARED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One draw: y = leaky_relu(mean + bias + sqrt(var + tiny) eps), eps as in `hashing.normals`."""
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
def _noisy_slope(
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


def bias_leaky_relu(x: Tensor, bias: Tensor, slope: float) -> Tensor:
    """Leaky ReLU of x + bias: (C, B, O), (C, O)."""
    C, B, O = x.shape
    y = torch.empty_like(x)
    _bias_leaky_relu[(triton.cdiv(B * O, _BLOCK), C)](x, bias, y, B, O, slope, BLOCK=_BLOCK)
    return y


def bias_leaky_relu_slope(g: Tensor, y: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """Gradients of `bias_leaky_relu` by x and bias, from its answer y."""
    C, B, O = y.shape
    gx, gb = torch.empty_like(y), y.new_empty(C, O)
    _bias_leaky_relu_slope[(triton.cdiv(O, _COLUMNS), C)](g, y, gx, gb, B, O, slope, ROWS=_ROWS, COLUMNS=_COLUMNS)
    return gx, gb


def noisy(mean: Tensor, bias: Tensor, var: Tensor, keys: Tensor, tiny: float, slope: float) -> tuple[Tensor, Tensor]:
    """Draw: mean and var (C, S or 1, B, O), bias (C, O), keys (C, S) -> the answers and the normals (C, S, B, O)."""
    C, shared, B, O = mean.shape
    S = keys.shape[1]
    y = mean.new_empty(C, S, B, O)
    eps = torch.empty_like(y)
    _noisy[(triton.cdiv(B * O, _BLOCK), S, C)](
        mean, bias, var, keys, y, eps, S, B * O, O, tiny, slope, SHARED=shared < S, BLOCK=_BLOCK
    )  # fmt: skip
    return y, eps


def noisy_slope(
    g: Tensor, y: Tensor, eps: Tensor, var: Tensor, tiny: float, slope: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `noisy` by mean, var and bias."""
    C, S, B, O = y.shape
    gm, gv, gb = torch.empty_like(var), torch.empty_like(var), var.new_empty(C, O)
    _noisy_slope[(triton.cdiv(O, _COLUMNS), C)](
        g, y, eps, var, gm, gv, gb, S, B, O, tiny, slope, SHARED=var.shape[1] < S, ROWS=_ROWS, COLUMNS=_COLUMNS
    )  # fmt: skip
    return gm, gv, gb
