"""FedALA: mixing weights of 1 are FedAvg; a mixing step is that of its formula, on its share of the rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_world import answered, assert_close, assert_schedules_agree, differences, kept, late, setup_of, trained
from torch import Tensor, nn

from metavd.core import local, rng
from metavd.core.model import from_module
from metavd.core.objective import cross_entropy
from metavd.core.types import Batch, Model, Sampling
from metavd.engine.kept import held
from metavd.engine.turn import moment, train_batches
from metavd.errors import SpecError
from metavd.methods import Setting, algorithm
from metavd.runs.setup import start
from metavd.tree import Params

NAMES = ("fc2.weight", "fc2.bias")


def test_mixing_weights_of_one_are_fedavg() -> None:
    """Law: the server's parameters and everybody's answers, where no mixing weight is learned."""
    one, two = setup_of("fedavg", {"local_epochs": 2}), setup_of("fedala", {"local_epochs": 2, "mix_epochs": 0})
    left, right = trained(one), trained(two)
    assert_close(left.params, right.params, 1e-13)
    for mine, theirs in zip(answered(one, left), answered(two, right), strict=True):
        np.testing.assert_allclose(theirs, mine, atol=1e-12)


def test_a_rate_of_zero_leaves_the_mixing_pass_without_effect() -> None:
    """Law: a client then does what FedAvg's does with the batches of the passes that follow."""
    setup = setup_of("fedala", {"local_epochs": 2, "mix_rate": 0.0})
    state, client = trained(setup), 0
    batches = train_batches(setup.algorithm, setup.pool, client, moment(state), client)
    got = setup.algorithm.emit.apply(state.params, torch.tensor(client), state.round)
    mine = {name: value[0] for name, value in held(setup.algorithm, state, [client]).items()}
    assert float(mine[local.BEGUN]) == 1.0
    ended, _ = setup.algorithm.local(got | mine, batches)
    wanted, _ = setup_of("fedavg").algorithm.local(got, batches[len(batches) // 3 :])
    assert_close(wanted, {name: ended[name] for name in wanted}, 1e-12)
    for name in NAMES:
        assert torch.equal(ended[local.OWN + name], ended[name])


def client(net: Model, *, begun: float = 1.0) -> Params:
    """What a client has: a received network, an older one of its own, and mixing weights."""
    received, own = net.init(torch.tensor(3)), net.init(torch.tensor(4))
    return (
        received
        | {local.OWN + name: own[name] for name in NAMES}
        | {local.MIX + name: torch.full_like(own[name], 0.7) for name in NAMES}
        | {local.BEGUN: torch.tensor(begun).double()}
    )


def stage(net: Model, batch: int, **more: bool):
    return local.mixing(
        cross_entropy(net), Sampling(batch, 1), NAMES, epochs=1, share=0.8, mix_rate=5.0, lr=0.1, **more
    )


@pytest.mark.parametrize("pad", [0, 4])
def test_a_mixing_step(net: Model, make_batch, pad: int) -> None:
    """Closed form: of 10 rows in batches of 6 the first 8 count; all else stays as it is."""
    start = client(net)
    whole: Batch = make_batch(10)
    batches = [_cut(whole, 0, 6, pad), _cut(whole, 6, 10, pad)]
    mix = {name: start[local.MIX + name] for name in NAMES}
    for first, last in ((0, 6), (6, 8)):
        mixed = {
            name: (start[local.OWN + name] + (start[name] - start[local.OWN + name]) * mix[name]).requires_grad_()
            for name in NAMES
        }
        logits = net.apply(start | mixed, whole.x[first:last], None)[0]
        loss = torch.nn.functional.cross_entropy(logits, whole.y[first:last])
        slopes = dict(zip(NAMES, torch.autograd.grad(loss, [mixed[name] for name in NAMES]), strict=True))
        mix = {
            name: (mix[name] - 5.0 * slopes[name] * (start[name] - start[local.OWN + name])).clamp(0, 1)
            for name in NAMES
        }
    ended, _ = stage(net, 6)(start, batches)
    clamped = torch.cat([mix[name].flatten() for name in NAMES])
    assert ((clamped > 0) & (clamped < 1) & (clamped != 0.7)).any()
    for name in NAMES:
        torch.testing.assert_close(ended[local.MIX + name], mix[name], rtol=1e-10, atol=1e-10)
        own = start[local.OWN + name]
        torch.testing.assert_close(ended[name], own + (start[name] - own) * mix[name], rtol=1e-10, atol=1e-10)
    assert torch.equal(ended["fc0.weight"], start["fc0.weight"])
    used, _ = stage(net, 6, personal=True)(start, batches)
    assert set(used) == {"fc0.weight", "fc0.bias", "fc1.weight", "fc1.bias", *NAMES}
    torch.testing.assert_close(used["fc2.weight"], ended["fc2.weight"])


def _cut(batch: Batch, first: int, last: int, pad: int) -> Batch:
    x: Tensor = torch.cat([batch.x[first:last], torch.full((pad, 4), 7.0).double()])
    mask = torch.cat([torch.ones(last - first), torch.zeros(pad)]).double() if pad else None
    return batch._replace(x=x, y=torch.cat([batch.y[first:last], batch.y[:1].expand(pad)]), mask=mask)


def test_a_client_that_never_took_part_uses_what_it_received(net: Model, make_batch) -> None:
    """Law: nothing of its own, nothing to mix."""
    start = client(net, begun=0.0)
    used, _ = stage(net, 6, personal=True)(start, [make_batch(5)])
    assert_close(net.init(torch.tensor(3)), used, 1e-13)


def test_schedules_agree() -> None:
    """Parity: loop, threads, vmap and steps in buffers; the last layer is kept, as it was after training."""
    setup = setup_of("fedala", {"local_epochs": 1, "mix_rate": 20.0})
    state = assert_schedules_agree(setup)
    assert list(state.params) == list(start(setup).params)
    rows = kept(state)
    assert {name.split(".", 1)[1] for name in rows} == {*NAMES, "begun"}
    mix = rows["mix.fc2.weight"]
    assert float(mix.min()) >= 0
    assert float((mix < 1).double().mean()) > 0.05, "some weights were learned"


def test_a_miscounted_phase_is_another_result() -> None:
    """The comparison above can fail: steps that take themselves for the next ones end elsewhere."""
    setup = setup_of("fedala", {"local_epochs": 1})
    wrong = trained(setup, rounds=1, algorithm=late(setup.algorithm))
    assert max(differences(trained(setup, rounds=1).params, wrong.params)) > 1e-6


@pytest.mark.parametrize("method", ["fedala+dropout", "fedala+metavd", "fedala+snip"])
def test_regularisers_go_with_it(method: str) -> None:
    """A regulariser's loss is what mixing and training go down."""
    setup = setup_of(method, {"local_epochs": 1, "last": 2} | ({"hyper_width": 4} if "metavd" in method else {}))
    for probs in answered(setup, trained(setup, rounds=2)):
        np.testing.assert_allclose(probs.sum(1), 1.0, atol=1e-9)


class HeadFirst(nn.Module):
    """4 -> 6 -> 3 -> 3, registered from its end."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.hidden, self.stem = nn.Linear(3, 3), nn.Linear(6, 3), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(self.stem(x).relu()).relu())


@pytest.mark.parametrize(("last", "layers"), [(1, {"out"}), (2, {"out", "hidden"}), (3, {"out", "hidden", "stem"})])
def test_the_last_layers_are_those_that_are_called_last(setting: Setting, last: int, layers: set[str]) -> None:
    """Law: the order in which a network registers its layers does not matter; the output layer is always mixed."""
    network = from_module(HeadFirst(), example=torch.zeros(2, 4))
    keep = algorithm("fedala", network, setting, {"last": last}).keep
    assert keep is not None
    assert {name.split(".")[1] for name in keep.init(rng.key(0), torch.tensor(0))} - {"begun"} == layers


def test_more_layers_than_there_are(net: Model, setting: Setting) -> None:
    """A clear refusal."""
    with pytest.raises(SpecError, match="last is 4, but the model has 3 layers"):
        algorithm("fedala", net, setting, {"last": 4})
