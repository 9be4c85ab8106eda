"""Every client's own model, and what it answers: serve -> personalise -> predict, for all clients.

Evaluation draws from keys of its own, so it never changes training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ..core import rng
from ..core.emit import OWNED
from ..core.types import Algorithm, Answer, Batch, Job, NonFiniteError, ServerState
from ..data.cohort import PERSONAL, TEST, Pool, lots
from ..tree import Params
from .metrics import ClientResult

ROWS = 256
"""Test rows answered at once: bounds memory, and fixes which draws a row gets."""


Run = Callable[..., Iterator[tuple[Answer, Params]]]


def _jobs(algorithm: Algorithm, pool: Pool, state: ServerState, clients: Sequence[int], split: str) -> Iterator[Job]:
    device = pool.x.device
    ids = torch.tensor(clients, dtype=torch.int64)
    # All clients' keys at once: one by one they would cost more than a small client's forward pass.
    personal_keys, answer_keys = (rng.fold(state.key.cpu(), tag, int(state.round), ids) for tag in (PERSONAL, TEST))
    drawn = lots(pool, clients, algorithm.personal_batches, personal_keys, state.round)
    for client, own, answer_key in zip(clients, drawn, answer_keys.to(device), strict=True):
        rows = torch.from_numpy(getattr(pool.federation, split)[client]).to(device)
        yield Job(torch.tensor(client, device=device), own, pool.inputs(rows), answer_key)


def personal(algorithm: Algorithm, state: ServerState, *, unseen: bool) -> Callable[[Tensor, Sequence[Batch]], Params]:
    """Return the function that gives a client its own model, for known or for unseen clients."""

    def own(client: Tensor, batches: Sequence[Batch]) -> Params:
        if unseen:
            received = algorithm.admit(state.params, state.round, batches)
        else:
            received = algorithm.serve(state.params, client, state.round)
        return algorithm.personalize(received, batches)[0]

    return own


def respond(algorithm: Algorithm, own: Params, rows: Tensor, key: Tensor) -> Answer:
    """Answer one row or more with a client's own model."""
    parts = [algorithm.predict(own, part, rng.fold(key, i)) for i, part in enumerate(torch.split(rows, ROWS))]
    drawn = {name: torch.cat([part.drawn[name] for part in parts]) for name in parts[0].drawn}
    return Answer(torch.cat([part.probs for part in parts]), drawn)


def masks_of(params: Params) -> Params:
    """Return the masks among a client's parameters."""
    return {name: value for name, value in params.items() if name.endswith(".mask")}


def answers(
    algorithm: Algorithm, pool: Pool, state: ServerState, clients: Sequence[int], run: Run, *, split: str = "test"
) -> Iterator[tuple[ClientResult, Params]]:
    """Personalise each client and answer its test (or validation) rows; also return the client's masks."""
    unseen = bool(clients) and clients[0] >= pool.federation.num_clients
    make = personal(algorithm, state, unseen=unseen)
    source = pool.federation.source

    def client(client: Tensor, batches: Sequence[Batch], rows: Tensor, key: Tensor) -> tuple[Answer, Params]:
        own = make(client, batches)
        if not len(rows):
            return Answer(rows.new_zeros(0, source.num_classes), {}), masks_of(own)
        return respond(algorithm, own, rows, key), masks_of(own)

    with torch.no_grad():
        results = run(client, _jobs(algorithm, pool, state, clients, split))
        for number, (answer, masks) in zip(clients, results, strict=True):
            rows = getattr(pool.federation, split)[number]
            train = pool.federation.train[number]
            probs = answer.probs[: len(rows)].double().cpu().numpy()
            if not np.isfinite(probs).all():
                raise NonFiniteError(
                    f"round {int(state.round)}: client {number} answers with probabilities that are NaN"
                )
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


def _stored(state: ServerState, received: Params, entry: str, client: int) -> Tensor:
    """Return a spread as the server stores it, before any clamp; a hypernetwork's is what it sends."""
    if OWNED + entry in state.params:
        return state.params[OWNED + entry][client]
    return state.params.get(entry, received[entry])


def diagnose(algorithm: Algorithm, state: ServerState, num_clients: int, limit: int = 256) -> dict[str, float] | None:
    """Return what the dropout rates of participating clients look like; None where the method has none.

    rate_mean, rate_sd: over weights and clients. rate_above_0.9: share of rates above 0.9. no_gradient: share of
    spreads that a push towards more noise cannot move. between_clients: root mean square, over weights, of the
    standard deviation between clients.
    """
    noise = algorithm.noise
    if noise is None:
        return None
    device = state.round.device
    ids = torch.linspace(0, num_clients - 1, min(num_clients, limit)).round().long()
    count = len(ids)
    sums: dict[str, Tensor] = {}
    total = square = above = stuck = 0.0
    weights = spreads = 0
    with torch.no_grad():
        for client in ids:
            received = algorithm.emit.apply(state.params, client.to(device), state.round)
            for layer, rate in noise.rates(received).items():
                value = rate.double()
                total += float(value.sum())
                square += float(value.square().sum())
                above += float((value > 0.9).sum())
                weights += value.numel()
                for name in noise.entries(layer, tuple(received[f"{layer}.weight"].shape)):
                    stored = _stored(state, received, name, int(client))
                    stuck += float(noise.stuck(name, stored).sum())
                    spreads += stored.numel()
                sums[layer] = sums.get(layer, 0) + value
                sums[f"{layer}^2"] = sums.get(f"{layer}^2", 0) + value.square()
    spread = torch.cat(
        [(sums[f"{layer}^2"] / count - (sums[layer] / count).square()).clamp(min=0).flatten() for layer in noise.layers]
    )
    mean = total / weights
    return {
        "rate_mean": mean,
        "rate_sd": float(np.sqrt(max(square / weights - mean * mean, 0.0))),
        "rate_above_0.9": above / weights,
        "no_gradient": stuck / spreads,
        "between_clients": float(spread.mean().sqrt()),
    }
