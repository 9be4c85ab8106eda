"""What a run gives back, what it warns of, and runs that go on for more rounds than were asked for first."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import save_file
from torch import nn

import metavd
from metavd.engine.rounds import Silent
from metavd.errors import SpecError, UserError
from metavd.evaluate.diagnose import diverged
from metavd.models import module_for
from metavd.runs.result import RowList
from metavd.runs.run import run
from metavd.runs.setup import prepare, start
from metavd.runs.store import Store, StoreError

SHORT: dict[str, Any] = {
    "data": "digits",
    "clients": 4,
    "unseen": 2,
    "cohort": 2,
    "rounds": 4,
    "width": 8,
    "eval_every": 2,
}


class Heard(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


# --- the result ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "run"


@pytest.fixture(scope="module", params=["in memory", "stored", "read again"])
def result(request: pytest.FixtureRequest, folder: Path) -> Any:
    settings = SHORT | {"method": "reptile+metavd"}
    return run(**settings) if request.param == "in memory" else run(**settings, out=folder)


def test_result_is_a_mapping(result: Any, folder: Path) -> None:
    """As before there were results: by key, as JSON, in other processes; and alike whether it was stored or not."""
    assert json.loads(json.dumps(dict(result))) == json.loads(json.dumps(result)) == dict(result)
    assert type(pickle.loads(pickle.dumps(result))) is dict
    stored = Store(folder).read_result() if folder.exists() else run(**SHORT | {"method": "reptile+metavd"})
    assert stored["model_sha256"] == result["model_sha256"]
    assert result["warnings"] == []


def test_history_has_rounds_and_evaluations(result: Any) -> None:
    assert [row["round"] for row in result.history] == [1, 2, 3, 4]
    assert [("test" in row) for row in result.history] == [False, True, False, True]
    assert result.history[-1]["test"] == result["test"]
    assert all(row["loss"] > 0 and len(row["cohort"]) == 2 for row in result.history)


def test_clients_are_rows(result: Any) -> None:
    """Pooled over participating clients their accuracies are the result's."""
    rows = result.clients
    assert [row["unseen"] for row in rows] == [0] * 4 + [1] * 2
    known = [row for row in rows if not row["unseen"]]
    right = sum(row["accuracy"] * row["test_size"] for row in known)
    assert right / sum(row["test_size"] for row in known) == pytest.approx(result["test"]["accuracy_pooled"])


def test_a_table_shows_itself(result: Any) -> None:
    """A line for each client and each round, cells escaped, thirty lines at most."""
    text = result.clients._repr_html_()
    assert text.count("<tr>") == 1 + len(result.clients)
    assert "<th>accuracy</th>" in text
    assert "<th>loss</th>" in result.history._repr_html_()
    many = RowList({"name": f"<b>{i}", "figure": i / 3, "gap": None} for i in range(40))._repr_html_()
    assert many.startswith("<table><tr><th>name</th><th>figure</th><th>gap</th></tr><tr><td>&lt;b&gt;0</td><td>0</td>")
    assert many.endswith("<td>9.667</td><td></td></tr></table><p>10 more rows</p>")


def test_names_that_look_like_numbers_stay_texts(tmp_path: Path) -> None:
    """A client called 007 is not client 7, whether the run was stored or not."""
    rng = np.random.default_rng(0)
    who = np.array(["007", "1e3", "nan"])[np.arange(60) % 3]
    source = metavd.arrays(rng.normal(size=(60, 3)), np.arange(60) % 2, client=who)
    for out in (None, tmp_path / "run"):
        found = run(method="fedavg", source=source, rounds=1, unseen=0, out=out, listener=Silent())
        assert [row["name"] for row in found.clients] == ["007", "1e3", "nan"]


def test_clients_frame(result: Any) -> None:
    pandas = pytest.importorskip("pandas")
    assert isinstance(result.clients_frame(), pandas.DataFrame)
    assert len(result.clients_frame()) == 6


def test_without_pandas_a_sentence(result: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(UserError, match=r"a frame needs the package pandas .*; install it with pip install pandas"):
        result.clients_frame()


def test_model_is_the_clients_own(result: Any, folder: Path) -> None:
    """The model is that of `metavd.personalize` on the run's folder, to the bit; a wrong name is refused."""
    if not folder.exists():
        run(**SHORT | {"method": "reptile+metavd"}, out=folder)
    for client in (1, 5, None):
        ours, theirs = result.model(client), metavd.personalize(folder, client=client)
        assert all(torch.equal(ours.params[name], value) for name, value in theirs.params.items())
    with pytest.raises(UserError, match="client is 17"):
        result.model(17)


def test_model_of_own_data_and_network(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(200, 3))
    source = metavd.arrays(x, (x[:, 0] > 0).astype(int))
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    settings = {"source": source, "module": module, "method": "fedavg", "partition": "iid", "rounds": 2, "clients": 4}
    kept, held = run(**settings).model(0), run(**settings, out=tmp_path / "run").model(0)
    assert np.array_equal(kept.predict(x).probs, held.predict(x).probs)


def test_plot_and_repr(result: Any) -> None:
    figure = result.plot()
    assert figure._repr_png_().startswith(b"\x89PNG"), "a notebook shows nothing"
    assert isinstance(figure, Figure)
    assert list(figure.axes[0].lines[0].get_ydata()) == [row["loss"] for row in result.history]
    assert [line.get_label() for line in figure.axes[1].lines] == ["participating", "never seen"]
    assert repr(result).startswith("<Result of reptile+metavd on digits, 4 rounds: participating ")
    assert len(repr(result)) < 120
    assert f"{result['test']['accuracy']:.1%}" in result._repr_html_()


# --- warnings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "accuracy", "nll", "says"),
    [
        (2e6, 0.9, 0.3, "last training loss is 2e+06"),
        (None, 0.11, 9.0, "accuracy of 11.0% is hardly better than always answering the most frequent class, 10.0%"),
        (2.0, 0.11, 2.4, None),
        (2.0, 0.5, 9.0, None),
        (None, None, None, None),
    ],
)
def test_when_a_run_has_diverged(loss: Any, accuracy: Any, nll: Any, says: str | None) -> None:
    found = diverged(loss, {"accuracy": accuracy, "nll": nll}, np.full(10, 7))
    assert len(found) == (says is not None)
    assert says is None or says in found[0]


def test_a_run_that_only_knows_the_most_frequent_class_has_not_learnt() -> None:
    """An accuracy well above 1/K is nothing where one class is frequent."""
    labels = np.array([60, 10, 10, 10, 10])
    assert diverged(None, {"accuracy": 0.55, "nll": 5.0}, labels)
    assert not diverged(None, {"accuracy": 0.9, "nll": 5.0}, labels)
    assert not diverged(None, {"accuracy": 0.6, "nll": 1.3}, labels)


def test_a_diverged_run_says_so(tmp_path: Path) -> None:
    """In the result, in its file, to the listener, and when the finished run is read again."""
    heard, again = Heard(), Heard()
    settings = SHORT | {"method": "fedavg", "lr": 20.0, "clip": 1e9}
    result = run(**settings, out=tmp_path / "run", listener=heard)
    assert len(result["warnings"]) == 1
    assert "diverged" in result["warnings"][0]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["warnings"] == result["warnings"]
    run(**settings, out=tmp_path / "run", listener=again)
    assert result["warnings"][0] in heard.notes
    assert result["warnings"][0] in again.notes
    assert "1 warning" in repr(result)


# --- folders ---------------------------------------------------------------------------------------------------------


def test_the_setting_that_differs_is_named(tmp_path: Path) -> None:
    run(**SHORT, method="fedavg", out=tmp_path / "run")
    with pytest.raises(
        StoreError, match=r"holds another run \(fedavg on digits, seed 0\): lr is 0\.\d+ there and 0\.5 here"
    ):
        run(**SHORT, method="fedavg", lr=0.5, out=tmp_path / "run")
    with pytest.raises(StoreError, match=r"rounds is 4 there and 3 here; name another --out"):
        run(**SHORT | {"rounds": 3}, method="fedavg", out=tmp_path / "run", resume=True)
    with pytest.raises(StoreError, match=r"rounds is 4 there and 5 here"):
        run(**SHORT | {"rounds": 5}, method="fedavg", out=tmp_path / "run")


@pytest.mark.parametrize(
    ("method", "more"), [("fedavg", {}), ("reptile+metavd", {"beta_ramp": 0}), ("reptile+metavd", {}), ("fedper", {})]
)
def test_a_longer_run_has_the_bits_of_one_from_the_start(method: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Law: where no schedule depends on the number of rounds, 4 rounds and 3 more are 7, in state, rounds and figures.

    A ramp over two hundredths of 4 or of 7 rounds is over after the first round, and the same.
    """
    heard = Heard()
    settings = SHORT | {"method": method, **more}
    run(**settings, out=tmp_path / "run")
    longer = run(**settings | {"rounds": 7}, out=tmp_path / "run", resume=True, listener=heard)
    whole = run(**settings | {"rounds": 7}, out=tmp_path / "whole")
    same = ("model_sha256", "test", "unseen", "bytes", "rounds", "trained_rounds", "spec")
    assert {key: longer[key] for key in same} == {key: whole[key] for key in same}
    assert [row["loss"] for row in longer.history] == [row["loss"] for row in whole.history]
    assert "the run of 4 rounds goes on to 7" in heard.notes
    assert not any("beta_ramp" in note for note in heard.notes)


def test_a_checkpoint_of_other_settings_goes_on_as_no_other_run(tmp_path: Path) -> None:
    """A config.toml that was edited after its run makes neither a shorter run of this one nor this one."""
    settings = SHORT | {"method": "fedavg", "lr": 0.05}
    run(**settings, out=tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.05", "lr = 0.5"))
    with pytest.raises(UserError, match=r"another run's \(spec \w+, and this run has \w+\)"):
        run(**settings | {"rounds": 7, "lr": 0.5}, out=tmp_path / "run", resume=True)


def test_a_longer_run_whose_schedule_depends_on_the_total_says_so(tmp_path: Path) -> None:
    heard = Heard()
    settings = SHORT | {"method": "reptile+metavd", "beta_ramp": 0.5}
    run(**settings, out=tmp_path / "run")
    longer = run(**settings | {"rounds": 8}, out=tmp_path / "run", resume=True, listener=heard)
    assert any("not the run of 8 rounds from the start: beta_ramp=0.5" in note for note in heard.notes)
    assert longer["model_sha256"] != run(**settings | {"rounds": 8})["model_sha256"]


def test_a_run_without_its_checkpoint_begins_anew_and_says_so(tmp_path: Path) -> None:
    heard = Heard()
    first = run(**SHORT, method="fedavg", out=tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoint").iterdir():
        path.unlink()
    (tmp_path / "run" / "result.json").unlink()
    again = run(**SHORT, method="fedavg", out=tmp_path / "run", resume=True, listener=heard)
    assert again["model_sha256"] == first["model_sha256"]
    assert any("holds no checkpoint of this run; it begins anew" in note for note in heard.notes)


# --- own networks, pre-trained weights -------------------------------------------------------------------------------


def test_chosen_layers_are_said_before_the_first_round() -> None:
    heard = Heard()
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 10))
    run(**SHORT | {"rounds": 1}, method="reptile+metavd", module=module, listener=heard)
    said = "your network: its output layer is 5; the posterior is on 3 (choose another of 1, 5 with layers=NAME)"
    assert said in heard.notes


def test_too_few_outputs_are_refused() -> None:
    with pytest.raises(SpecError, match=r"returns 7 logits for a row, but the data have 10 classes; .*'1' 10 units"):
        run(**SHORT, method="fedavg", module=nn.Sequential(nn.Flatten(), nn.Linear(64, 7)))
    with pytest.raises(UserError, match="module is the class Linear"):
        run(**SHORT, method="fedavg", module=nn.Linear)  # type: ignore[arg-type]


def test_a_model_made_beforehand_is_settled_by_the_run() -> None:
    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body = nn.Linear(6, 10), nn.Linear(64, 6)

        def forward(self, x):
            return self.head(torch.relu(self.body(x.flatten(1))))

    setup = prepare(metavd.Experiment(**SHORT, method="reptile+metavd"), None, metavd.from_module(HeadFirst()))
    assert (setup.task.model.head, setup.algorithm.posterior.layers) == (("head",), ("body",))  # type: ignore[union-attr]


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module_for("mlp", (1, 8, 8), 10, 8).state_dict().items()}


def begun(path: Path, **more: Any) -> Any:
    return prepare(metavd.Experiment(**SHORT | {"method": "fedavg", "model": "mlp", "weights": str(path)} | more))


def test_training_starts_from_the_file(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Also where a method would start its noisy layer anew; the file's place is no part of the run, its content is."""
    save_file(weights, tmp_path / "a.safetensors")
    save_file(weights, tmp_path / "b.safetensors")
    for method in ("fedavg", "reptile+metavd"):
        params = start(begun(tmp_path / "a.safetensors", method=method)).params
        assert all(torch.equal(params[name], value) for name, value in weights.items())
    settings = SHORT | {"method": "fedavg", "model": "mlp", "out": tmp_path / "run"}
    first = run(**settings, weights=str(tmp_path / "a.safetensors"))
    assert run(**settings, weights=str(tmp_path / "b.safetensors")) == first
    save_file({name: value + 1 for name, value in weights.items()}, tmp_path / "b.safetensors")
    with pytest.raises(StoreError, match="the weights to begin with are others"):
        run(**settings, weights=str(tmp_path / "b.safetensors"))
    (tmp_path / "a.safetensors").unlink()
    assert first.model(0).predict(np.zeros((1, 8, 8), np.uint8)).probs.shape == (1, 10)


def test_a_head_for_other_classes_starts_anew(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(weights | {"fc2.weight": torch.zeros(100, 4), "fc2.bias": torch.zeros(100)}, path)
    setup = begun(path)
    params = start(setup).params
    assert params["fc2.weight"].shape == (10, 4)
    assert params["fc2.weight"].abs().sum() > 0
    assert torch.equal(params["fc1.weight"], weights["fc1.weight"])
    assert any("output layer fc2 has 100 classes, here are 10: fc2 starts anew" in note for note in setup.notes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"fc9.weight": torch.zeros(2)}, r"has 'fc9\.weight', but the network has no such weight; did you mean"),
        ({"fc1.bias": None}, r"lacks 'fc1\.bias', but the network has it"),
        ({"fc1.weight": torch.zeros(3, 3)}, r"fc1\.weight has shape \(3, 3\) there and \(4, 8\) in the network"),
        ({"fc2.weight": torch.zeros(10, 9)}, r"fc2\.weight has shape \(10, 9\) there"),
    ],
)
def test_weights_that_do_not_fit(
    weights: dict[str, torch.Tensor], change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "w.safetensors"
    save_file({name: value for name, value in (weights | change).items() if value is not None}, path)
    with pytest.raises(SpecError, match=says):
        run(**SHORT, method="fedavg", model="mlp", weights=str(path), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_file_and_no_safetensors(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        begun(tmp_path / "nowhere.safetensors")
    (tmp_path / "text").write_text("no tensors here")
    with pytest.raises(SpecError, match="is no safetensors file"):
        begun(tmp_path / "text")
    save_file(weights, tmp_path / "cut")
    (tmp_path / "cut").write_bytes((tmp_path / "cut").read_bytes()[:-4])
    with pytest.raises(SpecError, match=r"is no safetensors file \(the tensors of the file claim \d+ bytes"):
        begun(tmp_path / "cut")


def test_a_plain_installation_reads_weights(
    weights: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The safetensors library comes with none of our extras."""
    save_file(weights, tmp_path / "w")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    params = start(begun(tmp_path / "w")).params
    assert all(torch.equal(params[name], value) for name, value in weights.items())
