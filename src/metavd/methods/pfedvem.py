"""pFedVEM: shared features, a private Gaussian head, and a latent head that confident clients speak louder about.

    local     q_i = N(m_i, s_i^2) <- q_i - lr grad [ E_q NLL(w, theta) + kl / n_i KL(q_i || N(mu, rho_i^2)) ]
              rho_i^2 = mean(s_i^2 + (m_i - mu)^2)                      for head_epochs passes, w held fixed
              w <- w - lr grad_w E_q NLL(w, theta)                      for local_epochs passes, q_i held fixed
    server    w  <- sum_i n_i w_i / sum_i n_i
              mu <- sum_i m_i / rho_i^2 / sum_i 1 / rho_i^2             m_i and rho_i^2 travel, s_i does not
    use       the head at m_i

The paper takes ten steps on all of a client's rows in place of our passes over them in batches, and trains every client
in every round. The authors' code fixes rho_i^2 when a turn begins; here it is at its optimum in every step, and what is
sent is that of the turn's end. A client's first turn starts at mu. One that has never taken part starts at mu too
before use, and fits q_i to its rows, the features held fixed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import core
from ..schema import option
from .catalogue import base
from .parts import Parts, Training, assemble, descent, kept, linear_head


@dataclass(frozen=True)
class PFedVEMOptions(Training):
    """FedAvg's, and those of the head's posterior."""

    head_epochs: int = option(10, "passes in which the head is trained", low=0, search=[1, 2, 5, 10])
    draws: int = option(5, "draws of the head in a training step", low=1)
    spread: float = option(0.1, "standard deviation of the head at first", low=1e-12, search=[0.01, 0.1, 1.0])
    spread_rate: float = option(1.0, "rate of the head's spread, as a multiple of lr", low=0)
    kl: float = option(1.0, "weight of the KL, which is divided by the client's rows", low=0, search=[0.1, 1.0])
    new_epochs: int = option(10, "passes with which a client that never took part fits its head", low=0)


@base(
    "pfedvem", "shared features, a private Gaussian head around a latent one", paper="Zhu et al., CVPR 2023",
    options=PFedVEMOptions,
    newcomer="fits a head of its own around the received one",
)  # fmt: skip
def pfedvem(parts: Parts, o: PFedVEMOptions) -> core.types.Algorithm:
    """Shared features, a private Gaussian head around a latent one."""
    model, vem, sampling = parts.model, core.vem, core.types.Sampling
    head = vem.Head(linear_head(model, "pfedvem"))
    loss = vem.expected(model, head, o.draws, o.kl)

    def trained(name: str) -> bool:
        return head.is_own(name) or not (model.in_head(name) or name in {vem.VARIANCE, core.local.BEGUN})

    def rate(name: str) -> float:
        return o.spread_rate if head.is_spread(name) else 1.0

    batches = sampling(o.batch, o.head_epochs + o.local_epochs)
    steps = core.local.in_turns(
        loss, batches, first=head.is_own, epochs=o.head_epochs, lr=o.lr, clip=o.clip, only=trained, rate=rate
    )
    steps = replace(steps, init=head.begun, final=head.sent)
    fits = replace(descent(loss, o, only=head.is_own, rate=rate), init=head.begun, final=head.used)
    emits = core.emit.joined_by(parts.emit, lambda key, like: {vem.VARIANCE: like.new_ones(())})  # noqa: ARG005
    parts = replace(parts, emit=emits, outer=loss, aggregate=vem.by_confidence(head))
    keep = kept(model, lambda first: head.start(first, o.spread))
    newcomer = core.types.Newcomer(fits, sampling(o.batch, o.new_epochs))
    built = assemble(parts, o, steps, batches, keep=keep, newcomer=newcomer)
    return replace(built, personalize=replace(built.personalize, final=head.used))
