"""Clients side by side, each on one core from its first step to its last."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event, Semaphore
from typing import Any

import torch

from ...core.types import Batch, Job
from . import Function, Map, Schedule
from .loop import turns


class _Stopped(Exception):  # noqa: N818
    """Nobody waits for the result any more."""


class _Watched(Sequence[Batch]):
    """A client's batches. Taking one, as every step does, ends the client's work once it is to stop."""

    def __init__(self, batches: Sequence[Batch], stop: Event) -> None:
        self.batches, self.stop = batches, stop

    def __getitem__(self, index: Any) -> Any:
        if self.stop.is_set():
            raise _Stopped
        return self.batches[index]

    def __len__(self) -> int:
        return len(self.batches)


def side_by_side(workers: int) -> Map:
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
                    return function(job.client, _Watched(job.batches, stop), job.rows, job.key, job.kept)
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


def threads(workers: int) -> Schedule:
    """Return the schedule of so many workers."""
    run = side_by_side(workers)
    return Schedule("threads", turns(run), run)
