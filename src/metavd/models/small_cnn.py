"""A network for small images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .blocks import conv, head, is_image, sequential
from .catalogue import network


@network("small-cnn", takes=is_image, needs="images of at least 8x8 pixels", suits=is_image)
def small_cnn(shape: Sequence[int], num_classes: int, width: int = 16) -> nn.Sequential:
    """Return two convolutions, then 4*width, 2*width and K units."""
    channels, height, across = shape
    blocks = [*conv(1, channels, width), *conv(2, width, 2 * width)]
    features = 2 * width * (height // 4) * (across // 4)
    return sequential(blocks + head(features, (4 * width, 2 * width), num_classes))
