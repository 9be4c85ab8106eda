"""What a run with `+dp` reveals of one client: (epsilon, delta), by Renyi differential privacy.

    a round     N(clipped sum, (z clip)^2): a Gaussian mechanism with multiplier z, of a random part of the clients
    neighbours  one client more (Poisson cohorts, or everybody), or another one in its place (cohorts of fixed size)

The accountant is dp-accounting's, an extra that is imported when epsilon is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..compat import renyi
from ..errors import SpecError
from ..extras import install

ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 512, 1024)
"""Whole, for which the accountant has closed forms."""
INSTALL = install("privacy")
_DEFAULT = 1.0
_MOST = 1e6
"""Largest multiplier that is tried for an epsilon."""


def known() -> bool:
    """Whether epsilon can be computed here."""
    return find_spec("dp_accounting") is not None


@dataclass(frozen=True)
class Mechanism:
    """How a client is hidden among the others, in numbers."""

    clip: float
    """Longest answer; math.inf: no bound."""
    noise: float
    """Multiplier; below 0: found from epsilon, or 1."""
    epsilon: float
    """Budget; 0: none."""
    delta: float
    clients: int
    cohort: int
    """Expected clients of a round; of Poisson cohorts the number varies around it."""
    rounds: int
    poisson: bool = True
    adaptive: bool = False
    quantile: float = 0.5
    clip_rate: float = 0.2
    sites: bool = False
    """Whether clients add the noise, each its part."""

    def __post_init__(self) -> None:
        if math.isinf(self.clip) and (self.noise or self.adaptive):
            raise SpecError(
                "answer_clip is 0, which bounds no answer, but noise and clipping=adaptive need a bound; give one, "
                "such as 1, or noise=0 with clipping=fixed"
            )
        if self.sites and self.adaptive:
            raise SpecError("noise_from is sites, but only the server can follow lengths; use clipping=fixed")
        if self.sites and self.cohort < self.clients:
            raise SpecError(
                f"noise_from is sites, which needs all clients in every round, but cohort is {self.cohort} of "
                f"{self.clients}; use cohort={self.clients}"
            )

    def check(self) -> None:
        """Refuse a budget that cannot be kept to here; whoever only uses a model needs no accountant."""
        if self.epsilon and not known():
            raise SpecError(f"epsilon is {self.epsilon:g}, but it takes dp-accounting to keep to it: {INSTALL}")

    @property
    def rate(self) -> float:
        """Probability that a client takes part in a round."""
        return self.cohort / self.clients

    @cached_property
    def multiplier(self) -> float:
        """Standard deviation of the noise on the sum over its sensitivity; of an adaptive clip, with the count."""
        if self.noise >= 0:
            return self.noise
        return self.found() if self.epsilon else _DEFAULT

    @property
    def count_noise(self) -> float:
        """Standard deviation of the noise on the count of answers below an adaptive clip."""
        return max(self.cohort / 20, self.multiplier) if self.multiplier else 0.0

    @property
    def sum_noise(self) -> float:
        """Multiplier of the noise on the sum alone: 1/z^2 = 1/z_sum^2 + 1/(2 count_noise)^2 (Andrew et al. 2021)."""
        if not self.adaptive or not self.multiplier:
            return self.multiplier
        return float((self.multiplier**-2 - (2 * self.count_noise) ** -2) ** -0.5)

    def present(self, answers: int) -> float:
        """Return the multiplier of a round with so many answers: sites that do not answer add no noise."""
        return self.multiplier * math.sqrt(answers / self.cohort) if self.sites else self.multiplier

    def spent(self, rounds: Mapping[float, int]) -> float:
        """Return epsilon after so many rounds with each multiplier."""
        return _epsilon(tuple(rounds.items()), self.delta, self.clients, self.cohort, self.poisson)

    def found(self) -> float:
        """Return the smallest multiplier, to four digits, with which all rounds spend at most epsilon."""
        self.check()

        def fits(z: float) -> bool:
            return self.spent({z: self.rounds}) <= self.epsilon

        low, high = 0.0, 1.0
        while not fits(high):
            low, high = high, 2 * high
            if high > _MOST:
                raise SpecError(f"epsilon is {self.epsilon:g} with delta {self.delta:g}, which no noise reaches")
        while high - low > 1e-4 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return float(f"{high * (1 + 1e-4):.5g}")

    def seen_by_server(self, rounds: int) -> float:
        """Return epsilon of single answers with the noise of their own sites, as the server sees them."""
        z = self.multiplier / math.sqrt(self.cohort)
        return _epsilon(((z, rounds),), self.delta, self.clients, self.clients, self.poisson)

    def told(self) -> list[str]:
        """Say before a run what it reveals."""
        who = f"about {self.cohort}" if self.poisson and self.rate < 1 else f"{self.cohort}"
        said = [
            f"differential privacy of clients: answers cut to {self.clip:g}, noise {self.multiplier:g} on the sum of "
            f"{who} of {self.clients}"
        ]
        if not self.multiplier:
            return [f"{said[0]}: without noise nothing is private"]
        if not known():
            return [f"{said[0]}; epsilon is not known without dp-accounting: {INSTALL}"]
        spends = self.spent({self.multiplier: self.rounds})
        budget = f", of which {self.epsilon:g} may be spent" if 0 < self.epsilon < spends else ""
        return [f"{said[0]}; {self.rounds} rounds spend epsilon {spends:.4g} at delta {self.delta:g}{budget}"]


def event(multiplier: float, clients: int, cohort: int, *, poisson: bool) -> tuple[Any, Any]:
    """Return a round as dp-accounting describes it, and which federations are neighbours."""
    import dp_accounting  # noqa: PLC0415

    near = dp_accounting.NeighboringRelation
    if not multiplier:
        return dp_accounting.NonPrivateDpEvent(), near.ADD_OR_REMOVE_ONE
    if cohort == clients:
        return dp_accounting.GaussianDpEvent(multiplier), near.ADD_OR_REMOVE_ONE
    if poisson:
        sampled = dp_accounting.PoissonSampledDpEvent(cohort / clients, dp_accounting.GaussianDpEvent(multiplier))
        return sampled, near.ADD_OR_REMOVE_ONE
    # Another client in its place moves the sum by two clips.
    halved = dp_accounting.GaussianDpEvent(multiplier / 2)
    return dp_accounting.SampledWithoutReplacementDpEvent(clients, cohort, halved), near.REPLACE_ONE


@lru_cache(maxsize=4096)
def _curve(multiplier: float, clients: int, cohort: int, poisson: bool) -> np.ndarray:
    """Return the Renyi divergences of one round, order by order."""
    return renyi(*event(multiplier, clients, cohort, poisson=poisson), ORDERS)


@lru_cache(maxsize=64)
def _epsilon(rounds: tuple[tuple[float, int], ...], delta: float, clients: int, cohort: int, poisson: bool) -> float:
    if not any(count for _, count in rounds):
        return 0.0
    from dp_accounting import rdp  # noqa: PLC0415

    total = sum(count * _curve(z, clients, cohort, poisson) for z, count in rounds)
    return float(rdp.compute_epsilon(ORDERS, total, delta)[0])
