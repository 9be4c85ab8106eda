#!/usr/bin/env python3
"""Feed damaged and hostile files to the dataset readers.

    python scripts/fuzz_data.py [--cases 600] [--seed 0]

Every case makes a small dataset in one of the formats, spoils it in one way, and loads it. It passes if loading raises
a `SourceError` of one sentence, or returns exactly what an independent reader (NumPy, json, pickle behind a list of
allowed names, Pillow, tarfile, gzip) finds in the spoilt files. Another exception, a hang, a memory that grows, or
content that differs fails. `check` must agree and must never raise. Cases run in a process of their own, so that a
crash of it is seen, too; case i of seed s is always the same: `--only i` repeats it. The datasets and the ways to spoil
them are in tests/data/formats/format_samples.py and format_damage.py.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "data" / "formats"))

from format_damage import BYTES, MARK, WHOLE, bombs, hostile_pickles, odd, replace_file
from format_samples import MAKERS, Rows, cifar

from metavd.data import formats
from metavd.data.source import SourceError

SECONDS = 10.0
"""A case may compute for so long."""
WAIT = 120.0
"""And may wait for so long, beside a load: a pipe would make it wait for ever."""
MEMORY = 700 << 20
"""The process may grow by so much."""


class Failed(Exception):  # noqa: N818 (a verdict, not an error)
    """A case that did not pass."""


def judge(name: str, root: Path, options: dict[str, Any], oracle: Callable[[], Rows] | None, must: bool | None) -> str:
    """Load; return "refused" or "loaded", or raise `Failed`."""
    try:
        data = formats.load(name, root, **options)
    except SourceError as error:
        text = str(error)
        if (
            "\n" in text
            or not text.endswith((".", "?"))
            or len(text) > 900
            or "fit into memory" in text
            or "is no path" in text
            or str(root) not in text
        ):
            raise Failed(f"not one good sentence: {text!r}") from None
        if must:
            raise Failed(f"refused a good file: {text}") from None
        verdict = "refused"
    else:
        if must is False:
            raise Failed("loaded what should be refused")
        verdict = "loaded"
        if oracle is not None:
            _same(data, oracle())
    report = formats.check(root)  # must not raise, whatever it finds
    if verdict == "refused" and report.ok and not options and name not in ("npz", "folder"):
        raise Failed("refused by load, but check finds nothing wrong")
    str(report)
    return verdict


def _same(data: Any, rows: Rows) -> None:
    for what, got, right in (("x", data.x, rows.x), ("y", data.y, rows.y), ("client", data.client, rows.client),
                             ("test", data.test, rows.test)):  # fmt: skip
        if (got is None) != (right is None):
            raise Failed(f"{what} is {got}, but the files hold {right}")
        if got is not None and (got.shape != right.shape or not np.array_equal(got, right)):
            raise Failed(f"{what} is not what the files hold")


def run_case(number: int, seed: int, scratch: Path) -> tuple[str, str]:
    """Run one case; return (what it was, verdict)."""
    rng = np.random.default_rng([seed, number])
    kinds = list(MAKERS)
    pick = int(rng.integers(0, 100))
    if pick < 12:
        return _hostile(rng, scratch)
    maker = kinds[number % len(kinds)]
    made = MAKERS[maker](scratch, rng)
    if pick < 18:
        how = WHOLE[int(rng.integers(0, len(WHOLE)))]
        replace_file(made, rng, how)
        oracle = None if made.name in ("folder", "celeba") and how == "missing" else made.oracle
        return f"{maker}, {how}", judge(made.name, made.root, made.options, oracle, None)
    if pick < 21:
        return f"{maker}, whole", judge(made.name, made.root, made.options, made.oracle, True)
    how = list(BYTES)[int(rng.integers(0, len(BYTES)))]
    path = made.files[int(rng.integers(0, len(made.files)))]
    path.write_bytes(BYTES[how](path.read_bytes(), rng))
    return f"{maker}, {path.name} {how}", judge(made.name, made.root, made.options, made.oracle, None)


def _hostile(rng: np.random.Generator, scratch: Path) -> tuple[str, str]:
    pickles = hostile_pickles()
    name = list(pickles)[int(rng.integers(0, len(pickles)))]
    made = cifar(scratch, rng, kind=10, version="python")
    made.files[int(rng.integers(0, 6))].write_bytes(pickles[name])
    return f"pickle: {name}", judge(made.name, made.root, made.options, None, False)


def run_fixed(scratch: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the cases that do not depend on chance: every bomb, every hostile pickle, every odd dataset."""
    rng = np.random.default_rng(0)
    for name, data in hostile_pickles().items():
        place = Path(tempfile.mkdtemp(dir=scratch))
        made = cifar(place, rng, kind=10, version="python")
        made.files[2].write_bytes(data)
        yield f"pickle: {name}", lambda made=made: judge(made.name, made.root, made.options, None, False)
    place = Path(tempfile.mkdtemp(dir=scratch))
    for what, name, root, options in bombs(place, rng):
        yield what, lambda name=name, root=root, options=options: judge(name, root, options, None, False)
    place = Path(tempfile.mkdtemp(dir=scratch))
    for what, name, root, options, must in odd(place, rng):
        yield what, lambda name=name, root=root, options=options, must=must: judge(name, root, options, None, must)


# Running


class Hang(BaseException):
    """Beyond every `except Exception`."""


def _alarm(*_: Any) -> None:
    raise Hang


def guarded(case: Callable[[], Any]) -> tuple[Any, str | None]:
    """Run a case; return (result, None) or (None, what failed)."""
    for kind in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(kind, _alarm)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WAIT)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        result = case()
    except Failed as failure:
        return None, str(failure)
    except Hang:
        return None, f"computed for {SECONDS} s or waited for {WAIT} s at\n{traceback.format_exc()}"
    except Exception:
        return None, traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if grown > MEMORY:
        return None, f"the process grew by {grown >> 20} MiB"
    if Path(MARK).exists():
        Path(MARK).unlink()
        return None, "hostile code was run"
    return result, None


def worker(first: int, last: int, seed: int, fixed: bool) -> int:
    """Run cases here; print a line of JSON for each."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (3 << 30), resource.RLIM_INFINITY))
    scratch = Path(tempfile.mkdtemp(prefix="metavd-fuzz-"))
    os.chdir(scratch)
    try:
        for number in range(first, last):
            place = scratch / str(number)
            place.mkdir()
            _attempt(number, lambda number=number, place=place: run_case(number, seed, place))
            shutil.rmtree(place)
        for what, case in run_fixed(scratch) if fixed else ():
            _attempt(what, lambda what=what, case=case: (what, case()))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


def _attempt(name: int | str, case: Callable[[], tuple[str, str]]) -> None:
    """Run a case that returns what it was and its verdict, and print that it begins and how it ends."""
    print(json.dumps({"start": name}), flush=True)
    begin = time.perf_counter()
    result, fault = guarded(case)
    what, verdict = result or ("", "")
    print(json.dumps({"case": name, "what": what, "verdict": verdict, "fault": fault,
                      "seconds": time.perf_counter() - begin}), flush=True)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run all cases in processes of their own and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=600, help="how many seeded mutations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="repeat this case alone")
    parser.add_argument("--no-fixed", action="store_true", help="leave out the bombs and the odd datasets")
    parser.add_argument("--worker", nargs=3, type=int, metavar=("FIRST", "LAST", "FIXED"), help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.worker:
        return worker(given.worker[0], given.worker[1], given.seed, bool(given.worker[2]))
    chunks = [(first, min(first + 100, given.cases), 0) for first in range(0, given.cases, 100)]
    if given.only is not None:
        chunks = [(given.only, given.only + 1, 0)]
    elif not given.no_fixed:
        chunks.append((0, 0, 1))
    counts: Counter[str] = Counter()
    faults, slowest = [], 0.0
    for first, last, fixed in chunks:
        command = [sys.executable, __file__, "--seed", str(given.seed), "--worker", str(first), str(last), str(fixed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            timer = time.monotonic() + (last - first + 150) * WAIT
            running = None
            for line in process.stdout or ():
                entry = json.loads(line)
                if "start" in entry:
                    running = entry["start"]
                    continue
                running = None
                slowest = max(slowest, entry["seconds"])
                counts[entry["verdict"] if entry["fault"] is None else "failed"] += 1
                if entry["fault"] is not None:
                    faults.append(f"case {entry['case']} ({entry['what']}): {entry['fault']}")
                if time.monotonic() > timer:
                    process.kill()
                    faults.append(f"cases {first} to {last} took too long")
        if process.returncode != 0:
            faults.append(f"case {running}: the process ended with {process.returncode}")
    for fault in faults:
        print(fault)
    total = sum(counts.values())
    print(f"{total} cases: {counts['refused']} refused, {counts['loaded']} loaded and compared, {len(faults)} failed; "
          f"slowest {slowest:.2f} s.")  # fmt: skip
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
