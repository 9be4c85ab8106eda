"""Closed forms of the posterior: its clamp and the clamp's gradient, its spread, dropout rates and KL."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import grad, hessian, jacrev, vmap
from torch.testing import assert_close

from metavd.core import rng
from metavd.core.variational import Noise, clamp, inward, kl, kl_terms, log_alpha, per_weight, rates, spread, variance
from metavd.core.variational import without_gradient as stuck

LOW, HIGH = -8.5, 8.5


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def slope(function, x):
    return jacrev(function)(x).diagonal()


def released(**options):
    """The released code's parameterisation: nothing is stored as a distance, and the clamp stops gradients."""
    return Noise(("fc",), offset=0.0, start=LOW, low=LOW, high=HIGH, through=False, **options)


# --- clamp ---------------------------------------------------------------------------------------------------------

POINTS = double(-20.0, -8.5 - 1e-9, -8.5, -8.5 + 1e-9, 0.3, 8.5 - 1e-9, 8.5, 8.5 + 1e-9, 20.0)


@pytest.mark.parametrize("through", [True, False])
def test_clamp_bounds(through):
    """The value is min(max(x, low), high), with and without straight-through gradients."""
    assert_close(clamp(POINTS, LOW, HIGH, through=through), POINTS.clamp(LOW, HIGH), rtol=0, atol=1e-14)


def test_clamp_lets_gradients_through():
    """Straight through: slope 1 inside, on the boundary and outside, so nothing is ever stuck."""
    assert slope(lambda x: clamp(x, LOW, HIGH), POINTS).tolist() == [1.0] * 9


def test_released_clamp_stops_gradients_outside():
    """Released: slope 1 inside and on both boundaries, 0 outside, on every version of torch."""
    assert slope(lambda x: clamp(x, LOW, HIGH, through=False), POINTS).tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("through", [True, False])
def test_clamp_gradient_by_backward_and_in_float32(through):
    """The same slopes by backward() in float32 as by torch.func in float64, and under vmap."""
    x = POINTS.float().requires_grad_()
    clamp(x, LOW, HIGH, through=through).sum().backward()
    wanted = torch.ones(9) if through else ((x >= LOW) & (x <= HIGH)).float()
    assert_close(x.grad, wanted, rtol=0, atol=0)
    inside = vmap(grad(lambda x: clamp(x, LOW, HIGH, through=through)))(POINTS)
    assert_close(inside, slope(lambda x: clamp(x, LOW, HIGH, through=through), POINTS), rtol=0, atol=0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_inward_stops_what_leads_out(sign):
    """Closed form: slope 1 inside; from the boundary on, 1 for a push that leads back and 0 for one that leads out.

    The same one by one, under vmap and grad, and at second order.
    """
    x = POINTS.clone().requires_grad_()
    value = inward(x, LOW, HIGH)
    assert_close(value, POINTS.clamp(LOW, HIGH), rtol=0, atol=0)
    (sign * value).sum().backward()
    out = (POINTS >= HIGH) if sign < 0 else (POINTS <= LOW)  # descent with slope -1 goes up
    assert_close(x.grad, torch.where(out, 0.0, sign).double(), rtol=0, atol=0)
    each = vmap(grad(lambda x: sign * inward(x, LOW, HIGH)))(POINTS)
    assert_close(each, x.grad, rtol=0, atol=0)
    slopes = grad(lambda x: grad(lambda x: (sign * inward(x, LOW, HIGH)).exp().sum())(x).sum())(POINTS)
    bounded = (sign * POINTS.clamp(LOW, HIGH)).exp()
    # The second slope is positive everywhere, so at the lower end it leads out itself.
    assert_close(slopes, torch.where(out | (POINTS <= LOW), 0.0, bounded), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("through", [True, False])
def test_clamp_has_a_second_order(through):
    """d^2/dx^2 exp(clamp x) = slope^2 exp(clamp x): the second derivative sees the same slopes as the first."""
    curved = hessian(lambda x: clamp(x, LOW, HIGH, through=through).exp().sum())(POINTS).diagonal()
    slopes = slope(lambda x: clamp(x, LOW, HIGH, through=through), POINTS)
    assert_close(curved, slopes.square() * POINTS.clamp(LOW, HIGH).exp(), rtol=1e-12, atol=0)


# --- parameterisation ------------------------------------------------------------------------------------------------


def test_anchor_values():
    """sigma(-8.5) = 0.014264, and p = 0.172 for theta = 0.03125 there; both parameterisations start so."""
    theta = torch.full((2, 3), 0.03125).double()
    for noise, stored in ((Noise(("fc",)), 0.0), (released(), -8.5)):
        params = {"fc.weight": theta, "fc.logvar": torch.full((2, 3), stored).double()}
        assert variance(noise, params, "fc").sqrt()[0, 0].item() == pytest.approx(0.014264, abs=5e-7)
        assert rates(noise, params)["fc"][0, 0].item() == pytest.approx(0.172, abs=5e-4)


def test_rates_of_the_initial_layer():
    """For theta ~ U(+-1/16), log sigma^2 = -8.5: median rate 0.17; 7.6 % of the rates above 0.9, 11.4 % above 0.8."""
    theta = (2.0 * rng.uniform(rng.key(0), [128, 256], torch.float64) - 1.0) / 16.0
    rate = rates(Noise(("fc",)), {"fc.weight": theta})["fc"]
    assert rate.median().item() == pytest.approx(0.172, abs=0.005)
    # P(p > q) = P(theta^2 < sigma^2 (1 - q) / q) = 16 sigma sqrt((1 - q) / q)
    for q, share in ((0.9, 0.0761), (0.8, 0.1141)):
        exact = 16.0 * math.exp(-4.25) * math.sqrt((1 - q) / q)
        assert exact == pytest.approx(share, abs=1e-4)
        assert (rate > q).double().mean().item() == pytest.approx(exact, abs=0.005)


@pytest.mark.parametrize(
    ("kind", "entry", "shape"),
    [("logvar", "fc.logvar", (3, 2, 5, 5)), ("logalpha", "fc.logalpha", (3, 2, 5, 5)), ("input", "fc.logalpha", (2,))],
)
def test_names_and_shapes(kind, entry, shape):
    """One number a weight, or one an input channel, under the name of what is learned."""
    noise = Noise(("fc",), kind)
    assert noise.entry("fc") == entry
    assert noise.shape((3, 2, 5, 5)) == shape


def test_variance_has_the_three_forms():
    """exp(lambda), alpha theta^2, and alpha_j theta_ij^2."""
    theta, stored = double([0.5, -2.0, 0.0], [1.0, 3.0, -0.1]), double([0.1, -0.2, 0.3], [0.4, 0.0, -1.0])
    alpha = double(0.1, 2.0, -1.0)
    cases = {
        "logvar": (stored, (stored - 3.0).exp()),
        "logalpha": (stored, (stored - 3.0).exp() * theta.square()),
        "input": (alpha, (alpha - 3.0).exp()[None, :] * theta.square()),
    }
    for kind, (value, wanted) in cases.items():
        noise = Noise(("fc",), kind, offset=-3.0)
        params = {"fc.weight": theta, noise.entry("fc"): value}
        assert_close(variance(noise, params, "fc"), wanted, rtol=1e-12, atol=0)
        p = per_weight(rates(noise, params)["fc"], theta)
        away = theta != 0
        assert_close(p[away], (wanted / (wanted + theta.square()))[away], rtol=1e-9, atol=0)


def test_variance_of_channels():
    """One alpha an input channel multiplies that channel's kernels: alpha_j theta_ij^2 at every pixel."""
    theta, alpha = rng.normal(rng.key(0), [2, 3, 3, 3], torch.float64), double(0.5, 1.0, 2.0)
    found = variance(Noise(("fc",), "input", offset=0.0), {"fc.weight": theta, "fc.logalpha": alpha.log()}, "fc")
    assert_close(found, alpha[None, :, None, None] * theta.square())


def test_rates_follow_alpha():
    """Rates p = alpha / (1 + alpha), for a weight of zero under a log sigma^2 practically 1."""
    noise = Noise(("fc",), "logalpha", offset=0.0)
    assert_close(rates(noise, {"fc.weight": double(2.0), "fc.logalpha": double(math.log(3.0))})["fc"], double(0.75))
    assert rates(Noise(("fc",)), {"fc.weight": double(0.0)})["fc"].item() > 1 - 1e-8


def test_spread_is_clamped_and_starts_at_its_first_value():
    """It is offset + clamp(stored) in [low, high]; a layer that stores nothing has offset + start."""
    noise = Noise(("fc",), offset=-8.5, low=-17.0, high=0.0)
    params = {"fc.weight": torch.zeros(3).double(), "fc.logvar": double(-100.0, 1.0, 100.0)}
    assert spread(noise, params, "fc").tolist() == [-17.0, -7.5, 0.0]
    assert spread(noise, {"fc.weight": torch.zeros(2, 3).double()}, "fc").tolist() == [[-8.5] * 3] * 2
    assert spread(released(), {"fc.weight": torch.zeros(2).double()}, "fc").tolist() == [-8.5] * 2
    assert spread(Noise(("fc",), "input", offset=-1.0, start=0.5), {"fc.weight": torch.zeros(2, 3)}, "fc").shape == (3,)


def test_per_weight_spreads_over_columns():
    """A number an input unit stands for that unit's column, of matrices and of kernels; a number a weight passes."""
    value, matrix, kernel = double(1.0, 2.0), torch.zeros(3, 2), torch.zeros(3, 2, 4, 4)
    assert per_weight(value, matrix).tolist() == [[1.0, 2.0]] * 3
    wide = per_weight(value, kernel)
    assert wide.shape == kernel.shape
    assert (wide[:, 0] == 1).all()
    assert (wide[:, 1] == 2).all()
    assert per_weight(matrix, matrix) is matrix


def test_log_alpha_holds_theta_fixed():
    """Here log alpha = lambda - log theta^2 moves with the spread and sends no gradient to the weight."""
    noise, theta, stored = Noise(("fc",)), double(0.3, -2.0), double(0.2, 0.4)
    by_theta = jacrev(lambda w: log_alpha(noise, {"fc.weight": w, "fc.logvar": stored}, "fc"))(theta)
    by_stored = jacrev(lambda s: log_alpha(noise, {"fc.weight": theta, "fc.logvar": s}, "fc"))(stored)
    assert (by_theta == 0).all()
    assert_close(by_stored, torch.eye(2).double(), rtol=0, atol=0)


def test_first_small_steps_count_in_float32():
    """A step of 3e-7 at -8.5 is kept as a distance from -8.5, where float32 would otherwise round it away."""
    step = torch.tensor(3.05e-7 * 0.5)
    assert (torch.tensor(-8.5) + step) == torch.tensor(-8.5)
    near = {"fc.weight": torch.tensor([0.0]), "fc.logvar": torch.tensor([0.0])}
    moved = near["fc.logvar"] + step
    assert moved > near["fc.logvar"]
    for _ in range(7):
        moved = moved + step
    assert spread(Noise(("fc",)), near | {"fc.logvar": moved}, "fc") > -8.5


# --- KL ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["logvar", "logalpha", "input"])
def test_kl_at_alpha_one(kind):
    """At alpha = 1 the KL is log(2)/2 = 0.34657 a posterior, as mean and as sum."""
    theta = torch.full((2, 3), 0.5).double()
    noise = Noise(("fc",), kind, offset=math.log(0.25) if kind == "logvar" else 0.0)
    params = {"fc.weight": theta, noise.entry("fc"): torch.zeros(noise.shape(theta.shape)).double()}
    count = 3 if kind == "input" else 6
    assert kl(noise, params).item() == pytest.approx(0.5 * math.log(2.0), abs=1e-9)
    assert kl(noise, params, mean=False).item() == pytest.approx(count * 0.34657359, abs=1e-7)


@pytest.mark.parametrize("kind", ["logvar", "logalpha", "input"])
@pytest.mark.parametrize("mean", [True, False])
def test_kl_gradient(kind, mean):
    """Slope d KL / d lambda_k = -(1 - p_k) / (2 K), K = 1 for the sum: always towards more noise. theta gets none."""
    noise = Noise(("fc",), kind, offset=-2.0)
    theta = double([0.1, -0.7, 1.5], [0.0, 0.3, -0.2])
    stored = double(0.5, -1.0, 1.0) if kind == "input" else double([0.5, -1.0, 1.0], [0.1, 0.2, 0.3])
    entry = noise.entry("fc")

    def loss(params):
        return kl(noise, params, mean=mean)

    params = {"fc.weight": theta, entry: stored}
    slopes = grad(loss)(params)
    p = rates(noise, params)["fc"]
    assert_close(slopes[entry], -(1 - p) / (2 * (stored.numel() if mean else 1)), rtol=1e-8, atol=1e-12)
    assert (slopes["fc.weight"] == 0).all()


def test_kl_is_half_log_one_plus_odds():
    """KL = 1/2 log(1 + theta^2 / sigma^2), whichever way sigma^2 = alpha theta^2 is parameterised."""
    theta, logvar = double(0.3, -1.2), double(-3.0, 0.4)
    exact = 0.5 * torch.log1p(theta.square() / logvar.exp())
    absolute = kl_terms(Noise(("fc",), offset=0.0), {"fc.weight": theta, "fc.logvar": logvar}, "fc")
    relative = logvar - theta.square().log()
    other = kl_terms(Noise(("fc",), "logalpha", offset=0.0), {"fc.weight": theta, "fc.logalpha": relative}, "fc")
    assert_close(absolute, exact, rtol=1e-9, atol=0)
    assert_close(other, exact, rtol=1e-9, atol=0)


def test_kl_over_layers_weighs_every_posterior_alike():
    """The mean runs over all posteriors of all layers, not over layers; masked ones add nothing."""
    noise = Noise(("a", "b"), "logalpha", offset=0.0)
    params = {
        "a.weight": torch.ones(1, 2).double(), "a.logalpha": torch.zeros(1, 2).double(),
        "b.weight": torch.ones(2, 3).double(), "b.logalpha": torch.full((2, 3), 50.0).double(),
    }  # fmt: skip
    noise = Noise(("a", "b"), "logalpha", offset=0.0, high=60.0)
    assert kl(noise, params).item() == pytest.approx(2 * 0.5 * math.log(2.0) / 8, abs=1e-12)
    masked = params | {"a.mask": double([1.0, 0.0])}
    assert kl(noise, masked, mean=False).item() == pytest.approx(0.5 * math.log(2.0), abs=1e-12)
    assert grad(lambda p: kl(noise, p))(masked)["a.logalpha"][0, 1] == 0


def test_kl_stays_finite_at_the_ends():
    """A theta of 0, or a spread at its floor, gives a finite KL and gradient."""
    params = {"fc.weight": double(0.0, 1e3), "fc.logvar": double(-100.0, -100.0)}
    noise = Noise(("fc",), low=-60.0)
    assert kl(noise, params).isfinite()
    assert grad(lambda p: kl(noise, p))(params)["fc.logvar"].isfinite().all()


# --- dead zone -----------------------------------------------------------------------------------------------------


def test_dead_zone_is_where_the_released_clamp_has_no_gradient():
    """`without_gradient` marks exactly the stored values whose KL gradient is zero; straight through marks none.

    An inward clamp marks those at the ceiling: the KL wants more noise, and there is no more to be had.
    """
    stored = double(-17.0, -8.6, -8.5, -8.4, 0.0, 8.5, 8.6)
    params = {"fc.weight": torch.full((7,), 0.1).double(), "fc.logvar": stored}
    noise = released()
    slopes = grad(lambda p: kl(noise, p))(params)["fc.logvar"]
    assert stuck(noise, stored).tolist() == (slopes == 0).tolist() == [True, True, False, False, False, False, True]
    free = Noise(("fc",))
    moved = {"fc.weight": params["fc.weight"], "fc.logvar": stored + 8.5}
    assert not stuck(free, moved["fc.logvar"]).any()
    assert (grad(lambda p: kl(free, p))(moved)["fc.logvar"] < 0).all()
    bounded = Noise(("fc",), offset=0.0, start=LOW, low=LOW, high=HIGH, inward=True)
    slopes = grad(lambda p: kl(bounded, p))(params)["fc.logvar"]
    assert stuck(bounded, stored).tolist() == (slopes == 0).tolist() == [False] * 5 + [True] * 2
