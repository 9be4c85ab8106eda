"""metavd run, compare, show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.measure import Measurement
from rich.table import Table

from .. import methods as catalogue
from ..errors import SpecError
from ..runs.settings import Experiment, spec_hash
from ..schema import nearest
from . import later
from .terminal import (
    COUNT,
    FILE,
    PLACE,
    Reporter,
    command_line,
    console,
    experiment_of,
    folder_for,
    many,
    print_table,
    settings_of,
    shared,
    tuned,
    tuned_folder,
    words,
)


@click.command("run")
@click.argument("given_words", nargs=-1, metavar="[METHOD] [KEY=VALUE]...")
@shared
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in DIR.")
@click.option("--track", multiple=True, metavar="PROGRAM",
              help="Also tell this program how the run goes: tensorboard, mlflow or wandb; repeatable.")  # fmt: skip
@click.option(
    "--baseline", metavar="METHOD", help="Run this method too, and show both. [default without METHOD: fedavg]"
)
def run_command(
    *, given_words: tuple[str, ...], out: str | None, config: str | None, pairs: tuple[str, ...], resume: bool,
    baseline: str | None, track: tuple[str, ...], **given: Any,
) -> None:  # fmt: skip
    """Train METHOD and show how well every client is served.

    Without METHOD: reptile+metavd, and fedavg under the same conditions beside it.
    """
    names, more = words(given_words)
    if len(names) > 1:
        raise SpecError(f"run takes one method, but got {' and '.join(names)}; metavd compare takes several")
    for name in track:
        if name not in later.runs_track.TRACKERS:
            raise SpecError(f"--track is {name!r}; {nearest(name, sorted(later.runs_track.TRACKERS))}")
    method = names[0] if names else None
    if resume and out and not config and not method and later.runs_store.Store(Path(out)).is_run():
        config = str(later.runs_store.Store(Path(out)).config)  # an unfinished run knows what it is
    settings = settings_of(config, [*pairs, *more], given)
    if method is None and "method" not in settings and baseline is None:
        baseline = "fedavg"
    wanted = experiment_of(settings, method)
    reporter = Reporter()
    data = later.runs_setup.data_of(wanted, None, reporter.note)
    planned = [(wanted, Path(out) if out else default_folder(wanted, data))]
    if resume and not planned[0][1].exists():
        raise SpecError(f"--resume, but there is no run in {planned[0][1]}; leave --resume out to begin it")
    if baseline:
        fitting = {key: value for key, value in settings.items() if key != "method"}
        known = catalogue.options_of(catalogue.check(baseline))
        shared = {key: value for key, value in fitting.items() if key in known or key not in wanted.options}
        other = experiment_of(shared, baseline)
        planned.append((other, planned[0][1] / "baseline" if out else default_folder(other, data)))
    for experiment, _ in planned:
        later.runs_setup.complete(experiment, data)
    trackers = [later.runs_track.TRACKERS[name] for name in track]
    listeners = [
        later.runs_track.both(reporter, *(tracker(folder, e) for tracker in trackers)) for e, folder in planned
    ]
    with reporter:
        results = [
            later.runs_run.run(e, out=folder, resume=resume or out is None, source=data, listener=heard)
            for (e, folder), heard in zip(planned, listeners, strict=True)
        ]
    print_results(results)
    click.echo(f"\nFiles: {planned[0][1]}" + (f" and {planned[1][1]}" if baseline else ""))


def default_folder(experiment: Experiment, data: later.data_collection.Collection) -> Path:
    """Return runs/DATA-METHOD-sSEED-HASH: the same run always has the same folder."""
    e = later.runs_setup.complete(experiment, data)
    return folder_for(e, spec_hash(e)[:6])


@click.command("compare")
@click.argument("given_words", nargs=-1, required=True, metavar="METHOD... [KEY=VALUE]...")
@shared
@click.option("--seeds", type=COUNT, default=3, help="Seeds per method.")
@tuned
@many
@click.option("--page", type=FILE, metavar="F.md", help="Also write the table as a document.")
@click.option("--leave-out", "away", metavar="each|NAMES",
              help="Leave each client out in turn, or each of the named ones, and show accuracy on it.")  # fmt: skip
def compare_command(
    *, given_words: tuple[str, ...], seeds: int, jobs: int, out: str | None, config: str | None, pairs: tuple[str, ...],
    share: later.studies_many.Share | None, until: float | None, page: str | None, away: str | None, tuned: bool,
    tuned_from: str | None, **given: Any,
) -> None:  # fmt: skip
    """Train several METHODs with several seeds; mean and 95 % interval in one table.

    METHOD may be the one word all. Finished runs in DIR are read, not run again; unfinished ones go on.
    """
    methods, more = words(given_words)
    if not methods:
        raise SpecError("compare needs at least one method, for example metavd compare fedavg reptile+metavd")
    settings = settings_of(config, [*pairs, *more], given)
    names = list(catalogue.NAMES) if methods == ["all"] else [catalogue.check(name) for name in dict.fromkeys(methods)]
    folder = Path(out) if out else Path("runs") / "compare"
    chosen = tuned_folder(tuned=tuned, tuned_from=tuned_from)
    reporter = Reporter()
    if away is not None:
        if any(each is not None for each in (page, share, until, chosen)) or "unseen" in settings:
            raise SpecError(
                "--leave-out decides who is unseen and writes its own table; leave out --page, --slice, --minutes, "
                "--tuned and unseen"
            )
        with reporter:
            found = later.studies_leave_out.leave_out(
                names, away, out=folder, seeds=seeds, jobs=jobs, listener=reporter, **settings
            )
        _print_left_out(found, folder)
        return
    with reporter:
        rows = later.studies_compare.compare(
            names, seeds=seeds, jobs=jobs, share=share, until=until, out=folder, listener=reporter,
            page=(Path(page), command_line()) if page else None, tuned=chosen, **settings,
        )  # fmt: skip
    if share is not None:
        click.echo(f"This slice is done in {folder}; when all are, the command without --slice shows the table.")
        return
    if not rows:
        click.echo(f"Some runs are missing; the same command goes on with them in {folder}.")
        return
    _print_compared(rows, seeds)
    click.echo(f"Files: {folder / 'comparison.md'}, {folder / 'comparison.json'}")


def _print_compared(rows: Mapping[str, Mapping[str, Any]], seeds: int) -> None:
    """Print the table of a comparison; where it is too wide for the terminal, intervals stand below their means."""
    study, out = later.studies_compare, console()
    shown = study.columns(rows)

    def table(narrow: bool) -> Table:
        title = f"mean ± 95 % interval over {seeds} seeds" if seeds > 1 else "one seed"
        frame = {"box": SIMPLE, "show_lines": True, "padding": (0, 1, 0, 0)} if narrow else {}
        made = Table(title=title, title_justify="left", **frame)  # type: ignore[arg-type]
        made.add_column("method", no_wrap=not narrow, overflow="fold")
        for column in shown:
            made.add_column(column.title.replace(" ", "\n", 9 if narrow else 1), justify="right", no_wrap=True)
        for name, row in rows.items():
            cells = (column.text(row[column.title]) for column in shown)
            made.add_row(name, *(each.replace(" ±", "\n±") if narrow else each for each in cells))
        return made

    wide = table(narrow=False)
    needed = Measurement.get(out, out.options.update(max_width=10_000), wide).maximum
    narrow = out.is_terminal and needed > out.width
    if not out.is_terminal:
        out.width = max(needed, out.width)  # a file has any width
    out.print(table(narrow=True) if narrow else wide)


def _print_left_out(rows: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    study = later.studies_leave_out
    clients = list(next(iter(rows.values())))
    heads = clients if len(clients) <= later.data_collection.SHOWN else [study.MEAN]
    lines = ([name, *(study.COLUMN.text(row[head]) for head in heads)] for name, row in rows.items())
    print_table(["method", *heads], lines, title="accuracy % on the client that was left out")
    click.echo(f"Files: {folder / 'leave_out.md'}, {folder / 'leave_out.json'}")


@click.command("show")
@click.argument("folders", nargs=-1, required=True, type=PLACE, metavar="DIR...")
def show_command(folders: tuple[str, ...]) -> None:
    """Show the result of finished runs again."""
    results = [later.runs_store.Store(Path(folder)).read_result() for folder in folders]
    print_results(results)
    for folder, result in zip(folders, results, strict=True):
        for text in result.get("warnings", ()):
            click.echo(f"{folder}: {text}")


def print_results(results: Sequence[Mapping[str, Any]]) -> None:
    """Print what a newcomer wants to know of one run or of several side by side."""
    first = results[0]
    share = later.evaluate_figures.get("accuracy").text
    title = f"{first['data']}, {first['rounds']} rounds, seed {first['seed']}"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(result["method"], justify="right")
    table.add_column("what it means")
    for part, name in (("test", "participating"), ("unseen", "never seen")):
        counts = "/".join(dict.fromkeys(str(result[part]["clients"]) for result in results))
        if counts == "0":
            continue
        table.add_row(f"[bold]{name} clients ({counts})[/bold]", *[""] * len(results), "")
        for figure in later.evaluate_figures.headline(wide=True):
            values = (figure.text(later.evaluate_figures.number(result, part, figure.name)) for result in results)
            table.add_row(f"  {figure.label or figure.short}", *values, figure.meaning)
        for domain in first.get("domains", ()):
            values = (share(later.evaluate_figures.number(result, "domains", domain, part)) for result in results)
            table.add_row(f"  accuracy on {domain}", *values, "of its test rows")
        table.add_section()
    table.add_row("[bold]cost[/bold]", *[""] * len(results), "")
    table.add_row("  traffic MB", *(f"{(r['bytes']['down'] + r['bytes']['up']) / 1e6:.2f}" for r in results),
                  "sent in both directions in all rounds")  # fmt: skip
    if any(result["sparsity"]["layer"] for result in results):
        table.add_row("  weights dropped", *(share(r["sparsity"]["layer"]) for r in results), "in the masked layer")
    spent = [later.evaluate_figures.number(result, "privacy", "epsilon") for result in results]
    if any(value is not None for value in spent):
        table.add_row("  epsilon", *("-" if value is None else f"{value:.2f}" for value in spent),
                      "how far one client can show; see docs/privacy.md")  # fmt: skip
    table.add_row("  seconds", *(f"{result['seconds']:.1f}" for result in results), "training and evaluation")
    console().print(table)
