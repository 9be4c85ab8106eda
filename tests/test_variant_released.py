"""What options change: the released code's preset with its known consequences, and each option by itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.func import vmap
from torch.nn import functional
from torch.testing import assert_close

from metavd import methods, tree
from metavd.core import aggregate, emit, local, objective, rng, server
from metavd.core.model import attach, from_module, reset, xavier
from metavd.core.optim import Groups, Sgd
from metavd.core.posterior import InputLogAlpha, logit
from metavd.core.types import NEW, Update
from metavd.errors import SpecError
from metavd.methods.fedbe import FedBEOptions
from metavd.models.cnn import cnn
from metavd.models.mlp import mlp
from metavd.models.small_cnn import small_cnn

COHORT = torch.tensor([2, 0])
SIZES = torch.tensor([30.0, 10.0]).double()
SMALL = {"hyper_width": 5, "embedding": 3}
ENTRY = "fc1.logvar"


@pytest.fixture
def build(net, setting):
    """Make a method on the tiny network, and its first state; options that the method lacks are left out."""

    def make(name, model=net, **options):
        known = methods.options_of(name)
        small = {key: value for key, value in SMALL.items() if key in known}
        algorithm = methods.algorithm(name, model, setting, small | options)
        return algorithm, algorithm.server.init(rng.key(0))

    return make


def received(algorithm, state, number=0):
    return algorithm.emit.apply(state.params, torch.tensor(number), state.round)


def answers(algorithm, state, shift=0.0, cohort=COHORT, sizes=SIZES):
    """The cohort returns what it received, every trained entry shifted."""
    sent = vmap(algorithm.emit.apply, (None, 0, None))(state.params, cohort, state.round)
    back = {n: v if n.endswith(("mask", "keep")) else v + shift for n, v in sent.items()}
    return Update(cohort, back, sizes, sent)


def same(found, wanted, atol=1e-12):
    assert set(found) == set(wanted)
    for name in wanted:
        assert_close(found[name], wanted[name], rtol=0, atol=atol)


def dark(state, name="server.hyper.3.bias", value=-3.0):
    """Push half of the hypernetwork's outputs below its start."""
    bias = state.params[name].clone()
    bias[::2] += value
    bias[1::2] -= value
    return state._replace(params=state.params | {name: bias})


# --- the preset ----------------------------------------------------------------------------------------------------

PRESET = {
    "clamp": "released", "floor": -8.5, "kl_epsilon": "variance", "test_beta": "last", "test_noise": "constant",
    "predict": "draws", "samples": 3, "average": "logits",
    "spread_decay": 5e-4, "owned": "share", "owned_decay": "dense", "meta_batches": "independent",
    "product": "released", "saliency": "released", "dropped": "released", "temperature": 1.0, "distill_lr": 0.9,
    "beta": 10.0,
}  # fmt: skip
STATED = {"beta": 10.0}


@pytest.mark.parametrize("name", methods.NAMES)
def test_preset(name):
    """The variant sets those of its options that a method has, changes nothing else, and gives way to what is given."""
    plain, released = methods.resolve(name), methods.resolve(name, {"variant": "released"})
    wanted = {key: PRESET.get(key, value) for key, value in plain.items()}
    assert released == wanted | {"variant": "released"}
    assert plain["variant"] == "default"
    for key in PRESET.keys() & plain.keys():
        assert plain[key] != PRESET[key], key
        given = methods.resolve(name, {"variant": "released", key: plain[key]})
        assert given == released | {key: plain[key]}


def test_preset_is_complete():
    """The released rules and the paper's values are exactly these, each of an option that some method has."""
    everywhere = [option for name in methods.NAMES for option in methods.options_of(name).values()]
    assert {option.name: option.presets["released"] for option in everywhere if option.presets} == PRESET
    for option in everywhere:
        presets = {"released": PRESET, "paper": STATED}
        wanted = {variant: values[option.name] for variant, values in presets.items() if option.name in values}
        assert dict(option.presets) == wanted


def test_the_papers_values_are_another_preset():
    """variant=paper changes its values alone, and gives way to what is given."""
    plain, paper = (methods.resolve("maml+metavd", {"variant": variant}) for variant in ("default", "paper"))
    assert paper == plain | STATED | {"variant": "paper"}
    assert methods.resolve("maml+metavd", {"variant": "paper", "beta": 3.0}) == paper | {"beta": 3.0}


@pytest.mark.parametrize("variant", ["default", "released"])
def test_server_rates(variant):
    """Section 5's table: FedAvg 1 / 0, the meta family 0.9 / 0.9, hypernetwork 0.9 / 0.6 / 5e-4, embeddings 0.3."""
    for base, wanted in (("fedavg", (1.0, 0.0)), ("fedprox", (1.0, 0.0)), ("fedbe", (1.0, 0.0)),
                         ("reptile", (0.9, 0.9)), ("maml", (0.9, 0.9)), ("perfedavg", (0.9, 0.9))):  # fmt: skip
        o = methods.resolve(base, {"variant": variant})
        assert (o["server_lr"], o["server_momentum"]) == wanted
    o = methods.resolve("fedavg+metavd", {"variant": variant})
    assert (o["server_lr"], o["server_momentum"]) == (1.0, 0.0)
    assert (o["hyper_lr"], o["hyper_momentum"], o["hyper_decay"]) == (0.9, 0.6, 5e-4)
    assert (o["embed_lr"], o["embed_momentum"], o["embed_decay"]) == (0.9, 0.3, 5e-4)
    o = methods.resolve("reptile+vd", {"variant": variant})
    assert (o["spread_lr"], o["spread_momentum"]) == (0.9, 0.6)
    assert o["spread_decay"] == (5e-4 if variant == "released" else 0.0)


# --- dead zone -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reptile+metavd", "fedavg+metavd", "maml+metavd", "perfedavg+metavd"])
def test_dead_zone(build, make_batch, name):
    """Released: a lambda below -8.5 gets no gradient, is counted, and never moves; by default every one moves."""
    batches = [make_batch(8, seed=i, round=50.0) for i in range(3)]
    for variant in ("released", "default"):
        algorithm, state = build(name, variant=variant)
        state = dark(state)
        sent = received(algorithm, state)
        adapted, _ = algorithm.local(sent, batches)
        below = sent[ENTRY] + algorithm.posterior.offset < -8.5
        assert 0.2 < below.double().mean() < 0.8
        counted = algorithm.posterior.stuck("", sent[ENTRY])
        moved = adapted[ENTRY] != sent[ENTRY]
        if variant == "released":
            assert torch.equal(counted, below)
            assert torch.equal(moved, ~below)
        else:
            assert not counted.any()
            assert moved.all()


def test_dead_zone_is_for_ever(build):
    """Released, the hypernetwork gets no signal for dead spreads; by default it is pulled out of the deep."""
    last = "server.hyper.3.bias"
    for variant, still in (("released", True), ("default", False)):
        algorithm, state = build("fedavg+metavd", variant=variant, hyper_decay=0.0, hyper_momentum=0.0, draws=1)
        state = dark(state)
        batch = [_batch()]
        sent = vmap(algorithm.emit.apply, (None, 0, None))(state.params, COHORT, state.round)
        back = tree.stack([algorithm.local(tree.unstack(sent, i), batch)[0] for i in range(2)])
        new = algorithm.server.update(state, Update(COHORT, back, SIZES, sent))
        low = state.params[last] < -1.0
        assert low.any()
        assert (new.params[last][low] == state.params[last][low]).all() == still
        assert (new.params[last][~low] != state.params[last][~low]).all()


def _batch(rows=8, seed=0):
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=source, dtype=torch.float64)
    y = torch.randint(0, 3, (rows,), generator=source)
    numbers = torch.tensor([50.0, float(rows)]).double()
    return local.Batch(x, y, None, rng.key(seed), *numbers)


def test_lambda_ranges(build):
    """Sent in [-17, 0] by both; used in [-17, 0] by default, in [-8.5, 0] as released, whose dead zone is the rest."""
    for variant, floor in (("default", -17.0), ("released", -8.5)):
        algorithm, state = build("reptile+metavd", variant=variant)
        weight = state.params["server.hyper.3.weight"]
        state = state._replace(params=state.params | {"server.hyper.3.weight": 1e5 * weight})
        sent = received(algorithm, state)
        value = sent[ENTRY] + algorithm.posterior.offset
        assert (value.min().item(), value.max().item()) == pytest.approx((-17.0, 0.0), abs=1e-6)
        used = algorithm.posterior.spread(sent, "fc1")
        assert (used.min().item(), used.max().item()) == pytest.approx((floor, 0.0), abs=1e-6)


# --- weight decay --------------------------------------------------------------------------------------------------


def test_weight_decay_alone_makes_noise():
    """Released VD: lr 0.9, momentum 0.6, decay 5e-4 move lambda from -8.5 to -7.19, -4.85, -2.76 without any data."""
    o = methods.resolve("reptile+vd", {"variant": "released"})
    rule = Sgd(o["spread_lr"], o["spread_momentum"], o["spread_decay"])
    value, velocity = torch.tensor(-8.5).double(), torch.zeros(()).double()
    path = [value]
    for _ in range(1000):
        value, velocity = rule.step(value, torch.zeros(()).double(), velocity)
        path.append(value)
    assert [round(path[r].item(), 2) for r in (150, 500, 1000)] == [-7.19, -4.85, -2.76]


@pytest.mark.parametrize("name", ["reptile+vd", "reptile+ensemblevd"])
def test_weight_decay_in_the_method(build, name):
    """150 rounds in which no client changes anything: released VD and EnsembleVD drift to -7.19, absent rows too."""
    for variant, wanted in (("released", -7.19), ("default", -8.5)):
        algorithm, state = build(name, variant=variant)
        for _ in range(150):
            state = algorithm.server.update(state, answers(algorithm, state))
        for number in (0, 1, NEW):
            value = received(algorithm, state, number)[ENTRY] + algorithm.posterior.offset
            assert_close(value, torch.full((3, 6), wanted).double(), rtol=0, atol=0.005)


def test_embeddings_decay_every_round_as_released(build):
    """MetaVD: embeddings of absent clients shrink by lr x decay as released, and rest by default."""
    name, absent = "server.client.embedding", [1, 3]
    for variant, factor in (("released", 1 - 0.9 * 5e-4), ("default", 1.0)):
        algorithm, state = build("reptile+metavd", variant=variant)
        new = algorithm.server.update(state, answers(algorithm, state, 0.1))
        assert_close(new.params[name][absent], factor * state.params[name][absent], rtol=1e-12, atol=0)


def test_owned_rows_take_their_share_as_released(build):
    """EnsembleVD: a client's own lambda takes lr x its step, times its data share as released (0.9 x 3/4 and 1/4)."""
    rows = "server.client." + ENTRY
    for variant, shares in (("released", [0.75, 0.25]), ("default", [1.0, 1.0])):
        algorithm, state = build("reptile+ensemblevd", variant=variant, spread_decay=0.0)
        new = algorithm.server.update(state, answers(algorithm, state, 0.1))
        moved = (new.params[rows] - state.params[rows])[COHORT]
        wanted = 0.9 * 0.1 * torch.tensor(shares).double()
        assert_close(moved, wanted[:, None, None].expand(2, 3, 6), rtol=1e-9, atol=0)


# --- evaluation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg+metavd", "reptile+metavd", "maml+metavd", "reptile+ensemblevd"])
def test_released_evaluation_is_a_constant_and_three_draws(build, make_batch, name):
    """Known and unseen clients alike: lambda = -8.5 everywhere, then softmax of the mean of 3 logit draws."""
    algorithm, state = build(name, variant="released")
    learned = "server.hyper.3.bias" if "metavd" in name else "server.client." + ENTRY
    state.params[learned] = state.params[learned] + 1.5
    known = algorithm.serve(state.params, torch.tensor(1), state.round)
    unseen = algorithm.admit(state.params, state.round, [])
    for own in (known, unseen):
        assert_close(algorithm.posterior.spread(own, "fc1"), torch.full((3, 6), -8.5).double())
        assert torch.equal(own["fc1.weight"], state.params["fc1.weight"])
    model = attach(from_module(_module(), init=xavier), algorithm.posterior)
    x, key = make_batch(6).x, rng.key(7)
    wanted = model.apply(known, x, rng.split(key, 3)).mean(0).softmax(-1)
    assert_close(algorithm.predict(known, x, key).probs, wanted, rtol=0, atol=1e-12)


def _module():
    return mlp((4,), 3, width=6).double()


def test_default_evaluation_is_the_clients_own_posterior_mean(build, make_batch):
    """Our rule: the client's own lambda is served, the mean embedding's to the unseen, and theta answers."""
    algorithm, state = build("reptile+metavd")
    state = dark(state)
    known = algorithm.serve(state.params, torch.tensor(1), state.round)
    same(known, received(algorithm, state, 1))
    same(algorithm.admit(state.params, state.round, []), received(algorithm, state, NEW))
    x = make_batch(6).x
    model = from_module(_module(), init=xavier)
    assert_close(algorithm.predict(known, x, rng.key(0)).probs, model.apply(known, x, None)[0].softmax(-1))


def test_vd_is_evaluated_with_its_own_spread(build):
    """VD ignores the constant, as released: its learned lambda is served."""
    algorithm, state = build("reptile+vd", variant="released")
    state.params[ENTRY] = state.params[ENTRY] + 2.0
    served = algorithm.serve(state.params, torch.tensor(0), state.round)
    assert_close(algorithm.posterior.spread(served, "fc1"), torch.full((3, 6), -6.5).double())


# --- KL and beta as released ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg+metavd", "reptile+vd", "maml+ensemblevd", "perfedavg+metavd"])
def test_released_kl_has_its_epsilon_beside_the_variance(build, name):
    """Closed form: the mean of 1/2 log(1 + theta^2 / (sigma^2 + 1e-13)) as released; ours adds it to theta^2."""
    for options in ({"variant": "released"}, {}, {"kl_epsilon": "variance"}):
        algorithm, state = build(name, **options)
        sent = received(algorithm, state)
        sent["fc1.weight"] = torch.linspace(-1e-6, 1e-6, 18).double().reshape(3, 6)
        theta2, sigma2 = sent["fc1.weight"].square(), algorithm.posterior.variance(sent, "fc1")
        odds = theta2 / (sigma2 + 1e-13) if options else (theta2 + 1e-13) / sigma2
        assert_close(algorithm.posterior.kl(sent), 0.5 * torch.log1p(odds).mean(), rtol=1e-9, atol=0)
    assert abs(odds.mean() / (theta2 / sigma2).mean() - 1) < 1e-3
    assert (build(name)[0].posterior.kl(sent) / algorithm.posterior.kl(sent)) > 1.1


@pytest.mark.parametrize("name", ["reptile+metavd", "maml+vd", "perfedavg+ensemblevd"])
def test_released_evaluation_takes_the_last_rounds_beta(build, make_batch, name):
    """After r rounds the last trained one was r - 1: its beta weighs the KL of a personalisation step, known or unseen.

    Training itself, and our own evaluation, take the beta of the round they are in.
    """
    released, state = build(name, variant="released", beta_ramp=1.0)
    ours, _ = build(name, variant="released", beta_ramp=1.0, test_beta="next")
    at = {round: [make_batch(8, seed=i, round=round) for i in range(3)] for round in (0.0, 49.0, 50.0)}
    known = released.serve(state.params, torch.tensor(1), state.round)
    unseen = released.admit(state.params, state.round, [])
    for own in (known, unseen):
        found = released.personalize(own, at[50.0][:1])[0]
        same(found, ours.personalize(own, at[49.0][:1])[0], atol=0)
        assert not torch.equal(found[ENTRY], ours.personalize(own, at[50.0][:1])[0][ENTRY])
        same(released.personalize(own, at[0.0][:1])[0], ours.personalize(own, at[0.0][:1])[0], atol=0)
    sent = received(released, state)
    same(released.local(sent, at[50.0])[0], ours.local(sent, at[50.0])[0], atol=0)


def test_a_fitted_newcomer_takes_the_last_rounds_beta(build, make_batch):
    """The fit of an unseen client's embedding is part of its personalisation."""
    options = {"newcomer": "fit", "beta_ramp": 1.0, "test_noise": "own"}
    last, state = build("reptile+metavd", test_beta="last", **options)
    ours, _ = build("reptile+metavd", **options)
    found, same_round, before = (
        algorithm.admit(state.params, state.round, [make_batch(8, round=round)])[ENTRY]
        for algorithm, round in ((last, 50.0), (ours, 50.0), (ours, 49.0))
    )
    assert torch.equal(found, before)
    assert not torch.equal(found, same_round)


# --- SNIP, PerFedAvg, FedBE, +drop as released -----------------------------------------------------------------------


def test_released_snip(build, make_batch):
    """Masked training with the clip on the unmasked gradient, zeros at test, an adaptation that may regrow them."""
    algorithm, state = build("reptile+snip", variant="released", clip=0.01)
    state = algorithm.server.update(state, answers(algorithm, state, 0.05))
    mask = state.params["fc1.mask"]
    assert 0 < mask.mean() < 1
    sent = received(algorithm, state)
    assert_close(sent["fc1.weight"], state.params["fc1.weight"] * mask, rtol=0, atol=0)
    batch = make_batch(8)
    adapted, _ = algorithm.local(sent, [batch])
    assert (adapted["fc1.weight"][mask == 0] == 0).all()
    loss = objective.cross_entropy(from_module(_module()))
    bare = {name: value for name, value in sent.items() if name != "fc1.keep"}
    slopes = tree.clip(torch.func.grad(loss)(bare, batch, bare), 0.01)
    wanted = bare["fc1.weight"] - 0.02 * slopes["fc1.weight"] * mask
    assert_close(adapted["fc1.weight"], wanted, rtol=0, atol=1e-14)
    served = algorithm.serve(state.params, torch.tensor(0), state.round)
    assert (served["fc1.weight"][mask == 0] == 0).all()
    own, _ = algorithm.personalize(served, [batch])
    assert (own["fc1.weight"][mask == 0] != 0).any()


def test_default_snip_masks_adaptation_too(build, make_batch):
    """Ours: pruned weights are absent in training, at test and in adaptation."""
    algorithm, state = build("reptile+snip")
    state = algorithm.server.update(state, answers(algorithm, state, 0.05))
    mask = state.params["fc1.mask"]
    served = algorithm.serve(state.params, torch.tensor(0), state.round)
    assert torch.equal(served["fc1.mask"], mask)
    own, _ = algorithm.personalize(served, [make_batch(8)])
    assert torch.equal(own["fc1.weight"][mask == 0], served["fc1.weight"][mask == 0])
    assert (own["fc1.weight"][mask == 1] != served["fc1.weight"][mask == 1]).any()


def test_released_maml_snip_leaves_its_inner_step_unclipped(build, make_batch):
    """MAML+SNIP computes the inner clip but does not use it, as released; ours clips."""
    batches = [make_batch(8, seed=i) for i in range(3)]
    loss = objective.cross_entropy(from_module(_module()))
    for variant, inner_clip in (("released", None), ("default", 0.01)):
        algorithm, state = build("maml+snip", variant=variant, clip=0.01, lr=0.5)
        sent = received(algorithm, state)
        wanted = local.maml(loss, loss, lr=0.5, outer_lr=0.1, clip=0.01, inner_clip=inner_clip)(sent, batches)[0]
        same(algorithm.local(sent, batches)[0], wanted)


@pytest.mark.parametrize("name", ["perfedavg", "perfedavg+metavd"])
def test_released_perfedavg(build, make_batch, name):
    """Half of the Hessian product with different noise, g and H g clipped apart, batches drawn independently."""
    algorithm, state = build(name, variant="released", lr=0.3, **({"draws": 2} if "+" in name else {}))
    assert algorithm.train_batches.independent
    assert algorithm.train_batches.group == 3
    model = from_module(_module())
    batches = [make_batch(8, seed=i, round=50.0) for i in range(3)]
    sent = received(algorithm, state)
    inner = outer = objective.cross_entropy(model)
    if "+" in name:
        inner = objective.cross_entropy(attach(model, algorithm.posterior), 2)
        outer = objective.total(inner, objective.divergence(algorithm.posterior, lambda round: 10.0 + 0.0 * round))
    options = {"lr": 0.3, "outer_lr": 0.1, "clip": 5.0, "frozen": ("logvar",)}
    found = algorithm.local(sent, batches)[0]
    same(found, local.hf_maml(inner, outer, product="released", **options)(sent, batches)[0], atol=1e-9)
    exact = local.hf_maml(inner, outer, **options)(sent, batches)[0]
    assert (found["fc0.weight"] - exact["fc0.weight"]).abs().max() > 1e-6


def test_released_fedbe(net, setting):
    """Teachers' logits are averaged, without sharpening, at rate 0.9; ours: probabilities, T = 1/2, 0.01."""
    rows = torch.randn(20, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    federation = replace(setting, server_rows=lambda key: rows)  # noqa: ARG005
    pull = server.pull(emit.shared(net), aggregate.mean, Groups({"": Sgd(1.0)}))
    for variant, config in (
        ("released", replace(FedBEOptions().distillation, average="logits", temperature=1.0, lr=0.9)),
        ("default", replace(FedBEOptions().distillation, average="probs", temperature=0.5, lr=0.01)),
    ):
        algorithm = methods.algorithm("fedbe", net, federation, {"variant": variant})
        state = algorithm.server.init(rng.key(0))
        update = answers(algorithm, state)
        moved = {
            n: torch.einsum("c,c...->c...", torch.tensor([0.5, 2.0]).double(), v) for n, v in update.params.items()
        }
        update = update._replace(params=moved)
        wanted = server.distill(pull, net, lambda key: rows, config).update(state, update)  # noqa: ARG005
        same(algorithm.server.update(state, update).params, wanted.params)
        assert (wanted.params["fc0.weight"] - pull.update(state, update).params["fc0.weight"]).abs().max() > 1e-4


def test_released_drop(build, make_batch):
    """Zeros are sent and regrow, the aggregate counts them, and at test nothing is masked."""
    options = {"threshold": 0.02, "drop_from": 0}
    algorithm, state = build("reptile+metavd+drop", variant="released", **options)
    sent = received(algorithm, state)
    dropped = sent["fc1.weight"] == 0
    assert 0 < dropped.double().mean() < 1
    assert not any(name.endswith("mask") for name in sent)
    adapted, _ = algorithm.local(sent, [make_batch(8, round=50.0)])
    assert (adapted["fc1.weight"][dropped] != 0).any()
    served = algorithm.serve(state.params, torch.tensor(0), state.round)
    assert torch.equal(served["fc1.weight"], state.params["fc1.weight"])
    alone, state = build("reptile+metavd+drop", dropped="released", **options)
    same(alone.serve(state.params, torch.tensor(0), state.round), received(build("reptile+metavd")[0], state))
    ours, state = build("reptile+metavd+drop", **options)
    sent = received(ours, state)
    mask = sent["fc1.mask"]
    assert torch.equal(mask == 0, dropped)
    adapted, _ = ours.local(sent, [make_batch(8, round=50.0)])
    assert torch.equal(adapted["fc1.weight"][dropped], sent["fc1.weight"][dropped])
    assert torch.equal(ours.serve(state.params, torch.tensor(0), state.round)["fc1.mask"], mask)


def test_released_fedavg_ignores_the_masks(build, make_batch):
    """FedAvg+MetaVD as released takes theta - theta_agg without masks; the others' gradient passes through them.

    A weight that is dropped for the whole cohort becomes what the clients regrew from 0 (server rate 1, no momentum),
    and rests where the gradient is masked. Ours leaves it where it is in both.
    """
    options = {"threshold": 0.0, "drop_from": 0, "server_lr": 1.0, "server_momentum": 0.0, "server_clip": 1e9}
    for base, overwritten in (("fedavg", True), ("reptile", False)):
        algorithm, state = build(f"{base}+metavd+drop", variant="released", **options)
        sent = vmap(algorithm.emit.apply, (None, 0, None))(state.params, COHORT, state.round)
        assert (sent["fc1.weight"] == 0).all()
        batch = make_batch(8, round=50.0)
        back = tree.stack([algorithm.local(tree.unstack(sent, i), [batch])[0] for i in range(2)])
        new = algorithm.server.update(state, Update(COHORT, back, SIZES, sent)).params["fc1.weight"]
        regrown = aggregate.precision(algorithm.posterior)(back, SIZES / SIZES.sum())["fc1.weight"][0]
        assert_close(new, regrown if overwritten else state.params["fc1.weight"], rtol=0, atol=1e-12)
        assert (regrown != 0).any()
        ours, state = build(f"{base}+metavd+drop", **options)
        new = ours.server.update(state, answers(ours, state, 0.1)).params["fc1.weight"]
        assert torch.equal(new, state.params["fc1.weight"])


def test_released_drop_is_metavd_where_nothing_is_dropped(build):
    """Law: with a threshold of 1 nothing is dropped, and +drop as released is +metavd as released, bit for bit."""
    for base in ("fedavg", "reptile"):
        plain, state = build(f"{base}+metavd", variant="released")
        dropping, _ = build(f"{base}+metavd+drop", variant="released", threshold=1.0, drop_from=0)
        update = answers(plain, state, 0.1)
        same(dropping.server.update(state, update).params, plain.server.update(state, update).params, atol=0)


# --- options: the posterior ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["reptile+metavd", "reptile+vd", "reptile+ensemblevd"])
def test_per_input_on_the_papers_network(name):
    """per=input: one rate per input of the three linear layers, 1024 + 256 + 128 = 1,408 in all."""
    model = from_module(cnn((3, 32, 32), 10), init=xavier)
    setting = methods.Setting(3, 10, 1000)
    algorithm = methods.algorithm(name, model, setting, {"per": "input"})
    state = algorithm.server.init(rng.key(0))
    sent = received(algorithm, state)
    sizes = {key: value.numel() for key, value in sent.items() if key.endswith("logalpha")}
    assert sizes == {"fc0.logalpha": 1024, "fc1.logalpha": 256, "fc2.logalpha": 128}
    assert sum(sizes.values()) == 1_408
    if name == "reptile+metavd":
        assert state.params["server.hyper.3.bias"].shape == (1_408,)
    assert isinstance(algorithm.posterior, InputLogAlpha)


def test_per_input_leaves_the_models_own_start(build, net):
    """layer_init is about a layer with a posterior a weight; noise on inputs changes no initial weight."""
    _, state = build("reptile+metavd", per="input")
    same({name: state.params[name] for name in net.init(rng.key(0))}, net.init(rng.fold(rng.key(0), 0)))


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("options", [{}, {"spread": "logalpha"}, {"per": "input"}])
def test_rate(rate, options):
    """rate: the first dropout rate: of every weight for log alpha; of the root-mean-square weight for log sigma^2."""
    model = from_module(small_cnn((1, 8, 8), 4, width=16).double(), init=xavier)
    setting = methods.Setting(3, 4, 100)
    algorithm = methods.algorithm("reptile+vd", model, setting, options | {"rate": rate})
    state = algorithm.server.init(rng.key(1))
    sent = received(algorithm, state)
    found = torch.cat([value.flatten() for value in algorithm.posterior.rates(sent).values()])
    if options:
        assert_close(found, torch.full_like(found, rate), rtol=1e-6, atol=0)
        return
    theta = sent["fc1.weight"]
    sigma2 = algorithm.posterior.variance(sent, "fc1")
    assert (sigma2 / (sigma2 + theta.square().mean())).mean().item() == pytest.approx(rate, rel=0.05)
    # theta ~ U(+-b): median theta^2 = b^2/4 against the mean b^2/3, so the median odds are 4/3 of those asked for.
    odds = 4 / 3 * rate / (1 - rate)
    assert found.median().item() == pytest.approx(odds / (1 + odds), rel=0.08)


def test_rate_zero_is_the_papers_start(build):
    """A rate of 0 is log sigma^2 = -8.5; log alpha starts at a rate of 0.15."""
    for options, wanted in (({}, -8.5), ({"spread": "logalpha"}, logit(0.15)),
                            ({"per": "input"}, logit(0.15))):  # fmt: skip
        for clamp in ("through", "released"):
            algorithm, state = build("reptile+vd", clamp=clamp, **options)
            value = algorithm.posterior.spread(received(algorithm, state), "fc1")
            assert_close(value, torch.full_like(value, wanted), rtol=1e-6, atol=0)


def test_spread_logalpha(build, make_batch):
    """spread=logalpha: one log alpha a weight travels, and the layer's variance is alpha theta^2."""
    algorithm, state = build("reptile+metavd", spread="logalpha")
    sent = received(algorithm, state)
    assert sent["fc1.logalpha"].shape == (3, 6)
    assert ENTRY not in sent
    alpha = algorithm.posterior.spread(sent, "fc1").exp()
    assert_close(algorithm.posterior.variance(sent, "fc1"), alpha * sent["fc1.weight"].square())
    adapted, _ = algorithm.local(sent, [make_batch(8, round=50.0)])
    assert (adapted["fc1.logalpha"] != sent["fc1.logalpha"]).all()


def loss_of(algorithm, state, batch):
    """The training loss before the first step."""
    return algorithm.local(received(algorithm, state), [batch])[1]


@pytest.mark.parametrize("size", [8.0, 400.0])
def test_kl_and_beta(build, make_batch, size):
    """kl=mean adds beta KL/K whatever n; kl=elbo adds beta KL/n, the negative ELBO a sample for beta = 1."""
    batch = make_batch(8, round=50.0, size=size)
    base, state = build("reptile+vd", beta=0.0)
    total = base.posterior.kl(received(base, state), mean=False)
    bare = loss_of(base, state, batch)
    for options, wanted in (
        ({"beta": 10.0}, 10.0 * total / 18), ({"beta": 3.0}, 3.0 * total / 18),
        ({"kl": "elbo", "beta": 1.0}, total / size), ({"kl": "elbo", "beta": 2.0}, 2.0 * total / size),
    ):  # fmt: skip
        algorithm, state = build("reptile+vd", **options)
        assert_close(loss_of(algorithm, state, batch) - bare, wanted, rtol=1e-9, atol=1e-12)


def test_beta_ramp(build, make_batch):
    """beta_ramp: the share of the rounds (here 100) in which beta rises; in round r the KL weighs ramp(r)."""
    base, state = build("reptile+vd", beta=0.0)
    term = base.posterior.kl(received(base, state))
    for share in (0.0, 0.02, 0.5):
        algorithm, state = build("reptile+vd", beta=7.0, beta_ramp=share)
        for round in (0.0, 1.0, 25.0, 60.0):
            batch = make_batch(8, round=round)
            beta = objective.ramp(7.0, 100, share)(batch.round)
            extra = loss_of(algorithm, state, batch) - loss_of(base, state, batch)
            assert_close(extra, beta * term, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("draws", [1, 3, 6])
def test_draws(build, make_batch, draws):
    """draws: noise draws a training step, whose logits are averaged before the cross-entropy."""
    algorithm, state = build("reptile+vd", beta=0.0, draws=draws, rate=0.5)
    batch, sent = make_batch(8), received(algorithm, state)
    model = attach(from_module(_module()), algorithm.posterior)
    logits = model.apply(sent, batch.x, rng.split(batch.key, draws)).mean(0)
    assert_close(loss_of(algorithm, state, batch), functional.cross_entropy(logits, batch.y))


def test_floor_ceiling_and_max_rate(build):
    """floor: lowest log sigma^2 or log alpha; ceiling: highest log sigma^2; max_rate: highest rate under log alpha."""
    cases = [
        ({"floor": -10.0}, -10.0, 0.0), ({"ceiling": -4.0}, -17.0, -4.0),
        ({"clamp": "released", "floor": -9.0}, -9.0, 8.5),
        ({"spread": "logalpha", "max_rate": 0.8, "floor": -5.0}, -5.0, logit(0.8)),
        ({"per": "input", "max_rate": 0.5}, -17.0, 0.0),
    ]  # fmt: skip
    for options, low, high in cases:
        algorithm, state = build("reptile+vd", **options)
        entry = algorithm.posterior.entry("fc1")
        ends = []
        for value in (-100.0, 100.0):
            params = state.params | {entry: torch.full_like(state.params[entry], value)}
            sent = algorithm.emit.apply(params, torch.tensor(0), state.round)
            ends.append(algorithm.posterior.spread(sent, "fc1").unique().item())
            assert (sent[entry] + algorithm.posterior.offset).unique().item() == pytest.approx(ends[-1], abs=1e-9)
        assert ends == pytest.approx([low, high], abs=1e-9)


@pytest.mark.parametrize("options", [{"floor": -5.0}, {"ceiling": -10.0}, {"spread": "logalpha", "max_rate": 0.1}])
def test_bounds_that_exclude_the_start_are_refused(build, options):
    """A floor above the start, or a ceiling or a max_rate below it, is refused in a sentence, not ignored."""
    with pytest.raises(SpecError, match=r"starts at log (sigma\^2|alpha) = .* floor, ceiling, max_rate or rate"):
        build("reptile+vd", **options)


def test_clamp(build):
    """clamp: "through" sends gradients past both ends, "released" stops them outside the range."""
    for clamp, wanted in (("through", 1.0), ("released", 0.0)):
        algorithm, state = build("reptile+vd", clamp=clamp)
        outside = {ENTRY: torch.full((3, 6), -30.0).double(), "fc1.weight": state.params["fc1.weight"]}
        slope = torch.func.grad(lambda p, noise=algorithm.posterior: noise.spread(p, "fc1").sum())(outside)[ENTRY]
        assert_close(slope, torch.full((3, 6), wanted).double())
        assert algorithm.posterior.clamp == clamp


def test_layer_init(build, net):
    """layer_init=uniform starts the noisy layer from U(+-1/sqrt(fan in)); model: as any other method starts it."""
    key = rng.fold(rng.key(0), 0)
    for choice, model in (("uniform", reset(net, ["fc1"])), ("model", net)):
        _, state = build("reptile+metavd", layer_init=choice)
        same({name: state.params[name] for name in net.init(key)}, model.init(key))
    pretrained = from_module(_module())
    _, state = build("reptile+metavd", pretrained)
    same({name: state.params[name] for name in net.init(key)}, pretrained.init(key))


def test_layers_by_name(build, make_batch):
    """layers: any linear or convolutional layers by name; all of them carry spreads, noise, KL and precision."""
    model = from_module(small_cnn((1, 4, 4), 3, width=2).double(), init=xavier)
    algorithm, state = build("reptile+metavd", model, layers="conv2, fc1", server_clip=1e9)
    sent = received(algorithm, state)
    assert algorithm.posterior.layers == ("conv2", "fc1")
    assert sent["conv2.logvar"].shape == (4, 2, 3, 3)
    assert sent["fc1.logvar"].shape == (4, 8)
    assert state.params["server.hyper.3.bias"].shape == (72 + 32,)
    assert state.params["conv2.weight"].abs().max() <= 1 / math.sqrt(18)
    adapted, loss = algorithm.local(sent, [make_batch(6, shape=(1, 4, 4), round=50.0)])
    assert (adapted["conv2.logvar"] != sent["conv2.logvar"]).all()
    still, _ = build("reptile+metavd", model, layers="fc1")
    assert (
        loss_of(still, still.server.init(rng.key(0)), make_batch(6, shape=(1, 4, 4), round=50.0)) - loss
    ).abs() > 1e-6
    update = answers(algorithm, state, 0.1)
    update.params["conv2.weight"][0] += 1.0
    update.params["conv2.logvar"][0] += 40.0
    new = algorithm.server.update(state, update).params["conv2.weight"]
    # Client 0 of the cohort is unsure to the ceiling, so the step follows the other one: lr 0.9 of its 0.1.
    assert_close(new - state.params["conv2.weight"], torch.full((4, 2, 3, 3), 0.09).double(), rtol=0, atol=1e-2)


@pytest.mark.parametrize("name", ["reptile+metavd", "fedavg+dropout", "fedavg+snip"])
def test_layers_that_do_not_exist(build, name):
    """A wrong name is refused with the names that exist; an empty list too."""
    with pytest.raises(SpecError, match="'fc7', but the model's layers are fc0, fc1, fc2"):
        build(name, layers="fc1,fc7")
    with pytest.raises(SpecError, match="at least one of fc0, fc1, fc2"):
        build(name, layers=" , ")


def test_predict_samples_average(build, make_batch):
    """predict=mean answers at theta; draws averages `samples` draws, of probabilities or of logits."""
    x, key = make_batch(6).x, rng.key(5)
    algorithm, state = build("reptile+vd", rate=0.6)
    own = received(algorithm, state)
    model = attach(from_module(_module()), algorithm.posterior)
    assert_close(algorithm.predict(own, x, key).probs, model.apply(own, x, None)[0].softmax(-1))
    for samples in (1, 7):
        logits = model.apply(own, x, rng.split(key, samples))
        for average, wanted in (("probs", logits.softmax(-1).mean(0)), ("logits", logits.mean(0).softmax(-1))):
            other, _ = build("reptile+vd", rate=0.6, predict="draws", samples=samples, average=average)
            assert_close(other.predict(own, x, key).probs, wanted, rtol=0, atol=1e-12)


def test_test_noise(build):
    """test_noise=constant serves lambda = -8.5 to all; own serves the client's; training sends its own in both."""
    for choice in ("own", "constant"):
        algorithm, state = build("reptile+metavd", test_noise=choice)
        state = dark(state)
        sent = received(algorithm, state)
        served = algorithm.serve(state.params, torch.tensor(0), state.round)
        same({**served, ENTRY: sent[ENTRY]}, sent)
        if choice == "own":
            same(served, sent)
        else:
            assert_close(algorithm.posterior.spread(served, "fc1"), torch.full((3, 6), -8.5).double())


# --- options: hypernetwork, groups, rows -----------------------------------------------------------------------------


def test_hypernetwork_size(build):
    """hyper_width, hyper_depth and embedding give its shapes; embedding = 0 is 1 + N/4."""
    _, state = build("reptile+metavd", hyper_width=7, hyper_depth=1, embedding=0)
    shapes = {name: tuple(value.shape) for name, value in state.params.items() if name.startswith("server.")}
    assert shapes == {
        "server.client.embedding": (4, 2), "server.hyper.0.weight": (7, 2), "server.hyper.0.bias": (7,),
        "server.hyper.1.weight": (18, 7), "server.hyper.1.bias": (18,),
    }  # fmt: skip


GROUPS = {
    "server.hyper.3.bias": ("reptile+metavd", "hyper_lr", "hyper_momentum", "hyper_decay"),
    "server.client.embedding": ("reptile+metavd", "embed_lr", "embed_momentum", "embed_decay"),
    "fc1.logvar": ("reptile+vd", "spread_lr", "spread_momentum", "spread_decay"),
    "server.client.fc1.logvar": ("reptile+ensemblevd", "spread_lr", "spread_momentum", "spread_decay"),
    "fc0.weight": ("reptile", "server_lr", "server_momentum", None),
    "fc2.bias": ("fedavg", "server_lr", "server_momentum", None),
}


@pytest.mark.parametrize("entry", GROUPS)
def test_groups(build, entry):
    """Each group's rate, momentum and decay drive its own entries: v <- m v + g + d p, p <- p - lr v."""
    name, lr, momentum, decay = GROUPS[entry]
    decays = {} if decay is None else {decay: 0.0}
    plain, start = build(name, **{lr: 1.0, momentum: 0.0, **decays})
    update = answers(plain, start, 0.1)
    slope = start.params[entry] - plain.server.update(start, update).params[entry]
    assert slope.abs().max() > 0
    decays = {} if decay is None else {decay: 0.2}
    algorithm, state = build(name, **{lr: 0.3, momentum: 0.5, **decays})
    shift = torch.full_like(state.params[entry], 0.01)
    state = state._replace(slots=state.slots | {entry: shift})
    new = algorithm.server.update(state, update)
    velocity = 0.5 * shift + slope + (0.2 if decay else 0.0) * state.params[entry]
    rows = COHORT if entry.startswith("server.client.") else slice(None)
    assert_close(new.slots[entry][rows], velocity[rows], rtol=0, atol=1e-12)
    assert_close(new.params[entry][rows], (state.params[entry] - 0.3 * velocity)[rows], rtol=0, atol=1e-12)


def test_owned(build):
    """owned: a client's step on its own row counts 1, or its share of the data."""
    entry = "server.client.embedding"
    steps = []
    for choice in ("one", "share"):
        algorithm, state = build("reptile+metavd", owned=choice, embed_lr=1.0, embed_momentum=0.0, embed_decay=0.0)
        new = algorithm.server.update(state, answers(algorithm, state, 0.1))
        steps.append((new.params[entry] - state.params[entry])[COHORT])
    assert_close(steps[1], steps[0] * torch.tensor([[0.75], [0.25]]).double(), rtol=1e-9, atol=1e-12)


def test_owned_decay(build):
    """owned_decay: rows of absent clients decay and coast with "dense" alone."""
    entry, absent = "server.client." + ENTRY, [1, 3]
    for choice in ("sparse", "dense"):
        algorithm, state = build("reptile+ensemblevd", owned_decay=choice, spread_decay=0.1)
        state.params[entry] = state.params[entry] + 1.0
        new = algorithm.server.update(state, answers(algorithm, state)).params[entry][absent]
        assert_close(new, torch.full_like(new, 1.0 if choice == "sparse" else 1 - 0.9 * 0.1))


def test_newcomer_fit(build, make_batch):
    """newcomer=fit: the unseen client's embedding takes fit_steps steps of fit_lr on its batch; mean: it takes none."""
    batch = make_batch(8, round=50.0)
    mean, state = build("reptile+metavd", rate=0.5)
    fit, _ = build("reptile+metavd", rate=0.5, beta=10.0, newcomer="fit", fit_steps=4, fit_lr=0.5)
    unseen = received(mean, state, NEW)
    same(mean.admit(state.params, state.round, [batch]), unseen)
    model = attach(from_module(_module()), fit.posterior)
    loss = objective.total(
        objective.cross_entropy(model, 3), objective.divergence(fit.posterior, objective.ramp(10.0, 100))
    )
    wanted = emit.fitted(fit.emit, loss, steps=4, lr=0.5)(state.params, state.round, [batch])
    found = fit.admit(state.params, state.round, [batch])
    same(found, wanted)
    assert (found[ENTRY] - unseen[ENTRY]).abs().max() > 1e-6
    same({name: value for name, value in found.items() if name != ENTRY},
         {name: value for name, value in unseen.items() if name != ENTRY})  # fmt: skip


def test_newcomer_fit_is_masked_too(build, make_batch):
    """+drop drops weights of unseen clients too, by the rates of the embedding that was found for them."""
    algorithm, state = build("reptile+metavd+drop", newcomer="fit", drop_from=0, threshold=0.02)
    admitted = algorithm.admit(state.params, state.round, [make_batch(8)])
    assert torch.equal(admitted["fc1.mask"], (algorithm.posterior.rates(admitted)["fc1"] <= 0.02).double())


def test_newcomer_fit_goes_through_what_is_served(build, make_batch):
    """A fitted newcomer is served as known clients are: constant noise, and dense weights under dropped=released."""
    batch = [make_batch(8)]
    algorithm, state = build("reptile+metavd", newcomer="fit", test_noise="constant")
    admitted = algorithm.admit(state.params, state.round, batch)
    assert_close(algorithm.posterior.spread(admitted, "fc1"), torch.full((3, 6), -8.5).double())
    algorithm, state = build("reptile+metavd+drop", newcomer="fit", dropped="released", drop_from=0, threshold=0.0)
    admitted = algorithm.admit(state.params, state.round, batch)
    assert torch.equal(admitted["fc1.weight"], state.params["fc1.weight"])


def test_newcomer_fit_gets_data_under_fedavg(build):
    """newcomer=fit needs a batch to fit, also where the method itself does not adapt."""
    algorithm, state = build("fedavg+metavd", newcomer="fit")
    assert algorithm.personal_batches.steps == 1
    sent = received(algorithm, state)
    assert algorithm.personalize(sent, [_batch()])[0] is sent
    assert build("fedavg+metavd")[0].personal_batches.steps == 0


def test_constant_test_noise_keeps_the_mask(build):
    """Dropped weights are absent everywhere, at test too, whatever spread is used there."""
    algorithm, state = build("reptile+metavd+drop", test_noise="constant", drop_from=0, threshold=0.02)
    sent = received(algorithm, state)
    for used in (algorithm.serve(state.params, torch.tensor(0), state.round),
                 algorithm.admit(state.params, state.round, [])):  # fmt: skip
        assert_close(algorithm.posterior.spread(used, "fc1"), torch.full((3, 6), -8.5).double())
        assert used["fc1.mask"].mean() < 1
    assert torch.equal(algorithm.serve(state.params, torch.tensor(0), state.round)["fc1.mask"], sent["fc1.mask"])


# --- options: dropout, SNIP, dropping, training ----------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout(build, make_batch, rate):
    """+dropout: Gaussian noise with alpha = p/(1-p) on the inputs of the linear layers in training, none at test."""
    algorithm, state = build("fedavg+dropout", rate=rate)
    batch, sent = make_batch(8), received(algorithm, state)
    assert set(sent) == set(from_module(_module()).init(rng.key(0)))
    noise = InputLogAlpha(("fc0", "fc1", "fc2"), offset=math.log(rate / (1 - rate)))
    model = attach(from_module(_module()), noise)
    logits = model.apply(sent, batch.x, rng.split(batch.key, 1))[0]
    assert_close(loss_of(algorithm, state, batch), functional.cross_entropy(logits, batch.y))
    assert_close(algorithm.predict(sent, batch.x, batch.key).probs, model.apply(sent, batch.x, None)[0].softmax(-1))
    alone, _ = build("fedavg+dropout", rate=rate, layers="fc1")
    noise = replace(noise, layers=("fc1",))
    logits = attach(from_module(_module()), noise).apply(sent, batch.x, rng.split(batch.key, 1))[0]
    assert_close(loss_of(alone, state, batch), functional.cross_entropy(logits, batch.y))


def test_snip_options(build):
    """sparsity: the pruned share; layers: which; saliency: before the step or, as released, after."""
    algorithm, state = build("reptile+snip", sparsity=0.5, layers="fc0,fc2")
    new = algorithm.server.update(state, answers(algorithm, state, 0.1)).params
    assert (new["fc0.mask"].sum(), new["fc2.mask"].sum()) == (12, 4)
    assert "fc1.mask" not in new
    masks = []
    for saliency in ("before", "released"):
        algorithm, state = build("fedavg+snip", saliency=saliency)
        update = answers(algorithm, state)
        source = torch.Generator().manual_seed(0)
        moved = {n: v if n.endswith(("mask", "keep")) else v + torch.randn(v.shape, generator=source).double()
                 for n, v in update.params.items()}  # fmt: skip
        masks.append(algorithm.server.update(state, update._replace(params=moved)).params["fc1.mask"])
    assert not torch.equal(*masks)


def test_drop_options(build):
    """Options threshold and drop_from: which rates are dropped, and from which round on."""
    algorithm, state = build("reptile+metavd+drop", threshold=0.05, drop_from=7)
    rate = algorithm.posterior.rates(received(algorithm, state))["fc1"]
    for round, wanted in ((6.0, torch.ones(3, 6).double()), (7.0, (rate <= 0.05).double())):
        sent = algorithm.emit.apply(state.params, torch.tensor(0), torch.tensor(round).double())
        assert torch.equal(sent["fc1.mask"], wanted)
    assert 0 < wanted.mean() < 1


def test_proximal_option(build, make_batch):
    """With mu = 0 FedProx is FedProx FedAvg, bit for bit; mu > 0 keeps clients nearer to what they received."""
    batches = [make_batch(8, seed=i) for i in range(4)]
    fedavg, state = build("fedavg")
    sent = received(fedavg, state)
    free = fedavg.local(sent, batches)[0]
    same(build("fedprox", mu=0.0)[0].local(sent, batches)[0], free, atol=0)
    held = build("fedprox", mu=10.0)[0].local(sent, batches)[0]
    lengths = [tree.squared_norm(tree.map(torch.sub, own, sent)) for own in (free, held)]
    assert lengths[1] < lengths[0]


def test_training_options(build, make_batch):
    """lr, clip, outer_lr, batch, local_epochs, adapt_steps, meta_batches: the steps and batches that they name."""
    loss = objective.cross_entropy(from_module(_module()))
    batches = [make_batch(8, seed=i) for i in range(3)]
    algorithm, state = build("reptile", lr=0.3, clip=0.1, batch=7, local_epochs=2, adapt_steps=3)
    sent = received(algorithm, state)
    wanted = local.sgd(loss, lr=0.3, clip=0.1)(sent, batches)[0]
    same(algorithm.local(sent, batches)[0], wanted)
    same(algorithm.personalize(sent, batches)[0], wanted)
    train, personal = algorithm.train_batches, algorithm.personal_batches
    assert (train.batch, train.epochs, train.steps, train.group) == (7, 2, None, 1)
    assert (personal.batch, personal.steps) == (7, 3)
    algorithm, _ = build("maml", lr=0.3, outer_lr=0.2, clip=0.1, meta_batches="independent")
    same(algorithm.local(sent, batches)[0], local.maml(
        loss, loss, lr=0.3, outer_lr=0.2, clip=0.1, inner_clip=0.1)(sent, batches)[0])  # fmt: skip
    assert (algorithm.train_batches.group, algorithm.train_batches.independent) == (3, True)
    assert not build("maml")[0].train_batches.independent
    same(algorithm.personalize(sent, batches[:1])[0], local.sgd(loss, lr=0.3, clip=0.1)(sent, batches[:1])[0])


@pytest.mark.parametrize(("spread_kind", "entry"), [("logvar", "logvar"), ("logalpha", "logalpha")])
def test_maml_freezes_the_spread_in_its_inner_step(build, make_batch, spread_kind, entry):
    """Support: CE alone, the spread held; query: CE + beta KL at the adapted weights, the spread moved with them."""
    algorithm, state = build("maml+metavd", spread=spread_kind, rate=0.5, lr=0.5, beta=10.0, draws=2)
    batches = [make_batch(8, seed=i, round=50.0) for i in range(3)]
    inner = objective.cross_entropy(attach(from_module(_module()), algorithm.posterior), 2)
    outer = objective.total(inner, objective.divergence(algorithm.posterior, lambda round: 10.0 + 0.0 * round))
    sent = received(algorithm, state)
    found = algorithm.local(sent, batches)[0]
    same(found, local.maml(inner, outer, lr=0.5, outer_lr=0.1, frozen=(entry,))(sent, batches)[0])
    thawed = local.maml(inner, outer, lr=0.5, outer_lr=0.1)(sent, batches)[0]
    assert (found["fc1.weight"] - thawed["fc1.weight"]).abs().max() > 1e-8


@pytest.mark.parametrize("product", ["exact", "difference", "released"])
def test_product_and_delta(build, make_batch, product):
    """Options product, delta and trust: PerFedAvg's Hessian product, its difference's step, its largest length."""
    loss = objective.cross_entropy(from_module(_module()))
    batches = [make_batch(8, seed=i) for i in range(3)]
    for trust in (0.5, 0.01, 1e6):
        algorithm, state = build("perfedavg", product=product, delta=0.1, lr=0.3, outer_lr=0.2, trust=trust)
        sent = received(algorithm, state)
        options = {"lr": 0.3, "outer_lr": 0.2, "delta": 0.1, "product": product, "trust": trust}
        same(algorithm.local(sent, batches)[0], local.hf_maml(loss, loss, **options)(sent, batches)[0])


@pytest.mark.parametrize(
    ("name", "adapts"),
    [("fedavg", 0), ("fedavg+ft", 1), ("fedprox", 0), ("fedavg+metavd", 0), ("reptile", 1), ("maml+metavd", 1)],
)
def test_who_adapts(build, make_batch, name, adapts):
    """One step before use and test for the meta family and +ft; FedAvg, FedProx and FedAvg+MetaVD use what they get."""
    algorithm, state = build(name)
    sent = received(algorithm, state)
    own, _ = algorithm.personalize(sent, [make_batch(8, round=50.0)])
    assert (own["fc0.weight"] != sent["fc0.weight"]).any() == adapts
    assert algorithm.personal_batches.steps == adapts
    if "metavd" in name and adapts:
        assert (own[ENTRY] != sent[ENTRY]).all()


def test_server_clip(build):
    """server_clip bounds the joint length of the server's gradient."""
    algorithm, state = build("fedavg", server_clip=0.5)
    new = algorithm.server.update(state, answers(algorithm, state, 1.0))
    moved = tree.map(torch.sub, new.params, state.params)
    assert tree.squared_norm(moved).sqrt().item() == pytest.approx(0.5, rel=1e-5)


def test_fedbe_options(net, setting):
    """The options of FedBE reach its distillation; without rows on the server it is refused in a sentence."""
    with pytest.raises(SpecError, match="unlabelled rows"):
        methods.algorithm("fedbe", net, setting)
    rows = torch.randn(9, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    federation = replace(setting, server_rows=lambda key: rows)  # noqa: ARG005
    given = {"teachers": 3, "teacher_law": "dirichlet", "concentration": 2.0, "average": "logits", "temperature": 0.7,
             "distill_lr": 0.3, "distill_last_lr": 0.2, "distill_steps": 6, "distill_batch": 4}  # fmt: skip
    config = server.Distillation(samples=3, sampling="dirichlet", scale=0.1, concentration=2.0, average="logits",
                                 temperature=0.7, lr=0.3, min_lr=0.2, steps=6, batch=4)  # fmt: skip
    gaussian = given | {"teacher_law": "gaussian", "teacher_scale": 0.4}
    pull = server.pull(emit.shared(net), aggregate.mean, Groups({"": Sgd(1.0)}))
    for options, wanted in ((given, config), (gaussian, replace(config, sampling="gaussian", scale=0.4))):
        algorithm = methods.algorithm("fedbe", net, federation, options)
        state = algorithm.server.init(rng.key(0))
        update = answers(algorithm, state)
        moved = {n: v + torch.linspace(-1, 1, v.numel()).reshape(v.shape).double() for n, v in update.params.items()}
        update = update._replace(params=moved)
        by_hand = server.distill(pull, net, lambda key: rows, wanted).update(state, update)  # noqa: ARG005
        same(algorithm.server.update(state, update).params, by_hand.params)
