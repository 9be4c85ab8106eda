"""What the server makes of answers: pull against an explicit loop, SNIP's masks, FedBE's distillation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.func import vmap
from torch.testing import assert_close

from metavd import tree
from metavd.core import aggregate, emit, rng, server
from metavd.core.optim import Groups, Sgd
from metavd.core.posterior import LogVariance
from metavd.core.types import ServerState, Update
from metavd.methods.fedbe import FedBEOptions

NOISE = LogVariance(("fc1",), offset=-8.5, high=0.0)
N = 5
COHORT = torch.tensor([3, 0, 4])
SIZES = torch.tensor([10.0, 50.0, 40.0]).double()
SHARES = SIZES / SIZES.sum()
PLAIN = Groups({"": Sgd(1.0)})


def distillation(**changes):
    """FedBE's distillation by default, with changes."""
    return replace(FedBEOptions().distillation, **changes)


def emits_for(net):
    base = emit.shared(net)
    meta = emit.meta(base, net, NOISE, N, size=3, width=4)
    return {
        "shared": base,
        "one_for_all": emit.learned(base, net, NOISE),
        "one_per_client": emit.learned(base, net, NOISE, N),
        "meta": meta,
        "dropping": emit.dropping(meta, NOISE, threshold=0.03, start=0),
        "released dropping": emit.dropping(meta, NOISE, threshold=0.03, start=0, released=True),
    }


def answer(emits, state, cohort=COHORT, sizes=SIZES, *, scale=0.1, seed=0):
    """What a cohort returns: what it received, moved at random."""
    received = vmap(emits.apply, (None, 0, None))(state.params, cohort, state.round)
    source = torch.Generator().manual_seed(seed)
    moved = {
        name: value if name.endswith(("mask", "keep"))
        else value + scale * torch.randn(value.shape, generator=source, dtype=value.dtype)
        for name, value in received.items()
    }  # fmt: skip
    for name in received:
        if name.endswith(".mask"):
            weight = name.replace("mask", "weight")
            moved[weight] = torch.where(received[name] > 0, moved[weight], received[weight])
    return Update(cohort, moved, sizes, received)


def in_order(update, order):
    """The same answers, clients in another order."""
    params, sent = ({n: v[order] for n, v in part.items()} for part in (update.params, update.sent))
    return Update(update.client[order], params, update.weight[order], sent)


def loop(emits, state, update, targets, weights, *, owned_alone):
    """sum_i w_i J_emit(i)^T (emitted_i - target_i), one client and one backward pass after another."""
    leaves = {name: value.clone().requires_grad_() for name, value in state.params.items()}
    total = {name: torch.zeros_like(value) for name, value in leaves.items()}
    for i, (number, weight) in enumerate(zip(update.client, weights, strict=True)):
        sent = emits.apply(leaves, number, state.round)
        product = sum(
            (value * (value - targets[name][i]).detach()).sum()
            for name, value in sent.items()
            if not name.endswith("mask")
        )
        slopes = torch.autograd.grad(product, list(leaves.values()), allow_unused=True)
        for name, slope in zip(leaves, slopes, strict=True):
            own = owned_alone and name.startswith("server.client.")
            total[name] += (1.0 if own else weight) * (0.0 if slope is None else slope)
    return total


def slope_of(state, new):
    """With SGD(1) the step is the gradient."""
    return tree.map(lambda a, b: a - b, state.params, new.params)


# --- pull ----------------------------------------------------------------------------------------------------------


def test_pull_is_fedavg(net):
    """Shared weights, SGD(1): the new model is the data-weighted mean of the answers, to the last bits."""
    emits = emit.shared(net)
    pull = server.pull(emits, aggregate.mean, PLAIN)
    state = pull.init(rng.key(0))
    update = answer(emits, state)
    new = pull.update(state, update)
    for name, value in new.params.items():
        assert_close(value, torch.einsum("c,c...->...", SHARES, update.params[name]), rtol=0, atol=1e-14)
    assert new.round == state.round + 1
    assert new.key == state.key


@pytest.mark.parametrize("kind", ["one_for_all", "one_per_client", "meta"])
def test_the_difference_is_taken_to_what_was_sent(net, kind):
    """Clients that send back just what they received pull at nothing, however that was rounded on its way out."""
    emits = emits_for(net)[kind]
    pull = server.pull(emits, aggregate.mean, PLAIN)
    state = pull.init(rng.key(0))
    update = answer(emits, state, scale=0.0)
    rounded = {name: value + 1e-9 * torch.randn_like(value) for name, value in update.sent.items()}
    new = pull.update(state, update._replace(params=rounded, sent=rounded)).params
    assert all(torch.equal(new[name], value) for name, value in state.params.items())
    computed_anew = pull.update(state, update._replace(params=rounded)).params
    assert any(not torch.equal(computed_anew[name], value) for name, value in state.params.items())


def test_pull_without_sizes_is_the_plain_mean(net):
    """by_size=False: every client counts 1/C."""
    emits = emit.shared(net)
    pull = server.pull(emits, aggregate.mean, PLAIN, by_size=False)
    state = pull.init(rng.key(0))
    update = answer(emits, state)
    new = pull.update(state, update)
    assert_close(new.params["fc0.weight"], update.params["fc0.weight"].mean(0), rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", ["shared", "one_for_all", "one_per_client", "meta", "dropping", "released dropping"])
@pytest.mark.parametrize("by_share", [True, False])
def test_pull_is_the_autograd_loop(net, kind, by_share):
    """One vector-Jacobian product equals a loop over clients with a backward pass each, owned rows included."""
    emits = emits_for(net)[kind]
    rule = aggregate.mean if kind == "shared" else aggregate.precision(NOISE)
    pull = server.pull(emits, rule, PLAIN, clip=None, owned_by_share=by_share)
    state = pull.init(rng.key(0))
    update = answer(emits, state)
    if "dropping" in kind:
        received = vmap(emits.apply, (None, 0, None))(state.params, COHORT, state.round)
        dropped = received["fc1.mask"] == 0 if kind == "dropping" else received["fc1.weight"] == 0
        assert 0 < dropped.double().mean() < 1
    targets = rule(update.params, SHARES)
    wanted = loop(emits, state, update, targets, SHARES, owned_alone=not by_share)
    found = slope_of(state, pull.update(state, update))
    for name in state.params:
        assert_close(found[name], wanted[name], rtol=0, atol=1e-12)


def test_one_for_all_is_the_mean_of_spreads(net):
    """VD: lambda moves to sum_i w_i lambda_i, theta to the precision-weighted consensus."""
    emits = emits_for(net)["one_for_all"]
    rule = aggregate.precision(NOISE)
    pull = server.pull(emits, rule, PLAIN)
    state = pull.init(rng.key(0))
    update = answer(emits, state)
    new = pull.update(state, update).params
    assert_close(new["fc1.logvar"], torch.einsum("c,c...->...", SHARES, update.params["fc1.logvar"]))
    assert_close(new["fc1.weight"], rule(update.params, SHARES)["fc1.weight"][0], rtol=0, atol=1e-12)
    assert_close(new["fc1.bias"], torch.einsum("c,c...->...", SHARES, update.params["fc1.bias"]))


@pytest.mark.parametrize("by_share", [True, False])
def test_owned_rows(net, by_share):
    """EnsembleVD: a participant's row takes its own client's whole step, or its data share of it; others stay."""
    emits = emits_for(net)["one_per_client"]
    pull = server.pull(emits, aggregate.precision(NOISE), PLAIN, owned_by_share=by_share)
    state = pull.init(rng.key(0))
    update = answer(emits, state)
    new = pull.update(state, update).params["server.client.fc1.logvar"]
    step = SHARES if by_share else torch.ones(3).double()
    assert_close(new[COHORT], torch.einsum("c,c...->c...", step, update.params["fc1.logvar"]), rtol=0, atol=1e-14)
    assert (new[[1, 2]] == 0).all()


def test_hypernetwork_step_goes_towards_the_answers(net):
    """A small step with Delta = before - after reduces |h(e_i) - lambda_i|, as first order predicts; lr = 0 not."""
    emits = emits_for(net)["meta"]
    distances = []
    for lr in (0.0, 1e-3, 2e-3):
        groups = Groups({"": Sgd(0.0), "server.": Sgd(lr)})
        pull = server.pull(emits, aggregate.precision(NOISE), groups, clip=None, owned_by_share=True)
        state = pull.init(rng.key(0))
        update = answer(emits, state, scale=1.0)
        new = pull.update(state, update)
        sent = vmap(emits.apply, (None, 0, None))(new.params, COHORT, state.round)["fc1.logvar"]
        gaps = (sent - update.params["fc1.logvar"]).square().sum((1, 2))
        distances.append((SHARES * gaps).sum())
        pulled = server.pull(emits, aggregate.precision(NOISE), PLAIN, clip=None, owned_by_share=True)
        slope = slope_of(state, pulled.update(state, update))
    length = sum(value.square().sum() for name, value in slope.items() if name.startswith("server."))
    assert distances[2] < distances[1] < distances[0]
    # L = 1/2 sum w |h - lambda|^2 falls by lr |grad|^2.
    assert_close((distances[0] - distances[1]) / 2, 1e-3 * length, rtol=0.05, atol=0)


def test_reptile_is_momentum_on_the_pull(net):
    """Rate 0.9, momentum 0.9: v <- 0.9 v + (w - mean), w <- w - 0.9 v, the first step v = w - mean."""
    emits = emit.shared(net)
    pull = server.pull(emits, aggregate.mean, Groups({"": Sgd(0.9, 0.9)}), clip=None)
    state = pull.init(rng.key(0))
    value, velocity = state.params["fc1.weight"], 0.0
    for round in range(4):
        update = answer(emits, state, seed=round)
        state = pull.update(state, update)
        average = torch.einsum("c,c...->...", SHARES, update.params["fc1.weight"])
        velocity = 0.9 * velocity + (value - average)
        value = value - 0.9 * velocity
        assert_close(state.params["fc1.weight"], value, rtol=0, atol=1e-12)
        assert_close(state.slots["fc1.weight"], velocity, rtol=0, atol=1e-12)
    assert state.round == 4


def test_pull_clips_jointly(net):
    """A pseudo-gradient longer than the limit is scaled to it over all entries, hypernetwork and embeddings too."""
    emits = emits_for(net)["meta"]
    free = server.pull(emits, aggregate.precision(NOISE), PLAIN, clip=None)
    state = free.init(rng.key(0))
    update = answer(emits, state, scale=1.0)
    whole = slope_of(state, free.update(state, update))
    norm = tree.squared_norm(whole).sqrt()
    for limit in (1.0, 100.0):
        found = slope_of(state, server.pull(emits, aggregate.precision(NOISE), PLAIN, clip=limit).update(state, update))
        scale = min(1.0, limit / (norm.item() + 1e-6))
        for name in whole:
            assert_close(found[name], scale * whole[name], rtol=0, atol=1e-12)
    assert norm > 1.0


def test_decay_is_not_clipped(net):
    """Weight decay joins after the clip: with equal answers and decay d, w <- (1 - lr d) w."""
    emits = emit.shared(net)
    pull = server.pull(emits, aggregate.mean, Groups({"": Sgd(0.5, 0.0, 0.1)}), clip=1e-3)
    state = pull.init(rng.key(0))
    new = pull.update(state, answer(emits, state, scale=0.0))
    assert_close(new.params, tree.map(lambda value: 0.95 * value, state.params), rtol=0, atol=1e-14)


def test_dense_and_sparse_rows_through_pull(net):
    """Embeddings of absent clients decay as released and stay by default; those of the cohort agree."""
    emits = emits_for(net)["meta"]
    name, absent = "server.client.embedding", [1, 2]
    results = []
    for sparse in (True, False):
        pull = server.pull(emits, aggregate.precision(NOISE), Groups({"": Sgd(0.9, 0.3, 5e-2)}, sparse=sparse))
        state = pull.init(rng.key(0))
        results.append(pull.update(state, answer(emits, state)).params[name])
    before = state.params[name]
    assert torch.equal(results[0][absent], before[absent])
    assert_close(results[1][absent], (1 - 0.9 * 5e-2) * before[absent])
    assert_close(results[0][COHORT], results[1][COHORT], rtol=0, atol=1e-14)


def test_order_of_answers_changes_nothing(net):
    """The same answers in another order give the same server."""
    emits = emits_for(net)["meta"]
    pull = server.pull(emits, aggregate.precision(NOISE), PLAIN)
    state = pull.init(rng.key(0))
    update = answer(emits, state)
    order = torch.tensor([2, 0, 1])
    shuffled = in_order(update, order)
    one, other = (pull.update(state, u).params for u in (update, shuffled))
    for name in one:
        assert_close(one[name], other[name], rtol=0, atol=1e-12)


def test_weights_dropped_by_all_stay_without_momentum(net):
    """A weight that the whole cohort masks gets no gradient; one that a single client sends takes that client's."""
    base = emits_for(net)["one_for_all"]
    pull = server.pull(base, aggregate.precision(NOISE), PLAIN)
    state = pull.init(rng.key(0))
    update = answer(base, state)
    mask = torch.zeros(3, 3, 6).double()
    mask[1, 0] = 1.0
    received = state.params["fc1.weight"].expand(3, 3, 6)
    own = torch.where(mask > 0, update.params["fc1.weight"], received)
    new = pull.update(state, update._replace(params=update.params | {"fc1.mask": mask, "fc1.weight": own})).params
    assert_close(new["fc1.weight"][1:], state.params["fc1.weight"][1:], rtol=0, atol=0)
    assert_close(new["fc1.weight"][0], own[1, 0], rtol=0, atol=1e-9)


def test_weights_dropped_by_all_stay_with_momentum(net):
    """No one sends the weight, so there is no update, whatever the velocity."""
    base = emits_for(net)["one_for_all"]
    pull = server.pull(base, aggregate.precision(NOISE), Groups({"": Sgd(0.9, 0.9)}))
    state = pull.init(rng.key(0))
    state = pull.update(state, answer(base, state))
    update = answer(base, state)
    received = state.params["fc1.weight"].expand(3, 3, 6)
    mask = torch.zeros(3, 3, 6).double()
    mask[1, 0] = 1.0
    new = pull.update(state, update._replace(params=update.params | {"fc1.mask": mask, "fc1.weight": received}))
    for part in ("params", "slots"):
        before, after = getattr(state, part), getattr(new, part)
        assert_close(after["fc1.weight"][1:], before["fc1.weight"][1:], rtol=0, atol=0)
        assert (after["fc1.weight"][0] != before["fc1.weight"][0]).all()
        assert (after["fc1.bias"] != before["fc1.bias"]).all()


def test_a_client_without_rows_does_no_harm(net):
    """A cohort may hold a client with no training rows; its share is 0 and everything stays finite."""
    emits = emits_for(net)["meta"]
    pull = server.pull(emits, aggregate.precision(NOISE), PLAIN)
    state = pull.init(rng.key(0))
    new = pull.update(state, answer(emits, state, sizes=torch.tensor([0.0, 5.0, 5.0]).double()))
    assert all(value.isfinite().all() for value in new.params.values())
    assert torch.equal(new.params["server.client.embedding"][3], state.params["server.client.embedding"][3])


def test_a_cohort_without_rows_changes_nothing(net):
    """A cohort of one client that has no training rows has nothing to say."""
    emits = emits_for(net)["meta"]
    pull = server.pull(emits, aggregate.precision(NOISE), PLAIN)
    state = pull.init(rng.key(0))
    update = answer(emits, state, COHORT[:1], torch.zeros(1).double(), scale=0.0)
    for name, value in pull.update(state, update).params.items():
        assert_close(value, state.params[name], rtol=0, atol=1e-12)


def test_masks_are_not_optimised(net):
    """Masks have no velocity and no gradient, and stay as they are."""
    emits = emit.unmasked(emit.shared(net), ["fc1"])
    pull = server.pull(emits, aggregate.mean, PLAIN)
    state = pull.init(rng.key(0))
    assert "fc1.mask" not in state.slots
    state = state._replace(params=state.params | {"fc1.mask": torch.eye(3, 6).double()})
    new = pull.update(state, answer(emits, state))
    assert torch.equal(new.params["fc1.mask"], torch.eye(3, 6).double())


# --- SNIP ----------------------------------------------------------------------------------------------------------

STILL = server.Server(lambda key: None, lambda state, update: state)  # noqa: ARG005
"""A server that changes nothing."""


def pruned(net, *, lr=1.0, momentum=0.0, **options):
    emits = emit.unmasked(emit.shared(net), ["fc1"])
    pull = server.pull(emits, aggregate.mean, Groups({"": Sgd(lr, momentum)}))
    return emits, server.prune(pull, ["fc1"], **options)


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("lr", [1.0, 0.9])
def test_saliency(net, released, lr):
    """|w (w - mean)| before the step by default; after the step as released, which for lr = 1 is only rounding."""
    emits, snip = pruned(net, lr=lr, sparsity=0.7, released=released)
    state = snip.init(rng.key(0))
    update = answer(emits, state)
    average = torch.einsum("c,c...->...", SHARES, update.params["fc1.weight"])
    at = snip.update(state, update).params["fc1.weight"] if released else state.params["fc1.weight"]
    saliency = (at * (at - average)).abs()
    mask = snip.update(state, update).params["fc1.mask"]
    kept = 5 + (1 if released else 0)  # int(0.3 * 18) = 5
    assert mask.unique().tolist() == [0.0, 1.0]
    if not (released and lr == 1.0):
        assert mask.sum() == kept
        assert set(saliency.flatten().topk(kept).indices.tolist()) == set(mask.flatten().nonzero().flatten().tolist())
    else:
        assert saliency.max() < 1e-15


def test_the_papers_layer_keeps_thirty_percent():
    """32,768 weights at sparsity 0.7: 9,830 are kept, one more as released."""
    weight = rng.normal(rng.key(0), [128, 256], torch.float64)

    state = ServerState({"fc1.weight": weight, "fc1.mask": torch.ones(128, 256)}, {}, torch.zeros(()), rng.key(0))
    answers = Update(COHORT[:1], {"fc1.weight": weight[None] + 1.0}, SIZES[:1], {})
    for released, kept in ((False, 9_830), (True, 9_831)):
        snip = server.prune(STILL, ["fc1"], released=released)
        assert snip.update(state, answers).params["fc1.mask"].sum() == kept


@pytest.mark.parametrize("sparsity", [0.5, 0.7, 0.8, 0.9])
def test_sparsity_is_met_exactly(sparsity):
    """Of 100 weights, 100 (1 - sparsity) stay, also where 1 - sparsity is not exact in binary."""
    weight = torch.linspace(0.1, 1.0, 100).double()
    state = ServerState({"a.weight": weight, "a.mask": torch.ones(100)}, {}, torch.zeros(()), rng.key(0))
    answers = Update(COHORT[:1], {"a.weight": torch.zeros(1, 100).double()}, SIZES[:1], {})
    mask = server.prune(STILL, ["a"], sparsity=sparsity).update(state, answers).params["a.mask"]
    assert mask.sum().item() == round(100 * (1 - sparsity))
    assert mask[-1] == 1


def shuffled_masks(net, released):
    """FedAvg's masks in float32 when the same answers are summed in different orders."""
    emits, snip = pruned(net, released=released)
    state = snip.init(rng.key(0))
    state = ServerState(*({n: v.float() for n, v in part.items()} for part in state[:2]), torch.zeros(()), state.key)
    cohort = torch.arange(N)
    moved = answer(emits, state, cohort, torch.linspace(1.0, 2.0, N))
    masks = []
    for order in (torch.arange(N), torch.tensor([4, 2, 0, 1, 3]), torch.tensor([1, 3, 4, 0, 2])):
        update = in_order(moved, order)
        masks.append(snip.update(state, update).params["fc1.mask"])
    return masks


def test_snip_does_not_depend_on_float_order(net):
    """FedAvg+SNIP: another order of summation gives the same mask; the released rule's mask is rounding noise."""
    first, *others = shuffled_masks(net, released=False)
    assert all(torch.equal(first, other) for other in others)
    noisy, *others = shuffled_masks(net, released=True)
    assert not all(torch.equal(noisy, other) for other in others)
    assert not torch.equal(noisy, first)


def test_pruning_happens_once(net):
    """The mask is made after the first round and then stays."""
    emits, snip = pruned(net)
    state = snip.init(rng.key(0))
    assert (state.params["fc1.mask"] == 1).all()
    state = snip.update(state, answer(emits, state))
    first = state.params["fc1.mask"]
    assert first.mean() < 1
    elsewhere = answer(emits, state)._replace(params=answer(emits, snip.init(rng.key(9)), seed=1).params)
    state = snip.update(state, elsewhere)
    assert torch.equal(state.params["fc1.mask"], first)
    again = snip.update(state._replace(round=torch.zeros(()).double()), elsewhere)
    assert not torch.equal(again.params["fc1.mask"], first)


# --- FedBE ---------------------------------------------------------------------------------------------------------


def test_distillation_rates():
    """72 steps at 0.9: constant for 1-35, on a straight line for 36-53, 9e-5 for 54-72."""
    rates = server.distill_rates(distillation(lr=0.9))
    assert len(rates) == 72
    assert rates[:35] == [0.9] * 35
    assert rates[53:] == pytest.approx([9e-5] * 19, rel=1e-9)
    falls = [a - b for a, b in pairwise(rates[34:54])]
    assert falls == pytest.approx([(0.9 - 9e-5) / 19] * 19, rel=1e-9)
    assert min(rates) > 0


def test_averaged_iterates():
    """SWA takes steps 54, 57, ..., 72."""
    assert server.swa_steps(distillation()) == [54, 57, 60, 63, 66, 69, 72]


@pytest.mark.parametrize("steps", [4, 5, 7, 20])
def test_short_distillations_have_rates_and_iterates(steps):
    """Any number of steps from 4 on gives one rate per step, never negative, and at least one averaged iterate."""
    config = distillation(steps=steps, lr=0.5)
    rates = server.distill_rates(config)
    assert len(rates) == steps
    assert all(9e-5 - 1e-12 <= rate <= 0.5 for rate in rates)
    assert rates == pytest.approx(sorted(rates, reverse=True), rel=1e-9)
    chosen = server.swa_steps(config)
    assert chosen
    assert all(1 <= step <= steps for step in chosen)


def test_soft_labels():
    """Mean probabilities or mean logits, then p^(1/T) normalised: T = 1 leaves them, T = 1/2 squares them."""
    logits = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probs = logits.softmax(-1).mean(0)
    assert_close(server.soft_labels(distillation(temperature=1.0), logits), probs)
    squared = probs.square() / probs.square().sum(-1, keepdim=True)
    sharp = server.soft_labels(distillation(), logits)
    assert_close(sharp, squared)
    assert (sharp.max(-1).values > probs.max(-1).values).all()
    mixed = server.soft_labels(distillation(average="logits", temperature=1.0), logits)
    assert_close(mixed, logits.mean(0).softmax(-1))
    assert (mixed - probs).abs().max() > 1e-2


def members():
    """Three clients' weights, their weighted mean and variance."""
    params = {"w": torch.tensor([[0.0, 1.0], [1.0, 1.0], [4.0, 1.0]]).double()}
    params["v"] = params["w"].flip(0) + 1.0
    average = {name: torch.einsum("c,c...->...", SHARES, value) for name, value in params.items()}
    variance = torch.einsum("c,c...->...", SHARES, (params["w"] - average["w"]).square())
    return params, average, variance


def test_gaussian_teachers():
    """Mean model, then clients, then draws mean + scale std eps with the weighted variance, at least 1e-6."""
    params, average, variance = members()
    config = distillation(samples=1500, scale=0.5)
    both = server.teachers(config, average, params, SHARES, rng.key(0))
    found = both["w"]
    assert found.shape == (1 + 3 + 1500, 2)
    assert torch.equal(found[0], average["w"])
    assert torch.equal(found[1:4], params["w"])
    assert variance[1] == 0
    std = 0.5 * variance.clamp(min=1e-6).sqrt()
    draws = (found[4:] - average["w"]) / std
    assert (draws.mean(0).abs() < 5 / 1500**0.5).all()
    assert ((draws.var(0) - 1).abs() < 5 * (2 / 1500) ** 0.5).all()
    joint = torch.corrcoef(torch.cat([draws, both["v"][4:]], 1).T)
    assert (joint - torch.eye(4)).abs().max() < 5 / 1500**0.5


def test_dirichlet_teachers():
    """Draws are convex combinations of the clients' models, by data size on average, and the same for one key."""
    params = {"w": torch.eye(3).double(), "b": torch.eye(3).double()}
    average = tree.map(lambda value: torch.einsum("c,c...->...", SHARES, value), params)
    config = distillation(samples=400, sampling="dirichlet", concentration=50.0)
    drawn = server.teachers(config, average, params, SHARES, rng.key(0))
    mix = drawn["w"][4:]
    assert mix.shape == (400, 3)
    assert (mix >= 0).all()
    assert_close(mix.sum(1), torch.ones(400).double())
    assert_close(drawn["b"], drawn["w"])
    assert_close(mix.mean(0), SHARES, rtol=0, atol=0.02)
    assert mix.std(0).min() > 0.01
    again = server.teachers(config, average, params, SHARES, rng.key(0))
    assert torch.equal(again["w"], drawn["w"])
    assert not torch.equal(server.teachers(config, average, params, SHARES, rng.key(1))["w"], drawn["w"])


def distilled(net, **options):
    emits = emit.shared(net)
    pull = server.pull(emits, aggregate.mean, PLAIN)
    rows = torch.randn(20, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    asked = []

    def give(key):
        asked.append(int(key))
        return rows

    return emits, pull, server.distill(pull, net, give, distillation(**options)), rows, asked


def test_identical_teachers_leave_the_student(net):
    """All clients equal, no spread, no sharpening: the student agrees with its teachers and stays where it is."""
    emits, pull, fedbe, _, _ = distilled(net, scale=0.0, temperature=1.0, lr=0.5, steps=8)
    state = fedbe.init(rng.key(0))
    update = answer(emits, state, scale=0.0)
    new, plain = fedbe.update(state, update), pull.update(state, update)
    for name in plain.params:
        assert_close(new.params[name], plain.params[name], rtol=0, atol=1e-12)
    assert new.round == 1
    # Draws around equal clients differ by 0.1 sqrt(1e-6), so the student stays near.
    emits, pull, fedbe, _, _ = distilled(net, temperature=1.0, lr=0.5, steps=8)
    near = fedbe.update(state, update)
    gap = max((near.params[name] - plain.params[name]).abs().max() for name in plain.params)
    assert 0 < gap < 1e-3


def test_distillation_goes_to_the_ensemble(net):
    """The student's cross-entropy to the ensemble's labels falls below the mean model's."""
    options = {"samples": 4, "scale": 1.0, "temperature": 0.5, "lr": 0.5, "steps": 20}
    emits, pull, fedbe, rows, asked = distilled(net, **options)
    state = fedbe.init(rng.key(0))
    update = answer(emits, state, scale=1.0)
    new, plain = fedbe.update(state, update), pull.update(state, update)
    key = rng.fold(state.key, 30_000, 0)
    ensemble = server.teachers(distillation(**options), plain.params, update.params, SHARES, rng.fold(key, 1))
    logits = vmap(lambda own: net.apply(own, rows, None)[0])(ensemble)
    assert logits.shape == (1 + 3 + 4, 20, 3)
    target = server.soft_labels(distillation(**options), logits)

    def loss(params):
        return -(target * net.apply(params, rows, None)[0].log_softmax(-1)).sum(-1).mean()

    assert loss(new.params) < loss(plain.params)
    assert asked == [int(rng.fold(key, 0))]


def test_distillation_by_hand(net):
    """Four full-batch steps of clipped SGD at the schedule's rates; step 3 alone is averaged into the new model."""
    options = {"samples": 1, "lr": 0.7, "steps": 4, "batch": 64, "clip": 0.2}
    emits, pull, fedbe, rows, _ = distilled(net, **options)
    config = distillation(**options)
    assert server.swa_steps(config) == [3]
    state = fedbe.init(rng.key(0))
    update = answer(emits, state, scale=1.0)
    start = pull.update(state, update).params
    ensemble = server.teachers(config, start, update.params, SHARES, rng.fold(state.key, 30_000, 0, 1))
    target = server.soft_labels(config, vmap(lambda own: net.apply(own, rows, None)[0])(ensemble))
    student = start
    for lr in server.distill_rates(config)[:3]:
        leaves = {name: value.clone().requires_grad_() for name, value in student.items()}
        loss = -(target * net.apply(leaves, rows, None)[0].log_softmax(-1)).sum(-1).mean()
        slopes = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        student = tree.axpy(-lr, tree.clip(slopes, 0.2), student)
    found = fedbe.update(state, update).params
    for name in found:
        assert_close(found[name], student[name], rtol=0, atol=1e-12)


def test_each_round_distils_anew(net):
    """Another round draws other rows, teachers and batches from the run's key."""
    emits, _, fedbe, _, asked = distilled(net, steps=4)
    state = fedbe.init(rng.key(0))
    update = answer(emits, state)
    one, later = fedbe.update(state, update), fedbe.update(state._replace(round=state.round + 1), update)
    assert len(set(asked)) == 2
    assert (one.params["fc0.weight"] - later.params["fc0.weight"]).abs().max() > 0
