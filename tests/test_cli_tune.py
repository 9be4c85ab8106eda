"""metavd tune: what it prints and writes, that its file runs, its exit status; wrong input never leaves a trace."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest
from rich.console import Console

from metavd.cli.tune import StudyBar
from metavd.runs.settings import Experiment
from metavd.studies.plan import plan

pytest.importorskip("optuna")

TINY = ["--rounds", "2", "clients=4", "cohort=2", "width=4", "test_share=0.9", "local_epochs=1", "eval_every=1"]


def test_tune_goes_on_and_its_best_configuration_runs(metavd, tmp_path):
    """The table, the files, what is left to do, and a run of best.toml with the figure that the table shows."""
    first = metavd("tune", "fedavg", "--trials", "2", "--out", "s", "--search", "lr=0.01..0.2:log", *TINY)
    assert first.status == 0, first.err
    assert "fedavg on digits: 2 trials of 2 rounds, validation NLL by rows, valid 0.2" in first.err
    assert "lr in 0.01..0.2:log" in first.err
    assert re.search(r"trial 1 \(2 of 2\)  lr=\S+  NLL", first.err)
    assert "metavd run --config s/best.toml" in first.out

    second = metavd("tune", "fedavg", "--trials", "3", "--out", "s", "--search", "lr=0.01..0.2:log", *TINY)
    assert second.status == 0
    assert "the study has 2 of 3, runs 1 more" in second.err
    assert "3 trials finished, 0 stopped early or diverged" in second.out
    history = json.loads((tmp_path / "s" / "trials.json").read_text())
    best = history["trials"][history["best"]]
    assert f"best: lr={best['settings']['lr']}" in second.out
    assert f"{best['value']:.4f}" in second.out
    assert {path.name for path in (tmp_path / "s").iterdir()} == {
        ".lock", "study.db", "best.toml", "trials.json", "importance.json"
    }  # fmt: skip

    ran = metavd("run", "--config", "s/best.toml", "--out", "r")
    assert ran.status == 0, ran.err
    assert json.loads((tmp_path / "r" / "result.json").read_text())["valid"]["nll"] == best["value"]


def test_the_same_command_finds_its_study_again(metavd, tmp_path):
    """Without --out, the folder is named by what is asked; a file's settings may be searched around."""
    words = ["tune", "fedavg", "--trials", "1", "--by", "clients", "--metric", "accuracy", *TINY]
    assert metavd(*words).status == 0
    again = metavd(*words)
    assert "has 1 of 1, nothing is left to run" in again.err
    folder = next((tmp_path / "runs").iterdir())
    assert re.fullmatch(r"tune-digits-fedavg-s0-[0-9a-f]{6}", folder.name)
    assert len(list((tmp_path / "runs").iterdir())) == 1
    config = str(folder / "best.toml")
    finer = metavd("tune", "--config", config, "--trials", "1", "--out", "f", "--search", "lr=0.01,0.02")
    assert finer.status == 0, finer.err
    assert "fedavg on digits" in finer.err
    nothing = metavd("tune", "--config", config, "--trials", "1", "--out", "g")
    assert nothing.status == 2
    assert "nothing is left to search" in nothing.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "tune takes one method, but got none"),
        (["fedavg", "reptile"], "got fedavg and reptile"),
        (["fedavgg"], "unknown method 'fedavgg'"),
        (["fedavg", "--trials", "0"], "0"),
        (["fedavg", "--metric", "loss"], "loss"),
        (["fedavg", "--search", "lr="], "--search got 'lr=', but needs key=space"),
        (
            ["fedavg", "--search", "batch"],
            "batch offers no values of its own to search; write --search batch=LOW..HIGH",
        ),
        (["fedavg", "--search", "lr=0.2..0.1"], "LOW < HIGH"),
        (["fedavg", "--search", "lr=1,2", "--search", "lr=3,4"], "names lr twice"),
        (["fedavg", "--search", "lr=1,2", "--set", "lr=0.1"], "both fixed with --set and searched"),
        (["fedavg", "--search", "rounds=5,10"], "rounds cannot be searched"),
        (["fedavg", "lr=0.1"], "nothing is left to search"),
        (["fedavg", "--set", "clients=0"], "clients is 0"),
        (["fedavg", "--data", "digit"], "digit"),
    ],
)
def test_wrong_input_is_one_sentence_and_leaves_no_trace(metavd, tmp_path, words, says):
    """Exit status 2, one line that names what is wrong, no file."""
    outcome = metavd("tune", *words)
    assert outcome.status == 2
    assert says in outcome.err
    assert len(outcome.err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_without_optuna_tune_says_what_to_install(metavd, tmp_path, monkeypatch):
    """Exit status 2 and one sentence; nothing is written."""
    monkeypatch.setitem(sys.modules, "optuna", None)
    outcome = metavd("tune", "fedavg", "--out", "s", *TINY)
    assert outcome.status == 2
    assert "pip install 'metavd[tune]'" in outcome.err
    assert not list(tmp_path.iterdir())


def test_a_terminal_has_a_bar():
    """On a terminal, a bar shows the trial in work; lines stay for those that ended."""
    screen = io.StringIO()
    bar = StudyBar()
    bar.err = Console(file=screen, force_terminal=True, width=150, highlight=False)
    bar.start(plan(Experiment(method="fedavg")), 10, 3, 5)
    bar.step(3, 4, 1.5)
    bar.bar.refresh()
    bar.trial({"number": 3, "state": "stopped", "settings": {"lr": 0.1}, "reason": "worse than the median at round 4"})
    bar.stop()
    shown = screen.getvalue()
    assert "the study has 3 of 5, runs 2 more" in shown
    assert "trial 3: round 4/10  NLL 1.5000" in shown
    assert "trial 3 (4 of 5)  lr=0.1  stopped: worse than the median at round 4" in shown
    assert bar.bar is None
