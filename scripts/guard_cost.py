"""What bounds, checks and accounts cost an honest round in the simulator, as ratios to the round without them.

    python scripts/guard_cost.py [--rounds 60] [--page]

Each variant is a run of its own that takes its rounds in turn with the others, in one process: a machine that is busy
is busy for all of them. A ratio is the median, over rounds, of a variant's round to the plain one that came before it.
Processor time counts, not the clock. With --page the table is written into docs/federation.md.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tables import into, markdown

from metavd import tree
from metavd.core.types import Update
from metavd.engine.machine import tuned
from metavd.engine.rounds import Returned, Transport, rounds
from metavd.runs.provenance import provenance
from metavd.runs.run import ledger_of, server_update, transport
from metavd.runs.settings import Experiment, with_settings
from metavd.runs.setup import prepare, start
from metavd.wire import Expected, Guard, Limits, decode, encode

PAGE = Path("docs/federation.md")
SETTING: dict[str, Any] = {"data": "digits", "cohort": 12, "backend": "loop", "device": "cpu"}
"""Rounds of a tenth of a second: what is added shows more than in any that matter."""
METHODS = ("fedavg", "reptile+metavd")


def by_message(plain: Transport, guard: Guard | None = None) -> Transport:
    """Return a transport whose answers are packed and unpacked; with a guard, checked and compared too."""

    def collect(state: Any, now: Any) -> Returned:
        found = plain.collect(state, now)
        assert found.update is not None
        return found._replace(update=_read(guard, found.update, now.done + 1))

    return plain._replace(collect=collect)


def _read(guard: Guard | None, update: Update, round: int) -> Update:
    clients, taken = range(len(update.client)), []
    sent = [tree.unstack(update.sent, i) for i in clients]
    data = [encode(tree.unstack(update.params, i), mask_known=True) for i in clients]
    if guard is None:
        return update._replace(params=tree.gather([decode(data[i], like=sent[i]) for i in clients]))
    for i in clients:
        expected = Expected(int(update.client[i]), round, sent[i])
        taken.append((expected, guard.check(expected, round=round, samples=float(update.weight[i]), payload=data[i])))
    assert not guard.judge(taken), "an honest answer was refused"
    return update._replace(params=tree.gather([dict(reply.params) for _, reply in taken]))


def turns(method: str, count: int, wrap: Callable[[Transport], Transport] = lambda x: x, **more: Any) -> Iterator[None]:
    """Take a run's rounds one by one, its ledger included."""
    setup = prepare(with_settings(Experiment(), SETTING | {"method": method, "rounds": count} | more))
    for _ in rounds(server_update(setup), wrap(transport(setup)), start(setup), count, ledger_of(setup)):
        yield


def variants(method: str, count: int) -> dict[str, Iterator[None]]:
    """Return the runs that are compared; the first is the plain one."""
    free = {"noise": 0.0, "answer_clip": 0.0, "sampling": "fixed"}
    return {
        "plain": turns(method, count),
        "plain again": turns(method, count),
        "`max_share=2`": turns(method, count, max_share=2.0),
        "answers packed and unpacked, as in messages": turns(method, count, by_message),
        "the same, and the guard": turns(method, count, lambda plain: by_message(plain, Guard(Limits()))),
        "`+dp` without clip and noise": turns(f"{method}+dp", count, **free),
        "`+dp epsilon=1000`, ledger and budget": turns(f"{method}+dp", count, epsilon=1000.0, sampling="fixed"),
    }


def measured(method: str, count: int) -> dict[str, float]:
    """Return each variant's ratio to the plain round."""
    runs = variants(method, count)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(count):
        for name, each in runs.items():
            began = time.process_time()
            next(each)
            taken[name].append(time.process_time() - began)
    plain, *others = runs
    pairs = {name: zip(taken[name][2:], taken[plain][2:], strict=True) for name in others}
    return {name: median(own / base for own, base in pair) for name, pair in pairs.items()}


def main() -> None:
    """Measure, print, and write the page where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--page", type=Path, nargs="?", const=PAGE, help=f"document to write into; {PAGE}")
    given = parser.parse_args()
    with torch.no_grad(), tuned(10_000, "cpu"):
        found = {method: measured(method, given.rounds) for method in METHODS}
    about, busy = provenance("cpu"), os.getloadavg()[1] / (os.cpu_count() or 1)
    text = markdown(
        f"Written by `python scripts/guard_cost.py --rounds {given.rounds} --page`: `digits`, 12 clients per round, "
        f"each variant's processor time to that of a plain round, median of {given.rounds - 2} rounds taken in turn; "
        f"{about['machine']}, torch {about['torch']}, commit {about['commit']}, load {busy:.1f} per core.",
        ["beside the plain round", *(f"`{method}`" for method in METHODS)],
        [[name, *(f"{found[method][name]:.3f}" for method in METHODS)] for name in found[METHODS[0]]],
    )
    print(text)
    if given.page is not None:
        into(given.page, "costs", text)


if __name__ == "__main__":
    main()
