"""metavd arena."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from ..errors import SpecError
from . import later
from .terminal import COUNT, FILE, Reporter, many, settings_of, shared, tuned, tuned_folder, words

PROTOCOLS = ("independent", "consistent")
_PICTURES = (".png", ".svg", ".pdf")


@click.command("arena")
@click.argument("given_words", nargs=-1, metavar="METHOD... [KEY=VALUE]...")
@shared
@click.option("--seeds", type=COUNT, default=1, metavar="K", help="Seeds of every method, from --seed on.")
@click.option("--test-rows", "protocols", default=",".join(PROTOCOLS), metavar="A,B",
              help="How test rows are dealt; every method runs under each.")  # fmt: skip
@click.option("--unknown", metavar="DATA", help="Another dataset: how well do clients tell its rows from their own?")
@click.option("--store", type=FILE, default="results/arena.jsonl",
              metavar="F", help="Finished runs; what it holds is not run again.")  # fmt: skip
@click.option("--page", type=FILE, metavar="F.md",
              help="Also write the tables as a document; without METHOD nothing is run.")  # fmt: skip
@click.option("--which", type=FILE, metavar="F.md", help="Also write which method to take for which purpose.")
@click.option("--picture", type=FILE, metavar="F",
              help="Also draw accuracy and calibration error, as .png, .svg or .pdf.")  # fmt: skip
@tuned
@many
def arena_command(
    *, given_words: tuple[str, ...], seeds: int, protocols: str, unknown: str | None, store: str, page: str | None,
    which: str | None, picture: str | None, jobs: int, share: later.studies_many.Share | None, tuned: bool,
    tuned_from: str | None, until: float | None, out: str | None, config: str | None, pairs: tuple[str, ...],
    **given: Any,
) -> None:  # fmt: skip
    """Run METHODs on equal terms under both ways to deal test rows, each run a line in a store.

    METHOD may be the one word all, or best: a choice of sixteen. The page is written from the store alone.
    """
    names, more = words(given_words)
    if picture is not None and Path(picture).suffix not in _PICTURES:
        raise SpecError(f"--picture is {picture!r}, but its name must end in {', '.join(_PICTURES)}")
    if not names and not (page or which or picture):
        raise SpecError("arena needs at least one method, for example metavd arena fedavg fedrep, or --page")
    planned = later.studies_arena.lineup(
        names, settings_of(config, [*pairs, *more], given), protocols=[part.strip() for part in protocols.split(",")],
        seeds=seeds, unknown=unknown, tuned=tuned_folder(tuned=tuned, tuned_from=tuned_from),
    )  # fmt: skip
    reporter, where = Reporter(), planned.where
    for text in planned.told:
        reporter.note(text)
    if planned.tasks:
        look = partial(later.serve_trust.trust, unknown=unknown, root=where.get("root"), device=where.get("device"))
        for ended in later.studies_arena.carry(
            planned.tasks, store=Path(store), work=Path(out or "runs/arena"), jobs=jobs, where=where, share=share,
            until=until, look=look,
        ):  # fmt: skip
            if isinstance(ended.error, later.data_source.SourceError):
                raise ended.error  # all runs have the same data
            method, protocol, seed = ended.key
            reporter.note(f"  {method}  {protocol}  seed {seed}  {_said(ended)}")
    if page is not None:
        later.studies_markdown.write(page, later.studies_arena.page(Path(store)))
        click.echo(f"Written: {page}")
    if which is not None:
        later.studies_markdown.write(which, later.studies_which.page(Path(store)))
        click.echo(f"Written: {which}")
    if picture is not None:
        click.echo(f"Written: {later.report_arena.draw_arena(Path(store), Path(picture))}")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _said(ended: later.studies_many.Ended[Any]) -> str:
    """Say what became of a run."""
    if ended.line is not None and "result" in ended.line:
        result = ended.line["result"]
        return f"{_share(result['test']['accuracy'])} test, {_share(result['unseen']['accuracy'])} unseen"
    return ended.end if ended.error is None else f"{ended.end}: {ended.error}"
