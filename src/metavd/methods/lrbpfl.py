"""LR-BPFL: shared weights, and a private Gaussian factor for each input and output of each layer.

    weights   W * (b_s a_s^T),  a_s, b_s ~ q_i = N(mean_i, sigma_i^2)        one draw for all rows; see core.rank_one
    local     W, q_i <- W, q_i - lr grad [ NLL of the mean of S softmaxes + kl / n_i KL(q_i || N(1, prior^2)) ]
    server    W <- sum_i n_i W_i / sum_i n_i                                 the factors never leave their client
    use       the mean of S draws

The rank is one for everybody; the paper's search for each client's rank is not here.
A client that has never taken part begins with factors around 1 and fits them to its rows, the weights held fixed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import core
from ..schema import option
from .catalogue import base
from .parts import SUMMED, TUNABLE, Parts, Training, assemble, descent, kept, named


@dataclass(frozen=True)
class LRBPFLOptions(Training):
    """FedAvg's, and those of the factors."""

    prior: float = option(0.1, "standard deviation of the factors' prior around 1", low=1e-6)
    spread: float = option(0.1, "standard deviation of the factors at first", low=1e-12, search=[0.01, 0.05, 0.1])
    kl: float = option(0.1, "weight of the KL, which is divided by the client's rows", low=0, search=[0.01, 0.1, 1.0])
    draws: int = option(4, "draws of a training step", low=1)
    answer_draws: int = option(4, "draws of an answer", low=1)
    factor_rate: float = option(1.0, "rate of the factors, as a multiple of lr", low=0, search=[0.1, 1.0, 10.0])
    layers: str = option("auto", "layers with factors, by name, with commas; auto: all")
    new_epochs: int = option(5, "passes with which a client that never took part fits its factors", low=0)


@base(
    "lrbpfl", "shared weights, private Gaussian factors of rank one", paper="Zhang et al., AISTATS 2025",
    options=LRBPFLOptions, gives=(TUNABLE, SUMMED),
    newcomer="fits factors of its own for new_epochs passes, the weights held fixed",
)  # fmt: skip
def lrbpfl(parts: Parts, o: LRBPFLOptions) -> core.types.Algorithm:
    """Shared weights, private Gaussian factors on inputs and outputs."""
    rank_one, model = core.rank_one, parts.model
    layers = named(model, o.layers, list(model.layers))
    factors = rank_one.Factors({layer: model.layers[layer] for layer in layers}, o.prior)
    loss = core.objective.total(rank_one.mixture(model, factors, o.draws), rank_one.divergence(factors, o.kl))
    parts = replace(parts, outer=loss, predict=rank_one.prediction(model, factors, o.answer_draws))

    def rate(name: str) -> float:
        return o.factor_rate if factors.has(name) else 1.0

    fits = descent(parts.personal(loss), o, only=factors.has, rate=rate)
    newcomer = core.types.Newcomer(fits, core.types.Sampling(o.batch, o.new_epochs))
    keep = kept(model, lambda first: factors.start(next(iter(first.values())), o.spread))
    return assemble(parts, o, descent(loss, o, rate=rate), keep=keep, newcomer=newcomer)
