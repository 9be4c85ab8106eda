"""Laws of LeNet and the residual networks: sizes of the published ones, alike under loop and vmap."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from derivatives import check_vmap_is_a_loop
from torch import nn

from metavd import run
from metavd.core.model import from_module, xavier
from metavd.data.source import arrays
from metavd.errors import SpecError
from metavd.models import module_for
from metavd.models.resnet import Residual

SMALL = {"lenet": (2, (1, 12, 12)), "resnet8": (2, (3, 8, 8)), "resnet18": (2, (3, 16, 16))}


def weights(name: str, shape: tuple[int, ...], classes: int) -> int:
    return sum(value.numel() for value in module_for(name, shape, classes, 0).parameters())


def test_sizes_are_the_published_ones() -> None:
    """LeNet-5 on MNIST has 61,706 parameters, ResNet-18 with a 3x3 stem on CIFAR-10 11,173,962."""
    assert weights("lenet", (1, 28, 28), 10) == 61_706
    assert weights("resnet18", (3, 32, 32), 10) == 11_173_962


def test_residual_block_by_its_equation() -> None:
    """At zero weights of the second norm the block is its shortcut."""
    block = Residual(4, 4, 1).double()
    nn.init.zeros_(block.norm2.weight)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(block(x), torch.relu(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", SMALL)
def test_vmap_over_clients_is_a_loop(name: str) -> None:
    width, shape = SMALL[name]
    model = from_module(module_for(name, shape, 3, width).double(), init=xavier)
    rows = torch.randn(2, 4, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    check_vmap_is_a_loop(model, rows, torch.tensor([0, 1, 2, 0]), atol=1e-10)


@pytest.mark.parametrize("name", SMALL)
def test_loop_and_vmap_train_alike(name: str) -> None:
    """In float64 a run under vmap and one under a loop end with the same figures, to rounding."""
    width, shape = SMALL[name]
    draw = np.random.RandomState(0)
    y = np.arange(96) % 3
    x = draw.normal(size=(96, *shape)) + y[:, None, None, None]
    settings = {"clients": 3, "unseen": 1, "cohort": 2, "partition": "iid", "batch": 8, "rounds": 2, "dtype": "float64"}
    nll = [
        run(source=arrays(x, y), method="reptile+metavd", model=name, width=width, backend=backend, **settings)["test"][
            "nll"
        ]
        for backend in ("loop", "vmap")
    ]
    assert nll[0] == pytest.approx(nll[1], rel=1e-6)


def test_small_pictures_are_refused() -> None:
    with pytest.raises(SpecError, match=r"model is 'lenet', but it needs images of at least 12x12 .*\(1, 8, 8\)"):
        module_for("lenet", (1, 8, 8), 3, 0)
