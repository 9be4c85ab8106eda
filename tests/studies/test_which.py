"""Ten lines of advice: computed from the store, for each question the method that stays least behind the best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from metavd.cli import main
from metavd.errors import UserError
from metavd.report.arena import draw_arena
from metavd.studies import arena
from metavd.studies.lines import append
from metavd.studies.which import page, questions, ranked

ROOT = Path(__file__).resolve().parents[2]


def stored(store: Path, method: str, accuracy: float, *, rows: str = "consistent", data: str = "cifar10",
           mb: float = 10.0, ece: float = 0.1, more_results: dict[str, Any] | None = None,
           **more: Any) -> None:  # fmt: skip
    part = {"accuracy": accuracy, "percentile_10": accuracy - 0.1, "nll": 2 - accuracy, "ece_top1": ece}
    result = {
        "test": part,
        "unseen": part,
        "bytes": {"down": mb * 1e6, "up": 0.0},
        "seconds": 5.0,
        **(more_results or {}),
    }
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
    assert row(text, "Traffic matters more")[1:3] == ["`fedavg`", "8.00 (a), 8.00 (b)"]
    assert row(text, "Confidence must match accuracy")[1] != "`maml`"
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


def test_a_figure_that_few_methods_have_recommends_none(tmp_path: Path) -> None:
    """One of three methods has AUROC: no advice, and the page says how many have it; two of three are enough."""
    store = tmp_path / "s.jsonl"
    trust = {"unknown": {"test": {"entropy": {"auroc": 0.9}}}}
    for method, has in (("fedavg", True), ("reptile", False), ("maml", False)):
        stored(store, method, 0.7, more_results={"trust": trust} if has else {})
    assert row(page(store), "Inputs of another kind")[1:] == ["not yet measured", "", "", "1 of 3 (a)"]
    stored(store, "maml", 0.7, more_results={"trust": trust})
    assert row(page(store), "Inputs of another kind")[1:] == ["`fedavg`", "0.900 (a)", "`maml` (+0.000)", "2"]


def test_the_page_says_what_did_not_count(tmp_path: Path) -> None:
    store = tmp_path / "s.jsonl"
    for method in ("maml", "reptile"):
        stored(store, method, 0.9, data="digits")
    for rows in ("consistent", "independent"):
        stored(store, "fedavg", 0.7, rows=rows, tuned="x/fedavg.toml")
        stored(store, "reptile", 0.7, rows=rows)
    stored(store, "reptile", 0.8, tuned="x/reptile.toml")
    append(
        store, {"scope": "arena", "seed": 1, "failed": "diverged", "settings": {"method": "maml", "data": "cifar10"}}
    )
    text = page(store)
    assert (
        "Not considered: 2 runs on digits, data that are there to try things out; 2 runs at the defaults, where others "
        "are tuned; 1 run without a result; in lines about several settings, methods that ran in only some of them "
        "(`reptile (tuned)`)."
    ) in text
    assert row(text, "Clients come that never")[1] == "`fedavg (tuned)`"


def test_servers_with_and_without_momentum_are_told_apart_by_the_settings_of_the_runs(tmp_path: Path) -> None:
    store = tmp_path / "s.jsonl"
    for method in ("fedavg", "fedprox"):
        stored(store, method, 0.7)
    assert "momentum" not in page(store)
    stored(store, "reptile+dropout", 0.7)
    said = "Momentum of 0.9: `reptile` (with whatever is added to them); of 0: all others."
    assert said in page(store)
    assert said in arena.page(store)


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
