"""How a machine is used while a run lasts: threads by the size of the model, memory that is kept, no compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..compat import compiler_unloaded, memory_kept
from ..ops.precision import EXACT

_SMALL = 200_000
"""Below so many weights, a second thread costs more in waiting than it saves in arithmetic."""


@contextmanager
def tuned(weights: int, device: str, backend: str = "loop", precision: str = EXACT) -> Iterator[None]:
    """Use a CPU well for operations on so many weights at once; let a GPU multiply in a precision of `ops.precision`.

    With one client per core (backend "threads") what lies between clients has one thread too: so a run's bits do not
    depend on the number of cores.
    """
    with compiler_unloaded(), _products(precision) if device != "cpu" else _threads(weights, backend):
        yield


@contextmanager
def _threads(weights: int, backend: str) -> Iterator[None]:
    before = torch.get_num_threads()
    if weights < _SMALL or backend == "threads":
        torch.set_num_threads(1)
    try:
        with memory_kept():
            yield
    finally:
        torch.set_num_threads(before)


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
