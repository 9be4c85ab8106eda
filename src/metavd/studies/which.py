"""Which method for what: ten lines, from the arena's store alone.

For each question there is a figure, and the runs that it is asked of. Of every setting (data, partition, test rows,
rounds) of those runs a method has a shortfall, how far its mean over seeds stays behind the best one's; the method with
the smallest mean shortfall is taken, among those that ran in all of the settings. A setting of which too few methods
have the figure answers nothing. Where a setting has tuned runs, only those count; data that are there to try things out
count where there are no others. The page says what did not count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import NamedTuple

from ..evaluate.figures import SECONDS, SENT, Column, get
from ..templates import filled
from . import arena
from .lines import Line, read
from .markdown import markdown_table
from .tuned import KEY

COMMAND = "metavd arena --page docs/arena.md --which docs/which.md --picture docs/arena.png"
TOY = "digits"
NEXT = 3
"""Methods that are named after the one that is taken."""
MEASURED = 0.5
"""Share of a setting's methods that must have a figure, so that the best of them is one of many."""


class Wish(NamedTuple):
    """What somebody may want, and the figure that answers it."""

    wants: str
    column: Column
    protocol: str = ""
    """Only these test rows; empty: all."""
    among: float = math.inf
    """Only methods count whose accuracy is within so many points of the best."""


def questions() -> list[Wish]:
    """Return the ten questions."""
    accuracy, tenth = get("accuracy"), get("percentile_10")
    return [
        Wish("A client meets the same mix of classes as in its own data", accuracy.column("test"), "consistent"),
        Wish("A client may meet any class, whatever it has itself", accuracy.column("test"), "independent"),
        Wish("Clients come that never took part", accuracy.column("unseen")),
        Wish("Nobody may be served badly (the worst tenth of clients)", tenth.column("test")),
        Wish("Probabilities are used as such (NLL)", get("nll").column("test")),
        Wish("Confidence must match accuracy, among methods within 5 points of the most accurate (ECE)",
             get("ece_top1").column("test"), among=5),
        Wish("Sets of classes with 90 % coverage, as small as possible (LAC)", arena.size_of_sets("lac")),
        Wish("Inputs of another kind must be noticed (AUROC)", arena.AUROC),
        Wish("Traffic matters more than a point of accuracy (MB)", SENT._replace(better=-1), among=1),
        Wish("Time matters more than a point of accuracy (seconds)", SECONDS._replace(better=-1), among=1),
    ]  # fmt: skip


Groups = Mapping[str, Mapping[str, Sequence[Line]]]
"""Finished runs by setting and method."""
Means = Mapping[str, Mapping[str, float]]
"""A figure's mean over seeds by setting and method."""


def means(groups: Groups, column: Column) -> dict[str, dict[str, float]]:
    """Return a figure by setting and method, where there is one; every setting has its entry."""
    found: dict[str, dict[str, float]] = {setting: {} for setting in groups}
    for setting, methods in groups.items():
        for method, lines in methods.items():
            known = column.values(line["result"] for line in lines)
            if known:
                found[setting][method] = sum(known) / len(known)
    return found


def measured(groups: Groups, column: Column) -> dict[str, dict[str, float]]:
    """Return a figure by setting and method, of the settings in which enough methods have it."""
    return {key: row for key, row in means(groups, column).items() if len(row) >= MEASURED * len(groups[key])}


def ranked(table: Means, better: int) -> list[tuple[str, float]]:
    """Return methods with their mean shortfall, the least first; only those that every setting has."""
    everywhere = set.intersection(*(set(methods) for methods in table.values())) if table else set()
    if not everywhere:
        return []
    best = {setting: max(methods.values(), key=lambda value: better * value) for setting, methods in table.items()}
    short = {
        method: sum(better * (best[setting] - table[setting][method]) for setting in table) / len(table)
        for method in everywhere
    }
    return sorted(short.items(), key=lambda item: (item[1], item[0]))


def answer(question: Wish, groups: Groups) -> tuple[str, str, str, str]:
    """Return the cells of a question's row: what to take, its figures, what comes next, and of how many."""
    letters = dict(zip(groups, ascii_lowercase, strict=False))
    asked = {key: methods for key, methods in groups.items() if question.protocol in ("", _protocol(methods))}
    digits, accuracy = question.column.digits, dict(ranked(measured(asked, get("accuracy").column("test")), 1))
    good = {method for method, short in accuracy.items() if short <= question.among}
    table = {
        key: {name: value for name, value in row.items() if name in good}
        for key, row in measured(asked, question.column).items()
    }
    # Of methods that are alike in the digits that are shown, the more accurate one is first.
    order = sorted(ranked(table, question.column.better), key=lambda item: (round(item[1], digits), accuracy[item[0]]))
    if not order:
        have = (
            f"{len(row)} of {len(asked[key])} ({letters[key]})" for key, row in means(asked, question.column).items()
        )
        return "not yet measured", "", "", ", ".join(have)
    taken = order[0][0]
    figures = ", ".join(f"{table[key][taken]:.{digits}f} ({letters[key]})" for key in table)
    others = ", ".join(f"`{name}` ({short - order[0][1]:+.{digits}f})" for name, short in order[1 : 1 + NEXT])
    return f"`{taken}`", figures, others, str(len(order))


def _protocol(methods: Mapping[str, Sequence[Line]]) -> str:
    return str(next(iter(methods.values()))[0]["settings"].get("test_rows", ""))


def grouped(store: Path) -> dict[str, dict[str, list[Line]]]:
    """Return the finished runs that count, by setting and method."""
    every = arena.grouped(line for line in read(store, arena.SCOPE).values() if "result" in line)
    serious = {key: methods for key, methods in every.items() if not key.startswith(TOY)} or every
    return {key: _tuned(methods) for key, methods in serious.items()}


def _tuned(methods: Mapping[str, list[Line]]) -> dict[str, list[Line]]:
    some = any(KEY in line["settings"] for lines in methods.values() for line in lines)
    return {name: lines for name, lines in methods.items() if not some or KEY in lines[0]["settings"]}


def left_out(store: Path, groups: Groups) -> list[str]:
    """Say what of a store does not count, and why."""
    toys = defaults = failed = 0
    for setting, methods in arena.grouped(read(store, arena.SCOPE).values()).items():
        for name, lines in methods.items():
            finished = sum("result" in line for line in lines)
            failed += len(lines) - finished
            toys += finished * (setting not in groups)
            defaults += finished * (setting in groups and name not in groups[setting])
    told = {
        f"on {TOY}, data that are there to try things out": toys,
        "at the defaults, where others are tuned": defaults,
        "without a result": failed,
    }
    texts = [f"{count} run{'s' * (count > 1)} {why}" for why, count in told.items() if count]
    names = {name for methods in groups.values() for name in methods}
    some = sorted(name for name in names if any(name not in methods for methods in groups.values()))
    if some:
        few = ", ".join(f"`{name}`" for name in some)
        texts.append(f"in lines about several settings, methods that ran in only some of them ({few})")
    return texts


def page(store: Path, command: str = COMMAND) -> str:
    """Write the ten lines."""
    groups = grouped(store)
    every = [line for methods in groups.values() for lines in methods.values() for line in lines]
    seeds = {len({line["seed"] for line in lines}) for methods in groups.values() for lines in methods.values()}
    low, high = min(seeds, default=0), max(seeds, default=0)
    how_many = "one seed" if high == 1 else f"{high} seeds"
    if low < high:
        how_many = f"{low} to {how_many}"
    table = markdown_table(
        ["you want", "take", "figures", "then", "compared"],
        [[question.wants, *answer(question, groups)] for question in questions()],
        text=range(5),
    )
    return filled(
        "which.md", runs=len(every), tuned=sum(KEY in line["settings"] for line in every), seeds=how_many,
        servers=arena.told_servers(every), table="\n".join(table), left_out=left_out(store, groups),
        settings=list(zip(ascii_lowercase, groups, strict=False)), command=command,
        measured=f"{100 * MEASURED:g} %",
    )  # fmt: skip
