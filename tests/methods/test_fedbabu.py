"""FedBABU: features trained below a head that nobody moves, all fine-tuned before use."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rival_laws import CLIENTS, answered, assert_same, assert_schedules_agree, kept_by, setup_of, trained

from metavd import methods
from metavd.core import local
from metavd.core.model import from_module
from metavd.core.objective import cross_entropy
from metavd.core.rng import fold
from metavd.core.types import Sampling
from metavd.data.cohort import PERSONAL, batches
from metavd.engine.turn import moment
from metavd.errors import SpecError


@pytest.mark.parametrize("method", ["fedbabu", "fedbabu+dropout", "fedbabu+metavd"])
def test_schedules_agree(method: str) -> None:
    assert_schedules_agree(setup_of(method))


def test_the_head_is_everyones_first_and_never_moves() -> None:
    """Law: what clients keep is the network's first head, to the bit, after any number of rounds; it never travels."""
    setup = setup_of("fedbabu")
    state = trained(setup)
    first = setup.task.model.init(fold(state.key, 0))
    head = {name: value for name, value in first.items() if setup.task.model.in_head(name)}
    assert head
    assert state.kept is not None
    assert len(state.kept.visited()) > 1
    kept = kept_by(setup, state)
    assert_same(kept, {name: value.expand(CLIENTS, *value.shape) for name, value in head.items()}, 0.0)
    assert not set(head) & set(state.params)
    assert set(head) | set(state.params) == set(first)


def test_it_is_fedavg_whose_head_stands_still() -> None:
    """Law: the features are those of FedAvg with a gradient in the features alone, to the bit."""
    ours, other = setup_of("fedbabu"), setup_of("fedavg")
    model = other.task.model
    steps = local.sgd(cross_entropy(model), lr=0.1, only=lambda name: not model.in_head(name))
    found, wanted = trained(ours), trained(other, algorithm=replace(other.algorithm, local=steps))
    for name, value in found.params.items():
        assert torch.equal(value, wanted.params[name])
    free = trained(other)
    assert any(not torch.equal(free.params[name], value) for name, value in found.params.items())


@pytest.mark.parametrize("client", [0, CLIENTS])
def test_known_and_unseen_clients_fine_tune_everything(client: int) -> None:
    """Closed form: a client's own model is tune_epochs passes of plain SGD from the shared features and the head."""
    setup = setup_of("fedbabu", tune_epochs=3)
    state, model = trained(setup), setup.task.model
    begin = state.params | {name: value[0] for name, value in kept_by(setup, state, [client]).items()}
    drawn = batches(setup.pool, client, Sampling(8, 3), moment(state).keys(PERSONAL, client), state.round)
    own, _ = local.sgd(cross_entropy(model), lr=0.1)(begin, drawn)
    assert all(not torch.equal(own[name], value) for name, value in begin.items())
    rows = torch.from_numpy(setup.pool.federation.test[client])
    probs = model.apply(own, setup.pool.inputs(rows), None)[0].softmax(-1)
    torch.testing.assert_close(torch.from_numpy(answered(setup, state)[client]), probs, rtol=1e-10, atol=1e-10)


def test_a_network_that_is_all_head_is_refused() -> None:
    """Nothing would be shared: one sentence says so."""
    model = from_module(torch.nn.Linear(5, 4))
    with pytest.raises(SpecError, match="nothing would be shared"):
        methods.algorithm("fedbabu", model, methods.Setting(3, 4, 1))
