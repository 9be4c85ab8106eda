"""Factors of I + S K S: the kernel against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from metavd.core import gp, rng
from metavd.core.gp_nodes import Inference
from metavd.ops import cholesky

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("rows", [1, 16, 33, 70])
def test_the_kernel_gives_the_same_factors(
    kernels: Callable[[bool], None], normal: Callable[..., Tensor], rows: int
) -> None:
    """Parity: several blocks with an edge, and rows of scale 0, which are the identity's."""
    half = normal(2, rows, rows)
    gram, scale = half @ half.mT, normal(2, 3, rows).abs()
    scale[:, 1, ::3] = 0.0
    kernels(False)
    expected = cholesky.factor(gram, scale)
    kernels(True)
    found = cholesky.factor(gram, scale).tril()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close((found @ found.mT)[:, 1, 0, 1:], torch.zeros_like(gram[:, 0, 1:]))


def test_a_step_with_all_kernels_is_the_references(
    kernels: Callable[[bool], None], normal: Callable[..., Tensor]
) -> None:
    """Parity: loss and gradient of pFedGP's tree, for two clients at once."""
    x, y = normal(2, 20, 4), torch.arange(20, device=DEVICE) % 4
    few = Inference(chains=2, sweeps=2, terms=4)

    def loss(x: Tensor, key: Tensor) -> Tensor:
        return gp.loss(x, y, None, key, 4, inference=few)

    keys = rng.split(rng.key(0, DEVICE), 2)
    kernels(False)
    expected = vmap(grad_and_value(loss))(x, keys)
    kernels(True)
    found = vmap(grad_and_value(loss))(x, keys)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert expected[0].abs().max() > 1e-2
