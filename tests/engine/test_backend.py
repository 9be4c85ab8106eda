"""The two backends: same answers, in order, no more of a cohort in memory than they run at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from metavd.core import rng
from metavd.core.types import Batch, Job
from metavd.engine.backend import Backend, loop, vectorized

SIZES = ([5, 3], [1], [], [4, 4, 2], [2], [5, 5, 5], [3])
"""Rows of each batch of seven clients: ragged in every way, one client without a batch."""
BACKENDS = [loop, vectorized(1), vectorized(2), vectorized(3), vectorized(7), vectorized(100)]


def make_job(client: int, sizes: Sequence[int], rows: int = 2) -> Job:
    key = rng.fold(rng.key(0), client)
    batches = [
        Batch(
            x=rng.normal(rng.fold(key, step), [size, 3], torch.float64),
            y=torch.arange(size),
            mask=None,
            key=rng.fold(key, 100 + step),
            round=torch.tensor(4.0).double(),
            size=torch.tensor(float(sum(sizes))).double(),
        )
        for step, size in enumerate(sizes)
    ]
    return Job(torch.tensor(client), batches, rng.normal(key, [rows, 3], torch.float64), key)


def jobs(rows: Sequence[int] = (2,) * 7) -> list[Job]:
    return [make_job(client, sizes, rows[client]) for client, sizes in enumerate(SIZES)]


def work(client: Tensor, batches: Sequence[Batch], rows: Tensor, key: Tensor) -> dict[str, Tensor | tuple[Tensor, ...]]:
    """Sums over real rows, and all else that a job holds, as a tree."""
    total = torch.zeros(3, dtype=torch.float64)
    noise = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        mask = torch.ones(len(batch.y)).double() if batch.mask is None else batch.mask
        real = (mask.sum() > 0).double()
        total = total + (batch.x * mask[:, None] * (1 + batch.y[:, None])).sum(0)
        noise = noise + real * rng.normal(batch.key, [1], torch.float64)[0] * batch.size
    return {"sum": total, "rest": (noise, client * 2, rows * rng.uniform(key, [1], torch.float64))}


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_agree_on_ragged_clients(backend: Backend) -> None:
    """Parity: any chunk size gives the loop's answers, one a job, in the order of the jobs."""
    found, wanted = list(backend(work, iter(jobs()))), list(loop(work, jobs()))
    assert len(found) == len(wanted) == 7
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_rows_are_padded_behind(backend: Backend) -> None:
    """Clients with fewer rows to answer, or none, get theirs first; what follows is padding."""
    sizes = [3, 0, 2, 0, 1, 5, 0]
    for size, mine, right in zip(sizes, backend(work, jobs(sizes)), loop(work, jobs(sizes)), strict=True):
        assert len(mine["rest"][2]) >= size
        torch.testing.assert_close(mine["rest"][2][:size], right["rest"][2], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_do(backend: Backend) -> None:
    """No jobs give no results; jobs without batches and rows are run all the same."""
    assert list(backend(work, [])) == []
    empty = [make_job(client, [], 0) for client in range(3)]
    assert [float(each["sum"].sum()) for each in backend(work, empty)] == [0.0] * 3


def counted(seen: list[int]) -> Iterator[Job]:
    for client, sizes in enumerate(SIZES):
        seen.append(client)
        yield make_job(client, sizes)


def test_loop_takes_one_job_at_a_time() -> None:
    """Law: memory is bounded; the loop asks for a client's data only when its turn has come."""
    seen: list[int] = []
    for done, _ in enumerate(loop(work, counted(seen)), 1):
        assert len(seen) == done


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_vmap_takes_one_chunk_at_a_time(chunk: int) -> None:
    """Law: memory is bounded; vmap holds at most `chunk` clients' data that is not yet answered."""
    seen: list[int] = []
    for done, _ in enumerate(vectorized(chunk)(work, counted(seen))):
        assert len(seen) <= (done // chunk + 1) * chunk
        assert len(seen) - done <= chunk


def test_vmap_refuses_random_numbers_of_its_own() -> None:
    """Law: client code cannot draw from a global generator unnoticed."""

    def careless(client: Tensor, batches: Sequence[Batch], rows: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return rows + torch.rand(3)

    with pytest.raises(RuntimeError, match="random"):
        list(vectorized(3)(careless, jobs()))
