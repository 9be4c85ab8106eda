"""A picture of who holds what (the paper's figure 2): every client's number of rows, and of which labels.

Shape letters: C clients, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..data.collection import SHOWN
from ..data.partition import Federation
from ..data.source import SourceError
from .pictures import save, short


def _name_ticks(axis: Axis, names: Sequence[str] | None, count: int) -> None:
    """Set one tick per client or class, with its name, where there are few; else some, at whole numbers alone."""
    if count <= SHOWN:
        axis.set_ticks(range(count), [short(name, 18) for name in names or map(str, range(count))])
    else:
        axis.set_major_locator(MaxNLocator(10, integer=True))


SUFFIXES = (".png", ".svg", ".pdf")
_BLUE, _ORANGE, _GREY = "#2a6f97", "#d98032", "#808080"


def clients_figure(federation: Federation) -> Figure:
    """Draw sizes above and, for each client, how many training rows of each class below."""
    source, known = federation.source, federation.num_clients
    counts = np.stack([np.bincount(source.y[rows], minlength=source.num_classes) for rows in federation.train])
    tests = np.array([len(rows) for rows in federation.test])
    clients = np.arange(len(counts))
    figure = Figure(figsize=(10, 6), layout="constrained")
    sizes, labels = figure.subplots(2, 1, sharex=True, height_ratios=[1, 2])
    sizes.bar(clients, counts.sum(1), 1.0, color=_BLUE, label="training rows")
    sizes.bar(clients, -tests, 1.0, color=_ORANGE, label="test rows")
    sizes.axhline(0, color="black", linewidth=0.6)
    sizes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):,.0f}")
    sizes.set_ylabel("rows")
    sizes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    shown = np.ma.masked_equal(counts.T, 0)
    image = labels.imshow(
        shown, aspect="auto", interpolation="nearest", origin="lower", cmap="Blues", norm=LogNorm(0.5, counts.max())
    )
    _name_ticks(labels.yaxis, source.classes or None, source.num_classes)
    _name_ticks(labels.xaxis, federation.names or None, len(clients))
    if federation.names and len(clients) <= SHOWN:
        labels.tick_params(axis="x", rotation=30 if max(map(len, federation.names)) > 6 else 0)
    labels.set_ylabel("class")
    labels.set_xlabel(
        "client" if not federation.num_unseen else f"client; from {federation.name(known)} on never trained with"
    )
    for domain in source.domains[1:]:
        labels.axhline(domain.first_class - 0.5, color=_GREY, linewidth=0.8)
    for domain in source.domains:
        middle = domain.first_class + (domain.num_classes - 1) / 2
        labels.annotate(f" {domain.name}", (1.0, middle), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    figure.colorbar(image, ax=labels, label="training rows", location="bottom", aspect=60, format="{x:g}")
    for axes in (sizes, labels):
        axes.spines[["top", "right"]].set_visible(False)
        if federation.num_unseen:
            axes.axvline(known - 0.5, color="black", linewidth=1, linestyle="--")
    sizes.set_title(f"{source.name}: {known} participating and {federation.num_unseen} unseen clients", loc="left")
    return figure


def draw_clients(federation: Federation, path: Path) -> None:
    """Write the picture, in the form that the file's ending names."""
    if path.suffix.lower() not in SUFFIXES:
        raise SourceError(f"{path} has no ending of a picture; use {', '.join(SUFFIXES)}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"font.size": 9}):
        save(clients_figure(federation), path, dpi=150)
