"""Many runs: what is in the store is read, what is missing is run, several at once, and stored as each one ends.

    def accuracy(settings, folder, listener):           # a function of a module: other processes import it
        result = run(**settings, out=folder, resume=True, listener=listener)
        return taken(result, {"accuracy": result["test"]["accuracy"]})

    tasks = {seed: {"method": "reptile", "data": "digits", "seed": seed} for seed in range(3)}
    for ended in carry_out(tasks, accuracy, store="results/mine.jsonl", work="runs/mine"):
        print(ended.key, ended.end, ended.line and ended.line["result"])

A task is a key of yours and its settings: fields of the experiment and options of the method. With a store the function
is told every option, those at their default too, so that what is run is what the line says. What has to go to other
processes beside the settings (data, a plan) is bound with `functools.partial`. The store is one file of JSON lines, see
`lines`; the same call again runs only what it lacks. Several commands on one machine may share a store and a work
folder: a run that one of them is at is left to it.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Generic, Literal, TypeVar

from ..core.types import NonFiniteError
from ..engine.rounds import Listener, Silent
from ..errors import SpecError, UserError
from ..runs.provenance import provenance
from ..runs.store import StoreError
from .lines import Line, append, complete, identity, read, stands
from .side import device_of, jobs_for, side_by_side

Key = TypeVar("Key", bound=Hashable)
Settings = Mapping[str, Any]
Work = Callable[[dict[str, Any], Path, Listener], Mapping[str, Any]]
"""What is done for a task: settings, a folder of its own (not yet made), a listener -> the part of the line that only
it knows: `result`, plain values, and where there are any `device`, `precision`, `spec`; see `taken`."""
End = Literal["stored", "done", "failed", "refused", "elsewhere", "left"]


@dataclass(frozen=True)
class Share:
    """One of `count` parts of a study, numbered from 1; which task is in it depends on nothing but the task."""

    number: int
    count: int

    @classmethod
    def of(cls, text: str) -> Share:
        """Read "3/16"."""
        number, slash, count = text.partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count) <= 10**6):
            raise SpecError(f"--slice is {text!r}, but must be K/N, the K-th of N shares, such as 3/16")
        return cls(int(number), int(count))

    def has(self, name: int) -> bool:
        """Whether a task of this name, a large number, is in this share."""
        return name % self.count == self.number - 1


@dataclass(frozen=True, eq=False)
class Ended(Generic[Key]):
    """What became of a task."""

    key: Key
    end: End
    """stored: its line was in the store, that of a failure included. done: it was run now. failed: it diverged; the
    store says so, and it is not tried again unless asked for. refused: it could not be started, and a user can mend
    why (data that is not there, settings that do not go together); nothing is stored.
    elsewhere: another process is at it, or it is in another share. left: it would not have ended in time."""
    line: Line | None = None
    """Its line, where there is one."""
    error: Exception | None = None
    """Why it failed or was refused, where that happened now."""


def carry_out(
    tasks: Mapping[Key, Settings],
    function: Work,
    *,
    store: str | Path | None = None,
    scope: str = "",
    work: str | Path | None = None,
    place: Callable[[Settings], str] | None = None,
    keep: bool = False,
    retry: bool = False,
    strict: bool = False,
    jobs: int = 1,
    device: str = "auto",
    share: Share | None = None,
    until: float | None = None,
    listener: Listener | None = None,
    progress: Callable[[Key, int, int], None] | None = None,
) -> Iterator[Ended[Key]]:
    """Yield what became of each task: first those that are in the store, then the others as they end.

    Args:
        tasks: settings by key; no two with the same settings.
        function: carries out one task, see `Work`. With several at once it must be importable by name, and so must a
            script that asks for it have the usual `if __name__ == "__main__":`.
        store: file of JSON lines. None: nothing is known as done and nothing is written; `function` may know better.
        scope: under which rules `function` takes its results; a part of their identity.
        work: folder in which runs have their folders, so that one that was stopped goes on, and in which processes
            say what they are at. None: a temporary folder for each run; one that is stopped starts anew.
        place: name of a run's folder in `work`, from its settings; by default its identity.
        keep: leave the folders of finished runs.
        retry: also run again what failed.
        strict: an error ends the whole, also one that else makes a run failed or refused.
        jobs: runs at once, each in a process of its own; 0: what suits the device, see `side`.
        device: where runs will be carried out, for `jobs` and for the line of a run that failed.
        share: which part of the missing tasks is carried out here, the others are elsewhere; None: all.
        until: when all must be over, on the clock of `time.monotonic`. No run is begun that would end later if it took
            as long as those before it did: on average those of its method, else all. None: no such time.
        listener: is told of every run's rounds; of several at once it is told nothing.
        progress: is told of each run before it starts (of several at once: when it ends), its number and how many
            there are.
    """
    names = {key: identity(settings, scope) for key, settings in tasks.items()}
    lines = {} if store is None else read(store, scope)
    missing: dict[Key, _Asked] = {}
    for key, name in names.items():
        if stands(line := lines.get(name), retry=retry):
            yield Ended(key, "stored", line)
        elif share is None or share.has(int(name, 16)):
            missing[key] = (tasks[key], name, place(tasks[key]) if place else name)
        else:
            yield Ended(key, "elsewhere")
    attempt = partial(
        _attempt, function=function, store=store, scope=scope, work=work, keep=keep, retry=retry, strict=strict,
        device=device,
    )  # fmt: skip
    at_once = jobs_for(device, jobs) if len(missing) > 1 else 1
    tell = progress or (lambda *_: None)
    yield from _ends(attempt, missing, at_once, _Watch(until), listener=listener, tell=tell)


_Asked = tuple[Settings, str, str]
"""Settings of a task, its identity, and the name of its folder."""


def _ends(
    attempt: Callable[..., tuple[End, Line | None, Exception | None]], asked: Mapping[Key, _Asked], jobs: int,
    watch: _Watch, *, listener: Listener | None, tell: Callable[[Key, int, int], None],
) -> Iterator[Ended[Key]]:  # fmt: skip
    """Attempt tasks, one after another in this process, where each tells of itself, or `jobs` at once."""
    keys = list(asked)

    def fits(which: int) -> bool:
        settings, *_ = asked[keys[which]]
        return watch.begin(which, str(settings.get("method", "")))

    orders: list[tuple[Any, ...]] = list(asked.values())
    if jobs == 1:
        orders = [
            (*order, listener, partial(tell, key, number, len(keys)))
            for number, (key, order) in enumerate(asked.items(), 1)
        ]
    for number, (which, found) in enumerate(side_by_side(attempt, orders, jobs, fits), 1):
        watch.end(which, counts=found[0] in {"done", "failed"})
        if jobs > 1:
            tell(keys[which], number, len(keys))
        yield Ended(keys[which], *found)
    yield from (Ended(key, "left") for which, key in enumerate(keys) if which not in watch.begun)


@dataclass(frozen=True, eq=False)
class _Watch:
    """When runs began, how long they took, and whether one more would end in time; see `carry_out`."""

    until: float | None
    begun: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Kind and time, by the run's number."""
    spent: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of the runs that are over, by their kind."""

    def begin(self, which: int, kind: str) -> bool:
        """Begin a run of a kind, unless it would end too late."""
        like = self.spent.get(kind) or [each for some in self.spent.values() for each in some] or [0.0]
        now = time.monotonic()
        if self.until is not None and now + sum(like) / len(like) > self.until:
            return False
        self.begun[which] = kind, now
        return True

    def end(self, which: int, *, counts: bool) -> None:
        """End a run; it tells how long others will take where it was carried out."""
        kind, began = self.begun[which]
        if counts:
            self.spent.setdefault(kind, []).append(time.monotonic() - began)


def taken(result: Mapping[str, Any], kept: Any) -> dict[str, Any]:
    """Return what a `Work` returns for a run: the part of its result that is kept, and where it was made."""
    return {key: result[key] for key in ("device", "precision", "spec")} | {"result": kept}


def _attempt(
    asked: Settings, name: str, place: str, listener: Listener | None = None, start: Callable[[], None] | None = None,
    *, function: Work, store: str | Path | None, scope: str, work: str | Path | None, keep: bool, retry: bool,
    strict: bool, device: str,
) -> tuple[End, Line | None, Exception | None]:  # fmt: skip
    """Carry out one task and store it; return what an `Ended` holds beside the key."""
    whole = complete(asked)
    with _folder(work, place) as folder:
        there = None if store is None else read(store, scope).get(name)
        if stands(there, retry=retry):
            return "stored", there, None
        if folder is None:
            return "elsewhere", None, None
        if start is not None:
            start()
        end: End = "done"
        wrong: Exception | None = None
        try:
            content = dict(function(dict(asked if store is None else whole), folder, listener or Silent()))
        except (NonFiniteError, UserError) as error:
            if strict:
                raise
            if not isinstance(error, NonFiniteError):
                return "refused", None, error
            end, wrong, content = "failed", error, {"failed": str(error)}
        head = {"id": name, "scope": scope, "seed": asked.get("seed"), "settings": whole}
        line = {**head, **_made(content.pop("device", device)), **content}
        if store is not None:
            append(store, line)
        if not keep and folder.exists():
            shutil.rmtree(folder)
    return end, line, wrong


def _made(device: str) -> dict[str, Any]:
    """Return when and where a line is made."""
    device = device_of(device)
    about = provenance(device)
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": device,
        "machine": about["machine"],
        "commit": about["commit"],
        "versions": {"metavd": about["version"], "torch": about["torch"], "python": about["python"]},
    }


@contextmanager
def _folder(work: str | Path | None, place: str) -> Iterator[Path | None]:
    """Give a run its folder, or None where another process is at work in it; the claim ends with its process."""
    if work is None:
        with tempfile.TemporaryDirectory(prefix="metavd-") as folder:
            yield Path(folder) / "run"
        return
    try:
        Path(work).mkdir(parents=True, exist_ok=True)
        file = (Path(work) / "claims").open("a+b")
    except OSError as error:
        raise StoreError(f"cannot write to the work folder {work}: {error.strerror}") from None
    with file:
        byte = int.from_bytes(hashlib.sha256(place.encode()).digest()[:4], "big")
        yield Path(work) / place if hold(file, byte) else None


def hold(file: IO[bytes], byte: int, *, wait: bool = False) -> bool:
    """Take one byte of a file for this process until it lets go, closes the file or dies; whether that succeeded.

    One byte stands for one run, so that no lock files are left behind, and a dead process is known at once.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except OSError:
        return False
    return True


def release(file: IO[bytes], byte: int) -> None:
    """Let go of a byte that `hold` took."""
    fcntl.lockf(file, fcntl.LOCK_UN, 1, byte)
