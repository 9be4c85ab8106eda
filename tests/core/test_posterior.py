"""Closed forms of the posteriors: spread, dropout rates, KL, precision; and who may add one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.func import grad, jacrev
from torch.testing import assert_close

from metavd.core import rng
from metavd.core.posterior import POSTERIORS, InputLogAlpha, LogAlpha, LogVariance, logit, named, per_weight
from metavd.methods.variational import PosteriorOptions

USUAL = PosteriorOptions().choice
"""What a method asks of a posterior by default."""
LOW, HIGH = -8.5, 8.5


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def released(**options):
    """The released code's parameterisation: nothing is stored as a distance, and the clamp stops gradients."""
    return LogVariance(("fc",), offset=0.0, first=LOW, low=LOW, high=HIGH, clamp="released", **options)


# --- parameterisation ------------------------------------------------------------------------------------------------


def test_anchor_values():
    """sigma(-8.5) = 0.014264, and p = 0.172 for theta = 0.03125 there; both parameterisations start so."""
    theta = torch.full((2, 3), 0.03125).double()
    for noise, stored in ((LogVariance(("fc",)), 0.0), (released(), -8.5)):
        params = {"fc.weight": theta, "fc.logvar": torch.full((2, 3), stored).double()}
        assert noise.variance(params, "fc").sqrt()[0, 0].item() == pytest.approx(0.014264, abs=5e-7)
        assert noise.rates(params)["fc"][0, 0].item() == pytest.approx(0.172, abs=5e-4)


def test_rates_of_the_initial_layer():
    """For theta ~ U(+-1/16), log sigma^2 = -8.5: median rate 0.17; 7.6 % of the rates above 0.9, 11.4 % above 0.8."""
    theta = (2.0 * rng.uniform(rng.key(0), [128, 256], torch.float64) - 1.0) / 16.0
    rate = LogVariance(("fc",)).rates({"fc.weight": theta})["fc"]
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
    """One number per weight, or one per input channel, under the name of what is learned."""
    noise = POSTERIORS[kind](("fc",))
    assert noise.entries("fc", (3, 2, 5, 5)) == {entry: shape}


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
        noise = POSTERIORS[kind](("fc",), offset=-3.0)
        params = {"fc.weight": theta, noise.entry("fc"): value}
        assert_close(noise.variance(params, "fc"), wanted, rtol=1e-12, atol=0)
        p = per_weight(noise.rates(params)["fc"], theta)
        away = theta != 0
        assert_close(p[away], (wanted / (wanted + theta.square()))[away], rtol=1e-9, atol=0)


def test_variance_of_channels():
    """One alpha an input channel multiplies that channel's kernels: alpha_j theta_ij^2 at every pixel."""
    theta, alpha = rng.normal(rng.key(0), [2, 3, 3, 3], torch.float64), double(0.5, 1.0, 2.0)
    found = InputLogAlpha(("fc",), offset=0.0).variance({"fc.weight": theta, "fc.logalpha": alpha.log()}, "fc")
    assert_close(found, alpha[None, :, None, None] * theta.square())


def test_rates_follow_alpha():
    """Rates p = alpha / (1 + alpha), for a weight of zero under a log sigma^2 practically 1."""
    noise = LogAlpha(("fc",), offset=0.0)
    assert_close(noise.rates({"fc.weight": double(2.0), "fc.logalpha": double(math.log(3.0))})["fc"], double(0.75))
    assert LogVariance(("fc",)).rates({"fc.weight": double(0.0)})["fc"].item() > 1 - 1e-8


def test_spread_is_clamped_and_starts_at_its_first_value():
    """It is offset + clamp(stored) in [low, high]; a layer that stores nothing has offset + start."""
    noise = LogVariance(("fc",), offset=-8.5, low=-17.0, high=0.0)
    params = {"fc.weight": torch.zeros(3).double(), "fc.logvar": double(-100.0, 1.0, 100.0)}
    assert noise.spread(params, "fc").tolist() == [-17.0, -7.5, 0.0]
    assert noise.spread({"fc.weight": torch.zeros(2, 3).double()}, "fc").tolist() == [[-8.5] * 3] * 2
    assert released().spread({"fc.weight": torch.zeros(2).double()}, "fc").tolist() == [-8.5] * 2
    assert InputLogAlpha(("fc",), offset=-1.0, first=0.5).spread({"fc.weight": torch.zeros(2, 3)}, "fc").shape == (3,)


def test_per_weight_spreads_over_columns():
    """One number per input unit stands for that unit's column, of matrices and of kernels; one per weight passes."""
    value, matrix, kernel = double(1.0, 2.0), torch.zeros(3, 2), torch.zeros(3, 2, 4, 4)
    assert per_weight(value, matrix).tolist() == [[1.0, 2.0]] * 3
    wide = per_weight(value, kernel)
    assert wide.shape == kernel.shape
    assert (wide[:, 0] == 1).all()
    assert (wide[:, 1] == 2).all()
    assert per_weight(matrix, matrix) is matrix


def test_log_alpha_holds_theta_fixed():
    """Here log alpha = lambda - log theta^2 moves with the spread and sends no gradient to the weight."""
    noise, theta, stored = LogVariance(("fc",)), double(0.3, -2.0), double(0.2, 0.4)
    by_theta = jacrev(lambda w: noise.log_alpha({"fc.weight": w, "fc.logvar": stored}, "fc"))(theta)
    by_stored = jacrev(lambda s: noise.log_alpha({"fc.weight": theta, "fc.logvar": s}, "fc"))(stored)
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
    assert LogVariance(("fc",)).spread(near | {"fc.logvar": moved}, "fc") > -8.5


# --- KL ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["logvar", "logalpha", "input"])
def test_kl_at_alpha_one(kind):
    """At alpha = 1 the KL is log(2)/2 = 0.34657 a posterior, as mean and as sum."""
    theta = torch.full((2, 3), 0.5).double()
    noise = POSTERIORS[kind](("fc",), offset=math.log(0.25) if kind == "logvar" else 0.0)
    params = {"fc.weight": theta, noise.entry("fc"): torch.zeros(*noise.entries("fc", theta.shape).values()).double()}
    count = 3 if kind == "input" else 6
    assert noise.kl(params).item() == pytest.approx(0.5 * math.log(2.0), abs=1e-9)
    assert noise.kl(params, mean=False).item() == pytest.approx(count * 0.34657359, abs=1e-7)


@pytest.mark.parametrize("kind", ["logvar", "logalpha", "input"])
@pytest.mark.parametrize("mean", [True, False])
def test_kl_gradient(kind, mean):
    """Slope d KL / d lambda_k = -(1 - p_k) / (2 K), K = 1 for the sum: always towards more noise. theta gets none."""
    noise = POSTERIORS[kind](("fc",), offset=-2.0)
    theta = double([0.1, -0.7, 1.5], [0.0, 0.3, -0.2])
    stored = double(0.5, -1.0, 1.0) if kind == "input" else double([0.5, -1.0, 1.0], [0.1, 0.2, 0.3])
    entry = noise.entry("fc")

    def loss(params):
        return noise.kl(params, mean=mean)

    params = {"fc.weight": theta, entry: stored}
    slopes = grad(loss)(params)
    p = noise.rates(params)["fc"]
    assert_close(slopes[entry], -(1 - p) / (2 * (stored.numel() if mean else 1)), rtol=1e-8, atol=1e-12)
    assert (slopes["fc.weight"] == 0).all()


def test_kl_is_half_log_one_plus_odds():
    """KL = 1/2 log(1 + theta^2 / sigma^2), whichever way sigma^2 = alpha theta^2 is parameterised."""
    theta, logvar = double(0.3, -1.2), double(-3.0, 0.4)
    exact = 0.5 * torch.log1p(theta.square() / logvar.exp())
    absolute = LogVariance(("fc",), offset=0.0).kl_terms({"fc.weight": theta, "fc.logvar": logvar}, "fc")
    relative = logvar - theta.square().log()
    other = LogAlpha(("fc",), offset=0.0).kl_terms({"fc.weight": theta, "fc.logalpha": relative}, "fc")
    assert_close(absolute, exact, rtol=1e-9, atol=0)
    assert_close(other, exact, rtol=1e-9, atol=0)


def test_kl_over_layers_weighs_every_posterior_alike():
    """The mean runs over all posteriors of all layers, not over layers; masked ones add nothing."""
    noise = LogAlpha(("a", "b"), offset=0.0)
    params = {
        "a.weight": torch.ones(1, 2).double(), "a.logalpha": torch.zeros(1, 2).double(),
        "b.weight": torch.ones(2, 3).double(), "b.logalpha": torch.full((2, 3), 50.0).double(),
    }  # fmt: skip
    noise = LogAlpha(("a", "b"), offset=0.0, high=60.0)
    assert noise.kl(params).item() == pytest.approx(2 * 0.5 * math.log(2.0) / 8, abs=1e-12)
    masked = params | {"a.mask": double([1.0, 0.0])}
    assert noise.kl(masked, mean=False).item() == pytest.approx(0.5 * math.log(2.0), abs=1e-12)
    assert grad(noise.kl)(masked)["a.logalpha"][0, 1] == 0


def test_kl_stays_finite_at_the_ends():
    """A theta of 0, or a spread at its floor, gives a finite KL and gradient."""
    params = {"fc.weight": double(0.0, 1e3), "fc.logvar": double(-100.0, -100.0)}
    noise = LogVariance(("fc",), low=-60.0)
    assert noise.kl(params).isfinite()
    assert grad(noise.kl)(params)["fc.logvar"].isfinite().all()


# --- dead zone -----------------------------------------------------------------------------------------------------


def test_dead_zone_is_where_the_released_clamp_has_no_gradient():
    """`without_gradient` marks exactly the stored values whose KL gradient is zero; straight through marks none.

    An inward clamp marks those at the ceiling: the KL wants more noise, and there is no more to be had.
    """
    stored = double(-17.0, -8.6, -8.5, -8.4, 0.0, 8.5, 8.6)
    params = {"fc.weight": torch.full((7,), 0.1).double(), "fc.logvar": stored}
    noise = released()
    slopes = grad(noise.kl)(params)["fc.logvar"]
    assert noise.stuck("", stored).tolist() == (slopes == 0).tolist() == [True, True, False, False, False, False, True]
    free = LogVariance(("fc",))
    moved = {"fc.weight": params["fc.weight"], "fc.logvar": stored + 8.5}
    assert not free.stuck("", moved["fc.logvar"]).any()
    assert (grad(free.kl)(moved)["fc.logvar"] < 0).all()
    bounded = LogVariance(("fc",), offset=0.0, first=LOW, low=LOW, high=HIGH, clamp="inward")
    slopes = grad(bounded.kl)(params)["fc.logvar"]
    assert bounded.stuck("", stored).tolist() == (slopes == 0).tolist() == [False] * 5 + [True] * 2


@pytest.mark.parametrize("p", [0.001, 0.2, 0.5, 0.9])
def test_logit_is_the_log_alpha_of_a_rate(p):
    """sigmoid(logit(p)) = p."""
    assert torch.sigmoid(torch.tensor(logit(p)).double()).item() == pytest.approx(p, rel=1e-6)


# --- what methods ask of a posterior -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", POSTERIORS)
def test_precision_is_share_over_variance(kind):
    """Closed form: share / (sigma^2 + 1e-10), up to the theta^2 that all clients share where the spread is relative."""
    noise, theta = POSTERIORS[kind](("fc",), offset=-2.0), double([0.1, -0.7, 1.5], [0.3, 0.3, -0.2])
    (shape,) = noise.entries("fc", theta.shape).values()
    stored = torch.linspace(-1.0, 1.0, math.prod(shape)).double().reshape(shape)
    found = noise.precision({"fc.weight": theta, noise.entry("fc"): stored}, "fc", double([0.25]))
    assert_close(found, 0.25 / (per_weight((stored - 2.0).exp(), theta) + 1e-10), rtol=1e-12, atol=0)
    assert found.shape == theta.shape


@pytest.mark.parametrize(("kind", "part"), [("logvar", "variance"), ("logalpha", "variance"), ("input", "alpha")])
def test_perturb_gives_one_of_two(kind, part):
    """A variance per weight, to draw the layer's output, or an alpha per input unit, to multiply its input."""
    noise, params = POSTERIORS[kind](("fc",), offset=-2.0), {"fc.weight": double([0.1, -0.7, 1.5], [0.3, 0.3, -0.2])}
    ((name, value),) = noise.perturb(params, "fc").items()
    assert name == part
    assert_close(value, noise.variance(params, "fc") if part == "variance" else torch.full((3,), -2.0).double().exp())


def test_rates_without_the_clamp():
    """clamped=False: the rates of what was sent, as it came; within the range they are the same."""
    noise, theta = released(), double(0.01, 0.01, 0.01)
    params = {"fc.weight": theta, "fc.logvar": double(-17.0, -8.5, 0.0)}
    clamped, sent = (noise.rates(params, clamped=flag)["fc"] for flag in (True, False))
    assert_close(sent, torch.sigmoid(params["fc.logvar"] - (theta.square() + 1e-13).log()), rtol=1e-12, atol=0)
    assert torch.equal(sent[1:], clamped[1:])
    assert sent[0] < clamped[0]


@pytest.mark.parametrize("kind", POSTERIORS)
def test_build_starts_where_it_was_asked_to(kind):
    """The first spread is that of the wished rate, in both ways to store it; what lies out of range is refused."""
    weights = {"fc.weight": torch.full((2, 3), 0.5).double()}
    for clamp in ("inward", "released"):
        noise = POSTERIORS[kind].build(
            ("fc",), lambda: weights, replace(USUAL, rate=0.2, clamp=clamp, kl_epsilon="variance")
        )
        assert_close(noise.rates(weights)["fc"], torch.full_like(noise.rates(weights)["fc"], 0.2), rtol=1e-6, atol=0)
        ((entry, _),) = noise.entries("fc", (2, 3)).items()
        assert noise.start(entry) == pytest.approx(0.0 if clamp == "inward" else noise.spread(weights, "fc").mean())
        assert noise.stored(entry, noise.offset + 1.5) == pytest.approx(1.5)
        assert noise.describe()["posterior"] == kind
        assert noise.describe()["layers"] == ("fc",)
        assert noise.describe().get("kl_epsilon", "variance") == "variance"
    with pytest.raises(ValueError, match=r"its range is 1 to .*; move floor, ceiling, max_rate or rate"):
        POSTERIORS[kind].build(("fc",), lambda: weights, replace(USUAL, rate=0.2, floor=1.0, ceiling=2.0))


def test_the_epsilon_of_the_kl_is_the_posteriors():
    """kl_epsilon=variance: a weight of 0 has no KL, as released; by default its epsilon has one."""
    params = {"fc.weight": double(0.0), "fc.logvar": double(-8.5)}
    assert released(kl_epsilon="variance").kl(params) == 0
    assert released().kl(params) > 0
    bare = {"fc.weight": double(0.0)}  # a layer that stores nothing has its first spread
    assert_close(released().kl(bare), released().kl(params), rtol=1e-12, atol=0)
    assert released(kl_epsilon="variance").kl(bare) == 0


def test_an_unknown_posterior_is_named():
    """The sentence says which there are."""
    with pytest.raises(ValueError, match="no posterior 'spam'; there are logvar, logalpha, input"):
        named("spam")
