"""Runs side by side, in several processes.

One run leaves much of a GPU idle between its many small kernels. NVIDIA's MPS lets kernels of different processes run
at the same time: four runs that share a GPU through it finish twice as many rounds per second as one after another.
Without MPS the processes take turns and gain little. On a CPU one run uses all cores, and nothing is gained.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing import get_context
from typing import Any

import torch

from ..compat import end_workers

_ON_GPU = 4
"""Processes that share a GPU; measured."""
_CONTROL = "nvidia-cuda-mps-control"
_PIPE, _LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"


def device_of(name: str) -> str:
    """Return the device that is meant, where `auto` leaves it open."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def jobs_for(device: str, jobs: int = 0) -> int:
    """Return how many runs to carry out at once on a device, where 0 leaves it open."""
    return jobs or (_ON_GPU if device_of(device).startswith("cuda") else 1)


@contextmanager
def sharing(jobs: int) -> Iterator[None]:
    """Let processes that are started inside share a GPU; where MPS is missing, or runs already, change nothing."""
    if jobs == 1 or not torch.cuda.is_available() or shutil.which(_CONTROL) is None or _PIPE in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="metavd-mps-") as folder:
        own = {_PIPE: folder, _LOG: folder}
        started = subprocess.run([_CONTROL, "-d"], env=os.environ | own, check=False, capture_output=True)
        if started.returncode:
            yield
            return
        os.environ.update(own)
        try:
            yield
        finally:
            for name in own:
                del os.environ[name]
            # Without a time it waits for ever for the work of a process that was killed.
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    [_CONTROL], input=b"quit -t 5\n", env=os.environ | own, check=False, capture_output=True, timeout=30
                )


def _begin(threads: int) -> None:
    """Leave Ctrl-C to the process that started this one, which ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)


def side_by_side(
    function: Callable[..., Any],
    tasks: Sequence[tuple[Any, ...]],
    jobs: int,
    fits: Callable[[int], bool] = lambda place: True,  # noqa: ARG005
) -> Iterator[tuple[int, Any]]:
    """Call a function with every task's arguments, `jobs` at once; yield place and answer of each as it ends.

    The first exception ends the others. Function, arguments and answers cross between processes, and so must be values.
    `fits` is asked when a task's turn comes; one that does not fit is not begun, and nothing is yielded for it.
    """
    if jobs == 1 or len(tasks) < 2:
        yield from ((place, function(*task)) for place, task in enumerate(tasks) if fits(place))
        return
    # A fork of a process that has used torch's threads, or a GPU, may hang.
    context, threads = get_context("spawn"), max(1, torch.get_num_threads() // jobs)
    with sharing(jobs), ProcessPoolExecutor(min(jobs, len(tasks)), context, _begin, (threads,)) as pool:
        running: dict[Future[Any], int] = {}
        turns = (place for place in range(len(tasks)) if fits(place))
        try:
            while True:
                for place in islice(turns, jobs - len(running)):
                    running[pool.submit(function, *tasks[place])] = place
                if not running:
                    return
                for ended in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(ended), ended.result()
        except BaseException:
            end_workers(pool)
            raise
