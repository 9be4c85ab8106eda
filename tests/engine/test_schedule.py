"""The schedules' maps: same answers, in order, no more of a cohort in memory than they run at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from metavd.core import rng
from metavd.core.model import from_module
from metavd.core.types import Batch, Job, Model
from metavd.engine.schedule import Map
from metavd.engine.schedule.loop import one_after_another as loop
from metavd.engine.schedule.threads import side_by_side as threads
from metavd.engine.schedule.vmap import all_at_once as vectorized
from metavd.engine.task import reentrant
from metavd.tree import Params

SIZES = ([5, 3], [1], [], [4, 4, 2], [2], [5, 5, 5], [3])
"""Rows of each batch of seven clients: ragged in every way, one client without a batch."""
THREADS = [threads(1), threads(2), threads(3), threads(20)]
MAPS = [loop, vectorized(1), vectorized(2), vectorized(3), vectorized(7), vectorized(100), *THREADS]


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
    own = rng.normal(rng.fold(key, 7), [2], torch.float64)
    return Job(torch.tensor(client), batches, rng.normal(key, [rows, 3], torch.float64), key, {"own": own})


def jobs(rows: Sequence[int] = (2,) * 7) -> list[Job]:
    return [make_job(client, sizes, rows[client]) for client, sizes in enumerate(SIZES)]


def work(
    client: Tensor, batches: Sequence[Batch], rows: Tensor, key: Tensor, kept: Params
) -> dict[str, Tensor | tuple[Tensor, ...]]:
    """Sums over real rows, and all else that a job holds, as a tree."""
    total = torch.zeros(3, dtype=torch.float64)
    noise = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        mask = torch.ones(len(batch.y)).double() if batch.mask is None else batch.mask
        real = (mask.sum() > 0).double()
        total = total + (batch.x * mask[:, None] * (1 + batch.y[:, None])).sum(0)
        noise = noise + real * rng.normal(batch.key, [1], torch.float64)[0] * batch.size
    return {
        "sum": total,
        "rest": (noise, client * 2, rows * rng.uniform(key, [1], torch.float64)),
        "kept": kept["own"] * 3,
    }


@pytest.mark.parametrize("run", MAPS)
def test_maps_agree_on_ragged_clients(run: Map) -> None:
    """Parity: any chunk size gives the loop's answers, one a job, in the order of the jobs."""
    found, wanted = list(run(work, iter(jobs()))), list(loop(work, jobs()))
    assert len(found) == len(wanted) == 7
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("run", MAPS[1:6])
def test_rows_are_padded_behind(run: Map) -> None:
    """Clients with fewer rows to answer, or none, get theirs first; what follows is padding."""
    sizes = [3, 0, 2, 0, 1, 5, 0]
    for size, mine, right in zip(sizes, run(work, jobs(sizes)), loop(work, jobs(sizes)), strict=True):
        assert len(mine["rest"][2]) >= size
        torch.testing.assert_close(mine["rest"][2][:size], right["rest"][2], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("run", MAPS)
def test_nothing_to_do(run: Map) -> None:
    """No jobs give no results; jobs without batches and rows are run all the same."""
    assert list(run(work, [])) == []
    empty = [make_job(client, [], 0) for client in range(3)]
    assert [float(each["sum"].sum()) for each in run(work, empty)] == [0.0] * 3


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

    def careless(client: Tensor, batches: Sequence[Batch], rows: Tensor, *rest: object) -> Tensor:  # noqa: ARG001
        return rows + torch.rand(3)

    with pytest.raises(RuntimeError, match="random"):
        list(vectorized(3)(careless, jobs()))


# --- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", THREADS)
def test_threads_give_the_same_bits_as_the_loop(run: Map) -> None:
    """Law: a client is computed by one thread with one core, so their number cannot be seen in the answers."""
    for mine, right in zip(run(work, iter(jobs())), loop(work, jobs()), strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=0)


def test_threads_keep_the_order_when_the_first_is_the_slowest() -> None:
    """Law: answers come in the order of the jobs, whoever is done first; nobody waits for the slowest to go on."""
    done: list[int] = []

    def uneven(client: Tensor, batches: Sequence[Batch], rows: Tensor, *rest: object) -> Tensor:  # noqa: ARG001
        while int(client) == 0 and len(done) < 6:
            time.sleep(0.001)
        done.append(int(client))
        return client * 2

    assert [int(each) for each in threads(2)(uneven, jobs())] == [0, 2, 4, 6, 8, 10, 12]
    assert done[-1] == 0


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_threads_draw_one_job_ahead(workers: int) -> None:
    """Law: memory is bounded; a client's data is asked for only when at most `workers` others are unfinished."""
    finished: list[int] = []
    most = 0

    def watched() -> Iterator[Job]:
        nonlocal most
        for client, sizes in enumerate(SIZES):
            most = max(most, client - len(finished))
            yield make_job(client, sizes)

    def counting(client: Tensor, batches: Sequence[Batch], rows: Tensor, *rest: object) -> Tensor:  # noqa: ARG001
        time.sleep(0.002)
        finished.append(int(client))
        return client

    assert len(list(threads(workers)(counting, watched()))) == 7
    # A worker has answered a moment before it makes room.
    assert most <= workers


@pytest.mark.parametrize("enabled", [True, False])
def test_threads_know_whether_the_caller_wants_gradients(enabled: bool) -> None:
    """Torch keeps that word for each thread apart."""

    def asked(client: Tensor, batches: Sequence[Batch], rows: Tensor, *rest: object) -> Tensor:  # noqa: ARG001
        return torch.tensor([torch.is_grad_enabled(), torch.get_num_threads() == 1])

    with torch.set_grad_enabled(enabled):
        assert [each.tolist() for each in threads(2)(asked, jobs())] == [[enabled, True]] * 7


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("client")]


def test_threads_leave_nothing_behind() -> None:
    """Law: afterwards there are no workers, and torch has as many threads as before, in the caller and in new ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        list(threads(3)(work, jobs()))
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert [torch.get_num_threads(), *seen] == [2, 2]
    finally:
        torch.set_num_threads(before)
    assert running() == []


def test_the_first_error_in_the_order_of_the_jobs_is_raised() -> None:
    """Law: which error a run ends with does not depend on who was faster."""

    def failing(client: Tensor, batches: Sequence[Batch], rows: Tensor, *rest: object) -> Tensor:  # noqa: ARG001
        if int(client) == 2:
            time.sleep(0.02)
        if int(client) >= 2:
            raise ArithmeticError(f"client {int(client)}")
        return client

    answers = threads(3)(failing, jobs())
    assert [int(next(answers)), int(next(answers))] == [0, 1]
    with pytest.raises(ArithmeticError, match="client 2"):
        next(answers)
    assert running() == []


@pytest.mark.parametrize("ending", [KeyboardInterrupt, GeneratorExit])
def test_who_stops_the_caller_stops_the_workers_at_their_next_step(ending: type[BaseException]) -> None:
    """Law: a client that would take many more steps does not take them."""
    steps: list[int] = []
    begun = threading.Event()

    def long(client: Tensor, batches: Sequence[Batch], rows: Tensor, *rest: object) -> Tensor:  # noqa: ARG001
        if int(client) == 0:
            begun.wait(10)
            return client
        for step in range(10_000):
            steps.append(len(batches[step % len(batches) : step % len(batches) + 1]))
            begun.set()
            time.sleep(0.001)
        return client

    answers = threads(2)(long, [make_job(client, [2, 2]) for client in range(6)])
    assert int(next(answers)) == 0
    with pytest.raises(ending) if ending is KeyboardInterrupt else pytest.raises(StopIteration):
        if ending is KeyboardInterrupt:
            answers.throw(KeyboardInterrupt)
        else:
            answers.close()
            next(answers)
    assert running() == []
    assert len(steps) < 10_000


def test_a_reentrant_model_serves_threads_with_different_weights() -> None:
    """Parity: calls side by side answer as calls one after another; a module alone would mix their weights up."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 3)).double()
    built: list[int] = []

    def build():
        built.append(1)
        return from_module(module)

    model = reentrant(build)
    x = torch.randn(50, 5, dtype=torch.float64)
    weights = [{name: value * (1 + 0.1 * i) for name, value in model.init(rng.key(0)).items()} for i in range(30)]

    def call(client: Tensor, batches: Sequence[Batch], rows: Tensor, *rest: object) -> Tensor:  # noqa: ARG001
        given = {name: value.requires_grad_() for name, value in weights[int(client)].items()}
        out = [model.apply(given, x, None).sum() + model.features(given, x).sum() for _ in range(5)]
        return torch.autograd.grad(torch.stack(out).sum(), given["0.weight"])[0]

    work = [make_job(client, []) for client in range(30)]
    for mine, right in zip(threads(4)(call, work), loop(call, work), strict=True):
        assert torch.equal(mine, right)
    assert 1 <= len(built) <= 5


def test_networks_are_built_one_at_a_time() -> None:
    """Four threads want a network at once, as in a first round: the trace of one must not see how another is made.

    What a new layer draws from torch's generator would look as if the traced module had drawn it.
    """
    meet = threading.Barrier(4, timeout=60)
    together: list[int] = []

    def build() -> Model:
        together.append(1)
        torch.rand(3)  # as a layer's first weights do
        time.sleep(0.02)
        made = from_module(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), example=torch.zeros(2, 1, 2, 2))
        assert len(together) == 1
        together.clear()
        return made._replace(apply=lambda params, x, keys: [meet.wait(), made.apply(params, x, keys)][1])

    model = reentrant(build)
    params, x = model.init(rng.key(0)), torch.ones(2, 1, 2, 2)

    def call(*_: object) -> Tensor:
        return model.apply(params, x, None)

    answers = list(threads(4)(call, [make_job(client, []) for client in range(4)]))
    assert all(torch.equal(each, answers[0]) for each in answers)
