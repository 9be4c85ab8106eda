"""Several methods, several seeds, one table with intervals; what is already there is not run again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..core.types import Model
from ..engine.checkpoint import write_atomic
from ..engine.rounds import Listener, Silent
from ..evaluate.metrics import interval
from ..methods import options_of
from ..runs.run import Data, check_folder, data_of, prepare, run
from ..runs.settings import Experiment, SpecError, with_settings
from ..runs.store import Store
from .side import jobs_for, side_by_side

COLUMNS: dict[str, tuple[str, float, int]] = {
    "test accuracy %": ("test.accuracy", 100.0, 1),
    "unseen accuracy %": ("unseen.accuracy", 100.0, 1),
    "test NLL": ("test.nll", 1.0, 3),
    "unseen NLL": ("unseen.nll", 1.0, 3),
    "test ECE %": ("test.ece_top1", 100.0, 1),
    "unseen ECE %": ("unseen.ece_top1", 100.0, 1),
    "MB sent": ("bytes.total", 1e-6, 2),
}
"""Heading -> (where in a result, factor, decimals)."""


def value_at(result: dict[str, Any], path: str) -> float | None:
    """Return a number inside a result, "test.accuracy"; bytes.total is both directions together."""
    if path == "bytes.total":
        return float(result["bytes"]["down"] + result["bytes"]["up"])
    value: Any = result
    for part in path.split("."):
        value = value[part]
    return None if value is None else float(value)


def summarize_runs(results: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float | None] | None]:
    """Return mean and half width of the 95 % interval over seeds, by heading; None where there is no number."""
    table: dict[str, tuple[float, float | None] | None] = {}
    for heading, (path, factor, _) in COLUMNS.items():
        values = [value_at(result, path) for result in results]
        known = [value * factor for value in values if value is not None]
        table[heading] = interval(known) if known else None
    return table


def cell(heading: str, value: tuple[float, float | None] | None) -> str:
    """Write "91.2 ± 0.8"."""
    if value is None:
        return "-"
    mean, half = value
    digits = COLUMNS[heading][2]
    return f"{mean:.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


def markdown(rows: dict[str, dict[str, tuple[float, float | None] | None]]) -> str:
    """Write the table as Markdown."""
    lines = ["| method | " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * len(COLUMNS)]
    for method, row in rows.items():
        lines.append(f"| {method} | " + " | ".join(cell(heading, row[heading]) for heading in COLUMNS) + " |")
    return "\n".join(lines) + "\n"


def document(table: str, results: Sequence[dict[str, Any]], command: str) -> str:
    """Write a page around the table: what was run, with what, where."""
    first = results[0]
    seeds = sorted({result["seed"] for result in results})
    commits = sorted({str(result["commit"]) for result in results})
    about = [
        f"# Methods on {first['data']}",
        "",
        f"{first['rounds']} rounds, {first['test']['clients']} participating and {first['unseen']['clients']} unseen "
        f"clients, seeds {', '.join(str(seed) for seed in seeds)}: mean ± half width of the 95 % interval over seeds "
        "(Student's t). The seed also decides who gets which rows. Accuracy is weighted by training size; ECE is "
        "top-1 with 15 bins; MB are both directions of all rounds.",
        "",
        table,
        f"Written by `{command}`; commit {', '.join(commits)}, metavd {first['version']}, torch {first['torch']}, "
        f"Python {first['python']}, {first['machine']}, device {first['device']}, "
        f"{sum(result['seconds'] for result in results):.0f} s of runs. What the command does not name has its default "
        "(`metavd methods NAME`).",
    ]
    return "\n".join(about) + "\n"


def compare(
    methods: Sequence[str],
    *,
    seeds: int = 3,
    jobs: int = 1,
    out: str | Path,
    experiment: Experiment | None = None,
    listener: Listener | None = None,
    page: tuple[Path, str] | None = None,
    source: Data | None = None,
    module: nn.Module | Model | None = None,
    **settings: Any,
) -> dict[str, dict[str, tuple[float, float | None] | None]]:
    """Run every method with seeds first..first+seeds-1 on the same clients' data, and return the table.

    `jobs` runs are carried out at once, each in a process of its own; 0 leaves the number to the device, see `side`.
    Options in `settings` go to the methods that have them. Runs live in OUT/METHOD/seed-S; finished ones are read,
    unfinished ones go on. `page` is a file to write the table to as a document, and the command that it shall name.
    """
    if seeds < 1:
        raise SpecError(f"seeds is {seeds}, but must be at least 1")
    listener = listener or Silent()
    settings = {key: value for key, value in settings.items() if key != "method"}
    base = with_settings(experiment or Experiment(), {key: settings.pop(key) for key in ("seed",) if key in settings})
    folder = Path(out)
    planned = {}
    for method in methods:
        for seed in range(base.seed, base.seed + seeds):
            one = with_settings(base, {"method": method, **_fitting(method, settings, methods), "seed": seed})
            planned[method, seed] = one, folder / method / f"seed-{seed}"
    data = data_of(
        with_settings(base, {k: settings[k] for k in ("data", "root") if k in settings}), source, listener.note
    )
    for one, place in planned.values():  # wrong input is found before the first run starts
        check_folder(Store(place), prepare(one, data, module), resume=True)
    if page is not None:
        page[0].parent.mkdir(parents=True, exist_ok=True)
    at_once = jobs_for(next(iter(planned.values()))[0].device, jobs)
    # A listener hears of one run at a time; several at once report when they end.
    heard = listener if at_once == 1 else None
    tasks = [(one, place, data, module, heard) for one, place in planned.values()]
    ended: dict[int, dict[str, Any]] = {}
    for number, result in side_by_side(_one, tasks, at_once):
        ended[number] = result
        if heard is None:
            listener.note(f"{len(ended)} of {len(tasks)}: {result['method']}, seed {result['seed']}")
    results = {key: ended[number] for number, key in enumerate(planned)}
    rows = {}
    for method in methods:
        rows[method] = summarize_runs([result for (name, _), result in results.items() if name == method])
    content = {"columns": list(COLUMNS), "rows": rows, "runs": list(results.values())}
    write_atomic(folder / "comparison.json", (json.dumps(content, indent=2) + "\n").encode())
    write_atomic(folder / "comparison.md", markdown(rows).encode())
    if page is not None:
        write_atomic(page[0], document(markdown(rows), list(results.values()), page[1]).encode())
    return rows


def _one(
    experiment: Experiment, place: Path, data: Data, module: nn.Module | Model | None, listener: Listener | None
) -> dict[str, Any]:
    return run(experiment, out=place, resume=True, listener=listener, source=data, module=module)


def _fitting(method: str, settings: Mapping[str, Any], every: Sequence[str]) -> dict[str, Any]:
    """Keep the options that this method has, and those that none of the methods has, to be refused by name."""
    own = options_of(method)
    others = {name for other in every for name in options_of(other)} - set(own)
    return {key: value for key, value in settings.items() if key not in others}
