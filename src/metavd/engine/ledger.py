"""What a run has revealed of single clients so far, and whether another round fits its budget."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..container import read_json, write_atomic
from ..core.accountant import Mechanism, known
from ..core.privacy import CLIP
from ..core.types import ServerState
from ..errors import UserError


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _counts(spent: Sequence[Sequence[float]]) -> dict[float, int]:
    found = {float(z): int(count) for z, count in spent}
    if any(z < 0 or count < 0 for z, count in found.items()):
        raise ValueError("counts below 0")
    return found


@dataclass
class Ledger:
    """Rounds by the multiplier of their noise; without a mechanism there is nothing to count."""

    mechanism: Mechanism | None
    rounds: dict[float, int] = field(default_factory=dict)
    releases: Path | None = None
    """File that counts releases, where a round that is taken again draws other noise."""
    asked: int = 0
    """Times that sites were asked for an answer with noise of their own, of rounds that came to nothing too."""

    @classmethod
    def opened(cls, mechanism: Mechanism | None, extra: Mapping[str, Any], releases: Path | None = None) -> Ledger:
        """Return the ledger of a run, with what its checkpoint says was spent, or its file of releases."""
        before: Mapping[str, Any] = extra.get("privacy", {})
        if mechanism is not None and releases is not None and releases.exists():
            try:
                before = read_json(releases.read_text())
                return cls(mechanism, _counts(before["spent"]), releases, int(before.get("asked", 0)))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{releases} is damaged ({error}); put back your copy of it") from None
        return cls(mechanism, _counts(before.get("spent", ())), releases, int(before.get("asked", 0)))

    def asking(self) -> None:
        """Count, before sites are asked, that each gives the server one answer more with noise of its own."""
        if self.mechanism is not None and self.mechanism.sites:
            self.asked += 1
            self._write()

    def add(self, answers: int) -> dict[str, Any]:
        """Count a round with so many answers; return what its line says of that."""
        if self.mechanism is None:
            return {}
        z = self.mechanism.present(answers)
        self.rounds[z] = self.rounds.get(z, 0) + 1
        self._write()
        return {"epsilon": self.epsilon()}

    def _write(self) -> None:
        if self.releases is not None:
            write_atomic(self.releases, json.dumps(self.state()["privacy"]).encode())

    def epsilon(self) -> float | None:
        """Return what was spent; None where it is not known, or without bound."""
        assert self.mechanism is not None
        return _finite(self.mechanism.spent(self.rounds)) if known() else None

    def full(self) -> str:
        """Say that no further round fits the budget; empty where one does."""
        m = self.mechanism
        if m is None or not m.epsilon:
            return ""
        after = m.spent({**self.rounds, m.multiplier: self.rounds.get(m.multiplier, 0) + 1})
        if after <= m.epsilon:
            return ""
        return (
            f"the privacy budget is spent: {sum(self.rounds.values())} rounds took {m.spent(self.rounds):.4g} of "
            f"epsilon {m.epsilon:g}, and one more would make it {after:.4g}"
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        if self.mechanism is None:
            return {}
        asked = {"asked": self.asked} if self.asked else {}
        return {"privacy": {"spent": [list(each) for each in self.rounds.items()]} | asked}

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
            told["epsilon_server"] = _finite(m.seen_by_server(max(count, self.asked))) if m.multiplier else None
        return {"privacy": told}
