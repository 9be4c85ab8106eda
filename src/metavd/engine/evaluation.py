"""Every client's own model, and what it answers, for all clients.

Evaluation draws from keys of its own, so it never changes training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from .. import tree
from ..core.owned import shown_to
from ..core.types import Algorithm, Answer, Batch, Job, ServerState
from ..data.cohort import PERSONAL, Pool, lots
from ..evaluate.metrics import ClientResult
from ..tree import Params
from . import turn
from .kept import held, newcomers
from .schedule import Map

_AT_ONCE = 256
"""Clients whose private state is read at once."""


def _jobs(
    algorithm: Algorithm, pool: Pool, state: ServerState, clients: Sequence[int], places: Tensor, *, split: str,
    new: bool,
) -> Iterator[Job]:  # fmt: skip
    device, now = pool.x.device, turn.moment(state)
    ids = torch.tensor(clients, dtype=torch.int64)
    # All clients' keys at once: one by one they would cost more than a small client's forward pass.
    drawn = lots(pool, clients, turn.personal_sampling(algorithm, new=new), now.keys(PERSONAL, ids), state.round)
    keys = turn.answer_key(now, ids).to(device)
    kept = _kept(algorithm, state, clients)
    for client, place, own, key, private in zip(clients, places, drawn, keys, kept, strict=True):
        rows = torch.from_numpy(getattr(pool.federation, split)[client]).to(device)
        yield Job(place, own, pool.inputs(rows), key, private)


def _kept(algorithm: Algorithm, state: ServerState, clients: Sequence[int]) -> Iterator[Params]:
    """Yield what one client after another keeps, read for many at once."""
    for first in range(0, len(clients), _AT_ONCE):
        some = clients[first : first + _AT_ONCE]
        rows = held(algorithm, state, some)
        yield from (tree.unstack(rows, place) for place in range(len(some)))


def masks_of(params: Params) -> Params:
    """Return the masks among a client's parameters."""
    return tree.select(params, lambda name: name.endswith(".mask"))


def answers(
    algorithm: Algorithm, pool: Pool, state: ServerState, clients: Sequence[int], run: Map, *, split: str = "test"
) -> Iterator[tuple[ClientResult, Params]]:
    """Personalise each client and answer its test (or validation) rows; also return the client's masks."""
    new = newcomers(algorithm, state, clients)
    if len(set(new)) < 2:
        yield from _alike(algorithm, pool, state, clients, run, split=split, new=any(new))
        return
    # Clients that have kept nothing yet have a stage and batches of their own.
    found: dict[int, tuple[ClientResult, Params]] = {}
    for kind in (False, True):
        some = [client for client, flag in zip(clients, new, strict=True) if flag is kind]
        # One kind to its end before the other: two that take turns would leave torch without gradients.
        found |= zip(some, _alike(algorithm, pool, state, some, run, split=split, new=kind), strict=True)
    yield from (found[client] for client in clients)


def _alike(
    algorithm: Algorithm, pool: Pool, state: ServerState, clients: Sequence[int], run: Map, *, split: str, new: bool
) -> Iterator[tuple[ClientResult, Params]]:
    """Personalise and test clients that all have kept something, or, `new`, that all have not."""
    unseen = bool(clients) and clients[0] >= pool.federation.num_clients
    source = pool.federation.source
    shown, places = shown_to(state, torch.tensor(clients, dtype=torch.int64, device=pool.x.device), unseen=unseen)

    def client(
        client: Tensor, batches: Sequence[Batch], rows: Tensor, key: Tensor, kept: Params
    ) -> tuple[Answer, Params]:
        received = turn.received_for_test(algorithm, shown.params, state.round, client, batches, unseen=unseen)
        if not len(rows):
            own = turn.own_model(algorithm, received, kept, batches, new=new)
            return Answer(torch.zeros(0, source.num_classes, dtype=pool.dtype, device=rows.device), {}), masks_of(own)
        answer, own = turn.test_turn(algorithm, received, kept, batches, rows=rows, key=key, new=new)
        return answer, masks_of(own)

    with torch.no_grad():
        results = run(client, _jobs(algorithm, pool, state, clients, places, split=split, new=new))
        for number, (answer, masks) in zip(clients, results, strict=True):
            rows, train = getattr(pool.federation, split)[number], pool.federation.train[number]
            probs = turn.checked(answer, len(rows), f"round {int(state.round)}: client {number}")
            # A client without rows may stand beside others in a vmap, which then answers padding for it.
            drawn = answer.drawn if len(rows) else {}
            yield (
                ClientResult(
                    client=number,
                    train_size=len(train),
                    probs=probs,
                    y=source.y[rows],
                    known=np.bincount(source.y[train], minlength=source.num_classes) > 0,
                    information=drawn["information"][: len(rows)].cpu().numpy() if drawn else None,
                ),
                masks,
            )
