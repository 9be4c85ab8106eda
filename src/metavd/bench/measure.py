"""Measure every variant in a process of its own, repetitions in turn, so that ratios come from one run."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

from ..errors import UserError
from ..runs.provenance import provenance
from ..runs.settings import Experiment, with_settings
from ..studies.side import sharing
from . import scale, whole
from .ours import dealt
from .workload import CURVES, WORKLOADS, Assignment, Workload, answered, curve, training_flops

OURS = "metavd"
WHOLE, START = "whole", "start"
"""The parts of a benchmark that take whole runs, and the time until a command answers."""
STARTS = ("--help", "methods", "datasets")
"""Commands that a person waits for."""
KEPT = {
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}
"""glibc's settings by which freed memory stays in the process; our engine sets its own."""
_PAUSE = 0.3
"""Seconds between two looks at a process's memory."""
_LIMIT = 540.0
"""Seconds after which a process has failed."""
_CLOSE, _MORE = 1.25, 2
"""Whoever is nearly as fast as ours, or faster, runs so many times as often again, and so does ours: a machine's noise
is as large as such a difference."""


@dataclass(frozen=True)
class Variant:
    """One way to compute the rounds of a workload."""

    name: str
    module: str
    """Of this package, run as a program."""
    python: str = sys.executable
    tuned: bool = False
    processes: int = 1
    threads: int = 0
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """What the process finds in its environment."""
        return os.environ | (KEPT if self.tuned else {})


def variants(
    device: str, settings: Mapping[str, Any], flower: str | None = None, pfl: str | None = None
) -> list[Variant]:
    """Return what is measured on a device: our engine first, then loops, then frameworks that are installed.

    `flower` and `pfl` are interpreters that have them; by default this one is asked.
    """
    cores = torch.get_num_threads()
    found = [Variant(OURS, "ours", settings=tuple(settings.items())), Variant("loop", "plain")]
    if device == "cpu":
        found.append(Variant(f"loop tuned, 1 x {cores}", "plain", tuned=True, threads=cores))
        if cores > 1:
            found.append(Variant(f"loop tuned, {cores} x 1", "plain", tuned=True, processes=cores, threads=1))
    else:
        found.append(Variant("loop tuned", "plain", tuned=True))
    for name, module, python, needs in (
        ("Flower simulation", "with_flower", flower, ("flwr", "ray")),
        ("pfl", "with_pfl", pfl, ("pfl",)),
    ):
        where = _has(python, needs, name)
        if where is not None:
            found += [Variant(name, module, where), Variant(f"{name} tuned", module, where, tuned=True)]
    return found


def _has(python: str | None, needs: Sequence[str], name: str) -> str | None:
    """Return the interpreter that has a framework, or None where nobody named one and this one has not."""
    if python is None:
        return sys.executable if all(map(importlib.util.find_spec, needs)) else None
    test = f"import importlib.util as i, sys; sys.exit(not all(map(i.find_spec, {(*needs, 'torch')!r})))"
    try:
        answer = subprocess.run([python, "-c", test], check=False, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{python} is no Python interpreter that could be started ({error})") from None
    if answer.returncode:
        raise UserError(f"{python} cannot import {', '.join(needs)} and torch, which {name} needs")
    return python


def call(variant: Variant, order: Assignment) -> dict[str, Any]:
    """Let a process of its own carry out an order; return its times, or the error that ended it."""
    order = replace(
        order, tuned=variant.tuned, processes=variant.processes, threads=variant.threads, settings=variant.settings,
        warm_up=order.first if variant.name == OURS else order.warm_up,
    )  # fmt: skip
    began = time.perf_counter()
    with (
        _alone() as folder,
        _told(order.to_json()) as told,
        subprocess.Popen(
            [variant.python, "-m", f"metavd.bench.{variant.module}"], stdin=told, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=variant.environment | {"PYTHONPATH": folder},
        ) as process,
    ):  # fmt: skip
        said, failed, most = _listen(process)
    found = answered(process.returncode, said, failed)
    if "error" in found:
        return found
    found["start_s"] = time.perf_counter() - began - sum(found["seconds"])
    found["memory_mb"] = max(most, found["memory_mb"])
    return checked(found, order)


def checked(found: dict[str, Any], order: Assignment) -> dict[str, Any]:
    """Return what a process found, or an error where its rounds did not do the work: then its times mean nothing."""
    wanted = order.images()[: len(found["seconds"])]
    if found.get("trained", wanted) == wanted:
        return found
    return {"error": f"its rounds trained on {found['trained']} images, not on {wanted}"}


@contextmanager
def _alone() -> Iterator[str]:
    """Return a folder to import this package from and nothing else: another environment keeps its own libraries."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(__file__).resolve().parents[1]
        (Path(folder) / package.name).symlink_to(package)
        yield os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])


@contextmanager
def _told(text: str) -> Iterator[IO[str]]:
    """Return a text as a file to read: one too long for a pipe would wait there while the process is listened to."""
    with tempfile.TemporaryFile("w+") as file:
        file.write(text)
        file.seek(0)
        yield file


def _listen(process: subprocess.Popen[str]) -> tuple[str, str, float]:
    """Wait for a process; return what it wrote and the most memory that it and its descendants had."""
    most, until = 0.0, time.monotonic() + _LIMIT
    while time.monotonic() < until:
        try:
            said, failed = process.communicate(timeout=_PAUSE)
            return said, failed, most
        except subprocess.TimeoutExpired:
            most = max(most, sum(map(_resident, _family(process.pid))))
        except BaseException:
            process.kill()
            raise
    process.kill()
    process.communicate()
    return "", f"stopped after {_LIMIT:.0f} s", most


def _family(pid: int) -> list[int]:
    """Return a process and all its descendants, where /proc tells."""
    found = [pid]
    for one in found:
        for path in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += [int(word) for word in path.read_text().split()]
            except OSError:  # it ended meanwhile
                continue
    return found


def _resident(pid: int) -> float:
    """Return a process's memory in MB; pages that processes share count in each."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return 0.0


@dataclass(frozen=True)
class Pace:
    """How long is measured."""

    repetitions: int
    rounds: int
    budget: float
    first: int = 2
    warm_up: int = 1


def pace(work: Workload, *, quick: bool) -> Pace:
    """Return how often a workload is measured: ragged rounds must be the same for all, others may be cut short."""
    if work.partition != "iid":
        many = 2 if work.cohort > 20 else 6
        return Pace(1, 2 if quick else many, 1e9, first=3)
    rounds = 50 if work.model == "mlp" else 4
    return Pace(1, min(rounds, 10), 4.0) if quick else Pace(3, rounds, 12.0)


def figures(
    order: Assignment, repetitions: Sequence[Mapping[str, Any]], peaks: Mapping[str, float], *, load: int = 0
) -> dict[str, Any]:
    """Sum up what repetitions took: one round, and what follows from it.

    That is the fastest where rounds are alike, since others on a machine only ever make one slower, and the mean where
    they are not; beside a load, which is what is measured then, it is the median.
    """
    broken = next((each["error"] for each in repetitions if "error" in each), None)
    if broken is not None:
        return {"error": broken}
    seconds = [second for each in repetitions for second in each["seconds"]]
    images = [count for each in repetitions for count in order.images()[: len(each["seconds"])]]
    alike = len(set(images)) == 1
    took = (statistics.median if load else min)(seconds) if alike else statistics.mean(seconds)
    speed = statistics.mean(images) / took
    flops = training_flops(order.work) * speed
    found = {
        "round_s": took,
        "rounds": len(seconds),
        "median_s": statistics.median(seconds),
        "slowest_s": max(seconds),
        "start_s": min(each["start_s"] for each in repetitions),
        "images_s": speed,
        "tflops": flops / 1e12,
        "memory_mb": max(each["memory_mb"] for each in repetitions),
    }
    last = repetitions[-1]
    found |= {key: last[key] for key in ("cuda_mb", "backend", "precision", "loss") if key in last}
    peak = peaks.get(found.get("precision", "float32"), peaks["float32"])
    return found | {"share": flops / peak}


Note = Callable[[str], None]


def order_of(work: Workload, device: str, how: Pace) -> Assignment:
    """Return the order of a workload that all variants are given."""
    sizes, cohorts = dealt(work, how.first + how.rounds)
    return Assignment(work, device, sizes, cohorts, how.first, how.warm_up, how.rounds, how.budget)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many cores busy meanwhile, as somebody else's programs would."""
    loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


def compared(
    work: Workload, device: str, chosen: Sequence[Variant], peaks: Mapping[str, float], note: Note, *, quick: bool,
    load: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Measure all variants on a workload, in turn, and relate them to ours; a close race goes on for longer.

    `load` is how many busy loops run beside them.
    """
    how = pace(work, quick=quick)
    order = order_of(work, device, how)
    answers: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in chosen}

    def take(turns: int, who: Sequence[Variant]) -> dict[str, dict[str, Any]]:
        for turn in range(turns):
            for variant in who:
                if any("error" in each for each in answers[variant.name]):
                    continue
                note(f"  {work.name}, {turn + 1} of {turns}: {variant.name}")
                answers[variant.name].append(call(variant, order))
        return {name: figures(order, each, peaks, load=load) for name, each in answers.items()}

    with busy(load):
        found = with_ratios(take(how.repetitions, chosen))
        close = [each for each in chosen if found[each.name].get("against_ours", math.inf) < _CLOSE]
        if len(close) > 1 and how.repetitions > 1:
            found = with_ratios(take(_MORE * how.repetitions, close))
    for name, each in found.items():
        if "error" in each:
            note(f"  {work.name}: {name} failed: {each['error']}")
    return {
        "name": work.name,
        **({"load": load} if load else {}),
        "workload": asdict(work),
        "images": statistics.median(order.images()),
        "flops_image": training_flops(work),
        "variants": [{"name": name, **each} for name, each in found.items()],
    }


def with_ratios(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Add how often our round fits into each variant's."""
    ours = found[OURS].get("round_s")
    return {
        name: {**each, "against_ours": each["round_s"] / ours} if ours and "round_s" in each else dict(each)
        for name, each in found.items()
    }


def scaled(
    name: str, device: str, ours: Variant, peaks: Mapping[str, float], note: Note, *, quick: bool
) -> list[dict[str, Any]]:
    """Measure the points of a scaling curve with our engine."""
    points = []
    for value, work in curve(name, device, quick=quick):
        note(f"  curve {work.name}")
        how = Pace(1, 3 if quick else 12, 4.0)
        order = order_of(work, device, how)
        points.append({"value": value, **figures(order, [call(ours, order)], peaks)})
    return points


def whole_runs(root: str, note: Note, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Take whole runs of every method; before its first, a start with an empty cache of kernels, which is kept."""
    rounds = {"rounds": 30} if quick else {}
    with tempfile.TemporaryDirectory() as folder:
        for method, at_once in whole.RUNS:
            cache = Path(folder) / method
            settings = {"method": method, "root": root, "device": "cuda"}
            first: dict[str, Any] = {}
            if not cache.exists():
                cache.mkdir()
                first = whole_run(settings | {"rounds": 2}, 1, cache, note)
            found = whole_run(settings | rounds, at_once, cache, note)
            yield found | ({"cold_s": first["start_s"]} if "start_s" in first else {})


def whole_run(settings: Mapping[str, Any], at_once: int, cache: Path, note: Note) -> dict[str, Any]:
    """Let processes of their own take whole runs, at once; return what one took, or the error that ended it.

    Seconds are those of all runs over their number. Compiled kernels are in the cache, or go there.
    """
    note(f"  {settings.get('rounds', whole.SETTING['rounds'])} rounds of {settings['method']}, {at_once} at once")
    began = time.time()
    with sharing(at_once):
        orders = [{"began": began, "settings": {**settings, "seed": whole.SETTING["seed"] + i}} for i in range(at_once)]
        processes = [_started(order, cache) for order in orders]
        answers = [process.communicate() for process in processes]
    found = [answered(process.returncode, *each) for process, each in zip(processes, answers, strict=True)]
    for each in found:
        if "error" in each:
            return {"method": settings["method"], "at_once": at_once, **each}
    return found[0] | {"at_once": at_once, "seconds": (time.time() - began) / at_once}


def _started(order: Mapping[str, Any], cache: Path) -> subprocess.Popen[str]:
    with _told(json.dumps(order)) as told:
        return subprocess.Popen(
            [sys.executable, "-m", "metavd.bench.whole"], stdin=told, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        )  # fmt: skip


def starts(note: Note, *, quick: bool) -> list[dict[str, Any]]:
    """Return the seconds after which commands have answered and ended, the best of five."""
    found = []
    for words in STARTS:
        note(f"  metavd {words}")
        seconds = []
        for _ in range(1 if quick else 5):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-m", "metavd", words], check=True, capture_output=True)
            seconds.append(time.perf_counter() - began)
        found.append({"command": f"metavd {words}", "seconds": min(seconds), "machine": provenance("cpu")["machine"]})
    return found


def _wanted(device: str, only: Sequence[str], root: str | None, load: int) -> set[str]:
    """Return the parts that are to be measured, or say what is wrong with them."""
    works = [work.name for work in WORKLOADS[device]]
    parts = [*works, *CURVES, *scale.KINDS[device], WHOLE if device == "cuda" else START]
    unknown = sorted(set(only) - set(parts))
    if unknown:
        raise UserError(f"there is no part {unknown[0]!r} on {device}; choose from {', '.join(parts)}")
    if WHOLE in only and root is None:
        raise UserError("whole runs are of CIFAR-10, but no --root names the folder of its files")
    if load and (not only or not set(only) <= set(works)):
        raise UserError(f"beside a load only workloads are measured; name some with --only: {', '.join(works)}")
    return set(only) or {*parts} - ({WHOLE} if root is None else set())


def bench(
    device: str,
    *,
    only: Sequence[str] = (),
    quick: bool = False,
    settings: Mapping[str, Any] | None = None,
    flower: str | None = None,
    pfl: str | None = None,
    root: str | None = None,
    load: int = 0,
    command: str = "",
    note: Note = lambda _: None,
    keep: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure workloads, curves, whole runs and starts on a device; return everything as plain values.

    `keep` is given what there is after every piece, so that who stops early keeps something. Beside a `load` of busy
    loops workloads alone are measured.
    """
    works = {work.name: work for work in WORKLOADS[device]}
    wanted = _wanted(device, only, root, load)
    with_settings(Experiment(method="fedavg"), settings or {})
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but torch finds no CUDA GPU here; use --device cpu")
    chosen = variants(device, settings or {}, flower, pfl)
    peaks: dict[str, float] = {}
    if wanted - {START, *scale.KINDS[device]}:
        note("  matrix products")
        answer = subprocess.run(
            [sys.executable, "-m", "metavd.bench.peak", device], check=True, capture_output=True, text=True
        )
        peaks = json.loads(answer.stdout)
    found: dict[str, Any] = {
        "device": device,
        **provenance(device),
        "command": command,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "quick": quick,
        "threads": torch.get_num_threads(),
        "peaks": peaks,
        "workloads": [],
        "curves": {},
        "whole": [],
        "starts": [],
        "scale": {},
    }
    if START in wanted:
        found["starts"] = starts(note, quick=quick)
        keep(found)
    for name, work in works.items():
        if name in wanted:
            found["workloads"].append(compared(work, device, chosen, peaks, note, quick=quick, load=load))
            keep(found)
    for name in CURVES:
        if name in wanted:
            found["curves"][name] = scaled(name, device, chosen[0], peaks, note, quick=quick)
            keep(found)
    for name in scale.KINDS[device]:
        if name in wanted:
            found["scale"][name] = scale.scaled(name, device, note, quick=quick)
            keep(found)
    for each in whole_runs(root, note, quick=quick) if root and WHOLE in wanted else ():
        found["whole"].append(each)
        keep(found)
    return found
