"""Several methods and seeds: what is in the table, and what is run, read or refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metavd.engine.rounds import Silent
from metavd.errors import SpecError
from metavd.runs.settings import Experiment
from metavd.runs.store import StoreError
from metavd.studies.compare import columns, compare, markdown, summarize_runs

TINY = {"clients": 4, "unseen": 2, "cohort": 2, "rounds": 1, "width": 8, "test_share": 0.9}


def fake(accuracy: float | None, down: int = 1_000_000) -> dict[str, Any]:
    part = {"accuracy": accuracy, "nll": 0.5, "ece_top1": 0.1}
    return {"test": part, "unseen": part, "bytes": {"down": down, "up": 500_000}}


TEST = next(column for column in columns() if column.title == "test accuracy %")


def test_the_columns_are_the_headline_figures() -> None:
    """Law: what every table shows is in this one, of both groups of clients, with the traffic; and privacy if any."""
    usual = [
        "test accuracy %", "unseen accuracy %", "test NLL", "unseen NLL", "test ECE %", "unseen ECE %", "MB sent",
    ]  # fmt: skip
    rows = {"fedavg": summarize_runs([fake(0.5)])}
    assert [column.title for column in columns(rows)] == usual
    rows["fedavg+dp"] = summarize_runs([fake(0.5) | {"privacy": {"epsilon": 8.0}}])
    assert [column.title for column in columns(rows)] == [*usual, "epsilon"]
    assert markdown(rows).splitlines()[2].endswith("| - |")


def test_mean_and_interval_over_seeds() -> None:
    """Closed form: for 0.5, 0.6, 0.7 Student's half width is 4.3027 x 0.1 / sqrt(3)."""
    table = summarize_runs([fake(0.5), fake(0.6), fake(0.7)])
    assert list(table) == [column.title for column in columns()]
    value = table["test accuracy %"]
    assert value is not None
    assert value[0] == pytest.approx(60.0)
    assert value[1] == pytest.approx(4.302653 * 10 / math.sqrt(3), rel=1e-5)
    assert TEST.text(value) == "60.0 ± 24.8"
    sent = table["MB sent"]
    assert sent is not None
    assert sent[0] == pytest.approx(1.5)


def test_one_seed_has_no_interval_and_nothing_is_a_dash() -> None:
    assert TEST.text(summarize_runs([fake(0.5)])["test accuracy %"]) == "50.0"
    assert summarize_runs([fake(None)])["test accuracy %"] is None
    assert TEST.text(None) == "-"


def test_markdown_is_a_table() -> None:
    lines = markdown({"fedavg": summarize_runs([fake(0.5), fake(None)])}).splitlines()
    assert len(lines) == 3
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| fedavg | 50.0 |")


class Counting(Silent):
    def __init__(self) -> None:
        self.started: list[tuple[str, int]] = []
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def start(self, experiment: Experiment, done: int) -> None:  # noqa: ARG002
        self.started.append((experiment.method, experiment.seed))


def test_runs_every_method_with_every_seed_once(tmp_path: Path) -> None:
    """Methods x seeds are run, stored and summed up; a second call only reads, a third one adds what is new."""
    first, second, third = Counting(), Counting(), Counting()
    rows = compare(["fedavg", "fedprox"], seeds=2, out=tmp_path, listener=first, mu=0.5, **TINY)
    assert sorted(first.started) == [("fedavg", 0), ("fedavg", 1), ("fedprox", 0), ("fedprox", 1)]
    content = json.loads((tmp_path / "comparison.json").read_text())
    results = [run["test"]["accuracy"] for run in content["runs"] if run["method"] == "fedavg"]
    value = rows["fedavg"]["test accuracy %"]
    assert value is not None
    assert value[0] == pytest.approx(100 * np.mean(results))
    assert (tmp_path / "comparison.md").read_text() == markdown(rows)
    assert compare(["fedavg", "fedprox"], seeds=2, out=tmp_path, listener=second, mu=0.5, **TINY) == rows
    assert second.started == []
    compare(["fedavg", "fedprox"], seeds=3, out=tmp_path, listener=third, mu=0.5, **TINY)
    assert third.started == [("fedavg", 2), ("fedprox", 2)]


@pytest.mark.processes
def test_what_another_command_is_at_is_left_to_it(
    tmp_path: Path, busy: Callable[[Path, str], AbstractContextManager[None]]
) -> None:
    """The others are run, how many are missing is said, and the same call finishes them."""
    first = Counting()
    with busy(tmp_path, "fedavg/seed-1"):
        assert compare(["fedavg"], seeds=3, out=tmp_path, listener=first, **TINY) == {}
    assert first.started == [("fedavg", 0), ("fedavg", 2)]
    assert first.notes[-1] == "1 runs are another command's at the moment; the same command goes on when they are over"
    again = Counting()
    assert compare(["fedavg"], seeds=3, out=tmp_path, listener=again, **TINY)
    assert again.started == [("fedavg", 1)]


def test_seeds_start_where_they_are_told(tmp_path: Path) -> None:
    counting = Counting()
    compare(["fedavg"], seeds=2, out=tmp_path / "a", listener=counting, seed=5, **TINY)
    compare(["fedavg"], seeds=1, out=tmp_path / "b", listener=counting, experiment=Experiment(seed=8), **TINY)
    assert counting.started == [("fedavg", 5), ("fedavg", 6), ("fedavg", 8)]


def test_every_method_gets_the_same_clients(tmp_path: Path) -> None:
    """Settings go to all, options to those that have them; the data of a seed is the same for all."""
    compare(["fedavg", "fedavg+metavd", "fedprox"], seeds=1, out=tmp_path, hyper_width=8, **TINY)
    lines = {
        tuple(line.split(",")[:4] for line in (folder / "seed-0" / "clients.csv").read_text().splitlines()).__repr__()
        for folder in tmp_path.iterdir()
        if folder.is_dir()
    }
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("methods", "settings", "says"),
    [
        (["fedavg", "fedprox"], {"nope": 3}, "'nope'"),
        (["fedavg", "fedprox"], {"mu": -1}, "mu is -1"),
        (["fedavg", "fedprox"], {"cohort": 9}, "cohort is 9"),
        (["fedavg", "fedavgg"], {}, "'fedavgg'"),
        (["fedavg", "fedavg+vd"], {"layers": "nope"}, "'nope'"),
    ],
)
def test_wrong_input_is_found_before_the_first_run(
    tmp_path: Path, methods: list[str], settings: dict[str, Any], says: str
) -> None:
    """One wrong method or setting refuses the whole comparison, and nothing is written."""
    with pytest.raises(ValueError, match=says):
        compare(methods, out=tmp_path / "c", **TINY | settings)
    assert list(tmp_path.iterdir()) == []


def test_other_settings_do_not_mix(tmp_path: Path) -> None:
    """The same folder with other settings is refused, and its runs stay."""
    compare(["fedavg"], seeds=1, out=tmp_path, **TINY)
    before = (tmp_path / "comparison.json").read_bytes()
    with pytest.raises(StoreError, match="another run"):
        compare(["fedavg"], seeds=1, out=tmp_path, lr=0.5, **TINY)
    assert (tmp_path / "comparison.json").read_bytes() == before


def test_folders_are_looked_at_before_the_first_run(tmp_path: Path) -> None:
    """A folder that holds another run is found before hours are spent on the methods in front of it."""
    compare(["fedprox"], seeds=1, out=tmp_path, **TINY | {"rounds": 2})
    counting = Counting()
    with pytest.raises(StoreError, match="another run"):
        compare(["fedavg", "fedprox"], seeds=1, out=tmp_path, listener=counting, **TINY)
    assert counting.started == []


@pytest.mark.parametrize("seeds", [0, -1])
def test_at_least_one_seed(tmp_path: Path, seeds: int) -> None:
    with pytest.raises(SpecError, match="seeds"):
        compare(["fedavg"], seeds=seeds, out=tmp_path / "c", **TINY)


def test_page_in_a_new_folder(tmp_path: Path) -> None:
    """The document may go to a folder that does not exist yet, or is refused before the first run."""
    page = tmp_path / "docs" / "new" / "page.md"
    try:
        compare(["fedavg"], seeds=1, out=tmp_path / "c", page=(page, "metavd compare fedavg"), **TINY)
    except (SpecError, StoreError):
        assert not (tmp_path / "c").exists()
    else:
        assert page.exists()
