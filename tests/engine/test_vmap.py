"""The cohort's steps under vmap on a CPU: the very steps of the loop, and none for a client that is done."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cheap import cheap
from metavd.data.cohort import choose
from metavd.data.source import Source, arrays
from metavd.engine.schedule.loop import loop
from metavd.engine.schedule.vmap import vmap
from metavd.runs.settings import Experiment
from metavd.runs.setup import Setup, prepare, start

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


@pytest.mark.parametrize("chunk", [0, 1, 2, 5, 100])
@pytest.mark.parametrize("method", ["fedavg", "reptile+metavd", "maml", "perfedavg+metavd", "fedprox"])
@pytest.mark.parametrize("partition", ["quantity:1.0", "iid"])
def test_the_same_as_the_loop(method: str, partition: str, chunk: int) -> None:
    """Parity: parameters and losses of a cohort, ragged or not, in chunks or not, agree with the loop's to rounding."""
    setup = setup_of(method, partition)
    assert setup.schedule.name == "vmap"
    state = start(setup)
    cohort = choose(state.key, 0, 8, 5)
    with torch.no_grad():
        gave, one, _, losses = loop.train(setup.algorithm, setup.pool, state, cohort)
        sent, two, _, others = vmap(chunk).train(setup.algorithm, setup.pool, state, cohort)
    assert set(one) == set(two)
    for name, value in gave.items():
        torch.testing.assert_close(sent[name], value, rtol=1e-12, atol=1e-12)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(others, losses, rtol=1e-12, atol=1e-12)


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
