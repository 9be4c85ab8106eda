"""A pickle's plain data, without running the pickle.

A pickle is a program: the usual interpreter imports and calls whatever it names. This one knows the instructions that
build numbers, text, lists, tuples, dicts and numpy arrays, and nothing else; it imports nothing and calls nothing, not
even numpy (an array is put together at the end, from its checked shape, type and bytes). Any other instruction is
refused with its byte. Work is bounded too: a limit on instructions, small dicts, and keys that cannot be nested, since
hashing a nested tuple can take for ever and a list of empty lists is twenty times as large as its pickle.

Large strings are views into the pickle, not copies.
"""

from __future__ import annotations

import codecs
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_STEPS = 500_000
"""CIFAR-100's largest pickle takes 200,000, and 350,000 in protocol 0."""
MAX_KEYS = 1_000
MAX_NUMBER_BYTES = 16


class PickleError(ValueError):
    """Why a pickle is not read, and at which byte."""

    def __init__(self, what: str, offset: int) -> None:
        self.what, self.offset = what, offset
        super().__init__(f"byte {offset}: {what}")


@dataclass(frozen=True)
class _Name:
    """Something that the pickle wants imported, of the few that are known; here it is a word and no more."""

    value: str


@dataclass
class _Type:
    """A numpy type, from its code."""

    code: str
    order: str = "="


@dataclass
class _Array:
    """An array before its state came."""

    value: np.ndarray | None = None


_MARK = _Name("(")
_RECONSTRUCT, _NDARRAY, _DTYPE, _SCALAR, _BUFFER, _ENCODE = (
    _Name(word) for word in ("_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer", "encode")
)
_KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy.core.multiarray", "scalar"): _SCALAR,
    ("numpy._core.multiarray", "scalar"): _SCALAR,
    ("numpy.core.numeric", "_frombuffer"): _BUFFER,
    ("numpy._core.numeric", "_frombuffer"): _BUFFER,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _DTYPE,
    ("_codecs", "encode"): _ENCODE,
}
_CODES = {"u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8", "b1"}


def loads(data: bytes | memoryview) -> Any:
    """Return the pickled value: None, bool, int, float, str, bytes-like, list, tuple, dict, ndarray.

    Python 2's strings come back as memoryviews, as do bytes: the caller knows which of them are text. Dict keys are
    str, with Python 2's read as latin-1.

    Raises:
        PickleError: the data is no pickle, is cut off, or wants something else.

    >>> import pickle
    >>> loads(pickle.dumps({"a": [1, 2.5, None]}))
    {'a': [1, 2.5, None]}
    """
    machine = _Machine(bytes(data))
    try:
        return machine.run()
    except PickleError:
        raise
    except (IndexError, KeyError, TypeError, ValueError, struct.error, OverflowError, UnicodeError):
        # The stack does not hold what the instruction needs; no regular pickle does that.
        raise PickleError("the pickle is damaged here; copy or fetch the file again.", machine.start) from None


class _Machine:
    """Stack, memo and place of one run."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.data, self.at, self.start = raw, memoryview(raw), 0, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.budget = 4 * len(raw) + 1_000_000

    def run(self) -> Any:
        for _ in range(MAX_STEPS):
            self.start = self.at
            if self.at >= len(self.data):
                raise PickleError("the pickle is cut off here; copy or fetch the file again.", self.at)
            code = self.data[self.at]
            self.at += 1
            if code == ord("."):
                value = self.stack.pop()
                if self.stack:
                    raise PickleError("the pickle ends with values left over.", self.start)
                return _finished(value, self.start)
            step = _STEPS.get(code)
            if step is None:
                raise PickleError(
                    f"the pickle uses instruction {chr(code)!r}, which plain data does not need; do not trust it.",
                    self.start,
                )
            step(self)
        raise PickleError(f"the pickle takes more than {MAX_STEPS} instructions.", self.at)

    # Reading

    def take(self, count: int) -> memoryview:
        if count < 0 or self.at + count > len(self.data):
            raise PickleError("the pickle is cut off here; copy or fetch the file again.", len(self.data))
        piece = self.data[self.at : self.at + count]
        self.at += count
        return piece

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def rest(self) -> bytes:
        """Take the rest of the line, as protocol 0 has it."""
        end = self.raw.find(b"\n", self.at)
        return bytes(self.take((end if end >= 0 else len(self.raw)) - self.at + 1)[:-1])

    def line(self) -> str:
        return self.rest().decode("ascii")

    # Stack

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise IndexError
        return value

    def popmark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise IndexError
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def remember(self, index: int) -> None:
        if self.stack[-1] is _MARK:
            raise IndexError
        self.memo[index] = self.stack[-1]

    # Instructions that need more than a line

    def text(self, count: int) -> None:
        self.push(bytes(self.take(count)).decode("utf-8", "surrogatepass"))

    def encode(self, text: str) -> memoryview:
        # Text can be encoded again and again from the memo, so what comes of it is bounded by the file's size.
        self.budget -= len(text)
        if self.budget < 0:
            raise PickleError("the pickle makes far more bytes than it has; do not trust it.", self.start)
        return memoryview(text.encode("latin-1"))

    def long(self, count: int) -> None:
        if count > MAX_NUMBER_BYTES:
            raise PickleError(f"the pickle holds a number of {count} bytes.", self.start)
        self.push(int.from_bytes(self.take(count), "little", signed=True))

    def name(self, module: Any, word: Any) -> None:
        known = _KNOWN.get((module, word)) if isinstance(module, str) and isinstance(word, str) else None
        if known is None:
            raise PickleError(
                f"the pickle wants to import {str(module)[:80]}.{str(word)[:80]}, but only numpy arrays and plain "
                "containers are read; do not trust it.",
                self.start,
            )
        self.push(known)

    def append(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise TypeError
        self.stack[-1].extend(_finished(item, self.start) for item in items)

    def set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise TypeError
        if len(target) + len(items) // 2 > MAX_KEYS:  # before they are hashed: keys can be made to collide
            raise PickleError(f"a pickled dict has more than {MAX_KEYS} keys.", self.start)
        for key, value in zip(items[::2], items[1::2], strict=True):
            word = str(key, "latin-1") if isinstance(key, memoryview) and len(key) <= 1_000 else key
            if type(word) not in (str, int):
                raise PickleError("a key of a pickled dict is neither text nor a number.", self.start)
            target[word] = _finished(value, self.start)

    def reduce(self) -> None:
        given, function = self.pop(), self.pop()
        if type(given) is not tuple:
            raise TypeError
        if function is _RECONSTRUCT and given[0] is _NDARRAY:
            self.push(_Array())
        elif function is _DTYPE:
            self.push(self.dtype(given))
        elif function is _SCALAR:
            kind, raw = given
            self.push(self.array(kind, (), False, raw).item())
        elif function is _BUFFER:
            raw, kind, shape, order = given[:4]
            self.push(self.array(kind, shape, order == "F", raw))
        elif function is _ENCODE and given[1] in ("latin1", "latin-1") and type(given[0]) is str:
            self.push(self.encode(given[0]))
        else:
            raise PickleError("the pickle calls something that builds no array; do not trust it.", self.start)

    def build(self) -> None:
        state, target = self.pop(), self.stack[-1]
        if type(state) is not tuple:
            raise TypeError
        if type(target) is _Type:
            target.order = state[1]
        elif type(target) is _Array and target.value is None:
            _, shape, kind, fortran, raw = state
            target.value = self.array(kind, shape, bool(fortran), raw)
        else:
            raise TypeError

    def dtype(self, given: tuple[Any, ...]) -> _Type:
        code = str(given[0], "ascii") if isinstance(given[0], memoryview) else given[0]
        if code not in _CODES:
            raise PickleError(f"a pickled array has type {str(code)[:40]!r}, but it must hold numbers.", self.start)
        return _Type(code)

    def array(self, kind: Any, shape: Any, fortran: bool, raw: Any) -> np.ndarray:
        if type(kind) is not _Type or type(shape) is not tuple or len(shape) > 4:
            raise TypeError
        if any(type(length) is not int or length < 0 for length in shape):
            raise TypeError
        order = str(kind.order, "ascii") if isinstance(kind.order, memoryview) else kind.order
        if order not in ("<", ">", "|", "="):
            raise TypeError
        dtype = np.dtype((order if order in "<>" else "=") + kind.code)
        if isinstance(raw, str):  # bytes of Python 2 that Python 3 saved again
            raw = self.encode(raw)
        wanted = math.prod(shape) * dtype.itemsize
        if not isinstance(raw, memoryview) or len(raw) != wanted:
            have = len(raw) if isinstance(raw, memoryview) else "no"
            raise PickleError(
                f"a pickled array of shape {shape} and type {dtype} needs {wanted} bytes, but has {have}.", self.start
            )
        return np.frombuffer(raw, dtype).reshape(shape, order="F" if fortran else "C")


def _finished(value: Any, offset: int) -> Any:
    """Return a value that may go into a container: an array with its content, and no word of the machine's own."""
    if type(value) is _Array:
        if value.value is None:
            raise PickleError("a pickled array has no content.", offset)
        return value.value
    if isinstance(value, _Name | _Type):
        raise PickleError("the pickle holds a function where data should be; do not trust it.", offset)
    return value


def _decimal(text: str) -> int | bool:
    if text in ("00", "01"):  # protocol 0's booleans
        return text == "01"
    if len(text) > 40:
        raise ValueError(text)
    return int(text)


def _index(text: str) -> int:
    if len(text) > 10:
        raise ValueError(text)
    return int(text)


def _tuple(machine: _Machine, count: int) -> None:
    # The parts of an array's state are words of the machine's own, so a tuple is not checked as containers are.
    items = [machine.pop() for _ in range(count)][::-1]
    machine.push(tuple(items))


def _quoted(machine: _Machine) -> None:
    text = machine.rest()
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in (b"'", b'"'):
        raise ValueError(text)
    machine.push(memoryview(codecs.escape_decode(text[1:-1])[0]))


def _unicode_line(machine: _Machine) -> None:
    machine.push(str(machine.rest(), "raw-unicode-escape"))


def _dict(machine: _Machine) -> None:
    items = machine.popmark()
    machine.push({})
    machine.set(items)


def _drop(machine: _Machine) -> None:
    machine.stack.pop()


def _steps() -> dict[int, Callable[[_Machine], Any]]:
    table: dict[str, Callable[[_Machine], Any]] = {
        "\x80": lambda m: m.take(1),
        "\x95": lambda m: m.take(8),
        "(": lambda m: m.push(_MARK),
        "0": _drop,
        "1": lambda m: m.popmark(),
        "N": lambda m: m.push(None),
        "\x88": lambda m: m.push(True),
        "\x89": lambda m: m.push(False),
        "I": lambda m: m.push(_decimal(m.line())),
        "L": lambda m: m.push(_decimal(m.line().removesuffix("L"))),
        "F": lambda m: m.push(float(m.line())),
        "K": lambda m: m.push(m.number("<B")),
        "M": lambda m: m.push(m.number("<H")),
        "J": lambda m: m.push(m.number("<i")),
        "G": lambda m: m.push(m.number(">d")),
        "\x8a": lambda m: m.long(m.number("<B")),
        "\x8b": lambda m: m.long(m.number("<i")),
        "S": _quoted,
        "V": _unicode_line,
        "U": lambda m: m.push(m.take(m.number("<B"))),
        "T": lambda m: m.push(m.take(m.number("<i"))),
        "C": lambda m: m.push(m.take(m.number("<B"))),
        "B": lambda m: m.push(m.take(m.number("<I"))),
        "\x8e": lambda m: m.push(m.take(m.number("<Q"))),
        "\x96": lambda m: m.push(m.take(m.number("<Q"))),
        "\x8c": lambda m: m.text(m.number("<B")),
        "X": lambda m: m.text(m.number("<I")),
        "\x8d": lambda m: m.text(m.number("<Q")),
        "]": lambda m: m.push([]),
        "}": lambda m: m.push({}),
        ")": lambda m: m.push(()),
        "l": lambda m: m.push([_finished(item, m.start) for item in m.popmark()]),
        "t": lambda m: m.push(tuple(m.popmark())),
        "\x85": lambda m: _tuple(m, 1),
        "\x86": lambda m: _tuple(m, 2),
        "\x87": lambda m: _tuple(m, 3),
        "d": _dict,
        "a": lambda m: m.append([m.pop()]),
        "e": lambda m: m.append(m.popmark()),
        "s": lambda m: m.set([m.pop(), m.pop()][::-1]),
        "u": lambda m: m.set(m.popmark()),
        "p": lambda m: m.remember(_index(m.line())),
        "q": lambda m: m.remember(m.number("<B")),
        "r": lambda m: m.remember(m.number("<I")),
        "\x94": lambda m: m.remember(len(m.memo)),
        "g": lambda m: m.push(m.memo[_index(m.line())]),
        "h": lambda m: m.push(m.memo[m.number("<B")]),
        "j": lambda m: m.push(m.memo[m.number("<I")]),
        "c": lambda m: m.name(m.line(), m.line()),
        "\x93": lambda m: m.name(*[m.pop(), m.pop()][::-1]),
        "R": lambda m: m.reduce(),
        "b": lambda m: m.build(),
    }
    return {ord(code): step for code, step in table.items()}


_STEPS = _steps()
