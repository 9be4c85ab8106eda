"""Parameters as bytes, and back: a container of our own, length-checked, without pickle.

    bytes    4  magic "MVDW"
             2  version
             4  length H of the header
             8  length P of the payload
             H  header, JSON: one [name, dtype, shape, encoding, bytes] an entry, in the order of the dictionary
             P  payload: the entries' bytes, one after the other, little-endian
            32  SHA-256 of all that

    encoding       what the entry's bytes are
    dense          its values
    sparse         those of its values that its layer's mask keeps
    half           as dense, in float16
    sparse-half    as sparse, in float16
    bits           a mask, one bit an entry
    kept, dropped  a mask, the positions of its ones or of its zeros
    known          a mask that the receiver has: no bytes

The checksum finds damage, not forgery: who may speak at all is the transport's business (TLS, registered nodes), and
what a speaker may say is `guard`'s.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..tree import Params
from . import masks as masking

MAGIC = b"MVDW"
VERSION = 1
LIMIT = 1 << 30
"""Bytes that decoded parameters may take unless the caller says otherwise: 1 GiB."""

_START = struct.Struct("<4sHIQ")
_CHECK = hashlib.sha256().digest_size
_MAX_HEADER = 1 << 20
_MAX_NAME = 256
_MAX_DIM = 16
_SHRINKS = (torch.float32, torch.float64)
"""What fp16 makes smaller; other entries travel as they are."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    )
}  # fmt: skip
_VALUES = {"dense", "sparse", "half", "sparse-half"}
_MASKS = {"bits", "kept", "dropped", "known"}


class WireError(ValueError):
    """A message cannot be written, or what came is not a message; the text says why in one sentence.

    `kind` says it in one word: damaged, version, oversized, name, shape, dtype, mask or overflow.
    """

    def __init__(self, reason: str, kind: str = "damaged") -> None:
        super().__init__(reason)
        self.kind = kind


class _Entry(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    encoding: str
    size: int


def stored_bytes(dtype: torch.dtype, *, half: bool) -> int:
    """Return the bytes that a value takes on the wire."""
    return 2 if half and dtype in _SHRINKS else dtype.itemsize


# --- writing -------------------------------------------------------------------------------------------------------


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
    entries, pieces = [], []
    for name, value in params.items():
        entry, piece = _write(name, value, params, half=half, mask_known=mask_known)
        entries.append([name, str(entry.dtype).removeprefix("torch."), list(entry.shape), entry.encoding, entry.size])
        pieces.append(piece)
    header = json.dumps(entries, separators=(",", ":")).encode()
    if len(header) > _MAX_HEADER:
        raise WireError(f"the header would take {len(header)} bytes; a message may have {_MAX_HEADER}", "oversized")
    payload = b"".join(pieces)
    body = _START.pack(MAGIC, VERSION, len(header), len(payload)) + header + payload
    return body + hashlib.sha256(body).digest()


def _write(name: str, value: Tensor, params: Params, *, half: bool, mask_known: bool) -> tuple[_Entry, bytes]:
    if not _proper(name):
        raise WireError(
            f"an entry cannot be named {name!r:.80}: names have 1 to {_MAX_NAME} printable characters", "name"
        )
    if value.dtype not in _DTYPES.values() or value.layout != torch.strided:
        raise WireError(f"{name} is {value.dtype} in layout {value.layout}, which cannot be sent", "dtype")
    if value.dim() > _MAX_DIM or value.numel() >= 1 << 32:
        raise WireError(f"{name} has shape {tuple(value.shape)}, which is too large to be sent", "shape")
    value = value.detach().cpu()
    if masking.is_mask(name):
        if not ((value == 0) | (value == 1)).all():
            raise WireError(f"{name} is a mask and must hold zeros and ones", "mask")
        way, piece = ("known", b"") if mask_known else masking.write(value)
        return _Entry(name, value.dtype, tuple(value.shape), way, len(piece)), piece
    mask = masking.mask_of(name, value.shape, params)
    values = value.reshape(-1) if mask is None else value[masking.cover(mask.detach().cpu(), value.shape)]
    encoding = "dense" if mask is None else "sparse"
    if half and value.dtype in _SHRINKS:
        encoding = "half" if mask is None else "sparse-half"
        exact, values = values, values.to(torch.float16)
        if (values.isinf() & exact.isfinite()).any():
            largest = float(exact[exact.isfinite()].abs().max())
            raise WireError(f"{name} holds {largest:.3g}, which float16 turns into infinity; send float32", "overflow")
    # A tensor of one entry may be contiguous and have a stride all the same, which only a copy mends.
    piece = values.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()
    return _Entry(name, value.dtype, tuple(value.shape), encoding, len(piece)), piece


def _proper(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= _MAX_NAME and name.isprintable()


# --- reading -------------------------------------------------------------------------------------------------------


def decode(data: bytes, like: Params | None = None, masks: Params | None = None, *, limit: int = LIMIT) -> Params:
    """Read a message; WireError, and no other exception, where it is not one.

    Values that were left out come back as zero: a client never reads a masked weight. A server does: it pulls towards
    the answer, and an answer has to hold there what the client was sent, as it does in the simulator. So a server
    passes what it sent as `like`; the message must then have the same names, dtypes and shapes, in any order, and
    dropped values are taken from `like`.

    Masks that did not travel are taken from `masks`, or else from `like`. The tensors are new, contiguous, on the CPU
    and in the order of the message. Without `like`, more than `limit` bytes of them are refused before any is made: a
    mask that drops everything takes no bytes, so a short message can name a large tensor.

    >>> received = {"fc.weight": torch.tensor([[1.0, 5.0]]), "fc.mask": torch.tensor([1.0, 0.0])}
    >>> answer = encode(received | {"fc.weight": torch.tensor([[2.0, 7.0]])}, mask_known=True)
    >>> decode(answer, like=received)["fc.weight"], decode(answer, masks=received)["fc.weight"]
    (tensor([[2., 5.]]), tensor([[2., 0.]]))
    """
    entries, payload = _parse(data)
    if like is not None:
        _compare(entries, like)
    elif (needed := sum(_extent(entry) for entry in entries)) > limit:
        raise WireError(f"the message would unfold to {needed} bytes; {limit} are allowed", "oversized")
    known = masks if masks is not None else like or {}
    pieces = dict(zip((entry.name for entry in entries), _split(entries, payload), strict=True))
    found = {
        entry.name: _read_mask(entry, pieces[entry.name], known) for entry in entries if masking.is_mask(entry.name)
    }
    return {
        entry.name: found[entry.name]
        if entry.name in found
        else _read_values(entry, pieces[entry.name], found, None if like is None else like[entry.name])
        for entry in entries
    }


def counted(data: bytes) -> int:
    """Return the bytes of a message's payload, which is what `traffic` counts; the rest is header and checksum."""
    return _sizes(data)[1]


def _sizes(data: bytes) -> tuple[int, int]:
    """Check the frame; return the lengths of header and payload."""
    if len(data) < _START.size + _CHECK:
        raise WireError(
            f"the message is truncated: {len(data)} bytes, and the frame alone takes {_START.size + _CHECK}"
        )
    magic, version, header, payload = _START.unpack_from(data)
    if magic != MAGIC:
        raise WireError("this is not a message of metavd")
    if version != VERSION:
        age = "newer" if version > VERSION else "older"
        raise WireError(
            f"the message has the {age} wire version {version}, and this metavd reads version {VERSION}", "version"
        )
    if header > _MAX_HEADER:
        raise WireError(f"the message claims a header of {header} bytes; {_MAX_HEADER} are allowed")
    whole = _START.size + header + payload + _CHECK
    if whole != len(data):
        what = "truncated" if whole > len(data) else "too long"
        raise WireError(f"the message is {what}: it has {len(data)} bytes and claims {whole}")
    return header, payload


def _parse(data: bytes) -> tuple[list[_Entry], memoryview]:
    header, payload = _sizes(data)
    view = memoryview(data)
    if hashlib.sha256(view[:-_CHECK]).digest() != view[-_CHECK:]:
        raise WireError("the message is damaged: its checksum does not match")
    start = _START.size
    try:
        listed = json.loads(bytes(view[start : start + header]), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise WireError("the header of the message is not proper JSON") from error
    if not isinstance(listed, list):
        raise WireError("the header of the message is not a list of entries")
    entries = [_entry(each) for each in listed]
    names: set[str] = set()
    for entry in entries:
        if entry.name in names:
            raise WireError(f"the message holds {entry.name} twice", "name")
        names.add(entry.name)
    total = sum(entry.size for entry in entries)
    if total != payload:
        raise WireError(f"the entries of the message claim {total} bytes, and its payload has {payload}")
    return entries, view[start + header : start + header + payload]


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number of a header")


def _entry(listed: Any) -> _Entry:
    """Check one entry of the header as far as that goes without its bytes."""
    if not isinstance(listed, list) or len(listed) != 5:
        raise WireError("an entry of the header is not [name, dtype, shape, encoding, bytes]")
    name, dtype, shape, encoding, size = listed
    if not _proper(name):
        raise WireError(f"an entry of the header has the improper name {name!r:.80}")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise WireError(f"{name} has the unknown dtype {dtype!r:.80}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIM or not all(_is_length(each) for each in shape):
        raise WireError(f"{name} has the improper shape {shape!r:.80}")
    if not _is_length(size):
        raise WireError(f"{name} claims the improper length of {size!r:.80} bytes")
    allowed = _MASKS if masking.is_mask(name) else _VALUES
    if not isinstance(encoding, str) or encoding not in allowed:
        raise WireError(f"{name} has the encoding {encoding!r:.80}, which it cannot have")
    if encoding.endswith("half") and _DTYPES[dtype] not in _SHRINKS:
        raise WireError(f"{name} is {dtype} and cannot come as float16")
    return _Entry(name, _DTYPES[dtype], tuple(shape), encoding, size)


def _is_length(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _extent(entry: _Entry) -> int:
    """Return the bytes of an entry; a length of 0 beside large ones does not make it small: strides overflow too."""
    return math.prod(max(length, 1) for length in entry.shape) * entry.dtype.itemsize


def _compare(entries: list[_Entry], like: Params) -> None:
    names = {entry.name for entry in entries}
    if missing := next((name for name in like if name not in names), None):
        raise WireError(f"the message lacks {missing}", "name")
    for entry in entries:
        if entry.name not in like:
            raise WireError(f"the message has {entry.name}, which nobody asked for", "name")
        value = like[entry.name]
        if entry.shape != tuple(value.shape):
            raise WireError(f"{entry.name} has shape {entry.shape} instead of {tuple(value.shape)}", "shape")
        if entry.dtype != value.dtype:
            raise WireError(f"{entry.name} is {entry.dtype} instead of {value.dtype}", "dtype")


def _split(entries: list[_Entry], payload: memoryview) -> Iterator[memoryview]:
    at = 0
    for entry in entries:
        yield payload[at : at + entry.size]
        at += entry.size


def _read_mask(entry: _Entry, piece: memoryview, known: Params) -> Tensor:
    if entry.encoding == "known":
        mask = known.get(entry.name)
        if mask is None:
            raise WireError(f"{entry.name} did not travel, and the receiver does not have it", "mask")
        if entry.size or tuple(mask.shape) != entry.shape or mask.dtype != entry.dtype:
            raise WireError(f"{entry.name} is not the mask that the receiver has", "mask")
        return mask.detach().cpu().clone(memory_format=torch.contiguous_format)
    try:
        kept = masking.read(entry.encoding, bytes(piece), math.prod(entry.shape))
    except ValueError as error:
        raise WireError(f"{entry.name} is a bad mask: {error}", "mask") from error
    return kept.to(entry.dtype).reshape(entry.shape)


def _read_values(entry: _Entry, piece: memoryview, masks: Params, like: Tensor | None) -> Tensor:
    mask = masking.mask_of(entry.name, entry.shape, masks)
    if entry.encoding.startswith("sparse") and mask is None:
        raise WireError(f"{entry.name} came without its dropped values, and no mask says which those are", "mask")
    if mask is not None and not entry.encoding.startswith("sparse"):
        raise WireError(f"{entry.name} came with values that its mask drops", "mask")
    kept = None if mask is None else masking.cover(mask, entry.shape)
    count = math.prod(entry.shape) if kept is None else int(kept.sum())
    stored = torch.float16 if entry.encoding.endswith("half") else entry.dtype
    if entry.size != count * stored.itemsize:
        raise WireError(f"{entry.name} has {entry.size} bytes instead of {count * stored.itemsize}")
    raw = torch.empty(entry.size, dtype=torch.uint8)
    raw.numpy()[:] = memoryview(piece)
    if stored == torch.bool and (raw > 1).any():
        raise WireError(f"{entry.name} holds bytes that are no booleans")
    values = raw.view(stored).to(entry.dtype)
    if kept is None:
        return values.reshape(entry.shape)
    if like is None:
        whole = torch.zeros(entry.shape, dtype=entry.dtype)
    else:
        whole = like.detach().cpu().clone(memory_format=torch.contiguous_format)
    whole[kept] = values
    return whole
