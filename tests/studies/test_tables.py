"""The paper's tables: that all numbers are there and agree, and that every cell can be run."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from metavd import methods
from metavd.errors import SpecError
from metavd.runs.settings import FROM_DATA, Experiment, resolve, with_settings
from metavd.studies.paper.tables import MEASURES, Cell, PaperFigure, cells, extras, get, tables

SPEC = Path(__file__).parents[3] / "shared" / "spec" / "metavd.md"

SHAPES = {
    "T1": (12, 3, 3), "T2": (4, 1, 3), "T3": (11, 1, 2), "T4": (5, 3, 3), "T5": (8, 4, 2), "T6": (6, 1, 3),
    "T7": (12, 3, 3), "T8": (12, 3, 3), "T9": (2, 3, 1), "T10": (4, 1, 3), "T11": (12, 3, 2), "T12": (12, 3, 2),
    "T13": (8, 3, 3), "T14": (8, 3, 3), "T15": (8, 3, 3), "T16": (10, 3, 3), "T17": (10, 3, 3),
}  # fmt: skip
"""Rows, columns and figures a cell."""


def every() -> list[Cell]:
    return [cell for table in tables().values() for cell in table.cells]


def by_name(cell: Cell) -> dict[str, PaperFigure]:
    return {figure.name: figure for figure in cell.figures}


def test_every_table_has_its_rows_and_columns() -> None:
    """Completeness: 17 tables of the paper's sizes, without an empty cell, every figure of a known kind."""
    shapes = {name: (len(table.rows), len(table.columns), len(table.figures)) for name, table in tables().items()}
    assert shapes == SHAPES
    for name, table in tables().items():
        assert len(table.cells) == len(table.rows) * len(table.columns), name
        assert all(tuple(by_name(cell)) == table.figures for cell in table.cells)
        assert set(table.figures) <= set(MEASURES)


def test_gaps_are_unseen_less_test() -> None:
    """Law: the printed gap is the difference of the printed accuracies; the only slips are the two that are marked."""
    slips = set()
    for cell in every():
        figures = by_name(cell)
        if "gap" in figures:
            off = figures["gap"].value - (figures["unseen"].value - figures["test"].value)
            assert (abs(off) > 0.005) == bool(figures["gap"].mark), cell.name
            if figures["gap"].mark:
                slips.add(cell.name)
    assert slips == {"T8 pFedGP 0.1", "T14 PerFedAvg 5"}


def test_one_run_has_one_number() -> None:
    """Law: cells with the same settings are the same run, so that their figures agree, but where a mark says not."""
    found: dict[tuple[str, str], set[float]] = defaultdict(set)
    marked: dict[tuple[str, str], set[float]] = defaultdict(set)
    for cell in every():
        for figure in cell.figures:
            key = json.dumps(cell.settings, sort_keys=True), figure.name
            (marked if figure.mark else found)[key].add(figure.value)
    assert all(len(values) == 1 for values in found.values())
    assert sorted(sorted(values) for values in marked.values() if len(values) > 1) == [[46.47, 46.57]]


def test_tables_share_runs() -> None:
    """Closed form: 216 trainings and 6 partitions stand behind 390 cells.

    T7, T8: 36 each. T2, T10: 2 more each. T4: 15. T13 to T15: 24 each, T5 8 more. T6: 3 more. T16, T17: 21 more each.
    """
    runs = {json.dumps(cell.settings, sort_keys=True) for cell in every()}
    assert len(every()) == 390
    assert len(runs) == 36 + 36 + 2 + 2 + 15 + 3 * 24 + 8 + 3 + 2 * 21 + 6
    assert sum('"method"' in run for run in runs) == 216


def test_settings_can_be_run() -> None:
    """Every method exists, every option is one of its own and in range, and nothing is left to a dataset's defaults."""
    names = {each.name for each in fields(Experiment)}
    for cell in every():
        settings = dict(cell.settings)
        if "method" not in settings:
            assert cell.table == "T9"
            continue
        assert methods.check(settings["method"]) == settings["method"] == cell.row.lower().replace("+dp", "+drop")
        options = {key: value for key, value in settings.items() if key not in names}
        assert options.items() <= methods.resolve(settings["method"], options).items()
        experiment = with_settings(Experiment(), settings)
        assert {key: getattr(experiment, key) for key in settings if key in names} == {
            key: value for key, value in settings.items() if key in names
        }
        assert set(settings) >= FROM_DATA, cell.name
        resolve(experiment, {})
        assert settings["rounds"] == 1000
        assert settings["width"] == 64


def test_what_a_cell_is_about_is_in_its_settings() -> None:
    """The column's and the table's own settings reach the run: alpha, cohort, threshold, mix."""
    assert cells("T7", ["MAML"], ["0.1"])[0].settings["partition"] == "dirichlet:0.1"
    assert [cell.settings["cohort"] for cell in cells("T4", ["FedAvg"])] == [40, 20, 10]
    assert {cell.settings["clients"] + cell.settings["unseen"] for cell in cells("T4")} == {200}
    assert [cell.settings["data"] for cell in cells("T5", ["MAML"])][3] == "celeba+cifar100+femnist"
    dropped = {cell.settings.get("threshold") for cell in cells("T6") if cell.row.endswith("DP")}
    assert dropped == {0.8}
    assert {cell.settings.get("threshold") for cell in cells("T16") if cell.row.endswith("DP")} == {0.9}
    assert "threshold" not in cells("T6", ["Reptile+MetaVD"])[0].settings


def test_marks_and_doubts_are_where_they_belong() -> None:
    """Exactly the numbers that are wrong or contradict each other are marked; pFedGP is doubted wherever it stands."""
    marks = {(cell.name, figure.name) for cell in every() for figure in cell.figures if figure.mark}
    assert marks == {
        ("T3 MAML cifar100 0.1", "mce"),
        ("T11 MAML 0.1", "mce"),
        ("T8 pFedGP 0.1", "gap"),
        ("T14 PerFedAvg 5", "gap"),
        ("T6 PerFedAvg+MetaVD+DP cifar10 0.5", "sparsity"),
        ("T16 PerFedAvg+MetaVD+DP 0.5", "sparsity"),
    }
    for table in tables().values():
        for row in table.rows:
            doubted = any(part in row.lower() for part in ("pfedgp", "fedbe", "perfedavg", "vd", "fedavg+snip"))
            assert bool(table.doubts[row]) == doubted, (table.name, row)
    assert len(get("T17").doubts["PerFedAvg+MetaVD+DP"]) == 3


@pytest.mark.parametrize(("name", "lowest"), [("T11", 5), ("T12", 3)])
def test_who_is_best_calibrated(name: str, lowest: int) -> None:
    """The notes of the calibration tables count right in how many of the six columns pFedGP is lowest."""
    best = 0
    for column in get(name).columns:
        for figure in ("ece", "mce"):
            values = {cell.row: by_name(cell)[figure].value for cell in cells(name, columns=[column])}
            best += min(values, key=lambda row, values=values: values[row]) == "pFedGP"
    assert best == lowest
    assert {5: "five of the six", 3: "three of the six"}[lowest] in get(name).notes[0]


def test_rows_and_columns_are_found_whatever_their_capitals() -> None:
    chosen = cells("t8", ["reptile+metavd"], ["0.5"])
    assert [cell.name for cell in chosen] == ["T8 Reptile+MetaVD 0.5"]
    assert [figure.value for figure in chosen[0].figures] == [83.20, 83.40, 0.20]


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (("T18",), "no table 'T18'; choose from T1, T2"),
        (("T8", ["FedAvgg"]), "no row 'FedAvgg'; did you mean FedAvg"),
        (("T8", None, ["7"]), "no column '7'; choose from 5, 0.5, 0.1"),
    ],
)
def test_what_is_not_in_the_paper_is_refused(asked: tuple[Any, ...], text: str) -> None:
    with pytest.raises(SpecError, match=re.escape(text)):
        cells(*asked)


def facts() -> dict[str, list[list[str]]]:
    """The tables of section 10, as texts: header line first."""
    section = (
        SPEC.read_text().split("## 10. ")[1].split("\n## 11.")[0].replace("\N{GREEK SMALL LETTER ALPHA}\u0307", "alpha")
    )
    found = {}
    for block in re.split(r"\n\*\*(?=T\d+\*\*)", section)[1:]:
        lines = [line for line in block.splitlines() if line.startswith("|")]
        rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines]
        found[block.split("**")[0]] = [rows[0], *rows[2:]]
    return found


def column_of(heading: str) -> tuple[str, str]:
    """("alpha.5", "gap") from "alpha.5 Δ"; the column is empty where a table has one only."""
    kinds = {"Test": "test", "OOD": "unseen", "Δ": "gap", "ECE": "ece", "MCE": "mce", "Sp": "sparsity"}
    if heading.startswith("alpha="):
        return heading, "classes"
    *column, kind = heading.removesuffix(" %").replace("Sparsity", "Sp").split()
    return " ".join(column), kinds[kind]


COLUMNS = {
    "T1": {"C100 5": "cifar100 5", "C100 .5": "cifar100 0.5", "C10 .1": "cifar10 0.1"},
    "T4": {"s.2": "0.2", "s.1": "0.1", "s.05": "0.05"},
    "T5": {"a": "a", "b": "b", "c": "c", "d": "d"},
    "T9": {"alpha=5.0": "5", "alpha=0.5": "0.5", "alpha=0.1": "0.1"},
}
ALPHAS = {"alpha5": "5", "alpha.5": "0.5", "alpha.1": "0.1"}


@pytest.mark.skipif(not SPEC.exists(), reason="the facts are not beside this checkout")
def test_numbers_are_those_of_the_facts() -> None:
    """Parity: section 10 of the facts, read anew, has the same rows, columns and numbers, digit for digit."""
    found = facts()
    assert list(found) == list(tables())
    for name, (head, *rows) in found.items():
        table = tables()[name]
        assert [row[0] for row in rows] == list(table.rows)
        ours = {(c.row, c.column, f.name): (f.value, f.sd) for c in table.cells for f in c.figures}
        theirs = {}
        for row in rows:
            for heading, text in zip(head[1:], row[1:], strict=True):
                column, figure = column_of(heading)
                label = COLUMNS.get(name, ALPHAS)[column] if column else table.columns[0]
                value, _, sd = text.partition(" ± ")
                theirs[row[0], label, figure] = (float(value), float(sd) if sd else None)
        assert ours == theirs, name


def test_tables_of_femnist_have_a_stand_in_without_the_paper_s_numbers() -> None:
    """Law: M4 is T4's runs with MNIST in place of FEMNIST, column by column, and holds no number to compare with."""
    with_femnist = {cell.table for cell in every() if "femnist" in cell.settings["data"]}
    stand_ins = {table.stands_for: table for table in extras().values() if table.stands_for}
    assert with_femnist == set(stand_ins) == {"T4", "T5", "T10", "T14", "T15"}
    for name, table in stand_ins.items():
        theirs = [cell for cell in get(name).cells if "femnist" in cell.settings["data"]]
        assert table.name == f"M{name[1:]}"
        assert table.alone
        for own, cell in zip(table.cells, theirs, strict=True):
            assert own.settings == {**cell.settings, "data": cell.settings["data"].replace("femnist", "mnist")}


def test_tables_of_our_own_have_no_number_of_the_paper_and_can_be_run() -> None:
    for table in extras().values():
        assert table.alone
        for cell in table.cells:
            assert all(math.isnan(figure.value) for figure in cell.figures)
            whole = with_settings(Experiment(), cell.settings)
            assert with_settings(Experiment(), {"method": whole.method}).method == cell.settings["method"]
            resolve(whole, {})
    released = {cell.settings["width"] for cell in get("A1").cells if cell.settings["variant"] == "released"}
    assert released == {64, 256}
