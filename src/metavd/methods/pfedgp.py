"""pFedGP: shared features, a Gaussian-process tree on each client's own classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .. import core
from ..schema import option
from .catalogue import base
from .parts import SUMMED, Parts, Rates

if TYPE_CHECKING:
    from ..core.types import Algorithm


@dataclass(frozen=True)
class PFedGPOptions(Rates):
    """Rates, and the tree's sampling."""

    lr: float = option(
        0.05, "local learning rate", low=0, search=[round(0.01 * i, 2) for i in range(3, 11)]
    )  # fmt: skip
    clip: float = option(50.0, "largest norm of a local gradient", low=0)
    local_steps: int = option(1, "steps per round, each on all of a client's rows", low=1)
    chains: int = option(20, "Gibbs chains", low=1)
    sweeps: int = option(5, "Gibbs sweeps", low=1)
    inducing: int = option(0, "inducing points per class; 0: 30 / classes, at least 1", low=0)
    limit: int = option(400, "largest number of own rows a client conditions on; above it, inducing points join", low=2)
    novel: Literal["laplace", "zero"] = option("laplace", "classes never seen: Laplace's share, or probability 0")
    extra_points: int = option(
        0, "the paper's protocol: labelled points of every class given at evaluation (40 or 50)", low=0,
        foreign="it gives a client rows of other clients, which stay where they are in a federation; use 0",
    )  # fmt: skip

    @property
    def weighs_alike(self) -> bool:
        """Every client's answer counts alike."""
        return True


@base(
    "pfedgp", "shared features, a Gaussian-process tree per client", paper="Achituve et al., NeurIPS 2021",
    options=PFedGPOptions, gives=(SUMMED,),
)  # fmt: skip
def pfedgp(parts: Parts, o: PFedGPOptions) -> Algorithm:
    """Shared features, a Gaussian-process tree on each client's own classes."""
    slots, sampling = core.gp_slots, core.types.Sampling
    classes = parts.setting.num_classes
    points = o.inducing or max(1, 30 // classes)
    tree = slots.Tree(num_classes=classes, chains=o.chains, sweeps=o.sweeps, limit=o.limit, novel=o.novel)
    model = core.model.headless(parts.model)
    emits = slots.with_points(core.emit.shared(model), model, classes, points)
    groups = core.optim.Groups(parts.groups)
    return core.types.Algorithm(
        emit=emits,
        local=core.local.sgd(slots.predictive_likelihood(model, tree), lr=o.lr, clip=o.clip),
        server=core.server.pull(emits, core.aggregate.mean, groups, clip=o.server_clip, by_size=not o.weighs_alike),
        personalize=slots.conditioned(model, tree),
        predict=slots.tree_prediction(model, tree),
        serve=emits.apply,
        admit=slots.borrowing(emits),
        train_batches=sampling(0, steps=o.local_steps, full=True),
        personal_batches=sampling(0, steps=1, full=True, augment=False, extra=o.extra_points),
    )
