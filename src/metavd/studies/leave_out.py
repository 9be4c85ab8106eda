"""Each client left out in turn: how well methods serve somebody whom they never trained with, client by client."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..container import write_atomic
from ..data.collection import Collection
from ..data.partition import NAMED
from ..engine.rounds import Listener, Silent
from ..errors import SpecError
from ..evaluate.figures import Cell, get
from ..evaluate.intervals import interval
from ..methods import options_of
from ..runs.settings import SETTINGS, Experiment, with_data, with_settings
from ..runs.setup import data_of
from ..runs.store import StoreError
from .compare import compare
from .markdown import markdown_table

EACH = "each"
"""The word for all clients in turn."""
MEAN = "mean"
"""Heading of the mean over the clients."""
COLUMN = get("accuracy").column("unseen", heading="unseen")


def left_out(words: str, data: Collection) -> list[str]:
    """Return the names of the clients to leave out: all of them for `each`, or those named with commas between."""
    names = data.sources[0].client_names if len(data.sources) == 1 else ()
    if len(names) < 2:
        raise SpecError(f"--leave-out is {words!r}, but the clients of {data.name} have no names; use unseen=1")
    if words == EACH:
        return list(names)
    chosen = [words] if words in names else [word.strip() for word in words.split(",")]
    for name in chosen:
        if name not in names:
            raise SpecError(f"--leave-out names {name!r}, but the clients are {', '.join(names[:12])}; or use {EACH}")
    return chosen


def leave_out(
    methods: Sequence[str], words: str, *, out: Path, seeds: int, listener: Listener | None = None, **how: Any
) -> dict[str, dict[str, Cell]]:
    """Compare methods once for every client that is left out; return accuracy on it by method and client.

    `words` are `each`, or clients' names with commas between; everything else is as in `compare`. The mean is over
    clients, of each one's mean over seeds; its interval is over clients.
    """
    listener = listener or Silent()
    how = with_data(how, Experiment().data, [name for method in methods for name in options_of(method)])
    named = with_settings(Experiment(), {key: value for key, value in how.items() if key in SETTINGS})
    if named.partition not in ("", "natural"):
        raise SpecError(f"partition is {named.partition!r}, but --leave-out takes clients by name; leave partition out")
    data = data_of(named, None, listener.note)
    names = left_out(words, data)
    table: dict[str, dict[str, Cell]] = {method: {} for method in methods}
    for number, name in enumerate(names):
        found = compare(
            methods, seeds=seeds, out=out / f"without-{number}", listener=listener, source=data,
            **(how | {"unseen": f"{NAMED}{name}"}),
        )  # fmt: skip
        if not found:
            raise StoreError(f"another process is at runs in {out}; the same command goes on when they are over")
        for method, row in found.items():
            table[method][name] = row[COLUMN.title]
    for row in table.values():
        known = [value[0] for value in row.values() if value is not None]
        row[MEAN] = interval(known) if known else None
    content = {"figure": COLUMN.title, "clients": list(names), "rows": table}
    write_atomic(out / "leave_out.json", (json.dumps(content, indent=2) + "\n").encode())
    write_atomic(out / "leave_out.md", markdown(table).encode())
    return table


def markdown(table: Mapping[str, Mapping[str, Cell]]) -> str:
    """Write the table as Markdown, a column for each client that was left out."""
    heads = list(next(iter(table.values())))
    rows = [[method, *(COLUMN.text(row[head]) for head in heads)] for method, row in table.items()]
    titles = (head.replace("|", "/") for head in heads)
    return "\n".join(markdown_table([f"{COLUMN.title}, left out:", *titles], rows)) + "\n"
