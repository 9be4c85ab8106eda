"""The table of what exists by name; packages that join it are in tests/outside."""

from __future__ import annotations

from typing import Any

import pytest

from metavd.errors import UserError
from metavd.registry import Registry


def test_a_module_may_define_its_own_entry_anew() -> None:
    """A notebook's cell can be run twice."""
    registry: Registry[Any] = Registry("none.at.all", [])
    registry.add("a", 1, "here")
    registry.add("a", 2, "here")
    assert registry.all() == {"a": 2}
    with pytest.raises(UserError, match="'a' of there is taken by here"):
        registry.add("a", 3, "there")
