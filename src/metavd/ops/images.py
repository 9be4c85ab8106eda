"""Rows of a dataset as a network sees them: cropped and mirrored at random, as a pure function of a key; normalised.

The crops are the same on a CPU and on a GPU.

Shape letters: N rows of a dataset, B images, c channels, h height, w width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.functional import pad as frame

from . import device, hashing

PAD = 4
"""Pixels by which an image moves at most."""


def crop_and_flip(images: Tensor, key: Tensor, pad: int = PAD) -> Tensor:
    """Shift each image by up to `pad` pixels each way, what comes in from outside being 0, and mirror half of them.

    images (B, c, h, w) of any type -> the same. An image's fate depends on its position in the batch and the key,
    not on how many images follow.
    """
    count, _, height, width = images.shape
    draw = hashing.bits(key, count * 3).reshape(count, 3)
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


Look = tuple[float, Tensor, Tensor]
"""Scale, mean (c,) and deviation (c,) of images: a network sees (x scale - mean) / deviation."""


def batches(
    x: Tensor,
    y: Tensor,
    rows: Tensor,
    keys: Tensor | None,
    look: Look | None,
    each: Callable[[Tensor, Tensor | None], Tensor],
) -> tuple[Tensor, Tensor]:
    """Return rows (..., B) of a dataset x (N, ...), y (N,) as a network sees them, and their labels.

    With keys (...), one per batch, images are cropped and mirrored. `each(rows (B,), key)` is the reference, one batch
    as a network sees it, or without a key any number of them; where `look` says how all images are normalised, a kernel
    takes its place. How images lie in memory is left to the device. No derivative; no vmap around it.
    """
    if look is not None and look[1].dtype == torch.float32 and device.has_kernels(x):
        seen, labels = _kernels().images(x, y, rows, keys, look, PAD)
        return seen, labels
    for _ in range(rows.ndim - 1 if keys is not None else 0):
        each = vmap(each)
    return each(rows, keys), y[rows]


_kernels = partial(device.kernels, "images")
