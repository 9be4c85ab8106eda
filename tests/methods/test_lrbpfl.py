"""LR-BPFL: without noise it is FedAvg; its KL and its weights are those of their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_world import answered, assert_close, assert_schedules_agree, differences, kept, setup_of, trained
from torch import nn
from torch.distributions import Normal, kl_divergence

from metavd.core import rank_one, rng
from metavd.core.model import from_module
from metavd.core.types import Batch, Model
from metavd.runs.setup import start

STILL = {"spread": 1e-12, "factor_rate": 0.0, "kl": 0.0, "answer_draws": 2}
"""Factors of 1 that stay there."""


def test_factors_of_one_without_spread_are_fedavg() -> None:
    """Law: the server's parameters and every participant's answers."""
    plain, still = setup_of("fedavg", {"local_epochs": 2}), setup_of("lrbpfl", {"local_epochs": 2, **STILL})
    one, two = trained(plain), trained(still)
    assert_close(one.params, two.params, 1e-9)
    for mine, theirs in zip(answered(plain, one), answered(still, two), strict=True):
        np.testing.assert_allclose(theirs, mine, atol=1e-9)
    for name, value in kept(two).items():
        expected = 1.0 if name.endswith("mean") else np.log(1e-12)
        torch.testing.assert_close(value, torch.full_like(value, expected), rtol=1e-15, atol=0)


def test_kl_is_that_of_the_normal_distribution() -> None:
    """Closed form, against torch.distributions."""
    factors = rank_one.Factors({"a": (3, 2), "b": (2, 3, 3, 3)}, 0.1)
    params = {
        name: rng.normal(rng.fold(rng.key(1), i), value.shape, torch.float64)
        for i, (name, value) in enumerate(factors.start(torch.zeros(1).double(), 0.1).items())
    }
    assert len(params) == 8
    assert all(map(factors.has, params))
    assert not factors.has("a.weight")
    wanted = sum(
        kl_divergence(Normal(params[name + "mean"], params[name + "log_sigma"].exp()), Normal(1.0, 0.1)).sum()
        for name in ("a.in_", "a.out_", "b.in_", "b.out_")
    )
    torch.testing.assert_close(factors.kl(params), wanted)


def test_a_draw_scales_inputs_and_outputs() -> None:
    """Closed form: y = b * (W (a * x)) + bias, of a linear layer and of a convolution's channels."""
    model = from_module(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(3, 4)).double())
    factors = rank_one.Factors(dict(model.layers), 0.1)
    params = model.init(rng.key(0)) | factors.start(torch.zeros(1).double(), 1e-12)
    for i, name in enumerate(name for name in params if name.endswith("_mean")):
        params[name] = rng.normal(rng.fold(rng.key(2), i), params[name].shape, torch.float64)
    x = rng.normal(rng.key(3), [5, 2, 3, 3], torch.float64)
    scaled = x * params["0.in_mean"][:, None, None]
    hidden = nn.functional.conv2d(scaled, params["0.weight"])[..., 0, 0] * params["0.out_mean"] + params["0.bias"]
    wanted = (hidden * params["2.in_mean"]) @ params["2.weight"].T * params["2.out_mean"] + params["2.bias"]
    found = model.apply(factors.draw(params, rng.key(4)), x, None)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("pad", [None, 3])
def test_the_loss_is_that_of_the_mean_of_the_draws(net: Model, make_batch, pad: int | None) -> None:
    """Closed form: -log mean_s p_s(y), whose draws are those of an answer with the same key; padding does not count."""
    factors = rank_one.Factors(dict(net.layers), 0.1)
    params = net.init(rng.key(0)) | factors.start(torch.zeros(1).double(), 0.3)
    batch: Batch = make_batch(6, pad=pad)
    said = rank_one.prediction(net, factors, 4)(params, batch.x, batch.key)
    wanted = -said.probs[torch.arange(6), batch.y[:6]].log().mean()
    torch.testing.assert_close(rank_one.mixture(net, factors, 4)(params, batch, {}), wanted)
    assert float(said.drawn["information"].min()) > 0
    single = rank_one.prediction(net, factors, 1)(params, batch.x, batch.key)
    assert float((said.probs - single.probs).abs().max()) > 1e-3, "the draws differ"


def test_schedules_agree() -> None:
    """Parity: loop, threads, vmap and steps in buffers; factors are kept by those that took part, and never sent."""
    setup = setup_of("lrbpfl", {"local_epochs": 1})
    state = assert_schedules_agree(setup)
    assert list(state.params) == list(start(setup).params)
    assert not any("sigma" in name for name in state.params)
    rows = kept(state)
    assert set(rows) == {f"fc{i}.{side}_{what}" for i in range(3) for side in ("in", "out")
                         for what in ("mean", "log_sigma")}  # fmt: skip
    assert float((rows["fc0.in_mean"][0] - rows["fc0.in_mean"][1]).abs().max()) > 1e-6


def test_the_kl_pulls_towards_the_prior() -> None:
    """Law: with a KL that outweighs the data, spreads go to the prior's."""
    setup = setup_of("lrbpfl", {"local_epochs": 4, "kl": 1e3, "spread": 0.05, "lr": 0.01})
    spread = kept(trained(setup, rounds=1, cohort=7))["fc0.in_log_sigma"].exp()
    assert float(spread.min()) > 0.0505
    assert float(spread.max()) < 0.1


def test_a_newcomer_fits_its_factors_alone() -> None:
    """Law: the weights of a client that never took part are those of the server; its factors are not 1."""
    setup = setup_of("lrbpfl", {"new_epochs": 3})
    newcomer = setup.algorithm.newcomer
    assert newcomer is not None
    assert newcomer.batches.epochs == 3
    state = trained(setup, rounds=2)
    assert setup.algorithm.keep is not None
    first = setup.algorithm.keep.init(state.key, torch.tensor(8))
    got = setup.algorithm.emit.apply(state.params, torch.tensor(0), state.round)
    x, y = rng.normal(rng.key(5), [9, 6], torch.float64), torch.arange(9) % 4
    batch = Batch(x, y, None, rng.key(6), state.round, torch.tensor(9.0).double())
    own, _ = newcomer.stage(got | first, [batch, batch])
    assert_close(got, {name: own[name] for name in got}, 0.0)
    assert min(differences(first, own)) > 0


def test_fine_tuning_goes_with_it() -> None:
    """`+ft` takes its steps on weights and factors."""
    setup = setup_of("lrbpfl+ft", {"local_epochs": 1})
    for probs in answered(setup, trained(setup, rounds=1)):
        np.testing.assert_allclose(probs.sum(1), 1.0, atol=1e-9)
