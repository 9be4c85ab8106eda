"""Triton kernel of Cholesky factors of I + S K S, one program per matrix. `cholesky` makes an operator of it.

A column of blocks after the other, each from those to its left:

    L_jj L_jj^T = A_jj - sum_k<j L_jk L_jk^T,   L_ij = (A_ij - sum_k<j L_ik L_jk^T) L_jj^-T

A program reads blocks again that it has written; a barrier stands between. Factors lie in memory column by column, as
cuSOLVER and cuBLAS take them.

Shape letters: m rows of a matrix, N rows of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import kernel

_BLOCK = 32
"""Rows of a block, for all but small matrices."""


@triton.jit
def _block(gram, scale, rows, columns, m):
    """Block of S K S."""
    left = tl.load(scale + rows, mask=rows < m, other=0.0)
    right = tl.load(scale + columns, mask=columns < m, other=0.0)
    here = (rows[:, None] < m) & (columns[None, :] < m)
    return left[:, None] * tl.load(gram + rows[:, None] * m + columns[None, :], mask=here, other=0.0) * right[None, :]


@triton.jit
def _known(out, rows, columns, m):
    """Block of the factor that has been written."""
    here = (rows[:, None] < m) & (columns[None, :] < m)
    return tl.load(out + columns[None, :] * m + rows[:, None], mask=here, other=0.0)


@kernel(do_not_specialize=("chains", "m"))  # nodes come in all sizes, which would be a kernel each
def _factor(grams, scales, outs, chains, m, N: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    gram = grams + number // chains * m * m
    scale = scales + number * m
    out = outs + number * m * m
    index = tl.arange(0, N)
    row, column = index[:, None], index[None, :]
    for first in range(0, m, N):
        here = first + index
        rest = _block(gram, scale, here, here, m) + tl.where(row == column, 1.0, 0.0)
        for known in range(0, first, N):
            left = _known(out, here, known + index, m)
            rest -= tl.dot(left, tl.trans(left), input_precision="ieee")
        # The block on the diagonal, column by column, and its inverse.
        lower = tl.zeros((N, N), tl.float32)
        inverse = tl.where(row == column, 1.0, 0.0)
        for c in range(N):
            values = tl.sum(tl.where(column == c, rest, 0.0), 1)
            root = tl.sqrt(tl.sum(tl.where(index == c, values, 0.0), 0))
            values = tl.where(index >= c, values / root, 0.0)
            lower = tl.where(column == c, values[:, None], lower)
            rest -= values[:, None] * values[None, :]
            solved = tl.sum(tl.where(row == c, inverse, 0.0), 0) / root
            below = tl.where(index > c, values, 0.0)
            inverse = tl.where(row == c, solved[None, :], inverse - below[:, None] * solved[None, :])
        tl.store(out + here[None, :] * m + here[:, None], lower, mask=(here[:, None] < m) & (here[None, :] < m))
        turned = tl.trans(inverse)
        for second in range(first + N, m, N):
            there = second + index
            rest = _block(gram, scale, there, here, m)
            for known in range(0, first, N):
                left = _known(out, there, known + index, m)
                rest -= tl.dot(left, tl.trans(_known(out, here, known + index, m)), input_precision="ieee")
            found = tl.dot(rest, turned, input_precision="ieee")
            place = out + here[None, :] * m + there[:, None]
            tl.store(place, found, mask=(there[:, None] < m) & (here[None, :] < m))
        tl.debug_barrier()


def factor(gram: Tensor, scale: Tensor) -> Tensor:
    """Return the lower factors (P, S, m, m) of I + S K S, gram (P, m, m), scale (P, S, m)."""
    problems, chains, m = scale.shape
    out = torch.empty(problems, chains, m, m, device=gram.device)
    if out.numel():
        block = 16 if m <= 16 else _BLOCK
        _factor[(problems * chains,)](gram.contiguous(), scale.contiguous(), out, chains, m, N=block)
    return out.mT
