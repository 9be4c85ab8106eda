"""Gradients of functions of parameters: `torch.func` under vmap, plain autograd elsewhere.

Both give the same numbers; without vmap, autograd takes about half of the time of `torch.func` for small networks,
whose cost is all in the bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, func
from torch.autograd import Function

from ..compat import transform_active
from ..tree import Params

Scalar = Callable[[Params], Tensor]


def _open(point: Params) -> tuple[Params, bool]:
    """Return the point as tensors to differentiate by, and whether someone outside differentiates through it."""
    nested = torch.is_grad_enabled() and any(value.requires_grad for value in point.values())
    return {n: v if nested and v.requires_grad else v.detach().requires_grad_() for n, v in point.items()}, nested


def _slopes(value: Tensor, point: Params, *, graph: bool) -> Params:
    if not value.requires_grad:  # the function does not depend on its point
        return {name: torch.zeros_like(part) for name, part in point.items()}
    slopes = torch.autograd.grad(value, tuple(point.values()), create_graph=graph, materialize_grads=True)
    return dict(zip(point, slopes, strict=True))


def grad_and_value(function: Scalar) -> Callable[[Params], tuple[Params, Tensor]]:
    """Return the function that gives gradient and value at a point; differentiable again from outside."""

    def both(point: Params) -> tuple[Params, Tensor]:
        if transform_active():
            gradient, value = func.grad_and_value(function)(point)
            return gradient, value
        with torch.enable_grad():
            opened, nested = _open(point)
            value = function(opened)
            return _slopes(value, opened, graph=nested), value if nested else value.detach()

    return both


def grad(function: Scalar) -> Callable[[Params], Params]:
    """Return the function that gives the gradient at a point."""
    both = grad_and_value(function)
    return lambda point: both(point)[0]


class _Towards(Function):
    """0, whose gradient by each of the first half of its arguments is the other half's; nothing may come after it.

    With it a vector-Jacobian product is the gradient of a scalar. `torch.func.vjp` would load a computer algebra
    system, half a second of imports, to compare two shapes.
    """

    @staticmethod
    def forward(*arguments: Tensor) -> Tensor:
        return arguments[0].new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs[len(inputs) // 2 :])

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.saved_tensors, *[None] * len(ctx.saved_tensors))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Tensor) -> tuple[Tensor, int]:  # noqa: ARG004
        return arguments[0].new_zeros(info.batch_size), 0


def pulled(function: Callable[[Params], Params], point: Params, direction: Callable[[Params], Params]) -> Params:
    """Return J^T d of a function at a point, where the direction d is a function of its value there."""

    def scalar(point: Params) -> Tensor:
        value = function(point)
        with torch.no_grad():
            along = direction(value)
        towards: Tensor = _Towards.apply(*value.values(), *(along[name] for name in value))  # type: ignore[no-untyped-call]
        return towards

    return grad(scalar)(point)


def hessian_product(function: Scalar, point: Params, direction: Params) -> Params:
    """Return H v exactly, by differentiating the gradient (the Hessian is symmetric)."""
    return pulled(grad(function), point, lambda _: direction)
