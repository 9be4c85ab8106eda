"""Measure what a federation costs beside the simulator, and where the time of a round goes.

    python scripts/federation_overhead.py --rounds 8

Three clients with shares of the digits: the simulator, a deployed federation with metavd's own nodes, and the same
with Flower's own (`flower-supernode`). Everything that is started is stopped again. Medians of the rounds after the
first, in seconds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from metavd.bench.whole import Clock
from metavd.flower.local import federation
from metavd.runs.run import run
from metavd.runs.store import Store

NODES = 3
TEXT = "unseen=0"


def simulated(method: str, rounds: int) -> float:
    """Return the simulator's seconds per round."""
    clock = Clock()
    run(method=method, clients=NODES, unseen=0, cohort=NODES, rounds=rounds, backend="loop", listener=clock)
    return clock.median()


def deployed(method: str, rounds: int, *, warm: bool) -> dict[str, float]:
    """Return a deployment's seconds per round, in parts, and the time until the first round has ended."""
    with federation(Path(tempfile.mkdtemp(prefix="metavd-overhead-")), warm=warm) as local:
        local.link()
        names = [f"client-{i}" for i in range(NODES)]
        local.register(names)
        for i, name in enumerate(names):
            local.node(name, {"partition-id": i, "name": name})
        time.sleep(20)  # nodes have started, and their starting is not counted
        out = local.folder / "out"
        config = {"method": method, "set": TEXT, "rounds": rounds, "clients": NODES, "data": "digits", "out": str(out)}
        began, first = time.monotonic(), 0.0

        def look() -> None:
            nonlocal first
            first = first or (time.monotonic() - began if Store(out).read_rounds() else 0.0)

        local.run(config, look)
        lines = Store(out).read_rounds()[1:]
    parts = {
        "round": [each["seconds"] for each in lines],
        "training": [each["seconds_training"] for each in lines],
        "transport": [each["seconds_waiting"] - each["seconds_training"] for each in lines],
        "server": [each["seconds"] - each["seconds_waiting"] for each in lines],
    }
    return {"first": first} | {name: median(values) for name, values in parts.items()}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--method", default="reptile+metavd")
    given = parser.parse_args()
    print(f"{given.method}, {NODES} clients, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores at the start")
    print("| | a round | training | transport and processes | server | first round after |")
    print("|---|---:|---:|---:|---:|---:|")
    print(f"| simulator | {simulated(given.method, given.rounds):.2f} | | | | |", flush=True)
    for name, warm in (("deployed, metavd's nodes", True), ("deployed, Flower's own nodes", False)):
        found = deployed(given.method, given.rounds, warm=warm)
        cells = [f"{found[key]:.2f}" for key in ("round", "training", "transport", "server", "first")]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
