"""One HTML page of several runs: everything inside, nothing fetched, and every figure beside it as SVG and PNG."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Iterable, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..container import write_atomic
from ..data import collection
from ..data.source import SourceError
from ..evaluate.figures import headline
from ..version import VERSION
from . import curves, gains, intervals, personal, reliability, summary
from .groups import Group, baseline_of, group, left_out, parts, settings, tasks
from .groups import gains as gains_over
from .pictures import Picture, looking_alike, publish, slug
from .read import FinishedRun, printable, read_runs
from .summary import NOTHING

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The browser fetches nothing, and runs nothing but a script whose hash is added, whatever a file has smuggled in."""


_ADAPTATION, _NEWCOMERS = {"adapt_steps", "tune_epochs", "mix_epochs"}, {"new_epochs", "newcomer"}
"""Options that say how a model is made a client's own, and a client's that never took part."""


def write_report(
    folders: Sequence[Path], out: Path, *, figures: Path | None = None, baseline: str | None = None, command: str = ""
) -> list[str]:
    """Write the page to `out` and its figures to a folder, by default OUT_files; return notes on what is missing."""
    runs, notes = read_runs(folders)
    groups, repeated = group(runs, baseline)
    notes = [printable(note) for note in [*notes, *repeated, *(note for run in runs for note in run.notes)]]
    if tasks(groups) > 1:
        notes.append("These runs do not all have the same data and clients; compare only those that do.")
    place = figure_folder(out, figures)
    with looking_alike():
        drawn = _figures(groups, baseline, place)
    write_atomic(out, _page(groups, drawn, notes=notes, baseline=baseline, place=place.name, command=command))
    return notes


def _figures(groups: Sequence[Group], baseline: str | None, place: Path) -> dict[str, Any]:
    drawn = partial(published, place=place)
    against = baseline_of(groups, baseline)
    over, without = gains_over(groups, against) if against else ([], [])
    return {
        "intervals": drawn(intervals.pictures(groups)),
        "learning": drawn(curves.learning(groups)),
        "reliability": {part: drawn(reliability.diagrams(groups, part)) for part in parts(groups)},
        "doubts": {part: drawn(reliability.doubts(groups, part)) for part in parts(groups)},
        "gains": drawn(gains.pictures(over, against or "")),
        "gain_notes": without,
        "rates": drawn(personal.rates(groups)),
        "embeddings": drawn(personal.embeddings(groups)),
        "cost": drawn(curves.cost(groups)),
    }


def figure_folder(out: Path, figures: Path | None) -> Path:
    """Make the folders of a page and of its figures, and return the latter, by default OUT_files."""
    place = figures or out.with_name(f"{out.stem}_files")
    place.mkdir(parents=True, exist_ok=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    return place


def _text_of(name: str) -> Markup:
    """Return a template as it stands."""
    return Markup((resources.files(__package__) / "templates" / name).read_text(encoding="utf-8"))


def rendered(name: str, **values: Any) -> bytes:
    """Return a template's page; whatever is put into it is escaped, and what is missing is an error."""
    pages = Environment(
        loader=PackageLoader("metavd.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return pages.get_template(name).render(style=_text_of("report.css"), version=VERSION, **values).encode()


def published(pictures: Iterable[Picture], place: Path) -> list[Markup]:
    """Write figures to a folder, and return them for a page."""
    # One at a time: a hundred open figures would take a gigabyte. Markup: `inline` has escaped what is foreign.
    return [Markup(publish(picture, place)) for picture in pictures]


def _page(
    groups: Sequence[Group], drawn: dict[str, Any], *, notes: Sequence[str], baseline: str | None, **more: str
) -> bytes:
    script = _text_of("report.js")
    policy = f"{POLICY}; script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
    runs = [run for each in groups for run in each.runs]
    domains = summary.domain_columns(groups)
    return rendered(
        "report.html",
        policy=policy,
        script=script,
        title=", ".join(dict.fromkeys(run.data for run in runs)),
        kind="report",
        facts=_facts(groups, runs),
        groups=groups,
        parts=parts(groups),
        notes=notes,
        columns=summary.headline_columns(groups),
        meanings=[(each.heading, each.help) for each in headline(wide=True)],
        width=len(summary.columns("test")),
        rows=summary.rows(groups, summary.headline_columns(groups)),
        over=_over(groups),
        once=all(len(curves.evaluated(run, "test", "accuracy")) < 2 for run in runs),
        sampled=_samples(groups, "sampled", "These figures, and their intervals over clients, rest on"),
        curve_sampled=_samples(groups, "curve_sampled", "Evaluations before the last rest on"),
        away=summary.away(groups),
        away_rows=summary.away_rows(groups),
        domains=domains,
        domain_rows=summary.rows(groups, [column for _, pair in domains for column in pair]),
        drawn=drawn,
        against=baseline_of(groups, baseline),
        clients=gains.table(groups),
        settings=_settings(groups),
        made=_made(runs),
        runs=[_about(each, run) for each in groups for run in each.runs],
        **more,
    )


def _over(groups: Sequence[Group]) -> str:
    """Say what the intervals of the headline table are over."""
    found = {len(each.runs) for each in groups}
    if min(found) > 1:
        return "seeds"
    return "clients" if max(found) == 1 else "both"


def _facts(groups: Sequence[Group], runs: Sequence[FinishedRun]) -> list[str]:
    """Return what the page is about, in a few words each."""

    def each(values: Iterable[Any]) -> str:
        return " / ".join(dict.fromkeys(str(value) for value in values))

    seeds = sorted({run.seed for run in runs})
    shown = ", ".join(map(str, seeds)) if len(seeds) <= 6 else f"{seeds[0]} to {seeds[-1]}"
    known = [f"{each(_tested(run, part) for run in runs)} {name}" for part, name in parts(groups).items()]
    return [
        f"{len(groups)} method{'s' * (len(groups) != 1)}",
        f"seed{'s' * (len(seeds) != 1)} {shown}",
        f"{each(run.result['rounds'] for run in runs)} rounds",
        f"{' and '.join(known)} clients",
        *([f"{len(away)} clients left out in turn"] if (away := summary.away(groups)) else []),
        *dict.fromkeys(str(run.config["partition"]) for run in runs if run.config.get("partition")),
    ]


def _tested(run: FinishedRun, part: str) -> str:
    """Return how many clients of a group the result is of, and of a sample how many there are."""
    whole = run.number("sampled", part, "of")
    return str(int(run.number(part, "clients") or 0)) + ("" if whole is None else f" of {whole:.0f}")


def _samples(groups: Sequence[Group], key: str, what: str) -> str:
    """Say which figures rest on a sample of clients; nothing where all clients were tested."""
    found = [
        f"{run.number(key, part, 'clients'):.0f} of {whole:.0f} {name}"
        for run in (run for each in groups for run in each.runs)
        for part, name in parts(groups).items()
        if (whole := run.number(key, part, "of")) is not None and run.number(key, part, "clients") is not None
    ]
    return f"{what} a sample of clients that the seed draws: {', '.join(dict.fromkeys(found))}." if found else ""


def _settings(groups: Sequence[Group]) -> list[tuple[str, list[str], bool]]:
    """Return each setting, its value in every group (a dash where a method has none), and whether values differ.

    Of what a client does before use, to have it or not is a difference too.
    """
    each = [settings(one.runs[0]) for one in groups]
    adaptation = _ADAPTATION | (_NEWCOMERS if "unseen" in parts(groups) else set())
    keys = dict.fromkeys(key for one in each for key in one if key != "method")
    rows = []
    for key in keys:
        values = [_text(one[key]) if key in one else NOTHING for one in each]
        if key == "unseen":
            values = [
                f"each of {', '.join(g.left_out)}" if g.left_out else v for g, v in zip(groups, values, strict=True)
            ]
        known = {value for value in values if value != NOTHING}
        rows.append((key, values, len(known) > 1 or (key in adaptation and NOTHING in values)))
    return rows


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _made(runs: Sequence[FinishedRun]) -> list[tuple[str, str]]:
    """Return versions, commit and machine; several where runs were made at different places."""
    names = {
        "metavd": "version", "commit": "commit", "Python": "python", "torch": "torch", "device": "device",
        "machine": "machine",
    }  # fmt: skip
    return [
        (name, "; ".join(dict.fromkeys(str(run.result.get(key, "unknown")) for run in runs)))
        for name, key in names.items()
    ]


def _about(group: Group, run: FinishedRun) -> dict[str, Any]:
    """Return a run's identity, and the command that repeats it."""
    away = left_out(run) if group.left_out else ""
    without = f"-without-{slug(away)}" if away else ""
    again = ["metavd", "run", "--config", str(run.folder / "config.toml"), "--out",
             f"again/{slug(group.name)}-seed-{run.seed}{without}"]  # fmt: skip
    return {
        "group": group.name,
        "seed": f"{run.seed}, without {away}" if away else run.seed,
        "folder": printable(str(run.folder)),
        "seconds": NOTHING if (seconds := run.number("seconds")) is None else f"{seconds:.1f}",
        "tested": run.result.get("tested_round", run.result["rounds"]),
        "model": str(run.result.get("model_sha256", "unknown"))[:12],
        "commit": str(run.result.get("commit", "unknown")),
        "command": printable(shlex.join(again)) if run.config else "",
        "needs": _needs(run),
        "config": run.config_text,
    }


def _needs(run: FinishedRun) -> str:
    """Say what the command line cannot know: data and networks that were handed over in Python."""
    if "/" in str(run.config.get("content", "")):
        return "its network was handed over in Python; repeat it with metavd.run(module=...)"
    try:
        collection.parse(run.data)
    except (SourceError, OSError):  # not a name, or too long for a path
        return "its data was handed over in Python; repeat it with metavd.run(source=...)"
    return ""
