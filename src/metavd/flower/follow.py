"""A run that is started through `flwr run` and followed to its end, with the true outcome.

`flwr run --stream` answers 0 also for a run that failed. A run is finished when its folder holds a result; of any
other the SuperLink is asked how it ended.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

from ..runs.store import Store
from . import compat
from .config import FailedRunError, FederationError

_LOOK = 0.2
"""Seconds between two looks at how a run goes."""
_ASK = 2.0
"""Seconds between two questions to the SuperLink, where the log broke off and the run did not end."""
_CALL = 300.0
"""Seconds that a command of Flower's may take."""


def pairs(values: Mapping[str, object]) -> str:
    """Write pairs as Flower's command line reads them.

    >>> pairs({"data": "npz:a b.npz", "partition-id": 3, "train": False})
    'data="npz:a b.npz" partition-id=3 train=false'
    """
    return " ".join(f"{key}={_toml(value)}" for key, value in values.items())


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return str(value)
    if '"' in value:
        raise FederationError(f"{value!r} has a quotation mark, which Flower's command line cannot take; rename it")
    return f'"{value}"'


def flwr() -> str:
    """Return the path of Flower's command line."""
    return str(Path(sys.executable).parent / "flwr")


def call(environment: Mapping[str, str], *arguments: str) -> str:
    """Call Flower's command line and return what it prints."""
    found = subprocess.run(
        [flwr(), *arguments], env=dict(environment), capture_output=True, text=True, timeout=_CALL, check=False
    )
    if found.returncode:
        raise FederationError(f"flwr {arguments[0]} failed: {compat.plain(found.stderr or found.stdout)}")
    return found.stdout


def runs(environment: Mapping[str, str], superlink: str, *options: str) -> list[compat.Listed]:
    """Return what the SuperLink knows of its runs, the newest first, as `flwr list` tells it."""
    said = call(environment, "list", superlink, *options, "--format", "json")
    try:
        return compat.listed_runs(said)
    except ValueError as error:
        raise FederationError(f"flwr list failed: {error}") from None


def follow(
    app: Path,
    config: Mapping[str, object],
    *,
    superlink: str,
    environment: Mapping[str, str],
    show: Callable[[str], object] = lambda _: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Start a run and wait until it ends; unless it is finished, raise FailedRunError with its own sentence.

    `config` overrides the app's and has an absolute folder `out`; `show` gets the lines of the log, and `meanwhile`
    is called several times a second.
    """
    store = Store(Path(str(config["out"])))
    was_finished = store.is_finished()
    command = [flwr(), "run", str(app), superlink, "--stream", "--run-config", pairs(config)]
    number, said = "", ""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
        errors="replace", env={**environment, "PYTHONUNBUFFERED": "1"}, start_new_session=True,
    )  # fmt: skip
    lines: Queue[str] = Queue()
    reader = Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    try:
        while reader.is_alive() or not lines.empty():
            meanwhile()
            try:
                line = lines.get(timeout=_LOOK)
            except Empty:
                continue
            if not number:
                said += line
                number = compat.started_run(line)
            show(line)
        if not number:
            raise FailedRunError(f"the run did not start: {compat.plain(said)}")
        if was_finished or not store.is_finished():
            _judge(store, number, superlink, environment, meanwhile)
    except KeyboardInterrupt:
        if number:
            show(f"run {number} goes on without this command; to end it: flwr stop {number} {superlink}\n")
        raise
    finally:
        process.kill()
        process.wait()


def _read(process: subprocess.Popen[str], lines: Queue[str]) -> None:
    for line in process.stdout or ():
        lines.put(line)


def _judge(
    store: Store, number: str, superlink: str, environment: Mapping[str, str], meanwhile: Callable[[], None]
) -> None:
    """Raise FailedRunError unless the SuperLink says that the run has come to its end, and the result is there."""
    done = len(store.read_rounds())
    saved = f"; {done} rounds are saved in {store.folder}, and the same command goes on after them" if done else ""
    while True:
        try:
            (run,) = runs(environment, superlink, "--run-id", number)
        except (FederationError, subprocess.TimeoutExpired) as error:
            raise FailedRunError(f"the SuperLink does not answer any more ({error}){saved}") from None
        if run.ended:
            break
        meanwhile()
        time.sleep(_ASK)
    if not run.completed:
        raise FailedRunError(f"{run.why}{saved}")
    if not store.is_finished():
        raise FailedRunError(f"the run has ended, but {store.folder} has no result; is out on another machine?")
