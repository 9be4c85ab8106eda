"""What was learnt of a table's or a text's rows goes with the model: kept, loaded, used on new rows, exported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors import safe_open

from metavd import run, table
from metavd.data.prepare import restored
from metavd.data.text import labelled
from metavd.models import module_for
from metavd.serve.export import export
from metavd.serve.model import Personal
from metavd.serve.personal import personalize
from metavd.serve.samples import UserError


def ward():
    """Return a table whose label one column decides."""
    draw = np.random.RandomState(0)
    age = draw.normal(60, 10, 120)
    content = {"age": age.tolist(), "city": draw.choice(["York", "Hull"], 120).tolist(),
               "label": np.where(age > 60, "old", "young").tolist(),
               "client": np.array(["n", "s", "e", "w"])[np.arange(120) % 4].tolist()}  # fmt: skip
    return table(content, name="ward"), {"age": [90.0, 30.0], "city": ["York", "Oslo"]}


def reviews():
    """Return texts whose label one word decides."""
    texts = ["a dull film", "a great film"] * 60
    return labelled(texts, ["bad", "good"] * 60, ["n", "n", "s", "s"] * 30), ["great", "dull and unheard of"]


@pytest.mark.parametrize("make", [ward, reviews])
def test_new_rows_are_prepared_by_the_model(make, tmp_path: Path) -> None:
    """Parity: the model, its folder read again and its ONNX graph answer alike; the metadata prepares the same rows."""
    source, new = make()
    run(method="fedavg", source=source, rounds=3, width=8, out=tmp_path / "run")
    own = personalize(tmp_path / "run", client="n", trained_on=source)
    said = own.predict(new).probs
    kept = Personal.load(own.save(tmp_path / "own"))
    np.testing.assert_array_equal(kept.predict(new).probs, said)
    export(kept, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    about = json.loads(session.get_modelmeta().custom_metadata_map["metavd"])
    rows = restored(about["prepare"]).rows(new)  # type: ignore[union-attr]
    (answers,) = session.run(None, {"x": rows.astype(np.float32)})
    np.testing.assert_allclose(answers, said, atol=1e-5)
    assert own.classes == list(source.classes)
    page = export(kept, tmp_path / "m.safetensors").read_text()
    assert "by `prepare` in the file's metadata" in page
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert json.loads(file.metadata()["metavd"])["prepare"] == about["prepare"]
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    takes = own.takes
    network = module_for(own.experiment.model, takes.x.shape[1:], 2, 8, takes.tokens)
    network.load_state_dict(weights)
    with torch.no_grad():
        np.testing.assert_allclose(network(torch.from_numpy(rows)).softmax(-1), said, atol=1e-5)


def test_wrong_ids_are_named(tmp_path: Path) -> None:
    source, _ = reviews()
    run(method="fedavg", source=source, rounds=1, width=8, out=tmp_path / "run")
    own = personalize(tmp_path / "run", trained_on=source)
    with pytest.raises(UserError, match="token id 99, but the model knows 0 to"):
        own.predict(np.full((1, own.takes.x.shape[1]), 99))
    with pytest.raises(UserError, match="takes rows of 3 token ids"):
        own.predict(np.zeros((1, 7), np.int64))
