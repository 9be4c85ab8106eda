"""The mathematics: pure functions on dictionaries of tensors. No files, no argv, no method names.

A module of this package is imported when it is first used (`core.local`), so that whoever only asks which methods
there are need not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import accountant as accountant
    from . import aggregate as aggregate
    from . import dbe as dbe
    from . import emit as emit
    from . import gp_nodes as gp_nodes
    from . import gp_slots as gp_slots
    from . import lda as lda
    from . import local as local
    from . import model as model
    from . import objective as objective
    from . import optim as optim
    from . import posterior as posterior
    from . import posteriors as posteriors
    from . import predict as predict
    from . import prior as prior
    from . import privacy as privacy
    from . import rank_one as rank_one
    from . import rng as rng
    from . import rules as rules
    from . import server as server
    from . import types as types
    from . import vem as vem

if not TYPE_CHECKING:  # a type checker would take any name for a module

    def __getattr__(name: str) -> Any:
        """Import a module of the package."""
        try:
            return import_module(f".{name}", __name__)
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
