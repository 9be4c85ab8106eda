"""SCAFFOLD: control variates against client drift."""

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
from metavd.core.diff import grad
from metavd.core.local import CONTROL, OWN
from metavd.core.objective import cross_entropy
from metavd.core.types import ServerState
from metavd.engine.turn import train_turn
from metavd.errors import SpecError
from metavd.runs.setup import start
from metavd.tree import Params


@pytest.mark.parametrize("method", ["scaffold", "scaffold+ft"])
def test_schedules_agree(method: str) -> None:
    assert_schedules_agree(setup_of(method))


def weights(state: ServerState) -> Params:
    return tree.select(state.params, lambda name: not name.startswith(CONTROL))


def test_one_step_of_everyone_is_fedavg() -> None:
    """Law: with one step and full participation the corrections cancel, and clients of one size give FedAvg."""
    fields = {"partition": "iid"}
    options = {"batch": 1000, "local_epochs": 1}
    ours, other = setup_of("scaffold", fields=fields, **options), setup_of("fedavg", fields=fields, **options)
    train = ours.pool.federation.train[:CLIENTS]
    assert len({len(rows) for rows in train}) == 1, "all have as many rows"
    found, wanted = trained(ours, 4, cohort=CLIENTS), trained(other, 4, cohort=CLIENTS)
    assert_same(weights(found), wanted.params)
    assert max(float(value.abs().max()) for name, value in found.params.items() if name.startswith(CONTROL)) > 1e-3
    some = trained(ours, 4, cohort=2), trained(other, 4, cohort=2)
    assert any(not torch.allclose(value, some[1].params[name]) for name, value in weights(some[0]).items())


@pytest.mark.parametrize("cohort", [2, CLIENTS])
def test_the_servers_control_is_the_mean_of_all_clients(cohort: int) -> None:
    """Law: c = sum_i c_i / N after every round, ragged clients and those that have never taken part included."""
    setup = setup_of("scaffold")
    state = trained(setup, 4, cohort=cohort)
    own = kept_by(setup, state)
    for name, value in state.params.items():
        if name.startswith(CONTROL):
            torch.testing.assert_close(value, own[OWN + name].mean(0), rtol=1e-11, atol=1e-13)
    assert any(float(value.abs().max()) > 0 for value in own.values())


def test_a_control_is_the_mean_of_the_clipped_gradients() -> None:
    """Closed form: steps by hand, with a clip that binds; c_i' is their mean gradient, whatever c and c_i were."""
    setup = setup_of("scaffold", clip=0.4, local_epochs=3)
    state, client = trained(setup, 2, cohort=CLIENTS), 1
    received = setup.algorithm.emit.apply(state.params, torch.tensor(client), state.round)
    kept = {name: value[client] for name, value in kept_by(setup, state).items()}
    drawn = batches_in(setup, state, client)
    objective = cross_entropy(setup.task.model)
    at, slopes = weights(state), []
    for batch in drawn:
        slopes.append(tree.clip(grad(lambda w, b=batch: objective(w, b, w))(at), 0.4))
        at = {name: value - 0.1 * (slopes[-1][name] - kept[OWN + CONTROL + name] + received[CONTROL + name])
              for name, value in at.items()}  # fmt: skip
    assert len(drawn) > 2
    sent, own, _ = train_turn(setup.algorithm, received, kept, drawn)
    mean = {name: torch.stack([each[name] for each in slopes]).mean(0) for name in at}
    assert list(sent) == list(received)
    assert_same({name: sent[name] for name in at}, at)
    for name, value in mean.items():
        new, old = own[OWN + CONTROL + name], kept[OWN + CONTROL + name]
        torch.testing.assert_close(new, value, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(sent[CONTROL + name] - received[CONTROL + name], new - old, rtol=1e-9, atol=1e-11)
    assert float(tree.squared_norm(mean)) <= 0.4**2


def test_without_a_row_nothing_changes() -> None:
    """Limit: a client without a batch sends what it received and keeps what it had."""
    setup = setup_of("scaffold")
    state = trained(setup, 2, cohort=CLIENTS)
    received = setup.algorithm.emit.apply(state.params, torch.tensor(0), state.round)
    kept = {name: value[0] for name, value in kept_by(setup, state).items()}
    sent, own, _ = train_turn(setup.algorithm, received, kept, [])
    assert_same(sent, received, 0.0)
    assert_same(own, kept, 0.0)


def test_in_use_there_is_no_control() -> None:
    """Law: a client answers with w alone, an unseen one too, and no control is sent to a client that is only used."""
    setup = setup_of("scaffold")
    state = trained(setup)
    served = setup.algorithm.serve(state.params, torch.tensor(0), state.round)
    assert list(served) == list(weights(state))
    own, _ = setup.algorithm.personalize(served | {name: v[0] for name, v in kept_by(setup, state).items()}, [])
    assert list(own) == list(served)
    for client in (0, CLIENTS):
        rows = setup.pool.inputs(torch.from_numpy(setup.pool.federation.test[client]))
        probs = setup.task.model.apply(weights(state), rows, None)[0].softmax(-1)
        torch.testing.assert_close(torch.from_numpy(answered(setup, state)[client]), probs, rtol=1e-10, atol=1e-10)


def test_everyone_begins_without_a_control() -> None:
    setup = setup_of("scaffold")
    state = start(setup)
    assert all(not value.any() for name, value in state.params.items() if name.startswith(CONTROL))
    assert all(not value.any() for value in kept_by(setup, state).values())


def test_a_rate_of_zero_is_refused() -> None:
    with pytest.raises(SpecError, match="lr is 0"):
        setup_of("scaffold", lr=0.0)
