"""Processes end with the one that started them, and a node goes on trying where Flower's own gives up for ever."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from metavd.flower.warm import patient

FORK = """
starter = os.getpid()
if os.fork() == 0:
    {how}
    child()
"""
LAUNCH = """
warm.ForkExecutor(lambda *_: child()).launch(None)
"""
SERVER = """
from types import SimpleNamespace
from metavd.flower import server
if os.fork() == 0:
    server.run_config = lambda config: child()
    server.main(None, SimpleNamespace(run_config={}))
"""
PARENT = """
import os, time
from metavd.flower import parent, warm
def child():
    print(os.getpid(), flush=True)
    time.sleep(300)
{start}
time.sleep(300)
"""


def state(pid: int) -> str:
    """Return the letter of a process's state; Z is dead and not waited for, none is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are looked for in /proc")
@pytest.mark.parametrize(
    "start", [FORK.format(how="parent.die_with(starter)"), FORK.format(how="parent.watch_parent()"), LAUNCH, SERVER],
    ids=["die_with", "watch_parent", "launch", "server"],
)  # fmt: skip
def test_a_process_ends_with_its_parent(start: str) -> None:
    """Also where the parent is killed, and where nobody has waited for it yet; an app ends with its executor.

    The ServerApp sees to it itself, too: not every executor does, nor every system.
    """
    command = [sys.executable, "-c", PARENT.format(start=start)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert state(child) not in {"", "Z"}
        parent.kill()  # not waited for: the parent's id still exists
        ends = time.monotonic() + 30
        while state(child) not in {"", "Z"}:
            assert time.monotonic() < ends, "the child lives on"
            time.sleep(0.02)


ORPHAN = """
import os, time
from metavd.flower import parent
starter = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == starter:
    time.sleep(0.01)
parent.kill_with_parent = lambda: None
os.getppid, asked = lambda: starter, os.getppid
parent.die_with(starter)
os.getppid = asked
parent.watch_parent()
time.sleep(20)
print("alive")
"""


@pytest.mark.processes
def test_an_orphan_does_not_take_its_new_parent_for_the_one_that_started_it() -> None:
    """Where the system kills nobody, and the parent ends between the two calls."""
    found = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, check=False, timeout=600)
    assert found.stdout == ""
    assert "the process that started this one is gone" in found.stderr


@pytest.mark.processes
def test_a_process_whose_parent_is_gone_already_ends_at_once() -> None:
    """The system tells only of what happens after it was asked."""
    code = "import os; from metavd.flower import parent; parent.die_with(os.getppid() + 1); print('alive')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert (found.returncode, found.stdout) == (1, "")


@pytest.mark.parametrize(
    ("said", "gives_up"),
    [
        ("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol (_ssl.c:1006)", False),
        ("_ssl.c:989: The handshake operation timed out", False),
        ("[Errno 104] Connection reset by peer", False),
        ("[Errno 111] Connection refused", False),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate (_ssl.c:1006)", True),
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)", True),
    ],
)
def test_a_cut_line_is_no_wrong_certificate(said: str, gives_up: bool) -> None:
    """A SuperLink that dies in the middle of a handshake comes back; one with another certificate is another one."""
    assert patient().should_giveup(httpx.ConnectError(said)) is gives_up


@pytest.mark.parametrize(("status", "gives_up"), [(404, True), (503, False)])
def test_refusals_are_flowers_own(status: int, gives_up: bool) -> None:
    """What a SuperLink answers is judged by Flower as before."""
    request = httpx.Request("POST", "https://127.0.0.1/")
    error = httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request))
    assert patient().should_giveup(error) is gives_up
