"""Results from clients' own figures: their rows, and what they answered of them, stay with them.

What crosses from a site is each figure of the registry that a client has of its own, and one reliability diagram.
Means over clients are exact, as long as nobody claims ten times the rows of the median client; nobody counts as more.
Beside each mean stands the median over clients, none of whom weighs more than two median ones, so that one client
cannot lift it however it lies. The calibration error comes from the clients' diagrams, added up. Figures that need
everybody's single answers (bins of equal counts, an AUROC over all rows) are not known here, and None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..evaluate.calibration import BINS, Reliability, plain, top1
from ..evaluate.figures import Binned, Figure, Rows, figures, of_clients, weighted, weights
from ..evaluate.metrics import ClientResult, client_figures, intervals, nothing

_DIAGRAM = "top1"
"""The diagram that crosses."""
_BINS = ("bin_count", "bin_confidence", "bin_accuracy")
_SIZES = ("train_size", "test_size")
_LOUD = 10.0
"""Times the median client's rows that a client counts for at most."""


def sent(result: ClientResult) -> dict[str, Any]:
    """Return what a site says of its own model; the reader of the answer is `checked`."""
    bins = plain(top1(result.probs, result.y))
    return client_figures(result) | {f"bin_{name}": value for name, value in bins.items() if name != "edges"}


def pooled(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of a group of clients, as `evaluate.metrics.summarize` does; and medians."""
    needed = {figure.name for figure in of_clients() if figure.always}
    tested = [each for each in reports if each["test_size"] and needed <= each.keys()]
    if not tested:
        return nothing()
    tested = _quiet(tested)
    means = {name: _each(figure, tested)[:2] for name, figure in figures().items() if figure.interval}
    return {
        **{name: _pooled(figure, tested) for name, figure in figures().items()},
        "intervals": intervals(means),
        "medians": {name: _median(*_each(figure, tested)) for name, figure in figures().items() if figure.interval},
        "clients": len(tested),
        "samples": sum(each["test_size"] for each in tested),
    }


class Most(NamedTuple):
    """What a client may claim."""

    train: float
    """Rows that it trained on, as its answers claimed."""
    rows: float
    """All of its rows, as it said before the first round."""


def loud(reports: Mapping[int, Mapping[str, Any]]) -> dict[int, tuple[int, int]]:
    """Return the clients that claim far more test rows than the others: as how many they count, and what they claim."""
    quiet = _quiet(list(reports.values()))
    pairs = {
        client: (each["test_size"], reports[client]["test_size"]) for client, each in zip(reports, quiet, strict=True)
    }
    return {client: (counted, own) for client, (counted, own) in pairs.items() if counted < own}


def _quiet(reports: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Let no client count for more than ten times the rows of the median client, in means and in the diagram."""
    found = list(reports)
    for size in _SIZES:
        claims = sorted(each[size] for each in reports if each[size])
        most = int(_LOUD * claims[(len(claims) - 1) // 2]) if claims else 0
        found = [each if each[size] <= most else _fewer(each, size, most) for each in found]
    return found


def _fewer(report: Mapping[str, Any], size: str, rows: int) -> dict[str, Any]:
    bins = {}
    if size == "test_size" and _BINS[0] in report:
        bins[_BINS[0]] = [count * rows / report[size] for count in report[_BINS[0]]]
    return {**report, size: rows, **bins}


def _median(values: np.ndarray | None, weight: np.ndarray) -> float | None:
    """Return the least value that half of the weight is not above; nobody weighs more than two median clients."""
    if values is None or not weight.sum() > 0:
        return None
    weight = np.minimum(weight, 2 * np.sort(weight)[(len(weight) - 1) // 2])
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weight[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])


def _each(figure: Figure, reports: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray | None, np.ndarray]:
    """Return (C,) clients' figures that a figure pools, and weights; None in place of figures that nobody sends."""
    name = next((each.name for each in of_clients() if each.take is figure.take), "")
    there = [each for each in reports if name in each]
    train, test = (np.array([each[size] for each in there], np.float64) for size in _SIZES)
    values = np.array([each[name] for each in there], np.float64) if there else None
    return values, weights(figure.pool, train, test)


def _pooled(figure: Figure, reports: Sequence[Mapping[str, Any]]) -> float | None:
    take, over = figure.take, figure.pool.over
    if isinstance(take, Binned) and over is None:
        bins = diagram(reports) if take.diagram == _DIAGRAM else None
        return None if bins is None else take.error(bins)
    if isinstance(take, Rows) and over is None:  # the mean over all rows is that of clients, weighted by their rows
        over = weighted("test_size").over
    values, weight = _each(figure, reports)
    return None if over is None or values is None else over(values, weight)


def diagram(reports: Sequence[Mapping[str, Any]]) -> Reliability | None:
    """Add up the reliability diagrams of the clients that sent one; None where none did."""
    there = [each for each in reports if _BINS[0] in each]
    if not there:
        return None
    count, confidence, accuracy = (np.array([each[name] for each in there], np.float64) for name in _BINS)
    total = count.sum(0)
    safe = np.where(total > 0, total, 1.0)
    edges = np.arange(count.shape[1] + 1) / count.shape[1]
    return Reliability(edges, total, (count * confidence).sum(0) / safe, (count * accuracy).sum(0) / safe)


def details(parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return what a report draws of the answers; labels and single entropies are not known here."""
    tested = {name: [each for each in part if each["test_size"]] for name, part in parts.items()}
    bins = {name: diagram(part) if part else None for name, part in tested.items()}
    return {
        "reliability": {name: None if found is None else {_DIAGRAM: plain(found)} for name, found in bins.items()},
        "entropy": dict.fromkeys(parts),
        "labels": None,
    }


def line(number: int, report: Mapping[str, Any], *, unseen: bool) -> dict[str, Any]:
    """Return a client's line of clients.csv."""
    sizes = {name: report[name] for name in _SIZES}
    own = {figure.name: report.get(figure.name, "") for figure in of_clients()}
    return {"client": number, "unseen": int(unseen)} | sizes | own


def checked(metrics: Mapping[str, Any], most: Most) -> dict[str, Any]:
    """Return the figures of one client, without those that no honest client sends.

    >>> checked({"train_size": 3, "test_size": 2, "accuracy": 7.0, "nll": float("nan"), "extra": 1}, Most(100, 100))
    {'train_size': 3, 'test_size': 2}
    """
    sizes: dict[str, Any] = {name: metrics.get(name) for name in _SIZES}
    for name, value in sizes.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"it claims a {name} of {value!r:.40}, but a whole number from 0 was expected")
    train, test = sizes["train_size"], sizes["test_size"]
    if train > most.train:
        raise ValueError(f"it claims a train_size of {train}, but at most {most.train:.0f} rows are believed")
    if train + test > most.rows:
        raise ValueError(
            f"it claims a test_size of {test}, but at most {most.rows:.0f} rows, all together, are believed"
        )
    own = {figure.name: metrics[figure.name] for figure in of_clients() if _believed(figure, metrics.get(figure.name))}
    if not test or any(figure.always and figure.name not in own for figure in of_clients()):
        own = {}
    bins = {name: metrics.get(name) for name in _BINS}
    # One client's broken diagram must not take everybody's away.
    return sizes | own | (bins if _proper(bins, test) else {})


def _proper(bins: Mapping[str, Any], test: int) -> bool:
    """Return whether bins are a diagram of so many rows."""
    if not all(isinstance(each, Sequence) and len(each) == BINS and all(map(_number, each)) for each in bins.values()):
        return False
    count, *shares = bins.values()
    return abs(sum(count) - test) < 0.5 and all(each <= 1.0 + 1e-6 for share in shares for each in share)


def _believed(figure: Figure, value: Any) -> bool:
    return _number(value) and figure.low <= value <= figure.high


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and bool(np.isfinite(value)) and value >= 0
