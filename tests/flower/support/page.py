"""The outcomes of a campaign: a line for each, a table by kind, and the page docs/faults.md."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from metavd.runs.provenance import commit

from .processes import LONG
from .rehearsal import BOUND, DEAD, FORGED, NAMELESS, Outcome

Line = Mapping[str, Any]
"""An outcome in plain values, so that it can travel with a test's report."""


def plain(outcome: Outcome) -> dict[str, Any]:
    """Return what the table needs of an outcome."""
    trial = outcome.trial
    return {
        "kind": trial.fault.kind, "name": trial.fault.name, "struck": outcome.struck, "hang": outcome.hang,
        "wrong_model": outcome.wrong_model, "lost_rounds": outcome.lost_rounds, "complaints": outcome.complaints,
        "seconds": outcome.seconds,
    }  # fmt: skip


def table(lines: Sequence[Line]) -> str:
    """Return the counts by kind."""
    kinds = (FORGED, DEAD, NAMELESS)
    heads = ["kind", "faults", "variants", "hangs", "wrong models", "lost rounds", *kinds, "others", "longest"]
    rows = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for kind in [*dict.fromkeys(each["kind"] for each in lines), ""]:
        mine = [each for each in lines if not kind or each["kind"] == kind]
        complaints = [text for each in mine for text in each["complaints"] or ([] if each["struck"] else ["no strike"])]
        counts = [sum(text.startswith(kind) for text in complaints) for kind in kinds]
        rows.append(
            f"| {kind or '**all**'} | {sum(each['struck'] for each in mine)} "
            f"| {len({(each['kind'], each['name']) for each in mine})} "
            f"| {sum(each['hang'] for each in mine)} | {sum(each['wrong_model'] for each in mine)} "
            f"| {sum(each['lost_rounds'] for each in mine)} "
            f"| {' | '.join(map(str, [*counts, len(complaints) - sum(counts)]))} "
            f"| {max(each['seconds'] for each in mine):.1f} s |"
        )
    return "\n".join(rows)


def page(lines: Sequence[Line], command: str, seconds: float) -> str:
    """Return docs/faults.md."""
    processes = sum(each["name"].endswith("(processes)") for each in lines)
    kinds = dict.fromkeys(each["kind"] for each in lines)
    variants = [
        f"| {kind} | {'; '.join(dict.fromkeys(each['name'] for each in lines if each['kind'] == kind))} |"
        for kind in kinds
    ]
    return "\n".join([
        "# Faults", "",
        "What a federation does when clients lie, fail or vanish, and when its own server does. The campaign of faults",
        "writes this page itself:", "",
        f"    {command}", "",
        f"Commit {commit()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"flwr {importlib.metadata.version('flwr')}, {os.cpu_count()} CPU cores, {platform.system()}; "
        f"{seconds / 60:.0f} minutes.", "",
        "Every fault strikes a federation of its own. The model at the end must have the bits of the simulator's, run",
        "without the answers that did not count; a start of a run must end by itself; after a crash the run, started",
        "again, must go on at the round that was in flight; every round must be on record once, with the refused or",
        f"lost client's name and the reason. {processes} faults struck real SuperLinks, SuperNodes and ServerApps",
        "with TLS and authentication; the others a federation in one process, where a grid stands for Flower's",
        "transport and everything else is what is deployed. Which round a signal hits is chance, so with processes the",
        "absent client is read from the record, and there may be one at most; a node that ends is started again after",
        "five seconds, as its supervisor would, and `metavd federate run` must answer 0 for a finished run and 1 for",
        "any other. In one process, to be killed is an exception that nobody catches. A start hangs if it lasts",
        f"{BOUND:.0f} s in one process, {LONG:.0f} s with processes.", "",
        "Of every run that finishes, the files hold neither NaN nor infinity, the figures lie in their ranges, and",
        "where everybody took part in all rounds they are, client by client, those of a run that nothing happened",
        "to; otherwise they count as forged. The audit log verifies. A damaged file of a stopped run is refused by its",
        "name, and the run goes on once it is put back, or goes on at once to the same model. A site that lies about",
        "its rows is left out by name and reason, and the model is that of the others.", "",
        table(lines), "", "A fault that did not strike, or was not on record as it must be, is among the others.",
        "", "## What was injected", "", "| kind | variants |", "|---|---|", *variants, "",
        "The short form, one fault of every kind, is `tests/flower/test_faults.py`.", "",
    ])  # fmt: skip
