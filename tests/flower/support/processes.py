"""Federations of real SuperLinks, SuperNodes and ServerApps, which are killed, frozen or cut off."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from metavd.engine.checkpoint import load_checkpoint
from metavd.flower.local import NAME, LocalFederation, federation
from metavd.runs.store import Store

from .rehearsal import DEAD, STARTS, Outcome, Trial, small_disk, wanted
from .stage import METHODS, Fault
from .waits import silent

NODES = 3
LONG = 600.0
"""Seconds that a start of a run of real processes may take."""
RESTART = 5.0
"""Seconds that a supervisor lets pass before it starts a process again."""
Strike = Callable[["Real"], Callable[[], None]]
"""(federation) -> what is done before the run is started again, or goes on."""


def start_run(local: LocalFederation, name: str, config: Mapping[str, object]) -> subprocess.Popen[bytes]:
    """Start `metavd federate run`, which follows a run to its end, as a process whose output goes to NAME.log."""
    words = [f"{key}={value}" for key, value in config.items()]
    command = [sys.executable, "-m", "metavd", "federate", "run", str(local.app()), "--superlink", NAME, *words]
    return local.start(name, command)


@dataclass
class Real:
    """SuperLink and SuperNodes as processes of this machine."""

    local: LocalFederation
    out: Path
    draw: random.Random
    proxies: dict[str, Proxy] = field(default_factory=dict)
    kept: dict[str, float] = field(default_factory=dict)
    """Nodes that a supervisor starts again when they end, and when it last did so."""

    def open(self) -> None:
        """Start everything."""
        self.local.link()
        names = [f"node{i}" for i in range(NODES)]
        self.local.register(names)
        for name in names:
            self.proxies[name] = Proxy(self.local.port)
            self.node(name)

    def node(self, name: str) -> None:
        """Start a node, which reaches the SuperLink through its own line."""
        self.kept[name] = time.monotonic()
        number = int(name.removeprefix("node"))
        config = {"partition-id": number, "num-partitions": NODES}
        self.local.node(name, config, "--superlink", f"127.0.0.1:{self.proxies[name].port}")

    def supervise(self) -> None:
        """Start nodes again that have ended, some seconds later, as systemd would."""
        for name, started in list(self.kept.items()):
            process = self.local.processes.get(name)
            if (process is None or process.poll() is not None) and time.monotonic() > started + RESTART:
                self.node(name)

    def signal(self, name: str, which: signal.Signals) -> None:
        """Send a signal to a process and all that belong to it."""
        # A process that is to be woken later may be gone by then, with its stage.
        with contextlib.suppress(ProcessLookupError, KeyError):
            os.killpg(self.local.processes[name].pid, which)

    def server_app(self) -> int | None:
        """Return the process of the ServerApp: the one that holds the run's folder."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.out / ".lock").read_text())
        return None


class Proxy:
    """A line to the SuperLink that can be cut."""

    def __init__(self, target: int) -> None:
        self.target, self.whole = target, True
        self.pairs: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            try:
                if not self.whole:
                    raise OSError
                far = socket.create_connection(("127.0.0.1", self.target), timeout=5)
                far.settimeout(None)
            except OSError:
                near.close()
                continue
            self.pairs += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        for each in (one, other):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def cut(self, *, whole: bool = False) -> None:
        """Cut the line, or mend it."""
        self.whole = whole
        for each in self.pairs if not whole else ():
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self.pairs = []


def _victim(real: Real) -> str:
    return f"node{real.draw.randrange(NODES)}"


def node_dies(*, back: bool) -> Strike:
    """Kill a SuperNode; its supervisor starts it again, or nobody does."""

    def strike(real: Real) -> Callable[[], None]:
        name = _victim(real)
        real.kept[name] = time.monotonic()
        if not back:
            real.kept.pop(name)
        real.signal(name, signal.SIGKILL)
        return lambda: None

    return strike


def node_freezes(seconds: float) -> Strike:
    """Stop a SuperNode for a while: it is slow, then late."""

    def strike(real: Real) -> Callable[[], None]:
        name = _victim(real)
        real.signal(name, signal.SIGSTOP)
        threading.Timer(seconds, real.signal, [name, signal.SIGCONT]).start()
        return lambda: None

    return strike


def line_cut(seconds: float) -> Strike:
    """Cut a SuperNode off for a while."""

    def strike(real: Real) -> Callable[[], None]:
        line = real.proxies[_victim(real)]
        line.cut()
        threading.Timer(seconds, line.cut, kwargs={"whole": True}).start()
        return lambda: None

    return strike


def link_dies(real: Real) -> Callable[[], None]:
    """Kill the SuperLink, and start it again with the same state."""
    real.local.processes["superlink"].kill()
    real.local.processes.pop("superlink").wait()
    time.sleep(real.draw.uniform(0, 3))
    real.local.link()
    return lambda: None


def server_dies(real: Real) -> Callable[[], None]:
    """Kill the ServerApp."""
    pid = real.server_app()
    if pid is None or pid not in real.local.left():
        raise RuntimeError(f"no process of this federation holds {real.out}")
    os.kill(pid, signal.SIGKILL)
    return lambda: None


def power_fails(real: Real) -> Callable[[], None]:
    """Kill everything at once, and start it again."""
    for pid in real.local.left():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in real.local.processes.values():
        process.wait()
    real.local.processes.clear()

    real.kept = dict.fromkeys(real.kept, time.monotonic())
    return real.local.link


def disk_fills(real: Real) -> Callable[[], None]:
    """Fill the server's disk."""
    filler = real.out.parent / "ballast"
    room = os.statvfs(real.out)
    filler.write_bytes(bytes(room.f_bavail * room.f_frsize))
    return lambda: filler.unlink(missing_ok=True)


PROCESSES: list[tuple[str, str, Strike]] = [
    ("client killed", "SuperNode, for good", node_dies(back=False)),
    ("SuperLink killed", "and started again", link_dies),
    ("ServerApp killed", "SIGKILL", server_dies),
    ("network cut", "a node, for 12 s", line_cut(12.0)),
    ("client killed", "SuperNode, started again", node_dies(back=True)),
    ("slow client", "SuperNode frozen for 8 s", node_freezes(8.0)),
    ("disk full", "the server's", disk_fills),
    ("power failure", "all processes at once", power_fails),
    ("slow client", "SuperNode frozen for 40 s", node_freezes(40.0)),
    ("network cut", "a node, for 45 s", line_cut(45.0)),
]


def perform(kind: str, name: str, strike: Strike, seed: int) -> Outcome:
    """Run a federation of real processes and let a fault strike it after its first round."""
    draw = random.Random(f"{seed} {kind} {name}")
    trial = Trial(Fault(kind, f"{name} (processes)", silent), draw.choice(list(METHODS)), 2, -1, seed)
    rounds, complaints, struck, hang, lost, starts = 4, [], False, False, 0, 0
    began, repair = time.monotonic(), lambda: None
    with tempfile.TemporaryDirectory(prefix="metavd-fault-") as scratch, contextlib.ExitStack() as stack:
        disk = Path(scratch) / "disk"
        disk.mkdir()
        if kind == "disk full":
            stack.enter_context(small_disk(disk))
        store = Store(disk / "out")
        real = Real(stack.enter_context(federation(Path(scratch) / "federation")), store.folder, draw)
        real.open()
        config = trial.config(store.folder) | {
            "rounds": rounds, "clients": NODES, "poll": 0.1, "round-timeout": 20.0, "join-timeout": 60.0,
        }  # fmt: skip
        while not store.is_finished() and not hang and starts < STARTS:
            starts += 1
            repair()
            repair = lambda: None  # noqa: E731
            run = start_run(real.local, f"run{starts}", config)
            ends = time.monotonic() + LONG
            while run.poll() is None and not store.is_finished():
                if not struck and len(store.read_rounds()) >= 1:
                    time.sleep(draw.uniform(0, 4))
                    repair, struck = strike(real), True
                real.supervise()
                if time.monotonic() > ends:
                    hang = True
                    break
                time.sleep(0.1)
            state = load_checkpoint(store.checkpoint)
            done = int(state[0].round) if state else 0
            lost += max(0, len(store.read_rounds()) - 1 - done)
            try:
                status = run.wait(0 if hang else LONG)
            except subprocess.TimeoutExpired:
                hang = True
                run.kill()
                status = run.wait()
            if status != (0 if store.is_finished() else 1) and not hang:
                complaints.append(f"start {starts} answered {status}: {real.local.log(f'run{starts}')[-400:]}")
        if not store.is_finished():
            complaints.append(f"{DEAD}: no end in {starts} starts: {real.local.log(f'run{starts}')[-400:]}")
        lines = store.read_rounds()
        if [line["round"] for line in lines] != list(range(1, rounds + 1)):
            complaints.append(f"rounds on record: {[line['round'] for line in lines]}")
        found = store.read_result()["model_sha256"] if store.is_finished() else "no result"
        there = tuple(tuple(line["cohort"]) for line in lines)
        # Which round a signal hits is chance; who may be missing, and that one node at most is, is not.
        if len({client for cohort in there for client in set(range(NODES)) - set(cohort)}) > 1:
            complaints.append(f"cohorts on record: {there}")
        wrong = found != wanted(trial.method, seed, there, NODES)
    return Outcome(trial, struck, hang, wrong, lost, tuple(complaints), starts, time.monotonic() - began)
