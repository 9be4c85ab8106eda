"""Every method by name: `base[+regulariser][+option]`, each a composition of the five slots.

A regulariser turns `Parts` into `Parts`, a base turns `Parts` into an `Algorithm`; `reptile+metavd+dp` is
reptile(dp(metavd(plain))). A new method is one function and one line in a table below.
"""

from __future__ import annotations

import difflib
import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..core import aggregate, emit, gp_slots, local, objective, posterior, rng, server
from ..core.model import attach, headless, reset
from ..core.optim import Groups, Sgd
from ..core.posterior import Choice, InputLogAlpha, Posterior, logit
from ..core.predict import posterior_draws, posterior_mean
from ..core.types import (
    NEW,
    Admit,
    Aggregate,
    Algorithm,
    Batch,
    Emit,
    Local,
    Model,
    Objective,
    Predict,
    Sampling,
    Server,
)
from ..tree import Params

Value = bool | int | float | str
Options = Mapping[str, Any]


class MethodError(ValueError):
    """A method, option or value that does not exist or cannot be combined; the text says what would be right."""


@dataclass(frozen=True)
class Option:
    """A hyper-parameter: its default, what it means, what it may be, and what the paper searched."""

    name: str
    default: Value
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] | None = None
    search: tuple[float, ...] | None = None

    def check(self, value: Any) -> Value:
        """Return the value in the option's type, or say in one sentence what is wrong with it."""
        kind = type(self.default)
        try:
            if kind is bool:
                result: Value = {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
            elif kind is int:
                result = int(str(value))
            else:
                result = kind(value)
        except (ValueError, KeyError, TypeError):
            raise MethodError(f"option {self.name} is {value!r}, but must be {_KINDS[kind]}") from None
        if self.choices is not None and result not in self.choices:
            raise MethodError(f"option {self.name} is {value!r}, but must be one of {', '.join(self.choices)}")
        if not isinstance(result, str):
            low = -math.inf if self.low is None else self.low
            high = math.inf if self.high is None else self.high
            if not low <= result <= high or result == math.inf:
                right = f"lie between {low:g} and {high:g}" if high < math.inf else f"be at least {low:g}"
                raise MethodError(f"option {self.name} is {value}, but must {right}")
        return result


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True)
class Setting:
    """What a method must know of the federation it runs in."""

    num_clients: int
    num_classes: int
    rounds: int
    server_rows: Callable[[Tensor], Tensor] | None = None
    """A round's key -> the server's own unlabelled rows (D, ...), where the method asks for them."""


@dataclass(frozen=True)
class Parts:
    """A method in the making: what regularisers may change before a base puts it together."""

    setting: Setting
    model: Model
    emit: Emit
    inner: Objective
    outer: Objective
    aggregate: Aggregate
    groups: dict[str, Sgd]
    predict: Predict
    noise: Posterior | None = None
    serve: Callable[[Emit], Emit] = lambda emits: emits
    """From what is emitted in training to what is emitted when a client is to be used or tested."""
    personal: Callable[[Objective], Objective] = lambda loss: loss
    """From what is minimised in training to what is minimised when a client is to be used or tested."""
    admit: Callable[[Emit], Admit] | None = None
    wrap: Callable[[Server], Server] = lambda base: base
    inner_clip: bool = True
    adapts: bool = False
    sparse: bool = True
    owned_by_share: bool = False


# --- options -----------------------------------------------------------------------------------------------------

_RATES = tuple(round(0.005 * i, 3) for i in range(1, 7))
_SERVER_RATES = (0.6, 0.7, 0.8, 0.9, 1.0)

TRAINING = (
    Option("batch", 64, "samples in a local batch", 1),
    Option("local_epochs", 5, "passes over a client's data in a round", 1),
    Option("lr", 0.02, "local learning rate; also of the inner step and of adaptation", 0, search=_RATES),
    Option("clip", 5.0, "largest norm of a local gradient", 0),
    Option("server_clip", 100.0, "largest norm of the server's gradient", 0),
)
AVERAGING = (
    Option("server_lr", 1.0, "server learning rate; 1 lands on the clients' mean", 0),
    Option("server_momentum", 0.0, "server momentum", 0, 1),
)
META = (
    Option("server_lr", 0.9, "server learning rate", 0, search=_SERVER_RATES),
    Option("server_momentum", 0.9, "server momentum", 0, 1),
)
ADAPTING = (Option("adapt_steps", 1, "gradient steps of personalisation before use and test", 0),)
OUTER = (
    *ADAPTING,
    Option("outer_lr", 0.1, "rate of the meta step", 0, search=tuple(round(0.01 * i, 2) for i in range(1, 11))),
    Option("meta_batches", "disjoint", "support and query batches", choices=("disjoint", "independent")),
)
POSTERIOR = (
    Option("layers", "auto", "layers with a posterior, by name, with commas; auto: the one before the output"),
    Option("per", "weight", "one rate a weight, or one log alpha an input unit", choices=("weight", "input")),
    Option("spread", "logvar", "learn log sigma^2 or log alpha", choices=("logvar", "logalpha", *posterior.added())),
    Option("rate", 0.0, "initial dropout rate of a typical weight; 0: log sigma^2 = -8.5", 0, 0.999),
    Option("floor", -17.0, "lowest log sigma^2 (or log alpha)", -60, 8),
    Option("ceiling", 0.0, "highest log sigma^2; not with clamp=released", -60, 8.5),
    Option("max_rate", 0.99, "highest dropout rate where log alpha is learned", 0.001, 0.9999),
    Option("clamp", "inward", "gradients past floor and ceiling: those that lead back pass, all, or none (released)",
           choices=("inward", "through", "released")),
    Option("beta", 10.0, "weight of the KL", 0, search=tuple(float(i) for i in range(1, 16))),
    Option("beta_ramp", 0.02, "share of all rounds in which beta rises from 0", 0, 1),
    Option("kl", "mean", "KL as mean over weights x beta, or as the ELBO's sum/n x beta", choices=("mean", "elbo")),
    Option("kl_epsilon", "weight", "the KL's 1e-13 is added to theta^2, or to sigma^2", choices=("weight", "variance")),
    Option("test_beta", "next", "round whose beta personalisation takes: the next, or the last that was trained",
           choices=("next", "last")),
    Option("draws", 3, "noise draws a training step, their logits averaged", 1),
    Option("layer_init", "uniform", "start of a noisy layer: U(+-1/sqrt(fan in)) or the model's own",
           choices=("uniform", "model")),
    Option("predict", "mean", "answer at the posterior mean, or by averaging over draws", choices=("mean", "draws")),
    Option("samples", 10, "draws of a prediction with predict=draws", 1),
    Option("average", "probs", "average the draws' probabilities or their logits", choices=("probs", "logits")),
    Option("test_noise", "own", "spread at test: the client's own, or -8.5 for all", choices=("own", "constant")),
)  # fmt: skip
SPREAD_GROUP = (
    Option("spread_lr", 0.9, "server rate of the spread", 0),
    Option("spread_momentum", 0.6, "server momentum of the spread", 0, 1),
    Option("spread_decay", 0.0, "weight decay on the spread itself", 0),
)
OWNED_ROWS = (
    Option("owned", "one", "weight of a client's step on rows that it alone owns", choices=("one", "share")),
    Option("owned_decay", "sparse", "rows decay when their client takes part, or always", choices=("sparse", "dense")),
)
HYPER = (
    Option("hyper_width", 200, "hidden units of the hypernetwork", 1),
    Option("hyper_depth", 3, "hidden layers of the hypernetwork", 0),
    Option("embedding", 0, "size of a client's embedding; 0: 1 + clients/4, at most 64", 0),
    Option("hyper_lr", 0.9, "server rate of the hypernetwork", 0),
    Option("hyper_momentum", 0.6, "its momentum", 0, 1),
    Option("hyper_decay", 5e-4, "its weight decay", 0),
    Option("embed_lr", 0.9, "server rate of the embeddings", 0),
    Option("embed_momentum", 0.3, "their momentum", 0, 1),
    Option("embed_decay", 5e-4, "their weight decay", 0),
    Option("newcomer", "mean", "embedding of an unseen client: mean of the known, or fitted", choices=("mean", "fit")),
    Option("fit_steps", 5, "steps of that fit", 1),
    Option("fit_lr", 0.1, "its rate", 0),
)
DROPOUT = (
    Option("rate", 0.2, "fixed Gaussian dropout rate on the inputs of the layers", 0.001, 0.999),
    Option("layers", "auto", "layers with dropout on their inputs, with commas; auto: all linear ones"),
)
SNIP = (
    Option("sparsity", 0.7, "share of a layer's weights that is pruned after the first round", 0, 0.999),
    Option("layers", "auto", "pruned layers, with commas; auto: the one before the output"),
    Option("saliency", "before", "taken before the server's step, or as released", choices=("before", "released")),
)
DP = (
    Option("threshold", 0.9, "weights with a higher dropout rate are dropped", 0, 1),
    Option("drop_from", 150, "first round in which weights are dropped", 0),
    Option("dropped", "absent", "dropped weights are absent everywhere, or zeros that regrow, as released",
           choices=("absent", "released")),
)  # fmt: skip
FEDPROX = (Option("mu", 0.1, "weight of the proximal term", 0),)
PERFEDAVG = (
    Option("product", "exact", "Hessian-vector product", choices=("exact", "difference", "released")),
    Option("delta", 1e-4, "step of the finite difference", 1e-12),
    Option("trust", 0.1, "largest curvature term relative to the gradient", 0, 1e6),
)
FEDBE = (
    Option("server_share", 0.04, "share of every client's rows that the server gets, unlabelled", 0, 0.5),
    Option("teachers", 10, "models drawn around the clients'", 0),
    Option("teacher_law", "gaussian", "their distribution", choices=("gaussian", "dirichlet")),
    Option("teacher_scale", 0.1, "standard deviations of a Gaussian draw", 0),
    Option("concentration", 1.0, "of the Dirichlet distribution", 1e-6),
    Option("average", "probs", "average the teachers' probabilities or logits", choices=("probs", "logits")),
    Option("temperature", 0.5, "sharpening of their average; 1: none", 1e-3),
    Option("distill_lr", 0.01, "rate of distillation", 0),
    Option("distill_steps", 72, "steps of distillation", 4),
    Option("distill_batch", 64, "rows in a step", 1),
)
PFEDGP = (
    Option("local_steps", 1, "steps a round, each on all of a client's rows", 1),
    Option("chains", 20, "Gibbs chains", 1),
    Option("sweeps", 5, "Gibbs sweeps", 1),
    Option("inducing", 0, "inducing points a class; 0: 30 / classes, at least 1", 0),
    Option("limit", 400, "largest number of own rows a client conditions on; above it, inducing points join", 2),
    Option("novel", "laplace", "classes never seen: Laplace's share, or probability 0", choices=("laplace", "zero")),
    Option("extra_points", 0, "the paper's protocol: labelled points of every class given at evaluation (40 or 50)", 0),
)

RELEASED: dict[str, Value] = {
    "clamp": "released", "floor": -8.5, "kl_epsilon": "variance", "test_beta": "last", "test_noise": "constant",
    "predict": "draws", "samples": 3, "average": "logits",
    "spread_decay": 5e-4, "owned": "share", "owned_decay": "dense", "meta_batches": "independent",
    "product": "released", "saliency": "released", "dropped": "released", "temperature": 1.0, "distill_lr": 0.9,
}  # fmt: skip
"""The released code's rules, as values of the options above; each method takes those it has."""

VARIANT = Option("variant", "default", "preset of all options: ours, or the released code's rules",
                 choices=("default", "released"))  # fmt: skip


# --- regularisers: Parts -> Parts ------------------------------------------------------------------------------------


def plain(model: Model, setting: Setting, o: Options) -> Parts:
    """No regulariser: shared weights, cross-entropy, plain averaging."""
    loss = objective.cross_entropy(model)
    groups = {"": Sgd(o["server_lr"], o["server_momentum"])}
    return Parts(setting, model, emit.shared(model), loss, loss, aggregate.mean, groups, posterior_mean(model))


def _named(model: Model, text: str, default: Sequence[str]) -> tuple[str, ...]:
    names = tuple(default) if text == "auto" else tuple(part.strip() for part in text.split(",") if part.strip())
    for name in names:
        if name not in model.layers:
            raise MethodError(f"option layers names {name!r}, but the model's layers are {', '.join(model.layers)}")
    if not names:
        raise MethodError(f"option layers is {text!r}, but must name at least one of {', '.join(model.layers)}")
    return names


def linear_layers(model: Model) -> list[str]:
    """Names of the layers whose weight is a matrix."""
    return [name for name, shape in model.layers.items() if len(shape) == 2]


def _noise(model: Model, o: Options) -> Posterior:
    """Build the posterior from the options."""
    kind = posterior.named("input" if o["per"] == "input" else o["spread"])
    layers = _named(model, o["layers"], linear_layers(model) if kind.everywhere else model.variational)
    choice = Choice(**{field.name: o[field.name] for field in fields(Choice)})
    try:
        return kind.build(layers, lambda: model.init(rng.key(0)), choice)
    except ValueError as error:
        raise MethodError(str(error)) from None


def _entries(parts: Parts) -> list[str]:
    """Names of what travels for the posterior, where there is one."""
    if parts.noise is None:
        return []
    layers = parts.model.layers
    return [name for layer in parts.noise.layers for name in parts.noise.entries(layer, layers[layer])]


def _posterior(parts: Parts, o: Options, extend: Callable[[Emit, Model, Posterior], Emit]) -> Parts:
    """What VD, EnsembleVD and MetaVD share: a posterior, its ELBO, precision-weighted aggregation, prediction."""
    model = parts.model
    if o["layer_init"] == "uniform" and o["per"] == "weight" and model.fresh:
        model = reset(model, _named(model, o["layers"], model.variational))
    noise = _noise(model, o)
    model = attach(model, noise)
    loss = objective.cross_entropy(model, o["draws"])
    beta = objective.ramp(o["beta"], parts.setting.rounds, o["beta_ramp"])
    emits = extend(emit.shared(model), model, noise)
    answer = posterior_mean(model) if o["predict"] == "mean" else posterior_draws(model, o["samples"], o["average"])
    return replace(
        parts,
        model=model,
        emit=emits,
        serve=(lambda used: emit.constant(used, model, noise, -8.5)) if o["test_noise"] == "constant" else parts.serve,
        inner=loss,
        outer=objective.total(loss, objective.divergence(noise, beta, o["kl"])),
        personal=objective.a_round_earlier if o["test_beta"] == "last" else parts.personal,
        aggregate=aggregate.precision(noise),
        predict=answer,
        noise=noise,
    )


def _owned(parts: Parts, o: Options, group: Sgd) -> Parts:
    groups = parts.groups | {emit.OWNED: group}
    return replace(parts, groups=groups, owned_by_share=o["owned"] == "share", sparse=o["owned_decay"] == "sparse")


def _spread_group(o: Options) -> Sgd:
    return Sgd(o["spread_lr"], o["spread_momentum"], o["spread_decay"])


def vd(parts: Parts, o: Options) -> Parts:
    """One learned spread for all clients."""
    parts = _posterior(parts, o, emit.one_for_all)
    groups = parts.groups | {name: _spread_group(o) for name in _entries(parts)}
    # The released code evaluates VD with its own spread, and only the others with a constant.
    return replace(parts, groups=groups, serve=lambda emits: emits)


def ensemblevd(parts: Parts, o: Options) -> Parts:
    """One learned spread for each client."""
    num = parts.setting.num_clients
    parts = _posterior(parts, o, lambda base, model, noise: emit.one_per_client(base, model, noise, num))
    return _owned(parts, o, _spread_group(o))


def metavd(parts: Parts, o: Options) -> Parts:
    """Each client's spread predicted by a hypernetwork from the client's embedding."""
    num = parts.setting.num_clients

    def extend(base: Emit, model: Model, noise: Posterior) -> Emit:
        return emit.meta(
            base, model, noise, num, size=o["embedding"] or None, width=o["hyper_width"], depth=o["hyper_depth"],
            released=o["clamp"] == "released",
        )  # fmt: skip

    parts = _posterior(parts, o, extend)
    if o["newcomer"] == "fit":
        loss = parts.personal(parts.outer)
        parts = replace(parts, admit=lambda used: emit.fitted(used, loss, steps=o["fit_steps"], lr=o["fit_lr"]))
    groups = parts.groups | {"server.hyper.": Sgd(o["hyper_lr"], o["hyper_momentum"], o["hyper_decay"])}
    return _owned(replace(parts, groups=groups), o, Sgd(o["embed_lr"], o["embed_momentum"], o["embed_decay"]))


def dropout(parts: Parts, o: Options) -> Parts:
    """Fixed Gaussian dropout on the inputs of the linear layers while training."""
    layers = _named(parts.model, o["layers"], linear_layers(parts.model))
    model = attach(parts.model, InputLogAlpha(layers, offset=logit(o["rate"])))
    loss = objective.cross_entropy(model, 1)
    return replace(parts, model=model, inner=loss, outer=loss, predict=posterior_mean(model))


def snip(parts: Parts, o: Options) -> Parts:
    """Prune one layer by saliency after the first round."""
    layers = _named(parts.model, o["layers"], parts.model.variational)
    released = o["saliency"] == "released"
    emits = emit.unmasked(parts.emit, layers)

    def wrap(base: Server) -> Server:
        return server.prune(base, layers, sparsity=o["sparsity"], lr=o["lr"], released=released)

    if released:
        return replace(
            parts,
            emit=emit.kept(emits, layers),
            serve=lambda _: emit.zeroed(emits, layers),
            wrap=wrap,
            inner_clip=False,
        )
    return replace(parts, emit=emits, wrap=wrap)


def dp(parts: Parts, o: Options) -> Parts:
    """Drop weights whose dropout rate is high from the messages and from the model."""
    assert parts.noise is not None
    released = o["dropped"] == "released"
    before, serve = parts.emit, parts.serve
    emits = emit.dropping(before, parts.noise, threshold=o["threshold"], start=o["drop_from"], released=released)
    # The released code tests with dense weights.
    return replace(parts, emit=emits, serve=(lambda _: serve(before)) if released else serve)


def ft(parts: Parts, o: Options) -> Parts:  # noqa: ARG001
    """Fine-tune before use and test."""
    return replace(parts, adapts=True)


# --- bases: Parts -> Algorithm -----------------------------------------------------------------------------------


def _assemble(parts: Parts, o: Options, steps: Local, batches: Sampling) -> Algorithm:
    """Put the slots together; personalisation takes gradient steps where the method adapts."""
    groups = Groups(parts.groups, sparse=parts.sparse)
    pulled = server.pull(
        parts.emit, parts.aggregate, groups, clip=o["server_clip"], owned_by_share=parts.owned_by_share
    )
    used = parts.serve(parts.emit)

    def admit(params: Params, round: Tensor, batches: Sequence[Batch]) -> Params:  # noqa: ARG001
        return used.apply(params, torch.full((), NEW, dtype=torch.int64, device=round.device), round)

    return Algorithm(
        emit=parts.emit,
        local=steps,
        server=parts.wrap(pulled),
        personalize=local.sgd(parts.personal(parts.outer), lr=o["lr"], clip=o["clip"]) if parts.adapts else local.keep,
        predict=parts.predict,
        serve=used.apply,
        admit=admit if parts.admit is None else parts.admit(used),
        train_batches=batches,
        # A client that does not adapt still needs a batch where its embedding is to be fitted.
        personal_batches=Sampling(o["batch"], steps=o["adapt_steps"] if parts.adapts else int(parts.admit is not None)),
        noise=parts.noise,
    )


def fedavg(parts: Parts, o: Options) -> Algorithm:
    """Local SGD, averaged by data size."""
    steps = local.sgd(parts.outer, lr=o["lr"], clip=o["clip"])
    return _assemble(parts, o, steps, Sampling(o["batch"], o["local_epochs"]))


def fedprox(parts: Parts, o: Options) -> Algorithm:
    """FedAvg with a pull towards what was received."""
    return fedavg(replace(parts, outer=objective.total(parts.outer, objective.proximal(o["mu"]))), o)


def reptile(parts: Parts, o: Options) -> Algorithm:
    """FedAvg with server momentum, and one adaptation step before use."""
    return fedavg(replace(parts, adapts=True), o)


def _endings(parts: Parts) -> list[str]:
    """Last words of the names of what travels for the posterior, which the inner step leaves alone."""
    return [name.rpartition(".")[2] for name in _entries(parts)]


def _meta_batches(o: Options) -> Sampling:
    return Sampling(o["batch"], o["local_epochs"], group=3, independent=o["meta_batches"] == "independent")


def maml(parts: Parts, o: Options) -> Algorithm:
    """Second-order meta-learning of a start from which one step adapts."""
    steps = local.maml(
        parts.inner, parts.outer, lr=o["lr"], outer_lr=o["outer_lr"], clip=o["clip"],
        inner_clip=o["clip"] if parts.inner_clip else None, frozen=_endings(parts),
    )  # fmt: skip
    return _assemble(replace(parts, adapts=True), o, steps, _meta_batches(o))


def perfedavg(parts: Parts, o: Options) -> Algorithm:
    """MAML with a Hessian-vector product in place of second-order differentiation."""
    steps = local.hf_maml(
        parts.inner, parts.outer, lr=o["lr"], outer_lr=o["outer_lr"], clip=o["clip"], delta=o["delta"],
        frozen=_endings(parts), product=o["product"], trust=o["trust"],
    )  # fmt: skip
    return _assemble(replace(parts, adapts=True), o, steps, _meta_batches(o))


def fedbe(parts: Parts, o: Options) -> Algorithm:
    """FedAvg whose mean is taught by an ensemble of models on the server's unlabelled rows."""
    config = server.Distillation(
        samples=o["teachers"], sampling=o["teacher_law"], scale=o["teacher_scale"], concentration=o["concentration"],
        average=o["average"], temperature=o["temperature"], lr=o["distill_lr"], steps=o["distill_steps"],
        batch=o["distill_batch"],
    )  # fmt: skip
    rows, model = parts.setting.server_rows, parts.model
    if rows is None:
        raise MethodError("fedbe needs unlabelled rows on the server; give the federation a server_share above 0")
    return fedavg(replace(parts, wrap=lambda base: server.distill(base, model, rows, config)), o)


def pfedgp(parts: Parts, o: Options) -> Algorithm:
    """Shared features, a Gaussian-process tree on each client's own classes."""
    classes = parts.setting.num_classes
    points = o["inducing"] or max(1, 30 // classes)
    tree = gp_slots.Tree(
        num_classes=classes, chains=o["chains"], sweeps=o["sweeps"], limit=o["limit"], novel=o["novel"]
    )
    model = headless(parts.model)
    emits = gp_slots.with_points(emit.shared(model), model, classes, points)
    groups = Groups(parts.groups)
    return Algorithm(
        emit=emits,
        local=local.sgd(gp_slots.predictive_likelihood(model, tree), lr=o["lr"], clip=o["clip"]),
        server=server.pull(emits, aggregate.mean, groups, clip=o["server_clip"], by_size=False),
        personalize=gp_slots.conditioned(model, tree),
        predict=gp_slots.tree_prediction(model, tree),
        serve=emits.apply,
        admit=gp_slots.borrowing(emits),
        train_batches=Sampling(0, steps=o["local_steps"], full=True),
        personal_batches=Sampling(0, steps=1, full=True, augment=False, extra=o["extra_points"]),
    )


# --- the tables ------------------------------------------------------------------------------------------------------


Built = TypeVar("Built")


@dataclass(frozen=True)
class Entry(Generic[Built]):
    """How something is built, its line of description, its paper and its options."""

    build: Callable[[Parts, Options], Built]
    text: str
    paper: str
    options: tuple[Option, ...]


Base = Entry[Algorithm]
Regulariser = Entry[Parts]

_JIANG = "Jiang et al. 2019, arXiv:1909.12488"
_METAVD = "Jeon et al., NeurIPS 2023"
_GP_TRAINING = (
    Option("lr", 0.05, "local learning rate", 0, search=tuple(round(0.01 * i, 2) for i in range(3, 11))),
    Option("clip", 50.0, "largest norm of a local gradient", 0),
    Option("server_clip", 100.0, "largest norm of the server's gradient", 0),
)

BASES: dict[str, Base] = {
    "fedavg": Base(fedavg, "local SGD, averaged by data size", "McMahan et al., AISTATS 2017", TRAINING + AVERAGING),
    "fedprox": Base(fedprox, "FedAvg with a proximal term", "Li et al., MLSys 2020", TRAINING + AVERAGING + FEDPROX),
    "reptile": Base(reptile, "FedAvg with server momentum and one adaptation step", _JIANG, TRAINING + META + ADAPTING),
    "maml": Base(maml, "second-order MAML on every client", "Chen et al. 2018, arXiv:1802.07876",
                 TRAINING + META + OUTER),
    "perfedavg": Base(perfedavg, "Hessian-free MAML", "Fallah et al., NeurIPS 2020",
                      TRAINING + META + OUTER + PERFEDAVG),
    "fedbe": Base(fedbe, "FedAvg distilled from a Bayesian ensemble", "Chen and Chao, ICLR 2021",
                  TRAINING + AVERAGING + FEDBE),
    "pfedgp": Base(pfedgp, "shared features, a Gaussian-process tree a client", "Achituve et al., NeurIPS 2021",
                   _GP_TRAINING + AVERAGING + PFEDGP),
}  # fmt: skip

REGULARISERS: dict[str, Regulariser] = {
    "metavd": Regulariser(metavd, "variational dropout, its rates from a hypernetwork", _METAVD,
                          POSTERIOR + HYPER + OWNED_ROWS),
    "vd": Regulariser(vd, "variational dropout, one set of rates for all", "Kingma et al., NeurIPS 2015",
                      POSTERIOR + SPREAD_GROUP),
    "ensemblevd": Regulariser(ensemblevd, "variational dropout, a set of rates a client", _METAVD,
                              POSTERIOR + SPREAD_GROUP + OWNED_ROWS),
    "dropout": Regulariser(dropout, "fixed Gaussian dropout", "Srivastava et al., JMLR 2014", DROPOUT),
    "snip": Regulariser(snip, "one layer pruned by saliency after round 1", "Lee et al., ICLR 2019", SNIP),
}  # fmt: skip

EXTRAS: dict[str, Regulariser] = {
    "dp": Regulariser(dp, "weights with high dropout rates neither sent nor used", _METAVD, DP),
    "ft": Regulariser(ft, "fine-tuned before use", "Wang et al. 2019, arXiv:1910.10252", ADAPTING),
}

PARTS = ChainMap(REGULARISERS, EXTRAS)

REGULARISED = ("fedavg", "reptile", "maml", "perfedavg")

NAMES: tuple[str, ...] = (
    *BASES,
    "fedavg+ft",
    *(f"{base}+{part}" for part in REGULARISERS for base in REGULARISED),
    *(f"{base}+metavd+dp" for base in REGULARISED),
)
"""Every method that is listed, run and tested by name."""


def parse(name: str) -> list[str]:
    """Split a method's name into its parts, or say in one sentence why there is no such method."""
    base, *rest = name.lower().split("+")
    known = list(PARTS)
    if base not in BASES:
        raise MethodError(f"unknown method {name!r}; {_nearest(name, NAMES)}")
    for part in rest:
        if part not in known:
            raise MethodError(f"unknown part {part!r} of method {name!r}; {_nearest(part, known)}")
    chosen = [part for part in rest if part in REGULARISERS]
    if len(chosen) > 1:
        raise MethodError(f"method {name!r} has the regularisers {' and '.join(chosen)}, but one at most is possible")
    if len(set(rest)) < len(rest):
        raise MethodError(f"method {name!r} names a part twice; each may stand once")
    if chosen and base not in REGULARISED:
        why = f"+{chosen[0]} goes with {', '.join(REGULARISED)}, not with {base}"
        raise MethodError(f"method {name!r} is not offered: {why}")
    if "dp" in rest and "metavd" not in rest:
        raise MethodError(
            f"method {name!r} is not possible: +dp drops weights by the dropout rates of +metavd, which {base} lacks; "
            "use for example reptile+metavd+dp"
        )
    if "ft" in rest and base not in {"fedavg", "fedprox"}:
        raise MethodError(f"method {name!r} is not possible: +ft adds the adaptation step that {base} does not take "
                          "or already has; it goes with fedavg and fedprox")  # fmt: skip
    return [base, *chosen, *(part for part in EXTRAS if part in rest)]


def check(name: str) -> str:
    """Return the method's name in its canonical spelling, or raise."""
    return "+".join(parse(name))


def _nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, 3, 0.4) or list(known)[:5]
    return f"did you mean {' or '.join(close)}?"


def options_of(name: str) -> dict[str, Option]:
    """Return the options of a method by name, a part's own overriding those of what it extends."""
    base, *rest = parse(name)
    options = {option.name: option for option in BASES[base].options}
    for part in rest:
        options |= {option.name: option for option in PARTS[part].options}
    return options | {VARIANT.name: VARIANT}


def resolve(name: str, given: Options | None = None) -> dict[str, Value]:
    """Return every option's value: the defaults, over them the variant's, over them what was given."""
    known, given = options_of(name), dict(given or {})
    for key in given:
        if key not in known:
            raise MethodError(f"method {name!r} has no option {key!r}; {_nearest(key, list(known))}")
    values = {key: option.default for key, option in known.items()}
    if VARIANT.check(given.get("variant", "default")) == "released":
        values |= {key: value for key, value in RELEASED.items() if key in known}
    return values | {key: known[key].check(value) for key, value in given.items()}


def algorithm(name: str, model: Model, setting: Setting, options: Options | None = None) -> Algorithm:
    """Build a method for a model and a federation."""
    base, *rest = parse(name)
    o = resolve(name, options)
    parts = plain(model, setting, o)
    for part in rest:
        parts = PARTS[part].build(parts, o)
    return BASES[base].build(parts, o)


def describe(name: str) -> dict[str, Any]:
    """Return a method's line of description, its paper and its options, as plain values."""
    base, *rest = parse(name)
    pieces: list[Base | Regulariser] = [BASES[base], *(PARTS[part] for part in rest)]
    return {
        "name": name,
        "text": "; ".join(piece.text for piece in pieces),
        "paper": "; ".join(dict.fromkeys(piece.paper for piece in pieces)),
        "options": [
            {key: value for key, value in vars(option).items() if value is not None}
            for option in options_of(name).values()
        ],
    }
