"""Run what the paper's tables need and the store lacks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...data.collection import find
from ...data.described import describe
from ...data.partition import federate
from ...data.source import Source, SourceError, arrays, digits
from ...engine.rounds import Listener, Silent
from ...errors import SpecError
from ...runs.settings import RUNTIME, SETTINGS
from ...schema import meant
from ..many import Share, carry_out
from .digest import digested
from .plan import PlannedRun, needed, store_file
from .protocol import PAPER, Protocol
from .tables import Labels

_CIFAR = {"cifar10": 10, "cifar100": 100}


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of the missing runs, see `many.Ended`; with reasons."""

    done: tuple[PlannedRun, ...]
    failed: tuple[tuple[PlannedRun, str], ...]
    refused: tuple[tuple[PlannedRun, str], ...]
    elsewhere: tuple[PlannedRun, ...]
    """Those that another process finished meanwhile, too."""
    left: tuple[PlannedRun, ...]


def run_missing(
    names: Sequence[str],
    store: str | Path,
    *,
    how: Protocol = PAPER,
    rows: Labels = None,
    columns: Labels = None,
    work: str | Path | None = None,
    keep: bool = False,
    retry: bool = False,
    jobs: int = 1,
    share: Share | None = None,
    until: float | None = None,
    listener: Listener | None = None,
    progress: Callable[[PlannedRun, int, int], None] | None = None,
    **runtime: Any,
) -> Outcome:
    """Run what the tables `names`, or these rows and columns of them, need and the store lacks.

    `how` is the protocol, `runtime` are settings of `RUNTIME`, device="cuda" for example; for the others see
    `many.carry_out`. The listener is told what goes wrong, of several runs at once too. Before anything is begun, data
    that are not there are told once, and their runs left out; where no run remains that is an error.
    """
    known = {key: SETTINGS[key] for key in RUNTIME}
    for key in runtime:
        if key not in known:
            raise SpecError(f"{key!r} cannot be set for the paper's runs as a whole; {meant(key, known)}")
    listener = listener or Silent()
    plan = needed(names, store, how=how, rows=rows, columns=columns, retry=retry, note=listener.note)
    ends: dict[str, list[tuple[PlannedRun, str]]] = defaultdict(list)
    absent = _absent(plan.missing, str(runtime.get("root", SETTINGS["root"].default)))
    ends["refused"] += [(one, absent[_read_by(one)]) for one in plan.missing if _read_by(one) in absent]
    if absent and len(ends["refused"]) == len(plan.missing):
        raise SourceError(" ".join(absent.values()))
    for data, why in absent.items():
        count = sum(_read_by(one) == data for one, _ in ends["refused"])
        listener.note(f"{count} of {len(plan.missing)} runs are left out: {why}")
    for ended in carry_out(
        {one: one.settings for one in plan.missing if _read_by(one) not in absent},
        partial(_carry, runtime),
        store=store_file(store, how.scale),
        scope=how.scale,
        work=work,
        keep=keep,
        retry=retry,
        jobs=jobs,
        share=share,
        until=until,
        device=str(runtime.get("device", "auto")),
        listener=listener,
        progress=progress,
    ):
        ends[ended.end].append((ended.key, str(ended.error or "")))
        if ended.error is not None:
            said = "failed" if ended.end == "failed" else "cannot be run"
            listener.note(f"{ended.key.cells[0]} {said}: {ended.error}")
    return Outcome(
        tuple(one for one, _ in ends["done"]),
        tuple(ends["failed"]),
        tuple(ends["refused"]),
        tuple(one for one, _ in ends["elsewhere"] + ends["stored"]),
        tuple(one for one, _ in ends["left"]),
    )


def _read_by(run: PlannedRun) -> str:
    """Return the data whose files a run reads; empty where it needs labels alone."""
    return str(run.settings["data"]) if "method" in run.settings else ""


def _absent(runs: Sequence[PlannedRun], root: str) -> dict[str, str]:
    """Return which data cannot be found below a folder, and why."""
    absent = {}
    for data in filter(None, dict.fromkeys(map(_read_by, runs))):
        try:
            find(data, root)
        except SourceError as error:
            absent[data] = str(error)
    return absent


def _carry(runtime: Mapping[str, Any], settings: dict[str, Any], folder: Path, listener: Listener) -> dict[str, Any]:
    """Carry out one run; see `many.Work`."""
    if "method" not in settings:
        return {"device": "cpu", "result": {"classes": _classes(settings)}}
    return digested(settings, folder, listener, where=runtime)


def _classes(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return how many classes a client has training rows of, which depends on labels alone: no images are needed."""
    who = {key: settings[key] for key in ("clients", "unseen", "seed")}
    classes = describe(federate(labels(settings["data"]), settings["partition"], **who))["train_classes"]
    return {key: round(classes[key], 6) for key in ("mean", "sd")}


def labels(data: str) -> Source:
    """Return CIFAR's labels without its images: as many of every class, 5 of 6 for training."""
    if data not in _CIFAR:
        return digits()
    num = _CIFAR[data]
    y = np.arange(60_000) % num
    test = np.arange(60_000) >= 50_000
    return arrays(np.zeros((60_000, 1), np.uint8), y, test=test, name=data, mean=[0.0], std=[1.0])
