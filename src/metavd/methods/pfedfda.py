"""pFedFDA: shared features whose classes are Gaussian, and a head that follows from them.

    head      theta_k = S^-1 m_k,  b_k = -1/2 m_k . S^-1 m_k + log pi_ik        pi_i: the shares of the client's labels
    local     w <- w - lr grad_w L(w, head(M, S, pi_i))                         the head held fixed
              M_i, S_i: means and covariance of the client's own features under the trained w
              M_i <- M + a (M_i - M),   S_i <- S + b (S_i - S)                  a, b: those of a grid that answer best
              for the half of the client's rows that was not fitted
    server    w, M, S <- sum_i n_i (w_i, M_i, S_i) / sum_i n_i                  no rate, momentum or clip for M and S
    use       the head of M_i, S_i under the received w: no gradient

A round is one pass that counts labels, `local_epochs` that train, and two that fit classes and try mixtures; see
`core.lda`. A class of which a client has fewer than `least_rows` rows keeps the received mean, and its share of the
labels is no less than about `prior_floor`, so that it can still be answered. S_i gets `ridge` on its diagonal and is
shrunk, for few rows leave it singular; a client without rows returns what it received.

The paper finds a and b by L-BFGS over two folds; here they are those of a grid, over two random halves of the rows.

A client that has never taken part does what the others do before use: its head follows from its own rows and what it
received.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import core
from ..schema import option
from .catalogue import base
from .parts import Parts, Training, assemble, linear_head


@dataclass(frozen=True)
class PFedFDAOptions(Training):
    """FedAvg's, and how classes are fitted."""

    grid: int = option(6, "values tried for each of the two mixing weights, from 0 (received) to 1 (own)", low=2)
    ridge: float = option(1e-4, "added to the diagonal of a client's own covariance", low=0, search=[1e-4, 1e-2, 1.0])
    shrinkage: float = option(1e-4, "share of its mean variance that a covariance takes", low=0, high=1)
    least_rows: int = option(3, "rows of a class below which its mean is the received one", low=1)
    prior_floor: float = option(1e-4, "added to the share of each class in a client's labels", low=1e-12, high=1)


@base(
    "pfedfda", "shared features, a head from Gaussian classes", paper="McLaughlin and Su, NeurIPS 2024",
    options=PFedFDAOptions,
    newcomer="has a head from its own rows and the received classes, without a gradient, as the others do",
)  # fmt: skip
def pfedfda(parts: Parts, o: PFedFDAOptions) -> core.types.Algorithm:
    """Shared features, a head from Gaussian classes."""
    lda, sampling = core.lda, core.types.Sampling
    model, classes = core.model.headless(parts.model), parts.setting.num_classes
    layer = linear_head(parts.model, "pfedfda")
    fit = lda.Fit(classes, layer, o.grid, o.ridge, o.shrinkage, o.least_rows, o.prior_floor)
    emits = lda.with_classes(core.emit.shared(model), model, classes)
    passes = lda.COUNTING + lda.SPLITS
    train, use = sampling(o.batch, passes + o.local_epochs), sampling(o.batch, passes, augment=False)
    steps, fits = (
        lda.stage(model, batches, fit, lr=o.lr, clip=o.clip, personal=personal)
        for batches, personal in ((train, False), (use, True))
    )
    parts = replace(parts, emit=emits, wrap=lambda server: core.server.gathered(server, (lda.MEANS, lda.COVARIANCE)))
    return assemble(parts, o, steps, train, use=(fits, use))
