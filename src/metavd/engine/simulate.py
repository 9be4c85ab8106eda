"""One round, and a run of rounds as a generator of records.

Shape letters: C clients of the cohort.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import tree, wire
from ..compat import absolute_sums
from ..core import rng
from ..core.local import FIXED
from ..core.types import Algorithm, Batch, Job, NonFiniteError, ServerState, Update
from ..data.cohort import TRAIN, Pool, arriving, batches, choose, over, sizes_of
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
    train = trainer or mapped(backend)
    new, finish = _begin(algorithm, pool, state, cohort, train, lost=lost, done=int(state.round))
    return new, finish()


def _begin(
    algorithm: Algorithm,
    pool: Pool,
    state: ServerState,
    cohort: Tensor,
    trainer: Trainer,
    *,
    lost: Sequence[int],
    done: int,
) -> tuple[ServerState, Callable[[], Record]]:
    """Set a round after `done` others going; return the state that it ends in and what waits for that and checks it."""
    wasted = [wire.traffic(algorithm.emit.apply(state.params, _id(pool, one), state.round)) for one in lost]
    down, dense = sum(each.down for each in wasted), sum(each.dense for each in wasted)
    if not len(cohort):
        record = Record(done + 1, [], list(lost), None, down, 0, dense, 0)
        return state._replace(round=state.round + 1), lambda: record
    adapted, losses = trainer(algorithm, pool, state, cohort)
    weight = over(torch.from_numpy(sizes_of(pool, cohort.tolist())), pool.x.device).to(pool.dtype)
    new = algorithm.server.update(state, Update(over(cohort, pool.x.device), adapted, weight))
    answered = adapted | {"loss": losses}
    loss = (losses * weight).sum() / weight.sum()
    told = _fetch(torch.stack([loss, *_sizes([*answered.values(), *new.params.values()])]))

    def finish() -> Record:
        mean, *sizes = told()
        if not all(map(math.isfinite, sizes)):
            check_finite(answered, done + 1, cohort)
            check_finite(new.params, done + 1, None)
        traffic = _traffic(adapted, len(cohort))
        return Record(
            round=done + 1,
            cohort=cohort.tolist(),
            lost=list(lost),
            loss=mean,
            down=down + sum(each.down for each in traffic),
            up=sum(each.up for each in traffic),
            dense_down=dense + sum(each.dense for each in traffic),
            dense_up=sum(each.dense for each in traffic),
        )

    return new, finish


def _traffic(adapted: Params, count: int) -> list[wire.Traffic]:
    """Return what each of so many clients received and sends; without masks it is the same for all."""
    masks = {name: value.cpu() for name, value in adapted.items() if name.rpartition(".")[2] in FIXED}
    if not masks:
        return [wire.traffic(tree.unstack(adapted, 0))] * count
    return [wire.traffic(tree.unstack(adapted | masks, i)) for i in range(count)]


def _sizes(values: list[Tensor]) -> list[Tensor]:
    """Return each tensor's sum of magnitudes: quick, and not finite where a summand is not; it may overflow."""
    return [size.to(values[0].dtype) for size in absolute_sums(values)]


def _fetch(values: Tensor) -> Callable[[], list[float]]:
    """Send numbers (n,) to the host; return what waits for them, and not for anything that the device does later."""
    if not values.is_cuda:
        return values.tolist
    here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()

    def wait() -> list[float]:
        arrived.synchronize()
        return here.tolist()

    return wait


def _finite(values: Iterable[Tensor]) -> bool:
    """Ask the device once for all tensors."""
    every = list(values)
    if torch.isfinite(torch.stack(_sizes(every))).all():
        return True
    return all(bool(torch.isfinite(value).all()) for value in every)


def check_finite(params: Params, round: int, cohort: Tensor | None) -> None:
    """Stop at the first tensor that is not finite, and say whose it is."""
    if _finite(params.values()):
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
    key, trainer = state.key.cpu(), trainer or mapped(backend)
    waiting: list[tuple[ServerState, Callable[[], Record]]] = []
    # A GPU works while the host prepares: the next round is under way before this one is waited for and yielded.
    ahead = 1 if pool.x.is_cuda else 0
    for done in range(int(state.round), rounds):
        asked = choose(key, done, pool.federation.num_clients, cohort, available)
        here = arriving(key, done, asked, lost)
        gone = sorted(set(asked.tolist()) - set(here.tolist()))
        with torch.no_grad():
            begun = _begin(algorithm, pool, state, here, trainer, lost=gone, done=done)
            waiting.append(begun)
            state = begun[0]
            finished = [(new, finish()) for new, finish in waiting[: len(waiting) - ahead]]
        del waiting[: len(waiting) - ahead]
        yield from finished
    for new, finish in waiting:
        yield new, finish()
