"""Where each client's answer should pull the server: targets, one per client.

Shape letters: C clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from .. import tree
from ..tree import Params
from .posterior import Posterior, per_weight
from .rules.coordinates import weighted_median
from .types import Summed

_EPS = 1e-10
"""Added to the sum of precisions, as in the released code."""


mean = Summed(lambda params, weight: params, (), lambda params, weight: {}, lambda sums, now: {})  # noqa: ARG005
"""Everyone's own answer: `pull` then moves towards their weighted mean."""


def bounded(weight: Tensor, most: float) -> Tensor:
    """Let no client weigh more than `most` times the median client (of an even number, the lower one): (C,).

        w_i <- min(w_i, most median_j w_j)

    >>> bounded(torch.tensor([10.0, 1e9, 12.0]), 2.0)
    tensor([10., 24., 12.])
    """
    return weight.minimum(most * lower_median(weight))


def lower_median(weight: Tensor) -> Tensor:
    """Return the median of weights (C,), of an even number the lower one."""
    return weight.sort().values[(len(weight) - 1) // 2]


def _precisions(posterior: Posterior, params: Params, layer: str, share: Tensor) -> Tensor:
    """Return each client's precision of a layer's weights times its share (C,): (C, ...), perhaps with axes of 1."""
    each = tree.per_client(share, params[f"{layer}.weight"])
    return torch.func.vmap(posterior.precision, (0, None, 0))(params, layer, each)


def precision(posterior: Posterior) -> Summed:
    """Consensus mean of the variational layers, weighted by each client's precision.

        mu = sum_i w_i m_i s_i^-2 mu_i / sum_i w_i m_i s_i^-2        (MetaVD, eq. 5 without its stray 1/M)

    A client that is sure of a weight (small variance) speaks louder about it; one whose mask m_i drops the weight
    does not speak, and a weight that everyone drops stays where it is. For a relative spread, s_i^2 = alpha_i theta^2
    with the one theta that all clients received, which cancels. All other entries pass through, so `pull` averages
    them plainly.
    """
    return _agreed(posterior, partial(_precisions, posterior))


def size(posterior: Posterior) -> Summed:
    """The same without the precision: mu = sum_i w_i m_i mu_i / sum_i w_i m_i, which without masks is `mean`."""

    def alike(params: Params, layer: str, weight: Tensor) -> Tensor:
        return tree.per_client(weight, params[f"{layer}.weight"])

    return _agreed(posterior, alike)


def _agreed(posterior: Posterior, say: Callable[[Params, str, Tensor], Tensor]) -> Summed:
    """Consensus mean of the variational layers by each client's say over a layer's weights, (C, ...)."""

    def votes_on(params: Params, layer: str, weight: Tensor) -> Tensor:
        """Return how loud each client speaks about each weight of a layer (C, ...), not at all where it drops it."""
        found, mask = say(params, layer, weight), params.get(f"{layer}.mask")
        return found if mask is None else found * torch.func.vmap(per_weight)(mask, params[f"{layer}.weight"])

    def sums(params: Params, weight: Tensor) -> Params:
        found: Params = {}
        for layer in posterior.layers:
            name = f"{layer}.weight"
            votes = votes_on(params, layer, weight)
            found |= {f"{name}/votes": votes.sum(0), f"{name}/answers": (votes * params[name]).sum(0)}
        return found

    def consensus(sums: Params, now: Params) -> Params:
        return {
            name: torch.where(sums[f"{name}/votes"] > 0, sums[f"{name}/answers"] / (sums[f"{name}/votes"] + _EPS),
                              now[name])
            for name in names
        }  # fmt: skip

    def aggregate(params: Params, weight: Tensor) -> Params:
        agreed = consensus(sums(params, weight), {name: params[name][0] for name in names})
        return params | {name: value.expand_as(params[name]) for name, value in agreed.items()}

    names = tuple(f"{layer}.weight" for layer in posterior.layers)
    return Summed(aggregate, names, sums, consensus)


def votes(params: Params, weight: Tensor, names: Iterable[str], posterior: Posterior | None) -> Params:
    """Return how much each client's answer counts before a rule is applied, entry by entry: (C, ...) or (C, 1, ...).

        v_i = w_i m_i min(s_i^-2, median_j s_j^-2)        for the weights of a layer with a posterior, else w_i m_i

    m_i is the client's mask, where there is one. No client is taken to be surer of a weight than the median client:
    whoever claims to know everything would outvote all others under any rule. So liars need a quarter of the weight to
    have half of the votes.
    """
    found = {}
    for name in names:
        answers = params[name]
        counts = tree.per_client(weight, answers)
        layer, _, last = name.rpartition(".")
        mask = params.get(f"{layer}.mask") if last == "weight" else None
        if mask is not None:
            counts = counts * torch.func.vmap(per_weight)(mask, answers)
        if posterior is not None and last == "weight" and layer in posterior.layers:
            sure = _precisions(posterior, params, layer, torch.ones_like(weight)).expand_as(answers)
            counts = counts * torch.minimum(sure, weighted_median(sure, counts))
        found[name] = counts
    return found
