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
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp
from httpx import TransportError

from .. import methods, tree
from ..container import write_atomic
from ..core import rng
from ..core.emit import EMBEDDING
from ..core.types import NonFiniteError, ServerState, Update
from ..data.cohort import choose, pool
from ..data.partition import Federation
from ..data.source import Source
from ..engine.checkpoint import load_checkpoint
from ..engine.evaluation import masks_of
from ..engine.machine import tuned
from ..engine.rounds import Account, Answers, Record, Run, Silent, Tested, Transport, carry_out
from ..engine.task import Task, task
from ..engine.turn import Moment
from ..errors import FailedError, UserError
from ..evaluate.diagnose import diagnose
from ..runs.details import VERSION as DETAILS
from ..runs.details import drawn_rates
from ..runs.provenance import provenance
from ..runs.run import channels_last
from ..runs.settings import Experiment, from_toml, spec_hash, to_toml, with_settings
from ..runs.store import Store
from ..serve.samples import described, restored, samples
from ..tree import Params
from ..wire import Expected, Guard, Rejected, Reply, encode, sparsity, traffic
from . import compat, figures, registry, site
from .config import FederationError, Plan, experiment_of, plan
from .fleet import Fleet, exchange
from .message import Order, payload, read_reply, spec, write_order
from .parent import watch_parent

app = ServerApp()
_LOG = logging.getLogger("flwr")
TAKES = "takes.json"
_TOLD = (UserError, FailedError, NonFiniteError, OSError)
"""Errors whose text says all that a user needs."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run, or go on with, the federation that the run config describes."""
    compat.log_sentences(_TOLD)
    watch_parent()
    chosen = plan(context.run_config)
    try:
        run(grid, chosen)
    except TransportError as error:
        raise FederationError(
            f"the SuperLink did not answer for {chosen.join_timeout:.0f} s ({error}); the last round is saved, start "
            "the SuperLink and run again"
        ) from None


@dataclass(frozen=True)
class Setup:
    """A federation's run, ready to go."""

    plan: Plan
    experiment: Experiment
    spec: str
    task: Task


def run(grid: Grid, plan: Plan) -> dict[str, Any]:
    """Carry out a run, from its last checkpoint where there is one, and return its result."""
    store = Store(Path(plan.out).resolve())
    compat.bound_retries(grid, plan.join_timeout)
    # The ServerApp of a run that was killed a moment ago may still be there.
    with store.lock(seconds=plan.join_timeout, report=_LOG.warning):
        if store.is_finished():
            _remembered(plan, store)
            _LOG.info("%s holds this run, finished; name another folder with out to run again", store.folder)
            return store.read_result()
        fleet = Fleet(grid, plan, registry.load(store.folder / registry.FILE))
        setup = _setup(fleet, store)
        with torch.no_grad(), tuned(setup.task.num_weights, "cpu"):
            return _run(fleet, setup, store)


# --- before the first round --------------------------------------------------------------------------------------


def _setup(fleet: Fleet, store: Store) -> Setup:
    """Wait for the clients, and find out or remember what is trained."""
    plan = fleet.plan
    expected = max(plan.clients, fleet.registry.rows)
    least = plan.needed(plan.asked(max(expected, 1)))
    fleet.wait(0, enough=max(expected, 1), least=least, everyone=not expected)
    if store.is_run():
        experiment, takes, classes = _remembered(plan, store)
    else:
        experiment, takes, classes = _agreed(fleet)
        store.open(to_toml(experiment))
        write_atomic(store.folder / TAKES, json.dumps({"takes": described(takes), "classes": classes}).encode())
    return Setup(plan, experiment, spec(experiment, takes, classes), _task(plan, experiment, takes))


def _agreed(fleet: Fleet) -> tuple[Experiment, Source, list[str]]:
    plan = fleet.plan
    clients = plan.clients or sum(each.trains for each in fleet.candidates.values())
    if plan.data:
        data, takes, classes = site.shared(plan.data)
        return experiment_of(plan, takes, clients, data.defaults, data.fingerprint), takes, classes
    takes, classes = site.agree(fleet.looks, plan.classes)
    content = hashlib.sha256(json.dumps([described(takes), classes]).encode()).hexdigest()[:12]
    return experiment_of(plan, takes, clients, {}, content), takes, classes


def _remembered(plan: Plan, store: Store) -> tuple[Experiment, Source, list[str]]:
    """Read what a run that is gone on with was made of, and compare it with what is asked now."""
    there = replace(with_settings(Experiment(), from_toml(store.config)), device="cpu")
    try:
        values = json.loads((store.folder / TAKES).read_text())
        takes, classes = restored(values["takes"]), list(values["classes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FederationError(f"{store.folder / TAKES} is damaged ({error}); put back your copy of it") from None
    now = experiment_of(plan, takes, int(there.clients), _defaults(plan), there.content)
    if spec_hash(now) != spec_hash(there):
        raise FederationError(
            f"{store.folder} holds another run ({there.method}, {there.rounds} rounds, seed {there.seed}, or other "
            "options); run with the same config, or name another folder with out"
        )
    return there, takes, classes


def _defaults(plan: Plan) -> Mapping[str, Any]:
    return site.shared(plan.data)[0].defaults if plan.data else {}


def _task(plan: Plan, e: Experiment, takes: Source) -> Task:
    if not plan.server_data:
        return task(e, takes)
    given = samples(plan.server_data, takes, [str(label) for label in range(takes.num_classes)])
    own = Federation(replace(takes, x=given.x), (), (), (), 0, 0, torch.arange(len(given.x)).numpy())
    held = pool(own, "cpu", getattr(torch, e.dtype), channels_last=channels_last(e))
    return task(e, takes, server_rows=lambda key: held.inputs(torch.arange(len(held.x)), key))


# --- rounds --------------------------------------------------------------------------------------------------------


def _run(fleet: Fleet, setup: Setup, store: Store) -> dict[str, Any]:
    e = setup.experiment
    found = load_checkpoint(store.checkpoint, report=_LOG.warning)
    state, extra = found or (setup.task.algorithm.server.init(rng.key(e.seed)), {})
    store.cut_rounds(int(state.round))
    guard = Guard.restored(setup.plan.limits, extra.get("guard", {}))
    tests = Tests(fleet, setup, int(extra.get("evaluated", 0)))
    result = carry_out(
        Run(
            spec=e,
            spec_hash=spec_hash(e),
            update=setup.task.algorithm.server.update,
            transport=Transport(
                collect=lambda state, now: _collect(fleet, setup, guard, state, now),
                ready=lambda state: _joined(fleet, setup, state, store),
            ),
            test=tests.run,
            journal=store,
            listener=_Log(store),
            about=lambda: {
                "bytes_evaluation": tests.down, "backend": "flower", "clients": fleet.registry.rows,
                **provenance(e.device),
            },
            kept=lambda: {"evaluated": tests.down, "guard": guard.state()},
            again="flwr run goes on from it",
        ),
        state,
        extra,
    )  # fmt: skip
    accuracy = result["test"]["accuracy"]
    known = "unknown" if accuracy is None else f"{accuracy:.1%}"
    _LOG.info("finished: accuracy %s, files in %s", known, store.folder)
    return result


@dataclass
class _Log(Silent):
    """Tells the ServerApp's log how a run goes on."""

    store: Store
    rounds: int = 0

    def start(self, experiment: Experiment, done: int) -> None:
        e, self.rounds = experiment, experiment.rounds
        _LOG.info("%s, %d rounds, seed %d, in %s", e.method, e.rounds, e.seed, self.store.folder)
        if done:
            _LOG.info("going on after round %d", done)

    def round(self, record: Record) -> None:
        _LOG.info("round %d/%d: %d answers, loss %.3f, %.1f s", record.round, self.rounds, len(record.cohort),
                  record.loss, record.more["seconds"])  # fmt: skip


def _joined(fleet: Fleet, setup: Setup, state: ServerState, store: Store) -> ServerState:
    """Number newcomers and give them rows; wait until there are clients enough for a round."""
    done, plan = int(state.round), setup.plan
    rows = max(int(setup.experiment.clients), fleet.registry.rows)
    least = plan.needed(plan.asked(rows))
    fleet.wait(done, enough=least, least=least)
    if fleet.settle(done) or not (store.folder / registry.FILE).exists():
        registry.save(store.folder / registry.FILE, fleet.registry)
        for member in fleet.registry.members:
            if member.joined == done:
                _LOG.info("%s is client %d", member.name, member.number)
    return registry.widened(state, fleet.registry.rows)


@dataclass
class _Attempts:
    """What a round has come to so far, over all attempts; by client."""

    good: dict[int, Reply] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    sent: dict[int, Params] = field(default_factory=dict)
    counted: dict[int, list[int]] = field(default_factory=dict)
    """Bytes down and up."""
    refused: dict[int, str] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    working: float = 0.0
    """Seconds that the slowest client trained."""
    waiting: float = 0.0


def _collect(fleet: Fleet, setup: Setup, guard: Guard, state: ServerState, now: Moment) -> Answers:
    """Ask clients until a quorum of good answers is there."""
    plan, done, began = setup.plan, now.done, time.monotonic()
    have = _Attempts()
    for _ in range(plan.repeats + 1):
        _attempt(fleet, setup, guard, (state, now), have)
        for client, why in (have.lost | have.refused).items():
            _LOG.warning("round %d goes on without client %d: %s", done + 1, client, why)
        needed = plan.needed(len(have.good | have.lost | have.refused))
        if len(have.good) >= needed:
            break
        _LOG.warning("round %d has %d good answers of %d that it needs", done + 1, len(have.good), needed)
        fleet.settle(done)
    else:
        raise FederationError(
            f"round {done + 1} had {len(have.good)} good answers in {plan.repeats + 1} attempts, but needs {needed}; "
            f"the state of round {done} is saved, and flwr run goes on from it"
        )
    cohort = sorted(have.good)
    dense = {client: traffic(params).dense for client, params in have.sent.items()}

    def account() -> Account:
        return Account(
            down=sum(down for down, _ in have.counted.values()),
            up=sum(up for _, up in have.counted.values()),
            dense_down=sum(dense.values()),
            dense_up=sum(dense[client] for client in cohort),
            more={
                "traffic": {str(client): each for client, each in sorted(have.counted.items())},
                "rejected": {str(client): why for client, why in sorted(have.refused.items())},
                "why_lost": {str(client): why for client, why in sorted(have.lost.items())},
                "seconds": round(time.monotonic() - began, 3),
                "seconds_waiting": round(have.waiting, 3),
                "seconds_training": round(have.working, 3),
            },
        )

    # In the order of clients, as the simulator has them.
    replies = [have.good[client] for client in cohort]
    weight = torch.tensor([reply.samples for reply in replies], dtype=state.round.dtype)
    adapted = tree.gather([dict(reply.params) for reply in replies])
    sent = tree.gather([dict(have.sent[client]) for client in cohort])
    update = Update(torch.tensor(cohort), adapted, weight, sent)
    losses = torch.tensor([have.losses[client] for client in cohort], dtype=torch.float64)
    return Answers(cohort, sorted(have.lost), update, losses, account)


def _attempt(fleet: Fleet, setup: Setup, guard: Guard, at: tuple[ServerState, Moment], have: _Attempts) -> None:
    """Ask those clients of the round that have not answered yet, and check what they answer."""
    plan, (state, now) = setup.plan, at
    done = now.done
    nodes = {n: node for n, node in fleet.trainers(fleet.online()).items() if not guard.excluded(n)}
    rows = max(int(setup.experiment.clients), fleet.registry.rows)
    here = torch.tensor([float(n in nodes) for n in range(rows)], dtype=torch.float64)
    asked = [n for n in choose(now.key, done, rows, plan.asked(rows), here).tolist() if n not in have.good]
    messages = {}
    for client in asked:
        if client not in have.sent:
            have.sent[client] = setup.task.algorithm.emit.apply(state.params, torch.tensor(client), state.round)
        params = encode(have.sent[client], half=plan.half)
        have.counted.setdefault(client, [0, 0])[0] += len(params)
        order = Order(done, client, int(now.key), setup.spec, plan.half, params=params)
        messages[client] = (nodes[client], write_order(order))
    asking = time.monotonic()
    answers = exchange(
        fleet.grid, messages, MessageType.TRAIN, round=done + 1, seconds=plan.round_timeout, poll=plan.poll,
        meanwhile=lambda: fleet.greet(done),
    )  # fmt: skip
    have.waiting += time.monotonic() - asking
    have.lost = {client: why for client, why in have.lost.items() if client not in asked} | answers.lost
    for client in sorted(answers.content):
        expected = Expected(client, done + 1, have.sent[client])
        try:
            reply, loss, seconds = _checked(guard, expected, answers.content[client], have.counted)
        except Rejected as error:
            have.refused[client] = error.reason
            continue
        have.good[client], have.losses[client], have.working = reply, loss, max(have.working, seconds)
        have.refused.pop(client, None)  # it may have been refused in an earlier attempt at this round


def _checked(
    guard: Guard, expected: Expected, content: RecordDict, counted: dict[int, list[int]]
) -> tuple[Reply, float, float]:
    """Return an answer that may be aggregated, its loss and the seconds it took; or raise Rejected."""
    try:
        about, metrics = read_reply(content)
        data = payload(content)
        loss, seconds = float(metrics.get("loss", 0.0)), float(metrics.get("seconds", 0.0))
    except (FederationError, TypeError, ValueError) as error:
        raise guard.reject(expected.client, "damaged", str(error)) from None
    counted[expected.client][1] += len(data)
    reply = guard.check(expected, round=about.get("round"), samples=metrics.get("rows"), payload=data)
    return reply, loss if abs(loss) < 1e30 else 0.0, seconds


# --- evaluation ----------------------------------------------------------------------------------------------------


Reports = Mapping[int, Mapping[str, Any]]
"""Clients' own figures, by client."""


@dataclass
class Tests:
    """Lets clients test their own models, and counts what that costs."""

    fleet: Fleet
    setup: Setup
    down: int
    """Bytes of the models that they were sent."""

    def run(self, state: ServerState) -> Tested:
        """Let every client that is there test its own model."""
        reports, down = _evaluate(self.fleet, self.setup, state)
        self.down += down
        return Tested(_summary(self.setup, state, reports), lambda: _files(self.fleet, self.setup, state, reports))


def _evaluate(fleet: Fleet, setup: Setup, state: ServerState) -> tuple[Reports, int]:
    """Return what clients say of their own models, and the bytes of those."""
    algorithm, plan, done = setup.task.algorithm, setup.plan, int(state.round)
    fit = methods.traits(setup.experiment.method, setup.experiment.options).admits_by_fitting
    online = fleet.online()
    messages, down = {}, 0
    for node, member in sorted(fleet.present.items(), key=lambda item: item[1].number):
        if node not in online:
            continue
        if member.trains:
            params = algorithm.serve(state.params, torch.tensor(member.number), state.round)
        elif fit:
            # Of the others' embeddings a newcomer needs the mean alone.
            params = state.params | {EMBEDDING: state.params[EMBEDDING].mean(0, keepdim=True)}
        else:
            params = algorithm.admit(state.params, state.round, ())
        data = encode(params, half=plan.half)
        down += len(data)
        whole = fit and not member.trains
        order = Order(done, member.number, int(state.key), setup.spec, plan.half, whole, data)
        messages[member.number] = (node, write_order(order))
    answers = exchange(
        fleet.grid, messages, MessageType.EVALUATE, round=done, seconds=plan.round_timeout, poll=plan.poll,
        meanwhile=lambda: fleet.greet(done),
    )  # fmt: skip
    reports = {}
    for client, content in sorted(answers.content.items()):
        try:
            reports[client] = figures.checked(read_reply(content)[1], plan.limits.max_samples)
        except (ArithmeticError, TypeError, ValueError) as error:
            answers.lost[client] = str(error)
    for client, why in answers.lost.items():
        _LOG.warning("client %d is not evaluated: %s", client, why)
    return reports, down


def _parts(reports: Reports) -> dict[str, list[Mapping[str, Any]]]:
    return {
        "test": [each for client, each in reports.items() if client < registry.GUESTS],
        "unseen": [each for client, each in reports.items() if client >= registry.GUESTS],
    }


def _summary(setup: Setup, state: ServerState, reports: Reports) -> dict[str, Any]:
    parts = {name: figures.pooled(part) for name, part in _parts(reports).items()}
    shared = {name: value for name, value in state.params.items() if not name.startswith("server.")}
    clients = [client for client in reports if client < registry.GUESTS] or [0]
    found = [
        sparsity(shared | masks_of(setup.task.algorithm.serve(state.params, torch.tensor(client), state.round)))
        for client in clients
    ]
    test, unseen = (parts[name]["accuracy"] for name in ("test", "unseen"))
    return parts | {
        "gap": None if test is None or unseen is None else unseen - test,
        "gap_interval": None,
        "sparsity": {key: sum(each[key] for each in found) / len(found) for key in ("layer", "model")},
        "diagnostics": diagnose(setup.task.algorithm, state, int(setup.experiment.clients)),
    }


def _files(
    fleet: Fleet, setup: Setup, state: ServerState, reports: Reports
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return what `metavd show` and `metavd report` read beside the result."""
    rows = fleet.registry.rows
    lines = [
        figures.line(client if client < registry.GUESTS else rows + client - registry.GUESTS, report,
                     unseen=client >= registry.GUESTS)
        for client, report in reports.items()
    ]  # fmt: skip
    more = figures.details(_parts(reports)) | {
        "version": DETAILS,
        "rates": drawn_rates(setup.task.algorithm, state, rows),
        "embeddings": state.params[EMBEDDING].tolist() if EMBEDDING in state.params else None,
    }
    nobody = {"client": 0, "unseen": 0, "train_size": 0, "test_size": 0}
    return lines or [nobody], more
