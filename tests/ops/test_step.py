"""The end of a step: the reference and the kernel, elsewhere and in place.

Where there is no GPU, Triton's interpreter runs the same kernels, block by block, on the CPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import vmap

pytest.importorskip("triton")

from metavd.ops import device, step, step_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
C = 2


@pytest.fixture(params=["reference", "kernel"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both implementations; small blocks, so that a test has several of them and edges within."""
    monkeypatch.setattr(step_kernels, "_BLOCK", 256)
    monkeypatch.setattr(step, "_descendable", lambda _: request.param == "kernel")
    monkeypatch.setattr(device, "has_kernels", lambda *_: request.param == "kernel")
    return str(request.param)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@pytest.mark.parametrize("clip", [None, 5.0, 1e9])
def test_a_step_of_all_entries(clip: float | None) -> None:
    """Closed form: start - lr min(1, clip / (norm + 1e-6)) slope, one norm per client over all its entries."""
    shapes = {"a": (5, 7), "b": (1100,), "c": ()}
    start = {name: normal(C, *shape) for name, shape in shapes.items()}
    slope = {name: 3.0 * normal(C, *shape, scale=1.0 + len(name)) for name, shape in shapes.items()}
    found = vmap(lambda a, b: step.descend(a, b, 0.1, clip))(start, slope)
    alone = step.descend(*({name: value[0] for name, value in each.items()} for each in (start, slope)), 0.1, clip)
    for c in range(C):
        norm = torch.cat([value[c].flatten() for value in slope.values()]).norm()
        scale = 1.0 if clip is None else min(1.0, clip / (float(norm) + 1e-6))
        for name, value in found.items():
            torch.testing.assert_close(value[c], start[name][c] - 0.1 * scale * slope[name][c], rtol=1e-5, atol=1e-6)
    for name, value in alone.items():
        torch.testing.assert_close(value, found[name][0], rtol=1e-6, atol=1e-6)


def test_a_step_in_place() -> None:
    """Law: a step in place has the same bits as elsewhere; a client that is not active stays as it is, NaN or not."""
    start, slope = ({"a": normal(C, 5, 7, scale=scale), "b": normal(C, 1100, scale=scale)} for scale in (1.0, 2.0))
    expected = vmap(lambda a, b: step.descend(a, b, 0.1, 5.0))(start, slope)
    whole = {name: value.clone() for name, value in start.items()}
    step.descend_(whole, slope, 0.1, 5.0)
    slope["a"][1] = torch.nan
    before = {name: value.clone() for name, value in start.items()}
    step.descend_(start, slope, 0.1, 5.0, torch.tensor([3.0, 0.0], device=DEVICE))
    for name, value in expected.items():
        assert torch.equal(whole[name], value)
        assert torch.equal(start[name][0], value[0])
        assert torch.equal(start[name][1], before[name][1])


def test_values_are_put_where_clients_are_active() -> None:
    """Law: entries that are named are overwritten, of active clients alone; the others stay."""
    start = {"a": normal(C, 3), "b": normal(C, 2)}
    before = {name: value.clone() for name, value in start.items()}
    new = {"a": torch.full((C, 3), torch.nan, device=DEVICE)}
    new["a"][1] = 7.0
    step.put_(start, new, torch.tensor([0.0, 2.0], device=DEVICE))
    assert torch.equal(start["a"][0], before["a"][0])
    assert torch.equal(start["a"][1], new["a"][1])
    assert torch.equal(start["b"], before["b"])
    step.put_(start, {})
    assert torch.equal(start["b"], before["b"])


def test_what_a_number_on_the_device_points_to() -> None:
    """Parity with indexing, for tensors of several types and sizes."""
    values = [normal(4, 300), torch.arange(4 * 7, device=DEVICE).reshape(4, 7), normal(4, 2, 1)]
    for number in range(4):
        for found in (step_kernels.gathered, step.nth):
            taken = found(values, torch.tensor([number], device=DEVICE))
            assert all(torch.equal(one, value[number]) for one, value in zip(taken, values, strict=True))
