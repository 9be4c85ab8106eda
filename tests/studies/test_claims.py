"""The claims: which runs test them, what a comparison says, and the verdict by the stated rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from metavd.studies.lines import append, complete
from metavd.studies.paper.claims import AGAINST, FOR, MISSING, OPEN, Claim, Comparison, claims, compare, page, verdict
from metavd.studies.paper.protocol import Protocol, protocol, settings_of
from metavd.studies.paper.tables import cells, extras, tables

ROOT = Path(__file__).resolve().parents[2]
HOW = protocol(seeds=2)


def claim(name: str) -> Claim:
    return next(each for each in claims() if each.name == name)


def stored(store: Path, table: str, row: str, column: str, right: int, *, how: Protocol = HOW, **more: Any) -> None:
    """Add the runs of a cell, two seeds, twenty clients with 100 test rows each and `right` right answers, or so."""
    counts = [right + number % 3 for number in range(20)]
    accuracy = sum(counts) / 2000
    clients = {"train": [50] * 20, "rows": [100] * 20, "right": counts}
    part = {"accuracy": accuracy, "ece_flat": 0.01 * (100 - right)}
    kept = {"test": part, "unseen": part, "clients": {"test": clients, "unseen": clients}, **more}
    for seed in how.seeds:
        cell = cells(table, [row], [column])[0]
        settings = complete(settings_of(cell, seed, how))
        append(store, {"scope": "full", "seed": seed, "settings": settings, "result": kept})


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ([FOR] * 9 + [OPEN], "holds"),
        ([FOR] * 9 + [AGAINST], "holds in part"),
        ([FOR] * 8 + [OPEN] * 2, "holds in part"),
        ([FOR] * 3 + [OPEN] * 7, "does not hold here"),
        ([FOR] * 4 + [OPEN] * 6, "holds in part"),
        ([FOR] * 4 + [AGAINST] * 4, "does not hold here"),
        ([OPEN] * 4, "does not hold here"),
        ([FOR] * 4 + [MISSING] * 5, "tested in part"),
        ([MISSING] * 9, "not yet tested"),
        ([FOR] * 4 + [MISSING] * 4, "holds"),
    ],
)
def test_the_verdict_is_the_rule_s(outcomes: list[str], said: str) -> None:
    assert verdict([Comparison("", "", outcome) for outcome in outcomes]) == said


def test_every_claim_names_rows_that_there_are(tmp_path: Path) -> None:
    """Every pair of rows meets in at least one column, and nothing is compared with itself."""
    every = tables() | extras()
    for each in claims():
        assert set(each.tables) | set(each.against) <= set(every)
        found = compare(each, tmp_path / "none.jsonl")
        assert all(one.outcome == MISSING for one in found)
        named = {one.what for one in found}
        assert named == {f"{first} to {second}" if second else first for first, second in each.pairs}


def test_gains_are_judged_by_seeds_and_clients(tmp_path: Path) -> None:
    """Five points more on every client and seed are in favour, five less against, none open; the paper's are beside."""
    store = tmp_path / "s.jsonl"
    stored(store, "T7", "Reptile", "5", 50)
    stored(store, "T7", "Reptile+MetaVD", "5", 55)
    stored(store, "T7", "MAML", "5", 50)
    stored(store, "T7", "MAML+MetaVD", "5", 45)
    stored(store, "T7", "FedAvg", "5", 50)
    stored(store, "T7", "FedAvg+MetaVD", "5", 50)
    found = {one.what: one for one in compare(claim("accuracy"), store, HOW) if one.outcome != MISSING}
    assert {what: one.outcome for what, one in found.items()} == {
        "Reptile+MetaVD to Reptile": FOR, "MAML+MetaVD to MAML": AGAINST, "FedAvg+MetaVD to FedAvg": OPEN,
    }  # fmt: skip
    best = found["Reptile+MetaVD to Reptile"]
    assert best.difference == pytest.approx(5.0)
    assert (best.low, best.high) == pytest.approx((5.0, 5.0))
    assert best.paper == pytest.approx(53.71 - 47.87)
    assert best.seeds == 2
    errors = {one.what: one for one in compare(claim("calibration"), store, HOW) if one.outcome != MISSING}
    assert errors["Reptile+MetaVD to Reptile"].outcome == FOR  # right + 5 has an error that is 5 points lower
    assert errors["MAML+MetaVD to MAML"].outcome == AGAINST


def test_without_loss_takes_weights_that_were_dropped(tmp_path: Path) -> None:
    """The same accuracy is no loss where half of the layer is gone, and shows nothing where it is not."""
    store = tmp_path / "s.jsonl"
    for row, layer in (("Reptile+MetaVD+DP", 0.6), ("MAML+MetaVD+DP", 0.2), ("PerFedAvg+MetaVD+DP", 0.9)):
        whole = row.removesuffix("+DP")
        stored(store, "T17", whole, "0.5", 50, sparsity={"layer": 0.0})
        stored(store, "T17", row, "0.5", 40 if row.startswith("Per") else 50, sparsity={"layer": layer})
    found = {one.what: one for one in compare(claim("compression"), store, HOW) if one.outcome != MISSING}
    assert [one.outcome for one in found.values()] == [FOR, AGAINST, AGAINST]
    assert [one.more for one in found.values()] == ["60% dropped", "20% dropped", "90% dropped"]


def test_rates_and_rows_of_different_tables(tmp_path: Path) -> None:
    store = tmp_path / "s.jsonl"
    stored(store, "T7", "Reptile+MetaVD", "0.5", 55, rates={"between_clients": 0.01})
    stored(store, "T8", "Reptile+MetaVD", "0.5", 55, rates={"between_clients": 0.2})
    stored(store, "A2", "Reptile+Dropout", "cifar100 0.5", 60)
    found = [one for one in compare(claim("rates"), store, HOW) if one.outcome != MISSING]
    assert [(one.where, one.outcome) for one in found] == [
        ("cifar100, Dirichlet 0.5", AGAINST), ("cifar10, Dirichlet 0.5", FOR),
    ]  # fmt: skip
    (fixed,) = (one for one in compare(claim("dropout"), store, HOW) if one.outcome != MISSING)
    assert (fixed.where, fixed.outcome) == ("cifar100, Dirichlet 0.5", AGAINST)
    stored(store, "A3", "Reptile+MetaVD by size", "cifar100 0.5", 50)
    (weighted,) = (one for one in compare(claim("aggregation"), store, HOW) if one.outcome != MISSING)
    assert (weighted.what, weighted.outcome) == ("Reptile+MetaVD to Reptile+MetaVD by size", FOR)
    text = page(store, HOW)
    assert (
        "| cifar100, Dirichlet 0.5 | Reptile+MetaVD to Reptile+Dropout | -5.00 | -5.00 to -5.00 |  | 2 | against |"
        in text
    )


def test_a_tuned_row_beside_an_untuned_one_is_marked(tmp_path: Path) -> None:
    """Where tuning has chosen for one of two rows alone, the comparison says so, and for neither, too."""
    store, folder = tmp_path / "s.jsonl", tmp_path / "tuned" / "cifar100-dirichlet-0.5-independent"
    folder.mkdir(parents=True)
    about = (
        'data = "cifar100"\npartition = "dirichlet:0.5"\ntest_rows = "independent"\nrounds = 9\n[options]\nlr = 0.5\n'
    )
    (folder / "maml.toml").write_text(f'method = "maml"\n{about}')
    how = protocol(seeds=2, tuned=tmp_path / "tuned")
    for row in ("MAML", "MAML+MetaVD", "FedAvg", "FedAvg+MetaVD"):
        stored(store, "T7", row, "5", 50, how=how)
    found = {one.what: one.more for one in compare(claim("accuracy"), store, how) if one.outcome != MISSING}
    assert found == {
        "MAML+MetaVD to MAML": "only one of the two is tuned",
        "FedAvg+MetaVD to FedAvg": "neither is tuned",
    }
    untuned = [one.more for one in compare(claim("accuracy"), store, protocol(seeds=2)) if one.outcome != MISSING]
    assert untuned == [""]  # where no tuned settings are asked for, their lack is no news


def test_the_page_of_the_repository_is_written_from_its_store() -> None:
    """Its last line names the command; the same protocol gives the same text."""
    kept = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    command = kept.strip().splitlines()[-1].removeprefix("Written by `").removesuffix("`.")
    words = command.split()
    assert words[:3] == ["metavd", "paper", "claims"]
    tuned = ROOT / "results" / "tuned" if "--tuned" in words else None
    seeds = int(words[words.index("--seeds") + 1]) if "--seeds" in words else 1
    assert page(ROOT / "results" / "paper.jsonl", protocol(seeds=seeds, tuned=tuned), command) == kept
