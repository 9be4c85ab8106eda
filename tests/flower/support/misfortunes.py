"""What befalls the server: its network, its SuperLink, its process and its disk."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

from flwr.app import Message

from .stage import Act, Event, Fault, Killed, Stage, never


def breaks(what: str, after: int, error: Callable[[], BaseException], *, new_ids: bool = False) -> Act:
    """Let the server's wish for the grid fail, after so many that are still granted."""

    def act(event: Event) -> list[Message]:
        left = [after]

        def cut(wish: str) -> None:
            if what not in {wish, "any"}:
                return
            left[0] -= 1
            if left[0] < 0:
                event.stage.cut = lambda _: None
                event.stage.struck += 1
                if new_ids:
                    for node in list(event.stage.nodes):
                        event.stage.renamed(node)
                raise error()

        event.stage.cut = cut
        return [event.reply]

    return act


def refusing(times: int) -> Act:
    """Let the SuperLink take no message for some time."""

    def act(event: Event) -> list[Message]:
        inner, left = event.stage.push_messages, [times]

        def push(messages: Iterable[Message]) -> list[str]:
            left[0] -= 1
            event.stage.struck += left[0] >= 0
            return [""] if left[0] >= 0 else inner(messages)

        event.stage.push_messages = push  # type: ignore[method-assign]
        return [event.reply]

    return act


def unreachable() -> BaseException:
    """What Flower raises when the SuperLink is gone for longer than it tries."""
    return ConnectionError("the SuperLink cannot be reached")


@contextlib.contextmanager
def failing_disk(stage: Stage, nth: int, error: Callable[[], BaseException]) -> Iterator[None]:
    """Let the nth write to disk after now fail before it is safe, once."""
    real, left = os.fsync, [nth]

    def fsync(file: int) -> None:
        left[0] -= 1
        if left[0] == -1:
            stage.struck += 1
            raise error()
        real(file)

    with mock.patch("os.fsync", fsync):
        yield


def writing(nth: int, error: Callable[[], BaseException]) -> Act:
    """Let the nth write after the round's answers fail."""

    def act(event: Event) -> list[Message]:
        event.stage.exits.enter_context(failing_disk(event.stage, nth, error))
        return [event.reply]

    return act


def full() -> BaseException:
    """What the system says of a full disk."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def ballast(free: int) -> Act:
    """Fill the run's own small file system, but for so many bytes; it is empty again when the run is started again."""

    def act(event: Event) -> list[Message]:
        event.stage.fill(free)
        event.stage.struck += 1
        return [event.reply]

    return act


TMPFS = (("tmpfs", True),)
SERVER = [
    *(Fault("network cut", f"{name}, after {after}", breaks(what, after, unreachable), absent=never, named=False)
      for name, what, after in (("sending", "push", 0), ("sending", "push", 2), ("hearing", "pull", 0),
                                ("hearing", "pull", 1), ("looking for nodes", "nodes", 0), ("anything", "any", 9))),
    *(Fault("SuperLink killed", f"after {after}", breaks("any", after, unreachable, new_ids=True), absent=never,
            named=False) for after in (0, 1, 5, 8)),
    Fault("SuperLink killed", "takes no message for a while", refusing(3), absent=never, named=False),
    *(Fault("ServerApp killed", f"at the grid, after {after}", breaks("any", after, Killed), absent=never, named=False)
      for after in (0, 1, 3, 7, 11)),
    *(Fault("ServerApp killed", f"at write {nth}", writing(nth, Killed), absent=never, named=False)
      for nth in range(10)),
    *(Fault("disk full", f"at write {nth}", writing(nth, full), absent=never, named=False) for nth in range(10)),
    *(Fault("disk full", f"{free} bytes left", ballast(free), absent=never, named=False, config=TMPFS)
      for free in (0, 4096, 16384, 32768)),
]  # fmt: skip
