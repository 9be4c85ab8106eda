"""Workloads: the arithmetic of a network, orders as text, how long is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from metavd.bench.plain import network
from metavd.bench.workload import (
    CIFAR,
    CURVES,
    PAPER,
    TINY,
    WORKLOADS,
    Assignment,
    curve,
    from_json,
    layer_flops,
    timed,
    training_flops,
)


@pytest.mark.parametrize("work", [CIFAR, TINY, replace(CIFAR, width=7, shape=(1, 16, 24), classes=3)])
def test_the_formula_counts_what_torch_counts(work):
    """Closed form: forward and backward of some images, against torch's own counter."""
    net, rows = network(work), 3
    with FlopCounterMode(display=False) as counter:
        out = net(torch.zeros(rows, *work.shape))
    assert counter.get_total_flops() == rows * sum(layer_flops(work))
    with FlopCounterMode(display=False) as counter:
        functional.cross_entropy(net(torch.zeros(rows, *work.shape)), torch.zeros(rows, dtype=torch.int64)).backward()
    assert counter.get_total_flops() == rows * training_flops(work)
    assert out.shape == (rows, work.classes)


def make_order(**changes: object) -> Assignment:
    values = {"sizes": (5, 1, 2), "cohorts": ((0, 1), (1, 2)), "first": 1, "warm_up": 1, "rounds": 3, "budget": 9.0}
    return Assignment(**{"work": PAPER, "device": "cpu", **values, **changes})  # type: ignore[arg-type]


def test_an_order_survives_the_way_to_another_process():
    order = make_order(settings=(("precision", "tf32"), ("chunk", 3)), tuned=True)
    assert from_json(order.to_json()) == order


def test_images_of_a_round_are_those_of_its_cohort():
    """Closed form: five epochs over the rows of clients (1, 2), (0, 1), (1, 2)."""
    assert make_order().images() == [15, 30, 15]


def clock(steps: list[float]) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += steps[0]


@pytest.mark.parametrize(("tick", "wanted"), [(0.01, 3), (100.0, 2)])
def test_rounds_end_with_their_number_or_with_the_time(tick: float, wanted: int):
    """Law: the numbers of rounds are consecutive from warm-up on, and two are timed however long they take."""
    ticks = clock([tick])
    seen: list[int] = []

    def round(number: int) -> float:
        seen.append(number)
        return float(number)

    found = timed(make_order(first=4, warm_up=2), round, lambda: next(ticks))
    assert seen == list(range(2, 4 + wanted))
    assert found["seconds"] == pytest.approx([tick] * wanted)
    assert found["loss"] == seen[-1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", CURVES)
def test_a_curve_varies_one_thing(name: str, device: str):
    points = curve(name, device)
    values = [value for value, _ in points]
    assert values == sorted(values)
    assert {getattr(work, name) for _, work in points} == set(values)
    assert len({replace(work, **{name: 1}, name="") for _, work in points}) == 1
    assert set(curve(name, device, quick=True)) < set(points)
    for _, work in points:
        assert work.cohort <= work.clients <= work.rows


def test_names_of_workloads_and_curves_differ():
    for works in WORKLOADS.values():
        names = [work.name for work in works] + list(CURVES)
        assert len(set(names)) == len(names)
