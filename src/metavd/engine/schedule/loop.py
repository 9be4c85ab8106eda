"""One client after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import tree
from ...core.owned import fetched
from ...core.types import Algorithm, Batch, Job, ServerState
from ...data.cohort import Pool
from ...ops.device import over
from ...tree import Params
from ..kept import held
from ..turn import moment, train_batches, train_turn
from . import Function, Map, Schedule, Train, Trained


def one_after_another(function: Function, jobs: Iterable[Job]) -> Iterator[Any]:
    """Run one client after another; memory is one client's."""
    for job in jobs:
        yield function(*job)


def turns(run: Map) -> Train:
    """Return the training that runs every client's whole turn as one function."""

    def train(algorithm: Algorithm, pool: Pool, state: ServerState, cohort: Tensor) -> Trained:
        ids, now = cohort.tolist(), moment(state)
        kept = held(algorithm, state, ids)
        shown, places = fetched(state, over(cohort, pool.x.device))
        sent = [algorithm.emit.apply(shown.params, place, state.round) for place in places]

        def jobs() -> Iterator[Job]:
            for place, client in enumerate(ids):
                own = train_batches(algorithm, pool, client, now, client)
                yield Job(torch.tensor(place), own, pool.x[:0], now.key, tree.unstack(kept, place))

        def turn(
            place: Tensor, batches: Sequence[Batch], rows: Tensor, key: Tensor, kept: Params  # noqa: ARG001
        ) -> tuple[Params, Params, Tensor]:  # fmt: skip
            return train_turn(algorithm, sent[int(place)], kept, batches)

        answers = list(run(turn, jobs()))
        losses = torch.stack([loss for _, _, loss in answers])
        parts, own = [dict(params) for params, _, _ in answers], [dict(kept) for _, kept, _ in answers]
        del answers  # or else the weights would stay where `gather` takes them from
        return Trained(tree.gather(sent), tree.gather(parts), tree.gather(own), losses)

    return train


loop = Schedule("loop", turns(one_after_another), one_after_another)
