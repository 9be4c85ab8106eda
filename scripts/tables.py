"""What scripts share that write tables of runs into a page: each run a line in a store, the page written from it.

    python scripts/SCRIPT.py NAME... [--root DIR] [--slice K/N]      run what the store lacks of the named tables
    python scripts/SCRIPT.py --page                                  write all tables that are complete into the page

Commands may be stopped and given again, or divided over machines; `metavd merge` joins their stores.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from metavd.container import write_atomic
from metavd.engine.rounds import Listener
from metavd.errors import UserError
from metavd.evaluate.intervals import interval
from metavd.runs.run import run
from metavd.studies.lines import Line, identity, read
from metavd.studies.many import Share, carry_out, taken

SCOPE = "end"
"""Of the stores: a result is what a run ends with."""
FIGURES = ("accuracy", "ece_top1", "nll")
Tasks = Mapping[Hashable, Mapping[str, Any]]
"""Settings of runs, by what a table calls them; the last part of a name is the seed."""
Found = Mapping[Any, Line]


@dataclass(frozen=True)
class Table:
    """One table: its runs, and how it is written from their lines, which it is given by the same names."""

    tasks: Tasks
    write: Callable[[Found], str]


def at_end(where: Mapping[str, Any], settings: dict[str, Any], folder: Path, listener: Listener) -> dict[str, Any]:
    """Carry out one run and keep what it ends with; see `metavd.studies.many.Work`."""
    result = run(**settings, **where, out=folder, resume=True, listener=listener)
    parts = {part: {name: result[part][name] for name in FIGURES} for part in ("test", "unseen") if result.get(part)}
    return taken(result, parts | {"rounds": result["rounds"], "seconds": result["seconds"]})


def percent(lines: list[Line], figure: str, *, half: bool = False, digits: int = 1) -> str:
    """Return a figure of participating clients in percent, mean over seeds; with `half` the 95 % interval's."""
    if any("failed" in line for line in lines):
        return "diverged"
    middle, width = interval([100 * line["result"]["test"][figure] for line in lines])
    return f"{middle:.{digits}f}" + (f" ± {width:.{digits}f}" if half and width is not None else "")


def made_on(lines: Collection[Line]) -> str:
    """Return where and when runs were made."""
    parts = {key: ", ".join(sorted({line[key] for line in lines})) for key in ("machine", "commit", "date")}
    torch = ", ".join(sorted({line["versions"]["torch"] for line in lines}))
    return f"{parts['machine']}, torch {torch}, commit {parts['commit']}, {parts['date']}"


def stored(tasks: Tasks, lines: Mapping[str, Line], scope: str) -> dict[Any, Line]:
    """Return the lines of those tasks that a store has, by the tasks' names."""
    names = {key: identity(settings, scope) for key, settings in tasks.items()}
    return {key: lines[name] for key, name in names.items() if name in lines}


def markdown(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a caption before it; the columns after the first are numbers."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join([*textwrap.wrap(caption, 120), "", *("| " + " | ".join(cells) + " |" for cells in lines), ""])


def into(page: Path, word: str, text: str) -> None:
    """Write a text into a page, between the marks that hold a word."""
    begin, end = f"<!-- {word}: written by", f"<!-- end of {word} -->"
    before, mark, rest = page.read_text(encoding="utf-8").partition(begin)
    first, last, after = rest.partition(end)
    if not (mark and last):
        raise UserError(f"{page} has no marks {begin} ... --> and {end}")
    head = first.partition("\n")[0]
    write_atomic(page, f"{before}{mark}{head}\n\n{text}\n{last}{after}".encode())


def _carried_out(name: str, table: Table, given: argparse.Namespace) -> None:
    where = {"device": given.device} | ({"root": given.root} if given.root else {})
    work = partial(at_end, where)
    for ended in carry_out(
        table.tasks, work, store=given.store, scope=SCOPE, work=given.out, jobs=given.jobs, device=given.device,
        share=Share.of(given.slice) if given.slice else None,
    ):  # fmt: skip
        said = percent([ended.line], "accuracy") + " %" if ended.line else str(ended.error or "")
        print(f"{name}: {ended.key}: {ended.end} {said}", flush=True)
        if ended.end == "refused":
            raise SystemExit(f"{ended.error}")


def _written(tables: Mapping[str, Table], store: Path) -> str:
    lines, parts = read(store, SCOPE, print), []
    for name, table in tables.items():
        found = stored(table.tasks, lines, SCOPE)
        if len(found) == len(table.tasks):
            parts.append(table.write(found))
        else:
            print(f"{name}: {store} holds {len(found)} of {len(table.tasks)} runs; the table is left out")
    return "\n".join(parts)


def reading(doc: str | None) -> argparse.ArgumentParser:
    """Return a command line that shows a script's docstring as it stands."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def main(doc: str, tables: Mapping[str, Table], *, store: Path, page: Path, word: str) -> None:
    """Read the command line, run what is missing, write the page between the marks that hold the word."""
    parser = reading(doc)
    parser.add_argument("tables", nargs="*", metavar="NAME", help=f"what to run: {', '.join(tables)}")
    parser.add_argument("--root", help="folder with the files of datasets")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=0, help="runs at once; 0: what suits the device")
    parser.add_argument("--slice", metavar="K/N", help="only this part of the missing runs")
    parser.add_argument("--out", type=Path, default=Path("runs") / store.stem, help="folder of runs under way")
    parser.add_argument("--store", type=Path, default=store)
    parser.add_argument("--page", type=Path, nargs="?", const=page, help=f"document to write into; {page}")
    given = parser.parse_args()
    if unknown := [name for name in given.tables if name not in tables]:
        parser.error(f"there is no table {unknown[0]!r}, but {', '.join(tables)}")
    if not given.tables and given.page is None:
        parser.error(f"name tables to run ({', '.join(tables)}), or --page")
    try:
        for name in given.tables:
            _carried_out(name, tables[name], given)
        if given.page is not None:
            into(given.page, word, _written(tables, given.store))
    except UserError as error:
        parser.error(str(error))
