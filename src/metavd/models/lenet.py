"""LeNet-5 (LeCun et al., 1998) with today's activations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .blocks import is_image, sequential
from .catalogue import network

_LEAST = 12


@network("lenet", takes=lambda shape: is_image(shape, _LEAST), needs=f"images of at least {_LEAST}x{_LEAST} pixels")
def lenet(shape: Sequence[int], num_classes: int, width: int = 6) -> nn.Sequential:
    """Return convolutions of `width` and 8/3 width filters of 5x5, then 20*width, 14*width and K units."""
    channels, height, across = shape
    more = max(8 * width // 3, 1)
    features = more * ((height // 2 - 4) // 2) * ((across // 2 - 4) // 2)
    return sequential([
        ("conv1", nn.Conv2d(channels, width, 5, padding=2)), ("relu1", nn.ReLU()), ("pool1", nn.MaxPool2d(2)),
        ("conv2", nn.Conv2d(width, more, 5)), ("relu2", nn.ReLU()), ("pool2", nn.MaxPool2d(2)),
        ("flatten", nn.Flatten()),
        ("fc0", nn.Linear(features, 20 * width)), ("relu3", nn.ReLU()),
        ("fc1", nn.Linear(20 * width, 14 * width)), ("relu4", nn.ReLU()),
        ("fc2", nn.Linear(14 * width, num_classes)),
    ])  # fmt: skip
