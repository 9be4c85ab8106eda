"""What a round of large pictures costs on a CPU, said before the first one is begun."""

from __future__ import annotations

import time

import torch

from ..core import rng
from ..core.rules import MEAN
from ..core.types import Algorithm, Model, Sampling
from ..data.cohort import Pool, layout, sizes_of
from ..engine import attacks
from .settings import Experiment

SIDE = 64
"""Pixels a side up to which nobody needs to be warned, and which is offered instead."""
_ROWS = 4
_BACKWARD = 3
"""Forward and backward together, in forward passes."""


def told(model: Model, pool: Pool, sampling: Sampling, cohort: int) -> list[str]:
    """Say what a round will take where pictures are large and there is no GPU; nothing otherwise.

    A few rows are timed on their way through the network; a round trains with as many as its clients' batches hold.
    """
    shape = tuple(pool.x.shape[1:])
    if pool.x.device.type != "cpu" or len(shape) != 3 or max(shape[1:]) <= SIDE:
        return []
    sizes = sizes_of(pool, range(pool.federation.num_clients))
    each = float(layout(sampling, sizes).size.sum()) / len(sizes)
    seconds = _row_seconds(model, shape, pool.dtype) * _BACKWARD * each * cohort
    less = seconds * (SIDE / max(shape[1:])) ** 2
    return [
        f"pictures of {shape[2]} x {shape[1]} pixels on a CPU: a round trains with about {each * cohort:,.0f} "
        f"of them and takes about {_told(seconds)}; image_size={SIDE} makes it about {_told(less)}"
    ]


def parts_told(algorithm: Algorithm, weights: int, e: Experiment) -> list[str]:
    """Say whether a cohort larger than a part is added up in parts, or why all its answers are held at once."""
    cohort = int(e.cohort)
    if not 0 < e.part < cohort:
        return []
    why = "the attack looks at all answers" if attacks.parse(e.attack) else ""
    if algorithm.server.take is None:
        rule = f"aggregate={e.aggregate}" if e.aggregate != MEAN else e.method
        why = f"{rule} needs all answers of a round together"
    if not why:
        return [f"the server adds up the answers of {cohort} clients in parts of {e.part} (part={e.part})"]
    size = cohort * weights * (8 if e.dtype == "float64" else 4)
    return [f"{why}: {cohort} clients' weights are in memory at once, {size / 2**20:,.0f} MB for each copy of them"]


def _row_seconds(model: Model, shape: tuple[int, ...], dtype: torch.dtype) -> float:
    params, rows = model.init(rng.key(0)), torch.zeros(_ROWS, *shape, dtype=dtype)
    with torch.no_grad():
        model.apply(params, rows, None)  # the first pass chooses algorithms and takes memory
        began = time.perf_counter()
        model.apply(params, rows, None)
    return (time.perf_counter() - began) / _ROWS


def _told(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{max(seconds, 1):.0f} s"
