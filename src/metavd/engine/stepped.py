"""A cohort's training step by step: all clients that still have steps left take their next one together.

The clients are sorted by their number of steps, most first, so that those who still train are always a prefix, and a
client that is done costs nothing. On a GPU the step of a prefix, from row numbers to new parameters, is captured once
as a CUDA graph and replayed: nothing of a step is left to Python. Elsewhere the same function runs as it is, so that a
machine without a GPU can test it. A client computes its own `Steps.step` under vmap, as in `backend.vectorized`.

Shape letters: C clients of the cohort, S steps, G batches a step, B rows a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from ..core import rng
from ..core.local import Steps
from ..core.types import Algorithm, Batch, Sampling, ServerState
from ..data.cohort import TRAIN, Pool, plan
from ..tree import Params

_WARM_UP = 2
"""Runs before a capture, in which libraries choose their kernels and take their memory."""


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
    noise: Tensor
    """(S, C, G) keys."""
    augment: Tensor
    """(S, C, G) keys."""
    size: Tensor
    """(C,) training rows of each client."""

    def to(self, device: torch.device) -> Table:
        """Move the tensors, without waiting for it."""
        moved = {name: value.to(device, non_blocking=True) for name, value in self._asdict().items() if name != "steps"}
        return Table(steps=self.steps, **moved)


def table(pool: Pool, sampling: Sampling, group: int, state: ServerState, cohort: Sequence[int]) -> Table:
    """Draw a round's batches, the very ones of `cohort.batches`, as numbers of rows."""
    keys = [rng.fold(state.key.cpu(), TRAIN, int(state.round), client) for client in cohort]
    own = [torch.from_numpy(pool.federation.train[client]) for client in cohort]
    plans = [plan(sampling, len(rows), rng.fold(key, 0)) for rows, key in zip(own, keys, strict=True)]
    order = sorted(range(len(plans)), key=lambda place: -len(plans[place]))
    longest, width = len(plans[order[0]]), max(len(batch) for batches in plans for batch in batches)
    rows = torch.zeros(longest, len(cohort), width, dtype=torch.int64)
    mask = torch.zeros(longest, len(cohort), width, dtype=pool.dtype)
    for column, place in enumerate(order):
        for step, positions in enumerate(plans[place]):
            rows[step, column, : len(positions)] = own[place][positions]
            mask[step, column, : len(positions)] = 1.0
    base = torch.stack([keys[place] for place in order])
    number = torch.arange(longest)[:, None]
    noise, augment = (rng.fold(rng.fold(base, tag), number) for tag in (1, 3))

    def grouped(values: Tensor) -> Tensor:
        """(S G, C, ...) -> (S, C, G, ...)."""
        return values.reshape(-1, group, *values.shape[1:]).transpose(1, 2).contiguous()

    return Table(
        order=torch.tensor(order),
        steps=[len(plans[place]) // group for place in order],
        rows=grouped(rows),
        mask=grouped(mask),
        noise=grouped(noise),
        augment=grouped(augment),
        size=torch.tensor([float(len(own[place])) for place in order], dtype=pool.dtype),
    )


@dataclass(eq=False)
class _Buffers:
    """What a step reads and writes, at addresses that stay."""

    params: Params
    received: Params
    loss: Tensor
    rows: Tensor
    mask: Tensor
    noise: Tensor
    augment: Tensor
    size: Tensor
    round: Tensor


Trainer = Callable[[Algorithm, Pool, ServerState, Tensor], tuple[Params, Tensor]]
"""(algorithm, pool, state, cohort of ids) -> adapted parameters (C, ...), mean losses (C,)."""


def serves(algorithm: Algorithm) -> bool:
    """Whether a method's training is a sequence of steps on batches of bounded size."""
    sampling = algorithm.train_batches
    return isinstance(algorithm.local, Steps) and not sampling.full and not sampling.extra


def stepped(*, capture: bool) -> Trainer:
    """Return a trainer for one algorithm and one pool, whose graphs it keeps; with `capture` it needs a GPU."""
    graphs: dict[int, Callable[[], None]] = {}
    kept: list[_Buffers] = []

    def train(algorithm: Algorithm, pool: Pool, state: ServerState, cohort: Tensor) -> tuple[Params, Tensor]:
        local = algorithm.local
        assert isinstance(local, Steps)
        device = pool.x.device
        drawn = table(pool, algorithm.train_batches, local.group, state, cohort.tolist())
        ids = cohort[drawn.order].to(device)
        received = vmap(algorithm.emit.apply, (None, 0, None))(state.params, ids, state.round)
        if not kept or not _fits(kept[0], drawn):
            graphs.clear()
            kept[:] = [_allocate(received, drawn, pool, algorithm.train_batches)]
        buffers = kept[0]
        _fill(buffers, received, drawn, state)
        moved = drawn.to(device)
        for step in range(drawn.steps[0]):
            active = sum(steps > step for steps in drawn.steps)
            _load(buffers, moved, step, active)
            if active not in graphs:
                take = partial(_step, local, algorithm.train_batches, pool, buffers, active)
                graphs[active] = _captured(take, buffers) if capture else take
            graphs[active]()
        back = torch.argsort(moved.order)
        steps = torch.tensor(drawn.steps, dtype=pool.dtype, device=device).clamp(min=1.0)
        adapted = {name: value[: len(ids)][back] for name, value in buffers.params.items()}
        return adapted, (buffers.loss[: len(ids)] / steps)[back]

    return train


def _fits(buffers: _Buffers, drawn: Table) -> bool:
    return buffers.rows.shape[0] >= drawn.rows.shape[1] and buffers.rows.shape[2] >= drawn.rows.shape[3]


def _allocate(received: Params, drawn: Table, pool: Pool, sampling: Sampling) -> _Buffers:
    clients, group = drawn.rows.shape[1:3]
    width = max(drawn.rows.shape[-1], sampling.batch)
    device = pool.x.device

    def room() -> Params:
        # What all clients share comes out of vmap as one expanded tensor, which cannot be written to.
        return {name: value.new_empty(value.shape) for name, value in received.items()}

    return _Buffers(
        params=room(),
        received=room(),
        loss=torch.zeros(clients, dtype=pool.dtype, device=device),
        rows=torch.zeros(clients, group, width, dtype=torch.int64, device=device),
        mask=torch.zeros(clients, group, width, dtype=pool.dtype, device=device),
        noise=torch.zeros(clients, group, dtype=torch.int64, device=device),
        augment=torch.zeros(clients, group, dtype=torch.int64, device=device),
        size=torch.zeros(clients, dtype=pool.dtype, device=device),
        round=torch.zeros((), dtype=pool.dtype, device=device),
    )


def _fill(buffers: _Buffers, received: Params, drawn: Table, state: ServerState) -> None:
    for name, value in received.items():
        buffers.received[name][: len(value)].copy_(value)
        buffers.params[name][: len(value)].copy_(value)
    buffers.loss.zero_()
    buffers.size[: len(drawn.size)].copy_(drawn.size)
    buffers.round.copy_(state.round)


def _load(buffers: _Buffers, moved: Table, step: int, active: int) -> None:
    width = moved.rows.shape[-1]
    buffers.rows[:active, :, :width].copy_(moved.rows[step, :active])
    buffers.mask[:active, :, :width].copy_(moved.mask[step, :active])
    buffers.mask[:active, :, width:].zero_()
    buffers.noise[:active].copy_(moved.noise[step, :active])
    buffers.augment[:active].copy_(moved.augment[step, :active])


def _step(local: Steps, sampling: Sampling, pool: Pool, buffers: _Buffers, active: int) -> None:
    """Take the next step of the first `active` clients."""
    seen = vmap(vmap(pool.inputs)) if sampling.augment else vmap(vmap(lambda rows, _: pool.inputs(rows)))
    x = seen(buffers.rows[:active], buffers.augment[:active])
    y = pool.y[buffers.rows[:active]]

    rounds = buffers.round.expand(active)
    batches = [
        Batch(x[:, j], y[:, j], buffers.mask[:active, j], buffers.noise[:active, j], rounds, buffers.size[:active])
        for j in range(buffers.rows.shape[1])
    ]
    own, received = (
        {name: value[:active] for name, value in part.items()} for part in (buffers.params, buffers.received)
    )
    new, loss = vmap(local.step, randomness="error")(own, batches, received)
    for name, value in new.items():
        buffers.params[name][:active].copy_(value)
    buffers.loss[:active].add_(loss)


def _captured(step: Callable[[], None], buffers: _Buffers) -> Callable[[], None]:
    """Capture a step as a CUDA graph, leaving the parameters as they are, and return its replay."""
    before = {name: value.clone() for name, value in buffers.params.items()}
    loss = buffers.loss.clone()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for name, value in before.items():
        buffers.params[name].copy_(value)
    buffers.loss.copy_(loss)
    return graph.replay
