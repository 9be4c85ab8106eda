"""One file per dataset, memory-mapped: what took a minute to read takes a moment the second time.

    magic | length of the header | header (JSON) | y, test, client | x, from a whole page on

The name of a file carries two digests: of the dataset, its options and the paths of its files, and of those files'
sizes and times. A file that changes therefore has another name, and its older copy is removed. Sizes and times stand
for the content: the change time too, which `touch` and `cp -p` cannot set back.

Any number of processes may write at once: each writes a file of its own and renames it, and whoever is last has
written the same bytes. What cannot be written (a full disk, a folder that is read-only) or does not read back as it
was written costs a note and a normal load, never an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..source import Source, SourceError
from .files import Plan, fail, plain, source

Note = Callable[[str], None]
"""Where a remark goes that is no error."""

log: Note = logging.getLogger("metavd.data").warning

VERSION = 1
"""Of what the readers make of a file; a change of theirs makes old copies worthless."""
SUFFIX = ".metavd"
_MAGIC = b"metavd1\n"
_MAX_HEADER = 1 << 20
_CHUNK = 8 << 20
_STALE = 24 * 3600.0
_FIELDS = ("y", "test", "client", "x")


def cached(plan: Plan, folder: Path | str | None, note: Note = log) -> Source:
    """Return the dataset, from its copy in `folder` if there is a good one, and else leave one there.

    With a folder the images are mapped, privately: changing them in memory does not change the file.
    """
    if folder is None or not plan.files:  # what has no files cannot be read faster from one
        return _read(plan)
    folder = Path(folder)
    before = _digest(plan)
    if before is None:
        return _read(plan)
    path = folder / f"{plan.name}-{before[0]}-{before[1]}{SUFFIX}"
    kept = _load(path, plan, note)
    if kept is not None:
        return kept
    fresh = _read(plan)
    if _digest(plan) != before:
        note(f"{plan.place} changed while it was read, so no copy was kept.")
        return fresh
    if not _write(path, fresh, note):
        return fresh
    _tidy(path, before[0])
    # The mapped copy takes the place of the one in memory.
    return _load(path, plan, note, verify=False) or fresh


def _read(plan: Plan) -> Source:
    try:
        fresh = plan.read(fail)
    except MemoryError:
        raise SourceError(f"{plan.place}: the dataset does not fit into memory; use a smaller size or part.") from None
    if fresh is None:
        raise SourceError(f"{plan.place}: the dataset could not be read.")
    return fresh


def _digest(plan: Plan) -> tuple[str, str] | None:
    """Return what names the dataset and what names its present state, or None if a file cannot be asked."""
    options = {key: repr(value) for key, value in sorted(plan.options.items())}
    asked, state = hashlib.sha256(), hashlib.sha256()
    asked.update(json.dumps([VERSION, plan.name, str(plan.place.absolute()), options]).encode("utf-8", "surrogatepass"))
    try:
        for file in plan.files:
            status = os.stat(file)  # noqa: PTH116 (a hundred thousand of them; this is the fast one)
            asked.update(os.fsencode(file) + b"\0")
            state.update(struct.pack("<qqq", status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    except (OSError, ValueError):
        return None
    return asked.hexdigest()[:16], state.hexdigest()[:16]


# Writing


def _write(path: Path, data: Source, note: Note) -> bool:
    handle = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=path.stem + "-", suffix=".part", dir=path.parent)
        temporary = Path(name)
    except OSError as error:
        note(f"{path.parent} cannot keep a copy of the data ({plain(error)}); it will be read anew next time.")
        return False
    try:
        with os.fdopen(handle, "wb") as file:
            _dump(file, data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        note(f"{path.parent} cannot keep a copy of the data ({plain(error)}); it will be read anew next time.")
        return False
    finally:
        # Gone if it was renamed; left over otherwise, whatever ended the writing.
        with contextlib.suppress(OSError):
            temporary.unlink()
    return True


def _dump(file: BinaryIO, data: Source) -> None:
    parts: list[dict[str, Any]] = []
    arrays = {name: getattr(data, name) for name in _FIELDS}
    offset = 0
    for name, array in arrays.items():
        if array is None:
            continue
        if name == "x":
            offset = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        parts.append({"name": name, "dtype": array.dtype.str, "shape": array.shape, "offset": offset,
                      "crc": _crc(array)})  # fmt: skip
        offset += array.nbytes
    header = {
        "num_classes": data.num_classes,
        "mean": data.mean,
        "std": data.std,
        "scale": data.scale,
        "augment": data.augment,
        "size": offset,
        "parts": parts,
    }
    text = json.dumps(header).encode()
    file.write(_MAGIC + struct.pack("<II", len(text), zlib.crc32(text)) + text)
    base = _base(len(text))
    for part in parts:
        array = np.ascontiguousarray(arrays[part["name"]])
        file.seek(base + part["offset"])
        if array.nbytes:
            file.write(array.reshape(-1).view(np.uint8).data)


def _base(header: int) -> int:
    """Return where the arrays begin: on a page, so that x can be mapped."""
    return -(-(len(_MAGIC) + 8 + header) // mmap.PAGESIZE) * mmap.PAGESIZE


def _crc(array: np.ndarray) -> int:
    crc = 0
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, len(flat), _CHUNK):
        crc = zlib.crc32(flat[start : start + _CHUNK].data, crc)
    return crc


def _tidy(path: Path, asked: str) -> None:
    """Remove copies of older states of the same files, and what a killed process left half written."""
    with contextlib.suppress(OSError):
        for other in path.parent.glob(f"*-{asked}-*{SUFFIX}"):
            if other != path:
                with contextlib.suppress(OSError):
                    other.unlink()
        for part in path.parent.glob("*.part"):
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > _STALE:
                    part.unlink()


# Reading


def _load(path: Path, plan: Plan, note: Note, *, verify: bool = True) -> Source | None:
    try:
        with path.open("rb") as file:
            header, base = _header(file)
            status = os.fstat(file.fileno())
            if status.st_size != base + header["size"]:
                raise ValueError("its size is wrong")
            found = {part["name"]: _part(file, base, part, verify) for part in header["parts"]}
        return source(
            path,
            plan.name,
            found["x"],
            found["y"],
            client=found.get("client"),
            test=found.get("test"),
            num_classes=header["num_classes"],
            mean=header["mean"],
            std=header["std"],
            scale=header["scale"],
            augment=header["augment"],
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:  # SourceError is a ValueError
        note(f"The cached copy {path} is damaged ({plain(error)}); the data is read anew.")
        return None


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError("it is no such file")
    length, crc = struct.unpack("<II", file.read(8))
    text = file.read(min(length, _MAX_HEADER))
    if len(text) != length or zlib.crc32(text) != crc:
        raise ValueError("its header is wrong")
    return json.loads(text), _base(length)


def _part(file: BinaryIO, base: int, part: dict[str, Any], verify: bool) -> np.ndarray:
    dtype, shape = np.dtype(part["dtype"]), tuple(part["shape"])
    start = base + part["offset"]
    if verify:
        file.seek(start)
        crc, left = 0, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        while left and (piece := file.read(min(left, _CHUNK))):
            crc, left = zlib.crc32(piece, crc), left - len(piece)
        if left or crc != part["crc"]:
            raise ValueError(f"the checksum of {part['name']} is wrong")
    if part["name"] == "x":
        return np.asarray(np.memmap(file, dtype, "c", start, shape))
    file.seek(start)
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(bytearray(file.read(count * dtype.itemsize)), dtype).reshape(shape)
