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
from ..templates import filled
from .many import Share, Work, carry_out, taken
from .markdown import markdown_table
from .side import jobs_for
from .tuned import KEY, label, plain, read, with_chosen


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


def document(table: str, results: Sequence[Mapping[str, Any]], command: str) -> str:
    """Write a page around the table: what was run, with what, where."""
    meanings = "; ".join(f"{figure.title or figure.name}: {figure.help}" for figure in headline())
    return filled(
        "compare.md", first=results[0], table=table, command=command, meanings=meanings[0].upper() + meanings[1:],
        seeds=sorted({result["seed"] for result in results}),
        commits=sorted({str(result["commit"]) for result in results}),
        seconds=sum(result["seconds"] for result in results),
    )  # fmt: skip


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
    listener, folder = listener or notebook.listener(), Path(out)
    known = [name for method in methods for name in options_of(method)]
    settings = {key: value for key, value in settings.items() if key != "method"}
    settings = with_data(settings, (experiment or Experiment()).data, known)
    base = with_settings(experiment or Experiment(), {key: settings.pop(key) for key in ("seed",) if key in settings})
    chosen = _chosen(methods, settings, base, tuned, listener)
    planned = {
        (name, seed): {**values, "seed": seed}
        for name, values in chosen.items()
        for seed in range(base.seed, base.seed + seeds)
    }
    experiments = [with_settings(base, plain(values)) for values in planned.values()]
    named = with_settings(base, {key: settings[key] for key in ("data", "root", "image_size") if key in settings})
    data = data_of(named, source, listener.note)
    for one, values in zip(experiments, planned.values(), strict=True):  # wrong input is found before the first run
        setup = prepare(one, data, module)
        check_folder(Store(folder / _place(values)), setup.experiment, setup.defaults, resume=True)
    if page is not None:
        page[0].parent.mkdir(parents=True, exist_ok=True)
    work = partial(_one, base=base, data=data, module=module)
    at_once = jobs_for(experiments[0].device, jobs)
    results = _carried_out(planned, work, folder, jobs=at_once, share=share, until=until, listener=listener)
    if share is not None or len(results) < len(planned):
        return {}
    rows = {name: summarize_runs([result for (own, _), result in results.items() if own == name]) for name in chosen}
    _write(folder, rows, list(results.values()), page)
    return rows


def _chosen(
    methods: Sequence[str], settings: Mapping[str, Any], base: Experiment, tuned: str | Path | None, listener: Listener
) -> dict[str, dict[str, Any]]:
    """Return each method's settings, tuned ones where they are asked for, by what its row is called."""
    files = None if tuned is None else read(tuned)
    found = {}
    for method in methods:
        own = {"method": method, **_fitting(method, settings, methods)}
        if files is not None:
            own, said = with_chosen(files, with_settings(base, own), own)
            listener.note(said)
        found[label(own)] = own
    return found


def _carried_out(
    planned: Mapping[tuple[str, int], dict[str, Any]], work: Work, folder: Path, *, jobs: int, share: Share | None,
    until: float | None, listener: Listener,
) -> dict[tuple[str, int], dict[str, Any]]:  # fmt: skip
    """Return the results of the runs that are finished, in the order of the plan; of a share they are not told."""

    def told(key: tuple[str, int], number: int, total: int) -> None:
        if jobs > 1:  # one run at a time tells of itself
            listener.note(f"{number} of {total}: {key[0]}, seed {key[1]}")

    ended = {
        each.key: each
        for each in carry_out(
            planned, work, work=folder, place=_place, keep=True, strict=True, jobs=jobs, share=share, until=until,
            listener=listener, progress=told,
        )
    }  # fmt: skip
    elsewhere = sum(each.end == "elsewhere" for each in ended.values())
    if elsewhere and share is None:
        listener.note(
            f"{elsewhere} runs are another command's at the moment; the same command goes on when they are over"
        )
    return {key: each.line["result"] for key in planned if (each := ended[key]).line is not None}


def _write(
    folder: Path, rows: Mapping[str, Mapping[str, Cell]], results: Sequence[dict[str, Any]],
    page: tuple[Path, str] | None,
) -> None:  # fmt: skip
    """Write the table for programs, as Markdown, and where a page is asked for as a document."""
    table = markdown(rows)
    content = {"columns": [each.title for each in columns(rows)], "rows": rows, "runs": results}
    write_atomic(folder / "comparison.json", (json.dumps(content, indent=2) + "\n").encode())
    write_atomic(folder / "comparison.md", table.encode())
    if page is not None:
        write_atomic(page[0], document(table, results, page[1]).encode())


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
