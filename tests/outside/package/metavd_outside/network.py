"""A network: two linear layers with nothing between them."""

import math

from torch import nn

from metavd.models import network


@network("line")
def line(shape, num_classes, width=4):
    """Return `width` and K units."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), width), nn.Linear(width, num_classes))
