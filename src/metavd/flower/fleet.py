"""The nodes that are there, and waiting for their answers: every wait here has an end.

A node is asked once in a run who it is (`hello`). Answers to that come in while training goes on, so that a newcomer
never holds up a round; it takes part from the next one on.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from . import compat
from .audit import Audit
from .config import FederationError, RunConfig
from .message import Order, cleaned, read_reply, write_order
from .registry import Candidate, Member, Roster, admit, by_key
from .site import Look, misfits, read_look

_LOG = logging.getLogger("flwr")
_AGAIN = 5.0
"""Seconds after which a node that could not say hello is asked again."""
Key = TypeVar("Key", bound=Hashable)


class Replies(NamedTuple):
    """What came back: contents, and of those that did not answer why."""

    content: dict[Any, RecordDict]
    lost: dict[Any, str]
    late: frozenset[Any] = frozenset()
    """Those of the lost that said nothing at all."""


@dataclass
class Pending:
    """Messages whose answers are still to come, by id."""

    grid: Grid
    waiting: dict[str, tuple[Any, int]] = field(default_factory=dict)
    """Message id -> whom it stands for, and the node that it went to."""

    def send(self, who: Any, node: int, content: RecordDict, *, kind: str, round: int, seconds: float) -> str:
        """Send one message, which dies after so many seconds; return why it could not be sent, or nothing."""
        message = Message(content, node, kind, ttl=seconds, group_id=str(round))
        # One by one: a large cohort's weights at once may be more than the SuperLink takes.
        ids = list(self.grid.push_messages([message]))
        if not ids or not ids[0]:
            return "the SuperLink did not take its message"
        self.waiting[ids[0]] = (who, node)
        return ""

    def take(self) -> Replies:
        """Return what has come by now."""
        content, lost = {}, {}
        for reply in self.grid.pull_messages(list(self.waiting)) if self.waiting else ():
            who, node = self.waiting.pop(reply.metadata.reply_to_message_id, (None, None))
            if who is None:
                continue
            if reply.has_error():
                lost[who] = cleaned(compat.reason(reply.error.reason))
            elif reply.metadata.src_node_id != node:
                lost[who] = "another node answered in its place"
            else:
                content[who] = reply.content
        return Replies(content, lost)


def exchange(
    grid: Grid,
    messages: Mapping[Key, tuple[int, RecordDict]],
    kind: str,
    *,
    round: int,
    seconds: float,
    poll: float,
    meanwhile: Callable[[], None] = lambda: None,
    enough: Callable[[Mapping[Key, RecordDict]], bool] = lambda _: False,
) -> Replies:
    """Send every node its own message and wait for the answers, at most so many seconds."""
    pending = Pending(grid)
    content: dict[Key, RecordDict] = {}
    lost: dict[Key, str] = {}
    ends = time.monotonic() + seconds
    for who, (node, records) in messages.items():
        if why := pending.send(who, node, records, kind=kind, round=round, seconds=seconds):
            lost[who] = why
    while pending.waiting and time.monotonic() < ends and not enough(content):
        came = pending.take()
        content |= came.content
        lost |= came.lost
        meanwhile()
        if pending.waiting and not (came.content or came.lost):
            time.sleep(poll)
    waited = min(seconds, time.monotonic() - ends + seconds)
    late = {who: f"no answer within {waited:.0f} s" for who, _ in pending.waiting.values()}
    return Replies(content, lost | late, frozenset(late))


@dataclass
class Fleet:
    """Who is there, and who they are."""

    grid: Grid
    config: RunConfig
    registry: Roster
    audit: Audit
    present: dict[int, Member] = field(default_factory=dict)
    """Nodes that said hello, by node id."""
    looks: dict[str, Look] = field(default_factory=dict)
    """What they said of their rows, by identity."""
    fits: Callable[[Look], None] = lambda _: None
    """Refuses rows that a run under way does not take."""
    refused: dict[int, str] = field(default_factory=dict)
    candidates: dict[int, Candidate] = field(default_factory=dict)
    """Nodes that said hello and have no number yet."""
    times: dict[int, float] = field(default_factory=dict)
    """Seconds after which each client's last answer came."""
    silences: dict[int, int] = field(default_factory=dict)
    """Attempts in a row to which each client said nothing."""
    _hellos: Pending = field(init=False)
    _keys: dict[int, str] = field(default_factory=dict)
    _asked: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._hellos = Pending(self.grid)

    def online(self) -> set[int]:
        """Return the nodes that are connected now, and learn their keys."""
        try:
            nodes = list(self.grid.get_nodes())
        except (NotImplementedError, AttributeError):  # the simulation engine has no keys
            return set(self.grid.get_node_ids())
        self._keys |= {node.node_id: hashlib.sha256(node.public_key).hexdigest() for node in nodes if node.public_key}
        return {node.node_id for node in nodes}

    def greet(self, done: int) -> None:
        """Ask nodes that nobody knows who they are, and hear those that were asked before."""
        now, online = time.monotonic(), self.online()
        for node in online - self.present.keys() - self.refused.keys() - self.candidates.keys():
            if now < self._asked.get(node, 0.0):
                continue
            self._asked[node] = now + self.config.join_timeout
            order = write_order(Order(done, 0, 0, ""))
            self._hellos.send(node, node, order, kind=MessageType.QUERY, round=done, seconds=self.config.join_timeout)
        came = self._hellos.take()
        for node, why in came.lost.items():
            _LOG.warning("node %d did not say hello: %s", node, why)
            self._asked[node] = now + _AGAIN
        for node, content in came.content.items():
            try:
                self._meet(node, content, online)
            except (ArithmeticError, RecursionError, TypeError, ValueError) as error:  # whatever a node may claim
                self._refuse(node, cleaned(error))

    def _meet(self, node: int, content: RecordDict, online: set[int]) -> None:
        about, _ = read_reply(content)
        name, partition = cleaned(about.get("name", node), 80), int(about.get("partition", -1))
        try:
            look = read_look(about.get("look"), self.config.max_samples)
            if look is not None:
                self.fits(look)
        except FederationError as error:
            raise FederationError(f"{name}: {error}") from None
        if look is None and not self.config.data:
            raise FederationError(f"{name} holds a share of a dataset, but the run config names none with data")
        key = self._keys.get(node) if self.config.identity == "key" else None
        identity = by_key(key) if key else f"name {name}"
        here = {other: each.identity for other, each in (self.present | self.candidates).items() if other in online}
        if identity in here.values():
            raise FederationError(f"{name} is there twice; give every node a name or a key of its own")
        known, trains = self.registry.find(identity), bool(about.get("trains", True))
        if known is not None and known.trains != trains:
            raise FederationError(
                f"{name} joined with train={known.trains} and is back with {trains}; start it as before"
            )
        if look is not None:
            self.looks[identity] = look
        order = (partition if partition >= 0 else 1 << 62, name)
        self.candidates[node] = Candidate(identity, name, trains, order)

    def agree(self) -> dict[str, Look]:
        """Return what those say of their rows whose rows go together, by name; the others are left out."""
        called = Counter(each.name for each in self.candidates.values())
        nodes = {
            each.name if called[each.name] == 1 else f"{each.name} (node {node})": node
            for node, each in self.candidates.items()
        }
        there = {name: self.looks[self.candidates[node].identity] for name, node in nodes.items()}
        for name, why in misfits(there, self.config.classes).items():
            self._refuse(nodes[name], why)
            del there[name], self.looks[self.candidates.pop(nodes[name]).identity]
        return there

    def _refuse(self, node: int, why: str) -> None:
        self.refused[node] = why
        _LOG.warning("node %d is left out: %s", node, why)
        self.audit.add("left out", node=node, why=why)

    def settle(self, done: int) -> bool:
        """Give everyone who said hello a number; return whether somebody is new to the federation."""
        before = self.registry
        self.registry = admit(before, list(self.candidates.values()), done)
        numbers = {each.identity: each for each in self.registry.members}
        self.present |= {node: numbers[each.identity] for node, each in self.candidates.items()}
        self.candidates = {}
        return self.registry != before

    def trainers(self, online: set[int]) -> dict[int, int]:
        """Return the node of every client that is there and trains, by client."""
        return {each.number: node for node, each in sorted(self.present.items()) if each.trains and node in online}

    def wait(self, done: int, *, enough: int, least: int, everyone: bool = False) -> None:
        """Wait until enough clients are there; at the end of `join-timeout` the least number will do.

        everyone=True waits also for all who are connected to say hello.
        """
        ends = time.monotonic() + self.config.join_timeout
        while True:
            self.greet(done)
            online = self.online()
            new = sum(each.trains for node, each in self.candidates.items() if node in online)
            count = len(self.trainers(online)) + new
            met = self.present.keys() | self.refused.keys() | self.candidates.keys()
            # Those who were left out are not waited for, where the others will do.
            out = len(self.refused.keys() & online) if count >= least and not online - met else 0
            if count + out >= enough and not (everyone and online - met):
                return
            if time.monotonic() > ends:
                break
            time.sleep(self.config.poll)
        if count < least:
            told = "; ".join(dict.fromkeys(self.refused.values()))
            raise FederationError(
                f"within {self.config.join_timeout:.0f} s {count} of at least {least} clients came; start more and run "
                f"again{f' (left out: {told})' if told else ''}"
            )
