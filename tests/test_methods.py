"""Every method by name: it runs, from its seed alone, alike on every backend, and goes on where it stopped."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import metavd
from cheap import cheap
from metavd import methods
from metavd.core import rng
from metavd.core.model import from_module, xavier
from metavd.core.types import ServerState
from metavd.data.formats import load
from metavd.engine.checkpoint import load_checkpoint, save_checkpoint, state_hash
from metavd.engine.evaluation import answers
from metavd.engine.machine import tuned
from metavd.engine.rounds import Silent
from metavd.engine.schedule.loop import loop
from metavd.engine.schedule.vmap import vmap
from metavd.errors import SpecError
from metavd.models.mlp import mlp
from metavd.runs.settings import Experiment
from metavd.runs.setup import Setup, prepare, start
from simulated import simulate

FIELDS = {
    "clients": 6, "unseen": 2, "cohort": 3, "rounds": 3, "width": 8, "dtype": "float64", "eval_every": 3,
    "test_share": 0.8,
}  # fmt: skip
"""All of digits, most of it to test on: some 45 training rows per client keep 32 methods quick."""
CHEAP = {"batch": 16, "server_share": 0.1, "drop_from": 1, "threshold": 0.2}
"""The threshold is low, so that +drop drops weights."""

BACKENDS = {"loop": loop, "vmap": vmap(3), "chunks of 2": vmap(2)}

VARIATIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fedavg+metavd", {"newcomer": "fit", "fit_steps": 2, "predict": "draws", "samples": 2}),
    ("maml+metavd", {"newcomer": "outputs", "clamp": "project", "spread_step": "lr", "draws_average": "loss"}),
    ("reptile+metavd", {"variant": "released"}),
    ("reptile+metavd", {"per": "input"}),
    ("maml+metavd", {"spread": "logalpha", "rate": 0.3, "kl": "elbo", "layers": "fc0,fc1"}),
    ("reptile+metavd+drop", {"variant": "released"}),
    ("reptile+metavd+drop", {"per": "input", "rate": 0.3}),
    ("reptile+ensemblevd", {"variant": "released"}),
    ("reptile+ensemblevd", {"spread_by": "hypernetwork"}),
    ("perfedavg+vd", {"spread_by": "hypernetwork", "clamp": "project"}),
    ("perfedavg+vd", {"variant": "released"}),
    ("perfedavg", {"product": "difference"}),
    ("maml", {"meta_batches": "independent", "adapt_steps": 3}),
    ("maml+snip", {"variant": "released"}),
    ("fedbe", {"variant": "released", "teacher_law": "dirichlet"}),
    ("pfedgp", {"extra_points": 2, "novel": "zero", "local_steps": 2}),
    ("pfedgp", {"limit": 20}),
    (
        "pfedgp",
        {
            "steps_on": "batches",
            "batch_rows": 16,
            "passes": 1,
            "momentum": 0.9,
            "lr": 0.01,
            "condition": "points",
            "extra_points": 2,
        },
    ),
)
"""Options that change what clients compute: these must agree between backends and resume too."""


@functools.cache
def digits() -> Any:
    return load("digits")


def setup_of(name: str, options: dict[str, Any] | None = None) -> Setup:
    chosen = cheap(name, **CHEAP) | (options or {})
    return prepare(Experiment(method=name, **FIELDS, options=chosen), digits())


def states(
    setup: Setup, state: ServerState | None = None, *, backend: str = "loop", rounds: int = 3
) -> list[ServerState]:
    """Return the state after each round."""
    first = state or start(setup)
    with tuned(0, "cpu"):
        steps = list(simulate(setup.algorithm, setup.pool, BACKENDS[backend], first, rounds=rounds, cohort=3))
    assert math.isfinite(steps[-1][1].loss)
    return [each for each, _ in steps]


class Reference(NamedTuple):
    """The uninterrupted run of the loop."""

    setup: Setup
    states: list[ServerState]
    probs: list[np.ndarray]


@functools.cache
def _reference(name: str, options: str) -> Reference:
    setup = setup_of(name, json.loads(options))
    found = states(setup)
    return Reference(setup, found, probabilities(setup, found[-1]))


def reference(name: str, options: dict[str, Any] | None = None) -> Reference:
    """Return the run of the loop, computed once for all tests."""
    return _reference(name, json.dumps(options or {}))


def probabilities(setup: Setup, state: ServerState, backend: str = "loop") -> list[np.ndarray]:
    """Return the answers of all clients, participating and unseen."""
    groups = (range(6), range(6, 8))
    with tuned(0, "cpu"):
        return [
            result.probs
            for clients in groups
            for result, _ in answers(setup.algorithm, setup.pool, state, clients, BACKENDS[backend].map)
        ]


def assert_agree(one: ServerState, two: ServerState) -> None:
    """Same names in the same order, and all numbers within 1e-10."""
    for part in ("params", "slots"):
        left, right = getattr(one, part), getattr(two, part)
        assert list(left) == list(right)
        for name in left:
            torch.testing.assert_close(
                left[name], right[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert int(one.round) == int(two.round)
    assert int(one.key) == int(two.key)


@pytest.fixture(scope="module", params=methods.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """A method: all laws of one before the next, so that its reference is computed once."""
    return str(request.param)


# --- the 3-round law of every method ---------------------------------------------------------------------------------


def test_finite_and_seeded(name: str) -> None:
    """Law: 3 rounds on digits are finite, and another seed gives another model, where clients share one.

    That the seed decides every bit, two runs show in `test_stopped_folder_resumes_to_the_same_result`.
    """
    setup, (first, *_, state), answered = reference(name)
    for value in (*state.params.values(), *state.slots.values()):
        assert torch.isfinite(value).all()
    for probs in answered:
        assert np.isfinite(probs).all()
        assert (probs >= 0).all()
        np.testing.assert_allclose(probs.sum(1), 1.0, atol=1e-9)
    (other,) = states(setup, setup.algorithm.server.init(rng.key(1)), rounds=1)
    assert (state_hash(other._replace(key=first.key)) != state_hash(first)) == bool(first.params)
    assert first.params or name == "local"


def test_backends_agree(name: str) -> None:
    """Parity: vmap == loop to 1e-10, the server's state and every client's probabilities.

    Of chunks `test_ragged_clients` says the same for every method.
    """
    check_backends(reference(name), "vmap")


@pytest.mark.parametrize(("name", "options"), VARIATIONS)
def test_backends_agree_under_options(name: str, options: dict[str, Any]) -> None:
    """Parity: the same for options that change what a client computes, in chunks of two clients and of one."""
    check_backends(reference(name, options), "chunks of 2")


def check_backends(wanted: Reference, backend: str) -> None:
    state = states(wanted.setup, backend=backend)[-1]
    assert_agree(state, wanted.states[-1])
    for mine, right in zip(probabilities(wanted.setup, state, backend), wanted.probs, strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("name", "options"), VARIATIONS)
def test_resumes_from_a_checkpoint(name: str, options: dict[str, Any], tmp_path: Any) -> None:
    """Law: stopped after round 2, stored and loaded into a fresh setup, a run ends with the same bits.

    With every method's defaults this is `test_stopped_folder_resumes_to_the_same_result`.
    """
    _, (_, second, straight), expected = reference(name, options)
    save_checkpoint(tmp_path, second, {"note": 1})
    found = load_checkpoint(tmp_path)
    assert found is not None
    again = setup_of(name, options)
    (resumed,) = states(again, found[0])
    assert state_hash(resumed) == state_hash(straight)
    for mine, wanted in zip(probabilities(again, resumed), expected, strict=True):
        assert np.array_equal(mine, wanted)


class Crash(Exception):  # noqa: N818
    """Power off."""


class CrashingAt(Silent):
    """Stops a run in the middle, as kill would: nothing of the run's own clean-up knows this exception."""

    def __init__(self, round: int) -> None:
        self.at = round

    def round(self, record: Any) -> None:
        if record.round == self.at:
            raise Crash


def test_stopped_folder_resumes_to_the_same_result(name: str, tmp_path: Any) -> None:
    """Law: a run that dies in round 3 and is resumed from its folder has the same result but for the seconds."""
    settings = {**FIELDS, "clients": 4, "unseen": 1, **cheap(name, **CHEAP), "method": name, "checkpoint_every": 1}
    straight = metavd.run(out=tmp_path / "straight", **settings)
    with pytest.raises(Crash):
        metavd.run(out=tmp_path / "broken", listener=CrashingAt(3), **settings)
    resumed = metavd.run(out=tmp_path / "broken", resume=True, **settings)
    assert resumed["model_sha256"] == straight["model_sha256"]
    assert resumed | {"seconds": 0} == straight | {"seconds": 0}
    for file in ("rounds.jsonl", "clients.csv"):
        assert (tmp_path / "broken" / file).read_bytes() == (tmp_path / "straight" / file).read_bytes()


@pytest.mark.parametrize("name", [name for name in methods.NAMES if name.endswith("+drop")])
def test_drop_drops_something_here(name: str) -> None:
    """The tests above are about +drop only if weights are dropped: its masks are neither all ones nor all zeros."""
    setup, (*_, state), _ = reference(name)
    received = setup.algorithm.emit.apply(state.params, torch.tensor(0), state.round)
    mask = received["fc1.mask"]
    assert 0 < float(mask.mean()) < 1


@pytest.mark.parametrize("name", ["fedavg+vd+drop", "reptile+ensemblevd+drop"])
def test_drop_goes_with_every_posterior(name: str) -> None:
    """Not listed, but possible: dropout rates are all that it needs."""
    assert name not in methods.NAMES
    setup = setup_of(name)
    state = states(setup)[-1]
    mask = setup.algorithm.emit.apply(state.params, torch.tensor(0), state.round)["fc1.mask"]
    assert 0 < float(mask.mean()) < 1


class Notes(Silent):
    """Remembers what a run says before its first round."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def round(self, record: Any) -> None:
        self.said.append(f"round {record.round}")

    def note(self, text: str) -> None:
        self.said.append(text)


def test_a_run_too_short_for_drop_says_so_before_its_first_round() -> None:
    """drop_from is not reached: one sentence with both numbers. Where it is reached, nothing is said."""
    settings = {**FIELDS, "method": "fedavg+metavd+drop", "hyper_width": 4, "threshold": 0.2}
    short, long = Notes(), Notes()
    metavd.run(listener=short, drop_from=3, **settings)
    metavd.run(listener=long, drop_from=2, **settings)
    sentence = "no weight is dropped in training: drop_from is 3 and the run has 3 rounds; set drop_from below 3"
    assert short.said == [sentence, "round 1", "round 2", "round 3"]
    assert long.said == ["round 1", "round 2", "round 3"]


def test_what_the_world_must_know_of_a_method() -> None:
    """Rows for the server, newcomers that fit, dropped weights: told by the options, whatever the method is called."""
    assert methods.traits("fedavg") == methods.traits("reptile+metavd") == (None, False, None, False)
    assert methods.traits("reptile+metavd", {"owned_decay": "dense"}).moves_all_rows
    assert methods.traits("fedbe", {"server_share": 0.1}).server_rows_share == 0.1
    assert methods.traits("fedbe", {"server_share": 0.0}).server_rows_share == 0.0
    assert methods.traits("maml+metavd", {"newcomer": "fit"}).admits_by_fitting
    assert methods.traits("maml+metavd+drop").drops_from == 150
    assert methods.traits("maml+vd+drop", {"drop_from": 7}).drops_from == 7


# --- grammar ---------------------------------------------------------------------------------------------------------


def test_names_are_listed() -> None:
    """Every base, fedavg+ft, each regulariser on its four bases, +drop on the +metavd family, and what rivals name."""
    bases = {"fedavg", "fedprox", "reptile", "maml", "perfedavg", "fedbe", "pfedgp"}
    rivals = {"local", "fedper", "fedrep", "fedbabu", "ditto", "pfedme", "scaffold", "fedala", "feddbe", "pfedfda",
              "pfedvem", "lrbpfl", "fedper+metavd", "fedper+dropout", "fedrep+dropout"}  # fmt: skip
    four = ("fedavg", "reptile", "maml", "perfedavg")
    parts = ("metavd", "vd", "ensemblevd", "dropout", "snip", "metavd+drop")
    regularised = {f"{base}+{part}" for base in four for part in parts}
    assert bases | rivals | {"fedavg+ft"} | regularised == set(methods.NAMES)
    assert len(set(methods.NAMES)) == len(methods.NAMES)


@pytest.mark.parametrize(
    ("name", "canonical"),
    [("FedAvg", "fedavg"), ("reptile+drop+metavd", "reptile+metavd+drop"), ("fedavg+ft+vd", "fedavg+vd+ft")],
)
def test_spelling_is_canonical(name: str, canonical: str) -> None:
    assert methods.check(name) == canonical


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fedavgg", ["'fedavgg'", "fedavg"]),
        ("reptyle+metavd", ["'reptyle+metavd'", "reptile+metavd"]),
        ("", ["''", "metavd methods"]),
        ("reptile+metvd", ["'metvd'", "metavd"]),
        ("reptile+", ["''", "metavd methods"]),
        ("reptile+vd+metavd", ["vd and metavd", "one at most"]),
        ("reptile+vd+vd", ["vd and vd"]),
        ("reptile+metavd+drop+drop", ["twice"]),
        ("fedbe+drop", ["'fedbe+drop'", "a posterior", "+metavd, +vd, +ensemblevd", "fedavg+metavd+drop"]),
        ("reptile+drop", ["a posterior", "+metavd"]),
        ("reptile+dropout+drop", ["a posterior", "+metavd"]),
        ("fedbe+dp", ["+dp", "the sum of the answers", "goes with fedavg, fedprox"]),
        ("scaffold+dp", ["+dp", "the sum of the answers"]),
        ("reptile+fedavg", ["unknown part 'fedavg'"]),
        ("metavd", ["unknown method 'metavd'"]),
        ("fedbe+metavd", ["fedavg, reptile, maml, perfedavg"]),
        ("pfedgp+vd", ["fedavg, reptile, maml, perfedavg"]),
        ("reptile+ft", ["+ft", "already have", "fedavg"]),
        ("maml+ft", ["+ft", "fedavg"]),
        ("fedbe+ft", ["+ft", "fedavg"]),
        ("pfedgp+ft", ["+ft", "fedavg"]),
    ],
)
def test_impossible_names_are_explained(name: str, says: list[str]) -> None:
    """A name that is no method says in one line what is wrong and what would be right."""
    with pytest.raises(SpecError) as error:
        methods.check(name)
    text = str(error.value)
    assert "\n" not in text
    for part in says:
        assert part in text


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", methods.NAMES)
def test_defaults_and_searched_values_are_allowed(name: str) -> None:
    """Each option's default, and each value that the paper searched, passes the option's own check unchanged."""
    for option in methods.options_of(name).values():
        for value in (option.default, *(option.search or ()), *(option.allowed or ()), *option.presets.values()):
            assert option.check(value) == value
            assert option.check(str(value)) == value, "as --set gives it"


@pytest.mark.parametrize("name", methods.NAMES)
def test_released_values_are_allowed(name: str) -> None:
    """variant=released changes options of the method to values that pass their checks, and only those."""
    known = methods.options_of(name)
    plain, released = methods.resolve(name), methods.resolve(name, {"variant": "released"})
    assert set(plain) == set(released) == set(known)
    for key, value in released.items():
        assert known[key].check(value) == value
        if "released" not in known[key].presets and key != "variant":
            assert value == plain[key]


def test_given_options_override_the_variant() -> None:
    chosen = methods.resolve("reptile+metavd", {"variant": "released", "samples": 7})
    assert (chosen["samples"], chosen["average"]) == (7, "logits")


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("fedavg", {"learning_rate": 1}, ["'learning_rate'", "'fedavg'", "did you mean lr?"]),
        ("fedavg", {"bacth": 3}, ["'bacth'", "batch"]),
        ("fedavg", {"beta": 3}, ["'beta'"]),
        ("reptile+metavd", {"bta": 3}, ["'bta'", "beta"]),
        ("fedavg", {"lr": -1}, ["lr is -1", "at least 0"]),
        ("fedavg", {"lr": "nan"}, ["lr is nan", "a finite number"]),
        ("fedavg", {"clip": "inf"}, ["clip is inf", "a finite number"]),
        ("fedavg", {"lr": "fast"}, ["lr is 'fast'", "a number"]),
        ("fedavg", {"batch": 0}, ["batch is 0", "at least 1"]),
        ("fedavg", {"batch": 2.5}, ["batch is 2.5", "a whole number"]),
        ("fedavg+snip", {"sparsity": 1.5}, ["sparsity is 1.5", "between 0 and 0.999"]),
        ("fedavg+metavd", {"per": "row"}, ["per is 'row'", "weight, input"]),
        ("fedavg+metavd", {"variant": "print"}, ["variant is 'print'", "default, paper, released"]),
        ("fedbe", {"server_share": 0.9}, ["server_share is 0.9", "between 0 and 0.5"]),
        ("fedavg+metavd+drop", {"threshold": -0.1}, ["threshold is -0.1", "between 0 and 1"]),
    ],
)
def test_wrong_options_are_explained(name: str, options: dict[str, Any], says: list[str]) -> None:
    """An unknown option names the nearest ones, a wrong value names what is allowed; one line each."""
    with pytest.raises(SpecError) as error:
        methods.resolve(name, options)
    text = str(error.value)
    assert "\n" not in text
    for part in says:
        assert part in text


@pytest.mark.parametrize("layers", ["fc9", "", " , "])
@pytest.mark.parametrize("name", ["fedavg+metavd", "fedavg+dropout", "fedavg+snip"])
def test_layers_are_named_or_refused(name: str, layers: str) -> None:
    """The option layers must name layers of the model; the message lists them."""
    model = from_module(mlp((1, 8, 8), 10), init=xavier)
    setting = methods.Setting(num_clients=2, num_classes=10, rounds=1)
    with pytest.raises(SpecError, match="fc0, fc1, fc2"):
        methods.algorithm(name, model, setting, {"layers": layers})


@pytest.mark.parametrize("name", methods.NAMES)
def test_describe(name: str) -> None:
    """A description has a text, a paper, and options with a default, a meaning and the paper's search space."""
    about = methods.describe(name)
    assert json.loads(json.dumps(about))["name"] == name
    assert about["text"].strip()
    assert about["paper"].strip()
    options = {option["name"]: option for option in about["options"]}
    assert set(options) == set(methods.options_of(name))
    for option in options.values():
        assert option["help"].strip()
        assert "default" in option
    searched = {key for key, option in options.items() if option.get("search")}
    expected = {"lr"}
    if name.startswith(("reptile", "maml", "perfedavg")):
        expected.add("server_lr")
    if name.startswith(("maml", "perfedavg")):
        expected.add("outer_lr")
    if set(name.split("+")) & {"metavd", "vd", "ensemblevd"}:
        expected.add("beta")
    assert expected <= searched


@pytest.mark.parametrize("name", methods.NAMES)
def test_no_option_has_the_name_of_a_setting(name: str) -> None:
    """--set KEY=VALUE and config.toml name settings and options alike, so no name may mean two things."""
    assert not {field.name for field in fields(Experiment)} & set(methods.options_of(name))
