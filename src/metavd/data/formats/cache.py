"""Fast copies of datasets, memory-mapped: what took a minute to read takes a moment the second time.

    NAME-ASKED-STATE/source.json    numbers of the source; size and SHA-256 of each array's file, and its own SHA-256
                     x.npy ...      the arrays

The name of a folder carries two digests: of the dataset, its options and the paths of its files, and of those files'
sizes and times. A file that changes therefore has another name, and its older copy is removed. Sizes and times stand
for the content: the change time too, which `touch` and `cp -p` cannot set back.

Any number of processes may write at once: each writes a folder of its own and renames it, and whoever is first has
written the same bytes. What cannot be written (a full disk, a folder that is read-only) or does not read back as it
was written costs a note and a normal load, never an error.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..source import Source, SourceError
from .files import Unread, fail, plain, source

Note = Callable[[str], None]
"""Where a remark goes that is no error."""

log: Note = logging.getLogger("metavd.data").warning

VERSION = 3
"""Of what the readers make of a file, and of the folder; a change of either makes old copies worthless."""
ABOUT = "source.json"
_PART = ".part"
"""Ending of a folder that is being written."""
_STALE = 24 * 3600.0
_ARRAYS = ("x", "y", "test", "client")
_NUMBERS = ("num_classes", "mean", "std", "scale", "augment", "classes", "client_names", "tokens")


def cached(unread: Unread, folder: Path | str | None, note: Note = log) -> Source:
    """Return the dataset, from its copy in `folder` if there is a good one, and else leave one there.

    With a folder the images are mapped, privately: changing them in memory does not change the file.
    """
    # What has no files cannot be read faster from one.
    before = _digest(unread) if folder is not None and unread.files and unread.keep else None
    if folder is None or before is None:
        return _read(unread)
    path = Path(folder) / f"{unread.name}-{before[0]}-{before[1]}"
    kept = _load(path, unread, note)
    if kept is not None:
        return kept
    fresh = _read(unread)
    if _digest(unread) != before:
        note(f"{unread.place} changed while it was read, so no copy was kept.")
    elif _write(path, fresh, note):
        _tidy(path, before[0])
        # The mapped copy takes the place of the one in memory.
        return _load(path, unread, note, verify=False) or fresh
    return fresh


def _read(unread: Unread) -> Source:
    try:
        return unread.read(fail)
    except MemoryError:
        raise SourceError(
            f"{unread.place}: the dataset does not fit into memory; use a smaller size or part."
        ) from None


def _digest(unread: Unread) -> tuple[str, str] | None:
    """Return what names the dataset and what names its present state, or None if a file cannot be asked."""
    options = {key: repr(value) for key, value in sorted(unread.options.items())}
    asked, state = hashlib.sha256(), hashlib.sha256()
    asked.update(
        json.dumps([VERSION, unread.name, str(unread.place.absolute()), options]).encode("utf-8", "surrogatepass")
    )
    try:
        for file in unread.files:
            status = os.stat(file)  # noqa: PTH116 (a hundred thousand of them; this is the fast one)
            asked.update(os.fsencode(file) + b"\0")
            state.update(struct.pack("<qqq", status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    except (OSError, ValueError):
        return None
    return asked.hexdigest()[:16], state.hexdigest()[:16]


# Writing


def _write(path: Path, data: Source, note: Note) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # What is not renamed is removed, whatever ended the writing.
        with tempfile.TemporaryDirectory(
            prefix=f"{path.name}-", suffix=_PART, dir=path.parent, ignore_cleanup_errors=True
        ) as scratch:
            _dump(Path(scratch), data)
            shutil.rmtree(path, ignore_errors=True)  # it is damaged, or not there
            Path(scratch).replace(path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another process was faster
            return True
        note(f"{path.parent} cannot keep a copy of the data ({plain(error)}); it will be read anew next time.")
        return False
    return True


class _Summed:
    """A file that is being written, and the sum of what it was given.

    To a file of Python's own numpy writes by itself, and does not notice that the disk is full.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.sum = file, hashlib.sha256()

    def write(self, data: bytes) -> None:
        self.sum.update(data)
        self.file.write(data)


def _dump(folder: Path, data: Source) -> None:
    files = {}
    for name in _ARRAYS:
        if (array := getattr(data, name)) is not None:
            with (folder / f"{name}.npy").open("wb") as file:
                summed = _Summed(file)
                np.lib.format.write_array(summed, np.ascontiguousarray(array), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
                files[name] = {"size": file.tell(), "sha256": summed.sum.hexdigest()}
    # What is learnt on training rows is measured anew, not kept.
    told = [name for name in _NUMBERS if data.prepare is None or name not in {"mean", "std"}]
    about = {name: getattr(data, name) for name in told} | {"arrays": files}
    (folder / ABOUT).write_text(json.dumps({"sha256": _sealed(about), **about}))


def _sealed(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def _tidy(path: Path, asked: str) -> None:
    """Remove copies of older states of the same files, and what a killed process left half written."""
    with contextlib.suppress(OSError):
        for other in path.parent.glob(f"*-{asked}-*"):
            if other != path and other.suffix != _PART:
                shutil.rmtree(other, ignore_errors=True)
        for part in path.parent.glob(f"*{_PART}"):
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > _STALE:
                    shutil.rmtree(part, ignore_errors=True)


# Reading


def _load(path: Path, unread: Unread, note: Note, *, verify: bool = True) -> Source | None:
    try:
        about = json.loads((path / ABOUT).read_text())
        if about.pop("sha256") != _sealed(about):
            raise ValueError(f"the checksum of {ABOUT} is wrong")
        found = {name: _array(path / f"{name}.npy", file, verify=verify) for name, file in about["arrays"].items()}
        numbers = {name: about[name] for name in _NUMBERS if name in about}
        return source(path, unread.name, **found, **numbers | {"tokens": numbers["tokens"] or None})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # SourceError is a ValueError
        note(f"The cached copy {path} is damaged ({plain(error)}); the data is read anew.")
        return None


def _array(path: Path, file: Mapping[str, Any], *, verify: bool) -> np.ndarray:
    if path.stat().st_size != file["size"]:
        raise ValueError(f"the size of {path.name} is wrong")
    if verify:
        with path.open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != file["sha256"]:
                raise ValueError(f"the checksum of {path.name} is wrong")
    return np.asarray(np.load(path, mmap_mode="c" if path.stem == "x" else None, allow_pickle=False))
