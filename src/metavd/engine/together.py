"""A cohort's training under vmap on a CPU: step by step, with no copy of its weights that a step does not make itself.

The steps are those of `stepped`, whose buffers a CUDA graph needs. Here every copy of a cohort's weights would cost as
much as a small network's arithmetic. Clients are sorted by their number of steps; those who are done are put aside.

Shape letters: C clients of the cohort, S steps, G batches a step, B rows a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from ..core.types import Algorithm, ServerState
from ..data.cohort import Pool
from ..tree import Params
from .stepped import Table, Trainer, batches_of, table


def together(chunk: int = 0) -> Trainer:
    """Return a trainer of up to `chunk` clients at once; 0: the whole cohort."""

    def train(algorithm: Algorithm, pool: Pool, state: ServerState, cohort: Tensor) -> tuple[Params, Tensor]:
        local = algorithm.local
        drawn = table(pool, algorithm.train_batches, local.group, state, cohort.tolist())
        ids = cohort[drawn.order]
        parts: list[tuple[Params, Tensor]] = []
        for first in range(0, len(ids), chunk or len(ids)):
            part = slice(first, min(first + (chunk or len(ids)), len(ids)))
            received = vmap(algorithm.emit.apply, (None, 0, None))(state.params, ids[part], state.round)
            parts += _train(algorithm, pool, received, drawn, part, round=state.round)
        adapted = {name: _joined([params[name] for params, _ in parts], drawn.order) for name in parts[0][0]}
        total = _joined([loss for _, loss in parts], drawn.order)
        steps = _joined([torch.tensor(drawn.steps, dtype=pool.dtype)], drawn.order)
        return adapted, total / steps.clamp(min=1.0)

    return train


def _train(
    algorithm: Algorithm, pool: Pool, received: Params, drawn: Table, part: slice, *, round: Tensor
) -> list[tuple[Params, Tensor]]:
    """Train a part of a cohort; return what clients end with and their losses' sums, in that part's order."""
    local = algorithm.local
    steps = drawn.steps[part]
    params, loss = received, torch.zeros(len(steps), dtype=pool.dtype)
    done: list[tuple[Params, Tensor]] = []
    take = vmap(local.take, (0, 0, 0, None), randomness="error")
    for step in range(steps[0] + 1):
        active = sum(each > step for each in steps)
        if active < len(loss):
            done.append(({name: value[active:] for name, value in params.items()}, loss[active:]))
            params, received = ({name: value[:active] for name, value in each.items()} for each in (params, received))
            loss = loss[:active]
        if active:
            now = slice(part.start, part.start + active)
            these = (drawn.rows[step, now], drawn.mask[step, now], drawn.keys[step, now])
            batches = batches_of(pool, algorithm.train_batches, these, round, drawn.size[now])
            params, taken = take(params, batches, received, torch.tensor(step))
            loss = loss + taken
    return done[::-1]  # who took most steps comes first, and was put aside last


def _joined(parts: list[Tensor], order: Tensor) -> Tensor:
    """Put parts of a sorted cohort (C, ...) together in the cohort's order; what is in it already is not copied."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    ordered = bool((order[1:] > order[:-1]).all())
    return whole if ordered else whole[torch.argsort(order)]
