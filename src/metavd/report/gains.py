"""Whom a method serves better than the baseline does: one dot for each client, by how much data it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..evaluate.figures import Figure, of_clients
from .groups import Gain, Group, federation
from .pictures import INK, PAPER, Picture, logarithmic, panel, short, tag
from .read import Run

_DOTS = 400
"""Dots of a picture; of more clients every n-th is drawn."""
_ROWS = 500
"""Clients of each kind and seed in the page's table; all of them are in clients.csv."""


def pictures(gains: Sequence[Gain], baseline: str) -> Iterator[Picture]:
    """Draw size against gain, one panel for each group, all on the same scales."""
    if not gains:
        return
    sizes = np.concatenate([gain.size for gain in gains])
    reach = max(5.0, *(abs(point) for gain in gains for point in gain.points)) * 1.08
    log = sizes.min() > 0 and sizes.max() > 15 * sizes.min()
    for gain in gains:
        size, points, unseen = np.array(gain.size), np.array(gain.points), np.array(gain.unseen)
        every = -(-len(size) // _DOTS)
        figure, axes = panel(short(gain.group.name, 28), width=2.9, height=2.6)
        axes.axhline(0, color=INK, linewidth=0.8)
        colour, marker = gain.group.look.colour, gain.group.look.marker
        for kind, face, name in ((~unseen, colour, "participating"), (unseen, PAPER, "unseen")):
            if kind.any():
                axes.scatter(size[kind][::every], points[kind][::every], 16, facecolor=face, edgecolor=colour,
                             marker=marker, linewidth=0.9, alpha=0.8, label=name)  # fmt: skip
        if log:
            logarithmic(axes, "x", "{x:,.0f}")
        axes.set(ylim=(-1.2 * reach, 1.25 * reach), xlabel="training rows", ylabel=f"points over {short(baseline, 16)}")
        better, worse = int((points > 0).sum()), int((points < 0).sum())
        said = f"{better} better, {worse} worse, {len(points) - better - worse} equal"
        axes.text(0.02, 0.02, said, transform=axes.transAxes, va="bottom", size=8)
        axes.legend(loc="upper right", ncols=2, columnspacing=0.8, handletextpad=0.1, borderaxespad=0)
        yield Picture(
            f"gain-{tag(gain.group)}",
            f"Gain in accuracy of {gain.group.name} over {baseline} against the number of training rows: {said}",
            figure,
        )


def table(groups: Sequence[Group]) -> dict[str, Any]:
    """Return what the page's table of clients shows: for each set of clients, who they are and all methods' figures."""
    sets: dict[tuple[Any, ...], list[tuple[Group, Run]]] = {}
    for group in groups:
        for run in group.runs:
            if run.clients:
                sets.setdefault(federation(run), []).append((group, run))
    seeds = [members[0][1].seed for members in sets.values()]
    there = {name for members in sets.values() for _, run in members for each in run.clients for name in each.figures}
    shown = [figure for figure in of_clients() if figure.name in there]
    return {
        "figures": [{"key": figure.name, "name": figure.column().title} for figure in shown],
        "groups": [group.name for group in groups],
        "sets": sorted(
            (_set(members, shown, alone=seeds.count(members[0][1].seed) == 1) for members in sets.values()),
            key=lambda each: each["seed"],
        ),
    }


def _set(members: Sequence[tuple[Group, Run]], shown: Sequence[Figure], *, alone: bool) -> dict[str, Any]:
    first = members[0][1]
    kept = [c for kind in (False, True) for c in [c for c in first.clients if c.unseen is kind][:_ROWS]]
    names = ", ".join(group.name for group, _ in members)
    values = []
    for group, run in members:
        by_number = {client.number: client for client in run.clients}
        columns = {
            figure.name: [_rounded(by_number[client.number].figures.get(figure.name), figure) for client in kept]
            for figure in shown
        }
        values.append({"group": group.index, **columns})
    return {
        "seed": first.seed,
        "name": f"seed {first.seed}" if alone else f"seed {first.seed}: {short(names, 60)}",
        "clients": [[c.number, int(c.unseen), c.train_size, c.test_size, _main_label(first, c)] for c in kept],
        "left_out": len(first.clients) - len(kept),
        "methods": values,
    }


def _rounded(value: float | None, figure: Figure) -> float | None:
    return None if value is None else round(figure.factor * value, figure.digits)


def _main_label(run: Run, client: Any) -> str:
    """Return the class that the client has most training rows of, and its share of them."""
    labels = run.labels_of(client)
    if labels is None or not labels.sum():
        return ""
    return f"{int(labels.argmax())} ({100 * labels.max() / labels.sum():.0f} %)"
