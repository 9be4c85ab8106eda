"""Many runs: what is run, what is only read, what is stored when, and how processes share the work."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from metavd import methods
from metavd.core.types import NonFiniteError
from metavd.data.source import SourceError
from metavd.engine.rounds import InterruptedRun
from metavd.runs.store import StoreError
from metavd.studies.lines import identity, read
from metavd.studies.many import carry_out

Busy = Callable[[Path, str], AbstractContextManager[None]]
TASKS = {seed: {"method": "fedavg", "data": "digits", "seed": seed} for seed in (1, 2, 3)}


def double(settings: Mapping[str, Any], folder: Path, _: Any) -> dict[str, Any]:
    """Stands in for a run; seed 2 leaves a folder."""
    if settings["seed"] == 2:
        folder.mkdir(parents=True)
    return {"result": {"twice": 2 * settings["seed"]}, "device": "cpu", "spec": "0" * 12}


class Counting:
    """`double`, and how often it was asked; `wrong` says what is to go wrong with which seed."""

    def __init__(self, wrong: Mapping[int, Exception] | None = None) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self.wrong = dict(wrong or {})

    def __call__(self, settings: Mapping[str, Any], folder: Path, listener: Any) -> dict[str, Any]:
        self.asked.append(settings)
        if settings["seed"] in self.wrong:
            raise self.wrong[settings["seed"]]
        return double(settings, folder, listener)


@pytest.mark.processes
@pytest.mark.parametrize("jobs", [1, 2])
def test_what_is_stored_is_not_run_again(tmp_path: Path, jobs: int) -> None:
    """Law: the first call runs, tells of and stores all, the second only reads, one with a task more runs that one."""
    store = tmp_path / "store.jsonl"
    told: list[tuple[int, int, int]] = []
    first = list(carry_out(TASKS, double, store=store, jobs=jobs, progress=lambda *word: told.append(word)))
    assert {key for key, _, _ in told} == {1, 2, 3}
    assert [(number, total) for _, number, total in told] == [(1, 3), (2, 3), (3, 3)]
    assert {(each.key, each.end) for each in first} == {(1, "done"), (2, "done"), (3, "done")}
    assert {each.key: each.line["result"]["twice"] for each in first if each.line} == {1: 2, 2: 4, 3: 6}
    counting = Counting()
    again = list(carry_out(TASKS, counting, store=store, jobs=jobs))
    assert [(each.key, each.end) for each in again] == [(1, "stored"), (2, "stored"), (3, "stored")]
    assert {each.key: each.line for each in again} == {each.key: each.line for each in first}
    more = list(carry_out(TASKS | {4: TASKS[1] | {"seed": 4}}, counting, store=store, jobs=jobs))
    assert [each.end for each in more] == ["stored", "stored", "stored", "done"]
    assert [asked["seed"] for asked in counting.asked] == [4]


def test_a_line_says_what_was_run_and_where(tmp_path: Path) -> None:
    """Law: all that is needed to judge or repeat a run is in its line, every option included."""
    store = tmp_path / "store.jsonl"
    list(carry_out(TASKS, double, store=store, scope="tests"))
    line = read(store, "tests")[identity(TASKS[2], "tests")]
    assert line["settings"] == TASKS[2] | methods.resolve("fedavg", {})
    assert line["seed"] == 2
    assert (line["device"], line["spec"]) == ("cpu", "0" * 12)
    assert {"date", "machine", "commit", "versions"} <= line.keys()
    assert [json.loads(row)["seed"] for row in store.read_text().splitlines()] == [1, 2, 3]


def test_every_option_is_told(tmp_path: Path) -> None:
    """Law: a run is told all its options, so that a dataset's presets cannot change what its identity names."""
    counting = Counting()
    list(carry_out(TASKS, counting, store=tmp_path / "store.jsonl"))
    assert counting.asked[0] == TASKS[1] | methods.resolve("fedavg", {})


def test_without_a_store_everything_is_carried_out(tmp_path: Path) -> None:
    """Law: without a store nothing is known as done, nothing but folders and claims is written, no default is said."""
    for _ in range(2):
        counting = Counting()
        ends = list(carry_out(TASKS, counting, work=tmp_path, keep=True, place=lambda one: f"a/{one['seed']}"))
        assert [each.end for each in ends] == ["done"] * 3
        assert counting.asked == list(TASKS.values())
        assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == {"a", "a/2", "claims"}
        (tmp_path / "a" / "2").rmdir()
        (tmp_path / "a").rmdir()


def test_folders_are_kept_only_where_asked(tmp_path: Path) -> None:
    """Law: a run works in WORK/identity; when its line is stored the folder goes, unless it is to stay."""
    work = tmp_path / "work"
    list(carry_out(TASKS, double, store=tmp_path / "a.jsonl", work=work))
    assert [path.name for path in work.iterdir()] == ["claims"]
    list(carry_out(TASKS, double, store=tmp_path / "b.jsonl", work=work, keep=True))
    assert {path.name for path in work.iterdir()} == {"claims", identity(TASKS[2])}


def test_a_failure_is_a_result(tmp_path: Path) -> None:
    """Law: a diverged run is stored as such, stops no other, and is tried again only if somebody asks."""
    store = tmp_path / "store.jsonl"
    counting = Counting({2: NonFiniteError("round 7: it diverged")})
    ends = list(carry_out(TASKS, counting, store=store))
    assert [each.end for each in ends] == ["done", "failed", "done"]
    assert str(ends[1].error) == "round 7: it diverged"
    assert read(store)[identity(TASKS[2])]["failed"] == "round 7: it diverged"
    counting.wrong.clear()
    assert [each.end for each in carry_out(TASKS, counting, store=store)] == ["stored"] * 3
    assert [each.end for each in carry_out(TASKS, counting, store=store, retry=True)] == ["stored", "stored", "done"]
    assert read(store)[identity(TASKS[2])]["result"] == {"twice": 4}


@pytest.mark.parametrize(
    ("error", "strict"),
    [(ZeroDivisionError("no"), False), (NonFiniteError("no"), True), (SourceError("no"), True)],
)
def test_what_ends_the_whole(tmp_path: Path, error: Exception, *, strict: bool) -> None:
    """Law: an error that is no result of its run, or is to be none, comes out."""
    with pytest.raises(type(error)):
        list(carry_out(TASKS, Counting({2: error}), store=tmp_path / "a.jsonl", strict=strict))


def test_a_run_without_data_stops_no_other(tmp_path: Path) -> None:
    """Law: what cannot be started is said, left missing, and the others go on."""
    store = tmp_path / "store.jsonl"
    counting = Counting({1: SourceError("there are no files")})
    ends = list(carry_out(TASKS, counting, store=store))
    assert [(each.end, str(each.error or "")) for each in ends] == [
        ("refused", "there are no files"), ("done", ""), ("done", ""),
    ]  # fmt: skip
    assert identity(TASKS[1]) not in read(store)


def test_an_interruption_loses_the_run_in_flight_only(tmp_path: Path) -> None:
    """Law: what is finished is on the disk before the next run starts."""
    store = tmp_path / "store.jsonl"
    counting = Counting({3: InterruptedRun("stopped after round 7")})
    ending = carry_out(TASKS, counting, store=store)
    for number in (1, 2):
        assert next(ending).key == number
        assert len(read(store)) == number
    with pytest.raises(InterruptedRun):
        next(ending)
    assert len(read(store)) == 2


def test_progress_is_told_of_what_is_missing(tmp_path: Path) -> None:
    """Law: each run that is carried out is told of once, counted among those that are missing."""
    store = tmp_path / "store.jsonl"
    list(carry_out({1: TASKS[1]}, double, store=store))
    told: list[tuple[int, int, int]] = []
    list(carry_out(TASKS, double, store=store, progress=lambda *word: told.append(word)))
    assert {key for key, _, _ in told} == {2, 3}
    assert [(number, total) for _, number, total in told] == [(1, 2), (2, 2)]


def test_no_run_is_begun_that_would_end_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a run is begun where the mean of its method's runs, else of all, would end in time; the others are left.

    The clock is our own, and the same call another time carries out what was left.
    """
    now = [100.0]
    monkeypatch.setattr("metavd.studies.many.time.monotonic", lambda: now[0])

    def slow(settings: Mapping[str, Any], folder: Path, listener: Any) -> dict[str, Any]:
        now[0] += {"fedavg": 10.0, "reptile": 2.0}[settings["method"]]
        return double(settings, folder, listener)

    methods = ["fedavg", "fedavg", "reptile", "fedavg", "reptile"]
    tasks = {number: TASKS[1] | {"method": method, "seed": number} for number, method in enumerate(methods)}
    store = tmp_path / "store.jsonl"
    ends = {each.key: each.end for each in carry_out(tasks, slow, store=store, until=130.0)}
    # 100 + nothing known, 110 + 10, 120 + 10, 122 + 10 is too late, 122 + 2
    assert ends == {0: "done", 1: "done", 2: "done", 4: "done", 3: "left"}
    assert len(read(store)) == 4
    assert [each.key for each in carry_out(tasks, slow, store=store, until=now[0] + 1) if each.end == "done"] == [3]
    assert [each.end for each in carry_out({9: TASKS[2]}, slow, store=store, until=now[0] - 1)] == ["left"]


@pytest.mark.processes
def test_processes_share_the_work(tmp_path: Path, busy: Busy) -> None:
    """Law: a run that another process is at is left to it, and is free again when that process has died."""
    store, work, counting = tmp_path / "store.jsonl", tmp_path / "work", Counting()
    with busy(work, identity(TASKS[2])):
        ends = list(carry_out(TASKS, counting, store=store, work=work))
    assert [each.end for each in ends] == ["done", "elsewhere", "done"]
    ends = list(carry_out(TASKS, counting, store=store, work=work))
    assert {each.key: each.end for each in ends} == {1: "stored", 2: "done", 3: "stored"}
    assert len(counting.asked) == 3


@pytest.mark.processes
def test_processes_share_the_work_without_a_store(tmp_path: Path, busy: Busy) -> None:
    """Law: a work folder is enough; whoever is at work in a run's folder is alone there."""
    how = {"work": tmp_path, "keep": True, "place": lambda one: f"a/{one['seed']}"}
    with busy(tmp_path, "a/2"):
        assert [each.end for each in carry_out(TASKS, Counting(), **how)] == ["done", "elsewhere", "done"]
    assert [each.end for each in carry_out(TASKS, Counting(), **how)] == ["done"] * 3


def test_a_work_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write to the work folder"):
        list(carry_out(TASKS, double, store=tmp_path / "s.jsonl", work=tmp_path / "file" / "work"))
