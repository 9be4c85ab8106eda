"""metavd tune."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import SpecError
from .terminal import at_once, console, experiment_of, settings_of, shared, words

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ..studies.tune import Plan

_BEST = 5
"""Trials in the table."""
_SILENCE = 30.0
"""Seconds without a line after which a trial's state is reported, so that a log shows that the study lives."""


class Bar:
    """Tells a person how a study goes: a bar on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console

        self.err = Console(stderr=True, highlight=False)
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.done = self.total = self.rounds = 0
        self.metric = "nll"
        self.best = ""
        self.said = time.monotonic()

    def start(self, plan: Plan, rounds: int, done: int, total: int) -> None:
        """Say what is searched, and how much of it is there."""
        self.done, self.total, self.rounds, self.metric = done, total, rounds, plan.metric
        e = plan.experiment
        judged = f"validation {_METRIC[plan.metric]} by {plan.by}, valid {e.valid:g}"
        seeds = f", {plan.seeds} seeds" if plan.seeds > 1 else ""
        self.note(f"{e.method} on {e.data}: {total} trials of {rounds} rounds{seeds}, {judged}")
        for one in plan.space:
            self.note(f"  {one.name} in {one}")
        if done:
            more = f"runs {total - done} more" if done < total else "nothing is left to run"
            self.note(f"  the study has {done} of {max(done, total)}, {more}")
        if self.err.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("trials"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(), console=self.err, transient=True,
            )  # fmt: skip
            self.task = self.bar.add_task("trials", total=total, completed=done, text="")
            self.bar.start()

    def step(self, number: int, round: int, value: float) -> None:
        """Show where a trial is."""
        text = f"trial {number}: round {round}/{self.rounds}  {_METRIC[self.metric]} {_shown(self.metric, value)}"
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, text=f"{text}{self.best}")
        elif time.monotonic() - self.said > _SILENCE:
            self.note(f"  {text}")

    def trial(self, line: Mapping[str, Any]) -> None:
        """Say how a trial ended."""
        self.done += line["state"] != "failed"
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=self.done)
        ended = line["state"]
        if ended == "finished":
            ended = f"{_METRIC[self.metric]} {_shown(self.metric, line['value'])}"
        elif "reason" in line:
            ended = f"{ended}: {line['reason']}"
        settings = "  ".join(f"{key}={_text(value)}" for key, value in line["settings"].items())
        same = f", as trial {line['same']}" if "same" in line else ""
        self.note(f"  trial {line['number']} ({self.done} of {self.total})  {settings}  {ended}{same}")

    def note(self, text: str) -> None:
        """Print a line beside the bar."""
        self.said = time.monotonic()
        self.err.print(text, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


@click.command("tune")
@click.argument("given_words", nargs=-1, metavar="METHOD [KEY=VALUE]...")
@shared
@click.option(
    "--trials",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    metavar="N",
    help="Trials in the study, those of earlier commands included.",
)
@click.option(
    "--search",
    "searched",
    multiple=True,
    metavar="KEY=SPACE",
    help="LOW..HIGH, LOW..HIGH:log or A,B,C; changes the paper's space or adds to it; repeatable.",
)
@click.option(
    "--metric",
    metavar="nll|accuracy",
    default="nll",
    show_default=True,
    help="What is best, on validation rows.",
)
@click.option(
    "--by",
    metavar="rows|clients",
    default="rows",
    show_default=True,
    help="Validate on held-out rows of training clients, or on clients that do not train.",
)
@click.option(
    "--seeds",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    metavar="K",
    help="Seeds that a trial is averaged over.",
)
@click.option(
    "--sampler",
    metavar="tpe|random",
    default="tpe",
    show_default=True,
    help="Learn from earlier trials, or not.",
)
@click.option(
    "--prune/--no-prune",
    default=True,
    show_default=True,
    help="Stop trials that are worse than the median at the same round.",
)
@at_once
def tune_command(
    *, given_words: tuple[str, ...], out: str | None, config: str | None, pairs: tuple[str, ...],
    searched: tuple[str, ...], trials: int, metric: str, by: str, seeds: int, sampler: str, prune: bool, jobs: int,
    **given: Any,
) -> None:  # fmt: skip
    """Search good settings of METHOD on validation rows; test rows and unseen clients are not looked at.

    The same command goes on where it was stopped. DIR/best.toml is for metavd run --config.
    """
    from ..studies.tune import plan, tune

    names, more = words(given_words)
    fixed = [*pairs, *more]
    search = searched_of(searched, fixed)
    settings = settings_of(config, fixed, given)
    if len(names) > 1 or not (names or "method" in settings):
        raise SpecError(
            f"tune takes one method, but got {' and '.join(names) or 'none'}; for example metavd tune reptile+metavd"
        )
    experiment = experiment_of(settings, names[0] if names else None)
    study = plan(experiment, search, seeds=seeds, metric=metric, by=by, sampler=sampler, prune=prune)
    folder = Path(out) if out else default_folder(study)
    bar = Bar()
    try:
        history = tune(study, out=folder, trials=trials, jobs=jobs, watcher=bar)
    finally:
        bar.stop()
    print_study(history)
    click.echo(f"\nFiles: {folder}/trials.json, importance.json, study.db\nmetavd run --config {folder / 'best.toml'}")


def searched_of(searched: Sequence[str], fixed: Sequence[str]) -> dict[str, str]:
    """Read --search; a setting that is also fixed is refused, rather than one of the two dropped in silence."""
    result: dict[str, str] = {}
    set_ = {pair.partition("=")[0].strip().replace("-", "_") for pair in fixed}
    for text in searched:
        key, equals, space = text.partition("=")
        name = key.strip().replace("-", "_")
        if not (name and equals and space.strip()):
            raise SpecError(f"--search got {text!r}, but needs key=space, for example --search lr=0.001..0.1:log")
        if name in result:
            raise SpecError(f"--search names {name} twice; once is enough")
        if name in set_:
            raise SpecError(f"{name} is both fixed with --set and searched with --search; choose one")
        result[name] = space.strip()
    return result


def default_folder(study: Plan) -> Path:
    """Return runs/tune-DATA-METHOD-sSEED-HASH: the same command always has the same folder."""
    from ..studies.tune import name_of

    e = study.experiment
    name = re.sub(r"[^\w.+=-]+", "-", e.data)[-60:]
    return Path("runs") / f"tune-{name}-{e.method}-s{e.seed}-{name_of(study)}"


_METRIC = {"nll": "NLL", "accuracy": "accuracy"}


def _shown(metric: str, value: float) -> str:
    return f"{value:.4f}" if metric == "nll" else f"{value:.1%}"


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_study(history: Mapping[str, Any]) -> None:
    """Print the best trials, what became of the others, and the best configuration."""
    from rich.table import Table

    metric, lines = history["metric"], history["trials"]
    searched = list(history["study"]["space"])
    finished = [line for line in lines if line["state"] == "finished"]
    finished.sort(key=lambda line: line["value"], reverse=history["direction"] == "maximize")
    table = Table(title=f"best trials by validation {_METRIC[metric]}", title_justify="left")
    for heading in ("trial", _METRIC[metric], *searched, "seconds"):
        table.add_column(heading, justify="right")
    for line in finished[:_BEST]:
        table.add_row(
            str(line["number"]),
            _shown(metric, line["value"]),
            *(_text(line["settings"][key]) for key in searched),
            f"{line['seconds']:.1f}",
        )
    console().print(table)
    stopped = sum(line["state"] == "stopped" for line in lines)
    click.echo(f"{len(finished)} trials finished, {stopped} stopped early or diverged")
    if history["importance"]:
        shares = ", ".join(f"{key} {share:.0%}" for key, share in history["importance"].items())
        click.echo(f"share of the variance explained: {shares}")
    best = " ".join(f"{key}={value}" for key, value in finished[0]["settings"].items())
    click.echo(f"best: {best}")
