"""Slices of a study on several machines, and their results in one place: no run lost, none done twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metavd.cli import main
from metavd.errors import UserError
from metavd.studies.many import Share
from metavd.studies.merge import Merged, merge

SMALL = ["--rounds", "3", "--set", "clients=4", "unseen=1", "cohort=2", "local_epochs=1", "width=8"]
METHODS = ["fedavg", "reptile"]
RUNS = sorted(f"{method}/seed-{seed}" for method in METHODS for seed in (0, 1, 2))


def finished(folder: Path) -> list[str]:
    return sorted(str(path.parent.relative_to(folder)) for path in folder.rglob("result.json"))


def slice_of(folder: Path, which: str) -> list[str]:
    return ["compare", *METHODS, "--seeds", "3", "--out", str(folder), "--slice", which, *SMALL]


@pytest.mark.processes
def test_two_slices_killed_restarted_and_merged_are_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Law: each run is in one slice alone; merged, the same command reads all of them and runs none."""
    one, two, whole = tmp_path / "one", tmp_path / "two", tmp_path / "whole"
    killed = subprocess.Popen([sys.executable, "-m", "metavd", *slice_of(one, "1/2")], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(one.rglob("rounds.jsonl")) and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    main(slice_of(one, "1/2"))
    main(slice_of(two, "2/2"))
    assert "the command without --slice shows the table" in capsys.readouterr().out
    assert sorted(finished(one) + finished(two)) == RUNS, "no run is lost, none done twice"
    assert finished(one)
    assert finished(two)
    main(["merge", str(whole), str(one), str(two)])
    main(["merge", str(whole), str(one)])
    said = capsys.readouterr().out
    assert f"{whole}: 6 added, 0 there already" in said
    assert f"{whole}: 0 added, {len(finished(one))} there already" in said
    made = {path: path.stat().st_mtime_ns for path in whole.rglob("result.json")}
    main(["compare", *METHODS, "--seeds", "3", "--out", str(whole), *SMALL])
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("result.json")} == made
    assert "reptile" in capsys.readouterr().out


def test_another_result_of_the_same_run_is_named_and_nothing_is_overwritten(tmp_path: Path) -> None:
    line = {"id": "ab", "scope": "s", "seed": 3, "settings": {"method": "maml"}, "date": "1", "result": {"x": 1}}
    here, same, other = (tmp_path / name for name in ("here", "same", "other"))
    here.write_text(json.dumps(line) + "\n")
    same.write_text(json.dumps(line | {"date": "2", "seconds": 5}) + "\nhalf a li")
    other.write_text(json.dumps(line | {"result": {"x": 2}}) + "\n" + json.dumps(line | {"id": "cd"}) + "\n")
    assert merge(here, [same, other]) == Merged(1, 1, ["maml, seed 3, ab: the same run, other figures"])
    assert [json.loads(text)["result"]["x"] for text in here.read_text().splitlines()] == [1, 1]
    with pytest.raises(SystemExit) as ended:
        main(["merge", str(here), str(other)])
    assert ended.value.code == 1


def test_folders_whose_figures_differ_are_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        main(["run", "fedavg", "--out", str(tmp_path / name / "run"), *SMALL, "--rounds", "1"])
    assert merge(tmp_path / "a", [tmp_path / "b"]) == Merged(0, 1, [])
    file = tmp_path / "b" / "run" / "result.json"
    result = json.loads(file.read_text())
    file.write_text(json.dumps(result | {"model_sha256": "0" * 64}))
    assert merge(tmp_path / "a", [tmp_path / "b"]) == Merged(0, 0, ["run: the same run, other figures"])
    file.write_text(json.dumps(result | {"spec": "0" * 64}))
    assert merge(tmp_path / "a", [tmp_path / "b"]) == Merged(0, 0, ["run: another run is at that place"])


def test_an_unfinished_run_gives_way_to_its_own_result_alone(tmp_path: Path) -> None:
    """Law: the same run, finished elsewhere, takes the place of what was begun here; another run never does."""
    for name, rounds in (("a", "1"), ("same", "1"), ("other", "2")):
        main(["run", "fedavg", "--out", str(tmp_path / name / "run"), *SMALL, "--rounds", rounds])
    (tmp_path / "a" / "run" / "result.json").unlink()
    assert merge(tmp_path / "a", [tmp_path / "other"]) == Merged(0, 0, ["run: another run is at that place"])
    assert "rounds = 1" in (tmp_path / "a" / "run" / "config.toml").read_text()
    both = [tmp_path / "same", tmp_path / "other"]
    assert merge(tmp_path / "a", both) == Merged(1, 0, ["run: another run is at that place"])
    assert finished(tmp_path / "a") == ["run"]


@pytest.mark.parametrize("spoilt", ["a", "b"])
def test_a_result_that_lacks_its_spec_is_named(tmp_path: Path, spoilt: str) -> None:
    """Law: a damaged result is passed over on neither side, and nothing is copied beside it."""
    for name in ("a/run", "b/run", "b/more"):
        main(["run", "fedavg", "--out", str(tmp_path / name), *SMALL, "--rounds", "1"])
    file = tmp_path / spoilt / "run" / "result.json"
    result = json.loads(file.read_text())
    del result["spec"]
    file.write_text(json.dumps(result))
    with pytest.raises(UserError, match=rf"{spoilt}/run/result\.json is damaged \(it lacks spec\)"):
        merge(tmp_path / "a", [tmp_path / "b"])
    assert finished(tmp_path / "a") == ["run"]


def test_what_cannot_be_merged_is_explained(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no JSON\n")
    (tmp_path / "folder").mkdir()
    for others, says in (
        (["gone"], "gone is not there"),
        (["folder", "text"], "are files and folders; merge one kind"),
        (["text"], "holds no JSON line"),
    ):
        with pytest.raises(UserError, match=says):
            merge(tmp_path / "new", [tmp_path / other for other in others])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "-1/2", "1/0"])
def test_a_wrong_slice_is_explained(text: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compare", "fedavg", f"--slice={text}"])
    assert ended.value.code == 2
    assert f"--slice is '{text}', but must be K/N" in capsys.readouterr().err


@given(st.integers(0, 2**64), st.integers(1, 50))
def test_every_task_is_in_one_share(name: int, count: int) -> None:
    assert [Share(number, count).has(name) for number in range(1, count + 1)].count(True) == 1
