"""Tell other programs how a run goes on. A tracker is a listener; a new one is one function and one entry here.

A tracker gets the run's folder and the experiment, and writes nothing before the run starts: only then is it sure
that the folder is this run's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..engine.rounds import Listener, Record
from ..errors import UserError
from .settings import Experiment, to_toml

Tracker = Callable[[Path, Experiment], Listener]


class TrackError(UserError):
    """A tracker that cannot be used here; the text says what would be right."""


class _Both:
    """Listeners that hear the same."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = listeners

    def start(self, experiment: Experiment, done: int) -> None:
        for listener in self.listeners:
            listener.start(experiment, done)

    def round(self, record: Record) -> None:
        for listener in self.listeners:
            listener.round(record)

    def evaluation(self, round: int, summary: Mapping[str, Any]) -> None:
        for listener in self.listeners:
            listener.evaluation(round, summary)

    def note(self, text: str) -> None:
        for listener in self.listeners:
            listener.note(text)


def both(*listeners: Listener) -> Listener:
    """Return one listener that tells all of them, in this order."""
    return listeners[0] if len(listeners) == 1 else _Both(*listeners)


def numbers(summary: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a nested mapping, named by their way in; lists and texts are no curves.

    >>> list(numbers({"test": {"accuracy": 0.5, "nll": None}, "gap": 0.1, "cohort": [1, 2]}))
    [('test/accuracy', 0.5), ('gap', 0.1)]
    """
    for key, value in summary.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield f"{prefix}{key}", float(value)


class _TensorBoard:
    """Writes event files to FOLDER/tensorboard. A resumed run takes back what it had written beyond its checkpoint."""

    def __init__(self, folder: Path, writer: Callable[..., Any]) -> None:
        self.folder, self.open = folder, writer
        self.writer: Any = None

    def start(self, experiment: Experiment, done: int) -> None:
        self.writer = self.open(str(self.folder / "tensorboard"), purge_step=done + 1)
        self.writer.add_text("config.toml", f"```\n{to_toml(experiment)}```", done)
        self.writer.flush()

    def round(self, record: Record) -> None:
        for name, value in numbers({
            "train/loss": record.loss, "train/clients": len(record.cohort), "train/lost": len(record.lost),
            "bytes/down": record.down, "bytes/up": record.up,
        }):  # fmt: skip
            self.writer.add_scalar(name, value, record.round)
        self.writer.flush()  # a run may be killed at any time, and who watches it wants to see it

    def evaluation(self, round: int, summary: Mapping[str, Any]) -> None:
        measured = {key: value for key, value in summary.items() if isinstance(value, Mapping) or key == "gap"}
        for name, value in numbers(measured):
            self.writer.add_scalar(name, value, round)
        self.writer.flush()

    def note(self, text: str) -> None:
        pass


def tensorboard(folder: Path, experiment: Experiment) -> Listener:  # noqa: ARG001 - told again at the start
    """Return a listener that writes what TensorBoard shows."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (an extra that few have)
    except ImportError as error:
        raise TrackError(
            f"--track tensorboard needs the package tensorboard ({error}); install it with pip install 'metavd[track]'"
        ) from None
    return _TensorBoard(folder, SummaryWriter)


TRACKERS: dict[str, Tracker] = {"tensorboard": tensorboard}
