"""Ten lines of advice: computed from the store, for each question the method that stays least behind the best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from metavd.cli import main
from metavd.errors import UserError
from metavd.report.arena import draw_arena
from metavd.studies.lines import append
from metavd.studies.which import page, questions, ranked

ROOT = Path(__file__).resolve().parents[2]


def stored(store: Path, method: str, accuracy: float, *, rows: str = "consistent", data: str = "cifar10",
           mb: float = 10.0, ece: float = 0.1, **more: Any) -> None:  # fmt: skip
    part = {"accuracy": accuracy, "percentile_10": accuracy - 0.1, "nll": 2 - accuracy, "ece_top1": ece}
    result = {"test": part, "unseen": part, "bytes": {"down": mb * 1e6, "up": 0.0}, "seconds": 5.0}
    settings = {"method": method, "data": data, "test_rows": rows, "partition": "iid", **more}
    append(store, {"scope": "arena", "seed": 0, "settings": settings, "result": result})


def row(text: str, start: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {start}"))
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_the_page_of_the_repository_is_written_from_its_store() -> None:
    kept = (ROOT / "docs" / "which.md").read_text(encoding="utf-8")
    assert page(ROOT / "results" / "arena.jsonl") == kept
    assert len(questions()) == 10


def test_the_least_shortfall_over_settings_wins() -> None:
    """By hand: b is 1 behind in one setting, a 3 in the other; c did not run everywhere."""
    table = {"one": {"a": 80.0, "b": 79.0, "c": 99.0}, "two": {"a": 50.0, "b": 53.0}}
    assert ranked(table, 1) == [("b", pytest.approx((20.0 + 0.0) / 2)), ("a", pytest.approx((19.0 + 3.0) / 2))]
    assert [name for name, _ in ranked(table, -1)] == ["a", "b"]
    assert ranked({}, 1) == []


def test_questions_are_asked_of_their_own_runs(tmp_path: Path) -> None:
    """The protocol decides where it is named; traffic is asked among methods within a point of the most accurate."""
    store = tmp_path / "s.jsonl"
    for rows, best in (("consistent", "reptile"), ("independent", "fedavg")):
        stored(store, "reptile", 0.8 if best == "reptile" else 0.795, rows=rows, mb=10)
        stored(store, "fedavg", 0.8 if best == "fedavg" else 0.795, rows=rows, mb=8)
        stored(store, "maml", 0.6, rows=rows, mb=1, ece=0.01)
    text = page(store)
    assert row(text, "A client meets the same mix")[1:3] == ["`reptile`", "80.0 (a)"]
    assert row(text, "A client may meet any class")[1:3] == ["`fedavg`", "80.0 (b)"]
    assert row(text, "Traffic is dear")[1:3] == ["`fedavg`", "8.00 (a), 8.00 (b)"]
    assert row(text, "Confidence must be accuracy")[1] != "`maml`"
    assert row(text, "Inputs of another kind")[1] == "not yet measured"
    assert "(a) cifar10, iid, consistent; (b) cifar10, iid, independent." in text


def test_tuned_runs_count_alone_and_toys_where_there_is_nothing_else(tmp_path: Path) -> None:
    store = tmp_path / "s.jsonl"
    stored(store, "maml", 0.99, data="digits")
    assert row(page(store), "A client meets the same mix")[1] == "`maml`"
    stored(store, "reptile", 0.9)
    assert row(page(store), "A client meets the same mix")[1] == "`reptile`"
    stored(store, "fedavg", 0.7, tuned="x/fedavg.toml")
    assert row(page(store), "A client meets the same mix")[1] == "`fedavg (tuned)`"


def test_an_empty_store_says_so(tmp_path: Path) -> None:
    assert "The store has no runs yet." in page(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="nothing to draw"):
        draw_arena(tmp_path / "none.jsonl", tmp_path / "a.png")


def test_the_picture_shows_every_setting_and_is_the_same_each_time(tmp_path: Path, capsys: Any) -> None:
    store = tmp_path / "s.jsonl"
    for rows in ("consistent", "independent"):
        stored(store, "reptile", 0.8, rows=rows)
        stored(store, "fedavg", 0.7, rows=rows)
    for name in ("a.svg", "b.svg"):
        main(["arena", "--store", str(store), "--picture", str(tmp_path / name)])
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    text = (tmp_path / "a.svg").read_text()
    assert all(f"<!-- cifar10, iid, {rows} -->" in text for rows in ("consistent", "independent"))
    assert "<!-- reptile -->" in text
    with pytest.raises(SystemExit) as ended:
        main(["arena", "--store", str(store), "--picture", str(tmp_path / "a.txt")])
    assert ended.value.code == 2
    assert "must end in .png, .svg, .pdf" in capsys.readouterr().err
