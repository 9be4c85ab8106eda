"""Which apps a server runs, and what it leaves in its database afterwards."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from pathlib import Path

from . import compat
from .config import SERVER_APP, FederationError

_FILE = "apps.txt"
"""Hashes of apps that may bring code of their own to the server."""
_WAIT = 2.0
"""Seconds that tidying waits for who reads or writes, before it tries again later."""
_LOG = logging.getLogger("flwr")


def registered(database: str) -> Path:
    """Return the file with the hashes of a server's apps: beside its database, or where the server was started."""
    return Path(database).resolve().with_name(_FILE) if database else Path(_FILE)


def is_ours(fab: bytes, path: Path) -> bool:
    """Return whether an app holds nothing but a run config for metavd, so that the metavd that is installed runs.

    Another app runs only if its hash is in the file `path`; otherwise FederationError says how to put it there.
    """
    files, server_app = compat.app_parts(fab)
    if not files and server_app == SERVER_APP:
        return True
    found = compat.app_hash(fab)
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


class Tidier:
    """Lets nothing of what nodes sent stay in a server's database and its log, once Flower has forgotten it.

    Flower deletes a run's messages when the run has ended, perhaps a while later, and whoever reads at that moment
    keeps the log from being cut. So the end of a run is not enough: the state of the files decides, at every look.
    """

    def __init__(self, database: str) -> None:
        self.database = Path(database)
        self._due = self._whole = self._warned = False
        """Whether a run has ended since, the log has yet to be cut, and a fault was told."""
        self._seen = (-1, -1)

    def look(self, ended: bool) -> None:
        """Tidy after a run has ended, and whenever something was deleted since."""
        self._due |= ended
        try:
            log = compat.write_log(self.database).stat()
        except OSError:
            return
        written = (log.st_mtime_ns, log.st_size)  # some systems' clocks tick every few milliseconds, or once a second
        if written == self._seen and not self._due:
            return
        try:
            clean = self._tidied()
        except sqlite3.Error as error:
            if not self._warned:
                _LOG.warning("%s is not tidied yet: %s", self.database, error)
            self._warned, clean = True, False
        self._seen = written if clean else (-1, -1)

    def _tidied(self) -> bool:
        with contextlib.closing(sqlite3.connect(self.database, timeout=_WAIT)) as link:
            (free,) = link.execute("PRAGMA freelist_count").fetchone()
            if free or self._due:
                link.execute("VACUUM")
                self._due, self._whole = False, True
            if self._whole:
                (busy, *_) = link.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                self._whole = bool(busy)
        return not self._whole
