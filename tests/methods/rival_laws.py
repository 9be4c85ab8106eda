"""What the tests of single methods share: small ragged federations, and the law that all schedules agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from metavd import methods
from metavd.core.types import Algorithm, Batch, ServerState
from metavd.data.source import Source, arrays
from metavd.engine.evaluation import answers
from metavd.engine.kept import held
from metavd.engine.schedule import Schedule
from metavd.engine.schedule.graph import stepwise
from metavd.engine.schedule.loop import loop
from metavd.engine.schedule.threads import threads
from metavd.engine.schedule.vmap import all_at_once, vmap, whole_turns
from metavd.engine.turn import moment, train_batches
from metavd.runs.settings import Experiment
from metavd.runs.setup import Setup, prepare, start
from metavd.tree import Params
from simulated import simulate

CLIENTS, UNSEEN, COHORT = 6, 2, 3
CHEAP = {"batch": 8, "local_epochs": 2, "lr": 0.1, "hyper_width": 4}


def blobs(rows: int = 112) -> Source:
    """Four noisy clusters in five dimensions."""
    draw = np.random.default_rng(0)
    y = np.arange(rows) % 4
    return arrays((draw.normal(size=(rows, 5)) + 2.0 * np.eye(5)[y]).astype(np.float32), y, name="blobs")


def setup_of(method: str, *, fields: dict[str, Any] | None = None, **options: object) -> Setup:
    """Prepare a federation of ragged clients in float64."""
    known = methods.options_of(method)
    chosen = {key: value for key, value in CHEAP.items() if key in known} | options
    settings: dict[str, Any] = {
        "clients": CLIENTS, "unseen": UNSEEN, "cohort": COHORT, "rounds": 4, "model": "mlp", "width": 4,
        "partition": "quantity:1.0", "dtype": "float64",
    }  # fmt: skip
    return prepare(Experiment(method=method, options=chosen, **settings | (fields or {})), blobs())


def trained(
    setup: Setup,
    rounds: int = 3,
    schedule: Schedule = loop,
    *,
    cohort: int | None = None,
    algorithm: Algorithm | None = None,
) -> ServerState:
    """Train from the start, by default with the setup's own algorithm and cohorts; return the last state."""
    method, asked = algorithm or setup.algorithm, cohort or int(setup.experiment.cohort)
    steps = simulate(method, setup.pool, schedule, start(setup), rounds=rounds, cohort=asked)
    *_, (state, record) = steps
    assert record.loss is not None
    assert math.isfinite(record.loss)
    return state


def answered(setup: Setup, state: ServerState, schedule: Schedule = loop) -> list[np.ndarray]:
    """Return the answers of all clients, participating and unseen."""
    known, unseen = setup.pool.federation.num_clients, setup.pool.federation.num_unseen
    groups = (range(known), range(known, known + unseen))
    return [
        result.probs
        for clients in groups
        for result, _ in answers(setup.algorithm, setup.pool, state, clients, schedule.map)
    ]


def everywhere() -> list[Schedule]:
    """Return all schedules but the loop; the GPU's without its graphs."""
    buffers = Schedule("test", stepwise(capture=False, otherwise=whole_turns()), all_at_once())
    return [threads(2), vmap(), vmap(2), buffers]


def kept_by(setup: Setup, state: ServerState, clients: Sequence[int] = range(CLIENTS)) -> Params:
    """Return what clients keep, (C, ...)."""
    return held(setup.algorithm, state, list(clients))


def assert_same(found: Params, wanted: Params, within: float = 1e-11) -> None:
    """Same names in the same order, and all numbers within a bound; 0: every bit."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=within, atol=within, msg=lambda m, n=name: f"{n}: {m}")


def assert_schedules_agree(setup: Setup) -> None:
    """Parity: rounds of partial cohorts of ragged clients give one server, one private state and one answer."""
    sizes = {len(rows) for rows in setup.pool.federation.train[:CLIENTS]}
    assert len(sizes) > 1, "the clients are ragged"
    state = trained(setup)
    probs, kept = answered(setup, state), kept_by(setup, state)
    assert all(np.isfinite(each).all() for each in probs)
    for schedule in everywhere():
        other = trained(setup, schedule=schedule)
        assert_same(other.params, state.params)
        assert_same(kept_by(setup, other), kept)
    for mine, wanted in zip(answered(setup, state, vmap()), probs, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-10, atol=1e-10)


def batches_in(setup: Setup, state: ServerState, client: int) -> list[Batch]:
    """Return the batches that a client trains on in the round that follows a state."""
    return train_batches(setup.algorithm, setup.pool, client, moment(state), client)
