"""A partition: clients take rows in turns, and keep every step-th of theirs."""

import numpy as np

from metavd.data.partition import PARTITIONS, PartitionKind


def by_turns(step: int, *, least: int = 1):
    """Return the function that deals rows: (labels, number of clients, generator, natural clients) -> positions."""
    return lambda y, num, rng, client_ids=None: [np.arange(k, len(y), num)[::step] for k in range(num)]


PARTITIONS.add("turns", PartitionKind(by_turns, int, "turns:1"), __name__)
