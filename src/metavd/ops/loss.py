"""Cross-entropy of the mean over draws of logits, as one operator.

A function of one client with derivatives to any order and a rule for vmap; on a GPU value and gradient are one kernel
each, and the gradient's own derivative is written in PyTorch's operators.

Shape letters: S draws, B rows, K classes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from . import device

_MOST_CLASSES = 1024
_MOST_ROWS = 8192


def cross_entropy(logits: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the real rows of -log softmax(z)[y], 0 when there is none; z is the mean of logits (S, B, K) over S.

    As one product with the labels' weights, which no gradient meets: few calls, and the same under vmap.
    """
    if _has_kernels(logits):
        return _CrossEntropy.apply(logits, y, torch.ones_like(logits[0, :, 0]) if mask is None else mask)
    z = logits.squeeze(0) if len(logits) == 1 else logits.mean(0)
    share = torch.full_like(z[:, 0], 1.0 / len(y)) if mask is None else mask / mask.sum().clamp(min=1.0)
    labels = share[:, None] * (y[:, None] == torch.arange(z.shape[1], device=y.device))
    return -(log_softmax(z, -1) * labels).sum()


def _has_kernels(logits: Tensor) -> bool:
    few = logits.shape[-1] <= _MOST_CLASSES and logits.shape[-2] <= _MOST_ROWS
    return few and device.has_float_kernels(logits)


_kernels = partial(device.kernels, "loss")


class _CrossEntropy(device.PerClient):
    batched = staticmethod(lambda *values: _kernels().cross_entropy(*values))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _CrossEntropySlope.apply(g, *ctx.saved_tensors), None, None


class _CrossEntropySlope(device.PerClient):
    batched = staticmethod(lambda *values: _kernels().cross_entropy_slope(*values))

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        g, logits, y, mask = ctx.saved_tensors
        share = (mask / mask.sum().clamp(min=1.0) / len(logits))[:, None]
        p, along = torch.softmax(logits.mean(0), -1), share * v.sum(0)
        labels = y[:, None] == torch.arange(logits.shape[-1], device=y.device)
        by_logits = g * p * (along - (p * along).sum(-1, keepdim=True)) / len(logits)
        return (along * (p - labels.to(p.dtype))).sum(), by_logits.expand(logits.shape), None, None
