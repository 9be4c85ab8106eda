"""Which network a name stands for, and which one `auto` chooses for the rows at hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import SpecError
from ..registry import Registry
from ..schema import nearest
from . import weights

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..core.types import Model
    from ..tree import Params

AUTO = "auto"
_EXAMPLE = 2
"""Rows that are followed through a network to see which layers it has where."""
Shape = Sequence[int]
"""Of one row: (channels, height, width) of an image, (features,) otherwise."""
Start = Callable[["Tensor", str, "Tensor"], "Tensor"]
"""(key, name, the module's own value) -> a parameter's first value."""
Build = Callable[..., "nn.Module"]
"""(shape, num_classes, width=...) -> a module without BatchNorm and Dropout."""


@dataclass(frozen=True)
class Network:
    """A network by name: how it is built, and for which rows."""

    name: str
    build: Build
    takes: Callable[[Shape], bool]
    needs: str
    """What `takes` asks for, in words."""
    suits: Callable[[Shape], bool]
    """Whether `auto` may choose it; the first that suits is chosen."""
    tokens: bool = False
    """Whether it takes rows of token ids, and no others; `build` then is told how many ids there are."""


REGISTRY: Registry[Network] = Registry(
    "metavd.models", [f"{__package__}.{name}" for name in ("cnn", "small_cnn", "mlp", "lenet", "resnet", "tokens")]
)


def network(
    name: str,
    *,
    takes: Callable[[Shape], bool] = lambda _: True,
    needs: str = "",
    suits: Callable[[Shape], bool] = lambda _: False,
    tokens: bool = False,
) -> Callable[[Build], Build]:
    """Register a network; by default it takes rows of any shape and is never chosen by `auto`."""

    def register(build: Build) -> Build:
        REGISTRY.add(name, Network(name, build, takes, needs, suits, tokens), build.__module__)
        return build

    return register


def names() -> tuple[str, ...]:
    """Return every network that can be asked for by name."""
    return tuple(REGISTRY.all())


def check(name: str) -> str:
    """Return a network's name, or say in one sentence which there are."""
    if name != AUTO and name not in REGISTRY:
        raise SpecError("; ".join([f"model is {name!r}", nearest(name, [AUTO, *names()]), *REGISTRY.broken]))
    return name


def module_for(name: str, shape: Shape, num_classes: int, width: int, tokens: int = 0) -> nn.Module:
    """Build a network by its name; `auto` chooses by the shape of a row, a width of 0 is the network's own.

    `tokens` is how many ids there are, where rows hold token ids.
    """
    import torch  # noqa: PLC0415

    check(name)  # which imports packages, where the name is none of ours
    found = REGISTRY.own()
    fitting = {key: each for key, each in found.items() if each.tokens == bool(tokens)}
    chosen = next(each for each in fitting.values() if each.suits(shape)) if name == AUTO else found[name]
    if chosen.name not in fitting or not chosen.takes(shape):
        others = " or ".join(each.name for each in fitting.values() if each.takes(shape))
        needs, here = chosen.needs or "numbers", f"{tokens} token ids, {shape[0]} a row" if tokens else tuple(shape)
        raise SpecError(f"model is {name!r}, but it needs {needs} and a row here is {here}; use {others}")
    with torch.random.fork_rng(devices=[]):  # torch initialises what it builds; nobody's generator shall notice
        more = ({"width": width} if width else {}) | ({"tokens": tokens} if tokens else {})
        return chosen.build(shape, num_classes, **more)


def model_for(e: Any, rows: Any, module: nn.Module | Model | None) -> Model:
    """Return the network of an experiment: the user's own, or the one that it names, on its device and in its type.

    Of the experiment it asks model, width, device, dtype, precision and weights, of the rows `x.shape`, `num_classes`
    and `tokens`. A network of the user's own is followed on its way from rows to logits, see `core.trace`.
    """
    import torch  # noqa: PLC0415

    from ..core.model import from_module, xavier  # noqa: PLC0415
    from ..core.types import Model  # noqa: PLC0415

    dtype = getattr(torch, e.dtype)
    example = torch.zeros(_EXAMPLE, *rows.x.shape[1:], dtype=torch.int64 if rows.tokens else dtype, device=e.device)
    if rows.tokens and module is not None:
        example[-1] = rows.tokens - 1  # what an embedding must know too
    if isinstance(module, Model):
        given = module

        def init(key: Tensor) -> Params:
            return {name: value.to(e.device, dtype) for name, value in given.init(key).items()}

        model = module._replace(init=init)
        if module.settle is not None:
            found = module.settle(example)
            names = ("head", "variational", "features", "num_classes", "called")
            model = model._replace(**{name: getattr(found, name) for name in names})
    elif module is None:
        built = module_for(e.model, rows.x.shape[1:], rows.num_classes, e.width, rows.tokens)
        start = _with_tables(built, xavier) if rows.tokens else xavier
        model = from_module(built.to(e.device, dtype), example=example, init=start, precision=e.precision)
    else:
        own = _with_integers(copy.deepcopy(module)).to(e.device, dtype)
        model = from_module(own, example=example, precision=e.precision)
    if 0 < model.num_classes < rows.num_classes:
        raise SpecError(
            f"the module returns {model.num_classes} logits for a row, but the data have {rows.num_classes} classes; "
            f"give its output layer {model.head[0]!r} {rows.num_classes} units"
        )
    return weights.started(model, e.weights, e.weights_content) if e.weights else model


def _with_tables(module: nn.Module, others: Start) -> Start:
    """Start embeddings at N(0, 1/E), whatever the number of tokens, and everything else as `others` does."""
    from torch import nn  # noqa: PLC0415

    from ..core import rng  # noqa: PLC0415

    tables = {f"{name}.weight" for name, each in module.named_modules() if isinstance(each, nn.Embedding)}

    def start(key: Tensor, name: str, value: Tensor) -> Tensor:
        if name not in tables:
            return others(key, name, value)
        return rng.normal(key, value.shape, value.dtype) / math.sqrt(value.shape[1])

    return start


def _with_integers(module: nn.Module) -> nn.Module:
    """Let embeddings take ids of any type: operations are counted on zeros of the weights' type, ONNX feeds floats."""
    from torch import nn  # noqa: PLC0415

    for each in module.modules():
        if isinstance(each, nn.Embedding):
            each.register_forward_pre_hook(lambda _, given: (given[0].long(), *given[1:]))
    return module
