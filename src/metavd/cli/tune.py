"""metavd tune, tune-all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ..errors import SpecError
from ..studies.plan import VALID, Plan, Watcher, name_of, plan
from . import later
from .terminal import (
    COUNT,
    FILE,
    FOLDER,
    Decorator,
    Reporter,
    Shown,
    adding,
    at_once,
    command_line,
    experiment_of,
    folder_for,
    many,
    print_table,
    settings_of,
    shared,
    words,
)

_BEST = 5
"""Trials in the table."""


def _searching(counts: click.IntRange, *, default: int, trials: str, space: str) -> Decorator:
    """Return the options of both commands: how many trials, over what."""
    return adding(
        click.option("--trials", type=counts, default=default, metavar="N", help=trials),
        click.option("--search", "searched", multiple=True, metavar="KEY[=SPACE]",
                     help=f"LOW..HIGH, LOW..HIGH:log or A,B,C{space}; KEY alone: what it offers; repeatable."),
    )  # fmt: skip


class StudyBar(Shown, Watcher):
    """Tells a person how a study goes: a bar on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.done = self.rounds = 0
        self.metric = "nll"

    def start(self, plan: Plan, rounds: int, done: int, total: int) -> None:
        """Say what is searched, and how much of it is there."""
        self.done, self.total, self.rounds, self.metric = done, total, rounds, plan.metric
        e = plan.experiment
        judged = f"validation {_called(plan.metric)} by {plan.by}, valid {e.valid:g}"
        seeds = f", {plan.seeds} seeds" if plan.seeds > 1 else ""
        self.note(f"{e.method} on {e.data}: {total} trials of {rounds} rounds{seeds}, {judged}")
        for one in plan.space:
            self.note(f"  {one.name} in {one}")
        if done:
            more = f"runs {total - done} more" if done < total else "nothing is left to run"
            self.note(f"  the study has {done} of {max(done, total)}, {more}")
        self.show("trials", total, done)

    def step(self, number: int, round: int, value: float) -> None:
        """Show where a trial is."""
        text = f"trial {number}: round {round}/{self.rounds}  {_called(self.metric)} {_shown(self.metric, value)}"
        if not self.move(text=text) and self.silent():
            self.note(f"  {text}")

    def trial(self, line: Mapping[str, Any]) -> None:
        """Say how a trial ended."""
        self.done += line["state"] != "failed"
        self.move(completed=self.done)
        ended = line["state"]
        if ended == "finished":
            ended = f"{_called(self.metric)} {_shown(self.metric, line['value'])}"
        elif "reason" in line:
            ended = f"{ended}: {line['reason']}"
        settings = "  ".join(f"{key}={_text(value)}" for key, value in line["settings"].items())
        same = f", as trial {line['same']}" if "same" in line else ""
        self.note(f"  trial {line['number']} ({self.done} of {self.total})  {settings}  {ended}{same}")


@click.command("tune")
@click.argument("given_words", nargs=-1, metavar="METHOD [KEY=VALUE]...")
@shared
@_searching(click.IntRange(1), default=20, trials="Trials in the study, those of earlier commands included.",
            space="; changes the paper's space or adds to it")  # fmt: skip
@click.option("--metric", metavar="nll|accuracy", default="nll", help="What is best, on validation rows.")
@click.option("--by", metavar="rows|clients", default="rows",
              help="Validate on held-out rows of training clients, or on clients that do not train.")  # fmt: skip
@click.option("--seeds", type=COUNT, default=1, metavar="K", help="Seeds that a trial is averaged over.")
@click.option("--sampler", metavar="tpe|random", default="tpe", help="Learn from earlier trials, or not.")
@click.option("--prune/--no-prune", default=True, help="Stop trials that are worse than the median at the same round.")
@at_once
def tune_command(
    *, given_words: tuple[str, ...], out: str | None, config: str | None, pairs: tuple[str, ...],
    searched: tuple[str, ...], trials: int, metric: str, by: str, seeds: int, sampler: str, prune: bool, jobs: int,
    **given: Any,
) -> None:  # fmt: skip
    """Search good settings of METHOD on validation rows; test rows and unseen clients are not looked at.

    The same command goes on where it was stopped. DIR/best.toml is for metavd run --config.
    """
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
    folder = Path(out) if out else folder_for(study.experiment, name_of(study), "tune-")
    with StudyBar() as bar:
        history = later.studies_tune.tune(study, out=folder, trials=trials, jobs=jobs, watcher=bar)
    print_study(history)
    click.echo(f"\nFiles: {folder}/trials.json, importance.json, study.db\nmetavd run --config {folder / 'best.toml'}")


def searched_of(searched: Sequence[str], fixed: Sequence[str]) -> dict[str, str]:
    """Read --search; a setting that is also fixed is refused, rather than one of the two dropped in silence."""
    result: dict[str, str] = {}
    set_ = {pair.partition("=")[0].strip().replace("-", "_") for pair in fixed}
    for text in searched:
        key, equals, space = text.partition("=")
        name = key.strip().replace("-", "_")
        if not name or (equals and not space.strip()):
            raise SpecError(f"--search got {text!r}, but needs key=space, for example --search lr=0.001..0.1:log")
        if name in result:
            raise SpecError(f"--search names {name} twice; once is enough")
        if name in set_:
            raise SpecError(f"{name} is both fixed with --set and searched with --search; choose one")
        result[name] = space.strip()
    return result


def _called(metric: str) -> str:
    return later.evaluate_figures.get(metric).short


def _shown(metric: str, value: float) -> str:
    return f"{value:.1%}" if later.evaluate_figures.get(metric).unit == "%" else f"{value:.4f}"


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_study(history: Mapping[str, Any]) -> None:
    """Print the best trials, what became of the others, and the best configuration."""
    metric, lines = history["metric"], history["trials"]
    searched = list(history["study"]["space"])
    finished = [line for line in lines if line["state"] == "finished"]
    finished.sort(key=lambda line: line["value"], reverse=history["direction"] == "maximize")
    print_table(
        ("trial", _called(metric), *searched, "seconds"),
        (
            [str(line["number"]), _shown(metric, line["value"]), *(_text(line["settings"][key]) for key in searched),
             f"{line['seconds']:.1f}"]
            for line in finished[:_BEST]
        ),
        title=f"best trials by validation {_called(metric)}", numbers=0,
    )  # fmt: skip
    stopped = sum(line["state"] == "stopped" for line in lines)
    click.echo(f"{len(finished)} trials finished, {stopped} stopped early or diverged")
    if history["importance"]:
        shares = ", ".join(f"{key} {share:.0%}" for key, share in history["importance"].items())
        click.echo(f"share of the variance explained: {shares}")
    best = " ".join(f"{key}={value}" for key, value in finished[0]["settings"].items())
    click.echo(f"best: {best}")


@click.command("tune-all")
@click.argument("given_words", nargs=-1, metavar="METHOD... [KEY=VALUE]...")
@shared
@_searching(click.IntRange(2, 1000), default=12,
            trials="Trials of every method, no two alike; the first one is its defaults.",
            space=", for the methods that have KEY")  # fmt: skip
@click.option("--rungs", default="300,1000", metavar="A,B,C",
              help="Rounds after which a third of the trials goes on; the last is what is tuned for.")  # fmt: skip
@click.option("--store", type=FILE, default="results/tuning.jsonl",
              metavar="F", help="Finished rungs; what it holds is not computed again.")  # fmt: skip
@click.option("--page", type=FILE, metavar="F.md",
              help="Also write what was chosen as a document and as files; without METHOD nothing is run.")  # fmt: skip
@click.option("--files", type=FOLDER, metavar="DIR",
              help="Where --page writes the files, one for each method. [default: results/tuned]")  # fmt: skip
@many
def tune_all_command(
    *, given_words: tuple[str, ...], trials: int, rungs: str, searched: tuple[str, ...], store: str, jobs: int,
    share: later.studies_many.Share | None, until: float | None, page: str | None, files: str | None,
    out: str | None, config: str | None, pairs: tuple[str, ...], **given: Any,
) -> None:  # fmt: skip
    """Tune several METHODs on equal terms by successive halving, on validation rows and validation clients.

    Every method has the same number of trials and rounds. Test rows and unseen clients are taken out before anybody
    trains. A slice is a share of the methods.
    """
    names, more = words(given_words)
    if share is not None:
        names = names[share.number - 1 :: share.count]
    fixed = [*pairs, *more]
    settings = {"valid": VALID, "valid_clients": 10} | settings_of(config, fixed, given)
    if not names and page is None:
        raise SpecError("tune-all needs at least one method, for example metavd tune-all fedavg reptile+metavd")
    thinning = later.studies_halving.Halving(trials, _rungs(rungs))
    experiments = [experiment_of(settings, name) for name in names]
    reporter = Reporter()
    for line in later.studies_halving.search(
        experiments, thinning, store=Path(store), scratch=Path(out or "runs/tune-all"), jobs=jobs,
        until=until, searched=searched_of(searched, fixed), note=reporter.note,
    ):  # fmt: skip
        what = "  ".join(f"{key}={value}" for key, value in line["settings"].items())
        score = "diverged" if line["score"] is None else f"{line['score']:.1%}"
        reporter.note(f"  {line['method']}  round {line['round']}  trial {line['trial']}  {score}  {what}")
    _print_chosen(store)
    if page is not None:
        lines = list(later.studies_halving.read(Path(store)).values())
        folder = Path(files) if files else later.studies_tuned.FOLDER
        later.studies_markdown.write(page, later.studies_halving.page(lines, command_line()))
        written = later.studies_tuned.write(lines, folder)
        click.echo(f"Written: {page}" + (f", and {len(written)} files in {folder}" if written else ""))


def _rungs(text: str) -> tuple[int, ...]:
    try:
        rungs = tuple(int(word) for word in text.split(","))
    except ValueError:
        rungs = ()
    if not rungs or rungs[0] < 1 or list(rungs) != sorted(set(rungs)):
        raise SpecError(f"rungs is {text!r}, but must be rising numbers of rounds, such as 300,1000")
    return rungs


def _print_chosen(store: str) -> None:
    chosen = later.studies_halving.chosen(later.studies_halving.read(Path(store)).values())
    rows = [
        (study, method, f"{best['score']:.1%}", " ".join(f"{key}={value}" for key, value in best["settings"].items()))
        for (study, method), (best, *_) in chosen.items()
    ]
    print_table(("study", "method", "accuracy", "settings"), rows, title="chosen on validation rows and clients")
