"""FedALA: a client mixes what it received with its own last values, weight by weight, and trains from there.

    start     w' = own_i + (w - own_i) * mix_i         in the last layers; elsewhere w' = w
    mix       mix_i <- mix_i - mix_rate grad_w' L(w') * (w - own_i), within 0 and 1, on a share of the rows
    local     w' <- w' - lr grad L(w'),  own_i <- w'
    server    w <- sum_i n_i w'_i / sum_i n_i
    use       w', after its mixing weights were learned as in a round

`own_i` and `mix_i`, of the last layers alone, stay with the client; mixing weights start at 1, which is FedAvg. The
paper learns them in the first round after a client's first to convergence and by one pass later; here it is always
`mix_epochs`. It mixes one layer of its network for images, as `last` does.

A client that has never taken part has nothing of its own to mix: it uses what it received.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .. import core
from ..errors import SpecError
from ..schema import option
from .catalogue import base
from .parts import REGULARISABLE, SOFTMAX, SUMMED, Parts, Training, assemble

if TYPE_CHECKING:
    from torch import Tensor

    from ..core.types import Algorithm, Local, Sampling
    from ..tree import Params


@dataclass(frozen=True)
class FedALAOptions(Training):
    """FedAvg's, and how mixing weights are learned."""

    last: int = option(1, "layers at the end of the network that are mixed", low=1, search=[1, 2, 3])
    mix_share: float = option(0.8, "share of a client's rows on which mixing weights are learned", low=0.01, high=1)
    mix_rate: float = option(1.0, "learning rate of the mixing weights", low=0, search=[1.0, 10.0, 100.0])
    mix_epochs: int = option(1, "passes over those rows, before training and before use", low=0)


@base(
    "fedala", "FedAvg from a learned mixture with a client's last model", paper="Zhang et al., AAAI 2023",
    options=FedALAOptions, gives=(REGULARISABLE, SUMMED, SOFTMAX), listed=(),
    newcomer="has nothing of its own to mix, and uses what it receives",
)  # fmt: skip
def fedala(parts: Parts, o: FedALAOptions) -> Algorithm:
    """FedAvg from a learned mixture with a client's own last values."""
    model, local, sampling = parts.model, core.local, core.types.Sampling
    if o.last > len(model.layers):
        raise SpecError(f"last is {o.last}, but the model has {len(model.layers)} layers")
    layers = list(model.layers)[-o.last :]

    def mixed(params: Params) -> Params:
        return {name: value for name, value in params.items() if name.rpartition(".")[0] in layers}

    def init(key: Tensor, client: Tensor) -> Params:  # noqa: ARG001
        first = mixed(model.init(core.rng.fold(key, 0)))
        own = {local.OWN + name: value.new_zeros(value.shape) for name, value in first.items()}
        mix = {local.MIX + name: value.new_ones(value.shape) for name, value in first.items()}
        return own | mix | {local.BEGUN: next(iter(first.values())).new_zeros(())}

    names = tuple(mixed(model.init(core.rng.key(0))))

    def stage(batches: Sampling, *, personal: bool) -> Local:
        loss = parts.personal(parts.outer) if personal else parts.outer
        return local.mixing(
            loss, batches, names, epochs=o.mix_epochs, share=o.mix_share, mix_rate=o.mix_rate, lr=o.lr, clip=o.clip,
            personal=personal,
        )  # fmt: skip

    train, use = sampling(o.batch, o.mix_epochs + o.local_epochs), sampling(o.batch, o.mix_epochs)
    built = assemble(parts, o, stage(train, personal=False), train, keep=core.types.Keep(init, alike=True))
    return replace(built, personalize=stage(use, personal=True), personal_batches=use)
