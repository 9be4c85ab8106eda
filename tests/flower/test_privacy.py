"""Differential privacy in a federation: the simulator's bits with a test seed, secret noise otherwise."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

import metavd
from metavd.core.accountant import Mechanism
from metavd.engine.ledger import Ledger
from metavd.engine.rounds import InterruptedRun
from metavd.errors import UserError
from metavd.flower.config import FederationError
from metavd.flower.message import payload, read_reply, write_reply
from metavd.wire import decode, encode

from .support.grid import SMALL, FakeGrid, shares


def simulated(method: str, text: str, **settings: object) -> dict[str, object]:
    pairs = dict(word.split("=") for word in text.split())
    common = {"clients": 3, "cohort": 3, "rounds": 2, "backend": "loop", "max_share": 2.0}
    return metavd.run(method=method, **(common | pairs | settings))


def seeded(count: int) -> dict:
    nodes = shares(count)
    for node in nodes.values():
        node.config["seeded-noise"] = True
    return nodes


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("fedavg+dp", "noise=0.5"),
        ("reptile+metavd+dp", "noise=0.5 clipping=adaptive"),
        ("reptile+ensemblevd+dp", "noise=0.3"),
        ("fedper+dp", "noise=0.5 noise_from=sites"),
    ],
)
def test_with_a_test_seed_the_bits_are_the_simulators(federate, method, text):
    """Clipping, noise of the server or of sites, an adaptive clip, rows that all share."""
    text = f"{SMALL} {text}"
    result = federate(FakeGrid(seeded(3)), method=method, set=text, **{"seeded-noise": True})
    wanted = simulated(method, text)
    assert result["model_sha256"] == wanted["model_sha256"]
    assert result["privacy"] == wanted["privacy"]


def test_poisson_cohorts_are_the_simulators_and_may_be_empty(federate, tmp_path: Path):
    """One of six on average, eight rounds: a round without anybody adds noise in both."""
    text = f"{SMALL} noise=0.5"
    how = {"clients": 6, "cohort": 1, "rounds": 8}
    result = federate(FakeGrid(seeded(6)), method="fedavg+dp", set=text, **how, **{"seeded-noise": True})
    wanted = simulated("fedavg+dp", text, **how)
    assert result["model_sha256"] == wanted["model_sha256"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    sizes = [len(line["cohort"]) for line in lines]
    assert 0 in sizes
    assert len(set(sizes)) > 1
    assert all(line["loss"] is None for line in lines if not line["cohort"])
    spent = [line["epsilon"] for line in lines]
    assert spent == sorted(spent)
    assert spent[0] > 0


def test_noise_is_secret_unless_a_test_asks_for_the_seeds(federate, tmp_path: Path):
    """Two federations of one seed have different models, and neither is the simulator's; both count releases."""
    text = f"{SMALL} noise=0.5"
    found = [
        federate(FakeGrid(shares(3)), method="fedavg+dp", set=text, out=str(tmp_path / str(i)))["model_sha256"]
        for i in range(2)
    ]
    assert len({*found, simulated("fedavg+dp", text)["model_sha256"]}) == 3
    assert json.loads((tmp_path / "0" / "privacy.json").read_text()) == {"spent": [[0.5, 2]]}


def test_a_round_that_is_taken_again_is_counted_again(federate):
    """A crash after the noise was drawn, before the checkpoint: the second draw is one more release."""
    text = f"{SMALL} noise=1"
    grid, crashed = FakeGrid(shares(3)), []

    def crash(message):
        if message.metadata.message_type == "evaluate" and not crashed:
            crashed.append(True)
            raise KeyboardInterrupt

    grid.before = crash
    with pytest.raises(InterruptedRun):
        federate(grid, method="fedavg+dp", set=text, **{"eval-every": 1})
    assert crashed
    result = federate(FakeGrid(shares(3)), method="fedavg+dp", set=text, **{"eval-every": 1})
    assert result["trained_rounds"] == 2
    assert result["privacy"]["rounds"] == 3


def test_with_noise_of_the_sites_no_answer_comes_without(federate):
    """What each node sends is clip-long at most before its noise, and differs from it by the noise's length."""
    grid = FakeGrid(shares(3))
    text = f"{SMALL} noise=3 answer_clip=0.01 noise_from=sites"
    result = federate(grid, method="fedavg+dp", set=text, rounds=1)
    orders = {m.metadata.dst_node_id: m for m in grid.received if m.metadata.message_type == "train"}
    for number, node in grid.nodes.items():
        answer = next(m for m in node.sent if m.metadata.message_type == "train")
        received = decode(payload(orders[number].content))
        moved = [(value - received[name]).flatten() for name, value in decode(payload(answer.content)).items()]
        vector = torch.cat(moved).double()
        expected = 3 * 0.01 * (vector.numel() / 3) ** 0.5
        # Secret numbers are others in every run: seven standard deviations of the length of so many.
        assert vector.norm() == pytest.approx(expected, rel=7 / (2 * vector.numel()) ** 0.5)
    assert result["privacy"]["epsilon_server"] > result["privacy"]["epsilon"]


def test_a_site_that_drops_out_takes_its_noise_with_it(federate, tmp_path: Path):
    """Two of three answer: epsilon is that of sqrt(2/3) of the noise."""
    grid, text = FakeGrid(shares(3)), f"{SMALL} noise=2 noise_from=sites"
    how = {"round-timeout": 1, "rounds": 1}
    last = max(grid.nodes)
    grid.tamper = lambda reply, number: None if number == last and reply.metadata.message_type == "train" else reply
    federate(grid, method="fedavg+dp", set=text, **how)
    spent = json.loads((tmp_path / "run" / "privacy.json").read_text())["spent"]
    assert spent == [[pytest.approx(2 * (2 / 3) ** 0.5), 1]]


def test_honest_noise_is_not_refused_however_long(federate, tmp_path: Path):
    """A thousand times as long as the weights themselves."""
    federate(
        FakeGrid(shares(5)), method="fedavg+dp", clients=5, set=f"{SMALL} noise=3 answer_clip=500 noise_from=sites"
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [len(line["cohort"]) for line in lines] == [5, 5]
    assert not any(line["rejected"] for line in lines)


def farther(grid: FakeGrid, factor: float):
    """The last node moves the weights so many times as far."""

    def tamper(reply, number):
        if number != max(grid.nodes) or reply.metadata.message_type != "train":
            return reply
        order = next(m for m in reversed(grid.received) if m.metadata.dst_node_id == number)
        about, metrics = read_reply(reply.content)
        received, answer = decode(payload(order.content)), decode(payload(reply.content))
        far = {name: received[name] + factor * (value - received[name]) for name, value in answer.items()}
        reply.content = write_reply(about["round"], metrics, encode(far, mask_known=True))
        return reply

    return tamper


@pytest.mark.parametrize(("method", "refused"), [("fedavg", 1), ("fedavg+dp", 0)])
def test_the_guard_compares_no_answers_where_clients_are_hidden(federate, tmp_path: Path, method, refused):
    """Four honest answers and one thirty times as long: whom others' rows may refuse, one client more could save."""
    grid = FakeGrid(shares(5))
    grid.tamper = farther(grid, 30.0)
    federate(grid, method=method, clients=5, rounds=1, set=f"{SMALL} partition=iid test_rows=uniform")
    line = json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[0])
    assert len(line["rejected"]) == refused
    assert len(line["cohort"]) == 5 - refused


def test_what_cannot_be_accounted_is_refused(federate):
    with pytest.raises(FederationError, match=r"cohort is 2 of 3.*use sampling=poisson"):
        federate(FakeGrid(shares(3)), method="fedavg+dp", cohort=2, set=f"{SMALL} sampling=fixed")


def test_the_log_says_what_is_spent(federate, caplog):
    logger = logging.getLogger("flwr")
    before, logger.propagate = logger.propagate, True
    try:
        with caplog.at_level(logging.INFO, logger="flwr"):
            federate(FakeGrid(shares(3)), method="fedavg+dp", set=f"{SMALL} noise=2 epsilon=3", rounds=4)
    finally:
        logger.propagate = before
    assert "differential privacy of clients" in caplog.text
    assert ", epsilon " in caplog.text
    assert "the privacy budget is spent: 1 rounds" in caplog.text


def test_the_server_has_seen_answers_of_rounds_that_came_to_nothing(federate, tmp_path: Path):
    """Sites add their own noise, and nobody else may: each time that they are asked tells the server more of them.

    A crash when all have answered, before the round is counted: its answers count beside those that come again.
    """
    text = f"{SMALL} noise=3 noise_from=sites"
    grid, answered = FakeGrid(shares(3)), []

    def crash(reply, number):
        if reply.metadata.message_type == "train":
            answered.append(number)
            if len(answered) == 6:
                raise KeyboardInterrupt
        return reply

    grid.tamper = crash
    with pytest.raises(InterruptedRun):
        federate(grid, method="fedavg+dp", set=text)
    assert json.loads((tmp_path / "run" / "privacy.json").read_text()) == {"spent": [[3.0, 1]], "asked": 2}
    found = federate(FakeGrid(shares(3)), method="fedavg+dp", set=text)["privacy"]
    smooth = federate(FakeGrid(shares(3)), method="fedavg+dp", set=text, out=str(tmp_path / "smooth"))["privacy"]
    assert json.loads((tmp_path / "run" / "privacy.json").read_text()) == {"spent": [[3.0, 2]], "asked": 3}
    assert found["epsilon"] == smooth["epsilon"]
    assert found["epsilon_server"] > smooth["epsilon_server"]


DAMAGED = ["", "{", "[]", "{}", '{"spent": 3}', '{"spent": [[1]]}', '{"spent": [[1, -5]]}', '{"spent": [[NaN, 1]]}']


@pytest.mark.parametrize("text", [*DAMAGED, '{"a":' * 3000 + "1" + "}" * 3000])
def test_a_ledger_that_cannot_be_read_is_named(tmp_path: Path, text):
    """A run whose past is not known may not spend more of its budget."""
    path = tmp_path / "privacy.json"
    path.write_text(text)
    mechanism = Mechanism(clip=1.0, noise=2.0, epsilon=9.0, delta=1e-5, clients=3, cohort=3, rounds=2)
    with pytest.raises(UserError, match=r"privacy\.json is damaged .*put back your copy"):
        Ledger.opened(mechanism, {}, path)
