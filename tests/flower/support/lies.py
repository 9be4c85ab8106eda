"""Lies by the dozen: every field of an answer, a hello and a figure with every value that it must not have."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import torch

from .answers import (
    BAD_MASK,
    INF,
    NAN,
    Change,
    bytes_,
    claims,
    filled,
    first_of,
    header,
    lacking,
    renamed,
    repacked,
    rounds_off,
    scaled,
    values,
)
from .edges import BEGINNING, END
from .stage import Fault, never

PARTS = (".weight", ".bias")
HUGE = 1e308


def everywhere(part: str, value: float) -> Change:
    """Fill the first entry of this kind."""
    return first_of(part, lambda entry: torch.full_like(entry, value))


def _entry(**changed: Any) -> Any:
    """Return what changes the first entry of a header."""

    def change(head: dict[str, Any]) -> str:
        entry = list(head.values())[1]
        entry |= changed
        return json.dumps({name: value for name, value in head.items() if value is not None}, separators=(",", ":"))

    return change


def _masks(value: float) -> Any:
    def change(packed: dict[str, torch.Tensor], was: dict[str, Any]) -> None:
        name = next(name for name in packed if name.endswith(".mask"))
        packed[name] = torch.full(was.pop(name)[2], value)

    return change


def _cut(share: float) -> Any:
    return bytes_(lambda data: data[: int(share * len(data))])


def _flipped(share: float) -> Any:
    def change(data: bytes) -> bytes:
        at = int(share * (len(data) - 1))
        return data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]

    return bytes_(change)


SHAPES = {
    "flattened": lambda v: v.reshape(-1)[: max(1, v.numel() - 1)], "doubled": lambda v: torch.cat([v, v]),
    "empty": lambda v: v[:0], "one axis more": lambda v: v[..., None], "one number": lambda v: v.reshape(-1)[0],
    "a row less": lambda v: v[:-1],
}  # fmt: skip
DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)
ENTRIES: dict[str, dict[str, Any]] = {
    "a negative shape": {"shape": [-1, 4]}, "a shape of text": {"shape": ["2", "2"]},
    "a shape of halves": {"shape": [2.5]},
    "no shape": {"shape": None}, "a shape that overflows": {"shape": [1 << 62, 1 << 62]},
    "many axes": {"shape": [1] * 99},
    "an unknown type": {"dtype": "F999"}, "no type": {"dtype": None}, "a type of a list": {"dtype": ["F32"]},
    "offsets turned round": {"data_offsets": [8, 0]}, "offsets beyond": {"data_offsets": [0, 1 << 50]},
    "one offset": {"data_offsets": [0]}, "offsets of text": {"data_offsets": ["0", "8"]},
    "no offsets": {"data_offsets": None},
    "a key more": {"evil": 1},
}  # fmt: skip
NAMES = ("server.key", "../../etc/passwd", "hyper.0.weight", "embedding")


def _named(name: str) -> Change:
    return lambda answer: answer | {name: torch.zeros(3)}


ANSWERS = [
    *(Fault("not finite", f"{value} in all of {part}", values(everywhere(part, value)))
      for part, value in product(PARTS, (NAN, INF, -INF))),
    *(Fault("not finite", f"{value} in one of {part}", values(filled(part, value)))
      for part, value in ((".weight", -INF), (".bias", INF))),
    *(Fault("wrong shape", f"{how} {part}", values(first_of(part, change)))
      for part, (how, change) in product(PARTS, SHAPES.items())),
    *(Fault("wrong dtype", f"{dtype} {part}", values(first_of(part, lambda v, dtype=dtype: v.to(dtype))))
      for part, dtype in product(PARTS, DTYPES)),
    *(Fault("wrong header", name, header(_entry(**changed))) for name, changed in ENTRIES.items()),
    *(Fault("wrong header", name, header(lambda _, text=text: text)) for name, text in (
        ("no JSON", "{"), ("a list", "[1, 2]"), ("nothing", ""), ("nested deep", "[" * 5000 + "]" * 5000),
        ("NaN", '{"a":NaN}'), ("a number", "7"))),
    *(Fault("wrong name", f"{name!r} more", values(_named(name))) for name in NAMES),
    *(Fault("wrong name", f"{old} is {new!r}", values(renamed(old, new)))
      for old, new in ((".weight", ".Weight"), (".bias", ".bias "), (".bias", ""), ("weight", "bias_"))),
    Fault("wrong name", "the first weight lacks", values(lacking(".weight"))),
    *(Fault("norm", f"times {by:g}", values(scaled(by)))
      for by in (1e2, -1e2, 1e4, -1e4, 1e10, -1e10, 1e20, 1e30, -1e30)),
    *(Fault("norm", f"{value:g} in one of {part}", values(filled(part, value)))
      for part, value in product(PARTS, (1e4, -1e4, 1e10, 1e20, -1e38))),
    *(Fault("norm", f"{value:g} in all of {part}", values(everywhere(part, value)))
      for part, value in product(PARTS, (1e3, -1e3, 1e15))),
    *(Fault("sample count", f"{value}", claims("metrics", rows=value)) for value in (
        -1, -1.5, -INF, 1e9 + 1, 1e15, 1e300, HUGE, 1 << 62, -(1 << 62), [], [NAN], [1e9], [1, 2, 3])),
    *(Fault("wrong round", f"{by:+d}", rounds_off(by)) for by in (-2, 2, 1000, -(10**6), 1 << 40)),
    *(Fault("wrong round", f"{value!r:.30}", claims("reply", round=value)) for value in (
        "", "one", "1\n", b"1", [1, 2], [1.0], NAN, INF, -INF, "9" * 5000)),
    *(Fault("damaged", f"protocol {value!r:.20}", claims("reply", protocol=value)) for value in (
        -1, 0, 3, "2", b"2", [2], NAN, 1 << 62)),
    *(Fault("truncated", f"{share:.1%} of it", _cut(share)) for share in (
        0.001, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9, 0.99)),
    *(Fault("damaged", f"a bit at {share:.1%}", _flipped(share)) for share in (
        0, 0.001, 0.003, 0.01, 0.02, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 1)),
    *(Fault("damaged", name, bytes_(change)) for name, change in (
        ("backwards", lambda data: data[::-1]), ("twice", lambda data: data + data),
        ("a byte more", lambda d: d + b"\0"),
        ("a byte before", lambda data: b"\0" + data), ("text", lambda _: b"all is well"),
        ("zeros", lambda d: bytes(len(d))),
        ("the length lies", lambda data: (1 << 60).to_bytes(8, "little") + data[8:]),
        ("the length is zero", lambda data: bytes(8) + data[8:]))),
    *(Fault("bad mask", f"numbers of {value}", repacked(_masks(value)), **BAD_MASK)
      for value in (0.0, 1e-3, 2.0, -1.0, NAN, INF)),
]  # fmt: skip
"""Answers that must be refused, and name the client and why."""

FIGURES = [
    *(Fault("bad figures", f"{name} is {value}", claims("metrics", **{name: value}), **END)
      for name, value in product(("accuracy", "nll", "brier"), (INF, -INF, -1.0, HUGE, -HUGE, [], [NAN, 1.0], 1e9))),
    *(Fault("bad figures", f"{name} is {value}", claims("metrics", **{name: value}), **END)
      for name, value in product(("train_size", "test_size"), (-1, 0.5, NAN, -INF, 1e300, 1 << 62, 10**9, [3], []))),
    *(Fault("bad figures", f"{name} is {label}", claims("metrics", **{name: value}), **END)
      for name, (label, value) in product(("bin_count", "bin_confidence", "bin_accuracy"), (
          ("NaN", [NAN] * 15), ("huge", [HUGE] * 15), ("negative", [-1.0] * 15), ("endless", [INF] * 15), ("empty", []),
          ("long", [1.0] * 5000), ("one number", 3.0), ("left out", None)))),
    *(Fault("bad figures", f"everything is {value}", claims("metrics", accuracy=value, nll=value, brier=value), **END)
      for value in (NAN, INF, -3.0)),
    *(Fault("bad figures", f"a loss of {value:g}", claims("metrics", loss=value), absent=never, named=False)
      for value in (INF, -INF, HUGE, -HUGE)),
    *(Fault("bad figures", f"{value:g} seconds", claims("metrics", seconds=value), absent=never, named=False)
      for value in (NAN, -1.0, -INF, HUGE)),
    *(Fault("bad figures", f"the reply's protocol is {value!r}", claims("reply", protocol=value), **END)
      for value in (None, 99, "2", [2])),
]  # fmt: skip
"""Figures that must not lift, sink or end a run."""

HELLOS = [
    *(Fault("bad hello", f"partition {value!r:.20}", claims("reply", partition=value), **BEGINNING)
      for value in ("", "1.5", [1, 2], [], NAN, -INF, b"\xff")),
    *(Fault("bad hello", f"protocol {value!r:.20}", claims("reply", protocol=value), **BEGINNING)
      for value in (-1, 3, "2", NAN, [2])),
    *(Fault("bad hello", f"look {value[:24]!r}", claims("reply", look=value), **BEGINNING) for value in (
        "[]", "7", '"text"', "null ",
        '{"rows": 1e999}', '{"rows": 5}', '{"a": ' * 2000 + "1" + "}" * 2000, "\x00", "{" * 9)),
    *(Fault("bad hello", f"a name of {label}", claims("reply", name=value), message="query", absent=never, named=False)
      for label, value in (("9 MB", "x" * 9_000_000), ("control codes", "a\x1b[2J\nINFO all is well"), ("nothing", ""),
                           ("another direction", "\u202egnp.exe"))),
]  # fmt: skip
"""Hellos that leave their site out, or are made harmless."""

LOOKS: dict[str, tuple[str, Any]] = {
    f"{field} is {value!r:.24}": (field, value)
    for field, several in {
        "rows": (0, -1, 1.5, 10**10, 1e300, "ten", None, [5], True),
        "classes": (-1, 0.5, 10**6, "ten", [10], None),
        "shape": ([], [8], [1, 8, 9], [0, 8, 8], [-1, 8, 8], [1 << 40, 8, 8], "1x8x8", 64, None, [1.5, 8, 8]),
        "dtype": ("float64", "", 7, None, "pickle", "uint8 "),
        "scale": (0, -1.0, 1e300, "255", None, [1.0]),
        "mean": ([1e300], [-1e12], [], ["0"], None, 0.5, [0.1] * 99),
        "std": ([-1.0], [1e300], [], ["1"], None, [0.1] * 99),
        "names": (["a"] * 20, [1, 2], "ab", [["a"]], ["x" * 10**6], list(map(str, range(200_000)))),
    }.items()
    for value in several
}
"""(field, value): what a site with rows of its own may say of them, and must not be believed."""
