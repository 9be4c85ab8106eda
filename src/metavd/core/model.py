"""Networks as pure functions, and any `torch.nn.Module` as one.

Shape letters: B batch, S noise draws, K classes, F features.

Linear and convolutional layers look at what their parameters bring: a "variance" makes the layer's output Gaussian
by local reparameterisation, an "alpha" multiplies its inputs by Gaussian noise, a "mask" removes weights. What comes
is decided by the method (`attach`), so one network serves every method.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from .. import tree
from ..compat import convolve
from ..errors import UserError
from ..ops import conv, dense
from ..ops.precision import EXACT
from ..tree import Params
from . import rng
from .posterior import Posterior, per_weight
from .trace import Traced, check_instance, check_layers, trace
from .types import Model

_EXTRAS = ("variance", "alpha", "mask", "key")
Init = Callable[[Tensor, str, Tensor], Tensor]
"""A tensor's initial value, from a key, its name and the module's own value."""
_STD_EPS = 1e-10
"""Added to the variance of a noisy activation; the value of the released code."""


class _Noisy(nn.Module):
    """What a noisy linear and a noisy convolutional layer share. An empty extra means that it was not given."""

    weight: Tensor
    bias: Tensor | None
    variance: Tensor
    alpha: Tensor
    mask: Tensor
    key: Tensor

    def transform(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply the layer's linear map."""
        raise NotImplementedError

    def noise_scale(self) -> Tensor:
        """Return sqrt(alpha) in the shape of one input."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Draw one noisy output per row.

        Rows are S draws of B samples; with a `key` (S, 1) in place of (S,) all draws share their rows.
        """
        weight = self.weight
        mask = per_weight(self.mask, weight) if self.mask.numel() else None
        if mask is not None:
            weight = torch.where(mask > 0, weight, torch.zeros_like(weight))
        if not self.key.numel():
            return self.plain(x, weight)
        x = x.to(weight.dtype)
        if self.alpha.numel():
            rows = dense.by_draw(x, self.key)
            noisy = rows * (1.0 + self.noise_scale() * dense.drawn(rows, self.key))
            return self.plain(noisy.flatten(0, 1), weight)
        return self.noisy(x, weight, self.variance if mask is None else self.variance * mask)

    def noisy(self, x: Tensor, weight: Tensor, sigma2: Tensor) -> Tensor:
        """Answer with Gaussian weights, by local reparameterisation."""
        mean, power = self.transform(x, weight, self.bias), self.transform(x.square(), sigma2, None)
        return self.after(dense.noisy(mean, None, power, self.key, _STD_EPS, 1.0))

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        """Answer without noise; a block before this one may have answered in a shorter type."""
        return self.after(self.transform(x.to(weight.dtype), weight, self.bias))

    def after(self, out: Tensor) -> Tensor:
        """Apply what belongs to the layer beside its linear map."""
        return out


class _NoisyLinear(_Noisy, nn.Linear):  # type: ignore[misc]
    leak: float | None = None
    """The slope below 0 of the leaky ReLU that follows it in the module, which then is computed here."""

    def transform(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Under vmap a bias in the product costs a call more than one added to it.
        out = functional.linear(x, weight)
        return out if bias is None else out + bias

    def noisy(self, x: Tensor, weight: Tensor, sigma2: Tensor) -> Tensor:
        mean, power = functional.linear(x, weight), functional.linear(x.square(), sigma2)
        return dense.noisy(mean, self.bias, power, self.key, _STD_EPS, 1.0 if self.leak is None else self.leak)

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.leak is None or self.bias is None:
            return super().plain(x, weight)
        return dense.bias_leaky_relu(functional.linear(x.to(weight.dtype), weight), self.bias, self.leak)

    def after(self, out: Tensor) -> Tensor:
        return out if self.leak is None else functional.leaky_relu(out, self.leak)

    def noise_scale(self) -> Tensor:
        return self.alpha.sqrt()


class _NoisyConv2d(_Noisy, nn.Conv2d):
    precision: str = EXACT
    pooled: bool = False
    """Whether the ReLU and the pooling that follow it in the module are computed here."""
    flat: bool = False
    """Whether its pixels are made a row next."""

    def transform(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return convolve(self, conv.convolvable(x), weight, bias)

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.pooled and self.bias is not None and _is_square(self):
            return conv.conv_relu_pool(x, weight, self.bias, self.precision, flat=self.flat)
        return super().plain(x, weight)

    def after(self, out: Tensor) -> Tensor:
        return conv.relu_pool(out) if self.pooled else out

    def noise_scale(self) -> Tensor:
        # A grouped convolution's weight knows the channels of one group; the groups share their rates.
        return self.alpha.sqrt().repeat(self.groups)[:, None, None]


def _is_square(conv: nn.Conv2d) -> bool:
    """Whether a convolution is the plain 3x3 one, which keeps the size of an image."""
    plain = (conv.kernel_size, conv.stride, conv.padding, conv.dilation) == ((3, 3), (1, 1), (1, 1), (1, 1))
    return plain and conv.groups == 1 and conv.padding_mode == "zeros"


def _fuse(module: nn.Module, precision: str) -> None:
    """Let layers of a Sequential compute what follows them, in place.

    Convolutions a ReLU and a 2x2 max-pooling, linear layers a leaky ReLU.
    """
    uses = Counter(id(layer) for _, layer in module.named_modules(remove_duplicate=False))
    for part in module.modules():
        if isinstance(part, _NoisyConv2d):
            part.precision = precision
        if type(part) is not nn.Sequential:
            continue
        layers = [*part, nn.Identity(), nn.Identity(), nn.Identity()]
        for i, layer in enumerate(part):
            after = layers[i + 1 : i + 4]
            if uses[id(layer)] > 1:  # elsewhere it may be followed by something else
                continue
            if isinstance(layer, _NoisyConv2d) and type(after[0]) is nn.ReLU and _halves(after[1]):
                layer.pooled, part[i + 1], part[i + 2] = True, nn.Identity(), nn.Identity()
                layer.flat = type(after[2]) is nn.Flatten and after[2].start_dim == 1 and after[2].end_dim == -1
            elif isinstance(layer, _NoisyLinear) and type(after[0]) is nn.LeakyReLU and after[0].negative_slope > 0:
                layer.leak, part[i + 1] = after[0].negative_slope, nn.Identity()


def _halves(pool: nn.Module) -> bool:
    """Whether a module is the usual max-pooling of 2x2 pixels."""
    usual = nn.MaxPool2d(2)
    if type(pool) is not nn.MaxPool2d:
        return False
    sizes = ((getattr(pool, name), getattr(usual, name)) for name in usual.__constants__)
    return all(own in (plain, (plain, plain)) for own, plain in sizes)


_NOISY: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: _NoisyLinear, nn.Conv2d: _NoisyConv2d}


def _layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the module's linear and convolutional layers by name, in the order of registration."""
    layers = {name: layer for name, layer in module.named_modules() if type(layer) in _NOISY}
    if not layers:
        raise UserError("the module has no nn.Linear or nn.Conv2d layer; at least its output layer must be one")
    return layers


def _prepare(layers: Mapping[str, nn.Module]) -> None:
    """Turn linear and convolutional layers into noisy ones, in place."""
    for layer in layers.values():
        layer.__class__ = _NOISY[type(layer)]
        for extra in _EXTRAS:
            layer.register_buffer(extra, torch.empty(0))


def _keep_to_layers(module: nn.Module) -> None:
    """Let transformers call their layers, in place: a built one in evaluation mode passes by them, and by noise."""
    for part in module.modules():
        if isinstance(part, nn.MultiheadAttention | nn.TransformerEncoderLayer | nn.TransformerEncoder):
            part.training = True


def _without_output(module: nn.Module, output: str) -> nn.Module:
    """Return the module with its output layer taken out, so that it returns that layer's inputs."""
    body = copy.deepcopy(module)
    parent, _, name = output.rpartition(".")
    setattr(body.get_submodule(parent), name, nn.Identity())
    return body


def from_module(
    module: nn.Module,
    variational: Sequence[str] | None = None,
    *,
    example: Tensor | None = None,
    init: Init | None = None,
    precision: str = EXACT,
) -> Model:
    """Turn a module that maps (B, ...) to logits (B, K) into a `Model`.

    Args:
        module: any module without BatchNorm and Dropout, whose logits one `nn.Linear` or `nn.Conv2d` makes.
        variational: names of the linear or convolutional layers that carry a posterior when the method has one.
            Default: the layer before the output layer (or the output layer, if it is the only one).
        example: a few rows (B, ...), which are followed through the module to find the output layer and the one
            before it. Without them the order of registration is taken until a run, which has rows, finds both.
        init: makes a tensor's initial value from (key, name, the module's own value). Default: the module's own
            values, so pre-trained weights are kept.
        precision: one of `ops.precision.PRECISIONS`, for what a GPU computes; parameters and answers keep their type.
    """
    check_instance(module)
    check_layers(module)
    module = copy.deepcopy(module)
    if type(module) in _NOISY:
        module = nn.Sequential(module)
    _keep_to_layers(module)
    noisy = _layers(module)
    layers = {name: tuple(layer.weight.shape) for name, layer in noisy.items()}  # type: ignore[arg-type]
    found = _registered(noisy) if example is None else trace(module, noisy, example)
    _prepare(noisy)
    _fuse(module, precision)
    start = {name: value.detach().clone() for name, value in module.named_parameters()}
    chosen = (found.before,) if variational is None else tuple(variational)
    _check_carriers(chosen, layers, start)
    tied = len(list(module.named_parameters(remove_duplicate=False))) > len(start)

    make, weights = _starter(start, init), _chosen(start, layers)
    run = _runner(module, weights, tied)

    def apply(params: Params, x: Tensor, keys: Tensor | None) -> Tensor:  # noqa: ARG001
        return run(params, x, {}, 1)

    def at(found: Traced) -> Model:
        """The model with its output layer there."""
        body = _without_output(module, found.head)

        def features(params: Params, x: Tensor) -> Tensor:
            dtype = x.dtype if x.is_floating_point() else next(iter(params.values())).dtype
            return _call(body, weights(params, found.head + "."), x, tied).to(dtype)

        before = chosen if variational is not None else (found.before,)
        return Model(
            make, apply, features, run, layers, before, init is not None, (found.head,), found.num_classes, found.called
        )

    def settle(rows: Tensor) -> Model:
        like = next(module.parameters())
        return at(trace(module, noisy, rows.to(like.device, like.dtype if rows.is_floating_point() else rows.dtype)))

    return at(found) if example is not None else at(found)._replace(settle=settle)


def _starter(start: Params, init: Init | None) -> Callable[[Tensor], Params]:
    """Return `Model.init`: the module's own values, or those that `init` makes of a key for each."""

    def make(key: Tensor) -> Params:
        if init is None:
            return {name: value.clone() for name, value in start.items()}
        return {name: init(rng.fold(key, i), name, value) for i, (name, value) in enumerate(start.items())}

    return make


def _chosen(start: Params, layers: Mapping[str, object]) -> Callable[..., Params]:
    """Return what takes from a client's parameters those of the network: its weights, and masks where there are any."""

    def weights(params: Params, without: str | None = None) -> Params:
        names = (name for name in start if without is None or not name.startswith(without))
        masks = (f"{name}.mask" for name in layers if f"{name}.mask" in params)
        return {name: params[name] for name in (*names, *masks)}

    return weights


def _runner(
    module: nn.Module, weights: Callable[..., Params], tied: bool
) -> Callable[[Params, Tensor, Params, int], Tensor]:
    """Return a module's `Model.run`."""

    @cache
    def parts(noisy: frozenset[str]) -> tuple[nn.Module, nn.Module, str]:
        """What is computed once, what is computed for every draw, and its first layer if that can tell draws apart."""
        if type(module) is not nn.Sequential or tied:
            return nn.Sequential(), module, ""
        # A layer that stands at two places has two names.
        names = [name for name, _ in module.named_modules(remove_duplicate=False) if name and "." not in name]
        first = min(map(names.index, noisy))
        return module[:first], module[first:], names[first] if isinstance(module[first], _Noisy) else ""

    def run(params: Params, x: Tensor, extras: Params, draws: int) -> Tensor:
        """Logits (draws, B, K). What lies before the first noisy layer of a Sequential is computed once for all."""
        given = weights(params) | extras
        rows = x.shape[0]
        if draws == 1:
            return _call(module, given, x, tied)[None]
        before, after, first = parts(frozenset(name.partition(".")[0] for name in extras))
        x = _call(before, given, x, tied)
        if first:
            given[f"{first}.key"] = given[f"{first}.key"][:, None]
        else:
            x = x.expand(draws, *x.shape).reshape(draws * rows, *x.shape[1:])
        return _call(after, given, x, tied).reshape(draws, rows, -1)

    return run


def _registered(layers: Mapping[str, nn.Module]) -> Traced:
    """Take the last layer for the output, and for the one before it the last that has no other layer's weights."""
    *others, head = layers
    first = {id(layer.weight): name for name, layer in reversed(list(layers.items()))}
    return Traced(head, ([name for name in others if name in first.values()] or [head])[-1], 0, tuple(layers))


def _check_carriers(chosen: Sequence[str], layers: Mapping[str, object], start: Params) -> None:
    """Refuse layers that cannot carry a posterior."""
    for name in chosen:
        if name not in layers:
            there = ", ".join(layers)
            raise UserError(f"no linear or convolutional layer is called {name!r}; the module has {there}")
        if f"{name}.weight" not in start:
            raise UserError(f"layer {name!r} shares its weight with another layer, which must carry the posterior")


def _call(module: nn.Module, given: Params, x: Tensor, tied: bool) -> Tensor:
    """Run a part of the network with the entries that belong to it; looking for tied weights costs time."""
    heads = {name for name, _ in (*module.named_children(), *module.named_parameters(recurse=False))}
    own = {name: value for name, value in given.items() if name.partition(".")[0] in heads}
    result: Tensor = functional_call(module, own, (x,), tie_weights=tied)
    return result


def attach(model: Model, posterior: Posterior) -> Model:
    """Give the model's layers a posterior: `apply` then draws from it, one draw per key."""

    def apply(params: Params, x: Tensor, keys: Tensor | None) -> Tensor:
        if keys is None:
            return model.run(params, x, {}, 1)
        extras = {}
        for i, layer in enumerate(posterior.layers):
            extras[f"{layer}.key"] = rng.fold(keys, i)
            extras |= {f"{layer}.{part}": value for part, value in posterior.perturb(params, layer).items()}
        return model.run(params, x, extras, keys.shape[0])

    return model._replace(apply=apply)


def reset(model: Model, layers: Sequence[str]) -> Model:
    """Start the named layers from U(+-1/sqrt(fan_in)) instead of the model's own initial values.

    The released code's initialiser passes over its noisy layer, which so keeps PyTorch's default: half the spread of
    the other methods' Xavier initialisation.
    """

    def init(key: Tensor) -> Params:
        params = model.init(key)
        for i, layer in enumerate(layers):
            bound = 1.0 / math.sqrt(math.prod(model.layers[layer][1:]))
            for j, name in enumerate([f"{layer}.weight", f"{layer}.bias"]):
                if name in params:
                    old = params[name]
                    draw = rng.uniform(rng.fold(key, 10_000 + i, j), old.shape, old.dtype)
                    params[name] = (2.0 * draw - 1.0) * bound
        return params

    return model._replace(init=init)


def headless(model: Model) -> Model:
    """Drop the output layer's parameters, for methods that answer from the features alone."""

    def init(key: Tensor) -> Params:
        return tree.select(model.init(key), lambda name: not model.in_head(name))

    return model._replace(init=init)


def xavier(key: Tensor, name: str, value: Tensor) -> Tensor:
    """Xavier-normal weights (fan with the kernel's area), biases N(0, 0.001^2): the released code's initialiser."""
    draw = rng.normal(key, value.shape, value.dtype)
    if not name.endswith("weight"):
        return draw * 0.001
    if value.dim() < 2:
        return value.clone()  # the scale of a norm layer starts where it was
    area = math.prod(value.shape[2:])
    return draw * math.sqrt(2.0 / (area * (value.shape[0] + value.shape[1])))
