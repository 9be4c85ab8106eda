"""Our engine on a workload: `python -m metavd.bench.ours` reads an order from standard input and prints its times."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from ..core import rng
from ..data.cohort import choose
from ..data.source import arrays
from ..engine.rounds import Record
from ..runs.run import rounds_of
from ..runs.settings import Experiment, with_settings
from ..runs.setup import Setup, prepare, start, using
from .plain import images, tell
from .workload import Workload, from_json, timed

_ENDLESS = 10**6
"""Rounds of the experiment: whoever measures stops earlier."""


def setup_of(work: Workload, device: str, settings: dict[str, object] | None = None) -> Setup:
    """Build a workload's experiment."""
    x, y = images(work)
    source = arrays(x, y, name=work.name, mean=[0.5], std=[0.5], num_classes=work.classes, augment=work.augment)
    experiment = Experiment(
        method="fedavg", partition=work.partition, clients=work.clients, unseen=0, cohort=work.cohort, rounds=_ENDLESS,
        model=work.model, width=work.width, test_share=0.0, device=device,
        options={"batch": work.batch, "local_epochs": work.epochs, "lr": work.lr, "clip": work.clip},
    )  # fmt: skip
    setup = prepare(with_settings(experiment, settings or {}), source)
    if work.keep:
        held = setup.pool.federation
        held = replace(held, train=tuple(rows[: work.keep] for rows in held.train))
        setup = replace(setup, pool=setup.pool._replace(federation=held))
    return setup


def dealt(work: Workload, rounds: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return each client's number of rows and who is asked in each round, as our engine has it."""
    setup = setup_of(work, "cpu")
    key = rng.key(setup.experiment.seed)
    cohorts = tuple(tuple(choose(key, round, work.clients, work.cohort).tolist()) for round in range(rounds))
    return tuple(len(rows) for rows in setup.pool.federation.train[: work.clients]), cohorts


def main() -> None:
    """Read an order, measure, print."""
    order = from_json(sys.stdin.read())
    setup = setup_of(order.work, order.device, dict(order.settings))
    with using(setup):
        steps = rounds_of(setup, start(setup))
        records: list[Record] = []

        def round(_: int) -> float | None:
            records.append(next(steps)[1])
            return records[-1].loss

        found = timed(order, round, time.perf_counter)
    sizes = [len(rows) for rows in setup.pool.federation.train]
    timed_records = records[order.warm_up :]
    found["trained"] = [order.work.epochs * sum(sizes[client] for client in each.cohort) for each in timed_records]
    found["backend"] = setup.experiment.backend
    found["precision"] = setup.experiment.precision
    tell(found, order.device)


if __name__ == "__main__":
    main()
