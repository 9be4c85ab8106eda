"""The clamp and its gradient in closed form; kernels of variance, KL and clamp against their references."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacrev, vmap
from torch.testing import assert_close

from metavd.ops import posterior
from metavd.ops.posterior import Bounds, clamp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
C, UNITS, K = 2, 7, 6
LOW, HIGH = -8.5, 8.5
BOUNDS = Bounds(offset=-3.0, low=-3.5, high=-2.5, clamp="inward")


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def slope(function, x):
    return jacrev(function)(x).diagonal()


POINTS = double(-20.0, -8.5 - 1e-9, -8.5, -8.5 + 1e-9, 0.3, 8.5 - 1e-9, 8.5, 8.5 + 1e-9, 20.0)


@pytest.mark.parametrize("rule", ["through", "released"])
def test_clamp_bounds(rule):
    """The value is min(max(x, low), high), with and without straight-through gradients."""
    assert_close(clamp(POINTS, LOW, HIGH, rule), POINTS.clamp(LOW, HIGH), rtol=0, atol=1e-14)


def test_clamp_lets_gradients_through():
    """Straight through: slope 1 inside, on the boundary and outside, so nothing is ever stuck."""
    assert slope(lambda x: clamp(x, LOW, HIGH, "through"), POINTS).tolist() == [1.0] * 9


def test_a_projecting_clamp_lets_gradients_through_and_ends_on_the_boundary():
    """Project: slope 1 everywhere, curvature 0, and outside the boundary itself, to the bit, in float32 too."""
    assert slope(lambda x: clamp(x, LOW, HIGH, "project"), POINTS).tolist() == [1.0] * 9
    assert not slope(lambda x: slope(lambda x: clamp(x, LOW, HIGH, "project"), x), POINTS).any()
    for low, high in ((LOW, HIGH), (-17.0 + 1.1, 0.1), (-0.3, 1e-7)):
        for points in (POINTS, POINTS.float()):
            assert torch.equal(clamp(points, low, high, "project"), points.clamp(low, high))


def test_released_clamp_stops_gradients_outside():
    """Released: slope 1 inside and on both boundaries, 0 outside, on every version of torch."""
    assert slope(lambda x: clamp(x, LOW, HIGH, "released"), POINTS).tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("rule", ["through", "released"])
def test_clamp_gradient_by_backward_and_in_float32(rule):
    """The same slopes by backward() in float32 as by torch.func in float64, and under vmap."""
    x = POINTS.float().requires_grad_()
    clamp(x, LOW, HIGH, rule).sum().backward()
    wanted = torch.ones(9) if rule == "through" else ((x >= LOW) & (x <= HIGH)).float()
    assert_close(x.grad, wanted, rtol=0, atol=0)
    inside = vmap(grad(lambda x: clamp(x, LOW, HIGH, rule)))(POINTS)
    assert_close(inside, slope(lambda x: clamp(x, LOW, HIGH, rule), POINTS), rtol=0, atol=0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_inward_stops_what_leads_out(sign):
    """Closed form: slope 1 inside; from the boundary on, 1 for a push that leads back and 0 for one that leads out.

    The same one by one, under vmap and grad, and at second order.
    """
    x = POINTS.clone().requires_grad_()
    value = clamp(x, LOW, HIGH, "inward")
    assert_close(value, POINTS.clamp(LOW, HIGH), rtol=0, atol=0)
    (sign * value).sum().backward()
    out = (POINTS >= HIGH) if sign < 0 else (POINTS <= LOW)  # descent with slope -1 goes up
    assert_close(x.grad, torch.where(out, 0.0, sign).double(), rtol=0, atol=0)
    each = vmap(grad(lambda x: sign * clamp(x, LOW, HIGH, "inward")))(POINTS)
    assert_close(each, x.grad, rtol=0, atol=0)
    slopes = grad(lambda x: grad(lambda x: (sign * clamp(x, LOW, HIGH, "inward")).exp().sum())(x).sum())(POINTS)
    bounded = (sign * POINTS.clamp(LOW, HIGH)).exp()
    # The second slope is positive everywhere, so at the lower end it leads out itself.
    assert_close(slopes, torch.where(out | (POINTS <= LOW), 0.0, bounded), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", ["through", "released"])
def test_clamp_has_a_second_order(rule):
    """d^2/dx^2 exp(clamp x) = slope^2 exp(clamp x): the second derivative sees the same slopes as the first."""
    curved = hessian(lambda x: clamp(x, LOW, HIGH, rule).exp().sum())(POINTS).diagonal()
    slopes = slope(lambda x: clamp(x, LOW, HIGH, rule), POINTS)
    assert_close(curved, slopes.square() * POINTS.clamp(LOW, HIGH).exp(), rtol=1e-12, atol=0)


# --- kernels -------------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(normal: Callable[..., Tensor]) -> Tensor:
    """Distances from the offset: within the bounds, on them and outside."""
    values = normal(C, UNITS, K, scale=0.4)
    values[:, 0, :4] = torch.tensor([-0.5, 0.5, -0.7, 0.7])
    return values


def test_the_kernel_of_the_variance(stored: Tensor, compared: Callable[..., None]) -> None:
    """Parity: sigma^2, with the clamp that lets nothing out."""
    # A loss is linear in it. Through anything else a clamped value has two slopes, added before the clamp or after.
    compared(lambda stored: 10.0 * posterior.variance(stored, BOUNDS), (stored,), through=torch.clone)


def test_the_kernel_of_the_kl(stored: Tensor, compared: Callable[..., None], normal: Callable[..., Tensor]) -> None:
    """Parity: the KL of the released code's parameterisation, with the clamp that lets nothing out."""

    def value(stored: Tensor, weight: Tensor) -> Tensor:
        return 30.0 * posterior.kl(stored, weight, None, BOUNDS, 1 / (UNITS * K))

    compared(value, (stored,), (normal(C, UNITS, K),), through=torch.clone)


def test_the_kernel_of_the_inward_clamp(kernels: Callable[[bool], None]) -> None:
    """Parity: outside the bounds, and on them, only what leads back inside passes."""
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0] * 2, device=DEVICE)
    push = torch.tensor([1.0] * 5 + [-1.0] * 5, device=DEVICE)
    found = []
    for use in (True, False):
        kernels(use)
        found.append(grad(lambda x: (clamp(x, -1.0, 1.0, "inward") * push).sum())(x))
    assert torch.equal(*found)
    assert found[0].tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0, 0.0]


# --- the KL's epsilon ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["inward", "through", "released"])
def test_both_places_of_the_epsilon(rule: str) -> None:
    """Closed form: 1/2 log(1 + (theta^2 + tiny) / sigma^2), or, as released, 1/2 log(1 + theta^2 / (sigma^2 + tiny)).

    They part where theta^2 or sigma^2 is as small as the epsilon: at theta = 0 the released one is 0 and pushes
    nowhere, and under a variance of e^-40 it stops growing.
    """
    theta, stored = double(0.3, 0.0, 1e-7, 2.0), double(-1.0, -2.0, -36.0, -40.0)
    bounds = Bounds(offset=0.0, low=-60.0, high=8.5, clamp=rule)
    sigma2, tiny = stored.exp(), 1e-13
    exact = {
        "weight": 0.5 * torch.log1p((theta.square() + tiny) / sigma2),
        "variance": 0.5 * torch.log1p(theta.square() / (sigma2 + tiny)),
    }
    for epsilon, terms in exact.items():
        assert_close(posterior.kl_terms(stored, theta, None, epsilon), terms, rtol=1e-12, atol=1e-24)
        whole = posterior.kl(stored, theta, None, bounds, 2.0, epsilon)
        assert_close(whole, 2.0 * terms.sum(), rtol=1e-12, atol=0)
        kept = posterior.kl(stored, theta, double(1.0, 0.0, 1.0, 0.0), bounds, 1.0, epsilon)
        assert_close(kept, terms[[0, 2]].sum(), rtol=1e-12, atol=0)
    slopes = grad(lambda s: posterior.kl(s, theta, None, bounds, 1.0, "variance"))(stored)
    ratio = theta.square() / (sigma2 + tiny)
    assert_close(slopes, -0.5 * ratio / (1 + ratio) * sigma2 / (sigma2 + tiny), rtol=1e-12, atol=1e-24)
    assert slopes[1] == 0
    assert (exact["weight"] - exact["variance"]).abs()[2:].min() > 0.01


def test_the_kl_moves_no_weight() -> None:
    """Law: theta is held fixed under both rules."""
    stored, theta = double(-1.0, -2.0), double(0.3, 0.4)
    bounds = Bounds(0.0, -8.5, 8.5, "released")
    for epsilon in ("weight", "variance"):
        assert not grad(lambda w, e=epsilon: posterior.kl(stored, w, None, bounds, 1.0, e))(theta).any()
