"""Where each client's answer should pull the server: targets, one per client.

Shape letters: C clients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..tree import Params
from .posterior import Posterior, per_weight
from .types import Aggregate

_EPS = 1e-10
"""Added to the sum of precisions, as in the released code."""


def mean(params: Params, weight: Tensor) -> Params:  # noqa: ARG001
    """Everyone's own answer: `pull` then moves towards their weighted mean."""
    return params


def precision(posterior: Posterior) -> Aggregate:
    """Consensus mean of the variational layers, weighted by each client's precision.

        mu = sum_i w_i m_i s_i^-2 mu_i / sum_i w_i m_i s_i^-2        (MetaVD, eq. 5 without its stray 1/M)

    A client that is sure of a weight (small variance) speaks louder about it; one whose mask m_i drops the weight
    does not speak, and a weight that everyone drops stays where it is. For a relative spread, s_i^2 = alpha_i theta^2
    with the one theta that all clients received, which cancels. All other entries pass through, so `pull` averages
    them plainly.
    """

    def aggregate(params: Params, weight: Tensor) -> Params:
        targets = dict(params)
        for layer in posterior.layers:
            name = f"{layer}.weight"
            answers = params[name]
            share = weight.reshape(-1, *[1] * (answers.dim() - 1))
            votes = torch.func.vmap(posterior.precision, (0, None, 0))(params, layer, share)
            mask = params.get(f"{layer}.mask")
            if mask is None:
                consensus = (votes * answers).sum(0) / (votes.sum(0) + _EPS)
            else:
                votes = votes * torch.func.vmap(per_weight)(mask, answers)
                total = votes.sum(0)
                consensus = torch.where(total > 0, (votes * answers).sum(0) / (total + _EPS), answers[0])
            targets[name] = consensus.expand_as(answers)
        return targets

    return aggregate
