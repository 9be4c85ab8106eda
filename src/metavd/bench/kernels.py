"""What Triton makes of our kernels for an H200, which need not be here: `python -m metavd.bench.kernels`.

One round and one evaluation of a few clients of the paper's networks and rows, in which every launch is noted and none
takes place; each variant of a kernel is then compiled. Prints registers, spills and shared memory of each.

With --time, on a GPU: what a launch takes there, ten clients at once, and what it would take with other constants.

Shape letters: C clients, S draws, B rows, K classes, O units, m rows of a matrix.
"""

from __future__ import annotations

import argparse
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from .. import compat
from ..core.types import NonFiniteError
from ..data.source import Source, arrays
from ..engine.cohorts import round_of
from ..engine.evaluation import answers
from ..engine.schedule import Schedule
from ..engine.schedule.graph import stepwise
from ..engine.schedule.vmap import all_at_once, whole_turns
from ..errors import UserError
from ..extras import need
from ..ops import device
from ..runs.settings import Experiment
from ..runs.setup import prepare, start

if TYPE_CHECKING:
    from ..ops.launch import Launch

HOPPER = 90
"""Compute capability of an H100 and an H200."""
MOST_SHARED = 227 * 1024
"""Bytes of shared memory that one block of such a GPU may have."""


@dataclass(frozen=True)
class Scene:
    """A round whose launches are noted."""

    method: str
    precision: str = "bf16"
    data: str = "cifar100"
    """Of `_ROWS`."""
    cohort: int = 2
    rows: int = 64
    """Of each client, training and test rows together."""
    dtype: Literal["float32", "float64"] = "float32"

    @property
    def name(self) -> str:
        """Say which round it is."""
        return f"{self.method} {self.data} {self.precision if self.dtype == 'float32' else self.dtype}"


_ROWS: dict[str, tuple[tuple[int, int, int], int]] = {
    "cifar10": ((3, 32, 32), 10), "cifar100": ((3, 32, 32), 100), "femnist": ((1, 28, 28), 62),
}  # fmt: skip
"""Shape and classes of the paper's rows; mirrored and cropped where they are photographs."""
SCENES = (
    Scene("reptile+metavd"),
    Scene("maml+metavd"),
    Scene("pfedgp"),
    Scene("maml+metavd", "exact"),
    Scene("fedavg", "tf32", "cifar10"),
    Scene("fedavg", "bf16", "femnist"),
    Scene("reptile+metavd", "bf16", "cifar10", cohort=18, rows=3),  # more than have a graph of their own
    Scene("fedavg", "exact", "cifar10", dtype="float64"),
)
"""The paper's networks at its width; kernels depend on shapes and types, hardly on how many clients there are."""


@dataclass(frozen=True)
class Compiled:
    """What became of one variant of a kernel."""

    kernel: str
    scene: str
    """The first that launches it."""
    given: str
    """Types of its arguments, and its constants."""
    warps: int
    registers: int
    """Of a thread; 255 are all that there are."""
    spilled: int
    """Bytes of a thread that did not fit, written and read again."""
    shared: int
    """Bytes of a block."""
    programs: int
    """Of the launch that was noted, which is of few clients."""


def _source(scene: Scene) -> Source:
    shape, classes = _ROWS[scene.data]
    count = (scene.cohort + 1) * scene.rows
    return arrays(
        np.zeros((count, *shape), np.uint8), np.arange(count) % classes, name=scene.data, num_classes=classes,
        augment=shape[0] == 3,
    )  # fmt: skip


def launches(scene: Scene) -> list[Launch]:
    """Return the launches of a round and of a test, seen and unseen clients."""
    from ..ops.launch import noting  # noqa: PLC0415  Triton need not be installed

    e = Experiment(
        method=scene.method, clients=scene.cohort, unseen=1, cohort=scene.cohort, rounds=1000, partition="iid",
        test_rows="uniform", model="cnn", width=64, device="cpu", backend="vmap", precision=scene.precision,
        dtype=scene.dtype,
    )  # fmt: skip
    setup = prepare(e, _source(scene))
    run = Schedule("graph", stepwise(capture=False, otherwise=whole_turns()), all_at_once())
    with torch.no_grad():
        state = start(setup)
        with patch.object(device, "has_kernels", lambda *_: True), noting() as noted:
            found = round_of(setup.algorithm, setup.pool, run, state, torch.arange(scene.cohort), lost=[])
            assert found.update is not None
            setup.algorithm.server.update(state, found.update)
            for client in (0, scene.cohort):
                with suppress(NonFiniteError):  # what is computed there is nonsense
                    list(answers(setup.algorithm, setup.pool, state, [client], run.map, split="test"))
    return noted


def beside(clients: int) -> list[Launch]:
    """Return launches that no round of nonsense leads to: of trees and their nodes, and of layers with noise in a row.

    Nodes as T7's pFedGP has them: 385 rows of 100 classes, 20 chains.
    """
    from ..ops.launch import noting  # noqa: PLC0415

    source = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    y, bias, keys = normal(clients, 3, 64, 128), normal(clients, 128), torch.zeros(clients, 3, dtype=torch.int64)
    with noting() as noted:
        for m, nodes in ((385, clients), (16, 50 * clients)):
            half = normal(nodes, m, 32)
            device.kernels("cholesky").factor(half @ half.mT, normal(nodes, 20, m))
        for classes in (100, 10):
            means = normal(clients, classes, 8)
            device.kernels("class_tree").class_tree(
                torch.cdist(means, means).square(), torch.ones(clients, classes), 10
            )
        device.kernels("hashing").normal(torch.zeros(385 * clients, 5, dtype=torch.int64), 20)
        device.kernels("hashing").normal(torch.zeros((), dtype=torch.int64), 1 << 16)
        device.kernels("dense").noisy(y, bias, y.square(), keys, 1e-10, 0.1)
        device.kernels("dense").noisy_slope(y, y, y, y.square(), 1e-10, 0.1)
        device.kernels("posterior").gate(y, y, -8.5, 8.5)
    return noted


def every_launch(scenes: Sequence[Scene] = SCENES, clients: int = 2) -> Iterator[tuple[str, Launch]]:
    """Yield each scene's name with its launches, then those beside them."""
    for scene in scenes:
        yield from ((scene.name, launch) for launch in launches(scene))
    yield from (("beside", launch) for launch in beside(clients))


def compiled() -> Iterator[Compiled]:
    """Compile what is launched, each variant once, for an H200."""
    if compat.is_interpreted():
        raise UserError("TRITON_INTERPRET is set, so that Triton compiles nothing; unset it")
    seen: set[int] = set()
    with compat.absent_gpu(HOPPER):
        for scene, launch in every_launch():
            said = io.StringIO()
            with redirect_stdout(said):
                made = launch.compiled()
            if id(made) not in seen:
                seen.add(id(made))
                found = compat.anatomy(made, said.getvalue())
                yield Compiled(
                    kernel=found.name,
                    scene=scene,
                    given=_given(launch, found.signature),
                    warps=found.warps,
                    registers=found.registers,
                    spilled=found.spilled,
                    shared=found.shared,
                    programs=math.prod(launch.grid),
                )


def _given(launch: Launch, signature: Mapping[str, Any]) -> str:
    """Write types and constants of a launch in a line."""
    types = [kind for name, kind in signature.items() if name not in launch.constants]
    short = [f"({len(kind)} x {'/'.join(dict.fromkeys(kind))})" if isinstance(kind, tuple) else kind for kind in types]
    return " ".join([*short, *(f"{name}={value}" for name, value in launch.constants.items())])


OTHERS: dict[str, tuple[dict[str, int], ...]] = {
    "_factor": ({"num_warps": 8}, {"num_warps": 2}),
    "_class_tree": ({"num_warps": 8}, {"num_warps": 32}),
    "_cross_entropy": ({"num_warps": 4}, {"num_warps": 8}, {"num_warps": 16}),
    "_cross_entropy_slope": ({"num_warps": 4}, {"num_warps": 8}, {"num_warps": 16}),
    "_weigh": ({"P": 64}, {"P": 32}, {"num_stages": 2}, {"num_stages": 1}, {"num_warps": 8}),
    "_take": ({"num_stages": 1}, {"num_warps": 8}),
    "_pool": ({"num_warps": 8}, {"num_warps": 2}),
    "_unpick": ({"num_warps": 8}, {"ROWS": 16}, {"ROWS": 64}),
    "_noisy": ({"num_warps": 8},),
    "_images": ({"num_warps": 8},),
}
"""Constants that --time tries in place of a kernel's own; none of them changes the grid."""


class Taken(NamedTuple):
    """What a launch takes on a GPU."""

    kernel: str
    scene: str
    constants: dict[str, Any]
    microseconds: float
    gigabytes: float
    """A second, of all that the kernel is given and gives, each once: an H200's memory does 4,800."""
    why: str = ""
    """Why it could not be measured."""

    @property
    def line(self) -> str:
        """Write it in a line of a table."""
        numbers = f"{self.microseconds:9.1f} us {self.gigabytes:7.0f} GB/s  {self.kernel:<22}"
        return f"{numbers}{self.scene}; {self.constants} {self.why}"


def timed(given: Iterable[tuple[str, Launch]], place: str = "cuda") -> Iterator[Taken]:
    """Measure launches, each kind once, and what else could be chosen for them."""
    from triton.testing import do_bench  # noqa: PLC0415

    seen: set[str] = set()
    for scene, launch in given:
        name = launch.kernel.jit.__name__
        kind = f"{name} {launch.grid} {launch.constants} {[_told(each) for each in launch.arguments]}"
        if kind in seen or not math.prod(launch.grid):
            continue
        seen.add(kind)
        own = {id(each): each.to(place) for each in _tensors(launch.arguments)}
        arguments = [_placed(each, own) for each in launch.arguments]
        size = sum(each.numel() * each.element_size() for each in own.values())
        for other in ({}, *OTHERS.get(name, ())):
            constants = launch.constants | other
            if other and constants == launch.constants:
                continue
            call = partial(launch.kernel.jit[launch.grid], *arguments, **constants)
            try:
                taken = 1000 * do_bench(call, warmup=5, rep=20)
            except Exception as error:  # what one variant cannot do keeps nobody from the next
                yield Taken(name, scene, constants, math.nan, math.nan, f"{type(error).__name__}: {error}"[:80])
                continue
            yield Taken(name, scene, constants, taken, size / taken / 1000)


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for each in arguments:
        if isinstance(each, tuple):
            yield from _tensors(each)
        elif isinstance(each, Tensor):
            yield each


def _placed(value: Any, own: Mapping[int, Tensor]) -> Any:
    if isinstance(value, tuple):
        return tuple(_placed(each, own) for each in value)
    return own.get(id(value), value)


def _told(value: Any) -> Any:
    """Return what of an argument makes a launch another kind."""
    if isinstance(value, tuple):
        return tuple(map(_told, value))
    return (value.dtype, value.shape) if isinstance(value, Tensor) else value


def table(found: Sequence[Compiled]) -> str:
    """Write what became of kernels as a table."""
    heading = (
        f"{'kernel':<24}{'warps':>6}{'regs':>6}{'spilled':>9}{'shared':>8}{'programs':>10}  given; first launched by"
    )
    return "\n".join([
        heading,
        *(
            f"{each.kernel:<24}{each.warps:>6}{each.registers:>6}{each.spilled:>9}{each.shared:>8}{each.programs:>10}"
            f"  {each.given}; {each.scene}"
            for each in sorted(found, key=lambda each: (each.kernel, each.given))
        ),
    ])  # fmt: skip


def main() -> None:
    """Compile, or measure, and print."""
    parser = argparse.ArgumentParser(
        prog="python -m metavd.bench.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each variant")
    parser.add_argument("--time", action="store_true", help="measure on the GPU that is here")
    given = parser.parse_args()
    try:
        _print(given.time, given.json)
    except UserError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def _print(measured: bool, as_json: bool) -> None:
    need("triton", "", "to look at kernels")
    if measured:
        if not torch.cuda.is_available():
            raise UserError("--time measures on a GPU, but torch finds no CUDA GPU here")
        tens = [replace(scene, cohort=10) for scene in SCENES if scene.cohort == 2]
        for taken in timed(every_launch(tens, 10)):
            print(json.dumps(taken._asdict()) if as_json else taken.line, flush=True)
    elif as_json:
        for each in compiled():
            print(json.dumps(asdict(each)), flush=True)
    else:
        print(table(list(compiled())))


if __name__ == "__main__":
    main()
