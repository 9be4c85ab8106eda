"""The page of the paper's tables with ours beside them, in Markdown, from the store alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...templates import filled
from ..markdown import markdown_table, write
from .plan import tuned_told
from .protocol import LAST, PAPER, Protocol, name_of, settings_of
from .statistics import Compared, Measured, View, table
from .tables import MEASURES, Cell, PaperFigure, PaperTable, extras, tables


def markdown(view: View) -> str:
    """Write one table as a section: for each column ours, the paper's and the differences."""
    shown, about = view.table, _Notes(view.table.name)
    text = [f"## {shown.name}. {shown.title}", "", _place(shown)]
    text += [f"- {note[0].upper()}{note[1:]}." for note in shown.notes]
    if shown.notes:
        text.insert(3, "")
    for column in shown.columns:
        answers = [answer for answer in view.answers if answer.cell.column == column]
        if answers:
            text += ["", f"### {_heading(answers[0].cell, view.how)}", "", *_rows(answers, view, about)]
    told = tuned_told([shown.name], how=view.how)
    text += ["", "Options:", "", *(f"- {each}." for each in told)] if told else []
    text += ["", _origin(list(view.lines.values())), *about.lines()]
    return "\n".join(text) + "\n"


def _place(shown: PaperTable) -> str:
    place = f"{shown.place[0].upper()}{shown.place[1:]}"
    instead = next((name for name, other in extras().items() if other.stands_for == shown.name), "")
    more = f" FEMNIST could not be had; {instead} has the same runs on MNIST by writer." if instead else ""
    return f"{place}." if shown.alone else f"{place} of the paper.{more}"


class _Notes:
    """Footnotes of a section, each text once."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.texts: list[str] = []

    def mark(self, text: str) -> str:
        if text not in self.texts:
            self.texts.append(text)
        return f"[^{self.prefix}-{self.texts.index(text) + 1}]"

    def lines(self) -> list[str]:
        own = [f"[^{self.prefix}-{number}]: {text[0].upper()}{text[1:]}." for number, text in enumerate(self.texts, 1)]
        return ["", *own] if own else []


def _heading(cell: Cell, how: Protocol) -> str:
    settings = settings_of(cell, how=how)
    where = str(settings["partition"]).replace("dirichlet:", "Dirichlet ").replace("natural", "natural clients")
    if "method" not in settings:
        return where
    asked = f" (for {cell.column})" if how.scale == "smoke" else ""
    return f"{settings['data']}, {where}, cohort of {settings['cohort']} of {settings['clients']}{asked}"


def _rows(answers: Sequence[Measured], view: View, about: _Notes) -> list[str]:
    headings: list[str] = []
    for title in (MEASURES[name].title for name in view.table.figures):
        headings += [f"{title}: ours" if view.beside else title, "last five", "untuned"]
        headings += ["paper", "difference"] if view.beside else []
    lines = []
    for answer in answers:
        label = answer.cell.row + "".join(about.mark(text) for text in view.table.doubts[answer.cell.row])
        parts: list[str] = []
        for each in answer.figures:
            parts += [_ours(each, answer), _beside(each.last, each), _beside(each.untuned, each)]
            parts += [_theirs(each.figure, about), _difference(each)] if view.beside else []
        failures = "".join(about.mark(f"failed, {text}") for text in answer.failures)
        count = f"{len(answer.seeds)} of {len(view.how.seeds)}{failures}"
        lines.append([label, *parts, count])
    head = ["", *headings, "seeds"]
    filled = [number for number, column in enumerate(zip(*lines, strict=True)) if any(column)]
    return markdown_table([head[number] for number in filled], [[line[number] for number in filled] for line in lines])


def _number(value: float, *, signed: bool) -> str:
    """Write two decimals, and 0.00 without a minus sign."""
    return f"{round(value, 2) + 0.0:{'+' if signed else ''}.2f}"


def _ours(compared: Compared, answer: Measured) -> str:
    if compared.ours is None:
        return "no number" if answer.seeds else "failed" if answer.failures else "not run"
    half = "" if compared.half is None else f" ± {compared.half:.2f}"
    spread = "" if compared.sd is None else f" (sd {compared.sd:.2f})"
    return _number(compared.ours, signed=compared.figure.name == "gap") + half + spread


def _beside(value: float | None, compared: Compared) -> str:
    return "" if value is None else _number(value, signed=compared.figure.name == "gap")


def _theirs(figure: PaperFigure, about: _Notes) -> str:
    spread = "" if figure.sd is None else f" (sd {figure.sd:g})"
    return (
        _number(figure.value, signed=figure.name == "gap") + spread + (about.mark(figure.mark) if figure.mark else "")
    )


def _difference(compared: Compared) -> str:
    if compared.difference is None:
        return ""
    text = _number(compared.difference, signed=True)
    return {True: f"**{text}**", False: text, None: f"({text})"}[compared.beyond]


def _origin(lines: Sequence[Mapping[str, Any]]) -> str:
    """Say what the figures were made with and on."""
    if not lines:
        return "Not run."

    def counted(values: Sequence[str]) -> str:
        count = Counter(values)
        return ", ".join(value + (f" ({number})" if len(count) > 1 else "") for value, number in sorted(count.items()))

    versions = [f"metavd {line['versions']['metavd']}, torch {line['versions']['torch']}" for line in lines]
    runs = f"{len(lines)} run" + ("s" if len(lines) > 1 else "")
    return (
        f"{runs}; commit {counted([str(line['commit']) for line in lines])}; "
        f"{counted([line['device'] + ', ' + line['machine'] for line in lines])}; {counted(versions)}."
    )


def report(
    store: str | Path,
    path: str | Path | None = None,
    *,
    names: Sequence[str] | None = None,
    how: Protocol = PAPER,
    command: str = "",
    pictures: Sequence[tuple[str, str]] = (),
    note: Callable[[str], None] | None = None,
) -> str:
    """Return, and where a path is given write, the page of all tables (or those named) from the store alone.

    `pictures` are captions and files, relative to the page, that are shown at its end.
    """
    views = [table(name, store, how=how, note=note) for name in (tables() if names is None else names)]
    shown = ["## Figures\n\n" + "\n".join(f"![{caption}]({file})\n\n*{caption}.*\n" for caption, file in pictures)]
    text = "\n".join([_preface(views, how, command), *(markdown(view) for view in views), *(shown if pictures else [])])
    if path is not None:
        write(path, text)
    return text


def _preface(views: Sequence[View], how: Protocol, command: str) -> str:
    answers = [answer for view in views for answer in view.answers]
    needed = {name_of(answer.cell, seed, how) for answer in answers for seed in how.seeds}
    lines = {name: line for view in views for name, line in view.lines.items()}
    finished = sum("result" in line for line in lines.values())
    figures = [figure for answer in answers for figure in answer.figures]
    return filled(
        "paper.md", title_end=_title_end(how), finished=finished, needed=len(needed), failed=len(lines) - finished,
        how=how, averaged=any(each.last is not None for each in figures), last=LAST,
        untuned=any(each.untuned is not None for each in figures), other_rounds=_other_rounds(answers, how),
        protocol=told_protocol(how), command=command,
    )  # fmt: skip


def _title_end(how: Protocol) -> str:
    """Say in a title what sets its runs apart from the paper's and the other pages'."""
    if how.scale == "smoke":
        return " (smoke runs)"
    told = [f"after {how.rounds:,} rounds"] if how.rounds else []
    told += ["with tuned settings"] if how.tuned is not None else []
    told += ["with options changed after validation"] if how.overrides else []
    return "".join(f", {each}" for each in told)


def _other_rounds(answers: Sequence[Measured], how: Protocol) -> str:
    """Return the paper's rounds where ours were asked for others, and nothing where they are the same."""
    if not how.rounds:
        return ""
    theirs = {answer.cell.settings["rounds"] for answer in answers if "rounds" in answer.cell.settings} - {how.rounds}
    return " or ".join(f"{rounds:,}" for rounds in sorted(theirs))


def told_protocol(how: Protocol) -> str:
    """Say how the cells were run and read."""
    rows = "test rows dealt independently of training rows, as in the paper"
    parts = [rows if how.test_rows == "independent" else f"test rows {how.test_rows}, unlike the paper"]
    parts += ["the last round, as in the paper" if how.last == 1 else f"average of the last {how.last} evaluations"]
    if how.rounds:
        parts.append(f"{how.rounds:,} rounds, unlike the paper")
    for key, values in how.overrides.items():
        parts.append(f"{key}: " + ", ".join(f"{name}={value}" for name, value in values.items()))
    if how.tuned is not None:
        parts.append(
            "options that tuning chose on validation rows (results/tuned), for the nearest data, partition and method "
            "where there was no tuning for these, and the defaults where there was none near"
        )
    elif not how.overrides:
        parts.append("no option changed after validation")
    return "; ".join(parts)
