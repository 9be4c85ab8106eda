"""What all formats share: finding files, reading bytes that nobody vouches for, and saying where they are wrong.

Nothing is ever unpacked to disk. What comes out of a compressed file has a limit that depends on its size, so that a
small file cannot ask for a large memory. Only regular files are opened: a named pipe would wait for ever.
"""

from __future__ import annotations

import gzip
import stat
import tarfile
import zipfile
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
MOST = 16 << 30
"""Bytes that any compressed file may unpack to."""
SMALL = 64 * MIB
"""Bytes that it may unpack to however small it is."""
MAX_RATIO = 250
"""Unpacked bytes per packed byte above `SMALL`: pictures give 2 to 20, and a bomb of deflate's about 1,000."""
MAX_MEMBERS = 1_000
"""Of a tar archive; the largest official one has 24."""


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


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Tell whatever a library raises at a damaged file as a fault of that file."""
    try:
        yield
    except (SourceError, MemoryError):
        raise
    except FileNotFoundError:
        raise FileError(path, "there is no such file or folder.") from None
    except Exception as error:  # decoders raise nearly every kind there is
        reason = plain(getattr(error, "strerror", None) or error)
        remedy = "do not trust it" if isinstance(error, tarfile.FilterError) else "check it, or copy or fetch it again"
        raise FileError(path, f"it cannot be read ({reason}); {remedy}.") from None


Report = Callable[[SourceError], None]
"""What to do with a fault: loading raises it, `check` writes it down and goes on."""


class Reported(SourceError):  # noqa: N818 (no fault of its own)
    """Faults that a `Report` was told already."""


def fail(error: SourceError) -> None:
    """Raise the first fault."""
    raise error


def each(report: Report, read: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """Return what `read` returns of every item; where it has faults, all are reported before `Reported` is raised."""
    found, whole = [], True
    for item in items:
        try:
            found.append(read(item))
        except SourceError as error:
            report(error)
            whole = False
    if not whole:
        raise Reported("some of the files have faults.")
    return found


@dataclass(frozen=True)
class Unread:
    """A dataset that was found on disk but not yet read."""

    name: str
    place: Path
    """The file or folder by which messages call it."""
    files: tuple[Path, ...]
    """All that the content depends on; the cache looks at their sizes and times."""
    read: Callable[[Report], Source]
    """Read everything; a fault is raised, of several files' faults those before the last are reported."""
    options: Mapping[str, Any] = field(default_factory=dict)
    keep: bool = True
    """Whether a fast copy may be kept; not of rows that are prepared anew for every federation."""


def source(place: Path | str, name: str, x: Any, y: Any, **options: Any) -> Source:
    """Return `arrays(...)` under the dataset's name, with errors that name the place on disk."""
    return replace(arrays(x, y, name=str(place), **options), name=name)


# Finding


def need_folder(root: Path | str) -> Path:
    """Return root, or say that there is none."""
    root = Path(root)
    if not root.exists():
        raise SourceError(f"{root}: there is no such file or folder; name the one that holds the data.")
    return root


def find(root: Path, folders: Sequence[str], names: Sequence[str]) -> tuple[Path, ...] | None:
    """Return the files of these names, perhaps gzipped, from the first folder below root that has any of them.

    Root may be one of these folders itself. A file that is missing beside the others is returned all the same, so that
    who reads it says so.
    """
    for folder in folders:
        for place in (root / folder, root) if root.name == Path(folder).name else (root / folder,):
            found = [_either(place / name) for name in names]
            if any(path.is_file() for path in found):
                return tuple(found)
    return None


def _either(path: Path) -> Path:
    packed = path.with_name(f"{path.name}.gz")
    return packed if packed.is_file() and not path.is_file() else path


def listing(folder: Path) -> list[Path]:
    """Return what a folder holds, sorted by name, without hidden entries.

    Sorted, because the order that a file system gives is not the same on another machine, and ids follow the order.
    """
    with reading(folder):
        return sorted((entry for entry in folder.iterdir() if not entry.name.startswith(".")), key=lambda e: e.name)


# Reading


def size_of(path: Path) -> int:
    """Return the size of a regular file, or say why it is none."""
    with reading(path):
        status = path.stat()
    refuse(stat.S_ISDIR(status.st_mode), path, "this is a folder, but a file is needed.")
    refuse(not stat.S_ISREG(status.st_mode), path, "this is a pipe or a device, but a regular file is needed.")
    return status.st_size


def unpack_limit(packed: int) -> int:
    """Return how many bytes a compressed file of that size may unpack to."""
    return min(MOST, max(SMALL, MAX_RATIO * packed))


class Stream:
    """The bytes of a file, unpacked if it is gzipped, in order and no more than its size lets one believe."""

    def __init__(self, path: Path, raw: BinaryIO, size: int) -> None:
        self.path, self.packed = path, raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        self._file: Any = gzip.GzipFile(fileobj=raw) if self.packed else raw
        self._left = unpack_limit(size)

    def read(self, count: int = 4 * MIB) -> bytes:
        """Return that many bytes, or fewer at the end."""
        with reading(self.path):
            piece: bytes = self._file.read(count)
        self._left -= len(piece) if self.packed else 0
        refuse(self._left < 0, self.path, "it unpacks to more bytes than any dataset of its size; do not trust it.")
        return piece

    def rest(self) -> bytes:
        """Return all that follows; gzip's checksum is compared at the end."""
        return b"".join(iter(self.read, b"")) if self.packed else self.read(-1)


@contextmanager
def open_stream(path: Path) -> Iterator[Stream]:
    """Open a file that may be gzipped."""
    size = size_of(path)
    with reading(path), path.open("rb", buffering=0) as raw:  # a buffer would be copied with the rest of the file
        yield Stream(path, raw, size)


def read_bytes(path: Path) -> bytes:
    """Return all that a file holds, unpacked if it is gzipped."""
    with open_stream(path) as stream:
        return stream.rest()


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Return a whole file of text."""
    data = read_bytes(path)
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise FileError(path, f"this byte ({data[error.start]}) is no UTF-8 text.", error.start) from None


def tar_files(path: Path, wanted: Sequence[str], most: int) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the wanted files of a .tar or .tar.gz, in the archive's order, each of `most` bytes.

    Nothing is written, yet an archive that tarfile's data filter would not write is refused: nobody should trust it.
    """
    seen: set[str] = set()
    with open_stream(path) as stream:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=MIB) as archive:  # type: ignore[call-overload]
            for number, member in enumerate(archive):
                refuse(number >= MAX_MEMBERS, path, f"the archive has more than {MAX_MEMBERS} members.")
                tarfile.data_filter(member, str(path.parent))
                base, told = PurePosixPath(member.name).name, repr(member.name[:80])
                if base in wanted and not member.isdir():
                    plain_file = member.isreg() and not member.issparse()
                    refuse(not plain_file, path, f"{told} is a link or a device, but must be a plain file.")
                    refuse(base in seen, path, f"{told} stands in the archive twice.")
                    refuse(member.size > most, path, f"{told} declares {member.size} bytes, but may have {most}.")
                    seen.add(base)
                    yield base, archive.extractfile(member).read()
        stream.rest()


@contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive."""
    size_of(path)
    with reading(path), zipfile.ZipFile(path) as archive:
        yield archive


def zip_member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> BinaryIO:
    """Open a member whose declared size is believable; more than that size is never read from it."""
    most = unpack_limit(min(info.compress_size, path.stat().st_size))
    what = f"{info.filename} declares {info.file_size} bytes of {info.compress_size} packed ones; do not trust it."
    refuse(info.file_size > most, path, what, info.header_offset)
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
    while parts:
        part = parts.pop()
        whole[rows - len(part) : rows] = part
        rows -= len(part)
    return whole


def numbered(names: Sequence[str]) -> np.ndarray:
    """Return each name's place among the sorted names: client ids that depend on nothing but the names."""
    return np.unique(np.asarray(names, dtype=object), return_inverse=True)[1].astype(np.int64)


def check_labels(path: Path, y: np.ndarray, right: range, start: int = 0, step: int | None = None) -> None:
    """Refuse a label that is none of the right ones, with its row and byte `start + step * row`."""
    bad = (y < right.start) | (y >= right.stop)
    if bad.any():
        row = int(bad.argmax())
        what = f"row {row} has label {y[row]}, but labels must be {right.start} to {right.stop - 1}; fetch it again."
        raise FileError(path, what, None if step is None else start + step * row)


def choice(what: str, value: Any, allowed: Sequence[Any]) -> None:
    """Refuse an option's value that is none of the allowed."""
    if value not in allowed:
        raise SourceError(f"{what} is {value!r}, but it must be {' or '.join(str(a) for a in allowed)}.")
