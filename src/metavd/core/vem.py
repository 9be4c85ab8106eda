"""A private Gaussian head around a latent one that all share, by variational expectation maximisation.

    theta_i ~ q_i = N(m_i, s_i^2),   prior N(mu, rho_i^2),   rho_i^2 = mean(s_i^2 + (m_i - mu)^2) at its optimum

A client that is sure of itself and near to mu has a small rho_i^2, and speaks louder about mu.

Shape letters: C clients, S draws, B rows, K classes, F features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import tree
from ..tree import Params
from . import rng
from .local import BEGUN, OWN
from .types import Batch, Model, Objective, Summed

VARIANCE = "head.variance"
"""() rho_i^2, which travels beside m_i."""
_SPREAD = ".log_sigma"
_TINY = 1e-12
"""The smallest rho^2 that is divided by."""


@dataclass(frozen=True)
class Head:
    """The output layer, linear with a bias."""

    layer: str

    @property
    def names(self) -> tuple[str, str]:
        """Names of its parameters, which hold mu where they travel down and m_i where they travel up."""
        return f"{self.layer}.weight", f"{self.layer}.bias"

    def start(self, params: Params, sigma: float) -> Params:
        """Return what a client keeps before its first turn: a spread, and a mean that is not used yet."""
        kept: Params = {BEGUN: params[self.names[0]].new_zeros(())}
        for name in self.names:
            value = params[name]
            spread = torch.full_like(value, sigma).log()
            kept |= {OWN + name: torch.zeros_like(value), OWN + name + _SPREAD: spread}
        return kept

    def begun(self, params: Params) -> Params:
        """Return where a turn starts: a client's first one at mu."""
        old = params[BEGUN] > 0
        return params | {OWN + name: torch.where(old, params[OWN + name], params[name]) for name in self.names}

    def sent(self, params: Params) -> Params:
        """Return what a turn ends with: m_i and rho_i^2 to be sent, q_i to be kept."""
        told = {name: params[OWN + name] for name in self.names}
        return params | told | {VARIANCE: self.variance(params), BEGUN: torch.ones_like(params[BEGUN])}

    def used(self, params: Params) -> Params:
        """Return the network that answers: the head at m_i."""
        own = {name: params[OWN + name] for name in self.names}
        return tree.without(params, OWN, VARIANCE) | own

    @staticmethod
    def is_own(name: str) -> bool:
        """Whether an entry is one of q_i's."""
        return name.startswith(OWN) and name != BEGUN

    @staticmethod
    def is_spread(name: str) -> bool:
        """Whether an entry is a spread of q_i."""
        return name.startswith(OWN) and name.endswith(_SPREAD)

    def squares(self, params: Params) -> list[Tensor]:
        """Return E_q (theta_i - mu)^2 = s_i^2 + (m_i - mu)^2 of the weights and of the biases."""
        return [
            (2.0 * params[OWN + name + _SPREAD]).exp() + (params[OWN + name] - params[name]).square()
            for name in self.names
        ]

    def variance(self, params: Params) -> Tensor:
        """Return rho_i^2, at its optimum."""
        return torch.cat([each.flatten() for each in self.squares(params)]).mean()

    def kl(self, params: Params) -> Tensor:
        """Return KL(q_i || N(mu, rho_i^2)), summed over the head's weights; rho_i^2 is held fixed."""
        rho2 = self.variance(params).detach().clamp(min=_TINY)
        terms = [
            (0.5 * rho2.log() - params[OWN + name + _SPREAD] + 0.5 * square / rho2 - 0.5).sum()
            for name, square in zip(self.names, self.squares(params), strict=True)
        ]
        return torch.stack(terms).sum()

    def drawn(self, params: Params, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights (S, K, F) and biases (S, K) of draws from q_i."""
        found = []
        for i, name in enumerate(self.names):
            mean, sigma = params[OWN + name], params[OWN + name + _SPREAD].exp()
            found.append(mean + sigma * rng.normal(rng.fold(keys, i), mean.shape, mean.dtype))
        return found[0], found[1]


def expected(model: Model, head: Head, draws: int, weight: float) -> Objective:
    """The mean over draws of the cross-entropy, and the weighted KL over the client's number of rows."""

    def objective(params: Params, batch: Batch, anchor: Params) -> Tensor:  # noqa: ARG001
        z = model.features(params, batch.x)
        weights, bias = head.drawn(params, rng.split(batch.key, draws))
        said = (torch.einsum("bf,skf->sbk", z, weights) + bias[:, None]).log_softmax(-1).mean(0)
        loss = -(said * batch.labels(said.shape[-1])).sum() / batch.rows().clamp(min=1.0)
        return loss + weight * head.kl(params) / batch.size.clamp(min=1.0)

    return objective


def by_confidence(head: Head) -> Summed:
    """Consensus of the latent head: mu = sum_i m_i / rho_i^2 over sum_i 1 / rho_i^2; all others pass through.

    A client without rows has no say.
    """

    def aggregate(params: Params, weight: Tensor) -> Params:
        votes = (weight > 0) / params[VARIANCE].clamp(min=_TINY)
        share = votes / votes.sum().clamp(min=_TINY)
        means = {name: torch.einsum("c,c...->...", share, params[name]) for name in head.names}
        return params | {name: value.expand_as(params[name]) for name, value in means.items()}

    def sums(params: Params, weight: Tensor) -> Params:
        votes = (weight > 0) / params[VARIANCE].clamp(min=_TINY)
        return {name: torch.einsum("c,c...->...", votes, params[name]) for name in head.names} | {"votes": votes.sum()}

    def consensus(sums: Params, now: Params) -> Params:  # noqa: ARG001
        return {name: sums[name] / sums["votes"].clamp(min=_TINY) for name in head.names}

    return Summed(aggregate, head.names, sums, consensus)
