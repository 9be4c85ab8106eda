#!/usr/bin/env python3
"""Run the tests many times and keep a record: what passes once in a quiet hour may fail beside a load.

    scripts/repeat.py --what suite --times 10                 every test, as `make tests` runs them
    scripts/repeat.py --what processes --times 50 --load 2    real processes and SuperLinks, beside two busy loops
    scripts/repeat.py --page docs/repeats.md                  only the page, from what is stored

Each repeat adds a line to results/repeats.jsonl, so that repeats of several days add up; docs/repeats.md is written
from those lines. Exit status 1 if a test failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from metavd.container import write_atomic
from metavd.runs.provenance import provenance
from metavd.studies.lines import append, rows

STORE, PAGE = Path("results/repeats.jsonl"), Path("docs/repeats.md")
WHAT = {
    "suite": ["--dist", "worksteal"],
    # A file's tests on one worker, as they share what was started; the longest files first, so that the small ones
    # fill up the worker that is done sooner.
    "processes": ["--dist", "loadfile", "--no-loadscope-reorder", "-m", "processes and not campaign",
                  "tests/flower/test_deployment.py", "tests/engine/test_ranks.py", "tests/test_cli.py", "tests"],
}  # fmt: skip
"""What can be repeated, as arguments of pytest."""
LIKE_MAKE = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
"""The environment that `make tests` sets."""
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
"""A busy loop that ends with the process that started it."""
Line = Mapping[str, Any]


@contextlib.contextmanager
def load(loops: int) -> Iterator[None]:
    """Keep so many cores busy."""
    # Sessions of their own, as Flower's and torchrun's processes have: Linux deals time out by session first.
    running = [subprocess.Popen([sys.executable, "-S", "-c", BUSY], start_new_session=True) for _ in range(loops)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def outcome(report: Path, status: int) -> dict[str, Any]:
    """Return what a JUnit report of pytest says: how many passed, which failed, how many were skipped."""
    if not report.exists():
        return {"passed": 0, "failed": [f"pytest ended with status {status} and without a report"], "skipped": 0}
    failed, skipped, total = [], 0, 0
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {part.tag for part in case}
        total += 1
        skipped += "skipped" in kinds
        if kinds & {"failure", "error"}:
            failed.append(f"{case.get('file')}::{case.get('name')}")
    if status and not failed:
        failed.append(f"pytest ended with status {status}")
    return {"passed": total - skipped - len(failed), "failed": sorted(set(failed)), "skipped": skipped}


def git(*words: str) -> str:
    """Return what a command of git prints."""
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()


def repeat(what: str, loops: int, jobs: int) -> dict[str, Any]:
    """Run the tests once and return the line of the store."""
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{STORE}", f":!{PAGE}")
    about = {
        "what": what, "load": loops, "commit": git("rev-parse", "--short=12", "HEAD"), "changed": bool(changed),
        "machine": provenance("cpu")["machine"], "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "average": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, load(loops):
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-n", str(jobs), f"--junitxml={report}", "-o", "junit_family=xunit1",
                   *WHAT[what]]  # fmt: skip
        began = time.monotonic()
        status = subprocess.run(command, env={**os.environ, **LIKE_MAKE}, check=False).returncode
        return {**about, "seconds": round(time.monotonic() - began, 1), **outcome(report, status)}


def in_a_row(lines: Sequence[Line]) -> int:
    """Return how many repeats there were since the last one in which a test failed."""
    failed = [number for number, line in enumerate(lines, 1) if line["failed"]]
    return len(lines) - max(failed, default=0)


def grouped(lines: Sequence[Line], *keys: str) -> dict[tuple[Any, ...], list[Line]]:
    """Return lines by some of their entries, in the order in which these first came."""
    found: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        found.setdefault(tuple(line[key] for key in keys), []).append(line)
    return found


def page(lines: Sequence[Line]) -> str:
    """Return the document."""
    beside = {0: "no busy loop", 1: "1 busy loop"}
    totals = [
        f"| {what} | {beside.get(loops, f'{loops} busy loops')} | {len(some)} | {sum(not x['failed'] for x in some)} "
        f"| {in_a_row(some)} | {sum(x['seconds'] for x in some) / len(some):.0f} |"
        for (what, loops), some in sorted(grouped(lines, "what", "load").items())
    ]
    commits = [
        f"| {commit}{' with changes' if changed else ''} | {machine} | {some[0]['date'][:10]} | {what} | {loops} "
        f"| {max(x['average'] for x in some)} | {len(some)} | {sum(not x['failed'] for x in some)} "
        f"| {some[-1]['passed']} | {some[-1]['skipped']} |"
        for (commit, changed, machine, what, loops), some in grouped(
            lines, "commit", "changed", "machine", "what", "load"
        ).items()
    ]
    whole = sum(not line["failed"] for line in lines)
    failures = [
        f"- `{test}`: {line['what']}, load {line['load']}, commit {line['commit']}, {line['date']}"
        for line in lines for test in line["failed"]
    ]  # fmt: skip
    return "\n".join([
        "# The tests, again and again", "",
        "A test that passes once may fail once in fifty times, most of all where it starts, stops and kills processes.",
        "*suite* is every test, as `make tests` runs them; *processes* are those with the marker of that name, which",
        "start real processes and SuperLinks. Made by", "",
        "    python scripts/repeat.py --what suite --times 10",
        "    python scripts/repeat.py --what processes --times 50 --load 2", "",
        "each repeat on record in `results/repeats.jsonl`; without `--times`, `--page` writes this page from it.", "",
        f"A suite runs the tests of *processes* too: these ran {len(lines)} times, {whole} times without a failure.",
        "",
        "| what | beside | repeats | without a failure | without one in a row, to the last | seconds each, mean |",
        "|---|---|---:|---:|---:|---:|",
        *totals, "",
        "| commit | machine | first | what | busy loops | load average before, most | repeats | without a failure "
        "| passed | skipped |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|",
        *commits, "",
        "## Every failure", "",
        *(failures or ["None."]), "",
    ])  # fmt: skip


def stored() -> list[Line]:
    """Return all repeats on record."""
    return [line for _, line in rows(STORE) if line is not None]


def count(text: str) -> int:
    """Read a number that is not negative."""
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def main() -> None:
    """Read the command line, repeat, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=WHAT, default="suite")
    parser.add_argument("--times", type=count, default=0, help="repeats; 0: only the page is written")
    parser.add_argument("--load", type=count, default=0, help="busy loops beside the tests")
    parser.add_argument("--jobs", type=count, default=2, help="workers of pytest")
    parser.add_argument("--page", type=Path, default=PAGE, help=f"document to write; {PAGE}")
    given = parser.parse_args()
    failed = 0
    write_atomic(given.page, page(stored()).encode())  # a test compares the two, whoever has added lines by hand
    for number in range(1, given.times + 1):
        line = repeat(given.what, given.load, given.jobs)
        append(STORE, line)
        write_atomic(given.page, page(stored()).encode())
        failed += bool(line["failed"])
        print(f"{number}/{given.times}: {line['passed']} passed, {len(line['failed'])} failed in {line['seconds']} s",
              *line["failed"], sep="\n  ", flush=True)  # fmt: skip
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
