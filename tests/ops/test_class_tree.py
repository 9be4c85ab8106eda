"""The tree of classes: the kernel against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.func import vmap

from metavd.ops.class_tree import class_tree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("classes", "width"), [(1, 2), (2, 3), (5, 4), (40, 8)])
def test_the_kernel_grows_the_same_trees(kernels: Callable[[bool], None], classes: int, width: int) -> None:
    """Parity: four clients, of which one lacks all classes and in one all means coincide."""
    source = torch.Generator().manual_seed(classes)
    means = torch.randn(4, classes, width, generator=source).to(DEVICE)
    present = (torch.rand(4, classes, generator=source) < 0.7).float().to(DEVICE)
    present[1], means[2], present[2] = 0.0, 1.0, 1.0
    kernels(False)
    expected = vmap(class_tree)(means, present)
    kernels(True)
    found = vmap(class_tree)(means, present)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert found[0][2].sum() >= classes - 1


@pytest.mark.parametrize("kernel", [False, True])
def test_means_that_are_no_numbers_end_in_a_tree(kernels: Callable[[bool], None], kernel: bool) -> None:
    """A client whose features have diverged must not hold up the others: k classes still use k - 1 nodes."""
    kernels(kernel)
    means = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    means[1], means[3] = torch.nan, torch.inf
    left, right = class_tree(means, torch.ones(6, device=DEVICE))
    assert (left.sum(-1) > 0).all()
    assert (right.sum(-1) > 0).all()
    assert torch.equal(left.mT @ right + right.mT @ left, 1.0 - torch.eye(6, device=DEVICE))
