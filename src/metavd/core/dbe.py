"""A client's own bias on the features, and a pull of the features' mean towards a mean that all agreed on.

The head is linear, theta(z + v) = W z + (b + W v): the bias on the features is one on the logits, which no network has
to know about.

Shape letters: B rows, F features, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import tree
from ..tree import Params
from .types import Batch, Local, Model, Move, Objective, Sampling

AGREED = "features.mean"
"""(F,) what all agreed on, where it travels down; a client's own mean, where it travels up."""
BIAS = "own.bias"
"""(F,) v_i."""
_RUNNING, _WEIGHT, _SUM, _ROWS = "work.running", "work.weight", "work.sum", "work.rows"


@dataclass(frozen=True)
class Bias:
    """The output layer, and from which round on a client's bias and the pull count."""

    layer: str
    start: float

    def folded(self, params: Params) -> Params:
        """Return the parameters with v_i in the head's bias."""
        weight, bias = f"{self.layer}.weight", f"{self.layer}.bias"
        return params | {bias: params[bias] + params[weight] @ params[BIAS]}

    def used(self, params: Params) -> Params:
        """Return the network that answers."""
        return tree.select(self.folded(params), lambda name: name not in {AGREED, BIAS})

    def counts(self, batch: Batch) -> Tensor:
        """Return 1 in the rounds that count, else 0."""
        return (batch.round >= self.start).to(batch.size.dtype)


def biased(base: Objective, bias: Bias) -> Objective:
    """Return an objective of the network with a client's bias on its features."""

    def objective(params: Params, batch: Batch, anchor: Params) -> Tensor:
        return base(bias.folded(params | {BIAS: bias.counts(batch) * params[BIAS]}), batch, anchor)

    return objective


def _mean(z: Tensor, mask: Tensor | None) -> Tensor:
    return z.mean(0) if mask is None else (mask[:, None] * z).sum(0) / mask.sum().clamp(min=1.0)


def _running(params: Params, mean: Tensor, momentum: float) -> tuple[Tensor, Tensor]:
    """Return the running mean's sum and its weight after one more batch; their quotient is the mean."""
    return (
        (1.0 - momentum) * params[_RUNNING] + momentum * mean,
        (1.0 - momentum) * params[_WEIGHT] + momentum,
    )


def towards(model: Model, bias: Bias, kappa: float, momentum: float) -> Objective:
    """Pull: kappa mean 1/2 (r - g)^2, where r is the running mean of the features and g what all agreed on."""

    def objective(params: Params, batch: Batch, anchor: Params) -> Tensor:  # noqa: ARG001
        total, weight = _running(params, _mean(model.features(params, batch.x), batch.mask), momentum)
        return bias.counts(batch) * kappa * 0.5 * (total / weight - params[AGREED]).square().mean()

    return objective


def trained(name: str) -> bool:
    """Whether an entry of a client's is one that its steps go down."""
    return name != AGREED and not name.startswith("work.")


def tracking(base: Local, model: Model, sampling: Sampling, momentum: float) -> Local:
    """Follow the features' mean beside steps: the running one, and that of the last pass, which is sent."""

    def init(received: Params) -> Params:
        nothing, none = torch.zeros_like(received[AGREED]), received[AGREED].new_zeros(())
        return received | {_RUNNING: nothing, _WEIGHT: none, _SUM: nothing, _ROWS: none}

    def step(params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Move, Tensor]:
        move, loss = base.step(params, batches, received, index)
        batch = batches[0]
        mean = _mean(model.features(params, batch.x), batch.mask)
        running, weight = _running(params, mean, momentum)
        rows = batch.rows()
        goes_on = (sampling.seen(index, batch) > 0).to(rows.dtype)
        put = {
            _RUNNING: running, _WEIGHT: weight,
            _SUM: goes_on * params[_SUM] + rows * mean, _ROWS: goes_on * params[_ROWS] + rows,
        }  # fmt: skip
        return Move(move.slope, move.put | put), loss

    def final(params: Params) -> Params:
        told = {AGREED: params[_SUM] / params[_ROWS].clamp(min=1.0)}
        return tree.without(params, "work.") | told

    return replace(base, init=init, step=step, final=final)
