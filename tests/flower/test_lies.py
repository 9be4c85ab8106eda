"""Sites that lie within what a transport lets through: about their weights, their rows, their figures."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message, MessageType

import metavd
from metavd import wire
from metavd.data.source import digits
from metavd.flower import registry
from metavd.flower.message import payload, read_order

from .support.answers import claims, resent
from .support.grid import SMALL, FakeGrid, Node, shares
from .support.stage import Event

LIAR = 3
MANY = "unseen=0 model=mlp width=16 partition=dirichlet:0.1"


def lines(folder: Path) -> list[dict]:
    """The rounds of a run."""
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


class Liar(FakeGrid):
    """A grid on which one client's answers of one kind are changed."""

    def __init__(self, count: int, lie: Callable[[Event], list[Message]], kind: str = MessageType.TRAIN) -> None:
        super().__init__(shares(count))
        self.lie, self.kind = lie, kind

    def answer(self, message: Message) -> Message | None:
        reply = super().answer(message)
        number = self.nodes[message.metadata.dst_node_id].config["partition-id"]
        if reply is None or number != LIAR or message.metadata.message_type != self.kind:
            return reply
        return self.lie(Event(self, message, reply))[0]  # type: ignore[arg-type]


def reversed_and(times: float) -> Callable[[Event], list[Message]]:
    """Answer with the update turned round and so many times as long."""

    def lie(event: Event) -> list[Message]:
        sent = wire.decode(read_order(event.order.content).params)
        found = wire.decode(payload(event.reply.content), like=sent)
        return resent(
            event.reply, wire.encode({name: sent[name] - times * (found[name] - sent[name]) for name in sent})
        )

    return lie


# --- weights ---------------------------------------------------------------------------------------------------------


def test_an_update_reversed_and_twenty_fold_is_refused_by_name_and_reason(federate, tmp_path):
    """One of 20 sites, honest in all else; after three such answers it is asked no more, and the others learn."""
    settings = {"method": "fedavg", "clients": 20, "rounds": 4, "set": MANY}
    result = federate(Liar(20, reversed_and(20)), **settings)
    found = lines(tmp_path / "run")
    assert [list(line["rejected"]) for line in found] == [[str(LIAR)]] * 3 + [[]]
    assert all("others of its round" in line["rejected"][str(LIAR)] for line in found[:3])
    assert all(LIAR not in line["cohort"] for line in found)
    assert result["trained_rounds"] == 4


def test_an_honest_heterogeneous_federation_is_never_refused(federate, tmp_path):
    """Law: sites of one or two classes each, 20 rounds: no answer stands out."""
    federate(FakeGrid(shares(20)), method="fedavg", clients=20, rounds=20, set=MANY)
    found = lines(tmp_path / "run")
    assert len(found) == 20
    assert all(line["rejected"] == {} and len(line["cohort"]) == 20 for line in found)


# --- rows ------------------------------------------------------------------------------------------------------------


def test_a_share_of_a_round_is_bounded(federate, tmp_path):
    """A site that claims a million rows weighs as one with twice the median, which is the simulator's max_share=2."""
    text = SMALL
    result = federate(Liar(4, claims("metrics", rows=10**6)), method="fedavg", clients=4, set=text)
    bounded = federate(Liar(4, claims("metrics", rows=10**9)), method="fedavg", clients=4, out=str(tmp_path / "b"))
    free = federate(
        Liar(4, claims("metrics", rows=10**6)), method="fedavg", clients=4, out=str(tmp_path / "c"), **{"max-share": 0}
    )
    assert result["model_sha256"] == bounded["model_sha256"] != free["model_sha256"]


def test_the_simulator_bounds_shares_alike(federate):
    """Parity: where sites have rows of very different number, max_share is the same bits in both."""
    text = f"{SMALL} partition=dirichlet:0.1"
    pairs = dict(word.split("=") for word in text.split())
    common = {"method": "fedavg", "clients": 5, "rounds": 2}
    simulated = metavd.run(cohort=5, backend="loop", max_share=1.0, **common, **pairs)
    plain = metavd.run(cohort=5, backend="loop", **common, **pairs)
    result = federate(FakeGrid(shares(5)), set=text, **common, **{"max-share": 1.0})
    assert result["model_sha256"] == simulated["model_sha256"] != plain["model_sha256"]


def test_rows_do_not_grow_between_rounds_unless_an_operator_registers_it(federate, tmp_path):
    """A claim above the one before is refused; what an operator registers is taken; the guard remembers in between."""

    def growing(event: Event) -> list[Message]:
        return claims("metrics", rows=50 + 10 * int(event.order.metadata.group_id))(event)

    class Crash(BaseException): ...

    def crash(message: Message) -> None:
        if message.metadata.message_type == MessageType.TRAIN and message.metadata.group_id == "3":
            raise Crash

    grid = Liar(4, growing)
    grid.before = crash
    with pytest.raises(Crash):
        federate(grid, method="fedavg", clients=4, rounds=4)
    found = lines(tmp_path / "run")
    assert found[0]["rejected"] == {}
    assert found[1]["rejected"] == {str(LIAR): "it claims 70 samples after 60; metavd federate rows registers more"}
    path = tmp_path / "run" / registry.FILE
    registry.save(path, registry.with_rows(registry.load(path), str(LIAR), 80))
    federate(Liar(4, growing), method="fedavg", clients=4, rounds=4)
    found = lines(tmp_path / "run")
    assert found[2]["rejected"] == {}
    assert found[3]["rejected"] == {str(LIAR): "it claims 90 samples after 80; metavd federate rows registers more"}


# --- hello and figures -----------------------------------------------------------------------------------------------


@pytest.fixture
def four_sites(tmp_path: Path) -> dict[int, Node]:
    """Digits at four sites, as .npz files."""
    source, nodes = digits(), {}
    for i in range(4):
        np.savez(tmp_path / f"{i}.npz", images=source.x[i::8, 0], labels=source.y[i::8])
        nodes[50 - i] = Node({"data": f"npz:{tmp_path / f'{i}.npz'}", "name": f"site {i}"}, key=b"abcd"[i : i + 1])
    return nodes


LOOKS = {
    "rows": (10**15, "rows is 1000000000000000, but must be a whole number from 1 to 1e.09"),
    "negative rows": (-5, "rows is -5"),
    "scale": (1e20, "scale is 1e.20, but must be a number above 0, at most 1000"),
    "classes": (10**8, "classes is 100000000, but must be a whole number from 0 to 100000"),
    "half classes": (12.5, "classes is 12.5"),
    "mean": ([0.1, 0.2, 0.3], "mean has 3 numbers, but a row has 1 channels"),
    "std": ([float("nan")], "NaN is not a number"),
    "far mean": ([5e8], "times as large as the others'"),
    "shape": ([1, 9, 9], r"has rows of shape \(1, 9, 9\) and type uint8, but most sites of \(1, 8, 8\)"),
    "names": (["b", "a\nINFO all is well"], "names are not sorted"),
    "dtype": ("object", "dtype is 'object', but must be one of numbers"),
}


@pytest.mark.parametrize("lie", LOOKS)
def test_a_lie_in_a_hello_leaves_that_site_out_by_name(federate, four_sites, tmp_path, caplog, lie):
    """The others go on, at once, and nothing that the liar said stays in the folder, but why it was left out."""
    value, why = LOOKS[lie]

    def tell(reply: Message, node: int) -> Message:
        if reply.metadata.message_type == MessageType.QUERY and node == 47:
            about = json.loads(reply.content["reply"]["look"]) | {lie.split()[-1]: value}
            reply.content["reply"]["look"] = json.dumps(about)
        return reply

    settings = {"data": "", "clients": 4, "rounds": 1, "set": "model=mlp width=8", "join-timeout": 300}
    began = time.monotonic()
    result = federate(FakeGrid(four_sites, tamper=tell), method="fedavg", **settings)
    assert time.monotonic() - began < 200
    assert lines(tmp_path / "run")[0]["cohort"] == [0, 1, 2]
    (said,) = [each.getMessage() for each in caplog.records if "is left out" in each.getMessage()]
    assert re.search(rf"site 3.*({why})", said)
    assert result["test"]["clients"] == 3
    kept = [path.name for path in (tmp_path / "run").rglob("*") if path.is_file() and b"site 3" in path.read_bytes()]
    assert kept == ["audit.jsonl"]
    (line,) = [each for each in (tmp_path / "run" / "audit.jsonl").read_text().splitlines() if "site 3" in each]
    assert json.loads(line)["event"] == "left out"
    assert json.loads((tmp_path / "run" / "takes.json").read_text())["classes"] == [str(i) for i in range(10)]


def test_a_site_cannot_train_on_more_rows_than_it_said_hello_with(federate, four_sites, tmp_path):
    def tell(reply: Message, node: int) -> Message:
        if reply.metadata.message_type == MessageType.TRAIN and node == 47:
            reply.content["metrics"]["rows"] = 5000
        return reply

    settings = {"data": "", "clients": 4, "rounds": 1, "set": "model=mlp width=8"}
    federate(FakeGrid(four_sites, tamper=tell), method="fedavg", **settings)
    assert lines(tmp_path / "run")[0]["rejected"] == {"3": "it claims 5000 samples, and said hello with 225 rows"}


@pytest.mark.parametrize("bins", ["bin_count", "bin_confidence"])
def test_huge_bins_do_not_end_a_run_after_its_last_round(federate, tmp_path, bins):
    lie = claims("metrics", **{bins: [1e308] * 15})
    result = federate(Liar(4, lie, MessageType.EVALUATE), method="fedavg", clients=4)
    assert result["test"]["clients"] == 4
    for path in (tmp_path / "run").glob("*.json*"):
        assert "Infinity" not in path.read_text()
        assert "NaN" not in path.read_text()


def test_an_excluded_site_does_not_evaluate(federate):
    grid = Liar(4, claims("metrics", rows=-1))
    result = federate(grid, method="fedavg", clients=4, rounds=3)
    kinds = [m.metadata.message_type for m in grid.received if m.metadata.dst_node_id == 1000 - 7 * LIAR]
    assert kinds == [MessageType.QUERY] + [MessageType.TRAIN] * 3
    assert result["test"]["clients"] == 3
