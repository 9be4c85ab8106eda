"""Networks by name, and any network as the `Model` that methods train."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from ..core.model import cnn, from_module, mlp, small_cnn, xavier
from ..core.types import Model
from ..data.source import Source
from ..errors import SpecError
from ..tree import Params

_BUILDERS = {"cnn": cnn, "small-cnn": small_cnn, "mlp": mlp}


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


def module_for(name: str, shape: Sequence[int], num_classes: int, width: int) -> nn.Module:
    """Build one of the networks that come with the package; auto chooses by the size of the input."""
    if name == "auto":
        small = len(shape) != 3 or min(shape[1:]) < 8
        name = "mlp" if small else ("cnn" if min(shape[1:]) >= 24 else "small-cnn")
    if name != "mlp" and (len(shape) != 3 or min(shape[1:]) < 8):
        raise SpecError(
            f"model is {name!r}, but it needs images of at least 8x8 pixels and a row here is {tuple(shape)}; use mlp"
        )
    with torch.random.fork_rng(devices=[]):  # torch initialises what it builds; nobody's generator shall notice
        return _BUILDERS[name](shape, num_classes, **({"width": width} if width else {}))


def model_for(e: Described, source: Source, module: nn.Module | Model | None) -> Model:
    """Return the network of an experiment: the user's own, or the one that it names, on its device and in its type."""
    dtype = getattr(torch, e.dtype)
    if isinstance(module, Model):

        def init(key: torch.Tensor) -> Params:
            return {name: value.to(e.device, dtype) for name, value in module.init(key).items()}

        return module._replace(init=init)
    if module is None:
        built = module_for(e.model, source.x.shape[1:], source.num_classes, e.width)
        return from_module(built.to(e.device, dtype), init=xavier, precision=e.precision)
    return from_module(copy.deepcopy(module).to(e.device, dtype), precision=e.precision)
