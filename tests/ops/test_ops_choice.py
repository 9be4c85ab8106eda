"""Which implementation of an operator runs: decided in `ops` alone, by device, type and shape."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import metavd
from metavd.core import rng
from metavd.ops import cholesky, class_tree, conv, dense, device, hashing, images, loss, posterior
from metavd.ops.posterior import Bounds
from metavd.ops.precision import EXACT

BOUNDS = Bounds(-3.0, -3.5, -2.5, "inward")
KEYS = rng.split(rng.key(0), 2)
LOOK = (1.0, torch.zeros(3), torch.ones(3))


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def block(*, channels: int = 3, side: int = 4, filters: int = 16, dtype: torch.dtype = torch.float32) -> Tensor:
    weight, bias = ones(filters, channels, 3, 3, dtype=dtype), ones(filters, dtype=dtype)
    return conv.conv_relu_pool(ones(2, channels, side, side, dtype=dtype), weight, bias, EXACT)


def rows(look: Any) -> Any:
    x, y = ones(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64)
    return images.batches(x, y, torch.zeros(2, 2, dtype=torch.int64), None, look, lambda rows, _: x[rows])


def entropy(rows: int = 2, classes: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return loss.cross_entropy(ones(1, rows, classes, dtype=dtype), torch.zeros(rows, dtype=torch.int64), None)


def kl(bounds: Bounds = BOUNDS, *, masked: bool = False, dtype: torch.dtype = torch.float32, **more: Any) -> Tensor:
    value = ones(2, 3, dtype=dtype)
    return posterior.kl(value, value, value if masked else None, bounds, 1.0, **more)


def noisy(*shape: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    mean = ones(*shape, dtype=dtype)
    return dense.noisy(mean, ones(shape[-1], dtype=dtype) if bias else None, mean, KEYS, 1e-10, 0.1)


def tree(classes: int = 3, dtype: torch.dtype = torch.float32) -> Any:
    return class_tree.class_tree(ones(classes, 2, dtype=dtype), ones(classes))


DOUBLE = torch.float64
THROUGH = BOUNDS._replace(clamp="through")
CASES: dict[str, tuple[Any, Callable[[], Any], bool]] = {
    "a hash": (hashing, lambda: hashing.mix(KEYS), True),
    "normals": (hashing, lambda: hashing.normals(KEYS, 3, torch.float32), True),
    "few channels": (conv, block, True),
    "many channels": (conv, lambda: block(channels=16), True),
    "odd channels": (conv, lambda: block(channels=17), False),
    "an odd size": (conv, lambda: block(side=5), False),
    "odd filters": (conv, lambda: block(filters=12), False),
    "a block in float64": (conv, lambda: block(dtype=DOUBLE), False),
    "bias and leaky ReLU": (dense, lambda: dense.bias_leaky_relu(ones(2, 3), ones(3), 0.1), True),
    "in float64": (dense, lambda: dense.bias_leaky_relu(ones(2, 3, dtype=DOUBLE), ones(3, dtype=DOUBLE), 0.1), False),
    "of more axes": (dense, lambda: dense.bias_leaky_relu(ones(2, 2, 3), ones(3), 0.1), False),
    "a noisy layer": (dense, lambda: noisy(4, 3), True),
    "a noisy layer without bias": (dense, lambda: noisy(4, 3, bias=False), False),
    "a noisy layer in float64": (dense, lambda: noisy(4, 3, dtype=DOUBLE), False),
    "a noisy convolution": (dense, lambda: noisy(4, 2, 2, 3), False),
    "a loss": (loss, entropy, True),
    "a loss of many classes": (loss, lambda: entropy(classes=1025), False),
    "a loss of many rows": (loss, lambda: entropy(rows=8193), False),
    "a loss in float64": (loss, lambda: entropy(dtype=DOUBLE), False),
    "a variance": (posterior, lambda: posterior.variance(ones(2, 3), BOUNDS), True),
    "a masked variance": (posterior, lambda: posterior.variance(ones(2, 3), BOUNDS, masked=True), False),
    "a variance with another clamp": (posterior, lambda: posterior.variance(ones(2, 3), THROUGH), False),
    "a KL": (posterior, kl, True),
    "a masked KL": (posterior, lambda: kl(masked=True), False),
    "a KL with another clamp": (posterior, lambda: kl(BOUNDS._replace(clamp="released")), False),
    "a KL with the released epsilon": (posterior, lambda: kl(epsilon="variance"), False),
    "a KL in float64": (posterior, lambda: kl(dtype=DOUBLE), False),
    "a gate": (posterior, lambda: posterior.gate(ones(3), ones(3), 0.0, 1.0), True),
    "a tree of classes": (class_tree, tree, True),
    "a tree of many classes": (class_tree, lambda: tree(classes=129), False),
    "a tree in float64": (class_tree, lambda: tree(dtype=DOUBLE), False),
    "factors": (cholesky, lambda: cholesky.factor(ones(1, 2, 2), ones(1, 3, 2)), True),
    "factors in float64": (cholesky, lambda: cholesky.factor(ones(1, 2, 2).double(), ones(1, 3, 2).double()), False),
    "images": (images, lambda: rows(LOOK), True),
    "images of several datasets": (images, lambda: rows(None), False),
    "images in float64": (images, lambda: rows((1.0, LOOK[1].double(), LOOK[2].double())), False),
}  # fmt: skip


class LaunchedError(Exception):
    pass


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_who_computes(case: str, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: on a GPU kernels compute what they can, and the references the rest; elsewhere references all of it."""
    module, call, launches = CASES[case]

    def launch(*_: Any, **__: Any) -> None:
        raise LaunchedError

    names = ("mix", "normal", "take", "taps", "pool", "bias_leaky_relu", "noisy", "cross_entropy", "variance", "kl",
             "gate", "images", "class_tree", "factor")  # fmt: skip
    fake = SimpleNamespace(
        MOST_COLUMNS=64, MOST_CLASSES=128, TAPS=2, ALONG=0, AGAINST=1, **dict.fromkeys(names, launch)
    )
    monkeypatch.setattr(module, "_kernels", lambda: fake)
    # Integers have kernels of their own: a reference may draw its numbers with them.
    monkeypatch.setattr(device, "has_kernels", lambda *v: gpu and (module is hashing or v[0].is_floating_point()))
    if gpu and launches:
        with pytest.raises(LaunchedError):
            call()
    else:
        call()


def test_a_machine_without_a_gpu_has_no_kernels() -> None:
    """Law: a tensor on the CPU is computed by references, whatever else the machine has."""
    assert not device.has_kernels(ones(1))
    assert not device.has_float_kernels(ones(1))


def test_nobody_else_asks() -> None:
    """Law: mathematics and data call operators; which implementation runs is no question of theirs."""
    asks = re.compile(r"is_cuda|triton|has_kernels|has_float_kernels|\bready\(|_kernels\b")
    root = Path(metavd.__file__).parent
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for folder in ("core", "data", "evaluate", "methods")
        for path in sorted((root / folder).rglob("*.py"))
        for line in path.read_text().splitlines()
        if asks.search(line)
    ]
    assert not found
