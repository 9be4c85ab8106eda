"""The arena: runs as lines of a store, and a page that is written from it alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metavd import methods
from metavd.cli import main
from metavd.studies.arena import BEST, lineup, name_of, page, setting_of
from metavd.studies.lines import identity
from metavd.studies.pairs import pair

QUICK = ["--rounds", "2", "local_epochs=1", "head_epochs=1", "model=mlp", "width=8"]


def arena(tmp_path: Path, *words: str) -> str:
    main(["arena", *words, "--store", str(tmp_path / "store.jsonl"), "--out", str(tmp_path / "work")])
    return page(tmp_path / "store.jsonl")


def test_runs_once_under_both_protocols_and_makes_its_page(tmp_path: Path) -> None:
    """Four runs become four lines, a second call adds none, and the page has a table for each protocol."""
    text = arena(tmp_path, "fedavg", "fedrep", *QUICK)
    lines = (tmp_path / "store.jsonl").read_text().splitlines()
    assert len(lines) == 4
    again = arena(tmp_path, "fedavg", "fedrep", *QUICK)
    assert (tmp_path / "store.jsonl").read_text().splitlines() == lines
    assert again == text
    assert re.findall("## (.*)", text) == [
        f"digits, {dealt}, 2 rounds, width 8" for dealt in ("consistent", "independent")
    ]
    for line in map(json.loads, lines):
        accuracy = 100 * line["result"]["test"]["accuracy"]
        row = rf"`{name_of(line)}` \| \**{accuracy:.1f}\**"
        assert re.search(row, text.split("## ")[1 if line["settings"]["test_rows"] == "consistent" else 2])
        assert {"root", "device"} & set(line["settings"]) == set()
        sets = line["result"]["trust"]["sets"]["test"]
        assert 0.5 < sets["lac"]["covered"] <= 1
        assert f"| {sets['aps']['size']:.2f} |" in text.replace("**", "")


def test_runs_of_unlike_settings_are_never_one_row() -> None:
    """Another network, cohort or dataset's option is another table; before, their runs were averaged like seeds."""
    settings = {"method": "fedavg", "seed": 0, "test_rows": "consistent", "data": "cifar100"}
    others: list[dict[str, Any]] = [
        {}, {"width": 8}, {"model": "lenet"}, {"cohort": 5}, {"unseen": 3}, {"valid": 0.2}, {"aggregate": "median"},
        {"data": "cifar100:labels=coarse"}, {"data": "mine"},
    ]  # fmt: skip
    usual = {"model": "cnn", "cohort": 10, "unseen": 30, "eval_every": 7, "device": "cpu"}
    titles = [setting_of({"settings": settings | other}) for other in [*others, usual]]
    assert len(set(titles)) == len(others)
    assert titles[-1] == titles[0] == "cifar100, consistent"
    assert titles[1:3] == ["cifar100, consistent, width 8", "cifar100, consistent, model lenet"]


def test_several_seeds_have_an_interval_and_the_best_is_bold(tmp_path: Path) -> None:
    text = arena(tmp_path, "fedavg", "fedrep", "--seeds", "2", "--test-rows", "consistent", *QUICK)
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == 2
    assert all("±" in row and row.endswith("0, 1 |") for row in rows)
    assert sum(row.split("|")[2].strip().startswith("**") for row in rows) == 1
    assert "test, to the first row" in text
    lines = [json.loads(line) for line in (tmp_path / "store.jsonl").read_text().splitlines()]
    by_name = {name: [line for line in lines if line["settings"]["method"] == name] for name in ("fedavg", "fedrep")}
    order = sorted(by_name, key=lambda name: -sum(line["result"]["test"]["accuracy"] for line in by_name[name]))
    compared = [pair(by_name[order[1]], by_name[order[0]], part) for part in ("test", "unseen")]
    assert [cell.strip() for cell in rows[1].split("|")[-4:-2]] == [str(each) for each in compared]
    means = [np.mean([line["result"]["test"]["accuracy"] for line in by_name[name]]) for name in order]
    assert compared[0] is not None
    assert compared[0].difference == pytest.approx(means[1] - means[0], abs=1e-5)


def test_a_plan_says_what_is_run_and_where(tmp_path: Path) -> None:
    """By hand: two methods, two protocols, two seeds; an option that one method knows is for that one."""
    planned = lineup(
        ["fedavg", "fedprox"], {"data": "digits", "mu": 0.5, "seed": "3", "device": "cpu", "method": "maml"},
        protocols=["independent", "consistent"], seeds=2,
    )  # fmt: skip
    assert list(planned.tasks) == [
        (method, protocol, seed)
        for method in ("fedavg", "fedprox")
        for protocol in ("independent", "consistent")
        for seed in (3, 4)
    ]
    assert planned.where == {"device": "cpu"}
    for (method, protocol, seed), task in planned.tasks.items():
        own = {"mu": 0.5} if method == "fedprox" else {}
        assert task == {"data": "digits", "method": method, "test_rows": protocol, "seed": seed, **own}
    assert planned.told == ()
    assert {method for method, *_ in lineup(["best"], {}, protocols=["consistent"]).tasks} == set(BEST)
    (said,) = lineup(["fedavg"], {}, protocols=["consistent"], tuned=tmp_path).told
    assert said.endswith("nothing was tuned for these, so its defaults")


def test_the_best_are_sixteen_methods_that_there_are() -> None:
    assert [methods.check(name) for name in BEST] == list(dict.fromkeys(BEST))
    assert len(BEST) == 16


def test_a_number_is_the_same_run_as_its_text() -> None:
    """Law: what a command line says as text and Python as a number is one run."""
    asked = {"method": "fedavg", "data": "digits", "clients": 100, "cohort": 0.1, "lr": 0.02}
    assert identity(asked) == identity({key: str(value) for key, value in asked.items()})
    assert identity(asked) != identity(asked | {"clients": 10})


def test_the_page_of_the_repository_is_written_from_its_store() -> None:
    root = Path(__file__).resolve().parents[2]
    assert page(root / "results" / "arena.jsonl") == (root / "docs" / "arena.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "arena needs at least one method"),
        (["fedavg", "blah=3"], "no setting and no option of fedavg is called 'blah'"),
        (["fedavg", "--test-rows", "nope"], "test_rows is 'nope', but must be one of"),
        (["fedavgg"], "unknown method 'fedavgg'"),
        (["fedavg", "reptile", "--data", "nope"], "There is no dataset 'nope'"),
        (["fedavg", "--unknown", "nope"], "There is no dataset 'nope'"),
    ],
)
def test_wrong_input_is_one_sentence_and_writes_nothing(words, sentence, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        arena(tmp_path, *words)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
