"""Triton kernel of a dataset's rows as a network sees them. `images` makes an operator of it.

Shape letters: N rows of a dataset, B rows of a batch, H x W pixels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .hashing_kernels import mixed
from .launch import kernel


@kernel()
def _images(
    x, y, rows, keys, mean, std, out, labels, scale, batch, pad,
    CHANNELS: tl.constexpr, H: tl.constexpr, W: tl.constexpr, AUGMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One image per program: `images.crop_and_flip`, then (value * scale - mean) / std; and its label."""
    place = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    here = e < CHANNELS * H * W
    channel = e % CHANNELS
    iy = e // CHANNELS // W
    ix = e // CHANNELS % W
    if AUGMENT:
        key = tl.load(keys + place // batch)
        first = (place % batch) * 3 + 1
        down = ((mixed(key + first * -7046029254386353131) >> 32) & 0x7FFFFFFF) * (2 * pad + 1) >> 31
        right = ((mixed(key + (first + 1) * -7046029254386353131) >> 32) & 0x7FFFFFFF) * (2 * pad + 1) >> 31
        mirrored = mixed(key + (first + 2) * -7046029254386353131) < 0
        ix = tl.where(mirrored, W - 1 - ix, ix)
        iy += down.to(tl.int32) - pad
        ix += right.to(tl.int32) - pad
    inside = here & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
    row = tl.load(rows + place)
    value = tl.load(x + row * (CHANNELS * H * W) + (channel * H + iy) * W + ix, mask=inside, other=0).to(tl.float32)
    minus = tl.load(mean + channel, mask=here, other=0.0)
    over = tl.load(std + channel, mask=here, other=1.0)
    value = (value * scale - minus) / over
    tl.store(out + place * (CHANNELS * H * W) + e, value, mask=here)
    tl.store(labels + place, tl.load(y + row))


def images(
    x: Tensor, y: Tensor, rows: Tensor, keys: Tensor | None, look: tuple[float, Tensor, Tensor], pad: int
) -> tuple[Tensor, Tensor]:
    """Return rows (..., B) of x (N, c, H, W) as a network sees them, (..., B, c, H, W), channels last in memory.

    And their labels, of y (N,). With keys (...), one per batch, images are cropped and mirrored. `look` is the scale,
    and mean and deviation (c,).
    """
    scale, mean, std = look
    _, channels, H, W = x.shape
    out = torch.empty(*rows.shape, H, W, channels, dtype=torch.float32, device=x.device)
    labels = torch.empty(rows.shape, dtype=y.dtype, device=x.device)
    rows = rows.contiguous()
    _images[(rows.numel(),)](
        x, y, rows, rows if keys is None else keys.contiguous(), mean, std, out, labels, scale, rows.shape[-1], pad,
        CHANNELS=channels, H=H, W=W, AUGMENT=keys is not None, BLOCK=triton.next_power_of_2(channels * H * W),
    )  # fmt: skip
    return out.movedim(-1, -3), labels
