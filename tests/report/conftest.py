"""Finished runs of a few seconds, and a page of them, shared by all tests of reports."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metavd import arrays, compare
from metavd.report.page import write_report

METHODS = ("fedavg", "reptile", "reptile+metavd+drop")
SMALL = {"clients": 8, "unseen": 3, "cohort": 4, "rounds": 4, "eval_every": 2, "local_epochs": 1, "drop_from": 1}


def once(name: str, factory: pytest.TempPathFactory, make: Callable[[Path], object]) -> Path:
    """Make a folder once for all workers of a session, whoever comes first."""
    workers = os.environ.get("PYTEST_XDIST_WORKER") is not None
    base = factory.getbasetemp().parent if workers else factory.getbasetemp()
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / name).exists():
            make(base / f"{name}.new")
            (base / f"{name}.new").rename(base / name)
    return base / name


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    """METHOD/seed-S of three methods and two seeds; not to be changed."""
    return once("runs", tmp_path_factory, lambda folder: compare(METHODS, seeds=2, out=folder, **SMALL))


@pytest.fixture(scope="session")
def page(runs, tmp_path_factory) -> Path:
    """The page of two of the methods."""

    def make(folder: Path) -> None:
        assert write_report([runs / "fedavg", runs / METHODS[2]], folder / "report.html", command="metavd report") == []

    return once("page", tmp_path_factory, make) / "report.html"


@pytest.fixture(scope="session")
def named(tmp_path_factory) -> Path:
    """Runs of three clients with names, none of them unseen, of two methods that train alike."""

    def make(folder: Path) -> None:
        rng = np.random.default_rng(0)
        y = np.arange(60) % 2
        who = np.array(["north", "south", "west"])[np.arange(60) // 20]
        source = arrays(rng.normal(size=(60, 4)) + 2 * y[:, None], np.array(["ill", "well"])[y], client=who)
        settings = {"rounds": 4, "eval_every": 2, "local_epochs": 1, "width": 8, "unseen": 0}
        compare(["fedavg", "fedavg+ft"], seeds=1, out=folder, source=source, **settings)

    return once("named", tmp_path_factory, make)


@pytest.fixture
def one(runs, tmp_path) -> Path:
    """A copy of one run of the method with most parts, to be spoilt."""
    return Path(shutil.copytree(runs / "reptile+metavd+drop" / "seed-0", tmp_path / "one"))


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """Make figures but do not write them, which is what takes the time."""
    monkeypatch.setattr("metavd.report.page.publish", lambda picture, _: f"<svg>{picture.name}</svg>")


@pytest.fixture
def edited() -> Callable[[Path, Callable[[Any], None]], None]:
    """Change a JSON file in place."""

    def edit(path: Path, change: Callable[[Any], None]) -> None:
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))

    return edit
