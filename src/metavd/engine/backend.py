"""Two ways to run a function of one client over many: a loop, and vmap.

A job is one client's arguments: tensors, and lists of batches that may be ragged. A backend returns one result a job,
in the order of the jobs. Both agree to rounding; the loop is the faster one for convolutions on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from ..core.types import Batch, Job
from ..data.cohort import pad

Function = Callable[[Tensor, Sequence[Batch], Tensor, Tensor], Any]
"""(client, batches, rows, key) -> any tree of tensors."""
Backend = Callable[[Function, Iterable[Job]], Iterator[Any]]


def loop(function: Function, jobs: Iterable[Job]) -> Iterator[Any]:
    """Run one client after another; memory is one client's."""
    for job in jobs:
        yield function(*job)


def vectorized(chunk: int) -> Backend:
    """Run up to `chunk` clients at once under vmap, padded to the largest of them."""

    def run(function: Function, jobs: Iterable[Job]) -> Iterator[Any]:
        queue = iter(jobs)
        while group := list(islice(queue, chunk)):
            yield from _together(function, group)

    return run


def _together(function: Function, group: Sequence[Job]) -> Iterator[Any]:
    blank = next((batch for job in group for batch in job.batches), None)
    batches = pad([job.batches for job in group], blank) if blank is not None else []
    most = max(len(job.rows) for job in group)
    rows = torch.stack([torch.cat([job.rows, job.rows.new_zeros(most - len(job.rows), *job.rows.shape[1:])])
                        for job in group])  # fmt: skip
    clients = torch.stack([job.client for job in group])
    keys = torch.stack([job.key for job in group])
    out = vmap(function, randomness="error")(clients, batches, rows, keys)
    leaves, shape = pytree.tree_flatten(out)
    for i in range(len(group)):
        yield pytree.tree_unflatten([leaf[i] for leaf in leaves], shape)
