"""How a personalised model answers: class probabilities (B, K)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ..tree import Params
from . import rng
from .types import Model, Predict


def posterior_mean(model: Model) -> Predict:
    """Answer once, at the mean of the weights."""

    def predict(own: Params, x: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return model.apply(own, x, None)[0].softmax(-1)

    return predict


def posterior_draws(model: Model, samples: int, average: Literal["probs", "logits"] = "probs") -> Predict:
    """Average over S draws from the posterior: their probabilities, or, as the released code does, their logits."""

    def predict(own: Params, x: Tensor, key: Tensor) -> Tensor:
        logits = model.apply(own, x, rng.split(key, samples))
        return logits.softmax(-1).mean(0) if average == "probs" else logits.mean(0).softmax(-1)

    return predict
