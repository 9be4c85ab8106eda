"""How far a run's answers can be trusted: sets and unknown inputs, against a client by client computation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score, roc_curve

from metavd.cli import main
from metavd.data.source import arrays, digits
from metavd.errors import UserError
from metavd.evaluate.conformal import crossed
from metavd.runs.run import run
from metavd.serve.personal import TrainedRun, open_run, personalize
from metavd.serve.trust import trust

FOREIGN = np.random.RandomState(0).randint(0, 256, (40, 28, 28)).astype(np.uint8)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    folder = tmp_path_factory.mktemp("trust") / "run"
    run(method="reptile", clients=3, unseen=1, cohort=3, rounds=3, width=8, partition="iid", device="cpu", out=folder,
        local_epochs=1)  # fmt: skip
    return open_run(folder)


def test_unknown_inputs_are_told_as_client_by_client(opened: TrainedRun) -> None:
    """Parity: every client's own model answers both kinds of rows by itself; scikit-learn takes AUROC and the curve."""
    found = trust(opened, unknown=(FOREIGN, None), rows=25)
    assert found["unknown"]["rows"] == 25
    shown = FOREIGN[np.unique(np.linspace(0, 39, 25).round().astype(int))]
    federation = opened.setup.pool.federation
    scores, unknown = [], []
    for client in range(3):
        own = personalize(opened, client=client)
        for x, flag in ((federation.source.x[federation.test[client]], False), (_fit(shown), True)):
            scores.append(own.predict(x).entropy)
            unknown.append(np.full(len(x), flag))
    score, positive = np.concatenate(scores), np.concatenate(unknown)
    told = found["unknown"]["test"]["entropy"]
    assert told["auroc"] == pytest.approx(roc_auc_score(positive, score), abs=1e-3)
    false, true, _ = roc_curve(~positive, -score, drop_intermediate=False)
    assert told["fpr95"] == pytest.approx(false[(true >= 0.95).argmax()], abs=0.03)  # rounding may move a row or two
    assert "information" not in found["unknown"]["test"]


def _fit(x: np.ndarray) -> np.ndarray:
    from metavd.data.domains import resize

    return resize(x[:, None], 1, *digits().x.shape[2:])


def test_sets_are_measured_on_every_client_s_test_rows(opened: TrainedRun) -> None:
    """Parity: coverage and size are those of the clients' answers, halved client by client."""
    said: list[str] = []
    found = trust(opened, coverage=0.8, note=said.append)["sets"]
    federation = opened.setup.pool.federation
    made = []
    for client in range(3):
        rows = federation.test[client]
        probs = personalize(opened, client=client).predict(federation.source.x[rows]).probs
        made.append(crossed(probs, federation.source.y[rows], 0.8, "lac", seed=client))
    covered, size = (np.concatenate(each).mean() for each in zip(*made, strict=True))
    assert found["test"]["lac"]["covered"] == pytest.approx(covered, abs=0.02)
    assert found["test"]["lac"]["size"] == pytest.approx(size, abs=0.05)
    assert found["test"]["lac"]["enough"] == 1.0
    assert set(found["unseen"]) == {"lac", "aps", "raps"}
    assert said == []


def test_the_same_dataset_is_hardly_unknown(opened: TrainedRun) -> None:
    """Other rows of the same kind pass for known: AUROC near a half, far from what noise gives."""
    federation = opened.setup.pool.federation
    rows = np.concatenate(federation.test[:3])
    found = trust(opened, unknown=arrays(federation.source.x[rows], federation.source.y[rows], name="same"))
    assert found["unknown"]["test"]["entropy"]["auroc"] == pytest.approx(0.5, abs=0.1)
    assert found["unknown"]["data"] == "same"


def test_the_command_prints_and_keeps_it(opened: TrainedRun, tmp_path: Path, capsys: Any) -> None:
    np.savez(tmp_path / "noise.npz", x=FOREIGN, y=np.arange(40) % 2)
    out = tmp_path / "trust.json"
    main(["trust", str(opened.folder), "--unknown", f"npz:{tmp_path / 'noise.npz'}", "--out", str(out),
          "--root", str(tmp_path)])  # fmt: skip
    shown = capsys.readouterr().out
    assert "FPR95" in shown
    assert "RAPS" in shown
    kept = json.loads(out.read_text())
    assert kept["unknown"]["rows"] == 40
    assert 0 <= kept["unknown"]["unseen"]["entropy"]["auroc"] <= 1


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"coverage": 1.0}, "coverage is 1.0"),
        ({"rows": 0, "unknown": (FOREIGN, None)}, "rows is 0"),
        ({"unknown": "digits"}, "which the run was trained on"),
        ({"unknown": (FOREIGN.astype(float), None)}, "the model was trained on uint8"),
    ],
)
def test_wrong_input_is_one_sentence(opened: TrainedRun, how: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        trust(opened, **how)
