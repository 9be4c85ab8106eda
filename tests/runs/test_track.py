"""Trackers: what a run tells them is what TensorBoard reads, also when it was resumed; the run does not notice."""

import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metavd import run
from metavd.cli import main
from metavd.engine.rounds import InterruptedRun, Silent
from metavd.errors import UserError
from metavd.runs.settings import Experiment
from metavd.runs.store import Store
from metavd.runs.track import TRACKERS, both, numbers

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


def log_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of LevelDB's log format, behind 7 bytes of W&B's own: checksum, length, kind and part."""
    place, whole = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<4xHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def metrics(folder: Path, name: str, tracker: str) -> list[tuple[int, float]]:
    """Return what MLflow's store or W&B's offline file holds of a curve."""
    if tracker == "mlflow":
        from mlflow import MlflowClient

        known = MlflowClient().get_metric_history((folder / "mlflow.txt").read_text(), name)
        return sorted((each.step, each.value) for each in known)
    from wandb.proto.wandb_internal_pb2 import Record

    lines = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in log_records(file.read_bytes()):
            items = {
                item.key or "/".join(item.nested_key): item.value_json for item in Record.FromString(data).history.item
            }
            lines += [(int(items["round"]), float(items[name]))] if name in items else []
    return lines


@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_other_trackers_hold_what_the_run_stored(tracker, tmp_path, monkeypatch):
    """Offline, every round's loss and every evaluation are the store's, in one run, also when it was resumed."""
    pytest.importorskip(tracker)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = tmp_path / "run"
    made = TRACKERS[tracker](folder, Experiment())
    assert not folder.exists(), "a tracker wrote before the run had its folder"
    run(**SMALL, out=folder, listener=made)
    result = run(**SMALL | {"rounds": 6}, out=folder, resume=True, listener=TRACKERS[tracker](folder, Experiment()))
    rounds = Store(folder).read_rounds()
    expected = [(each["round"], each["loss"]) for each in rounds]
    assert len(expected) == 6
    assert metrics(folder, "train/loss", tracker) == [pytest.approx(each) for each in expected]
    assert metrics(folder, "test/accuracy", tracker)[-1] == (6, pytest.approx(result["test"]["accuracy"]))
    if tracker == "mlflow":
        from mlflow import MlflowClient

        known = MlflowClient().get_run((folder / "mlflow.txt").read_text())
        assert (known.info.status, known.data.params["method"]) == ("FINISHED", "fedavg")


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


@pytest.mark.parametrize(("tracker", "extra"), [("tensorboard", "track"), ("mlflow", "mlflow"), ("wandb", "wandb")])
def test_a_missing_package_is_one_sentence(tracker, extra, tmp_path, monkeypatch):
    """Without its package a tracker says what to install, before anything is trained."""
    monkeypatch.setitem(sys.modules, tracker, None)
    with pytest.raises(UserError, match=rf"--track {tracker} needs .* pip install 'metavd\[{extra}\]'"):
        TRACKERS[tracker](tmp_path, Experiment())


def test_a_tracker_that_is_not_there_is_one_sentence(capsys, monkeypatch, tmp_path):
    """The sentence names the word and the trackers that there are; nothing is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["metavd", "run", "fedavg", "--track", "wandbb", "--out", "out"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "metavd: --track is 'wandbb'; did you mean wandb?\n"
    assert not list(tmp_path.iterdir())
