"""Several methods, several seeds, one table with intervals; what is already there is not run again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ..container import write_atomic
from ..core.types import Model
from ..engine.rounds import Listener
from ..errors import SpecError
from ..evaluate.figures import EPSILON, SENT, Cell, Column, headline
from ..methods import options_of
from ..runs import notebook
from ..runs.folder import check_folder
from ..runs.run import run
from ..runs.settings import Experiment, with_data, with_settings
from ..runs.setup import Data, data_of, prepare
from ..runs.store import Store
from .many import Share, carry_out, taken
from .markdown import markdown_table
from .side import jobs_for
from .tuned import KEY, Tuned, applied, find_for, label, plain, read, told


def columns(rows: Mapping[str, Mapping[str, Cell]] | None = None) -> list[Column]:
    """Return the figures of the table: those that every table shows, of both groups of clients, traffic and privacy.

    Given the table, without those that no method has: there may be no unseen client.
    """
    figures = (figure.column(part, heading=part) for figure in headline() for part in ("test", "unseen"))
    every = [*figures, SENT, EPSILON]
    return [each for each in every if rows is None or any(row[each.title] is not None for row in rows.values())]


def summarize_runs(results: Sequence[Mapping[str, Any]]) -> dict[str, Cell]:
    """Return mean and half width of the 95 % interval over seeds, by heading; None where there is no number."""
    return {column.title: column.cell(results) for column in columns()}


def markdown(rows: Mapping[str, Mapping[str, Cell]]) -> str:
    """Write the table as Markdown."""
    shown = columns(rows)
    lines = [[method, *(each.text(row[each.title]) for each in shown)] for method, row in rows.items()]
    return "\n".join(markdown_table(["method", *(each.title for each in shown)], lines)) + "\n"


def document(table: str, results: Sequence[dict[str, Any]], command: str) -> str:
    """Write a page around the table: what was run, with what, where."""
    first = results[0]
    seeds = sorted({result["seed"] for result in results})
    commits = sorted({str(result["commit"]) for result in results})
    meanings = "; ".join(f"{figure.title or figure.name}: {figure.help}" for figure in headline())
    about = [
        f"# Methods on {first['data']}",
        "",
        f"{first['rounds']} rounds, {first['test']['clients']} participating and {first['unseen']['clients']} unseen "
        f"clients, seeds {', '.join(str(seed) for seed in seeds)}: mean ± half width of the 95 % interval over seeds "
        f"(Student's t). The seed also decides who gets which rows. {meanings[0].upper()}{meanings[1:]}; "
        "MB: both directions of all rounds.",
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
    share: Share | None = None,
    until: float | None = None,
    out: str | Path,
    experiment: Experiment | None = None,
    listener: Listener | None = None,
    page: tuple[Path, str] | None = None,
    tuned: str | Path | None = None,
    source: Data | None = None,
    module: nn.Module | Model | None = None,
    **settings: Any,
) -> dict[str, dict[str, Cell]]:
    """Run every method with seeds first..first+seeds-1 on the same clients' data, and return the table.

    `jobs` runs are carried out at once, each in a process of its own; 0 leaves the number to the device, see `side`.
    Options in `settings` go to the methods that have them. Runs live in OUT/METHOD/seed-S; finished ones are read,
    unfinished ones go on. `page` is a file to write the table to as a document, and the command that it shall name.
    `tuned` is a folder of tuned settings (see `tuned`), which methods then have, and rows that say so. Of a `share` of
    the runs, or where some were left because they must be over `until` a time (see `many.carry_out`), there is no
    table: it is empty. So it is where another process is at some of them, which are left to it.
    """
    if seeds < 1:
        raise SpecError(f"seeds is {seeds}, but must be at least 1")
    listener = listener or notebook.listener()
    known = [name for method in methods for name in options_of(method)]
    settings = {key: value for key, value in settings.items() if key != "method"}
    settings = with_data(settings, (experiment or Experiment()).data, known)
    base = with_settings(experiment or Experiment(), {key: settings.pop(key) for key in ("seed",) if key in settings})
    files = None if tuned is None else read(tuned)
    chosen = {
        method: _tuned({"method": method, **_fitting(method, settings, methods)}, base, files, listener)
        for method in methods
    }
    planned: dict[tuple[str, int], dict[str, Any]] = {
        (label(values), seed): {**values, "seed": seed}
        for values in chosen.values()
        for seed in range(base.seed, base.seed + seeds)
    }
    experiments = [with_settings(base, plain(values)) for values in planned.values()]
    named = with_settings(base, {key: settings[key] for key in ("data", "root", "image_size") if key in settings})
    data = data_of(named, source, listener.note)
    folder = Path(out)
    for one, values in zip(experiments, planned.values(), strict=True):  # wrong input is found before the first run
        setup = prepare(one, data, module)
        check_folder(Store(folder / _place(values)), setup.experiment, setup.defaults, resume=True)
    if page is not None:
        page[0].parent.mkdir(parents=True, exist_ok=True)
    at_once = jobs_for(experiments[0].device, jobs)

    def told(key: tuple[str, int], number: int, total: int) -> None:
        if at_once > 1:  # one run at a time tells of itself
            listener.note(f"{number} of {total}: {key[0]}, seed {key[1]}")

    ended = {
        each.key: each
        for each in carry_out(
            planned, partial(_one, base=base, data=data, module=module), work=folder, place=_place, keep=True,
            strict=True, jobs=at_once, share=share, until=until, listener=listener, progress=told,
        )
    }  # fmt: skip
    if share is not None:
        return {}
    elsewhere = sum(each.end == "elsewhere" for each in ended.values())
    if elsewhere:
        listener.note(
            f"{elsewhere} runs are another command's at the moment; the same command goes on when they are over"
        )
    results = {key: each.line["result"] for key in planned if (each := ended[key]).line is not None}
    if len(results) < len(planned):
        return {}
    rows = {
        label(values): summarize_runs([result for (name, _), result in results.items() if name == label(values)])
        for values in chosen.values()
    }
    content = {"columns": [each.title for each in columns(rows)], "rows": rows, "runs": list(results.values())}
    write_atomic(folder / "comparison.json", (json.dumps(content, indent=2) + "\n").encode())
    write_atomic(folder / "comparison.md", markdown(rows).encode())
    if page is not None:
        write_atomic(page[0], document(markdown(rows), list(results.values()), page[1]).encode())
    return rows


def _tuned(
    settings: dict[str, Any], base: Experiment, files: Sequence[Tuned] | None, listener: Listener
) -> dict[str, Any]:
    """Return a method's settings with what was chosen for it, and say which file that is."""
    if files is None:
        return settings
    asked = with_settings(base, settings)
    found = find_for(files, asked)
    listener.note(told(asked, found))
    return applied(found, settings)


def _place(settings: Mapping[str, Any]) -> str:
    return f"{settings['method']}{'-tuned' if KEY in settings else ''}/seed-{settings['seed']}"


def _one(
    settings: Mapping[str, Any],
    folder: Path,
    listener: Listener,
    *,
    base: Experiment,
    data: Data,
    module: nn.Module | Model | None,
) -> dict[str, Any]:
    result = run(base, out=folder, resume=True, listener=listener, source=data, module=module, **plain(settings))
    return taken(result, result)


def _fitting(method: str, settings: Mapping[str, Any], every: Sequence[str]) -> dict[str, Any]:
    """Keep the options that this method has, and those that none of the methods has, to be refused by name."""
    own = options_of(method)
    others = {name for other in every for name in options_of(other)} - set(own)
    return {key: value for key, value in settings.items() if key not in others}
