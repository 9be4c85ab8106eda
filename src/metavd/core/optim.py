"""The server's optimiser, in groups by name: SGD with momentum, or one of FedOpt's adaptive rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..tree import Params
from .emit import OWNED


@dataclass(frozen=True)
class Sgd:
    """v <- momentum v + (g + decay p),  p <- p - lr v; torch's SGD without dampening or Nesterov."""

    lr: float
    momentum: float = 0.0
    decay: float = 0.0

    def step(self, value: Tensor, gradient: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new value and the new velocity."""
        velocity = self.momentum * velocity + gradient + self.decay * value
        return value - self.lr * velocity, velocity

    def begin(self, value: Tensor) -> tuple[Tensor, ...]:
        """Return what it remembers before the first step: a velocity of 0."""
        return (torch.zeros_like(value),)


Adapts = Literal["adam", "yogi", "adagrad"]


@dataclass(frozen=True)
class Adaptive:
    """FedOpt (Reddi et al., ICLR 2021): m <- beta1 m + (1 - beta1) g,  p <- p - lr m / (sqrt(v) + tau).

        adam      v <- beta2 v + (1 - beta2) g^2
        yogi      v <- v - (1 - beta2) g^2 sign(v - g^2)
        adagrad   v <- v + g^2

    As in the paper, m begins at 0, v at tau^2, and neither is corrected for that.
    """

    kind: Adapts
    lr: float
    tau: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.99

    def step(self, value: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the new value and the new moments."""
        first, squared = self.beta1 * first + (1.0 - self.beta1) * gradient, gradient.square()
        if self.kind == "adam":
            second = self.beta2 * second + (1.0 - self.beta2) * squared
        elif self.kind == "yogi":
            second = second - (1.0 - self.beta2) * squared * torch.sign(second - squared)
        else:
            second = second + squared
        return value - self.lr * first / (second.sqrt() + self.tau), first, second

    def begin(self, value: Tensor) -> tuple[Tensor, ...]:
        """Return what it remembers before the first step: the moments."""
        return torch.zeros_like(value), torch.full_like(value, self.tau**2)


Rule = Sgd | Adaptive
_MEMORIES = ("", ".second")
"""Endings of the names under which a rule remembers something of a parameter: velocity or first moment, and second."""


@dataclass(frozen=True)
class Groups:
    """One rule a name prefix; the longest prefix that fits decides.

    With `sparse`, rows of client-owned tables move, decay and remember only in rounds in which their client takes
    part. Otherwise all rows decay and coast every round, as in the released code.
    """

    by_prefix: dict[str, Rule]
    sparse: bool = True

    def rule(self, name: str) -> Rule:
        """Return the rule for a parameter."""
        return self.by_prefix[max((p for p in self.by_prefix if name.startswith(p)), key=len)]

    def begin(self, params: Params) -> Params:
        """Return what is remembered of parameters before the first step."""
        return {
            name + ending: memory
            for name, value in params.items()
            for ending, memory in zip(_MEMORIES, self.rule(name).begin(value), strict=False)
        }

    def step(self, params: Params, gradient: Params, slots: Params, client: Tensor) -> tuple[Params, Params]:
        """Move the parameters that have a gradient; return them all, with what is remembered of them."""
        params, slots = dict(params), dict(slots)
        for name, slope in gradient.items():
            rule, kept = self.rule(name), remembered(name, slots)
            given = [params[name], slope, *(slots[each] for each in kept)]
            if self.sparse and name.startswith(OWNED):
                rows = rule.step(*(value[client] for value in given))
                whole = [given[0], *given[2:]]
                moved = tuple(value.index_copy(0, client, new) for value, new in zip(whole, rows, strict=True))
            else:
                moved = rule.step(*given)
            params[name] = moved[0]
            slots.update(zip(kept, moved[1:], strict=True))
        return params, slots


def remembered(name: str, slots: Params) -> list[str]:
    """Return the names under which something of a parameter is remembered."""
    return [name + ending for ending in _MEMORIES if name + ending in slots]
