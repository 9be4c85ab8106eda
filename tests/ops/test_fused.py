"""A client's step on the GPU against PyTorch's own; without one, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import vmap

pytest.importorskip("triton")

from metavd.ops import fused, kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
C = 2


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, so that a test has several of them and edges within."""
    monkeypatch.setattr(kernels, "_BLOCK", 256)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@pytest.mark.parametrize("clip", [None, 5.0, 1e9])
def test_a_step_of_all_entries(clip: float | None) -> None:
    """Closed form: start - lr min(1, clip / (norm + 1e-6)) slope, one norm a client over all its entries."""
    shapes = {"a": (5, 7), "b": (1100,), "c": ()}
    start = {name: normal(C, *shape) for name, shape in shapes.items()}
    slope = {name: 3.0 * normal(C, *shape, scale=1.0 + len(name)) for name, shape in shapes.items()}
    found = vmap(lambda a, b: fused.descend(a, b, 0.1, clip))(start, slope)
    for c in range(C):
        norm = torch.cat([value[c].flatten() for value in slope.values()]).norm()
        scale = 1.0 if clip is None else min(1.0, clip / (float(norm) + 1e-6))
        for name, value in found.items():
            torch.testing.assert_close(value[c], start[name][c] - 0.1 * scale * slope[name][c], rtol=1e-5, atol=1e-6)


def test_a_step_in_place() -> None:
    """Law: told so, a step writes where its parameters are, to the same bits as elsewhere; who is not there stays."""
    start, slope = ({"a": normal(C, 5, 7, scale=scale), "b": normal(C, 1100, scale=scale)} for scale in (1.0, 2.0))
    expected = vmap(lambda a, b: fused.descend(a, b, 0.1, 5.0))(start, slope)
    slope["a"][1] = torch.nan
    before = {name: value.clone() for name, value in start.items()}
    with fused.in_place(torch.tensor([3.0, 0.0], device=DEVICE)):
        found = vmap(lambda a, b: fused.descend(a, b, 0.1, 5.0))(start, slope)
    for name, value in expected.items():
        assert found[name].data_ptr() == start[name].data_ptr() != value.data_ptr()
        assert torch.equal(found[name][0], value[0])
        assert torch.equal(found[name][1], before[name][1])


def test_what_a_number_on_the_device_points_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parity with indexing, for tensors of several types and sizes."""
    values = [normal(4, 300), torch.arange(4 * 7, device=DEVICE).reshape(4, 7), normal(4, 2, 1)]
    monkeypatch.setattr(fused, "ready", lambda: True)
    for number in range(4):
        for found in (kernels.pull, fused.pull):
            pulled = found(values, torch.tensor([number], device=DEVICE))
            assert all(torch.equal(one, value[number]) for one, value in zip(pulled, values, strict=True))
