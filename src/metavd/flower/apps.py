"""Which apps a server runs, and what it leaves in its database afterwards."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import sqlite3
import tomllib
import zipfile
from pathlib import Path

from . import compat
from .config import SERVER_APP, FederationError

_FILE = "apps.txt"
"""Hashes of apps that may bring code of their own to the server."""
_LOG = logging.getLogger("flwr")


def registered(database: str) -> Path:
    """Return the file with the hashes of a server's apps: beside its database, or where the server was started."""
    return Path(database).resolve().with_name(_FILE) if database else Path(_FILE)


def is_ours(fab: bytes, path: Path) -> bool:
    """Return whether an app holds nothing but a run config for metavd, so that the metavd that is installed runs.

    Another app runs only if its hash is in the file `path`; otherwise FederationError says how to put it there.
    """
    with zipfile.ZipFile(io.BytesIO(fab)) as files:
        parts = tomllib.loads(files.read("pyproject.toml").decode())["tool"]["flwr"]["app"]["components"]
        if set(files.namelist()) <= {"pyproject.toml", ".info/CONTENT"} and parts["serverapp"] == SERVER_APP:
            return True
    found = hashlib.sha256(fab).hexdigest()
    if found not in (path.read_text().split() if path.exists() else ()):
        raise FederationError(
            f"the app {found} brings code of its own and is not registered here; metavd federate allow registers it"
        )
    return False


def allow(app: Path, path: Path) -> str:
    """Register an app, a folder, by its hash, and return that; SuperLinks with this file run it from then on."""
    found = compat.app_hash(app)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w") as file:
        file.write(found + "\n")
    return found


def tidy(database: str) -> None:
    """Let nothing of what nodes sent stay in the database and its log, once the run has ended and Flower forgot it."""
    try:
        with contextlib.closing(sqlite3.connect(database, timeout=10)) as link:
            link.execute("VACUUM")
            link.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        _LOG.warning("%s is not tidied: %s", database, error)
