"""One experiment from its description to its result: what is told, stored, resumed, refused."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import metavd
from metavd.container import load
from metavd.core.types import NonFiniteError
from metavd.data.partition import PartitionError
from metavd.data.source import Source, arrays
from metavd.engine.checkpoint import CHECKPOINT, load_checkpoint, state_hash
from metavd.engine.rounds import InterruptedRun, Silent
from metavd.errors import SpecError
from metavd.models import module_for
from metavd.runs.evaluation import evaluate
from metavd.runs.run import run
from metavd.runs.settings import Experiment
from metavd.runs.setup import prepare, start
from metavd.runs.store import StoreError

TINY = {"clients": 4, "unseen": 2, "cohort": 2, "rounds": 3, "width": 8, "test_share": 0.9, "method": "fedavg"}


class Told(Silent):
    """Writes down what it is told, and raises what it is asked to."""

    def __init__(self, error: BaseException | None = None, at: int = 0) -> None:
        self.error, self.at = error, at
        self.started: list[int] = []
        self.rounds: list[int] = []
        self.evaluations: list[int] = []
        self.notes: list[str] = []

    def start(self, experiment: Experiment, done: int) -> None:
        assert experiment.cohort > 0, "what is told is resolved"
        self.started.append(done)

    def round(self, record: Any) -> None:
        self.rounds.append(record.round)
        if self.error is not None and record.round == self.at:
            raise self.error

    def evaluation(self, round: int, summary: Mapping[str, Any]) -> None:
        assert {"test", "unseen", "gap", "sparsity", "diagnostics"} <= set(summary)
        self.evaluations.append(round)

    def note(self, text: str) -> None:
        self.notes.append(text)


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one | {"seconds": 0} == two | {"seconds": 0}


# --- result ----------------------------------------------------------------------------------------------------------


def test_nothing_is_written_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(**TINY)
    assert list(tmp_path.iterdir()) == []
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert same(run(out=tmp_path / "run", **TINY), result)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["model_sha256"] == result["model_sha256"]


def test_listener_is_told_everything() -> None:
    """A start, every round, an evaluation every `eval_every` rounds and one at the end."""
    told = Told()
    run(listener=told, eval_every=2, **TINY | {"rounds": 5})
    assert (told.started, told.rounds, told.evaluations) == ([0], [1, 2, 3, 4, 5], [2, 4, 5])


def test_traffic_is_summed_over_rounds(tmp_path: Path) -> None:
    result = run(out=tmp_path / "run", **TINY)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert result["bytes"] == {key: sum(line[key] for line in lines) for key in result["bytes"]}


def test_sparsity_is_measured() -> None:
    """SNIP at 0.7 on one of three layers: about 0.7 of the layer, less of the whole model."""
    result = run(**TINY | {"method": "fedavg+snip"})
    assert result["sparsity"]["layer"] == pytest.approx(0.7, abs=0.05)
    assert 0 < result["sparsity"]["model"] < result["sparsity"]["layer"]
    assert result["bytes"]["up"] < result["bytes"]["dense_up"]
    assert run(**TINY)["sparsity"] == {"layer": 0.0, "model": 0.0}


def test_no_unseen_clients_and_no_test_rows() -> None:
    """Where there is nobody to test, figures are None, never NaN or an error."""
    result = run(**TINY | {"unseen": 0})
    assert result["unseen"]["accuracy"] is None
    assert result["gap"] is None
    assert result["unseen"]["clients"] == 0
    nothing = run(**TINY | {"test_share": 0.0, "clients": 20, "rounds": 1})
    assert nothing["test"]["accuracy"] is None
    assert nothing["test"]["samples"] == 0
    json.dumps(nothing, allow_nan=False)


def test_validation_rows_can_be_evaluated() -> None:
    setup = prepare(Experiment(**TINY | {"valid": 0.5, "test_share": 0.2}))
    found = evaluate(setup, start(setup), split="valid").summary
    assert found["test"]["samples"] == sum(len(rows) for rows in setup.pool.federation.valid[:4]) > 0
    assert found["unseen"]["samples"] == 0, "nothing may be chosen by looking at unseen clients"
    result = run(**TINY | {"valid": 0.5, "test_share": 0.2})
    assert result["valid"]["samples"] == found["test"]["samples"]
    assert "valid" not in run(**TINY)


def test_experiment_and_settings_together() -> None:
    """An `Experiment` may be given, and changed by name."""
    experiment = Experiment(**TINY)
    result = run(experiment, seed=4, lr=0.05)
    assert result["seed"] == 4
    assert experiment.seed == 0
    assert result["model_sha256"] == run(**TINY, seed=4, lr=0.05)["model_sha256"]


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_float64_and_backends_by_name(backend: str) -> None:
    result = run(**TINY, dtype="float64", backend=backend)
    assert result["backend"] == backend
    assert 0 <= result["test"]["accuracy"] <= 1


# --- stop and go on --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_crash_and_resume(tmp_path: Path, at: int, every: int) -> None:
    """Law: whatever the last checkpoint was, a resumed run leaves the same bytes."""
    settings = TINY | {"checkpoint_every": every}
    wanted = run(out=tmp_path / "whole", **settings)
    with pytest.raises(ZeroDivisionError):
        run(out=tmp_path / "run", listener=Told(ZeroDivisionError(), at), **settings)
    assert not (tmp_path / "run" / "result.json").exists()
    told = Told()
    assert same(run(out=tmp_path / "run", resume=True, listener=told, **settings), wanted)
    assert told.started == [(at - 1) // every * every]
    for name in ("rounds.jsonl", "clients.csv", "config.toml"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_checkpoint_names_its_run(tmp_path: Path) -> None:
    """Its spec, its seed and its round stand beside the state."""
    result = run(out=tmp_path / "run", **TINY | {"seed": 5})
    _, words = load(CHECKPOINT, (tmp_path / "run" / "checkpoint" / "round-000003.safetensors").read_bytes())
    assert {name: words[name] for name in ("spec", "seed", "round")} == {
        "spec": result["spec"],
        "seed": "5",
        "round": "3",
    }


def test_interrupt_saves_the_last_round(tmp_path: Path) -> None:
    """Ctrl-C: the state of the last whole round is stored, whatever the interval; the text says how to go on."""
    settings = TINY | {"rounds": 9, "checkpoint_every": 9}
    with pytest.raises(InterruptedRun, match=r"after round 2; .*run.*--resume"):
        run(out=tmp_path / "run", listener=Told(KeyboardInterrupt(), 3), **settings)
    assert (tmp_path / "run" / "checkpoint" / "round-000002.safetensors").exists()
    told = Told()
    assert same(run(out=tmp_path / "run", resume=True, listener=told, **settings), run(**settings))
    assert told.started == [2]


def test_interrupt_without_a_folder() -> None:
    with pytest.raises(InterruptedRun, match=r"stopped after round 1$"):
        run(listener=Told(KeyboardInterrupt(), 2), **TINY)


def test_interrupt_right_after_resuming(tmp_path: Path) -> None:
    """Interrupted again before another round is over: nothing is lost, and the text says where the run stands."""
    settings = TINY | {"rounds": 9, "checkpoint_every": 9}
    with pytest.raises(InterruptedRun, match="after round 2"):
        run(out=tmp_path / "run", listener=Told(KeyboardInterrupt(), 3), **settings)
    with pytest.raises(InterruptedRun, match="after round 2"):
        run(out=tmp_path / "run", resume=True, listener=Told(KeyboardInterrupt(), 3), **settings)


def test_nan_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    settings = TINY | {"rounds": 9, "checkpoint_every": 9, "eval_every": 9, "local_epochs": 1}
    settings |= {"server_lr": 1e8, "server_clip": 1e30, "clip": 1e30}
    with pytest.raises(NonFiniteError, match=r"round 3: client \d made \S+ NaN .*checkpoint of round 2 is kept"):
        run(out=tmp_path / "run", **settings)
    assert (tmp_path / "run" / "checkpoint" / "round-000002.safetensors").exists()
    with pytest.raises(NonFiniteError, match=r"^round 3: client \d made \S+ NaN[^;]*;[^;]*$"):
        run(**settings)


def test_finished_run_is_read(tmp_path: Path) -> None:
    """A second call with the same settings computes nothing, with `resume` or without."""
    first = run(out=tmp_path / "run", **TINY)
    for resume in (False, True):
        told = Told()
        assert run(out=tmp_path / "run", resume=resume, listener=told, **TINY) == first
        assert (told.started, told.rounds) == ([], [])
        assert len(told.notes) == 1
        assert "finished" in told.notes[0]


def test_how_a_run_is_carried_out_may_change_on_resuming(tmp_path: Path) -> None:
    """Intervals and backend are no part of what is computed: a run may go on with others."""
    with pytest.raises(ZeroDivisionError):
        run(out=tmp_path / "run", listener=Told(ZeroDivisionError(), 3), checkpoint_every=1, **TINY)
    wanted = run(**TINY)
    found = run(out=tmp_path / "run", resume=True, checkpoint_every=3, eval_every=1, **TINY)
    assert found["model_sha256"] == wanted["model_sha256"]


def test_other_runs_and_unfinished_runs_are_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run(out=tmp_path / "run", listener=Told(ZeroDivisionError(), 3), **TINY)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(StoreError, match="unfinished"):
        run(out=tmp_path / "run", **TINY)
    for resume in (False, True):
        with pytest.raises(StoreError, match="another run"):
            run(out=tmp_path / "run", resume=resume, **TINY | {"seed": 1})
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_result_without_a_configuration_is_no_run(tmp_path: Path) -> None:
    """A result.json alone says nothing of how it was made: the folder is a stranger's, not this run's."""
    run(out=tmp_path / "run", **TINY)
    (tmp_path / "run" / "config.toml").unlink()
    for resume in (False, True):
        with pytest.raises(StoreError, match="holds no run"):
            run(out=tmp_path / "run", resume=resume, **TINY | {"seed": 1})


# --- own data and own networks ---------------------------------------------------------------------------------------


def own(seed: int = 0) -> Source:
    generator = np.random.RandomState(seed)
    return arrays(generator.randn(200, 5), np.arange(200) % 3, name="mine")


OWN = {"clients": 4, "unseen": 1, "cohort": 2, "rounds": 2, "method": "fedavg"}


def test_own_source(tmp_path: Path) -> None:
    """Own arrays are named in the result; their run can be stored, read and resumed like any other."""
    result = run(source=own(), out=tmp_path / "run", **OWN)
    assert result["data"] == "mine"
    assert run(source=own(), out=tmp_path / "run", **OWN) == result


@pytest.mark.parametrize("resume", [False, True])
def test_other_data_of_the_same_name_is_another_run(tmp_path: Path, resume: bool) -> None:
    """A folder holds what was computed from certain rows: with others it is refused, not answered from the past."""
    run(source=own(0), out=tmp_path / "run", **OWN)
    with pytest.raises(StoreError, match="another run"):
        run(source=own(1), out=tmp_path / "run", resume=resume, **OWN)


@pytest.mark.parametrize("resume", [False, True])
def test_other_module_is_another_run(tmp_path: Path, resume: bool) -> None:
    run(source=own(), module=nn.Linear(5, 3), out=tmp_path / "run", **OWN)
    other = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    with pytest.raises(StoreError, match="another run"):
        run(source=own(), module=other, out=tmp_path / "run", resume=resume, **OWN)


def test_own_module_starts_from_its_own_weights() -> None:
    """Pre-trained weights are kept: at learning rate 0 the model stays the module."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    setup = prepare(Experiment(**OWN), own(), module)
    state = start(setup)
    assert all(torch.equal(state.params[name], value) for name, value in module.named_parameters())
    assert state_hash(state) == state_hash(start(prepare(Experiment(**OWN), own(), metavd.from_module(module))))


def test_own_module_is_left_as_it_is() -> None:
    """A run trains a copy: the user's module keeps its weights and its class."""
    module = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    run(source=own(), module=module, **OWN)
    assert list(module.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert type(module[0]) is nn.Linear


def test_own_module_keeps_its_type() -> None:
    module = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    run(source=own(), module=module, dtype="float64", **OWN)
    assert module[0].weight.dtype == torch.float32


def test_model_of_another_type_is_converted_or_refused() -> None:
    """What `from_module` made in float32 runs in float64 too, or is refused in one sentence."""
    model = metavd.from_module(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)))
    try:
        run(source=own(), module=model, dtype="float64", **OWN)
    except SpecError as error:
        assert "float64" in str(error)  # noqa: PT017


# --- networks and wrong input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "layers"),
    [
        ("auto", (4,), ["fc0", "fc1", "fc2"]),
        ("auto", (1, 7, 9), ["fc0", "fc1", "fc2"]),
        ("auto", (1, 8, 8), ["conv1", "conv2", "fc0", "fc1", "fc2"]),
        ("auto", (3, 32, 32), ["conv1", "conv2", "conv3", "fc0", "fc1", "fc2"]),
        ("mlp", (3, 32, 32), ["fc0", "fc1", "fc2"]),
        ("small-cnn", (3, 32, 32), ["conv1", "conv2", "fc0", "fc1", "fc2"]),
    ],
)
def test_networks_by_name(name: str, shape: tuple[int, ...], layers: list[str]) -> None:
    module = module_for(name, shape, 7, 8)
    assert list(metavd.from_module(module).layers) == layers
    assert module(torch.zeros(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(("name", "shape"), [("cnn", (4,)), ("small-cnn", (1, 4, 4)), ("cnn", (3, 7, 32))])
def test_networks_that_do_not_fit(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match="use mlp"):
        module_for(name, shape, 7, 8)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"method": "nope"}, SpecError),
        ({"nope": 1}, SpecError),
        ({"cohort": 9}, SpecError),
        ({"partition": "nope"}, PartitionError),
        ({"clients": 2000, "cohort": 2}, PartitionError),
        ({"method": "fedavg+vd", "layers": "nope"}, SpecError),
        ({"method": "fedbe", "server_share": 0}, SpecError),
        ({"model": "cnn", "data": "digits", "width": -1}, SpecError),
    ],
)
def test_wrong_input_is_found_before_anything_is_written(
    tmp_path: Path, settings: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        run(out=tmp_path / "run", **TINY | settings)
    assert list(tmp_path.iterdir()) == []


def test_seconds_add_up_over_interruptions(tmp_path: Path) -> None:
    with pytest.raises(InterruptedRun):
        run(out=tmp_path / "run", listener=Told(KeyboardInterrupt(), 3), **TINY)
    before = load_checkpoint(tmp_path / "run" / "checkpoint")[1]["seconds"]  # type: ignore[index]
    assert math.isfinite(before)
    assert run(out=tmp_path / "run", resume=True, **TINY)["seconds"] >= round(before, 3) > 0


# --- data, domains, participation ------------------------------------------------------------------------------------


def pictures(name: str, side: int, channels: int, classes: int, people: int | None = None) -> Source:
    """Grey or coloured squares whose brightness is the label."""
    y = np.arange(120) % classes
    noise = np.random.RandomState(len(name)).randint(0, 20, (120, channels, side, side))
    client = None if people is None else np.arange(120) // classes % people
    return arrays((noise + 60 * y[:, None, None, None]).astype(np.uint8), y, client=client, name=name)


@pytest.mark.parametrize("domains", ["mixed", "separate"])
def test_several_datasets_train_together_and_are_reported_apart(domains: str, tmp_path: Path) -> None:
    """Accuracy by domain is always in the result; it adds up to the pooled accuracy of the whole."""
    sources = [pictures("faces", 8, 3, 2, people=10), pictures("letters", 12, 1, 3)]
    settings = {"clients": 6, "unseen": 2, "cohort": 4, "rounds": 3, "width": 8, "domains": domains, "partition": "iid"}
    result = run(source=sources, out=tmp_path / "run", method="reptile+metavd", **settings)
    assert result["data"] == "faces+letters"
    assert set(result["domains"]) == {"faces", "letters"}
    assert all(0 <= each[part] <= 1 for each in result["domains"].values() for part in ("test", "unseen"))
    assert same(run(source=sources, out=tmp_path / "run", method="reptile+metavd", **settings), result)
    with pytest.raises(StoreError, match=r"data is faces\+letters there and letters\+faces here"):
        run(source=sources[::-1], out=tmp_path / "run", method="reptile+metavd", **settings)


def test_shares_become_counts(tmp_path: Path) -> None:
    """unseen=0.2 with 8 participating clients is 2 of 10; cohort=0.5 is 4 of 8; config.toml holds the counts."""
    run(out=tmp_path, **TINY | {"clients": 8, "unseen": 0.2, "cohort": 0.5, "rounds": 1})
    text = (tmp_path / "config.toml").read_text()
    assert "\nunseen = 2\n" in text
    assert "\ncohort = 4\n" in text


def test_clients_that_are_away_or_lost(tmp_path: Path) -> None:
    """Law: a probability of 1 to be there is no change; lost clients cost traffic down and none up, and are named."""
    settings = TINY | {"clients": 6, "cohort": 3, "rounds": 8}
    plain = run(**settings)
    assert run(**settings, available="1.0", lost="0.0")["model_sha256"] == plain["model_sha256"]
    result = run(out=tmp_path / "run", **settings, available="0.3..0.9", lost="0.4")
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(1, 9))
    lost = sum(len(line["lost"]) for line in lines)
    asked = lost + sum(len(line["cohort"]) for line in lines)
    assert 0 < lost < asked < 24
    one = plain["bytes"]["down"] // 24
    assert result["bytes"] == {"down": asked * one, "up": (asked - lost) * one, "dense_down": asked * one,
                               "dense_up": (asked - lost) * one}  # fmt: skip
    assert all(not set(line["lost"]) & set(line["cohort"]) for line in lines)


def test_a_round_without_answers_changes_nothing(tmp_path: Path) -> None:
    """Law: where every answer is lost the model is the first one, rounds are counted, and resuming gives the same."""
    settings = TINY | {"lost": "1"}
    result = run(out=tmp_path / "lost", **settings)
    assert result["test"]["accuracy"] is not None
    lines = [json.loads(line) for line in (tmp_path / "lost" / "rounds.jsonl").read_text().splitlines()]
    assert [(line["cohort"], line["loss"], line["up"]) for line in lines] == [([], None, 0)] * 3
    first = start(prepare(Experiment(**settings)))
    assert all(
        torch.equal(value, first.params[name])
        for name, value in load_checkpoint(tmp_path / "lost" / "checkpoint")[0].params.items()  # type: ignore[index]
    )
    nobody = run(**TINY | {"available": "0"})
    assert (nobody["bytes"]["down"], nobody["bytes"]["up"]) == (0, 0)


def test_participation_survives_a_crash(tmp_path: Path) -> None:
    """Law: who is there and who is lost depends on the seed and the round alone, so a resumed run has the same bits."""
    settings = TINY | {"rounds": 6, "available": "0.5..1", "lost": "0.3", "cohort": 3, "checkpoint_every": 2}
    whole = run(**settings)
    with pytest.raises(InterruptedRun):
        run(out=tmp_path / "run", listener=Told(KeyboardInterrupt(), at=4), **settings)
    assert same(run(out=tmp_path / "run", resume=True, **settings), whole)


# --- early stopping --------------------------------------------------------------------------------------------------

STOPPING = TINY | {"valid": 0.4, "test_share": 0.3, "rounds": 40, "eval_every": 2, "lr": 0.3, "patience": 3}
"""A rate at which validation soon gets worse."""


def test_patience_stops_and_tests_the_best_state(tmp_path: Path) -> None:
    """Closed form: the state with the smallest validation NLL is tested, three evaluations before training ends.

    The model is the one that a run of just so many rounds gives.
    """
    told = Told()
    result = run(out=tmp_path / "run", listener=told, **STOPPING)
    seen = {line["round"]: line["valid"]["nll"]
            for line in map(json.loads, (tmp_path / "run" / "rounds.jsonl").read_text().splitlines())
            if "valid" in line}  # fmt: skip
    best = min(seen, key=seen.__getitem__)
    assert result["tested_round"] == best
    assert result["trained_rounds"] == best + 2 * 3 < 40
    assert result["valid"]["nll"] == pytest.approx(seen[best], rel=1e-12)
    state, _ = load_checkpoint(tmp_path / "run" / "best", round=best)  # type: ignore[misc]
    assert state_hash(state) == result["model_sha256"]
    assert any(f"round {best}" in note for note in told.notes)
    plain = {key: value for key, value in STOPPING.items() if key != "patience"}
    assert run(**plain | {"rounds": best})["model_sha256"] == result["model_sha256"]


@functools.cache
def undisturbed() -> Mapping[str, Any]:
    """Return the result of the run that stops early, and by itself."""
    return MappingProxyType(run(**STOPPING))


@pytest.mark.parametrize("at", [1, 5, 8])
def test_patience_survives_a_crash(at: int, tmp_path: Path) -> None:
    """Law: stopped by hand at any round and resumed, the run stops at the same round with the same bits."""
    with pytest.raises(InterruptedRun):
        run(out=tmp_path / "run", listener=Told(KeyboardInterrupt(), at=at), checkpoint_every=3, **STOPPING)
    resumed = run(out=tmp_path / "run", resume=True, checkpoint_every=3, **STOPPING)
    assert same(resumed, dict(undisturbed()))


def test_patience_needs_validation_rows() -> None:
    with pytest.raises(SpecError, match="no validation rows to watch"):
        run(**TINY | {"patience": 2})
    with pytest.raises(SpecError, match="leaves no client a validation row"):
        run(**TINY | {"patience": 2, "valid": 0.01})
