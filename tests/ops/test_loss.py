"""Cross-entropy over draws: its closed form, and its kernel against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from metavd.ops import loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
C, S, B, K = 2, 3, 5, 6


def test_cross_entropy() -> None:
    """Closed form: the mean over the real rows of -log softmax at the label; 0 where there is no row."""
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [5.0, 5.0, 5.0]], dtype=torch.float64)
    y = torch.tensor([0, 2, 1])
    rows = functional.cross_entropy(logits, y, reduction="none")
    for mask in (None, [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]):
        real = None if mask is None else torch.tensor(mask, dtype=torch.float64)
        expected = rows.mean() if real is None else (rows * real).sum() / real.sum()
        torch.testing.assert_close(loss.cross_entropy(logits[None], y, real), expected)
        draws = torch.stack([logits - 0.5, logits + 0.5])
        torch.testing.assert_close(loss.cross_entropy(draws, y, real), expected)
    assert loss.cross_entropy(logits[None], y, torch.zeros(3, dtype=torch.float64)) == 0.0


@pytest.mark.parametrize("masked", [False, True])
def test_the_kernel_of_cross_entropy(
    masked: bool, compared: Callable[..., None], normal: Callable[..., Tensor]
) -> None:
    """Parity: cross-entropy of the mean logits over real rows, and 0 of a client that has none."""
    y = torch.arange(C * B, device=DEVICE).reshape(C, B) % K
    mask = torch.ones(C, B, device=DEVICE)
    if masked:
        mask[0, 3:], mask[1] = 0.0, 0.0

    def value(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return loss.cross_entropy(logits, y, mask if masked else None)

    compared(value, (normal(C, S, B, K, scale=2.0),), (y, mask))
