"""Rows of the server that belong to one client each: fetched for a cohort, moved and put back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import metavd
from metavd.core import owned
from metavd.core.emit import EMBEDDING
from metavd.engine.checkpoint import state_hash
from metavd.engine.kept import KeptTable
from metavd.engine.rounds import InterruptedRun, Silent
from metavd.runs.evaluation import evaluate
from metavd.runs.run import rounds_of
from metavd.runs.settings import Experiment
from metavd.runs.setup import prepare, start


def spec(method: str = "reptile+metavd", **more: Any) -> Experiment:
    settings = {"clients": 12, "unseen": 3, "cohort": 4, "rounds": 3, "model": "mlp", "width": 8, **more}
    return Experiment(method=method, data="digits", seed=1, device="cpu", **settings)


def trained(e: Experiment) -> tuple[str, dict[str, Any]]:
    """Return the hash of what a run ends in, and what its clients answer."""
    setup = prepare(e)
    *_, (state, _) = rounds_of(setup, start(setup))
    return state_hash(state), evaluate(setup, state).summary


@pytest.mark.parametrize(
    ("method", "backend"), [("reptile+metavd", "vmap"), ("maml+ensemblevd", "loop"), ("fedper+metavd", "vmap")]
)
def test_rows_apart_give_the_same_bits(method: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: where a table lies shows nowhere; newcomers, who are shown the mean row, included."""
    e = spec(method, backend=backend, lost="0.2")
    together = trained(e)
    monkeypatch.setattr(owned, "MANY", 5)
    assert start(prepare(e)).rows is not None
    assert trained(e) == together


def test_a_round_touches_the_rows_of_its_cohort_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law, counted: no round and no evaluation of known clients reads a row that it does not need."""
    monkeypatch.setattr(owned, "MANY", 5)
    read: list[int] = []
    rows = KeptTable.rows

    def counted(self: KeptTable, clients: Any) -> Any:
        read.append(len(clients))
        return rows(self, clients)

    monkeypatch.setattr(KeptTable, "rows", counted)
    monkeypatch.setattr(KeptTable, "everyone", lambda _: pytest.fail("all rows were read"))
    setup = prepare(spec(unseen=0, final_clients=2, eval_clients=2))
    first = start(setup)
    last = first
    for state, record in rounds_of(setup, first):
        assert max(read) == 4
        assert state.rows is not None
        assert EMBEDDING not in state.params
        assert set(record.cohort) <= set(state.rows.visited())
        last = state
    read.clear()
    evaluate(setup, last, count=2)
    assert max(read) <= 12  # what rates look like is said of 256 clients at most, and here are 12
    assert 2 in read


def test_an_older_state_keeps_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a state that somebody holds is not moved by the rounds after it."""
    e = spec(rounds=4)
    setup = prepare(e)
    wanted = [state_hash(state) for state, _ in rounds_of(setup, start(setup))]
    monkeypatch.setattr(owned, "MANY", 5)
    states = [state for state, _ in rounds_of(setup, start(setup))]
    assert [state_hash(state) for state in states] == wanted


def test_a_run_is_resumed_with_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: checkpoints hold all rows as ever, whichever way the run that wrote them laid them."""

    class Stop(Silent):
        def round(self, record: Any) -> None:
            if record.round == 2:
                raise KeyboardInterrupt

    e = spec(checkpoint_every=1)
    wanted = metavd.run(e)["model_sha256"]
    for many in (5, 100):
        out = tmp_path / str(many)
        monkeypatch.setattr(owned, "MANY", many)
        with pytest.raises(InterruptedRun):
            metavd.run(e, out=out, listener=Stop())
        monkeypatch.setattr(owned, "MANY", 105 - many)
        assert metavd.run(e, out=out, resume=True)["model_sha256"] == wanted


def test_rows_that_always_decay_stay_among_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under owned_decay=dense every round moves every row, so there is nothing to fetch."""
    monkeypatch.setattr(owned, "MANY", 5)
    dense = start(prepare(spec(options={"owned_decay": "dense"})))
    assert dense.rows is None
    assert len(dense.params[EMBEDDING]) == 12


def test_rows_out_of_the_cohort_do_not_coast() -> None:
    """Under the defaults a row neither decays nor follows its velocity while its client does not take part."""
    setup = prepare(spec())
    before = start(setup)
    for state, record in rounds_of(setup, before):
        rest = [client for client in range(12) if client not in record.cohort]
        assert torch.equal(state.params[EMBEDDING][rest], before.params[EMBEDDING][rest])
        assert torch.equal(state.slots[EMBEDDING][rest], before.slots[EMBEDDING][rest])
        before = state
