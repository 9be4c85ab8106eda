"""The paper's claims, each with the runs that test it, and a verdict by a rule that is the same for all.

`claims.toml` says which rows of which tables are compared. A comparison is, for one column, the first row less the
second one, same seeds, same clients:

    in favour   every seed says so, and the 95 % interval leaves out 0 (for "without loss": a margin)
    against     the same on the other side
    open        neither

The interval of accuracies is the paired bootstrap over clients (`pairs`), that of other figures Student's over seeds;
one seed of those has no interval and counts by its sign. A claim then

    holds                nine in ten comparisons are in favour, none is against
    holds in part        some are in favour
    does not hold here   fewer than a third are in favour, or no more than are against
    tested in part       more than half of the comparisons lack a run
    not yet tested       all do
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ...evaluate.figures import Column, number
from ...evaluate.intervals import interval
from ...templates import filled
from ..lines import Line, read
from ..markdown import markdown_table
from ..pairs import pair
from ..tuned import KEY
from .digest import NORMAL
from .page import told_protocol
from .plan import store_file
from .protocol import PAPER, Protocol, runs_of, settings_of
from .tables import MEASURES, Cell, cells

_OUTCOMES = FOR, OPEN, AGAINST, MISSING = "in favour", "open", "against", "not run"
_SAME = ("data", "partition", "cohort", "width", "variant")
"""What two rows must share to be compared."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What the paper says, and what tests it; see `claims.toml`."""

    name: str
    title: str
    says: str
    kind: str
    figure: str
    tables: Sequence[str]
    pairs: Sequence[Sequence[str]]
    against: Sequence[str] = ()
    """Tables that the first row is looked for in, where those are others than the second's."""
    columns: Sequence[str] | None = None
    margin: float = 0.0
    least: float = 0.0
    note: str = ""
    ours: bool = False
    """Whether it is not the paper's claim, but a question that its claims raise."""


@dataclass(frozen=True)
class Comparison:
    """One column of a claim."""

    where: str
    what: str
    outcome: str
    difference: float | None = None
    """In favour of the claim where it is positive; in points."""
    low: float | None = None
    high: float | None = None
    paper: float | None = None
    seeds: int = 0
    more: str = ""


@cache
def claims() -> tuple[Claim, ...]:
    """Return all claims."""
    text = (resources.files(__package__) / "claims.toml").read_text(encoding="utf-8")
    return tuple(Claim(**values) for values in tomllib.loads(text)["claim"])


def verdict(found: Sequence[Comparison]) -> str:
    """Return the verdict of the rule above."""
    count = Counter(each.outcome for each in found)
    tested = len(found) - count[MISSING]
    if tested < len(found) / 2 or not tested:
        return "tested in part" if tested else "not yet tested"
    if count[FOR] >= 0.9 * tested and not count[AGAINST]:
        return "holds"
    return "does not hold here" if count[FOR] < tested / 3 or count[FOR] <= count[AGAINST] else "holds in part"


def compare(claim: Claim, store: str | Path, how: Protocol = PAPER) -> list[Comparison]:
    """Return a claim's comparisons, from the store alone."""
    lines = read(store_file(store, how.scale), how.scale)
    wanted = [cell for name in claim.tables for cell in cells(name, None, claim.columns)]
    others = [cell for name in claim.against for cell in cells(name)] or wanted
    found = []
    for first, second in claim.pairs:
        places = {_place(cell): cell for cell in others if cell.row == first}
        if not second:
            found += [_rates(claim, cell, lines, how) for cell in places.values()]
            continue
        for cell in (cell for cell in wanted if cell.row == second):
            if _place(cell) in places:
                found.append(_compared(claim, places[_place(cell)], cell, lines, how))
    return found


def _place(cell: Cell) -> tuple[Any, ...]:
    return tuple(cell.settings.get(key) for key in _SAME)


def _where(cell: Cell) -> str:
    settings = cell.settings
    alpha = str(settings["partition"]).replace("dirichlet:", "Dirichlet ").replace("natural", "by writer")
    more = f", {settings['width']} filters" if "variant" in settings else ""
    share = f", {settings['cohort']} of {settings['clients']} in a round" if settings["partition"] == "natural" else ""
    return f"{settings['data']}, {alpha}{more}{share}"


def _compared(claim: Claim, first: Cell, second: Cell, lines: dict[str, Line], how: Protocol) -> Comparison:
    sign = -1.0 if claim.kind == "lower" else 1.0
    measure = MEASURES[claim.figure]
    where, what = _where(first), f"{first.row} to {second.row}"
    paper = _paper(first, second, claim.figure, sign)
    own, other = runs_of(first, lines, how), runs_of(second, lines, how)
    each = {
        seed: sign * measure.factor * (a - b)
        for seed in own
        if seed in other
        and (a := number(own[seed]["result"], *measure.path)) is not None
        and (b := number(other[seed]["result"], *measure.path)) is not None
    }
    if not each:
        return Comparison(where, what, MISSING, paper=paper)
    shared = [[runs[seed] for seed in each] for runs in (own, other)]
    difference = sum(each.values()) / len(each)
    low, high = _interval(claim.figure, list(each.values()), *shared)
    more, limit, enough = _untuned((first, second), how), 0.0, True
    if claim.kind == "no-loss":
        dropped = min(number(line["result"], "sparsity", "layer") or 0.0 for line in shared[0])
        more = ", ".join(filter(None, (f"{dropped:.0%} dropped", more)))
        limit, enough = -claim.margin, dropped >= claim.least
    bounds = (difference, difference) if low is None or high is None else (low, high)
    outcome = OPEN
    if bounds[0] > limit and all(value > limit for value in each.values()) and enough:
        outcome = FOR
    elif not enough or (bounds[1] < limit and all(value < limit for value in each.values())):
        outcome = AGAINST
    return Comparison(where, what, outcome, difference, low, high, paper, len(each), more)


def _untuned(compared: Sequence[Cell], how: Protocol) -> str:
    """Say which of two rows tuned settings were asked for and none were found."""
    if how.tuned is None:
        return ""
    tuned = sum(KEY in settings_of(cell, how=how) for cell in compared)
    return {0: "neither is tuned", 1: "only one of the two is tuned"}.get(tuned, "")


def _interval(
    figure: str, values: Sequence[float], first: Sequence[Line], second: Sequence[Line]
) -> tuple[float | None, float | None]:
    """Return the 95 % interval of a difference: over clients where stores have them, else over seeds."""
    mean, half = interval(values)
    if figure in {"test", "unseen"}:
        found = pair(first, second, figure)
        if found is not None and found.seeds == len(values):
            return 100 * found.low, 100 * found.high
        errors = [number(line["result"], "error", figure) for line in (first[0], second[0])]
        if half is None and None not in errors:  # one seed, stored before clients were: as if they were not the same
            half = NORMAL * 100 * math.hypot(*(error or 0.0 for error in errors))
    return (None, None) if half is None else (mean - half, mean + half)


def _paper(first: Cell, second: Cell, figure: str, sign: float) -> float | None:
    values = [next((each.value for each in cell.figures if each.name == figure), math.nan) for cell in (first, second)]
    difference = sign * (values[0] - values[1])
    return None if math.isnan(difference) else difference


def _rates(claim: Claim, cell: Cell, lines: dict[str, Line], how: Protocol) -> Comparison:
    """Return how far rates differ between clients."""
    runs = runs_of(cell, lines, how)
    known = Column("", ("rates", "between_clients")).values(line["result"] for line in runs.values())
    if not known:
        return Comparison(_where(cell), cell.row, MISSING)
    outcome = FOR if min(known) >= claim.least else AGAINST if max(known) < claim.least else OPEN
    more = f"{sum(known) / len(known):.3f} between clients"
    return Comparison(_where(cell), cell.row, outcome, seeds=len(known), more=more)


def page(store: str | Path, how: Protocol = PAPER, command: str = "") -> str:
    """Write all claims with numbers and verdicts, from the store alone."""
    judged = [(claim, compare(claim, store, how)) for claim in claims()]
    table = markdown_table(
        ["claim", "verdict", *_OUTCOMES, "mean difference", "the paper's"],
        [_summed_up(claim, found) for claim, found in judged],
        text=(0, 1),
    )
    sections = [(claim, _said(found), *_tested(found)) for claim, found in judged]
    return filled(
        "claims.md", protocol=told_protocol(how), seeds=how.seeds, table="\n".join(table), claims=sections,
        command=command,
    )  # fmt: skip


def _summed_up(claim: Claim, found: Sequence[Comparison]) -> list[str]:
    """Return a claim's row."""
    count = Counter(each.outcome for each in found)
    tested = [each for each in found if each.difference is not None] or found
    ours, paper = _mean(tested, lambda each: each.difference), _mean(tested, lambda each: each.paper)
    title = f"(not the paper's) {claim.title}" if claim.ours else claim.title
    counts = (str(count[outcome]) for outcome in _OUTCOMES)
    return [f"[{title}](#{claim.name})", f"**{_said(found)}**", *counts, ours, paper]


def _said(found: Sequence[Comparison]) -> str:
    said = verdict(found)
    seeds = {each.seeds for each in found if each.outcome != MISSING}
    return f"{said} (one seed: a lead)" if said.startswith(("holds", "does")) and seeds == {1} else said


def _mean(found: Sequence[Comparison], value: Callable[[Comparison], float | None]) -> str:
    """Return a mean over comparisons, in points."""
    known = [each for each in map(value, found) if each is not None]
    return _points(sum(known) / len(known) if known else None)


def _tested(found: Sequence[Comparison]) -> tuple[str, int]:
    """Return the table of the comparisons that have their runs, and how many have not."""
    tested = [each for each in found if each.outcome != MISSING]
    heads = ["", "", "difference", "95 % interval", "the paper's", "seeds", ""]
    table = markdown_table(heads, [_row(each) for each in tested], text=(0, 1, 6)) if tested else []
    return "\n".join(table), len(found) - len(tested)


def _row(each: Comparison) -> list[str]:
    inside = "" if each.low is None or each.high is None else f"{each.low:+.2f} to {each.high:+.2f}"
    numbers = [_points(each.difference), inside, _points(each.paper), str(each.seeds)]
    return [each.where, each.what, *numbers, each.outcome + (f", {each.more}" if each.more else "")]


def _points(value: float | None) -> str:
    return "" if value is None else f"{round(value, 2) + 0.0:+.2f}"
