"""A page of a study (`metavd tune`): how the search went, how trials learned, and which settings mattered."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from ..container import write_atomic
from ..evaluate.figures import get
from .page import POLICY, figure_folder, published, rendered
from .pictures import INK, MUTED, RIGHT, WRONG, Picture, logarithmic, looking_alike, panel, short
from .read import ReportError

TRIALS, IMPORTANCE = "trials.json", "importance.json"


def is_study(folder: Path) -> bool:
    """Whether a folder holds a study."""
    return (folder / TRIALS).is_file()


def write_study(folder: Path, out: Path, *, figures: Path | None = None, command: str = "") -> list[str]:
    """Write the page to `out` and its figures to a folder, by default OUT_files; return notes on what is missing."""
    history, importance = _read(folder / TRIALS), {}
    notes = []
    if (folder / IMPORTANCE).is_file():
        importance = _read(folder / IMPORTANCE).get("importance", {})
    else:
        notes.append(f"{folder} has no {IMPORTANCE} yet; it is written when a tune command comes to its end.")
    with looking_alike():
        try:
            about, pictures = _about(history), list(_pictures(history, importance))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ReportError(f"{folder / TRIALS} is damaged ({type(error).__name__}: {error})") from None
        place = figure_folder(out, figures)
        drawn = published(pictures, place)
    write_atomic(out, rendered("study.html", policy=POLICY, kind="study", drawn=drawn, command=command, **about))
    return notes


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError) as error:
        raise ReportError(f"{path} is damaged ({error}); run the study on with metavd tune") from None
    return found


def _judged(history: Mapping[str, Any]) -> str:
    return f"validation {get(history['metric']).short}"


def _pictures(history: Mapping[str, Any], importance: Mapping[str, float]) -> Iterator[Picture]:
    what = _judged(history)
    finished = [trial for trial in history["trials"] if trial["value"] is not None]
    if finished:
        yield Picture("history", f"{what} of every finished trial, and the best so far", _history(history, what))
    if any(trial["curve"] for trial in history["trials"]):
        yield Picture("curves", f"{what} over rounds of every trial", _curves(history, what))
    if importance:
        yield Picture("importance", "Share of the trials' variance that each setting explains", _importance(importance))
    for name in history["study"]["space"]:
        shown = [(trial["settings"][name], trial["value"]) for trial in finished if name in trial["settings"]]
        if shown and all(isinstance(value, int | float) for value, _ in shown):
            figure, axes = panel(short(f"{what} by {name}"))
            axes.plot(*zip(*shown, strict=True), "o", color=RIGHT, alpha=0.75)
            axes.set(xlabel=name, ylabel=what)
            if "log" in str(history["study"]["space"][name]):
                logarithmic(axes, "x")
            yield Picture(f"by-{name}", f"{what} against {name}", figure)


def _history(history: Mapping[str, Any], what: str) -> Any:
    figure, axes = panel("Trials")
    better = max if history["direction"] == "maximize" else min
    finished = [trial for trial in history["trials"] if trial["value"] is not None]
    numbers, values = ([trial[key] for trial in finished] for key in ("number", "value"))
    axes.plot(numbers, values, "o", color=RIGHT, label="trial")
    axes.step(numbers, list(accumulate(values, better)), where="post", color=INK, label="best so far")
    axes.set(xlabel="trial", ylabel=what)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    return figure


def _curves(history: Mapping[str, Any], what: str) -> Any:
    figure, axes = panel("Learning of every trial")
    for trial in history["trials"]:
        if not trial["curve"]:
            continue
        best = trial["number"] == history["best"]
        colour = INK if best else (MUTED if trial["value"] is not None else WRONG)
        weight = {"alpha": 1.0, "linewidth": 2.0, "label": "best"} if best else {"alpha": 0.45, "linewidth": 1.0}
        dot = "." if len(trial["curve"]) == 1 else None
        axes.plot(*zip(*trial["curve"], strict=True), color=colour, marker=dot, **weight)
    axes.plot([], [], color=MUTED, label="finished")
    axes.plot([], [], color=WRONG, label="stopped early")
    axes.set(xlabel="round", ylabel=what)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    return figure


def _importance(importance: Mapping[str, float]) -> Any:
    names = list(importance)[::-1]
    figure, axes = panel("What mattered", height=max(2.0, 0.32 * len(names) + 1.0))
    axes.barh([short(name, 18) for name in names], [100 * importance[name] for name in names], color=RIGHT, height=0.6)
    axes.set(xlabel="% of the variance between trials (fANOVA)", xlim=(0, 100))
    axes.grid(visible=False, axis="y")
    return figure


def _about(history: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page says in words and numbers."""
    study = history["study"]
    columns = list(study["space"])
    sign = 1 if history["direction"] == "minimize" else -1
    order = sorted(history["trials"], key=lambda trial: (trial["value"] is None, sign * (trial["value"] or 0)))
    return {
        "title": f"{study['method']} on {study['data']}",
        "facts": [
            f"{len(order)} trials", f"{study['rounds']} rounds", f"{_judged(history)} by {study['by']}",
            f"{study['seeds']} seed{'s' * (study['seeds'] != 1)} from {study['seed']} on",
        ],
        "what": _judged(history),
        "columns": columns,
        "trials": [
            {
                "number": trial["number"], "state": trial["state"], "reason": trial.get("reason", ""),
                "value": "" if trial["value"] is None else f"{trial['value']:.4f}",
                "settings": [_text(trial["settings"].get(name, "")) for name in columns],
                "best": trial["number"] == history["best"],
            }
            for trial in order
        ],
    }  # fmt: skip


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
