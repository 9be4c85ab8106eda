"""metavd data fetch, check, show."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.table import Table

from ..errors import SpecError
from . import later
from .terminal import (
    CommandGroup,
    Reporter,
    console,
    experiment_of,
    how,
    print_table,
    setting,
    settings_of,
    where,
    words,
)


@click.group("data", cls=CommandGroup)
def data_group() -> None:
    """Get datasets, see what a path holds, see what clients hold."""


@data_group.command("fetch")
@click.argument("name")
@click.option("--root", envvar="METAVD_DATA", default="data", metavar="DIR", help="Folder to put the files into.")
def fetch_command(name: str, root: str) -> None:
    """Download dataset NAME from its official place; sizes and checksums are verified."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=Reporter().err, transient=True)
    tasks: dict[str, TaskID] = {}

    def progress(file: str, done: int, total: int | None) -> None:
        bar.start()
        if file not in tasks:
            tasks[file] = bar.add_task(Path(file).name)
        bar.update(tasks[file], completed=done, total=total)

    try:
        paths = later.data_formats.fetch(name, root, progress=progress)
    finally:
        bar.stop()
    for path in paths:
        click.echo(path)


@data_group.command("check")
@click.argument("path", type=click.Path())
def check_command(path: str) -> None:
    """Say what PATH holds: datasets, counts, ranges, and what is wrong with a file, by name and byte.

    The exit status is 2 if something is wrong or nothing was found.
    """
    report = later.data_formats.check(path)
    click.echo(str(report) or f"{path}: no dataset was found here; metavd datasets lists what is known.")
    if not report.ok:
        sys.exit(2)


@data_group.command("show")
@click.argument("given_words", nargs=-1, metavar="[KEY=VALUE]...")
@where
@setting("partition", "P")
@how
@click.option("--out", type=click.Path(dir_okay=False), metavar="F.png", help="Draw the clients, as PNG, SVG or PDF.")
@click.option("--json", "as_json", is_flag=True, help="The statistics, for programs.")
def show_command(
    *, given_words: tuple[str, ...], config: str | None, pairs: tuple[str, ...], out: str | None, as_json: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Show who would hold what: sizes and labels of the clients, and how far their test rows differ."""
    names, more = words(given_words)
    if names:
        raise SpecError(f"data show takes settings such as clients=20, but got {names[0]!r}")
    experiment = experiment_of(settings_of(config, [*pairs, *more], given), None)
    data = later.runs_setup.data_of(experiment, None, Reporter().note)
    federation = later.runs_setup.deal(later.runs_setup.complete(experiment, data), data)
    about = later.data_described.describe(federation)
    if out is not None:
        later.report_clients.draw_clients(federation, Path(out))
    if as_json:
        named = {"names": {"clients": federation.names, "classes": federation.source.classes}}
        click.echo(json.dumps(about | (named if federation.names or federation.source.classes else {}), indent=2))
        return
    console().print(_table(federation, about))
    if federation.names and len(federation.names) <= later.data_collection.SHOWN:
        rows = (
            (name, kind, f"{train:,}", f"{test:,}", f"{label} ({share:.0%})")
            for name, kind, train, test, label, share in later.data_described.people(federation)
        )
        print_table(("client", "", "training rows", "test rows", "most frequent class"), rows)
    if out is not None:
        click.echo(f"Drawn to {out}")


def _table(federation: later.data_partition.Federation, about: dict[str, Any]) -> Table:
    source = federation.source
    shape = " x ".join(str(length) for length in source.x.shape[1:])
    title = f"{source.name}: {len(source.y):,} rows of {shape}, {source.num_classes} classes"
    table = Table("", "participating", "unseen", "what it means", title=title, title_justify="left")

    def both(label: str, key: str, meaning: str, form: str) -> None:
        values = (about[key][part] for part in ("participating", "unseen"))
        table.add_row(label, *("-" if value is None else format(value, form) for value in values), meaning)

    table.add_row("clients", f"{about['clients']:,}", f"{about['unseen']:,}", "who trains, and who never does")
    both("training rows", "train_rows", "validation and server rows not among them", ",")
    both("test rows", "test_rows", "", ",")
    both("labels never seen", "absent", "test rows whose label the client has no training row of", ".1%")
    table.add_section()
    for label, key in (
        ("training rows per client", "train_size"), ("validation rows", "valid_size"), ("test rows", "test_size"),
        ("classes in training", "train_classes"), ("classes in test", "test_classes"),
    ):  # fmt: skip
        spread = about[key]
        table.add_row(label, f"{spread['mean']:.2f} ± {spread['sd']:.2f}", "",
                      f"all clients, mean ± sd; {spread['min']:,} to {spread['max']:,}")  # fmt: skip
    distance = about["total_variation"]
    table.add_row("label shift", "-" if distance is None else f"{distance:.2f}", "",
                  "total variation of a client's training and test labels, mean; 0 alike, 1 disjoint")  # fmt: skip
    return table
