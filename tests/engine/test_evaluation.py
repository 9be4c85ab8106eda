"""Personal models and their answers: who is served how, which numbers are drawn, and the diagnostics' closed forms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from metavd import methods
from metavd.core import rng
from metavd.core.model import from_module, xavier
from metavd.core.types import Algorithm, Answer, Batch, NonFiniteError, ServerState
from metavd.data.cohort import PERSONAL, TRAIN, Pool, batches, pool
from metavd.data.partition import federate
from metavd.data.source import arrays
from metavd.engine.checkpoint import state_hash
from metavd.engine.evaluation import answers
from metavd.engine.schedule.loop import loop
from metavd.engine.schedule.vmap import vmap
from metavd.evaluate.diagnose import diagnose
from metavd.evaluate.metrics import gap_interval, summarize
from metavd.models.mlp import mlp
from metavd.tree import Params
from simulated import simulate


@pytest.fixture
def data() -> Pool:
    """Four participating and two unseen clients with 4 features, 3 classes, and validation rows."""
    generator = np.random.RandomState(0)
    source = arrays(generator.randn(300, 4), np.arange(300) % 3)
    return pool(federate(source, "iid", clients=4, unseen=2, valid=0.2, seed=1), dtype=torch.float64)


def build(name: str, **options: Any) -> Algorithm:
    model = from_module(mlp((4,), 3, width=6).double(), init=xavier)
    return methods.algorithm(name, model, methods.Setting(4, 3, 10), options)


def started(algorithm: Algorithm, seed: int = 0, round: int = 0) -> ServerState:
    with torch.no_grad():
        return algorithm.server.init(rng.key(seed))._replace(round=torch.tensor(float(round)).double())


def answered(algorithm: Algorithm, data: Pool, state: ServerState, clients: Sequence[int], **more: Any) -> list:
    return [result for result, _ in answers(algorithm, data, state, clients, more.pop("run", loop.map), **more)]


# --- who is served how -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [loop.map, vmap(2).map], ids=["loop", "vmap"])
def test_known_clients_are_served_and_unseen_ones_admitted(data: Pool, backend: Any) -> None:
    """Law: `serve` for those who took part, `admit` for those who never did; no one gets both."""
    algorithm = build("fedavg")
    called: list[str] = []

    def serve(params: Params, client: Tensor, round: Tensor) -> Params:
        called.append("serve")
        return algorithm.serve(params, client, round)

    def admit(params: Params, round: Tensor, batches: Sequence[Batch]) -> Params:
        called.append("admit")
        return algorithm.admit(params, round, batches)

    spied = replace(algorithm, serve=serve, admit=admit)
    answered(spied, data, started(algorithm), range(4), run=backend)
    assert set(called) == {"serve"}
    called.clear()
    answered(spied, data, started(algorithm), range(4, 6), run=backend)
    assert set(called) == {"admit"}


def test_every_client_gets_its_own_rows_and_labels(data: Pool) -> None:
    algorithm, federation = build("fedavg"), data.federation
    for split in ("test", "valid"):
        for result in answered(algorithm, data, started(algorithm), range(4), split=split):
            rows = getattr(federation, split)[result.client]
            assert result.train_size == len(federation.train[result.client])
            assert np.array_equal(result.y, federation.source.y[rows])
            assert result.probs.shape == (len(rows), 3)
            assert result.probs.dtype == np.float64


def test_fedavg_answers_with_the_server_s_model(data: Pool) -> None:
    """Closed form: without adaptation a client's probabilities are the softmax of the server's logits on its rows."""
    model = from_module(mlp((4,), 3, width=6).double(), init=xavier)
    algorithm = methods.algorithm("fedavg", model, methods.Setting(4, 3, 10))
    state = started(algorithm)
    for clients in (range(4), range(4, 6)):
        for result in answered(algorithm, data, state, clients):
            x = data.inputs(torch.from_numpy(data.federation.test[result.client]))
            wanted = model.apply(state.params, x, None)[0].softmax(-1)
            np.testing.assert_array_equal(result.probs, wanted.numpy())


def test_adaptation_is_one_gradient_step(data: Pool) -> None:
    """Closed form: fedavg+ft answers with w - lr grad L(w; the batch of the client's personal key)."""
    model = from_module(mlp((4,), 3, width=6).double(), init=xavier)
    algorithm = methods.algorithm("fedavg+ft", model, methods.Setting(4, 3, 10), {"lr": 0.3, "batch": 5, "clip": 1e9})
    state = started(algorithm, round=7)
    (result,) = answered(algorithm, data, state, [2])
    key = rng.fold(state.key, PERSONAL, 7, 2)
    (batch,) = batches(data, 2, algorithm.personal_batches, key, state.round)
    assert len(batch.y) == 5
    params = {name: value.clone().requires_grad_() for name, value in state.params.items()}
    loss = torch.nn.functional.cross_entropy(model.apply(params, batch.x, None)[0], batch.y)
    gradient = torch.autograd.grad(loss, list(params.values()))
    own = {name: value - 0.3 * g for (name, value), g in zip(state.params.items(), gradient, strict=True)}
    x = data.inputs(torch.from_numpy(data.federation.test[2]))
    np.testing.assert_allclose(result.probs, model.apply(own, x, None)[0].softmax(-1), rtol=1e-12, atol=1e-14)


def test_many_rows_are_answered_in_parts() -> None:
    """Law: more than 256 test rows give the same answers, row by row, on both backends and for shorter prefixes."""
    generator = np.random.RandomState(0)
    source = arrays(generator.randn(1300, 4), np.arange(1300) % 3)
    data = pool(federate(source, "iid", clients=2, test_share=0.5, seed=1), dtype=torch.float64)
    algorithm = build("fedavg+vd", predict="draws", samples=2)
    state = started(algorithm)
    (whole, _), (again, _) = (answered(algorithm, data, state, range(2), run=run) for run in (loop.map, vmap(2).map))
    assert len(whole.y) > 256
    np.testing.assert_allclose(again.probs, whole.probs, rtol=1e-10, atol=1e-12)
    fewer = replace(data.federation, test=tuple(rows[:300] for rows in data.federation.test))
    (part, _) = answered(algorithm, data._replace(federation=fewer), state, range(2))
    np.testing.assert_allclose(part.probs, whole.probs[:300], rtol=1e-12, atol=1e-14)
    assert whole.information.shape == (len(whole.y),)
    np.testing.assert_allclose(again.information, whole.information, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(part.information, whole.information[:300], rtol=1e-9, atol=1e-14)


def test_known_classes_are_those_of_training_rows(data: Pool) -> None:
    """A class that a client has in its test rows only is not known to it; known and unseen clients alike."""
    federation, algorithm = data.federation, build("fedavg")
    y = federation.source.y
    train = tuple(rows[y[rows] != client % 3] for client, rows in enumerate(federation.train))
    cut = data._replace(federation=replace(federation, train=train))
    for clients in (range(4), range(4, 6)):
        for result in answered(algorithm, cut, started(algorithm), clients):
            assert result.known.tolist() == [label != result.client % 3 for label in range(3)]


@pytest.mark.parametrize("backend", [loop.map, vmap(3).map], ids=["loop", "vmap"])
@pytest.mark.parametrize("method", ["fedavg", "fedavg+vd", "pfedgp"])
def test_only_draws_tell_information(data: Pool, method: str, backend: Any) -> None:
    """None where a method makes no draws; else a number for each row, none for a client without test rows."""
    federation = data.federation
    test = (federation.test[0][:0], federation.test[1][:3], *federation.test[2:])  # ragged: vmap pads
    gaps = data._replace(federation=replace(federation, test=test))
    small = {"chains": 2, "sweeps": 1} if method == "pfedgp" else {}
    algorithm = build(method, **small)
    assert all(r.information is None for r in answered(algorithm, gaps, started(algorithm), range(4), run=backend))
    if method == "fedavg+vd":
        drawing = build(method, predict="draws", samples=3, rate=0.6)
        empty, *others = answered(drawing, gaps, started(drawing), range(4), run=backend)
        assert (empty.information, len(empty.y), empty.probs.shape) == (None, 0, (0, 3))
        for result in others:
            assert result.information.shape == result.y.shape
            assert (result.information > 0).all()
        told = summarize([empty, *others])
        assert told["mutual_information"] == pytest.approx(np.concatenate([r.information for r in others]).mean())
        assert told["mutual_information"] < told["entropy"]


@pytest.mark.parametrize("method", ["fedavg", "reptile+metavd"])
def test_figures_do_not_depend_on_the_backend(data: Pool, method: str) -> None:
    """Parity: loop and vmap give the same figures to rounding, draws and all."""
    algorithm = build(method, **({} if method == "fedavg" else {"predict": "draws", "samples": 3}))
    state = started(algorithm)
    one, two = (summarize(answered(algorithm, data, state, range(4), run=run)) for run in (loop.map, vmap(3).map))
    spans = one.pop("intervals")
    assert two.pop("intervals") == {name: pytest.approx(span, abs=1e-9) for name, span in spans.items()}
    assert one == {name: pytest.approx(value, abs=1e-9) for name, value in two.items()}


def test_nan_answers_are_named(data: Pool) -> None:
    algorithm = build("fedavg")
    spoilt = replace(algorithm, predict=lambda own, x, key: Answer(algorithm.predict(own, x, key).probs * math.nan, {}))
    with pytest.raises(NonFiniteError, match=r"round 3: client 0 .*NaN"):
        answered(spoilt, data, started(algorithm, round=3), range(4))


# --- evaluation never touches training -------------------------------------------------------------------------------


def test_keys_of_training_and_evaluation_are_apart(data: Pool) -> None:
    """Law: no batch of personalisation or test has a key, or an order of rows, of a training step."""
    algorithm = build("reptile", batch=5)
    used: dict[str, set[int]] = {"train": set(), "personal": set(), "test": set()}

    def local(received: Params, batches: Sequence[Batch]) -> tuple[Params, Tensor]:
        used["train"] |= {int(batch.key) for batch in batches}
        return algorithm.local(received, batches)

    def personalize(received: Params, batches: Sequence[Batch]) -> tuple[Params, Tensor]:
        used["personal"] |= {int(batch.key) for batch in batches}
        return algorithm.personalize(received, batches)

    def predict(own: Params, x: Tensor, key: Tensor) -> Answer:
        used["test"].add(int(key))
        return algorithm.predict(own, x, key)

    spied = replace(algorithm, local=local, personalize=personalize, predict=predict)
    for state, _ in simulate(spied, data, loop, started(algorithm), rounds=3, cohort=4):
        answered(spied, data, state, range(4))
        answered(spied, data, state, range(4, 6))
    assert all(used.values())
    assert not used["train"] & used["personal"]
    assert not used["train"] & used["test"]
    assert not used["personal"] & used["test"]
    assert len(used["personal"]) == len(used["test"]) == 3 * 6, "one per client and round"
    assert rng.fold(rng.key(0), TRAIN, 0, 0) != rng.fold(rng.key(0), PERSONAL, 0, 0)


@pytest.mark.parametrize("method", ["fedavg", "reptile+metavd"])
def test_training_is_the_same_with_and_without_evaluation(data: Pool, method: str) -> None:
    """Law: evaluating all clients, drawing and summing up after each round changes no bit of what is trained."""
    algorithm = build(method, **({} if method == "fedavg" else {"predict": "draws"}))
    ends = []
    for evaluated in (False, True):
        torch.manual_seed(0)
        for state, _ in simulate(algorithm, data, loop, started(algorithm), rounds=3, cohort=2):
            if evaluated:
                known, unseen = (answered(algorithm, data, state, who) for who in (range(4), range(4, 6)))
                summarize(known), gap_interval(known, unseen)
        ends.append((state_hash(state), torch.get_rng_state().tolist()))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("method", ["reptile+metavd", "pfedgp", "maml+vd"])
def test_evaluation_leaves_the_state_as_it_is(data: Pool, method: str) -> None:
    """Law: answers and diagnostics are functions of the state: the same twice, and the state keeps its bits."""
    algorithm = build(method, **({"chains": 2, "sweeps": 1} if method == "pfedgp" else {"predict": "draws"}))
    state = started(algorithm)
    before = state_hash(state)
    one, two = (answered(algorithm, data, state, range(4)) for _ in range(2))
    assert diagnose(algorithm, state, 4) == diagnose(algorithm, state, 4)
    assert all(np.array_equal(a.probs, b.probs) for a, b in zip(one, two, strict=True))
    assert state_hash(state) == before


# --- diagnostics -----------------------------------------------------------------------------------------------------

KEYS = {"rate_mean", "rate_sd", "rate_above_0.9", "no_gradient", "between_clients"}


@pytest.mark.parametrize("method", ["fedavg", "fedavg+dropout", "fedavg+snip", "fedbe", "pfedgp"])
def test_methods_without_a_posterior_have_no_diagnostics(method: str) -> None:
    model = from_module(mlp((4,), 3, width=6).double(), init=xavier)
    setting = methods.Setting(4, 3, 10, lambda _: torch.zeros(2, 4).double())
    algorithm = methods.algorithm(method, model, setting)
    assert diagnose(algorithm, started(algorithm), 4) is None


def hand_made(clients: int = 4, **options: Any) -> tuple[Algorithm, ServerState, str]:
    """Return EnsembleVD, a state of it, and the name of the table that holds its clients' spreads."""
    model = from_module(mlp((4,), 3, width=6).double(), init=xavier)
    algorithm = methods.algorithm("fedavg+ensemblevd", model, methods.Setting(clients, 3, 10), options)
    return algorithm, started(algorithm), "server.client.fc1.logvar"


def test_diagnostics_of_a_hand_made_case() -> None:
    """Closed form: p = sigma^2 / (sigma^2 + theta^2) for every client and weight, then plain moments of those."""
    algorithm, state, table = hand_made()
    generator = np.random.RandomState(3)
    weight = generator.uniform(0.1, 2.0, (3, 6))
    log_variance = generator.uniform(-6.0, -0.1, (4, 3, 6))
    params = state.params | {"fc1.weight": torch.from_numpy(weight), table: torch.from_numpy(log_variance + 8.5)}
    found = diagnose(algorithm, state._replace(params=params), 4)
    p = np.exp(log_variance) / (np.exp(log_variance) + weight**2)
    assert found is not None
    assert set(found) == KEYS
    assert found["rate_mean"] == pytest.approx(p.mean(), rel=1e-9)
    assert found["rate_sd"] == pytest.approx(p.std(), rel=1e-9)
    assert found["rate_above_0.9"] == pytest.approx((p > 0.9).mean())
    assert found["no_gradient"] == 0.0
    assert found["between_clients"] == pytest.approx(np.sqrt(p.var(0).mean()), rel=1e-9)


def test_equal_clients_have_no_dispersion() -> None:
    """Law: where all clients share their spread (VD), rates do not differ between them."""
    algorithm = build("fedavg+vd")
    found = diagnose(algorithm, started(algorithm), 4)
    assert found is not None
    assert found["between_clients"] == pytest.approx(0.0, abs=1e-9)
    assert found["rate_sd"] > 0


def test_many_clients_are_sampled_evenly() -> None:
    """A thousand clients cost as much as `limit`: those looked at are spread over all, first and last included."""
    algorithm, state, table = hand_made(1000)
    looked: list[int] = []

    def apply(params: Params, client: Tensor, round: Tensor) -> Params:
        looked.append(int(client))
        return algorithm.emit.apply(params, client, round)

    found = diagnose(replace(algorithm, emit=algorithm.emit._replace(apply=apply)), state, 1000, limit=10)
    assert found is not None
    assert looked == sorted(set(looked))
    assert (len(looked), looked[0], looked[-1]) == (10, 0, 999)
    assert max(b - a for a, b in pairwise(looked)) <= 112
    assert table in state.params


def test_share_without_gradient_of_released_metavd() -> None:
    """Closed form: the released double clamp cuts off every weight whose hypernetwork output is below its floor."""
    algorithm = build("reptile+metavd", variant="released")
    state = started(algorithm)
    bias = state.params["server.hyper.3.bias"]
    down = torch.linspace(-1.0, 1.0, len(bias)).double()
    params = state.params | {
        "server.hyper.3.weight": torch.zeros_like(state.params["server.hyper.3.weight"]),
        "server.hyper.3.bias": down,
    }
    found = diagnose(algorithm, state._replace(params=params), 4)
    assert found is not None
    assert found["no_gradient"] == pytest.approx(float((down < 0).double().mean()))
    default = build("reptile+metavd")
    found = diagnose(default, started(default), 4)
    assert found is not None
    assert found["no_gradient"] == 0.0


@pytest.mark.parametrize("method", ["fedavg+vd", "fedavg+ensemblevd"])
def test_share_without_gradient_of_released_vd(method: str) -> None:
    """Closed form: under the released clamp a stored spread below the floor gets no gradient from what it emits."""
    algorithm = build(method, variant="released")
    state = started(algorithm)
    name = "fc1.logvar" if method == "fedavg+vd" else "server.client.fc1.logvar"
    below = torch.full_like(state.params[name], -20.0)

    def emitted(stored: Tensor) -> Tensor:
        return algorithm.emit.apply(state.params | {name: stored}, torch.tensor(0), state.round)["fc1.logvar"].sum()

    assert not torch.func.grad(emitted)(below).any(), "nothing can move it any more"
    found = diagnose(algorithm, state._replace(params=state.params | {name: below}), 4)
    assert found is not None
    assert found["no_gradient"] == 1.0
