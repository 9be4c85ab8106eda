"""Operators of what follows the convolutions, each one kernel on a GPU: biases, noise, the loss, posteriors.

As in `fused`, each is a function of one client with derivatives to any order and a rule for vmap. A first derivative
is one kernel too, and its own derivative is written in PyTorch's operators, which have all the orders above.

Shape letters: S draws, B rows, O units, K classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .fused import aligned, outward, ready

_MOST_CLASSES = 1024
_MOST_ROWS = 8192


def usable(*values: Tensor) -> bool:
    """Whether these operators compute with such tensors."""
    return all(value.is_cuda and value.dtype == torch.float32 for value in values) and ready()


def bend(x: Tensor, bias: Tensor, slope: float) -> Tensor:
    """Leaky ReLU of x + bias, (B, O); slope 1 is none."""
    return _Bend.apply(x, bias, slope)


def gauss(mean: Tensor, bias: Tensor, var: Tensor, keys: Tensor, tiny: float, slope: float) -> Tensor:
    """Leaky ReLU of mean + bias + sqrt(var + tiny) eps, with normals eps of each key: -> (S B, O).

    mean and var are (S B, O), or (B, O) where all draws share them, which `keys` (S, 1) in place of (S,) says.
    """
    draws = len(keys)
    shape = (1 if keys.dim() > 1 else draws, -1, mean.shape[-1])
    y, _ = _Gauss.apply(mean.reshape(shape), bias, var.reshape(shape), keys.reshape(-1), tiny, slope)
    return y.flatten(0, 1)


def entropic(logits: Tensor) -> bool:
    """Whether `entropy` computes with logits (S, B, K)."""
    return logits.shape[-1] <= _MOST_CLASSES and logits.shape[-2] <= _MOST_ROWS and usable(logits)


def entropy(logits: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
    """Cross-entropy of the mean of logits (S, B, K) over the draws, over the real rows."""
    return _Entropy.apply(logits, y, torch.ones_like(logits[0, :, 0]) if mask is None else mask)


def variance(stored: Tensor, offset: float, low: float, high: float) -> Tensor:
    """Return exp(offset + `variational.inward`(stored, low, high))."""
    return _Variance.apply(stored, offset, low, high)


def kl(stored: Tensor, weight: Tensor, place: tuple[float, float, float, float], scale: float) -> Tensor:
    """Return scale times the sum of 1/2 log(1 + 1/alpha); only the spread has a gradient.

    log alpha = offset + inward(stored, low, high) - log(weight^2 + tiny); `place` is offset, low, high and tiny.
    """
    return _Kl.apply(stored, weight.detach(), place, scale)


def _kernels() -> Any:
    from . import dense_kernels  # noqa: PLC0415  Triton need not be installed

    return dense_kernels


def _one(*values: Any) -> list[Any]:
    """Give tensors of one client an axis of clients."""
    return [value[None].contiguous() if isinstance(value, Tensor) else value for value in values]


def _all(info: Any, in_dims: Any, *values: Any) -> list[Any]:
    """Bring the client axis of all tensors to the front; what clients share is repeated."""
    return [
        aligned(info, (dim,), value)[0].contiguous() if isinstance(value, Tensor) else value
        for dim, value in zip(in_dims, values, strict=True)
    ]


class _Bend(Function):
    @staticmethod
    def forward(x: Tensor, bias: Tensor, slope: float) -> Tensor:
        y: Tensor = _kernels().bend(*_one(x, bias), slope)[0]
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.slope = inputs[2]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return (*_Unbend.apply(g, ctx.saved_tensors[0].detach(), ctx.slope), None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *values: Any) -> Any:
        return _kernels().bend(*_all(info, in_dims, *values)), 0


def _steep(y: Tensor, slope: float) -> Tensor:
    """Derivative of the leaky ReLU, from its answer."""
    return torch.where(y > 0, 1.0, slope)


class _Unbend(Function):
    @staticmethod
    def forward(g: Tensor, y: Tensor, slope: float) -> tuple[Tensor, Tensor]:
        gx, gb = _kernels().unbend(*_one(g, y), slope)
        return gx[0], gb[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.slope = inputs[2]
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gx: Tensor, gb: Tensor) -> tuple[Tensor | None, ...]:
        return (gx + gb) * _steep(ctx.saved_tensors[0], ctx.slope), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *values: Any) -> Any:
        return _kernels().unbend(*_all(info, in_dims, *values)), (0, 0)


class _Gauss(Function):
    @staticmethod
    def forward(
        mean: Tensor, bias: Tensor, var: Tensor, keys: Tensor, tiny: float, slope: float
    ) -> tuple[Tensor, Tensor]:
        y, eps = _kernels().gauss(*_one(mean, bias, var, keys), tiny, slope)
        return y[0], eps[0]

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
        gm, gv, gb = _GaussSlope.apply(g, y.detach(), eps, var, ctx.tiny, ctx.slope)
        return gm, gb, gv, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *values: Any) -> Any:
        return _kernels().gauss(*_all(info, in_dims, *values)), (0, 0)


class _GaussSlope(Function):
    @staticmethod
    def forward(
        g: Tensor, y: Tensor, eps: Tensor, var: Tensor, tiny: float, slope: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        gm, gv, gb = _kernels().gauss_slope(*_one(g, y, eps, var), tiny, slope)
        return gm[0], gv[0], gb[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        g, y, eps, var, ctx.tiny, ctx.slope = inputs
        ctx.save_for_backward(g, y, eps, var)

    @staticmethod
    def backward(ctx: Any, gm: Tensor, gv: Tensor, gb: Tensor) -> tuple[Tensor | None, ...]:
        g, y, eps, var = ctx.saved_tensors
        steep, power = _steep(y, ctx.slope), var + ctx.tiny
        by_g = steep * (gm + gb + 0.5 * gv * eps * power.rsqrt())
        by_var = -0.25 * gv * g * steep * eps * power.pow(-1.5)
        return by_g, None, None, by_var.sum(0, keepdim=True) if len(var) < len(y) else by_var, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *values: Any) -> Any:
        return _kernels().gauss_slope(*_all(info, in_dims, *values)), (0, 0, 0)


class _Entropy(Function):
    @staticmethod
    def forward(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        loss: Tensor = _kernels().entropy(*_one(logits, y, mask))[0]
        return loss

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _EntropySlope.apply(g, *ctx.saved_tensors), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *values: Any) -> Any:
        return _kernels().entropy(*_all(info, in_dims, *values)), 0


class _EntropySlope(Function):
    @staticmethod
    def forward(g: Tensor, logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        slope: Tensor = _kernels().entropy_slope(*_one(g, logits, y, mask))[0]
        return slope

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        g, logits, y, mask = ctx.saved_tensors
        share = (mask / mask.sum().clamp(min=1.0) / len(logits))[:, None]
        p, along = torch.softmax(logits.mean(0), -1), share * v.sum(0)
        labels = y[:, None] == torch.arange(logits.shape[-1], device=y.device)
        by_logits = g * p * (along - (p * along).sum(-1, keepdim=True)) / len(logits)
        return (along * (p - labels.to(p.dtype))).sum(), by_logits.expand(logits.shape), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *values: Any) -> Any:
        return _kernels().entropy_slope(*_all(info, in_dims, *values)), 0


class _Variance(Function):
    @staticmethod
    def forward(stored: Tensor, offset: float, low: float, high: float) -> Tensor:
        var: Tensor = _kernels().variance(stored.contiguous(), offset, low, high)
        return var

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        stored, *ctx.place = inputs
        ctx.save_for_backward(stored, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        stored, var = ctx.saved_tensors
        return _VarianceSlope.apply(g, var, stored, *ctx.place[1:]), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *values: Any) -> Any:
        return _kernels().variance(*_all(info, in_dims, *values)), 0


class _VarianceSlope(Function):
    @staticmethod
    def forward(g: Tensor, var: Tensor, stored: Tensor, low: float, high: float) -> Tensor:
        slope: Tensor = _kernels().variance_slope(g.contiguous(), var.contiguous(), stored.contiguous(), low, high)
        return slope

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        *saved, ctx.low, ctx.high = inputs
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        g, var, stored = ctx.saved_tensors
        v = v.masked_fill(outward(g * var, stored, ctx.low, ctx.high), 0.0)
        return v * var, v * g, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *values: Any) -> Any:
        return _kernels().variance_slope(*_all(info, in_dims, *values)), 0


class _Kl(Function):
    @staticmethod
    def forward(stored: Tensor, weight: Tensor, place: tuple[float, float, float, float], scale: float) -> Tensor:
        total: Tensor = _kernels().kl(*_rows(*_one(stored, weight)), place, scale)[0]
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        stored, weight, ctx.place, ctx.scale = inputs
        ctx.save_for_backward(stored, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _KlSlope.apply(g, *ctx.saved_tensors, ctx.place, ctx.scale), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, stored: Tensor, weight: Tensor, *rest: Any) -> Any:
        return _kernels().kl(*_rows(*_all(info, in_dims[:2], stored, weight)), *rest), 0


class _KlSlope(Function):
    @staticmethod
    def forward(
        g: Tensor, stored: Tensor, weight: Tensor, place: tuple[float, float, float, float], scale: float
    ) -> Tensor:
        return _kl_slope(_one(g, stored, weight), place, scale)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        g, stored, weight, ctx.place, ctx.scale = inputs
        ctx.save_for_backward(g, stored, weight)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        g, stored, weight = ctx.saved_tensors
        offset, low, high, tiny = ctx.place
        kept = torch.sigmoid((weight.square() + tiny).log() - offset - stored.clamp(low, high))
        slope = -0.5 * ctx.scale * kept
        v = v.masked_fill(outward(g * slope, stored, low, high), 0.0)
        bent = 0.5 * ctx.scale * g * v * kept * (1.0 - kept)
        return (v * slope).sum(), bent.masked_fill(outward(bent, stored, low, high), 0.0), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, g: Tensor, stored: Tensor, weight: Tensor, place: Any, scale: float) -> Any:
        return _kl_slope(_all(info, in_dims[:3], g, stored, weight), place, scale), 0


def _rows(*values: Tensor) -> list[Tensor]:
    return [value.flatten(1) for value in values]


def _kl_slope(values: list[Tensor], place: Any, scale: float) -> Tensor:
    """`kernels.kl_slope` of all clients, in the shape of what is stored."""
    g, stored, weight = values
    slope: Tensor = _kernels().kl_slope(g, *_rows(stored, weight), place, scale)
    return slope.reshape(stored.shape)
