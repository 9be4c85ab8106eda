"""What follows the product of a linear layer: bias, noise, leaky ReLU, as one operator, and as one kernel on a GPU.

Each is a function of one client with derivatives to any order and a rule for vmap. A kernel's first derivative is one
kernel too, and its own derivative is written in PyTorch's operators, which have all the orders above.

Shape letters: S draws, B rows, O units.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from . import device, hashing


def bias_leaky_relu(x: Tensor, bias: Tensor, slope: float) -> Tensor:
    """Leaky ReLU of x + bias, (..., O), with a slope below 0."""
    if x.dim() == 2 and device.has_float_kernels(x):
        return _BiasLeakyRelu.apply(x, bias, slope)
    return leaky_relu(x + bias, slope)


def noisy(mean: Tensor, bias: Tensor | None, var: Tensor, keys: Tensor, tiny: float, slope: float) -> Tensor:
    """Leaky ReLU of mean + bias + sqrt(var + tiny) eps, with normals eps of each key: -> (S B, ...); slope 1 is none.

    mean and var are (S B, ...), or (B, ...) where all draws share them, which `keys` (S, 1) in place of (S,) says.
    Rows of a draw get the same normals however many rows follow them.
    """
    draws = 1 if keys.dim() > 1 else len(keys)
    if bias is not None and mean.dim() == 2 and device.has_float_kernels(mean):
        shape = (draws, -1, mean.shape[-1])
        y, _ = _Noisy.apply(mean.reshape(shape), bias, var.reshape(shape), keys.reshape(-1), tiny, slope)
        return y.flatten(0, 1)
    mean, std = mean if bias is None else mean + bias, (var + tiny).sqrt()
    mean, std = by_draw(mean, keys), by_draw(std, keys)
    out = (mean + std * drawn(mean, keys)).flatten(0, 1)
    return out if slope == 1.0 else leaky_relu(out, slope)


def by_draw(rows: Tensor, keys: Tensor) -> Tensor:
    """Return rows as (S, B, ...), or (1, B, ...) where all draws share them, which `keys` (S, 1) says."""
    draws = 1 if keys.dim() > 1 else len(keys)
    return rows.reshape(draws, rows.shape[0] // draws, *rows.shape[1:])


def drawn(like: Tensor, keys: Tensor) -> Tensor:
    """Standard normals (S, B, ...) of each key, for rows (S or 1, B, ...)."""
    shape = like.shape[1:]
    # Not `shape.numel()`, which would fix the number of rows of an exported graph.
    return hashing.normals(keys.reshape(-1), math.prod(shape), like.dtype).reshape(len(keys), *shape)


_kernels = partial(device.kernels, "dense")


class _BiasLeakyRelu(device.PerClient):
    batched = staticmethod(lambda *values: _kernels().bias_leaky_relu(*values))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.slope = inputs[2]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return (*_BiasLeakyReluSlope.apply(g, ctx.saved_tensors[0].detach(), ctx.slope), None)


def _steep(y: Tensor, slope: float) -> Tensor:
    """Derivative of the leaky ReLU, from its answer."""
    return torch.where(y > 0, 1.0, slope)


class _BiasLeakyReluSlope(device.PerClient):
    batched = staticmethod(lambda *values: _kernels().bias_leaky_relu_slope(*values))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.slope = inputs[2]
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gx: Tensor, gb: Tensor) -> tuple[Tensor | None, ...]:
        return (gx + gb) * _steep(ctx.saved_tensors[0], ctx.slope), None, None


class _Noisy(device.PerClient):
    batched = staticmethod(lambda *values: _kernels().noisy(*values))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, _, var, _, ctx.tiny, ctx.slope = inputs
        y, eps = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(eps)
        ctx.save_for_backward(y, eps, var)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if g is None:
            return (None,) * 6
        y, eps, var = ctx.saved_tensors
        gm, gv, gb = _NoisySlope.apply(g, y.detach(), eps, var, ctx.tiny, ctx.slope)
        return gm, gb, gv, None, None, None


class _NoisySlope(device.PerClient):
    batched = staticmethod(lambda *values: _kernels().noisy_slope(*values))

    @staticmethod
    def backward(ctx: Any, gm: Tensor, gv: Tensor, gb: Tensor) -> tuple[Tensor | None, ...]:
        g, y, eps, var = ctx.saved_tensors
        tiny, slope = ctx.given
        steep, power = _steep(y, slope), var + tiny
        by_g = steep * (gm + gb + 0.5 * gv * eps * power.rsqrt())
        by_var = -0.25 * gv * g * steep * eps * power.pow(-1.5)
        return by_g, None, None, by_var.sum(0, keepdim=True) if len(var) < len(y) else by_var, None, None
