"""A run's folder that was damaged while the run was stopped.

The run goes on, or refuses in a sentence and goes on once the file is put back; never to another model.
"""

from __future__ import annotations

import functools
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from metavd.errors import UserError
from metavd.flower import server
from metavd.flower.config import run_config
from metavd.runs.store import Store

from .grid import shares
from .misfortunes import breaks
from .rehearsal import BOUND, DEAD, NAMELESS, Hang, Outcome, Trial, alarm, forged, wanted
from .stage import CLIENTS, ROUNDS, Fault, Killed, Stage, never

METHOD, AT = "fedavg", 3
Damage = Callable[[bytes], bytes | None]
DAMAGES: dict[str, Damage] = {
    "removed": lambda _: None,
    "emptied": lambda _: b"",
    "cut in half": lambda data: data[: len(data) // 2],
    "a byte less": lambda data: data[:-1],
    "a byte more": lambda data: data + b"x",
    "a bit": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 8]) + data[len(data) // 2 + 1 :],
    "noise": lambda data: random.Random(0).randbytes(len(data)),
    "zeros": lambda data: bytes(len(data)),
    "nested deep": lambda _: b"[" * 100_000,
    "NaN": lambda _: b'{"a": NaN}',
}
FILES = ("checkpoint", "registry.json", "takes.json", "rounds.jsonl", "config.toml", "audit.jsonl", "offences.json")
CASES = [(name, how) for name in FILES for how in DAMAGES]


@functools.lru_cache(maxsize=1)
def stopped() -> Path:
    """Return a folder of a run that was killed in its last round, after a client was refused once."""
    folder = Path(tempfile.mkdtemp(prefix="metavd-stopped-"))
    kill = Fault("ServerApp killed", "in the last round", breaks("any", 0, Killed), absent=never, named=False)
    stage = Stage(shares(CLIENTS), kill, AT - 1, 0)
    try:
        server.run(stage, run_config(_config(folder / "run")))
    except Killed:
        stage.again()
    (folder / "run" / "offences.json").write_text("{}")
    return folder / "run"


def _config(folder: Path) -> dict[str, object]:
    fault = Fault("file", "", lambda event: [event.reply], absent=never, named=False)
    return Trial(fault, METHOD, AT, 0, 0).config(folder)


def restart(name: str, how: str) -> Outcome:
    """Damage a file, or the newest one of a folder, go on, and put it back where the run refuses."""
    trial = Trial(Fault(f"file {name}", how, lambda event: [event.reply], absent=never, named=False), METHOD, AT, 0, 0)
    complaints: list[str] = []
    hang, starts, began = False, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="metavd-file-") as scratch:
        folder = Path(scratch) / "run"
        shutil.copytree(stopped(), folder)
        path = folder / name
        if path.is_dir():
            path = max((each for each in path.rglob("*") if each.is_file()), key=lambda each: each.stat().st_mtime_ns)
        before = path.read_bytes()
        after = DAMAGES[how](before)
        path.unlink() if after is None else path.write_bytes(after)
        while starts < 2 and not hang:
            starts += 1
            try:
                with alarm(BOUND):
                    server.run(_stage(), run_config(_config(folder)))
                break
            except Hang:
                hang = True
            except UserError as error:
                if (
                    path.name.partition(".")[0] not in str(error)
                    and name not in str(error)
                    and "holds" not in str(error)
                ):
                    complaints.append(f"{NAMELESS}: the refusal does not name the file: {error!s:.200}")
                path.write_bytes(before)
            except Exception as error:
                complaints.append(f"the server broke: {type(error).__name__}: {error!s:.200}")
                path.write_bytes(before)
        store = Store(folder)
        found = store.read_result()["model_sha256"] if not hang and store.is_finished() else "no result"
        everybody = (tuple(range(CLIENTS)),) * ROUNDS
        complaints += forged(folder, chain=name != "audit.jsonl") if found != "no result" else [DEAD]
        wrong = found != wanted(METHOD, 0, everybody)
    return Outcome(trial, True, hang, wrong, 0, tuple(complaints), starts, time.monotonic() - began)


def _stage() -> Stage:
    nothing = Fault("none", "", lambda event: [event.reply], absent=never, named=False)
    return Stage(shares(CLIENTS), nothing, 99, 0)
