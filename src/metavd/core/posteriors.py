"""Every posterior by name. Nothing here imports torch, so that whoever only asks for the names need not wait for it."""

from __future__ import annotations

from typing import Any

from ..registry import Registry

POSTERIORS: Registry[Any] = Registry("metavd.posteriors", [f"{__package__}.posterior"])
"""Classes that fill `posterior.Posterior`; `POSTERIORS.add(name, Mine, __name__)` in a file of your own adds one."""
