"""FedDBE: FedAvg whose features are freed of each client's bias, which the client keeps.

    local     w, theta, v_i <- ... - lr grad [ L(theta(phi_w(x) + v_i)) + kappa mean 1/2 (r - g)^2 ]
              r <- (1 - momentum) r + momentum mean_batch phi_w(x)          anew in every round, over its weight so far
    server    w, theta <- sum_i n_i (w_i, theta_i) / sum_i n_i
              g <- sum_i n_i g_i / sum_i n_i                                in the first rounds; then it is fixed
              g_i: the mean of a client's features in the last pass of its round
    use       theta(phi_w(x) + v_i)

In the first `warm_rounds` rounds g is not known: neither v_i nor the pull counts, and a round is one of FedAvg. The
paper begins with one round of all clients; g is then the mean over the cohorts of the first rounds. kappa and momentum
are those of the authors' own command line; PFLlib's kappa of 0 switches the pull off.

A client that has never taken part begins with v_i = 0 and fits it to its rows, all else held fixed; the paper does not
say what it should do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import core
from ..schema import option
from .catalogue import base
from .parts import REGULARISABLE, SOFTMAX, SUMMED, TUNABLE, Parts, Training, assemble, descent, kept, linear_head


@dataclass(frozen=True)
class FedDBEOptions(Training):
    """FedAvg's, and those of the bias and of the pull."""

    kappa: float = option(50.0, "weight of the pull of the features' mean", low=0, search=[0.1, 1.0, 5.0, 50.0])
    momentum: float = option(1.0, "share of a batch in the running mean of the features", low=0.001, high=1,
                             search=[0.1, 1.0])  # fmt: skip
    warm_rounds: int = option(1, "rounds over which the features' mean is gathered", low=1)
    bias_rate: float = option(1.0, "rate of the bias on the features, as a multiple of lr", low=0)
    new_epochs: int = option(5, "passes with which a client that never took part fits its bias", low=0)


@base(
    "feddbe", "FedAvg with a private bias on the features", paper="Zhang et al., NeurIPS 2023",
    options=FedDBEOptions, gives=(REGULARISABLE, TUNABLE, SUMMED, SOFTMAX), listed=(),
    newcomer="fits a bias of its own on the features for new_epochs passes, all else held fixed",
)  # fmt: skip
def feddbe(parts: Parts, o: FedDBEOptions) -> core.types.Algorithm:
    """FedAvg with a private bias on the features, whose mean is pulled to a common one."""
    dbe, model = core.dbe, parts.model
    layer = linear_head(model, "feddbe")
    bias, width = dbe.Bias(layer, float(o.warm_rounds)), model.layers[layer][1]
    outer = dbe.biased(parts.outer, bias)
    loss = core.objective.total(outer, dbe.towards(model, bias, o.kappa, o.momentum))

    def rate(name: str) -> float:
        return o.bias_rate if name == dbe.BIAS else 1.0

    batches = core.types.Sampling(o.batch, o.local_epochs)
    steps = dbe.tracking(descent(loss, o, only=dbe.trained, rate=rate), model, batches, o.momentum)
    fits = descent(parts.personal(outer), o, only=lambda name: name == dbe.BIAS, rate=rate)
    wrap, admit, admitting = parts.wrap, parts.admit, parts.personal(parts.outer)
    parts = replace(
        parts,
        emit=core.emit.joined_by(parts.emit, lambda key, like: {dbe.AGREED: like.new_zeros(width)}),  # noqa: ARG005
        outer=outer,
        # A client that is being admitted has no bias yet.
        admit=None if admit is None else lambda used, _: admit(used, admitting),
        wrap=lambda server: core.server.gathered(wrap(server), (dbe.AGREED,), o.warm_rounds),
    )
    newcomer = core.types.Newcomer(replace(fits, final=bias.used), core.types.Sampling(o.batch, o.new_epochs))
    keep = kept(model, lambda first: {dbe.BIAS: next(iter(first.values())).new_zeros(width)})
    built = assemble(parts, o, steps, batches, keep=keep, newcomer=newcomer)
    return replace(built, personalize=replace(built.personalize, final=bias.used))
