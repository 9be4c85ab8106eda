"""The page of a study: every trial, the best one marked, figures of what is known, and damage named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from metavd.report.read import ReportError
from metavd.report.tuning import is_study, write_study

TRIALS = {
    "study": {"method": "fedavg", "data": "<b>digits</b>", "rounds": 4, "by": "rows", "seed": 0, "seeds": 1,
              "space": {"lr": "0.01..0.1:log", "batch": "16,32", "variant": "default,released"}},
    "metric": "nll", "direction": "minimize", "best": 1,
    "trials": [
        {"number": 0, "state": "finished", "value": 1.5, "curve": [[2, 2.0], [4, 1.5]],
         "settings": {"lr": 0.02, "batch": 16, "variant": "default"}},
        {"number": 1, "state": "finished", "value": 0.75, "curve": [[2, 1.0], [4, 0.75]],
         "settings": {"lr": 0.09, "batch": 32, "variant": "released"}},
        {"number": 2, "state": "stopped", "value": None, "curve": [[2, 2.5]], "reason": "worse than the median",
         "settings": {"lr": 0.011, "batch": 16, "variant": "default"}},
    ],
}  # fmt: skip


def study(folder: Path, history: object = TRIALS, importance: object = None) -> Path:
    folder.mkdir()
    (folder / "trials.json").write_text(json.dumps(history))
    if importance is not None:
        (folder / "importance.json").write_text(json.dumps({"importance": importance}))
    return folder


def test_trials_stand_best_first_and_figures_beside_the_page(tmp_path: Path) -> None:
    """Closed form: the order of the table, and one figure for history, curves, importance and each number searched."""
    folder = study(tmp_path / "s", importance={"lr": 0.9, "batch": 0.1})
    assert is_study(folder)
    assert write_study(folder, tmp_path / "page.html", command="metavd report s") == []
    text = (tmp_path / "page.html").read_text()
    assert re.findall(r'<td class="first">(\d+)</td>', text) == ["1", "0", "2"]
    assert '<td class="best">0.7500</td>' in text
    assert "stopped: worse than the median" in text
    assert "<b>digits</b>" not in text, "what comes from a file is escaped"
    names = {path.name for path in (tmp_path / "page_files").iterdir()}
    stems = ("history", "curves", "importance", "by-lr", "by-batch")
    assert names == {f"{stem}.{ending}" for stem in stems for ending in ("svg", "png")}
    assert text.count("<svg") == len(stems)
    assert not re.findall(r"https?://(?!www\.w3\.org)", text)


def test_a_study_that_goes_on_has_no_importance_yet(tmp_path: Path) -> None:
    """What is missing is noted, not drawn."""
    started = {**TRIALS, "best": None, "trials": TRIALS["trials"][2:]}
    (note,) = write_study(study(tmp_path / "s", started), tmp_path / "page.html")
    assert "importance.json" in note
    assert {path.stem for path in (tmp_path / "page_files").iterdir()} == {"curves"}


@pytest.mark.parametrize("content", ["", "[]", "{", '{"trials": 3}', '{"metric": "nll", "trials": [{}]}'])
def test_a_damaged_study_is_one_sentence(tmp_path: Path, content: str) -> None:
    folder = study(tmp_path / "s")
    (folder / "trials.json").write_text(content)
    with pytest.raises(ReportError, match=r"trials\.json is damaged"):
        write_study(folder, tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["s"], "nothing half written"
