"""Kernels without a GPU: Triton's interpreter runs them on the CPU, block by block, and counts as one here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from metavd.ops import device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
C = 2
"""Clients."""
Function = Callable[..., Tensor]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Small blocks, so that a test has several of them and edges within; call it with False for the references."""
    pytest.importorskip("triton")
    from metavd.ops import conv_kernels, dense_kernels, loss_kernels, posterior_kernels

    sizes = {
        conv_kernels: {
            "_CHUNK": 32, "_BLOCK": 256, "_GET": {"ROWS": 2, "BLOCK": 8}, "_PUT": {"CHUNK": 4, "ROWS": 2, "BLOCK": 8},
            "_TAKE": {"P": 16}, "_WEIGH": {"P": 16}, "_FLOAT_TAKE": {"P": 16}, "_FLOAT_WEIGH": {"P": 16},
        },
        dense_kernels: {"_BLOCK": 8, "_ROWS": 4, "_COLUMNS": 4},
        loss_kernels: {"_ROWS": 4},
        posterior_kernels: {"_BLOCK": 8, "_LANES": 2},
    }  # fmt: skip
    for module, values in sizes.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)

    def use(them: bool) -> None:
        monkeypatch.setattr(device, "has_kernels", lambda *_: them)

    use(True)
    return use


@pytest.fixture
def normal() -> Function:
    """Return normal numbers of a shape, always the same."""

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)

    return draw


@pytest.fixture
def compared(kernels: Callable[[bool], None]) -> Callable[..., None]:
    """Hold an operator's kernels against its reference."""
    return lambda *arguments, **more: _compare(kernels, *arguments, **more)


def _compare(
    kernels: Callable[[bool], None],
    operator: Function,
    values: tuple[Tensor, ...],
    fixed: tuple[Tensor, ...] = (),
    *,
    through: Function = torch.sin,
) -> None:
    """Hold values, gradients and gradients of gradients against each other, one client alone and all under vmap."""
    places = tuple(range(len(values)))

    def slope(*given: Tensor) -> tuple[Tensor, ...]:
        return grad(lambda *g: through(operator(*g, *given[len(values) :])).sum(), places)(*given[: len(values)])

    def length(*given: Tensor) -> Tensor:
        return sum((part * (part + 0.3).cos()).sum() for part in slope(*given))

    for what in (lambda *given: (operator(*given),), slope, grad(length, places)):
        kernels(False)
        expected = vmap(what)(*values, *fixed)
        kernels(True)
        alone = [what(*(value[c] for value in (*values, *fixed))) for c in range(C)]
        for found in (vmap(what)(*values, *fixed), [torch.stack(parts) for parts in zip(*alone, strict=True)]):
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)
