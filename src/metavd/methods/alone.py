"""Local training: no federation. Everything is the client's own, nothing is sent, and the server knows nothing.

    local     w_i <- w_i - lr clip(grad L(w_i))           from the same first weights for everyone
    use       w_i

The row beside which a federation has to show that it is worth its messages. A client trains in the rounds in which it
would take part. One that never took part trains from the first weights for new_epochs passes over its rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import core
from ..schema import option
from .catalogue import base
from .parts import SOFTMAX, Parts, Training, assemble, descent, kept


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
    model = parts.model
    nothing = core.types.Emit(lambda key: {}, lambda params, client, round: {})  # noqa: ARG005
    newcomer = core.types.Newcomer(descent(parts.outer, o), core.types.Sampling(o.batch, o.new_epochs))
    parts = replace(parts, emit=nothing, wrap=lambda _: core.server.idle(model))
    return assemble(parts, o, keep=kept(model, lambda first: first), newcomer=newcomer)
