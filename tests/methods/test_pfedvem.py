"""pFedVEM: without spread and KL it is FedRep; rho^2, the KL and the consensus are those of their formulas."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from small_world import answered, assert_close, assert_schedules_agree, differences, kept, late, setup_of, trained
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy

from metavd.core import rng, vem
from metavd.core.types import Batch, Model
from metavd.engine.kept import held
from metavd.errors import SpecError
from metavd.methods import Setting, algorithm
from metavd.runs.setup import start
from metavd.tree import Params

PASSES = {"head_epochs": 2, "local_epochs": 1}
HEAD = vem.Head("fc2")


def some(net: Model, *, begun: float = 1.0) -> Params:
    """A network, and a posterior of its head that is somewhere else."""
    params = net.init(rng.key(0))
    params |= HEAD.start(params, 0.2) | {vem.BEGUN: torch.tensor(begun).double()}
    for i, name in enumerate(HEAD.names):
        draw = rng.normal(rng.fold(rng.key(1), i), params[name].shape, torch.float64)
        params |= {f"own.{name}": params[name] + draw, f"own.{name}.log_sigma": 0.3 * draw - 1.0}
    return params


def test_without_spread_and_kl_it_is_fedrep() -> None:
    """Law: the features, everybody's head and everybody's answers, where all take part."""
    still = {"spread": 1e-12, "spread_rate": 0.0, "kl": 0.0, "draws": 2}
    one, two = setup_of("fedrep", PASSES), setup_of("pfedvem", PASSES | still)
    left, right = (trained(setup, rounds=3, cohort=7) for setup in (one, two))
    assert_close(left.params, {name: right.params[name] for name in left.params}, 1e-9)
    for name, value in kept(left).items():
        torch.testing.assert_close(kept(right)[f"own.{name}"], value, rtol=1e-9, atol=1e-9)
    for mine, theirs in zip(answered(one, left)[:7], answered(two, right)[:7], strict=True):
        np.testing.assert_allclose(theirs, mine, atol=1e-9)


def test_the_variance_is_at_its_optimum(net: Model) -> None:
    """Closed form: rho^2 minimises the KL, which is torch.distributions'."""
    params = some(net)

    def kl(rho: float | torch.Tensor) -> torch.Tensor:
        return sum(
            kl_divergence(
                Normal(params[f"own.{name}"], params[f"own.{name}.log_sigma"].exp()), Normal(params[name], rho)
            ).sum()
            for name in HEAD.names
        )  # type: ignore[return-value]

    rho = HEAD.variance(params).sqrt()
    torch.testing.assert_close(HEAD.kl(params), kl(rho))
    assert kl(rho) < min(kl(1.01 * rho), kl(0.99 * rho))


@pytest.mark.parametrize("pad", [None, 3])
def test_the_loss_is_the_mean_over_draws(net: Model, make_batch: Callable[..., Batch], pad: int | None) -> None:
    """Closed form: the cross-entropy of each drawn head, and the KL over the client's rows; padding does not count."""
    params, batch = some(net), make_batch(5, pad=pad, size=20.0)
    weights, bias = HEAD.drawn(params, rng.split(batch.key, 3))
    losses = [
        cross_entropy(net.apply(params | {"fc2.weight": w, "fc2.bias": b}, batch.x[:5], None)[0], batch.y[:5])
        for w, b in zip(weights, bias, strict=True)
    ]
    wanted = torch.stack(losses).mean() + 0.5 * HEAD.kl(params) / 20
    torch.testing.assert_close(vem.expected(net, HEAD, 3, 0.5)(params, batch, {}), wanted)
    assert float((weights[0] - weights[1]).abs().min()) > 0


def test_confident_clients_speak_louder() -> None:
    """Closed form: mu = sum m / rho^2 over sum 1 / rho^2, whatever the data sizes; one without rows is not heard."""
    setup = setup_of("pfedvem", PASSES)
    state = start(setup)
    got = {name: value.expand(3, *value.shape) for name, value in state.params.items()}
    answers = dict(got)
    for name in HEAD.names:
        answers[name] = torch.stack([torch.full_like(state.params[name], value) for value in (1.0, 2.0, 100.0)])
    answers[vem.VARIANCE] = torch.tensor([0.5, 0.25, 0.001]).double()
    targets = vem.by_confidence(HEAD)(answers, torch.tensor([0.9, 0.1, 0.0]).double())
    for name in HEAD.names:
        torch.testing.assert_close(targets[name], torch.full_like(answers[name], (1 / 0.5 + 2 / 0.25) / (2 + 4)))
    assert targets["fc0.weight"] is answers["fc0.weight"]


def test_the_server_takes_the_consensus() -> None:
    """Closed form, a whole round: the latent head from what clients keep, and rho^2 of what they sent."""
    setup = setup_of("pfedvem", PASSES)
    before, after = start(setup), trained(setup, rounds=1, cohort=7)
    rows = kept(after)
    assert float(rows[vem.BEGUN].min()) == 1.0
    rho = torch.func.vmap(
        lambda own: HEAD.variance({name: before.params[name] for name in HEAD.names} | own)
    )(rows)  # fmt: skip
    share = (1 / rho) / (1 / rho).sum()
    for name in HEAD.names:
        wanted = torch.einsum("c,c...->...", share, rows[f"own.{name}"])
        torch.testing.assert_close(after.params[name], wanted, rtol=1e-9, atol=1e-9)
    size = torch.tensor([float(len(each)) for each in setup.pool.federation.train[:7]]).double()
    torch.testing.assert_close(after.params[vem.VARIANCE], (size * rho).sum() / size.sum())


def test_schedules_agree() -> None:
    """Parity: loop, threads, vmap and steps in buffers; spreads are kept and not sent."""
    setup = setup_of("pfedvem", PASSES)
    state = assert_schedules_agree(setup)
    assert list(state.params) == [*setup_of("fedavg").algorithm.emit.init(state.key), vem.VARIANCE]
    spread = kept(state)["own.fc2.weight.log_sigma"]
    assert float((spread - np.log(0.1)).abs().max()) > 1e-6


def test_a_miscounted_phase_is_another_result() -> None:
    """The comparison above can fail: steps that take themselves for the next ones end elsewhere."""
    setup = setup_of("pfedvem", PASSES)
    wrong = trained(setup, rounds=1, algorithm=late(setup.algorithm))
    assert max(differences(trained(setup, rounds=1).params, wrong.params)) > 1e-6


def test_a_first_turn_starts_at_the_latent_head(net: Model) -> None:
    """Law: mu for a client that begins, its own mean for one that has begun; use puts its mean into the network."""
    new, old = HEAD.begun(some(net, begun=0.0)), HEAD.begun(some(net))
    for name in HEAD.names:
        assert torch.equal(new[f"own.{name}"], new[name])
        assert not torch.equal(old[f"own.{name}"], old[name])
        assert torch.equal(HEAD.used(old)[name], old[f"own.{name}"])
    assert set(HEAD.used(old)) == set(net.init(rng.key(0)))


def test_a_newcomer_starts_at_the_latent_head_and_fits_its_own() -> None:
    """Law: without a pass it answers with mu; with passes its head alone has moved."""
    setup = setup_of("pfedvem", PASSES)
    state = trained(setup, rounds=2)
    stage = setup.algorithm.newcomer.stage  # type: ignore[union-attr]
    got = setup.algorithm.serve(state.params, torch.tensor(0), state.round)
    mine = {name: value[0] for name, value in held(setup.algorithm, state, [8]).items()}
    own, _ = stage(got | mine, [])
    assert_close({name: value for name, value in got.items() if name != vem.VARIANCE}, own, 0.0)
    x, y = rng.normal(rng.key(5), [9, 6], torch.float64), torch.arange(9) % 4
    fitted, _ = stage(got | mine, [Batch(x, y, None, rng.key(6), state.round, torch.tensor(9.0).double())])
    assert {name for name in own if not torch.equal(own[name], fitted[name])} == set(HEAD.names)


def test_takes_no_regulariser(net: Model, setting: Setting) -> None:
    """Its loss is its own."""
    with pytest.raises(SpecError, match="is not possible"):
        algorithm("pfedvem+dropout", net, setting)
