"""The real thing on loopback: a SuperLink with TLS and node authentication, three SuperNodes, `flwr run`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import metavd
from metavd.core.accountant import Mechanism
from metavd.engine.checkpoint import load_checkpoint
from metavd.flower import security
from metavd.flower.local import LocalFederation, federation
from metavd.flower.registry import load
from metavd.flower.server import RELEASES
from metavd.runs.store import Store

from .support.processes import start_run

pytestmark = pytest.mark.processes
NAMES = ("anna", "bert", "cleo")
PATIENCE = 300
"""Seconds after which a run has failed, on the slowest machine that runs the tests."""
SMALL = "unseen=0 model=mlp width=8 local_epochs=1"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    """A SuperLink and three nodes. They look for messages so rarely because looking is most of what they do."""
    with federation(tmp_path_factory.mktemp("federation"), poll=0.25) as found:
        found.link()
        found.register(NAMES)
        for index, name in enumerate(NAMES):
            found.node(name, {"partition-id": index, "name": name})
        yield found
    assert found.left() == []


def config(folder: Path, method: str, text: str, rounds: int) -> dict[str, Any]:
    """A run that asks again where a busy machine makes a node late: all three are needed for the simulator's bits."""
    return {
        "method": method, "set": text, "rounds": rounds, "clients": 3, "data": "digits", "out": str(folder),
        "quorum": 3.0, "join-timeout": 240.0, "round-timeout": 240.0, "poll": 0.1,
    }  # fmt: skip


def until(holds: Callable[[], bool], local: LocalFederation, name: str) -> None:
    """Wait until something holds."""
    ends = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < ends, local.log(name)
        time.sleep(0.05)


def gone(pid: int) -> bool:
    """Return whether a process has ended; one that nobody has waited for is only a name."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def executors(local: LocalFederation) -> int:
    """Return how many processes do the SuperLink's tasks: one, and a fork of it for each ServerApp."""
    found = 0
    for pid in local.left():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            found += b"--execute" in words and os.fsencode(local.folder / "state.db") in words
    return found


def simulated(method: str, text: str, rounds: int) -> str:
    pairs = dict(word.split("=") for word in text.split())
    return metavd.run(method=method, clients=3, cohort=3, rounds=rounds, backend="loop", **pairs)["model_sha256"]


def test_a_deployed_federation_gives_the_simulators_bits(local, tmp_path):
    """Exactly equal: through processes, TLS, the sparse wire and whatever order answers came in.

    That it is so for what clients keep, too, the killed SuperLink below shows.
    """
    folder, method, rounds, text = tmp_path / "run", "maml+metavd+drop", 2, f"{SMALL} drop_from=1 threshold=0.1"
    ends, seen = time.monotonic() + PATIENCE, False

    def held() -> bool:
        """Whether weights of a message lie in the SuperLink's database, or in its log."""
        return any(b"logvar" in (local.folder / name).read_bytes() for name in ("state.db", "state.db-wal"))

    def hurry() -> None:
        nonlocal seen
        assert time.monotonic() < ends, local.log("run")
        seen = seen or held()

    local.run(config(folder, method, text, rounds), hurry)
    assert seen
    result = json.loads((folder / "result.json").read_text())
    assert result["model_sha256"] == simulated(method, text, rounds)
    assert 0 < result["sparsity"]["layer"] < 1
    assert [each.name for each in load(folder / "registry.json").members] == list(NAMES)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [each["cohort"] for each in lines] == [[0, 1, 2]] * rounds
    assert [path for path in folder.rglob("*") if path.stat().st_mode & 0o077] == []
    until(lambda: not held(), local, "superlink")


REFUSED = {
    "unregistered": "metavd does not let this node in: its key is not registered",
    "plaintext": "Failed to initialize the connection to the SuperLink",
    "wrong certificate": "CERTIFICATE_VERIFY_FAILED",
}


@pytest.fixture(scope="module")
def strangers(local: LocalFederation) -> dict[str, subprocess.Popen[bytes]]:
    """A node without a registered key, one without TLS, one that trusts another authority, started together."""
    other = local.folder / "another authority"
    security.certificates(other, ["127.0.0.1"])
    found = {}
    for who in REFUSED:
        own = LocalFederation(local.folder, secure=who != "plaintext", warm=False, port=local.port, mark=local.mark)
        extra = ["--root-certificates", str(other / security.CA)] if who == "wrong certificate" else []
        found[who] = own.node(who, {"partition-id": 0}, "--max-retries", "1", *extra)
    return found


@pytest.mark.parametrize("who", REFUSED)
def test_who_does_not_belong_is_refused(local, strangers, who):
    """None of them gets in, and each says why."""
    assert strangers[who].wait(PATIENCE) != 0
    assert REFUSED[who] in local.log(who)


def test_a_run_that_fails_says_so_in_a_sentence(local, tmp_path):
    """`metavd federate run` answers 1 with the ServerApp's own words, here of a folder that somebody else holds."""
    folder = tmp_path / "taken"
    with Store(folder).lock():
        process = start_run(local, "failed", config(folder, "fedavg", "unseen=0", rounds=1) | {"join-timeout": 1.0})
        assert process.wait(PATIENCE) == 1, local.log("failed")
    said = local.log("failed")
    assert f"another process ({os.getpid()}) is writing to {folder}; waiting at most 1 s until it ends" in said
    assert said.splitlines()[-1].startswith(f"metavd: another process ({os.getpid()}) is writing to {folder}; wait")
    assert "Traceback" not in said
    assert "Exit Code" not in said


def test_a_killed_superlink_and_a_node_that_was_away_cost_one_round(local, tmp_path):
    """With kill -9 in the middle: the same command goes on, clients keep numbers and private heads, the bits are equal.

    The ServerApp of the killed SuperLink ends with it, and the command that followed the run says that it failed.
    """
    folder = tmp_path / "killed"
    asked = config(folder, "fedper+metavd", SMALL, rounds=4)
    until(lambda: executors(local) == 1, local, "superlink")  # the ServerApps of other tests' runs have ended
    earlier = len(local.log("superlink"))
    following = start_run(local, "killed", asked)
    rounds = Store(folder).read_rounds
    until(lambda: len(rounds()) >= 2, local, "killed")
    server_app = int((folder / ".lock").read_text())
    local.stop("superlink", how=signal.SIGKILL)
    local.stop("cleo")
    until(lambda: gone(server_app), local, "killed")
    slowly = "Task stopped by user" in local.log("superlink")[earlier:]
    assert not slowly, "it ended with all that Flower does at an end"
    assert following.wait(PATIENCE) == 1, local.log("killed")
    assert "rounds are saved in" in local.log("killed").splitlines()[-1]
    assert 2 <= len(rounds()) < 4
    local.link()
    local.node("cleo", {"partition-id": 2, "name": "cleo"})
    assert start_run(local, "again", asked).wait(PATIENCE) == 0, local.log("again")
    assert "going on after round" in local.log("again")
    assert [each["round"] for each in rounds()] == [*range(1, 5)]
    members = load(folder / "registry.json").members
    assert [(each.number, each.name) for each in members] == [(0, "anna"), (1, "bert"), (2, "cleo")]
    assert Store(folder).read_result()["model_sha256"] == simulated("fedper+metavd", SMALL, rounds=4)


def released(folder: Path) -> int:
    """How many rounds the ledger of a run has counted so far."""
    path = folder / RELEASES
    return sum(count for _, count in json.loads(path.read_text())["spent"]) if path.exists() else 0


def test_a_killed_superlink_forgets_no_release_and_the_budget_ends_the_run(local, tmp_path):
    """The budget is that of two rounds of six. With kill -9 after a release, what was released stays counted.

    Every round is evaluated, so that there is time between a release and its checkpoint; whether the kill falls
    between them is chance, and two releases are all that there may be either way.
    """
    clients = {"clients": 3, "cohort": 3, "rounds": 6, "delta": 1e-5, "clip": 1.0, "epsilon": 0.0}
    two = Mechanism(noise=2.0, **clients).spent({2.0: 2})
    folder = tmp_path / "budget"
    asked = config(folder, "fedavg+dp", f"{SMALL} noise=2 epsilon={1.01 * two:.3f}", rounds=6) | {"eval-every": 1}
    following = start_run(local, "budget", asked)
    until(lambda: released(folder) >= 1, local, "budget")
    server_app = int((folder / ".lock").read_text())
    local.stop("superlink", how=signal.SIGKILL)
    until(lambda: gone(server_app), local, "budget")
    assert following.wait(PATIENCE) == 1, local.log("budget")
    before = released(folder)
    local.link()
    assert start_run(local, "budget again", asked).wait(PATIENCE) == 0, local.log("budget again")
    said, result = local.log("budget again"), Store(folder).read_result()
    done = int((re.search(r"going on after round (\d+)", said) or [0, 0])[1])
    assert "the privacy budget is spent: 2 rounds took" in said
    assert released(folder) == result["privacy"]["rounds"] == 2
    assert result["trained_rounds"] == 2 - (before - done)
    assert result["privacy"]["epsilon"] == pytest.approx(two)
    assert result["privacy"]["noise_from"] == "server"


def test_sites_add_the_noise_in_processes_of_their_own(local, tmp_path):
    """Answers are 1e-6 long before it: all that moves the model is the noise of three sites, z clip / 3 in each weight.

    So nobody else adds any, and no answer came without.
    """
    folder, text = tmp_path / "sites", f"{SMALL} answer_clip=1e-6 noise_from=sites"
    local.run(config(folder, "fedavg+dp", f"{text} noise=1000", rounds=1))
    pairs = dict(word.split("=") for word in text.split())
    metavd.run(method="fedavg+dp", clients=3, cohort=3, rounds=1, noise=0, out=tmp_path / "still", **pairs)
    (state, _), (still, _) = (load_checkpoint(Store(each).checkpoint) for each in (folder, tmp_path / "still"))
    noise = torch.cat([(value - still.params[name]).flatten() for name, value in state.params.items()]).double()
    assert noise.square().mean().sqrt() == pytest.approx(1000 * 1e-6 / 3, rel=0.15)
    told = Store(folder).read_result()["privacy"]
    assert told["noise_from"] == "sites"
    assert told["epsilon_server"] > told["epsilon"]
    assert json.loads((folder / RELEASES).read_text()) == {"spent": [[1000.0, 1]], "asked": 1}
