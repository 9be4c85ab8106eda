"""metavd paper: what is listed, planned, run at smoke scale, reported and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def test_a_whole_table_at_smoke_scale(metavd: Any, tmp_path: Path) -> None:
    """All 36 cells of T8 run, are stored apart from real results, are not run again, and become a page with figures."""
    outcome = metavd("paper", "T8", "--scale", "smoke")
    assert outcome.status == 0
    shown = outcome.out
    assert "PerFedAvg+MetaVD" in shown
    assert "not run" not in shown
    lines = (tmp_path / "results" / "paper.smoke.jsonl").read_text().splitlines()
    assert len(lines) == 36
    assert {json.loads(line)["settings"]["data"] for line in lines} == {"digits"}
    assert not (tmp_path / "results" / "paper.jsonl").exists()
    outcome = metavd("paper", "T8", "T12", "--scale", "smoke", "--plan")
    assert outcome.status == 0
    assert "0 runs are missing, 36 are done." in outcome.out
    assert metavd("paper", "report", "T12", "--scale", "smoke", "--out", "page.md").status == 0
    page = (tmp_path / "page.md").read_text()
    assert "say nothing about the paper's numbers" in page
    files = sorted(path.name for path in (tmp_path / "page_files").iterdir())
    assert [name for name in files if "reliability" in name] == [
        f"reliability-T12-{a}.png" for a in ("0.1", "0.5", "5")
    ]
    assert all(f"(page_files/{name})" in page for name in files)


def test_lists_and_plans_train_nothing(metavd: Any, tmp_path: Path) -> None:
    listed = metavd("paper", "list")
    assert listed.status == 0
    assert all(f"│ T{number} " in listed.out for number in range(1, 18))
    planned = metavd("paper", "T8", "--rows", "FedAvg,Reptile", "--columns", "0.5", "--plan")
    assert planned.status == 0
    shown = planned.out
    assert "fedavg, seed 777: T8 FedAvg 0.5" in shown
    assert "2 runs are missing" in shown
    both = metavd("paper", "T8", "A2", "--rows", "FedAvg,fedavg+dropout", "--columns", "0.5,cifar10 0.5", "--plan")
    assert both.status == 0, "each table takes the rows that it has"
    assert both.out.splitlines() == [
        "fedavg, seed 777: T8 FedAvg 0.5", "fedavg+dropout, seed 777: A2 FedAvg+Dropout cifar10 0.5",
        "2 runs are missing, 0 are done.",
    ]  # fmt: skip
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["T99"], "no table 'T99'"),
        (["T8", "--rows", "FedAv"], "did you mean FedAvg"),
        (["T8", "--columns", "0.7"], "no column '0.7'"),
        (["T8", "A2", "--rows", "FedAv"], "tables T8, A2 have no row 'FedAv'; did you mean FedAvg"),
        (["T8", "A2", "--rows", "FedAvg+Dropout", "--columns", "0.5"], "have no row of FedAvg+Dropout in a column of"),
        (["T8", "--scale", "tiny"], "scale is 'tiny'"),
        (["T8", "--last", "3"], "last is 3"),
        (["T8", "--rounds", "-1"], "rounds is -1"),
        (["T8", "--test-rows", "odd"], "test_rows is 'odd'"),
        (["T8", "--overrides", "nowhere.toml"], "nowhere.toml"),
        (["T8", "--rows", "FedAvg,Reptile", "--root", "nowhere"], "cifar10 is looked for below nowhere"),
    ],
)
def test_wrong_input_is_one_sentence(metavd: Any, tmp_path: Path, words: list[str], says: str) -> None:
    outcome = metavd("paper", *words)
    assert outcome.status == 2
    assert outcome.err.count("\n") == 1
    assert says in outcome.err
    assert not list(tmp_path.iterdir())
