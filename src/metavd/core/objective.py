"""What a client minimises: cross-entropy, proximal term and KL, added up.

Shape letters: B batch, S noise draws, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ..ops import dense
from ..tree import Params
from . import rng
from .types import Batch, Model, Objective
from .variational import Noise, kl

Schedule = Callable[[Tensor], Tensor]
"""Round (a scalar tensor, the first is 0) -> weight."""


def mean_cross_entropy(drawn: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the real rows of -log softmax(logits)[y], 0 when there is none; logits are the mean of (S, B, K).

    As one product with the labels' weights, which no gradient meets: few calls, and the same under vmap.
    """
    if dense.entropic(drawn):
        return dense.entropy(drawn, y, mask)
    logits = drawn.squeeze(0) if len(drawn) == 1 else drawn.mean(0)
    share = torch.full_like(logits[:, 0], 1.0 / len(y)) if mask is None else mask / mask.sum().clamp(min=1.0)
    labels = share[:, None] * (y[:, None] == torch.arange(logits.shape[1], device=y.device))
    return -(functional.log_softmax(logits, -1) * labels).sum()


def cross_entropy(model: Model, draws: int = 0) -> Objective:
    """Cross-entropy of the logits, averaged over `draws` noise draws; 0 draws answer at the posterior mean.

    The released code averages logits, not losses, over its three draws; so does this.
    """

    def objective(params: Params, batch: Batch, anchor: Params) -> Tensor:  # noqa: ARG001
        keys = rng.split(batch.key, draws) if draws else None
        return mean_cross_entropy(model.apply(params, batch.x, keys), batch.y, batch.mask)

    return objective


def proximal(mu: float) -> Objective:
    """FedProx: mu/2 ||w - w_received||^2 over all parameters."""

    def objective(params: Params, batch: Batch, anchor: Params) -> Tensor:  # noqa: ARG001
        gaps = [(value - anchor[name].detach()).square().sum() for name, value in params.items()]
        return 0.5 * mu * torch.stack(gaps).sum()

    return objective


def divergence(noise: Noise, beta: Schedule, weight: Literal["mean", "elbo"] = "mean") -> Objective:
    """Weight the KL of the posteriors: beta x KL.

    weight="mean" takes the mean over the weights (the released code's rule, beta = 10); weight="elbo" takes their sum
    over the client's number of samples, which with beta = 1 makes the loss the negative ELBO a sample.
    """

    def objective(params: Params, batch: Batch, anchor: Params) -> Tensor:  # noqa: ARG001
        scale = beta(batch.round)
        if weight == "mean":
            return scale * kl(noise, params)
        return scale * kl(noise, params, mean=False) / batch.size.clamp(min=1.0)

    return objective


def total(*terms: Objective) -> Objective:
    """Sum of objectives."""

    def objective(params: Params, batch: Batch, anchor: Params) -> Tensor:
        return reduce(torch.add, (term(params, batch, anchor) for term in terms))

    return objective


def ramp(beta: float, rounds: int, share: float = 0.02) -> Schedule:
    """Sigmoid rise from near 0 to beta over the first `share` of all rounds, then constant.

        v = r beta / (share R),    beta_r = beta / (1 + exp(-12 (v - beta/2) / beta))  while v <= beta,  else beta

    It is in the released code but not in the paper.

    >>> [round(float(ramp(10.0, 1000)(torch.tensor(float(r)))), 3) for r in (0, 10, 20, 21)]
    [0.025, 5.0, 9.975, 10.0]
    """
    length = share * rounds

    def schedule(round: Tensor) -> Tensor:
        if length <= 0:
            return torch.full_like(round, beta)
        # r / (share R) may exceed 1 by rounding at the last round of the ramp, which still belongs to it.
        over = round > length * (1.0 + 1e-6)
        return beta * torch.sigmoid(round * (12.0 / length) - 6.0).masked_fill(over, 1.0)

    return schedule


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy against probabilities, mean over rows."""
    return -(target * functional.log_softmax(logits, -1)).sum(-1).mean()


def logit(p: float) -> float:
    """Return log(p / (1 - p)), the log alpha of a dropout rate p."""
    return math.log(p) - math.log1p(-p)
