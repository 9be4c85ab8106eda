"""What one client does with its data: gradient steps of several kinds.

Written for one client; engines loop or vmap over clients. A batch of padding alone leaves everything as it was, so
ragged clients agree with themselves padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from .. import tree
from ..ops.step import descend
from ..tree import Params
from . import rng
from .diff import grad, grad_and_value, hessian_product
from .posterior import Posterior
from .types import Batch, Local, Move, Objective, Sampling

FIXED = ("mask", "keep")
"""Endings of entries that no gradient ever moves."""
OWN = "own."
"""Begins the names of what a client keeps beside what it receives under the same name."""
CONTROL = "control."
"""Begins the names of SCAFFOLD's control variates, one for every weight."""
_START, _STEPS, _VELOCITY = "work.start.", "work.steps", "work.velocity."
"""What a stage remembers while it goes on: where it started, how many steps it has taken, where it is heading."""
MIX, BEGUN = "mix.", "own.begun"
"""What a client that mixes keeps beside its own values: its mixing weights, and () whether it has had a turn."""


def _nothing(params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Move, Tensor]:  # noqa: ARG001
    return Move({}, {}), next(iter(params.values())).new_zeros(())


unchanged = Local(_nothing)
"""Use what was received and kept as it is."""


def _shared(name: str) -> bool:
    return not name.startswith((OWN, MIX))


def movable(params: Params, frozen: Sequence[str] = ()) -> Params:
    """Return the entries that training moves: all but masks, and those with a frozen ending."""
    endings = {*FIXED, *frozen}
    return tree.select(params, lambda name: name.rpartition(".")[2] not in endings)


def _bind(
    objective: Objective,
    params: Params,
    batch: Batch,
    anchor: Params,
    frozen: Sequence[str] = (),
    *,
    only: Callable[[str], bool] | None = None,
) -> tuple[Callable[[Params], Tensor], Params]:
    """Return the objective as a function of the trained entries alone, and those entries."""
    trained = movable(params, frozen)
    if only is not None:
        trained = tree.select(trained, only)
    fixed = {name: value for name, value in params.items() if name not in trained}
    return (lambda moving: objective({**fixed, **moving}, batch, anchor)), trained


def _gradient(
    objective: Objective,
    params: Params,
    batch: Batch,
    anchor: Params,
    *,
    only: Callable[[str], bool] | None = None,
    rate: Callable[[str], float] | None = None,
) -> tuple[Params, Tensor]:
    """Return the gradient by the trained entries, each times its rate, and the loss."""
    function, trained = _bind(objective, params, batch, anchor, only=only)
    gradient, loss = grad_and_value(function)(trained)
    return _rated(gradient, rate), loss


def _move(params: Params, gradient: Params, lr: float, clip: float | None) -> Params:
    """Take one clipped step. A layer's "keep" (see `emit.kept`) holds weights fixed only after the clip."""
    slope = tree.join(gradient)
    rate = lr if clip is None else lr * tree.clip_scale(slope, clip)
    kept = {f"{name.rpartition('.')[0]}.weight": params[name] for name in params if name.endswith(".keep")}
    if kept:
        slope = tree.join({name: value * kept[name] if name in kept else value for name, value in gradient.items()})
    start = {name: params[name] for name in gradient}
    return params | tree.part(tree.join(start) - rate * slope, start)


def _down(params: Params, gradient: Params, lr: float, clip: float | None) -> Move:
    """Return the step that ends a client's turn: down the gradient, but where "keep" holds weights that step itself."""
    if any(name.endswith(".keep") for name in params):
        moved = _move(params, gradient, lr, clip)
        return Move({}, {name: moved[name] for name in gradient})
    return Move(gradient, {})


def _rated(gradient: Params, rate: Callable[[str], float] | None) -> Params:
    """Give each entry's gradient its factor; a factor of 1 costs nothing."""
    if rate is None:
        return gradient
    factors = {name: rate(name) for name in gradient}
    return {name: value if factors[name] == 1.0 else factors[name] * value for name, value in gradient.items()}


def sgd(
    objective: Objective,
    *,
    lr: float,
    clip: float | None = 5.0,
    only: Callable[[str], bool] | None = None,
    rate: Callable[[str], float] | None = None,
) -> Local:
    """Plain gradient descent, one step per batch: w <- w - lr clip(grad), without momentum or weight decay.

    `only` says which entries are trained, by default all; the others stay. `rate` gives an entry's gradient a factor.
    """

    def step(params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Move, Tensor]:  # noqa: ARG001
        gradient, loss = _gradient(objective, params, batches[0], received, only=only, rate=rate)
        return _down(params, gradient, lr, clip), loss

    return Local(step, lr, clip)


def heavy_ball(objective: Objective, *, lr: float, momentum: float, clip: float | None = 5.0) -> Local:
    """Gradient descent with momentum within a client's turn: v <- momentum v + clip(grad),  w <- w - lr v.

    torch's SGD after its clip_grad_norm_. v begins at 0 in every turn and ends with it.
    """

    def init(received: Params) -> Params:
        return received | {_VELOCITY + name: torch.zeros_like(value) for name, value in movable(received).items()}

    def step(params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Move, Tensor]:  # noqa: ARG001
        gradient, loss = _gradient(objective, tree.without(params, _VELOCITY), batches[0], received)
        heading = {
            name: momentum * params[_VELOCITY + name] + slope for name, slope in tree.clip(gradient, clip).items()
        }
        return Move(heading, {_VELOCITY + name: value for name, value in heading.items()}), loss

    return Local(step, lr, None, init=init, final=lambda params: tree.without(params, _VELOCITY))


def projected(stage: Local, posterior: Posterior, names: Sequence[str]) -> Local:
    """Put spreads back into their range after every step of a stage, instead of gating its slopes one by one.

        lambda <- min(max(lambda - lr slope, low), high)

    The slope is that of the whole loss: what a cross-entropy and a KL ask for is added up before anything is cut.
    """

    def settle(params: Params) -> Params:
        return {name: posterior.bounded(name, params[name]) for name in names if name in params}

    return replace(stage, settle=settle)


def in_turns(
    objective: Objective,
    sampling: Sampling,
    *,
    first: Callable[[str], bool],
    epochs: int,
    lr: float,
    clip: float | None = 5.0,
    only: Callable[[str], bool] | None = None,
    rate: Callable[[str], float] | None = None,
) -> Local:
    """Gradient descent in two phases: for so many passes on the entries `first` names, then on the others.

    `only` and `rate` are those of `sgd`.
    """

    def step(params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Move, Tensor]:
        gradient, loss = _gradient(objective, params, batches[0], received, only=only, rate=rate)
        early = sampling.epoch(index, batches[0]) < epochs
        moving = {name: torch.where(early == first(name), value, 0.0) for name, value in gradient.items()}
        return _down(params, moving, lr, clip), loss

    return Local(step, lr, clip)


def own_of(params: Params) -> Params:
    """Return a client's own entries under the names of what they stand beside."""
    return tree.under(params, OWN)


def without_own(params: Params) -> Params:
    """Return everything but a client's own entries."""
    return tree.without(params, OWN)


def use_own(params: Params) -> Params:
    """Put a client's own entries in the place of those that they stand beside."""
    return without_own(params) | own_of(params)


def own_at_received(params: Params) -> Params:
    """Put what was received in the place of a client's own entries."""
    return params | {OWN + name: params[name] for name in own_of(params)}


def near(objective: Objective, *, mu: float, lr: float, clip: float | None = 5.0) -> Local:
    """Gradient descent on a client's own entries v, near what it received: v <- v - lr clip(grad + mu (v - received)).

    Entries that the client receives and has none of its own for, such as masks and spreads, are used as they came.
    """

    def step(params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Move, Tensor]:  # noqa: ARG001
        own, given = own_of(params), without_own(received)
        gradient, loss = _gradient(objective, given | own, batches[0], given, only=own.__contains__)
        gradient = {name: value + mu * (own[name] - given[name]) for name, value in gradient.items()}
        move = _down(given | own, gradient, lr, clip)
        moved = move.put or descend({name: own[name] for name in gradient}, gradient, lr, clip)
        return Move({}, {OWN + name: value for name, value in moved.items()}), loss

    return Local(step)


def side_by_side(first: Local, own: Local) -> Local:
    """Take two steps on every batch: one on what was received, and one on the client's own entries, each for itself.

    The loss is the first's.
    """

    def step(params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Move, Tensor]:
        move, loss = first.step(without_own(params), batches, without_own(received), index)
        beside, _ = own.step(params, batches, received, index)
        return Move(move.slope, move.put | beside.put), loss

    return Local(step, first.lr, first.clip)


def controlled(objective: Objective, *, lr: float, clip: float | None = 5.0) -> Local:
    """SCAFFOLD: descent corrected by how a client's gradients differ from everyone's, and the client's new control.

        w <- w - lr (clip(grad) - c_i + c),    c_i' = c_i - c + (w_received - w) / (steps lr)

    The clip is the gradient's alone, so that c_i' is the mean of the clipped gradients and no longer than the clip.
    A client ends with w, with c + (c_i' - c_i) in the place of c, and with c_i' as its own. One without a step ends
    with what it had.
    """
    work = CONTROL, OWN, _START, _STEPS

    def init(received: Params) -> Params:
        start = {_START + name: received[name] for name in tree.under(received, CONTROL)}
        return received | start | {_STEPS: next(iter(start.values())).new_zeros(())}

    def step(params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Move, Tensor]:  # noqa: ARG001
        gradient, loss = _gradient(objective, tree.without(params, *work), batches[0], tree.without(received, *work))
        slope = {
            name: value - params[OWN + CONTROL + name] + params[CONTROL + name]
            for name, value in tree.clip(gradient, clip).items()
        }
        return Move(slope, {_STEPS: params[_STEPS] + 1.0}), loss

    def final(params: Params) -> Params:
        steps, ended = params[_STEPS], tree.without(params, _START, _STEPS)
        for name, start in tree.under(params, _START).items():
            mean = (start - params[name]) / (steps.clamp(min=1.0) * lr)
            change = torch.where(steps > 0, mean - params[CONTROL + name], torch.zeros_like(mean))
            for part in (CONTROL, OWN + CONTROL):
                ended[part + name] = params[part + name] + change
        return ended

    return Local(step, lr, None, init=init, final=final)


def personal(objective: Objective, *, pull: float, steps: int, lr: float, clip: float | None = 5.0) -> Local:
    """So many steps on every batch towards the minimum of L(theta) + pull/2 |theta - received|^2.

        theta <- theta - lr (clip(grad L(theta)) + pull (theta - received))

    The clip is the gradient's alone: a clipped pull would hold nothing.
    """

    def step(params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Move, Tensor]:  # noqa: ARG001
        theta = movable(params)
        losses = []
        for _ in range(steps):
            gradient, loss = _gradient(objective, params | theta, batches[0], received)
            losses.append(loss)
            slope = tree.map(lambda g, a, w: g + pull * (a - w), tree.clip(gradient, clip), theta, received)
            theta = tree.axpy(-lr, slope, theta)
        return Move({}, theta), losses[0]

    return Local(step)


def envelope(near: Local, *, pull: float, lr: float) -> Local:
    """PFedMe: w <- w - lr pull (w - theta(w)), the gradient of L's Moreau envelope; `near` finds theta(w) from w."""

    def step(params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Move, Tensor]:  # noqa: ARG001
        move, loss = near.step(params, batches, params, index)
        return Move({name: pull * (params[name] - theta) for name, theta in move.put.items()}, {}), loss

    return Local(step, lr)


def unmixed(params: Params) -> Params:
    """Return what a client that mixes these entries keeps before its first turn: nothing of its own, weights of 1."""
    own = {OWN + name: torch.zeros_like(value) for name, value in params.items()}
    mix = {MIX + name: torch.ones_like(value) for name, value in params.items()}
    return own | mix | {BEGUN: next(iter(params.values())).new_zeros(())}


def mixing(
    objective: Objective,
    sampling: Sampling,
    names: Sequence[str],
    *,
    epochs: int,
    share: float,
    mix_rate: float,
    lr: float,
    clip: float | None = 5.0,
    personal: bool = False,
) -> Local:
    """Mix what was received with a client's own last values of some entries, then gradient descent on all.

        w' = w + (own - w) (1 - mix),    mix <- mix - mix_rate grad_w' * (w - own), within 0 and 1

    Mixing weights are learned for so many passes, each on its first `share` of the rows, and all else is held fixed.
    A client keeps its own values and its mixing weights; before its first turn its own values are what it received.
    `personal`: a client ends with what it computes with, and with nothing to keep.
    """

    def mixture(params: Params, received: Params, weights: Params) -> Params:
        return {
            name: received[name] + (params[OWN + name] - received[name]) * (1.0 - weights[MIX + name]) for name in names
        }

    def init(received: Params) -> Params:
        old = received[BEGUN] > 0
        params = received | {OWN + name: torch.where(old, received[OWN + name], received[name]) for name in names}
        return params | mixture(params, received, params)

    def step(params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Move, Tensor]:
        batch = batches[0]
        early = sampling.epoch(index, batch) < epochs
        real = batch.real()
        place = sampling.seen(index, batch) + real.cumsum(0) - real
        used = real * (~early | (place < torch.ceil(share * batch.size))).to(real.dtype)
        gradient, loss = _gradient(objective, params, batch._replace(mask=used), received, only=_shared)
        weights = {
            MIX + name: (
                params[MIX + name] - mix_rate * gradient[name] * (received[name] - params[OWN + name])
            ).clamp(0.0, 1.0)
            for name in names
        }  # fmt: skip
        moved = _move(params, gradient, lr, clip)
        mixed = params | weights | mixture(params, received, weights)
        return Move({}, {name: torch.where(early, mixed[name], moved[name]) for name in (*gradient, *weights)}), loss

    def final(params: Params) -> Params:
        if personal:
            return tree.without(params, OWN, MIX)
        begun = {BEGUN: torch.ones_like(params[BEGUN])}
        return params | {OWN + name: params[name] for name in names} | begun

    return Local(step, lr, clip, init=init, final=final)


def _joint_objective(objective: Objective, batches: Sequence[Batch]) -> Callable[[Params, Params], Tensor]:
    """Return the objective over the rows of several batches: their losses, weighted by their numbers of rows.

    Each batch keeps its own key, so a row's noise does not depend on how far the batch before it is padded.
    """

    def objective_of_all(params: Params, anchor: Params) -> Tensor:
        losses = torch.stack([objective(params, batch, anchor) for batch in batches])
        rows = torch.stack([batch.rows() for batch in batches])
        return (losses * rows).sum() / rows.sum().clamp(min=1.0)

    return objective_of_all


def maml(
    inner: Objective,
    outer: Objective,
    *,
    lr: float,
    outer_lr: float,
    clip: float | None = 5.0,
    inner_clip: float | None = 5.0,
    frozen: Sequence[str] = (),
    rate: Callable[[str], float] | None = None,
) -> Local:
    """True second-order MAML; three batches per step: one of support, two of query.

        w' = w - lr clip(grad inner(w; support)),    w <- w - outer_lr clip(d outer(w'; query) / d w)

    The inner step leaves entries with a frozen ending alone; the outer step moves all, an entry's gradient times its
    `rate`. The clip's scale is part of the graph, as in the released code.
    """

    def step(params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Move, Tensor]:  # noqa: ARG001
        support, query = batches[0], _joint_objective(outer, batches[1:])

        def adapted(moving: Params) -> Tensor:
            whole = {**params, **moving}
            function, trained = _bind(inner, whole, support, received, frozen)
            return query(_move(whole, grad(function)(trained), lr, inner_clip), received)

        gradient, loss = grad_and_value(adapted)(movable(params))
        return _down(params, _rated(gradient, rate), outer_lr, clip), loss

    return Local(step, outer_lr, clip, group=3)


def hf_maml(
    inner: Objective,
    outer: Objective,
    *,
    lr: float,
    outer_lr: float,
    clip: float | None = 5.0,
    delta: float = 1e-4,
    frozen: Sequence[str] = (),
    product: Literal["exact", "difference", "released"] = "exact",
    trust: float = math.inf,
    rate: Callable[[str], float] | None = None,
) -> Local:
    """PerFedAvg's Hessian-free MAML; three batches per step.

        w' = w - lr clip(grad inner(w; B1)),    g = grad outer(w'; B2),    w <- w - outer_lr clip(g - lr H(w; B3) g)

    `trust` bounds the curvature term, ||lr H g|| <= trust ||g||. B1, B2 and B3 differ, so where a loss is sharp
    (lr times its largest curvature above 1) the product's sign may disagree with the gradient's, and the step climbs.
    With trust <= 1 it never points against its own g, since then g . (g - lr H g) >= 0; that alone is no promise of
    descent over batches: trust = 1 diverged on digits, and 0.5 on CIFAR-10.

    product="exact" differentiates the gradient; "difference" takes (grad(w + delta g) - grad(w - delta g)) / 2 delta
    with common noise. "released" repeats the released code: its minus point is w itself, so it returns half of H g,
    its two gradients draw different noise, and g and H g are clipped apart. `rate` is that of `maml`.
    """
    last_clip = None if product == "released" else clip

    def step(params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Move, Tensor]:  # noqa: ARG001
        first, second, third = batches
        function, trained = _bind(inner, params, first, received, frozen)
        shifted = _move(params, grad(function)(trained), lr, clip)
        gradient, loss = _gradient(outer, shifted, second, received)
        function, point = _bind(outer, params, third, received)
        if product == "exact":
            curved = hessian_product(function, point, gradient)
        elif product == "difference":
            ahead, behind = (grad(function)(tree.axpy(sign * delta, gradient, point)) for sign in (1.0, -1.0))
            curved = tree.map(lambda a, b: (a - b) / (2.0 * delta), ahead, behind)
        else:
            other, _ = _bind(outer, params, third._replace(key=rng.fold(third.key, 1)), received)
            ahead, here = grad(function)(tree.axpy(delta, gradient, point)), grad(other)(point)
            curved = tree.map(lambda a, b: (a - b) / (2.0 * delta), ahead, here)
            gradient, curved = tree.clip(gradient, clip), tree.clip(curved, clip)
        if trust < math.inf and product != "released":
            limit = trust * tree.squared_norm(gradient).sqrt()
            size = lr * tree.squared_norm(curved).sqrt()
            scale = torch.where(size > limit, limit / size.clamp(min=1e-30), torch.ones_like(size))
            curved = tree.map(lambda value: value * scale, curved)
        return _down(params, _rated(tree.axpy(-lr, curved, gradient), rate), outer_lr, last_clip), loss

    return Local(step, outer_lr, last_clip, group=3)
