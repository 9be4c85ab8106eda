"""What Triton makes of every kernel for an H200, which need not be here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from metavd.bench import kernels as bench
from metavd.ops import device, launch

MODULES = ("cholesky", "class_tree", "conv", "dense", "hashing", "images", "loss", "posterior", "step")
SPILLED = {"_class_tree": 8000, "_weigh": 160}
"""Bytes of a thread that may be written to memory and read again, where it is not 0: trees hold the distances of a
hundred classes, and the weights' gradient by floats spills a little so that three programs fit a multiprocessor."""
PINS = Path(__file__).parents[2] / "constraints.txt"
PINNED = next(line[8:] for line in PINS.read_text().splitlines() if line.startswith("triton=="))
"""The compiler that these bounds were seen with; another one, as on a machine with a GPU, spills elsewhere."""


@pytest.fixture(scope="module")
def variants() -> list[dict[str, Any]]:
    """Compile in a process of its own, where no kernel is interpreted; half a minute of one core."""
    done = subprocess.run(
        [sys.executable, "-m", "metavd.bench.kernels", "--json"], capture_output=True, text=True, check=False,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )  # fmt: skip
    assert not done.returncode, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_every_kernel_compiles_for_hopper_and_fits_it(variants: list[dict[str, Any]]) -> None:
    """With the types, shapes and constants that the launchers give; registers suffice but where a bound is stated."""
    ours = {
        each.jit.__name__
        for name in MODULES
        for each in vars(device.kernels(name)).values()
        if isinstance(each, launch.Kernel)
    }
    assert {each["kernel"] for each in variants} == ours
    for each in variants:
        assert 0 < each["registers"] <= 255, each
        assert each["shared"] <= bench.MOST_SHARED, each
        if triton.__version__ == PINNED:
            assert each["spilled"] <= SPILLED.get(each["kernel"], 0), each


def test_all_types_are_among_them(variants: list[dict[str, Any]]) -> None:
    """bfloat16, float32 and TF32 products, and the rows of a run in float64."""
    taken = {each["given"] for each in variants if each["kernel"] == "_take"}
    for part in ("*bf16 *bf16", "PRECISION=ieee", "PRECISION=tf32", "PICK=True"):
        assert any(part in each for each in taken), part
    assert any("*fp32 *fp32 *fp32 *i8 *fp32" in each and "ieee" in each for each in taken)
    assert any("fp64" in each["given"] for each in variants)


def test_a_launch_is_measured_with_its_own_constants_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind once; what one variant cannot do is told, and the next is measured all the same."""
    triton_testing = pytest.importorskip("triton.testing")
    with launch.noting() as noted:
        for _ in range(2):
            device.kernels("class_tree").class_tree(torch.rand(1, 4, 4), torch.ones(1, 4), 2)
    tried = []

    def bench_of(call: Any, **_: Any) -> float:
        tried.append(call.keywords["num_warps"])
        if len(tried) == 2:
            raise RuntimeError("out of something")
        return 0.001

    monkeypatch.setattr(triton_testing, "do_bench", bench_of)
    found = list(bench.timed([("a", each) for each in noted], "cpu"))
    assert tried == [2, 8, 32]
    assert [each.microseconds for each in found][::2] == [1.0, 1.0]
    assert found[1].why == "RuntimeError: out of something"
    assert found[0].gigabytes == pytest.approx(4 * (16 + 4 + 12 + 12) / 1000)
    assert "_class_tree" in found[0].line
