"""Fixed Gaussian dropout."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import core
from ..schema import option
from .catalogue import regulariser
from .parts import Options, Parts, linear_layers, named


@dataclass(frozen=True)
class DropoutOptions(Options):
    """How much noise, and where."""

    rate: float = option(
        0.2, "fixed Gaussian dropout rate on the inputs of the layers", low=0.001, high=0.999,
        search=[0.05, 0.1, 0.15, 0.2, 0.3],
    )  # fmt: skip
    layers: str = option("auto", "layers with dropout on their inputs, with commas; auto: all linear ones")


@regulariser("dropout", "fixed Gaussian dropout", paper="Srivastava et al., JMLR 2014", options=DropoutOptions)
def dropout(parts: Parts, o: DropoutOptions) -> Parts:
    """Fixed Gaussian dropout on the inputs of the linear layers while training."""
    layers = named(parts.model, o.layers, linear_layers(parts.model))
    noise = core.posterior.InputLogAlpha(layers, offset=core.posterior.logit(o.rate))
    model = core.model.attach(parts.model, noise)
    loss = core.objective.cross_entropy(model, 1)
    return replace(parts, model=model, inner=loss, outer=loss, predict=core.predict.posterior_mean(model))
