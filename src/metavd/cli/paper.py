"""metavd paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ..errors import UserError
from . import later
from .terminal import COUNT, PLACE, Reporter, command_line, many, print_table, tuned, tuned_folder

STORE = "results/paper.jsonl"
PAGES = {"report": "docs/paper.md", "claims": "docs/claims.md"}


def _list(text: str | None) -> list[str] | None:
    return [word.strip() for word in text.split(",")] if text else None


@click.command("paper")
@click.argument("what", nargs=-1, required=True, metavar="list | report | claims | all | T1...T17 | A1... | M4...")
@click.option("--rows", metavar="A,B",
              help="Only these rows, such as FedAvg,Reptile; of several tables, each those that it has.")  # fmt: skip
@click.option("--columns", metavar="A,B", help="Only these columns; metavd paper list T8 shows them.")
@click.option("--seeds", type=COUNT, default=1, help="Seeds from 777 on.")
@click.option("--rounds", type=int, default=0, show_default=False, metavar="N",
              help="Rounds of training. [default: the paper's 1000]")  # fmt: skip
@click.option("--scale", default="full", metavar="full|smoke",
              help="smoke: every cell in seconds on embedded data, to see that it works.")  # fmt: skip
@click.option("--test-rows", default="independent", metavar="HOW",
              help="How test rows are dealt: independent (the paper's), consistent, uniform.")  # fmt: skip
@click.option("--last", type=int, default=1, metavar="1|5", help="Evaluations averaged at the end.")
@click.option("--overrides", type=PLACE, metavar="F.toml", help="Options that validation chose, a table per method.")
@tuned
@click.option("--store", default=STORE, type=PLACE, metavar="F", help="Finished runs.")
@click.option("--work", default="runs/paper", type=PLACE, metavar="DIR",
              help="Where runs in progress live; several processes may share it.")  # fmt: skip
@click.option("--keep", is_flag=True, help="Keep the folders of finished runs there.")
@click.option("--retry", is_flag=True, help="Repeat runs that diverged.")
@many
@click.option("--plan", "plan_only", is_flag=True, help="Say what would be run, and run nothing.")
@click.option("--out", type=PLACE, metavar="F.md",
              help="Page of the report or the claims. [default: docs/paper.md, docs/claims.md]")  # fmt: skip
@click.option("--root", envvar="METAVD_DATA", metavar="DIR", help="Folder with the datasets' files.")
@click.option("--device", metavar="D", help="auto, cpu or cuda. [default: auto]")
def paper_command(
    *, what: tuple[str, ...], rows: str | None, columns: str | None, seeds: int, rounds: int, scale: str,
    test_rows: str, last: int, overrides: str | None, tuned: bool, tuned_from: str | None, store: str, work: str,
    keep: bool, retry: bool, jobs: int,
    share: later.studies_many.Share | None, until: float | None, plan_only: bool, out: str | None, **runtime: Any,
) -> None:  # fmt: skip
    """Run what the paper's tables need, and set ours beside theirs.

    \b
    metavd paper list               every table, and how much of it is done
    metavd paper T8 --rows FedAvg   run what is missing of a table, print ours, theirs and the difference
    metavd paper report             write docs/paper.md from the finished runs
    metavd paper claims             write docs/claims.md: what the paper claims, and what the runs say to it

    M4, M5, M10, M14 and M15 are the tables of FEMNIST, which could not be had, on MNIST by writer; A1 to A4 are ours.

    Finished runs are kept one by one, so that any part may be run in any order and after any interruption.
    """  # noqa: D301 - click reads the backspace as "keep these lines"
    chosen = later.paper_protocol.overrides_from(Path(overrides)) if overrides else None
    how = later.paper_protocol.protocol(
        scale=scale, seeds=seeds, test_rows=test_rows, overrides=chosen, last=last, rounds=rounds,
        tuned=tuned_folder(tuned=tuned, tuned_from=tuned_from),
    )  # fmt: skip
    action = what[0] if what[0] in {"list", *PAGES} else ""
    page = Path(out or PAGES.get(action, ""))
    names = list(what[1:] if action else what)
    everything = names == ["all"] or (action and not names)
    every = [*later.paper_tables.tables(), *later.paper_tables.extras()]
    names = every if everything else [later.paper_tables.get(name).name for name in names]
    reporter = Reporter()
    if action == "list":
        _print_list(names, store, how, reporter, in_full=len(what) > 1)
        return
    if action == "report":
        _report(names, store, how, page, reporter)
        return
    if action == "claims":
        later.studies_markdown.write(page, later.paper_claims.page(store, how, command_line()))
        click.echo(f"Written: {page}")
        return
    part: dict[str, Any] = {"how": how, "rows": _list(rows), "columns": _list(columns)}
    for text in later.paper_plan.tuned_told(names, **part):
        reporter.note(text)
    if plan_only:
        _print_plan(later.paper_plan.needed(names, store, retry=retry, note=reporter.note, **part))
        return
    _run(names, store, part, reporter, work=work, keep=keep, retry=retry, jobs=jobs, share=share,
         until=until, runtime=runtime)  # fmt: skip
    for name, (some_rows, some_columns) in later.paper_tables.within(names, part["rows"], part["columns"]).items():
        _print_view(later.paper_statistics.table(name, store, how=how, rows=some_rows, columns=some_columns))
    click.echo(f"Finished runs: {later.paper_plan.store_file(store, scale)}")


def _report(
    names: Sequence[str], store: str, how: later.paper_protocol.Protocol, out: Path, reporter: Reporter
) -> None:
    views = [later.paper_statistics.table(name, store, how=how) for name in names]
    folder = out.with_name(f"{out.stem}_files")
    pictures = [
        (caption, f"{folder.name}/{path.name}") for caption, path in later.report_paper.draw_paper(views, folder)
    ]
    later.paper_page.report(
        store, out, names=names, how=how, command=command_line(), pictures=pictures, note=reporter.note
    )
    click.echo(f"Written: {out}" + (f", and figures in {folder}" if pictures else ""))


def _run(
    names: Sequence[str], store: str, part: dict[str, Any], reporter: Reporter, *, runtime: dict[str, Any], **how: Any
) -> None:
    def progress(run: later.paper_plan.PlannedRun, number: int, total: int) -> None:
        reporter.stop()
        reporter.note(f"{number} of {total}: {', '.join(run.cells)}")

    given = {key: value for key, value in runtime.items() if value is not None}
    with reporter:
        outcome = later.paper_carry.run_missing(
            names, store, listener=reporter, progress=progress, **part, **how, **given
        )
    if outcome.left:
        reporter.note(f"{len(outcome.left)} runs were not begun, for want of time; the same command goes on with them")
    if outcome.refused and not outcome.done and len(outcome.refused) == len(outcome.refused + outcome.elsewhere):
        raise UserError(f"none of the {len(outcome.refused)} runs could be begun, for what is said above")


def _print_list(
    names: Sequence[str], store: str, how: later.paper_protocol.Protocol, reporter: Reporter, *, in_full: bool
) -> None:
    rows = []
    for name in names:
        shown = later.paper_tables.get(name)
        plan = later.paper_plan.needed([name], store, how=how, note=reporter.note)
        about = shown.title
        if in_full:
            about += f"\nrows: {', '.join(shown.rows)}\ncolumns: {', '.join(shown.columns)}"
        done, missing = len(plan.done), len(plan.missing)
        rows.append((name, about, str(len(later.paper_tables.cells(name))), f"{done} of {done + missing}"))
    print_table(("table", "what it is", "cells", "runs done"), rows)


def _print_plan(plan: later.paper_plan.Needed) -> None:
    for run in plan.missing:
        what = run.settings.get("method", "no training")
        file = run.settings.get(later.studies_tuned.KEY)
        source = "" if file is None else f", from {file}"
        click.echo(f"{what}, seed {run.settings['seed']}: {', '.join(run.cells)}{source}")
    click.echo(f"{len(plan.missing)} runs are missing, {len(plan.done)} are done.")


def _print_view(view: later.paper_statistics.View) -> None:
    headings = [""]
    for figure in view.table.figures:
        headings += [later.paper_tables.MEASURES[figure].title, *(("paper", "difference") if view.beside else ())]
    for column in dict.fromkeys(answer.cell.column for answer in view.answers):
        there = (answer for answer in view.answers if answer.cell.column == column)
        rows = ([answer.cell.row, *_cells(answer, view), str(len(answer.seeds))] for answer in there)
        title = f"{view.table.name}, {column}: {view.table.title}"
        print_table([*headings, "seeds"], rows, title=title, numbers=1)
    if view.beside:
        click.echo(
            "* beyond noise, by the seeds' spread or, with one seed, by a bootstrap over clients; ? noise unknown"
        )


def _cells(answer: later.paper_statistics.Measured, view: later.paper_statistics.View) -> list[str]:
    texts = []
    for each in answer.figures:
        texts.append(_ours(each, answer))
        if view.beside:
            mark = "!" if each.figure.mark else ""
            sign = {True: " *", False: "", None: " ?"}[each.beyond]
            texts += [
                f"{each.figure.value:.2f}{mark}",
                "" if each.difference is None else f"{each.difference:+.2f}{sign}",
            ]
    return texts


def _ours(each: later.paper_statistics.Compared, answer: later.paper_statistics.Measured) -> str:
    if each.ours is None:
        return "failed" if answer.failures else "not run"
    return f"{each.ours:.2f}" + ("" if each.half is None else f" ± {each.half:.2f}")
