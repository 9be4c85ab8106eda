"""What a client minimises: cross-entropy, proximal term and KL, added up.

Shape letters: B batch, S noise draws, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from ..ops import loss
from ..tree import Params
from . import rng
from .posterior import Posterior
from .types import Batch, Model, Objective

Schedule = Callable[[Tensor], Tensor]
"""Round (a scalar tensor, the first is 0) -> weight."""


def cross_entropy(model: Model, draws: int = 0, average: Literal["logits", "loss"] = "logits") -> Objective:
    """Cross-entropy of the logits, averaged over `draws` noise draws; 0 draws answer at the posterior mean.

    logits    CE(mean_s z_s, y)      what the released code does
    loss      mean_s CE(z_s, y)      what an ELBO asks for; by convexity it is never less
    """

    def objective(params: Params, batch: Batch, anchor: Params) -> Tensor:  # noqa: ARG001
        keys = rng.split(batch.key, draws) if draws else None
        logits, y, mask = model.apply(params, batch.x, keys), batch.y, batch.mask
        if average == "loss" and draws > 1:
            # Every draw of a row is a row of its own: their mean is that of the losses.
            logits, y, mask = logits.flatten(0, 1)[None], y.repeat(draws), None if mask is None else mask.repeat(draws)
        return loss.cross_entropy(logits, y, mask)

    return objective


def proximal(mu: float) -> Objective:
    """FedProx: mu/2 ||w - w_received||^2 over all parameters."""

    def objective(params: Params, batch: Batch, anchor: Params) -> Tensor:  # noqa: ARG001
        gaps = [(value - anchor[name].detach()).square().sum() for name, value in params.items()]
        return 0.5 * mu * torch.stack(gaps).sum()

    return objective


def divergence(posterior: Posterior, beta: Schedule, weight: Literal["mean", "elbo"] = "mean") -> Objective:
    """Weight the KL of the posteriors: beta x KL.

    weight="mean" takes the mean over the weights (the released code's rule, beta = 10); weight="elbo" takes their sum
    over the client's number of samples, which with beta = 1 makes the loss the negative ELBO per sample.
    """

    def objective(params: Params, batch: Batch, anchor: Params) -> Tensor:  # noqa: ARG001
        scale = beta(batch.round)
        if weight == "mean":
            return scale * posterior.kl(params)
        return scale * posterior.kl(params, mean=False) / batch.size.clamp(min=1.0)

    return objective


def total(*terms: Objective) -> Objective:
    """Sum of objectives."""

    def objective(params: Params, batch: Batch, anchor: Params) -> Tensor:
        return reduce(torch.add, (term(params, batch, anchor) for term in terms))

    return objective


def a_round_earlier(objective: Objective) -> Objective:
    """Ask the schedules of an objective for the round before the batch's: the last that was trained, in evaluation."""

    def earlier(params: Params, batch: Batch, anchor: Params) -> Tensor:
        return objective(params, batch._replace(round=(batch.round - 1.0).clamp(min=0.0)), anchor)

    return earlier


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
