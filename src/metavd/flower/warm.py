"""Apps that start at once, and nodes that run no code but metavd's.

Flower starts a Python process for every message, and that process imports torch before it can train: seconds per
message. Here an executor imports everything once and forks for each task. A forked client runs the ClientApp of this
package, whatever app the message belongs to: code that comes over the network is neither unpacked nor run. The
operator chooses how often messages are looked for; Flower's own intervals (3 s for new messages, 1 s for tasks, 0.5 s
for answers) add up to seconds per round.

Every process here ends with the one that started it: a SuperLink that is killed takes its executor and the ServerApp
with it, so that nobody is left who writes to a run's folder.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..compat import line_is_cut
from . import compat
from .parent import die_with

POLL = "METAVD_POLL"
"""Environment variable: seconds between two looks for messages."""
_RETRY = 5
"""Seconds, at most, between two tries to reach the SuperLink."""
_PATIENCE = 60.0
"""Seconds that a node tries to be let in."""
_LOG = logging.getLogger("flwr")


# --- the executor ----------------------------------------------------------------------------------------------------


@dataclass
class ForkExecutor:
    """Runs each task in a fork of this process."""

    do: Callable[[Any, int], None]
    """(task, id of this process): carries out a task, in the fork."""
    idle: Callable[[bool], None] | None = None
    """Called at every look for tasks while none is under way: whether one has ended since the last call."""
    _ended: bool = False

    def get_eligible_capacity(self, supported_task_types: set[Any], **_: Any) -> tuple[set[Any], set[str]]:
        """Take any task: a SuperNode gives one at a time."""
        return supported_task_types, set()

    def wait_for_capacity(self, *_: Any, **__: Any) -> None:
        """Never wait."""

    def launch(self, spec: Any) -> Any:
        """Fork, and let the child do what the task says."""
        self._under_way()
        parent = os.getpid()
        if os.fork() == 0:
            die_with(parent)
            _to_the_end(lambda: self.do(spec, parent))
        return compat.launched()

    def reconcile(self) -> None:
        """Let go of children that have finished."""
        if not self._under_way() and self.idle:
            ended, self._ended = self._ended, False
            self.idle(ended)

    def _under_way(self) -> bool:
        """Let go of children that have finished, and return whether others have not."""
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                self._ended = True
        except ChildProcessError:
            return False
        return True

    def close(self) -> None:
        """Nothing is held."""


def _to_the_end(work: Callable[[], None]) -> None:
    """Do something and end the process, whatever happens; Flower's threads would keep it alive."""
    status = 1
    try:
        work()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def execute(address: str, parent: int, authority: str, database: str) -> None:
    """Do the tasks that a SuperNode or SuperLink has, until its process is gone."""
    die_with(parent)
    from .. import methods, models  # noqa: PLC0415 - all before the first fork: no child needs to import them
    from . import apps, client, server  # noqa: PLC0415

    compat.load_task(server=bool(database))
    for registry in (methods.REGISTRY, models.REGISTRY):
        registry.own()
    file = apps.registered(database)

    def do(spec: Any, parent: int) -> None:
        compat.run_task(spec, parent, client.app, server.app, lambda fab: apps.is_ours(fab, file))

    executor = ForkExecutor(do, apps.Tidier(database).look if database else None)
    compat.run_executor(executor, address, parent=parent, authority=authority)


def beside(address: str, *, authority: str = "", database: str = "") -> None:
    """Keep an executor running as long as this process lives."""
    command = [sys.executable, "-m", "metavd.flower.warm", "--execute", address, str(os.getpid()), authority, database]
    environment = {compat.TASK_INTERVAL: os.environ.get(POLL, "0.2"), **os.environ}

    def keep() -> None:
        while True:
            subprocess.run(command, env=environment, check=False)
            time.sleep(1)

    threading.Thread(target=keep, daemon=True).start()


def value_of(arguments: Sequence[str], option: str, default: str = "") -> str:
    """Return what follows an option on a command line."""
    return arguments[arguments.index(option) + 1] if option in arguments else default


# --- the node --------------------------------------------------------------------------------------------------------


def patient() -> Any:
    """Return how a node tries again: for ever, also where the line was cut in the middle of a handshake."""
    return compat.retry_invoker(longest=_RETRY, goes_on=line_is_cut)


def insisting(activate: Callable[..., Any], seconds: float = _PATIENCE) -> Callable[..., Any]:
    """Ask to be let in again and again: a node that was killed counts as online until its heartbeat has run out."""
    refused = compat.refused()

    def ask(client: Any, request: Any) -> Any:
        ends = time.monotonic() + seconds
        while True:
            try:
                return activate(client, request)
            except refused as error:
                if time.monotonic() > ends:
                    raise
                _LOG.warning("%s; trying again", refusal(error))
                time.sleep(3)

    return ask


def refusal(error: Any) -> str:
    """Return the sentence of a SuperLink that does not let a node in: of metavd's door, or what Flower's means."""
    said = compat.refusal(error)
    if said.startswith("metavd "):
        return said
    return "the SuperLink does not let this node in: it was killed a moment ago and still counts as online"


def main(arguments: Sequence[str]) -> None:
    """Run flower-supernode with these arguments and an executor beside it; what it writes is its user's alone."""
    os.umask(0o077)
    beside(f"127.0.0.1:{value_of(arguments, '--port', compat.NODE_PORT)}")
    poll = float(os.environ.get(POLL, "1"))
    _to_the_end(lambda: compat.run_supernode(list(arguments), poll=poll, retries=patient, activated=insisting))


if __name__ == "__main__":
    if sys.argv[1] == "--execute":
        execute(sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
    else:
        main(sys.argv[1:])
