"""FedBE: FedAvg whose mean is taught by an ensemble of models on the server's unlabelled rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from .. import core
from ..errors import SpecError
from ..schema import option
from .averaging import averaged
from .catalogue import base
from .parts import SOFTMAX, Parts, Training

if TYPE_CHECKING:
    from ..core.server import Distillation


@dataclass(frozen=True)
class FedBEOptions(Training):
    """FedAvg's, the teachers' and the distillation's."""

    server_share: float = option(0.04, "share of every client's rows that the server gets, unlabelled", low=0, high=0.5)
    teachers: int = option(10, "models drawn around the clients'", low=0)
    teacher_law: Literal["gaussian", "dirichlet"] = option("gaussian", "distribution that the teachers are drawn from")
    teacher_scale: float = option(0.1, "standard deviations of a Gaussian draw", low=0)
    concentration: float = option(1.0, "concentration of the Dirichlet distribution", low=1e-6)
    average: Literal["probs", "logits"] = option(
        "probs", "average the teachers' probabilities or logits", released="logits"
    )
    temperature: float = option(
        0.5, "sharpening of the teachers' average; 1: none", low=1e-3, search=[0.5, 1.0, 2.0], released=1.0
    )
    distill_lr: float = option(0.01, "rate of distillation", low=0, search=[0.001, 0.003, 0.01, 0.03], released=0.9)
    distill_last_lr: float = option(
        9e-5, "rate of its last quarter, whose iterates are averaged", low=0, search=[9e-5, 4e-4, 1e-3], later=True
    )
    distill_steps: int = option(72, "steps of distillation", low=4)
    distill_batch: int = option(64, "rows in a step", low=1)

    @property
    def distillation(self) -> Distillation:
        """What is asked of the distillation itself; the defaults are the FedBE paper's."""
        return core.server.Distillation(
            samples=self.teachers, sampling=self.teacher_law, scale=self.teacher_scale,
            concentration=self.concentration, average=self.average, temperature=self.temperature, lr=self.distill_lr,
            min_lr=self.distill_last_lr, steps=self.distill_steps, batch=self.distill_batch,
        )  # fmt: skip

    @property
    def server_rows_share(self) -> float:
        """Share of every client's rows that the server gets, unlabelled."""
        return self.server_share

    @property
    def only_mean(self) -> str:
        """Its teachers are the clients' own models."""
        return "fedbe teaches its mean by every client's model, which no rule keeps liars out of"


@base(
    "fedbe",
    "FedAvg distilled from a Bayesian ensemble",
    paper="Chen and Chao, ICLR 2021",
    options=FedBEOptions,
    gives=(SOFTMAX,),
)
def fedbe(parts: Parts, o: FedBEOptions) -> core.types.Algorithm:
    """FedAvg whose mean is taught by an ensemble of models on the server's unlabelled rows."""
    rows, model = parts.setting.server_rows, parts.model
    if rows is None:
        raise SpecError("fedbe needs unlabelled rows on the server; give the federation a server_share above 0")
    return averaged(replace(parts, wrap=lambda base: core.server.distill(base, model, rows, o.distillation)), o)
