"""One description of a setting: its type, range and choices are checked in one place, and nothing is read twice."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import pytest

from metavd import methods
from metavd.errors import SpecError, UserError
from metavd.runs.settings import SETTINGS
from metavd.schema import Option, called, meant, option, options


@dataclass(frozen=True)
class Parent:
    rate: float = option(0.5, "a number", low=0, high=1, search=[0.1, 0.5], also=("speed",), released=0.9)
    steps: int = option(3, "a count", low=1)


@dataclass(frozen=True)
class Child(Parent):
    rate: float = option(0.2, "the child's own", low=0)
    kind: Literal["red", "blue"] = option("red", "a word")
    loud: bool = option(False, "a truth")
    part: int | float = option(-1, "a number, or a share of all", low=0, high=100, share=True)
    name: str = option("x", "a text", canonical=str.lower)
    words: str = option("a", "words that others know", choices=lambda: ("a", "b"))


def test_fields_are_options() -> None:
    """Law: an option is a field of the dataclass: same names, same order, same defaults; a child's overrides."""
    known = options(Child)
    assert list(known) == [field.name for field in fields(Child)] == ["rate", "steps", *list(known)[2:]]
    assert {name: each.default for name, each in known.items()} == vars(Child())
    assert (known["rate"].help, known["rate"].high, known["rate"].presets) == ("the child's own", None, {})
    assert (options(Parent)["rate"].presets, options(Parent)["rate"].search) == ({"released": 0.9}, (0.1, 0.5))
    assert known["kind"].allowed == ("red", "blue")
    assert known["words"].allowed == ("a", "b")
    assert known["steps"].allowed is None


@pytest.mark.parametrize(
    ("name", "given", "read"),
    [
        ("rate", "0.25", 0.25), ("rate", 1, 1.0), ("steps", "4", 4), ("steps", 4.0, 4), ("kind", "blue", "blue"),
        ("loud", "true", True), ("loud", 0, False), ("part", "0.5", 0.5), ("part", "3", 3), ("part", 3.0, 3),
        ("part", 1, 1), ("part", 0, 0), ("name", "ABC", "abc"), ("words", "b", "b"),
    ],
)  # fmt: skip
def test_values_are_read_in_their_type(name: str, given: Any, read: Any) -> None:
    found = options(Child)[name].check(given)
    assert found == read
    assert type(found) is type(read)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("rate", "fast", "rate is 'fast', but must be a number"),
        ("rate", -1, "rate is -1, but must be at least 0"),
        ("rate", float("inf"), "rate is inf, but must be a finite number"),
        ("rate", float("nan"), "rate is nan, but must be a finite number"),
        ("steps", 2.5, "steps is 2.5, but must be a whole number"),
        ("steps", True, "steps is True, but must be a whole number"),
        ("steps", float("inf"), "steps is inf, but must be a whole number"),
        ("steps", 0, "steps is 0, but must be at least 1"),
        ("kind", "green", "kind is 'green', but must be one of red, blue"),
        ("words", "c", "words is 'c', but must be one of a, b"),
        ("loud", "perhaps", "loud is 'perhaps', but must be true or false"),
        ("part", 2.5, "part is 2.5, but must be a whole number or a share below 1"),
        ("part", 101, "part is 101, but must lie between 0 and 100"),
        ("part", -1, "part is -1, but must lie between 0 and 100"),
    ],
)
def test_wrong_values_are_explained(name: str, given: Any, says: str) -> None:
    with pytest.raises(SpecError) as error:
        options(Child)[name].check(given)
    assert str(error.value) == says
    assert isinstance(error.value, UserError)


def test_no_number_is_unbounded() -> None:
    """Law: infinity is refused where there is no bound, too."""
    for value in (float("inf"), float("-inf"), float("nan")):
        with pytest.raises(SpecError, match="must be a finite number"):
            Option("shift", 0.0, "a number").check(value)


def test_what_others_call_an_option_leads_to_it() -> None:
    """Law: also where a child has the option anew; and where nobody calls one so, the spelling decides."""
    assert called("Speed", options(Child)) == ["rate"]
    assert meant("speed", options(Child)) == "did you mean rate?"
    assert meant("stps", options(Child)).startswith("did you mean steps")
    with pytest.raises(SpecError, match="method 'fedavg' has no option 'learning_rate'; did you mean lr"):
        methods.resolve("fedavg", {"learning_rate": 0.1})


@pytest.mark.parametrize("name", methods.NAMES)
def test_what_others_call_options_is_no_name_of_ours(name: str) -> None:
    """Law: of one method each such word leads to one option, and is the name of none."""
    known = {**SETTINGS, **methods.options_of(name)}
    words = [word for each in known.values() for word in each.also]
    assert {"learning_rate", "num_rounds"} <= set(words)
    assert len(set(words)) == len(words)
    assert not {*words} & {*known}


def test_ranges_are_shown_as_one_would_type_them() -> None:
    with pytest.raises(SpecError, match=r"between 1 and 10000000$"):
        Option("rounds", 1, "", 1, 10**7).check(0)
    with pytest.raises(SpecError, match=r"between 0 and 0\.9$"):
        Option("valid", 0.0, "", 0.0, 0.9).check(2)
