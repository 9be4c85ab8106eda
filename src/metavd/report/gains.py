"""Whom a method serves better than the baseline does: one dot for each client, by how much data it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..evaluate.figures import Figure, of_clients
from .groups import Gain, Group, federation, left_out
from .pictures import INK, PAPER, Picture, logarithmic, panel, short, tag
from .read import FinishedRun

_DOTS = 400
"""Dots of a picture; of more clients every n-th is drawn."""
_ROWS = 500
"""Clients of each kind and seed in the page's table; all of them are in clients.csv."""


def pictures(gains: Sequence[Gain], baseline: str) -> Iterator[Picture]:
    """Draw size against gain, one panel for each group, all on the same scales."""
    if not gains:
        return
    every_point = [point for gain in gains for point in gain.points]
    low, high = min(-1.0, *every_point), max(1.0, *every_point)
    room = 0.12 * (high - low)
    if all(len(gain.names) == len(gain.points) for gain in gains):
        yield from _by_name(gains, baseline, (low - room, high + room))
        return
    sizes = np.concatenate([gain.size for gain in gains])
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
        axes.set(
            ylim=(low - 2 * room, high + 2 * room), xlabel="training rows", ylabel=f"points over {short(baseline, 16)}"
        )
        said = _said(gain)
        axes.text(0.02, 0.02, said, transform=axes.transAxes, va="bottom", size=8)
        axes.legend(loc="upper right", ncols=2, columnspacing=0.8, handletextpad=0.1, borderaxespad=0)
        yield Picture(
            f"gain-{tag(gain.group)}",
            f"Gain in accuracy of {gain.group.name} over {baseline} against the number of training rows: {said}",
            figure,
        )


def _said(gain: Gain) -> str:
    better, worse = sum(point > 0 for point in gain.points), sum(point < 0 for point in gain.points)
    return f"{better} better, {worse} worse, {len(gain.points) - better - worse} equal"


def _by_name(gains: Sequence[Gain], baseline: str, span: tuple[float, float]) -> Iterator[Picture]:
    """Draw each client's gain on a line with its name, the unseen ones below."""
    for gain in gains:
        who = sorted(dict.fromkeys(zip(gain.unseen, gain.names, strict=True)))
        figure, axes = panel(short(gain.group.name, 26), width=2.9, height=1.4 + 0.17 * len(who))
        axes.axvline(0, color=INK, linewidth=0.8)
        colour, marker = gain.group.look.colour, gain.group.look.marker
        for point, new, name in zip(gain.points, gain.unseen, gain.names, strict=True):
            face = PAPER if new else colour
            axes.plot(point, who.index((new, name)), marker, color=colour, markerfacecolor=face, clip_on=False)
        axes.set_yticks(range(len(who)), [short(name, 20) for _, name in who])
        said = [f"points over {short(baseline, 16)}", _said(gain), *["hollow: unseen"] * any(gain.unseen)]
        axes.set(xlim=span, ylim=(len(who) - 0.5, -0.5), xlabel="\n".join(said))
        axes.tick_params(axis="y", length=0, colors=INK)
        yield Picture(
            f"gain-{tag(gain.group)}",
            f"Gain in accuracy of {gain.group.name} over {baseline}, client by client: {_said(gain)}",
            figure,
        )


def table(groups: Sequence[Group]) -> dict[str, Any]:
    """Return what the page's table of clients shows: for each set of clients, who they are and all methods' figures."""
    sets: dict[tuple[Any, ...], list[tuple[Group, FinishedRun]]] = {}
    for group in groups:
        for run in group.runs:
            if run.clients:
                sets.setdefault(federation(run), []).append((group, run))
    places = [_place(*members[0]) for members in sets.values()]
    there = {name for members in sets.values() for _, run in members for each in run.clients for name in each.figures}
    shown = [figure for figure in of_clients() if figure.name in there]
    return {
        "figures": [{"key": figure.name, "name": figure.column().title} for figure in shown],
        "groups": [group.name for group in groups],
        "sets": sorted(
            (_set(members, shown, alone=places.count(_place(*members[0])) == 1) for members in sets.values()),
            key=lambda each: (each["seed"], each["name"]),
        ),
    }


def _place(group: Group, run: FinishedRun) -> str:
    """Return which of its group's runs a run is."""
    return f"seed {run.seed}" + (f", without {left_out(run)}" if group.left_out else "")


def _set(members: Sequence[tuple[Group, FinishedRun]], shown: Sequence[Figure], *, alone: bool) -> dict[str, Any]:
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
        "name": _place(*members[0]) if alone else f"{_place(*members[0])}: {short(names, 60)}",
        "clients": [
            [c.name or c.number, int(c.unseen), c.train_size, c.test_size, _main_label(first, c)] for c in kept
        ],
        "left_out": len(first.clients) - len(kept),
        "methods": values,
    }


def _rounded(value: float | None, figure: Figure) -> float | None:
    return None if value is None else round(figure.factor * value, figure.digits)


def _main_label(run: FinishedRun, client: Any) -> str:
    """Return the class that the client has most training rows of, and its share of them."""
    labels = run.labels_of(client)
    if labels is None or not labels.sum():
        return ""
    return f"{run.class_name(int(labels.argmax()))} ({100 * labels.max() / labels.sum():.0f} %)"
