"""Local SGD whose results are averaged: FedAvg, FedProx, and Reptile, which is FedAvg with server momentum."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import core
from ..schema import option
from .catalogue import base
from .parts import REGULARISABLE, SOFTMAX, SUMMED, TUNABLE, Adapting, Momentum, Parts, Training, assemble


def averaged(parts: Parts, o: Training, *, pulls: core.types.Emit | None = None) -> core.types.Algorithm:
    """Local SGD on batches, put together by the server's one vector-Jacobian product."""
    return assemble(parts, o, pulls=pulls)


@base(
    "fedavg", "local SGD, averaged by data size", paper="McMahan et al., AISTATS 2017", options=Training,
    gives=(REGULARISABLE, TUNABLE, SUMMED, SOFTMAX),
)  # fmt: skip
def fedavg(parts: Parts, o: Training) -> core.types.Algorithm:
    """Local SGD, averaged by data size."""
    # The released server of this base ignores the masks of dropped weights: it takes the difference of the clients'
    # mean to the dense weights, so that a weight that was dropped for all of a cohort becomes what clients regrew.
    return averaged(parts, o, pulls=parts.undropped)


@dataclass(frozen=True)
class FedProxOptions(Training):
    """FedAvg's, and the pull's weight."""

    mu: float = option(0.1, "weight of the proximal term", low=0, search=[0.001, 0.01, 0.1, 1.0],
                       also=("proximal_mu",))  # fmt: skip


@base(
    "fedprox",
    "FedAvg with a proximal term",
    paper="Li et al., MLSys 2020",
    options=FedProxOptions,
    gives=(TUNABLE, SUMMED, SOFTMAX),
)
def fedprox(parts: Parts, o: FedProxOptions) -> core.types.Algorithm:
    """FedAvg with a pull towards what was received: loss + mu/2 |w - received|^2."""
    return averaged(replace(parts, outer=core.objective.total(parts.outer, core.objective.proximal(o.mu))), o)


@dataclass(frozen=True)
class ReptileOptions(Adapting, Momentum):
    """Training, server momentum and adaptation."""


@base(
    "reptile", "FedAvg with server momentum and one adaptation step: the MetaVD paper's Reptile, not Nichol et al.'s",
    paper="Jiang et al. 2019, arXiv:1909.12488", options=ReptileOptions, gives=(REGULARISABLE, SUMMED, SOFTMAX),
)  # fmt: skip
def reptile(parts: Parts, o: ReptileOptions) -> core.types.Algorithm:
    """FedAvg with server momentum, and one adaptation step before use."""
    return averaged(replace(parts, adapt_steps=o.adapt_steps), o)
