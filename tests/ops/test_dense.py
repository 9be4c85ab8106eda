"""What follows a linear layer's product: kernels against references, and references against closed forms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional

pytest.importorskip("triton")
from metavd.core import rng
from metavd.core.model import attach, from_module
from metavd.core.objective import cross_entropy, divergence, ramp, total
from metavd.core.posterior import LogVariance
from metavd.core.types import Batch
from metavd.models.mlp import mlp
from metavd.ops import dense

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
C, S, B, UNITS, K = 2, 3, 5, 7, 6
TINY = 1e-10


@pytest.mark.parametrize("leak", [0.1, 1.0])
def test_bias_and_leaky_relu(leak: float, compared: Callable[..., None], normal: Callable[..., Tensor]) -> None:
    """Parity of the kernel and the reference."""
    compared(lambda x, b: dense.bias_leaky_relu(x, b, leak), (normal(C, B, UNITS), normal(C, UNITS)))


@pytest.mark.parametrize("shared", [False, True])
def test_a_noisy_layer(shared: bool, compared: Callable[..., None], normal: Callable[..., Tensor]) -> None:
    """Parity of the kernel and the reference, of draws that share their rows and of others."""
    keys = rng.split(rng.split(rng.key(3, DEVICE), C), S)
    rows = B if shared else S * B

    def noisy(mean: Tensor, bias: Tensor, log_var: Tensor, keys: Tensor) -> Tensor:
        return dense.noisy(mean, bias, log_var.exp(), keys[:, None] if shared else keys, TINY, 0.1)

    compared(noisy, (normal(C, rows, UNITS), normal(C, UNITS), normal(C, rows, UNITS)), (keys,))


@pytest.mark.parametrize("shared", [False, True])
def test_the_reference_of_a_noisy_layer(shared: bool) -> None:
    """Closed form: leaky ReLU of mean + bias + sqrt(var + tiny) eps, eps the normals of each draw's key."""
    draw = torch.Generator().manual_seed(0)
    rows = B if shared else S * B
    mean, var = (torch.randn(rows, UNITS, generator=draw, dtype=torch.float64) for _ in range(2))
    bias = torch.randn(UNITS, generator=draw, dtype=torch.float64)
    keys = rng.split(rng.key(3), S)
    found = dense.noisy(mean, bias, var.exp(), keys[:, None] if shared else keys, TINY, 0.1)
    for s in range(S):
        own = slice(0, B) if shared else slice(s * B, (s + 1) * B)
        eps = rng.normal(keys[s], [B, UNITS], torch.float64)
        value = mean[own] + bias + (var[own].exp() + TINY).sqrt() * eps
        torch.testing.assert_close(found[s * B : (s + 1) * B], functional.leaky_relu(value, 0.1), rtol=0, atol=1e-14)


@pytest.mark.parametrize("draws", [0, 1, 3])
def test_a_noisy_network_computes_the_same_with_kernels(
    draws: int, kernels: Callable[[bool], None], normal: Callable[..., Tensor]
) -> None:
    """Parity: the whole objective of a method with a posterior, and its gradient."""
    posterior = LogVariance(("fc1",), clamp="inward", offset=-3.0, low=-3.5, high=-2.5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = attach(from_module(mlp((UNITS,), K, 8).to(DEVICE)), posterior)
    objective = total(cross_entropy(model, draws), divergence(posterior, ramp(10.0, 100)))
    params = model.init(rng.key(0, DEVICE)) | {"fc1.logvar": normal(4, 8, scale=0.4)}
    batch = Batch(
        normal(B, UNITS), torch.arange(B, device=DEVICE) % K, None, rng.key(1, DEVICE),
        torch.tensor(1.0, device=DEVICE), torch.tensor(5.0, device=DEVICE),
    )  # fmt: skip
    answers = []
    for use in (True, False):
        kernels(use)
        answers.append(grad(lambda given: objective(given, batch, given))(params))
    for name, expected in answers[1].items():
        torch.testing.assert_close(answers[0][name], expected, rtol=1e-4, atol=1e-6)
