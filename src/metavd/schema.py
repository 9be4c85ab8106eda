"""One description of a setting, whatever it belongs to: type, default, range, choices, help and search space.

A dataclass whose fields are made by `option` is a schema. Options of methods, the settings of an experiment and the run
config of a federation are such dataclasses; the command line, TOML files, pages and checks are made from them.

    >>> @dataclass(frozen=True)
    ... class Steps:
    ...     lr: float = option(0.02, "learning rate", low=0)
    >>> Steps().lr, options(Steps)["lr"].check("0.5")
    (0.02, 0.5)
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .errors import SpecError

Value = bool | int | float | str


@dataclass(frozen=True)
class Option:
    """A setting: its default, what it means, what it may be, and what is searched by default."""

    name: str
    default: Value
    help: str
    low: float | None = None
    high: float | None = None
    choices: Sequence[str] | Callable[[], Sequence[str]] | None = None
    """The words that it may be. A field's `Literal` type gives them; a function, where other packages have a say."""
    search: tuple[float, ...] | None = None
    """What is searched by default: what the paper did, or what makes methods comparable."""
    offered: tuple[float, ...] | None = None
    """What is searched where it is only asked for by name, as in --search NAME; by default it is not."""
    presets: Mapping[str, Value] = field(default_factory=dict)
    """Its value under a preset, such as "released", where that is not the default."""
    share: bool = False
    """Whether a share below 1 of some whole may stand for a number."""
    names: bool = False
    """Whether a text that is no number may stand for one: names, with commas between."""
    runtime: bool = False
    """Whether it decides how a run is carried out, not what it computes."""
    from_data: Value | None = None
    """Where the default is the dataset's: what it is for a dataset that brings none."""
    later: bool = False
    """Whether it came after runs had been stored: at its default, it is left out of the name of what is computed."""
    canonical: Callable[[str], str] | None = None
    """Checks a text by other rules and returns its canonical spelling."""
    foreign: str = ""
    """Why it cannot be set where clients are real, in half a sentence; empty where it can."""
    also: tuple[str, ...] = ()
    """What others call it: whoever writes that is led to its name."""

    @property
    def allowed(self) -> tuple[str, ...] | None:
        """The words that it may be, None where it is not a choice."""
        return None if self.choices is None else tuple(self.choices() if callable(self.choices) else self.choices)

    def check(self, value: Any) -> Value:
        """Return the value in the option's type, or say in one sentence what is wrong with it."""
        try:
            result = self._read(value)
        except (KeyError, OverflowError, TypeError, ValueError):
            kind = "a whole number or a share below 1" if self.share else _KINDS[type(self.default)]
            kind += ", or names" if self.names else ""
            raise SpecError(f"{self.name} is {value!r}, but must be {kind}") from None
        if isinstance(result, str):
            allowed = self.allowed
            if allowed is not None and result not in allowed:
                raise SpecError(f"{self.name} is {value!r}, but must be one of {', '.join(allowed)}")
            return result if self.canonical is None else self.canonical(result)
        if self.share and 0 < result < 1:
            return result
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        if not math.isfinite(result):
            raise SpecError(f"{self.name} is {value}, but must be a finite number")
        if not low <= result <= high:
            right = f"lie between {_plain(low)} and {_plain(high)}" if high < math.inf else f"be at least {_plain(low)}"
            raise SpecError(f"{self.name} is {value}, but must {right}")
        return result

    def _read(self, value: Any) -> Value:
        kind = type(self.default)
        if kind is bool:
            return _TRUTHS[str(value).lower()]
        if self.names and isinstance(value, str) and value.strip() and not _is_number(value):
            return value.strip()
        if self.share:
            number = float(value)
            if number > 1 and number != int(number):
                raise ValueError(value)
            return int(number) if number == int(number) else number
        if kind is int:
            if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
                raise ValueError(value)
            return int(value)
        return kind(value)


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_TRUTHS = {"true": True, "false": False, "1": True, "0": False}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def option(
    default: Value,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] | Callable[[], Sequence[str]] | None = None,
    search: Sequence[float] | None = None,
    offered: Sequence[float] | None = None,
    share: bool = False,
    names: bool = False,
    runtime: bool = False,
    from_data: Value | None = None,
    later: bool = False,
    canonical: Callable[[str], str] | None = None,
    foreign: str = "",
    also: Sequence[str] = (),
    **presets: Value,
) -> Any:
    """Make a dataclass field of what `Option` describes; further keywords are presets: `released=-8.5`."""
    found = Option(
        "", default, help, low, high, choices, None if search is None else tuple(search),
        None if offered is None else tuple(offered), presets, share=share, names=names, runtime=runtime,
        from_data=from_data, later=later, canonical=canonical, foreign=foreign, also=tuple(also),
    )  # fmt: skip
    return field(default=default, metadata={"option": found})


def like(schema: Any, name: str, default: Any = None) -> Any:
    """Make a dataclass field of a setting as another schema describes it, perhaps with a default of its own."""
    (known,) = (each for each in fields(schema) if each.name == name)
    return field(default=known.default if default is None else default, metadata=known.metadata)


@cache
def options(schema: Any) -> Mapping[str, Option]:
    """Return the options of a dataclass by name; a field that `option` did not make is none.

    The words that a field of a `Literal` type may be are its choices. What a dataclass names in `came_later` is a later
    option of it, also where it inherits the field from one that always had it. Others call an option what they call
    that of this name in the dataclasses that this one extends, too.
    """
    types = get_type_hints(schema)
    found = {}
    for each in fields(schema):
        if "option" in each.metadata:
            words = get_args(types[each.name]) if get_origin(types[each.name]) is Literal else None
            told: Option = each.metadata["option"]
            later = told.later or each.name in getattr(schema, "came_later", ())
            choices = words if told.choices is None else told.choices
            default: Any = each.default  # another than the option's own, where `like` was given one
            also = tuple(dict.fromkeys(word for base in schema.__mro__ for word in _also(base, each.name)))
            found[each.name] = replace(told, name=each.name, default=default, choices=choices, later=later, also=also)
    return MappingProxyType(found)


def _also(schema: Any, name: str) -> tuple[str, ...]:
    """Return what a dataclass says that others call its option of that name."""
    named = (each for each in (fields(schema) if is_dataclass(schema) else ()) if each.name == name)
    return tuple(word for each in named if "option" in each.metadata for word in each.metadata["option"].also)


def numbers(text: str, build: Callable[..., Any], said: str, example: str) -> list[int | float]:
    """Read the numbers after a name, NAME:NUMBER:..., as the parameters of a function want them.

    Args:
        text: the name and its numbers.
        build: whose parameters they are; those with a default may be left out.
        said: how the sentence about a wrong text begins.
        example: a text that would be right.

    >>> numbers("trimmed:0.2", lambda share=0.1: share, "aggregate is 'trimmed:0.2'", "trimmed:0.1")
    [0.2]
    """
    name, *given = text.split(":")
    types = get_type_hints(build)
    wanted = list(signature(build).parameters.values())
    least = sum(each.default is Parameter.empty for each in wanted)
    kinds = ["a whole number" if types.get(each.name) is int else "a number" for each in wanted]
    if not wanted and given:
        raise SpecError(f"{said}, but {name} takes no number; write {name}")
    try:
        if not least <= len(given) <= len(wanted):
            raise ValueError(text)
        values = [types.get(each.name, float)(word) for each, word in zip(wanted, given, strict=False)]
        if not all(map(math.isfinite, values)):
            raise ValueError(text)
    except ValueError:
        takes = ", and perhaps ".join(filter(None, (", ".join(kinds[:least]), ", ".join(kinds[least:]))))
        raise SpecError(f"{said}, but {name} takes {takes} after colons, such as {example}") from None
    return values


def nearest(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Say which known words a wrong one may have meant; where none is near, `otherwise`, or which there are.

    >>> nearest("IDD", ["iid", "natural"]), nearest("?", ["iid", "natural"])
    ('did you mean iid?', 'choose from iid, natural')
    """
    every = list(known)
    close = difflib.get_close_matches(word, every, 3, 0.4) or difflib.get_close_matches(word.lower(), every, 3, 0.4)
    return asking(close) if close else otherwise or f"choose from {', '.join(every)}"


def asking(words: Sequence[str]) -> str:
    """Ask whether one of these words was meant."""
    return f"did you mean {' or '.join(words)}?"


def called(word: str, known: Mapping[str, Option]) -> list[str]:
    """Return the options that a word names, as we or as others call them."""
    word = word.lower().replace("-", "_")
    return [name for name, each in known.items() if word in {name.replace("-", "_"), *each.also}]


def meant(word: str, known: Mapping[str, Option]) -> str:
    """Say which options a wrong name may have meant: those that others call so, else those spelt nearly so.

    >>> known = {"batch": Option("batch", 64, "rows", also=("batch_size",)), "backend": Option("backend", "", "how")}
    >>> meant("batch-size", known), meant("bach", known)
    ('did you mean batch?', 'did you mean batch or backend?')
    """
    return asking(found) if (found := called(word, known)) else nearest(word, sorted(known))
