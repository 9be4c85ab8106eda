"""Packages that need not be installed, and what is said where one is missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .errors import UserError


def install(extra: str) -> str:
    """Return the command that installs an extra.

    >>> install("tune")
    "pip install 'metavd[tune]' (from a checkout: pip install '.[tune]')"
    """
    return f"pip install 'metavd[{extra}]' (from a checkout: pip install '.[{extra}]')"


def need(name: str, extra: str, what: str, error: type[UserError] = UserError) -> Any:
    """Import a module of an optional package, or say what installs it; without an extra of ours, its own name does.

    >>> need("json", "", "nothing").dumps([1])
    '[1]'
    >>> need("nowhere.part", "tune", "tuning")
    Traceback (most recent call last):
    ...
    metavd.errors.UserError: tuning needs the package nowhere (No module named 'nowhere'); install it with pip install \
'metavd[tune]' (from a checkout: pip install '.[tune]')
    """
    try:
        return import_module(name)
    except ImportError as fault:
        package = name.partition(".")[0]
        how = install(extra) if extra else f"pip install {package}"
        raise error(f"{what} needs the package {package} ({fault}); install it with {how}") from None
