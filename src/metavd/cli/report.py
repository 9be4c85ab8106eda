"""metavd report."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import click

from . import later
from .terminal import FILE, FOLDER, PLACE, Reporter, command_line


@click.command("report")
@click.argument("folders", nargs=-1, required=True, type=PLACE, metavar="DIR...")
@click.option("--out", type=FILE, metavar="F.html",
              help="The page; .html is added where it is missing. [default: DIR/report.html; of several DIRs, "
                   "report.html]")  # fmt: skip
@click.option("--figures", type=FOLDER, metavar="DIR", help="Every figure as SVG and PNG. [default: F_files]")
@click.option("--baseline", metavar="METHOD", help="What clients' gains are over. [default: fedavg]")
@click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
def report_command(
    *, folders: tuple[str, ...], out: str | None, figures: str | None, baseline: str | None, show: bool
) -> None:
    """Write one HTML page of the finished runs in and below DIR, or of the study in DIR (metavd tune).

    The page needs no network and no other file: tables, learning curves, calibration, clients, dropout rates, cost,
    and how to repeat every run.
    """
    places = [Path(folder) for folder in folders]
    named = out if out is None or out.lower().endswith((".html", ".htm")) else f"{out}.html"
    page = Path(named) if named else (places[0] / "report.html" if len(places) == 1 else Path("report.html"))
    reporter = Reporter()
    with reporter.err.status("Reading runs and drawing"):
        command = command_line()
        drawn = Path(figures) if figures else None
        if len(places) == 1 and later.report_tuning.is_study(places[0]):
            notes = later.report_tuning.write_study(places[0], page, figures=drawn, command=command)
        else:
            notes = later.report_page.write_report(places, page, figures=drawn, baseline=baseline, command=command)
    for note in notes:
        reporter.note(note)
    click.echo(f"Written: {page}")
    if show:
        webbrowser.open(page.resolve().as_uri())
