"""Pages are written from the stores alone: in a fresh clone, without a GPU, the command that a page names gives it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from metavd.cli.paper import paper_command
from metavd.studies.paper.page import report
from metavd.studies.paper.protocol import protocol
from metavd.studies.paper.tables import extras, tables

ROOT = Path(__file__).resolve().parents[2]
FIGURES = "## Figures"


def command_of(page: Path) -> str:
    found = re.search(r"^Written by `(metavd paper [^`]*)`\.$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("paper*.md")), ids=lambda page: page.name)
def test_the_paper_s_pages_are_those_of_the_store(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text and numbers; pictures are drawn from the same store, and only their files' names are compared."""
    monkeypatch.chdir(ROOT)
    command = command_of(page)
    given = paper_command.make_context("paper", shlex.split(command)[2:]).params
    assert given["what"][0] == "report"
    names = list(given["what"][1:]) or [*tables(), *extras()]
    how = protocol(
        seeds=given["seeds"], rounds=given["rounds"], test_rows=given["test_rows"], last=given["last"],
        tuned="results/tuned" if given["tuned"] else None,
    )  # fmt: skip
    kept = page.read_text(encoding="utf-8")
    made = report(given["store"], names=names, how=how, command=command)
    assert made.split(FIGURES)[0].strip() == kept.split(FIGURES)[0].strip()
    drawn = re.findall(r"\((\w[^)]*\.png)\)", kept.partition(FIGURES)[2])
    assert all((page.parent / name).exists() for name in drawn)
