"""One round, and a run of rounds as a generator of records.

Shape letters: C clients of the cohort.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import tree, wire
from ..core import rng
from ..core.types import Algorithm, Batch, Job, NonFiniteError, ServerState, Update
from ..data.cohort import TRAIN, Pool, arriving, batches, choose
from ..tree import Params
from .backend import Backend
from .stepped import Trainer


class Record(NamedTuple):
    """What is known of a round once it is over."""

    round: int
    """Counted from 1."""
    cohort: list[int]
    """The clients whose answers arrived."""
    lost: list[int]
    """Those that were asked and did not answer."""
    loss: float | None
    """Mean training loss over the cohort's steps, weighted by data size; None of a round without an answer."""
    down: int
    """Bytes that the cohort received, and, below, sent; and what they would be without masks."""
    up: int
    dense_down: int
    dense_up: int


def _jobs(algorithm: Algorithm, pool: Pool, state: ServerState, cohort: Tensor) -> Iterator[Job]:
    for client in cohort.tolist():
        key = rng.fold(state.key.cpu(), TRAIN, int(state.round), client)
        own = batches(pool, client, algorithm.train_batches, key, state.round)
        yield Job(_id(pool, client), own, pool.x[:0], key.to(pool.x.device))


def _id(pool: Pool, client: int) -> Tensor:
    return torch.tensor(client, device=pool.x.device)


def mapped(backend: Backend) -> Trainer:
    """Return the trainer that lets a backend run every client's whole training as one function."""

    def train(algorithm: Algorithm, pool: Pool, state: ServerState, cohort: Tensor) -> tuple[Params, Tensor]:
        def client(client: Tensor, batches: Sequence[Batch], rows: Tensor, key: Tensor) -> tuple[Params, Tensor]:  # noqa: ARG001
            return algorithm.local(algorithm.emit.apply(state.params, client, state.round), batches)

        answers = list(backend(client, _jobs(algorithm, pool, state, cohort)))
        losses = torch.stack([loss for _, loss in answers])
        parts = [dict(params) for params, _ in answers]
        del answers  # or else the weights would stay where `gather` takes them from
        return tree.gather(parts), losses

    return train


def train_round(
    algorithm: Algorithm,
    pool: Pool,
    state: ServerState,
    cohort: Tensor,
    backend: Backend,
    *,
    trainer: Trainer | None = None,
    lost: Sequence[int] = (),
) -> tuple[ServerState, Record]:
    """Send, train, take the answers: one round of a cohort (client ids, ascending).

    Clients that are lost have received their share and cost traffic; their training, of which nobody hears, is not
    computed. A round without a single answer leaves the server's parameters as they are. A `trainer` takes the place
    of the backend.
    """
    round = int(state.round) + 1
    wasted = [wire.traffic(algorithm.emit.apply(state.params, _id(pool, one), state.round)) for one in lost]
    down, dense = sum(each.down for each in wasted), sum(each.dense for each in wasted)
    if not len(cohort):
        return state._replace(round=state.round + 1), Record(round, [], list(lost), None, down, 0, dense, 0)
    adapted, losses = (trainer or mapped(backend))(algorithm, pool, state, cohort)
    _check(adapted | {"loss": losses}, round, cohort)
    sizes = [len(pool.federation.train[client]) for client in cohort.tolist()]
    weight = torch.tensor(sizes, dtype=pool.dtype, device=pool.x.device)
    traffic = [wire.traffic(tree.unstack(adapted, i)) for i in range(len(cohort))]
    new = algorithm.server.update(state, Update(cohort.to(pool.x.device), adapted, weight))
    _check(new.params, round, None)
    record = Record(
        round=round,
        cohort=cohort.tolist(),
        lost=list(lost),
        loss=float((losses * weight).sum() / weight.sum()),
        down=down + sum(each.down for each in traffic),
        up=sum(each.up for each in traffic),
        dense_down=dense + sum(each.dense for each in traffic),
        dense_up=sum(each.dense for each in traffic),
    )
    return new, record


def _check(params: Params, round: int, cohort: Tensor | None) -> None:
    """Stop at the first tensor that is not finite, and say whose it is."""
    # One question to the device for all tensors; only a bad answer is worth asking again.
    if torch.stack([torch.isfinite(value).all() for value in params.values()]).all():
        return
    for name, value in params.items():
        if torch.isfinite(value).all():
            continue
        who = "the server's update"
        if cohort is not None:
            bad = ~torch.isfinite(value).reshape(len(cohort), -1).all(1)
            who = f"client {cohort[int(bad.nonzero()[0])].item()}"
        raise NonFiniteError(f"round {round}: {who} made {name} NaN or infinite; a smaller lr or clip may help")


def simulate(
    algorithm: Algorithm,
    pool: Pool,
    state: ServerState,
    *,
    rounds: int,
    cohort: int,
    backend: Backend,
    trainer: Trainer | None = None,
    available: Tensor | None = None,
    lost: Tensor | None = None,
) -> Iterator[tuple[ServerState, Record]]:
    """Go on from a state until `rounds` rounds are finished, yielding the state and the record after each.

    `available` and `lost` (N,) are the clients' probabilities of being there and of failing to answer.
    """
    for done in range(int(state.round), rounds):
        asked = choose(state.key, done, pool.federation.num_clients, cohort, available)
        here = arriving(state.key, done, asked, lost)
        gone = sorted(set(asked.tolist()) - set(here.tolist()))
        with torch.no_grad():
            state, record = train_round(algorithm, pool, state, here, backend, trainer=trainer, lost=gone)
        yield state, record
