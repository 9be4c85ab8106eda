"""A network for features or very small images."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from .blocks import head, sequential
from .catalogue import network


@network("mlp", suits=lambda _: True)
def mlp(shape: Sequence[int], num_classes: int, width: int = 64) -> nn.Sequential:
    """Return `width`, width/2 and K units."""
    return sequential(head(math.prod(shape), (width, max(width // 2, 1)), num_classes))
