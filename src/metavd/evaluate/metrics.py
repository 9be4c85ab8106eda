"""How good, and how honest, predicted probabilities are, for one client and over clients. NumPy, float64.

The home of what clients answered (`ClientResult`) and of the figures that are stored. Single figures come from
`scores` (accuracy, likelihood, Brier), `calibration`, `uncertainty` and `intervals`, and are also named here.

Shape letters: C clients, N samples, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import calibration, scores
from .calibration import (
    Reliability,
    ece_classwise,
    ece_flat,
    ece_mass,
    ece_top1,
    flat,
    mce_classwise,
    mce_flat,
    mce_mass,
    mce_top1,
    reliability,
    scaled,
    temperature,
    top1,
)
from .intervals import bootstrap, bounds, interval, resampled
from .scores import accuracy, brier, nll
from .uncertainty import auroc, entropy

__all__ = [
    "CLIENT_FIGURES", "FIGURES", "ClientResult", "Reliability", "accuracy", "auroc", "batch_accuracy", "bootstrap",
    "brier", "client_figures", "diagrams", "ece_classwise", "ece_flat", "ece_mass", "ece_top1", "entropy", "flat",
    "gap_interval", "interval", "mce_classwise", "mce_flat", "mce_mass", "mce_top1", "nll", "of_classes",
    "reliability", "scaled", "summarize", "temperature", "tempered", "top1",
]  # fmt: skip


@dataclass(frozen=True, eq=False)  # equality of arrays has no truth value
class ClientResult:
    """What one client's personalised model answered on the client's test rows."""

    client: int
    train_size: int
    probs: np.ndarray
    """(N, K)"""
    y: np.ndarray
    """(N,)"""
    known: np.ndarray | None = None
    """(K,) bool: the client has training rows of the class. None where nobody looked."""
    information: np.ndarray | None = None
    """(N,) mutual information of label and weights, see `core.predict`; None where the method makes no draws."""


FIGURES = (
    "accuracy", "accuracy_pooled", "accuracy_uniform", "worst_client", "percentile_10",
    "nll", "brier",
    "ece_top1", "ece_mass", "ece_classwise", "ece_flat", "mce_top1", "mce_mass", "mce_classwise", "mce_flat",
    "entropy", "mutual_information",
    "auroc_wrong", "auroc_unknown", "auroc_wrong_information", "auroc_unknown_information", "unknown_share",
    "intervals",
)  # fmt: skip
"""What `summarize` returns, besides the numbers of clients and samples."""
CLIENT_FIGURES = (
    "accuracy", "nll", "brier", "ece_top1", "entropy", "mutual_information", "auroc_wrong", "auroc_unknown",
)  # fmt: skip
"""What `client_figures` returns."""


def summarize(results: Sequence[ClientResult], *, released: bool = False) -> dict[str, Any]:
    """Return the figures of a group of clients.

        accuracy = sum_i n_i acc_i / sum_i n_i,   n_i the *training* size (the paper's headline number)

    `accuracy_pooled` weights every test row alike, `accuracy_uniform` every client; `worst_client` is the lowest client
    accuracy, `percentile_10` the one that a tenth of the clients stay below. All other figures are pooled over test
    rows. `auroc_wrong` and `auroc_unknown` say how well the entropy of an answer tells wrong from right, and classes
    that the client has no training row of from those it has; `..._information` the same of the mutual information.
    `intervals` holds 95 % bootstrap intervals over clients.

    A figure that is not defined is None: without draws, without unknown classes, without a wrong answer, with one
    client alone (intervals), without training rows (`accuracy`). Clients without test rows have no say; where nobody
    has any, every figure is None and the counts are 0.
    released=True takes a client's accuracy by `batch_accuracy` and leaves p = 1 out of the flat calibration error.
    """
    tested = [result for result in results if len(result.y)]
    if not tested:
        return {**dict.fromkeys(FIGURES), "clients": 0, "samples": 0}
    probs = np.concatenate([np.asarray(result.probs, np.float64) for result in tested])
    y = np.concatenate([result.y for result in tested])
    size = np.array([len(result.y) for result in tested])
    train = np.array([result.train_size for result in tested], np.float64)
    first = size.cumsum() - size

    def by_client(row: np.ndarray) -> np.ndarray:
        mean: np.ndarray = np.add.reduceat(row.astype(np.float64), first) / size
        return mean

    right = scores.correct(probs, y)
    plain = by_client(right)
    each = np.array([batch_accuracy(result.probs, result.y) for result in tested]) if released else plain
    surprise, error = scores.surprise(probs, y), scores.squared_error(probs, y)
    means = {
        "accuracy": (each, train),
        "accuracy_pooled": (plain, size),
        "accuracy_uniform": (each, np.ones(len(tested))),
        "nll": (by_client(surprise), size),
        "brier": (by_client(error), size),
    }
    bins = _reliabilities(probs, y, released=released)
    information, unknown = _joined([result.information for result in tested]), _unknown(tested)
    return {
        "accuracy": float((train * each).sum() / train.sum()) if train.any() else None,
        "accuracy_pooled": float(right.mean()),
        "accuracy_uniform": float(each.mean()),
        "worst_client": float(each.min()),
        "percentile_10": float(np.percentile(each, 10)),
        "nll": float(surprise.mean()),
        "brier": float(error.mean()),
        **{f"ece_{name}": calibration.expected_error(diagram) for name, diagram in bins.items()},
        **{f"mce_{name}": calibration.maximum_error(diagram) for name, diagram in bins.items()},
        **_doubts(entropy(probs), information, ~right, unknown),
        "auroc_wrong_information": _told(information, ~right),
        "auroc_unknown_information": _told(information, unknown),
        "unknown_share": None if unknown is None else float(unknown.mean()),
        "intervals": _intervals(means),
        "clients": len(tested),
        "samples": len(y),
    }


def client_figures(result: ClientResult) -> dict[str, float | None]:
    """Return one client's own figures, None where they are not defined: a line of a table of clients."""
    if not len(result.y):
        return dict.fromkeys(CLIENT_FIGURES)
    probs, y = result.probs, result.y
    right = scores.correct(probs, y)
    return {
        "accuracy": float(right.mean()),
        "nll": nll(probs, y),
        "brier": brier(probs, y),
        "ece_top1": ece_top1(probs, y),
        **_doubts(entropy(probs), result.information, ~right, _unknown([result])),
    }


def diagrams(results: Sequence[ClientResult], *, released: bool = False) -> dict[str, dict[str, list[Any]]] | None:
    """Return the pooled reliability diagrams as plain lists: edges, and count, confidence and accuracy of each bin.

    The classwise one, K diagrams, is left out. None where nobody has test rows.
    """
    tested = [result for result in results if len(result.y)]
    if not tested:
        return None
    probs, y = np.concatenate([result.probs for result in tested]), np.concatenate([result.y for result in tested])
    bins = _reliabilities(probs, y, released=released)
    return {name: calibration.plain(bins[name]) for name in ("top1", "mass", "flat")}


def gap_interval(
    known: Sequence[ClientResult], unseen: Sequence[ClientResult], *, released: bool = False
) -> list[float] | None:
    """Return the 95 % bootstrap interval of the accuracy of unseen clients less that of known ones, [low, high].

    Both groups are resampled, each by itself. None where a group has fewer than two clients with test rows.
    """
    accuracy_of = batch_accuracy if released else accuracy
    replicates = []
    for seed, group in enumerate((known, unseen)):
        tested = [result for result in group if len(result.y)]
        if len(tested) < 2:
            return None
        each = np.array([[accuracy_of(result.probs, result.y)] for result in tested])
        replicates.append(resampled(each, np.array([[result.train_size] for result in tested]), seed=seed)[:, 0])
    return bounds(replicates[1] - replicates[0])


def tempered(results: Sequence[ClientResult], held: Sequence[ClientResult]) -> list[ClientResult]:
    """Scale each client's answers by the temperature that suits its validation answers `held`, client by client.

    A client without validation rows keeps its answers. The mutual information of draws is not scaled, and left out.
    """
    rows = {result.client: result for result in held}
    scale = {client: temperature(result.probs, result.y) for client, result in rows.items()}
    return [
        replace(result, probs=scaled(result.probs, scale[result.client]), information=None)
        if result.client in scale and len(rows[result.client].y)
        else result
        for result in results
    ]


_RELEASED_BATCH = 100


def batch_accuracy(probs: np.ndarray, y: np.ndarray) -> float:
    """Return the mean over batches of 100 rows of their accuracies, a short last batch counting as a whole one.

    That is how the released code tests a client; it differs from `accuracy` for clients with more than 100 rows.
    """
    starts = range(0, len(y), _RELEASED_BATCH)
    return float(np.mean([accuracy(probs[s : s + _RELEASED_BATCH], y[s : s + _RELEASED_BATCH]) for s in starts]))


def of_classes(results: Sequence[ClientResult], first: int, count: int) -> list[ClientResult]:
    """Keep each client's rows whose label is one of `count` classes from `first` on: one domain of several."""
    kept = []
    for result in results:
        rows = (result.y >= first) & (result.y < first + count)
        information = None if result.information is None else result.information[rows]
        kept.append(replace(result, probs=result.probs[rows], y=result.y[rows], information=information))
    return kept


def _reliabilities(probs: np.ndarray, y: np.ndarray, *, released: bool) -> dict[str, Reliability]:
    return {
        "top1": calibration.top1(probs, y),
        "mass": calibration.mass(probs, y),
        "classwise": calibration.classwise(probs, y),
        "flat": calibration.flat(probs, y, released=released),
    }


def _joined(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Join what all clients have; None where one of them has none."""
    there = [part for part in parts if part is not None]
    return np.concatenate(there) if len(there) == len(parts) else None


def _unknown(tested: Sequence[ClientResult]) -> np.ndarray | None:
    """Return (N,) bool: the client has no training row of the label."""
    return _joined([None if result.known is None else ~result.known[result.y] for result in tested])


def _doubts(
    doubt: np.ndarray, information: np.ndarray | None, wrong: np.ndarray, unknown: np.ndarray | None
) -> dict[str, float | None]:
    return {
        "entropy": float(doubt.mean()),
        "mutual_information": None if information is None else float(information.mean()),
        "auroc_wrong": _told(doubt, wrong),
        "auroc_unknown": _told(doubt, unknown),
    }


def _told(score: np.ndarray | None, what: np.ndarray | None) -> float | None:
    return None if score is None or what is None else auroc(score, what)


def _intervals(means: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, list[float] | None]:
    """Return the bootstrap intervals of weighted means over the same resampled clients, by name."""
    values, weights = (np.stack(columns, 1) for columns in zip(*means.values(), strict=True))
    if len(values) < 2:
        return dict.fromkeys(means)
    return dict(zip(means, map(bounds, resampled(values, weights).T), strict=True))
