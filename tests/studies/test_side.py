"""Several runs at once: the same answers, the first error out, and nothing left behind."""

from __future__ import annotations

import json
import operator
import os
from pathlib import Path

import pytest
import torch

from metavd.studies.compare import compare
from metavd.studies.lines import read
from metavd.studies.paper.carry import run_missing
from metavd.studies.paper.plan import store_file
from metavd.studies.paper.protocol import protocol
from metavd.studies.side import jobs_for, sharing, side_by_side

SMALL = {"clients": 3, "unseen": 1, "cohort": 2, "rounds": 1, "width": 8, "local_epochs": 1}


def test_how_many_at_once() -> None:
    """Law: what is asked for is done; what is left open is one on a CPU."""
    assert jobs_for("cpu", 7) == jobs_for("cuda", 7) == 7
    assert jobs_for("cpu") == 1
    assert jobs_for("cuda") > 1
    assert jobs_for("auto") == (jobs_for("cuda") if torch.cuda.is_available() else 1)


@pytest.mark.processes
@pytest.mark.parametrize("jobs", [1, 2])
def test_every_task_is_answered_with_its_place(jobs: int) -> None:
    """Law: place and answer belong together, in whatever order tasks end."""
    tasks = [(2, 3), (4, 5), (6, 7)]
    assert dict(side_by_side(operator.mul, tasks, jobs)) == {0: 6, 1: 20, 2: 42}


@pytest.mark.processes
@pytest.mark.parametrize("jobs", [1, 2])
def test_what_does_not_fit_is_not_begun(jobs: int) -> None:
    """Law: each task is asked about once, in order, and only as many in advance as are under way."""
    asked: list[int] = []

    def fits(place: int) -> bool:
        asked.append(place)
        return place % 2 == 0

    ending = side_by_side(operator.mul, [(2, 3), (4, 5), (6, 7), (8, 9)], jobs, fits)
    found = [next(ending)]
    assert len(asked) <= jobs + 1
    assert dict(found + list(ending)) == {0: 6, 2: 42}
    assert asked == [0, 1, 2, 3]


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_comes_out(jobs: int) -> None:
    """Law: what goes wrong in a process is raised here."""
    with pytest.raises(ZeroDivisionError):
        list(side_by_side(operator.floordiv, [(1, 1), (1, 0), (4, 2)], jobs))


def test_a_machine_without_a_gpu_shares_nothing() -> None:
    """Law: the environment is as it was, and MPS is not started, where there is nothing to share."""
    before = dict(os.environ)
    with sharing(1):
        assert dict(os.environ) == before
    assert dict(os.environ) == before


@pytest.mark.processes
def test_comparison_side_by_side(tmp_path: Path) -> None:
    """Parity: two processes write the table of one."""
    tables = [
        compare(["fedavg", "reptile"], seeds=1, jobs=jobs, out=tmp_path / str(jobs), **SMALL)  # type: ignore[arg-type]
        for jobs in (1, 2)
    ]
    assert tables[0] == tables[1]
    runs = json.loads((tmp_path / "2" / "comparison.json").read_text())["runs"]
    assert [run["method"] for run in runs] == ["fedavg", "reptile"]


@pytest.mark.processes
def test_tables_side_by_side(tmp_path: Path) -> None:
    """Parity: the store has the same results, whoever ran them."""
    how = protocol(scale="smoke")
    part = {"how": how, "rows": ["FedAvg"], "columns": ["0.5", "5"]}
    stores = []
    for jobs in (1, 2):
        store = tmp_path / f"{jobs}.jsonl"
        outcome = run_missing(["T8"], store, work=tmp_path / f"work-{jobs}", jobs=jobs, **part)  # type: ignore[arg-type]
        assert len(outcome.done) == 2
        stores.append({key: line["result"]["test"] for key, line in read(store_file(store, "smoke"), "smoke").items()})
    assert stores[0] == stores[1]
