"""Run what the paper's tables need and the store lacks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...data.described import describe
from ...data.partition import federate
from ...data.source import Source, arrays, digits
from ...engine.rounds import Listener, Silent
from ...errors import SpecError
from ...runs.settings import RUNTIME
from ...schema import nearest
from ..many import Share, carry_out
from .digest import digested
from .plan import Run, needed, store_file
from .protocol import PAPER, Protocol

_CIFAR = {"cifar10": 10, "cifar100": 100}


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of the missing runs."""

    done: tuple[Run, ...]
    failed: tuple[tuple[Run, str], ...]
    """They diverged; the store says so, and they are not tried again unless asked for."""
    refused: tuple[tuple[Run, str], ...]
    """They could not be started, because data is missing, for example; nothing is stored."""
    elsewhere: tuple[Run, ...]
    """Another process is at them, or finished them meanwhile."""
    left: tuple[Run, ...]
    """There was no time for them."""


def run_missing(
    names: Sequence[str],
    store: str | Path,
    *,
    how: Protocol = PAPER,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    work: str | Path | None = None,
    keep: bool = False,
    retry: bool = False,
    jobs: int = 1,
    share: Share | None = None,
    until: float | None = None,
    listener: Listener | None = None,
    progress: Callable[[Run, int, int], None] | None = None,
    **runtime: Any,
) -> Outcome:
    """Run what the tables need and the store lacks, one after the other or several at once.

    Args:
        names: tables, such as ["T8"].
        store: file of JSON lines, see `plan.store_file`.
        how: the protocol.
        rows: only these of each table.
        columns: only these of each table.
        work: folder in which a run can be interrupted and continued, see `many.carry_out`.
        keep: leave the folders of finished runs, with their clients' lines and checkpoints, in `work`.
        retry: also run again what failed.
        jobs: runs at once, each in a process of its own; 0: what suits the device.
        share: the part of what is missing that is run here; None: all.
        until: when all must be over, see `many.carry_out`.
        listener: is told of every run's rounds, and of what goes wrong; of several at once only of the latter.
        progress: is told of each run before it starts (of several at once: when it ends), its number and how many
            there are.
        runtime: `RUNTIME` settings, device="cuda" for example.
    """
    for key in runtime:
        if key not in RUNTIME:
            raise SpecError(f"{key!r} cannot be set for the paper's runs as a whole; {nearest(key, sorted(RUNTIME))}")
    listener = listener or Silent()
    plan = needed(names, store, how=how, rows=rows, columns=columns, retry=retry, note=listener.note)
    runs = {one.id: one for one in plan.missing}
    ends: dict[str, list[tuple[Run, str]]] = defaultdict(list)
    for ended in carry_out(
        {name: one.settings for name, one in runs.items()},
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
        progress=None if progress is None else lambda key, number, total: progress(runs[key], number, total),
    ):
        ends[ended.end].append((runs[ended.key], str(ended.error or "")))
        if ended.error is not None:
            said = "failed" if ended.end == "failed" else "cannot be run"
            listener.note(f"{runs[ended.key].cells[0]} {said}: {ended.error}")
    return Outcome(
        tuple(one for one, _ in ends["done"]),
        tuple(ends["failed"]),
        tuple(ends["refused"]),
        tuple(one for one, _ in ends["elsewhere"] + ends["stored"]),
        tuple(one for one, _ in ends["left"]),
    )


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
