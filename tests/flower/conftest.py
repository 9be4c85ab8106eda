"""What the tests of federations share, and the options of the campaign. Without flwr none of them is collected."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = ["test_*.py", "support/*"] if find_spec("flwr") is None else []
_BEGAN = time.monotonic()


@pytest.fixture
def federate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Give the function that runs a federation of digits in this process."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    from metavd.flower.config import run_config
    from metavd.flower.server import run

    from .support.grid import SMALL

    common = {"data": "digits", "clients": 3, "rounds": 2, "out": str(tmp_path / "run"), "set": SMALL, "poll": 0.01}

    def call(grid: Any, **config: Any) -> dict[str, Any]:
        return run(grid, run_config(common | config))

    return call


# --- the campaign of faults ------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what a campaign can be told; see test_campaign.py."""
    group = parser.getgroup("campaign", "faults in federations: pytest -m campaign tests/flower")
    group.addoption("--repeats", type=int, default=1, help="times that every fault strikes in this process")
    group.addoption("--processes", type=int, default=0, help="faults that strike real processes")
    group.addoption("--seed", type=int, default=0, help="of where faults strike, and of the runs")
    group.addoption("--page", type=Path, help="write the counts into this file")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the counts of a campaign, and write its page."""
    reports = [each for kind in ("passed", "failed") for each in terminalreporter.stats.get(kind, ())]
    lines = [value for each in reports for name, value in each.user_properties if name == "outcome"]
    if not lines:
        return
    from .support.page import page, table

    terminalreporter.section("faults")
    terminalreporter.write_line(table(lines))
    if target := config.getoption("page", None):
        command = shlex.join(["pytest", *map(str, config.invocation_params.args)])
        target.write_text(page(lines, command, time.monotonic() - _BEGAN))
