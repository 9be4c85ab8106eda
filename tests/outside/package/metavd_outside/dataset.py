"""A dataset without files: stripes that lie or stand."""

from pathlib import Path

import numpy as np

from metavd.data.formats import Unread, dataset
from metavd.data.source import arrays


@dataset("stripes", "stripes that lie or stand, 2 classes", options={"rows": "how many"}, files=False)
def find_stripes(root, *, rows: int = 60) -> Unread:
    """Return what reads them; here nothing is read."""
    y = np.arange(rows) % 2
    x = np.zeros((rows, 8, 8), np.uint8)
    x[y == 0, ::2], x[y == 1, :, ::2] = 255, 255
    return Unread("stripes", Path(root), (), lambda _: arrays(x, y, name="stripes"))
