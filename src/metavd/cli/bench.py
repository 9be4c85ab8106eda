"""metavd bench."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..errors import UserError
from . import later
from .terminal import FILE, Reporter, print_table, settings_of

_STORE = "results"
_PLACES = {"--flower-python": "PYTHON", "--pfl-python": "PYTHON", "--root": "DIR", "--json": "FILE"}
"""Options whose values are this machine's own."""


def _shown(arguments: list[str]) -> str:
    """Write the command as another machine would be given it.

    >>> _shown(["bench", "--root", "/home/me/data", "--pfl-python=/opt/bin/python", "--quick"])
    'metavd bench --root DIR --pfl-python=PYTHON --quick'
    """
    words = []
    for before, word in zip(["", *arguments], arguments, strict=False):
        name, equals, _ = word.partition("=")
        words.append(_PLACES.get(before) or (f"{name}={_PLACES[name]}" if equals and name in _PLACES else word))
    return f"metavd {shlex.join(words)}"


@click.command("bench")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--only", metavar="A,B", help="Only these: cifar, tiny, cohort, clients, width, many, "
              "large, heads; on cpu also ranks, start; on cuda paper, paper100, methods, whole.")  # fmt: skip
@click.option("--quick", is_flag=True, help="Few rounds: for direction, not for a page.")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="A setting of our engine; repeatable.")
@click.option("--json", "place", type=FILE, metavar="FILE",
              help="Where the figures go. [default: with --page, results/bench-DEVICE.json]")  # fmt: skip
@click.option("--page", type=FILE, metavar="FILE",
              help="Also write the page, such as docs/performance.md, from the figures of all devices.")  # fmt: skip
@click.option("--render", is_flag=True, help="Measure nothing; write the page from the figures that are stored.")
@click.option("--flower-python", metavar="PATH", help="An interpreter that has flwr[simulation] and torch.")
@click.option("--pfl-python", metavar="PATH", help="An interpreter that has pfl and torch.")
@click.option("--load", type=click.IntRange(0, 64), default=0, metavar="N",
              help="Measure workloads beside N busy loops; the median round counts.")  # fmt: skip
@click.option("--root", metavar="DIR", type=click.Path(exists=True, file_okay=False),
              help="Folder with CIFAR-10's files, for whole runs on a GPU.")  # fmt: skip
def bench_command(
    *, device: str, only: str | None, quick: bool, pairs: tuple[str, ...], place: str | None, page: str | None,
    render: bool, flower_python: str | None, pfl_python: str | None, load: int, root: str | None,
) -> None:  # fmt: skip
    """Measure the engine beside the loops that people write, Flower and pfl.

    Seconds per round, images and operations per second, memory, ratios, and how all that grows with the cohort, the
    clients and the network, up to a million clients and 10,000 per round; on a CPU also with four processes. Close
    everything else first: the machine is used whole.
    """
    used = later.studies_side.device_of(device)
    store = Path(place) if place else (Path(_STORE) / f"bench-{used}.json" if page or render else None)
    for path in (store, Path(page) if page else None):
        if path is not None:
            later.bench_page.check_place(path)
    if render:
        if page is None:
            raise UserError("--render writes a page, but --page names none; for example --page docs/performance.md")
        later.bench_page.write_page(Path(page), store.parent if store else Path(_STORE))
        click.echo(f"Written: {page}")
        return
    reporter = Reporter()
    found = later.bench_measure.bench(
        used,
        only=[word.strip() for word in only.split(",")] if only else (),
        quick=quick,
        settings=settings_of(None, list(pairs), {}),
        flower=flower_python,
        pfl=pfl_python,
        root=root,
        load=load,
        command=_shown(sys.argv[1:]),
        note=reporter.note,
        keep=partial(later.bench_page.store_figures, store) if store else lambda _: None,
    )
    _print(found)
    if store is not None:
        click.echo(f"Figures: {store}")
    if page is not None and store is not None:
        later.bench_page.write_page(Path(page), store.parent)
        click.echo(f"Written: {page}")


def _print(found: Mapping[str, Any]) -> None:
    """Print what was measured."""
    for workload in found["workloads"]:
        heading, *rows = later.bench_page.table(workload)
        print_table(heading, rows, title=later.bench_page.title(workload), numbers=1)
    for name, points in found["curves"].items():
        for point in points:
            line = f"{point['round_s']:.4g} s, {point['memory_mb']:,.0f} MB" if "round_s" in point else point["error"]
            click.echo(f"{name} {point['value']:>7,}: {line}")
    for name, points in found["scale"].items():
        for row in later.bench_page.scale_rows(name, points)[1:]:
            click.echo(f"{name}: {', '.join(row)}")
    for each in found["starts"]:
        click.echo(f"{each['command']}: {each['seconds']:.2f} s")
    for each in found["whole"]:
        line = f"{each['seconds']:.1f} s, first round after {each['start_s']:.1f} s" if "seconds" in each else ""
        click.echo(f"whole run of {each['method']}, {each['at_once']} at once: {line or each['error']}")
