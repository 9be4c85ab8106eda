"""Cholesky factors of I + S K S for many diagonal S beside one K; on a GPU in one kernel, without the matrices.

cuSOLVER gives a matrix of a few hundred rows to one block of threads, which takes it column by column.

Shape letters: P matrices K, S scales of each, m rows.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from . import device

_kernels = partial(device.kernels, "cholesky")


def factor(gram: Tensor, scale: Tensor) -> Tensor:
    """Return the lower Cholesky factors (P, S, m, m) of I + diag(scale) gram diag(scale), gram (P, m, m).

    `gram` has no negative eigenvalue, so all of theirs are at least 1: float32 is safe and no check is needed. What
    stands above the diagonal is not to be read. No derivative; no vmap around it.
    """
    if device.has_float_kernels(gram, scale):
        return _kernels().factor(gram, scale)
    matrix = scale[..., :, None] * gram[:, None] * scale[..., None, :]
    matrix.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return torch.linalg.cholesky_ex(matrix).L
