"""Whole runs of the paper's setting on real images, from the start of a process to its result.

`python -m metavd.bench.whole` reads an order from standard input and prints what the run took.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from itertools import pairwise
from typing import Any

from ..engine.rounds import Record, Silent
from ..runs.run import run

RUNS = (("fedavg", 1), ("reptile", 1), ("reptile+metavd", 1), ("maml", 1), ("perfedavg", 1), ("reptile+metavd", 4))
"""Methods, and how many runs of each at once."""
SETTING: dict[str, Any] = {
    "data": "cifar10", "partition": "dirichlet:0.5", "clients": 100, "unseen": 30, "cohort": 10, "batch": 64,
    "local_epochs": 5, "model": "cnn", "width": 64, "rounds": 1000, "eval_every": 100, "seed": 777,
}  # fmt: skip


class Clock(Silent):
    """Remembers when rounds were over."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def round(self, record: Record) -> None:  # noqa: ARG002
        """Note the time."""
        self.ends.append(time.time())

    def median(self) -> float:
        """Return what a round took, the first one aside."""
        return statistics.median(later - earlier for earlier, later in pairwise(self.ends))


def main() -> None:
    """Read an order, run, print."""
    order: dict[str, Any] = json.loads(sys.stdin.read())
    clock = Clock()
    result = run(listener=clock, **SETTING | order["settings"])
    found = {
        "method": result["method"],
        "rounds": result["rounds"],
        "seconds": time.time() - order["began"],
        "start_s": clock.ends[0] - order["began"],
        "round_s": clock.median(),
        "precision": result["precision"],
        "test": result["test"]["accuracy"],
        "unseen": result["unseen"]["accuracy"],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
