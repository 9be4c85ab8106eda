"""What the server makes of the answers.

Shape letters: C clients, K classes, D distillation rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from .. import tree
from ..tree import Params
from . import rng
from .aggregate import bounded, lower_median, votes
from .diff import grad, pulled
from .emit import OWNED
from .local import FIXED, movable
from .objective import soft_cross_entropy
from .optim import Groups, remembered
from .posterior import Posterior, per_weight
from .rules import Ballot, Rule, consensus
from .types import Aggregate, Emit, Model, Server, ServerState, Summed, Take, Update

_TINY = 1e-30
"""Keeps the shares of a cohort without any rows at 0."""
_MEAN = "mean/"
"""Begins the names of sums that are means of entries."""
_PART = 256
"""Clients whose pull towards a consensus is computed at once, where answers were added up."""


def _shares(weight: Tensor, of: Tensor, *, by_size: bool = True) -> Tensor:
    """Return clients' shares (n,) of a cohort with these weights (C,): by weight, or all alike."""
    weight, of = (weight, of) if by_size else (torch.ones_like(weight), torch.ones_like(of))
    return weight / of.sum().clamp(min=_TINY)


def limited(base: Server, most: float) -> Server:
    """Let no client weigh more than `most` times the median client of its cohort."""

    def take(state: ServerState, update: Update, weight: Tensor) -> Params:
        assert base.take is not None
        lighter = update._replace(weight=update.weight.minimum(most * lower_median(weight)))
        return base.take(state, lighter, bounded(weight, most))

    return Server(
        base.init,
        lambda state, update: base.update(state, update._replace(weight=bounded(update.weight, most))),
        base.take and take,
    )


def _pulls(
    emit: Emit,
    state: ServerState,
    clients: Tensor,
    gap: Callable[[Params], Params],
    among: Callable[[str], bool] = lambda _: True,
) -> Params:
    """Return sum_i J_emit(i)^T gap_i over clients and some of the entries that they are sent."""
    fixed = {name: value for name, value in state.params.items() if name.rpartition(".")[2] in FIXED}

    def emitted(moving: Params) -> Params:
        out = vmap(emit.apply, (None, 0, None))(fixed | moving, clients, state.round)
        return tree.select(movable(out), among)

    return pulled(emitted, movable(state.params), gap)


def _apart(update: Update, targets: Params, share: Tensor, *, anew: bool) -> Callable[[Params], Params]:
    """Return how far what clients were sent is from their targets, times their shares; see `pull` for `anew`."""

    def gap(computed: Params) -> Params:
        if update.moved:
            found = tree.map(torch.neg, update.moved)
        else:
            sent = computed if anew else tree.select(movable(update.sent), computed.__contains__)
            found = tree.map(torch.sub, sent, targets)
        return tree.map(lambda value: torch.einsum("c,c...->c...", share, value), found)

    return gap


def _added(emit: Emit, aggregate: Summed, state: ServerState, update: Update, share: Tensor) -> Params:
    """Return the gradient from sums; who pulls towards a consensus is known only now that there is one."""
    gradient = tree.under(update.sums, "gradient/")
    if not aggregate.names:
        return gradient
    common = aggregate.consensus(tree.under(update.sums, "votes/"), state.params)
    for first in range(0, len(share), _PART):
        some = share[first : first + _PART]

        def gap(computed: Params, some: Tensor = some) -> Params:
            return {name: torch.einsum("c,c...->c...", some, value - common[name])
                    for name, value in computed.items()}  # fmt: skip

        more = _pulls(emit, state, update.client[first : first + _PART], gap, common.__contains__)
        gradient = tree.map(torch.add, gradient, more)
    return gradient


def _with_whole_rows(gradient: Params, clients: Tensor, share: Tensor) -> Params:
    """Give the rows that clients own their own client's gradient with weight 1: no one else shares them."""
    whole = dict(gradient)
    for name, value in gradient.items():
        if name.startswith(OWNED):
            inverse = torch.where(share > 0, 1.0 / share, torch.zeros_like(share))
            rows = torch.einsum("c,c...->c...", inverse, value[clients])
            whole[name] = value.index_copy(0, clients, rows)
    return whole


def _only_sent(params: Params, slots: Params, masks: Params, before: ServerState) -> tuple[Params, Params]:
    """Leave a weight that nobody was sent where it was, and so what is remembered of it."""
    params, slots = dict(params), dict(slots)
    for name, mask in masks.items():
        weights = name.removesuffix("mask") + "weight"
        sent_to_some = per_weight(mask, params[weights]) > 0
        params[weights] = torch.where(sent_to_some, params[weights], before.params[weights])
        for each in remembered(weights, slots):
            slots[each] = torch.where(sent_to_some, slots[each], before.slots[each])
    return params, slots


def pull(
    emit: Emit,
    aggregate: Aggregate,
    groups: Groups,
    *,
    clip: float | None = 100.0,
    by_size: bool = True,
    owned_by_share: bool = False,
    anew: bool = False,
) -> Server:
    """Pull the server's parameters so that what it emits moves towards the targets.

        gradient = sum_i w_i J_emit(i)^T (sent_i - target_i)        one vector-Jacobian product

    sent_i is what client i received, not what `emit` computes anew: where a client moves a spread by less than the
    rounding between two ways to compute it, that rounding would be most of the gradient. anew=True takes the difference
    to what `emit` computes, for a server whose `emit` is not what clients receive.

    With `emit = shared` and SGD(1) this is FedAvg, with server momentum Reptile, with a hypernetwork inside `emit`
    MetaVD's rule for the hypernetwork and the embeddings. w_i is the client's share of the data (or 1/C). A
    client-owned row takes its own client's step with weight 1; owned_by_share=True weighs it by w_i, as the released
    code does.

    The gradient is a sum over clients, and so are the votes of a `Summed` aggregate: `take` adds them up part by part.
    Where answers pull towards a consensus, their pull waits for it: what clients were sent is then emitted again, in
    parts, which gives the same bits for the weights that all share.
    """

    def init(key: Tensor) -> ServerState:
        params = emit.init(rng.fold(key, 0))
        round = next(iter(params.values())).new_zeros(())
        return ServerState(params, groups.begin(movable(params)), round, key)

    def take(state: ServerState, update: Update, weight: Tensor) -> Params:
        assert isinstance(aggregate, Summed)
        share, common = _shares(update.weight, weight, by_size=by_size), aggregate.names
        gap = _apart(update, update.params, share, anew=anew)
        gradient = _pulls(emit, state, update.client, gap, lambda name: name not in common)
        return (
            {f"gradient/{name}": value for name, value in gradient.items()}
            | {f"votes/{name}": value for name, value in aggregate.sums(update.params, share).items()}
            | {f"sent/{name}": value.sum(0) for name, value in update.params.items() if name.endswith(".mask")}
        )

    def update(state: ServerState, update: Update) -> ServerState:
        share = _shares(update.weight, update.weight, by_size=by_size)
        if isinstance(aggregate, Summed) and update.sums:
            gradient, masks = _added(emit, aggregate, state, update, share), tree.under(update.sums, "sent/")
        else:
            gap = _apart(update, aggregate(update.params, share), share, anew=anew)
            gradient = _pulls(emit, state, update.client, gap)
            masks = {name: mask.amax(0) for name, mask in update.params.items() if name.endswith(".mask")}
        gradient = gradient if owned_by_share else _with_whole_rows(gradient, update.client, share)
        moved = groups.step(state.params, tree.clip(gradient, clip), state.slots, update.client)
        return ServerState(*_only_sent(*moved, masks, state), state.round + 1, state.key)

    return Server(init, update, take if isinstance(aggregate, Summed) else None)


def guarded(base: Server, rule: Rule, posterior: Posterior | None = None, *, by_size: bool = True) -> Server:
    """Let a rule decide what a server is told: the consensus in place of every client's own answer.

        told_i = sent_i + consensus of {answer_j - sent_j}    of what all share, which the server holds by that name
        told_i = sent_i + trust_i (answer_i - sent_i)         of what is the client's own, which is not mixed

    The differences are to what was sent, to the bit. by_size=False: every client counts alike.
    """

    def update(state: ServerState, update: Update) -> ServerState:
        weight = update.weight if by_size else torch.ones_like(update.weight)
        weight = weight / weight.sum().clamp(min=_TINY)
        sent = {name: update.sent[name] for name in movable(update.params)}
        moves = {name: update.params[name] - value for name, value in sent.items()}
        shared = [name for name in moves if name in state.params]
        counted = rule(Ballot(moves, votes(update.params, weight, shared, posterior), weight, torch.ones_like(weight)))
        common = consensus(counted.moves, counted.votes)
        told = {
            name: value + common[name]
            if name in common
            else value + torch.einsum("c,c...->c...", counted.trust, counted.moves[name])
            for name, value in sent.items()
        }
        return base.update(state, update._replace(params=update.params | told))

    return Server(base.init, update)


def by_participation(base: Server, prefix: str, num_clients: int) -> Server:
    """Move entries of this prefix by the share of all clients that answered: SCAFFOLD's |S|/N."""

    def update(state: ServerState, update: Update) -> ServerState:
        new, share = base.update(state, update), len(update.client) / num_clients
        moved = {name: state.params[name] + share * (value - state.params[name])
                 for name, value in new.params.items() if name.startswith(prefix)}  # fmt: skip
        return new._replace(params=new.params | moved)

    return Server(base.init, update, base.take)


def idle(model: Model) -> Server:
    """A server that knows nothing and counts rounds: for clients that stay alone."""

    def init(key: Tensor) -> ServerState:
        some = next(iter(model.init(rng.fold(key, 0)).values()))
        return ServerState({}, {}, some.new_zeros(()), key)

    def update(state: ServerState, update: Update) -> ServerState:  # noqa: ARG001
        return state._replace(round=state.round + 1)

    return Server(init, update, lambda state, update, weight: {})  # noqa: ARG005


def _means(update: Update, weight: Tensor, names: Iterable[str]) -> Params:
    """Return clients' part of the weighted means of some entries, or the means where they were added up already."""
    if update.sums:
        return tree.under(update.sums, _MEAN)
    share = _shares(update.weight, weight)
    return {name: torch.einsum("c,c...->...", share, update.params[name]) for name in names}


def _taking_means(base: Server, names: Iterable[str], shown: Callable[..., tuple[ServerState, Update]]) -> Take | None:
    """Add up means of some entries beside what a server adds up, to which a state and an update are `shown`."""

    def take(state: ServerState, update: Update, weight: Tensor) -> Params:
        assert base.take is not None
        means = {_MEAN + name: value for name, value in _means(update, weight, names).items()}
        return base.take(*shown(state, update), weight) | means

    return base.take and take


def gathered(base: Server, names: Collection[str], rounds: float = math.inf) -> Server:
    """Take some entries as they are: the weighted mean of the answers, which no rate, momentum or clip touches.

    They are statistics of the clients' rows, and no steps. After so many rounds they stay as they are; until then, if
    there is such an end, they are the mean over the rounds.
    """

    def others(params: Params) -> Params:
        return tree.select(params, lambda name: name not in names)

    def init(key: Tensor) -> ServerState:
        state = base.init(key)
        return state._replace(slots=others(state.slots))

    def rest(state: ServerState, update: Update) -> tuple[ServerState, Update]:
        return state._replace(params=others(state.params)), update._replace(
            params=others(update.params), sent=others(update.sent)
        )

    def update(state: ServerState, update: Update) -> ServerState:
        moved = base.update(*rest(state, update))
        total = update.weight.sum()
        means = _means(update, update.weight, names)
        share = torch.ones_like(state.round) if math.isinf(rounds) else 1.0 / (state.round + 1.0)
        takes = (state.round < rounds) & (total > 0)
        params = dict(state.params) | moved.params
        for name in names:
            params[name] = torch.where(takes, params[name] + share * (means[name] - params[name]), params[name])
        return moved._replace(params=params)

    return Server(init, update, _taking_means(base, names, rest))


def prune(
    base: Server, layers: Sequence[str], *, sparsity: float = 0.7, lr: float = 0.02, released: bool = False
) -> Server:
    """SNIP: after the first round, keep the (1 - sparsity) share of a layer's weights with the largest saliency.

        saliency = |w . g|,   g = w - sum_i w_i w_i'       at the weights from before the server's step

    released=True takes both after the step, with the local rate under g; where the step lands on the mean (FedAvg)
    g is then rounding noise.
    """
    names = {f"{layer}.weight": f"{layer}.mask" for layer in layers}

    def update(state: ServerState, update: Update) -> ServerState:
        new = base.update(state, update)
        means = _means(update, update.weight, names)
        params = dict(new.params)
        for name, mask in names.items():
            at = (new if released else state).params[name]
            saliency = (at * (at - means[name]) / lr).abs()
            kept = round((1.0 - sparsity) * saliency.numel()) + int(released)
            threshold = saliency.flatten().sort(descending=True).values[max(kept, 1) - 1]
            chosen = (saliency >= threshold).to(at.dtype)
            params[mask] = torch.where(state.round == 0, chosen, params[mask])
        return new._replace(params=params)

    return Server(base.init, update, _taking_means(base, names, lambda *both: both))


@dataclass(frozen=True)
class Distillation:
    """FedBE's hyper-parameters."""

    samples: int
    sampling: Literal["gaussian", "dirichlet"]
    scale: float
    """Standard deviations of a Gaussian sample around the mean."""
    concentration: float
    average: Literal["probs", "logits"]
    temperature: float
    """Sharpening p^(1/T); 1 leaves the average as it is."""
    lr: float
    min_lr: float
    steps: int
    batch: int
    clip: float | None = 5.0


def distill_rates(config: Distillation) -> list[float]:
    """Return the learning rate of each step: constant, then a straight line down, then min_lr.

    With 72 steps: 1-35 at lr, 36-53 falling, 54-72 at min_lr.
    """
    last = config.steps * 3 // 4
    hold = config.steps // 2 - 1
    falling = last - hold
    fall = [(config.lr * (falling - i) + config.min_lr * i) / falling for i in range(1, falling + 1)]
    return ([config.lr] * hold + fall + [config.min_lr] * config.steps)[: config.steps]


def swa_steps(config: Distillation) -> list[int]:
    """Return the steps (counted from 1) whose iterates are averaged: every third of the last quarter."""
    return list(range(config.steps * 3 // 4, config.steps + 1, 3))


def teachers(config: Distillation, average: Params, params: Params, weight: Tensor, key: Tensor) -> Params:
    """Return the mean model, the clients' models and draws from a distribution over models, stacked."""
    spread = [tree.map(lambda value: value[None], average), params]
    if config.sampling == "gaussian":
        variance = tree.map(lambda p, m: torch.einsum("c,c...->...", weight, (p - m).square()), params, average)
        for s in range(config.samples):
            drawn = {}
            for i, (name, value) in enumerate(average.items()):
                eps = rng.normal(rng.fold(key, s, i), value.shape, value.dtype)
                drawn[name] = (value + config.scale * variance[name].clamp(min=1e-6).sqrt() * eps)[None]
            spread.append(drawn)
    else:
        host = np.random.Generator(np.random.Philox(int(key) & (2**63 - 1)))
        for share in host.dirichlet([config.concentration] * len(weight), config.samples):
            mix = torch.as_tensor(share, dtype=weight.dtype, device=weight.device) * weight
            mix = mix / mix.sum()
            spread.append(tree.map(lambda p, mix=mix: torch.einsum("c,c...->...", mix, p)[None], params))
    return tree.concatenated(spread)


def soft_labels(config: Distillation, logits: Tensor) -> Tensor:
    """Teachers' logits (M, D, K) -> targets (D, K): their mean, sharpened."""
    mean = logits.softmax(-1).mean(0) if config.average == "probs" else logits.mean(0).softmax(-1)
    sharp = mean.pow(1.0 / config.temperature)
    return sharp / sharp.sum(-1, keepdim=True)


def distill(base: Server, model: Model, rows: Callable[[Tensor], Tensor], config: Distillation) -> Server:
    """FedBE: average, then teach the average what an ensemble of models says about unlabelled rows of the server.

    The student's iterates of the last quarter are averaged (SWA) into the new model. `rows(key)` gives the server's
    rows, for a round's key, as (D, ...).
    """

    def update(state: ServerState, update: Update) -> ServerState:
        new = base.update(state, update)
        key = rng.fold(state.key, 30_000, state.round.to(torch.int64))
        x = rows(rng.fold(key, 0))
        weight = update.weight / update.weight.sum()
        ensemble = teachers(config, new.params, update.params, weight, rng.fold(key, 1))
        count = next(iter(ensemble.values())).shape[0]
        logits = torch.stack([model.apply(tree.unstack(ensemble, i), x, None)[0] for i in range(count)])
        target = soft_labels(config, logits)
        student, chosen = new.params, swa_steps(config)
        iterates: list[Params] = []
        for step, lr in enumerate(distill_rates(config), 1):
            order = rng.permutation(rng.fold(key, 2, step), len(x))[: config.batch]
            batch, wanted = x[order], target[order]

            def loss(params: Params, batch: Tensor = batch, wanted: Tensor = wanted) -> Tensor:
                return soft_cross_entropy(model.apply(params, batch, None)[0], wanted)

            student = tree.axpy(-lr, tree.clip(grad(loss)(student), config.clip), student)
            if step in chosen:
                iterates.append(student)
        return new._replace(params=tree.map(lambda values: values.mean(0), tree.stack(iterates)))

    return Server(base.init, update)
