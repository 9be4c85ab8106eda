"""Processes that end with the one that started them, however that ends."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time

_LOOK = 0.2
"""Seconds between two looks whether the parent process is there."""
_LOG = logging.getLogger("flwr")


def die_with(parent: int) -> None:
    """Let the system kill this process when its parent ends, however that ends; only Linux can.

    The system watches the parent's thread that has started this process, so that thread has to stay.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def watch_parent() -> None:
    """End this process soon after its parent, also on systems and under executors that do not kill it.

    Flower watches too, but it asks whether a process with that id exists, which a dead one does until it is waited
    for, and then only interrupts the main thread, which may sit in a long wait.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK)
        _LOG.error("the process that started this one is gone (%d), so this one ends; run again to go on", parent)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
