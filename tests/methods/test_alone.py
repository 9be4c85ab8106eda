"""The method `local`: no federation. Nothing is sent, and everything works on nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from rival_laws import CLIENTS, answered, assert_same, assert_schedules_agree, kept_by, setup_of, trained

import metavd
from metavd import wire
from metavd.core import local
from metavd.core.objective import cross_entropy
from metavd.core.rng import fold
from metavd.core.types import Sampling
from metavd.data.cohort import PERSONAL, batches
from metavd.engine.checkpoint import load_checkpoint, save_checkpoint, state_hash
from metavd.engine.kept import digest
from metavd.engine.schedule.loop import loop
from metavd.engine.turn import moment
from metavd.runs.setup import start
from simulated import simulate


def test_schedules_agree() -> None:
    assert_schedules_agree(setup_of("local", new_epochs=2))


def test_it_is_fedavg_of_one_client() -> None:
    """Law: FedAvg with a single client lands on that client's own weights: local training, to rounding."""
    fields = {"clients": 1, "unseen": 0, "cohort": 1}
    alone, together = (setup_of(name, fields=fields) for name in ("local", "fedavg"))
    kept = kept_by(alone, trained(alone, cohort=1), [0])
    assert_same({name: value[0] for name, value in kept.items()}, trained(together, cohort=1).params)


def test_nothing_is_sent() -> None:
    """Closed form: no parameter on the server, no byte in a message, in every round."""
    setup = setup_of("local")
    for state, record in simulate(setup.algorithm, setup.pool, loop, start(setup), rounds=2, cohort=3):
        assert state.params == state.slots == {}
        assert (record.down, record.up, record.dense_down, record.dense_up) == (0, 0, 0, 0)
        assert len(record.cohort) == 3
    assert wire.decode(wire.encode({}), like={}) == {}


def test_a_client_that_is_away_stays_as_it_is() -> None:
    """Law: a client's weights change in its own rounds alone."""
    setup = setup_of("local")
    states = list(simulate(setup.algorithm, setup.pool, loop, start(setup), rounds=4, cohort=2))
    before = kept_by(setup, start(setup))
    for state, record in states:
        after = kept_by(setup, state)
        for client in range(CLIENTS):
            moved = any(not torch.equal(after[name][client], before[name][client]) for name in before)
            assert moved == (client in record.cohort)
        before = after


def test_a_newcomer_trains_from_the_first_weights() -> None:
    """Closed form: new_epochs passes of plain SGD over its rows from the network's first weights."""
    setup = setup_of("local", new_epochs=3)
    state, client, model = trained(setup), CLIENTS, setup.task.model
    drawn = batches(setup.pool, client, Sampling(8, 3), moment(state).keys(PERSONAL, client), state.round)
    own, _ = local.sgd(cross_entropy(model), lr=0.1)(model.init(fold(state.key, 0)), drawn)
    rows = setup.pool.inputs(torch.from_numpy(setup.pool.federation.test[client]))
    probs = model.apply(own, rows, None)[0].softmax(-1)
    torch.testing.assert_close(torch.from_numpy(answered(setup, state)[client]), probs, rtol=1e-10, atol=1e-10)


def test_a_checkpoint_of_nothing_but_what_clients_keep(tmp_path: Path) -> None:
    """Law: stopped, stored, loaded and gone on with: the same bits."""
    setup = setup_of("local")
    straight = trained(setup, 4)
    save_checkpoint(tmp_path, trained(setup, 2), {})
    found = load_checkpoint(tmp_path)
    assert found is not None
    *_, (resumed, _) = simulate(setup.algorithm, setup.pool, loop, found[0], rounds=4, cohort=3)
    assert state_hash(resumed) == state_hash(straight)
    assert resumed.kept is not None
    assert straight.kept is not None
    assert digest(resumed.kept) == digest(straight.kept)


def test_a_whole_run(tmp_path: Path) -> None:
    """A folder, a result and a report's files, all of a run without a byte of traffic."""
    result = metavd.run(
        method="local", clients=4, unseen=1, cohort=2, rounds=2, width=8, new_epochs=1, out=tmp_path / "run"
    )
    assert result["bytes"] == {"down": 0, "up": 0, "dense_down": 0, "dense_up": 0}
    assert result["kept_sha256"]
