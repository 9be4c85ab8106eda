#!/usr/bin/env python3
"""Kill a run with SIGKILL at random moments, resume it, and compare what it leaves with an uninterrupted run.

    scripts/kill_and_resume.py [--trials 20] [--method reptile+metavd] [--rounds 24] [--seed 0]

Every trial starts `metavd run METHOD --out DIR`, kills it one to three times (each time the run goes on with --resume),
and then lets it finish. The moments: at any time since the process started, at any time since the run began to work,
while a checkpoint is half written, or between the last checkpoint and the result. All that a run leaves must be the
same, byte for byte: the model, result.json (but for `seconds`), rounds.jsonl, clients.csv. Exit status 1 if anything
differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from metavd.engine.checkpoint import load_checkpoint, state_hash

SETTINGS = [
    "--set", "clients=6", "--set", "unseen=2", "--set", "cohort=3", "--set", "width=16",
    "--set", "test_share=0.9", "--set", "checkpoint_every=1", "--set", "eval_every=8",
]  # fmt: skip
"""A small experiment that writes a checkpoint after every round, so that many moments lie inside one."""

FREE = {"seconds", "commit"}
"""Entries of result.json that may differ: the time it took, and what was committed meanwhile."""

POLL = 0.0005


class Span(NamedTuple):
    """How long an uninterrupted run takes, in seconds."""

    start: float
    """Until it begins to work."""
    run: float


class Failure(Exception):  # noqa: N818
    """A run that did not go as it must."""


def start(what: Sequence[str], folder: Path, *more: str) -> subprocess.Popen[str]:
    """Start a run in a process of its own."""
    command = [sys.executable, "-m", "metavd", "run", *what, "--out", str(folder), *SETTINGS, *more]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> None:
    """Let a run end by itself; it must succeed."""
    _, said = process.communicate(timeout=600)
    if process.returncode != 0:
        raise Failure(f"exit status {process.returncode}: {said.strip().splitlines()[-1:]}")


def half_written(folder: Path) -> set[str]:
    """Return the checkpoints that are being written."""
    try:
        return {name for name in os.listdir(folder / "checkpoint") if name.endswith(".partial")}  # noqa: PTH208
    except OSError:
        return set()


def opened(folder: Path) -> int:
    """Return when a run last took the folder into use: it then writes its configuration; 0 if never."""
    try:
        return (folder / "config.toml").stat().st_mtime_ns
    except OSError:
        return 0


def lines(folder: Path) -> int:
    """Return how many rounds the run has recorded."""
    try:
        return (folder / "rounds.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def kill(what: Sequence[str], folder: Path, moment: str, share: float, span: Span, *more: str) -> str:
    """Start a run, wait for the moment, kill, and return what was there then; a run that was faster is not killed.

    `share` of the way from where the run stands to its end is where it shall be killed, counted in rounds, so that a
    busy machine does not matter, and to a fraction of a round.
    """
    before, stale, rounds = opened(folder), half_written(folder), int(what[-1])
    target = lines(folder) + share * (rounds - lines(folder))
    process = start(what, folder, *more)

    def wait(condition: Callable[[], bool], every: float = POLL) -> None:
        while not condition() and process.poll() is None:
            if every:
                time.sleep(every)

    def pause(seconds: float) -> None:
        until = time.monotonic() + seconds
        wait(lambda: time.monotonic() >= until)

    if moment == "start":
        pause(span.start * share)
    else:
        wait(lambda: opened(folder) != before)
    if moment == "ending":
        wait((folder / "checkpoint" / f"round-{rounds:06d}.safetensors").exists)
    elif moment != "start":
        wait(lambda: lines(folder) >= int(target))
        pause(span.run / rounds * (target % 1))
    if moment == "writing":
        wait(lambda: bool(half_written(folder) - stale), every=0.0)  # it lasts milliseconds: no time to sleep
    process.kill()
    process.communicate()
    if process.returncode == 0:
        return "done"
    return f"{lines(folder)}{'w' if half_written(folder) - stale else ''}{'e' if moment == 'ending' else ''}"


def remains(folder: Path) -> dict[str, object]:
    """Return all that a finished run leaves and that must not depend on interruptions."""
    result = json.loads((folder / "result.json").read_text())
    found = load_checkpoint(folder / "checkpoint")
    if found is None:
        raise Failure("it left no checkpoint")
    state, extra = found
    return {
        "model hash": result["model_sha256"],
        "result.json": {key: value for key, value in result.items() if key not in FREE},
        "rounds.jsonl": (folder / "rounds.jsonl").read_bytes(),
        "clients.csv": (folder / "clients.csv").read_bytes(),
        "config.toml": (folder / "config.toml").read_bytes(),
        "last checkpoint": (state_hash(state), list(state.params), list(state.slots), extra | {"seconds": 0.0}),
        "files": sorted(path.name for path in folder.iterdir() if path.name != ".lock"),
    }


def again(folder: Path) -> list[str]:
    """Return how a killed run is asked for again: one that was killed before it began is no run yet."""
    return ["--resume"] if opened(folder) else []


def trial(what: Sequence[str], folder: Path, span: Span, choose: random.Random) -> list[str]:
    """Kill and resume until the run is finished; return what was there at every kill."""
    told: list[str] = []
    for _ in range(choose.choice([1, 1, 2, 3])):
        moment = choose.choice(["start", "running", "running", "writing", "writing", "ending"])
        told.append(kill(what, folder, moment, choose.random(), span, *again(folder)))
        if told[-1] == "done":
            break
    finish(start(what, folder, *again(folder)))
    return told


def main() -> int:
    """Run the trials and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20, help="interrupted runs (default 20)")
    parser.add_argument("--method", default="reptile+metavd", help="what is trained (default reptile+metavd)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    parser.add_argument("--rounds", type=int, default=24, help="rounds of a run (default 24)")
    given = parser.parse_args()
    what = [given.method, "--rounds", str(given.rounds)]
    choose = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="metavd-kill-") as scratch:
        began, whole = time.monotonic(), Path(scratch) / "whole"
        process = start(what, whole)
        while not opened(whole) and process.poll() is None:
            time.sleep(POLL)
        appeared = time.monotonic()
        try:
            finish(process)
        except Failure as failure:
            print(f"the uninterrupted run failed: {failure}")
            return 1
        span = Span(appeared - began, time.monotonic() - appeared)
        wanted = remains(whole)
        print(f"{given.method}, {given.rounds} rounds, whole: {span.start:.1f} s to start and {span.run:.1f} s, "
              f"model {str(wanted['model hash'])[:12]}", flush=True)  # fmt: skip
        bad = kills = 0
        for number in range(1, given.trials + 1):
            folder = Path(scratch) / f"trial-{number}"
            try:
                told = trial(what, folder, span, choose)
                left = remains(folder)
                different = [name for name in wanted if left[name] != wanted[name]]
                verdict = f"DIFFERENT: {', '.join(different)}" if different else "identical"
            except (Failure, OSError, ValueError) as failure:
                told, different, verdict = [], ["failed"], f"FAILED: {failure}"
            bad += bool(different)
            kills += sum(each != "done" for each in told)
            print(f"trial {number:2d}: killed at round {', '.join(told) or '?'}: {verdict}", flush=True)
    print(f"{given.trials - bad} of {given.trials} runs identical after {kills} kills "
          "(w: while a checkpoint was written, e: before the result was, done: the run was faster)")  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
