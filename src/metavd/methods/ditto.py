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
from typing import TYPE_CHECKING

from .. import core
from ..schema import option
from .catalogue import base
from .parts import REGULARISABLE, SOFTMAX, SUMMED, Parts, Training, assemble

if TYPE_CHECKING:
    from torch import Tensor

    from ..core.types import Algorithm
    from ..tree import Params


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
def ditto(parts: Parts, o: DittoOptions) -> Algorithm:
    """FedAvg, and a private model that is pulled towards it."""
    local, sampling, own = core.local, core.types.Sampling, core.local.OWN

    def first(key: Tensor, client: Tensor) -> Params:  # noqa: ARG001
        return {own + name: value for name, value in parts.model.init(core.rng.fold(key, 0)).items()}

    def at_received(received: Params) -> Params:
        return received | {name: received[name.removeprefix(own)] for name in received if name.startswith(own)}

    alone = local.near(parts.outer, mu=o.mu, lr=o.lr, clip=o.clip)
    steps = local.side_by_side(local.sgd(parts.outer, lr=o.lr, clip=o.clip), alone)
    near = local.near(parts.personal(parts.outer), mu=o.mu, lr=o.lr, clip=o.clip)
    return replace(
        assemble(
            parts,
            o,
            steps,
            sampling(o.batch, o.local_epochs),
            keep=core.types.Keep(first, alike=True),
            newcomer=core.types.Newcomer(
                replace(near, init=at_received, final=local.use_own), sampling(o.batch, o.new_epochs)
            ),
        ),
        personalize=replace(local.unchanged, final=local.use_own),
    )
