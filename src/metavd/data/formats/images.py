"""Pictures in files: JPEG, PNG and the like to bytes, by Pillow."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..source import SourceError
from .files import FileError, Report, each, plain, read_bytes, refuse

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
"""Pillow knows more, some of which start other programs."""
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff"}
MAX_PIXELS = 100_000_000
MAX_TOTAL = 32 << 30

Size = int | tuple[int, int] | None
"""One side of a square, (height, width), or None: as the pictures are."""


def _parse_size(text: str) -> Size:
    """Read 32, 64x48 (height x width) or none.

    >>> _parse_size("64x48")
    (64, 48)
    """
    if text.lower() == "none":
        return None
    height, cross, width = text.lower().partition("x")
    return (int(height), int(width)) if cross else int(height)


SIZE = ("side of the square images in pixels, HEIGHTxWIDTH, or none to keep them as they are", _parse_size)
"""The option `size` of a dataset of pictures."""


def check_size(size: Size) -> tuple[int, int] | None:
    """Return (height, width) of an option `size`."""
    if size is None:
        return None
    pair = (size, size) if isinstance(size, int) else size
    ok = isinstance(pair, Sequence) and len(pair) == 2
    if not ok or any(isinstance(v, bool) or not isinstance(v, int) or not 1 <= v <= 4096 for v in pair):
        raise SourceError(f"size is {size!r}, but it must be a whole number of pixels, 1 to 4096, or two of them.")
    return pair[0], pair[1]


def open_picture(path: Path, data: bytes | None = None) -> Any:
    """Return Pillow's picture, decoded; any fault of a decoder becomes one sentence."""
    from PIL import Image, ImageOps  # noqa: PLC0415 (only pictures need it)

    data = read_bytes(path) if data is None else data
    refuse(not data, path, "the file is empty, but it must be a picture.", 0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd metadata, and about sizes that are checked here
            picture = Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = picture.size
            what = f"the picture declares {width} x {height} pixels, but at most {MAX_PIXELS} fit."
            refuse(width * height > MAX_PIXELS, path, what)
            if picture.format == "PNG":
                # Only `verify` looks at PNG's checksums, and it uses the picture up.
                picture.verify()
                picture = Image.open(io.BytesIO(data), formats=FORMATS)
            picture.load()
            return ImageOps.exif_transpose(picture)
    except FileError:
        raise
    except Exception as error:  # Pillow's decoders raise nearly every kind there is
        raise FileError(path, f"this is no readable picture ({plain(error)}); replace or remove it.") from None


def pixels(path: Path, picture: Any, size: tuple[int, int] | None, channels: int | None) -> np.ndarray:
    """Return (c, h, w) bytes: 1 channel of a grey picture and 3 of any other, unless `channels` says which.

    What is transparent becomes white. Resized with Pillow's bilinear filter, which averages when it shrinks.
    """
    from PIL import Image  # noqa: PLC0415

    what = f"the picture has mode {picture.mode}, more than 8 bits per pixel; save it with 8 bits, scaled."
    refuse(picture.mode.startswith(("I", "F")), path, what)
    try:
        if "A" in picture.getbands() or "transparency" in picture.info:
            clear = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert(
                "L" if picture.mode in ("LA", "La") else "RGB"
            )
        grey = picture.mode in ("L", "1")
        picture = picture.convert("L" if (channels or (1 if grey else 3)) == 1 else "RGB")
        array = _resized(picture, size or (picture.height, picture.width))
    except Exception as error:  # conversions of odd modes raise their own
        raise FileError(path, f"this picture cannot be converted ({plain(error)}); replace or remove it.") from None
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def _resized(picture: Any, size: tuple[int, int]) -> np.ndarray:
    from PIL import Image  # noqa: PLC0415

    if (picture.height, picture.width) != size:
        picture = picture.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.asarray(picture, np.uint8)


def resize(x: np.ndarray, size: tuple[int, int] | None) -> np.ndarray:
    """Return (n, c, h, w) bytes in another size, as `pixels` does it for files."""
    if size is None or x.shape[2:] == size:
        return x
    from PIL import Image  # noqa: PLC0415

    result = np.empty((*x.shape[:2], *size), np.uint8)
    for row, channel in np.ndindex(x.shape[:2]):
        result[row, channel] = _resized(Image.fromarray(np.ascontiguousarray(x[row, channel])), size)
    return result


def pictures(paths: Sequence[Path], size: tuple[int, int] | None, channels: int | None, report: Report) -> np.ndarray:
    """Return (n, c, h, w) of picture files; all faults are reported."""
    stack = Stack(len(paths), size, channels)
    each(report, stack.add, paths)
    return stack.x


class Stack:
    """Pictures of one shape, collected into one array; grey ones among coloured ones get three channels."""

    def __init__(self, count: int, size: tuple[int, int] | None, channels: int | None) -> None:
        self._count, self._size, self._channels = count, size, channels
        self._x: np.ndarray | None = None
        self._first: Path | None = None
        self._at = 0

    def add(self, path: Path, picture: Any = None) -> None:
        """Keep one more picture: Pillow's, or the file's."""
        self.put(path, pixels(path, picture or open_picture(path), self._size, self._channels))

    def put(self, path: Path, picture: np.ndarray) -> None:
        """Keep one more picture, (c, h, w) bytes."""
        if self._x is None:
            total = self._count * 3 * picture.shape[1] * picture.shape[2]
            what = f"{self._count} pictures of its size take {total} bytes; pass a size, such as size=32."
            refuse(total > MAX_TOTAL, path, what)
            self._x = np.empty((self._count, *picture.shape), np.uint8)
            self._first = path
        (h, w), (height, width) = picture.shape[1:], self._x.shape[2:]
        has = f"the picture has {w} x {h} pixels, but {self._first} has {width} x {height}"
        what = f"{has}; pass a size, such as size={min(height, width)}, and all are resized."
        refuse((h, w) != (height, width), path, what)
        if len(picture) == 3 and self._x.shape[1] == 1:
            self._x = np.repeat(self._x, 3, axis=1)
        self._x[self._at] = picture
        self._at += 1

    @property
    def full(self) -> bool:
        """Whether every picture was added."""
        return 0 < self._count == self._at

    @property
    def x(self) -> np.ndarray:
        """(n, c, h, w) of all that were added."""
        if self._x is None:
            raise ValueError("no picture was added")
        return self._x[: self._at]
