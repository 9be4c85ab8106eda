"""How a personalised model answers: class probabilities (B, K), and where it draws, how much the draws disagree.

Shape letters: S posterior draws, B rows, K classes.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ..tree import Params
from . import rng
from .types import Answer, Model, Predict


def posterior_mean(model: Model) -> Predict:
    """Answer once, at the mean of the weights."""

    def predict(own: Params, x: Tensor, key: Tensor) -> Answer:  # noqa: ARG001
        return Answer(model.apply(own, x, None)[0].softmax(-1), {})

    return predict


def posterior_draws(model: Model, samples: int, average: Literal["probs", "logits"] = "probs") -> Predict:
    """Average over S draws from the posterior: their probabilities, or, as the released code does, their logits."""

    def predict(own: Params, x: Tensor, key: Tensor) -> Answer:
        return averaged(model.apply(own, x, rng.split(key, samples)), average)

    return predict


def averaged(logits: Tensor, average: Literal["probs", "logits"] = "probs") -> Answer:
    """Return the answer of draws (S, B, K), and how much they disagree."""
    probs = logits.softmax(-1).mean(0) if average == "probs" else logits.mean(0).softmax(-1)
    return Answer(probs, {"information": mutual_information(logits)})


def mutual_information(logits: Tensor) -> Tensor:
    """What a label would tell about the weights, in nats: (S, B, K) logits of draws -> (B,), in float64.

        I = H(mean_s p_s) - mean_s H(p_s) = mean_s KL(p_s || mean_s p_s) >= 0

    The second form does not subtract two nearly equal numbers, and is exactly 0 for draws that agree. The mixture is
    always that of the probabilities, also for an answer that averages logits: only of a mixture is this a mutual
    information, and only then does it have a sign.
    """
    log_probs = logits.double().log_softmax(-1)
    top = log_probs.amax(0)
    log_mixture = top + (log_probs - top).exp().mean(0).log()
    return (log_probs.exp() * (log_probs - log_mixture)).sum(-1).mean(0).clamp(min=0.0)
