"""What the tests of federations share. Without flwr none of them is collected."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = ["test_*.py"] if find_spec("flwr") is None else []


@pytest.fixture
def federate(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Give the function that runs a federation of digits in this process."""
    from metavd.flower.config import plan
    from metavd.flower.server import run

    from .grid import SMALL

    def call(grid: Any, **config: Any) -> dict[str, Any]:
        settings = {"data": "digits", "clients": 3, "rounds": 2, "out": str(tmp_path / "run"), "set": SMALL}
        return run(grid, plan(settings | config))

    return call


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make looking for answers quicker than it is worth on a network."""
    real = time.sleep
    monkeypatch.setattr("metavd.flower.fleet.time.sleep", lambda seconds: real(min(seconds, 0.005)))
