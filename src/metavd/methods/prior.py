"""The label prior: clients train and adapt on logits + log pi_i, the shares of their own labels.

    local     L(w) = cross-entropy of z_w(x) + log pi_i            pi_ik = (n_ik + s) / (n_i + K s),  s: prior_smoothing
    use       adaptation on the same loss; answers are softmax(z), or softmax(z + log pi_i)    prior_answer

A client's labels are not those of everyone, and what it trains learns their mix along with the classes. With the mix
added to its logits the loss asks for the rest alone. Where rows to answer have the client's own mix, it is added back:
personalisation without a gradient step. Known as logit adjustment (Menon et al., ICLR 2021) and balanced softmax (Ren
et al., NeurIPS 2020); in federations, FedLC (Zhang et al., ICML 2022) calibrates logits by a margin between labels
instead. Equal shares are the base to the bit.

A client counts its own training rows and sends nothing new; one that never took part counts those it adapts on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from .. import core
from ..schema import option
from .catalogue import extra
from .parts import SOFTMAX, Options, Parts, linear_head


@dataclass(frozen=True)
class PriorOptions(Options):
    """How shares are smoothed, and whether answers have them."""

    prior_smoothing: float = option(
        0.5, "rows added to each class before its share is taken", low=1e-6, search=[0.1, 0.5, 1.0, 5.0]
    )
    prior_answer: Literal["auto", "with", "without"] = option(
        "auto",
        "answers with the client's label shares, or without; auto: with where test rows are dealt by its own labels "
        "(test_rows=consistent, or a natural partition)",
    )


@extra(
    "prior", "the client's label shares in its loss", paper="Menon et al., ICLR 2021", options=PriorOptions,
    needs=SOFTMAX, because="adds log shares of labels to the logits of a cross-entropy, which this base does not train",
)  # fmt: skip
def prior(parts: Parts, o: PriorOptions) -> Parts:
    """Train and adapt on logits + log label shares; answer with or without them."""
    bias, finish = f"{linear_head(parts.model, '+prior')}.bias", parts.finish
    classes, smoothing, shifted = parts.setting.num_classes, o.prior_smoothing, core.prior.shifted

    def told(built: core.types.Algorithm) -> core.types.Algorithm:
        built = finish(built)
        stage, use, new = built.personalize, replace(built.personal_batches, classes=classes), built.newcomer
        if new is not None:
            new = replace(new, batches=replace(new.batches, classes=classes))
        if o.prior_answer == "with":
            stage, use = core.prior.answering(stage, use, bias, smoothing)
            if new is not None:
                new = core.types.Newcomer(*core.prior.answering(new.stage, new.batches, bias, smoothing))
        train = replace(built.train_batches, classes=classes)
        return replace(built, personalize=stage, personal_batches=use, newcomer=new, train_batches=train)

    return replace(
        parts,
        inner=shifted(parts.inner, bias, smoothing),
        outer=shifted(parts.outer, bias, smoothing),
        finish=told,
    )
