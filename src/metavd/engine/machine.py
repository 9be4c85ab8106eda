"""How a machine is used while a run lasts: threads by the size of the model, and memory that is not given back.

glibc returns every freed block above a threshold to the system and faults it in anew at the next step; a batch's
activations are such blocks, and the faults take as long as the arithmetic. While a run lasts, blocks stay in the
process; afterwards the thresholds are as they were at its start and what is free is given back. torch's compiler, which
no run needs and which takes seconds to load, stays unloaded.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch

from ..ops.precision import EXACT

_SMALL = 200_000
"""Below so many weights, a second thread costs more in waiting than it saves in arithmetic."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Names of glibc's settings in malloc.h."""
_USUAL = ((_TRIM_THRESHOLD, 128 << 10), (_TOP_PAD, 128 << 10), (_MMAP_THRESHOLD, 128 << 10))
# Older versions refuse a threshold above 32 MiB and keep the one before.
_KEEPING = (
    (_TRIM_THRESHOLD, (1 << 31) - 1),
    (_TOP_PAD, 64 << 20),
    (_MMAP_THRESHOLD, 32 << 20),
    (_MMAP_THRESHOLD, 1 << 30),
)


@contextmanager
def tuned(weights: int, device: str, backend: str = "loop", precision: str = EXACT) -> Iterator[None]:
    """Use a CPU well for operations on so many weights at once; let a GPU multiply in a precision of `ops.precision`.

    With one client a core (backend "threads") what lies between clients has one thread too: so a run's bits do not
    depend on the number of cores.
    """
    with _compiler_unloaded(), _products(precision) if device != "cpu" else _threads(weights, backend):
        yield


@contextmanager
def _threads(weights: int, backend: str) -> Iterator[None]:
    before = torch.get_num_threads()
    if weights < _SMALL or backend == "threads":
        torch.set_num_threads(1)
    libc = _glibc()
    try:
        _set(libc, _KEEPING)
        yield
    finally:
        torch.set_num_threads(before)
        _set(libc, _USUAL)
        if libc is not None:
            libc.malloc_trim(0)


@contextmanager
def _products(precision: str) -> Iterator[None]:
    """Let products be TF32 unless they are to be exact; algorithms that give other bits every time are never used."""
    matrices, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matrices.allow_tf32, convolutions.allow_tf32, convolutions.deterministic)
    short = precision != EXACT
    try:
        matrices.allow_tf32, convolutions.allow_tf32, convolutions.deterministic = short, short, True
        yield
    finally:
        matrices.allow_tf32, convolutions.allow_tf32, convolutions.deterministic = before


class _Unloaded:
    """A module of torch's compiler that is loaded when someone asks it for more than whether it is at work."""

    def __init__(self, name: str, **known: Any) -> None:
        self._name = name
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


@contextmanager
def _compiler_unloaded() -> Iterator[None]:
    """Keep `torch.func.grad` from loading torch's compiler to switch its autograd off: nobody can have switched it on.

    Whoever imports the compiler meanwhile gets it, and then the switch is the real one.
    """
    name = "torch._dynamo"
    if name in sys.modules:
        yield
        return
    switch = _Unloaded(f"{name}.compiled_autograd", _disable=nullcontext)
    torch._dynamo = _Unloaded(name, compiled_autograd=switch)  # type: ignore[assignment]
    ours = torch._dynamo
    try:
        yield
    finally:
        if vars(torch).get("_dynamo") is ours:
            del torch._dynamo


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
        return libc if all(hasattr(libc, name) for name in ("gnu_get_libc_version", "mallopt")) else None
    except (OSError, TypeError):  # no dynamic loader, or Windows
        return None


def _set(libc: ctypes.CDLL | None, values: Sequence[tuple[int, int]]) -> None:
    if libc is not None:
        for name, value in values:
            libc.mallopt(name, value)
