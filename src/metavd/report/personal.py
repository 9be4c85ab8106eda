"""What the server has learnt about its clients: their dropout rates, and where their embeddings lie.

Clients are other people under another seed, so these figures show one seed, the first that has them.

Shape letters: N participating clients, K classes, M bins, E length of an embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .groups import Group
from .pictures import PAPER, WIDTH, Picture, panel, short, slug, tag
from .read import FinishedRun, LayerRates

_CLASSES = (
    "#3b7dd8", "#e07b2a", "#2e9e6b", "#d1495b", "#8b62c9", "#1aa3b8", "#c49a00", "#d867a8", "#a0694b", "#7aa52c",
)  # fmt: skip


def rates(groups: Sequence[Group]) -> Iterator[Picture]:
    """Draw, for every layer with rates, all of them above and client by client below."""
    for group in groups:
        run = next((run for run in group.runs if run.details.rates), None)
        for place, (layer, each) in enumerate(run.details.rates.items() if run else ()):
            if run is not None and each.clients.sum():
                yield Picture(
                    f"rates-{tag(group)}-{place + 1}-{slug(layer)}",
                    f"Dropout rates of layer {layer} of {group.name}, seed {run.seed}, of all clients and of each",
                    _rates(group, layer, each, run),
                )


def _rates(group: Group, layer: str, rates: LayerRates, run: FinishedRun) -> Figure:
    names = run.client_names()
    figure = Figure(figsize=(WIDTH, 3.6 + 0.12 * max(len(names) - 14, 0)), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 2])
    above.set_title(f"{short(group.name, 26)}: {short(layer, 14)}, seed {run.seed}")
    total = rates.clients.sum(0)
    above.stairs(100 * total / total.sum(), rates.edges, fill=True, color=group.look.colour)
    above.set_ylabel("% of rates")
    shares = 100 * rates.clients / np.maximum(rates.clients.sum(1, keepdims=True), 1)
    middle = (rates.edges[1:] + rates.edges[:-1]) / 2
    order = (shares * middle).sum(1).argsort(kind="stable")
    span = (rates.edges[0], rates.edges[-1], 0.5, len(shares) + 0.5)
    image = below.imshow(
        shares[order], aspect="auto", interpolation="none", origin="lower", extent=span, cmap="viridis",
        norm=PowerNorm(0.5, 0, max(float(shares.max()), 1e-9)),
    )  # fmt: skip
    below.grid(visible=False)
    if len(names) == len(shares):
        below.set_yticks(range(1, len(names) + 1), [short(names[place], 14) for place in order])
    else:
        below.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    below.set(xlabel="dropout rate", ylabel="clients, by mean rate")
    figure.colorbar(image, ax=below, label="% of a client's rates", aspect=14, pad=0.02).outline.set_visible(False)
    return figure


def plane(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (N, 2) points on the plane that keeps most of their variance, and the share (2,) that each axis keeps.

    Principal components by singular values. An axis points to where its longest arrow does, so that the map does not
    flip between machines.
    """
    centred = points - points.mean(0)
    left, scale, _ = np.linalg.svd(centred, full_matrices=False)
    found = np.zeros((len(points), 2))
    count = min(2, len(scale))
    found[:, :count] = left[:, :count] * scale[:count]
    sign = np.sign(found[np.abs(found).argmax(0), [0, 1]])
    share = np.zeros(2)
    share[:count] = scale[:count] ** 2 / max((scale**2).sum(), 1e-300)
    return found * np.where(sign == 0, 1, sign), share


def embeddings(groups: Sequence[Group]) -> Iterator[Picture]:
    """Draw the map of every group's embeddings, coloured by what clients hold."""
    for group in groups:
        run = next((r for r in group.runs if r.details.embeddings is not None and len(r.details.embeddings) > 1), None)
        if run is not None and run.details.embeddings is not None:
            yield Picture(
                f"embeddings-{tag(group)}",
                f"Map of the clients' embeddings of {group.name}, seed {run.seed}, by principal components",
                _map(group, run, run.details.embeddings),
            )


def _map(group: Group, run: FinishedRun, points: np.ndarray) -> Figure:
    figure, axes = panel(f"{short(group.name, 28)}, seed {run.seed}", height=3.6)
    place, share = plane(points)
    labels = run.details.labels
    if labels is None or len(labels) < len(points) or not labels.sum():
        axes.scatter(place[:, 0], place[:, 1], 26, color=group.look.colour, alpha=0.85)
    else:
        held = labels[: len(points)]
        size = 14 + 60 * np.sqrt(held.sum(1) / max(held.sum(1).max(), 1))
        few = held.shape[1] <= len(_CLASSES)
        mix = held / np.maximum(held.sum(1, keepdims=True), 1)
        colour = held.argmax(1) if few else plane(mix)[0][:, 0]
        scale = {"cmap": ListedColormap(_CLASSES[: held.shape[1]]), "vmin": -0.5, "vmax": held.shape[1] - 0.5}
        drawn = axes.scatter(
            place[:, 0], place[:, 1], size, c=colour, alpha=0.9, linewidth=0.6, edgecolor=PAPER,
            **(scale if few else {"cmap": "viridis"}),
        )  # fmt: skip
        says = "most frequent label" if few else "1st component of the label mix"
        bar = figure.colorbar(drawn, ax=axes, label=says, aspect=22, pad=0.02)
        bar.outline.set_visible(False)
        if few:
            bar.set_ticks(range(held.shape[1]), labels=[short(run.class_name(k), 12) for k in range(held.shape[1])])
            bar.ax.tick_params(length=0)
    turns = place[:, 1].argsort(kind="stable").argsort()  # neighbours have their names on different sides
    for (x, y), name, turn in zip(place, run.client_names(), turns, strict=False):
        side = -1 if turn % 2 and len(place) > 8 else 1
        axes.annotate(
            short(name, 14), (x, y), xytext=(4 * side, 4), textcoords="offset points", fontsize=7,
            ha="left" if side > 0 else "right",
        )  # fmt: skip
    axes.set(xlabel=f"1st component, {share[0]:.0%} of variance", ylabel=f"2nd component, {share[1]:.0%}")
    axes.margins(0.3 if run.client_names() else 0.12, 0.12)  # room for names
    return figure
