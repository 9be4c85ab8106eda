"""The end of a client's step, w <- w - lr min(1, clip / |slope|) slope, over all entries of a client at once.

`descend` is the pure form, of one client, with a rule for vmap. `descend_` writes the new values of many clients where
the old ones are. On a GPU both are two launches of one kernel, whatever the number of entries. Nothing may be
differentiated through either: a step within a derivative is `core.local`'s.

Shape letters: C clients.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.func import vmap

from .. import tree
from ..compat import copy_each
from ..tree import Params
from . import device


def descend(start: Params, slope: Params, lr: float, clip: float | None) -> Params:
    """Return one client's entries after the step; `slope` has the names of `start`."""
    if _descendable(start):
        ends = _Descend.apply(lr, clip, *start.values(), *(slope[name] for name in start))  # type: ignore[no-untyped-call]
        return dict(zip(start, ends, strict=True))
    norms = [torch.linalg.vector_norm(slope[name]) for name in start]
    rate = lr if clip is None else lr * tree.clip_scale(torch.stack(norms), clip)
    return {name: value - rate * slope[name] for name, value in start.items()}


def descend_(start: Params, slope: Params, lr: float, clip: float | None, active: Tensor | None = None) -> None:
    """Take the step of C clients in place, entries (C, ...); with `active` (C,) only where it is above 0."""
    if _descendable(start):
        _kernel().descend(list(start.values()), [slope[name] for name in start], lr, clip, active, in_place=True)
        return
    put_(start, vmap(lambda a, b: descend(a, b, lr, clip))(start, slope), active)


def put_(start: Params, new: Params, active: Tensor | None = None) -> None:
    """Overwrite entries (C, ...) of C clients; with `active` (C,) only where it is above 0."""
    if active is not None:
        new = {name: torch.where(active.reshape(-1, *[1] * (value.ndim - 1)) > 0, value, start[name])
               for name, value in new.items()}  # fmt: skip
    if new:
        copy_each([start[name] for name in new], list(new.values()))


def nth(values: list[Tensor], number: Tensor) -> list[Tensor]:
    """Return value[number] of each contiguous tensor; the number (1,) may be known to the device alone; no vmap."""
    if device.has_kernels(*values):
        found: list[Tensor] = _kernel().gathered(values, number)
        return found
    return [value.index_select(0, number)[0] for value in values]


def _descendable(params: Params) -> bool:
    return device.has_float_kernels(*params.values())


_kernel = partial(device.kernels, "step")


class _Descend(Function):
    @staticmethod
    def forward(lr: float, clip: float | None, *values: Tensor) -> tuple[Tensor, ...]:
        half = len(values) // 2
        rows = [value[None] for value in values]
        return tuple(end[0] for end in _kernel().descend(rows[:half], rows[half:], lr, clip))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> None:
        raise NotImplementedError("a step of `descend` is the last one; a step within a derivative is `local._move`'s")

    @staticmethod
    def vmap(info: Any, in_dims: Any, lr: float, clip: float | None, *values: Tensor) -> Any:
        half = len(values) // 2
        rows = device.aligned(info, in_dims[2:], *values)
        return tuple(_kernel().descend(rows[:half], rows[half:], lr, clip)), (0,) * half
