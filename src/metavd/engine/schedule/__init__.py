"""Who calls the clients' turns: one after another, side by side, all at once, or all at once as CUDA graphs.

| schedule | how | where it is fastest |
|---|---|---|
| `loop` | one client after another | the reference; a federation's own way |
| `threads` | one client per core | large networks on a CPU |
| `vmap` | all clients of a cohort take each step together | small networks on a CPU |
| `graph` | as `vmap`, each step a CUDA graph | a GPU |

All agree to rounding, threads and the loop to the bit. Each emits every client's parameters once in a round, and hands
back what it sent: that is what the server takes the difference to.

Shape letters: C clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ...core.types import Algorithm, Batch, Job, ServerState
from ...data.cohort import Pool
from ...tree import Params

Function = Callable[[Tensor, Sequence[Batch], Tensor, Tensor, Params], Any]
"""(client, batches, rows, key, kept) of a `Job` -> any tree of tensors."""
Map = Callable[[Function, Iterable[Job]], Iterator[Any]]
"""Runs a function of one client over many; one result per job, in the order of the jobs."""


class Trained(NamedTuple):
    """One round of a cohort, in its order: what clients received, send and keep, and their mean losses."""

    sent: Params
    """(C, ...); what all clients share is one tensor, expanded."""
    adapted: Params
    """(C, ...)."""
    kept: Params
    """(C, ...); empty where the method keeps nothing."""
    losses: Tensor
    """(C,)."""


Train = Callable[[Algorithm, Pool, ServerState, Tensor], Trained]
"""(algorithm, rows, server's state, ids of the cohort, ascending) -> what came of it."""


class Schedule(NamedTuple):
    """A way to run clients. One schedule serves one algorithm and one pool: it may keep what it made for them."""

    name: str
    train: Train
    map: Map
