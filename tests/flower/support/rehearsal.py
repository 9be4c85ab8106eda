"""A federation in this process, struck by one fault, beside the simulator without it."""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from metavd.container import read_json
from metavd.engine.checkpoint import state_hash
from metavd.engine.cohorts import round_of
from metavd.engine.ledger import Ledger
from metavd.engine.rounds import Transport
from metavd.engine.rounds import rounds as every
from metavd.flower import audit, server
from metavd.flower.config import FederationError, run_config
from metavd.runs.settings import Experiment, with_settings
from metavd.runs.setup import prepare, start
from metavd.runs.store import Store

from .answers import BIG
from .grid import FakeGrid, shares
from .stage import CLIENTS, METHODS, OWN, ROUNDS, Fault, Killed, Stage

BOUND = 180.0
"""Seconds that a start of a run may take; its own waits are far shorter."""
STARTS = 4
"""Starts that a run may need; every fault here comes once."""
SHORT = {"round-timeout": 1.0, "join-timeout": 4.0}
PATIENT = {"round-timeout": 30.0, "join-timeout": 30.0}
FORGED, DEAD, NAMELESS = "forged figures", "dead folders", "nameless refusals"
"""Kinds of complaints, which begin with one of them; those that begin otherwise are other ones."""


class Hang(BaseException):
    """A run did not end by itself."""


@dataclass(frozen=True)
class Trial:
    """A fault, and where it strikes."""

    fault: Fault
    method: str
    round: int
    client: int
    seed: int

    @property
    def rounds(self) -> int:
        """Rounds of the run."""
        return int(dict(self.fault.config).get("rounds", ROUNDS))

    def config(self, folder: Path) -> dict[str, Any]:
        """Return the run config."""
        own = {key: value for key, value in self.fault.config if key != "tmpfs"}
        return {
            "method": self.method, "set": METHODS[self.method], "rounds": ROUNDS, "seed": self.seed, "data": "digits",
            "clients": CLIENTS, "out": str(folder), "poll": 0.01, "max-bytes": BIG,
            **(SHORT if self.fault.quick else PATIENT), **own,
        }  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of it."""

    trial: Trial
    struck: bool
    hang: bool
    wrong_model: bool
    lost_rounds: int
    complaints: tuple[str, ...]
    starts: int
    seconds: float


def good(outcome: Outcome) -> bool:
    """Return whether a fault struck and nothing came of it."""
    return outcome.struck and not (outcome.hang or outcome.wrong_model or outcome.lost_rounds or outcome.complaints)


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise Hang in what takes longer."""

    def ring(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@functools.lru_cache(maxsize=16)
def prepared(method: str, seed: int, rounds: int, clients: int) -> Any:
    """Return the simulator's own setup of the same run."""
    words = dict(word.split("=") for word in METHODS[method].split())
    settings = {"method": method, "seed": seed, "rounds": rounds, "data": "digits", "clients": clients,
                "cohort": clients, "unseen": 0, "max_share": 2.0, "device": "cpu", "backend": "loop",
                **words}  # fmt: skip
    return prepare(with_settings(Experiment(), settings))


@functools.lru_cache(maxsize=256)
def wanted(method: str, seed: int, cohorts: tuple[tuple[int, ...], ...], clients: int = CLIENTS) -> str:
    """Return the hash of the simulator's state after rounds of these cohorts."""
    setup = prepared(method, seed, len(cohorts), clients)
    these = Transport(
        lambda state, now: round_of(
            setup.algorithm, setup.pool, setup.schedule, state, torch.tensor(cohorts[now.done]), lost=[]
        )
    )
    *_, (state, _) = every(setup.algorithm.server.update, these, start(setup), len(cohorts), Ledger(None))
    return state_hash(state)


def cohorts(trial: Trial) -> tuple[tuple[int, ...], ...]:
    """Return whose answers count, round by round, when the failed client's do not."""
    absent = trial.fault.absent(trial.round, trial.rounds)
    everybody = range(CLIENTS)
    return tuple(
        tuple(client for client in everybody if not (client == trial.client and round in absent))
        for round in range(1, trial.rounds + 1)
    )


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[int], None]]:
    """Mount a small file system at a folder; give a function that fills it, and empties it with -1."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    filler = folder / "ballast"

    def fill(free: int) -> None:
        if free < 0:
            filler.unlink(missing_ok=True)
            return
        room = os.statvfs(folder)
        filler.write_bytes(bytes(max(room.f_bavail * room.f_frsize - free, 0)))

    try:
        yield fill
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def rehearse(trial: Trial) -> Outcome:
    """Run a federation in this process and let the fault strike it."""
    stage = Stage(shares(CLIENTS), trial.fault, trial.round, trial.client)
    complaints: list[str] = []
    hang, lost, starts, began = False, 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="metavd-fault-") as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch) / "run"
        if dict(trial.fault.config).get("tmpfs"):
            folder.mkdir()
            stage.fill = stack.enter_context(small_disk(folder))
            folder = folder / "out"
        config, reached, said = run_config(trial.config(folder)), 0, ""
        while True:
            starts += 1
            try:
                with alarm(BOUND):
                    server.run(stage, config)
                break
            except Hang:
                hang = True
                break
            except (Killed, OSError, FederationError) as error:
                said = f"{type(error).__name__}: {error}"
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                complaints.append(f"the server broke: {said:.200}")
            finally:
                first = min((round for round, _ in stage.trained), default=reached)
                lost += max(0, reached - first)
                reached = max([reached, *(round for round, _ in stage.trained)])
                stage.again()
                stage.fill(-1)
            if starts == STARTS:
                complaints.append(f"{DEAD}: the run did not end in {STARTS} starts: {said}")
                break
        store = Store(folder)
        lines = store.read_rounds()
        finished = not hang and store.is_finished()
        found = store.read_result()["model_sha256"] if finished else "no result"
        wrong = found != wanted(trial.method, trial.seed, cohorts(trial))
        complaints += [*_recorded(trial, lines), *forged(folder), *_others(trial, folder)] if finished else []
    return Outcome(trial, bool(stage.struck), hang, wrong, lost, tuple(complaints), starts, time.monotonic() - began)


def _recorded(trial: Trial, lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Say what is wrong with the records of the rounds."""
    if [line["round"] for line in lines] != list(range(1, trial.rounds + 1)):
        yield f"rounds on record: {[line['round'] for line in lines]}"
        return
    if [tuple(line["cohort"]) for line in lines] != list(cohorts(trial)):
        yield f"cohorts on record: {[line['cohort'] for line in lines]}"
    line = lines[trial.round - 1]
    if trial.fault.named and not (line["rejected"] | line["why_lost"]).get(str(trial.client)):
        yield f"{NAMELESS}: round {trial.round} does not name client {trial.client} with a reason"


@functools.lru_cache(maxsize=16)
def _honest(method: str, seed: int, rounds: int) -> dict[str, dict[str, str]]:
    """Return the figures of clients, by client, in a federation that nothing happens to."""
    calm = Trial(Fault("nothing", "", lambda event: [event.reply], config=(("rounds", rounds),)), method, 1, 0, seed)
    with tempfile.TemporaryDirectory(prefix="metavd-honest-") as scratch:
        server.run(FakeGrid(shares(CLIENTS)), run_config(calm.config(Path(scratch) / "run")))
        return _figures(Path(scratch) / "run")


def _figures(folder: Path) -> dict[str, dict[str, str]]:
    with Store(folder).clients.open(newline="") as file:
        return {row["client"]: row for row in csv.DictReader(file)}


def _others(trial: Trial, folder: Path) -> Iterator[str]:
    """Say whose figures are not those of a calm run of the same model; the failed client's may be left out."""
    if set(cohorts(trial)) != {tuple(range(CLIENTS))}:
        return
    honest = _honest(trial.method, trial.seed, trial.rounds)
    for client, row in _figures(folder).items():
        own = client == str(trial.client)
        for name, value in row.items():
            if value != honest[client][name] and not (own and not value):
                yield f"{FORGED}: {name} of client {client} is {value}, not {honest[client][name]}"


def forged(folder: Path, *, chain: bool = True) -> Iterator[str]:
    """Say what is wrong with the figures and the audit log of a finished run."""
    for path in [*folder.glob("*.json"), folder / "rounds.jsonl"]:
        try:
            for text in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
                read_json(text)
        except ValueError as error:
            yield f"{FORGED}: {path.name}: {error}"
    test = Store(folder).read_result()["test"]
    for name, most in (("accuracy", 1.0), ("nll", 28.0), ("brier", 2.0), ("ece", 1.0)):
        if not 0 <= (test.get(name) or 0.0) <= most:
            yield f"{FORGED}: {name} is {test[name]}"
    log = folder / audit.FILE
    try:
        audit.verify(log, Store(folder).read_result()["audit"] if chain else "")
    except audit.BrokenAuditError as error:
        if chain:
            yield str(error)
        return
    last = [line for line in map(json.loads, log.read_text().splitlines()) if line["event"] == "figures"][-1]
    silent = set(map(str, range(CLIENTS))) - set(map(str, last["accepted"])) - last["refused"].keys()
    here = {str(line["client"]) for line in map(json.loads, log.read_text().splitlines()) if line["event"] == "hello"}
    gone = {
        str(line["client"]) for line in map(json.loads, log.read_text().splitlines()) if line["event"] == "excluded"
    }
    if silent & here - gone and not all(last["refused"].values()):
        yield f"{NAMELESS}: clients {sorted(silent)} have neither figures nor a reason"


def trials(repeats: int, seed: int, faults: Sequence[Fault]) -> Iterator[Trial]:
    """Spread every fault over methods, rounds and clients."""
    draw = random.Random(seed)
    names = list(METHODS)
    for repeat in range(repeats):
        for fault in faults:
            method = fault.method or names[draw.randrange(len(names))]
            # The server's misfortunes take their time, so they begin early; masks drop nothing in the first round.
            last = ROUNDS - 1 if fault.kind in OWN else ROUNDS
            first = 2 if fault.kind == "bad mask" else 1
            at = 1 if fault.lasting else draw.randint(first, last)
            client = draw.randrange(CLIENTS) if fault.client is None else fault.client
            yield Trial(fault, method, at, client, seed + repeat)


def can_mount() -> bool:
    """Return whether this user may mount a file system."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with small_disk(Path(folder)):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False
