"""What all formats share: reading bytes that nobody vouches for, and saying where they are wrong.

Nothing is ever unpacked to disk. Whatever an archive declares is compared with a limit before it is believed, and what
it declares is read in pieces, so that a small file cannot ask for a large memory. Only regular files are opened: a
named pipe would wait for ever.
"""

from __future__ import annotations

import gzip
import os
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

import numpy as np

from ..source import Source, SourceError, arrays

T = TypeVar("T")

MIB = 1 << 20
GIB = 1 << 30
MAX_FILE = 16 * GIB
MAX_RATIO = 250
"""Unpacked bytes a packed byte above `SMALL`: pictures give 2 to 20, and a bomb of deflate's about 1,000."""
SMALL = 64 * MIB
"""What any archive may unpack to, however small it is."""
MAX_MEMBERS = 1_000
"""Of an archive; the largest official one has 24."""
_CHUNK = 4 * MIB
_BLOCK = 512


class FileError(SourceError):
    """What is wrong with one file, with its path and, where there is one, the byte."""

    def __init__(self, path: Path | str, what: str, offset: int | None = None) -> None:
        self.path, self.what, self.offset = Path(path), what, offset
        super().__init__(f"{path}: {what}" if offset is None else f"{path}, byte {offset}: {what}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.what, self.offset)


Report = Callable[[SourceError], None]
"""What to do with a fault: loading raises it, `check` writes it down and goes on."""


def fail(error: SourceError) -> None:
    """Raise the first fault."""
    raise error


def attempt(report: Report, read: Callable[..., T], *args: Any, **options: Any) -> T | None:
    """Return what `read` returns, or None after its fault was reported."""
    try:
        return read(*args, **options)
    except SourceError as error:
        report(error)
        return None


@dataclass(frozen=True)
class Plan:
    """A dataset that was found on disk but not yet read."""

    name: str
    place: Path
    """The file or folder by which messages call it."""
    files: tuple[Path, ...]
    """All that the content depends on; the cache looks at their sizes and times."""
    read: Callable[[Report], Source | None]
    """Read everything; None where a fault was reported and did not raise."""
    options: Mapping[str, Any] = field(default_factory=dict)


def source(place: Path | str, name: str, x: Any, y: Any, **options: Any) -> Source:
    """Return `arrays(...)` under the dataset's name, with errors that name the place on disk."""
    return replace(arrays(x, y, name=str(place), **options), name=name)


# Files and folders


def size_of(path: Path, limit: int = MAX_FILE) -> int:
    """Return the size of a regular file, or say why it is none."""
    with _reading(path):
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise FileError(path, "this is a folder, but a file is needed.")
        if not stat.S_ISREG(status.st_mode):
            raise FileError(path, "this is a pipe or a device, but only a regular file can be read.")
    if status.st_size > limit:
        raise FileError(path, f"the file has {status.st_size} bytes, but at most {limit} are read.")
    return status.st_size


def read_bytes(path: Path, limit: int = MAX_FILE) -> bytes:
    """Return a whole file."""
    size = size_of(path, limit)
    with _reading(path), path.open("rb") as file:
        data = file.read(size)
    if len(data) != size:
        raise FileError(path, f"the file shrank from {size} bytes while it was read; read it again.", len(data))
    return data


def listing(folder: Path) -> list[Path]:
    """Return what a folder holds, sorted by name, without hidden entries.

    Sorted, because the order that a file system gives is not the same on another machine, and ids follow the order.
    """
    with _reading(folder):
        return sorted((entry for entry in folder.iterdir() if not entry.name.startswith(".")), key=lambda e: e.name)


def first_folder(root: Path, candidates: Sequence[str]) -> Path | None:
    """Return the first of the candidates below root that is a folder; "." is root itself."""
    return next((root / name for name in candidates if (root / name).is_dir()), None)


def need_folder(root: Path | str) -> Path:
    """Return root, or say that there is none."""
    root = Path(root)
    if not root.exists():
        raise SourceError(f"{root}: there is no such file or folder; name the one that holds the data.")
    return root


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except SourceError:
        raise
    except FileNotFoundError:
        raise FileError(path, "there is no such file or folder.") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise FileError(path, f"it cannot be read ({reason}); check its rights and the disk.") from None
    except ValueError:  # a null byte in a name
        raise SourceError(f"{str(path)!r} is no path.") from None


# Compressed files


def unpack_limit(packed: int, limit: int) -> int:
    """Return how many bytes a compressed file of that size may unpack to."""
    return min(limit, max(SMALL, MAX_RATIO * packed))


class Stream:
    """The unpacked bytes of a file, gzipped or not, in order, with every fault told as a `FileError`."""

    def __init__(self, path: Path, raw: BinaryIO, packed: int, limit: int) -> None:
        self.path, self.offset = path, 0
        head = raw.read(2)
        raw.seek(0)
        self.packed = head == b"\x1f\x8b"
        self._file: Any = gzip.GzipFile(fileobj=raw, mode="rb") if self.packed else raw
        self._limit = unpack_limit(packed, limit) if self.packed else limit

    def read(self, count: int) -> bytes:
        """Return that many bytes, or fewer at the end."""
        pieces, missing = [], count
        while missing:
            piece = self._some(min(missing, _CHUNK))
            if not piece:
                break
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)

    def skip(self, count: int) -> int:
        """Pass over that many bytes; return how many there were."""
        passed = 0
        while passed < count and (piece := self._some(min(count - passed, _CHUNK))):
            passed += len(piece)
        return passed

    def end(self) -> int:
        """Read to the end, where gzip keeps its checksum, and return how many bytes were left."""
        return self.skip(self._limit + 1)

    def _some(self, count: int) -> bytes:
        try:
            piece: bytes = self._file.read(count)
        except EOFError:
            raise FileError(self.path, "the gzip stream is cut off; copy or fetch the file again.") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            text = str(error).lower()
            what = "checksum" if "crc" in text or "length" in text else "compressed data"
            raise FileError(
                self.path, f"gzip's {what} is damaged (unpacked byte {self.offset}); copy or fetch the file again."
            ) from None
        except OSError as error:
            raise FileError(self.path, f"it cannot be read ({error}); check the disk.", self.offset) from None
        self.offset += len(piece)
        if self.offset > self._limit:
            raise FileError(
                self.path, f"it unpacks to more than {self._limit} bytes, which no such dataset does; do not trust it."
            )
        return piece


@contextmanager
def open_stream(path: Path, limit: int) -> Iterator[Stream]:
    """Open a file that may be gzipped; at most `limit` bytes come out of it."""
    size = size_of(path)
    with _reading(path), path.open("rb") as raw:
        yield Stream(path, raw, size, limit)


# Archives


def tar_files(path: Path, wanted: Sequence[str], *, member_limit: int, limit: int) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the wanted files of a .tar or .tar.gz, in the archive's order.

    The headers are read here and not by `tarfile`, which believes the sizes of extended headers; this way every fault
    also has a byte, counted in the unpacked archive.
    """
    seen: set[str] = set()
    with open_stream(path, limit) as stream:
        for _ in range(MAX_MEMBERS):
            start = stream.offset
            block = stream.read(_BLOCK)
            if not block.strip(b"\0") and len(block) in (0, _BLOCK):
                break
            name, size, kind = _tar_header(path, block, start)
            base = PurePosixPath(name).name
            if base in wanted and kind != "5":
                if kind not in "0\0":
                    raise FileError(path, f"{name!r} is a link or a device, but it must be a plain file.", start)
                if base in seen:
                    raise FileError(path, f"{base!r} stands in the archive twice.", start)
                if size > member_limit:
                    raise FileError(
                        path, f"{name!r} declares {size} bytes, but such a file has at most {member_limit}.", start
                    )
                seen.add(base)
                content = stream.read(size)
                _tar_whole(path, name, len(content), size, stream.offset)
                yield base, content
            else:
                _tar_whole(path, name, stream.skip(size), size, stream.offset)
            stream.skip(-size % _BLOCK)
        else:
            raise FileError(path, f"the archive has more than {MAX_MEMBERS} members, which no such dataset has.")
        stream.end()


def _tar_whole(path: Path, name: str, got: int, size: int, offset: int) -> None:
    if got != size:
        raise FileError(path, f"the archive ends inside {name!r}, after {got} of {size} bytes.", offset)


def _tar_header(path: Path, block: bytes, offset: int) -> tuple[str, int, str]:
    if len(block) < _BLOCK:
        raise FileError(path, f"the archive ends inside a header, after {len(block)} of {_BLOCK} bytes.", offset)
    total = sum(block) - sum(block[148:156]) + 8 * ord(" ")
    try:
        right = int(block[148:156].strip(b" \0") or b"-1", 8) == total
    except ValueError:
        right = False
    if not right:
        raise FileError(path, "this is no tar header (its checksum is wrong); copy or fetch the file again.", offset)
    field_bytes = block[124:136]
    if field_bytes[0] & 0x80:  # GNU's binary numbers, for more than 8 GiB
        size = int.from_bytes(field_bytes[1:], "big")
    else:
        try:
            size = int(field_bytes.strip(b" \0") or b"0", 8)
        except ValueError:
            size = -1
    if size < 0:
        raise FileError(path, "the size in this tar header is no number.", offset)
    kind = chr(block[156])
    prefix = block[345:500].split(b"\0")[0] if block[257:262] == b"ustar" else b""
    parts = [part.decode("utf-8", "replace") for part in (prefix, block[:100].split(b"\0")[0]) if part]
    name = "/".join(parts)
    if kind not in "xgLK":  # those describe the next member and are passed over
        check_member(path, name, offset)
        return name, 0 if kind in "123456" else size, kind
    return "", size, kind


def check_member(path: Path, name: str, offset: int | None = None) -> None:
    """Refuse an archive that would write outside its folder. It is never unpacked here, but nobody should trust it."""
    if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/") or name[1:2] == ":":
        raise FileError(path, f"the member {name!r} points outside the archive; do not trust this file.", offset)


@contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive whose members are all plain and within the archive."""
    size_of(path)
    try:
        with path.open("rb") as raw, zipfile.ZipFile(raw) as archive:
            infos = archive.infolist()
            if len(infos) > MAX_MEMBERS:
                raise FileError(path, f"the archive has {len(infos)} members, but at most {MAX_MEMBERS} are read.")
            seen: set[str] = set()
            for info in infos:
                check_member(path, info.filename, info.header_offset)
                if info.filename in seen:
                    raise FileError(path, f"{info.filename!r} stands in the archive twice.", info.header_offset)
                seen.add(info.filename)
            yield archive
    except _ZIP_FAULTS as error:
        reason = str(error).rstrip(".") or "cut off"
        raise FileError(
            path, f"the zip archive cannot be read ({_plain(reason)}); copy or fetch the file again."
        ) from None


# What `zipfile` raises on damaged archives, found by fuzzing: its own error for most, others from below it.
_ZIP_FAULTS = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError, OverflowError,
               UnicodeDecodeError)  # fmt: skip


def zip_member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, limit: int) -> BinaryIO:
    """Open a member whose declared size is believable; more than that size is never read from it."""
    if info.flag_bits & 1:
        raise FileError(path, f"the member {info.filename!r} is encrypted, which no dataset is.", info.header_offset)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise FileError(
            path, f"the member {info.filename!r} is neither stored nor deflated; save it again.", info.header_offset
        )
    packed = path.stat().st_size
    if info.file_size > unpack_limit(min(info.compress_size, packed), limit) or info.compress_size > packed:
        raise FileError(
            path,
            f"the member {info.filename!r} declares {info.file_size} bytes of {info.compress_size} packed ones, "
            "which is more than any dataset of that size unpacks to; do not trust it.",
            info.header_offset,
        )
    return archive.open(info)  # type: ignore[return-value]


def _plain(text: str) -> str:
    """Return text of an error of somebody else's, short and on one line."""
    line = " ".join(text.split())
    return line if len(line) <= 120 else line[:117] + "..."


def plain(error: BaseException | str) -> str:
    """Return somebody else's message on one line, without its full stop."""
    return _plain(str(error)).rstrip(".") or type(error).__name__


# Small pieces


def join(parts: list[np.ndarray]) -> np.ndarray:
    """Return the parts one after another and empty the list: each is freed as soon as it is copied."""
    rows = sum(len(part) for part in parts)
    whole = np.empty((rows, *parts[0].shape[1:]), parts[0].dtype)
    at = rows
    while parts:
        part = parts.pop()
        at -= len(part)
        whole[at : at + len(part)] = part
    return whole


def numbered(names: Sequence[str]) -> np.ndarray:
    """Return each name's place among the sorted names: client ids that depend on nothing but the names."""
    return np.unique(np.asarray(names, dtype=object), return_inverse=True)[1].astype(np.int64)


def choice(what: str, value: Any, allowed: Sequence[Any]) -> None:
    """Refuse an option's value that is none of the allowed."""
    if value not in allowed:
        raise SourceError(f"{what} is {value!r}, but it must be {' or '.join(str(a) for a in allowed)}.")


def exists(path: Path) -> bool:
    """Whether something is there; a path that cannot even be asked for is not."""
    try:
        return os.path.lexists(path)
    except ValueError:
        return False
