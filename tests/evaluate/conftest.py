"""Predictions on which every metric is held against a reference: random ones, and those that break careless code."""

from __future__ import annotations

import numpy as np
import pytest


def _cases() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.RandomState(0)
    y = rng.randint(0, 4, 60)
    eye = np.eye(4)
    soft = rng.dirichlet(np.ones(4), 60)
    sharp = rng.dirichlet(np.full(100, 0.05), 500)
    return {
        "random": (soft, y),
        "binary": (rng.dirichlet([1.0, 1.0], 200), rng.randint(0, 2, 200)),
        "sharp, 100 classes": (sharp, rng.randint(0, 100, 500)),
        "all correct": (0.4 * eye[y] + 0.6 * soft, (0.4 * eye[y] + 0.6 * soft).argmax(1)),
        "all wrong": (soft, (soft.argmax(1) + 1) % 4),
        "sure and right": (eye[y], y),
        "sure and wrong": (eye[(y + 1) % 4], y),
        "sure, some right": (eye[rng.randint(0, 4, 60)], y),
        "zeros among others": (np.where(soft < 0.2, 0, soft) / np.where(soft < 0.2, 0, soft).sum(1, keepdims=True), y),
        "one label only": (soft, np.full(60, 2)),
        "ties everywhere": (np.full((60, 4), 0.25), y),
        "few values": (np.array([[0.5, 0.5, 0, 0], [0.125, 0.625, 0.25, 0], [0.25, 0.25, 0.375, 0.125]])[y % 3], y),
        "one row": (soft[:1], y[:1]),
        "one row, wrong and sure": (eye[:1], np.array([3])),
        "single precision": (soft.astype(np.float32), y),
    }


CASES = _cases()


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities (N, K) and labels (N,)."""
    return CASES[request.param]
