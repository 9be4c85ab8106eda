"""What simulated clients keep: versions of a table, in memory and on disk, checkpoints, clients of every kind."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import metavd
from metavd import methods
from metavd.core import rng
from metavd.core.types import Keep, ServerState
from metavd.data.cohort import choose
from metavd.engine import kept as module
from metavd.engine.checkpoint import hashes, load_checkpoint, save_checkpoint
from metavd.engine.kept import digest, empty, filled, held, newcomers
from metavd.engine.rounds import Silent
from metavd.engine.schedule.loop import loop
from metavd.engine.schedule.threads import threads
from metavd.engine.schedule.vmap import vmap
from metavd.runs.run import rounds_of
from metavd.runs.settings import Experiment
from metavd.runs.setup import Setup, prepare, start
from metavd.tree import Params

LIKE = {"a": torch.zeros(2, 3, dtype=torch.float64), "b": torch.zeros(1, dtype=torch.float64)}


def rows(*values: float) -> Params:
    """What so many clients keep: all entries the client's number."""
    return {name: torch.stack([torch.full_like(like, each) for each in values]) for name, like in LIKE.items()}


def numbers(table: module.KeptTable, clients: list[int]) -> list[float]:
    found = table.rows(clients)
    assert found["a"].shape == (len(clients), 2, 3)
    assert torch.equal(found["a"][:, 0, 0], found["b"][:, 0])
    return found["b"][:, 0].tolist()


@pytest.mark.parametrize("in_memory", [1 << 30, 0])
def test_versions_stay_as_they_were(in_memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: each version answers as it did when it was the newest, in memory and mapped from a file."""
    monkeypatch.setattr(module, "IN_MEMORY", in_memory)
    generator = np.random.default_rng(0)
    versions, wanted = [empty(6, LIKE)], [{}]
    for step in range(1, 12):
        clients = sorted(generator.choice(6, 2, replace=False).tolist())
        values = [100.0 * step + client for client in clients]
        versions.append(versions[-1].put(clients, rows(*values)))
        wanted.append(wanted[-1] | dict(zip(clients, values, strict=True)))
    for table, right in zip(versions, wanted, strict=True):
        assert table.visited() == sorted(right)
        assert table.has([5, 0]) == [5 in right, 0 in right]
        assert numbers(table, [4, 1, 0, 5, 2, 3]) == [right.get(client, 0.0) for client in (4, 1, 0, 5, 2, 3)]


def test_versions_that_nobody_holds_are_forgotten() -> None:
    """Law: memory does not grow with rounds; an older version lives as long as somebody holds it."""
    table = empty(4, LIKE)
    for step in range(50):
        table = table.put([step % 4], rows(float(step)))
    gc.collect()
    alive = [each for each in gc.get_objects() if isinstance(each, module.KeptTable) and each.storage is table.storage]
    assert alive == [table]


def test_only_the_newest_version_has_a_next_one() -> None:
    table = empty(4, LIKE)
    table.put([0], rows(1.0))
    with pytest.raises(AssertionError, match="newest"):
        table.put([1], rows(1.0))


def test_a_large_table_is_a_file_of_which_only_what_is_written_takes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million clients with 13,000 numbers each would be 104 GB; two of them are two rows."""
    monkeypatch.setattr(module, "IN_MEMORY", 1 << 20)
    table = empty(1_000_000, {"head": torch.zeros(1300, dtype=torch.float64)})
    two = torch.stack([torch.full((1300,), 3.0), torch.full((1300,), 4.0)]).double()
    after = table.put([7, 999_999], {"head": two})
    assert torch.equal(after.rows([999_999, 7, 8])["head"][:, 5], torch.tensor([4.0, 3.0, 0.0]).double())
    assert after.visited() == [7, 999_999]


def setup_of(method: str = "fedrep", backend: str = "loop", **more: object) -> Setup:
    values = {"clients": 8, "unseen": 2, "cohort": 3, "rounds": 4, "seed": 3, "dtype": "float64", "device": "cpu"}
    options = {"head_epochs": 1, "local_epochs": 1} if method == "fedrep" else {"local_epochs": 1}
    return prepare(
        Experiment(method=method, data="digits", model="mlp", width=8, backend=backend, options=options,
                   partition="quantity:1.0", **(values | more))
    )  # fmt: skip


def trained(setup: Setup, state: ServerState | None = None) -> list[ServerState]:
    return [state for state, _ in rounds_of(setup, state or start(setup))]


def test_a_checkpoint_holds_what_clients_keep(tmp_path: Path) -> None:
    """Law: saved, loaded and gone on with gives the bits of going on."""
    setup = setup_of()
    states = trained(setup)
    save_checkpoint(tmp_path, states[1], {})
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert hashes(found[0]) == hashes(states[1])
    assert len(hashes(states[1])) == 2
    again = trained(setup, found[0])
    assert hashes(again[-1]) == hashes(states[-1])
    assert hashes(states[-1])["kept_sha256"] != hashes(states[1])["kept_sha256"]


def test_who_has_kept_nothing_has_what_it_begins_with() -> None:
    """Closed form: clients that took part have rows, the others and the unseen ones the first head."""
    setup = setup_of()
    state = trained(setup)[1]
    took = sorted(set(choose(state.key, 0, 8, 3).tolist()) | set(choose(state.key, 1, 8, 3).tolist()))
    everyone = list(range(10))
    assert state.kept is not None
    assert state.kept.visited() == took
    assert newcomers(setup.algorithm, state, everyone) == [client not in took for client in everyone]
    assert setup.algorithm.keep is not None
    first = setup.algorithm.keep.init(state.key, torch.tensor(0))
    found = held(setup.algorithm, state, everyone)
    for client in everyone:
        same = all(torch.equal(found[name][client], value) for name, value in first.items())
        assert same == (client not in took)


KEEPERS = ["local", "fedper", "fedrep", "ditto", "scaffold", "fedala", "feddbe", "pfedvem", "lrbpfl"]


@pytest.mark.parametrize("method", KEEPERS)
def test_who_begins_alike_begins_alike(method: str) -> None:
    """`alike` promises that a client's number does not matter: the law behind making what all begin with once."""
    keep, key = setup_of(method=method).algorithm.keep, rng.key(3)
    assert keep is not None
    assert keep.alike
    one, other = (module.first_of(keep, key, client) for client in (0, 5))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_all_begin_with_is_made_once() -> None:
    """Newcomers of every round and evaluation share it, unless a method says that clients begin differently."""
    setup = setup_of()
    keep = setup.algorithm.keep
    assert keep is not None
    calls: list[object] = []

    def counted(key: torch.Tensor, client: torch.Tensor) -> Params:
        calls.append(client)
        return keep.init(key, client)

    found = {}
    for alike in (True, False):
        calls.clear()
        algorithm = replace(setup.algorithm, keep=Keep(counted, alike))
        state = module.started(algorithm, start(setup)._replace(kept=None), 6)
        found[alike] = [held(algorithm, state, clients) for clients in ([0, 1], [2], [3, 4, 5])]
        assert len(calls) == (2 if alike else 4)  # the first of both is for the table's shapes
    for one, other in zip(*found.values(), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_newcomers_and_others_are_answered_in_order_and_leave_torch_as_it_was() -> None:
    """Some clients have kept something and some have not: one answer each, in order, and gradients stay on."""
    from metavd.runs.evaluation import evaluate

    setup = setup_of()
    found = evaluate(setup, trained(setup)[0])
    assert [each.client for each in found.clients] == list(range(10))
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("method", ["fedrep", "fedper"])
def test_schedules_agree_on_what_is_kept(method: str) -> None:
    """Parity: three rounds of ragged clients in float64, under every schedule."""
    reference = setup_of(method)
    wanted = trained(reference)[2]
    kept = held(reference.algorithm, wanted, range(8))
    for name in ("threads", "vmap"):
        setup = setup_of(method, name)
        found = trained(setup)[2]
        torch.testing.assert_close(held(setup.algorithm, found, range(8)), kept, rtol=1e-11, atol=1e-11)
        for entry, value in wanted.params.items():
            torch.testing.assert_close(found.params[entry], value, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("schedule", [threads(2), vmap(), vmap(2)], ids=["threads", "vmap", "vmap2"])
def test_a_mistake_in_the_phase_is_seen(schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: phases that count padding, or do not know a client's own passes, differ."""
    from metavd.core.types import Sampling

    setup = setup_of()
    state = start(setup)
    cohort = choose(state.key, 0, 8, 5)
    with torch.no_grad():
        right = loop.train(setup.algorithm, setup.pool, state, cohort)
        same = schedule.train(setup.algorithm, setup.pool, state, cohort)
        monkeypatch.setattr(Sampling, "epoch", lambda self, index, batch: (index >= 2).to(batch.size.dtype))  # noqa: ARG005
        wrong = schedule.train(setup.algorithm, setup.pool, state, cohort)
    torch.testing.assert_close(same.adapted["fc0.weight"], right.adapted["fc0.weight"], rtol=1e-12, atol=1e-12)
    assert (wrong.adapted["fc0.weight"] - right.adapted["fc0.weight"]).abs().max() > 1e-6


def test_fedrep_trains_in_turns() -> None:
    """Law: without head passes nothing private moves; without a pass of features nothing shared moves in the first."""
    setup = setup_of()
    state = start(setup)
    cohort = choose(state.key, 0, 8, 3)
    with torch.no_grad():
        found = loop.train(setup.algorithm, setup.pool, state, cohort)
        algorithm = prepare(
            Experiment(method="fedrep", data="digits", model="mlp", width=8, backend="loop", dtype="float64", seed=3,
                       clients=8, unseen=2, cohort=3, rounds=4, partition="quantity:1.0", device="cpu",
                       options={"head_epochs": 0, "local_epochs": 1})
        ).algorithm  # fmt: skip
        without = loop.train(algorithm, setup.pool, state, cohort)
    assert set(found.adapted) & set(found.kept) == set()
    assert set(found.kept) == {"fc2.weight", "fc2.bias"}
    first = held(setup.algorithm, state, cohort.tolist())
    assert all(torch.equal(without.kept[name], first[name]) for name in first)
    assert all(not torch.equal(found.kept[name], first[name]) for name in first)


def test_fedper_in_its_first_round_sends_what_fedavg_sends() -> None:
    """Law: everyone begins with FedAvg's first head, so the features after one round are FedAvg's, to the bit."""
    one, two = (trained(setup_of(method, rounds=1))[0].params for method in ("fedper", "fedavg"))
    assert set(two) - set(one) == {"fc2.weight", "fc2.bias"}
    assert all(torch.equal(value, two[name]) for name, value in one.items())


@pytest.mark.parametrize("backend", ["loop", "threads", "vmap"])
def test_fedrep_with_nothing_in_its_head_is_fedavg(backend: str, tmp_path: Path) -> None:
    """Law: a client that keeps nothing sends all, and the rounds are FedAvg's to the bit; stopped and resumed too."""
    plain, setup = setup_of("fedavg", backend), setup_of("fedrep", backend)
    headless, options = setup.task.model._replace(head=()), setup.experiment.options | {"head_epochs": 0}
    algorithm = methods.algorithm("fedrep", headless, methods.Setting(8, 10, 4), options)
    setup = replace(setup, task=replace(setup.task, algorithm=algorithm))
    wanted, found = trained(plain), trained(setup)
    for one, two in zip(wanted, found, strict=True):
        assert list(one.params) == list(two.params)
        assert all(torch.equal(value, two.params[name]) for name, value in one.params.items())
    assert held(algorithm, found[-1], range(10)) == {}
    save_checkpoint(tmp_path, found[1], {})
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    assert newcomers(algorithm, loaded[0], range(10)) == newcomers(algorithm, found[1], range(10))
    assert hashes(trained(setup, loaded[0])[-1]) == hashes(found[-1])


def test_resumed_with_private_state(tmp_path: Path) -> None:
    """Law: interrupted after a round and resumed, a run gives the result of one that was not."""

    class Stopping(Silent):
        def round(self, record) -> None:
            if record.round == 3:
                raise KeyboardInterrupt

    how = {"method": "fedrep", "data": "digits", "rounds": 5, "model": "mlp", "width": 8, "head_epochs": 1,
           "local_epochs": 1, "checkpoint_every": 1, "seed": 1}  # fmt: skip
    whole = metavd.run(**how)
    with pytest.raises(Exception, match="stopped after round"):
        metavd.run(**how, out=tmp_path / "run", listener=Stopping())
    again = metavd.run(**how, out=tmp_path / "run", resume=True)
    for name in ("model_sha256", "kept_sha256", "test", "unseen"):
        assert again[name] == whole[name]
    own = metavd.personalize(tmp_path / "run", client=0)
    assert set(own.params) >= {"fc2.weight", "fc0.weight"}


def test_nothing_of_it_is_traffic() -> None:
    """Closed form: bytes of FedRep are those of a network without its head."""
    how = {"data": "digits", "rounds": 2, "model": "mlp", "width": 8, "local_epochs": 1, "cohort": 4}
    mine, all_of_it = (metavd.run(method=method, **how)["bytes"] for method in ("fedper", "fedavg"))
    head = sum(value[0].numel() for value in held(setup_of().algorithm, start(setup_of()), [0]).values())
    for way in ("dense_down", "dense_up"):
        assert all_of_it[way] - mine[way] == 2 * 4 * 4 * head


def test_keys() -> None:
    """Law: what a client begins with depends on the run's seed alone, and is the same wherever it is asked for."""
    setup = setup_of()
    keep = setup.algorithm.keep
    assert keep is not None
    one, two = keep.init(rng.key(1), torch.tensor(0)), keep.init(rng.key(1), torch.tensor(5))
    other = keep.init(rng.key(2), torch.tensor(0))
    assert torch.equal(one["fc2.weight"], two["fc2.weight"])
    assert not torch.equal(one["fc2.weight"], other["fc2.weight"])


def test_filled_is_what_a_checkpoint_holds() -> None:
    table = filled(5, [1, 3], rows(1.0, 3.0))
    assert numbers(table, [3, 1, 0]) == [3.0, 1.0, 0.0]
    assert digest(table) == digest(empty(5, LIKE).put([3], rows(3.0)).put([1], rows(1.0)))


def test_ranks_of_a_host_share_one_file_which_the_first_writes() -> None:
    """Law: both have the same rows at every version, and only one of them wrote; the file has no name any more."""
    barrier, said = threading.Barrier(2), {}

    def rank(number: int) -> list[module.KeptTable]:
        def tell(path: str | None) -> str:
            barrier.wait(60)
            said.update({} if path is None else {"path": path})
            barrier.wait(60)
            return said["path"]

        begun = empty(5, LIKE).put([2], rows(7.0))
        versions = [module.once_per_host(begun, tell, first=number == 0, everyone=False)]
        for step in range(1, 4):
            versions.append(versions[-1].put([step, 4], rows(10.0 * step, 10.0 * step + 4)))
        return versions

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2))
    for a, b in zip(first, second, strict=True):
        assert a.visited() == b.visited()
        assert numbers(a, [0, 1, 2, 3, 4]) == numbers(b, [0, 1, 2, 3, 4])
    assert numbers(first[0], [1, 2, 3, 4]) == [0.0, 7.0, 0.0, 0.0]
    assert numbers(second[2], [1, 2, 3, 4]) == [10.0, 20.0, 0.0, 24.0]
    assert [table.storage.writes for table in (first[0], second[0])] == [True, False]
    first[0].storage.rows[0] = 5.0
    assert numbers(second[-1], [0]) == [5.0]
    assert not Path(said["path"]).exists()
