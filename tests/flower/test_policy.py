"""The server as the adversary: what an honest site's answer tells of its rows, and the policy that stops it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Message, MessageType

from metavd import wire
from metavd.data.source import digits
from metavd.engine.task import client_task
from metavd.flower import policy, site
from metavd.flower.config import FederationError, experiment_of, node_config, run_config
from metavd.flower.message import Order, payload, spec, write_order
from metavd.tree import Params

from .support.grid import FakeGrid, Node, shares

FULL = "model=mlp width=512 local_epochs=1 batch=1000 lr=1"
"""One step on all rows at once."""


def own_rows(folder: Path, count: int = 450) -> str:
    """A site's file."""
    source = digits()
    np.savez(folder / "rows.npz", images=source.x[:count, 0], labels=source.y[:count])
    return f"npz:{folder / 'rows.npz'}"


def crafted(params: Params) -> Params:
    """Weights with which a gradient holds rows: unit k of the first layer is on for rows brighter than threshold k.

    Everything behind treats all units alike, so that neighbours' gradients differ by the rows between two thresholds.
    """
    generator = torch.Generator().manual_seed(0)
    width, pixels = params["fc0.weight"].shape
    return params | {
        "fc0.weight": torch.full((width, pixels), 1 / pixels),
        "fc0.bias": -torch.linspace(-0.4, 0.4, width),
        "fc1.weight": torch.full_like(params["fc1.weight"], 0.01),
        "fc1.bias": torch.full_like(params["fc1.bias"], 0.5),
        "fc2.weight": 0.1 * torch.randn(params["fc2.weight"].shape, generator=generator),
    }


GROUP = 8


def trapped(params: Params, alike: float = 1.0) -> Params:
    """Weights with which units are on for hardly any row, in directions that look like any others'.

    The server chooses thresholds by digits of its own. One unit of each group is never on, and all of a group count
    alike behind it: what is left of another's gradient without that unit's is the rows that it is on for. `alike` is
    how much they do.
    """
    generator = torch.Generator().manual_seed(0)
    width, pixels = params["fc0.weight"].shape
    known = torch.from_numpy(digits().x[450:]).float().flatten(1)
    known = (known - known.mean()) / known.std()
    weight = torch.randn(width, pixels, generator=generator) / 8
    found = known @ weight.T
    bias = -torch.quantile(found, 0.998, dim=0)
    bias[::GROUP] = -3 * found.amax(0)[::GROUP].abs()
    shape = params["fc1.weight"].shape
    shared = torch.randn(shape[0], width // GROUP, generator=generator).repeat_interleave(GROUP, 1)
    own = torch.randn(shape, generator=generator)
    behind = (alike * shared + (1 - alike**2) ** 0.5 * own) / 16
    return params | {"fc0.weight": weight, "fc0.bias": bias, "fc1.weight": behind}


def read_traps(sent: Params, answer: Params) -> torch.Tensor:
    """(n, pixels): what the differences to a group's unit that is never on say that rows are."""
    weight, bias = (answer[name].double() - sent[name].double() for name in ("fc0.weight", "fc0.bias"))
    weight = (weight.unflatten(0, (-1, GROUP)) - weight[::GROUP, None])[:, 1:].flatten(0, 1)
    bias = (bias.unflatten(0, (-1, GROUP)) - bias[::GROUP, None])[:, 1:].flatten()
    there = bias.abs() > 1e-7
    return weight[there] / bias[there, None]


def read_back(sent: Params, answer: Params) -> torch.Tensor:
    """(n, pixels): what the differences of neighbouring units say that rows are."""
    weight, bias = (answer[name].double() - sent[name].double() for name in ("fc0.weight", "fc0.bias"))
    between, amount = weight.diff(dim=0), bias.diff()
    there = amount.abs() > 1e-7
    return between[there] / amount[there, None]


Attack = tuple[Callable[[Params], Params], Callable[[Params, Params], torch.Tensor]]
"""What a server sends in place of its weights, and how it reads the answer."""
BINS: Attack = (crafted, read_back)
TRAPS: Attack = (trapped, read_traps)
HIDDEN: Attack = (partial(trapped, alike=0.997), read_traps)
"""Copies that differ by so much that they pass for none."""


def recovered(folder: Path, config: dict[str, object], text: str = FULL, attack: Attack = BINS) -> tuple[int, int, str]:
    """Return how many rows a server gets from one answer of a site, of how many, and what the site said instead."""
    node = {"data": own_rows(folder), "name": "north", "state": str(folder / "state"), **config}
    takes, classes = site.agree({"north": site.look(node_config(node))})
    e = experiment_of(run_config({"method": "fedavg", "set": text}), takes, 1, {}, "x")
    task = client_task(e, takes)
    craft, read = attack
    sent = craft(task.algorithm.server.init(torch.tensor(0)).params)
    order = write_order(Order(0, 0, 7, spec(e, takes, classes), params=wire.encode(sent)))
    grid = FakeGrid({7: Node(node)})
    ids = grid.push_messages([Message(order, 7, MessageType.TRAIN)])
    (reply,) = grid.pull_messages(ids)
    held = site.settle(node_config(node), e, takes, classes)
    index = torch.from_numpy(held.pool.federation.train[0])
    rows = held.pool.inputs(index).flatten(1).double()
    if reply.has_error():
        return 0, len(rows), reply.error.reason
    found = read(sent, wire.decode(payload(reply.content), like=sent))
    near = torch.cdist(rows, found, p=float("inf")).min(1).values
    return int((near < 0.05).sum()), len(rows), ""


def test_one_full_batch_step_from_crafted_weights_gives_rows_back_without_a_policy(tmp_path):
    """The attack works: the test below would notice a policy that lets it through."""
    (tmp_path / "none.toml").write_text("least_steps = 1\nalike = 1\n")
    count, of, _ = recovered(tmp_path, {"policy": str(tmp_path / "none.toml")})
    assert of == 360
    assert count > 20


def test_the_default_policy_gives_no_row_back(tmp_path, caplog):
    """Refused before anything is trained: a sentence for the server, and the reason in the site's own log."""
    count, _, said = recovered(tmp_path, {})
    assert count == 0
    assert "the policy of the site does not allow what was asked" in said
    assert "steps" not in said
    logged = [each.getMessage() for each in caplog.records]
    assert any(
        "train is refused by this site's policy: the turn has 1 steps, but the policy" in each for each in logged
    )


@pytest.mark.parametrize("asked", ["local_epochs=3 batch=1000 lr=0.001", "local_epochs=1 batch=64 lr=0.001"])
def test_steps_alone_do_not_stop_it_but_crafted_layers_are_seen(tmp_path, asked):
    """With a small rate several steps, or an epoch of batches, add up to one gradient; copied units tell."""
    (tmp_path / "any.toml").write_text("alike = 1\n")
    text = f"model=mlp width=512 {asked}"
    assert recovered(tmp_path, {"policy": str(tmp_path / "any.toml")}, text)[0] > 0
    assert recovered(tmp_path, {}, text)[0] == 0


SMALL_STEPS = ["local_epochs=3 batch=1000 lr=0.01", "local_epochs=1 batch=64 lr=0.001"]


def test_traps_in_any_direction_are_seen_by_what_is_behind_them(tmp_path, caplog):
    """They give back more than bins do where everything is allowed, and nothing under the default policy."""
    (tmp_path / "none.toml").write_text("least_steps = 1\nalike = 1\n")
    assert recovered(tmp_path, {"policy": str(tmp_path / "none.toml")}, attack=TRAPS)[0] > 40
    assert recovered(tmp_path, {}, attack=TRAPS)[0] == 0
    for asked in SMALL_STEPS:
        count, _, said = recovered(tmp_path, {}, f"model=mlp width=512 {asked}", TRAPS)
        assert count == 0
        assert "the policy of the site does not allow what was asked" in said
    assert any("of the inputs of fc1.weight are copies" in each.getMessage() for each in caplog.records)


@pytest.mark.parametrize("asked", SMALL_STEPS)
def test_what_is_still_possible_is_little(tmp_path, asked):
    """Copies that are hidden pass the policy, as SECURITY.md says: of 360 rows a handful at most is given back."""
    count, _, said = recovered(tmp_path, {}, f"model=mlp width=512 {asked}", HIDDEN)
    assert not said
    assert count <= 5


@pytest.mark.parametrize(
    ("text", "asked", "why"),
    [
        ("least_rows = 500", "", "the site has 360 rows, but the policy wants 500"),
        ("least_batch = 32", "batch=8", "the largest batch has 8 rows, but the policy wants 32"),
        ("largest_batch = 64", "batch=100", "the largest batch has 100 rows, but the policy wants 1 to 64"),
        ('methods = ["reptile"]', "", "the method is fedavg, but the policy allows reptile"),
        ("[options]\nlocal_epochs = [3, 9]", "local_epochs=2", "local_epochs is 2, but the policy allows 3 to 9"),
        ("", "lr=0.00001", "lr is 1e-05, but the policy allows 0.001 to 10"),
    ],
)
def test_each_bound_is_enforced_whatever_the_server_asks(tmp_path, caplog, text, asked, why):
    (tmp_path / "policy.toml").write_text(text)
    count, _, said = recovered(tmp_path, {"policy": str(tmp_path / "policy.toml")}, f"model=mlp width=16 {asked}")
    assert count == 0
    assert "the policy of the site does not allow what was asked" in said
    assert any(why in each.getMessage() for each in caplog.records)


def test_weights_that_leap_and_turns_too_many_are_refused(tmp_path, caplog):
    """The second of two turns: the same weights pass a bound on their change, and a day has one turn only."""
    (tmp_path / "policy.toml").write_text("largest_change = 0.5\nrounds_a_day = 1\nalike = 1\n")
    config = {"policy": str(tmp_path / "policy.toml")}
    usual = "model=mlp width=16"
    assert not recovered(tmp_path, config, usual)[2]
    assert recovered(tmp_path, config, usual)[2]
    assert any("there were 1 turns in 24 hours" in each.getMessage() for each in caplog.records)
    kept = next((tmp_path / "state").rglob("received.safetensors"))
    own = policy.Shelf(kept.parent, "", 0, "cpu", print)
    last, _ = policy.load(policy._RECEIVED, kept.read_bytes())
    chosen = policy.Policy(largest_change=0.5, alike=1.0)
    policy.check_received(chosen, own, last)
    with pytest.raises(policy.RefusedError, match="the weights moved by"):
        policy.check_received(chosen, own, {name: value + 3 for name, value in last.items()})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("least_step = 3", "has the key 'least_step'"),
        ("least_steps = 0", "least_steps is 0"),
        ("methods = 3", "write methods = "),
        ("[options]\nlr = 3", r"write lr = \[0\.001, 1\.0\]"),
        ("least_steps =", "cannot be read"),
    ],
)
def test_a_policy_that_cannot_be_read_is_said_at_once(tmp_path, text, sentence):
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(FederationError, match=sentence):
        policy.read({"policy": str(tmp_path / "policy.toml")})
    assert policy.read({"data": "npz:x"}) == policy.Policy()
    assert policy.read({"partition-id": 0}) is None


def test_no_figures_of_few_rows(federate, tmp_path):
    """A site with fewer test rows than its policy wants sends none, not even how many it has."""
    (tmp_path / "policy.toml").write_text("figures_from = 100000\nleast_steps = 1\nleast_rows = 1\n")
    nodes = shares(3)
    nodes[993].config["policy"] = str(tmp_path / "policy.toml")
    result = federate(FakeGrid(nodes), method="fedavg")
    assert result["test"]["clients"] == 2
    assert dict(nodes[993].sent[-1].content["metrics"]) == {"train_size": 0, "test_size": 0}
