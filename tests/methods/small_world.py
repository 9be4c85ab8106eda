"""A small ragged federation in float64, and the comparison of schedules that every method with phases has to pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from rival_laws import answered, everywhere, trained

from metavd.core.types import Algorithm, ServerState
from metavd.data.source import Source, arrays
from metavd.runs.settings import Experiment
from metavd.runs.setup import Setup, prepare
from metavd.tree import Params

CLASSES, CLIENTS, UNSEEN = 4, 7, 2


def blobs(rows: int = 420) -> Source:
    """Gaussian classes with 6 features."""
    source = np.random.RandomState(0)
    y = np.arange(rows) % CLASSES
    centres = 1.5 * source.randn(CLASSES, 6)
    return arrays((centres[y] + source.randn(rows, 6)).astype(np.float32), y, name="blobs")


def setup_of(method: str, options: dict[str, Any] | None = None, **settings: Any) -> Setup:
    """Prepare a method in the federation; `options` are the method's own."""
    fields: dict[str, Any] = {
        "clients": CLIENTS, "unseen": UNSEEN, "cohort": 4, "rounds": 3, "model": "mlp", "width": 8,
        "partition": "quantity:0.7", "dtype": "float64", "device": "cpu", "backend": "loop",
    }  # fmt: skip
    return prepare(Experiment(method=method, options={"batch": 16, **(options or {})}, **fields | settings), blobs())


def kept(state: ServerState) -> Params:
    """Return what the clients keep that have kept something, (C, ...)."""
    return {} if state.kept is None else state.kept.rows(state.kept.visited())


def assert_close(one: Params, two: Params, tolerance: float = 1e-10) -> None:
    """All entries, of the same names."""
    assert list(one) == list(two)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=tolerance, atol=tolerance)


def assert_schedules_agree(setup: Setup) -> ServerState:
    """Three rounds of a ragged cohort, clients coming and going: the same however clients are run; return the end."""
    sizes = [len(rows) for rows in setup.pool.federation.train]
    assert len({-(-size // 16) for size in sizes}) > 2, "clients have different numbers of steps"
    wanted = trained(setup)
    said = answered(setup, wanted)
    assert len(said) == CLIENTS + UNSEEN
    for schedule in everywhere():
        found = trained(setup, schedule=schedule)
        assert_close(wanted.params, found.params)
        assert_close(kept(wanted), kept(found))
        for mine, theirs in zip(said, answered(setup, found, schedule), strict=True):
            np.testing.assert_allclose(theirs, mine, rtol=1e-9, atol=1e-9)
    return wanted


def late(algorithm: Algorithm) -> Algorithm:
    """Miscount: every step takes itself for the one after it."""
    step = algorithm.local.step
    local = replace(algorithm.local, step=lambda params, some, got, index: step(params, some, got, index + 1))
    return replace(algorithm, local=local)


def differences(one: Params, two: Params) -> Iterator[float]:
    """Yield the largest difference of each entry."""
    return (float((value - two[name]).abs().max()) for name, value in one.items())
