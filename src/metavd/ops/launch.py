"""Launching Triton kernels, and compiling those of a function side by side before its first run.

Triton compiles a kernel when it is first launched, one after another. `rehearse` calls a function whose kernels are
noted and not launched, and compiles all of them at once, each in a thread: most of the work is done outside Python.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode

_Calls = dict[int, list[Callable[[], Any]]]
_noted: list[_Calls] = []


class Kernel:
    """A Triton kernel; `kernel[grid](*arguments)` launches it."""

    def __init__(self, function: Callable[..., None], **how: Any) -> None:
        self._jit = triton.jit(function, **how)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if not _noted:
            return self._jit[grid]
        return lambda *arguments, **constants: (
            _noted[-1].setdefault(id(self), []).append(partial(self._compile, grid, arguments, constants))
        )

    def _compile(self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        made = self._jit.warmup(*arguments, grid=grid, **constants)
        getattr(made, "run", None)  # brings what launches it


def kernel(**how: Any) -> Callable[[Callable[..., None]], Kernel]:
    """Make a function a kernel; `how` is what `triton.jit` takes."""
    return lambda function: Kernel(function, **how)


_FILLED = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like, Tensor.new_empty: Tensor.new_zeros}


class _Zeros(TorchFunctionMode):
    """Memory that nobody fills is 0, so that row numbers and labels are ones that exist."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _FILLED.get(function, function)(*args, **(kwargs or {}))


@contextmanager
def _noting() -> Iterator[_Calls]:
    calls: _Calls = {}
    _noted.append(calls)
    try:
        with _Zeros():
            yield calls
    finally:
        _noted.pop()


def rehearse(function: Callable[[], Any]) -> None:
    """Compile what a function launches. What it computes is nonsense, and the caller's to undo."""
    with _noting() as calls:
        function()
    # One kernel's variants in turn: the second call of a kind finds the first one's.
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        list(workers.map(lambda variants: [compile() for compile in variants], calls.values()))
