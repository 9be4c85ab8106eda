"""What a federation remembers of its clients, how long it waits, and whose checkpoint it takes."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Error, Message, MessageType

import metavd
from metavd.cli import main
from metavd.data.source import digits
from metavd.errors import UserError
from metavd.flower import collect
from metavd.flower.config import FederationError
from metavd.flower.message import cleaned
from metavd.flower.registry import load_offences
from metavd.runs.store import Store

from .support.answers import claims
from .support.grid import SMALL, FakeGrid, Node, shares
from .test_lies import LIAR, Liar, lines


def deaf(reply: Message, node: int) -> Message | None:
    """Nothing arrives of client 1's training."""
    return None if node == 993 and reply.metadata.message_type == MessageType.TRAIN else reply


def test_a_silent_client_is_asked_no_more_after_some_rounds(federate, tmp_path):
    grid = FakeGrid(shares(4), tamper=deaf)
    config = {"round-timeout": 1, "max-silences": 2}
    federate(grid, method="fedavg", clients=4, rounds=4, **config)
    found = lines(tmp_path / "run")
    assert [line["lost"] for line in found] == [[1], [1], [], []]
    assert all(line["seconds_waiting"] > 0.9 for line in found[:2]), "as long as the timeout of a round"


def test_the_wait_adapts_to_the_answers_own_times(federate, tmp_path, monkeypatch):
    """With a quorum, nobody is waited for many times as long as the slowest answer took."""
    monkeypatch.setattr(collect, "_LEAST", 0.2)
    began = time.monotonic()
    federate(FakeGrid(shares(4), tamper=deaf), method="fedavg", clients=4, rounds=2, **{"round-timeout": 600})
    assert time.monotonic() - began < 400
    found = lines(tmp_path / "run")
    assert [line["lost"] for line in found] == [[1], [1]]
    assert all(line["seconds_waiting"] < 200 for line in found)


def test_offences_survive_a_failed_round_and_are_listed(federate, tmp_path, capsys):
    """Three refusals in a round that never had its quorum: the next start does not ask that client."""
    lie = claims("metrics", rows=-1)
    with pytest.raises(FederationError, match="round 1 had 3 good answers"):
        federate(Liar(4, lie), method="fedavg", clients=4, quorum=4)
    assert load_offences(tmp_path / "run") == {LIAR: 3}
    grid = FakeGrid(shares(4))
    federate(grid, method="fedavg", clients=4, quorum=3)
    assert all(line["cohort"] == [0, 1, 2] for line in lines(tmp_path / "run"))
    main(["federate", "nodes", str(tmp_path / "run")])
    row = capsys.readouterr().out.splitlines()[1 + LIAR].split()
    assert row[:3] == [str(LIAR), "partition", str(LIAR)]
    assert row[-2:] == ["none", "3"]


def test_a_checkpoint_of_another_run_is_refused(federate, tmp_path):
    """Seed 42's checkpoint in seed 41's folder, in a federation and in the simulator: one sentence, and no result."""

    class Crash(BaseException): ...

    def crash(message: Message) -> None:
        if message.metadata.message_type == MessageType.TRAIN and message.metadata.group_id == "2":
            raise Crash

    for seed in (41, 42):
        with pytest.raises(Crash):
            federate(FakeGrid(shares(3), before=crash), method="fedavg", seed=seed, out=str(tmp_path / str(seed)))
    moved(tmp_path / "42", tmp_path / "41")
    with pytest.raises(UserError, match=r"another run's \(seed 42, and this run has 41\)"):
        federate(FakeGrid(shares(3)), method="fedavg", seed=41, out=str(tmp_path / "41"))
    assert not Store(tmp_path / "41").is_finished()
    settings = dict(word.split("=") for word in SMALL.split()) | {"clients": 3, "rounds": 2}
    for seed in (1, 2):
        metavd.run(method="fedavg", seed=seed, out=tmp_path / f"s{seed}", **settings)
        (tmp_path / f"s{seed}" / "result.json").unlink()
    moved(tmp_path / "s2", tmp_path / "s1")
    with pytest.raises(UserError, match=r"another run's \(seed 2, and this run has 1\)"):
        metavd.run(method="fedavg", seed=1, out=tmp_path / "s1", resume=True, **settings)


def moved(one: Path, other: Path) -> None:
    """Put a run's checkpoints into another's folder."""
    shutil.rmtree(other / "checkpoint")
    shutil.copytree(one / "checkpoint", other / "checkpoint")


def test_rows_that_changed_between_two_turns_are_noticed(federate, tmp_path, caplog):
    """By the site, from a fingerprint that stays there; the server hears that they did, and nothing of what."""
    source = digits()
    nodes = {}
    for i in range(2):
        np.savez(tmp_path / f"{i}.npz", images=source.x[i::4, 0], labels=source.y[i::4])
        config = {"data": f"npz:{tmp_path / f'{i}.npz'}", "name": f"site {i}", "state": str(tmp_path / "state")}
        nodes[50 - i] = Node(config, key=b"ab"[i : i + 1])

    def change(message: Message) -> None:
        if message.metadata.message_type == MessageType.TRAIN and message.metadata.group_id == "2":
            np.savez(tmp_path / "1.npz", images=255 - source.x[1::4, 0], labels=source.y[1::4])

    settings = {"data": "", "clients": 2, "rounds": 3, "set": "model=mlp width=8"}
    federate(FakeGrid(nodes, before=change), method="fedavg", **settings)
    said = [each.getMessage() for each in caplog.records]
    assert said.count("client 1: the rows at this site are others than in its last turn") == 1
    assert not any("client 0: the rows" in each for each in said)
    assert [m.content["metrics"].get("changed") for m in nodes[49].sent[1:4]] == [None, 1, None]
    prints = [path.read_text() for path in (tmp_path / "state").rglob("rows.sha256")]
    assert len(prints) == 2
    assert not any(mark in str(vars(message)) for mark in prints for message in nodes[49].sent)


def test_text_from_clients_is_cut_and_cleaned(federate, tmp_path, caplog):
    """Neither a second line, nor a control code, nor nine megabytes reach a log or a file."""
    evil = "north\n2026-01-01 INFO all is well\x1b[2J\u202e" + "x" * 9_000_000

    def shout(reply: Message, node: int) -> Message:
        if node == 993 and reply.metadata.message_type == MessageType.TRAIN:
            error = Message(Error(2, f"<class 'ValueError'>:<'{evil}'>"), reply_to=reply)
            error.metadata.__dict__.update(_src_node_id=node, _reply_to_message_id=reply.metadata.reply_to_message_id)
            return error
        return reply

    nodes = shares(3)
    nodes[993].config["name"] = evil
    federate(FakeGrid(nodes, tamper=shout), method="fedavg")
    for each in caplog.records:
        assert each.getMessage().isprintable()
        assert len(each.getMessage()) < 400
    assert max(len(line["why_lost"]["1"]) for line in lines(tmp_path / "run")) == 200
    assert (tmp_path / "run" / "registry.json").stat().st_size < 5000
    assert cleaned(evil, 30) == "north 2026-01-01 INFO all is w"
