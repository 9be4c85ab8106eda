"""A site's rows: read where they are, alike for all, and never sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from PIL import Image

import metavd
from metavd.data.source import digits, moments
from metavd.errors import UserError
from metavd.evaluate.figures import of_clients
from metavd.flower.config import FederationError, node_config
from metavd.flower.site import Look, agree, check_fit, look, read_look, shared, write_look
from metavd.wire import decode

from .support.grid import SMALL, FakeGrid, Node, shares


@pytest.fixture
def three_sites(tmp_path: Path) -> dict[int, Node]:
    """Digits at three sites, none of which has all classes, as .npz files."""
    source = digits()
    nodes = {}
    for i in range(3):
        rows = np.flatnonzero((source.y % 3 != i) & (np.arange(len(source.y)) % 3 == i))
        path = tmp_path / f"site {i}.npz"
        np.savez(path, images=source.x[rows, 0], labels=source.y[rows])
        nodes[50 - i] = Node({"data": f"npz:{path}", "name": f"site {i}"}, key=b"abc"[i : i + 1])
    return nodes


def test_sites_with_their_own_files_train_together(federate, three_sites, tmp_path):
    """No site has all classes or knows how many there are; the federation does, and learns them."""
    settings = {"data": "", "clients": 0, "rounds": 6, "set": "model=mlp width=32 lr=0.1 local_epochs=3"}
    result = federate(FakeGrid(three_sites), method="reptile", **settings)
    assert result["data"] == "sites"
    assert result["clients"] == 3
    assert result["test"]["accuracy"] > 0.8
    assert metavd.flower.registry.load(tmp_path / "run" / "registry.json").rows == 3


def test_sites_with_their_own_files_answer_with_their_own_label_shares(federate, three_sites, tmp_path):
    """Their test rows are of their own rows, so a class that a site does not have is hardly ever right there."""
    settings = {"data": "", "clients": 0, "rounds": 1, "set": "model=mlp width=8"}
    federate(FakeGrid(three_sites), method="fedavg+prior", **settings)
    told = (tmp_path / "run" / "config.toml").read_text()
    assert 'prior_answer = "with"' in told


def test_the_numbers_that_sites_agree_on_are_those_of_all_rows(three_sites):
    """Mean and standard deviation from the sites' own are those of their rows together."""
    looks = {node.config["name"]: look(node_config(node.config)) for node in three_sites.values()}
    takes, classes = agree(looks)
    x = np.concatenate([np.load(node.config["data"][4:])["images"] for node in three_sites.values()])
    mean, std = moments(x[:, None])
    assert takes.mean == pytest.approx([mean[0] / 255])
    assert takes.std == pytest.approx([std[0] / 255])
    assert (takes.x.shape[1:], takes.num_classes, classes) == ((1, 8, 8), 10, [str(i) for i in range(10)])


def test_folders_are_joined_by_the_names_of_their_classes(tmp_path, federate):
    """A site that lacks a class still gives the others the numbers that all use."""
    generator = np.random.default_rng(0)
    held = {"a": ("cat", "dog"), "b": ("cat", "emu")}
    for site, names in held.items():
        for name in names:
            (tmp_path / site / name).mkdir(parents=True)
            for i in range(20):
                image = generator.integers(0, 60, (8, 8)) + 60 * ("cat", "dog", "emu").index(name)
                Image.fromarray(image.astype(np.uint8)).save(tmp_path / site / name / f"{i}.png")
    nodes = {
        i: Node({"data": f"folder:{tmp_path / site}", "name": site}, key=site.encode()) for i, site in enumerate(held)
    }
    _, classes = agree({node.config["name"]: look(node_config(node.config)) for node in nodes.values()})
    assert classes == ["cat", "dog", "emu"]
    settings = {"data": "", "clients": 2, "rounds": 4, "set": "model=mlp width=16 lr=0.1"}
    assert federate(FakeGrid(nodes), method="fedavg", **settings)["test"]["accuracy"] > 0.6


def test_token_ids_stay_token_ids(tmp_path, federate):
    """Sites with sentences as ids train an LSTM together, which knows the largest id of any; a stranger is refused."""
    draw = np.random.default_rng(0)
    nodes = {}
    for i in range(3):
        x = draw.integers(1, 20 + i, (40, 5))
        x[0, 0] = 20 + i
        np.savez(tmp_path / f"{i}.npz", x=x.astype(np.uint8), y=np.arange(40) % 2)
        nodes[i] = Node({"data": f"npz:{tmp_path / f'{i}.npz'}", "name": f"site {i}"}, key=b"abc"[i : i + 1])
    looks = {node.config["name"]: look(node_config(node.config)) for node in nodes.values()}
    takes, _ = agree(looks)
    assert (takes.tokens, takes.mean, takes.std, takes.scale) == (23, (0.0,), (1.0,), 1.0)
    with pytest.raises(FederationError, match="token id 23, but the run knows 23"):
        check_fit(replace(looks["site 0"], tokens=24), takes, ["0", "1"])
    settings = {"data": "", "clients": 3, "rounds": 1, "set": "model=lstm width=4 batch=8"}
    assert federate(FakeGrid(nodes), method="fedavg", **settings)["test"]["nll"] > 0, "the LSTM takes nothing else"


@pytest.mark.parametrize(
    ("name", "content"),
    [("table:f.csv,label=ill", "age,ill\n1,a\n2,b\n3,a\n"), ("text:f.csv", "text,label\na b,1\nc,2\n")],
)
def test_what_would_be_learnt_of_all_rows_is_refused(name, content, tmp_path, monkeypatch):
    """A table's columns and a text's words are learnt of training rows, which no site may see of another."""
    monkeypatch.chdir(tmp_path)
    Path("f.csv").write_text(content)
    with pytest.raises(FederationError, match="which no site may see; give every site an npz"):
        look(node_config({"data": name}))
    with pytest.raises(FederationError, match="which no site may see"):
        shared(name)


LOOK = Look(10, (1, 8, 8), "uint8", 3, (), (0.5,), (0.2,), 1 / 255, False)


def test_sites_that_do_not_fit_are_named():
    other = Look(10, (3, 8, 8), "uint8", 3, (), (0.5,) * 3, (0.2,) * 3, 1 / 255, False)
    with pytest.raises(FederationError, match=r"a has rows of shape \(1, 8, 8\) .* but b of \(3, 8, 8\)"):
        agree({"b": other, "a": LOOK})
    with pytest.raises(FederationError, match="classes is 2, but a site has label 2"):
        agree({"a": LOOK}, classes=2)
    assert agree({"a": LOOK}, classes=7)[0].num_classes == 7


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": 1}', write_look(LOOK).replace("0.5", "NaN")])
def test_what_a_site_says_is_checked(text):
    with pytest.raises(FederationError, match="what the site says of its rows cannot be read"):
        read_look(text)
    assert read_look(write_look(LOOK)) == LOOK


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        ({}, "this node has no data; start it with --data npz:rows.npz"),
        ({"data": "npz:x.npz", "polcy": "p.toml"}, "there is no node config key 'polcy'; did you mean policy"),
        ({"partition-id": "first"}, "partition-id is 'first', but must be a whole number"),
        ({"partition-id": 0, "train": "no"}, "train is 'no', but must be true or false"),
        ({"data": "digits+mnist"}, "names 2 datasets, but a site holds one"),
    ],
)
def test_a_node_without_usable_data_says_what_would_be_right(node, sentence):
    with pytest.raises(UserError, match=sentence):
        look(node_config(node))


# --- what leaves a site ----------------------------------------------------------------------------------------------


def bytes_of(message: Message) -> bytes:
    """Everything of a message that is sent: all its objects as Flower writes them."""
    return b"".join(each.deflate() for each in get_all_nested_objects(message).values())


def windows(row: np.ndarray) -> Iterator[bytes]:
    """A row as it may look in memory: raw, normalised, in three types, whole and in halves."""
    flat = row.reshape(-1)
    normal = (flat / 16 - 0.305260) / 0.376049
    for values in (flat, normal):
        for dtype in (np.uint8, np.float16, np.float32, np.float64):
            if dtype == np.uint8 and values is normal:
                continue
            data = values.astype(dtype).tobytes()
            yield data
            yield data[: len(data) // 2]
            yield data[len(data) // 2 :]


ALLOWED = {
    "params": ArrayRecord, "reply": ConfigRecord, "metrics": MetricRecord,
}  # fmt: skip
METRICS = {
    "rows", "loss", "seconds", "anew", "changed",
    "train_size", "test_size", "bin_count", "bin_confidence", "bin_accuracy",
    *(figure.name for figure in of_clients()),
}  # fmt: skip


def leaks(message: Message, rows: np.ndarray) -> list[str]:
    """Return what a message gives away: rows in its bytes, or records that are neither weights nor numbers."""
    data = bytes_of(message)
    found = [f"row {i}" for i, row in enumerate(rows) if any(each in data for each in windows(row))]
    for name, record in message.content.items():
        if type(record) is not ALLOWED.get(name):
            found.append(name)
    found += [name for name in message.content["metrics"] if name not in METRICS]
    about = {"protocol", "round"} if message.metadata.message_type != MessageType.QUERY else {
        "protocol", "round", "name", "trains", "partition", "look",
    }  # fmt: skip
    return found + [name for name in message.content["reply"] if name not in about]


def test_no_row_leaves_a_site(federate, three_sites):
    """Every byte that left three sites in a whole run, read: weights, rates, counts and figures, and nothing else."""
    grid = FakeGrid(three_sites)
    settings = {"data": "", "clients": 3, "rounds": 2, "set": "model=mlp width=8"}
    federate(grid, method="reptile+metavd+drop", **settings)
    for node in three_sites.values():
        rows = np.load(node.config["data"][4:])["images"]
        kinds = [message.metadata.message_type for message in node.sent]
        assert kinds == [MessageType.QUERY, MessageType.TRAIN, MessageType.TRAIN, MessageType.EVALUATE]
        for message in node.sent:
            assert leaks(message, rows) == []
            if message.metadata.message_type == MessageType.TRAIN:
                asked = next(m for m in grid.received if m.metadata.message_type == MessageType.TRAIN)
                sent = bytes(message.content["params"]["params"].data)
                received = decode(bytes(asked.content["params"]["params"].data))
                assert set(decode(sent, like=received)) == received.keys()


def test_a_row_that_leaves_is_found(federate, three_sites, monkeypatch):
    """The test above can fail: a client that hides a row in its weights is caught."""
    from metavd.flower import client

    honest = client.encode

    def hiding(params, **how):
        rows = np.load(three_sites[50].config["data"][4:])["images"]
        weight = params["fc0.weight"].clone()
        normal = (rows[3].reshape(-1) / 16 - 0.305260) / 0.376049
        weight.view(-1)[:64] = torch.from_numpy(normal.astype(np.float32))
        return honest(params | {"fc0.weight": weight}, **how)

    monkeypatch.setattr(client, "encode", hiding)
    grid = FakeGrid(three_sites)
    federate(grid, method="reptile", data="", clients=3, rounds=1, set="model=mlp width=8")
    rows = np.load(three_sites[50].config["data"][4:])["images"]
    assert [leaks(message, rows) for message in three_sites[50].sent] == [[], ["row 3"], []]


def test_the_server_cannot_choose_what_a_site_reads(federate, tmp_path):
    """A run's dataset is for nodes that hold shares; a site with data of its own reads that and nothing else."""
    (tmp_path / "secret.npz").write_bytes(b"")
    nodes = shares(2) | {7: Node({"partition-id": 2, "data": f"npz:{tmp_path / 'own.npz'}"}, key=b"k")}
    source = digits()
    np.savez(tmp_path / "own.npz", images=source.x[:90, 0], labels=source.y[:90])
    # One step on its few rows is what a site refuses by default.
    federate(FakeGrid(nodes), method="fedavg", set=SMALL.replace("local_epochs=1", "local_epochs=3"))
    sizes = [m.content["metrics"]["rows"] for m in nodes[7].sent if m.metadata.message_type == MessageType.TRAIN]
    assert sizes
    assert max(sizes) < 90
