"""Ditto: FedAvg, and a private model that is pulled towards it."""

from __future__ import annotations

import pytest
import torch
from rival_laws import (
    CLIENTS,
    answered,
    assert_same,
    assert_schedules_agree,
    batches_in,
    kept_by,
    setup_of,
    trained,
)

from metavd import tree
from metavd.core import local
from metavd.core.diff import grad
from metavd.core.objective import cross_entropy
from metavd.core.types import Batch, Sampling
from metavd.data.cohort import PERSONAL, batches
from metavd.engine.turn import moment
from metavd.runs.setup import Setup, start
from metavd.tree import Params


@pytest.mark.parametrize("method", ["ditto", "ditto+dropout", "ditto+metavd"])
def test_schedules_agree(method: str) -> None:
    assert_schedules_agree(setup_of(method))


@pytest.mark.parametrize("mu", [0.0, 0.7])
def test_what_it_sends_is_fedavgs(mu: float) -> None:
    """Law: the private model has no part in what is sent; w is FedAvg's to the bit."""
    assert_same(trained(setup_of("ditto", mu=mu)).params, trained(setup_of("fedavg")).params, 0.0)


def test_without_a_pull_the_private_model_trains_alone() -> None:
    """Law: mu = 0 makes of v what local training makes, to the bit; a pull makes another one."""
    alone, free, bound = (setup_of("local"), setup_of("ditto", mu=0.0), setup_of("ditto", mu=0.7))
    wanted, found, other = (kept_by(each, trained(each)) for each in (alone, free, bound))
    assert_same(local.own_of(found), wanted, 0.0)
    assert any(not torch.equal(other[local.OWN + name], value) for name, value in wanted.items())


def pulled(setup: Setup, own: Params, received: Params, batch: Batch) -> Params:
    """Return grad L(v) + 0.7 (v - w) on a batch."""
    objective = cross_entropy(setup.task.model)
    gradient = grad(lambda at: objective(at, batch, at))(own)
    return tree.map(lambda g, v, w: g + 0.7 * (v - w), gradient, own, received)


def test_a_private_step_by_hand() -> None:
    """Closed form: v <- v - lr clip(grad L(v) + mu (v - w)), the clip over v's own slope, w what was received."""
    setup = setup_of("ditto", mu=0.7, clip=0.3, local_epochs=3)
    state = trained(setup, 1, cohort=CLIENTS)
    client = 2
    own = local.own_of({name: value[client] for name, value in kept_by(setup, state).items()})
    clipped = []
    for batch in batches_in(setup, state, client):
        slope = pulled(setup, own, state.params, batch)
        clipped.append(float(tree.squared_norm(slope)) > 0.3**2)
        own = tree.axpy(-0.1, tree.clip(slope, 0.3), own)
    assert any(clipped)
    assert len(clipped) > 2, "the w that trains beside v has moved away from the one received"
    after = kept_by(setup, trained(setup, 2, cohort=CLIENTS))
    assert_same(local.own_of({name: value[client] for name, value in after.items()}), own)


def test_a_strong_pull_holds_the_private_model_at_what_was_received() -> None:
    """Limit: lr mu = 1 forgets v in one step: v lands within lr |grad| of the received w."""
    setup = setup_of("ditto", mu=1e4, lr=1e-4, clip=1e9, local_epochs=1)
    before, after = trained(setup, 1, cohort=CLIENTS), trained(setup, 2, cohort=CLIENTS)
    for name, value in local.own_of(kept_by(setup, after)).items():
        torch.testing.assert_close(value, before.params[name].expand_as(value), rtol=0, atol=1e-3)


def test_a_newcomer_starts_from_what_it_receives() -> None:
    """Closed form: an unseen client's model is prox steps on its rows, from w, pulled to w."""
    setup = setup_of("ditto", mu=0.7, new_epochs=2)
    state, client = trained(setup), CLIENTS
    own = state.params
    for batch in batches(setup.pool, client, Sampling(8, 2), moment(state).keys(PERSONAL, client), state.round):
        slope = pulled(setup, own, state.params, batch)
        own = tree.axpy(-0.1, tree.clip(slope, 5.0), own)
    rows = setup.pool.inputs(torch.from_numpy(setup.pool.federation.test[client]))
    probs = setup.task.model.apply(own, rows, None)[0].softmax(-1)
    torch.testing.assert_close(torch.from_numpy(answered(setup, state)[client]), probs, rtol=1e-10, atol=1e-10)


def test_a_known_client_answers_with_its_private_model() -> None:
    """Law: v as it is kept, without another step, and not w."""
    setup = setup_of("ditto")
    state = trained(setup, cohort=CLIENTS)
    model, client = setup.task.model, 1
    rows = setup.pool.inputs(torch.from_numpy(setup.pool.federation.test[client]))
    own = local.own_of({name: value[client] for name, value in kept_by(setup, state).items()})
    mine = torch.from_numpy(answered(setup, state)[client])
    torch.testing.assert_close(mine, model.apply(own, rows, None)[0].softmax(-1), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(mine, model.apply(state.params, rows, None)[0].softmax(-1))


def test_everyone_begins_with_the_first_weights() -> None:
    setup = setup_of("ditto")
    state = start(setup)
    for name, value in local.own_of(kept_by(setup, state)).items():
        assert torch.equal(value, state.params[name].expand_as(value))
