"""Operators of a client's step, each one kernel on a GPU; `kernels` holds the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..tree import Params
from .device import aligned, ready


def pull(values: list[Tensor], number: Tensor) -> list[Tensor]:
    """Return value[number] of each contiguous tensor; the number (1,) may be known to the device alone; no vmap."""
    if values[0].is_cuda and ready():
        pulled: list[Tensor] = _kernels().pull(values, number)
        return pulled
    return [value.index_select(0, number)[0] for value in values]


_places: list[dict[str, Any]] = [{}]


@contextmanager
def in_place(here: Tensor | None = None) -> Iterator[None]:
    """Let `descend` write where its parameters are, for someone who does not need those any more.

    `here` (C,) says which clients take the step: those with a number above 0.
    """
    _places.append({"here": here, "in_place": True})
    try:
        yield
    finally:
        _places.pop()


def descend(start: Params, slope: Params, lr: float, clip: float | None) -> Params:
    """Take one clipped step, start - lr min(1, clip / |slope|) slope, over all entries of a client; no derivative."""
    ends = _Descend.apply(lr, clip, *start.values(), *(slope[name] for name in start))
    return dict(zip(start, ends, strict=True))


def descendable(params: Params) -> bool:
    """Whether `descend` can take the step."""
    return all(value.is_cuda and value.dtype == torch.float32 for value in params.values()) and ready()


def _kernels() -> Any:
    from . import kernels  # noqa: PLC0415  Triton need not be installed

    return kernels


class _Descend(Function):
    @staticmethod
    def forward(lr: float, clip: float | None, *values: Tensor) -> tuple[Tensor, ...]:
        half = len(values) // 2
        rows = [value[None] for value in values]
        return tuple(end[0] for end in _kernels().descend(rows[:half], rows[half:], lr, clip))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> None:
        raise NotImplementedError("a step of `descend` is the last one; a step within a derivative is `local._move`'s")

    @staticmethod
    def vmap(info: Any, in_dims: Any, lr: float, clip: float | None, *values: Tensor) -> Any:
        half = len(values) // 2
        rows = aligned(info, in_dims[2:], *values)
        return tuple(_kernels().descend(rows[:half], rows[half:], lr, clip, **_places[-1])), (0,) * half
