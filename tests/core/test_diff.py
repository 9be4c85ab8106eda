"""Derivatives: the same under vmap and without, and those of `torch.func`."""

import pytest
import torch
from torch.func import vjp, vmap

from metavd.core.diff import grad, hessian_product, pulled


def function(point):
    """R^3 x R^2 -> R^3 x R^2."""
    return {"a": point["a"] ** 3 * point["b"].sum(), "b": torch.sin(point["b"]) * point["a"].prod()}


def points(*batch):
    keys = torch.Generator().manual_seed(5)
    return {name: torch.randn(*batch, size, generator=keys, dtype=torch.float64) for name, size in (("a", 3), ("b", 2))}


def test_pulled_is_the_vector_jacobian_product_with_a_direction_that_depends_on_the_value():
    """Parity: `torch.func.vjp`; the direction is a number, through which nothing is differentiated."""
    point = points()
    value, pullback = vjp(function, point)
    (expected,) = pullback({name: part**2 + 1 for name, part in value.items()})
    found = pulled(function, point, lambda value: {name: part**2 + 1 for name, part in value.items()})
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_pulled_of_many_points_is_each_ones():
    """Law: vmap over points and directions changes nothing."""
    point, direction = points(4), {name: value.flip(0) for name, value in points(4).items()}
    together = vmap(lambda p, d: pulled(function, p, lambda _: d))(point, direction)
    for i in range(4):
        alone = pulled(
            function, {n: v[i] for n, v in point.items()}, lambda _, i=i: {n: v[i] for n, v in direction.items()}
        )
        for name in alone:
            torch.testing.assert_close(together[name][i], alone[name], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("batched", [False, True])
def test_hessian_product_of_a_quadratic_is_its_matrix(batched):
    """Closed form: f = x'Ax/2 + b'x has H v = A v; the part in which it is linear has no curvature."""
    matrix = torch.tensor([[2.0, 1.0], [1.0, 5.0]], dtype=torch.float64)
    point = {"x": torch.tensor([0.3, -0.7], dtype=torch.float64), "y": torch.ones(2, dtype=torch.float64)}
    direction = {"x": torch.tensor([1.0, 2.0], dtype=torch.float64), "y": torch.ones(2, dtype=torch.float64)}

    def quadratic(at):
        return at["x"] @ matrix @ at["x"] / 2 + at["y"].sum()

    if batched:
        lifted = vmap(lambda p, d: hessian_product(quadratic, p, d))
        found = lifted(*({n: v[None] for n, v in part.items()} for part in (point, direction)))
        found = {name: value[0] for name, value in found.items()}
    else:
        found = hessian_product(quadratic, point, direction)
    torch.testing.assert_close(found["x"], matrix @ direction["x"])
    assert not found["y"].any()


def test_a_function_that_does_not_depend_on_its_point_has_no_slope():
    """Law: the gradient of a constant is 0."""
    slopes = grad(lambda _: torch.zeros(()))(points())
    assert not any(value.any() for value in slopes.values())
    flat = hessian_product(lambda at: at["a"].sum(), points(), points())
    assert not any(value.any() for value in flat.values())
