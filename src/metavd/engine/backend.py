"""Three ways to run a function of one client over many: a loop, threads, and vmap.

A job is one client's arguments: tensors, and lists of batches that may be ragged. A backend returns one result a job,
in the order of the jobs. All agree to rounding, threads with each other and with a loop on one core to the bit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from threading import Event, Semaphore
from typing import Any, overload

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


class _Stopped(Exception):  # noqa: N818
    """Nobody waits for the result any more."""


class _Watched(Sequence[Batch]):
    """A client's batches. Taking one, as every step does, ends the client's work once it is to stop."""

    def __init__(self, batches: Sequence[Batch], stop: Event) -> None:
        self.batches, self.stop = batches, stop

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | Sequence[Batch]:
        if self.stop.is_set():
            raise _Stopped
        return self.batches[index]

    def __len__(self) -> int:
        return len(self.batches)


def threads(workers: int) -> Backend:
    """Run up to `workers` clients side by side, each on one core from its first step to its last.

    torch computes without Python's lock, so two threads keep two cores as busy as two processes do, and a client's
    bits do not depend on how many there are. One client that is drawn ahead is all that waits in memory. Whatever ends
    the caller ends the workers at their next step.
    """

    def run(function: Function, jobs: Iterable[Job]) -> Iterator[Any]:
        stop, room, queue = Event(), Semaphore(workers + 1), iter(jobs)
        answers: deque[Future[Any]] = deque()
        mode, before = torch.is_grad_enabled(), torch.get_num_threads()

        def work(job: Job) -> Any:
            try:
                with torch.set_grad_enabled(mode):  # as in the caller; torch keeps it for each thread apart
                    return function(job.client, _Watched(job.batches, stop), job.rows, job.key)
            finally:
                room.release()

        pool = ThreadPoolExecutor(workers, "client", torch.set_num_threads, (1,))
        try:
            while room.acquire() and (job := next(queue, None)) is not None:
                answers.append(pool.submit(work, job))
                while answers and answers[0].done():
                    yield answers.popleft().result()
            while answers:
                yield answers.popleft().result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(before)  # a worker's number is also that of all threads to come

    return run


def vectorized(chunk: int) -> Backend:
    """Run up to `chunk` clients at once under vmap, padded to the largest of them; fewer where memory is short."""

    def run(function: Function, jobs: Iterable[Job]) -> Iterator[Any]:
        queue, size = iter(jobs), chunk
        while group := list(islice(queue, size)):
            try:
                answers = list(_together(function, group))
            except torch.cuda.OutOfMemoryError:
                if len(group) == 1:
                    raise
                torch.cuda.empty_cache()
                queue, size = chain(group, queue), (len(group) + 1) // 2
                continue
            yield from answers

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
