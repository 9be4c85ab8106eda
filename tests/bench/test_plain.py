"""The reference loop computes FedAvg, and what our engine computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from metavd.bench import plain
from metavd.bench.ours import dealt, setup_of
from metavd.bench.plain import average, clients_of, crop_and_flip, images, network, one_process, several_processes
from metavd.bench.workload import CIFAR, PAPER, TINY, Assignment, Workload
from metavd.models.cnn import cnn
from metavd.models.mlp import mlp
from metavd.runs.run import rounds_of
from metavd.runs.setup import start

SMALL = replace(TINY, clients=6, rows=60, cohort=4, batch=10, width=8)


def order_of(work: Workload, **more: object) -> Assignment:
    sizes, cohorts = dealt(work, 3)
    return replace(Assignment(work, "cpu", sizes, cohorts, first=0, warm_up=0, rounds=2, budget=9.0), **more)


@pytest.mark.parametrize(("work", "ours"), [(CIFAR, cnn), (TINY, mlp)])
def test_the_network_is_ours(work, ours):
    """Parity: the same layers in the same order, the same shapes of weights."""
    mine, theirs = network(work), ours(work.shape, work.classes, work.width)
    assert [type(layer) for layer in mine] == [type(layer) for layer in theirs]
    assert [value.shape for value in mine.parameters()] == [value.shape for value in theirs.parameters()]


def test_average_is_weighted_by_rows():
    states = [{"w": torch.tensor([0.0, 3.0])}, {"w": torch.tensor([3.0, 0.0])}]
    assert average(states, [1, 2])["w"].tolist() == [2.0, 1.0]


def test_a_round_is_the_engines(monkeypatch):
    """Parity: from the same weights, with one step on all rows of each client, both average to the same weights."""
    order, setup = order_of(SMALL), setup_of(SMALL, "cpu", {"dtype": "float64"})
    federation = setup.pool.federation
    state = start(setup)
    state = state._replace(params={name: value.float().double() for name, value in state.params.items()})
    wanted, _ = next(rounds_of(setup, state))
    x, y = images(SMALL)
    rows = [row for part in federation.train for row in part]
    monkeypatch.setattr(plain, "images", lambda _: (x[rows], y[rows]))
    server = network(SMALL)
    server.load_state_dict(
        dict(zip(server.state_dict(), [value.float() for value in state.params.values()], strict=True))
    )
    states, _ = clients_of(order)(server, order.cohorts[0])
    mean = average(states, [order.sizes[client] for client in order.cohorts[0]])
    for mine, right in zip(mean.values(), wanted.params.values(), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tuned", [False, True])
def test_processes_share_a_cohort(tuned):
    """Parity: two processes give the rounds of one, where a client has a single batch and order does not matter."""
    order = order_of(SMALL, tuned=tuned)
    losses = []
    for make, told in ((one_process, order), (several_processes, replace(order, processes=2, threads=1))):
        torch.manual_seed(0)  # of the server's first weights
        round = make(told)
        losses.append([round(0), round(1), round(2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_crops_are_windows_of_the_padded_image():
    """Law: pixels come from the image or its border, at one place for all channels; with nothing to see, nothing."""
    torch.manual_seed(0)
    x = torch.randint(1, 255, (8, 3, 12, 12), dtype=torch.uint8)
    out = crop_and_flip(x)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    flat = torch.nn.functional.pad(x, (4, 4, 4, 4))
    for image, seen in zip(flat, out, strict=True):
        windows = [image[:, i : i + 12, j : j + 12] for i in range(9) for j in range(9)]
        assert any(torch.equal(seen, each) or torch.equal(seen, each.flip(2)) for each in windows)


def test_clients_are_dealt_as_the_engine_has_them():
    """Law: every row belongs to one client, cohorts are sorted and of their size; ragged where the paper's are."""
    small = replace(PAPER, rows=600, clients=12, cohort=5)
    sizes, cohorts = dealt(small, 4)
    assert sum(sizes) == 600
    assert len(set(sizes)) > 1
    assert all(len(set(cohort)) == 5 and list(cohort) == sorted(cohort) for cohort in cohorts)
    sizes, _ = dealt(replace(SMALL, keep=3), 1)
    assert set(sizes) == {3}
