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
from typing import Any

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
        return {key.decode("latin-1") if isinstance(key, bytes) else key: _array(held) for key, held in value.items()}
    return _array(value)


def _array(value: Any) -> Any:
    return value.value if isinstance(value, _Array) else value


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
            if code.code not in _ALLOWED:
                raise PickleError(f"the pickle uses {name}, which plain data does not need; do not trust it.")
            if step >= MAX_STEPS or tuples > MAX_TUPLES:
                raise PickleError(f"the pickle takes more than {MAX_STEPS} instructions, or {MAX_TUPLES} tuples.")
            if abs(arg) > (MAX_STEPS if put else MAX_NUMBER) and name != "FRAME":
                raise PickleError("the pickle holds a number that is too large for plain data; do not trust it.")
            if "GET" in name and memo.get(arg) not in _NAMED:
                raise PickleError("the pickle holds a tuple twice, which plain data does not; do not trust it.")
            if name == "GLOBAL":
                known(*str(given).split(" ", 1))
            if put:
                memo[len(memo) if given is None else arg] = maker
            else:
                maker = memo[arg] if "GET" in name else code.code
    except PickleError as error:
        raise PickleError(error.what, at) from None
    except ValueError:  # no instruction, or its argument is cut off
        raise PickleError("the pickle is damaged or cut off here; copy or fetch the file again.", at) from None


# While it runs: the few names that are known


def known(module: str, word: str) -> str:
    """Return which of the functions below a pickle means, or refuse what it wants to import."""
    if (module, word) == ("_codecs", "encode") or (module == "numpy" and word in ("ndarray", "dtype")):
        return word
    if module in _NUMPY and word in ("_reconstruct", "scalar", "_frombuffer"):
        return word
    raise PickleError(
        f"the pickle wants to import {module[:80]}.{word[:80]}, but only numpy arrays and plain containers are read; "
        "do not trust it."
    )


class _Call:
    """A function that the pickle may call; it cannot be given any state."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __setstate__(self, state: Any) -> None:
        raise TypeError


class _Type:
    """A numpy type, from its code."""

    def __init__(self, code: Any) -> None:
        self.code, self.order = _text(code), "="
        if self.code not in _CODES:
            raise PickleError(f"a pickled array has type {str(self.code)[:40]!r}, but it must hold numbers.")

    def __setstate__(self, state: Any) -> None:
        self.order = _text(state[1])


class _Array:
    """An array, which has its content once its state came."""

    def __init__(self, unpickler: _Plain) -> None:
        self._unpickler = unpickler
        self.value: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, raw = state
        self.value = self._unpickler.build(kind, shape, fortran, raw)


class _Plain(pickle.Unpickler):
    """The standard unpickler, for which a name is one of a few functions and no more."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self._budget = 4 * len(data) + 1_000_000

    def find_class(self, module: str, word: str) -> _Call:
        """Return the function for a name."""
        functions: dict[str, Callable[..., Any]] = {
            "ndarray": lambda: None,  # only ever an argument of _reconstruct
            "_reconstruct": lambda *_: _Array(self),
            "dtype": lambda code, *_: _Type(code),
            "scalar": lambda kind, raw: self.build(kind, (), False, raw).item(),
            "_frombuffer": lambda raw, kind, shape, order: self.build(kind, shape, order == "F", raw),
            "encode": self._encode,
        }
        return _Call(functions[known(module, word)])

    def _encode(self, text: str, encoding: str = "latin1") -> bytes:
        # Text can be encoded again and again from the memo, so what comes of it is bounded by the file's size.
        self._budget -= len(text)
        if self._budget < 0:
            raise PickleError("the pickle makes far more bytes than it has; do not trust it.")
        if _text(encoding) not in ("latin1", "latin-1"):
            raise TypeError(encoding)
        return text.encode("latin-1")

    def build(self, kind: Any, shape: Any, fortran: Any, raw: Any) -> np.ndarray:
        """Return the array of these bytes, if there are as many as it needs."""
        if type(kind) is not _Type or type(shape) is not tuple or len(shape) > 4:
            raise TypeError(shape)
        if kind.order not in ("<", ">", "|", "=") or any(type(length) is not int or length < 0 for length in shape):
            raise TypeError(shape)
        dtype = np.dtype((kind.order if kind.order in "<>" else "=") + kind.code)
        if isinstance(raw, str):  # bytes of Python 2 that Python 3 saved again
            raw = self._encode(raw)
        wanted, have = math.prod(shape) * dtype.itemsize, len(raw)
        if not isinstance(raw, bytes | bytearray) or have != wanted:
            raise PickleError(
                f"a pickled array of shape {shape} and type {dtype} needs {wanted} bytes, but has {have}."
            )
        return np.frombuffer(raw, dtype).reshape(shape, order="F" if fortran else "C")


def _text(word: Any) -> Any:
    return word.decode("latin-1") if isinstance(word, bytes) else word
