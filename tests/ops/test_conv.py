"""Convolution, bias, ReLU and pooling: kernels against PyTorch's own, to second order, alone and under vmap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from metavd.core import rng
from metavd.core.model import from_module
from metavd.models.cnn import cnn
from metavd.ops import conv, device
from metavd.ops.precision import BF16, EXACT

pytestmark = pytest.mark.usefixtures("kernels")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
C, B, SIDE, FILTERS = 2, 3, 4, 16


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.max_pool2d(functional.relu(functional.conv2d(x, weight, bias, padding=1)), 2)


def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    # The last block of a network is laid out for a linear layer.
    return conv.conv_relu_pool(x, weight, bias, EXACT, flat=x.shape[-1] < SIDE)


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
    monkeypatch.setattr(conv, "MOST_GROUPED", most)
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
    block = vmap(lambda x, w, b: conv.conv_relu_pool(x, w, b, BF16))
    out = block(x, given["w1"], given["b1"])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), vmap(plain)(x, given["w1"], given["b1"]), rtol=0.05, atol=0.05)
    slope = vmap(grad(loss(lambda x, w, b: conv.conv_relu_pool(x, w, b, BF16))))(given, x)
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
    pick, pool = conv._Block.apply, conv._Pool.apply
    monkeypatch.setattr(conv._Block, "apply", lambda *arguments: calls.append("few channels") or pick(*arguments))
    monkeypatch.setattr(conv._Pool, "apply", lambda *arguments: calls.append("many") or pool(*arguments))
    torch.testing.assert_close(model.apply(params, x, None)[0], module(x), rtol=1e-5, atol=1e-5)
    assert calls == ["few channels", "many", "many"]
    features = module[:-1](x)
    torch.testing.assert_close(model.features(params, x), features, rtol=1e-5, atol=1e-5)


def by_hand(x: Tensor, weight: Tensor, bias: Tensor, g: Tensor) -> list[Tensor]:
    """What `take` and `weigh` are to answer, of PyTorch's operators; clients in front, then pixels, then channels."""
    given = [value.clone().requires_grad_() for value in (weight, bias)]
    y = vmap(plain)(x, *given)
    gw, gb = torch.autograd.grad(y, given, g.permute(3, 0, 4, 1, 2))
    return [y.detach().permute(1, 3, 4, 0, 2), gw, gb]


def by_kernels(x: Tensor, weight: Tensor, bias: Tensor, g: Tensor) -> list[Tensor]:
    kernels = device.kernels("conv")
    y, place = kernels.take(x, kernels.taps(weight, kernels.TAPS, x.dtype), bias, None, "ieee")
    return [y, *kernels.weigh(x, g, place, "ieee")]


def given_to_kernels(images: int, channels: int, height: int, width: int) -> list[Tensor]:
    shapes = (C, images, channels, height, width), (C, FILTERS, channels, 3, 3), (C, FILTERS)
    return [normal(*shape) for shape in (*shapes, (images, height // 2, width // 2, C, FILTERS))]


@pytest.mark.parametrize(
    ("images", "channels", "height", "width"), [(1, 1, 2, 2), (5, 3, 2, 10), (3, 7, 6, 2), (7, 2, 6, 10)]
)
def test_few_channels_at_every_edge(images: int, channels: int, height: int, width: int) -> None:
    """Parity: windows at one edge, at two or at all, and numbers of windows that no tile divides."""
    given = given_to_kernels(images, channels, height, width)
    for expected, found in zip(by_hand(*given), by_kernels(*given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def shared_by_clients(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape)


def cut_out(x: Tensor) -> Tensor:
    return functional.pad(x, (2, 3, 1, 4), value=7.0)[..., 1:-4, 2:-3]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels last": lambda x: x.movedim(2, -1).contiguous().movedim(-1, 2),
    "clients inside": lambda x: x.movedim(0, 1).contiguous().movedim(1, 0),
    "clients innermost": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "shared": shared_by_clients,
    "cut out": cut_out,
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_images_may_lie_in_memory_as_they_like(layout: Callable[[Tensor], Tensor]) -> None:
    """Law: the same bits, however the images lie."""
    x, *rest = given_to_kernels(3, 3, 4, 6)
    x = layout(x)
    for expected, found in zip(by_kernels(x.contiguous(), *rest), by_kernels(x, *rest), strict=True):
        assert torch.equal(found, expected)


def test_kernels_do_not_depend_on_how_many_clients_there_are() -> None:
    """Law: strides within an image are constants of a kernel, which must not be compiled for each number of clients."""
    launch = pytest.importorskip("metavd.ops.launch")
    found = []
    for clients in (2, 5):
        with launch.noting() as noted:
            x = LAYOUTS["clients innermost"](normal(clients, 3, 3, 4, 4))
            by_kernels(
                x, normal(clients, FILTERS, 3, 3, 3), normal(clients, FILTERS), normal(3, 2, 2, clients, FILTERS)
            )
        found.append(
            [(each.kernel.jit.__name__, each.constants, each.arguments[-3:]) for each in noted if len(each.grid) == 3]
        )
    assert [name for name, *_ in found[0]] == ["_take", "_weigh"]
    assert found[0] == found[1]


@pytest.mark.skipif(DEVICE != "cpu", reason="takes memory that is only named, which a GPU has to have")
def test_images_may_lie_farther_apart_than_32_bits_tell(tmp_path: Path) -> None:
    """Law: an image's place counts in 64 bits; a file of which next to nothing is written stands for the memory."""
    x, *rest = given_to_kernels(3, 3, 4, 4)
    file = torch.from_file(str(tmp_path / "images"), shared=True, size=(1 << 31) + x.numel())
    far = file.as_strided(x.shape, (x[0, 0].numel(), 1 << 30, 16, 4, 1)).copy_(x)
    for expected, found in zip(by_kernels(x, *rest), by_kernels(far, *rest), strict=True):
        assert torch.equal(found, expected)
