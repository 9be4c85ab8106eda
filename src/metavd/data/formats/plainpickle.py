"""A pickle's plain data: numbers, text, lists, tuples, dicts and numpy arrays, and nothing else.

A pickle is a program: the usual unpickler imports and calls whatever it names. Here `pickle.Unpickler` runs it with a
list of names, each of which stands for a function of this module that checks what it is given and builds an array from
the pickle's own bytes; numpy's are never called. Before that, `pickletools` goes through the instructions, because some
harm needs no import: a size that is not there, a memo of a thousand million entries, keys of a dict that collide
(numbers from 2^61 - 1 on, tuples of -1 and -2) or that take for ever to hash (a tuple that holds another one twice).
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

MAX_STEPS = 500_000
"""CIFAR-100's largest pickle takes 200,000, and 350,000 in protocol 0."""
MAX_TUPLES = 1_000
"""Those that are no arguments; an array has two."""
MAX_NUMBER = 2**61 - 2

_NAMED = frozenset("ILFKMJG\x8a\x8bSVUTCB\x8e\x96\x8cX\x8d]}ldc\x93R")
"""Instructions that make numbers, text, lists, dicts, and what the names below stand for; no tuples."""
_TUPLES = frozenset(")t\x85\x86\x87")
_ALLOWED = _NAMED | _TUPLES | frozenset("\x80\x95.(N\x88\x89aesupqr\x94ghjb")
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric")
_KNOWN = {("_codecs", "encode"), ("numpy", "ndarray"), ("numpy", "dtype")} | {
    (module, word) for module in _NUMPY for word in ("_reconstruct", "scalar", "_frombuffer")
}
_CODES = {"u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8", "b1"}


class PickleError(ValueError):
    """Why a pickle is not read, and at which byte if that is known."""

    def __init__(self, what: str, offset: int | None = None) -> None:
        self.what, self.offset = what, offset
        super().__init__(what if offset is None else f"byte {offset}: {what}")


def loads(data: bytes) -> Any:
    """Return the pickled value: None, bool, int, float, str, bytes, list, tuple, dict, ndarray.

    Python 2's strings come back as bytes, but the keys of the outermost dict as str.

    Raises:
        PickleError: the data is no pickle, is cut off, or wants something else.

    >>> loads(pickle.dumps({"a": [1, 2.5, None]}))
    {'a': [1, 2.5, None]}
    """
    _scan(data)
    try:
        value = _Plain(data).load()
    except PickleError:
        raise
    except Exception as error:  # the stack does not hold what the instruction needs; no regular pickle does that
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:80]
        raise PickleError(f"the pickle is damaged ({reason}); copy or fetch the file again.") from None
    if isinstance(value, dict):
        return {_text(key): held.value if isinstance(held, _Array) else held for key, held in value.items()}
    return value.value if isinstance(value, _Array) else value


def _text(word: Any) -> Any:
    return word.decode("latin-1") if isinstance(word, bytes) else word


# Before: what instructions there are


def _scan(data: bytes) -> None:
    """Go through the instructions without obeying them, and refuse those that would do harm."""
    at, tuples, maker = 0, 0, ""
    memo: dict[int, str] = {}  # which instruction made a value that may be asked for again
    try:
        for step, (code, given, place) in enumerate(pickletools.genops(data)):
            at, name, arg = place or 0, code.name, given if isinstance(given, int) else 0
            put = "PUT" in name or name == "MEMOIZE"
            tuples += maker in _TUPLES and not put and name not in ("REDUCE", "BUILD")
            wrong = ""
            if code.code not in _ALLOWED:
                wrong = f"uses {name}, which plain data does not need"
            elif step >= MAX_STEPS or tuples > MAX_TUPLES:
                wrong = f"takes more than {MAX_STEPS} instructions, or {MAX_TUPLES} tuples"
            elif abs(arg) > (MAX_STEPS if put else MAX_NUMBER) and name != "FRAME":
                wrong = "holds a number that is too large for plain data"
            elif "GET" in name and memo.get(arg) not in _NAMED:
                wrong = "holds a tuple twice, which plain data does not"
            if wrong:
                raise PickleError(f"the pickle {wrong}; do not trust it.", at)
            if name == "GLOBAL":
                module, word = str(given).split(" ", 1)
                _check_known(module, word, at)
            if put:
                memo[len(memo) if given is None else arg] = maker
            else:
                maker = memo[arg] if "GET" in name else code.code
    except PickleError:
        raise
    except ValueError:  # no instruction, or its argument is cut off
        raise PickleError("the pickle is damaged or cut off here; copy or fetch the file again.", at) from None


def _check_known(module: str, word: str, at: int | None = None) -> None:
    if (module, word) not in _KNOWN:
        wants = f"the pickle wants to import {module[:80]}.{word[:80]}"
        raise PickleError(f"{wants}, but only numpy arrays and plain containers are read; do not trust it.", at)


# While it runs: what the few names stand for


class _Call(NamedTuple):
    """A function that the pickle may call; it cannot be given any state."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class _Type:
    """A numpy type, from its code."""

    def __init__(self, code: Any) -> None:
        self.code, self.order = _text(code), "="
        if self.code not in _CODES:
            raise PickleError(f"a pickled array has type {str(self.code)[:40]!r}, but it must hold numbers.")

    def __setstate__(self, state: Any) -> None:
        self.order = {"<": "<", ">": ">", "|": "=", "=": "="}[_text(state[1])]


class _Array:
    """An array, which has its content once its state came."""

    def __init__(self, build: Callable[..., np.ndarray]) -> None:
        self._build = build
        self.value: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, raw = state
        self.value = self._build(kind, shape, "F" if fortran else "C", raw)


class _Plain(pickle.Unpickler):
    """The standard unpickler, for which a name is one of a few functions and no more."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self._budget = 4 * len(data) + 1_000_000

    def find_class(self, module: str, word: str) -> _Call:
        """Return the function for a name."""
        _check_known(module, word)
        functions: dict[str, Callable[..., Any]] = {
            "ndarray": lambda: None,  # only ever an argument of _reconstruct
            "_reconstruct": lambda *_: _Array(self._build),
            "dtype": lambda code, *_: _Type(code),
            "scalar": lambda kind, raw: self._build(kind, (), "C", raw).item(),
            "_frombuffer": lambda raw, kind, shape, order: self._build(kind, shape, order, raw),
            "encode": self._encode,
        }
        return _Call(functions[word])

    def _encode(self, text: str, encoding: str = "latin1") -> bytes:
        # Text can be encoded again and again from the memo, so what comes of it is bounded by the file's size.
        self._budget -= len(text)
        if self._budget < 0:
            raise PickleError("the pickle makes far more bytes than it has; do not trust it.")
        if _text(encoding) not in ("latin1", "latin-1"):
            raise TypeError(encoding)
        return text.encode("latin-1")

    def _build(self, kind: Any, shape: Any, order: Any, raw: Any) -> np.ndarray:
        """Return the array of these bytes, if there are as many as it needs."""
        if type(kind) is not _Type or type(shape) is not tuple or len(shape) > 4:
            raise TypeError(shape)
        if any(type(length) is not int or length < 0 for length in shape):
            raise TypeError(shape)
        dtype = np.dtype(kind.order + kind.code)
        raw = self._encode(raw) if isinstance(raw, str) else raw  # bytes of Python 2 that Python 3 saved again
        wanted, have = math.prod(shape) * dtype.itemsize, len(raw)
        if not isinstance(raw, bytes | bytearray) or have != wanted:
            raise PickleError(
                f"a pickled array of shape {shape} and type {dtype} needs {wanted} bytes, but has {have}."
            )
        return np.frombuffer(raw, dtype).reshape(shape, order="F" if order == "F" else "C")
