"""What tests of studies share: another process that is at work."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from metavd.studies.many import _folder


def _at_it(work: Path, place: str, there: Connection) -> None:
    with _folder(work, place) as folder:
        there.send(folder)
        time.sleep(600)


@contextmanager
def _busy(work: Path, place: str) -> Iterator[None]:
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    other = fork.Process(target=_at_it, args=(work, place, there), daemon=True)
    other.start()
    try:
        assert here.recv() == work / place
        yield
    finally:
        other.kill()
        other.join()


@pytest.fixture
def busy() -> Callable[[Path, str], AbstractContextManager[None]]:
    """Give the function (work folder, place in it) -> while another process is at work there, which then dies."""
    return _busy
