"""Laws of the server's optimiser."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from metavd.core.optim import Adaptive, Groups, Sgd

EVERYONE = torch.arange(4)
TABLE = "server.client.embedding"


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("options", [(1.0, 0.0, 0.0), (0.9, 0.9, 0.0), (0.9, 0.6, 5e-4), (0.3, 0.0, 0.1)])
def test_sgd_is_torchs(options):
    """Rule v <- m v + g + d p, p <- p - lr v: ten steps of torch.optim.SGD without dampening or Nesterov."""
    lr, momentum, decay = options
    rule = Sgd(lr, momentum, decay)
    value, velocity = draw(3), torch.zeros(3).double()
    leaf = value.clone().requires_grad_()
    other = torch.optim.SGD([leaf], lr=lr, momentum=momentum, weight_decay=decay)
    for step in range(10):
        slope = draw(3, seed=step + 1)
        value, velocity = rule.step(value, slope, velocity)
        leaf.grad = slope.clone()
        other.step()
    assert_close(value, leaf.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.6, 0.9])
def test_momentum_under_a_constant_gradient(momentum):
    """First step v = g; after R rounds v_R = g (1 - m^R)/(1 - m), so the effective rate tends to lr/(1 - m)."""
    rule, g = Sgd(0.9, momentum), torch.tensor(2.0).double()
    value = velocity = torch.zeros(()).double()
    for round in range(1, 301):
        before = value
        value, velocity = rule.step(value, g, velocity)
        wanted = 2.0 * (1 - momentum**round) / (1 - momentum)
        assert velocity.item() == pytest.approx(wanted, rel=1e-12)
        assert (before - value).item() == pytest.approx(0.9 * wanted, rel=1e-9)
        if round == 1:
            assert velocity == g
    assert (before - value).item() == pytest.approx(0.9 * 2.0 / (1 - momentum), rel=1e-9)


def test_longest_prefix_decides():
    """A group named by a prefix takes all names that start with it, unless a longer prefix fits."""
    groups = Groups({"": Sgd(1.0), "server.": Sgd(2.0), "server.hyper.": Sgd(3.0), "fc1.logvar": Sgd(4.0)})
    rates = {"fc1.weight": 1, "fc1.logvar": 4, "server.client.x": 2, "server.hyper.0.bias": 3, "server": 1}
    assert {name: groups.rule(name).lr for name in rates} == rates


def test_groups_move_what_has_a_gradient():
    """Entries without a gradient stay, the given dictionaries too."""
    params = {"a": draw(2), "b": draw(2), "a.mask": torch.ones(2)}
    slots = {"a": torch.zeros(2).double(), "b": torch.zeros(2).double()}
    new, kept = Groups({"": Sgd(0.5, 0.9)}).step(params, {"a": torch.ones(2).double()}, slots, EVERYONE)
    assert_close(new["a"], params["a"] - 0.5)
    assert new["b"] is params["b"]
    assert new["a.mask"] is params["a.mask"]
    assert_close(kept["a"], torch.ones(2).double())
    assert (slots["a"] == 0).all()


@pytest.mark.parametrize("sparse", [True, False])
def test_rows_of_absent_clients(sparse):
    """Sparse: rows of clients that take no part neither decay nor coast. Dense, as released: they do both."""
    rule = Sgd(0.5, 0.4, 0.1)
    groups = Groups({"": rule}, sparse=sparse)
    params, slots = {TABLE: draw(4, 3)}, {TABLE: draw(4, 3, seed=1)}
    slope, cohort = torch.zeros(4, 3).double(), torch.tensor([3, 1])
    slope[cohort] = draw(2, 3, seed=2)
    new, memory = groups.step(params, {TABLE: slope}, slots, cohort)
    value, velocity = rule.step(params[TABLE], slope, slots[TABLE])
    assert_close(new[TABLE][cohort], value[cohort], rtol=0, atol=1e-14)
    assert_close(memory[TABLE][cohort], velocity[cohort], rtol=0, atol=1e-14)
    absent = torch.tensor([0, 2])
    wanted = (params[TABLE], slots[TABLE]) if sparse else (value, velocity)
    assert_close(new[TABLE][absent], wanted[0][absent], rtol=0, atol=1e-14)
    assert_close(memory[TABLE][absent], wanted[1][absent], rtol=0, atol=1e-14)


def test_sparse_concerns_owned_rows_alone():
    """Shared entries decay every round, sparse or not."""
    params = {"server.hyper.0.weight": draw(4, 3), "w": draw(4)}
    zero = {name: torch.zeros_like(value) for name, value in params.items()}
    for sparse in (True, False):
        new, _ = Groups({"": Sgd(0.5, 0.0, 0.1)}, sparse=sparse).step(params, zero, zero, torch.tensor([0]))
        assert_close(new, {name: 0.95 * value for name, value in params.items()})


def test_everyone_takes_part():
    """With the whole federation in the cohort, sparse and dense agree."""
    params, slots, slope = {TABLE: draw(4, 3)}, {TABLE: draw(4, 3, seed=1)}, {TABLE: draw(4, 3, seed=2)}
    results = [Groups({"": Sgd(0.5, 0.4, 0.1)}, sparse=s).step(params, slope, slots, EVERYONE) for s in (True, False)]
    assert_close(results[0], results[1], rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", ["adam", "yogi", "adagrad"])
def test_three_adaptive_steps_by_hand(kind):
    """Closed form: m and v in plain numbers, without a correction, v from tau^2; g^2 on both sides of Yogi's v."""
    rule = Adaptive(kind, 0.1, tau=0.5, beta1=0.8, beta2=0.9)
    value = torch.tensor(1.0).double()
    first, second = rule.begin(value)
    p, m, v = 1.0, 0.0, 0.25
    for g in (2.0, -0.3, 0.1):
        value, first, second = rule.step(value, torch.tensor(g, dtype=torch.float64), first, second)
        m = 0.8 * m + 0.2 * g
        sign = 1.0 if v > g * g else -1.0
        v = {"adam": 0.9 * v + 0.1 * g * g, "yogi": v - 0.1 * g * g * sign, "adagrad": v + g * g}[kind]
        p -= 0.1 * m / (v**0.5 + 0.5)
        assert (value.item(), first.item(), second.item()) == pytest.approx((p, m, v), rel=1e-14)


def test_adam_is_torchs_but_for_its_corrections():
    """Torch divides m by 1 - b1^t and v by 1 - b2^t: with both taken out and v from 0, ten steps are the same."""
    rule = Adaptive("adam", 0.1, tau=1e-3, beta1=0.9, beta2=0.99)
    leaf = draw(3).requires_grad_()
    other = torch.optim.Adam([leaf], lr=0.1, betas=(0.9, 0.99), eps=1e-3)
    first, second = torch.zeros(3).double(), torch.zeros(3).double()
    for step in range(1, 11):
        slope = draw(3, seed=step)
        before = leaf.detach().clone()
        leaf.grad = slope.clone()
        other.step()
        _, first, second = rule.step(before, slope, first, second)
        wanted = 0.1 * first / (1 - 0.9**step) / ((second / (1 - 0.99**step)).sqrt() + 1e-3)
        assert_close(before - leaf.detach(), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["yogi", "adagrad"])
def test_a_large_tau_leaves_the_gradient_alone(kind):
    """Limit: as tau grows, sqrt(v) stays at tau, and lr = 2 tau makes the step that of SGD(1)."""
    rule = Adaptive(kind, 2e9, tau=1e9, beta1=0.0)
    value = plain = draw(4)
    memory, velocity = rule.begin(value), torch.zeros(4).double()
    for round in range(3):
        slope = draw(4, seed=round + 1)
        value, *memory = rule.step(value, slope, *memory)
        plain, velocity = Sgd(1.0).step(plain, slope, velocity)
    assert_close(value, plain, rtol=1e-9, atol=1e-9)


def test_a_small_tau_takes_the_sign():
    """Limit: without memory and with tau near 0, Adam's step is lr sign(g), whatever the gradient's size."""
    rule = Adaptive("adam", 0.1, tau=1e-12, beta1=0.0, beta2=0.0)
    slope = torch.tensor([1e-4, -3.0, 250.0]).double()
    value, _, _ = rule.step(torch.zeros(3).double(), slope, *rule.begin(slope))
    assert_close(value, -0.1 * slope.sign(), rtol=1e-6, atol=0)


def test_adagrad_adds_up():
    """Closed form: R equal gradients g give v = tau^2 + R g^2, and steps that shrink as 1/sqrt(R)."""
    rule = Adaptive("adagrad", 1.0, tau=1e-6, beta1=0.0)
    value = torch.zeros(()).double()
    memory = rule.begin(value)
    for round in range(1, 101):
        before = value
        value, *memory = rule.step(value, torch.tensor(2.0).double(), *memory)
        assert memory[1].item() == pytest.approx(1e-12 + 4.0 * round, rel=1e-12)
        assert (before - value).item() == pytest.approx(round**-0.5, rel=1e-5)


def test_rules_of_two_kinds_in_one_server():
    """Each group remembers what its own rule needs, and rows of absent clients keep both moments."""
    rule = Adaptive("adam", 0.1)
    groups = Groups({"": Sgd(1.0, 0.5), "server.client.": rule})
    params = {"w": draw(2), TABLE: draw(4, 3)}
    slots = groups.begin(params)
    assert list(slots) == ["w", TABLE, f"{TABLE}.second"]
    slope, cohort = {"w": draw(2, seed=1), TABLE: torch.zeros(4, 3).double()}, torch.tensor([3, 1])
    slope[TABLE][cohort] = draw(2, 3, seed=2)
    new, memory = groups.step(params, slope, slots, cohort)
    wanted = rule.step(params[TABLE], slope[TABLE], *rule.begin(params[TABLE]))
    for found, whole, before in zip(
        (new[TABLE], memory[TABLE], memory[f"{TABLE}.second"]),
        wanted,
        (params[TABLE], slots[TABLE], slots[f"{TABLE}.second"]),
        strict=True,
    ):
        assert_close(found[cohort], whole[cohort], rtol=0, atol=1e-15)
        assert torch.equal(found[[0, 2]], before[[0, 2]])
    assert_close(new["w"], params["w"] - slope["w"])
    assert list(memory) == list(slots)
