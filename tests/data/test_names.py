"""Clients and classes keep their names from the source to every table, picture and command."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from metavd import run
from metavd.__main__ import main
from metavd.data import collection
from metavd.data.partition import PartitionError, federate, leaving_out, sealed
from metavd.data.source import Source, arrays, named
from metavd.report.clients import clients_figure
from metavd.report.read import read_run

DOMAINS = ("art", "cartoon", "photo", "sketch")


def four(rows: int = 160) -> Source:
    """Return a dataset of four named clients and two named classes."""
    draw = np.random.RandomState(0)
    x = draw.randn(rows, 3)
    y = np.where(x[:, 0] > 0, "dog", "cat")
    return arrays(x, y, client=np.array(DOMAINS)[np.arange(rows) % 4], name="four")


def test_names_are_numbered_by_nothing_but_themselves() -> None:
    """Law: the order of rows does not change which number a name has."""
    data = four()
    assert (data.classes, data.client_names) == (("cat", "dog"), DOMAINS)
    assert named(["b", "2", "10", "a"])[0] == ("2", "10", "a", "b")


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_named_clients_does_not_depend_on_the_seed(seed: int) -> None:
    """Law: participating clients stand in the order of their names, and hold the rows of that name."""
    data = four()
    dealt = federate(data, "natural", clients=3, unseen=1, seed=seed)
    assert list(dealt.names[:3]) == sorted(dealt.names[:3])
    assert sorted(dealt.names) == list(DOMAINS)
    for client, name in enumerate(dealt.names):
        rows = np.concatenate([dealt.train[client], dealt.test[client]])
        assert {data.client_names[owner] for owner in data.client[rows]} == {name}  # type: ignore[index]


def test_every_client_is_left_out_by_some_seed() -> None:
    assert {federate(four(), "natural", clients=3, unseen=1, seed=seed).names[3] for seed in range(40)} == set(DOMAINS)


@pytest.mark.parametrize(
    ("text", "names"), [("sketch", ["sketch"]), ("sketch, art", ["art", "sketch"]), ("client:photo", ["photo"])]
)
def test_named_clients_are_left_out(text: str, names: list[str]) -> None:
    """They are the unseen ones, whatever the seed; nobody else is."""
    for seed in (0, 1):
        dealt = federate(four(), "natural", clients=4 - len(names), unseen=text, seed=seed)
        assert list(dealt.names[dealt.num_clients :]) == names
        assert sealed(dealt).names == dealt.names[: dealt.num_clients]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("skech", "no such client; did you mean sketch"),
        ("art,nobody", "no such client; the clients are art, cartoon, photo, sketch"),
        ("art,art", "names a client twice"),
        ("art,cartoon,photo,sketch", "leaves nobody to train"),
    ],
)
def test_wrong_names_are_answered_with_the_right_ones(text: str, says: str) -> None:
    with pytest.raises(PartitionError, match=says):
        leaving_out(text, four())


def test_names_need_clients_by_nature() -> None:
    with pytest.raises(PartitionError, match="only clients by nature have names"):
        federate(four(), "iid", clients=3, unseen="sketch", seed=0)


@pytest.mark.parametrize(
    ("given", "clients", "unseen", "cohort"),
    [
        ({}, 3, 1, 3), ({"unseen": 0}, 4, 0, 4), ({"unseen": 1}, 3, 1, 3), ({"unseen": 2}, 2, 2, 2),
        ({"unseen": "sketch,art"}, 2, "sketch,art", 2), ({"clients": 4}, 4, 0, 4), ({"clients": 2}, 2, 1, 2),
        ({"unseen": 0.25}, 3, 1, 3), ({"cohort": 2}, 3, 1, 2),
    ],
)  # fmt: skip
def test_of_four_clients_all_take_part_and_one_is_left_out(given, clients, unseen, cohort) -> None:
    """Whoever is unseen is one of the four, not a fifth; everybody else takes part in every round."""
    from metavd.runs.settings import Experiment, with_settings
    from metavd.runs.setup import complete

    e = complete(with_settings(Experiment(), given), collection.collect(four()))
    assert (e.clients, e.cohort) == (clients, cohort)
    assert e.unseen == unseen or (e.unseen, unseen) == (0.25, 1)


def test_what_was_chosen_is_said_before_the_first_round() -> None:
    said: list[str] = []

    class Heard:
        def start(self, experiment, done): ...
        def round(self, _record):
            said.append("round")

        def evaluation(self, round, summary): ...
        def note(self, text):
            said.append(text)

    result = run(method="fedavg", source=four(), rounds=1, unseen="photo", listener=Heard())
    assert said[0] == "clients: art, cartoon, sketch; photo is left out of training and only tested"
    assert "all 3 clients take part in every round" in said[1]
    assert said.index("round") > 1
    assert result["names"] == {"clients": ["art", "cartoon", "sketch", "photo"], "classes": ["cat", "dog"]}


def test_clients_that_are_not_used_are_told() -> None:
    """Of clients with one row each a single one takes part, and there is nothing to measure: neither goes unsaid."""
    from metavd.runs.settings import Experiment
    from metavd.runs.setup import prepare

    x = np.random.default_rng(0).normal(size=(40, 3))
    setup = prepare(Experiment(), arrays(x, (x[:, 0] > 0).astype(int), client=np.arange(40)))
    assert setup.notes[0] == (
        "1 of the data's own clients takes part; 0 more are left out and only tested; "
        "39 are not used (clients=NUMBER takes more, 40 of all clients have one row only)"
    )
    assert "no client that takes part has a test row, so nothing is measured on them" in setup.notes


def test_ticks_of_the_picture_are_the_names() -> None:
    """One tick for each client and each class, at whole places."""
    axes = clients_figure(federate(four(), "natural", clients=3, unseen="sketch", seed=0)).axes[1]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["art", "cartoon", "photo", "sketch"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["cat", "dog"]
    assert list(axes.get_xticks()) == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with PACS's layout: domain/class/picture."""
    place = tmp_path_factory.mktemp("named")
    digits = load_digits()
    for row in range(240):
        below = place / "pacs" / DOMAINS[row % 4] / ("dog", "cat")[int(digits.target[row]) % 2]
        below.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[row] * 15).astype(np.uint8)).save(below / f"{row}.png")
    return place


def test_names_reach_every_file_and_command(pictures, monkeypatch, capsys) -> None:
    """clients.csv, result.json, the report, data show, personalize, predict, and the table of left-out domains."""
    monkeypatch.chdir(pictures)

    def metavd(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["metavd", *words])
        main()
        return capsys.readouterr().out

    shown = metavd("data", "show", "--data", "folder:pacs", "--set", "unseen=sketch")
    assert all(name in shown for name in (*DOMAINS, "dog"))
    metavd("run", "reptile+metavd", "--data", "folder:pacs", "--rounds", "2", "--out", "out", "--set", "unseen=sketch")
    with Path("out/clients.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["name"] for line in lines] == list(DOMAINS)
    assert [line["unseen"] for line in lines] == ["0", "0", "0", "1"]
    assert json.loads(Path("out/result.json").read_text())["names"]["classes"] == ["cat", "dog"]
    assert [client.name for client in read_run(Path("out")).clients] == list(DOMAINS)
    metavd("report", "out", "--out", "page.html")
    page = Path("page.html").read_text()
    assert all(f'"{name}"' in page for name in DOMAINS)
    assert "art" in page
    assert "client-sketch" in metavd("personalize", "out", "--client", "sketch")
    answers = metavd("predict", "out/personal/client-sketch", "--data", "folder:pacs/sketch")
    assert "p_cat,p_dog" in answers.splitlines()[0]
    metavd("predict", "out", "--client", "art", "--data", "folder:pacs/art")
    table = metavd("compare", "fedavg", "reptile", "--data", "folder:pacs", "--leave-out", "each", "--rounds", "1",
                   "--seeds", "1", "--out", "table")  # fmt: skip
    assert all(name in table for name in (*DOMAINS, "mean", "fedavg", "reptile"))
    content = json.loads(Path("table/leave_out.json").read_text())
    assert list(content["rows"]["fedavg"]) == [*DOMAINS, "mean"]
    each = [content["rows"]["fedavg"][name][0] for name in DOMAINS]
    assert content["rows"]["fedavg"]["mean"][0] == pytest.approx(sum(each) / 4)
