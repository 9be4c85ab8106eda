"""FedRep: shared features, a private head, trained in turns.

    local     theta_i <- theta_i - lr grad_theta L(w, theta_i)          for head_epochs passes, w held fixed
              w       <- w - lr grad_w L(w, theta_i)                    for local_epochs passes, theta_i held fixed
    server    w <- sum_i n_i w_i / sum_i n_i                            the features w alone travel

A client that has never taken part begins with the first random head and fits it to its rows, the features held fixed.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import core
from ..schema import option
from .catalogue import base
from .fedper import PrivateHead, fits_head, private_head
from .parts import REGULARISABLE, SOFTMAX, SUMMED, TUNABLE, Parts, assemble


@dataclass(frozen=True)
class FedRepOptions(PrivateHead):
    """FedPer's, and the head's passes."""

    local_epochs: int = option(1, "passes over a client's data in which the features are trained", low=1)
    head_epochs: int = option(10, "passes before them in which the head is trained", low=0, search=[1, 2, 5, 10])


@base(
    "fedrep", "shared features, a private head; trained in turns", paper="Collins et al., ICML 2021",
    options=FedRepOptions, gives=(REGULARISABLE, TUNABLE, SUMMED, SOFTMAX), listed=("dropout",),
    newcomer="fits a head of its own for new_epochs passes, the features held fixed",
)  # fmt: skip
def fedrep(parts: Parts, o: FedRepOptions) -> core.types.Algorithm:
    """Shared features, a private head; trained in turns."""
    shared, keep = private_head(parts)
    batches = core.types.Sampling(o.batch, o.head_epochs + o.local_epochs)
    steps = core.local.in_turns(
        parts.outer, batches, first=parts.model.in_head, epochs=o.head_epochs, lr=o.lr, clip=o.clip
    )
    return assemble(shared, o, steps, batches, keep=keep, newcomer=fits_head(shared, o))
