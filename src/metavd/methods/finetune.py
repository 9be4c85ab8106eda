"""Fine-tuning before use and test."""

from __future__ import annotations

from dataclasses import replace

from .catalogue import extra
from .parts import TUNABLE, Adapting, Parts


@extra(
    "ft", "fine-tuned before use", paper="Wang et al. 2019, arXiv:1910.10252", options=Adapting, needs=TUNABLE,
    because="adds an adaptation step, which other bases do not take or already have", listed=("fedavg",),
)  # fmt: skip
def ft(parts: Parts, o: Adapting) -> Parts:
    """Fine-tune before use and test."""
    return replace(parts, adapt_steps=o.adapt_steps)
