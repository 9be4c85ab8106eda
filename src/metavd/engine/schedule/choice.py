"""Which schedule suits a workload: graphs on a GPU; on a CPU threads, or vmap where bookkeeping outweighs arithmetic.

A step of a small network is a hundred calls of a few microseconds each, whatever its size; vmap pays them once for the
whole cohort. Large products run best one client per core, in the layout that convolutions prefer. The rule knows sizes
alone, no clock: a run takes the same way, and so gives the same bits, on a busy machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.func import vmap as mapped
from torch.overrides import TorchFunctionMode

from ...core import rng
from ...core.types import Model
from . import Schedule
from .graph import graph
from .loop import loop
from .threads import threads
from .vmap import vmap

_LIGHT = 3e7
"""Operations of a client's step, forward and backward, up to which bookkeeping outweighs them (two cores, torch 2.13).

One client's step costs 0.9 to 3.7 of vmap's share of it up to there, and from four times as many on less than one.
"""
_MANY = 3
"""Clients from which on vmap's own bookkeeping, which is that of two, is shared by enough."""


class _Products(TorchFunctionMode):
    """Counts the operations of linear layers, convolutions and matrix products, which are nearly all of a network's.

    torch's own `FlopCounterMode` counts every operator, and loads torch's compiler for it: 2 s at the start of a run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: int = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if name in {"linear", "conv1d", "conv2d", "conv3d"}:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            self.operations += 2 * out.numel() * weight.shape[1:].numel()
        elif name in {"matmul", "__matmul__", "mm", "bmm"} and args:
            self.operations += 2 * out.numel() * args[0].shape[-1]
        return out


def flops(model: Model, shape: Sequence[int]) -> int:
    """Count the operations of one row's way through a network; a multiplication and an addition are two."""
    params = model.init(rng.key(0))
    some = next(iter(params.values()))
    counter = _Products()
    with torch.no_grad(), counter:
        model.apply(params, torch.zeros(1, *shape, dtype=some.dtype, device=some.device), None)
    return counter.operations


def choice(model: Model, shape: Sequence[int], batch: int, cohort: int) -> str:
    """Return "vmap" or "threads" for clients that take steps of `batch` rows (0: all they have), so many per round."""
    light = 0 < 3 * batch * flops(model, shape) <= _LIGHT
    return "vmap" if light and cohort >= _MANY else "threads"


def unmappable(model: Model, rows: torch.Tensor) -> str:
    """Return why a network cannot answer `rows` for several clients at once, under vmap; nothing where it can.

    One that branches on values, takes `.item()` or leaves torch cannot.
    """
    params = {name: torch.stack([value, value]) for name, value in model.init(rng.key(0)).items()}
    try:
        with torch.no_grad():
            mapped(lambda own: model.apply(own, rows, None))(params)
    except RuntimeError as error:
        return str(error).partition("\n")[0].partition(". ")[0]
    return ""


def resolved(
    backend: str, device: str, model: Model, shape: Sequence[int], *, batch: int, cohort: int, one: bool
) -> str:
    """Return the setting `backend` that a run takes where it was left open ("auto").

    `one`: there is only this one model, which two threads cannot use at once.
    """
    if backend == "auto":
        backend = choice(model, shape, batch, cohort) if device == "cpu" else "vmap"
    return "loop" if one and backend == "threads" else backend


def schedule(backend: str, device: str, chunk: int = 0) -> Schedule:
    """Return the schedule of a setting `backend`, "loop", "threads" or "vmap", on a device."""
    if backend == "vmap":
        return vmap(chunk) if device == "cpu" else graph(chunk)
    return loop if backend == "loop" else threads(torch.get_num_threads())
