"""The outcome of a run is that of its folder and of the SuperLink, whatever `flwr run` answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from metavd.flower import follow as module
from metavd.flower.config import FailedRunError
from metavd.flower.follow import follow

pytestmark = pytest.mark.processes
FLWR = """#!{python} -S
import sys, time
from pathlib import Path
here = Path({here!r})
(here / "calls").open("a").write(" ".join(sys.argv[1:]) + chr(10))
if sys.argv[1] == "list":
    answers = (here / "list").read_text().splitlines()
    (here / "list").write_text(chr(10).join(answers[1:] or answers))
    print("Displaying information ...")
    print(answers[0])
    sys.exit()
print((here / "run").read_text(), flush=True)
if (here / "result").exists():
    (here / "result").rename(here / "out" / "result.json")
time.sleep(float((here / "pause").read_text()))
"""
RESULT = dict.fromkeys(("method", "data", "seed", "rounds", "test", "unseen", "bytes", "sparsity", "seconds", "spec"))
STARTED = "Successfully started run 77 in federation x"


def answer(status: str, details: str = "") -> str:
    """What `flwr list` prints of a run."""
    return json.dumps({"success": True, "runs": [{"status": status, "status-details": details}]})


Play = Callable[..., None]


@pytest.fixture(autouse=True)
def flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a command in Flower's place that says what it is told to say."""
    stub = tmp_path / "flwr"
    stub.write_text(FLWR.format(python=sys.executable, here=str(tmp_path)))
    stub.chmod(0o700)
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(module, "flwr", lambda: str(stub))
    monkeypatch.setattr(module, "_ASK", 0.01)


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Give the function that follows a run."""

    def call(*answers: str, said: str = STARTED, result: bool = False, before: bool = False, pause: float = 0) -> None:
        (tmp_path / "run").write_text(said)
        (tmp_path / "list").write_text("\n".join(answers) or "nothing")
        (tmp_path / "pause").write_text(str(pause))
        if result or before:
            (tmp_path / ("out/result.json" if before else "result")).write_text(json.dumps(RESULT))
        shown: list[str] = []
        follow(Path("app"), {"out": str(tmp_path / "out")}, superlink="here", environment=os.environ, show=shown.append)
        assert said in "".join(shown)

    return call


def test_a_run_is_finished_when_its_result_is_there(play: Play, tmp_path: Path) -> None:
    play(result=True)
    assert len((tmp_path / "calls").read_text().splitlines()) == 1, "and nobody needs to be asked"


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        ([answer("finished:failed", "ServerApp failed with exception: the disk is full")], "^the disk is full$"),
        ([answer("finished:stopped", "Task stopped by user.")], "^Task stopped by user.$"),
        ([answer("running"), answer("running"), answer("finished:failed", "no heartbeat")], "^no heartbeat$"),
        ([answer("finished:completed")], "the run has ended, but .* has no result; is out on another machine"),
        ([json.dumps({"success": False, "error-message": "no SuperLink"})], "the SuperLink does not answer any more"),
        (["no JSON"], "the SuperLink does not answer any more .flwr list failed: .*no JSON"),
    ],
)
def test_a_run_without_a_result_has_failed(play: Play, answers: list[str], sentence: str) -> None:
    """`flwr run` answers 0 in all of these cases; the text is the run's own."""
    with pytest.raises(FailedRunError, match=sentence):
        play(*answers)


def test_what_is_saved_is_said(play: Play, tmp_path: Path) -> None:
    (tmp_path / "out" / "rounds.jsonl").write_text('{"round": 1}\n{"round": 2}\n')
    with pytest.raises(FailedRunError, match=r"gone; 2 rounds are saved in .*/out, and the same command goes on"):
        play(answer("finished:failed", "gone"))


def test_an_old_result_does_not_count(play: Play) -> None:
    """The folder holds another run, finished: the SuperLink says whether the new one was refused."""
    with pytest.raises(FailedRunError, match="holds another run"):
        play(answer("finished:failed", "ServerApp failed with exception: out holds another run"), before=True)
    play(answer("finished:completed"), before=True)


def test_a_run_that_does_not_start_has_failed(play: Play) -> None:
    with pytest.raises(FailedRunError, match="the run did not start: Error no such app"):
        play(said="╭─ Error ──╮\n│ no such app │")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Heed Ctrl-C, which a shell lets its jobs in the background ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_command_that_is_interrupted_leaves_nothing_and_says_what_goes_on(tmp_path: Path) -> None:
    """Ctrl-C: Flower's own command is stopped, and the person knows how to stop the run."""
    began = time.monotonic()

    shown: list[str] = []

    def interrupt() -> None:
        while STARTED not in "".join(shown):
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    (tmp_path / "run").write_text(STARTED)
    (tmp_path / "pause").write_text("60")
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        follow(Path("app"), {"out": str(tmp_path / "out")}, superlink="here", environment=os.environ, show=shown.append)
    assert time.monotonic() - began < 30
    assert shown[-1] == "run 77 goes on without this command; to end it: flwr stop 77 here\n"
    alive = subprocess.run(["pgrep", "-f", str(tmp_path / "flwr")], capture_output=True, check=False)
    assert alive.stdout == b""
