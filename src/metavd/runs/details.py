"""What a report draws beyond the figures of a result: bins, histograms and the embeddings, small and without rows.

    details.json
      reliability   {test, unseen}: {top1, mass, flat}, see `evaluate.calibration.Reliability`; None without test rows
      entropy       {test, unseen}: edges, and how many right and wrong answers lie between them
      labels        for each client, how many training rows of each class
      rates         {layer}: edges, and for each participating client how many dropout rates lie between them
      embeddings    for each participating client, the server's vector; None where the method has none

Shape letters: C clients, N participating clients, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..core.emit import EMBEDDING
from ..core.owned import fetched
from ..core.types import Algorithm, ServerState
from ..data.partition import Federation
from ..evaluate.answers import Answers
from ..evaluate.metrics import ClientResult, diagrams

VERSION = 1
LIMIT = 500
"""Clients whose labels, rates and embeddings are kept; a picture of more shows no more."""
_BINS = 20


def details(
    algorithm: Algorithm,
    state: ServerState,
    federation: Federation,
    results: Sequence[ClientResult],
    *,
    released: bool = False,
) -> dict[str, Any]:
    """Return all of it as plain lists and numbers."""
    known = federation.num_clients
    parts = {
        "test": [each for each in results if each.client < known],
        "unseen": [each for each in results if each.client >= known],
    }
    return {
        "reliability": {name: diagrams(part, released=released) for name, part in parts.items()},
        "entropy": {name: _uncertainty([each for each in part if len(each.y)]) for name, part in parts.items()},
        "labels": [
            np.bincount(federation.source.y[rows], minlength=federation.source.num_classes).tolist()
            for rows in (*federation.train[:known][:LIMIT], *federation.train[known:][:LIMIT])
        ],
        **of_server(algorithm, state, known),
    }


def of_server(algorithm: Algorithm, state: ServerState, known: int) -> dict[str, Any]:
    """Return what is drawn of the server's own state, for the first of so many clients that it knows."""
    shown, _ = fetched(state, torch.arange(min(known, LIMIT)))
    return {
        "version": VERSION,
        "rates": _drawn_rates(algorithm, shown, known),
        "embeddings": shown.params[EMBEDDING][:LIMIT].tolist() if EMBEDDING in shown.params else None,
    }


def _uncertainty(results: Sequence[ClientResult]) -> dict[str, list[float]] | None:
    if not results:
        return None
    answers = Answers(results)
    right, edges = answers.right, np.linspace(0, math.log(answers.probs.shape[1]), _BINS + 1)
    values = answers.entropy.clip(edges[0], edges[-1])  # rounding may put a uniform answer above log K
    count = {
        name: np.histogram(values[kept], edges)[0].tolist() for name, kept in (("right", right), ("wrong", ~right))
    }
    return {"edges": edges.tolist(), **count}


def _drawn_rates(algorithm: Algorithm, state: ServerState, known: int) -> dict[str, dict[str, Any]] | None:
    """Return histograms of the dropout rates of participating clients; None where the method has none."""
    if algorithm.posterior is None:
        return None
    edges = torch.linspace(0, 1, _BINS + 1)
    found: dict[str, list[list[int]]] = {}
    with torch.no_grad():
        for client in range(min(known, LIMIT)):
            received = algorithm.emit.apply(state.params, torch.tensor(client, device=state.round.device), state.round)
            for layer, rate in algorithm.posterior.rates(received).items():
                bins = torch.histc(rate.float().cpu(), _BINS, 0, 1).long().tolist()
                found.setdefault(layer, []).append(bins)
    return {layer: {"edges": edges.tolist(), "clients": clients} for layer, clients in found.items()}
