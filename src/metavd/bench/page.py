"""The page of a benchmark: a part for each device, tables and curves, all from the stored figures."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from ..container import write_atomic
from ..errors import UserError
from ..report.pictures import RIGHT, logarithmic, looking_alike
from ..studies.markdown import markdown_table
from ..templates import filled
from .scale import HEADS, LARGE, MANY, METHODS, RANKS
from .workload import CURVES

DEVICES = ("cpu", "cuda")
_TITLES = {"cpu": "On a CPU", "cuda": "On a GPU"}
_ABOUT = {
    "cifar": "100 clients with 320 random 3x32x32 images each, 10 per round, 5 steps of 64, 64 filters",
    "tiny": "200 clients with 20 random 8x8 images each, 100 per round, 2 steps of 10, a network of 64-64-32-10 units",
    "paper": "50,000 random 3x32x32 images dealt by dirichlet:0.5 to 100 clients, 10 per round, 5 epochs, batch 64, "
    "64 filters, augmentation",
    "paper100": "the same with all 100 clients in every round",
}
_AXES = {"cohort": "clients per round", "clients": "clients", "width": "filters per layer"}


def shown_seconds(value: float) -> str:
    """Write a time with three digits.

    >>> shown_seconds(0.00982), shown_seconds(1.617), shown_seconds(123.4)
    ('0.00982', '1.62', '123')
    """
    return f"{value:#.3g}".rstrip(".")


def told_precision(workload: Mapping[str, Any]) -> str:
    """Say so where the precision of a workload's products is not the same for all variants."""
    own = {each["precision"] for each in workload["variants"] if "precision" in each} - {"exact", "float32"}
    if not own:
        return ""
    return (
        f" metavd's products are in {' and '.join(sorted(own))}, its default on this device; the other variants' "
        "as torch has them unless told otherwise: float32, where cuDNN may take tf32 for convolutions; the peak beside "
        "them is float32's. *Of ours* is both together: how clients are computed, and how precisely."
    )


def title(workload: Mapping[str, Any]) -> str:
    """Name a workload, and the load beside which it was measured; the median round counts there."""
    load = workload.get("load", 0)
    beside = f", the median round beside {load} busy loop{'s' if load > 1 else ''}" if load else ""
    return f"{workload['name']}{beside}"


_Columns = Mapping[str, Callable[[Mapping[str, Any]], str]]
"""Headings, and what stands below them for a piece of figures."""


def _rows(pieces: Sequence[Mapping[str, Any]], names: _Columns, figures: _Columns) -> list[list[str]]:
    """Return the rows of a table, the headings first; what failed has its names and no figures."""
    rows = [[*names, *figures]]
    for each in pieces:
        said = (write(each) for write in figures.values())
        cells = ["failed", *[""] * (len(figures) - 1)] if "error" in each else said
        rows.append([*(write(each) for write in names.values()), *cells])
    return rows


def _where(
    figure: str, pieces: Sequence[Mapping[str, Any]], heading: str, write: Callable[[float], str] = "{:,.0f}".format
) -> _Columns:
    """Return the column of a figure, where some piece has it: a GPU's memory, say."""
    if not any(figure in each for each in pieces):
        return {}
    return {heading: lambda each: write(each[figure]) if figure in each else ""}


def table(workload: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of a workload's table, the headings first."""
    figures: _Columns = {
        "s per round": lambda each: shown_seconds(each["round_s"]),
        "of ours": lambda each: f"{each['against_ours']:.2f}" if "against_ours" in each else "",
        "median s": lambda each: shown_seconds(each["median_s"]),
        "images/s": lambda each: f"{each['images_s']:,.0f}",
        "TFLOP/s": lambda each: shown_seconds(each["tflops"]),
        "of the peak": lambda each: f"{each['share']:.1%}",
        "memory MB": lambda each: f"{each['memory_mb']:,.0f}",
        **_where("cuda_mb", workload["variants"], "GPU MB"),
    }
    return _rows(workload["variants"], {"variant": _called}, figures)


def _called(variant: Mapping[str, Any]) -> str:
    how = f" ({variant['backend']}, {variant['precision']})" if "backend" in variant else ""
    return f"{variant['name']}{how}"


class Section(NamedTuple):
    """A part of the page about one kind of measurement."""

    title: str
    text: str
    table: str = ""
    failed: Sequence[tuple[str, str]] = ()
    """What has no figures, and why."""


def _section(
    title: str, text: str, rows: Sequence[Sequence[str]], measured: Sequence[Mapping[str, Any]] = (), name: str = "name"
) -> Section:
    """Return a section with a table, and below it which of `measured` failed, by their entry `name`."""
    failed = [(str(each[name]), str(each["error"])) for each in measured if "error" in each]
    return Section(title, text, "\n".join(markdown_table(rows[0], rows[1:])), failed)


def _curve_rows(name: str, points: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    figures: _Columns = {
        "s per round": lambda each: shown_seconds(each["round_s"]),
        "images/s": lambda each: f"{each['images_s']:,.0f}",
        "TFLOP/s": lambda each: shown_seconds(each["tflops"]),
        "memory MB": lambda each: f"{each.get('cuda_mb', each['memory_mb']):,.0f}",
    }
    return _rows(points, {_AXES[name]: lambda each: f"{each['value']:,}"}, figures)


_CURVE_TEXT = {
    "cpu": {
        "cohort": "1,000 clients with 20 images of 8x8 each, 64-64-32-10 units, 2 steps of 10.",
        "clients": "A million images of 8x8 in memory whoever holds them, 10 clients per round, 1 step of 10.",
        "width": "Three convolutions of so many filters, 2 clients per round, 5 steps of 64 images of 3x32x32.",
    },
    "cuda": {
        "cohort": "1,000 clients with 64 images of 3x32x32 each, 64 filters, 1 step of 64.",
        "clients": "A million images of 8x8 on the device whoever holds them, 10 clients per round, 1 step of 10.",
        "width": "Three convolutions of so many filters, 10 clients per round, 5 steps of 64 images of 3x32x32.",
    },
}


_SCALE_TITLES = {
    METHODS: "Every method",
    MANY: "A hundred to a million clients",
    LARGE: "Large cohorts",
    HEADS: "Private heads",
    RANKS: "Ranks",
}
_SCALE_TEXT = {
    MANY: "Ten rows of 8 numbers for each client, an mlp of width 8, 10 clients per round, 100 tested in an "
    "evaluation; every point in a process of its own. The start is from the rows in memory to the first round; the "
    "round is the median; memory is the most that the process had, its rows included.",
    LARGE: "20,000 clients with ten rows of 8 numbers each, an mlp of width 256. Answers are added up in parts of so "
    "many clients; *all* holds the whole cohort, as far as that was tried.",
    HEADS: "What it costs that every client keeps a last layer of its own, 13,100 weights. An mlp of width 260, 100 "
    "classes, 10 clients per round, ten rows of 8 numbers each.",
    RANKS: "100 clients with ten images of 3x32x32 each, three convolutions of 16 filters, 32 clients per round. "
    "Several ranks have one thread each, as torchrun starts them, and one alone has all cores; memory is that of the "
    "largest rank. Ranks can be faster up to the number of cores; more of them only show what they cost.",
}
_SCALE_TEXT_GPU = {
    MANY: "Ten rows of 8 numbers for each client, an mlp of width 8, 10 clients per round, 100 tested in an "
    "evaluation.",
    LARGE: "10,000 clients with ten images of 3x32x32 each, of which eight are trained on, 5 steps per round of "
    "the paper's network (64 filters). Answers are added up in parts of so many clients; *all* holds the whole cohort.",
    METHODS: "The paper's setting with 100 classes: 50,000 random 3x32x32 images dealt by dirichlet:0.5 to 100 "
    "clients, 10 per round, 64 filters, all options at their defaults. *Kernels* is the time that the GPU computes in "
    "a round, without the gaps; where a round takes much longer, it is bound by the host, which starts kernels one by "
    "one.",
    HEADS: _SCALE_TEXT[HEADS],
}


_SCALE_NAMES: Mapping[str, _Columns] = {
    MANY: {"clients": lambda each: f"{each['clients']:,}", "partition": lambda each: each["partition"]},
    LARGE: {"clients per round": lambda each: f"{each['cohort']:,}",
            "in parts of": lambda each: f"{each['part']:,}" if each["part"] else "all"},
    METHODS: {"backend": lambda each: each.get("backend", "")},
    HEADS: {"clients": lambda each: f"{each['clients']:,}"},
    RANKS: {"ranks": lambda each: f"{each['ranks']}", "backend": lambda each: each.get("backend", "")},
}  # fmt: skip


def scale_rows(kind: str, points: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the rows of a table of how runs grow, the headings first."""
    figures: _Columns = {
        "start s": lambda each: f"{each['start_s']:.1f} ({each['start_cpu_s']:.1f})",
        "ms per round": lambda each: f"{1000 * each['round_s']:.0f} ({1000 * each['round_cpu_s']:.0f})",
        **_where("kernels_s", points, "kernels ms", lambda value: f"{1000 * value:.0f}"),
        "evaluation s": lambda each: f"{each['evaluation_s']:.2f} ({each['evaluation_cpu_s']:.2f})",
        "memory MB": lambda each: f"{each['memory_mb']:,.0f}",
        **_where("cuda_mb", points, "GPU memory MB"),
    }
    return _rows(points, {"method": lambda each: each["method"], **_SCALE_NAMES[kind]}, figures)


def _scale_section(kind: str, points: Sequence[Mapping[str, Any]], commit: str | None) -> Section:
    machines = " and ".join(sorted({each["machine"] for each in points}))
    about = _SCALE_TEXT_GPU if points[0].get("device") == "cuda" else _SCALE_TEXT
    text = f"{about[kind]} On {machines}.{_of(points, commit)}"
    return _section(_SCALE_TITLES[kind], text, scale_rows(kind, points), points, "method")


def _whole_rows(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    names: _Columns = {"method": lambda each: each["method"], "runs at once": lambda each: f"{each['at_once']}"}
    figures: _Columns = {
        "rounds": lambda each: f"{each['rounds']:,}",
        "a whole run, s": lambda each: f"{each['seconds']:.1f}",
        "first round after, s": lambda each: f"{each['start_s']:.1f}",
        "kernels not yet compiled, s": lambda each: f"{each['cold_s']:.1f}" if "cold_s" in each else "",
        "ms per round": lambda each: f"{1000 * each['round_s']:.1f}",
        "accuracy": lambda each: f"{each['test']:.2%}",
        "unseen clients": lambda each: f"{each['unseen']:.2%}",
    }
    return _rows(runs, names, figures)


_WHOLE_TEXT = """CIFAR-10 dealt by dirichlet:0.5 to 100 clients and 30 unseen ones, 10 per round, 5 epochs, batch 64, 64
filters, augmentation, all 130 clients personalised and tested every 100 rounds. From the start of a process to its
result: imports, reading the data, capturing graphs. Kernels were compiled by a run of two rounds before, whose own
first round came as late as *kernels not yet compiled* says. Of several runs at once, with seeds of their own, a run's
seconds are those of all over their number."""


def draw(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Draw seconds, logarithmic, and memory over what was varied."""
    present = [name for name in CURVES if curves.get(name)]
    figure = Figure(figsize=(3.6 * len(present), 4.4), layout="constrained")
    panels = figure.subplots(2, len(present), squeeze=False, sharex="col")
    for column, name in enumerate(present):
        points = [each for each in curves[name] if "error" not in each]
        values = [each["value"] for each in points]
        for axes, figures, label in (
            (panels[0][column], [each["round_s"] for each in points], "s per round"),
            (panels[1][column], [each.get("cuda_mb", each["memory_mb"]) for each in points], "memory MB"),
        ):
            axes.plot(values, figures, marker="o", color=RIGHT)
            axes.set(ylabel=label, xscale="log")
            axes.set_xticks(values, [f"{value:,}" for value in values])
            axes.set_xticks([], minor=True)
        seconds, memory = (row[column] for row in panels)
        low, high = (rule(each["round_s"] for each in points) for rule in (min, max))
        seconds.set(ylim=(low / 2, 2 * high), title=_AXES[name])
        logarithmic(seconds, "y")
        memory.set(ylim=(0, 1.2 * memory.get_ylim()[1]), xlabel=_AXES[name])
    return figure


def _of(pieces: Sequence[Mapping[str, Any]], commit: str | None) -> str:
    """Say which commits pieces are of, where it is another than the last one's."""
    others = sorted({str(piece["commit"] or "unknown") for piece in pieces if piece["commit"] != commit})
    return f" Measured at commit {' and '.join(others)}." if others else ""


def _sections(found: Mapping[str, Any]) -> Iterator[Section]:
    """Yield what a device's part says of each measurement."""
    commit = found["commit"]
    for each in found["workloads"]:
        text = f"{_ABOUT[each['name']]}; {each['flops_image'] / 1e6:.3g} MFLOP per image."
        text += told_precision(each) + _of([each], commit)
        yield _section(title(each), text, table(each), each["variants"])
    if found["whole"]:
        yield _section("Whole runs", _WHOLE_TEXT + _of(found["whole"], commit), _whole_rows(found["whole"]))
    if found["starts"]:
        times = ", ".join(f"`{each['command']}` {each['seconds']:.2f} s" for each in found["starts"])
        text = f"Until a command has answered, best of five, on {found['starts'][0]['machine']}: {times}."
        yield Section("Start", text + _of(found["starts"], commit))
    for kind in _SCALE_TITLES:
        if found["scale"].get(kind):
            yield _scale_section(kind, found["scale"][kind], commit)
    for name, points in found["curves"].items():
        text = _CURVE_TEXT[found["device"]][name] + _of(points, commit)
        yield _section(_AXES[name], text, _curve_rows(name, points))


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the stored figures of each device that has some."""
    found = []
    for device in DEVICES:
        path = folder / f"bench-{device}.json"
        if not path.exists():
            continue
        try:
            found.append(_marked(json.loads(path.read_text())))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} holds no figures of a benchmark: {error}") from None
    if not found:
        raise UserError(f"there are no figures in {folder}; metavd bench --page FILE measures them")
    return found


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Keep of earlier figures what was not measured anew, if they are of the same machine; each piece names its commit.

    So a device that is lent for minutes can be measured piece by piece; ratios are of one run all the same.
    """
    new, old = _marked(new), _marked(old) if old else {}
    if not old:
        return new
    named = {"starts": new["starts"] or old["starts"], "scale": {**old["scale"], **new["scale"]}}
    if not any(new[part] for part in ("workloads", "curves", "whole")):  # the others name their machine
        return {**old, **named}
    if any(old.get(key) != new[key] for key in ("device", "machine", "torch", "quick")):
        return new
    commands = [old["command"], *([] if new["command"] in old["command"].split("\n") else [new["command"]])]
    return {
        **new,
        **named,
        "command": "\n".join(commands),
        "workloads": _replaced(old["workloads"], new["workloads"], "name", "load"),
        "curves": {**old["curves"], **new["curves"]},
        "whole": _replaced(old["whole"], new["whole"], "method", "at_once"),
    }


def _marked(found: Mapping[str, Any]) -> dict[str, Any]:
    """Write into each piece the commit that it is of."""

    def mark(pieces: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [{"commit": found["commit"], **piece} for piece in pieces]

    curves, scale = (
        {name: mark(points) for name, points in found.get(part, {}).items()} for part in ("curves", "scale")
    )
    lists = {part: mark(found.get(part, ())) for part in ("workloads", "whole", "starts")}
    return {**found, **lists, "curves": curves, "scale": scale}


def _replaced(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], *keys: str) -> list[Any]:
    """Put new pieces in the places of their like, and others behind."""
    fresh = {tuple(each.get(key) for key in keys): each for each in new}
    kept = [fresh.pop(tuple(each.get(key) for key in keys), each) for each in old]
    return [*kept, *fresh.values()]


def check_place(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is measured for it."""
    folder = next(place for place in path.absolute().parents if place.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"cannot write {path}: {folder} is no folder that can be written to; name another file")


def store_figures(path: Path, found: Mapping[str, Any]) -> None:
    """Write a run's figures, beside those that are there already."""
    try:
        old = json.loads(path.read_text())
    except (OSError, ValueError):
        old = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(merged(old, found), indent=1) + "\n").encode())


def write_page(page: Path, folder: Path) -> None:
    """Write the page and its figures from what is stored in a folder, every device's part."""
    parts = []
    for found in read(folder):
        figure = None
        if any(found["curves"].values()):
            place = page.parent / f"{page.stem}_files" / f"curves-{found['device']}.svg"
            place.parent.mkdir(parents=True, exist_ok=True)
            figure = f"{place.parent.name}/{place.name}"
            with looking_alike():
                memory = io.BytesIO()
                draw(found["curves"]).savefig(memory, format="svg", metadata={"Date": None})
            write_atomic(place, memory.getvalue())
        peaks = ", ".join(f"{name} {value / 1e12:.3g}" for name, value in found["peaks"].items())
        parts.append({"title": _TITLES[found["device"]], "found": found, "peaks": peaks, "figure": figure,
                      "sections": list(_sections(found))})  # fmt: skip
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, filled("performance.md", parts=parts).encode())
