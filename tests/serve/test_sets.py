"""Which rows calibrate a client's sets, and what is said of them; the sets themselves: tests/evaluate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metavd.data.source import arrays, digits
from metavd.errors import UserError
from metavd.evaluate.conformal import calibrate
from metavd.runs.run import run
from metavd.serve.model import Personal
from metavd.serve.personal import TrainedRun, open_run, personalize
from metavd.serve.sets import calibrated


def trained(folder: Path, **settings: Any) -> TrainedRun:
    """A small run whose clients keep a third of their rows for validation."""
    source = settings.get("source")
    run(method="fedavg", clients=3, unseen=1, cohort=3, rounds=1, width=8, partition="iid", device="cpu", out=folder,
        **{"valid": 0.3, "valid_rows": "own", **settings})  # fmt: skip
    return open_run(folder, trained_on=source)


def test_validation_rows_of_the_client_calibrate(tmp_path: Path) -> None:
    """They are the federation's, none of them a training row; an unseen client has none, nor has a saved model."""
    opened = trained(tmp_path / "run")
    federation = opened.setup.pool.federation
    own, mine = personalize(opened, client=1), federation.valid[1]
    assert own.held is not None
    assert not set(mine) & set(federation.train[1])
    np.testing.assert_array_equal(own.held.x, federation.source.x[mine])
    np.testing.assert_array_equal(own.held.y, federation.source.y[mine])
    said: list[str] = []
    rule = calibrated(own, 0.9, "raps", note=said.append)
    assert rule == calibrate(own.predict(federation.source.x[mine]).probs, federation.source.y[mine], 0.9, "raps")
    assert said == [
        "sets for coverage 0.9: RAPS without random numbers, penalty 0.01 for each rank beyond 5, calibrated on "
        f"{len(mine)} rows (validation rows of client 1)"
    ]
    said.clear()
    own_way = calibrated(own, 0.9, "raps", penalty=0.1, free=1, note=said.append)
    assert (own_way.penalty, own_way.free) == (0.1, 1)
    assert "penalty 0.1 for each rank beyond 1" in said[0]
    rows = (federation.source.x[mine], federation.source.y[mine])
    loaded = Personal.load(own.save(tmp_path / "mine"))
    assert calibrated(loaded, 0.9, "raps", source=rows) == rule
    for without in (loaded, personalize(opened, client=3), personalize(opened)):
        with pytest.raises(UserError, match=r"coverage is 0\.9, but there are no calibration rows"):
            calibrated(without, 0.9)
    with pytest.raises(UserError, match="the model has learnt from rows of digits, which cannot calibrate it"):
        calibrated(own, 0.9, source="digits")


def test_what_weakens_the_promise_is_said(tmp_path: Path) -> None:
    """Validation rows with a mix of classes of their own, and such as the state was chosen by."""
    said: list[str] = []
    opened = trained(tmp_path / "run", valid_rows="independent", patience=1)
    calibrated(personalize(opened, client=0), 0.9, note=said.append)
    assert "valid_rows=independent" in said[1]
    assert "patience" in said[2]
    said.clear()
    calibrated(personalize(opened, client=0), 0.9, source=(digits().x[:20], digits().y[:20]), note=said.append)
    assert len(said) == 1


def test_only_rows_of_the_same_dataset_calibrate(tmp_path: Path) -> None:
    """A client of two datasets: the rows to come are like one of them, which alone has their normalisation."""
    x, y = digits().x, digits().y
    both = [replace(digits(), name="one"), arrays(255 - x[:600] * 15, y[:600] % 3, name="two")]
    opened = trained(tmp_path / "run", source=both)
    own = personalize(opened, client=0)
    assert own.held is not None
    assert own.held.domain is not None
    second = own.held.domain == 1
    assert 0 < second.sum() < len(second)
    wanted = calibrate(own.predict(own.held.x[second], domain="two").probs, own.held.y[second], 0.8)
    assert calibrated(own, 0.8, domain="two") == wanted
