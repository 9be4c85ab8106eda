"""Kernels compiled side by side before they are needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

pytest.importorskip("triton")

from metavd.core import rng
from metavd.core.model import from_module
from metavd.models.cnn import cnn
from metavd.ops import launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
C, B = 2, 3


@pytest.mark.usefixtures("kernels")
def test_a_rehearsal_notes_every_kernel_and_launches_none(
    monkeypatch: pytest.MonkeyPatch, normal: Callable[..., Tensor]
) -> None:
    """Law: what is compiled before a step is what the step launches; memory that no kernel filled is 0."""
    model = from_module(cnn((3, 8, 8), 5, 16).to(DEVICE))
    params = {name: value.expand(C, *value.shape) for name, value in model.init(rng.key(0, DEVICE)).items()}
    x, y = normal(C, B, 3, 8, 8), torch.arange(B, device=DEVICE).expand(C, B)
    compiled, launched, labels = [], [], []
    monkeypatch.setattr(launch, "_bring", lambda noted: compiled.extend(each.kernel.jit.__name__ for each in noted))
    plain = launch.Kernel.__getitem__

    def noting(self: launch.Kernel, grid: tuple[int, ...]) -> Callable[..., None]:
        launched.append(self.jit.__name__)
        return plain(self, grid)

    def loss(own: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model.apply(own, x, None)[0], y)

    def step() -> None:
        labels.append(torch.empty(C, B, dtype=torch.int64, device=DEVICE))
        vmap(grad(loss))(params, x, y)

    launch.rehearse(step)
    assert not labels[0].any()
    monkeypatch.setattr(launch.Kernel, "__getitem__", noting)
    step()
    assert len(set(launched)) > 3
    assert sorted(compiled) == sorted(launched)
