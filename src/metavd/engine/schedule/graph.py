"""A cohort's training step by step on a GPU: all clients that still have steps left take their next one together.

The step of the clients that still train, from row numbers to new parameters, is captured once as a CUDA graph and
replayed: nothing of a step is left to Python, not even its number, which the device counts. A step lands in place, in
buffers that stay where they are. Without a GPU the same function runs as it is, so that any machine can test it.

A cohort that does not fit the memory at once is taken in parts: the memory of a few clients' step is measured, and if
a part does not fit all the same, the parts are halved until they do.

Shape letters: C clients of the cohort, S steps, G batches per step, B rows per batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from ...compat import copy_each
from ...core.types import Algorithm, Local, Sampling, ServerState
from ...data.cohort import Pool, layout, sizes_of
from ...ops.device import over, rehearse
from ...ops.step import descend_, nth, put_
from ...tree import Params
from ..kept import held
from ..turn import split
from . import Schedule, Train, Trained
from .table import StepTable, batches_of, ordered, part_of, rejoined, table, tabled
from .vmap import all_at_once, emitted, whole_turns

_EXACT = 16
"""Up to so many clients every number has a graph of its own; above, numbers share one with the next in the row."""
_SAMPLE = 16
"""Clients whose step shows what one needs in memory."""
_SHARE = 0.8
"""Of the free memory that is planned with."""


@dataclass(eq=False)
class _Buffers:
    """What a step reads and writes, at addresses that stay, and the graphs that know them."""

    params: Params
    received: Params
    loss: Tensor
    step: Tensor
    """(1,) number of the next step."""
    rows: Tensor
    mask: Tensor
    keys: Tensor
    size: Tensor
    about: Params
    round: Tensor
    graphs: dict[int, Callable[[], None]] = field(default_factory=dict)
    memory: Any = None
    """The graphs' own memory, which they share: only one runs at a time."""

    @property
    def clients(self) -> int:
        return len(self.loss)


def graph(chunk: int = 0) -> Schedule:
    """Return the schedule of one algorithm and one pool on a GPU.

    `chunk` clients are trained at once; 0: as many as the memory holds.
    """
    several = all_at_once(chunk)
    return Schedule("graph", stepwise(capture=True, chunk=chunk, otherwise=whole_turns(chunk)), several)


def stepwise(*, capture: bool, chunk: int = 0, otherwise: Train) -> Train:
    """Return the training of a cohort step by step, in buffers that it keeps; with `capture`, as CUDA graphs.

    What cannot be tabled is left to `otherwise`.
    """
    buffers: list[_Buffers] = []
    most = [chunk]

    def train(algorithm: Algorithm, pool: Pool, state: ServerState, cohort: Tensor) -> Trained:
        if not tabled(algorithm.train_batches):
            return otherwise(algorithm, pool, state, cohort)
        graphs = capture and algorithm.local.captured
        sent, own = emitted(algorithm, state, cohort), held(algorithm, state, cohort.tolist())
        if not most[0] and capture and len(cohort) > _SAMPLE:
            most[0] = _affordable(algorithm, pool, state, cohort, sent | own)
        drawn = table(pool, algorithm.train_batches, algorithm.local.group, state, cohort)
        received = ordered(sent | own, drawn.order)
        parts: list[tuple[Params, Tensor]] = []
        while (done := sum(len(loss) for _, loss in parts)) < len(cohort):
            part = slice(done, min(done + (most[0] or len(cohort)), len(cohort)))
            these = {name: value[part] for name, value in received.items()}
            try:
                parts.append(_train(algorithm, pool, state, (these, part_of(drawn, part)), buffers, capture=graphs))
            except torch.cuda.OutOfMemoryError:
                width = part.stop - part.start
                if width == 1:
                    raise
                buffers.clear()
                torch.cuda.empty_cache()
                most[0] = (width + 1) // 2
        ended, losses = rejoined(parts, drawn.order)
        return Trained(sent, *split(ended, own), losses)

    return train


def _affordable(algorithm: Algorithm, pool: Pool, state: ServerState, cohort: Tensor, start: Params) -> int:
    """Return how many clients fit the free memory, from what the step of a few needs."""
    few = cohort[:_SAMPLE]
    drawn = table(pool, algorithm.train_batches, algorithm.local.group, state, few)
    own = ordered({name: value[:_SAMPLE] for name, value in start.items()}, drawn.order)
    drawn = drawn._replace(steps=[min(1, steps) for steps in drawn.steps])

    def first() -> None:
        _train(algorithm, pool, state, (own, drawn), [], capture=False)

    rehearse(first)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first()
    torch.cuda.synchronize()
    each = (torch.cuda.max_memory_allocated() - before) / len(few)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return max(1, int(_SHARE * free / max(each, 1.0)))


def _train(
    algorithm: Algorithm, pool: Pool, state: ServerState, who: tuple[Params, StepTable], kept: list[_Buffers], *,
    capture: bool,
) -> tuple[Params, Tensor]:  # fmt: skip
    """Train clients that fit the memory; return copies of what they end with, in their order."""
    received, drawn = who
    local, sampling = algorithm.local, algorithm.train_batches
    start, count = received if local.init is None else vmap(local.init)(received), len(drawn.steps)
    if not kept or kept[0].clients < count:
        kept[:] = [_allocate(start, received, drawn, pool, sampling)]
    buffers = kept[0]
    _fill(buffers, start, received, drawn, state)
    for step in range(drawn.steps[0]):
        active = sum(steps > step for steps in drawn.steps)
        together = min(_rounded_up(active), buffers.clients) if capture else active
        if together not in buffers.graphs:
            take = partial(_step, local, sampling, pool, buffers, together)
            buffers.graphs[together] = _captured(take, buffers) if capture else take
        buffers.graphs[together]()
    steps = over(torch.tensor(drawn.steps), pool.x.device).clamp(min=1).to(pool.dtype)
    ended = {name: value[:count].clone() for name, value in buffers.params.items()}
    return ended if local.final is None else vmap(local.final)(ended), buffers.loss[:count] / steps


def _rounded_up(active: int) -> int:
    """Round a number of clients up to one that has a graph: eight in every power of two.

    >>> [_rounded_up(active) for active in (3, 16, 17, 33, 1000)]
    [3, 16, 18, 36, 1024]
    """
    if active <= _EXACT:
        return active
    grain = 1 << (active - 1).bit_length() - 4
    return -(-active // grain) * grain


def _allocate(start: Params, received: Params, drawn: StepTable, pool: Pool, sampling: Sampling) -> _Buffers:
    clients, group = drawn.rows.shape[1:3]
    width = max(drawn.rows.shape[-1], sampling.batch)
    everyone = sizes_of(pool, np.arange(pool.federation.num_clients))
    steps = max(int(layout(sampling, everyone).batches.max()) // group, len(drawn.rows))
    device = pool.x.device

    def room(like: Params) -> Params:
        # What all clients share comes out of vmap as one expanded tensor, which cannot be written to.
        return {name: value.new_empty(value.shape) for name, value in like.items()}

    return _Buffers(
        params=room(start),
        received=room(received),
        loss=torch.zeros(clients, dtype=pool.dtype, device=device),
        step=torch.zeros(1, dtype=torch.int64, device=device),
        rows=torch.zeros(steps, clients, group, width, dtype=torch.int64, device=device),
        mask=torch.zeros(steps, clients, group, width, dtype=pool.dtype, device=device),
        keys=torch.zeros(steps, clients, group, 2, dtype=torch.int64, device=device),
        size=torch.zeros(clients, dtype=pool.dtype, device=device),
        about={name: torch.zeros_like(value) for name, value in drawn.about.items()},
        round=torch.zeros((), dtype=pool.dtype, device=device),
    )


def _fill(buffers: _Buffers, start: Params, received: Params, drawn: StepTable, state: ServerState) -> None:
    steps, count, _, width = drawn.rows.shape
    for room, given in ((buffers.received, received), (buffers.params, start)):
        copy_each([room[name][:count] for name in given], list(given.values()))
    buffers.loss.zero_()
    buffers.step.zero_()
    # Rows of clients and batches that this cohort lacks are padding; a stale mask would call them real.
    buffers.mask.zero_()
    buffers.rows[:steps, :count, :, :width].copy_(drawn.rows)
    buffers.mask[:steps, :count, :, :width].copy_(drawn.mask)
    buffers.keys[:steps, :count].copy_(drawn.keys)
    buffers.size[:count].copy_(drawn.size)
    for name, value in drawn.about.items():
        buffers.about[name][:count].copy_(value)
    buffers.round.copy_(state.round)


def _step(local: Local, sampling: Sampling, pool: Pool, buffers: _Buffers, active: int) -> None:
    """Take the next step of the first `active` clients."""
    drawn = nth([buffers.rows, buffers.mask, buffers.keys], buffers.step)
    rows, mask, keys = (value[:active] for value in drawn)
    batches = batches_of(pool, sampling, (rows, mask, keys), buffers.round, size=buffers.size, told=buffers.about)
    own, received = (
        {name: value[:active] for name, value in part.items()} for part in (buffers.params, buffers.received)
    )
    move, loss = vmap(local.step, (0, 0, 0, None), randomness="error")(own, batches, received, buffers.step[0])
    # Of many clients some may be done, whose masks are 0.
    real = mask[:, 0].sum(-1) if active > _EXACT else None
    if move.slope:
        descend_({name: own[name] for name in move.slope}, move.slope, local.lr, local.clip, real)
    put_(own, move.put, real)
    if local.settle is not None:
        put_(own, vmap(local.settle)(own), real)
    buffers.loss[:active].add_(loss if real is None else torch.where(real > 0, loss, 0.0))
    buffers.step.add_(1)


def _captured(step: Callable[[], None], buffers: _Buffers) -> Callable[[], None]:
    """Capture a step as a CUDA graph, leaving everything as it is, and return its replay."""
    touched = [*buffers.params.values(), buffers.loss, buffers.step]
    before = [value.clone() for value in touched]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        if not buffers.graphs:
            rehearse(step)
            copy_each(touched, before)
        step()  # in which libraries choose their kernels and take their memory
        copy_each(touched, before)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=buffers.memory):
        step()
    buffers.memory = graph.pool()
    return graph.replay
