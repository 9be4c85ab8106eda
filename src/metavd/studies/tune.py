"""Search for good hyper-parameters with Optuna: what is tried, what it scores, and a study that survives being killed.

    plan -> claim a trial -> curve (train, look at validation rows) -> tell -> trials.json, best.toml

A trial is trained with validation rows held out and scored on those alone. Before training, `partition.sealed` takes
test rows and unseen clients out of the federation, so that nobody holds the number of such a row.

A study is a folder:

study.db           all trials, Optuna's own SQLite file
best.toml          the best configuration so far, complete; `metavd run --config` takes it
trials.json        the history as plain data
importance.json    which setting mattered how much; there once a command has come to its end
.lock              byte n is held by the process that runs trial n, `_CHOOSING` by the one that chooses a trial

The kernel gives a dead process's bytes free, so that a trial whose process was killed is known at once, without
heartbeats and waiting, and is run again with the same settings. Optuna is imported where it is first needed: it is an
extra, and everything else works without it.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
import torch

from ..container import write_atomic
from ..core.types import NonFiniteError
from ..data.collection import Collection
from ..engine.rounds import InterruptedRun
from ..errors import SpecError, UserError
from ..evaluate.figures import get
from ..extras import need
from ..runs.evaluation import evaluate_valid, validation_clients
from ..runs.run import ledger_of, rounds_of
from ..runs.settings import RUNTIME, SETTINGS, Experiment, content, to_toml, with_settings
from ..runs.setup import Data, Setup, complete, data_of, prepare, start, using
from ..schema import Value
from .many import carry_out, hold, release
from .plan import Dimension, Plan, Watcher
from .side import jobs_for

if TYPE_CHECKING:
    import optuna

_CHOOSING = 1 << 40
_TRIES = 5
"""How often a trial is begun whose process always dies, perhaps because of it."""
_PATIENCE = 100.0
"""Seconds that a process waits for another one's write to the database."""
_STATES = {"COMPLETE": "finished", "PRUNED": "stopped", "FAIL": "failed", "RUNNING": "running"}
_DIED = "its process ended before it did"
_HOPELESS = (NonFiniteError, torch.OutOfMemoryError, SpecError)
"""What ends a trial and not the study: it diverged, does not fit, or its values do not go together."""


# --- what a trial scores ---------------------------------------------------------------------------------------------


def _ready(plan: Plan, values: Mapping[str, Any], seed: int, data: Collection) -> Setup:
    """Build one seed of a trial, sealed; by clients, the share `valid` of them, at least one, does not train."""
    e = with_settings(plan.experiment, {**values, "seed": seed})
    if plan.by == "clients" and not e.valid_clients:
        e = complete(e, data)
        if e.clients < 2:
            raise UserError(f"clients is {e.clients}, but to validate by clients takes at least 2; use --by rows")
        apart = min(max(1, round(e.valid * e.clients)), e.clients - 1)
        left = e.clients - apart
        e = replace(e, clients=left, cohort=min(int(e.cohort), left), valid_clients=apart)
    setup = prepare(e, data, sealed=True)
    if not any(map(len, setup.pool.federation.valid)):
        raise UserError(f"valid is {e.valid}, but leaves nobody a validation row to judge by; raise it")
    return setup


def curve(plan: Plan, setups: Sequence[Setup]) -> Iterator[tuple[int, float]]:
    """Train all seeds of a trial side by side; yield a round and the mean score after it, the last round's last.

    The last one comes sooner where the privacy budget of a seed is spent by then.
    """
    e, ledgers = setups[0].experiment, [ledger_of(setup) for setup in setups]
    runs = [rounds_of(setup, start(setup), ledger) for setup, ledger in zip(setups, ledgers, strict=True)]
    for now in zip(*runs, strict=False):
        round, ends = now[0][1].round, any(ledger.full() for ledger in ledgers)
        if round % e.eval_every == 0 or round == e.rounds or ends:
            scores = []
            for setup, (state, _) in zip(setups, now, strict=True):
                who = None if plan.by == "rows" else validation_clients(setup.pool.federation)
                scores.append(evaluate_valid(setup, state, who)[plan.metric])
            yield round, sum(scores) / len(scores)
        if ends:
            return


# --- a study ---------------------------------------------------------------------------------------------------------


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
    def alone(self) -> Iterator[None]:
        """Be the only process that chooses a trial or writes a file."""
        hold(self.lock, _CHOOSING, wait=True)
        try:
            yield
        finally:
            release(self.lock, _CHOOSING)

    def trials(self, *states: str) -> list[optuna.trial.FrozenTrial]:
        """Return the trials in some of Optuna's states."""
        return [trial for trial in self.study.get_trials(deepcopy=False) if trial.state.name in states]

    def done(self) -> int:
        """Return how many trials count."""
        return len(self.trials("COMPLETE", "PRUNED"))


def _optuna() -> Any:
    """Import Optuna, and let it tell nothing but warnings."""
    optuna = need("optuna", "tune", "tuning")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@contextmanager
def _session(plan: Plan, folder: Path, data: Collection, total: int, watcher: Watcher) -> Iterator[_Session]:
    """Open a study, or make it, and its folder."""
    e = complete(plan.experiment, data)
    try:
        if folder.is_dir() and not (folder / "study.db").exists() and {p.name for p in folder.iterdir()} - {".lock"}:
            raise UserError(f"the folder {folder} is not empty and holds no study; name a new or empty one with --out")
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("ab")
    except OSError as error:
        raise UserError(f"cannot write to the folder {folder}: {error.strerror}; name another --out") from None
    with lock:
        hold(lock, _CHOOSING, wait=True)
        study = _study(folder, plan, e.rounds)
        _same(folder, study, _about(plan, e))
        release(lock, _CHOOSING)
        yield _Session(plan, folder, lock, study, data, total, watcher)


def _study(folder: Path, plan: Plan, rounds: int) -> optuna.Study:
    """Open the database in a folder, or make it."""
    found = _optuna()
    from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415 - comes with Optuna

    def connect() -> sqlite3.Connection:  # by path: a URL would stumble over some characters of it
        return sqlite3.connect(folder / "study.db", timeout=_PATIENCE, check_same_thread=False)

    # The first quarter of a run says little about its end: beta rises, momentum gathers.
    pruner = found.pruners.MedianPruner(n_warmup_steps=rounds // 4) if plan.prune else found.pruners.NopPruner()
    try:
        storage = found.storages.RDBStorage("sqlite:///study.db", engine_kwargs={"creator": connect})
        study: optuna.Study = found.create_study(
            study_name="metavd", storage=storage, direction=_direction(plan.metric), pruner=pruner, load_if_exists=True
        )
    except (SQLAlchemyError, sqlite3.Error, RuntimeError) as error:
        reason = str(getattr(error, "orig", None) or error).splitlines()[0]
        raise UserError(f"{folder / 'study.db'} cannot be read ({reason}); name another --out") from None
    return study


def _about(plan: Plan, resolved: Experiment) -> dict[str, Any]:
    """Return what all trials of a study share, as plain data."""
    searched = {one.name for one in plan.space}
    settings = content(resolved)
    settings |= settings.pop("options")
    shared = {key: value for key, value in settings.items() if key not in searched | RUNTIME}
    own = {"metric": plan.metric, "by": plan.by, "seeds": plan.seeds, "space": plan.texts()}
    return cast(dict[str, Any], json.loads(json.dumps(shared | own)))


def _same(folder: Path, study: optuna.Study, here: Mapping[str, Any]) -> None:
    """Refuse a study that is about something else."""
    there = study.user_attrs.get("about")
    if there is None:
        study.set_user_attr("about", here)
        return
    # A study that is older than a setting has what is that setting's default by now.
    there = {name: each.default for name, each in SETTINGS.items() if each.later and name in here} | there
    if there != here:
        key = next(key for key in {**here, **there} if here.get(key) != there.get(key))
        raise UserError(
            f"the folder {folder} holds another study, where {key} is {there.get(key)!r} and not {here.get(key)!r}; "
            "name another --out"
        )


def _again(session: _Session) -> int:
    """Mark trials whose process is gone as failed and put them in the queue; return how many others run."""
    study, running = session.study, 0
    for trial in session.trials("RUNNING"):
        if not hold(session.lock, trial.number):
            running += 1
            continue
        release(session.lock, trial.number)
        tries = trial.user_attrs.get("tries", 1)
        if tries < _TRIES and trial.params:
            # First in the queue, then failed: killed between the two, it is run once too often, not never.
            study.enqueue_trial(trial.params, user_attrs={"tries": tries + 1, "again": trial.number})
        study.tell(trial.number, state=_optuna().trial.TrialState.FAIL)
    return running


# --- one trial -------------------------------------------------------------------------------------------------------


def _claim(session: _Session) -> tuple[optuna.Trial, dict[str, Value]] | None:
    """Choose the next trial and hold it; None where all are done or in work."""
    plan, study, samplers = session.plan, session.study, _optuna().samplers
    with session.alone():
        position = _again(session) + session.done()
        if position >= session.total:
            return None
        # Seeded by the trial's place in the study, so that going on draws nothing a second time.
        seed = int(np.random.SeedSequence([plan.experiment.seed, position]).generate_state(1)[0])
        sampler = samplers.TPESampler if plan.sampler == "tpe" else samplers.RandomSampler
        study.sampler = sampler(seed=seed)
        trial = study.ask()
        hold(session.lock, trial.number)
        values = {one.name: _suggest(trial, one) for one in plan.space}
        trial.set_user_attr("settings", values)
        trial.set_user_attr("sampler", plan.sampler)
        return trial, values


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


def _attempt(session: _Session, trial: optuna.Trial, values: Mapping[str, Any]) -> float | str:
    """Run a trial; return its value, or the reason why it has none."""
    plan, first = session.plan, session.plan.experiment.seed
    for line in _lines(session):
        if line["settings"] == values and line["state"] in {"finished", "stopped"}:
            # Training would only repeat it to the bit.
            for done, value in line["curve"]:
                trial.report(value, done)
            trial.set_user_attr("same", line["number"])
            return cast("float | str", line["reason"] if line["value"] is None else line["value"])
    value, done, rounds = math.nan, 0, 0
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
    if done < rounds:
        trial.set_user_attr("spent", f"its privacy budget was spent after round {done}")
    return value


def _next(*_: Any, session: _Session) -> dict[str, Any]:
    """Run the next trial; return its line as `result`, None where all are done or in work."""
    if (claimed := _claim(session)) is None:
        return {"result": None}
    trial, values = claimed
    began = time.monotonic()
    found = _attempt(session, trial, values)
    with session.alone():  # told and let go in one, or another process might take it for dead in between
        trial.set_user_attr("seconds", round(time.monotonic() - began, 3))
        if isinstance(found, str):
            trial.set_user_attr("reason", found)
            session.study.tell(trial, state=_optuna().trial.TrialState.PRUNED)
        else:
            session.study.tell(trial, found)
        release(session.lock, trial.number)
        history = _write(session)
    return {"result": next(line for line in history["trials"] if line["number"] == trial.number)}


def _next_elsewhere(*_: Any, plan: Plan, folder: Path, total: int, source: Data | None) -> dict[str, Any]:
    """Run the next trial in a process of its own; whoever started it reports."""
    with _session(plan, folder, data_of(plan.experiment, source), total, Watcher()) as session:
        return _next(session=session)


# --- what is written -------------------------------------------------------------------------------------------------


def _lines(session: _Session) -> list[dict[str, Any]]:
    """Return all trials that were begun as plain data."""
    return [_line(trial) for trial in session.trials(*_STATES) if "settings" in trial.user_attrs]


def _line(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    state, known = trial.state.name, trial.user_attrs
    return {
        "number": trial.number,
        "state": _STATES[state],
        "value": trial.value if state == "COMPLETE" else None,
        "settings": known["settings"],
        "curve": [[round, value] for round, value in sorted(trial.intermediate_values.items())],
        **({"reason": _DIED} if state == "FAIL" else {}),
        **{key: known[key] for key in ("reason", "again", "same", "spent", "sampler", "seconds") if key in known},
    }


def _direction(metric: str) -> str:
    """Return optuna's word for which way of a figure is better."""
    return "minimize" if get(metric).better == "lower" else "maximize"


def _write(session: _Session) -> dict[str, Any]:
    """Write the history and the best configuration so far."""
    plan, folder, lines = session.plan, session.folder, _lines(session)
    finished = [line for line in lines if line["state"] == "finished"]
    sign = 1 if _direction(plan.metric) == "minimize" else -1
    best = min(finished, key=lambda line: sign * line["value"]) if finished else None
    history = {
        "study": session.study.user_attrs["about"],
        "metric": plan.metric,
        "direction": _direction(plan.metric),
        "best": best["number"] if best else None,
        "trials": lines,
    }
    if best is not None:
        chosen = complete(with_settings(plan.experiment, best["settings"]), session.data)
        write_atomic(folder / "best.toml", to_toml(chosen).encode())
    write_atomic(folder / "trials.json", (json.dumps(history, indent=2) + "\n").encode())
    return history


def _importance(session: _Session) -> dict[str, float]:
    """Write which share of the finished trials' variance each setting explains, largest first (fANOVA)."""
    importance = _optuna().importance
    finished = session.trials("COMPLETE")
    shares: dict[str, float] = {}
    if len({trial.value for trial in finished}) > 1:
        found = importance.get_param_importances(session.study, evaluator=importance.FanovaImportanceEvaluator(seed=0))
        shares = {name: float(share) for name, share in found.items()}
    content = {"metric": session.plan.metric, "evaluator": "fANOVA", "finished": len(finished), "importance": shares}
    write_atomic(session.folder / "importance.json", (json.dumps(content, indent=2) + "\n").encode())
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
        source: your own data; by default the experiment's is read, once per process.
        watcher: is told how it goes on.
    """
    _optuna()
    for name, value, least in (("trials", trials, 1), ("jobs", jobs, 0)):
        if value < least:
            raise SpecError(f"{name} is {value}, but must be at least {least}")
    watcher, folder = watcher or Watcher(), Path(out)
    data = data_of(plan.experiment, source, watcher.note)
    rounds = _checked(plan, data).rounds
    with _session(plan, folder, data, trials, watcher) as session:
        with session.alone():
            running = _again(session)
        done = session.done()
        watcher.start(plan, rounds, done, trials)
        at_once = min(jobs_for(plan.experiment.device, jobs), trials - done - running)
        here = partial(_next, session=session)
        there = partial(_next_elsewhere, plan=plan, folder=folder, total=trials, source=source)
        tasks = {place: {"place": place} for place in range(done, trials)}
        try:
            for ended in carry_out(
                tasks, there if at_once > 1 else here, strict=True, jobs=max(1, at_once), device="cpu"
            ):
                if ended.line and (line := ended.line["result"]):
                    watcher.trial(line)
                    if "spent" in line:
                        watcher.note(f"  trial {line['number']} ended early: {line['spent']}")
        except (KeyboardInterrupt, BrokenProcessPool) as stop:
            with session.alone():
                _again(session)
                _write(session)
            why = "stopped with" if isinstance(stop, KeyboardInterrupt) else "a process ended by itself after"
            raise InterruptedRun(
                f"{why} {session.done()} of {trials} trials, which are kept in {folder}; the same command goes on"
            ) from None
        with session.alone():
            history = _write(session)
            importance = _importance(session)
        if history["best"] is None:
            reasons = [f"; the last one: {line['reason']}" for line in history["trials"] if "reason" in line]
            why = "".join(reasons[-1:])
            raise UserError(f"none of {session.done()} trials in {folder} came to an end{why}")
    return history | {"importance": importance}


def _checked(plan: Plan, data: Collection) -> Experiment:
    """Return what is fixed, completed; every end of the space and one whole trial's parts are tried beforehand."""
    for one in plan.space:
        for value in one.values or (one.low, one.high):
            complete(with_settings(plan.experiment, {one.name: value}), data)
    _ready(plan, {}, plan.experiment.seed, data)
    return complete(plan.experiment, data)
