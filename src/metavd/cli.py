"""The command line: reads argv, calls the rest. The only place that knows about terminals and exit statuses."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import methods as catalogue
from .core.types import NonFiniteError
from .data.partition import PartitionError
from .data.source import SOURCES, SourceError
from .engine.simulate import Record
from .experiment.compare import COLUMNS, cell, compare
from .experiment.run import InterruptedRun, run
from .experiment.spec import FROM_DATA, HELP, Experiment, SpecError, from_toml, resolve, spec_hash, with_settings
from .experiment.store import Store, StoreError
from .version import VERSION

WRONG_INPUT = (catalogue.MethodError, SourceError, PartitionError, SpecError, StoreError)
"""What is the user's to mend: one sentence, exit status 2."""

_WIDE = 120
"""Columns of a table that does not go to a terminal."""


def console() -> Console:
    """Return standard output, wide enough for tables where it is no terminal."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=_WIDE)


class Reporter:
    """Tells a person how a run goes: a bar on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self.err = Console(stderr=True, highlight=False)
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.total = 0
        self.began = 0.0
        self.first = 0
        self.accuracy = ""
        self.loss = ""

    def start(self, experiment: Experiment, done: int) -> None:
        """Say what begins."""
        self.stop()
        self.total, self.first, self.began, self.accuracy = experiment.rounds, done, time.monotonic(), ""
        title = f"{experiment.method} on {experiment.data}, seed {experiment.seed}"
        if self.err.is_terminal:
            self.bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(), console=self.err, transient=True,
            )  # fmt: skip
            self.task = self.bar.add_task(title, total=self.total, completed=done, text="")
            self.bar.start()
        else:
            self.note(f"{title}: {self.total} rounds" + (f", going on after round {done}" if done else ""))

    def round(self, record: Record) -> None:
        """Move the bar."""
        self.loss = f"loss {record.loss:.3f}"
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=record.round, text=f"{self.loss}{self.accuracy}")

    def evaluation(self, round: int, summary: Mapping[str, Any]) -> None:
        """Show an evaluation."""
        shown = "  ".join(
            f"{name} {summary[name]['accuracy']:.1%}"
            for name in ("test", "unseen")
            if summary[name]["accuracy"] is not None
        )
        self.accuracy = f"  {shown}" if shown else ""
        if self.bar is None:
            spent = time.monotonic() - self.began
            left = spent / max(round - self.first, 1) * (self.total - round)
            self.note(f"  round {round}/{self.total}  {self.loss}  {shown}  {left:.0f} s left")
        elif round >= self.total:
            self.stop()

    def note(self, text: str) -> None:
        """Print a line beside the bar."""
        self.err.print(text, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def settings_of(config: str | None, pairs: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Collect settings: from the file, over them --set, over them the command's own options."""
    values = from_toml(Path(config)) if config else {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise SpecError(f"--set got {pair!r}, but needs key=value, for example --set lr=0.05")
        values[key.strip().replace("-", "_")] = value.strip()
    return values | {key: value for key, value in given.items() if value is not None}


def _words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell methods from settings: `--set lr=0.1 beta=2` may go on without another --set."""
    return [word for word in words if "=" not in word], [word for word in words if "=" in word]


def experiment_of(settings: Mapping[str, Any], method: str | None) -> Experiment:
    """Build the experiment that a command asks for."""
    base = with_settings(Experiment(), {"method": catalogue.check(method)}) if method else Experiment()
    return with_settings(base, {key: value for key, value in settings.items() if not (method and key == "method")})


Command = Callable[..., None]


def _shared(command: Command) -> Command:
    """Add the options that `run` and `compare` share."""
    for option in reversed([
        click.option("--data", metavar="NAME", help="Dataset; see metavd datasets. [default: digits]"),
        click.option("--rounds", type=int, metavar="N", help="Communication rounds. [default: the dataset's]"),
        click.option("--seed", type=int, metavar="S", help="Seed of everything random. [default: 0]"),
        click.option("--out", type=click.Path(), metavar="DIR", help="Folder for results. [default: below runs/]"),
        click.option("--device", metavar="D", help="auto, cpu or cuda. [default: auto]"),
        click.option("--config", type=click.Path(), metavar="F.toml", help="Settings from a file, as config.toml."),
        click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE",
                     help="Any setting or option of the method, for example --set beta=2; repeatable."),
    ]):  # fmt: skip
        command = option(command)
    return command


@click.group(
    invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(VERSION, prog_name="metavd")
@click.pass_context
def cli(context: click.Context) -> None:
    """Personalised, Bayesian federated learning.

    \b
    metavd run                          train reptile+metavd on the embedded digits, beside fedavg
    metavd run maml+metavd --rounds 50  train one method
    metavd compare fedavg reptile       several methods and seeds, one table
    metavd methods                      what can be trained
    metavd show DIR                     a finished run again
    """  # noqa: D301 - click reads the backspace as "keep these lines"
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command("run")
@click.argument("words", nargs=-1, metavar="[METHOD] [KEY=VALUE]...")
@_shared
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in DIR.")
@click.option(
    "--baseline", metavar="METHOD", help="Run this method too, and show both. [default without METHOD: fedavg]"
)
def run_command(
    *, words: tuple[str, ...], out: str | None, config: str | None, pairs: tuple[str, ...], resume: bool,
    baseline: str | None, **given: Any,
) -> None:  # fmt: skip
    """Train METHOD and show how well every client is served.

    Without METHOD: reptile+metavd, and fedavg under the same conditions beside it.
    """
    names, more = _words(words)
    if len(names) > 1:
        raise SpecError(f"run takes one method, but got {' and '.join(names)}; metavd compare takes several")
    method = names[0] if names else None
    if resume and out and not config and not method and Store(Path(out)).is_run():
        config = str(Store(Path(out)).config)  # an unfinished run knows what it is
    settings = settings_of(config, [*pairs, *more], given)
    if method is None and "method" not in settings and baseline is None:
        baseline = "fedavg"
    wanted = experiment_of(settings, method)
    planned = [(wanted, Path(out) if out else default_folder(wanted))]
    if baseline:
        fitting = {key: value for key, value in settings.items() if key != "method"}
        known = catalogue.options_of(catalogue.check(baseline))
        shared = {key: value for key, value in fitting.items() if key in known or key not in wanted.options}
        other = experiment_of(shared, baseline)
        planned.append((other, planned[0][1] / "baseline" if out else default_folder(other)))
    for experiment, _ in planned:
        resolve(experiment)
    reporter = Reporter()
    try:
        results = [run(e, out=folder, resume=resume or out is None, listener=reporter) for e, folder in planned]
    finally:
        reporter.stop()
    print_results(results)
    click.echo(f"\nFiles: {planned[0][1]}" + (f" and {planned[1][1]}" if baseline else ""))


def default_folder(experiment: Experiment) -> Path:
    """Return runs/DATA-METHOD-sSEED-HASH: the same run always has the same folder."""
    e = resolve(experiment)
    return Path("runs") / f"{e.data}-{e.method}-s{e.seed}-{spec_hash(e)[:6]}"


@cli.command("compare")
@click.argument("words", nargs=-1, required=True, metavar="METHOD... [KEY=VALUE]...")
@_shared
@click.option("--seeds", type=click.IntRange(1, 1000), default=3, show_default=True, help="Seeds a method.")
@click.option("--page", type=click.Path(dir_okay=False), metavar="F.md", help="Also write the table as a document.")
def compare_command(
    *, words: tuple[str, ...], seeds: int, out: str | None, config: str | None, pairs: tuple[str, ...],
    page: str | None, **given: Any,
) -> None:  # fmt: skip
    """Train several METHODs with several seeds; mean and 95 % interval in one table.

    METHOD may be the one word all. Finished runs in DIR are read, not run again; unfinished ones go on.
    """
    methods, more = _words(words)
    if not methods:
        raise SpecError("compare needs at least one method, for example metavd compare fedavg reptile+metavd")
    settings = settings_of(config, [*pairs, *more], given)
    names = list(catalogue.NAMES) if methods == ["all"] else [catalogue.check(name) for name in dict.fromkeys(methods)]
    folder = Path(out) if out else Path("runs") / "compare"
    reporter = Reporter()
    try:
        wanted = (Path(page), f"metavd {shlex.join(sys.argv[1:])}") if page else None
        rows = compare(names, seeds=seeds, out=folder, listener=reporter, page=wanted, **settings)
    finally:
        reporter.stop()
    table = Table(title=f"mean ± 95 % interval over {seeds} seeds" if seeds > 1 else "one seed", title_justify="left")
    table.add_column("method", no_wrap=True)
    for heading in COLUMNS:
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(cell(heading, row[heading]) for heading in COLUMNS))
    console().print(table)
    click.echo(f"Files: {folder / 'comparison.md'}, {folder / 'comparison.json'}")


@cli.command("methods")
@click.option("--json", "as_json", is_flag=True, help="Everything, for programs.")
@click.argument("name", required=False)
def methods_command(name: str | None, as_json: bool) -> None:
    """List every method, or everything about NAME: options, defaults, the paper's search space."""
    chosen = [catalogue.check(name)] if name else list(catalogue.NAMES)
    described = [catalogue.describe(each) for each in chosen]
    if as_json:
        click.echo(json.dumps(described, indent=2))
        return
    out = console()
    if name:
        about = described[0]
        out.print(f"[bold]{about['name']}[/bold]: {about['text']}\n{about['paper']}\n")
        table = Table("option", "default", "meaning", "may be", "paper searched")
        for option in about["options"]:
            table.add_row(option["name"], _text(option["default"]), option["help"], _allowed(option),
                          ", ".join(f"{value:g}" for value in option.get("search", ())))  # fmt: skip
        out.print(table)
        table = Table("setting", "default", "of every run, for --set as well")
        for setting, meaning in HELP.items():
            default = "the dataset's" if setting in FROM_DATA else _text(getattr(Experiment(), setting))
            table.add_row(setting, default, meaning)
        out.print(table)
        return
    table = Table("method", "what it is", "paper")
    for about in described:
        table.add_row(about["name"], about["text"], about["paper"])
    out.print(table)
    table = Table("part of a method", "its options = defaults, and in braces what the paper searched")
    for sign, entries in (("", catalogue.BASES), ("+", catalogue.REGULARISERS), ("+", catalogue.EXTRAS)):
        for part, entry in entries.items():
            table.add_row(sign + part, ", ".join(_brief(option) for option in entry.options))
    out.print(table)
    click.echo("metavd methods NAME explains a method's options; metavd methods --json shows everything.")


def _brief(option: catalogue.Option) -> str:
    searched = option.search and f" {{{option.search[0]:g}..{option.search[-1]:g}}}"
    return f"{option.name}={_text(option.default)}{searched or ''}"


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _allowed(option: Mapping[str, Any]) -> str:
    if "choices" in option:
        return " | ".join(option["choices"])
    low, high = option.get("low"), option.get("high")
    if low is None:
        return ""
    return f"{low:g} to {high:g}" if high is not None else f"{low:g} or more"


@cli.command("datasets")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def datasets_command(as_json: bool) -> None:
    """List the datasets and the settings that each brings."""
    if as_json:
        rows = [{"name": i.name, "description": i.description, "defaults": i.defaults} for i in SOURCES.values()]
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table("dataset", "what it is", "defaults")
    for info in SOURCES.values():
        table.add_row(info.name, info.description, ", ".join(f"{k}={v}" for k, v in info.defaults.items()))
    console().print(table)


@cli.command("show")
@click.argument("folders", nargs=-1, required=True, type=click.Path(), metavar="DIR...")
def show_command(folders: tuple[str, ...]) -> None:
    """Show the result of finished runs again."""
    print_results([Store(Path(folder)).read_result() for folder in folders])


_ROWS: tuple[tuple[str, str, Callable[[Mapping[str, Any]], Any], str], ...] = (
    ("accuracy", "%", lambda part: part["accuracy"], "mean over clients, weighted by their training data"),
    ("worst client", "%", lambda part: part["worst_client"], "accuracy of the client served worst"),
    (
        "calibration error",
        "%",
        lambda part: part["ece_top1"],
        "how far confidence is from accuracy (ECE); lower is better",
    ),
    ("NLL", "", lambda part: part["nll"], "surprise at the true labels; lower is better"),
)


def print_results(results: Sequence[Mapping[str, Any]]) -> None:
    """Print what a newcomer wants to know of one run or of several side by side."""
    first = results[0]
    title = f"{first['data']}, {first['rounds']} rounds, seed {first['seed']}"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(result["method"], justify="right")
    table.add_column("what it means")
    for part, name in (("test", "participating"), ("unseen", "never seen")):
        counts = "/".join(dict.fromkeys(str(result[part]["clients"]) for result in results))
        table.add_row(f"[bold]{name} clients ({counts})[/bold]", *[""] * len(results), "")
        for label, unit, get, meaning in _ROWS:
            table.add_row(f"  {label}", *(_number(get(result[part]), unit) for result in results), meaning)
        table.add_section()
    table.add_row("[bold]cost[/bold]", *[""] * len(results), "")
    table.add_row("  traffic MB", *(f"{(r['bytes']['down'] + r['bytes']['up']) / 1e6:.2f}" for r in results),
                  "sent in both directions in all rounds")  # fmt: skip
    if any(result["sparsity"]["layer"] for result in results):
        table.add_row(
            "  weights dropped", *(_number(r["sparsity"]["layer"], "%") for r in results), "in the masked layer"
        )
    table.add_row("  seconds", *(f"{result['seconds']:.1f}" for result in results), "training and evaluation")
    console().print(table)


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f} %" if unit == "%" else f"{value:.3f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exit status 0 only for a finished job, 2 for wrong input, 1 for failure."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        cli.main(args=argv, prog_name="metavd", standalone_mode=False)
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except WRONG_INPUT as error:
        _fail(str(error), 2)
    except (InterruptedRun, NonFiniteError) as error:
        _fail(str(error), 1)
    except (click.Abort, KeyboardInterrupt):
        _fail("stopped", 1)
    except BrokenPipeError:
        # Whoever read our output has seen enough; Python would complain once more when it closes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1)


def _fail(text: str, status: int) -> None:
    click.echo(f"metavd: {text}", err=True)
    sys.exit(status)
