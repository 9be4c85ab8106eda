"""Networks by name, those of packages among them."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
from torch import nn

from metavd.models import REGISTRY, module_for, network


def test_a_package_is_asked_for_a_name_that_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody has asked before, and where another package, asked before it, cannot be imported."""

    def load(point: EntryPoint) -> None:
        if point.name == "broken":
            raise ImportError("no such module")
        network("theirs")(lambda shape, num_classes: nn.Linear(shape[0], num_classes))

    monkeypatch.setattr(EntryPoint, "load", load)
    points = [EntryPoint(name, "their.module", REGISTRY.group) for name in ("broken", "theirs")]
    for name, value in (
        ("_found", dict(REGISTRY.own())), ("_homes", dict(REGISTRY._homes)), ("_offered", points), ("broken", []),
        ("_asked_packages", False),
    ):  # fmt: skip
        monkeypatch.setattr(REGISTRY, name, value)
    assert module_for("theirs", (4,), 3, 0).weight.shape == (3, 4)
    assert len(REGISTRY.broken) == 1
