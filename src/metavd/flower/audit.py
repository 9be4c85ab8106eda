"""What happened in a federation's run, line by line, each sealed to the one before: OUT/audit.jsonl.

    hash = SHA-256 of the line without it;  before = the hash of the line before, of the first line nothing

A line that was changed, removed, put in or moved breaks the chain at that place. That lines are missing at the end can
be told only by whoever knows the last line's hash, the head: it stands in `result.json` and in the run's log, and every
checkpoint remembers it. Whoever may write to the folder can forge a whole chain, but not one with a head that somebody
has written down elsewhere.

A process that is killed may leave half a line. That is cut off, and said in the next line, when the run goes on.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..container import finite
from ..errors import FailedError

FILE = "audit.jsonl"


class BrokenAuditError(FailedError):
    """An audit log that is not as it was written, and its first line that is not."""


class Verified(NamedTuple):
    """An audit log whose chain holds."""

    lines: int
    head: str
    hashes: frozenset[str]
    torn: int
    """Bytes of half a line at the end."""


def verify(path: Path, head: str = "") -> Verified:
    """Check a log's chain, and that its last line is the one with this head, where one is known."""
    data = path.read_bytes() if path.exists() else b""
    whole, _, torn = data.rpartition(b"\n")
    before, hashes = "", set()
    lines = whole.split(b"\n") if whole else []
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            found = _sealed({key: value for key, value in line.items() if key != "hash"})
            if found != text.decode() or line["line"] != number:
                raise ValueError
        except (ValueError, KeyError, AttributeError, RecursionError):
            raise BrokenAuditError(f"line {number} of {path} is not as it was written") from None
        if line["before"] != before:
            raise BrokenAuditError(
                f"line {number} of {path} does not follow line {number - 1}: one of them was put there"
            )
        before = line["hash"]
        hashes.add(before)
    if head and head != before:
        there = "is a line before the last: lines were added after it" if head in hashes else "is not in it"
        raise BrokenAuditError(f"{path} ends with {before or 'nothing'}, but the head {head} {there}")
    return Verified(len(lines), before, frozenset(hashes), len(torn))


def _sealed(line: dict[str, Any]) -> str:
    """Return a line with its hash."""
    text = json.dumps(line, sort_keys=True, allow_nan=False)
    return json.dumps({**line, "hash": hashlib.sha256(text.encode()).hexdigest()}, sort_keys=True, allow_nan=False)


@dataclass
class Audit:
    """A log that is written to; before `open` it holds what it is told."""

    path: Path
    head: str = ""
    lines: int = -1
    """Written so far; -1: not open yet."""
    held: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def open(self, remembered: str = "") -> None:
        """Go on with the lines that are there; what is wrong with them becomes a line of its own, and nothing more.

        `remembered` is a head that must be among them.
        """
        wrong: dict[str, Any] = {}
        try:
            known = verify(self.path)
            self.head, self.lines = known.head, known.lines
            if known.torn:
                wrong["torn"] = known.torn
            if remembered and remembered not in known.hashes:
                wrong["missing"] = f"the checkpoint's head {remembered}"
        except BrokenAuditError as error:
            kept = self.path.read_bytes().split(b"\n")[:-1]
            self.lines, self.head = len(kept), hashlib.sha256(b"\n".join(kept)).hexdigest()
            wrong["broken"] = str(error)
        if self.path.exists():
            with self.path.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
        if wrong:
            self.add("wrong", **wrong)
        held, self.held = self.held, []
        for event, about in held:
            self.add(event, **about)

    def add(self, event: str, **about: Any) -> None:
        """Write a line, to the disk."""
        if self.lines < 0:
            self.held.append((event, about))
            return
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = {"line": self.lines + 1, "time": now, "event": event, **finite(about), "before": self.head}
        text = _sealed(json.loads(json.dumps(line)))  # with names in place of numbers, as they are read again
        with os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines, self.head = self.lines + 1, json.loads(text)["hash"]


def note(folder: Path, event: str, **about: Any) -> None:
    """Write what an operator did to a run's folder, with who it was."""
    log = Audit(folder / FILE)
    log.open()
    log.add(event, user=os.getuid(), **about)
