"""A grid on which one fault happens, and the federation that stands on it.

Everything but the grid is what is deployed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from flwr.app import Message

from .grid import FakeGrid, Node

CLIENTS = 4
ROUNDS = 3
SMALL = "model=mlp width=16 test_share=0.9 local_epochs=1"
METHODS = {
    "fedavg": SMALL,
    "reptile+metavd": f"{SMALL} hyper_width=8",
    "maml+metavd+drop": f"{SMALL} hyper_width=8 drop_from=1 threshold=0.02",
}
"""Weights alone, weights and rates, weights and rates and masks."""


class Killed(BaseException):
    """The ServerApp's process is gone."""


class Event(NamedTuple):
    """An honest reply that is about to arrive."""

    stage: Stage
    order: Message
    reply: Message


Act = Callable[[Event], list[Message]]
"""What arrives in the reply's place."""
Rounds = Callable[[int, int], set[int]]
"""(round of the fault, rounds of the run) -> some rounds."""


def once(at: int, rounds: int) -> set[int]:  # noqa: ARG001
    """The round of the fault."""
    return {at}


def never(at: int, rounds: int) -> set[int]:  # noqa: ARG001
    """No round: the answer counts, or is asked for again."""
    return set()


def ever(at: int, rounds: int) -> set[int]:
    """That round and all later ones."""
    return set(range(at, rounds + 1))


def all_rounds(at: int, rounds: int) -> set[int]:  # noqa: ARG001
    """Every round."""
    return set(range(1, rounds + 1))


def two(at: int, rounds: int) -> set[int]:
    """That round and the next."""
    return {at, at + 1} & set(range(rounds + 1))


@dataclass(frozen=True)
class Fault:
    """What goes wrong, once, with one client in one round."""

    kind: str
    name: str
    act: Act
    absent: Rounds = once
    """Rounds in which the client's answer does not count."""
    named: bool = True
    """Whether the record of the round must name the client."""
    quick: bool = False
    """Whether somebody is waited for in vain, so that waits had better be short."""
    method: str = ""
    """The only method that it makes sense with."""
    config: tuple[tuple[str, Any], ...] = ()
    lasting: bool = False
    """Whether it happens again in every later round."""
    client: int | None = None
    """Whom it happens to; anybody."""
    message: str = "train"
    """The message whose answer it spoils."""


OWN = {"network cut", "SuperLink killed", "ServerApp killed", "disk full"}
"""Kinds that strike the server, some time after they were set up."""


def _nothing(_: object) -> None: ...


class Stage(FakeGrid):
    """A grid on which one fault happens."""

    def __init__(self, nodes: dict[int, Node], fault: Fault, at: int, client: int) -> None:
        super().__init__(nodes)
        self.fault, self.at, self.client = fault, at, client
        self.struck = 0
        """How often something went wrong."""
        self.acting = False
        self.exits = contextlib.ExitStack()
        """What ends with the start of a run."""
        self.fill: Callable[[int], None] = _nothing
        """Fills the disk of the run, but for so many bytes."""
        self.trained: list[tuple[int, int]] = []
        """(round, client) of every order to train, since the run was started."""
        self.later: list[tuple[int, Message]] = []
        """Messages that arrive in a round in which nobody waits for them."""
        self.held: list[tuple[int, Message]] = []
        """Messages that arrive after some more looks."""
        self.cut: Callable[[str], None] = _nothing
        """Called before everything that the server wants of the grid."""
        self.errands: list[tuple[int, Callable[[], None]]] = []
        """What happens as soon as a round begins."""

    @property
    def now(self) -> int:
        """The round that is in flight."""
        return self.trained[-1][0] if self.trained else 0

    def number(self, node: int) -> int:
        """Return the client at a node."""
        return int(self.nodes[node].config["partition-id"])

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are there."""
        self.cut("nodes")
        return list(super().get_node_ids())

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Take messages, and note whom the server asks to train."""
        self.cut("push")
        several = list(messages)
        ids = super().push_messages(several)
        for message in several:
            if message.metadata.message_type == "train":
                self.trained.append((int(message.metadata.group_id), self.number(message.metadata.dst_node_id)))
                due = [errand for round, errand in self.errands if round <= self.now]
                self.errands = [(round, errand) for round, errand in self.errands if round > self.now]
                for errand in due:
                    errand()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Deliver what is due."""
        self.cut("pull")
        found = list(super().pull_messages(message_ids))
        found += [message for left, message in self.held if left <= 0]
        self.held = [(left - 1, message) for left, message in self.held if left > 0]
        found += [message for round, message in self.later if round <= self.now]
        self.later = [(round, message) for round, message in self.later if round > self.now]
        return found

    def answer(self, message: Message) -> Message | None:
        """Let a client answer, and the fault strike."""
        reply = super().answer(message)
        kind, round = message.metadata.message_type, int(message.metadata.group_id or 0)
        mine = kind == self.fault.message and self.number(message.metadata.dst_node_id) == self.client
        again = self.fault.lasting and round > self.at
        due = (round == self.at or kind != "train") and (self.fault.lasting or not self.acting)
        if reply is None or not mine or not (due or again):
            return reply
        self.acting = True
        arrives = self.fault.act(Event(self, message, reply))
        self.struck += self.fault.kind not in OWN
        # The base class delivers one message; others come with the next look.
        self.held = [(-1, more) for more in arrives[1:]] + self.held
        return arrives[0] if arrives else None

    def again(self) -> None:
        """Forget what only a running server knows; the nodes are still there."""
        self.exits.close()
        self.waiting.clear()
        self.held, self.later, self.trained = [], [], []

    def renamed(self, node: int) -> None:
        """Let a node come back as a process of its own: another node id, the same key and data."""
        old = self.nodes.pop(node)
        self.nodes[node + 5000] = Node(old.config, old.key)
