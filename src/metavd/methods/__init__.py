"""Every method by name, one file per family; `catalogue` puts a name together, `parts` is what families share.

A method of one's own is a dataclass of options and a function with a decorator, as in every file here; a package that
names such a module as an entry point of the group `metavd.methods` makes it known to the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..schema import option
from .catalogue import (
    REGISTRY,
    VARIANT,
    VARIANTS,
    Entry,
    Traits,
    algorithm,
    base,
    check,
    describe,
    entries,
    extra,
    names,
    notes,
    options_of,
    parse,
    regulariser,
    resolve,
    traits,
)
from .parts import (
    POSTERIOR,
    REGULARISABLE,
    TUNABLE,
    Adapting,
    Momentum,
    Options,
    Parts,
    Rates,
    Setting,
    Training,
    assemble,
    linear_layers,
    named,
    plain,
)

if TYPE_CHECKING:
    NAMES: tuple[str, ...]

__all__ = [
    "NAMES", "POSTERIOR", "REGISTRY", "REGULARISABLE", "TUNABLE", "VARIANT", "VARIANTS", "Adapting", "Entry",
    "Momentum", "Options", "Parts", "Rates", "Setting", "Training", "Traits", "algorithm", "assemble", "base",
    "check", "describe", "entries", "extra", "linear_layers", "named", "names", "notes", "option", "options_of",
    "parse", "plain", "regulariser", "resolve", "traits",
]  # fmt: skip

if not TYPE_CHECKING:  # a type checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        """`NAMES`: every method that is listed, with those of installed packages."""
        if name == "NAMES":
            return names()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
