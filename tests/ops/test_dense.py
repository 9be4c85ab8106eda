"""The operators after the convolutions against PyTorch's own: values, first and second derivatives, under vmap too.

Where there is no GPU, Triton's interpreter runs the same kernels on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

pytest.importorskip("triton")

from metavd.core import rng, variational
from metavd.core.model import attach, from_module
from metavd.core.objective import cross_entropy, divergence, mean_cross_entropy, ramp, total
from metavd.core.types import Batch
from metavd.core.variational import Noise
from metavd.models.mlp import mlp
from metavd.ops import dense, dense_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
C, S, B, UNITS, K = 2, 3, 5, 7, 6
TINY = 1e-10
NOISE = Noise(layers=("fc1",), inward=True, offset=-3.0, low=-3.5, high=-2.5)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, so that a test has several of them and edges within; and the interpreter counts as a GPU."""
    for name, size in {"_BLOCK": 8, "_LANES": 2, "_ROWS": 4, "_COLUMNS": 4}.items():
        monkeypatch.setattr(dense_kernels, name, size)
    monkeypatch.setattr(dense, "usable", lambda *values: all(value.dtype == torch.float32 for value in values))


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


Function = Callable[..., Tensor]


def compared(
    ours: Function, plain: Function, values: tuple[Tensor, ...], fixed: tuple[Tensor, ...] = (), *,
    through: Function = torch.sin,
) -> None:  # fmt: skip
    """Hold values, gradients and gradients of gradients against each other, one client alone and all under vmap."""
    places = tuple(range(len(values)))

    def curved(function: Function) -> Function:
        def slope(*given: Tensor) -> tuple[Tensor, ...]:
            return grad(lambda *g: through(function(*g, *given[len(values) :])).sum(), places)(*given[: len(values)])

        return slope

    def twice(function: Function) -> Function:
        def length(*given: Tensor) -> Tensor:
            return sum((part * (part + 0.3).cos()).sum() for part in curved(function)(*given))

        return grad(length, places)

    for what in (lambda function: lambda *given: (function(*given),), curved, twice):
        expected = vmap(what(plain))(*values, *fixed)
        for found in (
            vmap(what(ours))(*values, *fixed),
            [torch.stack(parts) for parts in zip(*(what(ours)(*(v[c] for v in (*values, *fixed))) for c in range(C)),
                                                 strict=True)],
        ):  # fmt: skip
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("leak", [0.1, 1.0])
def test_bend(leak: float) -> None:
    """Parity: bias and leaky ReLU."""
    compared(
        lambda x, b: dense.bend(x, b, leak),
        lambda x, b: functional.leaky_relu(x + b, leak),
        (normal(C, B, UNITS), normal(C, UNITS)),
    )


@pytest.mark.parametrize("shared", [False, True])
def test_gauss(shared: bool) -> None:
    """Parity: a noisy layer's answer with the normals of `rng`, of draws that share their rows and of others."""
    keys = rng.split(rng.split(rng.key(3, DEVICE), C), S)
    rows = B if shared else S * B

    def plain(mean: Tensor, bias: Tensor, log_var: Tensor, keys: Tensor) -> Tensor:
        eps = rng.normal(keys, [B, UNITS])
        spread = (log_var.exp() + TINY).sqrt()
        value = (mean + bias).reshape(-1, B, UNITS) + spread.reshape(-1, B, UNITS) * eps
        return functional.leaky_relu(value, 0.1).flatten(0, 1)

    def ours(mean: Tensor, bias: Tensor, log_var: Tensor, keys: Tensor) -> Tensor:
        return dense.gauss(mean, bias, log_var.exp(), keys[:, None] if shared else keys, TINY, 0.1)

    compared(ours, plain, (normal(C, rows, UNITS), normal(C, UNITS), normal(C, rows, UNITS)), (keys,))


@pytest.mark.parametrize("masked", [False, True])
def test_entropy(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parity: cross-entropy of the mean logits over real rows, and 0 of a client that has none."""
    y = torch.arange(C * B, device=DEVICE).reshape(C, B) % K
    mask = torch.ones(C, B, device=DEVICE)
    if masked:
        mask[0, 3:], mask[1] = 0.0, 0.0

    def with_kernels(use: bool) -> Function:
        def value(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
            monkeypatch.setattr(dense, "entropic", lambda _: use)
            return mean_cross_entropy(logits, y, mask if masked else None)

        return value

    compared(with_kernels(True), with_kernels(False), (normal(C, S, B, K, scale=2.0),), (y, mask))


def stored() -> Tensor:
    """Distances from the offset: within the bounds, on them and outside."""
    values = normal(C, UNITS, K, scale=0.4)
    values[:, 0, :4] = torch.tensor([-0.5, 0.5, -0.7, 0.7])
    return values


@pytest.mark.parametrize("what", ["variance", "kl"])
def test_posterior(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parity: sigma^2 and the KL of the released code's parameterisation, with the clamp that lets nothing out."""

    def with_kernels(use: bool) -> Function:
        def value(stored: Tensor, weight: Tensor) -> Tensor:
            monkeypatch.setattr(dense, "usable", lambda *_: use)
            params = {"fc1.logvar": stored, "fc1.weight": weight}
            if what == "kl":
                return 30.0 * variational.kl(NOISE, params)
            return 10.0 * variational.variance(NOISE, params, "fc1")

        return value

    # A loss is linear in them. Through anything else a clamped value has two slopes, added before the clamp or after.
    compared(with_kernels(True), with_kernels(False), (stored(),), (normal(C, UNITS, K),), through=torch.clone)


@pytest.mark.parametrize("draws", [0, 1, 3])
def test_a_noisy_network_computes_the_same_with_operators(draws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parity: the whole objective of a method with a posterior, and its gradient."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = attach(from_module(mlp((UNITS,), K, 8).to(DEVICE)), NOISE)
    objective = total(cross_entropy(model, draws), divergence(NOISE, ramp(10.0, 100)))
    params = model.init(rng.key(0, DEVICE)) | {"fc1.logvar": normal(4, 8, scale=0.4)}
    batch = Batch(
        normal(B, UNITS), torch.arange(B, device=DEVICE) % K, None, rng.key(1, DEVICE),
        torch.tensor(1.0, device=DEVICE), torch.tensor(5.0, device=DEVICE),
    )  # fmt: skip
    answers = []
    for use in (True, False):
        monkeypatch.setattr(dense, "usable", lambda *_, use=use: use)
        answers.append(grad(lambda given: objective(given, batch, given))(params))
    for name, expected in answers[1].items():
        torch.testing.assert_close(answers[0][name], expected, rtol=1e-4, atol=1e-6)
