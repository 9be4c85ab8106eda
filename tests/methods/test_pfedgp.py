"""pFedGP's training as the others', by its own script, and what its tree is conditioned on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rival_laws import CLIENTS, assert_same, assert_schedules_agree, batches_in, setup_of, trained

from metavd.engine.turn import moment, personal_batches
from metavd.errors import SpecError
from metavd.runs.run import Setup, start
from metavd.runs.settings import Experiment, resolve, spec_hash

SMALL: dict[str, Any] = {"chains": 2, "sweeps": 1}
BATCHES: dict[str, Any] = {"steps_on": "batches", "batch_rows": 8, "passes": 2}


def conditioned_rows(setup: Setup, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and labels that a client's answers rest on."""
    state = start(setup)
    (batch,) = personal_batches(setup.algorithm, setup.pool, client, moment(state), client, new=False)
    return batch.x, batch.y


def test_batches_are_those_of_other_methods() -> None:
    """Law: with steps_on=batches a client trains on the very batches of FedAvg."""
    mine, theirs = setup_of("pfedgp", **SMALL, **BATCHES), setup_of("fedavg", batch=8, local_epochs=2)
    for client in range(CLIENTS):
        ours, wanted = (batches_in(setup, start(setup), client) for setup in (mine, theirs))
        assert len(ours) == len(wanted) > 1
        for one, two in zip(ours, wanted, strict=True):
            assert torch.equal(one.x, two.x)
            assert torch.equal(one.key, two.key)


def test_one_batch_of_all_rows_is_a_step_on_all_rows() -> None:
    """Law: a batch that holds every client makes the two ways one, but for the order of rows."""
    all_rows = setup_of("pfedgp", **SMALL, local_steps=2)
    one_batch = setup_of("pfedgp", **SMALL, **BATCHES | {"batch_rows": 1000})
    assert_same(trained(one_batch).params, trained(all_rows).params)


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_momentum_is_torchs(momentum: float) -> None:
    """Parity: three steps of torch.optim.SGD with momentum, after clip_grad_norm_, from where the client begins."""
    setup = setup_of("pfedgp", **SMALL, local_steps=3, momentum=momentum, lr=0.1, clip=0.5)
    plain = setup_of("pfedgp", **SMALL, local_steps=3)
    state, zero = start(setup), torch.tensor(0)
    received = setup.algorithm.emit.apply(state.params, zero, state.round)
    batches = batches_in(setup, state, 0)
    found, _ = setup.algorithm.local(received, batches)
    by_hand = {name: value.clone().requires_grad_() for name, value in received.items()}
    optimizer = torch.optim.SGD(by_hand.values(), lr=0.1, momentum=momentum)
    for batch in batches:
        now = {name: value.detach() for name, value in by_hand.items()}
        slopes = plain.algorithm.local.step(now, [batch], received, zero)[0].slope
        for name, value in by_hand.items():
            value.grad = slopes[name].clone()
        torch.nn.utils.clip_grad_norm_(by_hand.values(), 0.5)
        optimizer.step()
    assert_same(found, {name: value.detach() for name, value in by_hand.items()}, within=1e-9)


def test_a_turn_ends_with_what_it_received_and_momentum_does_not_outlive_it() -> None:
    setup = setup_of("pfedgp", **SMALL, local_steps=2, momentum=0.9)
    received = start(setup).params
    assert list(setup.algorithm.local(received, batches_in(setup, start(setup), 0))[0]) == list(received)


def test_what_answers_rest_on() -> None:
    """Own rows; own rows and 3 of every class; 3 of every class alone, none of them the client's own."""
    own, both, points = (
        conditioned_rows(setup_of("pfedgp", **SMALL, **more), 1)
        for more in ({}, {"extra_points": 3}, {"extra_points": 3, "condition": "points"})
    )
    assert torch.bincount(points[1], minlength=4).tolist() == [3] * 4
    assert len(both[1]) == len(own[1]) + 12
    mine = {tuple(row) for row in own[0].tolist()}
    given = {tuple(row) for row in points[0].tolist()}
    assert len(mine) == len(own[1])
    assert not mine & given
    assert {tuple(row) for row in both[0].tolist()} == mine | given


def test_points_that_nobody_gives_are_refused() -> None:
    with pytest.raises(SpecError, match="condition is points, but extra_points is 0; give a number of every class"):
        setup_of("pfedgp", condition="points")


def test_inducing_points_condition_at_test_as_in_training() -> None:
    """Known clients below the limit rest on own rows alone, or on points of their classes too, as newcomers do."""
    used = {}
    for word in ("needed", "always"):
        setup = setup_of("pfedgp", **SMALL, inducing=2, test_points=word)
        state = start(setup)
        batches = personal_batches(setup.algorithm, setup.pool, 0, moment(state), 0, new=False)
        received = setup.algorithm.serve(state.params, torch.tensor(0), state.round)
        own, _ = setup.algorithm.personalize(received, batches)
        used[word] = own["gp.omega"]
        admitted, _ = setup.algorithm.personalize(setup.algorithm.admit(state.params, state.round, batches), batches)
        newcomer = admitted["gp.omega"]
    rows = len(batches[0].y)
    assert not used["needed"][..., rows:].any()
    assert used["always"][..., rows:].any()
    assert torch.equal(used["always"], newcomer)


@pytest.mark.parametrize(
    "options",
    [
        BATCHES | {"momentum": 0.9, "test_points": "always", "lr": 0.01},
        {"local_steps": 3, "momentum": 0.9, "extra_points": 2, "condition": "points"},
    ],
)
def test_schedules_agree(options: dict[str, Any]) -> None:
    assert_schedules_agree(setup_of("pfedgp", **SMALL, **options))


def test_a_run_from_before_keeps_its_name() -> None:
    plain = Experiment(method="pfedgp", data="digits")
    told = Experiment(method="pfedgp", data="digits", options={"steps_on": "all", "batch_rows": 64, "momentum": 0.0})
    assert spec_hash(resolve(plain)) == spec_hash(resolve(told))
