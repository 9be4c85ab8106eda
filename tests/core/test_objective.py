"""Closed forms of what a client minimises."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import grad
from torch.nn import functional
from torch.testing import assert_close

from metavd.core import objective, rng
from metavd.core.model import attach
from metavd.core.posterior import LogAlpha, LogVariance

NOISE = LogVariance(("fc1",), offset=-2.0)


@pytest.fixture
def params(net):
    return net.init(rng.key(0))


# --- cross-entropy -------------------------------------------------------------------------------------------------


def test_cross_entropy_is_the_mean_over_real_rows(net, params, make_batch):
    """Without draws: torch's cross-entropy at the posterior mean; padded rows do not count, whatever they hold."""
    batch = make_batch(5)
    logits = net.apply(params, batch.x, None)[0]
    loss = objective.cross_entropy(net)
    assert_close(loss(params, batch, params), functional.cross_entropy(logits, batch.y), rtol=0, atol=1e-14)
    assert_close(loss(params, make_batch(5, pad=3), params), loss(params, batch, params), rtol=0, atol=1e-14)


def test_draws_average_logits_not_losses(net, params, make_batch):
    """CE of the mean of S logit draws, whose keys are split from the batch's key."""
    noisy, batch = attach(net, NOISE), make_batch(5)
    draws = noisy.apply(params, batch.x, rng.split(batch.key, 3))
    found = objective.cross_entropy(noisy, 3)(params, batch, params)
    assert_close(found, functional.cross_entropy(draws.mean(0), batch.y), rtol=0, atol=1e-14)
    apart = torch.stack([functional.cross_entropy(draw, batch.y) for draw in draws]).mean()
    assert (found - apart).abs() > 1e-4
    padded = objective.cross_entropy(noisy, 3)(params, make_batch(5, pad=4), params)
    assert_close(padded, found, rtol=0, atol=1e-13)


def test_draws_may_average_losses(net, params, make_batch):
    """The mean of S cross-entropies, of the same draws; padded rows do not count; without draws there is one."""
    noisy, batch = attach(net, NOISE), make_batch(5)
    draws = noisy.apply(params, batch.x, rng.split(batch.key, 3))
    wanted = torch.stack([functional.cross_entropy(draw, batch.y) for draw in draws]).mean()
    loss = objective.cross_entropy(noisy, 3, "loss")
    assert_close(loss(params, batch, params), wanted, rtol=0, atol=1e-14)
    assert_close(loss(params, make_batch(5, pad=4), params), wanted, rtol=0, atol=1e-13)
    without = objective.cross_entropy(net, 0, "loss")(params, batch, params)
    assert torch.equal(without, objective.cross_entropy(net)(params, batch, params))


def test_soft_cross_entropy(make_batch):
    """- sum_k t_k log softmax(z)_k, mean over rows; equal to torch's with probabilities as targets."""
    logits, target = make_batch(6, shape=(3,)).x, make_batch(6, seed=1, shape=(3,)).x.softmax(-1)
    found = objective.soft_cross_entropy(logits, target)
    assert_close(found, functional.cross_entropy(logits, target), rtol=0, atol=1e-14)


# --- proximal term and KL ------------------------------------------------------------------------------------------


def test_proximal(params, make_batch):
    """Value mu/2 |w - w_received|^2 over all entries, slope mu (w - w_received), none towards the anchor."""
    anchor = {name: value + 0.1 for name, value in params.items()}
    term, batch = objective.proximal(0.3), make_batch()
    size = sum(value.numel() for value in params.values())
    assert term(params, batch, anchor).item() == pytest.approx(0.15 * size * 0.01)
    slopes = grad(term)(params, batch, anchor)
    for slope in slopes.values():
        assert_close(slope, torch.full_like(slope, -0.03), rtol=1e-12, atol=0)
    assert term(params, batch, params) == 0
    assert all((slope == 0).all() for slope in grad(term, argnums=2)(params, batch, anchor).values())


def test_divergence_as_mean(params, make_batch):
    """Adds beta x the mean of log(2)/2 at alpha = 1, whatever the client's size; its slope is -beta (1 - p)/(2K)."""
    noise = LogAlpha(("fc1",), offset=0.0)
    own = params | {"fc1.logalpha": torch.zeros(3, 6).double()}
    term = objective.divergence(noise, lambda round: 7.0 * torch.ones_like(round))
    for size in (1.0, 400.0):
        assert term(own, make_batch(size=size), own).item() == pytest.approx(3.5 * math.log(2.0))
    slope = grad(term)(own, make_batch(), own)["fc1.logalpha"]
    assert_close(slope, -7.0 * (1 - noise.rates(own)["fc1"]) / (2 * 18), rtol=1e-12, atol=0)


def test_divergence_as_elbo(params, make_batch):
    """Adds beta x sum KL / n: with beta = 1, CE + KL is the negative ELBO a sample; n is at least one."""
    noise = LogAlpha(("fc1",), offset=0.0)
    own = params | {"fc1.logalpha": torch.zeros(3, 6).double()}
    term = objective.divergence(noise, torch.ones_like, "elbo")
    for size, wanted in ((1.0, 1.0), (40.0, 40.0), (0.0, 1.0)):
        assert term(own, make_batch(size=size), own).item() == pytest.approx(18 * 0.5 * math.log(2.0) / wanted)


def test_divergence_reads_the_round(params, make_batch):
    """The schedule is asked with the batch's round."""
    own = params | {"fc1.logvar": torch.zeros(3, 6).double()}
    term = objective.divergence(NOISE, lambda round: round)
    assert term(own, make_batch(round=0.0), own) == 0
    once, twice = (term(own, make_batch(round=float(r)), own) for r in (1, 2))
    assert_close(twice, 2 * once)


def test_a_round_earlier(params, make_batch):
    """Schedules are asked for the round before, and for the first where there is none before."""
    own = params | {"fc1.logvar": torch.zeros(3, 6).double()}
    term = objective.divergence(NOISE, lambda round: 1.0 + round)
    earlier = objective.a_round_earlier(term)
    for now, before in ((7.0, 6.0), (1.0, 0.0), (0.0, 0.0)):
        assert earlier(own, make_batch(round=now), own) == term(own, make_batch(round=before), own)


def test_total_is_the_sum(net, params, make_batch):
    """Terms add up, and so do their gradients."""
    batch, anchor = make_batch(), {name: 0.9 * value for name, value in params.items()}
    terms = [objective.cross_entropy(net), objective.proximal(0.5)]
    both = objective.total(*terms)
    assert_close(both(params, batch, anchor), sum(term(params, batch, anchor) for term in terms))
    slopes = [grad(term)(params, batch, anchor)["fc1.weight"] for term in terms]
    assert_close(grad(both)(params, batch, anchor)["fc1.weight"], slopes[0] + slopes[1])


# --- schedule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("rounds", "round", "beta", "digits"),
    [
        *[(1000, r, b, d) for r, b, d in [(0, 0.0247, 4), (5, 0.474, 3), (8, 2.31, 2), (10, 5.00, 2), (12, 7.69, 2),
                                          (15, 9.53, 2), (20, 9.975, 3), (21, 10.0, 9), (999, 10.0, 9)]],
        *[(300, r, b, d) for r, b, d in [(0, 0.0247, 4), (3, 5.0, 9), (6, 9.975, 3), (7, 10.0, 9), (299, 10.0, 9)]],
    ],
)  # fmt: skip
def test_ramp_has_the_released_values(rounds, round, beta, digits, dtype):
    """A sigmoid over 2 % of the rounds: R = 1000 rises over 20 rounds, R = 300 over 6, and is exactly beta after."""
    found = objective.ramp(10.0, rounds)(torch.tensor(float(round), dtype=dtype))
    assert found.dtype == dtype
    assert found.item() == pytest.approx(beta, abs=0.51 * 10.0**-digits if digits < 9 else 1e-6)
    if round > 0.02 * rounds:
        assert found.item() == 10.0


def test_ramp_scales_and_can_be_off():
    """It is proportional to beta; a share of 0 is beta from the first round on; the last round of a ramp belongs."""
    at = torch.tensor(5.0)
    assert_close(objective.ramp(3.0, 1000)(at), 0.3 * objective.ramp(10.0, 1000)(at))
    assert objective.ramp(3.0, 1000, share=0.0)(torch.tensor(0.0)) == 3.0
    for rounds, share in ((100, 0.07), (100, 0.29), (350, 0.02), (150, 0.02)):
        last = torch.tensor(float(round(rounds * share)))
        assert objective.ramp(1.0, rounds, share)(last) < 1.0
        assert objective.ramp(1.0, rounds, share)(last + 1) == 1.0
