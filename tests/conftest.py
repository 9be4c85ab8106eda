"""What many tests share: a tiny network in float64, a client's batches, a federation's numbers; one thread; seeds."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from metavd.container import seal
from metavd.core import rng
from metavd.core.model import from_module, xavier
from metavd.core.types import Batch, Model
from metavd.methods import Setting
from metavd.models.mlp import mlp

torch.set_num_threads(1)
if find_spec("hypothesis") is not None:  # a machine with a GPU may lack it, and the tests of kernels do without
    from hypothesis import settings

    # The same examples in every run, and no example fails because another process had the core; a hunt for new ones is
    # HYPOTHESIS_PROFILE=search.
    settings.register_profile("suite", deadline=None, derandomize=True)
    settings.register_profile("search", deadline=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))
if not torch.cuda.is_available():
    # Triton reads it when it is imported: its kernels then run in an interpreter, on the CPU.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_runtest_setup() -> None:
    """Seed what tests draw from global generators: a module's own first weights must not depend on the test before."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)


@pytest.fixture
def net() -> Model:
    """An MLP 4 -> 6 -> 3 -> 3 with the layers fc0, fc1, fc2, in float64."""
    return from_module(mlp((4,), 3, width=6).double(), init=xavier)


@pytest.fixture
def setting() -> Setting:
    """Four participating clients, three classes, a hundred rounds."""
    return Setting(num_clients=4, num_classes=3, rounds=100)


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    """Make one step's batch; `pad` appends rows that would do harm if they were read (0: a mask of ones)."""

    def make(rows: int = 5, *, seed: int = 0, pad: int | None = None, shape: tuple[int, ...] = (4,), classes: int = 3,
             round: float = 0.0, size: float | None = None) -> Batch:  # fmt: skip
        source = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, *shape, generator=source, dtype=torch.float64)
        y = torch.randint(0, classes, (rows,), generator=source)
        mask = None
        if pad is not None:
            mask = torch.cat([torch.ones(rows), torch.zeros(pad)]).double()
            x = torch.cat([x, torch.full((pad, *shape), 7.0).double()])
            y = torch.cat([y, torch.ones(pad, dtype=torch.int64)])
        number = float(rows if size is None else size)
        return Batch(x, y, mask, rng.fold(rng.key(seed), 99), *torch.tensor([round, number]).double())

    return make


@pytest.fixture(scope="session")
def damaged() -> Callable[[Any, bytes, bool], bytes]:
    """Change, cut out or put in bytes of a container, as Hypothesis draws; `again` seals it anew."""
    from hypothesis import strategies as st

    def damage(data: Any, whole: bytes, again: bool) -> bytes:
        body = bytearray(whole)
        for _ in range(data.draw(st.integers(1, 6))):
            at = data.draw(st.integers(0, max(len(body) - 1, 0)))
            what = data.draw(st.sampled_from(["change", "cut", "put", "truncate"]))
            if what == "change" and body:
                body[at] = data.draw(st.integers(0, 255))
            elif what == "cut":
                del body[at : at + data.draw(st.integers(1, 9))]
            elif what == "put":
                body[at:at] = data.draw(st.binary(max_size=9))
            else:
                del body[at:]
        if not again:
            return bytes(body)
        end = 8 + int.from_bytes(body[:8], "little")
        return seal(bytes(body[8:end]), [bytes(body[end:])])

    return damage


class Outcome(NamedTuple):
    """What a command came to."""

    status: int
    out: str
    err: str


@pytest.fixture
def metavd(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Outcome]]:
    """Run the command line in this process, in a folder of its own."""
    from metavd.cli import main

    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def call(*argv: str | Path) -> Outcome:
        capsys.readouterr()
        status = 0
        monkeypatch.setattr(sys, "argv", ["metavd", *map(str, argv)])
        try:
            main()
        except SystemExit as leave:
            status = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)
