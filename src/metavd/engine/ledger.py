"""What a run has revealed of single clients so far, and whether another round fits its budget."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..container import write_atomic
from ..core.accountant import Mechanism, known
from ..core.privacy import CLIP
from ..core.types import ServerState
from ..errors import UserError


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass
class Ledger:
    """Rounds by the multiplier of their noise; without a mechanism there is nothing to count."""

    mechanism: Mechanism | None
    rounds: dict[float, int] = field(default_factory=dict)
    releases: Path | None = None

    @classmethod
    def opened(
        cls, mechanism: Mechanism | None, before: Mapping[str, Any] | None, releases: Path | None = None
    ) -> Ledger:
        """Return the ledger of a run, with what its checkpoint says was spent, or its file of releases."""
        spent: Sequence[Sequence[float]] = (before or {}).get("spent", ())
        if mechanism is not None and releases is not None and releases.exists():
            try:
                spent = json.loads(releases.read_text())["spent"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UserError(f"{releases} is damaged ({error}); put back your copy of it") from None
        return cls(mechanism, {float(z): int(count) for z, count in spent}, releases)

    def add(self, answers: int) -> dict[str, Any]:
        """Count a round with so many answers; return what its line says of that."""
        if self.mechanism is None:
            return {}
        z = self.mechanism.present(answers)
        self.rounds[z] = self.rounds.get(z, 0) + 1
        if self.releases is not None:
            write_atomic(self.releases, json.dumps(self.state()["privacy"]).encode())
        return {"epsilon": self.epsilon()}

    def epsilon(self) -> float | None:
        """Return what was spent; None where it is not known, or without bound."""
        assert self.mechanism is not None
        return _finite(self.mechanism.spent(self.rounds)) if known() else None

    def full(self) -> str:
        """Say why no further round may be taken; empty where one may."""
        m = self.mechanism
        if m is None or not m.epsilon:
            return ""
        after = m.spent({**self.rounds, m.multiplier: self.rounds.get(m.multiplier, 0) + 1})
        if after <= m.epsilon:
            return ""
        return (
            f"  the privacy budget is spent: {sum(self.rounds.values())} rounds took {m.spent(self.rounds):.4g} of "
            f"epsilon {m.epsilon:g}, and one more would make it {after:.4g}; training ends here"
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {} if self.mechanism is None else {"privacy": {"spent": [list(each) for each in self.rounds.items()]}}

    def summary(self, state: ServerState) -> dict[str, Any]:
        """Return what a result says."""
        m = self.mechanism
        if m is None:
            return {}
        count = sum(self.rounds.values())
        told: dict[str, Any] = {
            "epsilon": self.epsilon(), "delta": m.delta, "budget": m.epsilon or None, "noise": m.multiplier,
            "clip": float(state.params[CLIP]) if m.adaptive else _finite(m.clip), "rounds": count,
            "sampling": "poisson" if m.poisson else "fixed", "rate": m.rate,
            "noise_from": "sites" if m.sites else "server",
            "neighbours": "one client more" if m.poisson or m.rate == 1 else "another client in one place",
        }  # fmt: skip
        if m.sites and known():
            told["epsilon_server"] = _finite(m.seen_by_server(count)) if m.multiplier else None
        return {"privacy": told}
