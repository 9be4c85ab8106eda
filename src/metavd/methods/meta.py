"""Learning a start from which one step adapts: MAML, and PerFedAvg, its Hessian-free form.

w' = w - lr grad L(w; support),   w <- w - outer_lr d L(w'; query) / d w
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from .. import core
from ..errors import SpecError
from ..schema import option
from .catalogue import base
from .parts import REGULARISABLE, SOFTMAX, SUMMED, Adapting, Momentum, Parts, assemble


def _rate(parts: Parts, o: MamlOptions) -> Callable[[str], float] | None:
    """Return the factor of an entry's meta step: lr / outer_lr for a spread that is to move at lr; None: 1 for all."""
    if not parts.spread_at_lr:
        return None
    if o.outer_lr == 0:
        raise SpecError("outer_lr is 0, at which nothing moves, but spread_step is lr; give an outer_lr above 0")
    spreads, factor = frozenset(parts.posterior_entries), o.lr / o.outer_lr
    return lambda name: factor if name in spreads else 1.0


@dataclass(frozen=True)
class MamlOptions(Adapting, Momentum):
    """Training, server momentum, adaptation and the meta step."""

    outer_lr: float = option(
        0.1, "rate of the meta step", low=0, search=[round(0.01 * i, 2) for i in range(1, 11)]
    )  # fmt: skip
    meta_batches: Literal["disjoint", "independent"] = option(
        "disjoint", "support and query batches", released="independent"
    )


def _meta(parts: Parts, o: MamlOptions, stage: Callable[..., core.types.Local], **more: Any) -> core.types.Algorithm:
    """Put together what learns a start by one of the two meta steps."""
    posterior = [name.rpartition(".")[2] for name in parts.posterior_entries]
    steps = stage(
        parts.inner, parts.outer, lr=o.lr, outer_lr=o.outer_lr, clip=o.clip, frozen=posterior, rate=_rate(parts, o),
        **more,
    )  # fmt: skip
    batches = core.types.Sampling(o.batch, o.local_epochs, group=3, independent=o.meta_batches == "independent")
    return assemble(replace(parts, adapt_steps=o.adapt_steps), o, steps, batches)


@base(
    "maml", "second-order MAML on every client", paper="Chen et al. 2018, arXiv:1802.07876", options=MamlOptions,
    gives=(REGULARISABLE, SUMMED, SOFTMAX),
)  # fmt: skip
def maml(parts: Parts, o: MamlOptions) -> core.types.Algorithm:
    """Second-order meta-learning of a start from which one step adapts."""
    return _meta(parts, o, core.local.maml, inner_clip=o.clip if parts.inner_clip else None)


@dataclass(frozen=True)
class PerFedAvgOptions(MamlOptions):
    """MAML's, and how the Hessian-vector product is taken."""

    product: Literal["exact", "difference", "released"] = option("exact", "Hessian-vector product", released="released")
    delta: float = option(1e-4, "step of the finite difference", low=1e-12)
    trust: float = option(0.1, "largest curvature term relative to the gradient", low=0, high=1e6)


@base(
    "perfedavg", "Hessian-free MAML", paper="Fallah et al., NeurIPS 2020", options=PerFedAvgOptions,
    gives=(REGULARISABLE, SUMMED, SOFTMAX),
)  # fmt: skip
def perfedavg(parts: Parts, o: PerFedAvgOptions) -> core.types.Algorithm:
    """MAML with a Hessian-vector product in place of second-order differentiation."""
    return _meta(parts, o, core.local.hf_maml, delta=o.delta, product=o.product, trust=o.trust)
