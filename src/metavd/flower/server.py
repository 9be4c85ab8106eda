"""The ServerApp: the simulator's round, with messages in place of calls.

    hello     who is there, and what rows are like
    round     emit -> messages -> answers, checked, in the order of client numbers -> server.update -> checkpoint
    evaluate  serve (or admit, for those who never train) -> messages -> figures

Every wait is bounded. A round needs a quorum of good answers; without one it is tried again, those who have answered
are not asked again, and in the end the run stops with a sentence. Each round ends with a checkpoint, so that after any
crash `flwr run` with the same config goes on from the last round. Answers are put in the order of client numbers and
all random numbers come from (seed, round, client): the same data and seed give the same bits as the simulator.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp
from httpx import TransportError
from torch import Tensor

from .. import methods
from ..container import read_json, write_atomic
from ..core import rng
from ..core.accountant import Mechanism
from ..core.emit import EMBEDDING
from ..core.privacy import secret
from ..core.types import NonFiniteError, ServerState, Update
from ..data.cohort import pool
from ..data.partition import Federation
from ..data.source import Source
from ..engine.checkpoint import hashes, load_checkpoint
from ..engine.evaluation import masks_of
from ..engine.ledger import Ledger
from ..engine.machine import tuned
from ..engine.rounds import Record, Run, ServerUpdate, Silent, Tested, Transport, carry_out
from ..engine.task import Task, notes, task
from ..errors import FailedError, UserError
from ..runs.details import of_server
from ..runs.evaluation import sparsity, summed
from ..runs.provenance import provenance
from ..runs.settings import Experiment, from_toml, spec_hash, to_toml, with_settings
from ..runs.setup import channels_last
from ..runs.store import Store
from ..serve.samples import described, restored, samples
from ..version import VERSION
from ..wire import Guard, Limits, encode
from . import compat, figures, registry, site
from .audit import FILE as AUDIT
from .audit import Audit
from .collect import FederationSetup, collect
from .config import FederationError, RunConfig, experiment_of, run_config
from .fleet import Fleet, exchange
from .message import Order, cleaned, read_reply, spec, write_order
from .parent import watch_parent

app = ServerApp()
_LOG = logging.getLogger("flwr")
TAKES = "takes.json"
RELEASES = "privacy.json"
_OWN_ROWS: Mapping[str, Any] = {"prior_answer": "with"}
"""What suits sites that bring rows of their own: those that they test on have their own labels."""
_TOLD = (UserError, FailedError, NonFiniteError, OSError)
"""Errors whose text says all that a user needs."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run, or go on with, the federation that the run config describes."""
    compat.log_sentences(_TOLD)
    watch_parent()
    chosen = run_config(context.run_config)
    try:
        run(grid, chosen)
    except TransportError as error:
        raise FederationError(
            f"the SuperLink did not answer for {chosen.join_timeout:.0f} s ({error}); the last round is saved, start "
            "the SuperLink and run again"
        ) from None


def run(grid: Grid, config: RunConfig) -> dict[str, Any]:
    """Carry out a run, from its last checkpoint where there is one, and return its result."""
    store = Store(Path(config.out).resolve())
    compat.bound_retries(grid, config.join_timeout)
    # The ServerApp of a run that was killed a moment ago may still be there.
    with store.lock(seconds=config.join_timeout, report=_LOG.warning):
        if store.is_finished():
            _remembered(config, store)
            _LOG.info("%s holds this run, finished; name another folder with out to run again", store.folder)
            return store.read_result()
        fleet = Fleet(grid, config, registry.load(store.folder / registry.FILE), Audit(store.folder / AUDIT))
        setup = _setup(fleet, store)
        with torch.no_grad(), tuned(setup.task.num_weights, "cpu"):
            return _run(fleet, setup, store)


# --- before the first round --------------------------------------------------------------------------------------


def _setup(fleet: Fleet, store: Store) -> FederationSetup:
    """Wait for the clients, and find out or remember what is trained."""
    config = fleet.config
    expected = max(config.clients, fleet.registry.rows)
    least = config.needed(config.asked(max(expected, 1)))
    fleet.wait(0, enough=max(expected, 1), least=least, everyone=not expected)
    if store.is_run():
        experiment, takes, classes = _remembered(config, store)
    else:
        experiment, takes, classes = _agreed(fleet)
        store.open(to_toml(experiment))
        write_atomic(store.folder / TAKES, json.dumps({"takes": described(takes), "classes": classes}).encode())
    if not config.data:
        fleet.fits = lambda look: site.check_fit(look, takes, classes)
    made = _task(config, experiment, takes)
    return FederationSetup(
        config, experiment, spec(experiment, takes, classes), made, _cohorts(config, made.algorithm.privacy)
    )


def _cohorts(config: RunConfig, privacy: Mechanism | None) -> Tensor | None:
    """Return a key that only this process knows, where sampling is to hide clients."""
    if privacy is None:
        return None
    privacy.check()
    if not privacy.poisson and privacy.rate < 1:
        raise FederationError(
            f"sampling is fixed and cohort is {privacy.cohort} of {privacy.clients}, but how many clients are there "
            "varies, which epsilon has no bound for; use sampling=poisson, or cohort=0"
        )
    return None if config.seeded_noise else torch.tensor(int.from_bytes(os.urandom(8), "little", signed=True))


def _limits(config: RunConfig, privacy: Mechanism | None) -> Limits:
    """Return what the guard puts up with: whom it refuses may not depend on others where clients are to be hidden."""
    if privacy is None:
        return config.limits
    free = replace(config.limits, max_size=math.inf, max_against=math.inf, max_change=math.inf)
    return replace(free, max_norm=math.inf) if privacy.sites else free


def _agreed(fleet: Fleet) -> tuple[Experiment, Source, list[str]]:
    config = fleet.config
    looks = {} if config.data else fleet.agree()
    clients = config.clients or sum(each.trains for each in fleet.candidates.values())
    if config.data:
        data, takes, classes = site.shared(config.data)
        return experiment_of(config, takes, clients, data.defaults, data.fingerprint), takes, classes
    if not looks:
        raise FederationError("no site has rows that a run can begin with; the log says why each is left out")
    takes, classes = site.agree(looks, config.classes)
    content = hashlib.sha256(json.dumps([described(takes), classes]).encode()).hexdigest()[:12]
    return experiment_of(config, takes, clients, _OWN_ROWS, content), takes, classes


def _remembered(config: RunConfig, store: Store) -> tuple[Experiment, Source, list[str]]:
    """Read what a run that is gone on with was made of, and compare it with what is asked now."""
    try:
        there = replace(with_settings(Experiment(), from_toml(store.config)), device="cpu")
    except UserError as error:
        raise FederationError(f"{store.config} is damaged ({error}); put back your copy of it") from None
    try:
        values = read_json((store.folder / TAKES).read_text())
        takes, classes = restored(values["takes"]), list(values["classes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FederationError(f"{store.folder / TAKES} is damaged ({error}); put back your copy of it") from None
    defaults = site.shared(config.data)[0].defaults if config.data else _OWN_ROWS
    now = experiment_of(config, takes, int(there.clients), defaults, there.content)
    if spec_hash(now) != spec_hash(there):
        raise FederationError(
            f"{store.folder} holds another run ({there.method}, {there.rounds} rounds, seed {there.seed}, or other "
            "options); run with the same config, or name another folder with out"
        )
    return there, takes, classes


def _task(config: RunConfig, e: Experiment, takes: Source) -> Task:
    normal = None if config.seeded_noise else secret
    if not config.server_data:
        return task(e, takes, normal=normal)
    given = samples(config.server_data, takes, [str(label) for label in range(takes.num_classes)])
    own = Federation(replace(takes, x=given.x), (), (), (), 0, 0, torch.arange(len(given.x)).numpy())
    held = pool(own, "cpu", getattr(torch, e.dtype), channels_last=channels_last(e))
    return task(e, takes, server_rows=lambda key: held.inputs(torch.arange(len(held.x)), key), normal=normal)


# --- rounds --------------------------------------------------------------------------------------------------------


def _run(fleet: Fleet, setup: FederationSetup, store: Store) -> dict[str, Any]:
    e = setup.experiment
    found = load_checkpoint(store.checkpoint, report=_LOG.warning, specs=[spec_hash(e)], seed=e.seed)
    state, extra = found or (setup.task.algorithm.server.init(rng.key(e.seed)), {})
    store.cut_rounds(int(state.round), _LOG.warning)
    privacy = setup.task.algorithm.privacy
    ledger = Ledger.opened(privacy, extra, None if setup.config.seeded_noise else store.folder / RELEASES)
    setup = replace(setup, asking=ledger.asking)
    guard = Guard.restored(_limits(setup.config, privacy), extra.get("guard", {}))
    offences = registry.load_offences(store.folder)
    guard.offences |= {client: max(count, guard.offences.get(client, 0)) for client, count in offences.items()}
    turns = {int(client): round for client, round in extra.get("turns", {}).items()}
    audit = fleet.audit
    audit.open(extra.get("audit", ""))
    audit.add("start", method=e.method, rounds=e.rounds, seed=e.seed, spec=spec_hash(e), done=int(state.round),
              metavd=VERSION)  # fmt: skip
    log = _Log(store, audit)
    tests = Tests(fleet, setup, int(extra.get("evaluated", 0)), turns, guard)
    remembered = _remembering(guard, store)(collect)
    result = carry_out(
        Run(
            spec=e,
            spec_hash=spec_hash(e),
            update=log.watching(setup.task.algorithm.server.update),
            transport=Transport(
                collect=lambda state, _: remembered(fleet, setup, guard, state, turns),
                ready=lambda state: _joined(fleet, setup, state, store),
            ),
            test=tests.run,
            look=tests.run,
            journal=store,
            listener=log,
            about=lambda: {
                "bytes_evaluation": tests.down, "backend": "flower", "clients": fleet.registry.rows,
                "audit": log.ended(), **provenance(e.device),
            },
            kept=lambda: {
                "evaluated": tests.down, "guard": guard.state(), "turns": dict(turns), "audit": audit.head,
            },
            again="flwr run goes on from it",
            ledger=ledger,
            notes=notes(e, setup.task.algorithm),
        ),
        state,
        extra,
    )  # fmt: skip
    accuracy = result["test"]["accuracy"]
    known = "unknown" if accuracy is None else f"{accuracy:.1%}"
    _LOG.info("finished: accuracy %s, files in %s; head of the audit log: %s", known, store.folder, audit.head)
    return result


@contextmanager
def _remembering(guard: Guard, store: Store) -> Iterator[None]:
    """Write offences at once, because a round that fails leaves no checkpoint."""
    before = dict(guard.offences)
    try:
        yield
    finally:
        if guard.offences != before:
            registry.save_offences(store.folder, guard.offences)


@dataclass
class _Log(Silent):
    """Tells the ServerApp's log, and the audit log, how a run goes on."""

    store: Store
    audit: Audit
    rounds: int = 0
    model: str = ""
    """The hash of the last round's model."""

    def watching(self, update: ServerUpdate) -> ServerUpdate:
        """Return the server's update with an eye on the model that it makes."""

        def watched(state: ServerState, answers: Update) -> ServerState:
            new = update(state, answers)
            self.model = hashes(new)["model_sha256"]
            return new

        return watched

    def ended(self) -> str:
        """Write the last line of a finished run, and return the head that belongs to its result."""
        self.audit.add("end", model=self.model)
        return self.audit.head

    def start(self, experiment: Experiment, done: int) -> None:
        e, self.rounds = experiment, experiment.rounds
        _LOG.info("%s, %d rounds, seed %d, in %s", e.method, e.rounds, e.seed, self.store.folder)
        if done:
            _LOG.info("going on after round %d", done)

    def round(self, record: Record) -> None:
        self.audit.add("round", round=record.round, model=self.model)
        loss = "" if record.loss is None else f", loss {record.loss:.3f}"
        spent = f", epsilon {record.more['epsilon']:.4g}" if record.more.get("epsilon") is not None else ""
        _LOG.info("round %d/%d: %d answers%s%s, %.1f s", record.round, self.rounds, len(record.cohort), loss, spent,
                  record.more["seconds"])  # fmt: skip

    def note(self, text: str) -> None:
        _LOG.info(text.strip())


def _joined(fleet: Fleet, setup: FederationSetup, state: ServerState, store: Store) -> ServerState:
    """Number newcomers and give them rows; wait until there are clients enough for a round."""
    done, config = int(state.round), setup.config
    rows = max(int(setup.experiment.clients), fleet.registry.rows)
    least = config.needed(config.asked(rows))
    fleet.wait(done, enough=least, least=least)
    if fleet.settle(done) or not (store.folder / registry.FILE).exists():
        registry.save(store.folder / registry.FILE, fleet.registry)
        for member in fleet.registry.members:
            if member.joined == done:
                _LOG.info("%s is client %d", member.name, member.number)
                fleet.audit.add("hello", client=member.number, name=member.name, identity=member.identity)
    # What a client would own, all share where single clients are to be hidden.
    return state if setup.task.algorithm.privacy is not None else registry.widened(state, fleet.registry.rows)


# --- evaluation ----------------------------------------------------------------------------------------------------


Reports = Mapping[int, Mapping[str, Any]]
"""Clients' own figures, by client."""


@dataclass
class Tests:
    """Lets clients test their own models, and counts what that costs."""

    fleet: Fleet
    setup: FederationSetup
    down: int
    """Bytes of the models that they were sent."""
    turns: Mapping[int, int]
    """The last round of each client that is part of the server's state."""
    guard: Guard
    """Who is excluded, and how many rows each client has claimed."""

    def run(self, state: ServerState) -> Tested:
        """Let every client that is there test its own model."""
        fleet, config, done = self.fleet, self.setup.config, int(state.round)
        answers = exchange(
            fleet.grid, self._orders(state), MessageType.EVALUATE, round=done, seconds=config.round_timeout,
            poll=config.poll, meanwhile=lambda: fleet.greet(done),
        )  # fmt: skip
        reports = {}
        members = {each.number: each for each in fleet.registry.members}
        for client, content in sorted(answers.content.items()):
            look = fleet.looks.get(members[client].identity)
            most = figures.Most(
                self.guard.rows.get(client, config.max_samples), look.rows if look else config.max_samples
            )
            try:
                reports[client] = figures.checked(read_reply(content)[1], most)
            except (ArithmeticError, TypeError, ValueError) as error:
                answers.lost[client] = cleaned(error)
        for client, (counted, own) in figures.loud(reports).items():
            _LOG.warning("client %d claims %d test rows and counts in means as %d", client, own, counted)
        for client, why in answers.lost.items():
            _LOG.warning("client %d is not evaluated: %s", client, why)
        fleet.audit.add("figures", round=done, accepted=sorted(reports), refused=answers.lost)
        return Tested(_summary(self.setup, state, reports), lambda: _files(fleet, self.setup, state, reports))

    def _orders(self, state: ServerState) -> dict[int, tuple[int, RecordDict]]:
        """Return each client's node and what it is asked, with its model; the models' bytes are counted."""
        fleet, setup, algorithm = self.fleet, self.setup, self.setup.task.algorithm
        fit = methods.traits(setup.experiment.method, setup.experiment.options).admits_by_fitting
        online = fleet.online()
        orders = {}
        for node, member in sorted(fleet.present.items(), key=lambda item: item[1].number):
            if node not in online or self.guard.excluded(member.number):
                continue
            if member.trains:
                params = algorithm.serve(state.params, torch.tensor(member.number), state.round)
            elif fit:
                # Of the others' embeddings a newcomer needs the mean alone.
                params = state.params | {EMBEDDING: state.params[EMBEDDING].mean(0, keepdim=True)}
            else:
                params = algorithm.admit(state.params, state.round, ())
            data = encode(params, half=setup.config.half)
            self.down += len(data)
            order = Order(
                int(state.round), member.number, int(state.key), setup.spec, setup.config.half,
                whole=fit and not member.trains, turn=self.turns.get(member.number, 0), params=data,
            )  # fmt: skip
            orders[member.number] = (node, write_order(order))
        return orders


def _parts(reports: Reports) -> dict[str, list[Mapping[str, Any]]]:
    return {
        "test": [each for client, each in reports.items() if client < registry.GUESTS],
        "unseen": [each for client, each in reports.items() if client >= registry.GUESTS],
    }


def _summary(setup: FederationSetup, state: ServerState, reports: Reports) -> dict[str, Any]:
    algorithm, parts = setup.task.algorithm, _parts(reports)
    clients = [client for client in reports if client < registry.GUESTS] or [0]
    return summed(
        algorithm, state, int(setup.experiment.clients), *(figures.pooled(parts[name]) for name in ("test", "unseen")),
        interval=None,
        sparsities=[
            sparsity(algorithm, state, masks_of(algorithm.serve(state.params, torch.tensor(client), state.round)))
            for client in clients
        ],
    )  # fmt: skip


def _files(
    fleet: Fleet, setup: FederationSetup, state: ServerState, reports: Reports
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return what `metavd show` and `metavd report` read beside the result."""
    rows = fleet.registry.rows
    lines = [
        figures.line(client if client < registry.GUESTS else rows + client - registry.GUESTS, report,
                     unseen=client >= registry.GUESTS)
        for client, report in reports.items()
    ]  # fmt: skip
    more = figures.details(_parts(reports)) | of_server(setup.task.algorithm, state, rows)
    nobody = {"client": 0, "unseen": 0, "train_size": 0, "test_size": 0}
    return lines or [nobody], more
