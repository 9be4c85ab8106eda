"""scikit-learn's handwritten digits, which come with the installation."""

from __future__ import annotations

from pathlib import Path

from ..source import digits
from .files import Unread
from .registry import dataset

_DEFAULTS = {"clients": 24, "unseen": 6, "cohort": 6, "partition": "dirichlet:0.5", "test_rows": "consistent",
             "rounds": 60, "batch": 32, "drop_from": 30, "model": "mlp"}  # fmt: skip


@dataset(
    "digits",
    "1,797 handwritten digits, 8 x 8 pixels, 10 classes; part of the installation, no download",
    defaults=_DEFAULTS,
    files=False,
)
def find_digits(root: Path | str) -> Unread:
    """Return a dataset without files."""
    return Unread("digits", Path(root), (), lambda _: digits())
