"""What is measured: workloads, the arithmetic of a round, and the order that a measuring process is given.

Nothing but the standard library is imported, since frameworks may live in an environment of their own.

Shape letters: C channels, H x W pixels, K classes.
"""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Workload:
    """FedAvg on random images: the same model, data and cohorts for everyone who is measured."""

    name: str
    model: str
    """cnn: three convolutions of `width` filters, then 4 width, 2 width and K units; mlp: width, width/2, K units."""
    width: int
    shape: tuple[int, int, int]
    clients: int
    rows: int
    """Images of all clients together."""
    cohort: int
    batch: int
    epochs: int
    partition: str = "iid"
    augment: bool = False
    keep: int = 0
    """Training rows that a client keeps of those dealt to it; 0: all."""
    classes: int = 10
    lr: float = 0.02
    clip: float = 5.0


CIFAR = Workload("cifar", "cnn", 64, (3, 32, 32), clients=100, rows=32_000, cohort=10, batch=64, epochs=1)
TINY = Workload("tiny", "mlp", 64, (1, 8, 8), clients=200, rows=4_000, cohort=100, batch=10, epochs=1)
PAPER = Workload("paper", "cnn", 64, (3, 32, 32), clients=100, rows=50_000, cohort=10, batch=64, epochs=5,
                 partition="dirichlet:0.5", augment=True)  # fmt: skip
PAPER_100 = replace(PAPER, name="paper100", cohort=100)
WORKLOADS = {
    "cpu": (CIFAR, TINY),
    "cuda": (PAPER, PAPER_100, CIFAR, TINY),
}
"""By device; the first is the one that speaks for the device."""

_SMALL = Workload("", "mlp", 64, (1, 8, 8), clients=1_000, rows=20_000, cohort=10, batch=10, epochs=1)
_CURVES: dict[str, tuple[Workload, tuple[int, ...]]] = {
    "cohort": (_SMALL, (1, 3, 10, 30, 100, 300, 1_000)),
    "clients": (replace(_SMALL, rows=1_000_000, keep=10), (100, 1_000, 10_000, 100_000)),
    "width": (replace(CIFAR, rows=3_200, clients=10, cohort=2), (16, 32, 64, 128, 256)),
}
CURVES = tuple(_CURVES)
"""What is varied in the scaling curves, all else being equal."""


def curve(name: str, device: str, *, quick: bool = False) -> list[tuple[int, Workload]]:
    """Return the points of a scaling curve: each value of what is varied, and its workload.

    A GPU is asked for the paper's network also where the cohort grows.

    >>> [value for value, _ in curve("clients", "cpu", quick=True)]
    [100, 10000]
    """
    base, values = _CURVES[name]
    if device == "cuda" and name == "cohort":
        base = replace(CIFAR, clients=1_000, rows=64_000)
    if device == "cuda" and name == "width":
        base = CIFAR
    chosen = values[::2][:2] if quick else values
    changes: list[dict[str, Any]] = [{name: value, "name": f"{name}={value}"} for value in chosen]
    return [(value, replace(base, **change)) for value, change in zip(chosen, changes, strict=True)]


def layer_flops(work: Workload) -> list[int]:
    """Return the operations of each layer's product for one image; a multiplication and an addition are two."""
    channels, height, across = work.shape
    hidden = (4 * work.width, 2 * work.width) if work.model == "cnn" else (work.width, max(work.width // 2, 1))
    flops, inputs = [], math.prod(work.shape)
    if work.model == "cnn":
        for _ in range(3):
            flops.append(2 * 9 * channels * work.width * height * across)
            channels, height, across = work.width, height // 2, across // 2
        inputs = channels * height * across
    sizes = [inputs, *hidden, work.classes]
    return flops + [2 * a * b for a, b in pairwise(sizes)]


def training_flops(work: Workload) -> int:
    """Return the operations of one image's forward and backward pass.

    Backward costs each layer two products, by its weights and by its inputs; the first layer's inputs are data.
    """
    flops = layer_flops(work)
    return 3 * sum(flops) - flops[0]


@dataclass(frozen=True)
class Assignment:
    """What one measuring process is told."""

    work: Workload
    device: str
    sizes: tuple[int, ...]
    """Training rows of each client."""
    cohorts: tuple[tuple[int, ...], ...]
    """Who is asked in each round; after the last, it begins anew."""
    first: int
    """The number of the first round that is timed; the same for all, since rounds of ragged clients differ."""
    warm_up: int
    """Rounds before it that are run."""
    rounds: int
    budget: float
    """Seconds after which no further round is begun, once two are timed."""
    tuned: bool = False
    """Whether everything that a plain loop can be given is given: channels_last, memory that is kept, no waiting."""
    processes: int = 1
    threads: int = 0
    """Threads of each process; 0: as torch chooses."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Further settings of our engine."""

    def to_json(self) -> str:
        """Write the order for the process's standard input."""
        return json.dumps(asdict(self))

    def images(self) -> list[int]:
        """Return how many images each timed round trains on."""
        asked = (self.cohorts[(self.first + i) % len(self.cohorts)] for i in range(self.rounds))
        return [self.work.epochs * sum(self.sizes[client] for client in cohort) for cohort in asked]


def from_json(text: str) -> Assignment:
    """Read an order."""
    told = json.loads(text)
    work = told.pop("work")
    return Assignment(
        work=Workload(**work | {"shape": tuple(work["shape"])}),
        sizes=tuple(told.pop("sizes")),
        cohorts=tuple(map(tuple, told.pop("cohorts"))),
        settings=tuple(map(tuple, told.pop("settings"))),
        **told,
    )


def answered(status: int, said: str, failed: str) -> dict[str, Any]:
    """Return the figures in a process's last line of JSON, or what it said last before it failed.

    Frameworks write to its output, too.
    """
    lines = [line for line in said.splitlines() if line.startswith("{")]
    if status or not lines:
        return {"error": (failed.strip().splitlines() or [f"exit status {status}"])[-1]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def timed(order: Assignment, round: Callable[[int], float | None], clock: Callable[[], float]) -> dict[str, Any]:
    """Run rounds until there are enough, and return what they took and the last one's loss."""
    began, loss = clock(), None
    for number in range(order.first - order.warm_up, order.first):
        loss = round(number)
    ready = clock()
    seconds: list[float] = []
    while len(seconds) < order.rounds and (len(seconds) < 2 or clock() - ready < order.budget):
        start = clock()
        loss = round(order.first + len(seconds))
        seconds.append(clock() - start)
    return {"seconds": seconds, "warm_up_s": ready - began, "loss": loss}


def peak_mb() -> float:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
