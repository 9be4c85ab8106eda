"""metavd tune-all."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from ..errors import SpecError
from .terminal import Reporter, at_once, console, experiment_of, settings_of, shared, words
from .tune import searched_of


@click.command("tune-all")
@click.argument("given_words", nargs=-1, metavar="METHOD... [KEY=VALUE]...")
@shared
@click.option(
    "--trials",
    type=click.IntRange(2, 1000),
    default=12,
    show_default=True,
    metavar="N",
    help="Trials of every method; the first one is its defaults.",
)
@click.option(
    "--rungs",
    default="300,1000",
    show_default=True,
    metavar="A,B,C",
    help="Rounds after which a third of the trials goes on; the last is what is tuned for.",
)
@click.option(
    "--search",
    "searched",
    multiple=True,
    metavar="KEY=SPACE",
    help="LOW..HIGH, LOW..HIGH:log or A,B,C, for the methods that have KEY; repeatable.",
)
@click.option(
    "--store",
    type=click.Path(dir_okay=False),
    default="results/tuning.jsonl",
    show_default=True,
    metavar="F",
    help="Finished rungs; what it holds is not computed again.",
)
@click.option(
    "--page",
    type=click.Path(dir_okay=False),
    metavar="F.md",
    help="Also write what was chosen as a document; without METHOD nothing is run.",
)
@at_once
def tune_all_command(
    *, given_words: tuple[str, ...], trials: int, rungs: str, searched: tuple[str, ...], store: str, jobs: int,
    page: str | None, out: str | None, config: str | None, pairs: tuple[str, ...], **given: Any,
) -> None:  # fmt: skip
    """Tune several METHODs on equal terms by successive halving, on validation rows and validation clients.

    Every method has the same number of trials and rounds. Test rows and unseen clients are taken out before anybody
    trains.
    """
    from ..studies import halving
    from ..studies.side import jobs_for
    from ..studies.tune import VALID

    names, more = words(given_words)
    fixed = [*pairs, *more]
    settings = {"valid": VALID, "valid_clients": 10} | settings_of(config, fixed, given)
    if not names and page is None:
        raise SpecError("tune-all needs at least one method, for example metavd tune-all fedavg reptile+metavd")
    plan = halving.Halving(trials, _rungs(rungs))
    experiments = [experiment_of(settings, name) for name in names]
    reporter = Reporter()
    for line in halving.search(
        experiments, plan, store=Path(store), scratch=Path(out or "runs/tune-all"),
        jobs=jobs_for(experiments[0].device, jobs) if experiments else 1, searched=searched_of(searched, fixed),
    ):  # fmt: skip
        what = "  ".join(f"{key}={value}" for key, value in line["settings"].items()) or "defaults"
        score = "diverged" if line["score"] is None else f"{line['score']:.1%}"
        reporter.note(f"  {line['method']}  round {line['round']}  trial {line['trial']}  {score}  {what}")
    _print(store)
    if page is not None:
        command = f"metavd {shlex.join(sys.argv[1:])}"
        Path(page).write_text(halving.page(list(halving.read(Path(store)).values()), command))
        click.echo(f"Written: {page}")


def _rungs(text: str) -> tuple[int, ...]:
    try:
        rungs = tuple(int(word) for word in text.split(","))
    except ValueError:
        rungs = ()
    if not rungs or rungs[0] < 1 or list(rungs) != sorted(set(rungs)):
        raise SpecError(f"rungs is {text!r}, but must be rising numbers of rounds, such as 300,1000")
    return rungs


def _print(store: str) -> None:
    from rich.table import Table

    from ..studies import halving

    table = Table(title="chosen on validation rows and clients", title_justify="left")
    for heading in ("study", "method", "accuracy", "settings"):
        table.add_column(heading)
    for (study, method), lines in halving.chosen(halving.read(Path(store)).values()).items():
        settings = " ".join(f"{key}={value}" for key, value in lines[0]["settings"].items()) or "defaults"
        table.add_row(study, method, f"{lines[0]['score']:.1%}", settings)
    console().print(table)
