"""A run's folder: what was asked, what happened, what came out. The only place that writes results.

config.toml     everything resolved, enough to repeat the run
rounds.jsonl    one line for each round; where there was an evaluation, its figures
clients.csv     one line for each client at the last evaluation
details.json    bins and histograms for reports, see runs.details
result.json     the result; there only when the run is finished
checkpoint/     see engine.checkpoint
best/           likewise, the states with the best validation, where the run stops early
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..container import finite, write_atomic
from ..errors import UserError

_RESULT = ("method", "data", "seed", "rounds", "test", "unseen", "bytes", "sparsity", "seconds", "spec")
"""What a result has at least."""
_LOCK = ".lock"
"""Held by the process that writes the run; it has that process's id."""
_LOOK = 0.1
"""Seconds between two tries to take the lock."""


class StoreError(UserError):
    """A folder that cannot be used; the text says what would be right."""


class Store:
    """Paths of a run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config.toml"
        self.rounds = folder / "rounds.jsonl"
        self.clients = folder / "clients.csv"
        self.details = folder / "details.json"
        self.result = folder / "result.json"
        self.checkpoint = folder / "checkpoint"
        self.best = folder / "best"

    def is_run(self) -> bool:
        """Whether a run was started here."""
        return self.config.exists()

    def is_finished(self) -> bool:
        """Whether the run here is complete and its result sound."""
        try:
            self.read_result()
        except StoreError:
            return False
        return True

    def open(self, config: str) -> None:
        """Write the configuration into a folder that is new, empty or this run's."""
        # The lock, and what a crash during the very first write may have left, are ours.
        ours = {_LOCK, f".{self.config.name}.partial"}
        if not self.is_run() and any(path.name not in ours for path in self.folder.iterdir()):
            raise StoreError(f"the folder {self.folder} is not empty and holds no run; name a new or empty one")
        write_atomic(self.config, config.encode())

    @contextmanager
    def lock(self, *, seconds: float = 0.0, report: Callable[[str], None] = lambda _: None) -> Iterator[None]:
        """Hold the folder against a second process that would write the same run.

        If another process holds it, wait for that process at most so many seconds, and report once which one it is.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise StoreError(f"{self.folder} is a file, but a run needs a folder; name another --out")
        created = not self.folder.exists()
        with self._locked(seconds, report):
            try:
                yield
            except StoreError:
                (self.folder / _LOCK).unlink(missing_ok=True)
                if created:
                    self.folder.rmdir()
                raise

    def _locked(self, seconds: float, report: Callable[[str], None]) -> io.FileIO:
        """Return the lock's file; this process holds the folder until it closes that file."""
        ends, told = time.monotonic() + seconds, False
        while True:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                file = (self.folder / _LOCK).open("a+b", buffering=0)
            except OSError as error:
                raise StoreError(f"cannot write to the folder {self.folder}: {error.strerror}") from None
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                pid = file.read(20).decode(errors="replace").strip()
                file.close()
            else:
                if os.fstat(file.fileno()).st_nlink:
                    with suppress(OSError):  # a full disk: the lock holds, only its holder stays unnamed
                        file.truncate(0)
                        file.write(f"{os.getpid()}\n".encode())
                    return file
                file.close()  # its last holder removed it: holding it would keep nobody out
                continue
            who = f"another process{f' ({pid})' if pid else ''}"
            if time.monotonic() >= ends:
                raise StoreError(f"{who} is writing to {self.folder}; wait for it or name another --out")
            if not told:
                report(f"{who} is writing to {self.folder}; waiting at most {seconds:.0f} s until it ends")
                told = True
            time.sleep(_LOOK)

    def read_result(self) -> dict[str, Any]:
        """Return a finished run's result."""
        try:
            value: dict[str, Any] = json.loads(self.result.read_text())
            if not isinstance(value, dict):
                raise ValueError("it is no JSON object")
            missing = [key for key in _RESULT if key not in value]
            if missing:
                raise ValueError(f"it lacks {', '.join(missing)}")
        except OSError:
            hint = "run it to the end with --resume" if self.is_run() else "name the --out folder of a run"
            raise StoreError(f"there is no finished run in {self.folder}; {hint}") from None
        except (ValueError, TypeError) as error:
            raise StoreError(f"{self.result} is damaged ({error}); run it again with --resume") from None
        return value

    def read_rounds(self) -> list[dict[str, Any]]:
        """Return the records of all whole lines."""
        if not self.rounds.exists():
            return []
        records = []
        for line in self.rounds.read_text(errors="replace").splitlines():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                break  # a line that a crash cut short: nothing after it counts
            if not isinstance(record, dict) or not isinstance(record.get("round"), int):
                break
            records.append(record)
        return records

    def evaluations(self, result: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the records of the rounds that were evaluated, the last one as the result has it."""
        before = [line for line in self.read_rounds() if "test" in line and line["round"] < result["rounds"]]
        return [*before, {**result, "round": result["rounds"]}]

    def read_clients(self) -> list[dict[str, str]]:
        """Return the lines of all clients."""
        with self.clients.open(newline="") as file:
            return list(csv.DictReader(file))

    def cut_rounds(self, done: int, report: Callable[[str], None] = lambda _: None) -> None:
        """Forget what was written after a round, so that going on from it leaves no trace of the interruption.

        What can no longer be read of the rounds up to it is told to `report`.
        """
        kept = [record for record in self.read_rounds() if record["round"] <= done]
        lost = sorted({*range(1, done + 1)} - {record["round"] for record in kept})
        if lost:
            said = f"{self.rounds} is damaged: it lacks {len(lost)} of {done} rounds, the first of them round {lost[0]}"
            report(f"{said}; training goes on all the same, but curves will lack them too")
        write_atomic(self.rounds, "".join(_line(record) for record in kept).encode())

    def add_round(self, record: Mapping[str, Any]) -> None:
        """Append a round's line."""
        with self.rounds.open("a") as file:
            file.write(_line(record))

    def finish(
        self, result: Mapping[str, Any], clients: Sequence[Mapping[str, Any]], details: Mapping[str, Any]
    ) -> None:
        """Write the clients' lines, what reports draw and, last, the result."""
        text = io.StringIO()
        writer = csv.DictWriter(text, list(clients[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(clients)
        write_atomic(self.clients, text.getvalue().encode())
        write_atomic(self.details, (json.dumps(finite(details), allow_nan=False) + "\n").encode())
        write_atomic(self.result, (json.dumps(finite(result), indent=2, allow_nan=False) + "\n").encode())


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(finite(record), allow_nan=False) + "\n"
