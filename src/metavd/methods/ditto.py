"""Ditto: FedAvg, and beside it a model of each client's own that is pulled towards what FedAvg gives.

    local     w   <- w - lr clip(grad L(w))                                    as FedAvg
              v_i <- v_i - lr clip(grad L(v_i) + mu (v_i - w_received))        on the same batches
    server    w   <- sum_i n_i w_i / sum_i n_i                                 v_i never leaves the client
    use       v_i

mu = 0 makes v_i what local training makes; the paper takes 1 where nobody attacks, and 0.1 under strong attacks. A
client that has never taken part begins its own model at what it receives and trains it, with the same pull, for
new_epochs passes over its rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import core
from ..schema import option
from .catalogue import base
from .parts import REGULARISABLE, SOFTMAX, SUMMED, Parts, Training, assemble, descent, kept


@dataclass(frozen=True)
class DittoOptions(Training):
    """FedAvg's, the pull's weight, and how a newcomer trains."""

    mu: float = option(
        1.0, "pull of a client's own model towards what it receives; 0: none", low=0, search=[0.05, 0.1, 0.2, 1.0, 2.0]
    )
    new_epochs: int = option(5, "passes with which a client that never took part trains its own model", low=0)


@base(
    "ditto", "FedAvg, and a private model pulled towards it", paper="Li et al., ICML 2021", options=DittoOptions,
    gives=(REGULARISABLE, SUMMED, SOFTMAX), listed=(),
    newcomer="begins its own model at what it receives and trains it for new_epochs passes",
)  # fmt: skip
def ditto(parts: Parts, o: DittoOptions) -> core.types.Algorithm:
    """FedAvg, and a private model that is pulled towards it."""
    local, own = core.local, core.local.OWN

    alone = local.near(parts.outer, mu=o.mu, lr=o.lr, clip=o.clip)
    near = local.near(parts.personal(parts.outer), mu=o.mu, lr=o.lr, clip=o.clip)
    fits = replace(near, init=local.own_at_received, final=local.use_own)
    made = assemble(
        parts, o, local.side_by_side(descent(parts.outer, o), alone),
        keep=kept(parts.model, lambda first: {own + name: value for name, value in first.items()}),
        newcomer=core.types.Newcomer(fits, core.types.Sampling(o.batch, o.new_epochs)),
    )  # fmt: skip
    return replace(made, personalize=replace(made.personalize, final=local.use_own))
