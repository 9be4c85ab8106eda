"""How runs went on, round by round: quality, loss, traffic, dropped weights.

Evaluations stand in rounds.jsonl; the last one stands in the result and belongs to the round whose state was tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from ..evaluate.figures import headline, number
from .groups import Group, parts
from .pictures import Picture, logarithmic, marked, panel
from .read import FinishedRun

Series = dict[float, float]
"""Round (or MB) -> value."""
_POINTS = 150
"""Points of a line; more rounds than that are averaged in blocks."""
_NEAR = 0.01
"""Share of a panel's height that two lines must be apart to be told from each other."""
_PIECE = 3.0
"""Length of a piece of a line that is drawn in turns with others, in widths of the line."""
_BEYOND = 2.0
"""Points below 0 % and above 100 % that a panel of shares shows, so that its lines do not run along the edge."""
_BANDS = 6
"""Up to so many groups show the spread of their seeds; more would only cover each other."""


def evaluated(run: FinishedRun, *path: str) -> Series:
    """Return a figure at every evaluation."""
    found = {float(record["round"]): number(record, *path) for record in run.rounds}
    last = run.number("tested_round") or run.number("rounds")
    if last is not None:
        found[last] = run.number(*path)
    return {place: value for place, value in sorted(found.items()) if value is not None}


def recorded(run: FinishedRun, *names: str) -> Series:
    """Return the sum of a round's numbers, averaged in blocks where rounds are many."""
    found = {}
    for record in run.rounds:
        values = [number(record, name) for name in names]
        if all(value is not None for value in values):
            found[float(record["round"])] = sum(value for value in values if value is not None)
    if len(found) <= _POINTS:
        return found
    blocks = np.array_split(np.array(list(found.items())), _POINTS)
    return {float(block[-1, 0]): float(block[:, 1].mean()) for block in blocks}


def learning(groups: Sequence[Group]) -> Iterator[Picture]:
    """Draw the headline figures at the evaluations, and the training loss."""
    for shown in headline(wide=True):
        for part, name in list(parts(groups).items())[: None if shown.headline == "always" else 1]:
            yield from _lines(
                f"curve-{shown.name}-{part}", f"{shown.heading}: {name} clients", groups,
                _at(part, shown.name, factor=shown.factor), log=shown.unit != "%", share=shown.unit == "%",
            )  # fmt: skip
    yield from _lines("curve-loss", "Training loss of the cohort", groups, lambda run: recorded(run, "loss"), log=True)


def cost(groups: Sequence[Group]) -> Iterator[Picture]:
    """Draw traffic of rounds, accuracy against traffic, and, where there are any, dropped weights and privacy spent."""
    title = "Traffic of a round, MB"
    yield from _lines("cost-traffic", title, groups, lambda run: _scaled(recorded(run, "down", "up"), 1e-6), zero=True)
    title = "Accuracy, %, against MB sent so far"
    yield from _lines(
        "cost-accuracy", title, groups, _against_traffic, x="MB, both directions, all clients", share=True
    )
    for key, name in (("layer", "of the masked layer"), ("model", "of the whole model")):
        if any(value > 0 for group in groups for value in group.numbers("sparsity", key)):
            title = f"Dropped weights {name}, %"
            yield from _lines(f"cost-sparsity-{key}", title, groups, _at("sparsity", key, factor=100), zero=True)

    if any(group.numbers("privacy", "epsilon") for group in groups):
        title = "Epsilon spent"
        yield from _lines("cost-epsilon", title, groups, lambda run: recorded(run, "epsilon"), zero=True)


def _at(*path: str, factor: float = 1.0) -> Callable[[FinishedRun], Series]:
    """Return a reader of one figure at every evaluation."""
    return lambda run: _scaled(evaluated(run, *path), factor)


def _against_traffic(run: FinishedRun) -> Series:
    sent, total = {}, 0.0
    for record in run.rounds:
        total += ((number(record, "down") or 0.0) + (number(record, "up") or 0.0)) / 1e6
        sent[float(record["round"])] = total
    quality = evaluated(run, "test", "accuracy")
    return {sent[place]: 100 * value for place, value in quality.items() if place in sent}


def _scaled(series: Series, factor: float) -> Series:
    return {place: factor * value for place, value in series.items()}


def _over_seeds(series: Sequence[Series], *, in_turn: bool) -> tuple[list[float], ...]:
    """Return places, mean, lowest and highest where every seed has a value.

    `in_turn` matches the first with the first and so on, and averages the places too: seeds send different amounts.
    """
    if in_turn:
        count = min(map(len, series))
        table = np.array([list(one.items())[:count] for one in series], np.float64)
        places, values = table[:, :, 0].mean(0), table[:, :, 1]
    else:
        places = np.array(sorted(set(series[0]).intersection(*series[1:])))
        values = np.array([[one[place] for place in places] for one in series])
    return places.tolist(), values.mean(0).tolist(), values.min(0).tolist(), values.max(0).tolist()


def _lines(
    name: str, title: str, groups: Sequence[Group], values: Callable[[FinishedRun], Series], *, x: str = "round",
    log: bool = False, zero: bool = False, share: bool = False,
) -> Iterator[Picture]:  # fmt: skip
    """Draw one line for each group: the mean over its seeds and, of few groups, their range.

    Over rounds, a single point for each is no line: it stands in the table.
    """
    figure, axes = panel(title)
    found: list[tuple[Group, int, tuple[list[float], ...]]] = []
    for group in groups:
        series = [one for run in group.runs if (one := values(run))]
        over = _over_seeds(series, in_turn=x != "round") if series else ([],)
        if over[0]:
            found.append((group, len(series), over))
    if not found or (x == "round" and all(len(places) == 1 for *_, (places, *_) in found)):
        return
    drawn = tuple(group for group, *_ in found)
    everything = [value for *_, (_, mean, *_) in found for value in mean]
    alike = _alike([dict(zip(places, mean, strict=True)) for *_, (places, mean, *_) in found])
    for at, (group, seeds, (places, mean, low, high)) in enumerate(found):
        same, look = alike[at], group.look
        turn, count = same.index(at), len(same)
        # Lines that lie on each other are drawn in turns, a piece of each, and their markers at different places.
        dash: Any = look.dash if count == 1 else (_PIECE * turn, (_PIECE, _PIECE * (count - 1)))
        every = -(-len(places) // 25) * count
        line = axes.plot(
            places, mean, color=look.colour, linestyle=dash, dash_capstyle="butt", marker=look.marker,
            markevery=(min(turn * every // count, len(places) - 1), every) if len(places) <= 25 or count > 1 else [],
        )[0]  # fmt: skip
        marked(line, group, 0)
        if seeds > 1 and len(groups) <= _BANDS:
            marked(axes.fill_between(places, low, high, color=look.colour, alpha=0.13, linewidth=0), group, 1)
    if log and min(everything) > 0 and max(everything) > 20 * min(everything):
        logarithmic(axes, "y")
    if zero:
        axes.set_ylim(0, 1.08 * max(everything) or 1)
    if share:
        bottom, top = axes.get_ylim()
        axes.set_ylim(max(bottom, -_BEYOND), min(top, 100 + _BEYOND))
    axes.set_xlabel(x)
    if x == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    yield Picture(name, f"{title}, by {x.partition(',')[0]}, one line for each method", figure, drawn)


def _alike(lines: Sequence[Series]) -> list[list[int]]:
    """Return, for each line, the lines that cannot be told from it: at half of their places or more, it included."""
    values = [value for line in lines for value in line.values()]
    near = _NEAR * (max(values) - min(values))

    def same(one: Series, other: Series) -> bool:
        shared = [place for place in one if place in other]
        return 2 * sum(abs(one[place] - other[place]) <= near for place in shared) >= max(len(one), len(other))

    groups: list[list[int]] = []
    for at, line in enumerate(lines):
        mine = next((each for each in groups if same(line, lines[each[0]])), None)
        if mine is None:
            groups.append([at])
        else:
            mine.append(at)
    return [next(each for each in groups if at in each) for at in range(len(lines))]
