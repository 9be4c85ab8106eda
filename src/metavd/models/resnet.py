"""Residual networks (He et al., 2016) for small images, with GroupNorm: clients cannot share BatchNorm's statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .blocks import Layers, is_image, sequential
from .catalogue import network

_GROUPS = 8
_NEEDS = "images of at least 8x8 pixels"


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(_GROUPS, channels), channels)


class Residual(nn.Module):
    """relu(x + norm(conv(relu(norm(conv(x)))))), with a 1x1 convolution on the shortcut where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = _norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = _norm(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity() if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), _norm(outputs))
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, h, w) -> (B, outputs, h / stride, w / stride)."""
        inner = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.shortcut(x) + self.norm2(self.conv2(inner)))


class Mean(nn.Module):
    """The mean over pixels: (B, c, h, w) -> (B, c)."""

    def forward(self, x: Tensor) -> Tensor:
        """Average."""
        return x.mean((2, 3))


def _resnet(channels: int, num_classes: int, width: int, stages: int, blocks: int) -> nn.Sequential:
    layers: Layers = [
        ("conv", nn.Conv2d(channels, width, 3, padding=1, bias=False)), ("norm", _norm(width)), ("relu", nn.ReLU())
    ]  # fmt: skip
    inputs = width
    for stage in range(stages):
        for block in range(blocks):
            outputs, stride = width * 2**stage, 2 if stage and not block else 1
            layers.append((f"block{stage + 1}_{block + 1}", Residual(inputs, outputs, stride)))
            inputs = outputs
    return sequential([*layers, ("mean", Mean()), ("fc", nn.Linear(inputs, num_classes))])


@network("resnet8", takes=is_image, needs=_NEEDS)
def resnet8(shape: Sequence[int], num_classes: int, width: int = 16) -> nn.Sequential:
    """Return three residual blocks of width, 2*width and 4*width filters; the posterior is on the last convolution."""
    return _resnet(shape[0], num_classes, width, stages=3, blocks=1)


@network("resnet18", takes=is_image, needs=_NEEDS)
def resnet18(shape: Sequence[int], num_classes: int, width: int = 64) -> nn.Sequential:
    """Return four stages of two residual blocks, width to 8*width filters, behind a 3x3 convolution."""
    return _resnet(shape[0], num_classes, width, stages=4, blocks=2)
