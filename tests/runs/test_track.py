"""Trackers: what a run tells them is what TensorBoard reads, also when it was resumed; the run does not notice."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from metavd import run
from metavd.engine.rounds import InterruptedRun, Silent
from metavd.runs.settings import Experiment
from metavd.runs.store import Store
from metavd.runs.track import TRACKERS, TrackError, both, numbers

SMALL = {"method": "fedavg", "clients": 6, "unseen": 2, "cohort": 3, "rounds": 4, "eval_every": 2, "local_epochs": 1}
tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def read(folder: Path) -> Any:
    """Read event files as TensorBoard does."""
    events = tensorboard.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    return events.Reload()


def curve(folder: Path, name: str) -> dict[int, float]:
    return {event.step: event.value for event in read(folder).Scalars(name)}


def test_tensorboard_reads_what_the_run_stored(tmp_path):
    """Every round's loss and bytes, and every evaluation, are the store's; the result is that of an untracked run."""
    tracker = TRACKERS["tensorboard"](tmp_path / "run", Experiment())
    assert not (tmp_path / "run").exists(), "a tracker wrote before the run had its folder"
    result = run(**SMALL, out=tmp_path / "run", listener=both(Silent(), tracker))
    rounds = Store(tmp_path / "run").read_rounds()
    assert curve(tmp_path / "run", "train/loss") == pytest.approx({each["round"]: each["loss"] for each in rounds})
    assert curve(tmp_path / "run", "bytes/up") == {each["round"]: each["up"] for each in rounds}
    expected = {2: rounds[1]["test"]["accuracy"], 4: result["test"]["accuracy"]}
    assert curve(tmp_path / "run", "test/accuracy") == pytest.approx(expected)
    assert curve(tmp_path / "run", "unseen/nll")[4] == pytest.approx(result["unseen"]["nll"])
    assert run(**SMALL)["model_sha256"] == result["model_sha256"]


def test_a_resumed_run_takes_back_what_it_repeats(tmp_path):
    """Rounds after the checkpoint are trained again; TensorBoard shows each round once, those of the last attempt."""

    class StopsAt(Silent):
        def round(self, record: Any) -> None:
            if record.round == 3:
                raise KeyboardInterrupt

    folder = tmp_path / "run"
    settings = {**SMALL, "checkpoint_every": 2}
    with pytest.raises(InterruptedRun):
        run(**settings, out=folder, listener=both(TRACKERS["tensorboard"](folder, Experiment()), StopsAt()))
    assert set(curve(folder, "train/loss")) == {1, 2, 3}
    run(**settings, out=folder, resume=True, listener=both(TRACKERS["tensorboard"](folder, Experiment())))
    steps = [event.step for event in read(folder).Scalars("train/loss")]
    assert steps == [1, 2, 3, 4]


def test_all_listeners_hear_the_same_in_order():
    """`both` passes on every call to every listener; of one listener it is that listener."""

    class Heard(Silent):
        def __init__(self, name: str) -> None:
            self.name = name

        def note(self, text: str) -> None:
            heard.append((self.name, text))

        def evaluation(self, round: int, summary: Any) -> None:  # noqa: ARG002
            heard.append((self.name, round))

    heard: list[tuple[str, Any]] = []
    one, two = Heard("one"), Heard("two")
    joined = both(one, two)
    joined.note("a")
    joined.evaluation(3, {})
    assert heard == [("one", "a"), ("two", "a"), ("one", 3), ("two", 3)]
    assert both(one) is one


def test_only_finite_numbers_become_curves():
    """None, NaN, truth values, texts and lists are no points of a curve."""
    found = dict(numbers({"a": {"b": 1, "c": float("nan"), "d": True}, "e": None, "f": "x", "g": [1.0]}))
    assert found == {"a/b": 1.0}


def test_the_tracker_of_the_docs_works(tmp_path, monkeypatch):
    """docs/report.md: one function is a tracker; the very text is run."""
    monkeypatch.setattr("metavd.runs.track.TRACKERS", dict(TRACKERS))
    page = Path(__file__).resolve().parents[2] / "docs" / "report.md"
    example = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)[0]
    space: dict[str, Any] = {}
    exec(compile(example, "docs/report.md", "exec"), space)
    run(**SMALL, out=tmp_path / "run", listener=space["TRACKERS"]["lines"](tmp_path / "run", Experiment()))
    assert [line.split()[0] for line in (tmp_path / "run" / "accuracy.txt").read_text().splitlines()] == ["2", "4"]


def test_a_missing_package_is_one_sentence(tmp_path, monkeypatch):
    """Without tensorboard the tracker says what to install, before anything is trained."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(TrackError, match=r"pip install 'metavd\[track\]'"):
        TRACKERS["tensorboard"](tmp_path, Experiment())
