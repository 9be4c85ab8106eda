"""PFedMe: personal models near a shared one, which descends the Moreau envelopes of the clients' losses.

    local     theta <- theta - lr (clip(grad L(theta)) + lambda (theta - w))       prox_steps times on a batch, from w
              w     <- w - outer_lr lambda (w - theta)
    server    w     <- (1 - beta) w + beta sum_i n_i w_i / sum_i n_i               beta: server_lr
    use       theta, by the same steps from the w that was received, for tune_epochs passes

Clients keep nothing. One that has never taken part does as the others: it finds its theta near w on its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import core
from ..errors import SpecError
from ..schema import option
from .catalogue import base
from .parts import SOFTMAX, SUMMED, Parts, Training, assemble


@dataclass(frozen=True)
class PFedMeOptions(Training):
    """Training, the pull, and how personal models are found."""

    lr: float = option(0.09, "rate of the steps on the personal model", low=0, search=[0.01, 0.03, 0.05, 0.09])
    pull: float = option(
        15.0, "lambda: pull of the personal model towards the shared one", low=0, search=[5, 10, 15, 20]
    )
    prox_steps: int = option(5, "K: steps on the personal model with one batch", low=1)
    outer_lr: float = option(
        0.005, "eta: rate of the shared model's step; 1/lambda lands on the personal model", low=0,
        search=[0.005, 0.01, 0.02, 0.05, 0.0667],
    )  # fmt: skip
    server_lr: float = option(1.0, "beta: server learning rate; 1 lands on the clients' mean", low=0, search=[1.0, 2.0])
    tune_epochs: int = option(5, "passes with which a client finds its personal model before use and test", low=0)


@base(
    "pfedme", "personal models near a shared one, by Moreau envelopes", paper="Dinh et al., NeurIPS 2020",
    options=PFedMeOptions, gives=(SUMMED, SOFTMAX),
    newcomer="finds its own model near what it receives, as the others do",
)  # fmt: skip
def pfedme(parts: Parts, o: PFedMeOptions) -> core.types.Algorithm:
    """Personal models near a shared one, which descends Moreau envelopes."""
    if o.lr * o.pull >= 2:
        raise SpecError(
            f"lr x pull is {o.lr * o.pull:g}, but from 2 on each step overshoots the shared model further; "
            f"give an lr below {2 / o.pull:g}"
        )
    local = core.local
    near, use = (
        local.personal(loss, pull=o.pull, steps=o.prox_steps, lr=o.lr, clip=o.clip)
        for loss in (parts.outer, parts.personal(parts.outer))
    )
    steps = local.envelope(near, pull=o.pull, lr=o.outer_lr)
    return assemble(parts, o, steps, use=(use, core.types.Sampling(o.batch, o.tune_epochs)))
