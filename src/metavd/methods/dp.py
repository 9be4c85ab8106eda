"""Differential privacy of clients: answers clipped, averaged alike, noise on the sum; see docs/privacy.md.

What a client alone owns on the server, an embedding or a spread, is shared by all: noise on a sum does not hide it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from .. import core
from ..errors import SpecError
from ..schema import option
from .catalogue import extra
from .parts import SUMMED, Options, Parts


@dataclass(frozen=True)
class DPOptions(Options):
    """The clip, the noise or what it may cost, and who is drawn."""

    answer_clip: float = option(
        1.0, "longest answer, as the difference to what was sent; 0: no bound, for noise=0", low=0,
        search=[0.1, 0.3, 1.0, 3.0],
    )  # fmt: skip
    clipping: Literal["fixed", "adaptive"] = option("fixed", "adaptive: the clip follows a quantile of the lengths")
    quantile: float = option(0.5, "which quantile an adaptive clip follows", low=0, high=1, search=[0.3, 0.5, 0.7])
    clip_rate: float = option(0.2, "how fast an adaptive clip follows", low=0, high=10)
    noise: float = option(
        -1.0, "noise on the sum, over answer_clip; -1: found from epsilon, or 1 without it", low=-1, high=1e6
    )
    epsilon: float = option(0.0, "budget of the whole run; 0: none", low=0)
    delta: float = option(1e-5, "delta of epsilon; well below 1 over the clients", low=1e-30, high=0.5)
    sampling: Literal["poisson", "fixed"] = option(
        "poisson", "a client takes part with probability cohort/clients, or cohorts have one size"
    )
    noise_from: Literal["server", "sites"] = option("server", "who adds the noise; sites: each its part")

    @property
    def only_mean(self) -> str:
        """Noise is measured for a sum."""
        return "+dp adds noise to the sum of clipped answers"


@extra(
    "dp", "differential privacy of clients", paper="McMahan et al., ICLR 2018", options=DPOptions, needs=SUMMED,
    because="adds noise to the sum of the answers, and this base needs more than the sum",
)  # fmt: skip
def dp(parts: Parts, o: DPOptions) -> Parts:
    """Clip answers, average them alike, add noise to the sum."""
    if parts.undropped is not None:
        raise SpecError("dropped is released, whose server looks past the answers, but +dp needs dropped=absent")
    setting, finish = parts.setting, parts.finish
    mechanism = core.accountant.Mechanism(
        clip=o.answer_clip or math.inf, noise=o.noise, epsilon=o.epsilon, delta=o.delta, clients=setting.num_clients,
        cohort=setting.cohort or setting.num_clients, rounds=setting.rounds, poisson=o.sampling == "poisson",
        adaptive=o.clipping == "adaptive", quantile=o.quantile, clip_rate=o.clip_rate, sites=o.noise_from == "sites",
    )  # fmt: skip
    normal = setting.normal or core.rng.normal

    def private(built: core.types.Algorithm) -> core.types.Algorithm:
        built = finish(built)
        return replace(
            built,
            server=core.privacy.released(built.server, built.emit, mechanism, normal),
            privacy=mechanism,
            veil=core.privacy.veiled(mechanism, normal) if mechanism.sites else None,
        )

    return replace(parts, emit=core.emit.alike(parts.emit), aggregate=core.aggregate.mean, finish=private)
