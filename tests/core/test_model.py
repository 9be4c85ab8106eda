"""Networks as pure functions: counts, moments of noisy layers, draws, masks, features, initial values, refusals."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.func import grad, hessian, vmap
from torch.nn import functional
from torch.testing import assert_close

from metavd.core import emit, rng
from metavd.core.model import attach, from_module, headless, reset, xavier
from metavd.core.posterior import POSTERIORS, InputLogAlpha, LogVariance
from metavd.models.cnn import cnn
from metavd.models.mlp import mlp
from metavd.models.small_cnn import small_cnn

DRAWS = 30_000


class Skip(nn.Module):
    """A residual block that no Sequential can express, with a nested part and a layer in the middle of the order."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(OrderedDict(fc=nn.Linear(4, 4), act=nn.Tanh()))
        self.side = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        return self.out(x + self.scale * self.side(self.inner(x)))


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.noisy, self.again, self.out = (nn.Linear(4, units) for units in (4, 4, 4, 3))
        self.again.weight = self.first.weight

    def forward(self, x):
        return self.out(torch.tanh(self.again(torch.tanh(self.noisy(torch.tanh(self.first(x)))))))


class Named(nn.Sequential):
    """A Sequential that builds itself and adds a skip connection."""

    def __init__(self, width):
        super().__init__(OrderedDict(fc0=nn.Linear(4, width), fc1=nn.Linear(width, width), fc2=nn.Linear(width, 3)))

    def forward(self, x):
        hidden = torch.tanh(self.fc0(x))
        return self.fc2(hidden + torch.tanh(self.fc1(hidden)))


def sequence(**layers):
    return nn.Sequential(OrderedDict(layers))


def plain():
    return sequence(fc0=nn.Linear(4, 5), a=nn.Tanh(), fc1=nn.Linear(5, 4), b=nn.Tanh(), fc2=nn.Linear(4, 3))


def nested():
    body = sequence(fc0=nn.Linear(4, 5), a=nn.Tanh(), fc1=nn.Linear(5, 4))
    return sequence(body=body, b=nn.Tanh(), fc2=nn.Linear(4, 3))


def unnamed():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def tied_sequence():
    module = sequence(first=nn.Linear(4, 4), a=nn.Tanh(), noisy=nn.Linear(4, 4), b=nn.Tanh(), again=nn.Linear(4, 4),
                      c=nn.Tanh(), out=nn.Linear(4, 3))  # fmt: skip
    module.again.weight = module.first.weight
    return module


def repeated():
    tanh = nn.Tanh()
    return sequence(fc0=nn.Linear(4, 5), a=tanh, fc1=nn.Linear(5, 5), b=tanh, fc2=nn.Linear(5, 4), c=tanh,
                    out=nn.Linear(4, 3))  # fmt: skip


def image_net():
    return sequence(conv=nn.Conv2d(2, 3, 3, padding=1), a=nn.ReLU(), f=nn.Flatten(), fc=nn.Linear(48, 5), b=nn.Tanh(),
                    out=nn.Linear(5, 3))  # fmt: skip


NETS = {
    "sequential": (plain, ("fc1",), (4,)),
    "two noisy layers": (plain, ("fc0", "fc1"), (4,)),
    "out of order": (plain, ("fc2", "fc0"), (4,)),
    "an activation at several places": (repeated, ("fc2",), (4,)),
    "nested": (nested, ("body.fc1",), (4,)),
    "unnamed": (unnamed, ("2",), (4,)),
    "convolution": (image_net, ("conv",), (2, 4, 4)),
    "after a convolution": (image_net, ("fc",), (2, 4, 4)),
    "skip": (Skip, ("side",), (4,)),
    "skip, nested": (Skip, ("inner.fc", "out"), (4,)),
    "tied": (Tied, ("noisy",), (4,)),
    "tied sequential": (tied_sequence, ("noisy",), (4,)),
    "subclass": (lambda: Named(4), ("fc1",), (4,)),
}


@pytest.fixture(params=NETS)
def built(request):
    """A module in float64, its model with other parameters than the module's own, and rows."""
    make, layers, shape = NETS[request.param]
    torch.manual_seed(0)
    module = make().double()
    model = from_module(module, layers)
    source = torch.Generator().manual_seed(1)
    params = {
        name: value + 0.3 * torch.randn(value.shape, generator=source, dtype=torch.float64)
        for name, value in model.init(rng.key(0)).items()
    }
    return module, model, params, torch.randn(5, *shape, generator=source, dtype=torch.float64)


# --- counts --------------------------------------------------------------------------------------------------------


def count(params):
    return sum(value.numel() for value in params.values())


def shapes_only(module):
    """A model whose values are never made."""
    return from_module(module, init=lambda key, name, value: value)  # noqa: ARG005


@pytest.mark.parametrize(
    ("classes", "total"),
    [(2, 371_202), (10, 372_234), (62, 378_942), (64, 379_200), (100, 383_844), (102, 384_102), (162, 391_842),
     (164, 392_100)],
)  # fmt: skip
def test_the_papers_network(classes, total):
    """370,944 + 129 C parameters, K = 32,768 of them in the layer before the output."""
    model = from_module(cnn((3, 32, 32), classes))
    assert count(model.init(rng.key(0))) == total == 370_944 + 129 * classes
    assert model.variational == ("fc1",)
    assert math.prod(model.layers["fc1"]) == 32_768


def test_the_papers_layers():
    """Each layer's own count, in order: 1,792, 36,928, 36,928, 262,400, 32,896, 129 C."""
    model = from_module(cnn((3, 32, 32), 10))
    params = model.init(rng.key(0))
    sizes = [count({name: value for name, value in params.items() if name.startswith(layer)}) for layer in model.layers]
    assert sizes == [1_792, 36_928, 36_928, 262_400, 32_896, 1_290]


def test_the_released_width():
    """Width 256: 5,907,456 + 513 C, K = 524,288."""
    with torch.device("meta"):
        module = cnn((3, 32, 32), 100, width=256)
    assert sum(value.numel() for value in module.parameters()) == 5_907_456 + 513 * 100 == 5_958_756
    assert module.fc1.weight.numel() == 524_288


def test_the_papers_hypernetwork():
    """N = 100, K = 32,768: 6,672,168 parameters and 100 embeddings of 26, here as released; d = 26, 41, 51 by N."""
    model = from_module(cnn((3, 32, 32), 10))
    params = emit.meta(emit.shared(model), model, LogVariance(("fc1",)), 100).init(rng.key(0))
    hyper = {name: value for name, value in params.items() if name.startswith("server.hyper.")}
    assert count(hyper) == 6_672_168
    assert sum(name.endswith("weight") for name in hyper) == 4
    assert params[emit.EMBEDDING].numel() == 2_600
    assert [emit.embedding_size(clients) for clients in (100, 160, 200)] == [26, 41, 51]


@pytest.mark.parametrize(("build", "shape"), [(small_cnn, (1, 8, 8)), (mlp, (1, 8, 8)), (mlp, (7,)), (cnn, (3, 16, 8))])
def test_other_networks_answer(build, shape):
    """The smaller networks map (B, *shape) to (1, B, K) logits, with the same names for their linear layers."""
    model = from_module(build(shape, 5, width=4))
    assert model.apply(model.init(rng.key(0)), torch.zeros(2, *shape), None).shape == (1, 2, 5)
    assert list(model.layers)[-3:] == ["fc0", "fc1", "fc2"]


# --- moments -------------------------------------------------------------------------------------------------------


def moments(model, params, x):
    """Empirical mean and variance of the output over many draws."""
    draws = model.apply(params, x, rng.split(rng.key(11), DRAWS))
    return draws.mean(0), draws.var(0), draws


def check(found, mean, variance):
    """Within 5 standard errors, with the 1e-10 that the layer adds to its variance."""
    variance = variance + 1e-10
    assert ((found[0] - mean).abs() < 5 * (variance / DRAWS).sqrt()).all()
    assert ((found[1] / variance - 1).abs() < 5 * math.sqrt(2 / DRAWS)).all()


@pytest.fixture
def dense():
    """One linear layer 3 -> 2 with a bias and rows that are partly equal and partly zero."""
    torch.manual_seed(3)
    model = from_module(sequence(fc=nn.Linear(3, 2)).double())
    x = torch.tensor([[1.0, -2.0, 0.5], [1.0, -2.0, 0.5], [0.0, 3.0, 0.0]], dtype=torch.float64)
    return model, model.init(rng.key(0)), x


SPREAD = torch.tensor([[-1.0, 0.5, -2.0], [0.0, -0.5, 1.0]], dtype=torch.float64)


@pytest.mark.parametrize("kind", ["logvar", "logalpha"])
def test_moments_of_a_noisy_linear_layer(dense, kind):
    """E = x theta^T + b, Var = x^2 (sigma^2)^T; rows and units are independent, equal rows included."""
    model, params, x = dense
    noise = POSTERIORS[kind](("fc",), offset=-1.0)
    params = params | {noise.entry("fc"): SPREAD}
    found = moments(attach(model, noise), params, x)
    theta, sigma2 = params["fc.weight"], (SPREAD - 1.0).exp()
    sigma2 = sigma2 if kind == "logvar" else sigma2 * theta.square()
    check(found, x @ theta.T + params["fc.bias"], x.square() @ sigma2.T)
    correlation = torch.corrcoef(found[2].reshape(DRAWS, -1).T) - torch.eye(6)
    assert correlation.abs().max() < 5 / math.sqrt(DRAWS)


def test_moments_of_a_linear_layer_with_noise_a_unit(dense):
    """Inputs times 1 + sqrt(alpha_j) eps: Var = sum_j alpha_j x_j^2 theta_ij^2, and units covary accordingly."""
    model, params, x = dense
    noise = InputLogAlpha(("fc",), offset=-1.0)
    alpha = torch.tensor([0.5, 2.0, 0.1], dtype=torch.float64)
    params = params | {"fc.logalpha": alpha.log() + 1.0}
    found = moments(attach(model, noise), params, x)
    theta = params["fc.weight"]
    check(found, x @ theta.T + params["fc.bias"], (x.square() * alpha) @ theta.square().T)
    together = (x.square() * alpha) @ (theta[0] * theta[1])
    centred = found[2] - found[0]
    scale = (found[1][:, 0] * found[1][:, 1]).sqrt()
    assert ((centred[..., 0] * centred[..., 1]).mean(0) - together).abs().lt(8 * scale / math.sqrt(DRAWS)).all()
    rows = torch.corrcoef(centred[..., 0].T)
    assert (rows - torch.eye(3)).abs().max() < 5 / math.sqrt(DRAWS)


@pytest.fixture
def image():
    """One convolution 2 -> 3 on 4 x 4, with stride, padding and bias."""
    torch.manual_seed(4)
    model = from_module(sequence(conv=nn.Conv2d(2, 3, 3, padding=1, stride=2)).double())
    return model, model.init(rng.key(0)), torch.randn(1, 2, 4, 4, dtype=torch.float64)


def convolve(x, weight, bias=None):
    return functional.conv2d(x, weight, bias, padding=1, stride=2).flatten(1)


@pytest.mark.parametrize("kind", ["logvar", "logalpha"])
def test_moments_of_a_noisy_convolution(image, kind):
    """E = conv(x, theta) + b, Var = conv(x^2, sigma^2), at every pixel; pixels are independent."""
    model, params, x = image
    noise = POSTERIORS[kind](("conv",), offset=-1.0)
    stored = torch.linspace(-1.0, 1.0, 54, dtype=torch.float64).reshape(3, 2, 3, 3)
    params = params | {noise.entry("conv"): stored}
    sigma2 = (stored - 1.0).exp()
    sigma2 = sigma2 if kind == "logvar" else sigma2 * params["conv.weight"].square()
    found = moments(attach(model, noise), params, x)
    check(found, convolve(x, params["conv.weight"], params["conv.bias"]), convolve(x.square(), sigma2))
    assert (torch.corrcoef(found[2][:, 0].T) - torch.eye(12)).abs().max() < 5 / math.sqrt(DRAWS)


def test_moments_of_a_convolution_with_noise_a_channel(image):
    """Every pixel of channel j times 1 + sqrt(alpha_j) eps: Var = conv(alpha x^2, theta^2)."""
    model, params, x = image
    alpha = torch.tensor([0.3, 1.5], dtype=torch.float64)
    params = params | {"conv.logalpha": alpha.log()}
    found = moments(attach(model, InputLogAlpha(("conv",), offset=0.0)), params, x)
    scaled = alpha[:, None, None] * x.square()
    wanted = convolve(scaled, params["conv.weight"].square())
    check(found, convolve(x, params["conv.weight"], params["conv.bias"]), wanted)


def test_moments_of_a_grouped_convolution_with_noise_a_channel():
    """One rate per column of the weight: channels in one place of their groups share it."""
    torch.manual_seed(5)
    model = from_module(sequence(conv=nn.Conv2d(4, 2, 2, groups=2)).double())
    params, x = model.init(rng.key(0)), torch.randn(1, 4, 3, 3, dtype=torch.float64)
    alpha = torch.tensor([0.3, 1.5], dtype=torch.float64)
    params = params | {"conv.logalpha": alpha.log()}
    found = moments(attach(model, InputLogAlpha(("conv",), offset=0.0)), params, x)
    scaled = alpha.repeat(2)[:, None, None] * x.square()
    wanted = functional.conv2d(scaled, params["conv.weight"].square(), groups=2).flatten(1)
    check(found, functional.conv2d(x, params["conv.weight"], params["conv.bias"], groups=2).flatten(1), wanted)


def test_noise_vanishes_with_the_variance(dense):
    """At a variance of 0 the output is the mean, up to the 1e-10 under the root."""
    model, params, x = dense
    noise = LogVariance(("fc",), offset=0.0, low=-200.0)
    params = params | {"fc.logvar": torch.full((2, 3), -200.0).double()}
    noisy = attach(model, noise).apply(params, x, rng.split(rng.key(0), 3))
    assert_close(noisy, model.apply(params, x, None).expand(3, 3, 2), rtol=0, atol=1e-4)


def test_rows_that_follow_change_no_draw(dense):
    """A row's noise depends on its place and the key alone, not on how many rows come after it."""
    model, params, x = dense
    for kind in ("logvar", "input"):
        noisy = attach(model, POSTERIORS[kind](("fc",)))
        keys = rng.split(rng.key(5), 4)
        padded = torch.cat([x, torch.full((2, 3), 9.0).double()])
        assert_close(noisy.apply(params, padded, keys)[:, :3], noisy.apply(params, x, keys), rtol=0, atol=1e-14)


# --- draws ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["logvar", "logalpha", "input"])
def test_draws_are_single_draws(built, kind):
    """S draws at once are S calls with one key each: what is shared before the first noisy layer changes nothing."""
    _, model, params, x = built
    noisy = attach(model, POSTERIORS[kind](model.variational, offset=-1.0))
    keys = rng.split(rng.key(2), 3)
    alone = torch.cat([noisy.apply(params, x, keys[i : i + 1]) for i in range(3)])
    assert alone.shape == (3, 5, 3)
    assert (alone[0] - alone[1]).abs().max() > 1e-3
    assert_close(noisy.apply(params, x, keys), alone, rtol=0, atol=1e-12)


def test_mean_is_the_module(built):
    """Without keys the answer is the module's own, with the given parameters; with or without a posterior."""
    module, model, params, x = built
    other = copy.deepcopy(module)
    with torch.no_grad():
        for name, value in other.named_parameters():
            value.copy_(params[name])
        wanted = other(x)[None]
    assert_close(model.apply(params, x, None), wanted, rtol=0, atol=1e-12)
    assert_close(model.apply(params, x, rng.split(rng.key(0), 2)), wanted, rtol=0, atol=1e-12)
    assert_close(attach(model, LogVariance(model.variational)).apply(params, x, None), wanted, rtol=0, atol=1e-12)


def test_clients_differ(built):
    """Under vmap over clients' parameters and keys each client gets the answer that it gets alone, without warnings."""
    _, model, params, x = built
    noisy = attach(model, LogVariance(model.variational, offset=-2.0))
    both = {name: torch.stack([value, 1.1 * value]) for name, value in params.items()}
    keys = rng.split(rng.split(rng.key(0), 2), 3)
    together = vmap(noisy.apply, (0, None, 0), randomness="error")(both, x, keys)
    alone = [noisy.apply({name: value[i] for name, value in both.items()}, x, keys[i]) for i in range(2)]
    assert_close(together, torch.stack(alone), rtol=0, atol=1e-12)


def test_every_parameter_is_heard(built):
    """Each entry of the parameters moves the answer of several draws; none falls back on the module's own value."""
    _, model, params, x = built
    noisy = attach(model, LogVariance(model.variational, offset=-2.0))
    keys = rng.split(rng.key(0), 2)
    slopes = grad(lambda p: noisy.apply(p, x, keys).square().sum())(params)
    assert all(slope.abs().max() > 0 for slope in slopes.values())


def test_a_missing_entry_is_an_error(net):
    """A client's parameters must be whole: the module's own values never fill in for what did not arrive."""
    params = net.init(rng.key(0))
    params.pop("fc0.bias")
    for model in (net, attach(net, LogVariance(("fc1",)))):
        for keys in (None, rng.split(rng.key(0), 1), rng.split(rng.key(0), 2)):
            with pytest.raises((KeyError, ValueError), match=r"fc0\.bias"):
                model.apply(params, torch.ones(2, 4).double(), keys)


def test_layers_and_keys_draw_apart():
    """Two layers of one shape draw unrelated noise, and so do two keys; one key always draws the same."""
    module = sequence(a=nn.Linear(3, 3, bias=False), b=nn.Linear(3, 3, bias=False)).double()
    model = from_module(module)
    params = {name: torch.zeros(3, 3).double() for name in ("a.weight", "b.weight")}
    first, second = (attach(model, LogVariance(layers, offset=0.0)) for layers in (("a",), ("a", "b")))
    x = torch.ones(50, 3).double()
    keys = rng.split(rng.key(0), 2)
    params["b.weight"] = torch.eye(3).double()
    inner = first.apply(params, x, keys)
    added = second.apply(params | {"a.weight": params["a.weight"]}, x, keys) - inner
    # With theta = 1 the second layer's noise has the scale of its input's norm, so it is compared after scaling.
    noise = added / (inner.square().sum(-1, keepdim=True) + 1e-10).sqrt()
    assert abs(torch.corrcoef(torch.stack([inner.flatten(), noise.flatten()]))[0, 1]) < 0.25
    assert abs(torch.corrcoef(torch.stack([inner[0].flatten(), inner[1].flatten()]))[0, 1]) < 0.35
    assert torch.equal(first.apply(params, x, keys), inner)


def test_noise_differentiates_twice(dense):
    """Second-order gradients pass through the noisy layer: the Hessian by weights and spreads matches differences."""
    model, params, x = dense
    noisy = attach(model, LogVariance(("fc",), offset=-1.0))
    keys = rng.split(rng.key(0), 2)
    start = torch.cat([params["fc.weight"].flatten(), SPREAD.flatten()])

    def loss(flat):
        own = {"fc.weight": flat[:6].reshape(2, 3), "fc.logvar": flat[6:].reshape(2, 3), "fc.bias": params["fc.bias"]}
        return noisy.apply(own, x, keys).mean(0).logsumexp(-1).sum()

    curved = hessian(loss)(start)
    step = 1e-5 * torch.eye(12, dtype=torch.float64)
    difference = torch.stack([(grad(loss)(start + e) - grad(loss)(start - e)) / 2e-5 for e in step])
    assert_close(curved, difference, rtol=0, atol=1e-7)
    assert curved[6:, 6:].abs().max() > 1e-3


# --- masks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["logvar", "logalpha", "input"])
@pytest.mark.parametrize("layer", ["conv", "fc"])
def test_masked_weights_are_irrelevant(layer, kind):
    """Garbage in masked weights and spreads changes no answer and no gradient, and gets a zero gradient itself."""
    torch.manual_seed(0)
    model = from_module(image_net().double(), (layer,))
    noise = POSTERIORS[kind]((layer,), offset=-2.0)
    noisy = attach(model, noise)
    params = model.init(rng.key(0))
    weight, entry = params[f"{layer}.weight"], noise.entry(layer)
    params[entry] = torch.full(*noise.entries(layer, weight.shape).values(), 0.3).double()
    shape = params[entry].shape
    mask = (rng.uniform(rng.key(1), shape) > 0.5).double()
    wide = mask.reshape(1, -1, *[1] * (weight.dim() - 2)).expand(weight.shape) if kind == "input" else mask
    assert 0 < mask.mean() < 1
    dirty = params | {
        f"{layer}.weight": torch.where(wide > 0, weight, 1e6),
        entry: torch.where(mask > 0, params[entry], 3.0),
    }
    x = torch.randn(3, 2, 4, 4).double()

    def answers(params):
        params = params | {f"{layer}.mask": mask}
        return torch.cat([noisy.apply(params, x, None), noisy.apply(params, x, rng.split(rng.key(2), 2))])

    assert_close(answers(dirty), answers(params), rtol=0, atol=1e-12)
    slopes, clean = (grad(lambda p: answers(p).square().sum())(p) for p in (dirty, params))
    for name in clean:
        assert_close(slopes[name], clean[name], rtol=0, atol=1e-10)
    assert (slopes[f"{layer}.weight"][wide == 0] == 0).all()
    assert (slopes[f"{layer}.weight"][wide > 0] != 0).any()
    if kind != "input":
        assert (slopes[entry][mask == 0] == 0).all()


def test_a_mask_is_a_zero(dense):
    """A masked weight is a zero weight without noise: E and Var lose its term."""
    model, params, x = dense
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]).double()
    noise = LogVariance(("fc",), offset=-1.0)
    params = params | {"fc.logvar": SPREAD, "fc.mask": mask}
    theta = params["fc.weight"] * mask
    found = moments(attach(model, noise), params, x)
    sigma2 = noise.variance(params, "fc") * mask
    sigma2 = x.square() @ sigma2.T
    check(found, x @ theta.T + params["fc.bias"], sigma2)
    assert_close(model.apply(params, x, None)[0], x @ theta.T + params["fc.bias"])


# --- features ------------------------------------------------------------------------------------------------------


def test_features_are_the_inputs_of_the_output_layer(built):
    """What a hook on the module's last layer sees."""
    module, model, params, x = built
    other, seen = copy.deepcopy(module), []
    with torch.no_grad():
        for name, value in other.named_parameters():
            value.copy_(params[name])
    other.get_submodule(list(model.layers)[-1]).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    other(x)
    assert_close(model.features(params, x), seen[0].detach(), rtol=0, atol=1e-12)


def test_headless_drops_the_output_layer_alone(net):
    """A method that answers from features neither keeps nor needs the output layer's parameters."""
    body = headless(net)
    params = body.init(rng.key(0))
    assert set(net.init(rng.key(0))) - set(params) == {"fc2.weight", "fc2.bias"}
    x = torch.ones(2, 4).double()
    assert_close(body.features(params, x), net.features(net.init(rng.key(0)), x), rtol=0, atol=0)


def test_features_see_masks(net):
    """The inputs of the output layer are those of the masked network, as `apply` computes them."""
    params = net.init(rng.key(0))
    masked = params | {"fc1.mask": torch.zeros(3, 6).double()}
    x = torch.ones(2, 4).double()
    zero = params | {"fc1.weight": torch.zeros(3, 6).double()}
    assert_close(net.apply(masked, x, None), net.apply(zero, x, None), rtol=0, atol=0)
    assert_close(net.features(masked, x), net.features(zero, x), rtol=0, atol=0)


# --- initial values ------------------------------------------------------------------------------------------------


def test_pretrained_weights_are_kept_and_the_module_is_not_touched(built):
    """Without `init` the module's values are the start, whatever the key; the module stays as it was given."""
    module, model, _, x = built
    before = [type(layer) for layer in module.modules()]
    start = model.init(rng.key(5))
    assert not model.fresh
    for name, value in module.named_parameters():
        assert torch.equal(start[name], value)
        assert not start[name].requires_grad
    start[next(iter(start))].zero_()
    assert model.init(rng.key(5))[next(iter(start))].abs().sum() > 0
    assert [type(layer) for layer in module.modules()] == before
    assert not dict(module.named_buffers())
    assert module(x).shape == (5, 3)


def test_xavier(net):
    """Weights N(0, 2 / (fan_in + fan_out)) with the kernel's area in the fans, biases N(0, 0.001^2), by key alone."""
    model = from_module(cnn((3, 32, 32), 10), init=xavier)
    params = model.init(rng.key(0))
    assert model.fresh
    for layer, shape in model.layers.items():
        area = math.prod(shape[2:])
        std = math.sqrt(2.0 / (area * (shape[0] + shape[1])))
        size = math.prod(shape)
        found = params[f"{layer}.weight"]
        assert abs(found.std().item() / std - 1) < 5 / math.sqrt(2 * size)
        assert abs(found.mean().item()) < 5 * std / math.sqrt(size)
        assert params[f"{layer}.bias"].abs().max() < 0.005
    assert params["fc1.weight"].std().item() == pytest.approx(0.0722, abs=0.001)
    assert torch.equal(net.init(rng.key(1))["fc0.weight"], net.init(rng.key(1))["fc0.weight"])
    assert not torch.equal(net.init(rng.key(1))["fc0.weight"], net.init(rng.key(2))["fc0.weight"])


@pytest.mark.parametrize("layer", ["fc1", "conv2"])
def test_reset_is_uniform_within_one_over_root_fan_in(layer):
    """The named layer starts from U(+-1/sqrt(fan_in)), its bias too; std = bound / sqrt 3; others stay."""
    base = from_module(cnn((3, 32, 32), 10), init=xavier)
    fan_in = math.prod(base.layers[layer][1:])
    bound = 1.0 / math.sqrt(fan_in)
    old, new = base.init(rng.key(3)), reset(base, [layer]).init(rng.key(3))
    for part in ("weight", "bias"):
        value = new[f"{layer}.{part}"]
        assert value.abs().max() <= bound
        assert value.abs().max() > 0.9 * bound
    weight = new[f"{layer}.weight"]
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3.0), rel=0.02)
    assert weight.mean().abs() < 0.03 * bound
    for name in old:
        assert torch.equal(old[name], new[name]) == (not name.startswith(layer + "."))


def test_reset_of_the_papers_layer_halves_its_spread():
    """fc1: std 0.0361 instead of Xavier's 0.0722."""
    model = reset(from_module(cnn((3, 32, 32), 10), init=xavier), ["fc1"])
    assert model.init(rng.key(0))["fc1.weight"].std().item() == pytest.approx(0.0361, abs=0.0005)


def test_xavier_leaves_norm_layers_usable():
    """LayerNorm is what the refusal of BatchNorm recommends; the initialiser must not trip over its 1-d weight."""
    module = sequence(fc0=nn.Linear(4, 4), norm=nn.LayerNorm(4), fc1=nn.Linear(4, 3))
    assert from_module(module, init=xavier).init(rng.key(0))["norm.weight"].tolist() == [1.0] * 4


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)], ids=repr)
def test_running_statistics_are_refused(layer):
    """The sentence names the layer, its kind, the reason and what to use instead."""
    with pytest.raises(ValueError, match=rf"'norm' \({type(layer).__name__}\).*running statistics.*GroupNorm"):
        from_module(sequence(fc=nn.Linear(4, 4), norm=layer, out=nn.Linear(4, 3)))


def test_batch_statistics_are_refused():
    """No BatchNorm at all: its batch statistics would count padded rows."""
    module = sequence(fc=nn.Linear(4, 4), norm=nn.BatchNorm1d(4, track_running_stats=False), out=nn.Linear(4, 3))
    with pytest.raises(ValueError, match="GroupNorm"):
        from_module(module)


@pytest.mark.parametrize("layer", [nn.Dropout(0.1), nn.Dropout2d(0.5), nn.AlphaDropout(0.2)])
def test_dropout_is_refused(layer):
    """The sentence names the layer and the method that takes its place; a rate of 0 draws nothing and passes."""
    with pytest.raises(ValueError, match=rf"'body.drop' \({type(layer).__name__}\).*random numbers.*\+dropout"):
        from_module(sequence(body=sequence(fc=nn.Linear(4, 4), drop=layer), out=nn.Linear(4, 3)))
    layer.p = 0.0
    assert from_module(sequence(fc=nn.Linear(4, 4), drop=layer, out=nn.Linear(4, 3))).variational == ("fc",)


def test_norms_of_single_rows_pass():
    """GroupNorm, LayerNorm and plain InstanceNorm look at one row at a time and are welcome."""
    for norm in (nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.InstanceNorm1d(4)):
        assert list(from_module(sequence(fc=nn.Linear(4, 4), norm=norm, out=nn.Linear(4, 3))).layers) == ["fc", "out"]


def test_unknown_layers_are_named():
    """A layer that does not exist is refused with the names of those that do; so is a module without any."""
    with pytest.raises(ValueError, match="'fc9'; the module has fc0, fc1, fc2"):
        from_module(plain(), ["fc9"])
    with pytest.raises(ValueError, match="'a'; the module has"):
        from_module(plain(), ["a"])
    with pytest.raises(ValueError, match=r"no nn.Linear or nn.Conv2d"):
        from_module(nn.Sequential(nn.Flatten()))


def test_a_lone_layer_is_a_network():
    """Logistic regression, given as a bare nn.Linear, can carry a posterior."""
    model = from_module(nn.Linear(4, 3).double())
    noisy = attach(model, LogVariance(model.variational))
    assert noisy.apply(model.init(rng.key(0)), torch.ones(2, 4).double(), rng.split(rng.key(0), 2)).shape == (2, 2, 3)


def test_a_posterior_on_a_tied_weight_is_refused():
    """A weight that travels under another layer's name cannot carry this layer's posterior; say so at once."""
    with pytest.raises(ValueError, match="again"):
        from_module(Tied(), ["again"])


def test_default_posterior_is_the_layer_before_the_output():
    """The last layer but one, or the only one; more than one when asked for."""
    assert from_module(plain()).variational == ("fc1",)
    assert from_module(sequence(out=nn.Linear(4, 3))).variational == ("out",)
    assert from_module(plain(), ["fc2", "fc0"]).variational == ("fc2", "fc0")
    assert from_module(image_net()).layers == {"conv": (3, 2, 3, 3), "fc": (5, 48), "out": (3, 5)}
