"""Whether kernels of our own compute an operator, and what all operators with a kernel share.

An operator is a function of one client. Where `has_kernels` says so, and types and shapes are those that its kernels
take, it launches them; elsewhere it computes its reference in PyTorch's operators. Nobody else asks which one ran.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


@cache
def ready() -> bool:
    """Whether kernels of our own can run here: a GPU, Triton, and the C compiler that it needs."""
    if not torch.cuda.is_available() or find_spec("triton") is None:
        return False
    try:
        from . import hashing_kernels  # noqa: PLC0415  Triton need not be installed

        hashing_kernels.normal(torch.zeros(1, dtype=torch.int64, device="cuda"), 1)
    except Exception:  # whatever keeps Triton from compiling: PyTorch's own operators are always there
        return False
    return True


def has_kernels(*values: Tensor) -> bool:
    """Whether kernels can compute with these tensors: all of them lie on a GPU, and kernels run there."""
    return all(value.is_cuda for value in values) and ready()


def has_float_kernels(*values: Tensor) -> bool:
    """Whether kernels that know float32 alone can compute with these tensors."""
    return has_kernels(*values) and all(value.dtype == torch.float32 for value in values)


def rehearse(function: Callable[[], Any]) -> None:
    """Call a function to compile its kernels side by side; what it computes is nonsense, and the caller's to undo."""
    if ready():
        from .launch import rehearse  # noqa: PLC0415  Triton need not be installed

        rehearse(function)


def over(values: Tensor, device: torch.device) -> Tensor:
    """Bring host values to a device; a GPU takes them when it comes to that, and the host does not wait for it."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def add_at(total: Tensor, index: Tensor, values: Tensor) -> None:
    """Add values (N,) to a vector at places (N,), one place several times too, always in the same order.

    Of PyTorch's two ways one keeps to an order on a GPU and the other on a CPU, whatever the number of threads.
    """
    if total.is_cuda:
        total.index_put_((index,), values, accumulate=True)
    else:
        total.index_add_(0, index, values)


def aligned(info: Any, in_dims: tuple[int | None, ...], *values: Tensor, axis: int = 0) -> list[Tensor]:
    """Bring the client axis of every argument to one place; what clients share is repeated."""
    return [
        value.unsqueeze(axis).expand(*value.shape[:axis], info.batch_size, *value.shape[axis:])
        if dim is None
        else value.movedim(dim, axis)
        for value, dim in zip(values, in_dims, strict=False)
    ]


def one_client(*values: Any) -> list[Any]:
    """Give tensors of one client an axis of clients."""
    return [value[None].contiguous() if isinstance(value, Tensor) else value for value in values]


def all_clients(info: Any, in_dims: Any, *values: Any) -> list[Any]:
    """Bring the client axis of all tensors to the front; what clients share is repeated, what is no tensor stays."""
    return [
        aligned(info, (dim,), value)[0].contiguous() if isinstance(value, Tensor) else value
        for dim, value in zip(in_dims, values, strict=True)
    ]


@cache
def kernels(name: str) -> Any:
    """Return the module of an operator's kernels, which is imported here alone, since Triton need not be installed."""
    return import_module(f".{name}_kernels", __package__)


class Operator(Function):
    """An operator whose derivative needs all that it was given: `ctx.saved_tensors`, and the rest as `ctx.given`."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        """Keep the inputs."""
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
        ctx.given = tuple(value for value in inputs if not isinstance(value, Tensor))


class PerClient(Operator):
    """An operator of one client whose kernel takes all clients at once.

    A subclass has `batched`, the kernel on tensors with a client axis in front, and the derivative.
    """

    batched: Callable[..., Any]

    @classmethod
    def forward(cls, *values: Any) -> Any:
        """Give the kernel a single client."""
        found = cls.batched(*one_client(*values))
        return found[0] if isinstance(found, Tensor) else tuple(each[0] for each in found)

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *values: Any) -> Any:
        """Give the kernel all clients."""
        found = cls.batched(*all_clients(info, in_dims, *values))
        return found, 0 if isinstance(found, Tensor) else (0,) * len(found)


class Constant(PerClient):
    """An operator whose answers carry no gradient."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""
        ctx.arguments = len(inputs)
        ctx.mark_non_differentiable(*([output] if isinstance(output, Tensor) else output))

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> tuple[None, ...]:  # noqa: ARG004
        """Give nothing."""
        return (None,) * ctx.arguments
