"""What all formats share: reading bytes that nobody vouches for, and saying where they are wrong.

Nothing is ever unpacked to disk. Whatever an archive declares is compared with a limit before it is believed, and what
it declares is read in pieces, so that a small file cannot ask for a large memory. Only regular files are opened: a
named pipe would wait for ever.
"""

from __future__ import annotations

import gzip
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

import numpy as np

from ..source import Source, SourceError, arrays

S = TypeVar("S")
T = TypeVar("T")

MIB = 1 << 20
GIB = 1 << 30
MAX_FILE = 16 * GIB
MAX_RATIO = 250
"""Unpacked bytes per packed byte above `SMALL`: pictures give 2 to 20, and a bomb of deflate's about 1,000."""
SMALL = 64 * MIB
"""What any archive may unpack to, however small it is."""
MAX_MEMBERS = 1_000
"""Of an archive; the largest official one has 24."""
_CHUNK = 4 * MIB


class FileError(SourceError):
    """What is wrong with one file, with its path and, where there is one, the byte."""

    def __init__(self, path: Path | str, what: str, offset: int | None = None) -> None:
        self.path, self.what, self.offset = Path(path), what, offset
        super().__init__(f"{path}: {what}" if offset is None else f"{path}, byte {offset}: {what}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.what, self.offset)


def refuse(wrong: object, path: Path, what: str, offset: int | None = None) -> None:
    """Raise `FileError` if something is wrong with a file."""
    if wrong:
        raise FileError(path, what, offset)


Report = Callable[[SourceError], None]
"""What to do with a fault: loading raises it, `check` writes it down and goes on."""


def fail(error: SourceError) -> None:
    """Raise the first fault."""
    raise error


def attempt(report: Report, read: Callable[..., T], *args: Any) -> T | None:
    """Return what `read` returns, or None after its fault was reported."""
    try:
        return read(*args)
    except SourceError as error:
        report(error)
        return None


def each(report: Report, read: Callable[[S], T], items: Iterable[S]) -> list[T] | None:
    """Return what `read` returns of every item, or None if one had a fault; all faults are reported."""
    found, whole = [], True
    for item in items:
        try:
            found.append(read(item))
        except SourceError as error:
            report(error)
            whole = False
    return found if whole else None


@dataclass(frozen=True)
class Plan:
    """A dataset that was found on disk but not yet read."""

    name: str
    place: Path
    """The file or folder by which messages call it."""
    files: tuple[Path, ...]
    """All that the content depends on; the cache looks at their sizes and times."""
    read: Callable[[Report], Source | None]
    """Read everything; a fault is raised, or reported before None is returned."""
    options: Mapping[str, Any] = field(default_factory=dict)
    keep: bool = True
    """Whether a fast copy may be kept; not of rows that are prepared anew for every federation."""


def source(place: Path | str, name: str, x: Any, y: Any, **options: Any) -> Source:
    """Return `arrays(...)` under the dataset's name, with errors that name the place on disk."""
    return replace(arrays(x, y, name=str(place), **options), name=name)


# Files and folders


def size_of(path: Path, limit: int = MAX_FILE) -> int:
    """Return the size of a regular file, or say why it is none."""
    with _reading(path):
        status = path.stat()
    size, mode = status.st_size, status.st_mode
    refuse(stat.S_ISDIR(mode), path, "this is a folder, but a file is needed.")
    refuse(not stat.S_ISREG(mode), path, "this is a pipe or a device, but only a regular file can be read.")
    refuse(size > limit, path, f"the file has {size} bytes, but at most {limit} are read.")
    return size


def read_bytes(path: Path, limit: int = MAX_FILE) -> bytes:
    """Return a whole file."""
    size = size_of(path, limit)
    with _reading(path), path.open("rb") as file:
        data = file.read(size)
    refuse(len(data) != size, path, f"the file shrank from {size} bytes while it was read; read it again.", len(data))
    return data


def read_text(path: Path, limit: int = MAX_FILE, encoding: str = "utf-8") -> str:
    """Return a whole file of text."""
    data = read_bytes(path, limit)
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise FileError(path, f"this byte ({data[error.start]}) is no UTF-8 text.", error.start) from None


def listing(folder: Path) -> list[Path]:
    """Return what a folder holds, sorted by name, without hidden entries.

    Sorted, because the order that a file system gives is not the same on another machine, and ids follow the order.
    """
    with _reading(folder):
        return sorted((entry for entry in folder.iterdir() if not entry.name.startswith(".")), key=lambda e: e.name)


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
    except FileNotFoundError:
        raise FileError(path, "there is no such file or folder.") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise FileError(path, f"it cannot be read ({reason}); check its rights and the disk.") from None


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
        return b"".join(self._pieces(count))

    def end(self) -> int:
        """Read to the end, where gzip keeps its checksum, and return how many bytes were left."""
        return sum(len(piece) for piece in self._pieces(self._limit + 1))

    def _pieces(self, count: int) -> Iterator[bytes]:
        while count > 0 and (piece := self._some(min(count, _CHUNK))):
            count -= len(piece)
            yield piece

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
        what = f"it unpacks to more than {self._limit} bytes, which no such dataset does; do not trust it."
        refuse(self.offset > self._limit, self.path, what)
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

    Nothing is written, yet an archive that tarfile's data filter would not write is refused: nobody should trust it.
    """
    seen: set[str] = set()
    with open_stream(path, limit) as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r|", bufsize=MIB) as archive:  # type: ignore[call-overload]
                for number, member in enumerate(archive):
                    refuse(number >= MAX_MEMBERS, path, f"the archive has more than {MAX_MEMBERS} members.")
                    name = _tar_member(path, member, wanted, member_limit, seen)
                    if name is not None:
                        seen.add(name)
                        yield name, archive.extractfile(member).read()
        except FileError:
            raise
        except tarfile.FilterError as error:
            raise FileError(path, f"a member points outside the archive ({plain(error)}); do not trust it.") from None
        except (tarfile.TarError, RecursionError, ValueError, OverflowError) as error:
            raise FileError(
                path, f"the tar archive cannot be read ({plain(error)}); copy or fetch the file again.", stream.offset
            ) from None
        stream.end()


def _tar_member(path: Path, member: tarfile.TarInfo, wanted: Sequence[str], limit: int, seen: set[str]) -> str | None:
    """Return the name under which a member is wanted, or None if it is not."""
    tarfile.data_filter(member, str(path.parent))
    base, told = PurePosixPath(member.name).name, repr(member.name[:80])
    if base not in wanted or member.isdir():
        return None
    odd, many = not member.isreg() or member.issparse(), member.size > limit
    refuse(odd, path, f"{told} is a link or a device, but it must be a plain file.", member.offset)
    refuse(base in seen, path, f"{told} stands in the archive twice.", member.offset)
    refuse(many, path, f"{told} declares {member.size} bytes, but such a file has at most {limit}.", member.offset)
    return base


# What `zipfile` raises on damaged archives, found by fuzzing: its own error for most, others from below it.
_ZIP_FAULTS = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError, OverflowError,
               UnicodeDecodeError)  # fmt: skip


@contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive whose members are all plain and within the archive."""
    size_of(path)
    try:
        with path.open("rb") as raw, zipfile.ZipFile(raw) as archive:
            infos = archive.infolist()
            refuse(len(infos) > MAX_MEMBERS, path, f"the archive has more than {MAX_MEMBERS} members.")
            refuse(len(infos) > len(archive.NameToInfo), path, "a name stands in the archive twice.")
            for info in infos:
                name = info.filename
                out = name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/") or name[1:2] == ":"
                what = f"the member {name!r} points outside the archive; do not trust this file."
                refuse(out, path, what, info.header_offset)
            yield archive
    except _ZIP_FAULTS as error:
        raise FileError(
            path, f"the zip archive cannot be read ({plain(error)}); copy or fetch the file again."
        ) from None


def zip_member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, limit: int) -> BinaryIO:
    """Open a member whose declared size is believable; more than that size is never read from it."""
    packed, name, at = path.stat().st_size, f"the member {info.filename!r}", info.header_offset
    refuse(info.flag_bits & 1, path, f"{name} is encrypted, which no dataset is.", at)
    odd = info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    refuse(odd, path, f"{name} is neither stored nor deflated; save it again.", at)
    many = info.file_size > unpack_limit(min(info.compress_size, packed), limit) or info.compress_size > packed
    sizes = f"{info.file_size} bytes of {info.compress_size} packed ones"
    refuse(many, path, f"{name} declares {sizes}, more than any dataset of that size has; do not trust it.", at)
    return archive.open(info)  # type: ignore[return-value]


# Small pieces


def plain(error: BaseException | str) -> str:
    """Return somebody else's message, short, on one line and without its full stop."""
    line = " ".join(str(error).split())
    return (line if len(line) <= 120 else line[:117] + "...").rstrip(".") or type(error).__name__


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


def check_labels(path: Path, y: np.ndarray, first: int, count: int, offset: Callable[[int], int] | None = None) -> None:
    """Refuse a label that is none of `count` from `first` on, with its row and the byte that `offset` gives for it."""
    bad = (y < first) | (y >= first + count)
    if bad.any():
        row = int(bad.argmax())
        raise FileError(
            path, f"row {row} has label {y[row]}, but labels must be {first} to {first + count - 1}; fetch it again.",
            None if offset is None else offset(row),
        )  # fmt: skip


def choice(what: str, value: Any, allowed: Sequence[Any]) -> None:
    """Refuse an option's value that is none of the allowed."""
    if value not in allowed:
        raise SourceError(f"{what} is {value!r}, but it must be {' or '.join(str(a) for a in allowed)}.")
