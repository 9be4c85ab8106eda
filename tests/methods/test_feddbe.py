"""FedDBE: without a bias and a pull it is FedAvg; the common mean is gathered once, and the pull is its formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_world import answered, assert_close, assert_schedules_agree, kept, late, setup_of, trained

from metavd.core import dbe, rng
from metavd.core.local import sgd
from metavd.core.objective import cross_entropy
from metavd.core.types import Batch, Model, Sampling
from metavd.engine.kept import held
from metavd.engine.turn import moment, train_batches
from metavd.runs.setup import start
from metavd.tree import Params

PLAIN = {"kappa": 0.0, "bias_rate": 0.0}


def test_without_bias_and_pull_it_is_fedavg() -> None:
    """Law: the server's parameters, and everybody's answers."""
    options = {"local_epochs": 2}
    one, two = setup_of("fedavg", options), setup_of("feddbe", options | PLAIN | {"new_epochs": 0})
    left, right = trained(one), trained(two)
    assert_close(left.params, {name: right.params[name] for name in left.params}, 1e-11)
    assert float(kept(right)[dbe.BIAS].abs().max()) == 0.0
    for mine, theirs in zip(answered(one, left), answered(two, right), strict=True):
        np.testing.assert_allclose(theirs, mine, atol=1e-11)


def test_the_first_rounds_are_fedavg() -> None:
    """Law: while the common mean is not known neither bias nor pull count."""
    one, two = setup_of("fedavg", {"local_epochs": 1}), setup_of("feddbe", {"local_epochs": 1, "warm_rounds": 2})
    left, right = (trained(setup, rounds=2) for setup in (one, two))
    assert_close(left.params, {name: right.params[name] for name in left.params}, 1e-11)
    after = trained(two, rounds=3).params["fc0.weight"] - trained(one, rounds=3).params["fc0.weight"]
    assert float(after.abs().max()) > 1e-6


@pytest.mark.parametrize("warm", [1, 2])
def test_the_common_mean_is_gathered_once(warm: int) -> None:
    """Closed form: the mean of the cohort's features by data size, over the first rounds; then it stays."""
    setup = setup_of("feddbe", {"local_epochs": 2, "warm_rounds": warm})
    states = [start(setup), *(trained(setup, rounds=count, cohort=7) for count in range(1, 4))]
    size = torch.tensor([float(len(rows)) for rows in setup.pool.federation.train[:7]]).double()
    rounds = []
    for state in states[:warm]:
        told = []
        for client in range(7):
            batches = train_batches(setup.algorithm, setup.pool, client, moment(state), client)
            got = setup.algorithm.emit.apply(state.params, torch.tensor(client), state.round)
            mine = {name: value[0] for name, value in held(setup.algorithm, state, [client]).items()}
            sent, _ = setup.algorithm.local(got | mine, batches)
            assert set(sent) == {*got, dbe.BIAS}
            told.append(sent[dbe.AGREED])
        rounds.append(torch.einsum("c,cf->f", size / size.sum(), torch.stack(told)))
    wanted = torch.stack(rounds).mean(0)
    for state in states[warm:]:
        torch.testing.assert_close(state.params[dbe.AGREED], wanted, rtol=1e-9, atol=1e-9)


def client(net: Model) -> Params:
    return net.init(rng.key(0)) | {
        dbe.BIAS: torch.tensor([0.3, -0.2, 0.1]).double(),
        dbe.AGREED: torch.tensor([0.5, 0.1, -0.4]).double(),
    }


@pytest.mark.parametrize("pad", [None, 3])
@pytest.mark.parametrize("momentum", [1.0, 0.1])
def test_the_pull_and_what_is_tracked(net: Model, make_batch, pad: int | None, momentum: float) -> None:
    """Closed form: two steps without a rate, so that features stay: running mean, pull and the mean that is sent."""
    bias, params = dbe.Bias("fc2", 1.0), client(net)
    pull = dbe.towards(net, bias, 7.0, momentum)
    sampling = Sampling(5, 2)
    stage = dbe.tracking(sgd(pull, lr=0.0, only=dbe.trained), net, sampling, momentum)
    batches: list[Batch] = [make_batch(rows, seed=seed, pad=pad, size=8.0, round=1.0)
                            for seed, rows in enumerate((5, 3, 5, 3))]  # fmt: skip
    means = [net.features(params, batch.x[: 5 - 2 * (i % 2)]).mean(0) for i, batch in enumerate(batches)]
    running, weight, losses = torch.zeros(3).double(), 0.0, []
    for mean in means:
        running, weight = (1 - momentum) * running + momentum * mean, (1 - momentum) * weight + momentum
        losses.append(7.0 * 0.5 * (running / weight - params[dbe.AGREED]).square().mean())
    sent, loss = stage(params, batches)
    torch.testing.assert_close(loss, torch.stack(losses).mean())
    torch.testing.assert_close(sent[dbe.AGREED], (5 * means[2] + 3 * means[3]) / 8)
    early, _ = stage(params, [batch._replace(round=torch.zeros(()).double()) for batch in batches[:1]])
    assert set(early) == set(params)


def test_the_bias_is_one_on_the_features(net: Model, make_batch) -> None:
    """Closed form: theta(phi(x) + v), in the loss from the first round that counts on, and in the network for use."""
    params, bias = client(net), dbe.Bias("fc2", 1.0)
    batch: Batch = make_batch(6, round=1.0)
    z = net.features(params, batch.x) + params[dbe.BIAS]
    wanted = z @ params["fc2.weight"].T + params["fc2.bias"]
    loss = dbe.biased(cross_entropy(net), bias)
    torch.testing.assert_close(loss(params, batch, {}), torch.nn.functional.cross_entropy(wanted, batch.y))
    before = batch._replace(round=torch.zeros(()).double())
    torch.testing.assert_close(loss(params, before, {}), cross_entropy(net)(params, batch, {}))
    own = bias.used(params)
    assert list(own) == list(net.init(rng.key(0)))
    torch.testing.assert_close(net.apply(own, batch.x, None)[0], wanted)


def test_schedules_agree() -> None:
    """Parity: loop, threads, vmap and steps in buffers; the bias is kept and never sent."""
    setup = setup_of("feddbe", {"local_epochs": 1, "momentum": 0.3})
    state = assert_schedules_agree(setup)
    assert list(state.params) == [*setup_of("fedavg").algorithm.emit.init(state.key), dbe.AGREED]
    assert dbe.AGREED not in state.slots
    biases = kept(state)[dbe.BIAS]
    assert float((biases - biases[0]).abs().max()) > 1e-5


def test_a_miscounted_pass_is_another_result() -> None:
    """The comparison above can fail: the mean that is sent is that of the last pass."""
    setup = setup_of("feddbe", {"local_epochs": 2})
    right, wrong = (trained(setup, rounds=1, algorithm=each) for each in (setup.algorithm, late(setup.algorithm)))
    assert float((right.params[dbe.AGREED] - wrong.params[dbe.AGREED]).abs().max()) > 1e-6


def test_a_newcomer_fits_its_bias_alone() -> None:
    """Law: all else is the server's; without a pass it uses what it received."""
    setup = setup_of("feddbe")
    state = trained(setup, rounds=2)
    stage = setup.algorithm.newcomer.stage  # type: ignore[union-attr]
    got = setup.algorithm.serve(state.params, torch.tensor(0), state.round)
    mine = {name: value[0] for name, value in held(setup.algorithm, state, [8]).items()}
    own, _ = stage(got | mine, [])
    assert_close({name: value for name, value in got.items() if name != dbe.AGREED}, own, 0.0)
    x, y = rng.normal(rng.key(5), [9, 6], torch.float64), torch.arange(9) % 4
    fitted, _ = stage(got | mine, [Batch(x, y, None, rng.key(6), state.round, torch.tensor(9.0).double())])
    assert {name for name in own if not torch.equal(own[name], fitted[name])} == {"fc2.bias"}


@pytest.mark.parametrize("method", ["feddbe+dropout", "feddbe+metavd", "feddbe+ft", "feddbe+snip"])
def test_what_goes_with_it(method: str) -> None:
    """Regularisers change the loss that the bias is in, and fine-tuning goes down it."""
    setup = setup_of(method, {"local_epochs": 1} | ({"hyper_width": 4} if "metavd" in method else {}))
    for probs in answered(setup, trained(setup, rounds=2)):
        np.testing.assert_allclose(probs.sum(1), 1.0, atol=1e-9)
