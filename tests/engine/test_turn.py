"""A client's turn: its random numbers are the client's, its rows are where they lie, NaN is named."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from metavd.core import rng
from metavd.core.types import Answer, NonFiniteError
from metavd.data.cohort import PERSONAL, TEST, TRAIN
from metavd.data.source import arrays
from metavd.engine import turn
from metavd.engine.evaluation import answers
from metavd.engine.schedule.loop import loop
from metavd.runs.settings import Experiment
from metavd.runs.setup import Setup, prepare, start

ROWS = arrays(np.random.RandomState(0).randn(300, 4), np.arange(300) % 3)


@pytest.fixture(scope="module")
def setup() -> Setup:
    fields = {"clients": 4, "unseen": 1, "cohort": 3, "rounds": 2, "width": 6, "dtype": "float64", "device": "cpu"}
    return prepare(Experiment(method="reptile+metavd", **fields), ROWS)  # type: ignore[arg-type]


def test_keys_come_from_run_stage_round_and_client(setup: Setup) -> None:
    """Closed form: fold(run, stage, rounds that are finished, client), for one client or for many at once."""
    now = turn.moment(start(setup)._replace(round=torch.tensor(7.0).double()))
    assert now.done == 7
    for tag in (TRAIN, PERSONAL, TEST):
        many = now.keys(tag, torch.arange(5))
        assert [int(now.keys(tag, client)) for client in range(5)] == many.tolist()
        assert int(many[3]) == int(rng.fold(rng.key(0), tag, 7, 3))
    assert int(turn.answer_key(now, 2)) == int(now.keys(TEST, 2))


def test_a_site_that_holds_one_client_takes_the_simulators_turn(setup: Setup) -> None:
    """Parity: rows at another place in another pool, but the client's number: the same bits."""
    state, client = start(setup), 2
    federation = setup.pool.federation
    alone = setup.pool._replace(federation=type(federation)(
        federation.source, federation.train[client : client + 1], federation.valid[client : client + 1],
        federation.test[client : client + 1], 1, 0, federation.server,
    ))  # fmt: skip
    with torch.no_grad():
        sent, adapted, _, losses = loop.train(setup.algorithm, setup.pool, state, torch.tensor([0, client]))
        now = turn.moment(state)
        own = turn.train_batches(setup.algorithm, alone, 0, now, client)
        found, _, loss = turn.train_turn(setup.algorithm, {name: value[1] for name, value in sent.items()}, {}, own)
        ((wanted, _),) = answers(setup.algorithm, setup.pool, state, [client], loop.map)
        own = turn.personal_batches(setup.algorithm, alone, 0, now, client, new=False)
        received = turn.received_for_test(
            setup.algorithm, state.params, state.round, torch.tensor(client), own, unseen=False
        )
        rows = alone.inputs(torch.from_numpy(alone.federation.test[0]))
        answer, _ = turn.test_turn(
            setup.algorithm, received, {}, own, rows=rows, key=turn.answer_key(now, client), new=False
        )
    assert all(torch.equal(value, adapted[name][1]) for name, value in found.items())
    assert torch.equal(loss, losses[1])
    assert np.array_equal(turn.checked(answer, len(rows), "it"), wanted.probs)


def test_what_is_not_finite_is_named() -> None:
    """Whose tensor it is: a caller's own word, or the client at its place in a stack; a sum may overflow."""
    good = {"a": torch.full((2, 3), 3e38), "b": torch.zeros(2)}
    turn.check_finite(good, 4, "training")
    for value in (math.nan, math.inf):
        bad = good | {"b": torch.tensor([0.0, value])}
        with pytest.raises(NonFiniteError, match="round 4: training made b NaN"):
            turn.check_finite(bad, 4, "training")
        with pytest.raises(NonFiniteError, match="round 4: client 9 made b NaN"):
            turn.check_finite(bad, 4, [5, 9])
    probs = torch.tensor([[0.5, 0.5], [math.nan, 0.5]])
    assert turn.checked(Answer(probs, {}), 1, "round 4: client 9").shape == (1, 2)
    with pytest.raises(NonFiniteError, match="round 4: client 9 answers with probabilities that are NaN"):
        turn.checked(Answer(probs, {}), 2, "round 4: client 9")
