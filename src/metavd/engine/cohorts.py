"""Rounds within one process: who is asked is drawn, and a schedule trains them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import tree, wire
from ..core.local import FIXED
from ..core.owned import fetched
from ..core.types import Algorithm, ServerState, Update
from ..data.cohort import Pool, arriving, choose, over, sizes_of, tossed
from ..tree import Params
from .attacks import Attack, deceived, falsified
from .rounds import Account, Answers, Record, Transport
from .rounds import rounds as every
from .schedule import Schedule
from .turn import VEIL, Moment, moment


def in_process(
    algorithm: Algorithm,
    pool: Pool,
    schedule: Schedule,
    *,
    cohort: int,
    available: Tensor | None = None,
    lost: Tensor | None = None,
    attack: Attack | None = None,
    liars: np.ndarray | None = None,
) -> Transport:
    """Return the rounds of simulated clients, `cohort` of them in each, or about as many where the method tosses.

    `available` and `lost` (N,) are the clients' probabilities of being there and of failing to answer; `liars` (N,)
    says who carries out the attack.
    """
    if attack is not None and liars is not None:
        pool = deceived(attack, pool, liars)

    def collect(state: ServerState, now: Moment) -> Answers:
        asked = called(
            algorithm, now.key, now.done, num_clients=pool.federation.num_clients, cohort=cohort, available=available
        )
        here = arriving(now.key, now.done, asked, lost)
        gone = sorted(set(asked.tolist()) - set(here.tolist()))
        answers = round_of(algorithm, pool, schedule, state, here, lost=gone)
        if attack is None or liars is None or answers.update is None:
            return answers
        return answers._replace(update=falsified(attack, liars, answers.update, answers.cohort, now))

    # A GPU works while the host prepares: the next round is under way before this one is waited for.
    return Transport(collect, ahead=1 if pool.x.is_cuda else 0)


def called(
    algorithm: Algorithm, key: Tensor, done: int, *, num_clients: int, cohort: int, available: Tensor | None = None
) -> Tensor:
    """Return whom a round asks: a cohort of this size, or, where clients are hidden so, each by its own coin."""
    if algorithm.privacy is not None and algorithm.privacy.poisson:
        return tossed(key, done, num_clients, algorithm.privacy.rate, available)
    return choose(key, done, num_clients, cohort, available)


def unanswered(state: ServerState) -> tuple[Update, Tensor]:
    """Return the answers of a round that has none, for a server that must not show it, and their losses."""
    none = state.round.new_zeros(0)
    return Update(none.to(torch.int64), {}, none, {}), none


def simulate(
    algorithm: Algorithm,
    pool: Pool,
    schedule: Schedule,
    state: ServerState,
    *,
    rounds: int,
    cohort: int,
    **chances: Any,
) -> Iterator[tuple[ServerState, Record]]:
    """Go on from a state until so many rounds of simulated clients are finished; see `in_process`."""
    return every(
        algorithm.server.update, in_process(algorithm, pool, schedule, cohort=cohort, **chances), state, rounds
    )


def round_of(
    algorithm: Algorithm, pool: Pool, schedule: Schedule, state: ServerState, cohort: Tensor, *, lost: list[int]
) -> Answers:
    """Send, train, take the answers of a cohort (client ids, ascending).

    Clients that are lost have received their share and cost traffic; their training, of which nobody hears, is not
    computed.
    """
    device = pool.x.device
    shown, away = fetched(state, torch.tensor(lost, dtype=torch.int64, device=device))
    wasted = [wire.traffic(algorithm.emit.apply(shown.params, one, state.round)) for one in away]
    down, dense = sum(each.down for each in wasted), sum(each.dense for each in wasted)
    if not len(cohort):
        update, losses = (None, None) if algorithm.privacy is None else unanswered(state)
        return Answers([], lost, update, losses, lambda: Account(down, 0, dense, 0))
    sent, adapted, kept, losses = schedule.train(algorithm, pool, state, cohort)
    if algorithm.veil is not None:
        # One by one, as sites do it.
        keys = over(moment(state).keys(VEIL, cohort), device)
        each = [tree.unstack(adapted, i) for i in range(len(cohort))]
        adapted = tree.stack([algorithm.veil(tree.unstack(sent, i), one, keys[i]) for i, one in enumerate(each)])
    weight = over(torch.from_numpy(sizes_of(pool, cohort.tolist())), device).to(pool.dtype)

    def account() -> Account:
        traffic = _traffic(adapted, len(cohort))
        all_dense = sum(each.dense for each in traffic)
        return Account(
            down=down + sum(each.down for each in traffic),
            up=sum(each.up for each in traffic),
            dense_down=dense + all_dense,
            dense_up=all_dense,
        )

    return Answers(cohort.tolist(), lost, Update(over(cohort, device), adapted, weight, sent), losses, account, kept)


def _traffic(adapted: Params, count: int) -> list[wire.Traffic]:
    """Return what each of so many clients received and sends; without masks it is the same for all."""
    masks = {name: value.cpu() for name, value in adapted.items() if name.rpartition(".")[2] in FIXED}
    if not masks:
        return [wire.traffic(tree.unstack(adapted, 0))] * count
    return [wire.traffic(tree.unstack(adapted | masks, i)) for i in range(count)]
