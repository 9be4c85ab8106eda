"""How much memory and time clients cost that are not asked: resident memory and seconds per round, as ratios.

    python scripts/bench_data.py --root DIR [--json FILE]

Every line is a process of its own, so that its peak is its own. MNIST is dealt evenly to 100, 1,000 and 10,000 clients
of which each keeps six rows, so that a round is the same work whoever is asked; 10 are. CIFAR-100 is dealt to the
paper's 130. One seed, one thread, and one size of the embeddings, which by default grows with the number of clients. A
round is timed by the median of many, without evaluations; the seconds are of this machine, the ratios are what matters.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from metavd.core import rng
from metavd.runs.evaluation import evaluate
from metavd.runs.run import rounds_of
from metavd.runs.settings import Experiment
from metavd.runs.setup import prepare, start

ROUNDS = 30
CASES = {
    "cifar100, 130 clients": {"data": "cifar100", "partition": "dirichlet:0.5", "model": "cnn"},
    **{
        f"mnist, {clients:,} clients": {
            "data": "mnist", "partition": "iid", "clients": clients, "unseen": 0, "model": "small-cnn", "width": 16,
        }
        for clients in (100, 1_000, 10_000)
    },
}  # fmt: skip


def measure(settings: dict[str, Any]) -> dict[str, float]:
    """Train and evaluate once, in this process, and return its peak and its times."""
    experiment = Experiment(method="reptile+metavd", cohort=10, rounds=ROUNDS, seed=0, device="cpu",
                            options={"local_epochs": 1, "batch": 8, "embedding": 16}, **settings)  # fmt: skip
    began = time.perf_counter()
    setup = prepare(experiment)
    ready = time.perf_counter() - began
    if settings["data"] == "mnist":
        held = setup.pool.federation
        held = replace(held, train=tuple(rows[:6] for rows in held.train), test=tuple(rows[:1] for rows in held.test))
        setup = replace(setup, pool=setup.pool._replace(federation=held))
    seconds = []
    state = start(setup)
    rounds = 3 if settings["data"] == "cifar100" else ROUNDS
    steps = rounds_of(setup, state)
    for _ in range(rounds):
        began = time.perf_counter()
        state, _record = next(steps)
        seconds.append(time.perf_counter() - began)
    trained = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    began = time.perf_counter()
    evaluate(setup, state)
    keys = time.perf_counter()
    rng.permutation(rng.key(0), setup.experiment.clients)
    return {
        "prepare_s": ready,
        "round_s": statistics.median(seconds),
        "choose_s": time.perf_counter() - keys,
        "evaluate_s": keys - began,
        "trained_mb": trained,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main(argv: list[str] | None = None) -> int:
    """Run all cases, print a table, and the two ratios that may not grow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="folder with the files of MNIST and CIFAR-100")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.case:
        torch.set_num_threads(1)
        print(json.dumps(measure({"root": given.root, **CASES[given.case]})))
        return 0
    found: dict[str, dict[str, float]] = {}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    print(f"{'case':24}{'peak MB':>9}{'trained MB':>12}{'prepare s':>11}{'round ms':>10}{'evaluate s':>12}")
    for case in CASES:
        command = [sys.executable, __file__, "--root", given.root, "--case", case]
        answer = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if answer.returncode:
            print(answer.stderr, file=sys.stderr)
            return answer.returncode
        one = found[case] = json.loads(answer.stdout)
        print(f"{case:24}{one['peak_mb']:9.0f}{one['trained_mb']:12.0f}{one['prepare_s']:11.2f}"
              f"{1000 * one['round_s']:10.1f}{one['evaluate_s']:12.1f}")  # fmt: skip
    few, many = found["mnist, 100 clients"], found["mnist, 10,000 clients"]
    print(f"10,000 clients over 100: memory {many['peak_mb'] / few['peak_mb']:.3f}, "
          f"time of a round {many['round_s'] / few['round_s']:.3f}; "
          f"choosing a cohort {1e6 * few['choose_s']:.0f} and {1e6 * many['choose_s']:.0f} microseconds")  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
