"""Clients that are slow, late, lost or killed."""

from __future__ import annotations

from collections import Counter

from flwr.app import Message

from .answers import bytes_, told
from .stage import CLIENTS, Act, Event, Fault, ever, never, two


def silent(_: Event) -> list[Message]:
    """Say nothing."""
    return []


def slow(looks: int) -> Act:
    """Answer after so many more looks of the server."""

    def act(event: Event) -> list[Message]:
        event.stage.held.append((looks, event.reply))
        return []

    return act


def late(rounds: int) -> Act:
    """Answer so many rounds too late, to a question that nobody remembers."""

    def act(event: Event) -> list[Message]:
        event.stage.later.append((event.stage.now + rounds, event.reply))
        return []

    return act


def leaves(back: int | None = None, *, say: bool = False, new: bool = False) -> Act:
    """Go offline in the middle of a round; come back so many rounds later, perhaps as a new process."""

    def act(event: Event) -> list[Message]:
        node = event.order.metadata.dst_node_id
        event.stage.nodes[node].online = False

        def home() -> None:
            event.stage.nodes[node].online = True
            if new:
                event.stage.renamed(node)

        if back is not None:
            event.stage.errands.append((event.stage.now + back, home))
        reason = "Node Unavailable: no heartbeat"
        return told(3, reason)(event) if say else []

    return act


def crowd(attempts: int, act: Act) -> Act:
    """Let the same happen to all clients but one, in so many attempts at the round."""

    def acts(event: Event) -> list[Message]:
        inner, seen, round = event.stage.answer, Counter[int](), event.stage.now
        spared = (event.stage.client + 1) % CLIENTS
        seen[event.stage.client] += 1

        def answer(message: Message) -> Message | None:
            found = inner(message)
            client = event.stage.number(message.metadata.dst_node_id)
            mine = message.metadata.message_type == "train" and int(message.metadata.group_id) == round
            if found is None or not mine or client == spared or seen[client] >= attempts:
                return found
            seen[client] += 1
            arrives = act(Event(event.stage, message, found))
            return arrives[0] if arrives else None

        event.stage.answer = answer  # type: ignore[method-assign]
        return act(event)

    return acts


CROWD = {"client": CLIENTS - 1, "absent": never, "named": False}
"""The last client answers first, so that all others follow it."""
WAITS = [
    Fault("slow client", "three looks", slow(3), absent=never, named=False),
    Fault("slow client", "thirty looks", slow(30), absent=never, named=False),
    Fault("late reply", "one round", late(1), quick=True),
    Fault("late reply", "two rounds", late(2), quick=True),
    Fault("lost client", "silent once", silent, quick=True),
    Fault("lost client", "silent for ever", silent, absent=ever, lasting=True, quick=True),
    Fault("lost client", "gone for good", leaves(), absent=ever, quick=True),
    Fault("lost client", "no quorum at first", crowd(1, silent), **CROWD, quick=True),
    Fault("lost client", "no quorum until started again", crowd(3, silent), **CROWD, quick=True),
    Fault("lost client", "no quorum of sound answers at first", crowd(1, bytes_(lambda data: data[:-1])),
          **CROWD, config=(("max-offences", 9),)),
    Fault("client killed", "back with the next round", leaves(1, say=True),
          absent=two),
    Fault("client killed", "back as a new process", leaves(1, say=True, new=True),
          absent=two),
    Fault("client killed", "unheard, and back as a new process", leaves(1, new=True), quick=True,
          absent=two),
    Fault("client killed", "for good", leaves(say=True), absent=ever),
]  # fmt: skip
