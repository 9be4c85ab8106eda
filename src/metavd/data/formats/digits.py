"""scikit-learn's handwritten digits, which come with the installation."""

from __future__ import annotations

from pathlib import Path

from ..source import digits
from .files import Plan
from .registry import dataset

_DEFAULTS = {"clients": 24, "unseen": 6, "cohort": 6, "partition": "dirichlet:0.5", "test_rows": "consistent",
             "rounds": 60, "batch": 32, "drop_from": 30, "model": "mlp"}  # fmt: skip


@dataset(
    "digits",
    "1,797 handwritten digits, 8 x 8 pixels, 10 classes; part of the installation, no download",
    defaults=_DEFAULTS,
    files=False,
)
def plan_digits(root: Path | str) -> Plan:
    """Return the plan of a dataset without files."""
    return Plan("digits", Path(root), (), lambda _: digits())
