"""Laws of differential privacy: sensitivity, what the server may see, and an attack that should fail.

Shape letters: C clients, R runs.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import beta, kstest
from torch.func import vmap
from torch.testing import assert_close

from metavd.core import aggregate, emit, privacy, rng, server
from metavd.core.accountant import Mechanism
from metavd.core.optim import Groups, Sgd
from metavd.core.types import Emit, Update

MOMENTUM = Groups({"": Sgd(0.9, 0.9)})


def mechanism(**values) -> Mechanism:
    usual = {"clip": 1.0, "noise": 0.0, "epsilon": 0.0, "delta": 1e-5, "clients": 8, "cohort": 8, "rounds": 5}
    return Mechanism(**(usual | values))


def drawn(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def shared(dtype=torch.float64) -> Emit:
    def init(key):  # noqa: ARG001
        return {"a.weight": drawn(1, 3, 4, dtype=dtype), "a.bias": drawn(2, 3, dtype=dtype)}

    return Emit(init, lambda params, client, round: dict(params))  # noqa: ARG005


def answers(state, moves, weight=None) -> Update:
    count = len(next(iter(moves.values())))
    sent = {name: value.expand(count, *value.shape) for name, value in state.params.items() if name in moves}
    weight = torch.ones(count, dtype=state.round.dtype) if weight is None else weight
    return Update(torch.arange(count), {name: sent[name] + moves[name] for name in moves}, weight, sent)


def moves(seed, count=8, scale=1.0, dtype=torch.float64):
    return {"a.weight": scale * drawn(seed, count, 3, 4, dtype=dtype),
            "a.bias": scale * drawn(seed + 1, count, 3, dtype=dtype)}  # fmt: skip


def pulling(emits, groups=MOMENTUM):
    return server.pull(emits, aggregate.mean, groups)


def vector(params):
    return torch.cat([value.flatten() for value in params.values()])


# --- the mean that is told -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_clip_and_no_noise_is_the_base_to_the_bit(dtype):
    """Whatever rows clients have: with equal weights, momentum included, over rounds."""
    emits = shared(dtype)
    base, hidden = pulling(emits), privacy.released(pulling(emits), emits, mechanism(clip=math.inf))
    wanted, found = base.init(rng.key(0)), hidden.init(rng.key(0))
    for round in range(4):
        said = moves(10 * round, scale=0.3, dtype=dtype)
        wanted = base.update(wanted, answers(wanted, said))
        found = hidden.update(found, answers(found, said, torch.arange(1.0, 9.0, dtype=dtype)))
        assert_close(found.params, wanted.params, rtol=0, atol=0)
        assert_close(found.slots, wanted.slots, rtol=0, atol=0)


finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
anything = st.floats(width=32)


@settings(max_examples=200, deadline=None)
@given(st.lists(anything, min_size=5, max_size=5), st.floats(1e-3, 1e3))
@example([0.0, 0.0, *[3.448370659511729e37] * 3], 0.03125)  # clip / length is no normal number of float32
def test_no_answer_moves_the_sum_by_more_than_the_clip(values, clip):
    """Any numbers, NaN and infinity among them: neighbours' sums differ by the clip at most."""
    one = {"a": torch.tensor([values[:3]]), "b": torch.tensor([values[3:]])}
    cut = privacy.shortened(one, privacy.lengths(one), clip)
    assert vector(cut).double().norm() <= clip * (1 + 1e-6)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 3.0))
def test_one_client_more_moves_what_the_server_is_told_by_the_clip_at_most(seed, clip):
    """Through the whole update: SGD(1) shows the mean that was told, times the cohort."""
    emits = shared()
    hidden = privacy.released(pulling(emits, Groups({"": Sgd(1.0)})), emits, mechanism(clip=clip))
    state, said = hidden.init(rng.key(0)), moves(seed)
    fewer = {name: value[:-1] for name, value in said.items()}
    both = [vector(hidden.update(state, answers(state, each)).params) for each in (said, fewer)]
    assert 8 * (both[0] - both[1]).norm() <= clip * (1 + 1e-9)


def test_short_answers_are_left_as_they_are():
    one = moves(3, scale=0.01)
    cut = privacy.shortened(one, privacy.lengths(one), 1.0)
    assert_close(cut, one, rtol=0, atol=0)


def test_the_base_sees_one_client_that_is_nobody():
    """Whatever a method's server does with an update, it has only the noisy mean to do it with."""
    seen = []
    emits = shared()
    base = pulling(emits)
    watched = base._replace(update=lambda state, update: seen.append(update) or base.update(state, update))
    hidden = privacy.released(watched, emits, mechanism(noise=1.0))
    state = hidden.init(rng.key(0))
    state = hidden.update(state, answers(state, moves(1)))
    hidden.update(state, Update(torch.zeros(0, dtype=torch.int64), {}, torch.zeros(0), {}))
    for update in seen:
        assert update.client.tolist() == [0]
        assert update.weight.tolist() == [1.0]
        assert {len(value) for part in (update.params, update.sent, update.moved) for value in part.values()} == {1}


def test_a_round_without_answers_has_the_noise_of_any_other():
    """Same key and round: an empty round, and one whose clients did not move, end in the same state."""
    emits = shared()
    hidden = privacy.released(pulling(emits), emits, mechanism(noise=2.0, clip=0.5))
    state = hidden.init(rng.key(0))
    still = {name: torch.zeros_like(value) for name, value in moves(0).items()}
    nobody = Update(torch.zeros(0, dtype=torch.int64), {}, torch.zeros(0), {})
    found, wanted = hidden.update(state, nobody), hidden.update(state, answers(state, still))
    assert_close(found.params, wanted.params, rtol=0, atol=1e-12)
    assert (vector(found.params) - vector(state.params)).norm() > 0


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("normal", [rng.normal, privacy.secret])
def test_the_noise_has_the_length_that_is_accounted(normal, adaptive):
    """It is z clip / cohort on every weight, more beside a count: 400,000 of them, by a Kolmogorov-Smirnov test.

    Secret numbers are others in every run. A bound that one right run in a thousand million exceeds still sees a length
    that is wrong by three per cent.
    """
    emits = Emit(lambda key: {"w": torch.zeros(400_000).double()}, lambda params, *_: dict(params))  # noqa: ARG005
    m = mechanism(noise=1.5, clip=0.4, adaptive=adaptive)
    hidden = privacy.released(pulling(emits, Groups({"": Sgd(1.0)})), emits, m, normal)
    state = hidden.init(rng.key(7))
    new = hidden.update(state, answers(state, {"w": torch.zeros(8, 400_000).double()}))
    z = (1.5**-2 - 3.0**-2) ** -0.5 if adaptive else 1.5
    told = new.params["w"] / (z * 0.4 / 8)
    assert kstest(told.numpy(), "norm").pvalue > 1e-9
    assert kstest(told.numpy() * 1.03, "norm").pvalue < 1e-9


def test_the_count_below_an_adaptive_clip_has_noise_of_its_own():
    """Clients that do not move: log clip falls by 0.2 (1 - 0.5 + N(0, (1.5 / 8)^2)); 2,000 runs."""
    emits = Emit(lambda key: {"w": torch.zeros(1).double()}, lambda params, *_: dict(params))  # noqa: ARG005
    hidden = privacy.released(pulling(emits), emits, mechanism(noise=1.5, adaptive=True))

    def clip(key):
        state = hidden.init(key)
        return hidden.update(state, answers(state, {"w": torch.zeros(8, 1).double()})).params[privacy.CLIP]

    found = vmap(clip)(rng.fold(rng.key(2), torch.arange(2000))).log() / -0.2 - 0.5
    assert kstest((found / (1.5 / 8)).numpy(), "norm").pvalue > 1e-3


def test_secret_numbers_do_not_repeat_and_seeded_ones_do():
    key = rng.key(1)
    assert not torch.equal(privacy.secret(key, [100]), privacy.secret(key, [100]))
    assert torch.equal(rng.normal(key, [100]), rng.normal(key, [100]))
    assert privacy.secret(key, ()).shape == ()
    assert privacy.secret(key, [3, 0]).shape == (3, 0)


def test_sites_parts_add_up_to_the_servers_noise():
    """Clients that do not move: the variance of the sum is (z clip)^2, each of them has 1/n of it."""
    m = mechanism(noise=2.0, clip=0.5, sites=True)
    veil, received = privacy.veiled(m), {"w": torch.zeros(30_000).double()}
    parts = torch.stack([veil(received, received, rng.fold(rng.key(0), i))["w"] for i in range(8)])
    assert parts.std(1).tolist() == pytest.approx([2 * 0.5 / 8**0.5] * 8, rel=0.03)
    assert float(parts.sum(0).std()) == pytest.approx(2 * 0.5, rel=0.03)


def test_a_server_adds_up_what_sites_have_hidden_and_cuts_liars():
    """Honest answers pass as they are; one a thousand times as long does not move the mean by more than its share."""
    m = mechanism(noise=1.0, sites=True)
    emits = shared()
    hidden = privacy.released(pulling(emits, Groups({"": Sgd(1.0)})), emits, m)
    state, veil = hidden.init(rng.key(0)), privacy.veiled(m)
    given = answers(state, moves(5))
    sent = [veil(dict(state.params), {n: v[i] for n, v in given.params.items()}, rng.fold(rng.key(3), i))
            for i in range(8)]  # fmt: skip
    hid = given._replace(params={name: torch.stack([each[name] for each in sent]) for name in sent[0]})
    new = hidden.update(state, hid)
    assert_close(new.params, {name: value.mean(0) for name, value in hid.params.items()}, rtol=0, atol=1e-12)
    lie = hid._replace(params={name: torch.cat([v[:-1], 1e3 * v[-1:]]) for name, v in hid.params.items()})
    far = vector(hidden.update(state, lie).params) - vector(new.params)
    assert 8 * far.norm() < 2 * (1 + 2 * (15 / 8) ** 0.5) + 1


# --- what clients would own ------------------------------------------------------------------------------------------


def test_what_a_client_would_own_is_shared():
    """One row for all: whoever is asked receives the same, NEW too."""
    table = emit.OWNED + "spread"

    def init(key):  # noqa: ARG001
        return {"w": torch.zeros(2), table: torch.arange(6.0).reshape(3, 2)}

    def apply(params, client, round):  # noqa: ARG001
        return {"w": params["w"], "spread": emit.row(params[table], client)}

    alike = emit.alike(Emit(init, apply))
    params = alike.init(rng.key(0))
    assert params[table].tolist() == [[0.0, 1.0]]
    got = vmap(alike.apply, (None, 0, None))(params, torch.tensor([-1, 0, 2]), torch.tensor(0.0))
    assert got["spread"].tolist() == [[0.0, 1.0]] * 3


# --- an adaptive clip ------------------------------------------------------------------------------------------------


def test_an_adaptive_clip_finds_the_quantile():
    """Without noise: lengths 1 to 8, and 0.75 of them at most 6."""
    emits = Emit(lambda key: {"w": torch.zeros(1).double()}, lambda params, *_: dict(params))  # noqa: ARG005
    m = mechanism(adaptive=True, clip=0.1, quantile=0.75, clip_rate=0.2)
    hidden = privacy.released(pulling(emits, Groups({"": Sgd(0.0)})), emits, m)
    state = hidden.init(rng.key(0))
    said = {"w": torch.arange(1.0, 9.0).double()[:, None]}
    for _ in range(150):
        state = hidden.update(state, answers(state, said))
    assert 5.5 < float(state.params[privacy.CLIP]) < 7.0
    assert state.params["w"].tolist() == [0.0]


def test_a_step_of_an_adaptive_clip_in_closed_form():
    """Two of eight at most 1 long, quantile 0.5: clip <- exp(-0.2 (0.25 - 0.5))."""
    emits = Emit(lambda key: {"w": torch.zeros(1).double()}, lambda params, *_: dict(params))  # noqa: ARG005
    hidden = privacy.released(pulling(emits), emits, mechanism(adaptive=True))
    state = hidden.init(rng.key(0))
    said = {"w": torch.tensor([0.1, 1.0, 2, 2, 2, 2, 2, 2]).double()[:, None]}
    new = hidden.update(state, answers(state, said))
    assert float(new.params[privacy.CLIP]) == pytest.approx(math.exp(0.05))


# --- an attack -------------------------------------------------------------------------------------------------------


def empirical(mechanism: Mechanism, factor: float, runs: int = 10_000) -> float:
    """Return a lower bound of epsilon, with 95 % confidence, by telling apart two federations over all their rounds.

    A linear model with one weight: client i pulls it towards its y_i. One federation has one client more, whose y is
    far away. The server's updates are the real ones, R runs at once by vmap, their cohorts drawn by Poisson's coin, and
    the noise is `factor` times what is claimed. The attacker sees every model, knows what the others did, takes the
    sum of what is left as its score, tries thresholds on half of the runs and counts on the other (Clopper-Pearson).
    """
    emits = Emit(lambda key: {"w": torch.zeros(1).double()}, lambda params, *_: dict(params))  # noqa: ARG005
    hidden = privacy.released(
        pulling(emits, Groups({"": Sgd(1.0)})), emits, mechanism,
        lambda key, shape, dtype: factor * rng.normal(key, shape, dtype),
    )  # fmt: skip
    wanted = torch.cat([torch.zeros(mechanism.clients - 1), torch.full((1,), 1e3)]).double()

    def score(key, present):
        state, total = hidden.init(key), torch.zeros(()).double()
        for round in range(mechanism.rounds):
            coins = rng.uniform(rng.fold(key, 1, round), [mechanism.clients], torch.float64) < mechanism.rate
            sent = state.params["w"].expand(mechanism.clients, 1)
            # A gradient step on (w - y)^2 / 2; who is absent does not move.
            moved = (coins & present)[:, None] * (wanted[:, None] - sent)
            took = Update(torch.arange(mechanism.clients), {"w": sent + moved}, torch.ones(len(wanted)), {"w": sent})
            new = hidden.update(state, took)
            others = moved[:-1].clamp(-1, 1).sum() / mechanism.cohort
            total = total + (new.params["w"] - state.params["w"]).sum() - others
            state = new
        return total

    keys = rng.fold(rng.key(0), torch.arange(2 * runs))
    everyone = torch.ones(len(wanted), dtype=torch.bool)
    without = everyone & (torch.arange(len(wanted)) < len(wanted) - 1)
    more = vmap(score, (0, None))(keys[:runs], everyone)
    fewer = vmap(score, (0, None))(keys[runs:], without)
    half = runs // 2

    def bound(hits, misses):
        low = beta.ppf(0.025, hits, half - hits + 1) if hits else 0.0
        high = beta.ppf(0.975, misses + 1, half - misses) if misses < half else 1.0
        return math.log((low - mechanism.delta) / high) if low > mechanism.delta else 0.0

    def counts(at, part):
        return int((more[part] > at).sum()), int((fewer[part] > at).sum())

    tried, counted = slice(None, half), slice(half, None)
    grid = torch.linspace(float(fewer.min()), float(more.max()), 400)
    best = max(grid, key=lambda at: bound(*counts(at, tried)))
    return bound(*counts(best, counted))


@pytest.mark.parametrize(("noise", "cohort", "rounds"), [(4.0, 8, 1), (6.0, 8, 3), (1.2, 4, 1)])
def test_an_attack_on_ten_thousand_runs_stays_below_the_epsilon_that_is_claimed(noise, cohort, rounds):
    """And with half of the noise it does not: the claim is not so loose that anything would pass."""
    pytest.importorskip("dp_accounting")
    # delta is large, so that 5,000 counts reach as far as the claim.
    m = mechanism(noise=noise, cohort=cohort, rounds=rounds, delta=1e-2, clip=1.0)
    claimed = m.spent({noise: rounds})
    honest, halved = empirical(m, 1.0), empirical(m, 0.5)
    assert 0 < honest < claimed
    assert halved > claimed, f"claimed {claimed:.3f}, honest {honest:.3f}, halved {halved:.3f}"
