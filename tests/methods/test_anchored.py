"""The anchored prior: KL = 1/2 (a/a0 - 1 - log(a/a0)), which keeps spreads near the rate that they start at."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from rival_laws import assert_same, assert_schedules_agree, batches_in, setup_of
from torch.distributions import Normal, kl_divergence
from torch.func import grad

from metavd.core.posterior import POSTERIORS, Spread, logit
from metavd.errors import SpecError
from metavd.methods.variational import PosteriorOptions
from metavd.runs.setup import start

USUAL = PosteriorOptions().choice
"""What a method asks of a posterior by default."""
THETA = torch.linspace(-0.4, 0.5, 12, dtype=torch.float64).reshape(3, 4)
ANCHORED: dict[str, Any] = {"prior": "anchored", "rate": 0.2}
INPUTS: dict[str, Any] = {**ANCHORED, "per": "input", "draws": 1, "beta_ramp": 0.0}


def built(kind: str, clamp: Any = "inward") -> Spread:
    """Return a posterior of one layer that starts, and stays, at rate 0.2."""
    choice = replace(USUAL, rate=0.2, ceiling=2.0, clamp=clamp, prior="anchored")
    made = POSTERIORS[kind].build(("fc",), lambda: {"fc.weight": THETA}, choice)
    assert isinstance(made, Spread)
    return made


def at(noise: Spread, distance: torch.Tensor | float, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Return parameters whose spreads are so far from their start, in logarithms."""
    ((entry, shape),) = noise.entries("fc", (3, 4)).items()
    stored = torch.full(shape, noise.start(entry), dtype=dtype) + torch.as_tensor(distance, dtype=dtype)
    return {"fc.weight": THETA.to(dtype), entry: stored}


@pytest.mark.parametrize("clamp", ["inward", "through", "released"])
@pytest.mark.parametrize("kind", ["logvar", "logalpha", "input"])
def test_it_is_exactly_zero_and_flat_where_it_is_anchored_and_positive_elsewhere(kind: str, clamp: str) -> None:
    noise = built(kind, clamp)
    for dtype in (torch.float32, torch.float64):
        here = at(noise, 0.0, dtype)
        assert noise.kl(here).item() == 0.0
        assert not grad(noise.kl)(here)[noise.entry("fc")].any()
        assert all(noise.kl(at(noise, far, dtype)).item() > 0 for far in (-3.0, -0.1, -0.01, 0.01, 0.1, 1.0))
    assert noise.kl({"fc.weight": THETA}).item() == 0.0, "a spread that is not stored stays where it starts"


@pytest.mark.parametrize("kind", ["logvar", "logalpha", "input"])
def test_it_is_a_kl_of_normals_with_one_mean(kind: str) -> None:
    """Torch's own KL, and for each spread the formula; a rate p stands for a = p / (1 - p)."""
    noise, far = built(kind), torch.linspace(-2.0, 1.0, 12, dtype=torch.float64)
    far = far[:4] if kind == "input" else far.reshape(3, 4)
    params = at(noise, far)
    spread = noise.spread(params, "fc")
    first = noise.spread(at(noise, 0.0), "fc")
    if kind != "logvar":
        assert first.flatten()[0].item() == pytest.approx(logit(0.2), abs=1e-12)
    mean = torch.zeros_like(spread)
    wanted = kl_divergence(Normal(mean, (spread / 2).exp()), Normal(mean, (first / 2).exp()))
    torch.testing.assert_close(noise.kl_terms(params, "fc"), wanted, rtol=1e-10, atol=1e-12)
    ratio = (spread - first).exp()
    torch.testing.assert_close(wanted, 0.5 * (ratio - 1 - ratio.log()), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(noise.kl(params), wanted.mean())
    torch.testing.assert_close(noise.kl(params, mean=False), wanted.sum())


@pytest.mark.parametrize("kind", ["logvar", "logalpha", "input"])
def test_its_slope_is_half_of_a_over_a0_less_one(kind: str) -> None:
    """Closed form, autograd and finite differences; the weights get none of it."""
    noise, step = built(kind), 1e-5

    def total(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return noise.kl(params, mean=False)

    for far in (-1.5, -0.2, 0.3, 1.0):
        slopes = grad(total)(at(noise, far))
        found = slopes[noise.entry("fc")]
        assert not slopes["fc.weight"].any()
        torch.testing.assert_close(found, torch.full_like(found, 0.5 * math.expm1(far)))
        rise = (total(at(noise, far + step)) - total(at(noise, far - step))) / (2 * step)
        assert rise.item() == pytest.approx(found.sum().item(), rel=1e-7)


def test_dropped_weights_do_not_count() -> None:
    noise = built("logvar")
    params = at(noise, 0.7) | {"fc.mask": torch.eye(3, 4, dtype=torch.float64)}
    one = 0.5 * (math.expm1(0.7) - 0.7)
    assert noise.kl(params, mean=False).item() == pytest.approx(3 * one)


def test_a_first_step_is_that_of_fixed_dropout_to_the_bit_whatever_beta() -> None:
    """Where the spread has not moved, the noise is `+dropout`'s and the KL is 0: the same loss, the same slopes."""
    fixed = setup_of("reptile+dropout", rate=0.2)
    held = setup_of("reptile+vd", **INPUTS, layer_init="model", beta=1e12)
    batches, zero = batches_in(fixed, start(fixed), 0)[:1], torch.tensor(0)
    received = start(held).params
    wanted, loss = fixed.algorithm.local.step(start(fixed).params, batches, start(fixed).params, zero)
    found, same = held.algorithm.local.step(received, batches, received, zero)
    assert torch.equal(same, loss)
    for name, slope in wanted.slope.items():
        assert torch.equal(found.slope[name], slope), name


def test_a_turn_whose_spread_cannot_move_is_that_of_fixed_dropout_to_the_bit() -> None:
    pinned = {"floor": logit(0.2), "max_rate": 0.2, "layer_init": "model", "beta": 1e6, "clip": 1e9}
    fixed, held = setup_of("reptile+dropout", rate=0.2, clip=1e9), setup_of("reptile+vd", **INPUTS, **pinned)
    batches = batches_in(fixed, start(fixed), 0)
    wanted, loss = fixed.algorithm.local(start(fixed).params, batches)
    found, same = held.algorithm.local(start(held).params, batches)
    assert torch.equal(same, loss)
    assert_same({name: found[name] for name in wanted}, wanted, within=0)


def test_the_larger_beta_the_nearer_rates_stay() -> None:
    """A turn takes spreads less and less far: the KL's slope balances the loss's."""

    def distance(beta: float) -> float:
        # Steps stay below what the KL's curvature allows: lr beta / (2 x 13 rates) < 1.
        setup = setup_of("reptile+vd", **INPUTS, beta=beta, local_epochs=10, lr=0.05)
        ended, _ = setup.algorithm.local(start(setup).params, batches_in(setup, start(setup), 0))
        return max(float(value.abs().max()) for name, value in ended.items() if name.endswith("logalpha"))

    free, near, nearer = (distance(beta) for beta in (0.0, 40.0, 400.0))
    assert near < 0.5 * free
    assert nearer < 0.5 * near


@pytest.mark.parametrize("name", ["reptile+metavd", "maml+vd"])
def test_schedules_agree(name: str) -> None:
    assert_schedules_agree(setup_of(name, **ANCHORED))


def test_an_anchor_without_a_rate_is_refused_in_a_sentence() -> None:
    with pytest.raises(SpecError, match="prior is anchored at rate, but rate is 0; give the rate to stay near"):
        setup_of("reptile+metavd", prior="anchored")


def test_the_usual_prior_goes_without_saying() -> None:
    """Files of personal models from before there was another say nothing of it, and still open."""
    assert "prior" not in POSTERIORS["logvar"].build(("fc",), dict, USUAL).describe()
    assert built("logvar").describe()["prior"] == "anchored"
