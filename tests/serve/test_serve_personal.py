"""A trained model in use: exactly what evaluation computes, from rows that anybody may bring; what is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save
from torch import nn

from metavd.container import dump
from metavd.data.cohort import pool
from metavd.data.source import Source, arrays, digits
from metavd.engine import turn
from metavd.engine.evaluation import answers
from metavd.engine.schedule.loop import loop
from metavd.errors import SpecError, UserError
from metavd.evaluate.metrics import ClientResult
from metavd.runs.run import run
from metavd.serve import export
from metavd.serve import model as use
from metavd.serve.model import Personal
from metavd.serve.personal import TrainedRun, open_run, personalize, personalize_each
from metavd.serve.samples import Samples, samples

TINY = {
    "clients": 4,
    "unseen": 2,
    "cohort": 2,
    "rounds": 3,
    "width": 8,
    "test_share": 0.9,
    "device": "cpu",
    "drop_from": 0,
    "samples": 4,
}
METHODS = {
    "fedavg": {},
    "reptile": {},
    "perfedavg": {"model": "small-cnn", "width": 4},
    "reptile+metavd": {"predict": "draws"},
    "reptile+metavd+drop": {"threshold": 0.1},
    "maml+metavd": {"predict": "draws", "newcomer": "fit"},
    "fedavg+dropout": {},
    "fedbe": {},
    "reptile+snip": {},
    "pfedgp": {"extra_points": 2},
}
Runs = Callable[[str], TrainedRun]


def settings_of(method: str) -> dict[str, Any]:
    from metavd.methods import options_of

    known = options_of(method)
    fields = {"clients", "unseen", "cohort", "rounds", "width", "test_share", "device"}
    return {key: value for key, value in TINY.items() if key in fields or key in known} | METHODS[method]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Train each method once."""
    held: dict[str, TrainedRun] = {}

    def get(method: str) -> TrainedRun:
        if method not in held:
            folder = tmp_path_factory.mktemp("run")
            run(method=method, out=folder / "run", **settings_of(method))
            held[method] = open_run(folder / "run")
        return held[method]

    return get


def evaluated(trained: TrainedRun, client: int) -> ClientResult:
    setup = trained.setup
    ((result, _),) = answers(setup.algorithm, setup.pool, trained.state, [client], loop.map)
    return result


def rows_of(trained: TrainedRun, client: int) -> np.ndarray:
    federation = trained.setup.pool.federation
    return federation.source.x[federation.test[client]]


def assert_same(own: Personal, trained: TrainedRun, client: int) -> None:
    said, result = own.predict(rows_of(trained, client)), evaluated(trained, client)
    assert len(result.y) > turn.ROWS or client == 0, "more rows than are answered at once"
    np.testing.assert_array_equal(said.probs, result.probs)
    if result.information is not None:
        np.testing.assert_array_equal(said.mutual_information, result.information)


# --- what evaluation computes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_personal_model_answers_exactly_as_evaluation(runs: Runs, method: str, tmp_path: Path) -> None:
    """Participating and unseen clients alike: the same bits, draws included, also from the folder it was saved to."""
    trained = runs(method)
    for client in (0, 3, 5):
        own = personalize(trained, client=client)
        assert_same(own, trained, client)
        assert own.about["kind"] == ("unseen" if client > 3 else "participating")
        assert own.about["samples"] == len(trained.setup.pool.federation.train[client])
    assert_same(Personal.load(own.save(tmp_path / "model")), trained, 5)


@pytest.mark.parametrize("method", METHODS)
def test_whoever_brings_an_unseen_clients_rows_gets_its_model(runs: Runs, method: str, tmp_path: Path) -> None:
    """Rows of both unseen clients from an .npz, two clients in it: the very models that the run evaluated."""
    trained = runs(method)
    federation = trained.setup.pool.federation
    rows = np.concatenate([federation.train[4], federation.train[5]])
    who = np.repeat([30, 200], [len(federation.train[4]), len(federation.train[5])])
    np.savez(tmp_path / "new.npz", x=federation.source.x[rows], y=federation.source.y[rows], client=who)
    found = personalize_each(trained, f"npz:{tmp_path / 'new.npz'}")
    assert list(found) == ["30", "200"]
    assert_same(found["30"], trained, 4)
    assert_same(found["200"], trained, 5)
    assert_same(personalize(trained, f"npz:{tmp_path / 'new.npz'}", client=200), trained, 5)
    with pytest.raises(UserError, match=r"hold 2 clients \(30, 200\), but one is wanted"):
        personalize(trained, f"npz:{tmp_path / 'new.npz'}")


def test_adapting_changes_the_model_and_uses_the_labels(runs: Runs) -> None:
    """The model that a new client receives, the one adapted to its rows, and that with other labels all differ."""
    trained = runs("reptile")
    x, y = digits().x[:20], digits().y[:20]
    models = [personalize(trained), personalize(trained, (x, y)), personalize(trained, (x, (y + 1) % 10))]
    said = [own.predict(x).probs for own in models]
    assert [own.about["samples"] for own in models] == [0, 20, 20]
    assert not np.array_equal(said[0], said[1])
    assert not np.array_equal(said[1], said[2])


def test_normalisation_is_the_runs(runs: Runs) -> None:
    """New rows with a mean of their own are normalised with the run's, each row by itself."""
    own = personalize(runs("fedavg"))
    x = digits().x[:5]
    bright = replace(digits(), x=x + 100, y=digits().y[:5], mean=(9.0,), std=(3.0,))
    assert personalize(runs("fedavg"), bright).takes.mean == own.takes.mean == digits().mean
    np.testing.assert_allclose(own.predict(np.concatenate([x, x + 100])).probs[:5], own.predict(x).probs, atol=1e-6)


def test_test_rows_are_not_adapted_to(runs: Runs) -> None:
    """What NEW marks as test rows has no say."""
    trained = runs("reptile")
    x, y = digits().x[:40], digits().y[:40]
    flagged = arrays(x, y, test=np.arange(40) >= 25)
    one, two = personalize(trained, flagged), personalize(trained, (x[:25], y[:25]))
    assert one.about["samples"] == 25
    np.testing.assert_array_equal(one.predict(x).probs, two.predict(x).probs)


def test_how_an_array_lies_in_memory_does_not_matter(runs: Runs) -> None:
    """Reversed, read-only or with its channels last: the same bits."""
    own, x = personalize(runs("perfedavg"), client=0), digits().x[:9]
    fixed = x.copy()
    fixed.flags.writeable = False
    turned = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    for same in (x[::-1].copy()[::-1], fixed, turned):
        np.testing.assert_array_equal(own.predict(same).probs, own.predict(x).probs)


def test_one_row_of_one_class_is_enough(runs: Runs) -> None:
    """The few rows of a client need not hold every class, as a training set must."""
    own = personalize(runs("reptile+metavd"), (digits().x[:1], digits().y[:1]))
    assert own.about["samples"] == 1
    assert own.predict(digits().x[:3]).probs.shape == (3, 10)


# --- uncertainty -----------------------------------------------------------------------------------------------------


def test_uncertainty_has_its_ranges_and_its_draws(runs: Runs) -> None:
    """0 <= I <= H <= log K for answers by draws; another number of draws is another answer."""
    own = personalize(runs("reptile+metavd"), client=0)
    said, more = own.predict(digits().x[:50]), own.predict(digits().x[:50], samples=9)
    assert said.mutual_information is not None
    assert (said.mutual_information >= 0).all()
    assert (said.mutual_information <= said.entropy + 1e-6).all()
    assert (said.entropy <= np.log(10) + 1e-9).all()
    assert not np.array_equal(said.probs, more.probs)


def test_answers_at_the_mean_stay_there(runs: Runs) -> None:
    """Where the run answers at the posterior mean, draws give the information and leave the probabilities alone."""
    own = personalize(runs("reptile+metavd+drop"), client=0)
    said, more = own.predict(digits().x[:50]), own.predict(digits().x[:50], samples=9)
    np.testing.assert_array_equal(said.probs, more.probs)
    assert said.mutual_information is not None
    assert not np.array_equal(said.mutual_information, more.mutual_information)


def test_without_a_posterior_there_is_no_information(runs: Runs) -> None:
    """None, and a number of draws is refused."""
    own = personalize(runs("fedavg"), client=0)
    assert own.predict(digits().x[:5]).mutual_information is None
    with pytest.raises(UserError, match="samples is 3, but fedavg has no posterior"):
        own.predict(digits().x[:5], samples=3)


# --- rows that fit, and rows that do not -----------------------------------------------------------------------------


def test_images_are_brought_to_the_models_size(runs: Runs) -> None:
    """Resized as in training; grey stays grey, floats and colour are refused."""
    own = personalize(runs("fedavg"))
    large = np.repeat(np.repeat(digits().x[:3], 4, 2), 4, 3)
    assert own.predict(large).probs.shape == (3, 10)
    assert own.predict(digits().x[:3, 0]).probs.shape == (3, 10), "one channel may be left out"
    for x, why in (
        (large.astype(np.float32), r"holds float32, but the model was trained on uint8, 0 to 255"),
        (np.repeat(large, 3, 1), r"only grey images can be given more channels"),
        (np.zeros((2, 64), np.uint8), r"shape \(2, 64\), but the model takes at least one row of 1x8x8"),
        (np.zeros((0, 1, 8, 8), np.uint8), r"at least one row"),
    ):
        with pytest.raises(UserError, match=why):
            own.predict(x)


def test_clients_stand_in_the_order_of_a_dataset() -> None:
    """Numbers by their size, then names; a sign that only looks like a digit is a name."""
    rows = Samples("mine", np.zeros((4, 1)), None, ["²", "10", "9", "10"], None, None, None)
    assert rows.clients() == ["9", "10", "²"]


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainedRun, Source]:
    """A run on arrays handed over in Python."""
    x = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    source = arrays(x, (x.sum(1) > 0).astype(int), name="mine")
    folder = tmp_path_factory.mktemp("features") / "run"
    run(method="reptile", source=source, clients=4, unseen=2, rounds=2, partition="iid", out=folder)
    return open_run(folder, trained_on=source), source


def test_features_of_another_width_are_refused(features: tuple[TrainedRun, Source]) -> None:
    """Nothing is cut or filled up; a number that is not finite is named by its row."""
    own = personalize(features[0])
    assert own.predict(np.zeros((2, 3))).probs.shape == (2, 2)
    with pytest.raises(UserError, match=r"x has shape \(2, 4\), but the model takes at least one row of 3 numbers"):
        own.predict(np.zeros((2, 4)))
    with pytest.raises(UserError, match="row 1 that is not a finite float32"):
        own.predict(np.array([[0, 0, 0], [0, np.inf, 0]]))
    with pytest.raises(UserError, match="holds uint8, but the model was trained on a float type"):
        own.predict(np.zeros((2, 3), np.uint8))


@pytest.mark.parametrize(
    ("y", "why"),
    [
        ([0, 10, 3], r"label 10 in row 1, but the model knows the classes 0 to 9"),
        ([0, -1, 3], r"label -1 in row 1"),
        ([0.0, 1.0, 2.0], r"type float64, but needs 3 whole numbers"),
        ([0, 1], r"labels of shape \(2,\)"),
        (None, r"has no labels"),
    ],
)
def test_labels_must_be_the_runs_classes(runs: Runs, y: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        personalize(runs("reptile"), (digits().x[:3], y))


def write_pictures(folder: Path, classes: dict[str, list[int]], x: np.ndarray) -> None:
    for label, rows in classes.items():
        (folder / label).mkdir(parents=True, exist_ok=True)
        for row in rows:
            Image.fromarray(x[row, 0] * 15).save(folder / label / f"{row:03d}.png")


def test_classes_of_folders_are_found_by_their_names(tmp_path: Path) -> None:
    """A new client's folders may be fewer than the run's: their numbers are the run's, not their own order's."""
    x, y = digits().x[:240], digits().y[:240]
    by_name = {name: list(np.flatnonzero(y % 3 == number)) for number, name in enumerate(("bird", "cat", "dog"))}
    write_pictures(tmp_path / "photos", by_name, x)
    data = f"folder:{tmp_path / 'photos'},size=8"
    run(method="reptile", data=data, rounds=1, clients=3, unseen=1, root=tmp_path, out=tmp_path / "run")
    trained = open_run(tmp_path / "run")
    write_pictures(tmp_path / "new", {"dog": by_name["dog"][:4]}, np.kron(x, np.ones((2, 2), np.uint8)))
    write_pictures(tmp_path / "new", {"bird": by_name["bird"][:2]}, x)
    own = personalize(trained, f"folder:{tmp_path / 'new'}")
    assert own.classes == ["bird", "cat", "dog"]
    rows = samples(f"folder:{tmp_path / 'new'}", own.takes, own.classes, data=data)
    assert rows.y is not None
    assert rows.y.tolist() == [0, 0, 2, 2, 2, 2]
    assert rows.x.shape == (6, 1, 8, 8), "read with the size that the run's folder was read with"
    assert rows.files is not None
    assert rows.files[2].startswith("dog/")
    (tmp_path / "new" / "dog").rename(tmp_path / "new" / "horse")
    with pytest.raises(UserError, match="has a class 'horse', but the model knows bird, cat, dog"):
        personalize(trained, f"folder:{tmp_path / 'new'}")


def test_rows_without_labels_are_answered(runs: Runs, tmp_path: Path) -> None:
    """An .npz without y, and pictures that lie directly in a folder."""
    own = personalize(runs("fedavg"))
    np.savez(tmp_path / "rows.npz", images=digits().x[:6], client=np.arange(6) // 3)
    rows = samples(f"npz:{tmp_path / 'rows.npz'}", own.takes, own.classes)
    assert rows.y is None
    assert rows.client == ["0", "0", "0", "1", "1", "1"]
    np.testing.assert_array_equal(rows.x, digits().x[:6])
    write_pictures(tmp_path, {"loose": [1, 2]}, digits().x)
    loose = samples(f"folder:{tmp_path / 'loose'}", own.takes, own.classes)
    assert (loose.y, loose.files) == (None, ["001.png", "002.png"])
    np.savez(tmp_path / "none.npz", other=np.zeros(3))
    with pytest.raises(ValueError, match="it holds other, but it must hold images or features or x"):
        samples(f"npz:{tmp_path / 'none.npz'}", own.takes, own.classes)


def test_what_stands_beside_the_rows_must_fit(runs: Runs, tmp_path: Path) -> None:
    """Clients and test flags of a labelled .npz, one for each row."""
    x, y = digits().x[:4], digits().y[:4]
    for extra, why in (({"client": np.arange(3)}, r"client of shape \(3,\)"), ({"test": np.zeros(4)}, "test of shape")):
        np.savez(tmp_path / "new.npz", x=x, y=y, **extra)
        with pytest.raises(UserError, match=why):
            personalize(runs("reptile"), f"npz:{tmp_path / 'new.npz'}")


# --- several datasets ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """A run on two datasets with different looks, and with unseen clients."""
    x, y = digits().x, digits().y
    sources = [replace(digits(), name="one"), arrays(255 - x[:600] * 15, y[:600] % 3, name="two")]
    folder = tmp_path_factory.mktemp("two") / "run"
    run(source=sources, out=folder, partition="iid", method="reptile+metavd", **{**settings_of("reptile"), "rounds": 2})
    return open_run(folder, trained_on=sources)


def test_a_domain_gives_labels_and_looks(two: TrainedRun) -> None:
    """Rows of the second dataset: its normalisation, its place under the common head; as evaluation has it."""
    federation = two.setup.pool.federation
    source = federation.source
    assert source.domain is not None
    mine = federation.train[4][source.domain[federation.train[4]] == 1]
    held = replace(federation, train=(*federation.train[:4], mine, federation.train[5]))
    only = replace(two, setup=replace(two.setup, pool=pool(held, "cpu", two.setup.pool.dtype)))
    own = personalize(two, (source.x[mine], source.y[mine] - 10), domain="two")
    rows = federation.test[4]
    second = source.domain[rows] == 1
    result = evaluated(only, 4)
    said = own.predict(source.x[rows[second]])
    np.testing.assert_allclose(said.probs, result.probs[second], atol=1e-6)
    assert own.classes[9:12] == ["one:9", "two:0", "two:1"]
    other = own.predict(source.x[rows[second]], domain="one")
    assert not np.allclose(other.probs, said.probs, atol=1e-3)


def test_onnx_has_the_looks_of_one_domain(two: TrainedRun) -> None:
    """The graph normalises as the chosen dataset was, for any number of rows."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    own = personalize(two, client=5, domain="two")
    session = runtime.InferenceSession(export.onnx_bytes(own))
    x = two.setup.pool.federation.source.x[-20:]
    np.testing.assert_allclose(session.run(None, {"x": x.astype(np.float32)})[0], own.predict(x).probs, atol=1e-5)


def test_a_domain_must_be_named(two: TrainedRun, runs: Runs) -> None:
    own = personalize(two, client=0)
    with pytest.raises(UserError, match="domain is not given, but must be one of one, two"):
        own.predict(digits().x[:2])
    with pytest.raises(UserError, match="domain is 'three', but must be one of one, two"):
        personalize(two, (digits().x[:2], digits().y[:2]), domain="three")
    with pytest.raises(UserError, match="label 5 in row 0, but the model knows the classes 0 to 2"):
        personalize(two, (digits().x[:1], [5]), domain="two")
    with pytest.raises(UserError, match="domain is 'one', but must be left out"):
        personalize(runs("fedavg"), client=0, domain="one")


# --- folders ---------------------------------------------------------------------------------------------------------


def test_the_best_state_is_used_where_the_run_tested_it(tmp_path: Path) -> None:
    """With patience the tested state is not the last one."""
    result = run(method="reptile", out=tmp_path / "run", valid=0.3, patience=1, eval_every=1,
                 **{**settings_of("reptile"), "rounds": 40, "lr": 0.5})  # fmt: skip
    assert result["tested_round"] < result["trained_rounds"], "the settings no longer make the run stop early"
    own = personalize(tmp_path / "run", client=0)
    assert own.about["round"] == result["tested_round"]
    assert own.about["model_sha256"] == result["model_sha256"]
    assert own.about["result"]["unseen"]["accuracy"] == result["unseen"]["accuracy"]


def test_a_damaged_state_is_not_replaced_by_an_older_one(tmp_path: Path) -> None:
    """A finished run is used at the state that it tested, or not at all."""
    run(method="fedavg", out=tmp_path / "run", **settings_of("fedavg"))
    newest = sorted((tmp_path / "run" / "checkpoint").glob("*.safetensors"))[-1]
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    notes: list[str] = []
    with pytest.raises(UserError, match=r"the state of round 3 that the run in .* tested is missing or damaged"):
        open_run(tmp_path / "run", note=notes.append)
    assert "checksum does not match" in notes[0]
    (tmp_path / "run" / "result.json").unlink()
    assert int(open_run(tmp_path / "run", note=notes.append).state.round) == 2
    assert "is not finished; its state of round 2 is used" in notes[-1]


@pytest.mark.parametrize("finished", [True, False])
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, *, finished: bool) -> None:
    """Law: a folder's own checkpoint alone is taken, whether or not there is a result to compare it with."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, lr in ((one, 0.1), (other, 0.2)):
        run(method="fedavg", out=folder, **{**settings_of("fedavg"), "lr": lr})
    for path in (other / "checkpoint").iterdir():
        shutil.copy(path, one / "checkpoint")
    if not finished:
        (one / "result.json").unlink()
    with pytest.raises(UserError, match=r"another run's \(spec \w+, and this run has \w+\)"):
        open_run(one)


def test_a_run_is_used_only_with_its_own_data_and_network(features: tuple[TrainedRun, Source], tmp_path: Path) -> None:
    """Data and networks from Python are asked for by name; others than the run's are refused."""
    trained, source = features
    with pytest.raises(UserError, match=r"'mine', which is no dataset's name .* pass them as trained_on="):
        open_run(trained.folder)
    with pytest.raises(UserError, match=r"are not those that the run in .* was trained with"):
        open_run(trained.folder, trained_on=arrays(source.x + 1, source.y, name="mine"))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    common = {"source": source, "clients": 4, "unseen": 2, "rounds": 2, "partition": "iid"}
    run(method="reptile+metavd", module=network, out=tmp_path / "run", rate=0.3, **common)
    with pytest.raises(UserError, match=r"a network of your own, which no folder holds; .* pass it as module="):
        open_run(tmp_path / "run", trained_on=source)
    own = personalize(tmp_path / "run", client=5, trained_on=source, module=network)
    folder = own.save(tmp_path / "model")
    with pytest.raises(UserError, match="pass it as module="):
        Personal.load(folder)
    np.testing.assert_array_equal(
        Personal.load(folder, module=network).predict(source.x[:9]).probs, own.predict(source.x[:9]).probs
    )
    wider = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(UserError, match=r"layer 0 of shape \(5, 3\), but the module's is \(6, 3\)"):
        Personal.load(folder, module=wider)
    with torch.no_grad():
        network[2].weight.mul_(2)
    with pytest.raises(UserError, match="another posterior than the module gives it"):
        Personal.load(folder, module=network)


def test_wrong_clients_and_folders_are_named(runs: Runs, tmp_path: Path) -> None:
    trained = runs("fedavg")
    for client in (6, -1, "x", "²"):
        with pytest.raises(UserError, match=r"the run has the clients 0 to 3, and 4 to 5 that never took part"):
            personalize(trained, client=client)
    with pytest.raises(UserError, match="client is '3', but the data hold no clients"):
        personalize(trained, (digits().x[:2], digits().y[:2]), client=3)
    with pytest.raises(UserError, match="holds no run and no personalised model"):
        personalize(tmp_path)
    with pytest.raises(UserError, match="names 2 datasets"):
        personalize(trained, "digits+mnist")
    (tmp_path / "config.toml").write_text("method = ")
    with pytest.raises(SpecError, match="is not TOML"):
        personalize(tmp_path)


@pytest.mark.parametrize("name", [use.WEIGHTS, use.CONFIG, use.ABOUT])
def test_a_changed_file_is_noticed(runs: Runs, tmp_path: Path, name: str) -> None:
    """Every file of a model's folder is under a checksum."""
    folder = personalize(runs("fedavg"), client=0).save(tmp_path / "model")
    data = (folder / name).read_bytes()
    changed = {use.WEIGHTS: data[:-1] + bytes([data[-1] ^ 1]), use.CONFIG: data + b"# mine\n"}
    (folder / name).write_bytes(changed.get(name, data.replace(b'"samples": ', b'"samples": 1')))
    with pytest.raises(UserError, match="holds no sound personalised model"):
        Personal.load(folder)


def test_a_folder_is_written_whole_or_not_at_all(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pickle, nothing left of a failed save, nothing overwritten, and a later format is named."""
    own = personalize(runs("fedavg"), client=0)
    with monkeypatch.context() as patch:
        patch.setattr(
            use, "write_atomic", lambda path, _: (_ for _ in ()).throw(OSError(28, "No space left", str(path)))
        )
        with pytest.raises(OSError, match="No space left"):
            own.save(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    folder = own.save(tmp_path / "model")
    assert {path.name for path in folder.iterdir()} == {use.WEIGHTS, use.CONFIG, use.ABOUT}
    with pytest.raises(UserError, match="is there already and not empty"):
        own.save(folder)
    about = json.loads((folder / use.ABOUT).read_text())
    assert (about["takes"]["mean"], about["samples"]) == (list(digits().mean), own.about["samples"])
    (folder / use.WEIGHTS).write_bytes(dump(use.MODEL._replace(version=99), own.params))
    with pytest.raises(UserError, match=r"the model has version 99, and this metavd reads version 2"):
        Personal.load(folder)
    (folder / use.WEIGHTS).write_bytes(save(own.params))
    with pytest.raises(UserError, match="this is not a model of metavd, or one of a version before 2"):
        Personal.load(folder)


# --- export ----------------------------------------------------------------------------------------------------------


def code_of(page: Path) -> str:
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    return block


@pytest.mark.parametrize("method", ["reptile+metavd", "reptile+metavd+drop"])
def test_onnx_answers_as_the_model_does(
    runs: Runs, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored rows in, the same probabilities and information out, for any number of rows; the card's code runs."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    own = personalize(runs(method), client=5)
    page = export.export(own, tmp_path / "model.onnx", licence="CC0-1.0")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    for count in (1, 13, turn.ROWS):
        said = own.predict(digits().x[:count])
        probs, information = session.run(None, {"x": digits().x[:count].astype(np.float32)})
        np.testing.assert_allclose(probs, said.probs, atol=1e-5)
        np.testing.assert_allclose(information, said.mutual_information, atol=1e-5)
    assert json.loads(session.get_modelmeta().custom_metadata_map["metavd"])["method"] == method
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    exec(compile(code_of(page), str(page), "exec"), space)
    assert space["probabilities"].shape == (1, 10)
    text = page.read_text()
    assert all(word in text for word in (method, "| licence | CC0-1.0 |", "ece_top1", "| unseen |", "## Limits"))


@pytest.mark.parametrize("method", ["fedavg", "reptile+metavd+drop", "reptile+snip"])
def test_safetensors_load_into_a_plain_network(
    runs: Runs, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card's code gives the probabilities of the model, masks folded in; spreads are variances."""
    own = personalize(runs(method), client=0)
    page = export.export(own, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"rows": torch.from_numpy(digits().x[:7].astype(np.float32))}
    code = re.sub(r"^x = .*$", "x = rows", code_of(page), flags=re.MULTILINE)
    exec(compile(code, str(page), "exec"), space)
    np.testing.assert_allclose(space["probabilities"].detach().numpy(), own.predict(digits().x[:7]).probs, atol=1e-6)
    assert not any(name.endswith(("mask", "logvar")) for name in space["weights"])
    if "metavd" in method:
        dropped = own.params["fc1.mask"] == 0
        assert dropped.any()
        assert (space["weights"]["fc1.variance"] > 0).equal(~dropped)


def test_export_refuses_what_it_cannot_write(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, and no file: a Gaussian-process tree, an odd ending, packages that are not installed."""
    own = personalize(runs("fedavg"), client=0)
    with pytest.raises(UserError, match=r"pfedgp answers by Gaussian processes, .* use --format safetensors"):
        export.export(personalize(runs("pfedgp"), client=0), tmp_path / "model.onnx")
    with pytest.raises(UserError, match=r"ends in '.bin', but must end in .safetensors or .onnx"):
        export.export(own, tmp_path / "model.bin")
    with pytest.raises(UserError, match=r"must end in .onnx"):
        export.export(own, tmp_path / "model.safetensors", format="onnx")
    with pytest.raises(UserError, match="lies in a folder that does not exist"):
        export.export(own, tmp_path / "no" / "model.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        UserError, match=r"needs the package onnxruntime .*; install it with pip install 'metavd\[export\]'"
    ):
        export.export(own, tmp_path / "model.onnx")
    with pytest.raises(UserError, match=r"needs the package pyarrow"):
        export.write_table(tmp_path / "t.parquet", {"row": [0]})
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_disagrees_is_not_written(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is run before it is written, and a difference is an error."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    monkeypatch.setattr(export, "AGREES", -1.0)
    with pytest.raises(UserError, match=r"onnxruntime answers .* apart from the model"):
        export.export(personalize(runs("fedavg"), client=0), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_nothing_else_needs_the_optional_packages() -> None:
    """The modules and the command line import where none of them is installed."""
    absent = ("onnx", "onnxruntime", "onnxscript", "pyarrow")
    code = f"import sys; sys.modules.update(dict.fromkeys({absent!r})); import metavd.cli.use, metavd.serve.export"
    subprocess.run([sys.executable, "-c", code], check=True)
