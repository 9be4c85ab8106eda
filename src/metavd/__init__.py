"""Personalised, Bayesian federated learning: meta-variational dropout, its baselines, and honest evaluation.

    import metavd

    result = metavd.run(method="reptile+metavd", data="digits", rounds=20)

Names are imported when they are first used, so that `import metavd` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import VERSION

if TYPE_CHECKING:
    from .core.model import from_module as from_module
    from .core.types import Algorithm as Algorithm
    from .data import partition as partition
    from .data.partition import Federation as Federation
    from .data.partition import federate as federate
    from .data.source import Source as Source
    from .data.source import arrays as arrays
    from .data.table import table as table
    from .evaluate import metrics as metrics
    from .runs.run import run as run
    from .runs.settings import Experiment as Experiment
    from .serve.model import Personal as Personal
    from .serve.personal import personalize as personalize
    from .studies.compare import compare as compare

__version__ = VERSION

_HOMES = {
    "Algorithm": "core.types",
    "Experiment": "runs.settings",
    "Federation": "data.partition",
    "Personal": "serve.model",
    "Source": "data.source",
    "arrays": "data.source",
    "compare": "studies.compare",
    "federate": "data.partition",
    "from_module": "core.model",
    "metrics": "evaluate",
    "partition": "data",
    "personalize": "serve.personal",
    "run": "runs.run",
    "table": "data.table",
}
__all__ = ["__version__", *_HOMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Import a public name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module 'metavd' has no attribute {name!r}")
    home = import_module(f".{_HOMES[name]}", __name__)
    return getattr(home, name) if hasattr(home, name) else import_module(f".{_HOMES[name]}.{name}", __name__)


def __dir__() -> list[str]:
    return sorted(__all__)
