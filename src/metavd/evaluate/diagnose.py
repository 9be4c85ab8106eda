"""What the dropout rates of a trained posterior look like, and whether training came to anything at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.emit import OWNED
from ..core.owned import fetched
from ..core.types import Algorithm, ServerState
from ..tree import Params

LOSS = 1e6
"""A training loss above it is no longer one."""


def diverged(loss: float | None, test: Mapping[str, Any], labels: np.ndarray) -> list[str]:
    """Say so where a run ended without having learnt: a huge loss, or guesses that are sure of themselves.

    `labels` (K,) counts the rows of each class. Whoever always answers the most frequent class has its share as
    accuracy, and whoever answers the shares themselves has their entropy as NLL; half as much again is far above.
    """
    if loss is not None and loss > LOSS:
        return [f"the run diverged: its last training loss is {loss:.3g}; lower the learning rates"]
    accuracy, nll = test["accuracy"], test["nll"]
    shares = labels[labels > 0] / max(labels.sum(), 1)
    if accuracy is None or nll is None or len(shares) < 2:
        return []
    chance, entropy = float(shares.max()), float(-(shares * np.log(shares)).sum())
    if accuracy <= chance * (1.0 + 0.5 * (1.0 - chance)) and nll > 1.5 * entropy:
        return [
            f"the run seems to have diverged: its accuracy of {accuracy:.1%} is hardly better than always answering "
            f"the most frequent class, {chance:.1%}, and its NLL of {nll:.3g} far above that of the classes' shares, "
            f"{entropy:.3g}; lower the learning rates"
        ]
    return []


def _stored(state: ServerState, received: Params, entry: str, client: int) -> Tensor:
    """Return a spread as the server stores it, before any clamp; a hypernetwork's is what it sends."""
    if OWNED + entry in state.params:
        table = state.params[OWNED + entry]
        return table[min(client, len(table) - 1)]  # all may share one row
    return state.params.get(entry, received[entry])


def diagnose(algorithm: Algorithm, state: ServerState, num_clients: int, limit: int = 256) -> dict[str, float] | None:
    """Return what the dropout rates of participating clients look like; None where the method has none.

    rate_mean, rate_sd: over weights and clients. rate_above_0.9: share of rates above 0.9. no_gradient: share of
    spreads that a push towards more noise cannot move. between_clients: root mean square, over weights, of the
    standard deviation between clients.
    """
    noise = algorithm.posterior
    if noise is None:
        return None
    device = state.round.device
    ids = torch.linspace(0, num_clients - 1, min(num_clients, limit)).round().long()
    count = len(ids)
    sums: dict[str, Tensor] = {}
    total = square = above = stuck = 0.0
    weights = spreads = 0
    state, places = fetched(state, ids.to(device))
    with torch.no_grad():
        for client in places:
            received = algorithm.emit.apply(state.params, client, state.round)
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
