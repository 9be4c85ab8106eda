"""All clients of a cohort at once under vmap, with no copy of their weights that a step does not make itself.

Training goes step by step: clients who are done are put aside, so that nobody computes padding. Where batches cannot
be tabled, and for evaluation, whole functions of one client run together, padded to the largest.

Shape letters: C clients of the cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.func import vmap as mapped

from ... import tree
from ...compat import flatten, unflatten
from ...core.owned import fetched
from ...core.types import Algorithm, Batch, Job, ServerState
from ...data.cohort import Pool, pad
from ...ops.device import over
from ...tree import Params
from ..kept import held
from ..turn import moment, split, train_batches, train_turn
from . import Function, Map, Schedule, Train, Trained
from .table import StepTable, batches_of, ordered, part_of, rejoined, table, tabled

MOST = 256
"""Clients whose whole turns run at once, where nothing else is said and the memory holds them."""
Item = TypeVar("Item")


def vmap(chunk: int = 0) -> Schedule:
    """Return the schedule that trains up to `chunk` clients at once; 0: the whole cohort."""
    return Schedule("vmap", together(chunk), all_at_once(chunk))


def emitted(algorithm: Algorithm, state: ServerState, cohort: Tensor) -> Params:
    """Return what a cohort receives, (C, ...), its numbers on the host; what all share is one tensor, expanded."""
    shown, places = fetched(state, cohort)
    here = over(places, state.key.device)
    sent: Params = mapped(algorithm.emit.apply, (None, 0, None))(shown.params, here, state.round)
    return sent


# --- whole functions -------------------------------------------------------------------------------------------------


def all_at_once(chunk: int = 0) -> Map:
    """Run up to `chunk` clients at once, padded to the largest of them; fewer where memory is short."""

    def run(function: Function, jobs: Iterable[Job]) -> Iterator[Any]:
        return _in_parts(jobs, chunk or MOST, lambda group: list(_stacked(function, group)))

    return run


def _in_parts(items: Iterable[Item], chunk: int, call: Callable[[list[Item]], list[Any]]) -> Iterator[Any]:
    """Yield what a function makes of parts of a row; a part that does not fit the memory is halved."""
    queue, size = iter(items), chunk
    while group := list(islice(queue, size)):
        try:
            answers = call(group)
        except torch.cuda.OutOfMemoryError:
            if len(group) == 1:
                raise
            torch.cuda.empty_cache()
            queue, size = chain(group, queue), (len(group) + 1) // 2
            continue
        yield from answers


def _padded(group: Sequence[Sequence[Batch]]) -> list[Batch]:
    blank = next((batch for batches in group for batch in batches), None)
    return pad(group, blank) if blank is not None else []


def _stacked(function: Function, group: Sequence[Job]) -> Iterator[Any]:
    batches = _padded([job.batches for job in group])
    most = max(len(job.rows) for job in group)
    rows = torch.stack([torch.cat([job.rows, job.rows.new_zeros(most - len(job.rows), *job.rows.shape[1:])])
                        for job in group])  # fmt: skip
    clients = torch.stack([job.client for job in group])
    keys = torch.stack([job.key for job in group])
    kept = tree.stack([job.kept for job in group])
    out = mapped(function, randomness="error")(clients, batches, rows, keys, kept)
    leaves, shape = flatten(out)
    for i in range(len(group)):
        yield unflatten([leaf[i] for leaf in leaves], shape)


def whole_turns(chunk: int = 0) -> Train:
    """Return the training of clients whose batches cannot be tabled: their whole turns run together, padded."""

    def train(algorithm: Algorithm, pool: Pool, state: ServerState, cohort: Tensor) -> Trained:
        sent, now = emitted(algorithm, state, cohort), moment(state)
        kept = held(algorithm, state, cohort.tolist())
        drawn = (
            (place, train_batches(algorithm, pool, client, now, client)) for place, client in enumerate(cohort.tolist())
        )

        def part(group: list[tuple[int, list[Batch]]]) -> list[tuple[Params, Params, Tensor]]:
            first = group[0][0]
            these = slice(first, first + len(group))
            axes = {name: None if value.stride(0) == 0 else 0 for name, value in sent.items()}
            own = {name: value[0 if axes[name] is None else these] for name, value in sent.items()}
            turn = mapped(partial(train_turn, algorithm), (axes, 0, 0), randomness="error")
            return [turn(own, tree.unstack(kept, these), _padded([batches for _, batches in group]))]

        parts = list(_in_parts(drawn, chunk or MOST, part))
        adapted, own = (tree.concatenated([each[i] for each in parts]) for i in (0, 1))
        return Trained(sent, adapted, own, torch.cat([loss for _, _, loss in parts]))

    return train


# --- step by step ----------------------------------------------------------------------------------------------------


def together(chunk: int = 0) -> Train:
    """Return the training of up to `chunk` clients at once, step by step; 0: the whole cohort."""
    otherwise = whole_turns(chunk)

    def train(algorithm: Algorithm, pool: Pool, state: ServerState, cohort: Tensor) -> Trained:
        if not tabled(algorithm.train_batches):
            return otherwise(algorithm, pool, state, cohort)
        sent = emitted(algorithm, state, cohort)
        drawn = table(pool, algorithm.train_batches, algorithm.local.group, state, cohort)
        kept = held(algorithm, state, cohort.tolist())
        received = ordered(sent | kept, drawn.order)
        parts: list[tuple[Params, Tensor]] = []
        for first in range(0, len(cohort), chunk or len(cohort)):
            part = slice(first, min(first + (chunk or len(cohort)), len(cohort)))
            parts += _train(algorithm, pool, tree.unstack(received, part), part_of(drawn, part), state.round)
        ended, losses = rejoined(parts, drawn.order)
        return Trained(sent, *split(ended, kept), losses)

    return train


def _train(
    algorithm: Algorithm, pool: Pool, received: Params, drawn: StepTable, round: Tensor
) -> list[tuple[Params, Tensor]]:
    """Train a part of a cohort; return what clients end with and their mean losses, in the part's order."""
    local, steps, number = algorithm.local, drawn.steps, torch.tensor(0)
    # The step's number is the same for all; as an argument it would cost vmap a second walk through all others.
    take = mapped(lambda own, batches, start: local.take(own, batches, start, number), randomness="error")
    params = received if local.init is None else mapped(local.init)(received)
    loss = torch.zeros(len(steps), dtype=pool.dtype)
    done: list[tuple[Params, Tensor]] = []
    for step in range(steps[0] + 1):
        active = sum(each > step for each in steps)
        if active < len(loss):
            ended = tree.unstack(params, slice(active, None))
            ended = ended if local.final is None else mapped(local.final)(ended)
            done.append((ended, loss[active:] / max(step, 1)))
            params, received = (tree.unstack(each, slice(active)) for each in (params, received))
            loss = loss[:active]
        if active:
            these = (drawn.rows[step, :active], drawn.mask[step, :active], drawn.keys[step, :active])
            batches = batches_of(pool, algorithm.train_batches, these, round, size=drawn.size, told=drawn.about)
            number = torch.tensor(step)
            params, taken = take(params, batches, received)
            loss = loss + taken
    return done[::-1]  # who took most steps comes first, and was put aside last
