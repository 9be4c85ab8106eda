"""Print a row of docs/scale.md: how start, memory and rounds grow with the number of clients.

python scripts/many_clients.py METHOD CLIENTS [ROWS]
"""

from __future__ import annotations

import resource
import sys
import time

import numpy as np

import metavd
from metavd.runs.evaluation import evaluate
from metavd.runs.run import rounds_of
from metavd.runs.settings import Experiment
from metavd.runs.setup import prepare, start

ROUNDS, TESTED = 20, 100


def main() -> None:
    """Measure one method with one number of clients, ten rows each unless told otherwise."""
    method, clients = sys.argv[1], int(sys.argv[2])
    rows = int(sys.argv[3]) if len(sys.argv) > 3 else 10 * clients
    draw = np.random.default_rng(0)
    y = draw.integers(0, 4, rows)
    x = draw.standard_normal((rows, 8), np.float32) + np.eye(8, dtype=np.float32)[y]
    source = metavd.arrays(x, y, name="tiny")
    began = time.monotonic()
    e = Experiment(
        method=method, clients=clients, unseen=0, cohort=10, rounds=ROUNDS, partition="iid", test_rows="uniform",
        model="mlp", width=8, eval_clients=TESTED, final_clients=TESTED, device="cpu",
    )  # fmt: skip
    setup = prepare(e, source)
    last = begun = start(setup)
    ready = time.monotonic()
    marks = [ready]
    for now, _ in rounds_of(setup, begun):
        last = now
        marks.append(time.monotonic())
    evaluate(setup, last, count=TESTED)
    tested = time.monotonic() - marks[-1]
    # The first rounds of a process pay for what is made once.
    each = np.median(np.diff(marks)[ROUNDS // 4 :])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"| `{method}` | {clients:,} | {rows:,} | {ready - began:.1f} | {1e3 * each:.0f} | {tested:.2f} | {peak:.2f} |"
    )


if __name__ == "__main__":
    main()
