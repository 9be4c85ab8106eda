"""Search for good hyper-parameters with Optuna: what is tried, what it scores, and a study that survives being killed.

    plan -> claim a trial -> curve (train, look at validation rows) -> tell -> trials.json, best.toml

A trial is trained with validation rows held out and scored on those alone. Before training, `partition.sealed` takes
test rows and unseen clients out of the federation, so that nobody holds the number of such a row.

A study is a folder:

study.db           all trials, Optuna's own SQLite file
best.toml          the best configuration so far, complete; `metavd run --config` takes it
trials.json        the history as plain data
importance.json    which setting mattered how much; there once a command has come to its end
.lock              byte n is held by the process that runs trial n, `_CLAIM` by the one that chooses a trial

The kernel gives a dead process's bytes free, so that a trial whose process was killed is known at once, without
heartbeats and waiting, and is run again with the same settings. Optuna is imported where it is first needed: it is an
extra, and everything else works without it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import multiprocessing
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch

from .. import methods
from ..container import write_atomic
from ..core.types import NonFiniteError, ServerState
from ..data.collection import Collection
from ..engine.rounds import InterruptedRun
from ..errors import SpecError, UserError
from ..runs.run import (
    Data,
    Setup,
    complete,
    data_of,
    evaluate_valid,
    prepare,
    rounds_of,
    start,
    using,
    validation_clients,
)
from ..runs.settings import RUNTIME, Experiment, content, to_toml, with_settings
from ..schema import Value, nearest
from .side import jobs_for, sharing

if TYPE_CHECKING:
    import optuna

METRICS = {"nll": "minimize", "accuracy": "maximize"}
"""What a trial may be judged by, on validation rows, and which way is better."""
SAMPLERS = ("tpe", "random")
BY = ("rows", "clients")
"""Validate on held-out rows of the clients that train, or on clients that do not."""
VALID = 0.2
"""Share held out where none is asked for."""
FIELDS = ("cohort", "model", "width")
"""Fields that may be searched. The others say what the task is; trials with different ones cannot be compared."""

_NOT_SEARCHED = frozenset({"server_share"})
"""Options that decide who holds which row."""
_NAME = "metavd"
_CLAIM = 1 << 40
_TRIES = 5
"""How often a trial is begun whose process always dies, perhaps because of it."""
_PATIENCE = 100.0
"""Seconds that a process waits for another one's write to the database."""
_LOOK = 0.5
"""Seconds between looks at what other processes have finished."""
_STATES = {"COMPLETE": "finished", "PRUNED": "stopped", "FAIL": "failed", "RUNNING": "running"}
_DIED = "its process ended before it did"
_HOPELESS = (
    NonFiniteError,
    torch.OutOfMemoryError,
    SpecError,
)
"""What ends a trial and not the study: it diverged, does not fit, or its values do not go together."""


class TuneError(UserError):
    """A study that cannot be made or continued; the text says what would be right."""


@dataclass(frozen=True)
class Dimension:
    """One searched setting: a list of values, or a range."""

    name: str
    values: tuple[Value, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def __str__(self) -> str:
        if self.values:
            return ",".join(map(str, self.values))
        return f"{self.low}..{self.high}{':log' if self.log else ''}"


@dataclass(frozen=True)
class Plan:
    """What is searched and how it is judged; `plan` makes one and checks it."""

    experiment: Experiment
    """All that is fixed; the rest is resolved for each trial."""
    space: tuple[Dimension, ...]
    seeds: int = 1
    metric: str = "nll"
    by: str = "rows"
    sampler: str = "tpe"
    prune: bool = True


class Watcher(Protocol):
    """Whoever wants to know how a study goes on."""

    def start(self, plan: Plan, rounds: int, done: int, total: int) -> None:
        """A study of so many trials begins, or goes on with `done` of them behind it."""

    def step(self, number: int, round: int, value: float) -> None:
        """A trial was looked at; not told of trials in other processes."""

    def trial(self, line: Mapping[str, Any]) -> None:
        """A trial is over; `line` is its entry in trials.json."""

    def note(self, text: str) -> None:
        """Something happened that a person should know."""


class Unwatched:
    """A watcher that does not watch."""

    def start(self, plan: Plan, rounds: int, done: int, total: int) -> None: ...  # noqa: D102
    def step(self, number: int, round: int, value: float) -> None: ...  # noqa: D102
    def trial(self, line: Mapping[str, Any]) -> None: ...  # noqa: D102
    def note(self, text: str) -> None: ...  # noqa: D102


# --- what is searched ------------------------------------------------------------------------------------------------


def plan(
    experiment: Experiment,
    search: Mapping[str, str] | None = None,
    *,
    seeds: int = 1,
    metric: str = "nll",
    by: str = "rows",
    sampler: str = "tpe",
    prune: bool = True,
) -> Plan:
    """Return what a study shall do, or say in one sentence what is wrong with it.

    Args:
        experiment: the method, the data and all that is fixed. Options that it sets leave the paper's search space.
        search: setting -> "LOW..HIGH", "LOW..HIGH:log" or "A,B,C"; changes the paper's space or adds to it.
        seeds: how many seeds, from the experiment's on, a trial is averaged over; each has its own partition.
        metric: "nll" or "accuracy", of the validation rows.
        by: "rows" scores the participating clients, "clients" some that are taken out of training.
        sampler: "tpe" learns from earlier trials, "random" does not.
        prune: stop a trial that is worse than the median of the finished ones at the same round.
    """
    for name, value, known in (("metric", metric, tuple(METRICS)), ("by", by, BY), ("sampler", sampler, SAMPLERS)):
        if value not in known:
            raise TuneError(f"{name} is {value!r}; {nearest(str(value), known)}")
    if seeds < 1:
        raise TuneError(f"seeds is {seeds}, but must be at least 1")
    if experiment.patience:
        raise TuneError(
            f"patience is {experiment.patience}, but a trial is scored after all its rounds; leave it out here, and "
            "set it when you run the best configuration"
        )
    experiment = replace(experiment, valid=experiment.valid or VALID)
    with_settings(experiment, {"seed": experiment.seed + seeds - 1})
    found = {
        option.name: Dimension(option.name, option.search)
        for option in methods.options_of(experiment.method).values()
        if option.search and option.name not in experiment.options
    }
    found |= {name: dimension(experiment, name, text) for name, text in (search or {}).items()}
    if not found:
        raise TuneError(
            f"nothing is left to search for {experiment.method}: every setting of the paper's space is fixed; name one "
            "with --search, for example --search lr=0.001..0.1:log"
        )
    return Plan(experiment, tuple(found.values()), seeds, metric, by, sampler, prune)


def dimension(experiment: Experiment, name: str, text: str) -> Dimension:
    """Read what is to be searched: LOW..HIGH, LOW..HIGH:log, or A,B,C.

    >>> dimension(Experiment(), "lr", "0.001..0.1:log")
    Dimension(name='lr', values=(), low=0.001, high=0.1, log=True)
    """
    options = set(methods.options_of(experiment.method)) - _NOT_SEARCHED
    if name not in options and name not in FIELDS:
        if name in _NOT_SEARCHED or name in {each.name for each in fields(Experiment)}:
            raise TuneError(
                f"{name} cannot be searched, because trials that differ in it cannot be compared; fix it with --set"
            )
        close = nearest(name, sorted(options | set(FIELDS)))
        raise TuneError(f"there is no setting {name!r} to search for {experiment.method}; {close}")

    def typed(word: str) -> Any:
        checked = with_settings(experiment, {name: word.strip()})
        return checked.options[name] if name in options else getattr(checked, name)

    low, dots, rest = text.partition("..")
    if not dots:
        values = tuple(typed(word) for word in text.split(","))
        if len(set(values)) < max(2, len(values)):
            raise TuneError(
                f"--search {name}={text} must name at least two values, each once; --set fixes a setting at one value"
            )
        return Dimension(name, values)
    high, colon, scale = rest.partition(":")
    ends = (typed(low), typed(high))
    if (colon and scale != "log") or isinstance(ends[0], str | bool) or type(ends[0]) is not type(ends[1]):
        raise TuneError(f"--search {name}={text} must be LOW..HIGH of numbers, LOW..HIGH:log, or values with commas")
    if ends[0] >= ends[1] or (colon and ends[0] <= 0):
        raise TuneError(f"--search {name}={text} must have {'0 < ' if colon else ''}LOW < HIGH")
    return Dimension(name, (), *ends, bool(colon))


def _step(values: Sequence[Any]) -> float | None:
    """Return the distance of ascending, evenly spaced numbers, which a sampler may know of; None of all others."""
    if any(isinstance(value, bool | str) for value in values):
        return None
    exact = [Decimal(str(value)) for value in values]  # 0.7 - 0.6 is 0.1 here
    steps = {after - before for before, after in pairwise(exact)}
    return float(steps.pop()) if len(steps) == 1 and min(steps) > 0 else None


def _suggest(trial: optuna.Trial, one: Dimension) -> Value:
    if not one.values:
        if isinstance(one.low, int):
            return trial.suggest_int(one.name, one.low, int(one.high), log=one.log)
        return trial.suggest_float(one.name, one.low, one.high, log=one.log)
    step = _step(one.values)
    if step is None:
        return cast(Value, trial.suggest_categorical(one.name, one.values))
    near = trial.suggest_float(one.name, float(one.values[0]), float(one.values[-1]), step=step)
    return min(one.values, key=lambda value: abs(float(value) - near))


def name_of(plan: Plan) -> str:
    """Return hex digits that name what is asked, so that the same command finds its study again."""
    asked = {key: value for key, value in content(plan.experiment).items() if key not in RUNTIME}
    text = json.dumps([asked, _space(plan), plan.seeds, plan.metric, plan.by], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def _space(plan: Plan) -> dict[str, str]:
    return {one.name: str(one) for one in plan.space}


def _about(plan: Plan, resolved: Experiment) -> dict[str, Any]:
    """Return what all trials of a study share, as plain data; a study goes on only with the same."""
    searched = {one.name for one in plan.space}
    settings = content(resolved)
    settings |= settings.pop("options")
    return {
        **{key: value for key, value in settings.items() if key not in searched | RUNTIME},
        "metric": plan.metric,
        "by": plan.by,
        "seeds": plan.seeds,
        "space": _space(plan),
    }


# --- what a trial scores ---------------------------------------------------------------------------------------------


def _ready(plan: Plan, values: Mapping[str, Any], seed: int, data: Collection) -> Setup:
    """Build one seed of a trial, sealed; by clients, the share `valid` of them, at least one, does not train."""
    e = with_settings(plan.experiment, {**values, "seed": seed})
    if plan.by == "clients" and not e.valid_clients:
        e = complete(e, data)
        if e.clients < 2:
            raise TuneError(f"clients is {e.clients}, but to validate by clients takes at least 2; use --by rows")
        apart = min(max(1, round(e.valid * e.clients)), e.clients - 1)
        left = e.clients - apart
        e = replace(e, clients=left, cohort=min(int(e.cohort), left), valid_clients=apart)
    return prepare(e, data, sealed=True)


def _score(plan: Plan, setup: Setup, state: ServerState) -> float:
    """Return the metric on validation rows at a state of the server."""
    federation = setup.pool.federation
    who = None if plan.by == "rows" else validation_clients(federation)
    value = evaluate_valid(setup, state, who)[plan.metric]
    if value is None:
        raise TuneError(f"valid is {plan.experiment.valid}, but leaves nobody a validation row to judge by; raise it")
    return float(value)


def curve(plan: Plan, setups: Sequence[Setup]) -> Iterator[tuple[int, float]]:
    """Train all seeds of a trial side by side; yield a round and the mean score after it, the last round's last."""
    e = setups[0].experiment
    for now in zip(*(rounds_of(setup, start(setup)) for setup in setups), strict=True):
        round = now[0][1].round
        if round % e.eval_every == 0 or round == e.rounds:
            scores = [_score(plan, setup, state) for setup, (state, _) in zip(setups, now, strict=True)]
            yield round, sum(scores) / len(scores)


# --- a study ---------------------------------------------------------------------------------------------------------


def _optuna() -> Any:
    """Import Optuna, which is an extra, or say how to get it."""
    try:
        import optuna  # noqa: PLC0415
    except ImportError:
        raise TuneError("tuning needs Optuna, which is not installed here; pip install 'metavd[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@contextmanager
def _claiming(lock: IO[bytes]) -> Iterator[None]:
    """Be the only process that chooses a trial or writes a file."""
    fcntl.lockf(lock, fcntl.LOCK_EX, 1, _CLAIM)
    try:
        yield
    finally:
        fcntl.lockf(lock, fcntl.LOCK_UN, 1, _CLAIM)


def _lives(lock: IO[bytes], number: int) -> bool:
    """Whether another process runs this trial."""
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
    except OSError:
        return True
    fcntl.lockf(lock, fcntl.LOCK_UN, 1, number)
    return False


@contextmanager
def _folder(folder: Path) -> Iterator[IO[bytes]]:
    """Open a study's folder, made if need be, and its lock file."""
    try:
        if folder.is_dir() and not (folder / "study.db").exists() and {p.name for p in folder.iterdir()} - {".lock"}:
            raise TuneError(f"the folder {folder} is not empty and holds no study; name a new or empty one with --out")
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("ab")
    except OSError as error:
        raise TuneError(f"cannot write to the folder {folder}: {error.strerror}; name another --out") from None
    with lock:
        yield lock


def _storage(folder: Path) -> Any:
    def connect() -> sqlite3.Connection:  # by path: a URL would stumble over some characters of it
        return sqlite3.connect(folder / "study.db", timeout=_PATIENCE, check_same_thread=False)

    return _optuna().storages.RDBStorage("sqlite:///study.db", engine_kwargs={"creator": connect})


def _study(folder: Path, plan: Plan, rounds: int, about: Mapping[str, Any]) -> optuna.Study:
    """Open the study in a folder, or make it; refuse one that is about something else."""
    found = _optuna()
    from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415 - comes with Optuna

    # The first quarter of a run says little about its end: beta rises, momentum gathers.
    pruner = found.pruners.MedianPruner(n_warmup_steps=rounds // 4) if plan.prune else found.pruners.NopPruner()
    try:
        study: optuna.Study = found.create_study(
            study_name=_NAME, storage=_storage(folder), direction=METRICS[plan.metric], pruner=pruner,
            load_if_exists=True,
        )  # fmt: skip
        there = study.user_attrs.get("about")
    except (SQLAlchemyError, sqlite3.Error, RuntimeError) as error:
        reason = str(getattr(error, "orig", None) or error).splitlines()[0]
        raise TuneError(f"{folder / 'study.db'} cannot be read ({reason}); name another --out") from None
    here = json.loads(json.dumps(about))
    if there is None:
        study.set_user_attr("about", here)
    elif there != here:
        key = next(key for key in {**here, **there} if here.get(key) != there.get(key))
        raise TuneError(
            f"the folder {folder} holds another study, where {key} is {there.get(key)!r} and not {here.get(key)!r}; "
            "name another --out"
        )
    return study


@dataclass(frozen=True)
class _Session:
    """A process at work on a study."""

    plan: Plan
    folder: Path
    lock: IO[bytes]
    study: optuna.Study
    data: Collection
    total: int
    """Trials that the study shall have."""
    watcher: Watcher


@contextmanager
def _session(
    plan: Plan, folder: Path, data: Collection, total: int, watcher: Watcher | None = None
) -> Iterator[_Session]:
    """Open a study, or make it."""
    e = complete(plan.experiment, data)
    with _folder(folder) as lock:
        with _claiming(lock):
            study = _study(folder, plan, e.rounds, _about(plan, e))
        yield _Session(plan, folder, lock, study, data, total, watcher or Unwatched())


def _sampler(plan: Plan, position: int) -> Any:
    """Return a sampler seeded by the trial's place in the study, so that going on draws nothing a second time."""
    seed = int(np.random.SeedSequence([plan.experiment.seed, position]).generate_state(1)[0])
    samplers = _optuna().samplers
    return samplers.TPESampler(seed=seed) if plan.sampler == "tpe" else samplers.RandomSampler(seed=seed)


def _again(study: optuna.Study, lock: IO[bytes]) -> int:
    """Mark trials whose process is gone as failed and put them in the queue; return how many others run."""
    states = _optuna().trial.TrialState
    running = 0
    for trial in study.get_trials(deepcopy=False, states=(states.RUNNING,)):
        if _lives(lock, trial.number):
            running += 1
            continue
        tries = trial.user_attrs.get("tries", 1)
        if tries < _TRIES and trial.params:
            # First in the queue, then failed: killed between the two, it is run once too often, not never.
            study.enqueue_trial(trial.params, user_attrs={"tries": tries + 1, "again": trial.number})
        study.tell(trial.number, state=states.FAIL)
    return running


def _done(study: optuna.Study) -> int:
    states = _optuna().trial.TrialState
    return len(study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED)))


def _claim(session: _Session) -> tuple[optuna.Trial, dict[str, Value]] | None:
    """Choose the next trial and hold it; None where all are done or in work."""
    plan, study, lock = session.plan, session.study, session.lock
    with _claiming(lock):
        position = _again(study, lock) + _done(study)
        if position >= session.total:
            return None
        study.sampler = _sampler(plan, position)
        trial = study.ask()
        fcntl.lockf(lock, fcntl.LOCK_EX, 1, trial.number)
        values = {one.name: _suggest(trial, one) for one in plan.space}
        trial.set_user_attr("settings", values)
        trial.set_user_attr("sampler", plan.sampler)
        return trial, values


def _attempt(session: _Session, trial: optuna.Trial, values: Mapping[str, Any]) -> float | str:
    """Run a trial; return its value, or the reason why it has none."""
    plan, first = session.plan, session.plan.experiment.seed
    for line in _lines(session.study):
        if line["settings"] == values and line["state"] in {"finished", "stopped"}:
            return _repeat(trial, line)
    value = math.nan
    try:
        setups = [_ready(plan, values, seed, session.data) for seed in range(first, first + plan.seeds)]
        rounds = setups[0].experiment.rounds
        with using(setups[0]):
            for done, value in curve(plan, setups):
                trial.report(value, done)
                session.watcher.step(trial.number, done, value)
                if done < rounds and trial.should_prune():
                    return f"worse than the median at round {done}"
    except _HOPELESS as error:
        return str(error)
    return value


def _repeat(trial: optuna.Trial, line: Mapping[str, Any]) -> float | str:
    """Give a trial the course of an earlier one with the same settings, which training would only repeat to the bit."""
    for done, value in line["curve"]:
        trial.report(value, done)
    trial.set_user_attr("same", line["number"])
    found: float | str = line["reason"] if line["value"] is None else line["value"]
    return found


def _work(session: _Session, wanted: Callable[[], bool] = lambda: True) -> None:
    """Run trials until all are done, one after another."""
    study, lock = session.study, session.lock
    while wanted() and (claimed := _claim(session)) is not None:
        trial, values = claimed
        began = time.monotonic()
        found = _attempt(session, trial, values)
        with _claiming(lock):  # told and let go in one, or another process might take it for dead in between
            trial.set_user_attr("seconds", round(time.monotonic() - began, 3))
            if isinstance(found, str):
                trial.set_user_attr("reason", found)
                study.tell(trial, state=_optuna().trial.TrialState.PRUNED)
            else:
                study.tell(trial, found)
            fcntl.lockf(lock, fcntl.LOCK_UN, 1, trial.number)
            history = _write(session)
        session.watcher.trial(next(line for line in history["trials"] if line["number"] == trial.number))


def _worker(plan: Plan, folder: Path, total: int, source: Data | None, threads: int) -> None:
    """Be one of several processes; whoever started them reports, and ends them at Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()
    with _session(plan, folder, data_of(plan.experiment, source), total) as session:
        _work(session, lambda: parent is None or parent.is_alive())


def _side_by_side(session: _Session, source: Data | None, jobs: int) -> None:
    """Run trials in several processes, each with its own data, and tell of those that end."""
    context = multiprocessing.get_context("spawn")  # a fork of a process that has used torch's threads may hang
    threads = max(1, torch.get_num_threads() // jobs)
    study, total = session.study, session.total
    arguments = (session.plan, session.folder, total, source, threads)
    workers = [context.Process(target=_worker, args=arguments, daemon=True) for _ in range(jobs)]
    told = {line["number"] for line in _lines(study) if line["state"] != "running"}

    def tell() -> None:
        for line in _lines(study):
            if line["state"] != "running" and line["number"] not in told:
                told.add(line["number"])
                session.watcher.trial(line)

    try:
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            time.sleep(_LOOK)
            tell()
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.terminate()
                worker.join()
    tell()
    broken = [worker.exitcode for worker in workers if worker.exitcode]
    if broken and _done(study) < total:
        raise InterruptedRun(
            f"a process ended with status {broken[0]} after {_done(study)} of {total} trials, which are kept in "
            f"{session.folder}; the same command goes on"
        )


# --- what is written -------------------------------------------------------------------------------------------------


def _lines(study: optuna.Study) -> list[dict[str, Any]]:
    """Return all trials that were begun as plain data."""
    begun = [trial for trial in study.get_trials(deepcopy=False) if trial.state.name in _STATES]
    return [_line(trial) for trial in begun if "settings" in trial.user_attrs]


def _line(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    state, known = trial.state.name, trial.user_attrs
    return {
        "number": trial.number,
        "state": _STATES[state],
        "value": trial.value if state == "COMPLETE" else None,
        "settings": known["settings"],
        "curve": [[round, value] for round, value in sorted(trial.intermediate_values.items())],
        **({"reason": _DIED} if state == "FAIL" else {}),
        **{key: known[key] for key in ("reason", "again", "same", "sampler", "seconds") if key in known},
    }


def _write(session: _Session) -> dict[str, Any]:
    """Write the history and the best configuration so far."""
    plan, study, folder = session.plan, session.study, session.folder
    lines = _lines(study)
    finished = [line for line in lines if line["state"] == "finished"]
    sign = 1 if METRICS[plan.metric] == "minimize" else -1
    best = min(finished, key=lambda line: sign * line["value"]) if finished else None
    history = {
        "study": study.user_attrs["about"],
        "metric": plan.metric,
        "direction": METRICS[plan.metric],
        "best": best["number"] if best else None,
        "trials": lines,
    }
    if best is not None:
        chosen = complete(with_settings(plan.experiment, best["settings"]), session.data)
        write_atomic(folder / "best.toml", to_toml(chosen).encode())
    write_atomic(folder / "trials.json", (json.dumps(history, indent=2) + "\n").encode())
    return history


def _importance(plan: Plan, study: optuna.Study, folder: Path) -> dict[str, float]:
    """Write which share of the finished trials' variance each setting explains, largest first (fANOVA)."""
    optuna = _optuna()
    finished = [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
    shares: dict[str, float] = {}
    if len({trial.value for trial in finished}) > 1:
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
        shares = {name: float(share) for name, share in found.items()}
    content = {"metric": plan.metric, "evaluator": "fANOVA", "finished": len(finished), "importance": shares}
    write_atomic(folder / "importance.json", (json.dumps(content, indent=2) + "\n").encode())
    return shares


def tune(
    plan: Plan,
    *,
    out: str | Path,
    trials: int = 20,
    jobs: int = 1,
    source: Data | None = None,
    watcher: Watcher | None = None,
) -> dict[str, Any]:
    """Run a study until it has so many trials, and return the content of trials.json, with `importance`.

    Args:
        plan: what is searched and how it is judged, see `plan`.
        out: the study's folder; one that holds this study is continued.
        trials: how many in all, those that stopped early included, those whose process was killed not.
        jobs: processes side by side; 0: what suits the device, see `side`. They start Python afresh, so that a script
            of yours that asks for several needs the usual `if __name__ == "__main__":`.
        source: your own data; by default the experiment's is read, once a process.
        watcher: is told how it goes on.
    """
    _optuna()
    for name, value, least in (("trials", trials, 1), ("jobs", jobs, 0)):
        if value < least:
            raise TuneError(f"{name} is {value}, but must be at least {least}")
    jobs = jobs_for(plan.experiment.device, jobs)
    watcher, folder = watcher or Unwatched(), Path(out)
    data = data_of(plan.experiment, source, watcher.note)
    rounds = _checked(plan, data).rounds
    with _session(plan, folder, data, trials, watcher) as session:
        study, lock = session.study, session.lock
        with _claiming(lock):
            running = _again(study, lock)
        done = _done(study)
        watcher.start(plan, rounds, done, trials)
        left = min(jobs, trials - done - running)
        try:
            if left > 1:
                with sharing(left):
                    _side_by_side(session, source, left)
            else:
                _work(session)
        except KeyboardInterrupt:
            with _claiming(lock):
                _again(study, lock)
                _write(session)
            raise InterruptedRun(
                f"stopped with {_done(study)} of {trials} trials, which are kept in {folder}; the same command goes on"
            ) from None
        with _claiming(lock):
            history = _write(session)
            importance = _importance(plan, study, folder)
    if history["best"] is None:
        why = next(
            (f"; the last one: {line['reason']}" for line in reversed(history["trials"]) if "reason" in line), ""
        )
        raise TuneError(f"none of {_done(study)} trials in {folder} came to an end{why}")
    return history | {"importance": importance}


def _checked(plan: Plan, data: Collection) -> Experiment:
    """Return what is fixed, completed; every end of the space and one whole trial's parts are tried beforehand."""
    for one in plan.space:
        for value in one.values or (one.low, one.high):
            complete(with_settings(plan.experiment, {one.name: value}), data)
    federation = _ready(plan, {}, plan.experiment.seed, data).pool.federation
    if not any(map(len, federation.valid)):
        raise TuneError(f"valid is {plan.experiment.valid}, but leaves nobody a validation row to judge by; raise it")
    return complete(plan.experiment, data)
