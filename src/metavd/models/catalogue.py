"""Which network a name stands for, and which one `auto` chooses for the rows at hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..errors import SpecError
from ..registry import Registry
from ..schema import nearest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..core.types import Model
    from ..tree import Params

AUTO = "auto"
Shape = Sequence[int]
"""Of one row: (channels, height, width) of an image, (features,) otherwise."""
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


REGISTRY: Registry[Network] = Registry(
    "metavd.models", [f"{__package__}.{name}" for name in ("cnn", "small_cnn", "mlp")]
)


def everything(shape: Shape) -> bool:  # noqa: ARG001
    """Take rows of any shape."""
    return True


def nothing(shape: Shape) -> bool:  # noqa: ARG001
    """Never be chosen by `auto`."""
    return False


def network(
    name: str, *, takes: Callable[[Shape], bool] = everything, needs: str = "", suits: Callable[[Shape], bool] = nothing
) -> Callable[[Build], Build]:
    """Register a network."""

    def register(build: Build) -> Build:
        REGISTRY.add(name, Network(name, build, takes, needs, suits), build.__module__)
        return build

    return register


def names() -> tuple[str, ...]:
    """Return every network that can be asked for by name."""
    return tuple(REGISTRY.all())


def check(name: str) -> str:
    """Return a network's name, or say in one sentence which there are."""
    if name != AUTO and not REGISTRY.has(name):
        raise SpecError("; ".join([f"model is {name!r}", nearest(name, [AUTO, *names()]), *REGISTRY.broken]))
    return name


def module_for(name: str, shape: Shape, num_classes: int, width: int) -> nn.Module:
    """Build a network by its name; `auto` chooses by the shape of a row, a width of 0 is the network's own."""
    import torch  # noqa: PLC0415

    found = REGISTRY.own()
    chosen = next(each for each in found.values() if each.suits(shape)) if check(name) == AUTO else found[name]
    if not chosen.takes(shape):
        others = " or ".join(each.name for each in found.values() if each.takes(shape))
        raise SpecError(
            f"model is {name!r}, but it needs {chosen.needs} and a row here is {tuple(shape)}; use {others}"
        )
    with torch.random.fork_rng(devices=[]):  # torch initialises what it builds; nobody's generator shall notice
        return chosen.build(shape, num_classes, **({"width": width} if width else {}))


class Described(Protocol):
    """What of an experiment decides its network."""

    @property
    def model(self) -> str: ...  # noqa: D102
    @property
    def width(self) -> int: ...  # noqa: D102
    @property
    def device(self) -> str: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def precision(self) -> str: ...  # noqa: D102


class Rows(Protocol):
    """What of a dataset decides the network's inputs and outputs."""

    @property
    def x(self) -> HasShape: ...  # noqa: D102
    @property
    def num_classes(self) -> int: ...  # noqa: D102


class HasShape(Protocol):
    """An array or a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102


def model_for(e: Described, rows: Rows, module: nn.Module | Model | None) -> Model:
    """Return the network of an experiment: the user's own, or the one that it names, on its device and in its type."""
    import torch  # noqa: PLC0415

    from ..core.model import from_module, xavier  # noqa: PLC0415
    from ..core.types import Model  # noqa: PLC0415

    dtype = getattr(torch, e.dtype)
    if isinstance(module, Model):

        def init(key: Tensor) -> Params:
            return {name: value.to(e.device, dtype) for name, value in module.init(key).items()}

        return module._replace(init=init)
    if module is None:
        built = module_for(e.model, rows.x.shape[1:], rows.num_classes, e.width)
        return from_module(built.to(e.device, dtype), init=xavier, precision=e.precision)
    return from_module(copy.deepcopy(module).to(e.device, dtype), precision=e.precision)
