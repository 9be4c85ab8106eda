"""One picture of the arena: of every setting how accurate methods are, and how far their confidence is from that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from ..errors import UserError
from ..evaluate.figures import Column, get
from ..studies.lines import Line
from ..studies.which import grouped
from .pictures import save

_MOST = 16
"""Methods of a setting that are shown, the most accurate ones."""
_TEST, _UNSEEN, _ERROR = "#1b4965", "#e07a5f", "#5b8e7d"


def draw_arena(store: Path, path: Path) -> Path:
    """Draw the settings of a store, two panels each; return the file, whose ending says its kind."""
    groups = grouped(store)
    if not groups:
        raise UserError(f"{store} holds no finished run of the arena, so that there is nothing to draw")
    with mpl.rc_context({"font.size": 8}):
        save(_figure(groups), path, dpi=130)
    return path


def _figure(groups: Mapping[str, Mapping[str, Sequence[Line]]]) -> Figure:
    shown = {setting: _best(methods) for setting, methods in groups.items()}
    heights = [0.17 * len(order) + 0.75 for order in shown.values()]
    figure = Figure(figsize=(8.6, sum(heights)), layout="constrained")
    panels = figure.subplots(len(shown), 2, squeeze=False, height_ratios=heights, width_ratios=[2, 1], sharey="row")
    for row, (setting, order) in enumerate(shown.items()):
        left, right = panels[row]
        runs = [groups[setting][name] for name in order]
        _dots(left, runs, get("accuracy").column("unseen"), "never seen", _UNSEEN, offset=0.16)
        _dots(left, runs, get("accuracy").column("test"), "participating", _TEST, offset=-0.16)
        _dots(right, runs, get("ece_top1").column("test"), "participating", _ERROR, offset=0.0)
        left.set_yticks(range(len(order)), order)
        left.set_ylim(len(order) - 0.5, -0.5)
        left.set_title(setting, loc="left", fontsize=9)
        left.set_xlabel("accuracy, %")
        right.set_xlabel("calibration error (ECE), %")
        right.set_xlim(left=0)
        for axes in (left, right):
            axes.grid(axis="x", linewidth=0.4, alpha=0.6)
            axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].legend(loc="lower right", frameon=False)
    return figure


def _best(methods: Mapping[str, Sequence[Line]]) -> list[str]:
    column = get("accuracy").column("test")
    means = {name: np.mean(column.values(_results(lines)) or [-1.0]) for name, lines in methods.items()}
    return sorted(means, key=lambda name: -means[name])[:_MOST]


def _results(lines: Sequence[Line]) -> list[Mapping[str, Any]]:
    return [line["result"] for line in lines]


def _dots(axes: Any, runs: Sequence[Sequence[Line]], column: Column, label: str, color: str, *, offset: float) -> None:
    """Draw a dot for each method, and a line as long as its 95 % interval over seeds where there are several."""
    for place, lines in enumerate(runs):
        found = column.cell(_results(lines))
        if found is not None:
            mean, half = found
            axes.errorbar(mean, place + offset, xerr=half, fmt="o", color=color, markersize=4, linewidth=1,
                          label=label if place == 0 else None)  # fmt: skip
