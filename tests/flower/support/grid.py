"""A federation without processes: a grid that calls the ClientApp where Flower would send a message."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from metavd.flower.client import app as client_app

Tamper = Callable[[Message, int], Message | None]
"""(a reply, the node it comes from) -> what arrives in its place; None: nothing."""


@dataclass
class Node:
    """A node: what it is configured with, and what leaves it."""

    config: dict[str, Any]
    key: bytes = b""
    online: bool = True
    sent: list[Message] = field(default_factory=list)


@dataclass
class FakeGrid(Grid):
    """Nodes by id; a message is answered when somebody asks for the answer, the last one first."""

    nodes: dict[int, Node]
    tamper: Tamper = lambda reply, _: reply
    before: Callable[[Message], None] = lambda _: None
    waiting: dict[str, Message] = field(default_factory=dict)
    received: list[Message] = field(default_factory=list)
    """Everything that the server sent."""

    def __post_init__(self) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **how: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [number for number, node in self.nodes.items() if node.online]

    def get_nodes(self) -> Iterable[Any]:
        return [SimpleNamespace(node_id=n, public_key=self.nodes[n].key) for n in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            ids.append(message.metadata.message_id)
            self.waiting[ids[-1]] = message
            self.received.append(message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        asked = [self.waiting.pop(each) for each in reversed(list(message_ids)) if each in self.waiting]
        replies = [self.answer(message) for message in asked]
        return [reply for reply in replies if reply is not None]

    def answer(self, message: Message) -> Message | None:
        self.before(message)
        number = message.metadata.dst_node_id
        node = self.nodes[number]
        if not node.online:
            return None
        context = Context(run_id=1, node_id=number, node_config=node.config, state=RecordDict(), run_config={})
        try:
            reply = client_app(message, context)
        except Exception as error:
            reply = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = number
        node.sent.append(reply)
        return self.tamper(reply, number)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError


def shares(count: int, first: int = 0, **config: Any) -> dict[int, Node]:
    """Nodes with shares of a dataset; their ids say nothing about their shares."""
    return {
        1000 - 7 * i: Node({"partition-id": i, "num-partitions": count, **config}, key=f"key {i}".encode())
        for i in range(first, first + count)
    }


SMALL = "unseen=0 model=mlp width=8 local_epochs=1 test_share=0.8"
"""A network that trains at once."""
