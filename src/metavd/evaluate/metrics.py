"""How good, and how honest, predicted probabilities are, for one client and over clients. NumPy, float64.

Sums up what clients answered (`ClientResult`) by the figures of the registry (`figures`). Single figures come from
`scores` (accuracy, likelihood, Brier), `calibration`, `uncertainty` and `intervals`, and are also named here.

Shape letters: C clients, N samples, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from . import calibration
from .answers import Answers, ClientResult
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
from .figures import ROWS, Figure, by_client, figures, of_clients, together, weights
from .intervals import bootstrap, bounds, interval, resampled
from .scores import accuracy, batch_accuracy, brier, nll
from .uncertainty import auroc, entropy, fpr95

__all__ = [
    "Answers", "ClientResult", "Reliability", "accuracy", "auroc", "batch_accuracy", "bootstrap", "brier",
    "client_figures", "diagrams", "ece_classwise", "ece_flat", "ece_mass", "ece_top1", "entropy", "flat",
    "fpr95", "gap_interval", "interval", "intervals", "mce_classwise", "mce_flat", "mce_mass", "mce_top1", "nll",
    "nothing", "of_classes", "reliability", "scaled", "summarize", "temperature", "tempered", "top1",
]  # fmt: skip


def summarize(results: Sequence[ClientResult], *, released: bool = False) -> dict[str, Any]:
    """Return every figure of a group of clients, 95 % bootstrap intervals over clients, and how many there are.

        accuracy = sum_i n_i acc_i / sum_i n_i,   n_i the *training* size (the paper's headline number)

    The other figures are in the registry, `figures`. One that is not defined is None: without draws, without unknown
    classes, without a wrong answer, with one client alone (intervals), without training rows (`accuracy`). Clients
    without test rows have no say; where nobody has any, every figure is None and the counts are 0.
    released=True takes a client's accuracy by `batch_accuracy` and leaves p = 1 out of the flat calibration error.
    """
    tested = _tested(results)
    if not tested:
        return nothing()
    answers = Answers(tested, released)
    values = {name: _pooled(figure, answers) for name, figure in figures().items()}
    means = {
        name: (_each(figure, answers), weights(figure.pool, answers.train_size, answers.test_size))
        for name, figure in figures().items()
        if figure.interval
    }
    return {**values, "intervals": intervals(means), "clients": len(tested), "samples": len(answers.y)}


def _tested(results: Sequence[ClientResult]) -> list[ClientResult]:
    """Return the clients that have test rows."""
    return [result for result in results if len(result.y)]


def nothing() -> dict[str, Any]:
    """Return the summary of clients without a test row."""
    return {**dict.fromkeys(figures()), "intervals": None, "clients": 0, "samples": 0}


def client_figures(result: ClientResult) -> dict[str, float | None]:
    """Return one client's own figures, None where they are not defined: a line of a table of clients."""
    if not len(result.y):
        return {figure.name: None for figure in of_clients()}
    answers = Answers([result])
    return {figure.name: together(figure.take, answers) for figure in of_clients()}


def diagrams(results: Sequence[ClientResult], *, released: bool = False) -> dict[str, dict[str, list[Any]]] | None:
    """Return the pooled reliability diagrams as plain lists: edges, and count, confidence and accuracy of each bin.

    The classwise one, K diagrams, is left out. None where nobody has test rows.
    """
    tested = _tested(results)
    if not tested:
        return None
    answers = Answers(tested, released)
    return {name: calibration.plain(answers.diagram(name)) for name in ("top1", "mass", "flat")}


def gap_interval(
    known: Sequence[ClientResult], unseen: Sequence[ClientResult], *, released: bool = False
) -> list[float] | None:
    """Return the 95 % bootstrap interval of the accuracy of unseen clients less that of known ones, [low, high].

    Both groups are resampled, each by itself. None where a group has fewer than two clients with test rows.
    """
    accuracy_of = batch_accuracy if released else accuracy
    replicates = []
    for seed, group in enumerate((known, unseen)):
        tested = _tested(group)
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


def of_classes(results: Sequence[ClientResult], first: int, count: int) -> list[ClientResult]:
    """Keep each client's rows whose label is one of `count` classes from `first` on: one domain of several."""
    kept = []
    for result in results:
        rows = (result.y >= first) & (result.y < first + count)
        information = None if result.information is None else result.information[rows]
        kept.append(replace(result, probs=result.probs[rows], y=result.y[rows], information=information))
    return kept


def intervals(means: Mapping[str, tuple[np.ndarray | None, np.ndarray]]) -> dict[str, list[float] | None]:
    """Return the bootstrap intervals of weighted means over the same resampled clients, by name.

    `means` has (C,) figures and (C,) weights of clients; None in place of figures where they are not defined.
    """
    known = {name: (values, weight) for name, (values, weight) in means.items() if values is not None}
    found: dict[str, list[float] | None] = dict.fromkeys(means)
    if known and len(next(iter(known.values()))[1]) > 1:
        values, weight = (np.stack(columns, 1) for columns in zip(*known.values(), strict=True))
        found |= dict(zip(known, map(bounds, resampled(values, weight).T), strict=True))
    return found


def _each(figure: Figure, answers: Answers) -> np.ndarray | None:
    """Return (C,) the clients' own figures, as this figure pools them."""
    return by_client(figure.take, answers, released=answers.released and figure.pool is not ROWS)


def _pooled(figure: Figure, answers: Answers) -> float | None:
    if figure.pool.over is None:
        return together(figure.take, answers)
    each = _each(figure, answers)
    if each is None:
        return None
    return figure.pool.over(each, weights(figure.pool, answers.train_size, answers.test_size))
