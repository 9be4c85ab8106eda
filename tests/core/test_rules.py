"""Laws of aggregation rules: what liars can and cannot do, closed forms, and how rules reach a server."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.func import vmap
from torch.testing import assert_close

from metavd.core import aggregate, emit, rng, rules, server
from metavd.core.optim import Groups, Sgd
from metavd.core.posterior import LogVariance
from metavd.core.rules import Ballot, consensus
from metavd.core.rules.coordinates import weighted_median
from metavd.core.types import Update
from metavd.errors import SpecError

C = 9
EVERY = ("mean", "median", "trimmed:0.3", "krum:2", "multi-krum:2", "multi-krum:2:3", "geometric-median", "clip",
         "clip:2", "clip+median", "multi-krum:2+trimmed:0.1")  # fmt: skip
ROBUST = ("median", "trimmed:0.34", "clip+median")


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ballot(moves, weight=None):
    """Votes by weight; equal weights by default."""
    count = len(next(iter(moves.values())))
    weight = torch.full((count,), 1 / count).double() if weight is None else weight / weight.sum()
    votes = {name: weight.reshape(-1, *[1] * (value.dim() - 1)) for name, value in moves.items()}
    return Ballot(moves, votes, weight, torch.ones_like(weight))


def agreed(text, moves, weight=None):
    rule = rules.parse(text) or rules.RULES[text].build()
    counted = rule(ballot(moves, weight))
    return consensus(counted.moves, counted.votes)


def answers(seed=0, count=C):
    return {"a.weight": drawn(seed, count, 3, 4), "a.bias": drawn(seed + 1, count, 3)}


def weights(seed, count=C):
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)).double() + 0.2


# --- laws of all rules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", EVERY)
def test_equal_answers_are_their_mean(text):
    """Nobody lies and all say the same: every rule says that too."""
    said = {name: value[:1].expand(C, *value.shape[1:]) for name, value in answers().items()}
    found = agreed(text, said, weights(3))
    assert_close(found, {name: value[0] for name, value in said.items()}, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("text", EVERY)
def test_the_order_of_clients_does_not_matter(text):
    said, weight = answers(), weights(4)
    order = torch.tensor([4, 0, 8, 2, 7, 1, 3, 6, 5])
    shuffled = {name: value[order] for name, value in said.items()}
    assert_close(agreed(text, shuffled, weight[order]), agreed(text, said, weight), rtol=0, atol=1e-12)


@pytest.mark.parametrize("text", EVERY)
def test_one_client_alone_is_itself(text):
    said = answers(count=1)
    assert_close(agreed(text, said), {name: value[0] for name, value in said.items()}, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("text", EVERY)
def test_moving_and_scaling_all_answers_moves_and_scales_the_consensus(text):
    """Except for clip, which measures from what was sent and so knows scale alone."""
    said, weight = answers(), weights(5)
    found = agreed(text, said, weight)
    double = agreed(text, {name: 2 * value for name, value in said.items()}, weight)
    assert_close(double, {name: 2 * value for name, value in found.items()}, rtol=1e-9, atol=1e-9)
    if "clip" not in text:
        moved = agreed(text, {name: value + 3 for name, value in said.items()}, weight)
        assert_close(moved, {name: value + 3 for name, value in found.items()}, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("text", EVERY)
def test_a_client_without_weight_does_not_count(text):
    """One that has no rows may say what it likes; distances of Krum's neighbours see it, and so it lies near."""
    said, weight = answers(), weights(6)
    weight[3] = 0
    near = "krum" in text or "clip" in text
    other = {name: value.clone() for name, value in said.items()}
    for name, value in other.items():
        value[3] = said[name][3] + (1e-9 if near else 1e9)
    assert_close(agreed(text, other, weight), agreed(text, said, weight), rtol=0, atol=1e-6)


@pytest.mark.parametrize("text", EVERY)
def test_a_rule_asks_the_device_for_no_number(text):
    """On tensors without values, where such a question is an error: a GPU can then capture the server's update."""
    said, weight = answers(), weights(2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = agreed(text, {name: torch.empty_like(value) for name, value in said.items()}, torch.empty_like(weight))
    assert {name: value.shape for name, value in found.items()} == {n: v.shape[1:] for n, v in said.items()}


def test_the_mean_leaves_the_ballot_alone():
    """`mean` is no rule for a server at all; within a chain it changes nothing."""
    assert rules.parse("mean") is None
    said = answers()
    assert_close(agreed("clip+mean", said), agreed("clip", said), rtol=0, atol=0)
    wanted = {name: value.mean(0) for name, value in said.items()}
    assert_close(agreed("mean", said), wanted, rtol=1e-12, atol=1e-14)
    assert_close(agreed("trimmed:0", said), wanted, rtol=1e-12, atol=1e-14)


# --- liars -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ROBUST)
@pytest.mark.parametrize("size", [1e3, 1e30, 1e150])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), liars=st.integers(1, 3))
def test_a_minority_cannot_leave_the_honest_range(text, size, seed, liars):
    """Weight by weight, whatever a third of nine clients says, on one side or on both."""
    said = answers(seed)
    for value in said.values():
        value[:liars] = size * drawn(seed + 7, liars, *value.shape[1:]).sign()
    found = agreed(text, said)
    for name, value in said.items():
        honest = value[liars:]
        slack = 1e-12
        if "clip" in text:  # honest answers are shortened too, so the range reaches to 0
            honest = torch.cat([honest, torch.zeros_like(honest[:1])])
        assert (found[name] >= honest.min(0).values - slack).all()
        assert (found[name] <= honest.max(0).values + slack).all()


def test_trimming_a_tenth_does_not_stop_three_of_nine():
    """The share is what it withstands: the test above is one that can fail."""
    said = answers()
    for value in said.values():
        value[:3] = 1e6
    assert agreed("trimmed:0.1", said)["a.bias"].min() > 1e4
    assert agreed("mean", said)["a.bias"].min() > 1e4


@pytest.mark.parametrize("liars", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_krum_picks_an_honest_client(liars, seed):
    """C = 2 f + 3 clients, the honest ones around 1; liars agree with each other, or are far away."""
    count = 2 * liars + 3
    x = 1 + 0.1 * drawn(seed, count, 20)
    for lie in (-5 + 0 * drawn(seed + 1, liars, 20), 1e12 * drawn(seed + 2, liars, 20)):
        x[:liars] = lie
        one = rules.parse(f"krum:{liars}")(ballot({"a.weight": x}))
        assert one.trust.sum() == 1
        assert one.trust[:liars].sum() == 0
        assert_close(consensus(*one[:2])["a.weight"], x[int(one.trust.argmax())], rtol=1e-12, atol=0)
        several = rules.parse(f"multi-krum:{liars}")(ballot({"a.weight": x}))
        assert int(several.trust.sum()) == count - liars - 2
        assert several.trust[:liars].sum() == 0
        assert several.votes["a.weight"][:liars].sum() == 0


def test_krum_against_the_definition():
    """The sum of squared distances to the C - f - 2 nearest others, by a plain loop."""
    said = answers()
    flat = torch.cat([value.flatten(1) for value in said.values()], 1)
    score = []
    for i in range(C):
        far = sorted(float((flat[i] - flat[j]).square().sum()) for j in range(C) if j != i)
        score.append(sum(far[: C - 2 - 2]))
    best = min(range(C), key=score.__getitem__)
    assert_close(agreed("krum:2", said), {name: value[best] for name, value in said.items()}, rtol=1e-12, atol=0)
    three = sorted(range(C), key=score.__getitem__)[:3]
    wanted = {name: value[three].mean(0) for name, value in said.items()}
    assert_close(agreed("multi-krum:2:3", said), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [1e2, 1e6, 1e12])
def test_the_geometric_median_withstands_four_of_nine(size):
    """Its distance from the honest mean stays bounded by the honest spread, however large the lies are."""
    x = drawn(0, C, 6)
    x[:4] = size
    honest = x[4:].mean(0)
    found = agreed("geometric-median:200", {"a.weight": x})["a.weight"]
    # Known bound: |z - c| <= 2 (1 - e) / (1 - 2 e) max_i |x_i - c| over honest i, e the liars' share.
    share = 4 / C
    bound = 2 * (1 - share) / (1 - 2 * share) * (x[4:] - honest).norm(dim=1).max()
    assert (found - honest).norm() < bound
    assert agreed("mean", {"a.weight": x})["a.weight"].norm() > 0.1 * size


# --- closed forms ----------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.integers(-4, 4), min_size=1, max_size=7), seed=st.integers(0, 10**6), whole=st.booleans()
)  # fmt: skip
def test_weighted_median_against_brute_force(values, seed, whole):
    """The midpoint of all answers z that minimise sum_i v_i |x_i - z|."""
    x = torch.tensor(values).double()
    votes = weights(seed, len(values))
    votes = (3 * votes).round() if whole else votes  # whole votes have ties, and may be 0
    if votes.sum() == 0:
        votes[0] = 1.0
    loss = {float(z): float((votes * (x - z).abs()).sum()) for z in x}
    best = [z for z, value in loss.items() if value <= min(loss.values()) + 1e-9]
    assert float(weighted_median(x, votes)) == pytest.approx((min(best) + max(best)) / 2)


def test_trimmed_mean_of_equal_votes():
    """Of ten clients, a fifth off each end: the mean of the middle six; an uneven share takes answers in part."""
    x = drawn(2, 10, 5)
    ordered = x.sort(0).values
    assert_close(agreed("trimmed:0.2", {"a": x})["a"], ordered[2:8].mean(0), rtol=1e-12, atol=1e-14)
    wanted = (ordered[2:8].sum(0) + 0.5 * (ordered[1] + ordered[8])) / 7
    assert_close(agreed("trimmed:0.15", {"a": x})["a"], wanted, rtol=1e-12, atol=1e-14)


def test_two_votes_are_two_clients():
    """A client with twice the weight counts as two that say the same, for rules that look at single weights."""
    said = answers(count=4)
    twice = {name: torch.cat([value, value[:1]]) for name, value in said.items()}
    weight = torch.tensor([2.0, 1, 1, 1]).double()
    for text in ("median", "trimmed:0.3", "geometric-median:100", "clip"):
        assert_close(agreed(text, said, weight), agreed(text, twice), rtol=1e-7, atol=1e-9)


def test_geometric_median_of_points_on_a_line_is_their_median():
    """Of an odd number of points on a line it is the middle one."""
    along = torch.tensor([0.0, 1.0, 2.5, 7.0, 30.0]).double()
    direction = torch.tensor([3.0, 4.0]).double()
    found = agreed("geometric-median:500", {"a": along[:, None] * direction + 1})["a"]
    assert_close(found, 2.5 * direction + 1, rtol=0, atol=1e-3)


def test_geometric_median_of_a_triangle_is_its_fermat_point():
    """In a triangle with base (-1, 0), (1, 0) and a high tip it sees every side under 120 degrees: (0, 1/sqrt 3)."""
    corners = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 4.0]]).double()
    found = agreed("geometric-median:300", {"a": corners})["a"]
    assert_close(found, torch.tensor([0.0, 1 / math.sqrt(3)]).double(), rtol=0, atol=1e-6)


def test_geometric_median_minimises_the_sum_of_distances():
    """The gradient of sum_i w_i |x_i - z| vanishes, over all entries together."""
    said, weight = answers(), weights(8)
    found = agreed("geometric-median:500", said, weight)
    flat = torch.cat([value.flatten(1) for value in said.values()], 1)
    z = torch.cat([found[name].flatten() for name in said])
    slope = (weight[:, None] * (z - flat) / (z - flat).norm(dim=1, keepdim=True)).sum(0)
    assert slope.norm() < 1e-9


def test_clip_shortens_only_what_is_longer_than_the_median():
    """Directions stay, lengths are at most the median's, and what is shorter is untouched to the bit."""
    x = drawn(3, 5, 12) * torch.tensor([0.1, 1.0, 2.0, 50.0, 1e9])[:, None].double()
    parts = {"a": x[:, :4], "b": x[:, 4:].reshape(5, 2, 4)}
    length = x.norm(dim=1)
    limit = length.median()
    for factor in (1.0, 2.0):
        counted = rules.parse(f"clip:{factor}")(ballot(parts))
        found = torch.cat([counted.moves["a"], counted.moves["b"].flatten(1)], 1)
        for i in range(5):
            if length[i] <= factor * limit:
                assert torch.equal(found[i], x[i])
            else:
                assert_close(found[i], x[i] * factor * limit / length[i], rtol=1e-12, atol=0)


# --- votes by precision ----------------------------------------------------------------------------------------------

NOISE = LogVariance(("fc",), offset=0.0, low=-60.0, high=60.0)


def sure_answers(seed=0):
    return {"fc.weight": drawn(seed, C, 4, 5), "fc.logvar": drawn(seed + 1, C, 4, 5), "fc.bias": drawn(seed + 2, C, 4)}


def test_equal_spreads_vote_by_weight():
    """Then precision says nothing, and neither does its cap."""
    params, weight = sure_answers() | {"fc.logvar": torch.full((C, 4, 5), -3.0).double()}, weights(1)
    found = aggregate.votes(params, weight, ["fc.weight", "fc.bias"], NOISE)
    share = found["fc.weight"] / found["fc.weight"].sum(0)
    assert_close(share, (weight / weight.sum())[:, None, None].expand_as(share), rtol=1e-12, atol=0)
    assert_close(found["fc.bias"], weight[:, None], rtol=0, atol=0)


def test_nobody_is_surer_than_the_median_client():
    """v_i = w_i min(1 / s_i^2, median): an unsure client counts less, a boastful one no more than the median one."""
    params, weight = sure_answers(), torch.ones(C).double()
    precision = (-params["fc.logvar"]).exp()
    found = aggregate.votes(params, weight, ["fc.weight"], NOISE)["fc.weight"]
    assert_close(
        found, torch.minimum(precision, precision.median(0).values), rtol=1e-8, atol=0
    )  # the posterior adds 1e-10


def test_boastful_liars_need_a_quarter():
    """Two of nine claim to be certain of an absurd weight: the median stays among the honest answers."""
    params = sure_answers()
    params["fc.weight"][:2], params["fc.logvar"][:2] = 1e9, -50.0
    weight = torch.full((C,), 1 / C).double()
    moves = {"fc.weight": params["fc.weight"]}
    votes = aggregate.votes(params, weight, moves, NOISE)
    counted = rules.parse("median")(Ballot(moves, votes, weight, torch.ones(C)))
    assert consensus(counted.moves, counted.votes)["fc.weight"].abs().max() < 10
    told = aggregate.precision(NOISE)(params, weight)["fc.weight"]
    assert told.min() > 1e8, "without a rule they have it their way"


def test_who_drops_a_weight_does_not_vote_on_it():
    """Masks count as in `precision`; where everyone drops a weight nothing moves."""
    params, weight = sure_answers(), torch.full((C,), 1 / C).double()
    mask = torch.ones(C, 4, 5).double()
    mask[0, 0], mask[:, 1] = 0.0, 0.0
    votes = aggregate.votes(params | {"fc.mask": mask}, weight, ["fc.weight"], NOISE)
    assert (votes["fc.weight"][0, 0] == 0).all()
    assert (votes["fc.weight"][1:, 0] > 0).all()
    for text in ("median", "trimmed:0.2", "geometric-median", "multi-krum:1"):
        counted = rules.parse(text)(Ballot({"fc.weight": params["fc.weight"]}, votes, weight, torch.ones(C)))
        found = consensus(counted.moves, counted.votes)["fc.weight"]
        assert (found[1] == 0).all()
        assert torch.isfinite(found).all()


# --- a server with a rule --------------------------------------------------------------------------------------------

POSTERIOR = LogVariance(("fc1",), offset=-8.5, high=0.0)
COHORT = torch.tensor([3, 0, 4, 1, 2, 5, 6])
SIZES = torch.tensor([10.0, 50.0, 40.0, 20.0, 30.0, 25.0, 35.0]).double()


def emits_for(net, kind):
    base = emit.shared(net)
    if kind == "meta":
        return emit.meta(base, net, POSTERIOR, 7, size=3, width=4)
    return base if kind == "shared" else emit.learned(base, net, POSTERIOR, 7)


def round_of(emits, base, seed=0):
    """A start and the answers of a cohort to it, moved at random."""
    state = base.init(rng.key(1))
    sent = vmap(emits.apply, (None, 0, None))(state.params, COHORT, state.round)
    answered = {name: value + 0.1 * drawn(seed + i, *value.shape) for i, (name, value) in enumerate(sent.items())}
    return state, Update(COHORT, answered, SIZES, sent)


@pytest.mark.parametrize("kind", ["shared", "meta", "one_per_client"])
def test_a_rule_that_changes_nothing_is_the_plain_server(net, kind):
    """trimmed:0 counts every vote: the same step to rounding, also of hypernetwork, embeddings and owned rows."""
    emits = emits_for(net, kind)
    base = server.pull(emits, aggregate.mean, Groups({"": Sgd(1.0)}))
    state, update = round_of(emits, base)
    found = server.guarded(base, rules.parse("trimmed:0")).update(state, update)
    assert_close(found.params, base.update(state, update).params, rtol=1e-9, atol=1e-11)


def test_a_server_lands_on_the_consensus_of_differences(net):
    """FedAvg's server with the median: each weight goes to sent + weighted median of what clients moved it by."""
    emits = emits_for(net, "shared")
    base = server.pull(emits, aggregate.mean, Groups({"": Sgd(1.0)}), clip=None)
    state, update = round_of(emits, base)
    found = server.guarded(base, rules.parse("median")).update(state, update)
    for name, value in found.params.items():
        wanted = state.params[name] + weighted_median(update.params[name] - update.sent[name],
                                                      SIZES.reshape(-1, *[1] * value.dim()))  # fmt: skip
        assert_close(value, wanted, rtol=0, atol=1e-12)
    alike = server.guarded(base, rules.parse("median"), by_size=False).update(state, update)
    some = next(iter(found.params))
    wanted = state.params[some] + (update.params[some] - update.sent[some]).median(0).values
    assert_close(alike.params[some], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["meta", "one_per_client"])
def test_what_is_a_client_s_own_is_not_mixed(net, kind):
    """Law: another client's lie about its own spread does not touch my row, under rules for single weights."""
    emits = emits_for(net, kind)
    base = server.pull(emits, aggregate.mean, Groups({"": Sgd(1.0)}), clip=None)
    state, update = round_of(emits, base)
    guarded = server.guarded(base, rules.parse("median"), POSTERIOR)
    lied = {**update.params, "fc1.logvar": update.params["fc1.logvar"].clone()}
    lied["fc1.logvar"][0] += 0.5
    name = emit.EMBEDDING if kind == "meta" else "server.client.fc1.logvar"
    honest, other = (guarded.update(state, update._replace(params=p)).params[name] for p in (update.params, lied))
    others = [client for client in range(7) if client != int(COHORT[0])]
    assert_close(other[others], honest[others], rtol=0, atol=1e-13)
    assert not torch.equal(other[int(COHORT[0])], honest[int(COHORT[0])])


def test_who_is_not_chosen_moves_nothing(net):
    """Under Krum a client that is not believed does not move its own row or the hypernetwork either."""
    emits = emits_for(net, "one_per_client")
    base = server.pull(emits, aggregate.mean, Groups({"": Sgd(1.0)}), clip=None)
    state, update = round_of(emits, base)
    for value in update.params.values():
        value[0] += 100.0
    found = server.guarded(base, rules.parse("multi-krum:1"), POSTERIOR).update(state, update)
    name = "server.client.fc1.logvar"
    moved = (found.params[name] - state.params[name]).flatten(1).abs().amax(1) > 0
    assert not moved[int(COHORT[0])]
    assert int(moved.sum()) == len(COHORT) - 1 - 2


def test_texts():
    """Chains read from left to right; a wrong text is one sentence."""
    for text, says in {
        "medain": "no rule 'medain'; did you mean median", "trimmed:0.5": "between 0 and 0.5", "krum:-1": "at least 0",
        "clip:0": "above 0", "median:2": "takes no number", "krum:1.5": "a whole number", "": "no rule ''",
        "geometric-median:0": "at least 1 step", "multi-krum:1:-2": "at least 0", "clip+": "no rule ''",
    }.items():  # fmt: skip
        with pytest.raises(SpecError, match=says):
            rules.parse(text)
    rules.check_cohort("clip+krum:2", 7)
    with pytest.raises(SpecError, match="needs a cohort of at least 7, but cohort is 6"):
        rules.check_cohort("clip+krum:2", 6)
    for one, two in itertools.permutations(("clip", "median", "krum:1"), 2):
        assert rules.parse(f"{one}+{two}") is not None
