"""What studies on a GPU share: runs of the paper's setting on CIFAR-10, each kept as soon as it is finished."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from metavd.bench.whole import SETTING
from metavd.engine.rounds import Silent
from metavd.runs.provenance import provenance
from metavd.runs.run import run
from metavd.studies.side import jobs_for, side_by_side

Line = dict[str, Any]
"""One run: what it changes in the setting, where it was made, and its evaluations."""


class _Curve(Silent):
    """Remembers evaluations, accuracies in percent."""

    def __init__(self) -> None:
        self.points: list[dict[str, Any]] = []

    def evaluation(self, round: int, summary: Any) -> None:
        found = {part: 100 * summary[part]["accuracy"] for part in ("test", "unseen", "valid") if part in summary}
        self.points.append({"round": round, **found, "nll": summary["test"]["nll"]})


def _run(changes: dict[str, Any], root: str) -> Line:
    curve = _Curve()
    settings = SETTING | {"root": root, "device": "cuda"} | changes
    run(listener=curve, **settings)
    made = provenance(settings["device"])
    made = {key: made[key] for key in ("commit", "machine", "torch")}
    return {"changes": changes, **made, "date": time.strftime("%Y-%m-%d", time.gmtime()), "curve": curve.points}


def _name(changes: dict[str, Any]) -> str:
    return json.dumps(changes, sort_keys=True)


def carried_out(cases: Sequence[dict[str, Any]], store: Path, root: str | None) -> list[Line]:
    """Return the lines of all cases that are in the store, in their order; with a root, run those that are missing."""
    lines = map(json.loads, store.read_text().splitlines() if store.exists() else [])
    done: dict[str, Line] = {_name(line["changes"]): line for line in lines}
    if root is not None:
        missing = [(changes, root) for changes in cases if _name(changes) not in done]
        store.parent.mkdir(parents=True, exist_ok=True)
        for _, line in side_by_side(_run, missing, jobs_for("cuda")):
            done[_name(line["changes"])] = line
            with store.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return [done[_name(changes)] for changes in cases if _name(changes) in done]


def made_on(lines: Sequence[Line]) -> str:
    """Return where and when runs were made."""
    parts = {key: ", ".join(sorted({line[key] for line in lines})) for key in ("machine", "torch", "commit", "date")}
    return f"{parts['machine']}, torch {parts['torch']}, commit {parts['commit']}, {parts['date']}"


def main(
    doc: str, cases: Callable[[argparse.Namespace], Sequence[dict[str, Any]]], page: Callable[..., str], store: Path,
    **counts: int,
) -> None:  # fmt: skip
    """Read the command line, run what is missing, write the page; `counts` are options with their defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder with CIFAR-10's files")
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--store", type=Path, default=store)
    parser.add_argument("--page", type=Path, help="document to write")
    parser.add_argument("--render", action="store_true", help="run nothing")
    given = parser.parse_args()
    if given.root is None and not given.render:
        parser.error("--root is missing; it names the folder with CIFAR-10's files")
    wanted = cases(given)
    lines = carried_out(wanted, given.store, None if given.render else given.root)
    if len(lines) < len(wanted):
        parser.error(
            f"{given.store} holds {len(lines)} of {len(wanted)} runs; give --root, and not --render, for the rest"
        )
    if given.page is not None:
        given.page.write_text(page(given, lines))
