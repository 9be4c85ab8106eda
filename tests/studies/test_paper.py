"""The paper's tables beside ours: what is a run, what is run once only, what is stored, compared and said."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from metavd.core.types import NonFiniteError
from metavd.data.source import SourceError
from metavd.engine.rounds import InterruptedRun, Silent
from metavd.errors import SpecError, UserError
from metavd.runs.store import Store
from metavd.studies.lines import append, identity, read
from metavd.studies.paper import carry, digest
from metavd.studies.paper.carry import run_missing
from metavd.studies.paper.page import report
from metavd.studies.paper.plan import needed, store_file
from metavd.studies.paper.protocol import overrides_from, protocol, settings_of
from metavd.studies.paper.statistics import table
from metavd.studies.paper.tables import cells, tables

SMOKE = protocol(scale="smoke")


def fake(settings: Mapping[str, Any], test: float = 0.5, unseen: float = 0.4) -> dict[str, Any]:
    """A result as `run` returns it, with an interval over clients of +-1.96 points (test) and twice that (unseen)."""

    def part(value: float, width: float) -> dict[str, Any]:
        names = ("accuracy", "accuracy_pooled", "accuracy_uniform", "worst_client", "nll", "ece_top1", "mce_top1")
        calibration = {"ece_flat": 0.006, "mce_flat": 0.3, "clients": 9, "samples": 99}
        bounds = {"accuracy": [value - width, value + width]}
        return {**dict.fromkeys(names, value), **calibration, "intervals": bounds}

    return {
        "method": settings["method"], "data": settings["data"], "seed": settings["seed"], "rounds": settings["rounds"],
        "test": part(test, 0.0196), "unseen": part(unseen, 0.0392), "gap": unseen - test,
        "sparsity": {"layer": 0.0, "model": 0.0}, "bytes": {"down": 1, "up": 2}, "seconds": 1.0,
        "spec": "0" * 12, "model_sha256": "0" * 64, "device": "cpu", "precision": "exact",
        "machine": "a machine", "commit": "c0ffee", "version": "0", "torch": "2", "python": "3",
    }  # fmt: skip


class Runs:
    """Stands in for `run`: keeps what it was asked for, and answers with a fake result."""

    def __init__(self, answer: Callable[[Mapping[str, Any]], dict[str, Any]] = fake) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answer = answer

    def __call__(self, *, out: Path, resume: bool, listener: Any, **settings: Any) -> dict[str, Any]:
        assert resume
        assert listener is not None
        self.asked.append({**settings, "out": out})
        out.mkdir()
        return self.answer(settings)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs()
    monkeypatch.setattr(digest, "run", made)
    monkeypatch.setattr(carry, "find", lambda *_: [])  # no data are read
    return made


# What a run is


def test_tables_share_a_run_by_its_identity() -> None:
    """Law: the same settings are the same run wherever they stand; a seed, a scale or an option makes another."""
    here, there = cells("T1", ["MAML"], ["cifar10 0.1"])[0], cells("T8", ["MAML"], ["0.1"])[0]
    first = identity(settings_of(here))
    assert first == identity(settings_of(there))
    others = [
        identity(settings_of(here, seed=778)),
        identity(settings_of(here), "smoke"),
        identity(settings_of(here, how=SMOKE), "smoke"),
        identity(settings_of(here, how=protocol(test_rows="consistent"))),
        identity(settings_of(here, how=protocol(overrides={"maml": {"lr": 0.03}}))),
        identity(settings_of(here, how=protocol(overrides={"maml": {"rounds": 500}}))),
    ]
    assert len({first, *others}) == 7


def test_a_default_said_aloud_is_the_same_run() -> None:
    """Law: options count by their values, not by whether or in what type they were given."""
    cell = cells("T8", ["Reptile+MetaVD"], ["0.5"])[0]
    said = protocol(overrides={"reptile+metavd": {"lr": "0.02", "beta": 10, "draws": 3}})
    assert identity(settings_of(cell, how=said)) == identity(settings_of(cell))


def test_how_many_seeds_or_which() -> None:
    assert protocol(seeds=3).seeds == (777, 778, 779)
    assert protocol(seeds=[5, 7]).seeds == (5, 7)


def test_overrides_go_where_they_are_meant() -> None:
    """Law: what names more wins; * reaches the methods that have the option, and no others."""
    how = protocol(
        overrides={
            "reptile+metavd@cifar100@dirichlet:5": {"beta": 3},
            "reptile+metavd": {"beta": 1},
            "*": {"beta": 7, "lr": 0.01},
            "*@cifar100": {"lr": 0.03},
            "reptile+metavd@cifar100": {"beta": 2},
        }
    )

    def of(name: str, row: str, column: str) -> dict[str, Any]:
        return settings_of(cells(name, [row], [column])[0], how=how)

    assert of("T7", "Reptile+MetaVD", "5")["beta"] == 3
    assert of("T7", "Reptile+MetaVD", "0.5")["beta"] == 2
    assert of("T8", "Reptile+MetaVD", "0.5")["beta"] == 1
    assert of("T8", "MAML+MetaVD", "0.5")["beta"] == 7
    assert of("T8", "MAML+MetaVD", "0.5")["lr"] == 0.01
    assert of("T7", "MAML+MetaVD", "0.5")["lr"] == 0.03
    assert "beta" not in of("T8", "FedAvg", "0.5")


def test_overrides_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "chosen.toml"
    path.write_text('["reptile+metavd@cifar100"]\nbeta = 2\nwidth = 256\n')
    assert protocol(overrides=overrides_from(path)).overrides == {
        "reptile+metavd@cifar100": {"beta": 2.0, "width": 256}
    }
    path.write_text("beta = 2\n")
    with pytest.raises(SpecError, match=r"beta in .* is 2, but must be a table"):
        overrides_from(path)
    path.write_text("beta = ")
    with pytest.raises(SpecError, match="is not TOML"):
        overrides_from(path)
    with pytest.raises(SpecError, match="cannot read the overrides"):
        overrides_from(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        ({"scale": "smok"}, SpecError, "scale is 'smok'; did you mean smoke?"),
        ({"test_rows": "consistant"}, SpecError, "did you mean consistent?"),
        ({"last": 3}, SpecError, "last is 3, but must be 1 (the last evaluation) or 5"),
        ({"seeds": 0}, SpecError, "seeds is 0, but must be a number from 1 on"),
        ({"seeds": [1, 1]}, SpecError, "different seeds"),
        ({"seeds": [-1]}, SpecError, "seed is -1"),
        ({"overrides": {"reptil": {}}}, SpecError, "unknown method 'reptil'"),
        ({"overrides": {"maml": {"betta": 1}}}, SpecError, "the overrides for maml set 'betta'"),
        ({"overrides": {"maml": {"beta": 1}}}, SpecError, "the overrides for maml set 'beta'"),
        ({"overrides": {"maml": {"lr": -1}}}, SpecError, "lr is -1"),
        ({"overrides": {"maml": {"rounds": 0}}}, SpecError, "rounds is 0"),
        ({"overrides": {"maml": {"seed": 1}}}, SpecError, "set 'seed'"),
        ({"overrides": {"maml@a@b@c": {}}}, SpecError, "a name is METHOD, METHOD@DATA or METHOD@DATA@PARTITION"),
    ],
)
def test_a_wrong_protocol_is_refused(asked: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        protocol(**asked)


@pytest.mark.parametrize("name", list(tables()))
def test_smoke_runs_are_small(name: str) -> None:
    """Law: at smoke scale every cell is on the digits, with a handful of clients and two rounds, whatever is set."""
    how = protocol(scale="smoke", overrides={"*": {"rounds": 500, "local_epochs": 9, "width": 256}})
    for cell in cells(name):
        settings = settings_of(cell, how=how)
        assert settings["data"] == "digits"
        assert settings["clients"] + settings["unseen"] == 6
        assert settings["partition"].startswith("dirichlet:")
        if "method" in settings:
            assert (settings["rounds"], settings["width"], settings.get("local_epochs", 1)) == (2, 8, 1)
            assert not {"image_size", "channels", "domains"} & set(settings)
        identity(settings, "smoke")


# The store


def test_scales_are_stored_apart(tmp_path: Path) -> None:
    """Law: a smoke run's line is in a file of its own, and is not read as a real one even if it got into the other."""
    store = tmp_path / "paper.jsonl"
    line = {"scope": "smoke", "settings": {"data": "digits"}, "result": {}}
    append(store_file(store, "smoke"), line)
    assert not store.exists()
    assert len(read(store_file(store, "smoke"), "smoke")) == 1
    store.write_bytes((tmp_path / "paper.smoke.jsonl").read_bytes())
    assert read(store_file(store), "full") == {}


# Running


def test_nothing_is_run_twice(tmp_path: Path, runs: Runs) -> None:
    """Law: a plan has each run once, however many tables and cells need it, and a second call finds nothing missing."""
    store = tmp_path / "paper.jsonl"
    names = ["T1", "T2", "T7"]
    before = needed(names, store)
    assert len(before.missing) == 36 + 12 + 2  # T7; T1's third column; two rows of T2
    assert before.done == ()
    shared = next(run for run in before.missing if "T2 Reptile cifar100 5" in run.cells)
    assert shared.cells == ("T1 Reptile cifar100 5", "T2 Reptile cifar100 5", "T7 Reptile 5")
    outcome = run_missing(names, store)
    assert len(runs.asked) == len(outcome.done) == 50
    assert len({json.dumps({**asked, "out": ""}, sort_keys=True) for asked in runs.asked}) == 50
    after = needed(names, store)
    assert (len(after.done), after.missing) == (50, ())
    assert run_missing(names, store).done == ()
    assert len(runs.asked) == 50


def test_runs_come_in_the_order_in_which_a_stop_leaves_the_most(tmp_path: Path) -> None:
    """Every column at Dirichlet 0.5, seed by seed, before the other partitions, seed by seed; no run twice."""
    missing = needed(["T7", "T8"], tmp_path / "s.jsonl", how=protocol(seeds=3)).missing
    assert len(missing) == len({run.id for run in missing}) == 216
    order = [(run.settings["partition"] != "dirichlet:0.5", run.settings["seed"]) for run in missing]
    assert order == sorted(order)
    assert order.count((False, 777)) == 24


def test_every_option_is_said_to_the_run(tmp_path: Path, runs: Runs) -> None:
    """Law: a run is told all its options, so that a dataset's presets cannot change what its identity names."""
    run_missing(["T8"], tmp_path / "s.jsonl", rows=["Reptile+MetaVD"], columns=["0.5"], device="cpu")
    asked = runs.asked[0]
    assert asked["beta"] == 10.0
    assert asked["lr"] == 0.02
    assert asked["variant"] == "default"
    assert asked["seed"] == 777
    assert asked["device"] == "cpu"
    assert asked["eval_every"] == 50


def test_seeds_are_run_one_after_the_other(tmp_path: Path, runs: Runs) -> None:
    """Law: all cells with the first seed come before any with the second, so that a stop leaves whole tables."""
    told: list[tuple[int, int]] = []
    run_missing(
        ["T2"],
        tmp_path / "s.jsonl",
        how=protocol(seeds=2),
        progress=lambda _, number, total: told.append((number, total)),
    )
    assert [asked["seed"] for asked in runs.asked] == [777] * 4 + [778] * 4
    assert told == [(number, 8) for number in range(1, 9)]


def test_an_interruption_loses_the_run_in_flight_only(tmp_path: Path, runs: Runs) -> None:
    """Law: what is finished is on the disk before the next run starts."""
    store = tmp_path / "s.jsonl"

    def third_is_stopped(settings: Mapping[str, Any]) -> dict[str, Any]:
        if len(runs.asked) == 3:
            raise InterruptedRun("stopped after round 7")
        assert len(read(store, "full")) == len(runs.asked) - 1
        return fake(settings)

    runs.answer = third_is_stopped
    with pytest.raises(InterruptedRun):
        run_missing(["T2"], store)
    assert len(needed(["T2"], store).done) == 2
    runs.answer = fake
    assert len(run_missing(["T2"], store).done) == 2


def test_a_diverged_run_is_stored_as_such(tmp_path: Path, runs: Runs) -> None:
    """Law: a failure is a result: it is told, not hidden, and not tried again until somebody asks."""
    store = tmp_path / "s.jsonl"

    def diverge(settings: Mapping[str, Any]) -> dict[str, Any]:
        raise NonFiniteError(f"{settings['method']} diverged")

    runs.answer = diverge
    outcome = run_missing(["T2"], store, rows=["Reptile"], work=tmp_path / "work")
    assert [text for _, text in outcome.failed] == ["reptile diverged"]
    assert needed(["T2"], store, rows=["Reptile"]).missing == ()
    answer = table("T2", store, rows=["Reptile"]).answers[0]
    assert answer.failures == ("seed 777: reptile diverged",)
    page = report(store, names=["T2"])
    assert "| Reptile | failed | 47.87 |" in page
    assert "Failed, seed 777: reptile diverged." in page
    assert "0 of 4 runs are done, 1 failed" in page
    runs.answer = fake
    assert len(run_missing(["T2"], store, rows=["Reptile"], retry=True).done) == 1
    assert table("T2", store, rows=["Reptile"]).answers[0].failures == ()


def test_a_run_without_data_stops_no_other(tmp_path: Path, runs: Runs) -> None:
    """Law: what cannot be started is told by name and left missing, and the others go on."""

    class Notes(Silent):
        def __init__(self) -> None:
            self.told: list[str] = []

        def note(self, text: str) -> None:
            self.told.append(text)

    def no_vd(settings: Mapping[str, Any]) -> dict[str, Any]:
        if settings["method"] == "reptile+vd":
            raise SourceError("there are no files")
        return fake(settings)

    runs.answer = no_vd
    listener = Notes()
    outcome = run_missing(["T2"], tmp_path / "s.jsonl", listener=listener)
    assert len(outcome.done) == 3
    assert [(run.cells, text) for run, text in outcome.refused] == [
        (("T2 Reptile+VD cifar100 5",), "there are no files")
    ]
    assert listener.told == ["T2 Reptile+VD cifar100 5 cannot be run: there are no files"]
    assert len(needed(["T2"], tmp_path / "s.jsonl").missing) == 1


def test_data_that_are_not_there_are_told_once_and_before_the_first_run(
    tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law: their runs are left out, the others go on; where there are no others, that is the error."""

    def find(data: str, root: str) -> None:
        if data == "cifar100":
            raise SourceError(f"no {data} in {root}")

    monkeypatch.setattr(carry, "find", find)
    told: list[str] = []
    listener = Silent()
    monkeypatch.setattr(listener, "note", told.append)
    store = tmp_path / "s.jsonl"
    part = {"listener": listener, "root": "here"}
    outcome = run_missing(["T7", "T8", "T9"], store, rows=["FedAvg", "CIFAR-100"], **part)
    assert told == ["3 of 9 runs are left out: no cifar100 in here"]
    assert {asked["data"] for asked in runs.asked} == {"cifar10"}
    assert [len(each) for each in (outcome.done, outcome.refused)] == [6, 3], "classes need no pictures"
    work = tmp_path / "work"
    with pytest.raises(SourceError, match=r"^no cifar100 in here$"):
        run_missing(["T7", "T8"], store, rows=["FedAvg"], work=work, **part)
    assert len(told) == 1
    assert not work.exists()


def test_settings_of_no_cell_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="'rounds' cannot be set for the paper's runs as a whole"):
        run_missing(["T2"], tmp_path / "s.jsonl", rounds=3)


def test_smoke_runs_end_to_end(tmp_path: Path) -> None:
    """Four methods are trained, stored in small lines and read back; the stored average is that of the evaluations."""
    store, work = tmp_path / "s.jsonl", tmp_path / "work"
    outcome = run_missing(["T2"], store, how=SMOKE, work=work, keep=True, device="cpu")
    assert len(outcome.done) == 4
    raw = (tmp_path / "s.smoke.jsonl").read_bytes().splitlines()
    assert all(len(row) < 4000 for row in raw)
    stored = read(store_file(store, "smoke"), "smoke")[outcome.done[3].id]
    assert {"spec", "commit", "device", "machine", "versions", "seed"} <= set(stored)
    folder = Store(work / outcome.done[3].id)
    result, first = folder.read_result(), folder.read_rounds()[0]
    assert stored["result"]["test"]["accuracy"] == pytest.approx(result["test"]["accuracy"], rel=1e-5)
    assert stored["result"]["last"]["rounds"] == [1, 2]
    mean = (first["unseen"]["accuracy"] + result["unseen"]["accuracy"]) / 2
    assert stored["result"]["last"]["unseen.accuracy"] == pytest.approx(mean, rel=1e-5)
    kept = stored["result"]["clients"]
    for part in ("test", "unseen"):  # the clients' counts give the headline number
        weight, tested, right = (kept[part][name] for name in ("train", "rows", "right"))
        shares = [w * r / n for w, n, r in zip(weight, tested, right, strict=True)]
        assert sum(shares) / sum(weight) == pytest.approx(result[part]["accuracy"], rel=1e-9)
    lower, upper = result["test"]["intervals"]["accuracy"]
    assert stored["result"]["error"]["test"] == pytest.approx((upper - lower) / 3.92, rel=1e-5)
    view = table("T2", store, how=SMOKE)
    assert all(answer.figures[0].ours is not None for answer in view.answers)
    assert all(each.difference is None and each.beyond is None for answer in view.answers for each in answer.figures)
    page = report(store, how=SMOKE, names=["T2"])
    assert "(smoke runs)" in page
    assert "47.87" not in page
    assert "not run" in report(store, names=["T2"])


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    """Law: with a work folder, a run that was stopped after round 1 goes on from there, and ends the same."""

    class Stopping(Silent):
        def __init__(self) -> None:
            self.began: list[int] = []

        def start(self, experiment: Any, done: int) -> None:  # noqa: ARG002
            self.began.append(done)

        def round(self, record: Any) -> None:
            if len(self.began) == 1 and record.round == 2:
                raise KeyboardInterrupt

    what = {"how": SMOKE, "rows": ["Reptile"], "device": "cpu"}
    listener = Stopping()
    with pytest.raises(InterruptedRun):
        run_missing(["T2"], tmp_path / "a.jsonl", work=tmp_path / "work", listener=listener, **what)
    assert read(tmp_path / "a.smoke.jsonl", "smoke") == {}
    run_missing(["T2"], tmp_path / "a.jsonl", work=tmp_path / "work", listener=listener, **what)
    assert listener.began == [0, 1]
    run_missing(["T2"], tmp_path / "b.jsonl", **what)
    ours, whole = (
        next(iter(read(tmp_path / name, "smoke").values()))["result"] for name in ("a.smoke.jsonl", "b.smoke.jsonl")
    )
    assert {**ours, "seconds": 0} == {**whole, "seconds": 0}


def test_classes_a_client_are_the_papers(tmp_path: Path) -> None:
    """Parity: T9 comes out of our partition to the paper's last digit, and needs no images for it."""
    store = tmp_path / "s.jsonl"
    assert len(run_missing(["T9"], store).done) == 6
    for answer in table("T9", store).answers:
        figure = answer.figures[0]
        assert figure.ours == pytest.approx(figure.figure.value, abs=0.005)
        assert figure.sd == pytest.approx(figure.figure.sd, abs=0.05)
        assert figure.beyond is False


# Comparing


def stored(tmp_path: Path, values: Mapping[int, tuple[float, float]], **more: Any) -> Path:
    """Store results of T2's Reptile (47.87, 47.73, -0.14 in the paper) by seed."""
    store = tmp_path / "s.jsonl"
    cell = cells("T2", ["Reptile"])[0]
    for seed, (test, unseen) in values.items():
        settings = settings_of(cell, seed)
        result = fake(settings, test, unseen)
        parts = {part: {**result[part], "intervals": None} for part in ("test", "unseen")}
        about = {key: result[key] for key in ("device", "machine", "commit")} | {
            "versions": {"metavd": "0", "torch": "2"}
        }
        content = {**result, **parts, "error": {"test": 0.01, "unseen": 0.02}, **more}
        append(store, {"scope": "full", "settings": settings, **about, "result": content})
    return store


def test_seeds_are_judged_by_the_next_run(tmp_path: Path) -> None:
    """Closed form: with three seeds a point apart the mean is +- 2.484, and one more run may lie 4.968 off.

    That is 4.303 / sqrt(3) and 4.303 sqrt(1 + 1/3); 4.6 points would be beyond noise without the 1 under the root.
    """
    values = {777: (0.5147, 0.52), 778: (0.5247, 0.53), 779: (0.5347, 0.54)}
    answer = table("T2", stored(tmp_path, values), how=protocol(seeds=3), rows=["Reptile"]).answers[0]
    test, unseen, gap = answer.figures
    assert answer.seeds == (777, 778, 779)
    assert test.ours == pytest.approx(52.47)
    assert test.half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-5)
    assert test.difference == pytest.approx(4.6)
    assert test.beyond is False
    assert unseen.difference == pytest.approx(5.27)
    assert unseen.beyond is True
    assert gap.beyond is True  # no spread at all, and 0.67 off


def test_seeds_that_are_missing_do_not_count(tmp_path: Path) -> None:
    answer = table("T2", stored(tmp_path, {778: (0.4, 0.4)}), how=protocol(seeds=3), rows=["Reptile"]).answers[0]
    assert answer.seeds == (778,)
    assert answer.figures[0].half is None


@pytest.mark.parametrize(("test", "beyond"), [(0.4787 + 0.0276, False), (0.4787 + 0.0279, True), (0.4787, False)])
def test_one_seed_is_judged_by_its_clients(tmp_path: Path, test: float, beyond: bool) -> None:
    """Closed form: with a standard error of 1 point, 1.96 sqrt(2) = 2.772 points are noise."""
    figure = table("T2", stored(tmp_path, {777: (test, 0.4773)}), rows=["Reptile"]).answers[0].figures[0]
    assert figure.beyond is beyond


def test_a_gap_has_the_noise_of_both(tmp_path: Path) -> None:
    """Closed form: with standard errors of 1 and 2 points, 1.96 sqrt(2) sqrt(5) = 6.198 points are noise."""
    for step, beyond in ((0.0619, False), (0.0621, True)):
        values = {777: (0.4787, 0.4787 - 0.0014 + step)}
        folder = tmp_path / str(step)
        assert table("T2", stored(folder, values), rows=["Reptile"]).answers[0].figures[2].beyond is beyond


def test_noise_that_is_not_known_is_not_guessed(tmp_path: Path) -> None:
    """Law: without an error over clients nothing is said, but for a difference below the paper's last digit."""
    values = {777: (0.6, 0.4773)}
    test, unseen, _ = table("T2", stored(tmp_path, values, error={}), rows=["Reptile"]).answers[0].figures
    assert test.beyond is None
    assert unseen.beyond is False


def test_the_average_of_the_last_evaluations(tmp_path: Path) -> None:
    """Law: last=5 reads the stored average in place of the last evaluation, and changes no run."""
    last = {"rounds": [960, 980, 1000], "test.accuracy": 0.46, "unseen.accuracy": None, "gap": 0.0}
    store = stored(tmp_path, {777: (0.5, 0.5)}, last=last)
    how = protocol(last=5)
    test, unseen, _ = table("T2", store, how=how, rows=["Reptile"]).answers[0].figures
    assert test.ours == pytest.approx(46.0)
    assert unseen.ours is None
    assert table("T2", store, rows=["Reptile"]).answers[0].figures[0].ours == pytest.approx(50.0)
    assert needed(["T2"], store, how=how, rows=["Reptile"]).missing == ()


# The page


def test_the_page_says_what_was_run_and_what_not(tmp_path: Path) -> None:
    """Every table has its section, every footnote its text; ours, theirs and the difference stand side by side."""
    store = stored(tmp_path, {777: (0.6, 0.477299)})
    page = report(store, tmp_path / "docs" / "paper.md", command="metavd paper --report")
    assert (tmp_path / "docs" / "paper.md").read_text() == page == report(store, command="metavd paper --report")
    assert re.findall(r"^## (T\d+)\. ", page, re.M) == list(tables())
    assert "1 of 222 runs are done" in page
    assert (
        "| Reptile | 60.00 | 47.87 | **+12.13** | 47.73 | 47.73 | +0.00 | -12.27 | -0.14 | **-12.13** | 1 of 1 |"
        in page
    )
    assert "| Reptile+VD[^T2-1] | not run | 50.20 |  | not run | 49.28 |  | not run | -0.92 |  | 0 of 1 |" in page
    assert page.count("| Reptile | 60.00 |") == 3  # T1, T2 and T7 share the run
    assert "1 run; commit c0ffee; cpu, a machine; metavd 0, torch 2." in page
    assert "Written by `metavd paper --report`." in page
    used = set(re.findall(r"\[\^(T\d+-\d+)\](?!:)", page))
    assert used == set(re.findall(r"^\[\^(T\d+-\d+)\]: \S", page, re.M))
    for cell in (cell for each in tables().values() for cell in each.cells):
        for figure in cell.figures:
            assert not figure.mark or f"{figure.mark[0].upper()}{figure.mark[1:]}." in page


def test_pages_of_other_protocols_say_so_in_title_and_text(tmp_path: Path) -> None:
    store = tmp_path / "s.jsonl"
    pages = {rounds: report(store, names=["T8"], how=protocol(rounds=rounds)) for rounds in (0, 1000, 100)}
    assert [page.splitlines()[0] for page in pages.values()] == [
        "# The paper's tables and ours",
        "# The paper's tables and ours, after 1,000 rounds",
        "# The paper's tables and ours, after 100 rounds",
    ]
    said = "**Ours are after 100 rounds, the paper's after 1,000**"
    assert [said in page for page in pages.values()] == [False, False, True]


def test_no_column_of_the_page_is_empty_throughout(tmp_path: Path) -> None:
    """Nothing was run, so there are no last five and no differences."""
    page = report(tmp_path / "none.jsonl", names=["T8"])
    assert "last five" not in page
    assert "| difference |" not in page
    assert "| FedAvg | not run | 78.28 | not run |" in page


def test_rows_of_the_page_have_as_many_fields_as_their_header(tmp_path: Path) -> None:
    for block in re.split(r"\n\n", report(tmp_path / "none.jsonl")):
        rows = [row for row in block.splitlines() if row.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1


def test_noise_that_is_unknown_stands_in_brackets(tmp_path: Path) -> None:
    assert "| Reptile | 60.00 | 47.87 | (+12.13) |" in report(
        stored(tmp_path, {777: (0.6, 0.4)}, error={}), names=["T2"]
    )


def test_another_protocol_is_said(tmp_path: Path) -> None:
    how = protocol(test_rows="consistent", last=5, overrides={"maml": {"lr": 0.01}})
    page = report(tmp_path / "none.jsonl", names=["T2"], how=how)
    assert "test rows consistent, unlike the paper; average of the last 5 evaluations; maml: lr=0.01." in page


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the page"):
        report(tmp_path / "s.jsonl", tmp_path / "file" / "paper.md", names=["T9"])
