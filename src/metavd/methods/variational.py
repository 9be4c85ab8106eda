"""Variational dropout: a Gaussian posterior on the weights of some layers, its spread learned.

MetaVD predicts each client's spread by a hypernetwork, VD learns one for all, EnsembleVD one for each client; `drop`
leaves out the weights whose dropout rate is high.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from .. import core
from ..errors import SpecError
from ..schema import option, options
from .catalogue import extra, regulariser
from .parts import POSTERIOR, Options, Parts, linear_layers, named

if TYPE_CHECKING:
    from ..core.emit import Shares
    from ..core.optim import Sgd
    from ..core.posterior import Choice, Posterior
    from ..core.types import Algorithm, Emit, Local, Model

_METAVD = "Jeon et al., NeurIPS 2023"
_CONSTANT = -8.5
"""log sigma^2 of the released code's evaluation, and of a start without a rate."""
_SPREADS = ("logvar", "logalpha")
"""Our own posteriors with one spread a weight; the third, one spread an input unit, is what per=input asks for."""
_RATES = (0.03, 0.1, 0.3, 0.9)
"""Server rates that may be searched for what predicts a spread."""


def _spreads() -> Sequence[str]:
    """Name the posteriors that weights may have; a package's own is imported when it is asked for."""
    return (*_SPREADS, *sorted(core.posteriors.POSTERIORS.names().difference(_SPREADS, ["input"])))


@dataclass(frozen=True)
class PosteriorOptions(Options):
    """What the three have in common: layers, parameterisation, the KL's weight, prediction."""

    layers: str = option("auto", "layers with a posterior, by name, with commas; auto: the one before the output")
    per: Literal["weight", "input"] = option("weight", "one rate per weight, or one log alpha per input unit")
    spread: str = option("logvar", "learn log sigma^2 or log alpha, or a package's own posterior", choices=_spreads)
    rate: float = option(0.0, "initial dropout rate of a typical weight; 0: log sigma^2 = -8.5", low=0, high=0.999)
    floor: float = option(-17.0, "lowest log sigma^2 (or log alpha)", low=-60, high=8, released=-8.5)
    ceiling: float = option(0.0, "highest log sigma^2; not with clamp=released", low=-60, high=8.5)
    max_rate: float = option(0.99, "highest dropout rate where log alpha is learned", low=0.001, high=0.9999)
    clamp: Literal["inward", "through", "project", "released"] = option(
        "inward",
        "at floor and ceiling: of each slope only what leads back passes; everything (through); everything, and each "
        "step ends inside (project); nothing (released)",
        released="released",
    )
    spread_step: Literal["base", "lr"] = option(
        "base", "rate of a spread's local steps: that of the base's weights (maml and perfedavg: outer_lr), or lr",
        later=True,
    )  # fmt: skip
    prior: Literal["hierarchical", "anchored"] = option(
        "hierarchical", "what the KL pulls spreads to: as much noise as possible, or the rate that they start at",
        later=True,
    )  # fmt: skip
    weighting: Literal["precision", "size"] = option(
        "precision",
        "how loud an answer speaks about a weight that has a posterior: by its precision times the client's training "
        "rows, or by those rows alone, as about all other weights",
        later=True,
    )
    beta: float = option(
        5.0, "weight of the KL", low=0, search=[float(i) for i in range(1, 16)], paper=10.0, released=10.0
    )
    beta_ramp: float = option(0.02, "share of all rounds in which beta rises from 0", low=0, high=1)
    kl: Literal["mean", "elbo"] = option("mean", "KL as mean over weights x beta, or as the ELBO's sum/n x beta")
    kl_epsilon: Literal["weight", "variance"] = option(
        "weight", "the KL's 1e-13 is added to theta^2, or to sigma^2", released="variance", later=True
    )
    test_beta: Literal["next", "last"] = option(
        "next", "round whose beta personalisation takes: the next, or the last that was trained", released="last",
        later=True,
    )  # fmt: skip
    draws: int = option(3, "noise draws per training step", low=1)
    draws_average: Literal["logits", "loss"] = option(
        "logits", "of a training step's draws, average the logits (as released) or the losses (as in an ELBO)",
        later=True,
    )  # fmt: skip
    layer_init: Literal["uniform", "model"] = option(
        "uniform", "start of a noisy layer: U(+-1/sqrt(fan in)) or the model's own"
    )
    predict: Literal["mean", "draws"] = option(
        "mean", "answer at the posterior mean, or by averaging over draws",
        released="draws",
    )  # fmt: skip
    samples: int = option(10, "draws of a prediction with predict=draws", low=1, released=3)
    average: Literal["probs", "logits"] = option(
        "probs", "average the draws' probabilities or their logits", released="logits"
    )
    test_noise: Literal["own", "constant"] = option(
        "own", "spread at test: the client's own, or -8.5 for all", released="constant"
    )

    @property
    def choice(self) -> Choice:
        """What is asked of the posterior itself."""
        kind = core.posterior.Choice
        return kind(**{each.name: getattr(self, each.name) for each in fields(kind)})


@dataclass(frozen=True)
class SpreadOptions(PosteriorOptions):
    """How the server learns a spread that is a parameter itself."""

    spread_lr: float = option(0.9, "server rate of the spread", low=0)
    spread_momentum: float = option(0.6, "server momentum of the spread", low=0, high=1)
    spread_decay: float = option(0.0, "weight decay on the spread itself", low=0, released=5e-4)

    @property
    def spread_group(self) -> Sgd:
        """The server's rule for the spread."""
        return core.optim.Sgd(self.spread_lr, self.spread_momentum, self.spread_decay)


@dataclass(frozen=True)
class OwnedOptions(Options):
    """Rows of the server's tables that belong to one client each."""

    owned: Literal["one", "share"] = option(
        "one", "weight of a client's step on rows that it alone owns", released="share"
    )
    owned_decay: Literal["sparse", "dense"] = option(
        "sparse", "rows decay when their client takes part, or always",
        released="dense",
    )  # fmt: skip

    @property
    def moves_all_rows(self) -> bool:
        """Dense decay is everybody's, in every round."""
        return self.owned_decay == "dense"


@dataclass(frozen=True)
class HyperOptions(Options):
    """The hypernetwork's and the embeddings'."""

    hyper_width: int = option(200, "hidden units of the hypernetwork", low=1)
    hyper_depth: int = option(3, "hidden layers of the hypernetwork", low=0)
    embedding: int = option(0, "size of a client's embedding; 0: 1 + clients/4, at most 64", low=0)
    hyper_lr: float = option(0.9, "server rate of the hypernetwork", low=0, offered=_RATES)
    hyper_momentum: float = option(0.6, "momentum of the hypernetwork's step", low=0, high=1)
    hyper_decay: float = option(5e-4, "weight decay of the hypernetwork", low=0)
    embed_lr: float = option(0.9, "server rate of the embeddings", low=0, offered=_RATES)
    embed_momentum: float = option(0.3, "momentum of the embeddings' step", low=0, high=1)
    embed_decay: float = option(5e-4, "weight decay of the embeddings", low=0)

    @property
    def hyper_group(self) -> Sgd:
        """The server's rule for the hypernetwork."""
        return core.optim.Sgd(self.hyper_lr, self.hyper_momentum, self.hyper_decay)

    @property
    def embed_group(self) -> Sgd:
        """The server's rule for the embeddings."""
        return core.optim.Sgd(self.embed_lr, self.embed_momentum, self.embed_decay)


@dataclass(frozen=True)
class MetaVDOptions(HyperOptions, OwnedOptions, PosteriorOptions):
    """The posterior's, the hypernetwork's and the embeddings', and a newcomer's."""

    newcomer: Literal["mean", "fit", "outputs"] = option(
        "mean",
        "an unseen client's spread: predicted from the mean of the known embeddings, from one fitted to its rows, or "
        "the mean of the predictions for known clients (at most 1,024 of them)",
    )
    fit_steps: int = option(5, "steps that newcomer=fit takes", low=1)
    fit_lr: float = option(0.1, "rate of those steps", low=0)

    @property
    def admits_by_fitting(self) -> bool:
        """Whether an unseen client fits its embedding."""
        return self.newcomer == "fit"


@dataclass(frozen=True)
class VDOptions(HyperOptions, SpreadOptions):
    """The posterior's, the spread's, and the hypernetwork's where there is one."""

    spread_by: Literal["itself", "hypernetwork"] = option(
        "itself",
        "a spread is a parameter of the server (spread_lr), or learned by MetaVD's step (hyper_lr, embed_lr): from a "
        "hypernetwork, of which +vd has one with one embedding, +ensemblevd one for each client",
        later=True,
    )
    came_later: ClassVar[frozenset[str]] = frozenset(options(HyperOptions))


@dataclass(frozen=True)
class EnsembleVDOptions(OwnedOptions, VDOptions):
    """VD's, and those of owned rows."""


def _noise(model: Model, o: PosteriorOptions) -> Posterior:
    """Build the posterior from the options."""
    if o.per == "input" and o.spread != _SPREADS[0]:
        raise SpecError(
            f"spread is {o.spread!r}, but per=input learns one log alpha per input unit; leave one of them out"
        )
    kind = core.posterior.named("input" if o.per == "input" else o.spread)
    layers = named(model, o.layers, linear_layers(model) if kind.everywhere else model.variational)
    try:
        return kind.build(layers, lambda: model.init(core.rng.key(0)), o.choice)
    except ValueError as error:
        raise SpecError(str(error)) from None


def _posterior(parts: Parts, o: PosteriorOptions, extend: Callable[[Emit, Model, Posterior], Emit]) -> Parts:
    """What the three share: a posterior, its ELBO, a consensus by precision (or size), prediction."""
    emit, objective, predict = core.emit, core.objective, core.predict
    model = parts.model
    if o.layer_init == "uniform" and o.per == "weight" and model.fresh:
        model = core.model.reset(model, named(model, o.layers, model.variational))
    noise = _noise(model, o)
    model = core.model.attach(model, noise)
    loss = objective.cross_entropy(model, o.draws, o.draws_average)
    beta = objective.ramp(o.beta, parts.setting.rounds, o.beta_ramp)
    by_mean, by_precision = o.predict == "mean", o.weighting == "precision"
    parts = replace(
        parts,
        model=model,
        emit=extend(emit.shared(model), model, noise),
        serve=(lambda used: emit.constant(used, model, noise, _CONSTANT))
        if o.test_noise == "constant"
        else parts.serve,
        inner=loss,
        outer=objective.total(loss, objective.divergence(noise, beta, o.kl)),
        personal=objective.a_round_earlier if o.test_beta == "last" else parts.personal,
        aggregate=core.aggregate.precision(noise) if by_precision else core.aggregate.size(noise),
        votes_by_precision=by_precision,
        predict=predict.posterior_mean(model) if by_mean else predict.posterior_draws(model, o.samples, o.average),
        posterior=noise,
        spread_at_lr=o.spread_step == "lr",
    )
    return _projected(parts) if o.clamp == "project" else parts


def _projected(parts: Parts) -> Parts:
    """Let every stage of a client, in training and before use, end its steps with spreads inside their range."""
    names, noise, finish = parts.posterior_entries, parts.posterior, parts.finish
    assert noise is not None

    def within(stage: Local) -> Local:
        return core.local.projected(stage, noise, names)

    def told(built: Algorithm) -> Algorithm:
        built = finish(built)
        new = built.newcomer and replace(built.newcomer, stage=within(built.newcomer.stage))
        return replace(built, local=within(built.local), personalize=within(built.personalize), newcomer=new)

    return replace(parts, finish=told)


def _predicted(parts: Parts, o: MetaVDOptions | VDOptions, shares: Shares) -> Parts:
    """A posterior whose spreads a hypernetwork predicts."""

    def extend(base: Emit, model: Model, noise: Posterior) -> Emit:
        return core.emit.meta(
            base, model, noise, parts.setting.num_clients, size=o.embedding or None, width=o.hyper_width,
            depth=o.hyper_depth, released=o.clamp == "released", shares=shares,
        )  # fmt: skip

    return _posterior(parts, o, extend)


def _owned(parts: Parts, o: OwnedOptions, group: Sgd) -> Parts:
    groups = parts.groups | {core.emit.OWNED: group}
    return replace(parts, groups=groups, owned_by_share=o.owned == "share", sparse=o.owned_decay == "sparse")


@regulariser(
    "metavd", "variational dropout, its rates from a hypernetwork", paper=_METAVD, options=MetaVDOptions,
    gives=(POSTERIOR,),
)  # fmt: skip
def metavd(parts: Parts, o: MetaVDOptions) -> Parts:
    """Each client's spread predicted by a hypernetwork from the client's embedding."""
    emit = core.emit
    parts = _predicted(parts, o, "network")
    if o.admits_by_fitting:
        parts = replace(parts, admit=lambda used, loss: emit.fitted(used, loss, steps=o.fit_steps, lr=o.fit_lr))
    elif o.newcomer == "outputs":
        parts = replace(parts, admit=lambda used, loss: emit.averaged(used))  # noqa: ARG005
    groups = parts.groups | {emit.HYPER: o.hyper_group}
    return _owned(replace(parts, groups=groups), o, o.embed_group)


@regulariser(
    "vd", "variational dropout, one set of rates for all", paper="Kingma et al., NeurIPS 2015",
    options=VDOptions, gives=(POSTERIOR,), tuned_as=("metavd",),
)  # fmt: skip
def vd(parts: Parts, o: VDOptions) -> Parts:
    """One learned spread for all clients."""
    if o.spread_by == "hypernetwork":
        parts = _predicted(parts, o, "all")
        groups = parts.groups | {core.emit.HYPER: o.hyper_group, core.emit.ONE_EMBEDDING: o.embed_group}
    else:
        parts = _posterior(parts, o, core.emit.learned)
        groups = parts.groups | dict.fromkeys(parts.posterior_entries, o.spread_group)
    # The released code evaluates VD with its own spread, and only the others with a constant.
    return replace(parts, groups=groups, serve=lambda emits: emits)


@regulariser(
    "ensemblevd", "variational dropout, a set of rates per client", paper=_METAVD, options=EnsembleVDOptions,
    gives=(POSTERIOR,), tuned_as=("metavd",),
)  # fmt: skip
def ensemblevd(parts: Parts, o: EnsembleVDOptions) -> Parts:
    """One learned spread for each client."""
    num, emit = parts.setting.num_clients, core.emit
    if o.spread_by == "hypernetwork":
        parts = replace(_predicted(parts, o, "nothing"), admit=lambda used, loss: emit.averaged_apart(used))  # noqa: ARG005
        return _owned(replace(parts, groups=parts.groups | {emit.OWN_HYPER: o.hyper_group}), o, o.embed_group)
    parts = _posterior(parts, o, lambda base, model, noise: emit.learned(base, model, noise, num))
    return _owned(parts, o, o.spread_group)


@dataclass(frozen=True)
class DropOptions(Options):
    """Which weights are dropped, and from when on."""

    threshold: float = option(0.9, "weights with a higher dropout rate are dropped", low=0, high=1)
    drop_from: int = option(150, "first round in which weights are dropped", low=0)
    dropped: Literal["absent", "released"] = option(
        "absent", "dropped weights are absent everywhere, or zeros that regrow, as released", released="released",
    )  # fmt: skip

    @property
    def drops_from(self) -> int:
        """First round in which weights are dropped."""
        return self.drop_from

    @property
    def only_mean(self) -> str:
        """The released rules average zeros that regrow."""
        return "dropped=released averages zeros that regrow; use dropped=absent" if self.dropped == "released" else ""

    def notes(self, rounds: int) -> Sequence[str]:
        """Say that a run is too short for anything to be dropped."""
        if self.drop_from < rounds:
            return ()
        return (
            f"no weight is dropped in training: drop_from is {self.drop_from} and the run has {rounds} rounds; "
            f"set drop_from below {rounds}",
        )


@extra(
    "drop", "weights with high dropout rates neither sent nor used", paper=_METAVD, options=DropOptions,
    needs=POSTERIOR, because="drops weights by the dropout rates of a posterior", listed=("metavd",),
)  # fmt: skip
def drop(parts: Parts, o: DropOptions) -> Parts:
    """Drop weights whose dropout rate is high from the messages and from the model."""
    assert parts.posterior is not None
    before, serve = parts.emit, parts.serve
    released = o.dropped == "released"
    emits = core.emit.dropping(before, parts.posterior, threshold=o.threshold, start=o.drop_from, released=released)
    if not released:
        return replace(parts, emit=emits)
    # The released code tests with dense weights.
    return replace(parts, emit=emits, serve=lambda _: serve(before), undropped=before)
