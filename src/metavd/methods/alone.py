"""Local training: no federation. Everything is the client's own, nothing is sent, and the server knows nothing.

    local     w_i <- w_i - lr clip(grad L(w_i))           from the same first weights for everyone
    use       w_i

The row beside which a federation has to show that it is worth its messages. A client trains in the rounds in which it
would take part. One that never took part trains from the first weights for new_epochs passes over its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import core
from ..schema import option
from .catalogue import base
from .parts import SOFTMAX, Parts, Training, descent, kept


@dataclass(frozen=True)
class AloneOptions(Training):
    """FedAvg's, of which those of the server do nothing, and how long a newcomer trains."""

    new_epochs: int = option(50, "passes with which a client that never took part trains from the first weights", low=0)

    @property
    def only_mean(self) -> str:
        """There are no answers."""
        return "local sends no answers that a rule could weigh"


@base(
    "local", "no federation: every client trains alone", paper="none: the baseline", options=AloneOptions,
    gives=(SOFTMAX,),
    newcomer="trains alone from the first weights for new_epochs passes",
)  # fmt: skip
def alone(parts: Parts, o: AloneOptions) -> core.types.Algorithm:
    """No federation: every client trains alone, and keeps everything."""
    sampling, model = core.types.Sampling, parts.model
    nothing = core.types.Emit(lambda key: {}, lambda params, client, round: {})  # noqa: ARG005
    steps = descent(parts.outer, o)
    return core.types.Algorithm(
        emit=nothing,
        local=steps,
        server=core.server.idle(model),
        personalize=core.local.unchanged,
        predict=parts.predict,
        serve=nothing.apply,
        admit=core.emit.as_newcomer(nothing),
        train_batches=sampling(o.batch, o.local_epochs),
        personal_batches=sampling(o.batch, steps=0),
        keep=kept(model, lambda first: first),
        newcomer=core.types.Newcomer(steps, sampling(o.batch, o.new_epochs)),
    )
