"""Pictures of the paper's page: who holds what (the paper's figure 2), and reliability diagrams (figure 3, appendix).

Both come from what is known without any image: the first from the labels alone, the second from the store's bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from ..data.partition import federate
from ..evaluate.calibration import Reliability
from ..studies.paper.carry import labels
from ..studies.paper.protocol import SEED, runs_of
from ..studies.paper.statistics import View
from ..studies.paper.tables import Cell
from .clients import draw_clients
from .pictures import save
from .reliability import bars

CALIBRATION = ("T11", "T12")
"""Tables whose cells are drawn as reliability diagrams, one picture for each column."""
DEALT = "T9"
"""The table of partitions, beside which they are drawn."""
PARTITIONS = tuple((data, alpha) for data in ("cifar10", "cifar100") for alpha in ("5", "0.5", "0.1"))
_BAR = "#2a6f97"


def draw_paper(views: Sequence[View], folder: Path) -> list[tuple[str, Path]]:
    """Draw all that can be drawn, and return captions and files."""
    drawn = []
    if {view.table.name for view in views} & {*CALIBRATION, DEALT}:
        folder.mkdir(parents=True, exist_ok=True)
    for data, alpha in PARTITIONS if any(view.table.name == DEALT for view in views) else ():
        path = folder / f"clients-{data}-{alpha}.png"
        federation = federate(labels(data), f"dirichlet:{alpha}", clients=100, unseen=30, seed=SEED)
        draw_clients(federation, path)
        drawn.append((f"Who holds what: {data}, Dirichlet {alpha}, seed {SEED} (the paper's figure 2)", path))
    for view in views:
        if view.table.name not in CALIBRATION:
            continue
        for column in view.table.columns:
            bins = [(answer.cell.row, _bins(view, answer.cell)) for answer in view.answers
                    if answer.cell.column == column]  # fmt: skip
            known = [(row, each) for row, each in bins if each]
            if known:
                path = folder / f"reliability-{view.table.name}-{column}.png"
                with mpl.rc_context({"font.size": 8}):
                    save(_diagrams(known), path, dpi=110)
                drawn.append((f"Reliability on unseen clients: {view.table.name}, Dirichlet {column}", path))
    return drawn


def _bins(view: View, cell: Cell) -> dict[str, Any] | None:
    """Return the bins of the first of a cell's seeds that has some."""
    runs = runs_of(cell, view.lines, view.how).values()
    return next((line["result"]["bins"] for line in runs if line["result"].get("bins")), None)


def _diagrams(cells: Sequence[tuple[str, dict[str, Any]]]) -> Figure:
    across = min(4, len(cells))
    down = -(-len(cells) // across)
    figure = Figure(figsize=(2.6 * across, 2.6 * down), layout="constrained")
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, (row, bins) in zip(panels, cells, strict=False):
        count = np.asarray(bins["count"], float)
        shown = Reliability(
            np.linspace(0, 1, len(count) + 1), count, *(np.asarray(bins[n]) for n in ("confidence", "accuracy"))
        )
        bars(axes, shown, _BAR)
        axes.set_title(row, fontsize=9, loc="left")
    for axes in panels[len(cells) :]:
        axes.axis("off")
    figure.supxlabel("probability given to a class", fontsize=9)
    figure.supylabel("how often it was the class", fontsize=9)
    return figure
