"""A method: FedAvg whose clients minimise a multiple of their loss."""

from dataclasses import dataclass, replace

from metavd import methods
from metavd.methods import REGULARISABLE, Parts, Training, option
from metavd.methods.averaging import averaged


@dataclass(frozen=True)
class HalfOptions(Training):
    """FedAvg's, and the factor."""

    factor: float = option(0.5, "what the loss is multiplied by", low=0)


@methods.base("half", "FedAvg with a smaller loss", paper="nobody", options=HalfOptions, gives=(REGULARISABLE,))
def half(parts: Parts, o: HalfOptions):
    """FedAvg on factor x loss."""
    loss = parts.outer
    return averaged(replace(parts, outer=lambda *given: o.factor * loss(*given)), o)
