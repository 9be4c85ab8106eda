"""How long a round takes, by method, and how a run grows: with clients, a round's clients, and processes that share it.

Every point is measured in a process of its own (or, of several ranks, in those that torchrun starts), which is told
what to do by its argument and prints what it found:

    python -m metavd.bench.scale '{"method": "fedavg", "clients": 1000}'
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

from .. import methods
from ..runs.provenance import provenance
from .workload import answered

if TYPE_CHECKING:
    from ..data.source import Source

_LIMIT = 900.0
"""Seconds after which a process has failed."""
_LOOKED_AT = 2
"""Rounds of a GPU whose kernels are added up, after those that are timed."""


@dataclass(frozen=True)
class Point:
    """One run that is measured, on random rows."""

    method: str
    clients: int
    cohort: int = 10
    partition: str = "iid"
    part: int = 512
    ranks: int = 1
    model: str = "mlp"
    width: int = 8
    shape: tuple[int, ...] = (8,)
    rounds: int = 12
    tested: int = 100
    device: str = "cpu"
    rows: int = 10
    """Of a client, test rows included: a fifth."""
    classes: int = 4
    batch: int = 0
    """Rows of a step; 0: the method's default."""


MANY, LARGE, HEADS, METHODS, RANKS = "many", "large", "heads", "methods", "ranks"
_LARGE = Point("fedavg", 20_000, width=256, rounds=3, tested=10)
_RANKS = Point("reptile+metavd", 100, cohort=32, model="cnn", width=16, shape=(3, 32, 32), rounds=6, tested=10)
# A GPU computes the padding of a batch, too, and nobody trains ten rows in batches of 64.
_MANY_ON_GPU = Point("reptile+metavd", 100, batch=8, device="cuda")
_ON_GPU = Point("fedavg", 10_000, model="cnn", width=64, shape=(3, 32, 32), rounds=4, tested=10, batch=8, device="cuda")
_HEAD = Point("fedper", 100, width=260, classes=100, tested=10)
_PAPER = Point(
    "fedavg", 100, partition="dirichlet:0.5", model="cnn", width=64, shape=(3, 32, 32), tested=10, device="cuda",
    rows=500, classes=100,
)  # fmt: skip
_WITH_NOISE = ("fedavg+dropout", "fedavg+vd", "fedavg+ensemblevd", "fedavg+metavd", "maml+metavd", "perfedavg+metavd")
KINDS: dict[str, dict[str, tuple[Point, ...]]] = {
    "cpu": {
        MANY: (
            *(
                Point(method, 10**power)
                for power in range(2, 7)
                for method in ("fedavg", "reptile+metavd", "fedper")
            ),
            *(Point("reptile+metavd", 10**6, partition=partition) for partition in ("dirichlet:10", "natural")),
        ),
        LARGE: (
            *(replace(_LARGE, cohort=10**power) for power in range(1, 5)),
            *(replace(_LARGE, cohort=cohort, part=0) for cohort in (1_000, 3_000)),
        ),
        HEADS: tuple(replace(_HEAD, clients=clients) for clients in (100, 10_000)),
        RANKS: tuple(replace(_RANKS, ranks=ranks) for ranks in (1, 2, 4)),
    },
    "cuda": {
        MANY: tuple(replace(_MANY_ON_GPU, clients=10**power) for power in (2, 4, 6)),
        LARGE: (
            *(replace(_ON_GPU, cohort=10**power) for power in range(1, 5)),
            replace(_ON_GPU, cohort=1_000, part=0),
        ),
        HEADS: tuple(replace(_HEAD, clients=clients, batch=8, device="cuda") for clients in (100, 10_000)),
        METHODS: tuple(
            replace(_PAPER, method=name)
            for name in (*(name for name in methods.NAMES if "+" not in name), *_WITH_NOISE)
        ),
    },
}  # fmt: skip
"""What is varied on a device, and the points of it."""


def points(kind: str, device: str = "cpu", *, quick: bool) -> Sequence[Point]:
    """Return the points of what is varied on a device; of a quick look the first three.

    >>> [each.ranks for each in points("ranks", quick=False)]
    [1, 2, 4]
    """
    return KINDS[device][kind][: 3 if quick else None]


def scaled(kind: str, device: str, note: Callable[[str], None], *, quick: bool) -> list[dict[str, Any]]:
    """Measure the points of what is varied on a device, one after another; each says on which machine."""
    found = []
    for point in points(kind, device, quick=quick):
        note(f"  {kind}: {told(point)}")
        found.append({**asdict(point), **_called(point), "machine": provenance(point.device)["machine"]})
    return found


def told(point: Point) -> str:
    """Write in a few words what is measured."""
    ranks = f", {point.ranks} ranks" if point.ranks > 1 else ""
    return f"{point.method}, {point.clients:,} clients ({point.partition}), {point.cohort:,} per round{ranks}"


def _called(point: Point) -> dict[str, Any]:
    """Let a process of its own measure a point; return what it found, or the error that ended it."""
    start = [sys.executable, "-m"]
    if point.ranks > 1:
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(point.ranks), "-m"]
    try:
        done = subprocess.run(
            [*start, "metavd.bench.scale", json.dumps(asdict(point))], capture_output=True, text=True, check=False,
            timeout=_LIMIT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"stopped after {_LIMIT:.0f} s"}
    return answered(done.returncode, done.stdout, done.stderr)


def _source(point: Point) -> Source:
    """Return the point's rows; images for a GPU are stored as bytes, as those of a dataset are."""
    import numpy as np  # noqa: PLC0415 (whoever only asks for the points need not wait)

    from ..data.source import arrays  # noqa: PLC0415

    rows = point.rows * point.clients
    draw = np.random.default_rng(0)
    y = draw.integers(0, point.classes, rows)
    if point.device == "cpu":
        x = draw.standard_normal((rows, *point.shape), np.float32)
        x.reshape(rows, -1)[np.arange(rows), y % math.prod(point.shape)] += 1.0
    else:
        x = draw.integers(0, 256, (rows, *point.shape), np.uint8)
    owner = np.arange(rows) // point.rows if point.partition == "natural" else None
    return arrays(x, y, client=owner, name="random")


def measured(point: Point) -> dict[str, Any]:
    """Take a point's rounds in this process; return seconds and memory, of several ranks the largest memory.

    Start: from the rows in memory to the first round, so partition, network and the first state. A round is the median
    of those after the first quarter, which pays for what is made once. Of a GPU also the time that kernels ran.
    """
    import torch  # noqa: PLC0415

    from ..engine.ranks import joined  # noqa: PLC0415
    from ..runs.evaluation import evaluate  # noqa: PLC0415
    from ..runs.run import rounds_of  # noqa: PLC0415
    from ..runs.settings import Experiment  # noqa: PLC0415
    from ..runs.setup import prepare, start, using  # noqa: PLC0415

    ranks, source = joined(Experiment().rank_wait), _source(point)
    began = _clocks()
    on_gpu = point.device == "cuda"
    options = {"batch": point.batch} if point.batch else {}
    e = Experiment(
        method=point.method, clients=point.clients, unseen=0, cohort=point.cohort,
        rounds=point.rounds + _LOOKED_AT * on_gpu, partition=point.partition, test_rows="uniform", model=point.model,
        width=point.width, part=point.part, eval_clients=point.tested, final_clients=point.tested, device=point.device,
        options=options,
    )  # fmt: skip
    setup = prepare(e, source, ranks=ranks)
    with using(setup):
        last = begun = start(setup)
        marks = [_clocks()]
        rounds = rounds_of(setup, begun)
        for now, _ in islice(rounds, point.rounds):
            last = now
            marks.append(_clocks())
        evaluate(setup, last, count=point.tested)
        tested = _clocks()
        kernels = {"kernels_s": _kernels(rounds)} if on_gpu else {}
    each = [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in pairwise(marks)][len(marks) // 4 :]
    (start_s, start_cpu), (test_s, test_cpu) = (
        tuple(b - a for a, b in zip(*pair, strict=True)) for pair in ((began, marks[0]), (marks[-1], tested))
    )
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {
        "start_s": start_s,
        "start_cpu_s": start_cpu,
        "first_s": marks[1][0] - marks[0][0],
        "round_s": statistics.median(wall for wall, _ in each),
        "round_cpu_s": statistics.median(cpu for _, cpu in each),
        "evaluation_s": test_s,
        "evaluation_cpu_s": test_cpu,
        "memory_mb": memory if ranks is None else max(ranks.all(memory)),
        "backend": setup.experiment.backend,
        **kernels,
    }
    if on_gpu:
        found["cuda_mb"] = torch.cuda.max_memory_allocated() / 2**20
    return found


def _kernels(rounds: Iterator[Any]) -> float:
    """Return the seconds that a GPU's kernels run in a round, added up: the rest of a round it waits for the host."""
    import torch  # noqa: PLC0415
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        count = sum(1 for _ in rounds)
        torch.cuda.synchronize()
    ran = [float(event.device_time) for event in seen.events() if event.device_type.name == "CUDA"]
    return sum(ran) / 1e6 / count


def _clocks() -> tuple[float, float]:
    """Return the seconds on the wall, and those that the process had a core: what a busy machine does not stretch."""
    return time.monotonic(), time.process_time()


def main() -> None:
    """Measure the point that the argument describes; rank 0 alone prints."""
    given = json.loads(sys.argv[1])
    found = measured(Point(**given | {"shape": tuple(given.get("shape", (8,)))}))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found))


if __name__ == "__main__":
    main()
