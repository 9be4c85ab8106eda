"""Parameters as a message, and back: packed first, then put into the container that files have too.

Packing makes of every entry another one under the same name; the metadata `packed` say what it was, [way, dtype,
shape] by name. An entry that is not named there travels as it is.

    way            what travels in place of the entry
    sparse         those of its values that its layer's mask keeps
    half           its values in float16
    sparse-half    as sparse, in float16
    bits           a mask, one bit per entry
    kept, dropped  a mask, the positions of its ones or of its zeros
    known          a mask that the receiver has: nothing

What a speaker may say is `guard`'s to judge.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import container
from ..container import DTYPES, NAMES, ContainerError, Format
from ..tree import Params
from . import masks as masking

MESSAGE = Format("message", 2, max_header=1 << 20)
LIMIT = 1 << 30
"""Bytes that decoded parameters may take unless the caller says otherwise: 1 GiB."""

_SHRINKS = (torch.float32, torch.float64)
"""What float16 makes smaller; other entries travel as they are."""
_VALUES = {"dense", "sparse", "half", "sparse-half"}
_MASKS = {"bits", "kept", "dropped", "known"}


class _Was(NamedTuple):
    """What an entry was before it was packed."""

    way: str
    dtype: torch.dtype
    shape: tuple[int, ...]


# Writing


def encode(params: Params, *, half: bool = False, mask_known: bool = False) -> bytes:
    """Write parameters as one message.

    Weights and spreads that a layer's mask drops are left out. The mask travels too, unless mask_known=True: on the
    way up, where the receiver made it. half=True sends float32 and float64 values as float16, which rounds them; a
    finite value that float16 cannot hold is refused rather than turned into an infinity. Otherwise every bit arrives,
    NaN and infinities included, whatever the layout in memory.

    >>> sent = {"fc.weight": torch.eye(2), "fc.mask": torch.eye(2)}
    >>> decode(encode(sent))["fc.weight"]
    tensor([[1., 0.],
            [0., 1.]])
    """
    packed: Params = {}
    was: dict[str, list[Any]] = {}
    for name, value in params.items():
        container.check(name, value)
        way, packed[name] = _pack(name, value.detach().cpu(), params, half=half, mask_known=mask_known)
        if way != "dense":
            was[name] = [way, NAMES[value.dtype], list(value.shape)]
    return container.dump(MESSAGE, packed, {"packed": json.dumps(was, separators=(",", ":"))} if was else {})


def _pack(name: str, value: Tensor, params: Params, *, half: bool, mask_known: bool) -> tuple[str, Tensor]:
    if masking.is_mask(name):
        if value.numel() >= masking.MOST:
            raise ContainerError(f"{name} has shape {tuple(value.shape)}, which is too large for a mask", "shape")
        if not ((value == 0) | (value == 1)).all():
            raise ContainerError(f"{name} is a mask and must hold zeros and ones", "mask")
        return ("known", torch.empty(0, dtype=torch.uint8)) if mask_known else masking.pack(value)
    mask = masking.mask_of(name, value.shape, params)
    kept = value if mask is None else value[masking.cover(mask.detach().cpu(), value.shape)]
    way = "dense" if mask is None else "sparse"
    if not half or value.dtype not in _SHRINKS:
        return way, kept
    rounded = kept.to(torch.float16)
    if (rounded.isinf() & kept.isfinite()).any():
        largest = float(kept[kept.isfinite()].abs().max())
        raise ContainerError(f"{name} holds {largest:.3g}, which float16 turns into infinity; send float32", "overflow")
    return "half" if mask is None else "sparse-half", rounded


# Reading


def decode(data: bytes, like: Params | None = None, *, limit: int = LIMIT) -> Params:
    """Read a message; ContainerError, and no other exception, where it is not one.

    Values that were left out come back as zero: a client never reads a masked weight. A server does: it pulls towards
    the answer, and an answer has to hold there what the client was sent, as it does in the simulator. So a server
    passes what it sent as `like`; the message must then have the same names, dtypes and shapes, in any order, and
    dropped values, and masks that did not travel, are taken from `like`.

    The tensors are new, contiguous, on the CPU and in the order of the message. Without `like`, more than `limit` bytes
    of them are refused before any is made: a mask that drops everything takes no bytes, so a short message can name a
    large tensor.

    >>> received = {"fc.weight": torch.tensor([[1.0, 5.0]]), "fc.mask": torch.tensor([1.0, 0.0])}
    >>> answer = encode(received | {"fc.weight": torch.tensor([[2.0, 7.0]])}, mask_known=True)
    >>> decode(answer, like=received)["fc.weight"]
    tensor([[2., 5.]])
    """
    packed, words = container.load(MESSAGE, data)
    was = dict(_described(packed, words))
    if like is not None:
        _compare(was, like)
    elif (needed := sum(_extent(entry) for entry in was.values())) > limit:
        raise ContainerError(f"the message would unfold to {needed} bytes; {limit} are allowed", "oversized")
    known = like or {}
    masks = {name: _mask(name, was[name], value, known) for name, value in packed.items() if masking.is_mask(name)}
    return {
        name: masks[name] if name in masks else _values(name, was[name], value, masks, known.get(name))
        for name, value in packed.items()
    }


def _described(packed: Params, words: dict[str, str]) -> Iterator[tuple[str, _Was]]:
    """Yield what every entry was, checked as far as that goes without its values."""
    try:
        listed = container.read_json(words.get("packed", "{}"))
    except (ValueError, RecursionError) as error:
        raise ContainerError("the message does not say in proper JSON how it is packed") from error
    if not isinstance(listed, dict):
        raise ContainerError("the message does not say by name how it is packed")
    if stray := listed.keys() - packed.keys():
        raise ContainerError(f"the message says how {min(stray)!r:.80} is packed, which it does not hold", "name")
    for name, value in packed.items():
        given = listed.get(name, ["dense", NAMES[value.dtype], list(value.shape)])
        if not isinstance(given, list) or len(given) != 3:
            raise ContainerError(f"{name} is not said to be packed by [way, dtype, shape]")
        way, dtype, shape = given
        if not isinstance(way, str) or way not in (_MASKS if masking.is_mask(name) else _VALUES):
            raise ContainerError(f"{name} is packed as {way!r:.80}, which it cannot be")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ContainerError(f"{name} was of the unknown dtype {dtype!r:.80}")
        if not container.is_shape(shape):
            raise ContainerError(f"{name} was of the improper shape {shape!r:.80}")
        if way.endswith("half") and DTYPES[dtype] not in _SHRINKS:
            raise ContainerError(f"{name} was {DTYPES[dtype]} and cannot come as float16")
        yield name, _Was(way, DTYPES[dtype], tuple(shape))


def _extent(was: _Was) -> int:
    """Return the bytes of an entry; a length of 0 beside large ones does not make it small: strides overflow too."""
    return math.prod(max(length, 1) for length in was.shape) * was.dtype.itemsize


def _compare(was: dict[str, _Was], like: Params) -> None:
    if missing := next((name for name in like if name not in was), None):
        raise ContainerError(f"the message lacks {missing}", "name")
    for name, entry in was.items():
        if name not in like:
            raise ContainerError(f"the message has {name}, which nobody asked for", "name")
        value = like[name]
        if entry.shape != tuple(value.shape):
            raise ContainerError(f"{name} has shape {entry.shape} instead of {tuple(value.shape)}", "shape")
        if entry.dtype != value.dtype:
            raise ContainerError(f"{name} is {entry.dtype} instead of {value.dtype}", "dtype")


def _mask(name: str, was: _Was, packed: Tensor, known: Params) -> Tensor:
    if was.way == "known":
        mask = known.get(name)
        if mask is None:
            raise ContainerError(f"{name} did not travel, and the receiver does not have it", "mask")
        if packed.numel() or tuple(mask.shape) != was.shape or mask.dtype != was.dtype:
            raise ContainerError(f"{name} is not the mask that the receiver has", "mask")
        return mask.detach().cpu().clone(memory_format=torch.contiguous_format)
    try:
        kept = masking.unpack(was.way, packed, math.prod(was.shape))
    except ValueError as error:
        raise ContainerError(f"{name} is a bad mask: {error}", "mask") from error
    return kept.to(was.dtype).reshape(was.shape)


def _values(name: str, was: _Was, packed: Tensor, masks: Params, like: Tensor | None) -> Tensor:
    mask = masking.mask_of(name, was.shape, masks)
    if was.way.startswith("sparse") and mask is None:
        raise ContainerError(f"{name} came without its dropped values, and no mask says which those are", "mask")
    if mask is not None and not was.way.startswith("sparse"):
        raise ContainerError(f"{name} came with values that its mask drops", "mask")
    kept = None if mask is None else masking.cover(mask, was.shape)
    dtype, shape = torch.float16 if was.way.endswith("half") else was.dtype, was.shape
    if kept is not None:
        shape = (int(kept.sum()),)
    if packed.dtype != dtype or tuple(packed.shape) != shape:
        came = f"{packed.dtype} of shape {tuple(packed.shape)}"
        raise ContainerError(f"{name} came as {came} instead of {dtype} of shape {shape}")
    values = packed.to(was.dtype)
    if kept is None:
        return values
    if like is None:
        whole = torch.zeros(was.shape, dtype=was.dtype)
    else:
        whole = like.detach().cpu().clone(memory_format=torch.contiguous_format)
    whole[kept] = values
    return whole
