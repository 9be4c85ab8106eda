"""PFedMe: personal models near a shared one, which descends Moreau envelopes."""

from __future__ import annotations

import pytest
import torch
from rival_laws import CLIENTS, answered, assert_same, assert_schedules_agree, setup_of, trained
from torch import Tensor

from metavd import tree
from metavd.core import local
from metavd.core.diff import grad
from metavd.core.objective import cross_entropy
from metavd.core.types import Batch, Sampling
from metavd.data.cohort import PERSONAL, batches
from metavd.engine.turn import moment
from metavd.errors import SpecError
from metavd.runs.setup import start
from metavd.tree import Params


def test_schedules_agree() -> None:
    assert_schedules_agree(setup_of("pfedme", prox_steps=2, tune_epochs=1))


def test_one_prox_step_that_is_landed_on_is_fedavg() -> None:
    """Law: K = 1 and outer_lr = 1/lambda make of w its first step, w - lr clip(grad): FedAvg's, for any lambda."""
    ours, other = setup_of("pfedme", prox_steps=1, pull=8.0, outer_lr=1 / 8, clip=0.5), setup_of("fedavg", clip=0.5)
    assert_same(trained(ours).params, trained(other).params)


def quadratic(params: Params, batch: Batch, anchor: Params) -> Tensor:  # noqa: ARG001
    """Return 3/2 |w - x|^2, x the batch's only row."""
    return 1.5 * (params["w"] - batch.x[0]).square().sum()


def test_the_personal_model_of_a_quadratic_loss() -> None:
    """Closed form: theta = (a x + lambda w) / (a + lambda), and w goes down lambda (w - theta), the slope."""
    x, w = torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor([4.0, 0.5], dtype=torch.float64)
    zero = torch.zeros((), dtype=torch.float64)
    batch = Batch(x[None], torch.zeros(1), None, zero, zero, zero + 1)
    near = local.personal(quadratic, pull=5.0, steps=200, lr=0.1, clip=None)
    theta = (3.0 * x + 5.0 * w) / 8.0
    torch.testing.assert_close(near({"w": w}, [batch])[0]["w"], theta, rtol=1e-12, atol=1e-12)
    ended, loss = local.envelope(near, pull=5.0, lr=0.01)({"w": w}, [batch])
    torch.testing.assert_close(ended["w"], w - 0.01 * 5.0 * (w - theta), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss, quadratic({"w": w}, batch, {}))
    few = local.personal(quadratic, pull=5.0, steps=3, lr=0.1, clip=None)
    torch.testing.assert_close(few({"w": w}, [batch])[0]["w"], theta + 0.2**3 * (w - theta), rtol=1e-12, atol=1e-12)


def test_the_server_goes_a_share_of_the_way() -> None:
    """Law: server_lr is beta: w <- (1 - beta) w + beta mean."""
    begun = start(setup_of("pfedme")).params
    whole, half = (trained(setup_of("pfedme", server_lr=beta), 1).params for beta in (1.0, 0.25))
    assert_same(half, tree.map(lambda a, b: 0.75 * a + 0.25 * b, begun, whole))
    assert any(not torch.equal(whole[name], value) for name, value in begun.items())


@pytest.mark.parametrize("client", [0, CLIENTS])
def test_known_and_unseen_clients_find_their_model_alike(client: int) -> None:
    """Closed form: steps by hand on the client's rows, pulled to the w that it received, not to where it is."""
    setup = setup_of("pfedme", tune_epochs=2, prox_steps=3, clip=0.5)
    state, model = trained(setup), setup.task.model
    objective, theta = cross_entropy(model), state.params
    for batch in batches(setup.pool, client, Sampling(8, 2), moment(state).keys(PERSONAL, client), state.round):
        for _ in range(3):
            slope = tree.clip(grad(lambda at, b=batch: objective(at, b, at))(theta), 0.5)
            theta = tree.map(lambda a, g, w: a - 0.1 * (g + 15.0 * (a - w)), theta, slope, state.params)
    rows = setup.pool.inputs(torch.from_numpy(setup.pool.federation.test[client]))
    probs = model.apply(theta, rows, None)[0].softmax(-1)
    torch.testing.assert_close(torch.from_numpy(answered(setup, state)[client]), probs, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(probs, model.apply(state.params, rows, None)[0].softmax(-1), atol=1e-6)


def test_a_pull_that_overshoots_is_refused() -> None:
    """Lr x lambda above 2 diverges for every loss: one sentence says so."""
    with pytest.raises(SpecError, match=r"lr x pull is 3, .* below 0\.0666667"):
        setup_of("pfedme", lr=0.1, pull=30.0)
