"""FedOpt: Adam, Yogi and AdaGrad on the server, for every base."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rival_laws import assert_same, assert_schedules_agree, setup_of, trained
from torch import Tensor

from metavd.core import aggregate, rng, server
from metavd.core.optim import Adaptive, Groups
from metavd.core.types import Emit, Update
from metavd.engine.checkpoint import load_checkpoint, save_checkpoint, state_hash
from metavd.engine.schedule.loop import loop
from metavd.runs.setup import start
from metavd.tree import Params
from simulated import simulate

KINDS = ("adam", "yogi", "adagrad")


@pytest.mark.parametrize("kind", KINDS)
def test_three_rounds_of_one_parameter_by_hand(kind: str) -> None:
    """Closed form: two clients of 1 and 3 rows, whose weighted mean move is minus the gradient."""

    def apply(params: Params, client: Tensor, round: Tensor) -> Params:  # noqa: ARG001
        return params

    one = torch.tensor([1.0], dtype=torch.float64)
    rule = Adaptive(kind, 0.1, tau=0.01, beta1=0.9, beta2=0.99)  # type: ignore[arg-type]
    made = server.pull(Emit(lambda _: {"w": one}, apply), aggregate.mean, Groups({"": rule}))
    state = made.init(rng.key(0))
    w, m, v = 1.0, 0.0, 1e-4
    for moves in ((1.0, -2.0), (0.5, 0.5), (-3.0, 1.5)):
        sent = torch.tensor([[w], [w]], dtype=torch.float64)
        answers = sent + torch.tensor(moves, dtype=torch.float64)[:, None]
        weight = torch.tensor([1.0, 3.0], dtype=torch.float64)
        state = made.update(state, Update(torch.tensor([0, 1]), {"w": answers}, weight, {"w": sent}))
        g = -(0.25 * moves[0] + 0.75 * moves[1])
        m = 0.9 * m + 0.1 * g
        v = {
            "adam": 0.99 * v + 0.01 * g * g,
            "yogi": v - 0.01 * g * g * float(np.sign(v - g * g)),
            "adagrad": v + g * g,
        }[kind]
        w -= 0.1 * m / (v**0.5 + 0.01)
        assert state.params["w"].item() == pytest.approx(w, rel=1e-12)
        assert state.slots["w"].item() == pytest.approx(m, rel=1e-12)
        assert state.slots["w.second"].item() == pytest.approx(v, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_agree(kind: str) -> None:
    assert_schedules_agree(setup_of("fedavg", server_optimizer=kind))


@pytest.mark.parametrize("method", ["reptile", "maml", "fedrep", "ditto", "scaffold", "pfedme", "pfedgp", "fedprox"])
def test_every_base_takes_them(method: str) -> None:
    """Law: the first round's step of every weight is lr m / (sqrt(v) + tau) of what the server's SGD(1) would take."""
    cheap = {"chains": 2, "sweeps": 1} if method == "pfedgp" else {}
    options = {"adaptive_lr": 0.03, "server_tau": 0.1, "server_beta1": 0.5, "server_beta2": 0.75}
    plain, ours = (
        setup_of(method, server_lr=1.0, server_momentum=0.0, **cheap),
        setup_of(method, server_optimizer="adam", **options, **cheap),
    )
    begun = start(plain).params
    there, found = trained(plain, 1).params, trained(ours, 1).params
    for name, value in begun.items():
        g = value - there[name]
        step = 0.03 * 0.5 * g / ((0.75 * 0.01 + 0.25 * g.square()).sqrt() + 0.1)
        if not name.startswith("control."):
            torch.testing.assert_close(found[name], value - step, rtol=1e-8, atol=1e-10)


def test_sgd_is_the_default_and_has_one_memory() -> None:
    """Law: naming the default, or settings of the other rules, changes no bit."""
    plain = trained(setup_of("reptile"))
    named = trained(setup_of("reptile", server_optimizer="sgd", server_tau=0.5, server_beta2=0.1, adaptive_lr=9.0))
    assert state_hash(plain) == state_hash(named)
    assert list(plain.slots) == list(plain.params)


def test_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Law: both moments are in it: stopped after round 2, the run ends with the same bits."""
    setup = setup_of("fedavg+metavd", server_optimizer="yogi")
    straight = trained(setup, 4)
    save_checkpoint(tmp_path, trained(setup, 2), {})
    found = load_checkpoint(tmp_path)
    assert found is not None
    *_, (resumed, _) = simulate(setup.algorithm, setup.pool, loop, found[0], rounds=4, cohort=3)
    assert state_hash(resumed) == state_hash(straight)


def test_a_weight_that_nobody_was_sent_stays_with_its_moments() -> None:
    """Law: under +drop, a weight that all of a cohort dropped keeps its value and both moments."""
    setup = setup_of("fedavg+metavd+drop", server_optimizer="adam", drop_from=0, threshold=0.01)
    steps = simulate(setup.algorithm, setup.pool, loop, start(setup), rounds=4, cohort=2)
    states = [state for state, _ in steps]
    before, after = states[-2], states[-1]
    weight = next(name for name in before.params if name == "fc1.weight")
    still = after.params[weight] == before.params[weight]
    assert 0 < int(still.sum()) < still.numel()
    for slot in (weight, f"{weight}.second"):
        assert torch.equal(after.slots[slot][still], before.slots[slot][still])
    assert (after.slots[f"{weight}.second"][~still] != before.slots[f"{weight}.second"][~still]).any()


def test_adagrads_mean_gradient_is_the_last() -> None:
    """As in the paper: server_beta1 is Adam's and Yogi's."""
    one, two = (trained(setup_of("fedavg", server_optimizer="adagrad", server_beta1=b)).params for b in (0.0, 0.9))
    assert_same(one, two, 0.0)
