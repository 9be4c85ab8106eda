"""The real thing on loopback: a SuperLink with TLS and node authentication, three SuperNodes, `flwr run`."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import metavd
from metavd.flower import security
from metavd.flower.local import Local, federation
from metavd.flower.registry import load

NAMES = ("anna", "bert", "cleo")
PATIENCE = 180
"""Seconds after which a run has failed, on the slowest machine that runs the tests."""


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    with federation(tmp_path_factory.mktemp("federation"), poll=0.2) as found:
        found.link()
        found.register(NAMES)
        for index, name in enumerate(NAMES):
            found.node(name, {"partition-id": index, "name": name})
        yield found
    assert found.left() == []


def start(local: Local, folder: Path, method: str, text: str, rounds: int):
    config = {"method": method, "set": text, "rounds": rounds, "clients": 3, "data": "digits", "out": str(folder)}
    return local.run(folder.name, config | {"join-timeout": 90.0, "round-timeout": 60.0})


def simulated(method: str, text: str, rounds: int) -> str:
    pairs = dict(word.split("=") for word in text.split())
    return metavd.run(method=method, clients=3, cohort=3, rounds=rounds, backend="loop", **pairs)["model_sha256"]


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("fedavg", "unseen=0"),
        ("reptile+metavd", "unseen=0"),
        ("maml+metavd+drop", "unseen=0 drop_from=1 threshold=0.1"),
    ],
)
def test_a_deployed_federation_gives_the_simulators_bits(local, tmp_path, method, text):
    """Exactly equal: through processes, TLS, the sparse wire and whatever order answers came in."""
    folder = tmp_path / "run"
    process = start(local, folder, method, text, rounds=2)
    assert process.wait(PATIENCE) == 0, local.log("run")
    result = json.loads((folder / "result.json").read_text())
    assert result["model_sha256"] == simulated(method, text, rounds=2)
    assert [each.name for each in load(folder / "registry.json").members] == list(NAMES)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [each["cohort"] for each in lines] == [[0, 1, 2]] * 2


@pytest.mark.parametrize(
    ("who", "sentence"),
    [
        ("unregistered", "Failed to activate SuperNode"),
        ("plaintext", "Failed to initialize the connection to the SuperLink"),
        ("wrong certificate", "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_who_does_not_belong_is_refused(local, tmp_path, who, sentence):
    """A node without a registered key, one without TLS, one that trusts another authority: none gets in."""
    extra = ["--max-retries", "1"]
    if who == "wrong certificate":
        security.certificates(tmp_path, ["127.0.0.1"])
        extra += ["--root-certificates", str(tmp_path / security.CA)]
    link = Local(local.folder, secure=who != "plaintext", warm=False, port=local.port, mark=local.mark)
    process = link.node(who, {"partition-id": 0}, *extra)
    assert process.wait(60) != 0
    assert sentence in local.log(who)


def test_a_killed_superlink_and_a_node_that_was_away_cost_one_round(local, tmp_path):
    """With kill -9 in the middle: the same command goes on, the client keeps its number, the bits are the same."""
    folder, text = tmp_path / "killed", "unseen=0 model=mlp width=8 local_epochs=1"
    start(local, folder, "reptile+metavd", text, rounds=4)
    ends = time.monotonic() + PATIENCE
    while not (folder / "rounds.jsonl").exists() or len((folder / "rounds.jsonl").read_text().splitlines()) < 2:
        assert time.monotonic() < ends, local.log("killed")
        time.sleep(0.05)
    local.stop("cleo")
    local.stop("superlink", how=signal.SIGKILL)
    local.stop("killed")
    done = len((folder / "rounds.jsonl").read_text().splitlines())
    assert done < 4
    local.link()
    local.node("cleo", {"partition-id": 2, "name": "cleo"})
    process = start(local, folder, "reptile+metavd", text, rounds=4)
    assert process.wait(PATIENCE) == 0, local.log("killed")
    result = json.loads((folder / "result.json").read_text())
    assert "going on after round" in local.log("killed")
    assert [each["round"] for each in map(json.loads, (folder / "rounds.jsonl").read_text().splitlines())] == [
        *range(1, 5)
    ]
    members = load(folder / "registry.json").members
    assert [(each.number, each.name) for each in members] == [(0, "anna"), (1, "bert"), (2, "cleo")]
    assert result["model_sha256"] == simulated("reptile+metavd", text, rounds=4)
