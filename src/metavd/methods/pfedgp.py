"""pFedGP: shared features, a Gaussian-process tree on each client's own classes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from .. import core
from ..errors import SpecError
from ..schema import option
from .catalogue import base
from .parts import SUMMED, Parts, Rates


@dataclass(frozen=True)
class PFedGPOptions(Rates):
    """Rates, and the tree's sampling."""

    lr: float = option(
        0.05, "local learning rate", low=0, search=[round(0.01 * i, 2) for i in range(3, 11)]
    )  # fmt: skip
    clip: float = option(50.0, "largest norm of a local gradient", low=0)
    steps_on: Literal["all", "batches"] = option(
        "all", "a step is on all of a client's rows (local_steps of them), or on batches of batch_rows (passes)",
        later=True,
    )  # fmt: skip
    local_steps: int = option(1, "steps per round, each on all of a client's rows", low=1)
    batch_rows: int = option(64, "with steps_on=batches, samples in a local batch", low=2, later=True)
    passes: int = option(5, "with steps_on=batches, passes over a client's data in a round", low=1, later=True)
    momentum: float = option(
        0.0, "of a client's steps within a round; its authors' script: local_steps=3 momentum=0.9", low=0, high=1,
        later=True,
    )  # fmt: skip
    chains: int = option(20, "Gibbs chains", low=1)
    sweeps: int = option(5, "Gibbs sweeps", low=1)
    inducing: int = option(0, "inducing points per class; 0: 30 / classes, at least 1", low=0)
    limit: int = option(400, "largest number of own rows a client conditions on; above it, inducing points join", low=2)
    test_points: Literal["needed", "always"] = option(
        "needed", "inducing points at test: where own rows were cut or the client is new, or always, as in training",
        later=True,
    )  # fmt: skip
    novel: Literal["laplace", "zero"] = option("laplace", "classes never seen: Laplace's share, or probability 0")
    extra_points: int = option(
        0, "the paper's protocol: labelled points of every class given at evaluation (40 or 50)", low=0,
        foreign="it gives a client rows of other clients, which stay where they are in a federation; use 0",
    )  # fmt: skip
    condition: Literal["own", "points"] = option(
        "own", "rows that answers rest on: the client's own and extra_points of every class, or those points alone",
        later=True,
    )  # fmt: skip

    weighs_alike: ClassVar[bool] = True


@base(
    "pfedgp", "shared features, a Gaussian-process tree per client", paper="Achituve et al., NeurIPS 2021",
    options=PFedGPOptions, gives=(SUMMED,),
)  # fmt: skip
def pfedgp(parts: Parts, o: PFedGPOptions) -> core.types.Algorithm:
    """Shared features, a Gaussian-process tree on each client's own classes."""
    slots, sampling = core.gp_slots, core.types.Sampling
    alone = o.condition == "points"
    if alone and not o.extra_points:
        raise SpecError("condition is points, but extra_points is 0; give a number of every class, such as 40")
    whole = sampling(0, steps=o.local_steps, full=True)
    batches = whole if o.steps_on == "all" else sampling(o.batch_rows, o.passes)
    classes = parts.setting.num_classes
    points = o.inducing or max(1, 30 // classes)
    tree = slots.Tree(
        num_classes=classes, inference=core.gp_nodes.Inference(chains=o.chains, sweeps=o.sweeps), limit=o.limit,
        novel=o.novel, always=o.test_points == "always",
    )  # fmt: skip
    model = core.model.headless(parts.model)
    emits = slots.with_points(core.emit.shared(model), model, classes, points)
    groups, loss = core.optim.Groups(parts.groups), slots.predictive_likelihood(model, tree)
    if o.momentum:
        steps = core.local.heavy_ball(loss, lr=o.lr, momentum=o.momentum, clip=o.clip)
    else:
        steps = core.local.sgd(loss, lr=o.lr, clip=o.clip)
    return core.types.Algorithm(
        emit=emits,
        local=replace(steps, captured=False),
        server=core.server.pull(emits, core.aggregate.mean, groups, clip=o.server_clip, by_size=not o.weighs_alike),
        personalize=slots.conditioned(model, tree),
        predict=slots.tree_prediction(model, tree),
        serve=emits.apply,
        admit=slots.borrowing(emits),
        train_batches=batches,
        personal_batches=sampling(0, steps=1, full=True, augment=False, extra=o.extra_points, own=not alone),
    )
