"""What decides how much personalisation can do, of a federation, in plain numbers.

Shape letters: C clients, K classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .partition import Federation, label_counts


def describe(federation: Federation) -> dict[str, Any]:
    """Return what decides how much personalisation can do, as plain numbers.

    `absent` is the share of test rows whose label the client has no train row of. `total_variation` is the mean over
    clients (with test rows) of sum_k |p_k - q_k| / 2 between the label mixes p of its train and q of its test rows.
    Standard deviations are the population's, as in the paper's table of classes per client. A share of nothing is
    None.
    """
    y, num_classes = federation.source.y, federation.source.num_classes
    train, test = (label_counts(y, num_classes, rows) for rows in (federation.train, federation.test))
    absent = np.where(train == 0, test, 0).sum(1)
    sizes = test.sum(1)
    seen = slice(None, federation.num_clients)
    unseen = slice(federation.num_clients, None)
    both = (train.sum(1) > 0) & (sizes > 0)
    mixes = [counts[both] / counts[both].sum(1, keepdims=True) for counts in (train, test)]
    return {
        "clients": federation.num_clients,
        "unseen": federation.num_unseen,
        "train_size": _spread(train.sum(1)),
        "valid_size": _spread(np.array([len(rows) for rows in federation.valid[seen]])),
        "test_size": _spread(sizes),
        "train_rows": {"participating": int(train[seen].sum()), "unseen": int(train[unseen].sum())},
        "test_rows": {"participating": int(test[seen].sum()), "unseen": int(test[unseen].sum())},
        "server_rows": len(federation.server),
        "train_classes": _spread((train > 0).sum(1)),
        "test_classes": _spread((test > 0).sum(1)),
        "absent": {
            "participating": _ratio(absent[seen].sum(), sizes[seen].sum()),
            "unseen": _ratio(absent[unseen].sum(), sizes[unseen].sum()),
        },
        "total_variation": _ratio(np.abs(mixes[0] - mixes[1]).sum() / 2, both.sum()),
    }


def people(federation: Federation) -> Iterator[tuple[str, str, int, int, str, float]]:
    """Yield of each client its name, what it is there for, its rows, and its most frequent class with its share."""
    source, known = federation.source, federation.num_clients
    tested = known + federation.num_unseen
    counts = label_counts(source.y, source.num_classes, federation.train)
    for client, name in enumerate(federation.names):
        kind = "participates" if client < known else "unseen" if client < tested else "validation"
        most = int(counts[client].argmax())
        label = source.classes[most] if source.classes else str(most)
        share = counts[client].max() / max(counts[client].sum(), 1)
        yield name, kind, len(federation.train[client]), len(federation.test[client]), label, float(share)


def _spread(values: np.ndarray) -> dict[str, float]:
    low, high = int(values.min()), int(values.max())
    return {"min": low, "mean": float(values.mean()), "max": high, "sd": float(values.std())}


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None
