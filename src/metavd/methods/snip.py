"""SNIP: one layer pruned by saliency after the first round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from .. import core
from ..schema import option
from .catalogue import regulariser
from .parts import Options, Parts, named


@dataclass(frozen=True)
class SnipOptions(Options):
    """How much is pruned, where, and by which saliency."""

    sparsity: float = option(0.7, "share of a layer's weights that is pruned after the first round", low=0, high=0.999)
    layers: str = option("auto", "pruned layers, with commas; auto: the one before the output")
    saliency: Literal["before", "released"] = option(
        "before", "taken before the server's step, or as released",
        released="released",
    )  # fmt: skip


@regulariser(
    "snip", "one layer pruned by saliency after round 1", paper="Lee et al., ICLR 2019", options=SnipOptions,
    tuned_as=(),
)  # fmt: skip
def snip(parts: Parts, o: SnipOptions) -> Parts:
    """Prune one layer by saliency after the first round."""
    emit = core.emit
    layers = named(parts.model, o.layers, parts.model.variational)
    released = o.saliency == "released"
    emits = emit.unmasked(parts.emit, layers)

    def wrap(base: core.types.Server) -> core.types.Server:
        return core.server.prune(base, layers, sparsity=o.sparsity, lr=parts.lr, released=released)

    if not released:
        return replace(parts, emit=emits, wrap=wrap)
    trained, used = (emit.zeroed(emits, layers, keep=keep) for keep in (True, False))
    return replace(parts, emit=trained, serve=lambda _: used, wrap=wrap, inner_clip=False)
