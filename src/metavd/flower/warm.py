"""Tasks that start at once, and nodes that run no code but metavd's.

Flower starts a Python process for every message, which imports torch before it can train: seconds a message. Here an
executor imports everything once and forks for each task. A forked client runs the ClientApp of this package, whatever
app the message belongs to: code that comes over the network is neither unpacked nor run. Polling is as quick as the
operator wants; Flower's own intervals (3 s for new messages, 1 s for tasks, 0.5 s for answers) add up to seconds a
round.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

POLL = "METAVD_POLL"
"""Environment variable: seconds between two looks for messages."""
_INTERVAL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
_HEARTBEAT = 10
"""Seconds, Flower's least; a SuperLink takes a node that is silent for two of them as gone, and not before."""
_RETRY = 5
"""Seconds, at most, between two tries to reach the SuperLink."""
_PATIENCE = 60.0
"""Seconds that a node tries to be let in."""
_LOG = logging.getLogger("flwr")


class ForkExecutor:
    """Runs each task in a fork of this process."""

    def get_eligible_capacity(self, supported_task_types: set[Any], **_: Any) -> tuple[set[Any], set[str]]:
        """Take any task: a SuperNode gives one at a time."""
        return supported_task_types, set()

    def wait_for_capacity(self, *_: Any, **__: Any) -> None:
        """Never wait."""

    def launch(self, spec: Any) -> Any:
        """Fork, and let the child do what the task says."""
        from flwr.supercore.constant import TaskType  # noqa: PLC0415
        from flwr.supercore.superexec.executor import LaunchResult  # noqa: PLC0415

        self.reconcile()
        parent = os.getpid()
        if os.fork() == 0:
            _ending(_serve if spec.task_type == TaskType.SERVER_APP else _answer, spec, parent)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Let go of children that have finished."""
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    def close(self) -> None:
        """Nothing is held."""


def _ending(task: Callable[..., None], spec: Any, parent: int) -> None:
    """Do a task, and end the process whatever happens."""
    from flwr.supercore.tls import validate_and_resolve_root_certificates  # noqa: PLC0415

    status = 1
    try:
        task(
            runtime_api_address=spec.runtime_api_address,
            token=spec.token,
            insecure=spec.insecure,
            certificates=validate_and_resolve_root_certificates(spec.root_certificates_path, spec.insecure),
            parent_pid=parent,
        )
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _answer(**how: Any) -> None:
    """Answer one message of a node."""
    from flwr.supernode.runtime import run_clientapp as module  # noqa: PLC0415

    from .client import app  # noqa: PLC0415

    vars(module).update(install_from_fab=lambda *_, **__: None, get_load_client_app_fn=lambda **_: lambda *__: app)
    module.run_clientapp(**how)


def _serve(**how: Any) -> None:
    """Carry out one run of the SuperLink."""
    from queue import Queue  # noqa: PLC0415

    from flwr.supercore.logger import mirror_output_to_queue  # noqa: PLC0415
    from flwr.superlink.runtime import run_serverapp  # noqa: PLC0415

    lines: Queue[str | None] = Queue()
    mirror_output_to_queue(lines)
    run_serverapp(log_queue=lines, **how)


def execute(address: str, parent: int, config: str, authority: str) -> None:
    """Do the tasks that a SuperNode or SuperLink has, until its process is gone."""
    from flwr.supercore.superexec import run_superexec as module  # noqa: PLC0415

    from . import client, server  # noqa: F401, PLC0415 - what a child needs is imported before it is born

    if sys.platform == "linux":  # die with the parent, whatever kills it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if "partition-id" in config:  # a share of a dataset, most likely of the digits that come with scikit-learn
        import sklearn.datasets  # noqa: F401, PLC0415
    vars(module).update(get_executor=lambda *_, **__: ForkExecutor())
    module.run_superexec(
        runtime_api_address=address, insecure=not authority, root_certificates_path=authority or None, parent_pid=parent
    )


def beside(address: str, *, config: str = "", authority: str = "") -> None:
    """Keep an executor running as long as this process lives."""
    command = [sys.executable, "-m", "metavd.flower.warm", "--execute", address, str(os.getpid()), config, authority]
    environment = {**os.environ, _INTERVAL: os.environ.get(_INTERVAL, os.environ.get(POLL, "0.2"))}

    def keep() -> None:
        while True:
            subprocess.run(command, env=environment, check=False)
            time.sleep(1)

    threading.Thread(target=keep, daemon=True).start()


def value_of(arguments: Sequence[str], option: str, default: str = "") -> str:
    """Return what follows an option on a command line."""
    return arguments[arguments.index(option) + 1] if option in arguments else default


def patient() -> Any:
    """Return how a node tries again: for ever, also where the line was cut in the middle of a handshake.

    Flower takes every error that speaks of TLS for a wrong certificate and gives up, and it waits up to 20 s between
    two tries, which a server that is back again need not wait for.
    """
    from flwr.supercore.retry import exponential, make_simple_http_retry_invoker  # noqa: PLC0415

    invoker = make_simple_http_retry_invoker()
    invoker.wait_gen_factory = lambda: exponential(max_delay=_RETRY)
    gives_up = invoker.should_giveup or (lambda _: False)
    invoker.should_giveup = lambda error: not is_cut(error) and gives_up(error)
    return invoker


def is_cut(error: Exception) -> bool:
    """Return whether an error says that the line is gone, and nothing about who is at its end.

    >>> is_cut(OSError("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol (_ssl.c:1006)"))
    True
    >>> is_cut(OSError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"))
    False
    """
    said = str(error).lower()
    return any(text in said for text in ("eof occurred", "connection reset", "handshake operation timed out"))


def insisting(activate: Callable[..., Any], seconds: float = _PATIENCE) -> Callable[..., Any]:
    """Ask to be let in again and again: a node that was killed counts as online until its heartbeat has run out."""
    from httpx import HTTPStatusError  # noqa: PLC0415

    def ask(client: Any, request: Any) -> Any:
        ends = time.monotonic() + seconds
        while True:
            try:
                return activate(client, request)
            except HTTPStatusError:
                if time.monotonic() > ends:
                    raise
                _LOG.warning("the SuperLink does not let this node in: its key is not registered, or it was killed "
                             "a moment ago and still counts as online; trying again")  # fmt: skip
                time.sleep(3)

    return ask


def main(argv: Sequence[str]) -> None:
    """Run flower-supernode with these arguments and an executor beside it."""
    from flwr.supercore import heartbeat  # noqa: PLC0415
    from flwr.supernode import fleet_http_connection as connection  # noqa: PLC0415
    from flwr.supernode import start_client_internal as internal  # noqa: PLC0415
    from flwr.supernode.cli import flower_supernode  # noqa: PLC0415
    from flwr.supernode.fleet_http_client import FleetHttpClient  # noqa: PLC0415

    for module in (heartbeat, connection):
        vars(module).update(HEARTBEAT_DEFAULT_INTERVAL=_HEARTBEAT)
    FleetHttpClient.ActivateNode = insisting(FleetHttpClient.ActivateNode)  # type: ignore[method-assign]
    poll = float(os.environ.get(POLL, "1"))
    vars(internal).update(time=SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, poll))))
    vars(connection).update(make_simple_http_retry_invoker=patient)
    beside(f"127.0.0.1:{value_of(argv, '--port', '9094')}", config=value_of(argv, "--node-config"))
    sys.argv = ["flower-supernode", *argv, "--isolation", "process", "--host", "127.0.0.1"]
    status = 1
    try:
        flower_supernode()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except Exception:
        traceback.print_exc()
    finally:
        # Flower's threads would keep a node alive that has given up, and nobody would start it again.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "--execute":
        execute(sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
    else:
        main(sys.argv[1:])
