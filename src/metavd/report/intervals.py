"""The headline figures as dots with their intervals: who is ahead, and whether by more than chance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ..evaluate.figures import Column, headline
from .groups import Group, parts
from .pictures import INK, MUTED, PAPER, Picture, marked, panel, short
from .summary import estimate

_SHIFT = {"test": 0.16, "unseen": -0.16}


def pictures(groups: Sequence[Group]) -> Iterator[Picture]:
    """Draw the figures that every table shows, of participating and unseen clients."""
    for shown in headline():
        both = {part: shown.column(part) for part in parts(groups)}
        if any(group.numbers(*column.path) for group in groups for column in both.values()):
            yield _picture(f"interval-{shown.name}", shown.heading, both, groups)


def _picture(name: str, title: str, both: dict[str, Column], groups: Sequence[Group]) -> Picture:
    column = both["test"]
    better = {1: "higher is better", -1: "lower is better", 0: ""}[column.better]
    figure, axes = panel(title, height=1.0 + 0.3 * len(groups))
    seen: list[float] = []
    reach: list[float] = []
    for line, group in enumerate(groups):
        for part, column in both.items():
            found = estimate(group, column)
            if found is None:
                continue
            values = column.values(run.result for run in group.runs)
            seen += values
            y = -line + _SHIFT[part] * (len(both) - 1)
            colour = group.look.colour
            reach += [found.value if bound is None else bound for bound in (found.low, found.high)]
            if found.low is not None and found.high is not None:
                drawn = axes.plot([found.low, found.high], [y, y], color=colour, linewidth=1.4, solid_capstyle="butt")
                marked(drawn[0], group, len(seen))
            if len(values) > 1:
                drawn = axes.plot(values, [y] * len(values), "|", color=colour, markersize=5, markeredgewidth=0.9)
                marked(drawn[0], group, 1000 + len(seen))
            face = colour if part == "test" else PAPER
            drawn = axes.plot(
                found.value, y, "o", color=colour, markerfacecolor=face, markersize=5.5, zorder=3, clip_on=False
            )
            marked(drawn[0], group, 2000 + len(seen))
    _limit(axes, seen, reach, column)
    axes.set_yticks([-line for line in range(len(groups))], [short(group.name, 24) for group in groups])
    axes.set_ylim(-len(groups) + 0.4, 0.6)
    axes.tick_params(axis="y", length=0, colors=INK)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    handles = [
        Line2D([], [], linestyle="", marker="o", color=MUTED, markerfacecolor=face, markersize=5, label=label)
        for face, label in ((MUTED, "participating"), (PAPER, "unseen"))
    ]
    axes.set_xlabel(better)
    if len(both) > 1:
        figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return Picture(name, f"{title} of every method, with 95 % intervals", figure)


def _limit(axes: Axes, seen: Sequence[float], reach: Sequence[float], column: Column) -> None:
    """Show all intervals, but none beyond what the values span: two seeds may have an interval of any width."""
    low, high = min(seen), max(seen)
    room = max(high - low, 0.02 * abs(high), 1e-3)
    top = 100.0 if column.factor == 100 else float("inf")
    left, right = max(low - room, min(reach), 0.0), min(high + room, max(reach), top)
    left = max(0.0, min(left, right - 0.5 * room))  # all alike
    axes.set_xlim(left - 0.08 * room, right + 0.08 * room)
