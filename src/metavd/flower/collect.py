"""One round's answers: asked for, waited for, checked, and put in the order of client numbers."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

import torch
from flwr.app import MessageType, RecordDict
from torch import Tensor

from .. import tree
from ..core.aggregate import bounded
from ..core.types import ServerState, Update
from ..engine.cohorts import called, unanswered
from ..engine.rounds import Account, Returned
from ..engine.task import Task
from ..runs.settings import Experiment
from ..tree import Params
from ..wire import Expected, Guard, Rejected, Reply, decode, encode, traffic
from .config import FederationError, RunConfig
from .fleet import Fleet, exchange
from .message import Order, cleaned, payload, read_reply, write_order

_LOG = logging.getLogger("flwr")
_LEAST = 30.0
"""Seconds that a round waits for everybody at least: answers of a moment say little."""
_FANCY = 1e6
"""No loss of a client, and no seconds that it trains, come to so much."""


@dataclass(frozen=True)
class FederationSetup:
    """A federation's run, ready to go."""

    config: RunConfig
    experiment: Experiment
    spec: str
    task: Task
    cohorts: Tensor | None = None
    """Key of whom rounds ask, where nobody else may know that; None: the run's."""
    asking: Callable[[], None] = lambda: None
    """Called before clients are asked for answers."""


@dataclass
class _Attempts:
    """What a round has come to so far, over all attempts; by client."""

    turns: Mapping[int, int]
    """The last round of each client that is part of the server's state."""
    good: dict[int, Reply] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    sent: dict[int, Params] = field(default_factory=dict)
    packed: dict[int, bytes] = field(default_factory=dict)
    """What was sent, as it travels."""
    counted: dict[int, list[int]] = field(default_factory=dict)
    """Bytes down and up."""
    refused: dict[int, str] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    anew: set[int] = field(default_factory=set)
    """Clients that had kept nothing, or lost it."""
    working: float = 0.0
    """Seconds that the slowest client trained."""
    waiting: float = 0.0


def collect(fleet: Fleet, setup: FederationSetup, guard: Guard, state: ServerState, turns: dict[int, int]) -> Returned:
    """Ask clients until a quorum of good answers is there; `turns` are the clients' last rounds."""
    config, done, began = setup.config, int(state.round), time.monotonic()
    have, needed = _Attempts(turns), 0
    for attempt in range(config.repeats + 1):
        if attempt:  # a client that is away fails at once: without waiting, every attempt is over before it is back
            fleet.wait(done, enough=needed, least=0)
            fleet.settle(done)
        _attempt(fleet, setup, guard, state, have)
        for client, why in (have.lost | have.refused).items():
            _LOG.warning("round %d goes on without client %d: %s", done + 1, client, why)
        asked = len(have.good | have.lost | have.refused)
        # Where each client's own coin decides, it may be that nobody is asked.
        needed = config.needed(asked) if asked or setup.task.algorithm.privacy is None else 0
        if len(have.good) >= needed:
            break
        _LOG.warning("round %d has %d good answers of %d that it needs", done + 1, len(have.good), needed)
    else:
        raise FederationError(
            f"round {done + 1} had {len(have.good)} good answers in {config.repeats + 1} attempts, but needs {needed}; "
            f"the state of round {done} is saved, and flwr run goes on from it"
        )
    cohort = sorted(have.good)
    for client in cohort:
        if client in have.anew and turns.get(client):
            _LOG.warning("client %d has lost what it kept after round %d and began anew", client, turns[client])
    turns |= dict.fromkeys(cohort, done + 1)
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

    if not cohort:
        return Returned([], sorted(have.lost), *unanswered(state), account)
    # In the order of clients, as the simulator has them.
    replies = [have.good[client] for client in cohort]
    weight = torch.tensor([reply.samples for reply in replies], dtype=state.round.dtype)
    weighs = bounded(weight, config.max_share) if config.max_share else weight
    for client, own, counted in zip(cohort, weight.tolist(), weighs.tolist(), strict=True):
        if counted < own:
            _LOG.info("round %d: client %d weighs as %g rows, not as the %g that it claims (max-share is %g)", done + 1,
                      client, counted, own, config.max_share)  # fmt: skip
    adapted = tree.gather([dict(reply.params) for reply in replies])
    sent = tree.gather([dict(have.sent[client]) for client in cohort])
    update = Update(torch.tensor(cohort), adapted, weight, sent)
    losses = torch.tensor([have.losses[client] for client in cohort], dtype=torch.float64)
    return Returned(cohort, sorted(have.lost), update, losses, account)


def _attempt(fleet: Fleet, setup: FederationSetup, guard: Guard, state: ServerState, have: _Attempts) -> None:
    """Ask those clients of the round that have not answered yet, and check what they answer."""
    config, done = setup.config, int(state.round)
    nodes = {n: node for n, node in fleet.trainers(fleet.online()).items()
             if not guard.excluded(n) and fleet.silences.get(n, 0) < config.max_silences}  # fmt: skip
    rows = max(int(setup.experiment.clients), fleet.registry.rows)
    here = torch.tensor([float(n in nodes) for n in range(rows)], dtype=torch.float64)
    key = state.key if setup.cohorts is None else setup.cohorts
    drawn = called(setup.task.algorithm, key, done, num_clients=rows, cohort=config.asked(rows), available=here)
    asked = [n for n in drawn.tolist() if n not in have.good]
    messages = {}
    for client in asked:
        if client not in have.sent:
            made = setup.task.algorithm.emit.apply(state.params, torch.tensor(client), state.round)
            have.packed[client] = encode(made, half=config.half)
            # What arrives is what the server later takes the difference to, so it is rounded here as it is there.
            have.sent[client] = decode(have.packed[client], like=made) if config.half else made
        have.counted.setdefault(client, [0, 0])[0] += len(have.packed[client])
        order = Order(
            done, client, int(state.key), setup.spec, config.half, turn=have.turns.get(client, 0),
            params=have.packed[client],
        )  # fmt: skip
        messages[client] = (nodes[client], write_order(order))
    setup.asking()
    fleet.audit.add("ask", round=done + 1, clients=asked)
    excluded = {client for client in asked if guard.excluded(client)}
    asking = time.monotonic()
    took: dict[int, float] = {}

    def late(came: Mapping[int, RecordDict]) -> bool:
        """Return whether those who have not answered yet are waited for in vain, by the times of all answers so far."""
        now = time.monotonic() - asking
        took.update(dict.fromkeys(came.keys() - took.keys(), now))
        known = [*took.values(), *(fleet.times[client] for client in asked if client in fleet.times)]
        if not config.slack or not known or len(have.good) + len(came) < config.needed(len(have.good) + len(asked)):
            return False
        return now > max(_LEAST, config.slack * max(known))

    answers = exchange(
        fleet.grid, messages, MessageType.TRAIN, round=done + 1, seconds=config.round_timeout, poll=config.poll,
        meanwhile=lambda: fleet.greet(done), enough=late,
    )  # fmt: skip
    waited = time.monotonic() - asking
    have.waiting += waited
    fleet.times |= dict.fromkeys(answers.content, waited) | took  # the last ones came just now
    _count_silences(fleet, asked, set(asked) - answers.late, config)
    have.lost = {client: why for client, why in have.lost.items() if client not in asked} | answers.lost
    for client in sorted(answers.content):
        expected = _expected(fleet, client, done + 1, have)
        try:
            reply, loss, seconds = _checked(guard, expected, answers.content[client], have)
        except Rejected as error:
            have.refused[client] = error.reason
            continue
        have.good[client], have.losses[client], have.working = reply, loss, max(have.working, seconds)
        have.refused.pop(client, None)  # it may have been refused in an earlier attempt at this round
    taken = [(_expected(fleet, client, done + 1, have), have.good[client]) for client in sorted(have.good)]
    for outlier in guard.judge(taken):
        have.refused[outlier.client] = outlier.reason
        del have.good[outlier.client]
    accepted = {client: have.good[client].samples for client in asked if client in have.good}
    refused = {client: why for client, why in have.refused.items() if client in asked}
    fleet.audit.add("answers", round=done + 1, accepted=accepted, refused=refused, lost=answers.lost)
    for client in asked:
        if guard.excluded(client) and client not in excluded:
            fleet.audit.add("excluded", client=client, why=f"{guard.offences[client]} refused answers")


def _count_silences(fleet: Fleet, asked: list[int], spoke: Set[int], config: RunConfig) -> None:
    """Count the attempts in a row that each client said nothing to, not even that it failed."""
    for client in asked:
        fleet.silences[client] = 0 if client in spoke else fleet.silences.get(client, 0) + 1
        if fleet.silences[client] == config.max_silences:
            _LOG.warning(
                "client %d is asked no more: it has not answered %d times in a row", client, config.max_silences
            )
            fleet.audit.add("excluded", client=client, why=f"silent {config.max_silences} times in a row")


def _expected(fleet: Fleet, client: int, round: int, have: _Attempts) -> Expected:
    member = next(each for each in fleet.registry.members if each.number == client)
    look = fleet.looks.get(member.identity)
    said = math.inf if look is None else float(look.rows)
    return Expected(client, round, have.sent[client], said, float(member.rows))


def _checked(guard: Guard, expected: Expected, content: RecordDict, have: _Attempts) -> tuple[Reply, float, float]:
    """Return an answer that may be aggregated, its loss and the seconds it took; or raise Rejected."""
    try:
        about, metrics = read_reply(content)
        data = payload(content)
        loss, seconds = float(metrics.get("loss", 0.0)), float(metrics.get("seconds", 0.0))
    except (FederationError, ArithmeticError, TypeError, ValueError) as error:
        raise guard.reject(expected.client, "damaged", cleaned(error)) from None
    have.counted[expected.client][1] += len(data)
    reply = guard.check(expected, round=about.get("round"), samples=metrics.get("rows"), payload=data)
    if metrics.get("anew"):
        have.anew.add(expected.client)
    if metrics.get("changed"):
        _LOG.warning("client %d: the rows at this site are others than in its last turn", expected.client)
    # Both are for people, who should not read one client's fancy as everybody's.
    return reply, loss if abs(loss) < _FANCY else 0.0, seconds if 0 <= seconds < _FANCY else 0.0
