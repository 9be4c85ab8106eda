"""The GPU's operators against PyTorch's own: values, first and second derivatives, alone and under vmap.

Where there is no GPU, Triton's interpreter runs the same kernels, block by block, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

pytest.importorskip("triton")

from metavd.core import rng
from metavd.core.model import from_module
from metavd.core.variational import inward
from metavd.data.augment import PAD, crop_and_flip
from metavd.models.cnn import cnn
from metavd.ops import fused, kernels, launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
C, B, SIDE, FILTERS = 2, 3, 4, 16


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, so that a test has several of them and edges within; and the interpreter counts as a GPU."""
    monkeypatch.setattr(kernels, "_CHUNK", 32)
    monkeypatch.setattr(kernels, "_BLOCK", 256)
    monkeypatch.setattr(kernels, "_GET", {"ROWS": 2, "BLOCK": 8})
    monkeypatch.setattr(kernels, "_PUT", {"CHUNK": 4, "ROWS": 2, "BLOCK": 8})
    for name in ("_TAKE", "_WEIGH", "_FLOAT_TAKE", "_FLOAT_WEIGH"):
        monkeypatch.setattr(kernels, name, {"P": 16})
    monkeypatch.setattr(fused, "poolable", lambda x: x.dtype != torch.float64 and x.shape[-1] % 2 == 0)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.max_pool2d(functional.relu(functional.conv2d(x, weight, bias, padding=1)), 2)


def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    # The last block of a network is laid out for a linear layer.
    return fused.block(x, weight, bias, fused.EXACT, flat=x.shape[-1] < SIDE)


def parameters(channels: int) -> dict[str, Tensor]:
    return {
        "w1": normal(C, FILTERS, channels, 3, 3, scale=0.3),
        "b1": normal(C, FILTERS),
        "w2": normal(C, FILTERS, FILTERS, 3, 3, scale=0.2),
        "b2": normal(C, FILTERS),
    }


def loss(block: Callable[..., Tensor]) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    def value(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return 10.0 * block(block(x, p["w1"], p["b1"]), p["w2"], p["b2"]).sin().mean()

    return value


def adapted(block: Callable[..., Tensor]) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """The loss after a step of descent: its gradient has second derivatives."""

    def value(p: dict[str, Tensor], x: Tensor) -> Tensor:
        slope = grad(loss(block))(p, x)
        return loss(block)({name: p[name] - 0.1 * slope[name] for name in p}, x.flip(0))

    return value


@pytest.mark.parametrize("most", [15, 16], ids=["apart", "grouped"])
@pytest.mark.parametrize("channels", [1, 3, 16])
@pytest.mark.parametrize("function", [loss, adapted])
def test_gradients_of_many_clients(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Callable[..., Tensor]], channels: int, most: int
) -> None:
    """Parity: gradients of two blocks, few and many input channels, first and second order, under vmap."""
    monkeypatch.setattr(fused, "MOST_GROUPED", most)
    given, x = parameters(channels), normal(C, B, channels, SIDE, SIDE)
    expected, found = (vmap(grad(function(block)))(given, x) for block in (plain, ours))
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-4 * value.norm(), name


@pytest.mark.parametrize("channels", [3, 16])
def test_gradients_of_one_client_by_everything(channels: int) -> None:
    """Parity: plain autograd, by images too, and again through the gradients."""
    given = {name: value[0].clone().requires_grad_() for name, value in parameters(channels).items()}
    x = normal(B, channels, SIDE, SIDE).requires_grad_()
    by = [*given.values(), x]
    firsts, seconds = [], []
    for block in (plain, ours):
        first = torch.autograd.grad(loss(block)(given, x), by, create_graph=True)
        firsts.append(first)
        seconds.append(torch.autograd.grad(sum(slope.square().sum() for slope in first), by))
    for pair in (firsts, seconds):
        for expected, found in zip(*pair, strict=True):
            assert (found - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter cannot multiply bfloat16")
def test_bfloat16_is_close() -> None:
    """Closed form: eight bits of mantissa, sums in float32; gradients of weights keep the weights' type."""
    given, x = parameters(3), normal(C, B, 3, SIDE, SIDE)
    block = vmap(lambda x, w, b: fused.block(x, w, b, fused.BF16))
    out = block(x, given["w1"], given["b1"])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), vmap(plain)(x, given["w1"], given["b1"]), rtol=0.05, atol=0.05)
    slope = vmap(grad(loss(lambda x, w, b: fused.block(x, w, b, fused.BF16))))(given, x)
    assert all(value.dtype == torch.float32 for value in slope.values())
    exact = vmap(grad(loss(plain)))(given, x)
    error = torch.cat([(slope[name] - exact[name]).flatten() for name in exact]).norm()
    assert error < 0.1 * torch.cat([value.flatten() for value in exact.values()]).norm()


def test_a_block_that_lets_nothing_through_has_no_gradient() -> None:
    """Law: where the ReLU is shut the answer is 0, and so are all gradients."""
    x, weight = normal(B, 3, SIDE, SIDE), normal(FILTERS, 3, 3, 3, scale=0.1)
    bias = torch.full((FILTERS,), -50.0, device=DEVICE)
    assert not ours(x, weight, bias).any()
    assert not any(slope.any() for slope in grad(lambda w, b: ours(x, w, b).sum(), (0, 1))(weight, bias))


def test_a_block_under_two_vmaps_is_refused() -> None:
    """Law: kernels see one axis of clients, and must not take a wrapped tensor for its contents."""
    given, x = parameters(16), normal(C, B, 16, SIDE, SIDE)
    with pytest.raises(NotImplementedError, match="one vmap"):
        vmap(vmap(ours))(x[None], given["w1"][None], given["b1"][None])


def test_a_network_computes_the_same_with_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parity: the paper's network with its blocks fused answers as the module does, and so do its features."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = cnn((3, 8, 8), 5, 16).to(DEVICE)
    x = normal(B, 3, 8, 8)
    model = from_module(module)
    params = model.init(rng.key(0, DEVICE))
    calls = []
    block = fused.block
    monkeypatch.setattr(fused, "block", lambda *arguments, **more: calls.append(1) or block(*arguments, **more))
    torch.testing.assert_close(model.apply(params, x, None)[0], module(x), rtol=1e-5, atol=1e-5)
    assert len(calls) == 3
    features = module[:-1](x)
    torch.testing.assert_close(model.features(params, x), features, rtol=1e-5, atol=1e-5)


def test_random_numbers_are_those_of_rng() -> None:
    """Parity: hashes to the bit, normal numbers to rounding, also under two vmaps."""
    keys = rng.split(rng.split(rng.key(3), 4), 3)
    expected = rng.normal(keys, [7], torch.float64)
    found = vmap(vmap(lambda key: fused.normals(key, 7)))(keys.to(DEVICE))
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-4, atol=1e-6)
    mixed = vmap(vmap(fused.mix))(keys.to(DEVICE))
    assert torch.equal(mixed.cpu(), rng._mix(keys))


def test_gate_is_the_gradient_of_the_inward_clamp() -> None:
    """Parity: outside the bounds, and on them, only what leads back inside passes."""
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0] * 2, device=DEVICE)
    slope = torch.tensor([1.0] * 5 + [-1.0] * 5, device=DEVICE)
    expected = grad(lambda x: (inward(x, -1.0, 1.0) * slope.double()).sum())(x.double())
    assert torch.equal(fused.gate(slope, x, -1.0, 1.0).double(), expected)


@pytest.mark.parametrize("augmented", [False, True])
def test_images_are_cropped_mirrored_and_normalised(augmented: bool) -> None:
    """Parity with `crop_and_flip` and (x scale - mean) / std, to the last bit of float32."""
    x = torch.from_numpy(np.random.RandomState(0).randint(0, 256, (20, 3, 8, 8)).astype(np.uint8)).to(DEVICE)
    rows = torch.arange(12, device=DEVICE).reshape(2, 2, 3) + 5
    keys = rng.split(rng.split(rng.key(1, DEVICE), 2), 2)
    mean, std = torch.tensor([0.4, 0.5, 0.6], device=DEVICE), torch.tensor([0.2, 0.3, 0.4], device=DEVICE)
    y = torch.arange(20, device=DEVICE) % 7
    found, labels = fused.images(x, y, rows, keys if augmented else None, (1 / 255, mean, std), PAD)
    assert torch.equal(labels, y[rows])
    for i in range(2):
        for j in range(2):
            raw = crop_and_flip(x[rows[i, j]], keys[i, j]) if augmented else x[rows[i, j]]
            expected = (raw.float() * (1 / 255) - mean[:, None, None]) / std[:, None, None]
            torch.testing.assert_close(found[i, j], expected, rtol=1e-6, atol=1e-6)


def test_a_rehearsal_notes_every_kernel_and_launches_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: what is compiled before a step is what the step launches; memory that no kernel filled is 0."""
    model = from_module(cnn((3, 8, 8), 5, 16).to(DEVICE))
    params = {name: value.expand(C, *value.shape) for name, value in model.init(rng.key(0, DEVICE)).items()}
    x, y = normal(C, B, 3, 8, 8), torch.arange(B, device=DEVICE).expand(C, B)
    compiled, launched, labels = [], [], []
    monkeypatch.setattr(launch.Kernel, "_compile", lambda self, *_: compiled.append(self._jit.__name__))
    plain = launch.Kernel.__getitem__

    def noting(self: launch.Kernel, grid: tuple[int, ...]) -> Callable[..., None]:
        launched.append(self._jit.__name__)
        return plain(self, grid)

    def loss(own: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model.apply(own, x, None)[0], y)

    def step() -> None:
        labels.append(torch.empty(C, B, dtype=torch.int64, device=DEVICE))
        vmap(grad(loss))(params, x, y)

    launch.rehearse(step)
    assert not labels[0].any()
    monkeypatch.setattr(launch.Kernel, "__getitem__", noting)
    step()
    assert len(set(launched)) > 3
    assert sorted(compiled) == sorted(launched)
