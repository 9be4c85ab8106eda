"""Laws of the algebra on dictionaries of tensors."""

from __future__ import annotations

import math

import torch
from torch.func import grad, jacrev, vmap
from torch.testing import assert_close

from metavd import tree

A = {"fc.weight": torch.tensor([3.0, 0.0]).double(), "fc.bias": torch.tensor([[4.0]]).double()}


def test_map_joins_by_name_over_the_first_tree():
    """Entries are joined by name, whatever their order, and only the first tree's names count."""
    other = {"fc.bias": torch.tensor([[10.0]]), "extra": torch.ones(1), "fc.weight": torch.tensor([1.0, 2.0])}
    joined = tree.map(torch.add, A, other)
    assert list(joined) == ["fc.weight", "fc.bias"]
    assert joined["fc.weight"].tolist() == [4.0, 2.0]
    assert joined["fc.bias"].tolist() == [[14.0]]


def test_axpy_keeps_what_x_lacks():
    """The sum y + a x where x has the name, y itself elsewhere; names that only x has are no entries."""
    out = tree.axpy(-2.0, {"fc.bias": torch.tensor([[1.0]]).double(), "extra": torch.ones(1)}, A)
    assert set(out) == set(A)
    assert out["fc.bias"].item() == 2.0
    assert out["fc.weight"] is A["fc.weight"]


def test_squared_norm_is_joint():
    """3^2 + 4^2 = 25 over two entries."""
    assert tree.squared_norm(A).item() == 25.0


def test_clip_has_the_stated_scale():
    """The scale is min(1, limit / (norm + 1e-6)), jointly over entries; no limit, no change."""
    clipped = tree.clip(A, 1.0)
    assert_close(clipped, {name: value / (5.0 + 1e-6) for name, value in A.items()}, rtol=1e-15, atol=0)
    assert_close(tree.clip(A, 5.1), A, rtol=0, atol=0)
    assert_close(tree.clip(A, None), A, rtol=0, atol=0)


def test_clip_stays_in_the_graph():
    """While it acts, d clip(g)/dg = L/(n+e) (I - g g^T / (n (n+e))), so the part along g is lost."""
    g = torch.tensor([3.0, 4.0]).double()
    limit, eps, norm = 2.0, 1e-6, 5.0
    jacobian = jacrev(lambda value: tree.clip({"g": value}, limit)["g"])(g)
    expected = limit / (norm + eps) * (torch.eye(2).double() - torch.outer(g, g) / (norm * (norm + eps)))
    assert_close(jacobian, expected, rtol=0, atol=1e-12)
    assert_close(jacrev(lambda value: tree.clip({"g": value}, 9.0)["g"])(g), torch.eye(2).double(), rtol=0, atol=0)


def test_clip_of_zero_is_zero_with_finite_gradient():
    """A zero gradient stays zero and differentiates as the identity, though the norm has no slope there."""
    zero = torch.zeros(3).double()
    assert tree.clip({"g": zero}, 1.0)["g"].tolist() == [0.0, 0.0, 0.0]
    assert_close(jacrev(lambda value: tree.clip({"g": value}, 1.0)["g"])(zero), torch.eye(3).double(), rtol=0, atol=0)


def test_clip_under_vmap_is_one_norm_a_client():
    """Clients are clipped apart: under vmap each has a norm of its own."""
    stacked = {"g": torch.tensor([[3.0, 4.0], [0.3, 0.4]]).double()}
    out = vmap(lambda one: tree.clip(one, 1.0))(stacked)["g"]
    assert_close(out.norm(dim=1), torch.tensor([1.0, 0.5]).double(), rtol=0, atol=1e-6)


def test_stack_and_unstack_are_inverse():
    """Stacking C trees and taking one out again gives it back."""
    other = tree.map(lambda value: value + 1.0, A)
    both = tree.stack([A, other])
    assert both["fc.weight"].shape == (2, 2)
    assert_close(tree.unstack(both, 0), A, rtol=0, atol=0)
    assert_close(tree.unstack(both, 1), other, rtol=0, atol=0)


def test_gather_stacks_and_empties():
    """Law: the stack is the same, and the trees hold nothing any more."""
    other = tree.map(lambda value: value + 1.0, A)
    parts = [dict(A), dict(other)]
    assert_close(tree.gather(parts), tree.stack([A, other]), rtol=0, atol=0)
    assert parts == [{}, {}]
    shared = tree.gather([dict(A), dict(A), dict(A)])
    assert_close(shared, tree.stack([A, A, A]), rtol=0, atol=0)
    assert all(value.stride(0) == 0 for value in shared.values()), "what all share is not copied"


def test_where_takes_whole_trees():
    """A scalar condition chooses one of two trees, entry by entry, and a NaN in the other does no harm."""
    bad = tree.map(lambda value: value * math.nan, A)
    assert_close(tree.where(torch.tensor(True), A, bad), A, rtol=0, atol=0)
    assert_close(tree.where(torch.tensor(False), bad, A), A, rtol=0, atol=0)
    fresh = torch.ones(2)
    shared = tree.where(torch.tensor(False), A | {"new": fresh}, A)
    assert all(shared[name] is value for name, value in (A | {"new": fresh}).items())


def test_select_goes_by_name():
    """The entries whose name is kept, in their order."""
    assert list(tree.select(A, lambda name: name.endswith("bias"))) == ["fc.bias"]
    assert tree.select(A, lambda name: True) == A  # noqa: ARG005


def test_squared_norm_differentiates():
    """The gradient of |t|^2 is 2 t."""
    slope = grad(tree.squared_norm)(A)
    assert_close(slope, tree.map(lambda value: 2.0 * value, A), rtol=0, atol=0)


def test_norms_are_each_clients_own():
    """Over all entries of a client together: 3-4-0, then 0-0-2; a factor per client scales its norm."""
    answers = {"w": torch.tensor([[[3.0]], [[0.0]]]).double(), "b": torch.tensor([[4.0, 0.0], [0.0, 2.0]]).double()}
    assert tree.norms(answers).tolist() == [5.0, 2.0]
    assert tree.norms(tree.scaled(answers, torch.tensor([2.0, 0.5]).double())).tolist() == [10.0, 1.0]


def test_clients_are_parted_and_joined_again():
    """A slice of clients keeps their axis, so that parts of a cohort put one after another are the cohort."""
    stacked = {name: torch.stack([value, 2.0 * value, 3.0 * value]) for name, value in A.items()}
    parts = [tree.unstack(stacked, slice(0, 2)), tree.unstack(stacked, slice(2, 3))]
    assert_close(tree.concatenated(parts), stacked, rtol=0, atol=0)
