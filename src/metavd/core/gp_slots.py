"""The slots filled with a Gaussian-process tree: shared features, answers from each client's own rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..tree import Params
from . import gp, rng
from .emit import as_newcomer, joined_by
from .gp_nodes import Inference
from .types import Admit, Answer, Batch, Emit, Local, Model, Move, Objective, Predict

POINTS = "gp_points"
_BORROW = "gp.borrow"


@dataclass(frozen=True)
class Tree:
    """Hyper-parameters of a client's tree."""

    num_classes: int
    inference: Inference = gp.PLAIN
    limit: int = 400
    novel: Literal["laplace", "zero"] = "laplace"
    always: bool = False
    """Whether inducing points condition at test as they do in training: always, not only where they are needed."""


def with_points(base: Emit, model: Model, num_classes: int, points: int) -> Emit:
    """Add learned inducing points, `points` a class, in the space of the features."""
    width = list(model.layers.values())[-1][1]

    def drawn(key: Tensor, like: Tensor) -> Params:
        return {POINTS: 0.01 * rng.normal(rng.fold(key, 50_000), [num_classes, points, width], like.dtype)}

    return joined_by(base, drawn)


def predictive_likelihood(model: Model, tree: Tree) -> Objective:
    """Half of the client's rows predicted from the other half."""

    def objective(params: Params, batch: Batch, anchor: Params) -> Tensor:  # noqa: ARG001
        return gp.loss(
            model.features(params, batch.x), batch.y, batch.mask, batch.key, tree.num_classes,
            points=params[POINTS], limit=tree.limit, inference=tree.inference,
        )  # fmt: skip

    return objective


def conditioned(model: Model, tree: Tree) -> Local:
    """Personalise by conditioning the tree on all of the client's rows; the weights stay as received."""

    def posterior(params: Params, features: Tensor, y: Tensor, mask: Tensor | None, key: Tensor) -> Params:
        points = params[POINTS]
        borrow = torch.ones_like(points[0, 0, 0]) if tree.always else params.get(_BORROW, points.new_zeros(()))
        return gp.condition(
            features, y, mask, key, tree.num_classes, points=points, borrow=borrow, limit=tree.limit,
            inference=tree.inference,
        )  # fmt: skip

    def step(params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Move, Tensor]:  # noqa: ARG001
        batch = batches[0]
        found = posterior(params, model.features(params, batch.x), batch.y, batch.mask, batch.key)
        return Move({}, found), params[POINTS].new_zeros(())

    def final(params: Params) -> Params:
        if "gp.features" in params:
            return params
        points = params[POINTS]
        nothing = torch.zeros(1, dtype=torch.int64, device=points.device)
        return params | posterior(params, points[0, :1], nothing, points[0, :1, 0] * 0, rng.key(0, points.device))

    return Local(step, final=final)


def tree_prediction(model: Model, tree: Tree) -> Predict:
    """Answer from the conditioned tree."""

    def predict(own: Params, x: Tensor, key: Tensor) -> Answer:  # noqa: ARG001
        probs = gp.predictive(own, model.features(own, x), novel=tree.novel, inference=tree.inference)
        return Answer(probs, {})

    return predict


def borrowing(emit: Emit) -> Admit:
    """Let a client that was never seen condition on the inducing points of its classes too."""
    shown = as_newcomer(emit)

    def admit(params: Params, round: Tensor, batches: Sequence[Batch]) -> Params:
        received = shown(params, round, batches)
        return received | {_BORROW: torch.ones_like(received[POINTS][0, 0, 0])}

    return admit
