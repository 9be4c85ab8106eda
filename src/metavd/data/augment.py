"""Random crops and flips of photographs, as a pure function of a key: the same on a CPU and on a GPU.

Shape letters: B images, c channels, h height, w width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad as frame

from ..core import rng

PAD = 4
"""Pixels by which an image moves at most."""


def crop_and_flip(images: Tensor, key: Tensor, pad: int = PAD) -> Tensor:
    """Shift each image by up to `pad` pixels each way, what comes in from outside being 0, and mirror half of them.

    images (B, c, h, w) of any type -> the same. An image's fate depends on its position in the batch and the key,
    not on how many images follow.
    """
    count, _, height, width = images.shape
    draw = rng.bits(key, [count, 3])
    # Multiply-shift on 31 bits: uniform over 0..2 pad but for a bias below 1e-8.
    shift = (((draw[:, :2] >> 32) & 0x7FFFFFFF) * (2 * pad + 1)) >> 31
    mirrored = draw[:, 2] < 0
    rows = shift[:, 0, None] + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device).expand(count, width)
    columns = shift[:, 1, None] + torch.where(mirrored[:, None], width - 1 - columns, columns)
    padded = frame(images, (pad, pad, pad, pad))
    index = torch.arange(count, device=images.device)[:, None, None]
    # Indices around a slice put the channel axis last.
    return padded[index, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
