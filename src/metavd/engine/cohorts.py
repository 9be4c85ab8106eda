"""Rounds within one process: who is asked is drawn, and a schedule trains them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .. import tree, wire
from ..core.owned import fetched
from ..core.types import Algorithm, ServerState, Update
from ..data.cohort import Pool, arriving, choose, sizes_of, tossed
from ..ops.device import over
from ..tree import Params
from .attacks import Attack, deceived, falsified
from .rounds import TRAFFIC, Account, Returned, Transport
from .schedule import Schedule
from .turn import Moment, moment, veiled


def in_process(
    algorithm: Algorithm,
    pool: Pool,
    schedule: Schedule,
    *,
    cohort: int,
    part: int = 0,
    available: Tensor | None = None,
    lost: Tensor | None = None,
    attack: Attack | None = None,
    liars: np.ndarray | None = None,
) -> Transport:
    """Return the rounds of simulated clients, `cohort` of them in each, or about as many where the method tosses.

    A larger cohort than `part` is trained in parts of so many, whose answers the server adds up, where it can and no
    attack looks at all of them; 0: never. `available` and `lost` (N,) are the clients' probabilities of being there and
    of failing to answer; `liars` (N,) says who carries out the attack.
    """
    if attack is not None and liars is not None:
        pool = deceived(attack, pool, liars)

    def collect(state: ServerState, now: Moment) -> Returned:
        asked = called(
            algorithm, now.key, now.done, num_clients=pool.federation.num_clients, cohort=cohort, available=available
        )
        here = arriving(now.key, now.done, asked, lost)
        gone = sorted(set(asked.tolist()) - set(here.tolist()))
        if attack is None and algorithm.server.take is not None and 0 < part < len(here):
            return added_up(algorithm, pool, schedule, state, here, part=part, lost=gone)
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


def round_of(
    algorithm: Algorithm, pool: Pool, schedule: Schedule, state: ServerState, cohort: Tensor, *, lost: list[int]
) -> Returned:
    """Send, train, take the answers of a cohort (client ids, ascending).

    Clients that are lost have received their share and cost traffic; their training, of which nobody hears, is not
    computed.
    """
    device = pool.x.device
    shown, away = fetched(state, torch.tensor(lost, dtype=torch.int64))
    wasted = [wire.traffic(algorithm.emit.apply(shown.params, one, state.round)) for one in over(away, device)]
    down, dense = sum(each.down for each in wasted), sum(each.dense for each in wasted)
    if not len(cohort):
        update, losses = (None, None) if algorithm.privacy is None else unanswered(state)
        return Returned([], lost, update, losses, lambda: Account(down, 0, dense, 0))
    sent, adapted, kept, losses = schedule.train(algorithm, pool, state, cohort)
    if algorithm.veil is not None:
        # One by one, as sites do it.
        now = moment(state)
        adapted = tree.stack(
            [
                veiled(algorithm, tree.unstack(sent, i), tree.unstack(adapted, i), now, client)
                for i, client in enumerate(cohort.tolist())
            ]
        )
    weight = over(torch.from_numpy(sizes_of(pool, cohort.tolist())), device).to(pool.dtype)

    counted = wire.together(adapted)

    def account() -> Account:
        traffic = counted()
        return Account(down + traffic.down, traffic.up, dense + traffic.dense, traffic.dense)

    return Returned(cohort.tolist(), lost, Update(over(cohort, device), adapted, weight, sent), losses, account, kept)


def added_up(
    algorithm: Algorithm, pool: Pool, schedule: Schedule, state: ServerState, cohort: Tensor, *, part: int,
    lost: list[int],
) -> Returned:  # fmt: skip
    """Do as `round_of`, with the answers of one part of the cohort in memory at a time.

    Parts are cut from the cohort in the order of its clients and added in that order, whoever trains them: the bits
    depend on `part`, and on nothing else of the machine.
    """
    take, device = algorithm.server.take, pool.x.device
    assert take is not None
    shown, here = fetched(state, cohort)
    places = over(here, device)
    weight = over(torch.from_numpy(sizes_of(pool, cohort.tolist())), device).to(pool.dtype)

    def one(first: int) -> tuple[Params, Returned]:
        """Return a part's sums, and what is left of its answers when they are added up."""
        some = slice(first, first + part)
        found = round_of(algorithm, pool, schedule, state, cohort[some], lost=[] if first else lost)
        assert found.update is not None
        assert found.losses is not None
        sums = take(shown, found.update._replace(client=places[some]), weight)
        sizes = [value.reshape(len(value), -1).abs().sum(1) for value in found.update.params.values()]
        return sums, found._replace(update=None, sizes=sum(sizes, torch.zeros_like(found.losses)))

    whole: Params = {}
    parts: list[Returned] = []
    for first in range(0, len(cohort), part):
        sums, made = one(first)
        whole = tree.map(torch.add, whole, sums) if whole else sums
        parts.append(made)

    def account() -> Account:
        costs = [made.account() for made in parts]
        return Account(*(sum(getattr(each, name) for each in costs) for name in TRAFFIC))

    kept = tree.concatenated([made.kept for made in parts])
    losses, sizes = (torch.cat([getattr(made, name) for made in parts]) for name in ("losses", "sizes"))
    update = Update(over(cohort, device), {}, weight, {}, sums=whole)
    return Returned(cohort.tolist(), lost, update, losses, account, kept, sizes)
