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

from dataclasses import dataclass

from .. import core
from ..errors import SpecError
from ..schema import option
from .catalogue import base
from .parts import REGULARISABLE, SOFTMAX, SUMMED, Parts, Training, assemble, kept


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
def fedala(parts: Parts, o: FedALAOptions) -> core.types.Algorithm:
    """FedAvg from a learned mixture with a client's own last values."""
    model, local, sampling = parts.model, core.local, core.types.Sampling
    if o.last > len(model.called):
        raise SpecError(f"last is {o.last}, but the model has {len(model.called)} layers")
    layers = model.called[-o.last :]
    names = [name for name in model.init(core.rng.key(0)) if name.rpartition(".")[0] in layers]
    train, use = sampling(o.batch, o.mix_epochs + o.local_epochs), sampling(o.batch, o.mix_epochs)
    steps, mixes = (
        local.mixing(
            loss, batches, names, epochs=o.mix_epochs, share=o.mix_share, mix_rate=o.mix_rate, lr=o.lr, clip=o.clip,
            personal=personal,
        )
        for loss, batches, personal in ((parts.outer, train, False), (parts.personal(parts.outer), use, True))
    )  # fmt: skip
    keep = kept(model, lambda first: local.unmixed({name: first[name] for name in names}))
    return assemble(parts, o, steps, train, keep=keep, use=(mixes, use))
