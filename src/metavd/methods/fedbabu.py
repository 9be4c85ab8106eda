"""FedBABU: the features are trained below a head that nobody moves; before use, each client fine-tunes all of it.

    local     w <- w - lr grad_w L(w, theta)            theta: the head's first random values, the same for everyone
    server    w <- sum_i n_i w_i / sum_i n_i            the features w alone travel
    use       w, theta <- w, theta - lr grad L(w, theta)                            for tune_epochs passes

Every client derives theta from the run's key and keeps it; it is never sent. A client that has never taken part does as
the others: it fine-tunes features and head on its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import core
from ..schema import option
from .catalogue import base
from .fedper import private_head
from .parts import REGULARISABLE, SOFTMAX, SUMMED, Parts, Training, assemble, descent


@dataclass(frozen=True)
class FedBABUOptions(Training):
    """FedAvg's, and how long clients fine-tune."""

    tune_epochs: int = option(
        5, "passes with which a client fine-tunes features and head before use and test", low=0, search=[1, 5, 10, 20]
    )


@base(
    "fedbabu", "features trained below a fixed random head; all fine-tuned before use", paper="Oh et al., ICLR 2022",
    options=FedBABUOptions, gives=(REGULARISABLE, SUMMED, SOFTMAX), listed=(),
    newcomer="fine-tunes all for tune_epochs passes, as the others do",
)  # fmt: skip
def fedbabu(parts: Parts, o: FedBABUOptions) -> core.types.Algorithm:
    """Features trained below a fixed random head; all fine-tuned before use."""
    shared, keep = private_head(parts)
    steps = descent(parts.outer, o, only=lambda name: not parts.model.in_head(name))
    use = descent(parts.personal(parts.outer), o), core.types.Sampling(o.batch, o.tune_epochs)
    return assemble(shared, o, steps, keep=keep, use=use)
