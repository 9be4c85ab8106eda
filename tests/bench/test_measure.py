"""Measuring: figures follow from times, ratios are quotients, a broken variant stops nobody. No time is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from metavd import methods
from metavd.bench import measure, scale, whole
from metavd.bench.measure import (
    OURS,
    Pace,
    Variant,
    bench,
    call,
    checked,
    figures,
    order_of,
    pace,
    variants,
    whole_run,
    whole_runs,
    with_ratios,
)
from metavd.bench.scale import Point, told
from metavd.bench.workload import PAPER, PAPER_100, TINY, WORKLOADS, Assignment, training_flops
from metavd.cli import main
from metavd.errors import UserError
from metavd.runs.run import run

SMALL = replace(TINY, clients=6, rows=60, cohort=4, batch=10, width=8)
PEAKS = {"float32": 1e9, "tf32": 4e9}


def order(rounds: int = 2) -> Assignment:
    return Assignment(SMALL, "cpu", (10,) * 6, ((0, 1, 2, 3),), first=1, warm_up=1, rounds=rounds, budget=1.0)


def answer(*seconds: float, **more: object) -> dict[str, object]:
    return {"seconds": list(seconds), "memory_mb": 10.0, "start_s": 2.0, "loss": 1.0, **more}


def test_figures_follow_from_the_seconds():
    """Closed form: two repetitions of two rounds of 40 images, of which the fastest counts."""
    found = figures(order(), [answer(1.0, 2.0), answer(4.0, 3.0, memory_mb=12.0)], PEAKS)
    assert (found["round_s"], found["rounds"], found["median_s"], found["slowest_s"]) == (1.0, 4, 2.5, 4.0)
    assert found["images_s"] == 40
    flops = training_flops(SMALL) * 40
    assert found["tflops"] == pytest.approx(flops / 1e12)
    assert found["share"] == pytest.approx(flops / 1e9)
    assert found["memory_mb"] == 12.0


def test_of_rounds_that_differ_the_mean_counts():
    """Closed form: 40 and 20 images in 1 and 4 seconds."""
    ragged = replace(order(), cohorts=((0, 1), (0, 1, 2, 3)))
    found = figures(ragged, [answer(1.0, 4.0)], PEAKS)
    assert (found["round_s"], found["images_s"]) == (2.5, 12)


def test_the_peak_is_that_of_the_precision():
    one, other = (figures(order(), [answer(1.0, precision=name)], PEAKS)["share"] for name in ("float32", "tf32"))
    assert one == pytest.approx(4 * other)


def test_a_round_that_was_cut_short_counts_its_own_images():
    assert figures(order(5), [answer(1.0, 1.0)], PEAKS)["images_s"] == 40


def test_ratios_are_quotients_and_ours_is_one():
    found = with_ratios({OURS: {"round_s": 0.5}, "loop": {"round_s": 2.0}, "other": {"error": "no"}})
    assert [found[name].get("against_ours") for name in (OURS, "loop", "other")] == [1.0, 4.0, None]
    assert "against_ours" not in with_ratios({OURS: {"error": "x"}, "loop": {"round_s": 2.0}})["loop"]


def test_an_error_in_one_repetition_is_the_variants_error():
    assert figures(order(), [answer(1.0), {"error": "out of memory"}], PEAKS) == {"error": "out of memory"}


def test_ragged_rounds_are_the_same_for_all():
    """Law: where rounds differ, nobody's are cut short by time."""
    for work in (PAPER, PAPER_100):
        for quick in (True, False):
            assert pace(work, quick=quick).budget > 1e6


def test_our_engine_comes_first_and_everyone_once():
    for device in WORKLOADS:
        names = [each.name for each in variants(device, {"chunk": 3})]
        assert names[0] == OURS
        assert len(set(names)) == len(names)
    assert variants("cpu", {"chunk": 3})[0].settings == (("chunk", 3),)


def test_tuned_variants_keep_their_memory(monkeypatch):
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    assert Variant("a", "plain", tuned=True).environment["MALLOC_TOP_PAD_"] == "268435456"
    assert Variant("a", "plain").environment["MALLOC_TOP_PAD_"] == "1"


@pytest.mark.parametrize("module", ["ours", "plain"])
def test_a_process_carries_out_an_order(module):
    """Law: so many rounds, each with a time, and a finite loss; memory is that of a process with torch."""
    told = order_of(SMALL, "cpu", Pace(1, 3, 60.0))
    found = call(Variant(OURS if module == "ours" else "loop", module), told)
    assert "error" not in found
    assert len(found["seconds"]) == 3
    assert all(second > 0 for second in found["seconds"])
    assert 0 < found["loss"] < 400
    assert found["memory_mb"] > 50
    assert found["start_s"] > 0


def test_an_order_longer_than_a_pipe_arrives():
    """Law: a thousand clients per round make an order that no pipe holds; the process must not wait for its end."""
    told = order_of(SMALL, "cpu", Pace(1, 2, 60.0))
    told = replace(told, cohorts=told.cohorts * 8_000)
    assert len(told.to_json()) > 1 << 18
    assert len(call(Variant("loop", "plain"), told)["seconds"]) == 2


def test_what_ends_a_process_is_its_error():
    found = call(Variant("nothing", "no_such_module"), order())
    assert found.keys() == {"error"}
    assert "no_such_module" in found["error"]


@pytest.mark.parametrize(("trained", "sound"), [([40, 40], True), ([40, 0], False), ([40], False)])
def test_a_framework_that_did_not_do_the_work_has_no_time(trained, sound):
    """Law: rounds in which clients failed without a word are an error, not fast rounds."""
    found = answer(1.0, 1.0, trained=trained)
    assert (checked(found, order()) == found) == sound
    assert ("error" in checked(found, order())) != sound


def test_a_process_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(measure, "_LIMIT", 0.2)
    monkeypatch.setattr(measure, "_PAUSE", 0.1)
    assert "stopped after" in call(Variant("loop", "plain"), order())["error"]


def fake(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> list[str]:
    """Let nothing be measured: ours takes a second, one breaks, the others take two, or what is said."""
    asked: list[str] = []

    def called(variant: Variant, told: Assignment) -> dict[str, object]:
        asked.append(f"{told.work.name}: {variant.name}")
        took = {"metavd": 1.0, **seconds}.get(variant.name, 2.0)
        return {"error": "broken"} if variant.name == "loop" else answer(*[took] * told.rounds)

    monkeypatch.setattr(measure, "call", called)
    monkeypatch.setattr(measure.subprocess, "run", lambda *_, **__: type("Done", (), {"stdout": json.dumps(PEAKS)}))
    return asked


def test_repetitions_go_in_turn_and_a_broken_variant_is_not_asked_again(monkeypatch):
    asked = fake(monkeypatch)
    said: list[str] = []
    found = bench("cpu", only=["tiny"], note=said.append)
    names = [each.name for each in variants("cpu", {})]
    assert asked[: len(names)] == [f"tiny: {name}" for name in names]
    assert asked.count("tiny: metavd") == pace(TINY, quick=False).repetitions
    assert asked.count("tiny: loop") == 1
    assert any("loop failed: broken" in text for text in said)
    (workload,) = found["workloads"]
    assert [each["name"] for each in workload["variants"]] == names
    assert found["curves"] == {}
    assert json.dumps(found), "plain values alone"


def test_a_close_race_goes_on(monkeypatch):
    """Law: whoever is nearly as fast as ours is measured as often as ours, three times as often as the others."""
    monkeypatch.setattr(measure.torch, "get_num_threads", lambda: 2)
    ours, _, slow, quick = (each.name for each in variants("cpu", {}))
    asked = fake(monkeypatch, **{quick: 1.2})
    found = bench("cpu", only=["tiny"])
    few = pace(TINY, quick=False).repetitions
    assert [asked.count(f"tiny: {name}") for name in (ours, quick, slow)] == [3 * few, 3 * few, few]
    rounds = {each["name"]: each.get("rounds") for each in found["workloads"][0]["variants"]}
    assert rounds[ours] == rounds[quick] == 3 * rounds[slow]


def test_who_stops_early_keeps_the_pieces_that_are_there(monkeypatch):
    """Law: after each piece everything measured so far is handed over."""
    fake(monkeypatch)
    kept = []
    bench("cpu", only=["cifar", "tiny", "cohort"], quick=True, keep=lambda found: kept.append(json.dumps(found)))
    pieces = [([work["name"] for work in each["workloads"]], [*each["curves"]]) for each in map(json.loads, kept)]
    assert pieces == [(["cifar"], []), (["cifar", "tiny"], []), (["cifar", "tiny"], ["cohort"])]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (
            ["--device", "cpu", "--only", "cifra"],
            "there is no part 'cifra' on cpu; choose from cifar, tiny",
        ),
        (["--device", "cpu", "--only", "paper"], "no part 'paper' on cpu"),
        (["--device", "cuda", "--only", "whole"], "no --root names the folder"),
        (["--device", "cpu", "--set", "chunks=3"], "there is no setting 'chunks'"),
        (["--device", "cpu", "--pfl-python", "/no/such"], "/no/such is no Python interpreter"),
        (["--device", "cpu", "--flower-python", sys.executable], "cannot import flwr, ray"),
        (["--device", "tpu"], "tpu"),
        (["--render"], "--page names none"),
        (["--device", "cpu", "--json", f"{__file__}/x.json"], "cannot write"),
        (["--device", "cpu", "--page", f"{__file__}/pages/x.md"], f"{__file__} is no folder"),
    ],
)
def test_wrong_input_is_one_sentence(arguments, wanted, capsys, monkeypatch):
    """Law: exit status 2, one line that says what would be right."""
    if "--flower-python" in arguments:
        monkeypatch.setattr(measure.subprocess, "run", lambda *_, **__: type("No", (), {"returncode": 1}))
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2
    said = capsys.readouterr().err.strip()
    assert wanted in said
    assert "\n" not in said


def test_a_whole_run_tells_what_it_took():
    """The very process, on digits: the first round is over before the run is, and the result is that of `run`."""
    settings = {"data": "digits", "model": "mlp", "width": 8, "partition": "iid", "clients": 4, "unseen": 2,
                "cohort": 2, "rounds": 3, "eval_every": 2, "method": "reptile", "device": "cpu"}  # fmt: skip
    told = json.dumps({"began": time.time(), "settings": settings})
    answer = subprocess.run([sys.executable, "-m", "metavd.bench.whole"], input=told, check=True, capture_output=True,
                            text=True)  # fmt: skip
    found = json.loads(answer.stdout)
    assert 0 < found["start_s"] < found["seconds"]
    assert (found["method"], found["rounds"]) == ("reptile", 3)
    assert found["test"] == run(**whole.SETTING | settings)["test"]["accuracy"]


DIGITS = {"data": "digits", "model": "mlp", "width": 8, "partition": "iid", "clients": 4, "unseen": 2, "cohort": 2,
          "eval_every": 2, "device": "cpu", "root": None}  # fmt: skip


@pytest.fixture
def orders(monkeypatch):
    """Whole runs take place on digits; return what each was told, and where its kernels are."""
    started, told = measure._started, []

    def on_digits(order, cache):
        told.append((order["settings"], cache))
        return started(order | {"settings": order["settings"] | DIGITS}, cache)

    monkeypatch.setattr(measure, "_started", on_digits)
    return told


def test_whole_runs_at_once(orders, tmp_path, monkeypatch):
    """Law: as many processes as said, each with a seed of its own; what ends one is the error of all."""
    settings = {"method": "fedavg", "rounds": 2}
    found = whole_run(settings, 2, tmp_path, lambda _: None)
    assert (found["method"], found["at_once"], found["rounds"]) == ("fedavg", 2, 2)
    assert [each["seed"] for each, _ in orders] == [777, 778]
    monkeypatch.setitem(DIGITS, "clients", -1)
    assert "clients" in whole_run(settings, 1, tmp_path, lambda _: None)["error"]


class Answered:
    """A process that has ended with an answer."""

    returncode = 0

    def __init__(self, settings):
        self.answer = json.dumps({"method": settings["method"], "rounds": settings["rounds"], "start_s": 1.0})

    def communicate(self):
        return self.answer, ""


def test_whole_runs_find_the_kernels_of_a_first_start(monkeypatch):
    """Law: a method's first start meets an empty cache and is told; its whole runs share that cache, and no other's."""
    orders = []

    def started(order, cache):
        orders.append((order["settings"], cache))
        return Answered(order["settings"])

    monkeypatch.setattr(measure, "_started", started)
    monkeypatch.setattr(whole, "RUNS", (("fedavg", 1), ("reptile", 1), ("fedavg", 2)))
    found = list(whole_runs("nowhere", lambda _: None, quick=True))
    assert [(each["method"], each["at_once"], each["rounds"], "cold_s" in each) for each in found] == [
        ("fedavg", 1, 30, True), ("reptile", 1, 30, True), ("fedavg", 2, 30, False)]  # fmt: skip
    assert [(each["method"], each["rounds"]) for each, _ in orders] == [
        ("fedavg", 2), ("fedavg", 30), ("reptile", 2), ("reptile", 30), ("fedavg", 30), ("fedavg", 30)]  # fmt: skip
    caches = [cache for _, cache in orders]
    assert caches[0] == caches[1] == caches[4] == caches[5] != caches[2] == caches[3]


def test_without_a_gpu_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(measure.torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no CUDA GPU here; use --device cpu"):
        bench("cuda")


def test_the_command_prints_stores_and_writes(monkeypatch, tmp_path: Path, capsys):
    """The whole command, with nothing measured: a table, JSON where --json says, a page beside."""
    fake(monkeypatch)
    store, page = tmp_path / "results" / "bench-cpu.json", tmp_path / "docs" / "performance.md"
    arguments = ["--device", "cpu", "--only", "tiny,cohort", "--quick", "--json", str(store), "--page", str(page)]
    main(["bench", *arguments])
    shown = capsys.readouterr().out
    assert "metavd" in shown
    assert "s per round" in shown
    assert json.loads(store.read_text())["quick"] is True
    assert "## On a CPU" in page.read_text()
    assert (tmp_path / "docs" / "performance_files" / "curves-cpu.svg").exists()
    before = page.read_text()
    page.unlink()
    main(["bench", "--render", "--json", str(store), "--page", str(page)])
    assert page.read_text() == before


def test_starts_are_the_best_of_five(monkeypatch):
    """Law: each command is called five times, and the shortest time counts; what was measured before stays."""
    calls, clock = [], iter(range(1000))
    monkeypatch.setattr(measure.subprocess, "run", lambda words, **_: calls.append(words[-1]))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock) ** 2)
    found = measure.starts(lambda _: None, quick=False)
    assert calls == [words for words in measure.STARTS for _ in range(5)]
    assert [each["seconds"] for each in found] == [1, 21, 41]


def test_how_runs_grow_is_measured_in_processes_of_their_own(monkeypatch):
    """A point is a process, or torchrun's; one that fails is told by its last line and stops nobody."""
    few = (Point("fedavg", 20, cohort=3, rounds=2, tested=2), Point("fedavgg", 20))
    monkeypatch.setitem(scale.KINDS["cpu"], "many", few)
    notes: list[str] = []
    found = bench("cpu", only=["many"], note=notes.append)["scale"]["many"]
    assert notes == [f"  many: {told(each)}" for each in few]
    assert found[0]["clients"] == 20
    assert all(found[0][name] > 0 for name in ("start_s", "round_s", "evaluation_s", "memory_mb"))
    assert "unknown method 'fedavgg'" in found[1]["error"]


def test_what_grows_is_what_the_issue_of_scale_asks():
    """10^2 to 10^6 clients, 10 to 10^4 per round, 1, 2 and 4 ranks."""
    clients = {each.clients for each in scale.KINDS["cpu"]["many"]}
    assert clients == {10**power for power in range(2, 7)}
    for kinds in scale.KINDS.values():
        assert {each.cohort for each in kinds["large"] if each.part} == {10, 100, 1_000, 10_000}
    assert [each.ranks for each in scale.KINDS["cpu"]["ranks"]] == [1, 2, 4]
    on_gpu = scale.points("large", "cuda", quick=False)
    assert {(each.device, each.model, each.width, each.shape) for each in on_gpu} == {("cuda", "cnn", 64, (3, 32, 32))}
    assert {name.partition("+")[0] for name in methods.NAMES} <= {
        each.method for each in scale.points("methods", "cuda", quick=False)
    }


def test_a_large_cohort_of_small_images_is_measured():
    """The points of a GPU, narrow and on a CPU: parts, the padding of a batch, all seconds."""
    wide = scale.points("large", "cuda", quick=False)[0]
    point = replace(wide, device="cpu", clients=12, cohort=8, part=3, width=4, shape=(3, 8, 8), rounds=2, tested=2)
    found = scale.measured(point)
    assert found["round_s"] > 0
    assert found["first_s"] > 0
    assert "cuda_mb" not in found
    assert str(scale._source(replace(point, device="cuda")).x.dtype) == "uint8"


@pytest.mark.parametrize("kind", ["heads", "methods"])
def test_a_point_of_a_gpu_runs_on_a_cpu_when_it_is_narrow(kind):
    """The last method is of a hypernetwork, the first keeps a head: both take their rounds, and no more than asked."""
    wide = scale.points(kind, "cuda", quick=False)[-1]
    narrow = {"clients": 8, "cohort": 4, "rows": 20, "classes": 12, "width": 8, "rounds": 2, "tested": 2}
    shape = (3, 8, 8) if wide.model == "cnn" else wide.shape
    found = scale.measured(replace(wide, device="cpu", shape=shape, **narrow))
    assert found["round_s"] > 0
    assert "kernels_s" not in found


def test_beside_a_load_the_median_counts(monkeypatch):
    """Busy loops run while variants are measured, and end with them; what is no workload is refused beside them."""
    running = []

    def busy_now(*_: object) -> dict[str, Any]:
        running.append(len(measure._family(os.getpid())) - 1)
        return {"seconds": [3.0, 1.0, 2.0], "start_s": 1.0, "memory_mb": 1.0}

    monkeypatch.setattr(measure, "call", busy_now)
    chosen = measure.variants("cpu", {})[:2]
    found = measure.compared(TINY, "cpu", chosen, {"float32": 1e12}, lambda _: None, quick=True, load=2)
    before = len(measure._family(os.getpid())) - 1
    assert set(running) == {before + 2}
    assert found["load"] == 2
    assert {each["round_s"] for each in found["variants"]} == {2.0}
    with pytest.raises(
        UserError, match="beside a load only workloads are measured; name some with --only: cifar, tiny"
    ):
        bench("cpu", only=["tiny", "start"], load=2)
