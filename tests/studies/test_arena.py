"""The arena: runs as lines of a store, and a page that is written from it alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from metavd.cli import main
from metavd.studies.arena import page

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
    assert re.findall("## (.*)", text) == ["digits, consistent, 2 rounds", "digits, independent, 2 rounds"]
    for line in map(json.loads, lines):
        accuracy = 100 * line["result"]["test"]["accuracy"]
        row = rf"`{line['settings']['method']}` \| \**{accuracy:.1f}\**"
        assert re.search(row, text.split("## ")[1 if line["settings"]["test_rows"] == "consistent" else 2])
        assert {"root", "device"} & set(line["settings"]) == set()


def test_several_seeds_have_an_interval_and_the_best_is_bold(tmp_path: Path) -> None:
    text = arena(tmp_path, "fedavg", "fedrep", "--seeds", "2", "--test-rows", "consistent", *QUICK)
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == 2
    assert all("±" in row and row.endswith("0, 1 |") for row in rows)
    assert sum(row.split("|")[2].strip().startswith("**") for row in rows) == 1


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
    ],
)
def test_wrong_input_is_one_sentence_and_writes_nothing(words, sentence, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        arena(tmp_path, *words)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
