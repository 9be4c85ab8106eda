"""A run's folder: one writer, whole lines, a result only at the end, and nothing left of what was refused."""

from __future__ import annotations

import csv
import fcntl
import json
import multiprocessing
import os
from pathlib import Path

import pytest

from metavd.runs.store import Store, StoreError

RESULT = {
    "method": "fedavg", "data": "digits", "seed": 0, "rounds": 2, "test": {}, "unseen": {}, "bytes": {},
    "sparsity": {}, "seconds": 1.0, "spec": "0" * 12,
}  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A run's folder that was opened."""
    store = Store(tmp_path / "run")
    with store.lock():
        store.open("rounds = 2\n")
    return store


def test_life_of_a_folder(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "run")
    assert not store.is_run()
    assert not store.is_finished()
    with store.lock():
        store.open("rounds = 2\n")
        assert store.is_run()
        for round in (1, 2):
            store.add_round({"round": round, "loss": 0.5})
        assert not store.is_finished()
        store.finish(RESULT, [{"client": 0, "accuracy": 0.25}, {"client": 1, "accuracy": ""}], {})
    assert store.is_finished()
    assert store.read_result() == RESULT
    assert store.config.read_text() == "rounds = 2\n"
    assert [json.loads(line)["round"] for line in store.rounds.read_text().splitlines()] == [1, 2]
    with store.clients.open() as file:
        assert list(csv.DictReader(file)) == [{"client": "0", "accuracy": "0.25"}, {"client": "1", "accuracy": ""}]


# --- rounds.jsonl ----------------------------------------------------------------------------------------------------


def test_cut_forgets_later_rounds(store: Store) -> None:
    """Law: after a cut the file is as it was after that round, byte for byte."""
    contents = [b""]
    for round in range(1, 5):
        store.add_round({"round": round, "loss": 1 / 3, "cohort": [1, 2]})
        contents.append(store.rounds.read_bytes())
    for done in (4, 2, 0):
        store.cut_rounds(done)
        assert store.rounds.read_bytes() == contents[done]
    assert store.read_rounds() == []


@pytest.mark.parametrize("length", range(1, 24))
def test_half_a_line_is_no_line(store: Store, length: int) -> None:
    """Law: a line that a crash cut short anywhere is dropped, and the next cut leaves no trace of it."""
    store.add_round({"round": 1, "loss": 0.5})
    whole = store.rounds.read_bytes()
    store.add_round({"round": 2, "loss": 0.5})
    store.rounds.write_bytes(whole + store.rounds.read_bytes()[len(whole) :][:length])
    assert store.read_rounds() == [{"round": 1, "loss": 0.5}]
    store.cut_rounds(1)
    assert store.rounds.read_bytes() == whole


def test_rounds_that_were_lost_are_told(store: Store) -> None:
    """Law: what a cut finds damaged among the rounds to be kept is said; what a crash cut short after them is not."""
    told: list[str] = []
    for round in range(1, 5):
        store.add_round({"round": round})
    whole = store.rounds.read_text()
    store.rounds.write_text(whole + '{"round": 5, "l')
    store.cut_rounds(4, told.append)
    assert told == []
    store.rounds.write_text(whole.replace('"round": 3', '"round" 3'))
    store.cut_rounds(4, told.append)
    assert len(told) == 1
    assert told[0].startswith(f"{store.rounds} is damaged: it lacks 2 of 4 rounds, the first of them round 3; ")


def test_missing_rounds_are_none(tmp_path: Path) -> None:
    assert Store(tmp_path).read_rounds() == []


@pytest.mark.parametrize("line", ["3", "[]", "null", '"text"', '{"round": "x"}'])
def test_lines_that_are_no_records(store: Store, line: str) -> None:
    """A damaged line that happens to be JSON counts as damage too."""
    store.add_round({"round": 1})
    with store.rounds.open("a") as file:
        file.write(line + "\n")
    store.cut_rounds(1)
    assert store.read_rounds() == [{"round": 1}]


# --- result.json -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["[]", "3", "null", '"method"'])
def test_a_result_that_is_no_object_is_called_that(store: Store, text: str) -> None:
    store.result.write_text(text)
    with pytest.raises(StoreError, match=r"result\.json is damaged \(it is no JSON object\)"):
        store.read_result()


NAMELESS = json.dumps({name: value for name, value in RESULT.items() if name != "spec"})


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "3", "null", '{"method": "fedavg"}', NAMELESS])
def test_damaged_result_is_named(store: Store, text: str) -> None:
    store.result.write_text(text)
    assert not store.is_finished(), "so that --resume writes it again"
    with pytest.raises(StoreError, match=r"result\.json is damaged .*--resume"):
        store.read_result()


def test_missing_result_says_what_to_do(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="--resume"):
        store.read_result()
    with pytest.raises(StoreError, match="--out"):
        Store(tmp_path / "nothing").read_result()


# --- opening and locking ---------------------------------------------------------------------------------------------


def test_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    """Law: a folder with other files is refused and stays as it was, also without the lock."""
    (tmp_path / "mine.txt").write_text("mine")
    store = Store(tmp_path)
    with pytest.raises(StoreError, match="not empty"), store.lock():
        store.open("rounds = 2\n")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_leftovers_of_a_killed_start_are_ours(tmp_path: Path) -> None:
    """Killed while config.toml was first written: the folder is this run's, not a stranger's."""
    (tmp_path / ".lock").touch()
    (tmp_path / ".config.toml.partial").write_text("rou")
    store = Store(tmp_path)
    with store.lock():
        store.open("rounds = 2\n")
    assert store.config.read_text() == "rounds = 2\n"
    assert not (tmp_path / ".config.toml.partial").exists()


def test_refused_folder_is_removed_if_it_was_made(tmp_path: Path) -> None:
    store = Store(tmp_path / "new")

    def refuse() -> None:
        with store.lock():
            raise StoreError("no")

    with pytest.raises(StoreError, match="no"):
        refuse()
    assert list(tmp_path.iterdir()) == []


def test_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match="is a file"), Store(tmp_path / "file").lock():
        pass
    with pytest.raises(StoreError, match="Not a directory"), Store(tmp_path / "file" / "run").lock():
        pass
    assert (tmp_path / "file").read_text() == "mine"


def _hold(folder: Path, entered: multiprocessing.synchronize.Event, leave: multiprocessing.synchronize.Event) -> None:
    with Store(folder).lock():
        entered.set()
        leave.wait(30)


def _writing(store: Store) -> multiprocessing.process.BaseProcess:
    """Return a process that holds the folder's lock."""
    context = multiprocessing.get_context("fork")
    entered, leave = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(store.folder, entered, leave))
    process.start()
    assert entered.wait(30)
    return process


@pytest.mark.processes
def test_one_writer_at_a_time(store: Store) -> None:
    """Law: a second process is refused while the first lives; the lock of a killed process does not count."""
    process = _writing(store)
    before = sorted(os.listdir(store.folder))  # noqa: PTH208
    with pytest.raises(StoreError, match="another process"), store.lock():
        pass
    assert sorted(os.listdir(store.folder)) == before, "the first one's lock is still there"  # noqa: PTH208
    process.kill()
    process.join(30)
    with store.lock():
        pass


@pytest.mark.processes
def test_who_waits_is_told_for_whom_and_goes_on_at_once(store: Store) -> None:
    """Law: with seconds to wait, a second process names the first, waits, and has the folder when the first ends."""
    process = _writing(store)
    told: list[str] = []
    with (
        pytest.raises(StoreError, match=rf"another process \({process.pid}\)"),
        store.lock(seconds=0.3, report=told.append),
    ):
        pass
    assert told == [f"another process ({process.pid}) is writing to {store.folder}; waiting at most 0 s until it ends"]
    with store.lock(seconds=30, report=lambda _: process.kill()):
        assert process.exitcode is not None or process.join(30) is None


def test_a_lock_that_was_removed_keeps_nobody_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: who opened the file of a holder that failed and removed it takes the new file, as everybody else does."""
    real, removed = fcntl.flock, []

    def flock(file: object, how: int) -> None:
        if not removed:
            removed.append((store.folder / ".lock").unlink())
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with store.lock(), pytest.raises(StoreError, match="another process"), store.lock():
        pass
