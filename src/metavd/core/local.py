"""What one client does with its data: gradient steps of three kinds.

Written for one client; engines loop or vmap over clients. A batch of padding alone leaves everything as it was, so
ragged clients agree with themselves padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from .. import tree
from ..tree import Params
from . import rng
from .diff import grad, grad_and_value, hessian_product
from .types import Batch, Local, Move, Objective

FIXED = ("mask", "keep")
"""Endings of entries that no gradient ever moves."""


def _nothing(params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Move, Tensor]:  # noqa: ARG001
    return Move({}, {}), next(iter(params.values())).new_zeros(())


keep = Local(_nothing)
"""Use what was received as it is."""


def _trained(params: Params, frozen: Sequence[str]) -> Params:
    endings = {*FIXED, *frozen}
    return tree.select(params, lambda name: name.rpartition(".")[2] not in endings)


def _bind(
    objective: Objective, params: Params, batch: Batch, anchor: Params, frozen: Sequence[str] = ()
) -> tuple[Callable[[Params], Tensor], Params]:
    """Return the objective as a function of the trained entries alone, and those entries."""
    trained = _trained(params, frozen)
    fixed = {name: value for name, value in params.items() if name not in trained}
    return (lambda moving: objective({**fixed, **moving}, batch, anchor)), trained


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


def sgd(objective: Objective, *, lr: float, clip: float | None = 5.0) -> Local:
    """Plain gradient descent, one step a batch: w <- w - lr clip(grad), without momentum or weight decay."""

    def step(params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Move, Tensor]:  # noqa: ARG001
        function, trained = _bind(objective, params, batches[0], received)
        gradient, loss = grad_and_value(function)(trained)
        return _down(params, gradient, lr, clip), loss

    return Local(step, lr, clip)


def _together(objective: Objective, batches: Sequence[Batch]) -> Callable[[Params, Params], Tensor]:
    """Return the objective over the rows of several batches: their losses, weighted by their numbers of rows.

    Each batch keeps its own key, so a row's noise does not depend on how far the batch before it is padded.
    """

    def objective_of_all(params: Params, anchor: Params) -> Tensor:
        losses = torch.stack([objective(params, batch, anchor) for batch in batches])
        rows = torch.stack(
            [torch.full_like(losses[0], len(batch.y)) if batch.mask is None else batch.mask.sum() for batch in batches]
        )
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
) -> Local:
    """True second-order MAML; three batches a step: one of support, two of query.

        w' = w - lr clip(grad inner(w; support)),    w <- w - outer_lr clip(d outer(w'; query) / d w)

    The inner step leaves entries with a frozen ending alone; the outer step moves all. The clip's scale is part of
    the graph, as in the released code.
    """

    def step(params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Move, Tensor]:  # noqa: ARG001
        support, query = batches[0], _together(outer, batches[1:])

        def adapted(moving: Params) -> Tensor:
            whole = {**params, **moving}
            function, trained = _bind(inner, whole, support, received, frozen)
            return query(_move(whole, grad(function)(trained), lr, inner_clip), received)

        gradient, loss = grad_and_value(adapted)(_trained(params, ()))
        return _down(params, gradient, outer_lr, clip), loss

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
) -> Local:
    """PerFedAvg's Hessian-free MAML; three batches a step.

        w' = w - lr clip(grad inner(w; B1)),    g = grad outer(w'; B2),    w <- w - outer_lr clip(g - lr H(w; B3) g)

    `trust` bounds the curvature term, ||lr H g|| <= trust ||g||. B1, B2 and B3 differ, so where a loss is sharp
    (lr times its largest curvature above 1) the product's sign may disagree with the gradient's, and the step climbs.
    With trust <= 1 it never points against its own g, since then g . (g - lr H g) >= 0; that alone is no promise of
    descent over batches: trust = 1 diverged on digits, and 0.5 on CIFAR-10.

    product="exact" differentiates the gradient; "difference" takes (grad(w + delta g) - grad(w - delta g)) / 2 delta
    with common noise. "released" repeats the released code: its minus point is w itself, so it returns half of H g,
    its two gradients draw different noise, and g and H g are clipped apart.
    """
    last_clip = None if product == "released" else clip

    def step(params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Move, Tensor]:  # noqa: ARG001
        first, second, third = batches
        function, trained = _bind(inner, params, first, received, frozen)
        shifted = _move(params, grad(function)(trained), lr, clip)
        function, trained = _bind(outer, shifted, second, received)
        gradient, loss = grad_and_value(function)(trained)
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
        return _down(params, tree.axpy(-lr, curved, gradient), outer_lr, last_clip), loss

    return Local(step, outer_lr, last_clip, group=3)
