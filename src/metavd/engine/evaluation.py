"""Every client's own model, and what it answers, for all clients.

Evaluation draws from keys of its own, so it never changes training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ..core.types import Algorithm, Answer, Batch, Job, ServerState
from ..data.cohort import PERSONAL, Pool, lots
from ..evaluate.metrics import ClientResult
from ..tree import Params
from . import turn
from .schedule import Map


def _jobs(algorithm: Algorithm, pool: Pool, state: ServerState, clients: Sequence[int], split: str) -> Iterator[Job]:
    device, now = pool.x.device, turn.moment(state)
    ids = torch.tensor(clients, dtype=torch.int64)
    # All clients' keys at once: one by one they would cost more than a small client's forward pass.
    drawn = lots(pool, clients, algorithm.personal_batches, now.keys(PERSONAL, ids), state.round)
    keys = turn.answer_key(now, ids).to(device)
    for client, own, key in zip(clients, drawn, keys, strict=True):
        rows = torch.from_numpy(getattr(pool.federation, split)[client]).to(device)
        yield Job(torch.tensor(client, device=device), own, pool.inputs(rows), key)


def masks_of(params: Params) -> Params:
    """Return the masks among a client's parameters."""
    return {name: value for name, value in params.items() if name.endswith(".mask")}


def answers(
    algorithm: Algorithm, pool: Pool, state: ServerState, clients: Sequence[int], run: Map, *, split: str = "test"
) -> Iterator[tuple[ClientResult, Params]]:
    """Personalise each client and answer its test (or validation) rows; also return the client's masks."""
    unseen = bool(clients) and clients[0] >= pool.federation.num_clients
    source = pool.federation.source

    def client(client: Tensor, batches: Sequence[Batch], rows: Tensor, key: Tensor) -> tuple[Answer, Params]:
        received = turn.received_for_test(algorithm, state.params, state.round, client, batches, unseen=unseen)
        if not len(rows):
            own = turn.own_model(algorithm, received, batches)
            return Answer(rows.new_zeros(0, source.num_classes), {}), masks_of(own)
        answer, own = turn.test_turn(algorithm, received, batches, rows, key)
        return answer, masks_of(own)

    with torch.no_grad():
        results = run(client, _jobs(algorithm, pool, state, clients, split))
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
