"""Pre-trained weights from a safetensors file, in place of a network's first values."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SpecError
from ..schema import nearest

if TYPE_CHECKING:
    from torch import Tensor

    from ..core.types import Model
    from ..tree import Params


def fingerprint(path: str) -> str:
    """Return 12 hex digits that name the content of a file."""
    return hashlib.sha256(_bytes(path)).hexdigest()[:12]


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SpecError(
            f"weights is {path!r}, which cannot be read: {error.strerror}; name a safetensors file"
        ) from None


@lru_cache(maxsize=1)
def _tensors(path: str, content: str) -> Params:  # noqa: ARG001 (another content is another file)
    from ..container import ContainerError, load_foreign  # noqa: PLC0415 (torch)

    try:
        return load_foreign(_bytes(path))
    except ContainerError as error:
        raise SpecError(
            f"weights is {path!r}, which is no safetensors file ({error}); save one with safetensors"
        ) from None


def started(model: Model, path: str, content: str) -> Model:
    """Return the model with the file's values as its first ones; the head keeps its own where classes differ."""
    first = model.init

    def init(key: Tensor) -> Params:
        values, found = first(key), _tensors(path, content)
        anew = _replaced(model, values, found, path)
        return {
            name: value if name in anew else found[name].to(value.device, value.dtype).reshape(value.shape)
            for name, value in values.items()
        }

    return model._replace(init=init, fresh=False)


def told(model: Model, path: str, content: str) -> str:
    """Check the file against the network, and say what a run starts from."""
    from ..core import rng  # noqa: PLC0415 (torch)

    values, found = model.init(rng.key(0)), _tensors(path, content)
    anew = _replaced(model, values, found, path)
    if not anew:
        return f"training starts from {path}"
    there, here = (tensors[sorted(anew)[0]].shape[0] for tensors in (found, values))
    head = model.head[0]
    return (
        f"training starts from {path}; its output layer {head} has {there} classes, here are {here}: {head} starts anew"
    )


def _replaced(model: Model, values: Params, found: Params, path: str) -> set[str]:
    """Return what of the head does not fit and starts anew; refuse every other difference."""
    said = f"weights is {path!r}"
    missing = [name for name in values if name not in found]
    unknown = [name for name in found if name not in values]
    if unknown:
        raise SpecError(
            f"{said}, which has {unknown[0]!r}, but the network has no such weight; {nearest(unknown[0], list(values))}"
        )
    if missing:
        raise SpecError(
            f"{said}, which lacks {missing[0]!r}, but the network has it; it must name all {len(values)} weights"
        )
    other = {name for name, value in values.items() if found[name].shape != value.shape}
    for name in sorted(other):
        if not model.in_head(name) or found[name].shape[1:] != values[name].shape[1:]:
            shapes = f"{tuple(found[name].shape)} there and {tuple(values[name].shape)} in the network"
            raise SpecError(f"{said}, but {name} has shape {shapes}; only the number of classes may differ")
    return {name for name in values if model.in_head(name)} if other else set()
