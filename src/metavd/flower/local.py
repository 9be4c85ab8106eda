"""SuperLink, SuperNodes and runs as processes of this machine: started, watched, and stopped whatever happens.

All of them listen on 127.0.0.1, write their output to files, have a FLWR_HOME of their own, and carry a mark in their
environment by which they, and whatever they have started, are found again.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import compat, security
from .config import FederationError, write_app
from .follow import follow, pairs
from .warm import POLL

HOST = "127.0.0.1"
NAME = "here"
"""What Flower's config calls the SuperLink."""
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Flower and Ray report to nobody, look for no updates and install nothing."""
_MARK = "METAVD_LOCAL"
_PORTS = (15_000, 32_000)
_GIVEN: set[int] = set()
_STARTING = 300.0
"""Seconds until a SuperLink must listen."""


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now.

    They lie below those that the system gives to outgoing connections, so that none of these takes one before a server
    listens on it, or while a server is started again. None is returned twice: who got one may not listen yet.
    """
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            port = random.SystemRandom().randrange(*_PORTS)
            with contextlib.suppress(OSError):
                stack.enter_context(socket.socket()).bind((HOST, port))
                if port not in _GIVEN:
                    found.append(port)
                    _GIVEN.add(port)
        return found


def connection(address: str, authority: Path | None) -> str:
    """Return the lines of Flower's config.toml that name a SuperLink; without an authority it is insecure."""
    how = "insecure = true" if authority is None else f'root-certificates = "{authority}"'
    return f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "{address}"\n{how}\n'


@dataclass
class LocalFederation:
    """A federation on this machine, in a folder that holds everything about it."""

    folder: Path
    secure: bool = True
    poll: float = 0.2
    warm: bool = True
    """Nodes by `metavd.flower.warm`; False: Flower's own."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    port: int = 0

    @property
    def authority(self) -> Path | None:
        """The certificate that nodes trust."""
        return self.folder / security.CA if self.secure else None

    @property
    def environment(self) -> dict[str, str]:
        """What every process is started with."""
        return {
            **os.environ,
            **QUIET,
            "FLWR_HOME": str(self.folder / "flwr"),
            compat.TASK_INTERVAL: str(self.poll),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            POLL: str(self.poll),
            _MARK: self.mark,
        }

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a process whose output goes to NAME.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                list(command), stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self.environment,
                cwd=self.folder, start_new_session=True,
            )  # fmt: skip
        self.processes[name] = process
        return process

    def link(self) -> None:
        """Start the SuperLink, at the same port and with the same state as before where there was one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "flwr").mkdir(exist_ok=True)
        self.port = self.port or free_ports(1)[0]
        config = connection(f"{HOST}:{self.port}", self.authority)
        (self.folder / "flwr" / "config.toml").write_text(config)
        command = [sys.executable, "-m", "metavd.flower.link", "--host", HOST, "--port", str(self.port)]
        command += ["--database", str(self.folder / "state.db")]
        if self.secure:
            if not (self.folder / security.SERVER).exists():
                security.certificates(self.folder, [HOST, "localhost"])
            command += security.link_arguments(self.folder)
        else:
            command.append("--insecure")
        process = self.start("superlink", command)
        ends = time.monotonic() + _STARTING
        while not self.answers():
            if process.poll() is not None or time.monotonic() > ends:
                raise FederationError(f"the SuperLink did not start; {self.folder / 'superlink.log'} says why")
            time.sleep(0.1)

    def answers(self) -> bool:
        """Return whether the SuperLink speaks."""
        try:
            with socket.create_connection((HOST, self.port), timeout=1) as plain:
                if self.authority is None:
                    return True
                with ssl.create_default_context(cafile=str(self.authority)).wrap_socket(plain, server_hostname=HOST):
                    return True
        except OSError:
            return False

    def key(self, name: str) -> Path:
        """Return a node's private key; a new one is made and registered."""
        path = self.folder / "keys" / name
        if not path.exists():
            security.node_key(path)
        return path

    def register(self, names: Sequence[str]) -> None:
        """Register the keys of nodes, as `flwr supernode register` does."""
        keys = {name: self.key(name).with_name(f"{name}.pub") for name in names}
        compat.register_nodes(f"{HOST}:{self.port}", self.authority, keys)

    def node(self, name: str, config: Mapping[str, object], *extra: str) -> subprocess.Popen[bytes]:
        """Start a SuperNode; `extra` are more arguments, which come last."""
        own = [sys.executable, "-m", "metavd.flower.warm"]
        command = own if self.warm else [str(Path(sys.executable).parent / "flower-supernode")]
        command = [*command, "--superlink", f"{HOST}:{self.port}"]
        command += ["--port", str(free_ports(1)[0]), "--node-config", pairs(config)]
        if self.secure:
            command += ["--root-certificates", str(self.authority), "--auth-supernode-private-key", str(self.key(name))]
        else:
            command.append("--insecure")
        return self.start(name, [*command, *extra])

    def app(self) -> Path:
        """Return the folder of the Flower app."""
        return write_app(self.folder)

    def run(self, config: Mapping[str, object], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Carry out a run to its end, with its log in run.log; raise FailedRunError unless it is finished."""
        with (self.folder / "run.log").open("a") as log:
            follow(
                self.app(), config, superlink=NAME, environment=self.environment, show=log.write, meanwhile=meanwhile
            )

    def log(self, name: str) -> str:
        """Return what a process has said so far."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def stop(self, *names: str, patience: float = 5.0, how: signal.Signals = signal.SIGTERM) -> None:
        """Stop processes by name, or all of them and everything that they have started."""
        chosen = {name: each for name, each in self.processes.items() if not names or name in names}
        for process in chosen.values():
            if process.poll() is None:
                process.send_signal(how)
        ends = time.monotonic() + patience
        for name, process in chosen.items():
            try:
                process.wait(max(0.1, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self.processes.pop(name)
        ends = time.monotonic() + patience
        while not names and (left := self.left()) and time.monotonic() < ends:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def left(self) -> list[int]:
        """Return the processes that carry this federation's mark."""
        wanted = f"{_MARK}={self.mark}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if wanted in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return [pid for pid in found if pid != os.getpid()]


@contextlib.contextmanager
def federation(folder: Path, **how: object) -> Iterator[LocalFederation]:
    """Give a federation that is stopped at the end, whatever the end is."""
    local = LocalFederation(folder, **how)  # type: ignore[arg-type]
    try:
        yield local
    finally:
        local.stop()
