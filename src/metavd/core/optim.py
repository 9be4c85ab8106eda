"""The server's optimiser: SGD with momentum, in groups by name."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Groups:
    """One `Sgd` a name prefix; the longest prefix that fits decides.

    With `sparse`, rows of client-owned tables move, decay and remember only in rounds in which their client takes
    part. Otherwise all rows decay and coast every round, as in the released code.
    """

    by_prefix: dict[str, Sgd]
    sparse: bool = True

    def rule(self, name: str) -> Sgd:
        """Return the rule for a parameter."""
        return self.by_prefix[max((p for p in self.by_prefix if name.startswith(p)), key=len)]

    def step(self, params: Params, gradient: Params, slots: Params, client: Tensor) -> tuple[Params, Params]:
        """Move the parameters that have a gradient; return them all, with their velocities."""
        params, slots = dict(params), dict(slots)
        for name, slope in gradient.items():
            rule, value, velocity = self.rule(name), params[name], slots[name]
            if self.sparse and name.startswith(OWNED):
                rows = rule.step(value[client], slope[client], velocity[client])
                params[name] = value.index_copy(0, client, rows[0])
                slots[name] = velocity.index_copy(0, client, rows[1])
            else:
                params[name], slots[name] = rule.step(value, slope, velocity)
        return params, slots
