"""Gaussian posteriors on the weights of chosen layers: parameterisation, clamp, dropout rates and KL.

A layer's posterior is q(w) = N(theta, sigma^2). Its spread is one of

    logvar    one log sigma^2 a weight, what the released code learns and what the paper's tables were made with
    logalpha  one log alpha a weight, sigma^2 = alpha theta^2, as the paper writes it
    input     one log alpha an input unit: x_j is multiplied by 1 + sqrt(alpha_j) eps, so w_ij has variance
              alpha_j theta_ij^2, the same relative noise for all weights that leave unit j

and is stored as a distance from `offset`, its initial value. float32 has a spacing of 1e-6 at log sigma^2 = -8.5,
which swallows the KL's first steps; near 0 it does not.

    dropout rate  p = alpha / (1 + alpha) = sigma^2 / (sigma^2 + theta^2)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..ops import dense, fused
from ..tree import Params

Kind = Literal["logvar", "logalpha", "input"]

_EPS = 1e-13
"""Keeps log(1 + theta^2 / sigma^2) finite; the value of the released code."""


def clamp(x: Tensor, low: float, high: float, *, through: bool = True) -> Tensor:
    """Clamp x to [low, high], with a gradient that is stated here: torch changed its own at the boundary in 2.15.

    A straight-through clamp has gradient 1 everywhere, so nothing is ever stuck outside the range. Otherwise the
    gradient is 1 inside and on the boundary and 0 outside, and what has left the range never returns: the released
    code's dead zone.

    >>> x = torch.tensor([-9.0, -8.5, 0.0], requires_grad=True)
    >>> clamp(x, -8.5, 8.5, through=False).sum().backward(); x.grad
    tensor([0., 1., 1.])
    """
    bounded = x.detach().clamp(low, high)
    if through:
        return x + (bounded - x.detach())
    return torch.where((x >= low) & (x <= high), x, bounded)


class _Inward(torch.autograd.Function):
    """See `inward`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, low: float, high: float) -> Tensor:
        return x.clamp(low, high)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(inputs[0])
        ctx.low, ctx.high = inputs[1:]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        if x.is_cuda and x.dtype == torch.float32 and fused.ready():
            return fused.gate(slope, x, ctx.low, ctx.high), None, None
        return slope.masked_fill(fused.outward(slope, x, ctx.low, ctx.high), 0.0), None, None


def inward(x: Tensor, low: float, high: float) -> Tensor:
    """Clamp x to [low, high]; outside, and on the boundary, only gradients that lead back inside pass.

    Nothing is stuck outside, as in a dead zone, and nothing is pushed further out, as by a straight-through clamp: its
    gradient never ends there, and the hypernetwork behind x grows without bound until it diverges.

    >>> x = torch.tensor([-9.0, 0.0, 9.0], requires_grad=True)
    >>> inward(x, -8.5, 8.5).sum().backward(); x.grad  # descent goes down: back inside from above, further out below
    tensor([0., 1., 1.])
    """
    return _Inward.apply(x, low, high)


@dataclass(frozen=True)
class Noise:
    """How the posterior of some layers is parameterised."""

    layers: tuple[str, ...]
    kind: Kind = "logvar"
    offset: float = -8.5
    """Stored values are distances from here."""
    start: float = 0.0
    """What is stored at first."""
    low: float = -17.0
    """Floor of log sigma^2 (or log alpha)."""
    high: float = 8.5
    through: bool = True
    """Whether gradients pass the clamp at both ends, see `clamp`."""
    inward: bool = False
    """Whether only those pass there that lead back inside, see `inward`; it goes before `through`."""

    def entry(self, layer: str) -> str:
        """Return the name under which a layer's spread travels."""
        return f"{layer}.logvar" if self.kind == "logvar" else f"{layer}.logalpha"

    def shape(self, weight: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a layer's spread, given its weight's (out, in, ...)."""
        return (weight[1],) if self.kind == "input" else tuple(weight)


def spread(noise: Noise, params: Params, layer: str) -> Tensor:
    """Return the clamped log sigma^2 (or log alpha) of a layer; a layer without an entry keeps its first value."""
    stored = params.get(noise.entry(layer))
    if stored is None:
        weight = params[f"{layer}.weight"]
        value = noise.offset + noise.start
        return torch.full(noise.shape(weight.shape), value, dtype=weight.dtype, device=weight.device)
    low, high = noise.low - noise.offset, noise.high - noise.offset
    return noise.offset + (
        inward(stored, low, high) if noise.inward else clamp(stored, low, high, through=noise.through)
    )


def _fusible(noise: Noise, params: Params, layer: str) -> Tensor | None:
    """Return what is stored of a layer's spread where `dense` can compute with it."""
    stored = params.get(noise.entry(layer))
    usual = noise.kind == "logvar" and noise.inward and f"{layer}.mask" not in params
    return stored if usual and stored is not None and dense.usable(stored) else None


def per_weight(value: Tensor, weight: Tensor) -> Tensor:
    """Spread a value per input unit (in,) over a weight (out, in, ...); others pass."""
    if value.dim() == 1 and weight.dim() > 1:
        return value.reshape(1, -1, *[1] * (weight.dim() - 2)).expand(weight.shape)
    return value


def variance(noise: Noise, params: Params, layer: str) -> Tensor:
    """Return sigma^2, one a weight."""
    stored = _fusible(noise, params, layer)
    if stored is not None:
        return dense.variance(stored, noise.offset, noise.low - noise.offset, noise.high - noise.offset)
    weight, value = params[f"{layer}.weight"], spread(noise, params, layer).exp()
    return value if noise.kind == "logvar" else per_weight(value, weight) * weight.square()


def log_alpha(noise: Noise, params: Params, layer: str) -> Tensor:
    """Return log(sigma^2 / theta^2) in the shape of the layer's spread; theta is held fixed."""
    value = spread(noise, params, layer)
    if noise.kind != "logvar":
        return value
    return value - (params[f"{layer}.weight"].detach().square() + _EPS).log()


def rates(noise: Noise, params: Params) -> Params:
    """Return each layer's dropout rates p = alpha / (1 + alpha), by layer name."""
    return {layer: torch.sigmoid(log_alpha(noise, params, layer)) for layer in noise.layers}


def kl_terms(noise: Noise, params: Params, layer: str) -> Tensor:
    """Return KL(q || p) of each posterior, under the hierarchical prior N(0, gamma) with gamma at its optimum.

        KL = 1/2 log(1 + theta^2 / sigma^2) = 1/2 log(1 + 1 / alpha),    dKL / d log sigma^2 = -(1 - p) / 2

    The gradient goes to the spread alone: theta is held fixed, as in the released code.
    """
    # Beyond 40 the logarithm is its argument, to the last bit of float64.
    terms = 0.5 * softplus(-log_alpha(noise, params, layer), threshold=40.0)
    mask = params.get(f"{layer}.mask")
    return terms if mask is None else terms * mask


def kl(noise: Noise, params: Params, *, mean: bool = True) -> Tensor:
    """Return the KL over all posteriors of all layers: their mean (the released code's) or their sum (the ELBO's)."""
    count = sum(math.prod(noise.shape(params[f"{layer}.weight"].shape)) for layer in noise.layers)
    return reduce(torch.add, (_kl_of(noise, params, layer, 1 / count if mean else 1.0) for layer in noise.layers))


def _kl_of(noise: Noise, params: Params, layer: str, scale: float) -> Tensor:
    """Return one layer's KL, times a scale."""
    stored = _fusible(noise, params, layer)
    if stored is None:
        return kl_terms(noise, params, layer).sum() * scale
    place = (noise.offset, noise.low - noise.offset, noise.high - noise.offset, _EPS)
    return dense.kl(stored, params[f"{layer}.weight"], place, scale)


def without_gradient(noise: Noise, stored: Tensor) -> Tensor:
    """Return which stored values the clamp cuts off from a push towards more noise, the way the KL pushes."""
    low, high = noise.low - noise.offset, noise.high - noise.offset
    if noise.inward:
        return stored >= high
    return ((stored < low) | (stored > high)) & (not noise.through)
