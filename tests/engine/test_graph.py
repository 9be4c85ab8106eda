"""The cohort's steps taken together: the very steps of the loop, and none for a client that is done.

A GPU replays them as CUDA graphs (tests/test_cuda.py); here the same functions run as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from cheap import cheap
from metavd import methods
from metavd.core.types import Batch, Local, Move
from metavd.data.cohort import choose
from metavd.data.source import Source, arrays
from metavd.engine.schedule import Schedule
from metavd.engine.schedule import graph as module
from metavd.engine.schedule.capture import _stored
from metavd.engine.schedule.graph import stepwise
from metavd.engine.schedule.loop import loop
from metavd.engine.schedule.table import table, tabled
from metavd.engine.schedule.threads import threads
from metavd.engine.schedule.vmap import all_at_once, vmap, whole_turns
from metavd.runs.settings import Experiment
from metavd.runs.setup import Setup, prepare, start
from metavd.tree import Params
from simulated import simulate

CHEAP = {"batch": 16, "local_epochs": 2, "drop_from": 0}


def steps_in_buffers() -> Schedule:
    """Return the GPU's schedule, without its graphs."""
    return Schedule("test", stepwise(capture=False, otherwise=whole_turns()), all_at_once())


def squares(rows: int = 400) -> Source:
    """Small photographs, augmented."""
    y = np.arange(rows) % 4
    noise = np.random.RandomState(0).randint(0, 60, (rows, 3, 8, 8))
    return arrays((noise + 40 * y[:, None, None, None]).astype(np.uint8), y, name="squares", augment=True)


def setup_of(method: str, **settings: object) -> Setup:
    options = cheap(method, **CHEAP)
    fields = {"clients": 8, "unseen": 0, "cohort": 5, "rounds": 4, "model": "small-cnn", "width": 4} | settings
    experiment = Experiment(
        method=method, partition="quantity:1.0", dtype="float64", backend="vmap", options=options, **fields
    )  # type: ignore[arg-type]
    return prepare(experiment, squares())


@pytest.mark.parametrize("method", [name for name in methods.NAMES if name != "pfedgp"])
def test_the_same_as_the_loop(method: str) -> None:
    """Parity: adapted parameters, what is kept, and losses of a ragged cohort agree with the loop's to rounding."""
    setup = setup_of(method)
    assert tabled(setup.algorithm.train_batches)
    state = start(setup)
    cohort = choose(state.key, 0, 8, 5)
    with torch.no_grad():
        wanted = loop.train(setup.algorithm, setup.pool, state, cohort)
        for schedule in (threads(2), steps_in_buffers()):
            found = schedule.train(setup.algorithm, setup.pool, state, cohort)
            assert list(found.adapted) == list(wanted.adapted)
            assert set(found.kept) == set(wanted.kept)
            for mine, right in zip(found[:3], wanted[:3], strict=True):
                for name, value in right.items():
                    torch.testing.assert_close(mine[name], value, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-12, atol=1e-12)


def phased(local: Local) -> Local:
    """Train the output layer in even steps and the rest in odd ones, and write a bias outright."""

    def step(params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Move, Tensor]:
        move, loss = local.step(params, batches, received, index)
        even = (index % 2 == 0).to(loss.dtype)
        slope = {name: value * (even if name.startswith("fc2") else 1.0 - even) for name, value in move.slope.items()}
        bias = slope.pop("fc2.bias")
        return Move(slope, {"fc2.bias": params["fc2.bias"] - 0.01 * index * bias}), loss

    def final(params: Params) -> Params:
        return params | {"fc1.bias": params["fc1.bias"] + 1.0}

    return replace(
        local, step=step, init=lambda received: received | {"fc0.bias": received["fc0.bias"] + 1.0}, final=final
    )


@pytest.mark.parametrize("method", ["fedavg", "maml"])
def test_steps_have_the_same_numbers_under_every_schedule(method: str) -> None:
    """Parity: a stage whose steps depend on their number, with a beginning and an end, in a ragged cohort."""
    setup = setup_of(method)
    algorithm = replace(setup.algorithm, local=phased(setup.algorithm.local))
    state = start(setup)
    cohort = choose(state.key, 0, 8, 5)
    with torch.no_grad():
        wanted = loop.train(algorithm, setup.pool, state, cohort)
        plain = loop.train(setup.algorithm, setup.pool, state, cohort)
        for schedule in (threads(2), vmap(), vmap(2), steps_in_buffers()):
            found = schedule.train(algorithm, setup.pool, state, cohort)
            for name, value in wanted.adapted.items():
                torch.testing.assert_close(found.adapted[name], value, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found.losses, wanted.losses, rtol=1e-12, atol=1e-12)
    assert (wanted.adapted["fc2.weight"] - plain.adapted["fc2.weight"]).abs().max() > 1e-4


def test_a_client_that_is_done_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed form: step s is taken by just those clients that have more than s steps, and together by all."""
    setup = setup_of("fedavg")
    taken: list[int] = []
    original = module._step

    def counting(*arguments: object) -> None:
        taken.append(arguments[-1])  # type: ignore[arg-type]
        original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_step", counting)
    state = start(setup)
    cohort = choose(state.key, 0, 8, 5)
    with torch.no_grad():
        steps_in_buffers().train(setup.algorithm, setup.pool, state, cohort)
    sizes = [len(setup.pool.federation.train[client]) for client in cohort.tolist()]
    steps = [2 * -(-size // 16) for size in sizes]
    assert len(set(steps)) > 1, "the cohort is ragged"
    assert taken == [sum(own > step for own in steps) for step in range(max(steps))]


def test_rounds_of_different_cohorts_share_the_buffers() -> None:
    """Law: a run in which clients come and go is the same run, cohorts smaller and larger than the first included."""
    setup = setup_of("reptile+metavd")
    chances = torch.full((8,), 0.5, dtype=torch.float64)
    ends = []
    for schedule in (loop, steps_in_buffers()):
        states = list(
            simulate(setup.algorithm, setup.pool, schedule, start(setup), rounds=6, cohort=5, available=chances)
        )
        assert len({len(record.cohort) for _, record in states}) > 1
        ends.append(states[-1][0].params)
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-10, atol=1e-10)


def test_rows_and_keys_are_those_of_the_loop() -> None:
    """Closed form: every row of every epoch once, in the loop's order; most steps first."""
    setup = setup_of("fedavg")
    state = start(setup)
    drawn = table(setup.pool, setup.algorithm.train_batches, 1, state, torch.tensor([0, 3, 6]))
    assert drawn.steps == sorted(drawn.steps, reverse=True)
    for column, place in enumerate(drawn.order.tolist()):
        own = setup.pool.federation.train[[0, 3, 6][place]]
        used = drawn.rows[:, column][drawn.mask[:, column] > 0]
        assert sorted(used.tolist()) == sorted([*own.tolist()] * 2)
        assert float(drawn.size[column]) == len(own)


def test_what_repeats_itself_is_stored_once() -> None:
    """Law: a graph's input for an expanded tensor holds its own numbers alone, and expands to the same tensor."""
    shared = torch.arange(6.0).reshape(2, 3)
    for value in (
        shared,
        shared.expand(5, 2, 3),
        shared[:, None].expand(2, 4, 3),
        shared.T,
        torch.tensor(1.0).expand(3),
    ):
        stored = _stored(value)
        assert torch.equal(stored.expand(value.shape), value)
        assert stored.numel() == len({float(each) for each in value.flatten()})


def test_what_cannot_be_tabled_runs_as_whole_turns() -> None:
    """PFedGP looks at all of a client's rows at once: no table holds them, and the loop's answers come all the same."""
    setup = setup_of("pfedgp", model="mlp")
    assert not tabled(setup.algorithm.train_batches)
    state, cohort = start(setup), torch.tensor([0, 3, 6])
    with torch.no_grad():
        one, two = (each.train(setup.algorithm, setup.pool, state, cohort) for each in (loop, steps_in_buffers()))
    for name, value in one.adapted.items():
        torch.testing.assert_close(two.adapted[name], value, rtol=1e-9, atol=1e-9)
