"""Launching Triton kernels, and compiling those of a function side by side before its first run.

Triton compiles a kernel when it is first launched, one after another. `rehearse` calls a function whose kernels are
noted and not launched, and compiles all of them at once, each in a thread: most of the work is done outside Python.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..compat import compile_kernel, load_kernel


class Launch(NamedTuple):
    """A launch that was noted and did not take place."""

    kernel: Kernel
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def compiled(self) -> Any:
        """Compile what would be launched; return Triton's kernel."""
        return compile_kernel(self.kernel.jit, self.grid, self.arguments, self.constants)


_noted: list[list[Launch]] = []


class Kernel:
    """A Triton kernel; `kernel[grid](*arguments)` launches it."""

    def __init__(self, function: Callable[..., None], **how: Any) -> None:
        self.jit = triton.jit(function, **how)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if not _noted:
            return self.jit[grid]
        return lambda *arguments, **constants: _noted[-1].append(Launch(self, grid, arguments, constants))


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
def noting() -> Iterator[list[Launch]]:
    """Note what is launched within, and launch nothing; what is computed there is nonsense."""
    launches: list[Launch] = []
    _noted.append(launches)
    try:
        with _Zeros():
            yield launches
    finally:
        _noted.pop()


def rehearse(function: Callable[[], Any]) -> None:
    """Compile what a function launches. What it computes is nonsense, and the caller's to undo."""
    with noting() as launches:
        function()
    variants: dict[int, list[Launch]] = {}
    for launch in launches:
        variants.setdefault(id(launch.kernel), []).append(launch)
    # One kernel's variants in turn: the second call of a kind finds the first one's.
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        list(workers.map(_bring, variants.values()))


def _bring(launches: list[Launch]) -> None:
    for launch in launches:
        load_kernel(launch.compiled())
