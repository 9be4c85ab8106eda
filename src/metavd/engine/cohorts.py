"""Rounds within one process: who is asked is drawn, and a schedule trains them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import tree, wire
from ..core.local import FIXED
from ..core.types import Algorithm, ServerState, Update
from ..data.cohort import Pool, arriving, choose, over, sizes_of
from ..tree import Params
from .rounds import Account, Answers, Record, Transport
from .rounds import rounds as every
from .schedule import Schedule
from .turn import Moment


def in_process(
    algorithm: Algorithm,
    pool: Pool,
    schedule: Schedule,
    *,
    cohort: int,
    available: Tensor | None = None,
    lost: Tensor | None = None,
) -> Transport:
    """Return the rounds of simulated clients, `cohort` of them in each.

    `available` and `lost` (N,) are the clients' probabilities of being there and of failing to answer.
    """

    def collect(state: ServerState, now: Moment) -> Answers:
        asked = choose(now.key, now.done, pool.federation.num_clients, cohort, available)
        here = arriving(now.key, now.done, asked, lost)
        gone = sorted(set(asked.tolist()) - set(here.tolist()))
        return round_of(algorithm, pool, schedule, state, here, lost=gone)

    # A GPU works while the host prepares: the next round is under way before this one is waited for.
    return Transport(collect, ahead=1 if pool.x.is_cuda else 0)


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
    wasted = [wire.traffic(algorithm.emit.apply(state.params, torch.tensor(one, device=device), state.round))
              for one in lost]  # fmt: skip
    down, dense = sum(each.down for each in wasted), sum(each.dense for each in wasted)
    if not len(cohort):
        return Answers([], lost, None, None, lambda: Account(down, 0, dense, 0))
    sent, adapted, losses = schedule.train(algorithm, pool, state, cohort)
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

    return Answers(cohort.tolist(), lost, Update(over(cohort, device), adapted, weight, sent), losses, account)


def _traffic(adapted: Params, count: int) -> list[wire.Traffic]:
    """Return what each of so many clients received and sends; without masks it is the same for all."""
    masks = {name: value.cpu() for name, value in adapted.items() if name.rpartition(".")[2] in FIXED}
    if not masks:
        return [wire.traffic(tree.unstack(adapted, 0))] * count
    return [wire.traffic(tree.unstack(adapted | masks, i)) for i in range(count)]
