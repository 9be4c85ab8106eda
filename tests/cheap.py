"""Options that make any method quick, for tests of every method."""

from __future__ import annotations

from typing import Any

from metavd import methods

FEW = {
    "local_epochs": 1, "head_epochs": 2, "new_epochs": 1, "tune_epochs": 1, "prox_steps": 2, "draws": 2,
    "answer_draws": 2, "grid": 2, "hyper_width": 8, "distill_steps": 4, "teachers": 2, "chains": 2, "sweeps": 1,
}  # fmt: skip


def cheap(method: str, **own: Any) -> dict[str, Any]:
    """Return those of the options, and of the caller's own, that the method has."""
    known = methods.options_of(method)
    return {key: value for key, value in (FEW | own).items() if key in known}
