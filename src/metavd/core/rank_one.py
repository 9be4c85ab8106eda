"""Gaussian factors on the inputs and outputs of layers: a weight is multiplied by a matrix of rank one.

    W_s = W * (b_s a_s^T),    a_s ~ N(mean_a, sigma_a^2),  b_s ~ N(mean_b, sigma_b^2)        one draw for all rows

so that a layer of out x in weights has 2 (out + in) numbers of a client's own. The channels of a convolution are its
inputs and outputs; biases are left as they are.

Shape letters: S draws, B rows, K classes, P factors of all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tree import Params
from . import rng
from .predict import averaged
from .types import Batch, Model, Objective, Predict

_SIDES = {"in": 1, "out": 0}
"""Axes of a weight (out, in, ...)."""
_MEAN, _SPREAD = "mean", "log_sigma"


@dataclass(frozen=True)
class Factors:
    """Which layers have factors, and the prior N(1, prior^2) of all of them."""

    shapes: dict[str, tuple[int, ...]]
    """Shapes of the layers' weights, by name."""
    prior: float

    def sizes(self) -> dict[str, int]:
        """Return how many factors each side of each layer has, by what an entry's name begins with: "fc0.in_"."""
        return {
            f"{layer}.{side}_": shape[axis] for layer, shape in self.shapes.items() for side, axis in _SIDES.items()
        }

    def start(self, like: Tensor, spread: float) -> Params:
        """Return factors around 1."""
        found: Params = {}
        for name, size in self.sizes().items():
            found |= {name + _MEAN: like.new_ones(size), name + _SPREAD: like.new_full([size], math.log(spread))}
        return found

    def has(self, name: str) -> bool:
        """Whether a parameter is one of the factors'."""
        return any(name in {start + _MEAN, start + _SPREAD} for start in self.sizes())

    def joined(self, params: Params, what: str) -> Tensor:
        """Return the means, or the logs of the spreads, of all factors as one vector (P,)."""
        return torch.cat([params[name + what] for name in self.sizes()])

    def kl(self, params: Params) -> Tensor:
        """Return KL(q || N(1, prior^2)), summed over all factors."""
        mean, log_sigma = self.joined(params, _MEAN), self.joined(params, _SPREAD)
        square = (2.0 * log_sigma).exp() + (mean - 1.0).square()
        return (math.log(self.prior) - log_sigma + square / (2.0 * self.prior**2) - 0.5).sum()

    def draw(self, params: Params, key: Tensor) -> Params:
        """Return the parameters with the weights of one draw."""
        mean, log_sigma = self.joined(params, _MEAN), self.joined(params, _SPREAD)
        drawn = mean + log_sigma.exp() * rng.normal(key, mean.shape, mean.dtype)
        sizes = self.sizes()
        factor = dict(zip(sizes, torch.split(drawn, list(sizes.values())), strict=True))
        found = dict(params)
        for layer, shape in self.shapes.items():
            outer = factor[f"{layer}.out_"][:, None] * factor[f"{layer}.in_"]
            found[f"{layer}.weight"] = params[f"{layer}.weight"] * outer.reshape(*shape[:2], *[1] * (len(shape) - 2))
        return found


def _logits(model: Model, factors: Factors, draws: int) -> Callable[[Params, Tensor, Tensor], Tensor]:
    def answer(params: Params, x: Tensor, key: Tensor) -> Tensor:
        each = (model.apply(factors.draw(params, rng.fold(key, s)), x, None) for s in range(draws))
        return torch.cat(list(each))

    return answer


def mixture(model: Model, factors: Factors, draws: int) -> Objective:
    """-log of the mean over draws of what they give the label, mean over rows."""
    logits = _logits(model, factors, draws)

    def objective(params: Params, batch: Batch, anchor: Params) -> Tensor:  # noqa: ARG001
        said = logits(params, batch.x, batch.key).log_softmax(-1)  # (S, B, K)
        labels = batch.y[:, None] == torch.arange(said.shape[-1], device=said.device)
        given = (said * labels).sum(-1).logsumexp(0) - math.log(draws)
        if batch.mask is None:
            return -given.mean()
        return -(given * batch.mask).sum() / batch.mask.sum().clamp(min=1.0)

    return objective


def divergence(factors: Factors, weight: float) -> Objective:
    """The weighted KL, over the client's number of rows."""

    def objective(params: Params, batch: Batch, anchor: Params) -> Tensor:  # noqa: ARG001
        return weight * factors.kl(params) / batch.size.clamp(min=1.0)

    return objective


def prediction(model: Model, factors: Factors, draws: int) -> Predict:
    """Answer with the mean of the draws' probabilities."""
    logits = _logits(model, factors, draws)
    return lambda own, x, key: averaged(logits(own, x, key))
