"""The description of a run: checked, complete, the same after a trip through TOML, and named by what it computes."""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from metavd import methods
from metavd.data.collection import collect
from metavd.data.formats import FORMATS
from metavd.data.source import arrays
from metavd.errors import SpecError
from metavd.runs.settings import (
    RUNTIME,
    SETTINGS,
    Experiment,
    content,
    from_toml,
    resolve,
    spec_hash,
    to_toml,
    with_settings,
)
from metavd.schema import nearest

TINY = {"clients": 4, "unseen": 2, "cohort": 2, "rounds": 3}


def read_back(text: str, folder: Path) -> Experiment:
    path = folder / "config.toml"
    path.write_text(text)
    return with_settings(Experiment(), from_toml(path))


@pytest.mark.parametrize("name", methods.NAMES)
def test_toml_round_trip(name: str, tmp_path: Path) -> None:
    """Law: what is resolved, written and read back is the same experiment, resolved, and has the same hash."""
    resolved = resolve(Experiment(method=name, seed=7, **TINY))
    again = read_back(to_toml(resolved), tmp_path)
    assert content(again) == content(resolved)
    assert resolve(again) == resolved
    assert to_toml(resolve(again)) == to_toml(resolved)
    assert spec_hash(resolve(again)) == spec_hash(resolved)


@pytest.mark.parametrize("value", [1e-12, 1e300, 0.1, 1 / 3, 1e15, 123456789012345680.0, 5e-324, 2.0, 100.0, 1e22])
def test_numbers_survive_toml(value: float, tmp_path: Path) -> None:
    """Law: a float keeps every bit and stays a float."""
    resolved = resolve(Experiment(method="fedavg", options={"clip": value}))
    written = tomllib.loads(to_toml(resolved))["options"]["clip"]
    assert isinstance(written, float)
    assert written == value
    assert resolve(read_back(to_toml(resolved), tmp_path)) == resolved


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "ümlaut", "tab\there", "new\nline", "a.b=c#d"])
def test_names_survive_toml(name: str, tmp_path: Path) -> None:
    """The name of one's own data may be any text."""
    source = arrays(np.zeros((4, 2)) + np.arange(4)[:, None], [0, 1, 0, 1], name=name)
    suits = collect(source).defaults
    resolved = resolve(Experiment(data=name, **TINY), suits)
    assert resolve(read_back(to_toml(resolved), tmp_path), suits) == resolved


def test_every_field_is_explained() -> None:
    assert set(SETTINGS) == {field.name for field in fields(Experiment)} - {"options"}
    assert all(setting.help for setting in SETTINGS.values())


def test_what_decides_no_number() -> None:
    """The settings that do not enter the hash, from the fields themselves."""
    assert set(RUNTIME) == {
        "root",
        "device",
        "part",
        "precision",
        "backend",
        "chunk",
        "eval_every",
        "eval_clients",
        "checkpoint_every",
        "rank_wait",
        "weights",
    }


@pytest.mark.parametrize(
    ("method", "plain", "released"),
    [
        ("fedavg", "e3aaf2f12f23", "5a580eb7afa2"),
        ("maml+snip", "93933279bae5", "327c0961bb46"),
        ("pfedgp", "882219e83d0f", "f2e68074b96e"),
    ],
)
def test_hashes_of_stored_runs_stay(method: str, plain: str, released: str) -> None:
    """Golden, by `spec_hash` at commit 5d63884: a stored run is found again under the name that it had."""
    assert spec_hash(resolve(Experiment(method=method))) == plain
    given = {"variant": "released", "clients": 10, "cohort": 0.5, "unseen": 0.2}
    assert spec_hash(resolve(with_settings(Experiment(), {"method": method, **given, "lr": "0.03"}))) == released


def test_what_came_later_renames_no_stored_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a setting or option that came later enters the hash only where it is not at its default."""
    from metavd.runs import settings as module

    base = resolve(Experiment(method="fedavg"))
    added = {name for name, setting in SETTINGS.items() if setting.later} | {"test_share"}
    without = {key: value for key, value in content(base).items() if key not in RUNTIME | added}
    later_options = {name for name, option in methods.options_of("fedavg").items() if option.later} | {"clip"}
    without["options"] = {key: value for key, value in base.options.items() if key not in later_options}
    wanted = hashlib.sha256(json.dumps(without, sort_keys=True).encode()).hexdigest()[:12]
    known = methods.options_of("fedavg")
    later = {**SETTINGS, "test_share": replace(SETTINGS["test_share"], later=True)}
    monkeypatch.setattr(module, "SETTINGS", later)
    monkeypatch.setattr(methods, "options_of", lambda _: {**known, "clip": replace(known["clip"], later=True)})
    assert spec_hash(base) == wanted
    assert spec_hash(replace(base, test_share=0.3)) != wanted
    assert spec_hash(replace(base, options={**base.options, "clip": 6.0})) != wanted


def test_a_setting_that_came_later_names_another_run_where_it_is_used() -> None:
    """Law: what goes without saying at its default is not left out at another value, of no field and no option."""
    base = resolve(Experiment(method="fedavg", **TINY))
    given = {
        "aggregate": "median", "max_share": 2.0, "attack": "sign-flip:0.5", "valid_rows": "uniform",
        "valid_clients": 1, "final_clients": 2, "weights_content": "0" * 12,
    }  # fmt: skip
    assert set(given) == {name for name, setting in SETTINGS.items() if setting.later} - RUNTIME
    options = {
        name: {**base.options, name: next(value for value in (*(each.allowed or ()), 0.5, 2) if value != each.default)}
        for name, each in methods.options_of("fedavg").items() if each.later
    }  # fmt: skip
    assert options
    others = [replace(base, **{name: value}) for name, value in given.items()]
    others += [replace(base, options=each) for each in options.values()]
    assert len({spec_hash(each) for each in (base, *others)}) == 1 + len(others)


def test_choices_are_the_modules_own() -> None:
    """Words that are only known where they are used: every one is taken."""
    from metavd.data.partition import TEST_ROWS
    from metavd.models import names
    from metavd.ops.precision import PRECISIONS

    for setting, words in (
        ("test_rows", TEST_ROWS),
        ("precision", ("auto", *PRECISIONS)),
        ("model", ("auto", *names())),
    ):
        for word in words:
            assert getattr(with_settings(Experiment(), {setting: word}), setting) == word


def test_defaults_of_digits() -> None:
    """The issue's newcomer run: reptile+metavd, Dirichlet 0.5, 24 participating and 6 unseen clients."""
    e = resolve(Experiment())
    assert (e.method, e.data, e.partition, e.clients, e.unseen) == ("reptile+metavd", "digits", "dirichlet:0.5", 24, 6)
    assert set(e.options) == set(methods.options_of("reptile+metavd"))
    assert e.options["batch"] == FORMATS["digits"].defaults["batch"]
    assert e.device in {"cpu", "cuda"}
    assert e.backend == ("auto" if e.device == "cpu" else "vmap"), "on a CPU the network decides"
    assert min(e.eval_every, e.checkpoint_every) > 0
    assert e.chunk == 0, "as many clients at once as the memory holds"


def test_own_settings_win_over_the_dataset_s() -> None:
    e = resolve(with_settings(Experiment(), {"method": "fedavg", "clients": 9, "unseen": 0, "cohort": 9, "batch": 5}))
    assert (e.clients, e.unseen, e.cohort, e.options["batch"]) == (9, 0, 9, 5)


def test_resolve_is_idempotent() -> None:
    once = resolve(Experiment(method="maml+vd", options={"variant": "released", "samples": 4}))
    assert resolve(once) == once
    assert (once.options["samples"], once.options["average"]) == (4, "logits")


def test_hash_names_what_is_computed() -> None:
    """Law: how a run is carried out does not change its hash; anything else does."""
    base = Experiment(method="fedavg", **TINY)
    same = [
        replace(base, backend="vmap"), replace(base, chunk=1), replace(base, device="cpu"),
        replace(base, eval_every=3), replace(base, checkpoint_every=2), replace(base, options={"lr": 0.02}),
    ]  # fmt: skip
    other = [
        replace(base, method="fedprox"), replace(base, partition="iid"), replace(base, test_rows="uniform"),
        replace(base, clients=5), replace(base, unseen=1), replace(base, cohort=1), replace(base, rounds=4),
        replace(base, seed=1), replace(base, valid=0.1), replace(base, test_share=0.3), replace(base, width=9),
        replace(base, model="small-cnn"), replace(base, dtype="float64"), replace(base, options={"lr": 0.03}),
    ]  # fmt: skip
    wanted = spec_hash(resolve(base))
    assert {spec_hash(resolve(each)) for each in same} == {wanted}
    hashes = {spec_hash(resolve(each)) for each in other}
    assert wanted not in hashes
    assert len(hashes) == len(other)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"chort": 3}, ["'chort'", "cohort"]),
        ({"lrr": 3}, ["'lrr'", "lr"]),
        ({"zzzzzz": 3}, ["'zzzzzz'", "choose from", "cohort"]),
        ({"options": {}}, ["'options'"]),
        ({"rounds": "many"}, ["rounds is 'many'", "a whole number"]),
        ({"rounds": 2.5}, ["rounds is 2.5", "a whole number"]),
        ({"rounds": True}, ["rounds is True", "a whole number"]),
        ({"rounds": None}, ["rounds is None", "a whole number"]),
        ({"rounds": float("inf")}, ["rounds is inf", "a whole number"]),
        ({"rounds": float("nan")}, ["rounds is nan", "a whole number"]),
        ({"rounds": 0}, ["rounds is 0", "between 1 and"]),
        ({"cohort": -2}, ["cohort is -2", "between 1 and"]),
        ({"cohort": 0}, ["cohort is 0", "between 1 and"]),
        ({"unseen": -1}, ["unseen is -1", "between 0 and"]),
        ({"seed": 2**32}, [f"seed is {2**32}", "between 0 and"]),
        ({"valid": 0.95}, ["valid is 0.95", "and 0.9"]),
        ({"valid": float("nan")}, ["valid is nan", "a finite number"]),
        ({"learning_rate": 0.1}, ["no setting 'learning_rate'", "did you mean lr?"]),
        ({"n_clients": 3}, ["no setting 'n_clients'", "did you mean clients?"]),
        ({"test_share": "half"}, ["test_share is 'half'", "a number"]),
        ({"width": 5000}, ["width is 5000", "and 4096"]),
        ({"model": "cnm"}, ["'cnm'", "cnn"]),
        ({"backend": "loops"}, ["'loops'", "loop"]),
        ({"dtype": "float16"}, ["'float16'", "float32"]),
        ({"test_rows": "consistant"}, ["'consistant'", "consistent"]),
    ],
)  # fmt: skip
def test_wrong_settings_are_explained(settings: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(SpecError) as error:
        with_settings(Experiment(method="fedavg"), settings)
    text = str(error.value)
    assert "\n" not in text
    for part in says:
        assert part in text


@pytest.mark.parametrize(
    ("experiment", "says"),
    [
        (Experiment(cohort=25), ["cohort is 25", "24 clients"]),
        (Experiment(clients=3, cohort=4), ["cohort is 4", "3 clients"]),
        (Experiment(device="tpu"), ["'tpu'", "auto, cpu or cuda"]),
        (Experiment(device="meta"), ["'meta'", "auto, cpu or cuda"]),
        (Experiment(rounds=-5), ["rounds is -5"]),
        (Experiment(backend="both"), ["'both'"]),
        (Experiment(valid=5.0), ["valid is 5.0"]),
    ],
)
def test_impossible_experiments_are_explained(experiment: Experiment, says: list[str]) -> None:
    """Also fields that were set in Python, past `with_settings`, are checked before anything runs."""
    with pytest.raises(SpecError) as error:
        resolve(experiment)
    for part in says:
        assert part in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_needs_a_gpu() -> None:
    for device in ("cuda", "cuda:1"):
        with pytest.raises(SpecError, match="no CUDA GPU"):
            resolve(Experiment(device=device))


def test_settings_from_a_file_and_from_text(tmp_path: Path) -> None:
    """Options may stand at the top or in [options]; numbers may come as text, as --set gives them."""
    path = tmp_path / "f.toml"
    path.write_text('rounds = 5\nlr = 0.5\n[options]\nclip = 2\nvariant = "released"\n')
    assert from_toml(path) == {"rounds": 5, "lr": 0.5, "clip": 2, "variant": "released"}
    text = with_settings(Experiment(method="fedavg"), {"rounds": "5", "valid": "0.25", "lr": "5e-1"})
    assert (text.rounds, text.valid, text.options["lr"]) == (5, 0.25, 0.5)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"rounds = ", "is not TOML"),
        (b"\xff", "is not TOML"),
        (b"rounds = 1\nrounds = 2", "is not TOML"),
        (b"", "holds no settings"),
        (b"[options]\n", "holds no settings"),
        (b"options = 3", "options"),
        (b"rounds = [1]", "rounds"),
        (b"[table]\nx = 1", "table"),
    ],
)
def test_wrong_files_are_explained(data: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_bytes(data)
    with pytest.raises(SpecError) as error:
        from_toml(path)
    assert str(path) in str(error.value)
    assert says in str(error.value)


def test_one_name_twice_in_a_file(tmp_path: Path) -> None:
    """The [options] table is the method's own word: it wins over the same name at the top."""
    path = tmp_path / "f.toml"
    path.write_text("lr = 0.1\n[options]\nlr = 0.2\n")
    assert from_toml(path) == {"lr": 0.2}


def test_nearest() -> None:
    assert nearest("digts", ["digits", "cifar"]) == "did you mean digits?"
    assert nearest("qqq", ["digits", "cifar"]) == "choose from digits, cifar"


def test_method_is_stored_in_its_canonical_spelling() -> None:
    e = resolve(with_settings(Experiment(), {"method": "Reptile+DROP+MetaVD"}))
    assert e.method == "reptile+metavd+drop"
    assert spec_hash(e) == spec_hash(resolve(Experiment(method="reptile+metavd+drop")))


def test_settings_of_one_method_do_not_follow_to_another() -> None:
    """An option that the new method lacks is refused by name, not carried along in silence."""
    first = with_settings(Experiment(), {"method": "fedprox", "mu": 0.5})
    with pytest.raises(SpecError, match="mu"):
        resolve(with_settings(first, {"method": "fedavg"}))
