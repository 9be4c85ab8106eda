"""Every posterior by name. Nothing here imports torch, so that whoever only asks for the names need not wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..registry import Registry

if TYPE_CHECKING:
    from .posterior import Posterior

POSTERIORS: Registry[type[Posterior]] = Registry("metavd.posteriors", [f"{__package__}.posterior"])
"""`POSTERIORS.add(name, Mine, __name__)` in a file of your own adds one."""
