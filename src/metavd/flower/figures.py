"""Results from clients' own figures: their rows, and what they answered of them, stay with them.

Means over clients are exact. The calibration error comes from the clients' bins, added up. Figures that need
everybody's single answers (bins of equal counts, AUROC over all rows) are not known here, and None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..evaluate.calibration import BINS, Reliability, expected_error, maximum_error, plain
from ..evaluate.intervals import bounds, resampled
from ..evaluate.metrics import CLIENT_FIGURES, FIGURES

_BINS = ("bin_count", "bin_confidence", "bin_accuracy")
_MEANS = {
    "accuracy": ("accuracy", "train_size"), "accuracy_pooled": ("accuracy", "test_size"),
    "accuracy_uniform": ("accuracy", None), "nll": ("nll", "test_size"), "brier": ("brier", "test_size"),
}  # fmt: skip
"""Figure of a group: the client's figure that is averaged, and what its weight is."""


def pooled(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of a group of clients, as `evaluate.metrics.summarize` does from their answers."""
    tested = [each for each in reports if each["test_size"] and "accuracy" in each]
    if not tested:
        return {**dict.fromkeys(FIGURES), "clients": 0, "samples": 0}

    def column(name: str) -> np.ndarray:
        return np.array([each[name] for each in tested], np.float64)

    size, accuracy = column("test_size"), column("accuracy")
    values = np.stack([column(name) for name, _ in _MEANS.values()], 1)
    weights = np.stack([np.ones(len(tested)) if by is None else column(by) for _, by in _MEANS.values()], 1)
    total = weights.sum(0)
    means = np.divide((values * weights).sum(0), total, out=np.full(len(total), np.nan), where=total > 0)
    limits = [bounds(each) for each in resampled(values, weights).T] if len(tested) > 1 else [None] * len(_MEANS)
    bins = diagram(tested)
    known = {name: None if np.isnan(mean) else float(mean) for name, mean in zip(_MEANS, means, strict=True)}
    return {
        **dict.fromkeys(FIGURES),
        **known,
        "worst_client": float(accuracy.min()),
        "percentile_10": float(np.percentile(accuracy, 10)),
        "ece_top1": None if bins is None else expected_error(bins),
        "mce_top1": None if bins is None else maximum_error(bins),
        "entropy": float((column("entropy") * size).sum() / size.sum()),
        "intervals": dict(zip(_MEANS, limits, strict=True)),
        "clients": len(tested),
        "samples": int(size.sum()),
    }


def diagram(reports: Sequence[Mapping[str, Any]]) -> Reliability | None:
    """Add up the reliability diagrams of the clients that sent one; None where none did."""
    sent = [each for each in reports if _BINS[0] in each]
    if not sent:
        return None
    count, confidence, accuracy = (np.array([each[name] for each in sent], np.float64) for name in _BINS)
    total = count.sum(0)
    safe = np.where(total > 0, total, 1.0)
    edges = np.arange(count.shape[1] + 1) / count.shape[1]
    return Reliability(edges, total, (count * confidence).sum(0) / safe, (count * accuracy).sum(0) / safe)


def details(parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return what a report draws of the answers; labels and single entropies are not known here."""
    tested = {name: [each for each in part if each["test_size"]] for name, part in parts.items()}
    bins = {name: diagram(part) if part else None for name, part in tested.items()}
    return {
        "reliability": {name: None if found is None else {"top1": plain(found)} for name, found in bins.items()},
        "entropy": dict.fromkeys(parts),
        "labels": None,
    }


def line(number: int, report: Mapping[str, Any], *, unseen: bool) -> dict[str, Any]:
    """Return a client's line of clients.csv."""
    sizes = {name: report[name] for name in ("train_size", "test_size")}
    return {"client": number, "unseen": int(unseen)} | sizes | {name: report.get(name, "") for name in CLIENT_FIGURES}


def checked(metrics: Mapping[str, Any], most: float) -> dict[str, Any]:
    """Return the figures of one client that may claim `most` rows, without those that no honest client sends.

    >>> checked({"train_size": 3, "test_size": 2, "accuracy": 7.0, "nll": float("nan"), "extra": 1}, 100)
    {'train_size': 3, 'test_size': 2}
    """
    sizes = {name: int(metrics.get(name, 0)) for name in ("train_size", "test_size")}
    for name, value in sizes.items():
        if value > most:
            raise ValueError(f"it claims a {name} of {value}, but at most {most:.0f} rows are believed")
    figures = {name: metrics[name] for name in CLIENT_FIGURES if _number(metrics.get(name))}
    shares = ("accuracy", "ece_top1", "auroc_wrong", "auroc_unknown")
    figures = {name: value for name, value in figures.items() if name not in shares or value <= 1}
    if not {"accuracy", "nll", "brier", "entropy"} <= figures.keys():
        figures = {}
    bins = {name: metrics.get(name) for name in _BINS}
    # One client's broken diagram must not take everybody's away.
    proper = all(isinstance(each, Sequence) and len(each) == BINS and all(map(_number, each)) for each in bins.values())
    return {name: max(0, value) for name, value in sizes.items()} | figures | (bins if proper else {})


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and bool(np.isfinite(value)) and value >= 0
