"""Rounds: exact whatever the order and the interval, ragged clients, bounded memory, and NaN named."""

from __future__ import annotations

import functools
import gc
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import metavd
from cheap import cheap
from metavd import methods, wire
from metavd.core import rng
from metavd.core.model import from_module, xavier
from metavd.core.types import Algorithm, Batch, Job, NonFiniteError, ServerState
from metavd.data.cohort import Pool, choose, pool
from metavd.data.formats import load
from metavd.data.partition import Federation
from metavd.data.source import Source, arrays
from metavd.engine.checkpoint import state_hash
from metavd.engine.cohorts import in_process
from metavd.engine.evaluation import answers
from metavd.engine.ledger import Ledger
from metavd.engine.rounds import Record, Returned, rounds
from metavd.engine.schedule import Map, Schedule
from metavd.engine.schedule.loop import loop, turns
from metavd.engine.schedule.threads import threads
from metavd.engine.schedule.vmap import all_at_once, vmap, whole_turns
from metavd.engine.task import reentrant
from metavd.engine.turn import Moment
from metavd.models.mlp import mlp
from metavd.tree import Params
from simulated import simulate

CHEAP = {"batch": 4, "hyper_width": 6, "teachers": 1, "drop_from": 1, "threshold": 0.2}


@functools.cache
def digits() -> Source:
    return load("digits")


def federation_of(train: Sequence[int], test: Sequence[int], unseen: int = 0, server: int = 6) -> Federation:
    """Give each client so many rows of digits, the last `unseen` of them never to be trained with."""
    rows = iter(np.random.RandomState(0).permutation(len(digits().y)))

    def take(counts: Sequence[int]) -> tuple[np.ndarray, ...]:
        return tuple(np.array([next(rows) for _ in range(count)], np.int64) for count in counts)

    nobody = tuple(np.zeros(0, np.int64) for _ in train)
    taken, tested = take(train), take(test)
    return Federation(digits(), taken, nobody, tested, len(train) - unseen, unseen, take([server])[0])


def build(name: str, data: Pool, rounds: int = 3, **options: Any) -> Algorithm:
    # As in a run: threads must not share one module.
    model = reentrant(lambda: from_module(mlp((1, 8, 8), 10, width=6).to(data.dtype), init=xavier))
    federation = data.federation
    rows = torch.from_numpy(federation.server)
    setting = methods.Setting(federation.num_clients, 10, rounds, lambda key: data.inputs(rows, key))
    return methods.algorithm(name, model, setting, cheap(name, **CHEAP) | options)


def started(algorithm: Algorithm, seed: int = 0) -> ServerState:
    with torch.no_grad():
        return algorithm.server.init(rng.key(seed))


def trained(
    algorithm: Algorithm, data: Pool, *, rounds: int = 3, cohort: int = 3, schedule: Schedule = loop
) -> tuple[ServerState, list[Record]]:
    steps = list(simulate(algorithm, data, schedule, started(algorithm), rounds=rounds, cohort=cohort))
    return steps[-1][0], [record for _, record in steps]


@pytest.fixture(scope="module")
def ordinary() -> Pool:
    """Six clients with enough rows, two more unseen."""
    return pool(federation_of([9, 12, 7, 15, 10, 8, 9, 11], [6] * 8, unseen=2), dtype=torch.float64)


FAMILIES = ("fedavg", "reptile+metavd", "maml+ensemblevd", "perfedavg+snip", "fedbe", "pfedgp", "reptile+metavd+drop")
"""One method for each way to use a client's data and the server's state."""


# --- exact -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["reptile+metavd", "fedbe"])
def test_result_does_not_depend_on_evaluations_and_checkpoints(method: str, tmp_path: Any) -> None:
    """Law: how often one looks at a run, or stores it, changes no bit of its model and its final result."""
    settings = {"clients": 5, "unseen": 2, "cohort": 2, "width": 8, "test_share": 0.9, "rounds": 4, "method": method}
    if "metavd" in method:
        settings |= {"predict": "draws", "samples": 2, "newcomer": "fit"}
    results = [
        metavd.run(out=tmp_path / str(i) if out else None, eval_every=every, checkpoint_every=stored, **settings)
        for i, (every, stored, out) in enumerate([(4, 4, False), (1, 4, False), (3, 1, True), (1, 3, True)])
    ]
    for result in results[1:]:
        assert result | {"seconds": 0} == results[0] | {"seconds": 0}


@pytest.mark.parametrize("method", FAMILIES)
def test_order_of_rows_in_memory_does_not_matter(method: str, ordinary: Pool) -> None:
    """Law: the same clients with the same rows give the same bits, wherever the rows lie in memory."""
    federation = ordinary.federation
    source = federation.source
    order = np.random.RandomState(5).permutation(len(source.y))
    place = np.argsort(order)
    moved = replace(
        federation,
        source=replace(source, x=source.x[order], y=source.y[order]),
        train=tuple(place[rows] for rows in federation.train),
        test=tuple(place[rows] for rows in federation.test),
        server=place[federation.server],
    )
    other = pool(moved, dtype=torch.float64)
    algorithm = build(method, ordinary)
    state, records = trained(algorithm, ordinary)
    state_moved, records_moved = trained(build(method, other), other)
    assert state_hash(state_moved) == state_hash(state)
    assert records_moved == records


def by(run: Map) -> Schedule:
    """Return the schedule of a way to run jobs."""
    return Schedule("test", turns(run), run)


def backwards(function: Callable[..., Any], jobs: Iterable[Job]) -> Iterator[Any]:
    """Run the last client first, and hand the results back in the order of the jobs."""
    return reversed([function(*job) for job in reversed(list(jobs))])


@pytest.mark.parametrize("method", FAMILIES)
def test_order_of_execution_does_not_matter(method: str, ordinary: Pool) -> None:
    """Law: a client's answer depends on (seed, round, client) alone, so the cohort may be run in any order."""
    algorithm = build(method, ordinary)
    state, records = trained(algorithm, ordinary)
    other, records_other = trained(algorithm, ordinary, schedule=by(backwards))
    assert state_hash(other) == state_hash(state)
    assert records_other == records
    forth = [result.probs for result, _ in answers(algorithm, ordinary, state, range(6), loop.map)]
    back = [result.probs for result, _ in answers(algorithm, ordinary, state, range(6), backwards)]
    assert all(np.array_equal(a, b) for a, b in zip(forth, back, strict=True))


@pytest.mark.parametrize("method", FAMILIES)
def test_client_s_answer_does_not_depend_on_the_rest_of_the_cohort(method: str, ordinary: Pool) -> None:
    """Law: what client 3 sends back in a round is the same whoever else takes part."""
    algorithm = build(method, ordinary)
    found: list[Params] = []
    with torch.no_grad():
        for cohort in ([3], [0, 3], [1, 3, 5]):
            sent, adapted, _, _ = loop.train(algorithm, ordinary, started(algorithm), torch.tensor(cohort))
            place = cohort.index(3)
            found.append({name: value[place] for part in (sent, adapted) for name, value in part.items()})
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items())


@pytest.mark.parametrize("schedule", [loop, vmap(2)], ids=["loop", "vmap"])
@pytest.mark.parametrize("method", FAMILIES)
def test_global_random_state_is_neither_read_nor_changed(method: str, schedule: Schedule, ordinary: Pool) -> None:
    """Law: other global seeds give the same bits, and all global generators are left as they were."""
    hashes = []
    algorithm = build(method, ordinary)  # torch's modules draw numbers when they are made, which `xavier` replaces
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
        state, _ = trained(algorithm, ordinary, rounds=2, schedule=schedule)
        for clients in (range(6), range(6, 8)):
            assert list(answers(algorithm, ordinary, state, clients, schedule.map))
        after = torch.get_rng_state(), np.random.get_state()[1], random.getstate()  # noqa: NPY002
        assert torch.equal(before[0], after[0])
        assert np.array_equal(before[1], after[1])
        assert before[2] == after[2]
        hashes.append(state_hash(state))
    assert hashes[0] == hashes[1]


WHOLE = {"method": "fedavg", "clients": 4, "unseen": 1, "cohort": 2, "width": 8, "test_share": 0.9, "rounds": 1}


def test_whole_run_does_not_read_global_random_state() -> None:
    """Law: other global seeds give the same bits of `metavd.run`, its partition and its new network included."""
    hashes = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        before = np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
        hashes.add(metavd.run(**WHOLE)["model_sha256"])
        assert np.array_equal(before[0], np.random.get_state()[1])  # noqa: NPY002
        assert before[1] == random.getstate()
    assert len(hashes) == 1


def test_whole_run_leaves_torch_s_generator_alone() -> None:
    """Law: `metavd.run` in a user's program does not change what the program draws afterwards."""
    before = torch.get_rng_state()
    metavd.run(**WHOLE)
    assert torch.equal(before, torch.get_rng_state())


def test_going_on_from_a_state_is_going_on(ordinary: Pool) -> None:
    """Law: 4 rounds are 2 rounds and, from their state, 2 more; the same clients take part in each."""
    algorithm = build("reptile+metavd", ordinary)
    whole, records = trained(algorithm, ordinary, rounds=4)
    half, first = trained(algorithm, ordinary, rounds=2)
    steps = list(simulate(algorithm, ordinary, loop, half, rounds=4, cohort=3))
    assert state_hash(steps[-1][0]) == state_hash(whole)
    assert first + [record for _, record in steps] == records
    assert list(simulate(algorithm, ordinary, loop, whole, rounds=4, cohort=3)) == []


@pytest.mark.parametrize("schedule", [loop, threads(2), vmap(), vmap(2)], ids=["loop", "threads", "vmap", "parts"])
@pytest.mark.parametrize("method", ["reptile+metavd", "maml+ensemblevd"])
def test_what_was_sent_is_what_the_difference_is_taken_to(method: str, schedule: Schedule, ordinary: Pool) -> None:
    """Law: clients that do not move leave spreads, embeddings and hypernetwork as they are, to the bit."""
    known = methods.options_of(method)
    still = {name: 0.0 for name in ("lr", "outer_lr", "hyper_decay", "embed_decay", "spread_decay") if name in known}
    algorithm = build(method, ordinary, **still)
    first = started(algorithm)
    state, _ = trained(algorithm, ordinary, rounds=2, schedule=schedule)
    owned = [name for name in first.params if name.startswith("server.")]
    assert owned
    assert all(torch.equal(state.params[name], first.params[name]) for name in owned)


@pytest.mark.parametrize("ahead", [1, 2, 9])
def test_rounds_under_way_are_the_same_rounds(ahead: int, ordinary: Pool) -> None:
    """Law: a loop that begins the next rounds before it waits for this one yields what it yields without."""
    algorithm = build("reptile+metavd", ordinary)
    begun: list[int] = []

    def counted(state: ServerState, now: Moment) -> Returned:
        begun.append(now.done)
        return here.collect(state, now)

    here = in_process(algorithm, ordinary, loop, cohort=3)
    first, none = started(algorithm), Ledger(None)
    wanted = list(rounds(algorithm.server.update, here, first, 4, none))
    steps = rounds(algorithm.server.update, here._replace(collect=counted, ahead=ahead), first, 4, none)
    found = [next(steps)]
    assert begun == list(range(min(1 + ahead, 4)))
    found += steps
    assert [(state_hash(state), record) for state, record in found] == [(state_hash(s), r) for s, r in wanted]


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_no_round_is_past_the_budget_however_many_are_under_way(ahead: int, ordinary: Pool) -> None:
    """Law: with a budget of three rounds there are three, all counted; a fourth that was begun is given up."""
    algorithm = build("fedavg", ordinary)
    ledger = Counting(3)
    transport = in_process(algorithm, ordinary, loop, cohort=3)._replace(ahead=ahead)
    steps = rounds(algorithm.server.update, transport, started(algorithm), 9, ledger)
    counts = [(record.round, ledger.taken, record.more) for _, record in steps]
    assert counts == [(n, n, {"taken": n}) for n in (1, 2, 3)]
    assert not list(rounds(algorithm.server.update, transport, started(algorithm), 9, ledger))


class Counting(Ledger):
    """A ledger whose budget is a number of rounds."""

    def __init__(self, most: int) -> None:
        super().__init__(None)
        self.most, self.taken = most, 0

    def add(self, answers: int) -> dict[str, Any]:
        assert answers == 3
        self.taken += 1
        return {"taken": self.taken}

    def full(self) -> str:
        return "spent" if self.taken == self.most else ""


def test_a_transport_may_change_the_state_before_a_round(ordinary: Pool) -> None:
    """Law: `ready` is asked before every round, and what it returns is what is sent and updated."""
    algorithm = build("fedavg", ordinary)
    seen: list[float] = []

    def ready(state: ServerState) -> ServerState:
        seen.append(float(state.round))
        return state._replace(params=state.params | {"fc2.bias": state.params["fc2.bias"] + 1.0})

    still = build("fedavg", ordinary, lr=0.0)
    steps = rounds(still.server.update, in_process(still, ordinary, loop, cohort=3)._replace(ready=ready),
                   started(algorithm), 3, Ledger(None))  # fmt: skip
    *_, (state, _) = steps
    assert seen == [0.0, 1.0, 2.0]
    torch.testing.assert_close(state.params["fc2.bias"], started(algorithm).params["fc2.bias"] + 3.0)


# --- ragged ----------------------------------------------------------------------------------------------------------

RAGGED = ([1, 5, 1, 17, 2, 1, 4], [3, 0, 1, 6, 0, 0, 2])
"""Training and test rows of five participating and two unseen clients: single samples, empty test sets."""


def assert_agree(one: ServerState, two: ServerState) -> None:
    for part in ("params", "slots"):
        left, right = getattr(one, part), getattr(two, part)
        assert list(left) == list(right)
        for name in left:
            torch.testing.assert_close(left[name], right[name], rtol=1e-10, atol=1e-10)


ALONE = tuple(name for name in methods.NAMES if "+" not in name or name.startswith("reptile+"))
"""Methods of which one client takes part: every base, and every regulariser on one of them."""


@pytest.mark.parametrize(("method", "cohort"), [*((name, 5) for name in methods.NAMES), *((name, 1) for name in ALONE)])
def test_ragged_clients(method: str, cohort: int) -> None:
    """Parity: one sample, no test rows, a cohort of one: all finite, and vmap == loop to 1e-10.

    What a cohort of one can spoil is what the server makes of the answers, which is the base's or the regulariser's.
    """
    data = pool(federation_of(*RAGGED, unseen=2), dtype=torch.float64)
    algorithm = build(method, data, rounds=2)
    state, records = trained(algorithm, data, rounds=2, cohort=cohort)
    assert all(math.isfinite(record.loss) for record in records)
    assert all(torch.isfinite(value).all() for value in (*state.params.values(), *state.slots.values()))
    chunk = vmap(3)
    assert_agree(trained(algorithm, data, rounds=2, cohort=cohort, schedule=chunk)[0], state)
    for clients in (range(5), range(5, 7)):
        mine, right = (list(answers(algorithm, data, state, clients, each.map)) for each in (chunk, loop))
        for (a, _), (b, _), client in zip(mine, right, clients, strict=True):
            assert a.probs.shape == b.probs.shape == (RAGGED[1][client], 10)
            assert np.isfinite(b.probs).all()
            np.testing.assert_allclose(a.probs, b.probs, rtol=1e-10, atol=1e-10)


def test_nobody_has_test_rows() -> None:
    """Whole chunks without a row to answer give empty answers under both schedules."""
    data = pool(federation_of([4, 5, 6], [0, 0, 0]), dtype=torch.float64)
    algorithm = build("reptile+metavd", data)
    for each in (loop, vmap(2)):
        found = [result.probs.shape for result, _ in answers(algorithm, data, started(algorithm), range(3), each.map)]
        assert found == [(0, 10)] * 3


# --- memory ----------------------------------------------------------------------------------------------------------


def most_batches(count: int, schedule: Schedule) -> int:
    """Return how many batches exist at most while clients are trained, with `count` of them participating."""
    data = pool(federation_of([8] * count, [1] * count))
    algorithm = build("fedavg", data)
    alive = []

    def watching(received: Params, batches: Sequence[Batch]) -> tuple[Params, Tensor]:
        alive.append(sum(type(each) is Batch for each in gc.get_objects()))
        return algorithm.local(received, batches)

    gc.collect()
    gc.freeze()  # what is there already is neither looked at nor counted
    try:
        trained(replace(algorithm, local=watching), data, rounds=1, cohort=12, schedule=schedule)
    finally:
        gc.unfreeze()
    return max(alive)


WHOLE_TURNS = Schedule("test", whole_turns(2), all_at_once(2))


@pytest.mark.parametrize(("schedule", "held"), [(loop, 1), (WHOLE_TURNS, 2)], ids=["loop", "vmap"])
def test_memory_is_bounded_by_what_runs_at_once(schedule: Schedule, held: int) -> None:
    """Law: batches exist for the clients that run now, not for the cohort, let alone for all clients."""
    few, many = most_batches(12, schedule), most_batches(60, schedule)
    assert few == many
    # Two batches a client, and under vmap the two padded ones that are made of them and their images inside vmap.
    assert few <= 2 * held + (4 if held > 1 else 0)


def test_state_does_not_grow_with_the_rounds(ordinary: Pool) -> None:
    """Law: no round leaves a graph or an entry behind."""
    algorithm = build("reptile+metavd", ordinary)
    sizes = set()
    for state, _ in simulate(algorithm, ordinary, loop, started(algorithm), rounds=3, cohort=2):
        tensors = [*state.params.values(), *state.slots.values(), state.round]
        assert not any(value.requires_grad for value in tensors)
        assert all(value.grad_fn is None for value in tensors)
        sizes.add(sum(value.numel() for value in tensors))
    assert len(sizes) == 1


# --- records and errors ----------------------------------------------------------------------------------------------


def test_record_says_what_happened(ordinary: Pool) -> None:
    """Closed form: who took part, the loss weighted by data size, the bytes of a dense model both ways."""
    algorithm = build("fedavg", ordinary)
    state = started(algorithm)
    cohort = choose(state.key, 0, 6, 3)
    with torch.no_grad():
        losses = loop.train(algorithm, ordinary, state, cohort).losses
    sizes = [len(ordinary.federation.train[client]) for client in cohort.tolist()]
    seen = list(zip(sizes, losses.tolist(), strict=True))
    new, record = next(simulate(algorithm, ordinary, loop, state, rounds=1, cohort=3))
    assert (record.round, int(new.round), record.cohort) == (1, 1, cohort.tolist())
    assert record.loss == pytest.approx(sum(n * loss for n, loss in seen) / sum(n for n, _ in seen), rel=1e-14)
    size = 3 * sum(value.numel() * 8 for value in state.params.values())
    assert (record.down, record.up, record.dense_down, record.dense_up) == (size,) * 4


def test_masks_save_bytes(ordinary: Pool) -> None:
    """Closed form: dropped weights and their spreads travel in neither direction; the mask itself travels down."""
    algorithm = build("fedavg+metavd+drop", ordinary, rounds=3)
    _, records = trained(algorithm, ordinary)
    assert records[0].down == records[0].dense_down, "nothing is dropped before drop_from"
    last = records[-1]
    assert last.up < last.down < last.dense_down == last.dense_up
    state, _ = trained(algorithm, ordinary, rounds=2)
    parts = [wire.traffic(algorithm.emit.apply(state.params, torch.tensor(c), state.round)) for c in last.cohort]
    assert (sum(each.down for each in parts), sum(each.up for each in parts)) == (last.down, last.up)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_of_a_client_is_named(ordinary: Pool, value: float) -> None:
    """The round, the client and the tensor are in the message; the state before stays in the caller's hands."""
    algorithm = build("fedavg", ordinary)
    whose = choose(started(algorithm).key, 1, 6, 3).tolist()[1]
    turn = iter(range(100))

    def spoilt(received: Params, batches: Sequence[Batch]) -> tuple[Params, Tensor]:
        adapted, loss = algorithm.local(received, batches)
        if next(turn) == 4:  # the second client of the second round
            adapted = adapted | {"fc1.bias": adapted["fc1.bias"] * value}
        return adapted, loss

    steps = simulate(replace(algorithm, local=spoilt), ordinary, loop, started(algorithm), rounds=3, cohort=3)
    state, _ = next(steps)
    assert int(state.round) == 1
    with pytest.raises(NonFiniteError, match=rf"round 2: client {whose} made fc1\.bias NaN"):
        next(steps)


def test_nan_loss_is_named(ordinary: Pool) -> None:
    algorithm = build("fedavg", ordinary)

    def spoilt(received: Params, batches: Sequence[Batch]) -> tuple[Params, Tensor]:
        adapted, loss = algorithm.local(received, batches)
        return adapted, loss * math.nan

    with pytest.raises(NonFiniteError, match=r"round 1: client \d made loss NaN"):
        trained(replace(algorithm, local=spoilt), ordinary)


def test_nan_of_the_server_is_named(ordinary: Pool) -> None:
    algorithm = build("fedavg", ordinary, server_lr=1e300, server_clip=1e300)

    with pytest.raises(NonFiniteError, match=r"round \d: (the server's update|client \d) made \S+ NaN"):
        trained(algorithm, ordinary, rounds=9)
    server = algorithm.server

    def spoilt(state: ServerState, update: Any) -> ServerState:
        new = server.update(state, update)
        return new._replace(params=new.params | {"fc2.bias": new.params["fc2.bias"] + math.inf})

    broken = replace(algorithm, server=server._replace(update=spoilt))
    with pytest.raises(NonFiniteError, match=r"round 1: the server's update made fc2\.bias NaN"):
        trained(broken, ordinary)


def test_own_arrays_as_features() -> None:
    """Rows need not be images: (n, d) features pass through the same rounds."""
    generator = np.random.RandomState(0)
    source = arrays(generator.randn(60, 4), np.arange(60) % 3)
    result = metavd.run(source=source, method="fedavg", clients=3, unseen=1, cohort=2, rounds=2, width=6)
    assert result["data"] == "arrays"
