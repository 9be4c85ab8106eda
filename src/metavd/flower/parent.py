"""Processes that end with the one that started them, however that ends."""

from __future__ import annotations

import logging
import os
import threading
import time

from ..compat import kill_with_parent

_LOOK = 0.2
"""Seconds between two looks whether the parent process is there."""
_LOG = logging.getLogger("flwr")
_known: list[int] = []
"""The process that started this one, where `die_with` was told."""


def die_with(parent: int) -> None:
    """End this process if its parent has ended, and let the system kill it when that ends later; only Linux can.

    The system watches the parent's thread that has started this process, so that thread has to stay.
    """
    _known[:] = [parent]
    kill_with_parent()
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def watch_parent() -> None:
    """End this process soon after its parent, also on systems and under executors that do not kill it.

    The parent is the one that `die_with` was told of, which may have ended since; under an executor of Flower's, who
    is the parent now. Flower watches too, but it asks whether a process with that id exists, which a dead one does
    until it is waited for, and then only interrupts the main thread, which may sit in a long wait.
    """
    (parent,) = _known or [os.getppid()]

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK)
        _LOG.error("the process that started this one is gone (%d), so this one ends; run again to go on", parent)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
