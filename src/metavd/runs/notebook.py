"""How a run from Python goes on: in a notebook a bar with its last figures, elsewhere what the run chose, on stderr."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ..engine.rounds import Listener, Record, Silent

_PAUSE = 0.2
"""Seconds between two pictures of the bar."""


def listener() -> Listener:
    """Return who is told of a run that was given no listener: a bar in a notebook, lines on stderr elsewhere."""
    return Bar() if in_notebook() else Lines()


def in_notebook() -> bool:
    """Whether a notebook's kernel runs this code; IPython is there already if it does."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


class Lines(Silent):
    """Prints what a run chose and what it warns of, below a line that names the run; rounds go by in silence."""

    title = ""

    def start(self, experiment: Any, done: int) -> None:  # noqa: ARG002
        """Remember the run's name, for its first line."""
        self.title = _title(experiment)

    def note(self, text: str) -> None:
        """Print a line."""
        if self.title:
            print(self.title, file=sys.stderr)
            self.title = ""
        print(f"  {text}", file=sys.stderr)


class Bar:
    """Shows the rounds that are over."""

    def start(self, experiment: Any, done: int) -> None:
        """Begin a bar."""
        shown = import_module("IPython.display")
        self.picture, self.notes = shown.HTML, list[str]()
        self.title, self.total = _title(experiment), experiment.rounds
        self.done, self.loss, self.accuracy, self.drawn = done, "", "", 0.0
        self.place = shown.display(self.picture(self._html()), display_id=True)

    def round(self, record: Record) -> None:
        """Move the bar."""
        self.done, self.loss = record.round, "" if record.loss is None else f", loss {record.loss:.3f}"
        self._draw(now=record.round >= self.total)

    def evaluation(self, round: int, summary: Mapping[str, Any]) -> None:
        """Show an evaluation; the last one ends the bar."""
        known = ((part, summary[part]["accuracy"]) for part in ("test", "unseen"))
        self.done = max(self.done, round)
        self.accuracy = "".join(f", {part} {value:.1%}" for part, value in known if value is not None)
        self._draw(now=True)

    def note(self, text: str) -> None:
        """Show a line below the bar."""
        if hasattr(self, "place"):
            self.notes.append(text)
            self._draw(now=True)
        else:
            print(text)  # before the run has begun, such as that data are read

    def _draw(self, *, now: bool) -> None:
        if now or time.monotonic() - self.drawn > _PAUSE:
            self.drawn = time.monotonic()
            self.place.update(self.picture(self._html()))

    def _html(self) -> str:
        said = html.escape(f"{self.title}: round {self.done} of {self.total}{self.loss}{self.accuracy}")
        below = "".join(f"<br><small>{html.escape(text)}</small>" for text in self.notes)
        return f'<progress value="{self.done}" max="{self.total}"></progress> {said}{below}'


def _title(experiment: Any) -> str:
    return f"{experiment.method} on {experiment.data}, seed {experiment.seed}"
