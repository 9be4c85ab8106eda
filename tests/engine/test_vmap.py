"""The cohort's steps under vmap on a CPU: the very steps of the loop, and none for a client that is done."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from cheap import cheap
from metavd.core.types import ServerState
from metavd.data.cohort import choose
from metavd.data.source import Source, arrays
from metavd.engine.schedule.loop import loop
from metavd.engine.schedule.vmap import vmap
from metavd.runs.settings import Experiment
from metavd.runs.setup import Setup, prepare, start
from metavd.tree import Params

CHEAP = {"batch": 16, "local_epochs": 2, "drop_from": 0}


def squares(rows: int = 400) -> Source:
    """Small photographs, augmented."""
    y = np.arange(rows) % 4
    noise = np.random.RandomState(0).randint(0, 60, (rows, 3, 8, 8))
    return arrays((noise + 40 * y[:, None, None, None]).astype(np.uint8), y, name="squares", augment=True)


def setup_of(method: str, partition: str = "quantity:1.0") -> Setup:
    options = cheap(method, **CHEAP)
    experiment = Experiment(
        method=method, partition=partition, dtype="float64", backend="vmap", options=options, device="cpu",
        clients=8, unseen=0, cohort=5, rounds=4, model="small-cnn", width=4,
    )  # fmt: skip
    return prepare(experiment, squares())


Cohort = tuple[Params, Params, torch.Tensor]


@functools.cache
def setup_and_loop(method: str, partition: str) -> tuple[Setup, ServerState, torch.Tensor, Cohort]:
    """Return a run before its first round, that round's cohort, and what the loop makes of it."""
    setup = setup_of(method, partition)
    state = start(setup)
    cohort = choose(state.key, 0, 8, 5)
    with torch.no_grad():
        sent, answered, _, losses = loop.train(setup.algorithm, setup.pool, state, cohort)
    return setup, state, cohort, (sent, answered, losses)


METHODS = ("fedavg", "reptile+metavd", "maml", "perfedavg+metavd", "fedprox")


@pytest.mark.parametrize(("method", "partition", "chunk"), [
    *((method, "quantity:1.0", 2) for method in METHODS), *((method, "iid", 0) for method in METHODS),
    *(("reptile+metavd", "quantity:1.0", chunk) for chunk in (0, 1, 5, 100)),
])  # fmt: skip
def test_the_same_as_the_loop(method: str, partition: str, chunk: int) -> None:
    """Parity: parameters and losses of a cohort, ragged or not, in chunks or not, agree with the loop's to rounding.

    How a cohort is cut into chunks is not a method's affair, so one method shows all cuts.
    """
    setup, state, cohort, wanted = setup_and_loop(method, partition)
    assert setup.schedule.name == "vmap"
    with torch.no_grad():
        sent, answered, _, losses = vmap(chunk).train(setup.algorithm, setup.pool, state, cohort)
    for mine, right in zip((sent, answered), wanted[:2], strict=True):
        assert set(mine) == set(right)
        for name, value in right.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(losses, wanted[2], rtol=1e-12, atol=1e-12)


def test_a_client_that_is_done_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed form: step s is taken by just those clients that have more than s steps, and together by all."""
    setup = setup_of("fedavg")
    taken: list[int] = []
    many = type(setup.pool).many

    def counting(pool: object, rows: torch.Tensor, keys: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        taken.append(rows.shape[1])
        return many(pool, rows, keys)

    monkeypatch.setattr(type(setup.pool), "many", counting)
    state = start(setup)
    cohort = choose(state.key, 0, 8, 5)
    with torch.no_grad():
        vmap().train(setup.algorithm, setup.pool, state, cohort)
    steps = [2 * -(-len(setup.pool.federation.train[client]) // 16) for client in cohort.tolist()]
    assert len(set(steps)) > 1, "the cohort is ragged"
    assert taken == [sum(own > step for own in steps) for step in range(max(steps))]
