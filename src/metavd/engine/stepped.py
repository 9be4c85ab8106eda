"""A cohort's training step by step: all clients that still have steps left take their next one together.

The clients are sorted by their number of steps, most first, so that those who still train are always a prefix, and a
client that is done costs nothing. On a GPU the step of a prefix, from row numbers to new parameters, is captured once
as a CUDA graph and replayed: nothing of a step is left to Python, not even its number, which the device counts.
Elsewhere the same function runs as it is, so that a machine without a GPU can test it. A client computes its own
`Steps.step` under vmap, as in `backend.vectorized`.

A cohort that does not fit the memory at once is taken in parts: the memory of a few clients' step is measured, and
should that deceive, the parts are halved until they fit.

Shape letters: C clients of the cohort, S steps, G batches a step, B rows a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from ..core import rng
from ..core.local import Steps
from ..core.types import Algorithm, Batch, Sampling, ServerState
from ..data.cohort import TRAIN, Plan, Pool, draw, layout, over, sizes_of
from ..ops import fused
from ..ops.device import rehearse
from ..tree import Params

_EXACT = 16
"""Up to so many clients every number has a graph of its own; above, numbers share one with the next in the row."""
_SAMPLE = 16
"""Clients whose step shows what one needs in memory."""
_SHARE = 0.8
"""Of the free memory that is planned with."""


class Table(NamedTuple):
    """Which rows each client's steps use, clients sorted by their number of steps, most first."""

    order: Tensor
    """(C,) places in the cohort."""
    steps: list[int]
    """Of each client, in that order."""
    rows: Tensor
    """(S, C, G, B) row numbers, 0 where there is none."""
    mask: Tensor
    """(S, C, G, B) 1 for a row, 0 for padding."""
    keys: Tensor
    """(S, C, G, 2) of noise and of augmentation."""
    size: Tensor
    """(C,) training rows of each client."""


def table(pool: Pool, sampling: Sampling, group: int, state: ServerState, cohort: Sequence[int]) -> Table:
    """Draw a round's batches, the very ones of `cohort.batches`, as numbers of rows."""
    ids = np.asarray(cohort)
    counts = sizes_of(pool, ids)
    made = layout(sampling, counts)
    order = np.argsort(-made.batches, kind="stable")
    made = Plan(*(part[order] for part in made))
    device = pool.x.device
    base = rng.fold(state.key, TRAIN, state.round.to(torch.int64), over(torch.from_numpy(ids[order]), device))
    rows, real = draw(pool, ids[order], made, rng.fold(base, 0))
    number = torch.arange(len(rows), device=device)[:, None]
    keys = torch.stack([rng.fold(rng.fold(base, tag), number) for tag in (1, 3)], -1)

    def grouped(values: Tensor) -> Tensor:
        """(S G, C, ...) -> (S, C, G, ...)."""
        return values.reshape(-1, group, *values.shape[1:]).transpose(1, 2)

    return Table(
        order=torch.from_numpy(order),
        steps=(made.batches // group).tolist(),
        rows=grouped(rows),
        mask=grouped(real.to(pool.dtype)),
        keys=grouped(keys),
        size=over(torch.from_numpy(counts[order]), device).to(pool.dtype),
    )


def batches_of(
    pool: Pool, sampling: Sampling, drawn: tuple[Tensor, Tensor, Tensor], round: Tensor, size: Tensor
) -> list[Batch]:
    """Return one step's G batches of C clients, from that step's rows, mask and keys of a `Table`."""
    rows, mask, keys = drawn
    # Batch by batch, not client by client: then each is one piece of memory.
    rows, mask, keys = (value.transpose(0, 1) for value in (rows, mask, keys))
    x, y = pool.many(rows, keys[..., 1] if sampling.augment else None)
    if not x.is_cuda:  # second derivatives of convolutions ask how images lie in memory, and vmap knows one answer
        x = x.contiguous()
    rounds = round.expand(len(size))
    return [Batch(x[j], y[j], mask[j], keys[j, :, 0], rounds, size) for j in range(len(rows))]


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
    round: Tensor
    graphs: dict[int, Callable[[], None]] = field(default_factory=dict)
    memory: Any = None
    """The graphs' own memory, which they share: only one runs at a time."""

    @property
    def clients(self) -> int:
        return len(self.loss)


Trainer = Callable[[Algorithm, Pool, ServerState, Tensor], tuple[Params, Tensor]]
"""(algorithm, pool, state, cohort of ids) -> adapted parameters (C, ...), mean losses (C,)."""


def serves(algorithm: Algorithm) -> bool:
    """Whether a method's training is a sequence of steps on batches of bounded size."""
    sampling = algorithm.train_batches
    return isinstance(algorithm.local, Steps) and not sampling.full and not sampling.extra


def stepped(*, capture: bool, chunk: int = 0) -> Trainer:
    """Return a trainer for one algorithm and one pool, whose graphs it keeps; with `capture` it needs a GPU.

    `chunk` clients are trained at once; 0: as many as the memory holds.
    """
    kept: list[_Buffers] = []
    most = [chunk]

    def train(algorithm: Algorithm, pool: Pool, state: ServerState, cohort: Tensor) -> tuple[Params, Tensor]:
        if not most[0] and capture and len(cohort) > _SAMPLE:
            most[0] = _affordable(algorithm, pool, state, cohort)
        local = algorithm.local
        assert isinstance(local, Steps)
        drawn = table(pool, algorithm.train_batches, local.group, state, cohort.tolist())
        ids = over(cohort[drawn.order], pool.x.device)
        parts: list[tuple[Params, Tensor]] = []
        while (done := sum(len(loss) for _, loss in parts)) < len(ids):
            part = slice(done, done + (most[0] or len(ids)))
            try:
                parts.append(_train(algorithm, pool, state, (ids[part], _part(drawn, part)), kept, capture=capture))
            except torch.cuda.OutOfMemoryError:
                width = len(ids[part])
                if width == 1:
                    raise
                kept.clear()
                torch.cuda.empty_cache()
                most[0] = (width + 1) // 2
        back = over(torch.argsort(drawn.order), pool.x.device)
        adapted = {name: torch.cat([params[name] for params, _ in parts])[back] for name in parts[0][0]}
        return adapted, torch.cat([loss for _, loss in parts])[back]

    return train


def _part(drawn: Table, part: slice) -> Table:
    steps = drawn.steps[part]
    rows, mask, keys = (value[: steps[0], part] for value in (drawn.rows, drawn.mask, drawn.keys))
    return Table(drawn.order[part], steps, rows, mask, keys, drawn.size[part])


def _affordable(algorithm: Algorithm, pool: Pool, state: ServerState, cohort: Tensor) -> int:
    """Return how many clients fit the free memory, from what the step of a few needs."""
    local = algorithm.local
    assert isinstance(local, Steps)
    few = cohort[:_SAMPLE]
    drawn = table(pool, algorithm.train_batches, local.group, state, few.tolist())
    ids = over(few[drawn.order], pool.x.device)
    drawn = drawn._replace(steps=[min(1, steps) for steps in drawn.steps])

    def first() -> None:
        _train(algorithm, pool, state, (ids, drawn), [], capture=False)

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
    algorithm: Algorithm, pool: Pool, state: ServerState, who: tuple[Tensor, Table], kept: list[_Buffers], *,
    capture: bool,
) -> tuple[Params, Tensor]:  # fmt: skip
    """Train clients that fit the memory; return copies of what they end with, in their order."""
    ids, drawn = who
    local, sampling = algorithm.local, algorithm.train_batches
    assert isinstance(local, Steps)
    received = vmap(algorithm.emit.apply, (None, 0, None))(state.params, ids, state.round)
    if not kept or kept[0].clients < len(ids):
        kept[:] = [_allocate(received, drawn, pool, sampling)]
    buffers = kept[0]
    _fill(buffers, received, drawn, state)
    for step in range(drawn.steps[0]):
        active = sum(steps > step for steps in drawn.steps)
        together = min(_together(active), buffers.clients) if capture else active
        if together not in buffers.graphs:
            take = partial(_step, local, sampling, pool, buffers, together)
            buffers.graphs[together] = _captured(take, buffers) if capture else take
        buffers.graphs[together]()
    steps = over(torch.tensor(drawn.steps), pool.x.device).clamp(min=1).to(pool.dtype)
    count = len(ids)
    return {name: value[:count].clone() for name, value in buffers.params.items()}, buffers.loss[:count] / steps


def _together(active: int) -> int:
    """Round a number of clients up to one that has a graph: eight in every power of two.

    >>> [_together(active) for active in (3, 16, 17, 33, 1000)]
    [3, 16, 18, 36, 1024]
    """
    if active <= _EXACT:
        return active
    grain = 1 << (active - 1).bit_length() - 4
    return -(-active // grain) * grain


def _allocate(received: Params, drawn: Table, pool: Pool, sampling: Sampling) -> _Buffers:
    clients, group = drawn.rows.shape[1:3]
    width = max(drawn.rows.shape[-1], sampling.batch)
    everyone = sizes_of(pool, np.arange(pool.federation.num_clients))
    steps = max(int(layout(sampling, everyone).batches.max()) // group, len(drawn.rows))
    device = pool.x.device

    def room() -> Params:
        # What all clients share comes out of vmap as one expanded tensor, which cannot be written to.
        return {name: value.new_empty(value.shape) for name, value in received.items()}

    return _Buffers(
        params=room(),
        received=room(),
        loss=torch.zeros(clients, dtype=pool.dtype, device=device),
        step=torch.zeros(1, dtype=torch.int64, device=device),
        rows=torch.zeros(steps, clients, group, width, dtype=torch.int64, device=device),
        mask=torch.zeros(steps, clients, group, width, dtype=pool.dtype, device=device),
        keys=torch.zeros(steps, clients, group, 2, dtype=torch.int64, device=device),
        size=torch.zeros(clients, dtype=pool.dtype, device=device),
        round=torch.zeros((), dtype=pool.dtype, device=device),
    )


def _fill(buffers: _Buffers, received: Params, drawn: Table, state: ServerState) -> None:
    steps, count, _, width = drawn.rows.shape
    names = list(received)
    for room in (buffers.received, buffers.params):
        torch._foreach_copy_([room[name][:count] for name in names], [received[name] for name in names])
    buffers.loss.zero_()
    buffers.step.zero_()
    # Rows of clients and batches that this cohort lacks are padding; a stale mask would call them real.
    buffers.mask.zero_()
    buffers.rows[:steps, :count, :, :width].copy_(drawn.rows)
    buffers.mask[:steps, :count, :, :width].copy_(drawn.mask)
    buffers.keys[:steps, :count].copy_(drawn.keys)
    buffers.size[:count].copy_(drawn.size)
    buffers.round.copy_(state.round)


def _step(local: Steps, sampling: Sampling, pool: Pool, buffers: _Buffers, active: int) -> None:
    """Take the next step of the first `active` clients."""
    drawn = fused.pull([buffers.rows, buffers.mask, buffers.keys], buffers.step)
    rows, mask, keys = (value[:active] for value in drawn)
    batches = batches_of(pool, sampling, (rows, mask, keys), buffers.round, buffers.size[:active])
    own, received = (
        {name: value[:active] for name, value in part.items()} for part in (buffers.params, buffers.received)
    )
    # Of many clients some may be done, whose masks are 0.
    real = mask[:, 0].sum(-1) if active > _EXACT else None
    with fused.in_place(real):
        new, loss = vmap(local.step, randomness="error")(own, batches, received)
    moved = {name: value for name, value in new.items() if value.data_ptr() != own[name].data_ptr()}
    if real is not None:
        loss = torch.where(real > 0, loss, 0.0)
        moved = {name: torch.where(real.reshape(-1, *[1] * (value.ndim - 1)) > 0, value, own[name])
                 for name, value in moved.items()}  # fmt: skip
    if moved:
        torch._foreach_copy_([own[name] for name in moved], list(moved.values()))
    buffers.loss[:active].add_(loss)
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
            torch._foreach_copy_(touched, before)
        step()  # in which libraries choose their kernels and take their memory
        torch._foreach_copy_(touched, before)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=buffers.memory):
        step()
    buffers.memory = graph.pool()
    return graph.replay
