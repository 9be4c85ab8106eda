"""The one container for tensors, as files and as messages: safetensors, with a checksum and words in its header.

    bytes 8     length H of the header, little-endian
          H     header, JSON, filled up with spaces to a multiple of 8:
                {"__metadata__": {"sha256": "...", "format": "metavd checkpoint", "version": "2", ...},
                 "fc1.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
          rest  the tensors' bytes, little-endian, without holes

Every reader of safetensors reads it. What is fixed beyond that format:

    order      the header names the tensors in the order of the dictionary; sums over entries are taken in that order,
               so a run that is resumed must have it. Their bytes lie by falling size of a value, so all are aligned
    sha256     stands at a fixed place, and is that of all other bytes
    format     what the container is, and the version of that
    the rest   of the metadata is the caller's: texts by name

A message may come from a stranger, so nothing is believed before it is checked: the length of the header, then the
checksum, then names, types, shapes and places, and only then is memory taken for tensors, never more than the bytes
that came. The checksum finds damage, not forgery: who may speak at all is the transport's business.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .tree import Params

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""What safetensors calls the types."""

_START = b'{"__metadata__":{"sha256":"'
_AT = 8 + len(_START)
"""Where the checksum stands."""
_DIGITS = 2 * hashlib.sha256().digest_size
_NESTING = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
"""Texts, which may hold anything, and brackets."""
_MAX_NAME = 256
_MAX_DIM = 16
_MAX_VALUES = 1 << 32
_MAX_HEADER = 100_000_000
"""As in the safetensors library."""


class ContainerError(ValueError):
    """Something cannot be put into a container, or bytes are not a sound one; the text says why in one sentence.

    `kind` says it in one word: damaged, version, oversized, name, shape or dtype, and what the caller adds.
    """

    def __init__(self, reason: str, kind: str = "damaged") -> None:
        super().__init__(reason)
        self.kind = kind


class Format(NamedTuple):
    """What a container is."""

    name: str
    """What sentences call it: "message"."""
    version: int
    max_header: int = _MAX_HEADER
    """Bytes that its header may have."""


class _Entry(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


# Writing


def check(name: str, value: Tensor) -> None:
    """Refuse a tensor that no container can hold."""
    if not _is_name(name):
        raise ContainerError(
            f"an entry cannot be named {name!r:.80}: names have 1 to {_MAX_NAME} printable characters", "name"
        )
    if value.dtype not in NAMES or value.layout != torch.strided:
        raise ContainerError(f"{name} is {value.dtype} in layout {value.layout}, which cannot be stored", "dtype")
    if value.dim() > _MAX_DIM or value.numel() >= _MAX_VALUES:
        raise ContainerError(f"{name} has shape {tuple(value.shape)}, which is too large", "shape")


def dump(format: Format, params: Params, about: Mapping[str, str] | None = None) -> bytes:
    """Return tensors and the caller's texts as one container; equal values make equal bytes.

    Every bit is kept, NaN and infinities included, whatever the layout in memory.

    >>> notes = Format("note", 1)
    >>> load(notes, dump(notes, {"a": torch.tensor([1.0, 2.0])}, {"by": "me"}))
    ({'a': tensor([1., 2.])}, {'by': 'me'})
    """
    for name, value in params.items():
        check(name, value)
    raw = {name: _bytes(params[name]) for name in sorted(params, key=lambda name: -params[name].itemsize)}
    places, end = {}, 0
    for name, piece in raw.items():
        places[name] = [end, end + piece.nbytes]
        end += piece.nbytes
    words = {"sha256": "0" * _DIGITS, "format": f"metavd {format.name}", "version": str(format.version)}
    header: dict[str, Any] = {"__metadata__": words | dict(about or {})}
    for name, value in params.items():
        header[name] = {"dtype": NAMES[value.dtype], "shape": list(value.shape), "data_offsets": places[name]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > format.max_header:
        raise ContainerError(
            f"the header would take {len(text)} bytes; that of a {format.name} may have {format.max_header}",
            "oversized",
        )
    return seal(text, list(raw.values()))


def seal(header: bytes, pieces: Sequence[bytes | memoryview]) -> bytes:
    """Return the container of a header, whatever it says, and these bytes, with the checksum put in its place."""
    before, after = len(header).to_bytes(8, "little") + header[: len(_START)], header[len(_START) + _DIGITS :]
    return b"".join([before, _digest([before, after, *pieces]), after, *pieces])


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= _MAX_NAME and name.isprintable() and name != "__metadata__"


def _bytes(value: Tensor) -> memoryview:
    # A tensor of one entry may be contiguous and have a stride all the same, which only a copy mends.
    flat = value.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().data


def _digest(pieces: Sequence[bytes | memoryview]) -> bytes:
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest().encode()


# Reading


def load(format: Format, data: bytes) -> tuple[Params, dict[str, str]]:
    """Return the tensors, new, on the CPU and in their order, and the texts; ContainerError where that cannot be."""
    end = _header_end(format, data)
    view = memoryview(data)
    if _digest([view[:_AT], view[_AT + _DIGITS :]]) != view[_AT : _AT + _DIGITS]:
        raise ContainerError(f"the {format.name} is damaged: its checksum does not match")
    header, words = _header(format, bytes(view[8:end]))
    return _tensors(format, header, view[end:]), words


def load_foreign(data: bytes) -> Params:
    """Return the tensors of anybody's safetensors file, which has no checksum; ContainerError where it is no such file.

    >>> load_foreign(dump(Format("note", 1), {"a": torch.tensor([1.0, 2.0])}))
    {'a': tensor([1., 2.])}
    """
    format = Format("file", 0)
    if len(data) < 8:
        raise ContainerError(f"it has {len(data)} bytes, fewer than any other")
    end = _frame_end(format, data)
    header = _json(format, data[8:end])
    if not isinstance(header, dict):
        raise ContainerError("its header is not a JSON object")
    header.pop("__metadata__", None)
    return _tensors(format, header, memoryview(data)[end:])


def _tensors(format: Format, header: Mapping[str, Any], payload: memoryview) -> Params:
    """Return what a header describes, once it describes all bytes and each once."""
    entries = {name: _entry(name, given) for name, given in header.items()}
    reached = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.begin != reached:
            raise ContainerError(f"{name} begins at byte {entry.begin}, where byte {reached} is next")
        reached = entry.end
    if reached != len(payload):
        raise ContainerError(f"the tensors of the {format.name} claim {reached} bytes, and it has {len(payload)}")
    return {name: _tensor(name, entry, payload[entry.begin : entry.end]) for name, entry in entries.items()}


def _header_end(format: Format, data: bytes) -> int:
    """Return where the header ends, once the frame is known to be one of ours."""
    if len(data) < _AT + _DIGITS:
        raise ContainerError(f"the {format.name} is truncated: it has {len(data)} bytes, fewer than any other")
    if data[8:_AT] != _START:
        raise ContainerError(f"this is not a {format.name} of metavd, or one of a version before {format.version}")
    return _frame_end(format, data)


def _frame_end(format: Format, data: bytes) -> int:
    """Return where the header ends, which lies within the data."""
    length = int.from_bytes(data[:8], "little")
    if length > format.max_header:
        raise ContainerError(f"the {format.name} claims a header of {length} bytes; {format.max_header} are allowed")
    if 8 + length > len(data):
        raise ContainerError(
            f"the {format.name} is truncated: it has {len(data)} bytes, and its header ends at {8 + length}"
        )
    return 8 + length


def _header(format: Format, text: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the entries, unchecked, and the caller's texts."""
    header = _json(format, text)
    words = header.pop("__metadata__")  # it is an object: so the text begins
    if not all(isinstance(word, str) for word in words.values()):
        raise ContainerError(f"the metadata of the {format.name} are not texts")
    found, version = words.pop("format", "nothing"), words.pop("version", "0")
    if found != f"metavd {format.name}":
        raise ContainerError(f"a metavd {format.name} was expected, and this calls itself {found!r:.80}")
    if version != str(format.version):
        raise ContainerError(
            f"the {format.name} has version {version:.20}, and this metavd reads version {format.version}", "version"
        )
    del words["sha256"]
    return header, words


def _json(format: Format, text: bytes) -> Any:
    try:
        check_depth(text)
        return json.loads(text, parse_constant=_no_number, object_pairs_hook=_unique)
    except ContainerError:
        raise
    except (ValueError, RecursionError) as error:
        raise ContainerError(f"the header of the {format.name} is not proper JSON") from error


def check_depth(text: bytes, most: int = 16) -> None:
    """Refuse JSON that is nested deeper than anything here is: a reader of it would go as deep.

    >>> check_depth(b'{"a": [[1], "[[[["]}', 3)
    >>> check_depth(b"[[1]]", 1)
    Traceback (most recent call last):
    ...
    ValueError: it is nested deeper than 1
    """
    depth = 0
    for found in _NESTING.finditer(text):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(found[0], 0)
        if depth > most:
            raise ValueError(f"it is nested deeper than {most}")


def read_json(text: str) -> Any:
    """Read JSON that came from elsewhere: nothing deep, and neither NaN nor infinity."""
    check_depth(text.encode(errors="replace"))
    return json.loads(text, parse_constant=_no_number)


def finite(value: Any) -> Any:
    """Return plain values with None in place of numbers that JSON cannot write.

    >>> finite({"a": [1.0, float("inf")], "b": float("nan")})
    {'a': [1.0, None], 'b': None}
    """
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number of a header")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ContainerError(f"the header holds {name!r:.80} twice", "name")
        found[name] = value
    return found


def _entry(name: str, given: Any) -> _Entry:
    """Check one entry of the header as far as that goes without its bytes."""
    if not _is_name(name):
        raise ContainerError(f"an entry of the header has the improper name {name!r:.80}")
    if not isinstance(given, dict) or given.keys() != {"dtype", "shape", "data_offsets"}:
        raise ContainerError(f"{name} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = given["dtype"], given["shape"], given["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ContainerError(f"{name} has the unknown dtype {dtype!r:.80}")
    if not is_shape(shape):
        raise ContainerError(f"{name} has the improper shape {shape!r:.80}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_length(each) for each in offsets):
        raise ContainerError(f"{name} has the improper place {offsets!r:.80}")
    size, taken = math.prod(shape) * DTYPES[dtype].itemsize, offsets[1] - offsets[0]
    if size != taken:
        raise ContainerError(f"{name} takes {taken} bytes instead of {size}")
    return _Entry(DTYPES[dtype], tuple(shape), *offsets)


def is_shape(shape: object) -> bool:
    """Return whether JSON gives a shape that torch can have; strides overflow beside a length of 0 too."""
    if not isinstance(shape, list) or len(shape) > _MAX_DIM or not all(_is_length(each) for each in shape):
        return False
    return bool(math.prod(max(length, 1) for length in shape) < 1 << 59)


def _is_length(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _tensor(name: str, entry: _Entry, piece: memoryview) -> Tensor:
    raw = torch.empty(len(piece), dtype=torch.uint8)
    raw.numpy()[:] = piece
    if entry.dtype == torch.bool and (raw > 1).any():
        raise ContainerError(f"{name} holds bytes that are no booleans")
    return raw.view(entry.dtype).reshape(entry.shape)


# Files


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that at any moment it is either whole or as it was before."""
    scratch = path.with_name(f".{path.name}.partial")
    with scratch.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
