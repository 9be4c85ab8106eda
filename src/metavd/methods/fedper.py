"""FedPer: everyone shares the features, each client keeps its own head.

    local     w, theta_i <- w, theta_i - lr grad L(w, theta_i)         both together
    server    w <- sum_i n_i w_i / sum_i n_i                            the features w alone travel

A client that has never taken part begins with the first random head and fits it to its rows, the features held fixed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import core
from ..errors import SpecError
from ..schema import option
from .catalogue import base
from .parts import REGULARISABLE, SOFTMAX, SUMMED, TUNABLE, Parts, Training, assemble, descent, kept


@dataclass(frozen=True)
class PrivateHead(Training):
    """FedAvg's, and how a newcomer fits its head."""

    new_epochs: int = option(
        5, "passes with which a client that never took part fits its head", low=0, search=[5, 30, 100]
    )


def private_head(parts: Parts) -> tuple[Parts, core.types.Keep]:
    """Return the method in the making without the head in its messages, and the head as what clients keep.

    Everyone begins with the head that the server's network would have had.
    """
    model = parts.model
    if all(layer in model.head for layer in model.layers):
        raise SpecError(
            f"the model's only layer is its head {', '.join(model.head)}, which clients keep for themselves: "
            "nothing would be shared; take a model with layers before it"
        )
    variational = [] if parts.posterior is None else [layer for layer in parts.posterior.layers if layer in model.head]
    if variational:
        raise SpecError(
            f"option layers names {variational[0]!r}, which is the head that clients keep for themselves; name others"
        )
    keep = kept(model, lambda first: {name: value for name, value in first.items() if model.in_head(name)})
    return replace(parts, emit=core.emit.without(parts.emit, model.in_head)), keep


def fits_head(parts: Parts, o: PrivateHead) -> core.types.Newcomer:
    """What a client does that has kept no head yet: fit one, the features held fixed."""
    steps = descent(parts.personal(parts.outer), o, only=parts.model.in_head)
    return core.types.Newcomer(steps, core.types.Sampling(o.batch, o.new_epochs))


@base(
    "fedper", "shared features, a private head; trained together", paper="Arivazhagan et al. 2019, arXiv:1912.00818",
    options=PrivateHead, gives=(REGULARISABLE, TUNABLE, SUMMED, SOFTMAX), listed=("metavd", "dropout"),
    newcomer="fits a head of its own for new_epochs passes, the features held fixed",
)  # fmt: skip
def fedper(parts: Parts, o: PrivateHead) -> core.types.Algorithm:
    """Shared features, a private head; both trained together."""
    shared, keep = private_head(parts)
    return assemble(shared, o, keep=keep, newcomer=fits_head(shared, o))
