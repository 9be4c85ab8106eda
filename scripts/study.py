"""What studies on a GPU share: runs of the paper's setting on CIFAR-10, each kept as soon as it is finished."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tables

from metavd.bench.whole import SETTING
from metavd.engine.rounds import Listener
from metavd.runs.run import run
from metavd.runs.store import Store
from metavd.studies.lines import Line, read
from metavd.studies.many import carry_out, taken
from metavd.studies.markdown import write

Changes = dict[str, Any]
"""What a run changes in the setting."""
SCOPE = "curve"
"""Of the stores: a result is the evaluations of a run, accuracies in percent."""


class Case(NamedTuple):
    """One run of a study."""

    changes: Changes
    line: Line

    @property
    def curve(self) -> list[dict[str, float]]:
        """Its evaluations, the first one first."""
        return list(self.line["result"]["curve"])


def _point(round: int, summary: Mapping[str, Any]) -> dict[str, float]:
    found = {part: 100 * summary[part]["accuracy"] for part in ("test", "unseen", "valid") if part in summary}
    return {"round": round, **found, "nll": summary["test"]["nll"]}


def curve(root: str, settings: dict[str, Any], folder: Path, listener: Listener) -> dict[str, Any]:
    """Carry out one run on a GPU, and keep its evaluations; see `metavd.studies.many.Work`."""
    result = run(**settings, root=root, device="cuda", out=folder, resume=True, listener=listener)
    return taken(result, {"curve": [_point(line["round"], line) for line in Store(folder).evaluations(result)]})


def carried_out(changes: Sequence[Changes], store: Path, root: str | None) -> list[Case]:
    """Return all cases that are in the store, in their order; with a root, run those that are missing."""
    tasks = {number: SETTING | each for number, each in enumerate(changes)}
    if root is not None:
        work = Path("runs") / store.stem
        for ended in carry_out(
            tasks, partial(curve, root), store=store, scope=SCOPE, work=work, strict=True, jobs=0,
            device="cuda",
        ):  # fmt: skip
            print(f"{ended.end}: {changes[ended.key]}")
    found = tables.stored(tasks, read(store, SCOPE, print), SCOPE)
    return [Case(changes[number], line) for number, line in found.items()]


def main(
    doc: str, changes: Callable[[argparse.Namespace], Sequence[Changes]], page: Callable[..., str], store: Path,
    **counts: int,
) -> None:  # fmt: skip
    """Read the command line, run what is missing, write the page; `counts` are options with their defaults."""
    parser = tables.reading(doc)
    parser.add_argument("--root", help="folder with CIFAR-10's files")
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--store", type=Path, default=store)
    parser.add_argument("--page", type=Path, help="document to write")
    parser.add_argument("--render", action="store_true", help="run nothing")
    given = parser.parse_args()
    if given.root is None and not given.render:
        parser.error("--root is missing; it names the folder with CIFAR-10's files")
    wanted = changes(given)
    cases = carried_out(wanted, given.store, None if given.render else given.root)
    if len(cases) < len(wanted):
        parser.error(
            f"{given.store} holds {len(cases)} of {len(wanted)} runs; give --root, and not --render, for the rest"
        )
    if given.page is not None:
        write(given.page, page(given, cases))
