"""What is learnt of rows before a network sees them: on training rows alone, once it is known who trains.

    source, raw -> partition -> learn(training rows) -> source of numbers or token ids, and what was learnt

Pictures need nothing of the kind: their bytes are scaled as their dataset says. What was learnt travels with the model
(`plain`, `restored`), and new rows are prepared by it, never by themselves.

Shape letters: n rows, d columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .partition import Federation
from .source import Prepare
from .table import Table
from .text import Text


def prepared(federation: Federation) -> Federation:
    """Return the federation with its rows prepared by the training rows of those who take part."""
    source = federation.source
    if source.prepare is None or source.prepare.learnt:
        return federation
    known = federation.train[: federation.num_clients]
    return replace(federation, source=source.prepare.learn(source, np.sort(np.concatenate(known))))


def restored(values: Mapping[str, Any] | None) -> Prepare | None:
    """Return what `plain` wrote."""
    if values is None:
        return None
    kinds: dict[str, Any] = {"table": Table, "text": Text}
    if values.get("kind") not in kinds:
        raise ValueError(f"rows are prepared by {values.get('kind')!r}, which is not known here")
    found: Prepare = kinds[values["kind"]].restored(values)
    return found
