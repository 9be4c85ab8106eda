"""How a machine is used while a run lasts: threads by the size of the model, memory that is kept, no compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..compat import compiler_unloaded, memory_kept
from ..ops.precision import EXACT

_SMALL = 200_000
"""Weights of one client below which a second thread costs more in waiting than it saves in arithmetic.

Also where vmap computes a hundred such clients at once: a round is a thousand short products, and after each of them
all threads wait for the last. Two threads save a fifth of it on a quiet machine; on a busy one, where the other thread
has no core, they took eight times as long (the benchmark's tiny workload).
"""


@contextmanager
def tuned(weights: int, device: str, backend: str = "loop", precision: str = EXACT) -> Iterator[None]:
    """Use a CPU well for a network of so many weights; let a GPU multiply in a precision of `ops.precision`.

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
