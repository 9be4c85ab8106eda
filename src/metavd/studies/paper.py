"""The paper's tables beside ours: what is missing, running it, comparing, and the page that says so.

    cells -> plan -> run_missing -> store (JSON lines) -> table -> report

A run is named by what it computes (`identity`), so cells of several tables share it and nothing is run twice. Each
finished run is one line of the store; an interruption loses the run in flight, and not even that where it has a work
folder to go on from.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import stdtrit

from .. import methods
from ..core.types import NonFiniteError
from ..data.cohort import ParticipationError
from ..data.partition import TEST_ROWS, PartitionError, describe, federate
from ..data.source import Source, SourceError, arrays, digits
from ..engine.checkpoint import write_atomic
from ..engine.rounds import Listener, Silent
from ..evaluate.metrics import interval
from ..runs.provenance import provenance
from ..runs.run import run
from ..runs.settings import RUNTIME, Experiment, SpecError, nearest, with_settings
from ..runs.store import Store, StoreError
from .compare import value_at
from .side import jobs_for, side_by_side
from .tables import MEASURES, Cell, Figure, Table, cells, get, tables

SEED = 777
"""The paper's."""
LAST = 5
"""Evaluations in the average that is stored beside the last one."""
SCALES = ("full", "smoke")

_FIXED = frozenset({"method", "data", "partition", "test_rows", "seed", "content", "patience", *RUNTIME})
"""Fields that overrides may not change: what a cell is about, the protocol's own, and those that compute nothing."""
_REFUSED = (SpecError, StoreError, SourceError, PartitionError, ParticipationError, methods.MethodError)
_SMOKE_FIELDS = {"data": "digits", "model": "mlp", "width": 8, "clients": 4, "unseen": 2, "cohort": 2, "rounds": 2}
_SMOKE_OPTIONS = {
    "batch": 32, "local_epochs": 1, "hyper_width": 8, "drop_from": 1, "teachers": 2, "distill_steps": 4, "chains": 2,
    "sweeps": 1, "extra_points": 2,
}  # fmt: skip
_CIFAR = {"cifar10": 10, "cifar100": 100}
_CLIENTS_OF = {"test": ("test",), "unseen": ("unseen",), "gap": ("test", "unseen")}
"""Whose clients' noise a figure has."""
_NORMAL = 1.96
_ROUNDING = 0.00501
"""Half of the paper's last digit, and a little for the binary fraction."""


class PaperError(ValueError):
    """A request that cannot be met; the text says what would be right."""


def _quiet(*_: Any) -> None:
    """Tell nobody."""


@dataclass(frozen=True, eq=False)
class Protocol:
    """How the cells are run and read; `protocol` makes one and checks it. What is here is the paper's way."""

    scale: str = "full"
    """smoke: every cell on the digits that come with the installation, in two rounds; only to see that it works."""
    seeds: tuple[int, ...] = (SEED,)
    test_rows: str = "independent"
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings chosen by validation, by METHOD[@DATA[@PARTITION]]; * stands for every method or dataset."""
    last: int = 1
    """Evaluations that a figure is the average of: 1, the paper's, or `LAST`."""
    rounds: int = 0
    """Rounds of training; 0: as many as the paper's, 1,000."""


PAPER = Protocol()


def protocol(
    *,
    scale: str = "full",
    seeds: int | Sequence[int] = 1,
    test_rows: str = "independent",
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    last: int = 1,
    rounds: int = 0,
) -> Protocol:
    """Return a protocol, or say in one sentence what is wrong with it; `seeds` is how many from 777 on, or which."""
    if scale not in SCALES:
        raise PaperError(f"scale is {scale!r}; {nearest(scale, SCALES)}")
    if test_rows not in TEST_ROWS:
        raise PaperError(f"test_rows is {test_rows!r}; {nearest(test_rows, TEST_ROWS)}")
    if last not in {1, LAST}:
        raise PaperError(f"last is {last}, but must be 1 (the last evaluation) or {LAST} (the average of as many)")
    chosen = tuple(range(SEED, SEED + seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not chosen or len(set(chosen)) < len(chosen):
        raise PaperError(f"seeds is {seeds!r}, but must be a number from 1 on, or different seeds")
    for seed in chosen:
        with_settings(Experiment(), {"seed": seed})
    if rounds:
        with_settings(Experiment(), {"rounds": rounds})
    return Protocol(scale, chosen, test_rows, _checked(overrides or {}), last, rounds)


def overrides_from(path: Path) -> dict[str, dict[str, Any]]:
    """Read overrides from a TOML file: ["reptile+metavd@cifar100"] and settings below it."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise PaperError(f"cannot read the overrides {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PaperError(f"the overrides {path} are not TOML: {error}") from None
    for key, value in values.items():
        if not isinstance(value, dict):
            raise PaperError(f'{key} in {path} is {value!r}, but must be a table such as ["reptile+metavd"]')
    return values


def _checked(overrides: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    every = {name: option for method in methods.NAMES for name, option in methods.options_of(method).items()}
    names = {each.name for each in fields(Experiment)} - {"options"} - _FIXED
    result: dict[str, dict[str, Any]] = {}
    for key, values in overrides.items():
        method, *rest = key.split("@")
        if len(rest) > 2:
            raise PaperError(f"the overrides name {key!r}, but a name is METHOD, METHOD@DATA or METHOD@DATA@PARTITION")
        known = every if method == "*" else methods.options_of(method)
        canonical = "@".join(["*" if method == "*" else methods.check(method), *rest])
        result[canonical] = {}
        for name, value in values.items():
            if name in names:
                result[canonical][name] = getattr(with_settings(Experiment(), {name: value}), name)
            elif name in known:
                result[canonical][name] = known[name].check(value)
            else:
                raise PaperError(f"the overrides for {key} set {name!r}; {nearest(name, sorted(names | set(known)))}")
    return result


# --- what a run is ---------------------------------------------------------------------------------------------------


def settings_of(cell: Cell, seed: int = SEED, how: Protocol = PAPER) -> dict[str, Any]:
    """Return what is to be run for a cell: fields, and those options that are not left to their defaults."""
    settings = dict(cell.settings)
    if "method" not in settings:
        small = {key: value for key, value in _SMOKE_FIELDS.items() if key in settings and how.scale == "smoke"}
        return settings | small | {"seed": seed}
    settings |= {"test_rows": how.test_rows} | _chosen(settings, how.overrides)
    if how.scale == "smoke":
        settings = _smoke(settings)
    if how.rounds:
        settings["rounds"] = how.rounds
    return settings | {"seed": seed}


def _chosen(settings: Mapping[str, Any], overrides: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the overrides say of a run; where two speak of the same setting, the one that names more wins."""
    place = [settings["method"], settings["data"], settings["partition"]]
    options = methods.options_of(settings["method"])
    names = {each.name for each in fields(Experiment)}
    result: dict[str, Any] = {}
    for key in sorted(overrides, key=lambda key: sum(word != "*" for word in key.split("@"))):
        if all(word in {"*", own} for word, own in zip(key.split("@"), place, strict=False)):
            result |= {name: value for name, value in overrides[key].items() if name in options or name in names}
    return result


def _smoke(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same cell on digits, as small as its method can be; only the Dirichlet alpha is left of the data."""
    known = methods.options_of(settings["method"])
    kept = {key: value for key, value in settings.items() if key in {"method", "test_rows", "partition"} | set(known)}
    if kept["partition"] == "natural":
        kept["partition"] = "dirichlet:0.5"
    return kept | _SMOKE_FIELDS | {key: value for key, value in _SMOKE_OPTIONS.items() if key in known}


def _complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add every option's default, so that neither a dataset's presets nor a later change of a default goes unseen."""
    if "method" not in settings:
        return dict(settings)
    known = methods.options_of(settings["method"])
    given = {key: value for key, value in settings.items() if key in known}
    return {key: value for key, value in settings.items() if key not in known} | methods.resolve(
        settings["method"], given
    )


def identity(settings: Mapping[str, Any], scale: str = "full") -> str:
    """Return 16 hex digits that name what a run computes, and at what scale."""
    what = {"scale": scale, "settings": _complete(settings)}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


# --- the store -------------------------------------------------------------------------------------------------------


def store_file(store: str | Path, scale: str = "full") -> Path:
    """Return the file of a scale's lines; smoke runs have one of their own."""
    path = Path(store)
    return path if scale == "full" else path.with_name(f"{path.stem}.{scale}{path.suffix}")


def read(store: str | Path, scale: str = "full", note: Callable[[str], None] = _quiet) -> dict[str, dict[str, Any]]:
    """Return the lines of a scale by their run's identity, the latest of each; what is no line is noted and skipped."""
    path = store_file(store, scale)
    try:
        rows = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError as error:
        raise PaperError(f"cannot read the store {path}: {error.strerror}") from None
    lines: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(rows, 1):
        if not row.strip():
            continue
        try:
            line = json.loads(row)
            whole = line["scale"] == scale and ("failed" in line) != ("result" in line) and bool(line["settings"])
        except (ValueError, TypeError, KeyError):
            whole = False
        if whole:
            lines[line["id"]] = line
        else:
            note(f"line {number} of {path} is no whole result of scale {scale} and is left out")
    return lines


def append(store: str | Path, line: Mapping[str, Any]) -> None:
    """Add one line, safe on the disk when this returns; a line that a crash cut short before it stays by itself."""
    path = store_file(store, line["scale"])
    data = json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another's half-written line must not pass for a broken one
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
                data = data if file.read(1) == b"\n" else b"\n" + data
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise PaperError(f"cannot write to the store {path}: {error.strerror}") from None


# --- what is missing, and running it ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Run:
    """A run that one or more cells need."""

    id: str
    settings: Mapping[str, Any]
    cells: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """Runs by whether the store has them, seed by seed, so that an interruption leaves whole tables."""

    done: tuple[Run, ...]
    missing: tuple[Run, ...]


def plan(
    names: Sequence[str],
    store: str | Path,
    *,
    how: Protocol = PAPER,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    retry: bool = False,
    note: Callable[[str], None] = _quiet,
) -> Plan:
    """Say which runs the tables need and which the store lacks; `retry` counts those that failed as lacking."""
    chosen = [cell for name in names for cell in cells(name, rows, columns)]
    needed: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for seed in how.seeds:
        for cell in chosen:
            settings = settings_of(cell, seed, how)
            users = needed.setdefault(identity(settings, how.scale), (settings, []))[1]
            users.append(cell.name)
    lines = read(store, how.scale, note)
    runs = [Run(key, settings, tuple(users)) for key, (settings, users) in needed.items()]
    there = {key for key, line in lines.items() if not (retry and "failed" in line)}
    return Plan(tuple(run for run in runs if run.id in there), tuple(run for run in runs if run.id not in there))


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of the missing runs."""

    done: tuple[Run, ...]
    failed: tuple[tuple[Run, str], ...]
    """They diverged; the store says so, and they are not tried again unless asked for."""
    refused: tuple[tuple[Run, str], ...]
    """They could not be started, for want of data, say; nothing is stored."""
    elsewhere: tuple[Run, ...]
    """Another process is at them, or finished them meanwhile."""


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
    listener: Listener | None = None,
    progress: Callable[[Run, int, int], None] = _quiet,
    **runtime: Any,
) -> Outcome:
    """Run what the tables need and the store lacks, one after the other or several at once.

    Args:
        names: tables, such as ["T8"].
        store: file of JSON lines, see `store_file`.
        how: the protocol.
        rows: only these of each table.
        columns: only these of each table.
        work: folder in which a run can be interrupted and gone on with, and through which several processes share
            the work; without it a run that is stopped starts anew.
        keep: leave the folders of finished runs, with their clients' lines and checkpoints, in `work`.
        retry: also run again what failed.
        jobs: runs at once, each in a process of its own; 0: what suits the device, see `side`.
        listener: is told of every run's rounds, and of what goes wrong; of several at once only of the latter.
        progress: is told of each run before it starts (of several at once: when it ends), its number and how many
            there are.
        runtime: `RUNTIME` settings, device="cuda" for example.
    """
    for key in runtime:
        if key not in RUNTIME:
            raise PaperError(f"{key!r} cannot be set for the paper's runs as a whole; {nearest(key, sorted(RUNTIME))}")
    listener = listener or Silent()
    missing = plan(names, store, how=how, rows=rows, columns=columns, retry=retry, note=listener.note).missing
    at_once = jobs_for(str(runtime.get("device", "auto")), jobs)
    ends: dict[str, list[tuple[Run, str]]] = {"done": [], "failed": [], "refused": [], "elsewhere": []}

    def ended(one: Run, end: str, reason: str) -> None:
        ends[end].append((one, reason))
        if end in _SAID:
            listener.note(f"{one.cells[0]} {_SAID[end]}: {reason}")

    order = _Order(store, how.scale, work, keep, retry, runtime)
    if at_once == 1 or len(missing) < 2:
        for number, one in enumerate(missing, 1):
            start = partial(progress, one, number, len(missing))
            ended(one, *_attempt(one, order, listener, start))
    else:
        if missing and work is None:
            raise PaperError("several runs at once need a work folder, in which they find what the others do")
        ending = side_by_side(_attempt, [(one, order) for one in missing], at_once)
        for number, (place, (end, reason)) in enumerate(ending, 1):
            progress(missing[place], number, len(missing))
            ended(missing[place], end, reason)
    return Outcome(
        tuple(one for one, _ in ends["done"]),
        tuple(ends["failed"]),
        tuple(ends["refused"]),
        tuple(one for one, _ in ends["elsewhere"]),
    )


_SAID = {"failed": "failed", "refused": "cannot be run"}


@dataclass(frozen=True)
class _Order:
    """How runs are to be carried out, see `run_missing`."""

    store: str | Path
    scale: str
    work: str | Path | None
    keep: bool
    retry: bool
    runtime: Mapping[str, Any]


def _attempt(
    one: Run, order: _Order, listener: Listener | None = None, start: Callable[[], None] = _quiet
) -> tuple[str, str]:
    """Carry out one run and store it; say how that ended, and why where it did not end well."""
    store, scale, runtime = order.store, order.scale, order.runtime
    with _place(order.work, one.id) as folder:
        there = read(store, scale).get(one.id)
        if folder is None or (there is not None and not (order.retry and "failed" in there)):
            return "elsewhere", ""
        start()
        end, reason = "done", ""
        try:
            append(store, _line(one, scale, _result(one, folder, runtime, listener or Silent())))
        except NonFiniteError as error:
            append(store, _line(one, scale, {"failed": str(error), **_made_on(runtime)}))
            end, reason = "failed", str(error)
        except _REFUSED as error:
            return "refused", str(error)
        if not order.keep and folder.exists():
            shutil.rmtree(folder)
    return end, reason


@contextmanager
def _place(work: str | Path | None, name: str) -> Iterator[Path | None]:
    """Give a run its folder, or None where another process has it; a lock goes with its process, however that ends."""
    if work is None:
        with tempfile.TemporaryDirectory(prefix="metavd-paper-") as folder:
            yield Path(folder) / name
        return
    try:
        Path(work).mkdir(parents=True, exist_ok=True)
        file = (Path(work) / "claims").open("a+b")
    except OSError as error:
        raise PaperError(f"cannot write to the work folder {work}: {error.strerror}") from None
    with file:
        try:
            # One byte of one file stands for a run, so that no lock files are left behind.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(name[:8], 16))
        except OSError:
            free = False
        else:
            free = True
        yield Path(work) / name if free else None


def _result(one: Run, folder: Path, runtime: Mapping[str, Any], listener: Listener) -> dict[str, Any]:
    if "method" not in one.settings:
        return {"result": {"classes": _classes(one.settings)}, **_made_on({"device": "cpu"})}
    often = {"eval_every": max(1, one.settings["rounds"] // 20)}
    result = run(**_complete(one.settings), **(often | dict(runtime)), out=folder, resume=True, listener=listener)
    store = Store(folder)
    made_on = {key: result[key] for key in ("device", "precision", "machine", "commit", "spec")}
    versions = {"metavd": result["version"], "torch": result["torch"], "python": result["python"]}
    summary = _summary(result, store)
    return {**made_on, "versions": versions, "result": _rounded(summary)}


def _made_on(runtime: Mapping[str, Any]) -> dict[str, Any]:
    """Provenance of what has no result of a run to take it from."""
    device = str(runtime.get("device", "auto"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    about = provenance(device)
    versions = {"metavd": about["version"], "torch": about["torch"], "python": about["python"]}
    return {"device": device, "machine": about["machine"], "commit": about["commit"], "versions": versions}


def _line(one: Run, scale: str, content: Mapping[str, Any]) -> dict[str, Any]:
    head = {"id": one.id, "scale": scale, "seed": one.settings["seed"], "settings": dict(one.settings)}
    return {**head, **content}


def _classes(settings: Mapping[str, Any]) -> dict[str, float]:
    """How many classes a client has training rows of, which depends on the labels alone: no images are needed."""
    who = {key: settings[key] for key in ("clients", "unseen", "seed")}
    classes = describe(federate(labels(settings["data"]), settings["partition"], **who))["train_classes"]
    return {key: round(classes[key], 6) for key in ("mean", "sd")}


def labels(data: str) -> Source:
    """CIFAR's labels without its images: as many of every class, 5 of 6 for training."""
    if data not in _CIFAR:
        return digits()
    num = _CIFAR[data]
    y = np.arange(60_000) % num
    test = np.arange(60_000) >= 50_000
    return arrays(np.zeros((60_000, 1), np.uint8), y, test=test, name=data, mean=[0.0], std=[1.0])


# --- a run's result in a few hundred bytes ---------------------------------------------------------------------------


_KEPT = (
    "accuracy", "accuracy_pooled", "accuracy_uniform", "worst_client", "nll", "ece_top1", "ece_flat", "mce_top1",
    "mce_flat", "clients", "samples",
)  # fmt: skip


def _summary(result: Mapping[str, Any], store: Store) -> dict[str, Any]:
    parts = {part: {key: result[part][key] for key in _KEPT} for part in ("test", "unseen")}
    kept = {key: result[key] for key in ("gap", "sparsity", "bytes", "seconds", "domains") if key in result}
    if "valid" in result:
        kept["valid"] = {key: result["valid"][key] for key in ("accuracy", "nll")}
    evaluations = [line for line in store.read_rounds() if "test" in line and line["round"] < result["rounds"]]
    return {
        **parts,
        **kept,
        "model": result["model_sha256"][:12],
        "error": {part: _standard_error(result[part]) for part in ("test", "unseen")},
        "last": _average([*evaluations, dict(result) | {"round": result["rounds"]}][-LAST:]),
        "bins": _bins(store),
    }


def _bins(store: Store) -> dict[str, Any] | None:
    """Return the paper's reliability diagram of unseen clients: what its figures of calibration are drawn from."""
    try:
        unseen = json.loads(store.details.read_text())["reliability"]["unseen"]
    except (OSError, ValueError, KeyError):
        return None
    return unseen and {name: unseen["flat"][name] for name in ("count", "confidence", "accuracy")}


def _standard_error(part: Mapping[str, Any]) -> float | None:
    """Of the accuracy, over clients: what the width of its bootstrap interval would be for a normal distribution."""
    bounds = (part.get("intervals") or {}).get("accuracy")
    return None if bounds is None else (bounds[1] - bounds[0]) / (2 * _NORMAL)


def _average(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Average the figures of some evaluations, and say of which rounds."""
    mean: dict[str, Any] = {"rounds": [each["round"] for each in evaluations]}
    for measure in MEASURES.values():
        if measure.path == "classes.mean":
            continue
        values = [value_at(dict(each), measure.path) for each in evaluations]
        known = [value for value in values if value is not None]
        mean[measure.path] = sum(known) / len(known) if len(known) == len(values) else None
    return mean


def _rounded(value: Any) -> Any:
    """Six significant digits, and null for what is no number: the store holds summaries, not bits."""
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


# --- ours and theirs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """One figure of the paper and ours."""

    figure: Figure
    ours: float | None
    """Mean over seeds."""
    half: float | None
    """Half width of the 95 % interval of that mean; None with one seed."""
    sd: float | None
    """Over clients, where the paper gives one too."""
    difference: float | None
    beyond: bool | None
    """Whether the difference is beyond noise; None where that cannot be said."""
    basis: str
    """What the noise is known from: "3 seeds", "clients" or "one seed", where it is not known."""


@dataclass(frozen=True, eq=False)
class Answer:
    """A cell, and what our runs say to it."""

    cell: Cell
    figures: tuple[Compared, ...]
    seeds: tuple[int, ...]
    """That ran to the end."""
    failures: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class View:
    """A table of the paper with our answers."""

    table: Table
    how: Protocol
    answers: tuple[Answer, ...]
    lines: tuple[dict[str, Any], ...]
    """Of the store, that the answers come from."""


def table(
    name: str,
    store: str | Path,
    *,
    how: Protocol = PAPER,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    note: Callable[[str], None] = _quiet,
) -> View:
    """Set our figures beside the paper's.

    The paper has one run a cell, so the question is whether its number could be one more run of ours.
    With n > 1 seeds, mean m and standard deviation s, a difference is beyond noise where it is larger than

        t_{n-1, 0.975} s sqrt(1 + 1/n)          Student's interval for one more observation

    With one seed, accuracies and their gap are judged by the noise from having these clients and no others:

        1.96 sqrt(2) e,     e the bootstrap's standard error over clients (of the gap: of both, added in squares),

    the root of 2 because the paper's run has that noise too. This knows nothing of the noise of training, so with one
    seed "beyond" is a lead, and the other figures cannot be judged ("one seed"). A difference within the rounding of
    the paper's last digit is within noise whatever the rest. Smoke runs are not compared: they are of other data.
    """
    lines = read(store, how.scale, note)
    answers: list[Answer] = []
    used: dict[str, dict[str, Any]] = {}
    for cell in cells(name, rows, columns):
        own = [(seed, identity(settings_of(cell, seed, how), how.scale)) for seed in how.seeds]
        there = {seed: lines[key] for seed, key in own if key in lines}
        used |= {line["id"]: line for line in there.values()}
        results = {seed: line["result"] for seed, line in there.items() if "result" in line}
        compared = tuple(_compare(figure, list(results.values()), how) for figure in cell.figures)
        failures = tuple(f"seed {seed}: {line['failed']}" for seed, line in there.items() if "failed" in line)
        answers.append(Answer(cell, compared, tuple(results), failures))
    return View(get(name), how, tuple(answers), tuple(used.values()))


def _value(result: Mapping[str, Any], path: str, last: int) -> float | None:
    if last > 1 and "last" in result:
        value = result["last"][path]
        return None if value is None else float(value)
    return value_at(dict(result), path)


def _compare(figure: Figure, results: Sequence[Mapping[str, Any]], how: Protocol) -> Compared:
    measure = MEASURES[figure.name]
    values = [_value(result, measure.path, how.last) for result in results]
    known = [value * measure.factor for value in values if value is not None]
    if not known:
        return Compared(figure, None, None, None, None, None, "")
    mean, half = interval(known)
    sd = results[0]["classes"]["sd"] if figure.sd is not None and how.scale == "full" else None
    if how.scale == "smoke":
        return Compared(figure, mean, half, sd, None, None, "")
    difference = mean - figure.value
    margin, basis = _margin(figure.name, known, results[0])
    beyond = None if margin is None else abs(difference) > margin + _ROUNDING
    if abs(difference) <= _ROUNDING:
        beyond = False
    return Compared(figure, mean, half, sd, difference, beyond, basis)


def _margin(name: str, values: Sequence[float], result: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return how far one more run may lie from ours, and what says so; the rule is `table`'s."""
    count = len(values)
    if count > 1:
        spread = float(np.std(values, ddof=1))
        return float(stdtrit(count - 1, 0.975)) * spread * math.sqrt(1 + 1 / count), f"{count} seeds"
    noise = result.get("error", {})
    errors = [noise.get(part) for part in _CLIENTS_OF.get(name, ())]
    if not errors or None in errors:
        return None, "one seed"
    return _NORMAL * math.sqrt(2) * 100 * math.hypot(*errors), "clients"


# --- Markdown --------------------------------------------------------------------------------------------------------


def markdown(view: View) -> str:
    """Write one table as a section: a part a column, ours, the paper's and the difference for each figure."""
    shown, about = view.table, _Notes(view.table.name)
    text = [f"## {shown.name}. {shown.title}", "", f"{shown.place[0].upper()}{shown.place[1:]} of the paper."]
    text += [f"- {note[0].upper()}{note[1:]}." for note in shown.notes]
    if shown.notes:
        text.insert(3, "")
    for column in shown.columns:
        answers = [answer for answer in view.answers if answer.cell.column == column]
        if answers:
            text += ["", f"### {_heading(answers[0].cell, view.how)}", "", *_rows(answers, view, about)]
    text += ["", _origin(view.lines), *about.lines()]
    return "\n".join(text) + "\n"


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


def _rows(answers: Sequence[Answer], view: View, about: _Notes) -> list[str]:
    headings = [MEASURES[name].heading for name in view.table.figures]
    if view.how.scale == "full":
        headings = [text for heading in headings for text in (f"{heading}: ours", "paper", "difference")]
    lines = ["| | " + " | ".join(headings) + " | seeds |", "|---|" + "---:|" * (len(headings) + 1)]
    for answer in answers:
        label = answer.cell.row + "".join(about.mark(text) for text in view.table.doubts[answer.cell.row])
        parts: list[str] = []
        for each in answer.figures:
            parts += [_ours(each, answer)]
            parts += [_theirs(each.figure, about), _difference(each)] if view.how.scale == "full" else []
        failures = "".join(about.mark(f"failed, {text}") for text in answer.failures)
        count = f"{len(answer.seeds)} of {len(view.how.seeds)}{failures}"
        lines.append(f"| {label} | " + " | ".join(parts) + f" | {count} |")
    return lines


def _number(value: float, *, signed: bool) -> str:
    """Two decimals, and no minus before nothing."""
    return f"{round(value, 2) + 0.0:{'+' if signed else ''}.2f}"


def _ours(compared: Compared, answer: Answer) -> str:
    if compared.ours is None:
        return "no number" if answer.seeds else "failed" if answer.failures else "not run"
    half = "" if compared.half is None else f" ± {compared.half:.2f}"
    spread = "" if compared.sd is None else f" (sd {compared.sd:.2f})"
    return _number(compared.ours, signed=compared.figure.name == "gap") + half + spread


def _theirs(figure: Figure, about: _Notes) -> str:
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
    note: Callable[[str], None] = _quiet,
) -> str:
    """Return, and where a path is given write, the page of all tables (or those named) from the store alone.

    `pictures` are captions and files, relative to the page, that are shown at its end.
    """
    views = [table(name, store, how=how, note=note) for name in (tables() if names is None else names)]
    shown = ["## Figures\n\n" + "\n".join(f"![{caption}]({file})\n\n*{caption}.*\n" for caption, file in pictures)]
    text = "\n".join([_preface(views, how, command), *(markdown(view) for view in views), *(shown if pictures else [])])
    if path is not None:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(Path(path), text.encode())
        except OSError as error:
            raise PaperError(f"cannot write the report {path}: {error.strerror}") from None
    return text


def _preface(views: Sequence[View], how: Protocol, command: str) -> str:
    answers = [answer for view in views for answer in view.answers]
    needed = {identity(settings_of(answer.cell, seed, how), how.scale) for answer in answers for seed in how.seeds}
    lines = {line["id"]: line for view in views for line in view.lines}
    finished = sum("result" in line for line in lines.values())
    seeds = ", ".join(str(seed) for seed in how.seeds)
    failed = f", {len(lines) - finished} failed" if len(lines) > finished else ""
    text = [
        "# The paper's tables and ours" + (" (smoke runs)" if how.scale == "smoke" else ""),
        "",
        f'{finished} of {len(needed)} runs are done{failed}; cells without one say "not run". Ours is the mean over '
        f"seeds {seeds} ± the half width of its 95 % interval (Student's t), where there is more than one.",
        "",
    ]
    if how.scale == "smoke":
        text += ["These runs are of other data, two rounds and a tiny network: they show that every cell can be run, "
                 "and say nothing about the paper's numbers.", ""]  # fmt: skip
    else:
        text += [
            "The paper's figures are of one run each (seed 777), at the last round, without validation data; which "
            "hyper-parameters were chosen is not published. Its unseen clients come from the same distribution as the "
            "participating ones. Footnotes say what is doubtful about a number or a row; what they say of ours holds "
            "under our default rules, not under `variant=released`.",
            "",
            "A difference is ours less the paper's. **Bold**: beyond noise, by Student's interval for one more run "
            "where there are several seeds, and by a bootstrap over clients where there is one, which leaves out the "
            "noise of training and is a lead, no more. Plain: within it. (In brackets): one seed, noise unknown.",
            "",
        ]
    text += [f"Protocol: {_told(how)}."]
    if command:
        text += ["", f"Written by `{command}`."]
    return "\n".join(text) + "\n"


def _told(how: Protocol) -> str:
    rows = "test rows dealt independently of training rows, as in the paper"
    parts = [rows if how.test_rows == "independent" else f"test rows {how.test_rows}, unlike the paper"]
    parts += ["the last round, as in the paper" if how.last == 1 else f"average of the last {how.last} evaluations"]
    if how.rounds:
        parts.append(f"{how.rounds:,} rounds, unlike the paper")
    for key, values in how.overrides.items():
        parts.append(f"{key}: " + ", ".join(f"{name}={value}" for name, value in values.items()))
    if not how.overrides:
        parts.append("no option changed after validation")
    return "; ".join(parts)
