#!/usr/bin/env python3
"""Inject faults into federations, and compare their models with those of runs without the clients that failed.

    scripts/faults.py --repeats 2 --processes 10 --page docs/faults.md      the whole campaign, half an hour
    scripts/faults.py --brief                                               one fault of every kind, a minute

Every fault has a federation of its own: four clients, three rounds or more, real digits. Most federations live in this
process: the ServerApp, the ClientApp and all their files are the real ones, and a grid stands where Flower carries
messages, and does to them, and to the server, what the fault says. With --processes, federations of real SuperLinks
and SuperNodes with TLS and authentication follow, whose processes are killed, frozen or cut off.

What must hold, of every fault:

    no hang       a start of the run ends, by itself, within a bound; after a crash it is started again
    right model   the final state has the bits of the simulator's, whose rounds lack the clients that failed there
    no lost round a started run goes on at the round that was in flight, or after it, and every round is on record once
    named         a refused or lost client and the reason stand in the record of the round

Exit status 1 if anything else happens.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import platform
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from campaign import answers, edges, misfortunes, waits
from campaign.processes import LONG, PROCESSES, perform
from campaign.rehearsal import BOUND, Outcome, can_mount, good, rehearse, trials

from metavd.runs.provenance import commit

FAULTS = [*answers.REPLIES, *waits.WAITS, *misfortunes.SERVER, *edges.OTHERS]


def tell(outcome: Outcome) -> None:
    """Print a line about a fault."""
    trial, bad = outcome.trial, []
    bad += ["did not strike"] if not outcome.struck else []
    bad += ["HANG"] if outcome.hang else []
    bad += ["WRONG MODEL"] if outcome.wrong_model else []
    bad += [f"{outcome.lost_rounds} ROUNDS LOST"] if outcome.lost_rounds else []
    what = "; ".join([*bad, *outcome.complaints]) or "as without it"
    where = f"{trial.method}, round {trial.round}" + (f", client {trial.client}" if trial.client >= 0 else "")
    print(f"{trial.fault.kind}: {trial.fault.name} ({where}, {outcome.seconds:.1f} s): {what}", flush=True)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the figures by kind."""
    lines = ["| kind | faults | variants | hangs | wrong models | lost rounds | other complaints | longest |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    kinds = list(dict.fromkeys(each.trial.fault.kind for each in outcomes))
    for kind in [*kinds, ""]:
        mine = [each for each in outcomes if not kind or each.trial.fault.kind == kind]
        lines.append(
            f"| {kind or '**all**'} | {sum(each.struck for each in mine)} "
            f"| {len({(each.trial.fault.kind, each.trial.fault.name) for each in mine})} "
            f"| {sum(each.hang for each in mine)} | {sum(each.wrong_model for each in mine)} "
            f"| {sum(each.lost_rounds for each in mine)} "
            f"| {sum(bool(each.complaints) or not each.struck for each in mine)} "
            f"| {max(each.seconds for each in mine):.1f} s |"
        )
    return "\n".join(lines)


def page(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Return docs/faults.md."""
    processes = [each for each in outcomes if each.trial.fault.name.endswith("(processes)")]
    variants = "\n".join(
        f"| {kind} | {'; '.join(dict.fromkeys(e.trial.fault.name for e in outcomes if e.trial.fault.kind == kind))} |"
        for kind in dict.fromkeys(each.trial.fault.kind for each in outcomes)
    )
    return "\n".join([
        "# Faults", "",
        "What a federation does when clients lie, fail or vanish, and when its own server does. This page is written",
        "by the campaign itself:", "",
        f"    {' '.join(['scripts/faults.py', *sys.argv[1:]])}", "",
        f"Commit {commit()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"flwr {importlib.metadata.version('flwr')}, {os.cpu_count()} CPU cores, {platform.system()}; "
        f"{seconds / 60:.0f} minutes.", "",
        "Every fault strikes a federation of its own. The model at the end must have the bits of the simulator's, run",
        "without the answers that did not count; a start of a run must end by itself; after a crash the run, started",
        "again, must go on at the round that was in flight; every round must be on record once, with the refused or",
        f"lost client's name and the reason. {len(processes)} faults struck real SuperLinks, SuperNodes and ServerApps",
        "with TLS and authentication; the others a federation in one process, where a grid stands for Flower's",
        "transport and everything else is what is deployed. Which round a signal hits is chance, so with processes the",
        "absent client is read from the record, and there may be one at most; a node that ends is started again after",
        "five seconds, as its supervisor would. In one process, to be killed is an exception that nobody catches. A",
        f"start hangs if it lasts {BOUND:.0f} s in one process, {LONG:.0f} s with processes.", "",
        table(outcomes), "", "A fault that did not strike, or was not on record as it must be, is another complaint.",
        "", "## What was injected", "", "| kind | variants |", "|---|---|", variants, "",
        "The short form, one fault of every kind, is `tests/flower/test_faults.py`.", "",
    ])  # fmt: skip


def main() -> int:
    """Run the campaign; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1, help="times that every fault strikes in this process")
    parser.add_argument("--processes", type=int, default=0, help="faults that strike real processes")
    parser.add_argument("--seed", type=int, default=0, help="of where faults strike, and of the runs")
    parser.add_argument("--brief", action="store_true", help="one variant of each kind")
    parser.add_argument("--only", default="", help="faults whose kind or name holds this text")
    parser.add_argument("--page", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    faults = [fault for fault in FAULTS if chosen.only in f"{fault.kind}: {fault.name}"]
    if not can_mount():
        faults = [fault for fault in faults if "tmpfs" not in dict(fault.config)]
        print("a small file system cannot be mounted here; full disks are played by failing writes alone")
    if chosen.brief:
        draw = random.Random(chosen.seed)
        kinds = dict.fromkeys(fault.kind for fault in faults)
        faults = [draw.choice([fault for fault in faults if fault.kind == kind]) for kind in kinds]
    print(f"commit {commit()}", flush=True)  # of the files that are loaded now
    began, outcomes = time.monotonic(), []
    for trial in trials(chosen.repeats, chosen.seed, faults):
        outcomes.append(rehearse(trial))
        tell(outcomes[-1])
    named = [each for each in PROCESSES if chosen.only in f"{each[0]}: {each[1]}"]
    for number in range(chosen.processes if named else 0):
        kind, name, strike = named[number % len(named)]
        outcomes.append(perform(kind, name, strike, chosen.seed + number))
        tell(outcomes[-1])
    if not outcomes:
        parser.error(f"no fault is named {chosen.only!r}")
    print(table(outcomes))
    if chosen.page:
        chosen.page.write_text(page(outcomes, time.monotonic() - began))
    return int(not all(map(good, outcomes)))


if __name__ == "__main__":
    sys.exit(main())
