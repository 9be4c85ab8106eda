"""The spread of a posterior: its clamp, its variance and its KL.

    spread = offset + clamp(stored, low - offset, high - offset)        log sigma^2, or log alpha

Each is a function of one client with derivatives to any order and a rule for vmap. A kernel's first derivative is one
kernel too, and its own derivative is written in PyTorch's operators, which have all the orders above.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from . import device

Clamp = Literal["inward", "through", "project", "released"]
"""Which gradients pass a clamp at its ends: those that lead back inside, all, all (and steps end inside), or none."""
Epsilon = Literal["weight", "variance"]
"""Where the KL's epsilon stands: beside theta^2, or beside sigma^2 (the released code's)."""
Prior = Literal["hierarchical", "anchored"]
"""What the KL is taken to: N(0, gamma) with gamma at its optimum, or the posterior's own start."""
_EPSILON = 1e-13
"""Keeps log(1 + theta^2 / sigma^2) finite; the value of the released code."""


class Bounds(NamedTuple):
    """How what is stored becomes a spread."""

    offset: float
    """Stored values are distances from here."""
    low: float
    """Least value of log sigma^2 (or log alpha)."""
    high: float
    clamp: Clamp

    @property
    def ends(self) -> tuple[float, float]:
        """Least and largest distance from the offset."""
        return self.low - self.offset, self.high - self.offset


def clamp(x: Tensor, low: float, high: float, rule: Clamp) -> Tensor:
    """Clamp x to [low, high], with a gradient that is stated here: torch changed its own at the boundary in 2.15.

    through: the gradient is 1 everywhere, so nothing is ever stuck outside the range.
    released: it is 1 inside and on the boundary and 0 outside, and what has left the range never returns: the released
        code's dead zone.
    inward: outside, and on the boundary, only gradients that lead back inside pass. Nothing is stuck outside, as in a
        dead zone, and nothing is pushed further out, as by a straight-through clamp: its gradient never ends there,
        and the hypernetwork behind x grows without bound until it diverges.

    project: it is 1 everywhere, as with through, and the value outside is the boundary itself, to the bit: for spreads
        that are put back into their range after every step, see `core.local.projected`.

    >>> x = torch.tensor([-9.0, -8.5, 0.0], requires_grad=True)
    >>> clamp(x, -8.5, 8.5, "released").sum().backward(); x.grad
    tensor([0., 1., 1.])
    >>> x = torch.tensor([-9.0, 0.0, 9.0], requires_grad=True)
    >>> clamp(x, -8.5, 8.5, "inward").sum().backward(); x.grad  # descent goes down: back from above, further out below
    tensor([0., 1., 1.])
    """
    if rule == "inward":
        return _Inward.apply(x, low, high)
    bounded = x.detach().clamp(low, high)
    if rule == "through":
        return x + (bounded - x.detach())
    if rule == "project":
        return torch.where((x >= low) & (x <= high), x, bounded + (x - x.detach()))
    return torch.where((x >= low) & (x <= high), x, bounded)


def spread(stored: Tensor, bounds: Bounds) -> Tensor:
    """Return log sigma^2 (or log alpha) of what is stored."""
    return bounds.offset + clamp(stored, *bounds.ends, bounds.clamp)


def variance(stored: Tensor, bounds: Bounds, *, masked: bool = False) -> Tensor:
    """Return exp(spread), sigma^2 of a stored log sigma^2; `masked` if some of the weights are dropped."""
    if bounds.clamp == "inward" and not masked and device.has_float_kernels(stored):
        return _Variance.apply(stored, bounds.offset, *bounds.ends)
    return spread(stored, bounds).exp()


def log_alpha(log_variance: Tensor, weight: Tensor) -> Tensor:
    """Return log(sigma^2 / theta^2) of a weight theta, which is held fixed."""
    return log_variance - (weight.detach().square() + _EPSILON).log()


def kl(
    stored: Tensor, weight: Tensor, mask: Tensor | None, bounds: Bounds, scale: float, epsilon: Epsilon = "weight"
) -> Tensor:
    """Return scale times the sum of the KL of all weights, given what is stored of their log sigma^2.

        1/2 log(1 + (theta^2 + tiny) / sigma^2)      epsilon = weight
        1/2 log(1 + theta^2 / (sigma^2 + tiny))      epsilon = variance, the released code's

    The gradient goes to the spread alone: theta is held fixed, as in the released code.
    """
    usual = bounds.clamp == "inward" and mask is None and epsilon == "weight"
    if usual and device.has_float_kernels(stored):
        return _Kl.apply(stored, weight.detach(), (bounds.offset, *bounds.ends, _EPSILON), scale)
    return kl_terms(spread(stored, bounds), weight, mask, epsilon).sum() * scale


def kl_terms(log_variance: Tensor, weight: Tensor, mask: Tensor | None, epsilon: Epsilon = "weight") -> Tensor:
    """Return the KL of each weight, see `kl`."""
    if epsilon == "weight":
        terms = relative_kl(log_alpha(log_variance, weight))
    else:
        terms = 0.5 * torch.log1p(weight.detach().square() / (log_variance.exp() + _EPSILON))
    return terms if mask is None else terms * mask


def relative_kl(log_alpha: Tensor) -> Tensor:
    """Return 1/2 log(1 + 1 / alpha)."""
    # Beyond 40 the logarithm is its argument, to the last bit of float64.
    return 0.5 * softplus(-log_alpha, threshold=40.0)


def anchored_kl(log_ratio: Tensor) -> Tensor:
    """Return 1/2 (a/a0 - 1 - log(a/a0)) of log(a/a0): exactly 0 at 0, where its slope 1/2 (a/a0 - 1) is too.

    It is KL(N(theta, a) || N(theta, a0)).
    """
    return 0.5 * (torch.expm1(log_ratio) - log_ratio)


def outward(slope: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    """Return where a slope leads x further out of [low, high], or along its edge."""
    return torch.where(slope < 0, x >= high, x <= low)


def gate(slope: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    """Return the slope, but 0 where it leads x further out of [low, high]: x <= low and it is >= 0, or the reverse."""
    if device.has_float_kernels(x):
        return _Gate.apply(slope, x, low, high)
    return slope.masked_fill(outward(slope, x, low, high), 0.0)


_kernels = partial(device.kernels, "posterior")


class _Inward(device.Operator):
    """The clamp that only gradients pass which lead back inside."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, low: float, high: float) -> Tensor:
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        return gate(slope, *ctx.saved_tensors, *ctx.given), None, None


class _Gate(device.Operator):
    @staticmethod
    def forward(slope: Tensor, x: Tensor, low: float, high: float) -> Tensor:
        let: Tensor = _kernels().gate(slope, x, low, high)
        return let

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        return g.masked_fill(outward(*ctx.saved_tensors, *ctx.given), 0.0), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, slope: Tensor, x: Tensor, low: float, high: float) -> Any:
        return _Gate.apply(*device.aligned(info, in_dims, slope, x), low, high), 0


class _Variance(device.PerClient):
    batched = staticmethod(lambda *values: _kernels().variance(*values))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        stored, *ctx.place = inputs
        ctx.save_for_backward(stored, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        stored, var = ctx.saved_tensors
        return _VarianceSlope.apply(g, var, stored, *ctx.place[1:]), None, None, None


class _VarianceSlope(device.PerClient):
    batched = staticmethod(lambda *values: _kernels().variance_slope(*values))

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        g, var, stored = ctx.saved_tensors
        v = v.masked_fill(outward(g * var, stored, *ctx.given), 0.0)
        return v * var, v * g, None, None, None


class _Kl(device.PerClient):
    batched = staticmethod(lambda stored, weight, *rest: _kernels().kl(*_rows(stored, weight), *rest))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return _KlSlope.apply(g, *ctx.saved_tensors, *ctx.given), None, None, None


def _kl_slope(g: Tensor, stored: Tensor, weight: Tensor, place: Any, scale: float) -> Tensor:
    """`posterior_kernels.kl_slope` of all clients, in the shape of what is stored."""
    slope: Tensor = _kernels().kl_slope(g, *_rows(stored, weight), place, scale)
    return slope.reshape(stored.shape)


class _KlSlope(device.PerClient):
    batched = staticmethod(_kl_slope)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        g, stored, weight = ctx.saved_tensors
        (offset, low, high, tiny), scale = ctx.given
        kept = torch.sigmoid((weight.square() + tiny).log() - offset - stored.clamp(low, high))
        slope = -0.5 * scale * kept
        v = v.masked_fill(outward(g * slope, stored, low, high), 0.0)
        bent = 0.5 * scale * g * v * kept * (1.0 - kept)
        return (v * slope).sum(), bent.masked_fill(outward(bent, stored, low, high), 0.0), None, None, None


def _rows(*values: Tensor) -> list[Tensor]:
    return [value.flatten(1) for value in values]
