"""metavd merge."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import FailedError
from . import later


@click.command("merge")
@click.argument("into", metavar="INTO")
@click.argument("others", nargs=-1, required=True, metavar="FROM...")
def merge_command(*, into: str, others: tuple[str, ...]) -> None:
    """Join finished runs from several machines: stores (files of JSON lines), or folders of runs.

    What INTO lacks is added. What is there already must be the same run with the same figures; where it is not, INTO
    keeps its own, the run is named with what differs, and the exit status is 1.
    """
    merged = later.studies_merge.merge(Path(into), [Path(each) for each in others])
    click.echo(f"{into}: {merged.added} added, {merged.same} there already")
    if merged.differ:
        raise FailedError(f"left as they are in {into}: " + "; ".join(merged.differ))
