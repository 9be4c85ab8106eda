"""What one client does: quadratics whose answers are known, second order by hand and by autograd, padding."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.testing import assert_close

from metavd import tree
from metavd.core import local, objective, rng
from metavd.core.model import attach, from_module, xavier
from metavd.core.posterior import LogVariance
from metavd.core.types import Batch, Local, Move

A = torch.tensor([[2.0, 0.3], [0.3, 0.5]], dtype=torch.float64)
BEST = torch.tensor([1.0, -2.0], dtype=torch.float64)
START = torch.tensor([4.0, 3.0], dtype=torch.float64)


def quadratic(params, batch, anchor):  # noqa: ARG001
    """1/2 (w - best)^T A (w - best)."""
    gap = params["w"] - BEST
    return 0.5 * gap @ A @ gap


@pytest.fixture
def steps(make_batch):
    """Make T batches with seeds of their own."""
    return lambda count, **options: [make_batch(seed=i, **options) for i in range(count)]


def close(found, wanted, atol=1e-12):
    assert set(found) == set(wanted)
    for name in wanted:
        assert_close(found[name], wanted[name], rtol=0, atol=atol)


# --- sgd -----------------------------------------------------------------------------------------------------------


def test_sgd_on_a_quadratic(steps):
    """w_T - w* = (I - lr A)^T (w_0 - w*), and the reported loss is the mean over the steps, each before its update."""
    lr, T = 0.3, 7
    adapted, loss = local.sgd(quadratic, lr=lr, clip=None)({"w": START}, steps(T))
    shrink = torch.eye(2).double() - lr * A
    path = [BEST + torch.linalg.matrix_power(shrink, t) @ (START - BEST) for t in range(T + 1)]
    assert_close(adapted["w"], path[-1], rtol=0, atol=1e-12)
    assert_close(loss, torch.stack([quadratic({"w": w}, None, None) for w in path[:-1]]).mean())


def test_sgd_reaches_the_optimum(steps):
    """Enough steps end at the known optimum."""
    adapted, _ = local.sgd(quadratic, lr=0.5)({"w": START}, steps(200))
    assert_close(adapted["w"], BEST, rtol=0, atol=1e-8)


def test_sgd_clips_the_joint_gradient(steps):
    """A step longer than the limit has length lr x limit over all entries together; a shorter one is left alone."""
    received = {"a": torch.full((3,), 50.0).double(), "b": torch.full((2, 2), -80.0).double()}

    def loss(params, batch, anchor):  # noqa: ARG001
        return 0.5 * tree.squared_norm(params)

    for limit, length in ((5.0, 5.0), (None, None), (1e4, None)):
        adapted, _ = local.sgd(loss, lr=0.1, clip=limit)(received, steps(1))
        moved = tree.map(lambda a, b: (a - b) / -0.1, adapted, received)
        norm = tree.squared_norm(received).sqrt()
        scale = 1.0 if length is None else length / (norm + 1e-6)
        close(moved, tree.map(lambda value, scale=scale: value * scale, received), atol=1e-9)


def test_sgd_takes_each_batch_in_turn(net, steps):
    """Step t uses batch t, from where step t - 1 ended, and the anchor stays what was received."""
    received, batches = net.init(rng.key(0)), steps(3)
    seen = []

    def loss(params, batch, anchor):
        seen.append((batch.key, anchor["fc0.weight"]))
        return objective.cross_entropy(net)(params, batch, anchor)

    adapted, _ = local.sgd(loss, lr=0.1)(received, batches)
    one, params = local.sgd(objective.cross_entropy(net), lr=0.1), received
    for batch in batches:
        params, _ = one(params, [batch])
    close(adapted, params, atol=0)
    assert [int(key) for key, _ in seen] == [int(batch.key) for batch in batches]
    assert all(anchor is received["fc0.weight"] for _, anchor in seen)


def test_no_batch_is_no_step(net):
    """A client without rows returns what it received, with a loss of 0."""
    received = net.init(rng.key(0))
    for method in (local.sgd(quadratic, lr=1.0), local.unchanged):
        adapted, loss = method(received, [])
        close(adapted, received, atol=0)
        assert loss == 0


def test_keep_keeps(net, steps):
    """`keep` uses what was received as it is, whatever the batches."""
    received = net.init(rng.key(0))
    adapted, loss = local.unchanged(received, steps(2))
    assert adapted is received
    assert loss == 0


def test_a_step_knows_its_number(make_batch):
    """Padding in front, between and behind has no number: real steps count from 0, under vmap too."""
    received = {"w": START}

    def numbered(params, batches, received, index):  # noqa: ARG001
        return Move({}, {"w": params["w"] * 10 + index}), params["w"].new_zeros(())

    count = Local(numbered, group=2)
    real, idle = make_batch(pad=0), blank(make_batch(pad=0))
    bare = make_batch()
    wanted = count(received, [bare] * 6)[0]["w"]
    assert_close(wanted, START * 1000 + 12)
    for steps in ([real] * 6, [idle, idle, *[real] * 4, idle, idle, real, real]):
        assert torch.equal(count(received, steps)[0]["w"], wanted)
        stacked = [Batch(*(torch.stack([part] * 2) for part in each[:-1])) for each in steps]
        assert torch.equal(vmap(count)(tree.stack([received] * 2), stacked)[0]["w"][1], wanted)


def test_a_stage_begins_and_ends(make_batch):
    """`init` comes before the first step, `final` after the last, also where there is no step at all."""
    stage = replace(
        local.sgd(quadratic, lr=0.1),
        init=lambda params: params | {"w": params["w"] + 1},
        final=lambda params: params | {"end": -params["w"]},
    )
    plain, _ = local.sgd(quadratic, lr=0.1)({"w": START + 1}, [make_batch()])
    found, _ = stage({"w": START}, [make_batch()])
    close(found, plain | {"end": -plain["w"]}, atol=0)
    close(stage({"w": START}, [])[0], {"w": START + 1, "end": -START - 1}, atol=0)


def test_masks_never_move(net, steps):
    """A mask gets no step from any method, though noise and KL depend on it, and holds its weights where they are."""
    inner, outer, received = variational(net)
    mask = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0, 1.0]] * 3).double()
    received = received | {"fc1.mask": mask}
    for method in METHODS.values():
        adapted, _ = method(inner, outer)(received, steps(3))
        assert torch.equal(adapted["fc1.mask"], mask)
        assert torch.equal(adapted["fc1.weight"] == received["fc1.weight"], mask == 0)
        assert torch.equal(adapted["fc1.logvar"] == received["fc1.logvar"], mask == 0)


def test_proximal_weight_zero_is_sgd(net, steps):
    """A weight mu = 0 removes the pull to the anchor, bit for bit."""
    received, loss = net.init(rng.key(0)), objective.cross_entropy(net)
    plain, _ = local.sgd(loss, lr=0.1)(received, steps(4))
    with_term, _ = local.sgd(objective.total(loss, objective.proximal(0.0)), lr=0.1)(received, steps(4))
    close(with_term, plain, atol=0)


def test_proximal_on_a_quadratic_stops_between(steps):
    """FedProx's optimum of a quadratic client is (A + mu I)^-1 (A w* + mu w_received)."""
    mu = 0.4
    loss = objective.total(quadratic, objective.proximal(mu))
    adapted, _ = local.sgd(loss, lr=0.4)({"w": START}, steps(200))
    assert_close(adapted["w"], torch.linalg.solve(A + mu * torch.eye(2).double(), A @ BEST + mu * START))


# --- padding -------------------------------------------------------------------------------------------------------


def variational(net):
    """A noisy objective with a KL, and what a client receives for it."""
    noise = LogVariance(("fc1",), offset=-3.0)
    model = attach(net, noise)
    loss = objective.cross_entropy(model, 2)
    both = objective.total(loss, objective.divergence(noise, torch.ones_like))
    return loss, both, net.init(rng.key(0)) | {"fc1.logvar": torch.full((3, 6), 0.1).double()}


METHODS = {
    "sgd": lambda _, outer: local.sgd(outer, lr=0.1),
    "maml": lambda inner, outer: local.maml(inner, outer, lr=0.1, outer_lr=0.2, frozen=("logvar",)),
    **{
        f"hf_maml {product}": lambda inner, outer, product=product: local.hf_maml(
            inner, outer, lr=0.1, outer_lr=0.2, frozen=("logvar",), product=product
        )
        for product in ("exact", "difference", "released")
    },
}  # fmt: skip


def blank(batch: Batch) -> Batch:
    """A step that is padding alone, with rows that would do harm."""
    return batch._replace(mask=torch.zeros_like(batch.mask), x=torch.full_like(batch.x, 5.0))


@pytest.mark.parametrize("name", METHODS)
def test_padding_changes_nothing(net, make_batch, name):
    """Padded rows and padded steps, with noise and KL, change neither the answer nor the reported loss by 1e-12."""
    inner, outer, received = variational(net)
    method = METHODS[name](inner, outer)
    rows = [5, 4, 3, 5, 2, 4]
    bare = [make_batch(n, seed=i) for i, n in enumerate(rows)]
    padded = [make_batch(n, seed=i, pad=9 - n) for i, n in enumerate(rows)]
    idle = [blank(batch) for batch in padded[:3]]
    wanted, loss = method(received, bare)
    # A difference quotient divides what rounding does to gradients by 2e-4.
    atol = 1e-12 if name not in {"hf_maml difference", "hf_maml released"} else 1e-10
    for batches in (padded, padded + idle, padded[:3] + idle + padded[3:]):
        found, same = method(received, batches)
        close(found, wanted, atol=atol)
        assert_close(same, loss, rtol=0, atol=1e-12)
    found, nothing = method(received, idle)
    close(found, received, atol=0)
    assert nothing == 0


@pytest.mark.parametrize("name", METHODS)
def test_vmap_is_the_loop(net, make_batch, name):
    """Stacked clients, one of them with padded steps, get under vmap what each gets alone."""
    inner, outer, received = variational(net)
    method = METHODS[name](inner, outer)
    clients = [[make_batch(4, seed=10 * c + i, pad=1) for i in range(6)] for c in range(3)]
    clients[1][3:] = [blank(batch) for batch in clients[1][3:]]
    starts = [tree.map(lambda value, c=c: (1.0 + 0.1 * c) * value, received) for c in range(3)]
    told = [[batch[:-1] for batch in each] for each in clients]
    stacked = [Batch(*(torch.stack(parts) for parts in zip(*step, strict=True))) for step in zip(*told, strict=True)]
    found, losses = vmap(method, randomness="error")(tree.stack(starts), stacked)
    atol = 1e-12 if name not in {"hf_maml difference", "hf_maml released"} else 1e-9
    for c in range(3):
        wanted, loss = method(starts[c], clients[c])
        close(tree.unstack(found, c), wanted, atol=atol)
        assert_close(losses[c], loss, rtol=0, atol=1e-12)


# --- maml ----------------------------------------------------------------------------------------------------------

SUPPORT, QUERY = (1.7, -0.4), (0.8, 2.5)
"""Curvature and optimum of two scalar quadratics."""


def scalar(curvature, best):
    def loss(params, batch, anchor):  # noqa: ARG001
        return 0.5 * curvature * (params["w"] - best).square().sum()

    return loss


@pytest.mark.parametrize("clip", [None, 1e3])
def test_maml_on_scalar_quadratics(steps, clip):
    """d/dw L_q(w - lr L_s'(w)) = (1 - lr a) b (w' - q), by hand; a clip that does not act changes nothing."""
    (a, s), (b, q), lr, outer, w = SUPPORT, QUERY, 0.3, 0.25, 3.0
    method = local.maml(scalar(a, s), scalar(b, q), lr=lr, outer_lr=outer, clip=clip, inner_clip=clip)
    found, loss = method({"w": torch.tensor([w]).double()}, steps(3))
    shifted = w - lr * a * (w - s)
    assert found["w"].item() == pytest.approx(w - outer * (1 - lr * a) * b * (shifted - q), abs=1e-12)
    assert loss.item() == pytest.approx(0.5 * b * (shifted - q) ** 2, abs=1e-12)


def test_maml_sees_the_support_loss_curvature(steps):
    """A cubic support loss a w^3 / 3: the slope is (1 - 2 lr a w) b (w' - q), which first-order MAML would miss."""
    a, (b, q), lr, outer, w = 0.6, QUERY, 0.3, 0.25, 1.5

    def cubic(params, batch, anchor):  # noqa: ARG001
        return (a * params["w"] ** 3 / 3).sum()

    method = local.maml(cubic, scalar(b, q), lr=lr, outer_lr=outer, clip=None, inner_clip=None)
    found, _ = method({"w": torch.tensor([w]).double()}, steps(3))
    shifted = w - lr * a * w**2
    assert found["w"].item() == pytest.approx(w - outer * (1 - 2 * lr * a * w) * b * (shifted - q), abs=1e-12)


def test_maml_differentiates_the_inner_clip(steps):
    """An active inner clip makes the step lr L g/(|g| + e), so d w'/dw = 1 - lr a L e/(|g| + e)^2, by hand."""
    (a, s), (b, q), lr, outer, w, limit, eps = SUPPORT, QUERY, 0.3, 0.25, 3.0, 0.5, 1e-6
    method = local.maml(scalar(a, s), scalar(b, q), lr=lr, outer_lr=outer, clip=None, inner_clip=limit)
    found, _ = method({"w": torch.tensor([w]).double()}, steps(3))
    slope = a * (w - s)
    shifted = w - lr * slope * limit / (slope + eps)
    chain = 1 - lr * a * limit * eps / (slope + eps) ** 2
    assert found["w"].item() == pytest.approx(w - outer * chain * b * (shifted - q), abs=1e-12)


def test_maml_clips_the_outer_gradient(steps):
    """The meta step has length outer_lr x clip where the meta gradient is longer."""
    method = local.maml(scalar(1.0, 0.0), scalar(1.0, 0.0), lr=0.1, outer_lr=0.2, clip=0.5)
    found, _ = method({"w": torch.tensor([100.0]).double()}, steps(3))
    assert found["w"].item() == pytest.approx(100.0 - 0.2 * 0.5, abs=1e-6)


def test_frozen_entries_wait_for_the_outer_step(steps):
    """L_s = a/2 (w + v)^2, L_q = b/2 (w + c v)^2, v frozen: slopes b r (1 - lr a) and b r (c - lr a), r = w' + c v."""
    a, b, c, lr, outer, w, v = 1.7, 0.8, 0.5, 0.3, 0.25, 3.0, -1.2

    def support(params, batch, anchor):  # noqa: ARG001
        return 0.5 * a * (params["w"] + params["x.logvar"]).square()

    def query(params, batch, anchor):  # noqa: ARG001
        return 0.5 * b * (params["w"] + c * params["x.logvar"]).square()

    received = {"w": torch.tensor(w).double(), "x.logvar": torch.tensor(v).double()}
    method = local.maml(support, query, lr=lr, outer_lr=outer, clip=None, inner_clip=None, frozen=("logvar",))
    found, _ = method(received, steps(3))
    rest = w - lr * a * (w + v) + c * v
    assert found["w"].item() == pytest.approx(w - outer * b * rest * (1 - lr * a), abs=1e-6)
    assert found["x.logvar"].item() == pytest.approx(v - outer * b * rest * (c - lr * a), abs=1e-6)
    # Hessian-free: g = grad L_q(w'), then g - lr H_q g with H_q = b [1 c; c c^2], all entries moving.
    method = local.hf_maml(support, query, lr=lr, outer_lr=outer, clip=None, frozen=("logvar",))
    found, _ = method(received, steps(3))
    g = (b * rest, b * c * rest)
    curved = b * (g[0] + c * g[1])
    assert found["w"].item() == pytest.approx(w - outer * (g[0] - lr * curved), abs=1e-6)
    assert found["x.logvar"].item() == pytest.approx(v - outer * (g[1] - lr * c * curved), abs=1e-6)


def autograd_maml(inner, outer, received, batches, *, lr, outer_lr, limit, frozen):
    """MAML once more, with torch.autograd and create_graph instead of torch.func."""
    leaves = {name: value.clone().requires_grad_() for name, value in received.items()}
    free = [name for name in leaves if not name.endswith(frozen)]
    support, *queries = batches
    slopes = torch.autograd.grad(inner(leaves, support, received), [leaves[n] for n in free], create_graph=True)
    norm = torch.sqrt(sum(slope.square().sum() for slope in slopes))
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    shifted = leaves | {n: leaves[n] - lr * scale * slope for n, slope in zip(free, slopes, strict=True)}
    rows = [len(batch.y) for batch in queries]
    losses = [outer(shifted, batch, received) for batch in queries]
    loss = sum(n * value for n, value in zip(rows, losses, strict=True)) / sum(rows)
    slopes = torch.autograd.grad(loss, list(leaves.values()))
    norm = torch.sqrt(sum(slope.square().sum() for slope in slopes))
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    moved = zip(leaves.items(), slopes, strict=True)
    return {name: (value - outer_lr * scale * slope).detach() for (name, value), slope in moved}, loss.detach()


@pytest.mark.parametrize("limit", [100.0, 0.3])
def test_maml_is_second_order_autograd(net, make_batch, limit):
    """On a noisy net, with and without active clips, ragged query batches: equal to create_graph=True."""
    inner, outer, received = variational(net)
    batches = [make_batch(n, seed=i) for i, n in enumerate((5, 4, 7))]
    options = {"lr": 0.3, "outer_lr": 0.2}
    wanted, loss = autograd_maml(inner, outer, received, batches, limit=limit, frozen="logvar", **options)
    method = local.maml(inner, outer, clip=limit, inner_clip=limit, frozen=("logvar",), **options)
    found, same = method(received, batches)
    close(found, wanted, atol=1e-12)
    assert_close(same, loss, rtol=0, atol=1e-12)


def test_maml_queries_weigh_by_rows(make_batch):
    """Two query batches of 1 and 3 rows count 1 : 3, as the concatenated batch would."""

    def mean_of_rows(params, batch, anchor):  # noqa: ARG001
        return params["w"] * batch.x.mean()

    batches = [make_batch(2, seed=0, shape=()), make_batch(1, seed=1, shape=()), make_batch(3, seed=2, shape=())]
    method = local.maml(mean_of_rows, mean_of_rows, lr=0.0, outer_lr=1.0, clip=None, inner_clip=None)
    found, _ = method({"w": torch.zeros(()).double()}, batches)
    assert_close(found["w"], -torch.cat([batches[1].x, batches[2].x]).mean())


# --- Hessian-free maml ---------------------------------------------------------------------------------------------


def test_hessian_product_is_exact_on_a_quadratic():
    """H v = A v, and the Hessian of a sum of fourth powers is 12 w^2."""
    v = torch.tensor([0.3, -5.0]).double()
    found = local.hessian_product(lambda p: quadratic(p, None, None), {"w": START}, {"w": v})
    assert_close(found["w"], A @ v, rtol=0, atol=1e-12)
    found = local.hessian_product(lambda p: p["w"].pow(4).sum(), {"w": START}, {"w": v})
    assert_close(found["w"], 12 * START.square() * v, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("product", "share", "atol"), [("exact", 1.0, 1e-12), ("difference", 1.0, 1e-9),
                                                        ("released", 0.5, 1e-9)])  # fmt: skip
def test_hf_maml_on_a_quadratic(steps, product, share, atol):
    """Ends at w - outer_lr (g - lr s A g), g = A (w' - w*), w' = w - lr A (w - w*): s = 1, but 1/2 as released."""
    lr, outer = 0.3, 0.25
    method = local.hf_maml(quadratic, quadratic, lr=lr, outer_lr=outer, clip=None, product=product)
    found, loss = method({"w": START}, steps(3))
    g = A @ (START - lr * A @ (START - BEST) - BEST)
    assert_close(found["w"], START - outer * (g - lr * share * A @ g), rtol=0, atol=atol)
    assert_close(loss, quadratic({"w": START - lr * A @ (START - BEST)}, None, None))


@pytest.mark.parametrize("product", ["exact", "difference"])
@pytest.mark.parametrize("trust", [0.0, 0.2, 0.9, 3.0])
def test_trust_bounds_the_curvature_term(steps, product, trust):
    """The term lr H g is shortened to trust |g| where it is longer: by hand on a quadratic with lr A up to 1.5."""
    lr, outer = 0.75, 0.25
    g = A @ (START - lr * A @ (START - BEST) - BEST)
    curved = lr * A @ g
    scale = min(1.0, (trust * g.norm() / curved.norm()).item())
    assert (scale < 1) == (trust < 1)
    method = local.hf_maml(quadratic, quadratic, lr=lr, outer_lr=outer, clip=None, product=product, trust=trust)
    found, _ = method({"w": START}, steps(3))
    assert_close(found["w"], START - outer * (g - scale * curved), rtol=0, atol=1e-9)
    if trust < 1:
        assert g @ (START - found["w"]) > 0


def three_gradients(inner, outer, received, batches, *, lr=0.1, limit):
    """Return g at the shifted point and H g at the old one, by autograd."""
    leaves = {name: value.clone().requires_grad_() for name, value in received.items()}
    names = list(leaves)
    free = [name for name in names if name != "fc1.logvar"]
    slopes = torch.autograd.grad(inner(leaves, batches[0], received), [leaves[name] for name in free])
    norm = torch.sqrt(sum(slope.square().sum() for slope in slopes))
    scale = min(1.0, limit / (norm.item() + 1e-6))
    shifted = leaves | {name: leaves[name] - lr * scale * slope for name, slope in zip(free, slopes, strict=True)}
    g = torch.autograd.grad(outer(shifted, batches[1], received), list(shifted.values()))
    slopes = torch.autograd.grad(outer(leaves, batches[2], received), list(leaves.values()), create_graph=True)
    dot = sum((a * b.detach()).sum() for a, b in zip(slopes, g, strict=True))
    curved = torch.autograd.grad(dot, list(leaves.values()))
    return dict(zip(names, g, strict=True)), dict(zip(names, curved, strict=True))


@pytest.fixture
def smooth():
    """A network without kinks, which a difference quotient would notice."""
    layers = OrderedDict(fc0=nn.Linear(4, 6), a=nn.Tanh(), fc1=nn.Linear(6, 3), b=nn.Tanh(), fc2=nn.Linear(3, 3))
    return from_module(nn.Sequential(layers).double(), init=xavier)


@pytest.mark.parametrize("limit", [100.0, 0.3])
@pytest.mark.parametrize("product", ["exact", "difference"])
def test_hf_maml_follows_its_formula(smooth, make_batch, limit, product):
    """On a noisy net: w - outer_lr clip(g - lr H g), one clip after combining; exact and difference agree."""
    loss, both, received = variational(smooth)
    batches = [make_batch(n, seed=i) for i, n in enumerate((5, 4, 7))]
    outer = both if product == "exact" else loss
    g, curved = three_gradients(loss, outer, received, batches, limit=limit)
    wanted = tree.axpy(-0.2, tree.clip(tree.axpy(-0.1, curved, g), limit), received)
    method = local.hf_maml(loss, outer, lr=0.1, outer_lr=0.2, clip=limit, frozen=("logvar",), product=product)
    close(method(received, batches)[0], wanted, atol=1e-12 if product == "exact" else 1e-9)


def test_products_differ_by_what_the_kl_holds_fixed(smooth, make_batch):
    """The KL holds theta fixed, also in H; a difference still moves theta: by -theta s^2 / (theta^2 + s^2)^2 g / K."""
    loss, both, received = variational(smooth)
    batches = [make_batch(n, seed=i) for i, n in enumerate((5, 4, 7))]
    g, _ = three_gradients(loss, both, received, batches, limit=1e9)
    answers = [
        local.hf_maml(loss, both, lr=0.1, outer_lr=0.2, clip=1e9, frozen=("logvar",), product=product)(
            received, batches
        )[0]
        for product in ("difference", "exact")
    ]
    theta, sigma2 = received["fc1.weight"], (received["fc1.logvar"] - 3.0).exp()
    gap = -theta * sigma2 / (theta.square() + sigma2).square() * g["fc1.weight"] / theta.numel()
    found = tree.map(torch.sub, *answers)
    assert_close(found.pop("fc1.logvar"), 0.2 * 0.1 * gap, rtol=1e-5, atol=1e-10)
    assert all(value.abs().max() < 1e-9 for value in found.values())


def test_released_product_draws_anew_and_clips_apart(net, make_batch):
    """Released: (grad(w + d g; key) - grad(w; another key)) / 2d, large from noise, and g and H g clipped apart."""
    inner, outer, received = variational(net)
    batches = [make_batch(n, seed=i) for i, n in enumerate((5, 4, 7))]
    delta, limit = 1e-4, 0.4
    g, _ = three_gradients(inner, outer, received, batches, limit=limit)

    def slope(point, batch):
        leaves = {name: value.clone().requires_grad_() for name, value in point.items()}
        return dict(
            zip(leaves, torch.autograd.grad(outer(leaves, batch, received), list(leaves.values())), strict=True)
        )

    other = batches[2]._replace(key=rng.fold(batches[2].key, 1))
    ahead, here = slope(tree.axpy(delta, g, received), batches[2]), slope(received, other)
    noisy = tree.map(lambda a, b: (a - b) / (2 * delta), ahead, here)
    assert tree.squared_norm(noisy).sqrt() > 100
    wanted = tree.axpy(-0.2, tree.axpy(-0.1, tree.clip(noisy, limit), tree.clip(g, limit)), received)
    method = local.hf_maml(
        inner, outer, lr=0.1, outer_lr=0.2, clip=limit, frozen=("logvar",), product="released", delta=delta
    )
    close(method(received, batches)[0], wanted, atol=1e-9)


def test_entries_that_the_loss_does_not_use_stay(steps):
    """A parameter that no loss reads (a spare layer of a user's module) has slope and curvature 0, and stays."""
    received = {"w": START, "spare": torch.ones(2).double()}
    methods = [local.sgd(quadratic, lr=0.1), local.maml(quadratic, quadratic, lr=0.1, outer_lr=0.1)]
    methods += [local.hf_maml(quadratic, quadratic, lr=0.1, outer_lr=0.1, product=p) for p in ("exact", "difference")]
    for method in methods:
        found, _ = method(received, steps(3))
        assert torch.equal(found["spare"], received["spare"])
        assert (found["w"] != START).all()


def linear_in_v(params, batch, anchor):
    """A loss whose gradient by "v" is constant."""
    return quadratic(params, batch, anchor) + params["v"] @ BEST


def run_linear(start, batches):
    method = local.hf_maml(linear_in_v, linear_in_v, lr=0.1, outer_lr=0.5, clip=None)
    return method({"w": start, "v": start}, batches)[0]["v"]


def test_curvature_of_a_linear_part_is_zero(steps):
    """Where the gradient is constant, Hessian-free MAML is plain descent, here under vmap."""
    batches, starts = steps(3), torch.stack([START, -START])
    assert_close(vmap(lambda start: run_linear(start, batches))(starts), starts - 0.5 * BEST)


def test_curvature_of_a_linear_part_is_zero_in_a_loop(steps):
    """The same for one client alone."""
    assert_close(run_linear(START, steps(3)), START - 0.5 * BEST)


@pytest.mark.parametrize("name", METHODS)
def test_gradient_mode_does_not_matter(net, make_batch, name):
    """Engines run under no_grad: the answers are the same bits with and without it, and carry no graph."""
    inner, outer, received = variational(net)
    method = METHODS[name](inner, outer)
    batches = [make_batch(4, seed=i) for i in range(3)]
    with torch.no_grad():
        quiet, loss = method(received, batches)
    loud, same = method(received, batches)
    close(loud, quiet, atol=0)
    assert same == loss
    assert not any(value.requires_grad for value in (*quiet.values(), *loud.values(), loss, same))


# --- SNIP as released ------------------------------------------------------------------------------------------------


def test_keep_holds_weights_after_the_clip(steps):
    """An entry "keep" stops pruned weights, but the clip still counts their gradients (section 14, point 1)."""
    received = {"fc.weight": torch.tensor([3.0, 4.0]).double(), "fc.keep": torch.tensor([1.0, 0.0]).double()}

    def loss(params, batch, anchor):  # noqa: ARG001
        return 0.5 * params["fc.weight"].square().sum() + params["fc.keep"].sum()

    found, _ = local.sgd(loss, lr=0.1, clip=1.0)(received, steps(1))
    assert found["fc.weight"].tolist() == pytest.approx([3.0 - 0.1 * 3.0 / 5.000001, 4.0], abs=1e-12)
    assert torch.equal(found["fc.keep"], received["fc.keep"])
    for method in (local.maml(loss, loss, lr=0.1, outer_lr=0.2), local.hf_maml(loss, loss, lr=0.1, outer_lr=0.2)):
        found, _ = method(received, steps(3))
        assert found["fc.weight"][1] == 4.0
        assert found["fc.weight"][0] != 3.0
        assert torch.equal(found["fc.keep"], received["fc.keep"])
