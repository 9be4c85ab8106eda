"""metavd personalize, predict, trust, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..errors import UserError
from ..extras import need
from . import later
from .terminal import FILE, PLACE, Reporter, adding, folder_name, print_table

_placed = adding(
    click.option("--root", metavar="DIR", help="Folder with the datasets' files. [default: the run's]"),
    click.option("--device", metavar="D", help="cpu or cuda. [default: the run's where there is one]"),
)
"""What these commands share."""
_domain = click.option(
    "--domain", metavar="NAME",
    help="Of a run on several datasets, which of them the rows are like. [default: by name]",
)  # fmt: skip


@click.command("personalize")
@click.argument("run", type=PLACE, metavar="RUN")
@click.option("--data", metavar="NEW", help="Labelled rows of a new client, such as npz:mine.npz or folder:mine.")
@click.option(
    "--client", metavar="ID", help="One of NEW's clients, or without NEW the name or number of one of the run's."
)
@_domain
@_placed
@click.option("--out", type=PLACE, metavar="DIR", help="Folder for the model. [default: below RUN/personal]")
def personalize_command(
    *, run: str, data: str | None, client: str | None, domain: str | None, out: str | None, **how: Any
) -> None:
    """Adapt the trained model of the folder RUN to a client, from a few labelled rows.

    Every client of NEW gets a model of its own. Without --data and --client, the model is written that a new client
    receives before it adapts.
    """
    reporter = Reporter()
    found = later.serve_personal.personalize_each(run, data, client=client, domain=domain, note=reporter.note, **how)
    names = {name: folder_name(f"client-{name}")[:80] if own.about["client"] else name for name, own in found.items()}
    base = Path(out) if out else Path(run) / "personal"
    alone = out is not None and len(found) == 1
    for name, own in found.items():
        place = own.save(base if alone else base / names[name])
        click.echo(f"{place}: adapted to {own.about['samples']} rows ({own.about['adapted_on']})")


@click.command("predict")
@click.argument("place", type=PLACE, metavar="MODEL_OR_RUN")
@click.option(
    "--data", required=True, metavar="X", help="Rows, with or without labels, such as npz:mine.npz or folder:mine."
)
@click.option(
    "--client", metavar="ID",
    help="Of a run: whose model answers, by name or number. [default: what a new client receives]",
)  # fmt: skip
@click.option("--samples", type=int, metavar="S", help="Posterior draws. [default: the run's]")
@click.option("--top", type=int, metavar="K", help="The K most probable classes in place of all.")
@click.option(
    "--coverage", type=float, metavar="C", help="Add the set of classes that holds the right one this often, as 0.9."
)
@click.option("--conformal", "kind", metavar="lac|aps|raps", help="How sets are made. [default: lac]")
@click.option(
    "--penalty", type=float, metavar="P", help="Of raps: what a rank adds to a class's score. [default: 0.01]"
)
@click.option("--free", type=int, metavar="K", help="Of raps: how many ranks add nothing. [default: 5]")
@click.option("--calibrate", metavar="ROWS",
              help="Labelled rows of the client for its sets. [default: its validation rows in the run]")  # fmt: skip
@_domain
@_placed
@click.option("--out", type=FILE, metavar="F", help="A .csv or .parquet file. [default: CSV, printed]")
def predict_command(
    *, place: str, data: str, client: str | None, top: int | None, coverage: float | None, kind: str | None,
    penalty: float | None, free: int | None, calibrate: str | None, domain: str | None, root: str | None,
    device: str | None, out: str | None, **how: Any,
) -> None:  # fmt: skip
    """Answer rows: class probabilities, entropy and, where there is a posterior, mutual information.

    With --coverage every row also gets a set of classes, from labelled rows that the model has not learnt from.
    """
    for name, value in (("conformal", kind), ("penalty", penalty), ("free", free), ("calibrate", calibrate)):
        if coverage is None and value is not None:
            raise UserError(f"{name} is {value!r}, but sets are made only for a coverage; add --coverage 0.9")
    kind = kind or "lac"
    if coverage is not None:
        later.evaluate_conformal.check(coverage, kind, penalty, free)
    if out is not None and later.serve_export.check_path(Path(out), later.serve_export.TABLES) == "parquet":
        need("pyarrow", "parquet", "a .parquet file")
    reporter = Reporter()
    own = later.serve_personal.open_model(
        place, client=client, domain=domain, device=device, root=root, note=reporter.note
    )
    rows = later.serve_samples.samples(
        data, own.takes, own.about["classes"], data=own.experiment.data, domain=domain or own.about["domain"],
        root=root or own.experiment.root, note=reporter.note,
    )  # fmt: skip
    like = None if rows.domain is None else own.takes.domains[rows.domain].name
    said = own.predict(rows.x, domain=like, **how)
    inside = None
    told = "" if rows.y is None else f", accuracy {later.evaluate_metrics.accuracy(said.probs, rows.y):.1%}"
    told += f", mean entropy {said.entropy.mean():.3f}"
    if coverage is not None:
        rule = later.serve_sets.calibrated(
            own, coverage, kind, source=calibrate, penalty=penalty, free=free, domain=like, root=root,
            note=reporter.note, **how,
        )  # fmt: skip
        inside = later.evaluate_conformal.sets(said.probs, rule)
        told += "" if rows.y is None else f", label in set {later.evaluate_conformal.covered(inside, rows.y):.1%}"
        told += f", mean set size {later.evaluate_conformal.size(inside):.2f}"
    columns = later.serve_export.table(own, rows, said, top, inside)
    if out is None:
        click.echo(later.serve_export.csv_text(columns), nl=False)
    else:
        later.serve_export.write_table(Path(out), columns)
    reporter.note(f"{len(rows.x)} rows{told}" + (f"; {out}" if out else ""))


@click.command("trust")
@click.argument("run", type=PLACE, metavar="RUN")
@click.option("--unknown", metavar="DATA", help="Another dataset, whose rows the run's clients are shown as unknown.")
@click.option("--rows", type=int, default=200, metavar="N", help="How many of them.")
@click.option("--coverage", type=float, default=0.9, metavar="C",
              help="How often a set of classes is to hold the right one.")  # fmt: skip
@_placed
@click.option("--out", type=FILE, metavar="F.json", help="[default: RUN/trust.json]")
def trust_command(*, run: str, out: str | None, **how: Any) -> None:
    """Measure how far the answers of a finished RUN can be trusted, client by client.

    Sets of classes (LAC, APS, RAPS): a client's test rows are halved, each half calibrates the other's sets. With
    --unknown, how well the clients' uncertainty tells rows of another dataset from their own.
    """
    found = later.serve_trust.trust(run, note=Reporter().note, **how)
    path = Path(out) if out else Path(run) / "trust.json"
    title = f"sets for coverage {found['coverage']:g}"
    title += f", unknown inputs from {found['unknown']['data']}" if "unknown" in found else ""
    print_table(("", "by", "participating clients", "unseen clients"), later.serve_trust.lines(found), title=title)
    later.serve_trust.write(found, path)
    click.echo(f"Written: {path}")


@click.command("export")
@click.argument("place", type=PLACE, metavar="MODEL_OR_RUN")
@click.option(
    "--client", metavar="ID", help="Of a run: whose model, by name or number. [default: what a new client receives]"
)
@click.option("--format", "kind", metavar="safetensors|onnx", help="[default: as the file's ending says]")
@click.option("--out", type=FILE, required=True, metavar="F", help="The file; its card goes beside it.")
@click.option("--samples", type=int, metavar="S", help="Posterior draws in an ONNX graph. [default: the run's]")
@click.option("--licence", metavar="TEXT", help="What the model card says of it.")
@_domain
@_placed
def export_command(
    *, place: str, client: str | None, kind: str | None, out: str, samples: int | None, licence: str | None,
    domain: str | None, **how: Any,
) -> None:  # fmt: skip
    """Write a client's model as safetensors or ONNX, with a model card (F.md) beside it."""
    if later.serve_export.check_path(Path(out), later.serve_export.FORMATS, kind) == "onnx":
        for name in ("onnx", "onnxruntime", "onnxscript"):
            need(name, "export", "ONNX")
    own = later.serve_personal.open_model(place, client=client, domain=domain, note=Reporter().note, **how)
    page = later.serve_export.export(
        own, out, format=kind, domain=domain, samples=samples, licence=licence or later.serve_export.LICENCE
    )
    click.echo(f"{out} and {page}")
