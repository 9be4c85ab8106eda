"""A federation without processes: a rehearsal in which messages may be tampered with on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message

from metavd.flower.rehearse import Node, Rehearsal

Tamper = Callable[[Message, int], Message | None]
"""(a reply, the node it comes from) -> what arrives in its place; None: nothing."""


@dataclass
class FakeGrid(Rehearsal):
    """A rehearsal; `before` is told of a message that arrives, `tamper` changes what a node answers."""

    tamper: Tamper = lambda reply, _: reply
    before: Callable[[Message], None] = lambda _: None
    received: list[Message] = field(default_factory=list)
    """Everything that the server sent."""

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        self.received += messages
        return super().push_messages(messages)

    def answer(self, message: Message) -> Message | None:
        self.before(message)
        reply = super().answer(message)
        return None if reply is None else self.tamper(reply, message.metadata.dst_node_id)


def shares(count: int, first: int = 0, **config: Any) -> dict[int, Node]:
    """Nodes with shares of a dataset; their ids say nothing about their shares."""
    return {
        1000 - 7 * i: Node({"partition-id": i, "num-partitions": count, **config}, key=f"key {i}".encode())
        for i in range(first, first + count)
    }


SMALL = "unseen=0 model=mlp width=8 local_epochs=1 test_share=0.8"
"""A network that trains at once."""
