"""Posteriors over the weights of chosen layers: what a method asks of one, and three that answer.

A layer's posterior is q(w) = N(theta, sigma^2). The three store its spread as

    logvar    one log sigma^2 per weight, what the released code learns and what the paper's tables were made with
    logalpha  one log alpha per weight, sigma^2 = alpha theta^2, as the paper writes it
    input     one log alpha per input unit: x_j is multiplied by 1 + sqrt(alpha_j) eps, so w_ij has variance
              alpha_j theta_ij^2, the same relative noise for all weights that leave unit j

and all as a distance from `offset`, its initial value. float32 has a spacing of 1e-6 at log sigma^2 = -8.5, which
swallows the KL's first steps; near 0 it does not.

    dropout rate  p = alpha / (1 + alpha) = sigma^2 / (sigma^2 + theta^2)

Another posterior is a class that fills `Posterior`, alone or as a `Spread`. A script adds it to `POSTERIORS` under a
name, and a package by the entry point group `metavd.posteriors`; the option `spread` then takes that name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from ..ops import posterior as ops
from ..tree import Params
from .posteriors import POSTERIORS

_EPS = 1e-10
"""Added to variances before they are inverted, as in the released code."""


@dataclass(frozen=True)
class Choice:
    """What a user may ask of a posterior; options of the methods have these names, and say what each means."""

    rate: float
    floor: float
    ceiling: float
    max_rate: float
    clamp: ops.Clamp
    kl_epsilon: ops.Epsilon
    prior: ops.Prior


class Posterior(Protocol):
    """A posterior of some layers. What a client receives, returns and keeps of it are entries of its parameters."""

    everywhere: ClassVar[bool]
    """Whether all linear layers have one when nothing else is said, or the model's variational layers alone."""

    @classmethod
    def build(cls, layers: tuple[str, ...], weights: Callable[[], Params], choice: Choice) -> Self:
        """Make it for some layers; `weights` gives initial parameters, where the start depends on them.

        What cannot be is a ValueError, in one sentence that says what would be right.
        """
        ...

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers that have it."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return all that makes it what it is, as plain values; "layers" among them."""
        ...

    def entries(self, layer: str, weight: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of what travels for a layer whose weight has a shape (out, in, ...).

        A name is the layer's and one more word, which no parameter of the network has: "fc1.logvar".
        """
        ...

    def start(self, entry: str) -> float:
        """Return what an entry holds at first."""
        ...

    def stored(self, entry: str, value: float) -> float:
        """Return what an entry holds where its spread is a value."""
        ...

    def bounded(self, entry: str, stored: Tensor) -> Tensor:
        """Return an entry as the server sends it, within its range."""
        ...

    def stuck(self, entry: str, stored: Tensor) -> Tensor:
        """Return which of an entry's values no push towards more noise can move, the way the KL pushes."""
        ...

    def perturb(self, params: Params, layer: str) -> Params:
        """Return what makes a layer noisy: one of two entries, see `model`.

        variance    one per weight: the layer's output is drawn, by local reparameterisation
        alpha       one per input unit: the layer's input is multiplied by 1 + sqrt(alpha) eps
        """
        ...

    def variance(self, params: Params, layer: str) -> Tensor:
        """Return sigma^2, one per weight."""
        ...

    def rates(self, params: Params, *, clamped: bool = True) -> Params:
        """Return dropout rates by layer name; without the clamp, those of what was sent as it is."""
        ...

    def precision(self, params: Params, layer: str, share: Tensor) -> Tensor:
        """Return a client's say over each weight, share / sigma^2.

        A factor that all clients have in common may be left out. `share` has as many axes as the weight.
        """
        ...

    def kl(self, params: Params, *, mean: bool = True) -> Tensor:
        """Return the KL over all layers, its mean (the released code's) or its sum (the ELBO's)."""
        ...


def entries(posterior: Posterior, weights: Mapping[str, tuple[int, ...]]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return layer, name and shape of all that travels for a posterior, given the shapes of its layers' weights."""
    return [
        (layer, name, shape)
        for layer in posterior.layers
        for name, shape in posterior.entries(layer, weights[layer]).items()
    ]


def per_weight(value: Tensor, weight: Tensor) -> Tensor:
    """Spread a value per input unit (in,) over a weight (out, in, ...); others pass."""
    if value.dim() == 1 and weight.dim() > 1:
        return value.reshape(1, -1, *[1] * (weight.dim() - 2)).expand(weight.shape)
    return value


def logit(p: float) -> float:
    """Return log(p / (1 - p)), the log alpha of a dropout rate p."""
    return math.log(p) - math.log1p(-p)


@dataclass(frozen=True)
class Spread:
    """What the three share: one log sigma^2 or log alpha per weight or per input unit, and its range."""

    layers: tuple[str, ...]
    offset: float = -8.5
    """Stored values are distances from here."""
    first: float = 0.0
    """What is stored at first."""
    low: float = -17.0
    """Floor of log sigma^2 (or log alpha)."""
    high: float = 8.5
    clamp: ops.Clamp = "through"
    prior: ops.Prior = "hierarchical"

    everywhere: ClassVar[bool] = False
    name: ClassVar[str]
    """Under which it is chosen."""
    ending: ClassVar[str] = "logalpha"
    """Last word of its entry's name."""
    quantity: ClassVar[str] = "log alpha"

    @classmethod
    def build(cls, layers: tuple[str, ...], weights: Callable[[], Params], choice: Choice) -> Self:
        """Start at the wished dropout rate, within the wished range."""
        if choice.prior == "anchored" and not choice.rate:
            raise ValueError("prior is anchored at rate, but rate is 0; give the rate to stay near, such as rate=0.2")
        first, prior = cls.initial(layers, weights, choice), choice.prior
        if choice.clamp == "released":
            return cls(layers, offset=0.0, first=first, low=choice.floor, high=8.5, clamp="released", prior=prior)
        high = cls.ceiling(choice)
        if not choice.floor <= first <= high:
            raise ValueError(
                f"the posterior starts at {cls.quantity} = {first:.3g}, but its range is {choice.floor:g} to "
                f"{high:.3g}; move floor, ceiling, max_rate or rate"
            )
        return cls(layers, offset=first, low=choice.floor, high=high, clamp=choice.clamp, prior=prior)

    @classmethod
    def initial(cls, layers: tuple[str, ...], weights: Callable[[], Params], choice: Choice) -> float:  # noqa: ARG003
        """Return the first log sigma^2 (or log alpha)."""
        return logit(choice.rate or 0.15)

    @classmethod
    def ceiling(cls, choice: Choice) -> float:
        """Return the highest log sigma^2 (or log alpha)."""
        return logit(choice.max_rate)

    @property
    def bounds(self) -> ops.Bounds:
        """How what is stored becomes a spread."""
        return ops.Bounds(self.offset, self.low, self.high, self.clamp)

    def describe(self) -> dict[str, Any]:
        """Return name and fields; the usual prior goes without saying, as in files from before there was another."""
        told = {"posterior": self.name, **asdict(self)}
        if self.prior == "hierarchical":
            del told["prior"]
        return told

    def entry(self, layer: str) -> str:
        """Return the name under which a layer's spread travels."""
        return f"{layer}.{self.ending}"

    def entries(self, layer: str, weight: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """One number per weight."""
        return {self.entry(layer): tuple(weight)}

    def start(self, entry: str) -> float:  # noqa: ARG002
        """Return the first distance from the offset."""
        return self.first

    def stored(self, entry: str, value: float) -> float:  # noqa: ARG002
        """Return the distance from the offset."""
        return value - self.offset

    def bounded(self, entry: str, stored: Tensor) -> Tensor:  # noqa: ARG002
        """Clamp; gradients of the server pass it at both ends, or, as released, not."""
        return ops.clamp(stored, *self.bounds.ends, "through" if self.clamp == "inward" else self.clamp)

    def stuck(self, entry: str, stored: Tensor) -> Tensor:  # noqa: ARG002
        """Return which values the clamp cuts off."""
        low, high = self.bounds.ends
        if self.clamp in {"inward", "project"}:
            return stored >= high
        return ((stored < low) | (stored > high)) & (self.clamp == "released")

    def spread(self, params: Params, layer: str, *, clamped: bool = True) -> Tensor:
        """Return the log sigma^2 (or log alpha) of a layer; a layer without an entry keeps its first value."""
        stored = params.get(self.entry(layer))
        if stored is None:
            weight = params[f"{layer}.weight"]
            (shape,) = self.entries(layer, tuple(weight.shape)).values()
            return torch.full(shape, self.offset + self.first, dtype=weight.dtype, device=weight.device)
        return ops.spread(stored, self.bounds) if clamped else self.offset + stored

    def log_alpha(self, params: Params, layer: str, *, clamped: bool = True) -> Tensor:
        """Return log(sigma^2 / theta^2) in the shape of the layer's spread."""
        return self.spread(params, layer, clamped=clamped)

    def variance(self, params: Params, layer: str) -> Tensor:
        """Return alpha theta^2, one per weight."""
        weight = params[f"{layer}.weight"]
        return per_weight(self.spread(params, layer).exp(), weight) * weight.square()

    def perturb(self, params: Params, layer: str) -> Params:
        """Draw the layer's output."""
        return {"variance": self.variance(params, layer)}

    def rates(self, params: Params, *, clamped: bool = True) -> Params:
        """Return each layer's dropout rates p = alpha / (1 + alpha), by layer name."""
        return {layer: torch.sigmoid(self.log_alpha(params, layer, clamped=clamped)) for layer in self.layers}

    def precision(self, params: Params, layer: str, share: Tensor) -> Tensor:
        """Return share / sigma^2; of a relative spread share / alpha, for all clients received one theta."""
        return share / (per_weight(self.spread(params, layer).exp(), params[f"{layer}.weight"]) + _EPS)

    def kl(self, params: Params, *, mean: bool = True) -> Tensor:
        """Return KL(q || p) over all layers.

        Under the hierarchical prior N(0, gamma) with gamma at its optimum it is

            KL = 1/2 log(1 + theta^2 / sigma^2) = 1/2 log(1 + 1 / alpha),    dKL / d log sigma^2 = -(1 - p) / 2

        and anchored where the spread started, a0 = sigma0^2 (or alpha0), under the prior N(theta, a0)

            KL = 1/2 (a / a0 - 1 - log(a / a0)),    dKL / d log a = (a / a0 - 1) / 2

        The mean runs over all spreads of all layers. The gradient goes to the spread alone: theta is held fixed, as in
        the released code.
        """
        weights = {layer: tuple(params[f"{layer}.weight"].shape) for layer in self.layers}
        count = sum(math.prod(shape) for _, _, shape in entries(self, weights))
        scale = 1 / count if mean else 1.0
        return reduce(torch.add, (self.layer_kl(params, layer, scale) for layer in self.layers))

    def layer_kl(self, params: Params, layer: str, scale: float) -> Tensor:
        """Return one layer's KL, times a scale."""
        return self.kl_terms(params, layer).sum() * scale

    def kl_terms(self, params: Params, layer: str) -> Tensor:
        """Return the KL of each spread of a layer."""
        anchored = self.prior == "anchored"
        terms = self.anchored_terms(params, layer) if anchored else ops.relative_kl(self.log_alpha(params, layer))
        mask = params.get(f"{layer}.mask")
        return terms if mask is None else terms * mask

    def anchored_terms(self, params: Params, layer: str) -> Tensor:
        """Return the anchored KL of each spread of a layer, from what is stored: exactly 0 at the start."""
        stored = params.get(self.entry(layer))
        if stored is None:
            return torch.zeros_like(self.spread(params, layer))
        return ops.anchored_kl(ops.clamp(stored, *self.bounds.ends, self.clamp) - self.first)


@dataclass(frozen=True)
class LogVariance(Spread):
    """One log sigma^2 per weight."""

    kl_epsilon: ops.Epsilon = "weight"
    """Where the KL's epsilon stands, see `ops.posterior.kl`."""

    name: ClassVar[str] = "logvar"
    ending: ClassVar[str] = "logvar"
    quantity: ClassVar[str] = "log sigma^2"

    @classmethod
    def build(cls, layers: tuple[str, ...], weights: Callable[[], Params], choice: Choice) -> Self:
        """Start at the wished dropout rate of the root-mean-square weight, or, as released, at -8.5."""
        made = super().build(layers, weights, choice)
        return cls(**asdict(made) | {"kl_epsilon": choice.kl_epsilon})

    @classmethod
    def initial(cls, layers: tuple[str, ...], weights: Callable[[], Params], choice: Choice) -> float:
        """Return log alpha + log mean theta^2."""
        if not choice.rate:
            return -8.5
        start = weights()
        square = float(torch.cat([start[f"{layer}.weight"].flatten() for layer in layers]).square().mean())
        return logit(choice.rate) + float(torch.tensor(square).log())

    @classmethod
    def ceiling(cls, choice: Choice) -> float:
        """Return the highest log sigma^2."""
        return choice.ceiling

    def log_alpha(self, params: Params, layer: str, *, clamped: bool = True) -> Tensor:
        """Return log(sigma^2 / theta^2); theta is held fixed."""
        return ops.log_alpha(self.spread(params, layer, clamped=clamped), params[f"{layer}.weight"])

    def variance(self, params: Params, layer: str) -> Tensor:
        """Return sigma^2."""
        stored = params.get(self.entry(layer))
        if stored is None:
            return self.spread(params, layer).exp()
        return ops.variance(stored, self.bounds, masked=f"{layer}.mask" in params)

    def layer_kl(self, params: Params, layer: str, scale: float) -> Tensor:
        """Return one layer's KL, times a scale."""
        stored, mask = params.get(self.entry(layer)), params.get(f"{layer}.mask")
        if stored is None or self.prior == "anchored":
            return super().layer_kl(params, layer, scale)
        return ops.kl(stored, params[f"{layer}.weight"], mask, self.bounds, scale, self.kl_epsilon)

    def kl_terms(self, params: Params, layer: str) -> Tensor:
        """Return the KL of each weight."""
        if self.prior == "anchored":
            return super().kl_terms(params, layer)
        mask = params.get(f"{layer}.mask")
        return ops.kl_terms(self.spread(params, layer), params[f"{layer}.weight"], mask, self.kl_epsilon)


@dataclass(frozen=True)
class LogAlpha(Spread):
    """One log alpha per weight."""

    name: ClassVar[str] = "logalpha"


@dataclass(frozen=True)
class InputLogAlpha(Spread):
    """One log alpha per input unit."""

    name: ClassVar[str] = "input"
    everywhere: ClassVar[bool] = True

    def entries(self, layer: str, weight: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """One number per input unit."""
        return {self.entry(layer): (weight[1],)}

    def perturb(self, params: Params, layer: str) -> Params:
        """Multiply the layer's input."""
        return {"alpha": self.spread(params, layer).exp()}


for _posterior in (LogVariance, LogAlpha, InputLogAlpha):
    POSTERIORS.add(_posterior.name, _posterior, __name__)


def named(name: str) -> type[Posterior]:
    """Return a posterior by its name, ours or another package's, which is imported now."""
    if name not in POSTERIORS:
        told = [f"there is no posterior {name!r}", f"there are {', '.join(POSTERIORS)}", *POSTERIORS.broken]
        raise ValueError("; ".join(told))
    return POSTERIORS[name]
