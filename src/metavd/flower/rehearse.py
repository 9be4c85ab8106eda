"""A federation in one process, to rehearse a real one: the same two apps and messages, without network and keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from . import compat
from .client import app as client_app
from .config import run_config
from .server import run


@dataclass
class Node:
    """A node: what it is configured with, and what leaves it."""

    config: dict[str, Any]
    key: bytes = b""
    online: bool = True
    sent: list[Message] = field(default_factory=list)


@dataclass
class Rehearsal(Grid):
    """Nodes by id; a message is answered when somebody asks for the answer, the last one first."""

    nodes: dict[int, Node]
    waiting: dict[str, Message] = field(default_factory=dict)

    def __post_init__(self) -> None:
        compat.be_server()

    def set_run(self, run: Any) -> None:
        """There is one run."""

    @property
    def run(self) -> Any:
        """Nothing that metavd asks for."""
        return None

    def create_message(self, *args: Any, **how: Any) -> Message:
        """Refuse what Flower itself no longer uses."""
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are there."""
        return [number for number, node in self.nodes.items() if node.online]

    def get_nodes(self) -> Iterable[Any]:
        """Return them with their keys."""
        return [SimpleNamespace(node_id=n, public_key=self.nodes[n].key) for n in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Take what the server sends."""
        sent = {compat.numbered(message): message for message in messages}
        self.waiting |= sent
        return list(sent)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return what nodes answer."""
        asked = [self.waiting.pop(each) for each in reversed(list(message_ids)) if each in self.waiting]
        replies = [self.answer(message) for message in asked]
        return [reply for reply in replies if reply is not None]

    def answer(self, message: Message) -> Message | None:
        """Let a node answer a message, as its ClientApp does anywhere."""
        number = message.metadata.dst_node_id
        node = self.nodes[number]
        if not node.online:
            return None
        context = Context(run_id=1, node_id=number, node_config=node.config, state=RecordDict(), run_config={})
        try:
            reply = client_app(message, context)
        except Exception as error:
            reply = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)
        compat.numbered(reply, number)
        node.sent.append(reply)
        return reply

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Refuse what the server does not use."""
        raise NotImplementedError


def rehearse(sites: Mapping[str, Mapping[str, Any]], **config: Any) -> dict[str, Any]:
    """Carry out a federation in this process and return its result, as the run's folder has it.

    Args:
        sites: each site's node config by its name, such as `{"north": {"data": "npz:north.npz"}}`, or
            `{"partition-id": 0}` where the run's `data` is shared out.
        config: the run config, `-` written as `_`: `method="reptile+metavd", rounds=5, out="runs/rehearsal"`.
    """
    nodes = {
        number: Node({"name": name, "num-partitions": len(sites), **node}, key=name.encode())
        for number, (name, node) in enumerate(sites.items(), 1)
    }
    chosen = {key.replace("_", "-"): value for key, value in config.items()}
    return run(Rehearsal(nodes), run_config({"poll": 0.01, "clients": len(sites), **chosen}))
