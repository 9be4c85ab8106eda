"""The same on a GPU: random numbers and augmented rows to the bit, every method to rounding in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import metavd
from cheap import cheap
from metavd import methods
from metavd.core import rng
from metavd.data.source import Source, arrays
from metavd.engine.checkpoint import state_hash
from metavd.engine.rounds import rounds
from metavd.engine.schedule import graph
from metavd.engine.schedule.capture import captured
from metavd.engine.turn import moment
from metavd.ops.images import crop_and_flip
from metavd.runs.run import ledger_of, rounds_of, server_update, transport
from metavd.runs.settings import Experiment
from metavd.runs.setup import prepare, start

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

TINY = {"clients": 4, "unseen": 2, "cohort": 3, "rounds": 3, "width": 8, "test_share": 0.5, "dtype": "float64"}
CHEAP = {"batch": 16, "drop_from": 1, "sweeps": 2, "extra_points": 2}


def test_keys_give_the_same_numbers() -> None:
    """Law: integers, uniform numbers and orders are the same bits on both; normal ones agree to rounding."""
    here, there = rng.fold(rng.key(5), 3, 1), rng.fold(rng.key(5, "cuda"), 3, 1)
    assert torch.equal(here, there.cpu())
    for draw in (rng.bits, rng.uniform):
        assert torch.equal(draw(here, [1000]), draw(there, [1000]).cpu())
    assert torch.equal(rng.permutation(here, 1000), rng.permutation(there, 1000).cpu())
    torch.testing.assert_close(rng.normal(here, [1000], torch.float64), rng.normal(there, [1000], torch.float64).cpu())


def test_crops_and_flips_are_the_same_bits() -> None:
    """Law: an augmented row depends on its key, not on where it is made."""
    rows = torch.from_numpy(np.random.RandomState(0).randint(0, 256, (64, 3, 32, 32)).astype(np.uint8))
    key = rng.fold(rng.key(1), 2)
    assert torch.equal(crop_and_flip(rows, key), crop_and_flip(rows.cuda(), key.cuda()).cpu())


@pytest.mark.parametrize("method", [*methods.NAMES, "fedavg+dp", "reptile+metavd+dp"])
def test_every_method_agrees(method: str) -> None:
    """Parity: three rounds on the CPU's loop, the GPU's loop and the GPU's vmap give the same answers to 1e-9."""
    options = cheap(method, **CHEAP)
    found = [
        metavd.run(method=method, device=device, backend=backend, **TINY, **options)
        for device, backend in (("cpu", "loop"), ("cuda", "loop"), ("cuda", "vmap"))
    ]
    for other in found[1:]:
        for part in ("test", "unseen"):
            assert other[part]["nll"] == pytest.approx(found[0][part]["nll"], rel=1e-9)
            assert other[part]["brier"] == pytest.approx(found[0][part]["brier"], rel=1e-9)


@pytest.mark.parametrize("rule", ["median", "trimmed:0.2", "multi-krum:0", "geometric-median", "clip+median"])
@pytest.mark.parametrize("method", ["fedavg", "reptile+metavd"])
def test_every_rule_agrees(method: str, rule: str) -> None:
    """Parity: liars and a rule against them, on the CPU's loop and the GPU's vmap."""
    common = TINY | {"clients": 6, "cohort": 5, "rounds": 5}
    here, there = (
        metavd.run(method=method, device=device, backend=backend, aggregate=rule, attack="sign-flip:0.3", **common)
        for device, backend in (("cpu", "loop"), ("cuda", "vmap"))
    )
    assert there["test"]["nll"] == pytest.approx(here["test"]["nll"], rel=1e-9)


@pytest.mark.parametrize(
    "more", [{"clipping": "adaptive"}, {"sampling": "fixed"}, {"noise_from": "sites", "cohort": 4}]
)
def test_hidden_clients_agree(more: dict[str, object]) -> None:
    """Parity: an adaptive clip, a captured update, noise of the sites, on the CPU's loop and the GPU's vmap."""
    common = TINY | {"clients": 4, "cohort": 2, "rounds": 5, "noise": 0.5} | more
    here, there = (
        metavd.run(method="reptile+vd+dp", device=device, backend=backend, **common)
        for device, backend in (("cpu", "loop"), ("cuda", "vmap"))
    )
    assert there["test"]["nll"] == pytest.approx(here["test"]["nll"], rel=1e-9)


@pytest.mark.parametrize("rule", ["median", "trimmed:0.2", "multi-krum:0", "geometric-median", "clip"])
def test_a_server_with_a_rule_is_captured(rule: str) -> None:
    """No rule asks the device for a number on its way."""
    setup = prepare(Experiment(method="reptile+metavd", device="cuda", aggregate=rule, **TINY))  # type: ignore[arg-type]
    state = start(setup)
    with torch.no_grad():
        update = transport(setup).collect(state, moment(state)).update
        assert update is not None
        setup.algorithm.server.update(state, update)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            setup.algorithm.server.update(state, update)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("method", ["fedavg", "reptile+metavd", "maml+metavd+drop"])
def test_convolutions_and_augmentation_agree(method: str) -> None:
    """Parity on pictures: convolutions, crops and flips included."""
    settings = TINY | {"source": pictures(), "partition": "iid", "model": "small-cnn", "batch": 16, "method": method}
    found = [metavd.run(device=device, **settings) for device in ("cpu", "cuda")]
    assert found[1]["test"]["nll"] == pytest.approx(found[0]["test"]["nll"], rel=1e-8)


def test_a_run_on_the_gpu_repeats_itself() -> None:
    """Law: the same run gives the same bits again."""
    settings = TINY | {"method": "reptile+metavd", "dtype": "float32", "device": "cuda"}
    assert metavd.run(**settings)["model_sha256"] == metavd.run(**settings)["model_sha256"]


def pictures(rows: int = 240) -> Source:
    """Small photographs of four kinds, augmented."""
    y = np.arange(rows) % 4
    noise = np.random.RandomState(0).randint(0, 60, (rows, 3, 16, 16))
    return arrays((noise + 40 * y[:, None, None, None]).astype(np.uint8), y, name="squares", augment=True)


PICTURES = {"clients": 6, "unseen": 2, "cohort": 4, "rounds": 4, "width": 16, "model": "small-cnn", "batch": 16,
            "local_epochs": 2, "partition": "quantity:1.0", "device": "cuda"}  # fmt: skip


@pytest.mark.parametrize("method", ["fedavg", "reptile+metavd", "maml", "perfedavg+metavd"])
def test_exact_blocks_agree_with_the_cpu(method: str) -> None:
    """Parity in float32: fused blocks, fused steps and graphs give the CPU's answers to a few thousandths."""
    settings = PICTURES | {"method": method, "source": pictures()}
    there = metavd.run(precision="exact", **settings)
    here = metavd.run(**settings | {"device": "cpu"})
    assert there["test"]["nll"] == pytest.approx(here["test"]["nll"], rel=5e-3)


@pytest.mark.parametrize("precision", ["exact", "tf32", "bf16"])
def test_pictures_repeat_themselves(precision: str) -> None:
    """Law: the same bits every time, in every precision: no kernel adds in the order in which it happens to run."""
    settings = PICTURES | {"method": "reptile+metavd", "source": pictures(), "precision": precision}
    assert metavd.run(**settings)["model_sha256"] == metavd.run(**settings)["model_sha256"]


def test_short_products_are_close() -> None:
    """Closed form: eight or ten bits of mantissa move the loss of a few rounds by some hundredths, not more."""
    found = [
        metavd.run(method="fedavg", source=pictures(), precision=precision, **PICTURES)["test"]["nll"]
        for precision in ("exact", "tf32", "bf16")
    ]
    assert found[1] == pytest.approx(found[0], rel=0.05)
    assert found[2] == pytest.approx(found[0], rel=0.10)


def test_short_products_are_as_accurate() -> None:
    """Three seeds of digits: the mean accuracy of bf16, the default, is that of exact products within the noise."""
    settings = {"clients": 20, "unseen": 5, "cohort": 8, "rounds": 40, "model": "small-cnn", "width": 16,
                "device": "cuda"}  # fmt: skip
    found = {
        precision: np.array([
            metavd.run(method="fedavg", precision=precision, seed=seed, **settings)["test"]["accuracy_pooled"]
            for seed in range(3)
        ])
        for precision in ("exact", "bf16")
    }  # fmt: skip
    noise = found["exact"].std(ddof=1)
    assert found["exact"].mean() > 0.7, "it learned"
    assert abs((found["bf16"] - found["exact"]).mean()) <= 2 * noise / np.sqrt(3) + 0.005


def test_rounds_ahead_are_the_same_rounds() -> None:
    """Law: a generator that starts the next round before it yields this one yields what single rounds give."""
    experiment = Experiment(method="reptile+metavd", options={"batch": 16, "local_epochs": 1}, **_without(PICTURES))
    setup = prepare(experiment, pictures())
    states = [state for state, _ in rounds_of(setup, start(setup))]
    one, alone, update = start(setup), transport(setup)._replace(ahead=0), server_update(setup)
    for done, ahead in enumerate(states):
        ((one, _),) = rounds(update, alone, one, done + 1, ledger_of(setup))
        assert state_hash(one) == state_hash(ahead)


def _without(settings: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in settings.items() if name not in {"batch", "local_epochs"}}


def test_graphs_of_functions() -> None:
    """Law: a captured function gives what the function gives; one that asks the device is left alone."""
    calls = []

    def function(tree: dict[str, torch.Tensor], by: torch.Tensor) -> dict[str, torch.Tensor]:
        calls.append(1)
        return {name: value * by + 1.0 for name, value in tree.items()}

    graph = captured(function)
    for size in (3, 3, 3, 5, 3, 5, 5):
        tree = {"a": torch.randn(size, device="cuda"), "b": torch.randn(2, size, device="cuda")}
        by = torch.randn((), device="cuda")
        tree["c"] = torch.randn(size, device="cuda").expand(7, size)
        found = graph(tree, by)
        assert all(torch.equal(found[name], value * by + 1.0) for name, value in tree.items())
    assert len(calls) == 2 * 3, "as it is, warm-up and capture; from then on replayed"
    asking = captured(lambda x: x * float(x.sum()))
    for _ in range(3):
        x = torch.randn(4, device="cuda")
        assert torch.equal(asking(x), x * float(x.sum()))


def test_a_cohort_that_does_not_fit_is_trained_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: memory that runs out halves the part, and the run ends where it would have ended."""
    settings = PICTURES | {"method": "fedavg", "source": pictures(), "precision": "exact"}
    whole = metavd.run(**settings)
    original = graph._train

    def scarce(algorithm: object, pool: object, state: object, who: tuple, kept: list, *, capture: bool) -> object:
        if len(who[1].steps) > 2:
            raise torch.cuda.OutOfMemoryError("not today")
        return original(algorithm, pool, state, who, kept, capture=capture)

    monkeypatch.setattr(graph, "_train", scarce)
    parts = metavd.run(**settings)
    assert parts["test"]["nll"] == pytest.approx(whole["test"]["nll"], rel=1e-3)


def test_a_thousand_clients_at_once() -> None:
    """Law: numbers of clients beyond those with a graph of their own share one, and agree with the loop."""
    y = np.arange(4000) % 4
    x = np.random.RandomState(0).randn(4000, 8).astype(np.float32) + y[:, None]
    settings = {"method": "fedavg", "source": arrays(x, y, name="rows"), "clients": 1000, "unseen": 0, "cohort": 1000,
                "rounds": 2, "width": 8, "batch": 2, "local_epochs": 1, "partition": "quantity:1.0", "dtype": "float64",
                "device": "cuda"}  # fmt: skip
    found = [metavd.run(backend=backend, **settings)["test"]["nll"] for backend in ("vmap", "loop")]
    assert found[0] == pytest.approx(found[1], rel=1e-9)
