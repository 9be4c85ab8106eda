"""What our networks are made of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

Layers = list[tuple[str, nn.Module]]


def head(features: int, hidden: tuple[int, int], num_classes: int) -> Layers:
    """Return two hidden layers and the output layer."""
    return [
        ("flatten", nn.Flatten()),
        ("fc0", nn.Linear(features, hidden[0])),
        ("act0", nn.LeakyReLU(0.1)),
        ("fc1", nn.Linear(hidden[0], hidden[1])),
        ("act1", nn.LeakyReLU(0.1)),
        ("fc2", nn.Linear(hidden[1], num_classes)),
    ]


def conv(index: int, inputs: int, outputs: int) -> Layers:
    """Return a convolution that keeps the image's size, and a pooling that halves it."""
    return [
        (f"conv{index}", nn.Conv2d(inputs, outputs, 3, padding=1)),
        (f"relu{index}", nn.ReLU()),
        (f"pool{index}", nn.MaxPool2d(2)),
    ]


def sequential(layers: Layers) -> nn.Sequential:
    """Return the layers as one module."""
    return nn.Sequential(OrderedDict(layers))


def is_image(shape: Sequence[int], least: int = 8) -> bool:
    """Whether a row is an image with at least so many pixels per side."""
    return len(shape) == 3 and min(shape[1:]) >= least
