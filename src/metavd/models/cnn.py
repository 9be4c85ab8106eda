"""The paper's network."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .blocks import conv, head, is_image, sequential
from .catalogue import network


@network("cnn", takes=is_image, needs="images of at least 8x8 pixels", suits=lambda shape: is_image(shape, 24))
def cnn(shape: Sequence[int], num_classes: int, width: int = 64) -> nn.Sequential:
    """Return three convolutions of `width` filters, then 4*width, 2*width and K units."""
    channels, height, across = shape
    blocks = [*conv(1, channels, width), *conv(2, width, width), *conv(3, width, width)]
    features = width * (height // 8) * (across // 8)
    return sequential(blocks + head(features, (4 * width, 2 * width), num_classes))
