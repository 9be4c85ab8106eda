"""Our figures beside the paper's, and whether they differ by more than noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from ...evaluate.figures import Column
from ...evaluate.intervals import interval
from ..lines import Line, read
from .digest import NORMAL, dotted
from .plan import store_file
from .protocol import LAST, PAPER, Protocol, name_of, runs_of
from .tables import MEASURES, Cell, Labels, PaperFigure, PaperTable, cells, get

_CLIENTS_OF = {"test": ("test",), "unseen": ("unseen",), "gap": ("test", "unseen")}
"""Whose clients' noise a figure has."""
_ROUNDING = 0.00501
"""Half of the paper's last digit, and a little for the binary fraction."""


@dataclass(frozen=True)
class Compared:
    """One figure of the paper and ours."""

    figure: PaperFigure
    untuned: float | None
    """Mean over seeds of runs at the defaults, beside tuned ones."""
    ours: float | None = None
    """Mean over seeds."""
    half: float | None = None
    """Half width of the 95 % interval of that mean; None with one seed."""
    last: float | None = None
    """The mean of the average of the last evaluations, where ours is of the last one alone."""
    sd: float | None = None
    """Over clients, where the paper gives one too."""
    difference: float | None = None
    beyond: bool | None = None
    """Whether the difference is beyond noise; None where that cannot be said."""


@dataclass(frozen=True, eq=False)
class Measured:
    """A cell, and what our runs say to it."""

    cell: Cell
    figures: tuple[Compared, ...]
    seeds: tuple[int, ...]
    """That ran to the end."""
    failures: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class View:
    """A table of the paper with our answers."""

    table: PaperTable
    how: Protocol
    answers: tuple[Measured, ...]
    lines: Mapping[str, Line]
    """Of the store, that the answers come from, by identity."""

    @property
    def beside(self) -> bool:
        """Whether ours can be set beside the paper's."""
        return self.how.scale == "full" and not self.table.alone


def table(
    name: str,
    store: str | Path,
    *,
    how: Protocol = PAPER,
    rows: Labels = None,
    columns: Labels = None,
    note: Callable[[str], None] | None = None,
) -> View:
    """Set our figures beside the paper's.

    The paper has one run for each cell, so the question is whether its number could be one more run of ours.
    With n > 1 seeds, mean m and standard deviation s, a difference is beyond noise where it is larger than

        t_{n-1, 0.975} s sqrt(1 + 1/n)          Student's interval for one more observation

    With one seed, accuracies and their gap are judged by the noise from having these clients and no others:

        1.96 sqrt(2) e,     e the bootstrap's standard error over clients (of the gap: of both, added in squares),

    the root of 2 because the paper's run has that noise too. This knows nothing of the noise of training, so with one
    seed "beyond" is a lead, and the other figures cannot be judged. A difference within the rounding of
    the paper's last digit is within noise whatever the rest. Smoke runs are not compared: they are of other data.
    """
    lines = read(store_file(store, how.scale), how.scale, note)
    answers: list[Measured] = []
    used: dict[str, Line] = {}
    for cell in cells(name, rows, columns):
        own = {seed: name_of(cell, seed, how) for seed in how.seeds}
        there = {seed: lines[name] for seed, name in own.items() if name in lines}
        used |= {own[seed]: line for seed, line in there.items()}
        results = {seed: line["result"] for seed, line in there.items() if "result" in line}
        # Of a tuned cell's runs at the defaults too, where there are some.
        before = {} if how.tuned is None else runs_of(cell, lines, replace(how, tuned=None))
        untuned = [line["result"] for line in before.values()]
        compared = tuple(_compare(figure, list(results.values()), how, untuned) for figure in cell.figures)
        failures = tuple(f"seed {seed}: {line['failed']}" for seed, line in there.items() if "failed" in line)
        answers.append(Measured(cell, compared, tuple(results), failures))
    return View(get(name), how, tuple(answers), used)


def _values(results: Sequence[Mapping[str, Any]], measure: Column, last: int) -> list[float]:
    """Return the figure of all results that have it, the last one or the average of the last ones."""
    averaged = measure._replace(path=("last", dotted(measure)))
    known: list[float] = []
    for each in results:
        known += (averaged if last > 1 and "last" in each else measure).values([each])
    return known


def _compare(
    figure: PaperFigure,
    results: Sequence[Mapping[str, Any]],
    how: Protocol,
    before: Sequence[Mapping[str, Any]],
) -> Compared:
    measure = MEASURES[figure.name]
    old, known = _values(before, measure, how.last), _values(results, measure, how.last)
    untuned = sum(old) / len(old) if old else None
    if not known:
        return Compared(figure, untuned)
    mean, half = interval(known)
    settled = _values([each for each in results if "last" in each], measure, LAST) if how.last == 1 else []
    last = sum(settled) / len(settled) if len(settled) == len(known) else None
    sd = results[0]["classes"]["sd"] if figure.sd is not None and how.scale == "full" else None
    compared = Compared(figure, untuned, mean, half, last, sd)
    if how.scale == "smoke" or math.isnan(figure.value):
        return compared
    difference = mean - figure.value
    margin = _margin(figure.name, known, results[0])
    beyond = None if margin is None else abs(difference) > margin + _ROUNDING
    return replace(compared, difference=difference, beyond=False if abs(difference) <= _ROUNDING else beyond)


def _margin(name: str, values: Sequence[float], result: Mapping[str, Any]) -> float | None:
    """Return how far one more run may lie from ours, where that is known; the rule is `table`'s."""
    count = len(values)
    if count > 1:
        spread = float(np.std(values, ddof=1))
        return float(stdtrit(count - 1, 0.975)) * spread * math.sqrt(1 + 1 / count)
    noise = result.get("error", {})
    errors = [noise.get(part) for part in _CLIENTS_OF.get(name, ())]
    return NORMAL * math.sqrt(2) * 100 * math.hypot(*errors) if errors and None not in errors else None
