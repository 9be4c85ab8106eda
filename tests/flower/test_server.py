"""Who takes part, who is waited for and how long, and what is left when something breaks."""

from __future__ import annotations

import csv
import errno
import json
import time
from pathlib import Path

import pytest
import torch
from flwr.app import Message, MessageType

from metavd.core.emit import EMBEDDING, hypernetwork
from metavd.core.types import ServerState
from metavd.engine import checkpoint
from metavd.flower.config import FederationError, run_config
from metavd.flower.message import payload, read_order, write_reply
from metavd.flower.registry import GUESTS, load, widened
from metavd.flower.server import run
from metavd.runs.store import Store
from metavd.wire import decode

from .support.grid import SMALL, FakeGrid, Node, shares


def rounds_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def in_round(message: Message, number: int) -> bool:
    return message.metadata.message_type == MessageType.TRAIN and message.metadata.group_id == str(number)


class Crash(BaseException):
    """What ends a server without asking."""


# --- identity --------------------------------------------------------------------------------------------------------


def test_a_client_keeps_its_number_when_everything_was_restarted(federate, tmp_path):
    """Node ids change, nodes come in another order, the server crashed: keys decide, and the bits are the same."""
    whole = federate(FakeGrid(shares(3)), method="reptile+metavd", rounds=4, out=str(tmp_path / "whole"))

    def crash(message: Message) -> None:
        if in_round(message, 3):
            raise Crash

    with pytest.raises(Crash):
        federate(FakeGrid(shares(3), before=crash), method="reptile+metavd", rounds=4)
    assert len(rounds_of(tmp_path / "run")) == 2
    again = FakeGrid({5 + 3 * i: node for i, node in enumerate(reversed(shares(3).values()))})
    result = federate(again, method="reptile+metavd", rounds=4)
    assert not any(in_round(message, 2) for message in again.received)
    assert result["model_sha256"] == whole["model_sha256"]
    assert [each["round"] for each in rounds_of(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_client_without_a_key_is_known_by_its_name(federate, tmp_path):
    nodes = {70 - i: Node({"partition-id": i, "name": f"site {i}"}) for i in range(3)}
    federate(FakeGrid(nodes), method="fedavg", identity="name")
    assert [each.identity for each in load(tmp_path / "run" / "registry.json").members] == [
        f"name site {i}" for i in range(3)
    ]


def test_two_nodes_of_one_name_are_told_apart(federate):
    """The second one is left out, and the run says so where it lacks a client."""
    nodes = {70 - i: Node({"partition-id": i, "name": "twin"}) for i in range(3)}
    with pytest.raises(FederationError, match=r"within 1 s 1 of at least 2 clients came.*twin is there twice"):
        federate(FakeGrid(nodes), method="fedavg", identity="name", **{"join-timeout": 1})


def test_a_node_that_joins_in_between_takes_part_with_the_mean_embedding(federate, tmp_path):
    """Its row is the mean of those that are there, its momentum zero; from then on it is a client like the others."""
    text = SMALL.replace("unseen=0", "unseen=1")
    late = shares(1, first=3)
    states = []

    def join(message: Message) -> None:
        if in_round(message, 2):
            grid.nodes |= late
        if in_round(message, 3):
            states.append(checkpoint.load_checkpoint(tmp_path / "run" / "checkpoint", round=2)[0])

    grid = FakeGrid(shares(3), before=join)
    federate(grid, method="reptile+metavd", rounds=4, set=text)
    assert [each["cohort"] for each in rounds_of(tmp_path / "run")] == [[0, 1, 2]] * 2 + [[0, 1, 2, 3]] * 2
    newest = load(tmp_path / "run" / "registry.json").members[-1]
    assert (newest.number, newest.joined) == (3, 2)
    # What it was sent in its first round is what `emit` gives a client that was never seen.
    first = next(m for m in grid.received if in_round(m, 3) and m.metadata.dst_node_id == next(iter(late)))
    known = next(m for m in grid.received if in_round(m, 3) and m.metadata.dst_node_id != next(iter(late)))
    assert payload(first.content) != payload(known.content)
    table = states[0].params[EMBEDDING]
    after = checkpoint.load_checkpoint(tmp_path / "run" / "checkpoint", round=3)[0].params[EMBEDDING]
    assert (len(table), len(after)) == (3, 4)
    assert not torch.equal(after[3], table.mean(0))
    spread = hypernetwork(states[0].params, table.mean(0))
    assert torch.equal(decode(payload(first.content))["fc1.logvar"].flatten(), spread)


def test_a_new_row_is_the_mean_of_the_others_at_rest():
    """Tables of one row per client grow, their momentum by zeros; everything else stays as it is."""
    table = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    params = {EMBEDDING: table, "fc.weight": torch.ones(2, 2)}
    state = ServerState(params, {EMBEDDING: table}, torch.tensor(0.0), torch.tensor(1))
    new = widened(state, 4)
    assert new.params[EMBEDDING].tolist() == [[1, 2], [3, 6], [2, 4], [2, 4]]
    assert new.slots[EMBEDDING].tolist() == [[1, 2], [3, 6], [0, 0], [0, 0]]
    assert new.params["fc.weight"] is params["fc.weight"]
    assert widened(state, 2).params[EMBEDDING] is table


@pytest.mark.parametrize(("newcomer", "train"), [("mean", False), ("fit", "false")])
def test_a_node_that_never_trains_is_personalised_and_tested(federate, tmp_path, newcomer, train):
    """It gets no row and no training message, but a model and figures; a shell that passes words is understood too."""
    nodes = shares(3) | shares(1, first=3, train=train)
    grid = FakeGrid(nodes)
    text = SMALL.replace("unseen=0", "unseen=1") + f" newcomer={newcomer}"
    result = federate(grid, method="reptile+metavd", set=text)
    assert (result["test"]["clients"], result["unseen"]["clients"]) == (3, 1)
    guest = next(number for number, node in nodes.items() if node.config["partition-id"] == 3)
    kinds = [m.metadata.message_type for m in grid.received if m.metadata.dst_node_id == guest]
    assert kinds == [MessageType.QUERY, MessageType.EVALUATE]
    assert load(tmp_path / "run" / "registry.json").members[-1].number == GUESTS
    with (tmp_path / "run" / "clients.csv").open() as file:
        assert [line["unseen"] for line in csv.DictReader(file)] == ["0", "0", "0", "1"]


def test_a_newcomer_that_fits_itself_sees_no_other_embedding(federate):
    """Of the table of embeddings only the mean leaves the server."""
    grid = FakeGrid(shares(3) | shares(1, first=3, train=False))
    text = SMALL.replace("unseen=0", "unseen=1") + " newcomer=fit"
    federate(grid, method="reptile+metavd", set=text)
    orders = [read_order(m.content) for m in grid.received if m.metadata.message_type == MessageType.EVALUATE]
    whole = [decode(order.params) for order in orders if order.whole]
    assert [len(params[EMBEDDING]) for params in whole] == [1]
    assert all(EMBEDDING not in decode(order.params) for order in orders if not order.whole)


# --- failing clients -------------------------------------------------------------------------------------------------


def test_a_client_that_never_answers_is_not_waited_for(federate, tmp_path):
    """Bounded wait, partial round: the others' answers make the round, which equals one that did not ask it."""

    def deaf(reply: Message, node: int) -> Message | None:
        return None if in_round(reply, 2) and node == 1000 - 7 * 1 else reply

    began = time.monotonic()
    result = federate(FakeGrid(shares(3), tamper=deaf), method="fedavg", rounds=3, **{"round-timeout": 1})
    assert time.monotonic() - began < 60
    lines = rounds_of(tmp_path / "run")
    assert [each["cohort"] for each in lines] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert lines[1]["lost"] == [1]
    assert lines[1]["why_lost"] == {"1": "no answer within 1 s"}
    assert result["trained_rounds"] == 3


def test_a_client_that_fails_says_so_without_detail(federate, tmp_path):
    """The reason in the log names the exception, not what it says: that may be a path or a value."""
    nodes = shares(3)
    nodes[1000].config |= {"device": "secret/path"}
    federate(FakeGrid(nodes), method="fedavg")
    why = rounds_of(tmp_path / "run")[0]["why_lost"]["0"]
    assert why == "train failed with RuntimeError; what went wrong is in the site's own log"
    assert not any("secret" in str(vars(message.error)) for message in nodes[1000].sent if message.has_error())


def test_a_round_without_a_quorum_is_tried_again_and_asks_only_the_others(federate, tmp_path):
    """Answers that came are kept; the repetition gives the bits of an undisturbed run.

    The last client is the first to answer well, so answers have to be put in order.
    """
    whole = federate(FakeGrid(shares(3)), method="reptile", out=str(tmp_path / "whole"))
    failed = []

    def moody(reply: Message, node: int) -> Message | None:
        if in_round(reply, 1) and node != 986 and failed.count(node) < 1:
            failed.append(node)
            return None
        return reply

    grid = FakeGrid(shares(3), tamper=moody)
    result = federate(grid, method="reptile", quorum=3, **{"round-timeout": 1})
    assert result["model_sha256"] == whole["model_sha256"]
    asked = [m.metadata.dst_node_id for m in grid.received if in_round(m, 1)]
    assert sorted(asked) == sorted([1000, 993, 986, 1000, 993])
    assert [each["cohort"] for each in rounds_of(tmp_path / "run")] == [[0, 1, 2]] * 2


def test_a_round_without_a_quorum_waits_for_a_node_that_is_away(federate):
    """The node that left is not there for the next attempt at once; without waiting, that one was the last."""
    nodes, left = shares(3), []

    class Away(FakeGrid):
        def get_node_ids(self):
            nodes[1000].online = not left or time.monotonic() > left[0] + 3  # three times as long as an attempt
            return super().get_node_ids()

    def leave(message: Message) -> None:
        if in_round(message, 1) and message.metadata.dst_node_id == 1000 and not left:
            left.append(time.monotonic())
            nodes[1000].online = False

    result = federate(Away(nodes, before=leave), method="fedavg", quorum=3, repeats=1, **{"round-timeout": 1})
    assert left
    assert result["rounds"] == 2


def test_a_run_without_a_quorum_stops_with_a_sentence(federate):
    def silent(reply: Message, _: int) -> Message | None:
        return reply if reply.metadata.message_type == MessageType.QUERY else None

    with pytest.raises(FederationError, match="round 1 had 0 good answers in 2 attempts, but needs 2; the state of"):
        federate(FakeGrid(shares(3), tamper=silent), method="fedavg", repeats=1, **{"round-timeout": 1})


def test_nobody_is_waited_for_for_ever(federate):
    began = time.monotonic()
    with pytest.raises(FederationError, match="within 1 s 0 of at least 2 clients came; start more and run again"):
        federate(FakeGrid({}), method="fedavg", **{"join-timeout": 1})
    assert time.monotonic() - began < 60


def test_a_node_that_goes_and_comes_back_is_asked_again(federate, tmp_path):
    nodes = shares(3)

    def leave(message: Message) -> None:
        nodes[986].online = not in_round(message, 2)

    federate(FakeGrid(nodes, before=leave), method="fedavg", rounds=4, **{"round-timeout": 1})
    assert [2 in each["cohort"] for each in rounds_of(tmp_path / "run")][0::3] == [True, True]
    assert 2 not in rounds_of(tmp_path / "run")[1]["cohort"]


@pytest.fixture(scope="module")
def without_client_1(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of a model of which client 1 has no part."""

    def absent(reply: Message, node: int) -> Message | None:
        return None if node == 993 and reply.metadata.message_type == MessageType.TRAIN else reply

    config = {"data": "digits", "clients": 3, "rounds": 4, "set": SMALL, "method": "fedavg", "round-timeout": 1}
    folder = tmp_path_factory.mktemp("without") / "run"
    return run(FakeGrid(shares(3), tamper=absent), run_config(config | {"out": str(folder)}))["model_sha256"]


@pytest.mark.parametrize("spoil", ["truncated", "round", "records", "rows"])
def test_a_bad_answer_is_refused_by_name_and_its_client_left_out(federate, tmp_path, without_client_1, spoil):
    """The model is that of the others alone; after three offences the client is asked no more."""

    def hostile(reply: Message, node: int) -> Message | None:
        if node != 993 or reply.metadata.message_type != MessageType.TRAIN:
            return reply
        order_round = int(reply.metadata.group_id)
        metrics = {"rows": 10**12 if spoil == "rows" else 10, "loss": 0.5}
        data = payload(reply.content)
        if spoil == "truncated":
            data = data[:-40]
        content = write_reply(order_round + (7 if spoil == "round" else 0), metrics, data)
        if spoil == "records":
            del content["reply"]
        bad = Message(content, reply_to=reply)
        bad.metadata.__dict__.update(_src_node_id=node, _reply_to_message_id=reply.metadata.reply_to_message_id)
        return bad

    result = federate(FakeGrid(shares(3), tamper=hostile), method="fedavg", rounds=4)
    lines = rounds_of(tmp_path / "run")
    assert [each["cohort"] for each in lines] == [[0, 2]] * 4
    assert [list(each["rejected"]) for each in lines] == [["1"]] * 3 + [[]]
    assert result["model_sha256"] == without_client_1


# --- failing servers -------------------------------------------------------------------------------------------------


def test_a_full_disk_loses_the_round_in_flight_and_no_more(federate, tmp_path, monkeypatch):
    whole = federate(FakeGrid(shares(3)), method="reptile", rounds=3, out=str(tmp_path / "whole"))
    real = checkpoint.write_atomic

    def full(path: Path, data: bytes) -> None:
        if "round-000002" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_atomic", full)
        with pytest.raises(OSError, match="No space left"):
            federate(FakeGrid(shares(3)), method="reptile", rounds=3)
    assert int(checkpoint.load_checkpoint(tmp_path / "run" / "checkpoint")[0].round) == 1
    assert federate(FakeGrid(shares(3)), method="reptile", rounds=3)["model_sha256"] == whole["model_sha256"]


def test_a_finished_run_is_read_and_another_one_is_kept_apart(federate, tmp_path):
    first = federate(FakeGrid(shares(3)), method="fedavg")
    assert federate(FakeGrid({}), method="fedavg") == first
    with pytest.raises(FederationError, match=r"holds another run .*name another folder with out"):
        federate(FakeGrid({}), method="reptile")
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(FederationError, match=r"holds another run .*name another folder with out"):
        federate(FakeGrid(shares(3)), method="reptile")


def test_a_run_too_short_for_drop_says_so(federate, caplog):
    """As in the simulator: one sentence with both numbers."""
    caplog.set_level("INFO", "flwr")
    text = f"{SMALL} hyper_width=4 drop_from=2 threshold=0.2"
    federate(FakeGrid(shares(3)), method="fedavg+metavd+drop", set=text)
    assert "no weight is dropped in training: drop_from is 2 and the run has 2 rounds" in caplog.text


def test_the_folder_is_one_that_metavd_reads(federate, tmp_path):
    """`metavd show` and `metavd report` take it as any other run's."""
    from metavd.report.read import read_run

    federate(FakeGrid(shares(3)), method="reptile+metavd", **{"eval-every": 1})
    found = read_run(tmp_path / "run")
    assert found.notes == ()
    assert len(found.clients) == 3
    assert found.details.reliability["test"].count.sum() == found.result["test"]["samples"]
    assert found.details.rates
    assert Store(tmp_path / "run").is_finished()
    assert all("test" in line for line in rounds_of(tmp_path / "run")[:-1])
