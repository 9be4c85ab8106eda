"""How spreads are learned and handed out: their step, their range, their draws, and what a newcomer gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rival_laws import CLIENTS, answered, assert_same, assert_schedules_agree, batches_in, setup_of, trained

from metavd import methods
from metavd.core import emit, local
from metavd.core.posterior import POSTERIORS, LogVariance
from metavd.core.types import Batch, Local, Move
from metavd.errors import SpecError
from metavd.runs.settings import Experiment, resolve, spec_hash
from metavd.runs.setup import Setup, start
from metavd.studies.plan import dimension, space
from metavd.tree import Params

META = ("maml+metavd", "perfedavg+metavd", "maml+vd", "perfedavg+ensemblevd")
FREE: dict[str, Any] = {"rate": 0.2, "beta_ramp": 0.0, "clip": 1e9}
"""Spreads that matter, a KL from the first round on, and no clip."""


def turn_of(setup: Setup, client: int = 0, steps: int = 1) -> tuple[Params, Params]:
    """Return what a client received, and what it makes of it in so many steps."""
    state, stage = start(setup), setup.algorithm.local
    received = setup.algorithm.emit.apply(state.params, torch.tensor(client), state.round)
    return received, stage(received, batches_in(setup, state, client)[: steps * stage.group])[0]


def moved(setup: Setup) -> Params:
    """Return how far a client's first step takes it."""
    received, ended = turn_of(setup)
    return {name: ended[name] - value for name, value in received.items()}


# --- the spread's local step -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", META)
def test_spreads_step_at_lr_whatever_the_outer_rate(name: str) -> None:
    """Closed form: without a clip, spreads move lr / outer_lr as far as at the base's rate, and weights just as far."""
    usual, slow = (moved(setup_of(name, **FREE, spread_step=word, outer_lr=0.4)) for word in ("base", "lr"))
    assert usual["fc1.logvar"].abs().max() > 0
    for entry, step in usual.items():
        factor = 0.25 if entry == "fc1.logvar" else 1.0
        torch.testing.assert_close(slow[entry], factor * step, rtol=1e-9, atol=1e-12)
    other = moved(setup_of(name, **FREE, spread_step="lr", outer_lr=0.025))
    torch.testing.assert_close(other["fc1.logvar"], slow["fc1.logvar"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(16.0 * other["fc1.weight"], slow["fc1.weight"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["reptile+metavd", "fedavg+vd"])
def test_bases_with_one_rate_are_not_changed_by_a_bit(name: str) -> None:
    """Law: where weights move at lr already, so do spreads."""
    one, two = (trained(setup_of(name, spread_step=word)) for word in ("base", "lr"))
    assert_same(one.params, two.params, within=0)


def test_an_outer_rate_of_zero_cannot_be_divided_by() -> None:
    with pytest.raises(SpecError, match="outer_lr is 0, at which nothing moves, but spread_step is lr"):
        setup_of("maml+metavd", spread_step="lr", outer_lr=0.0)


# --- how loud answers speak ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["mean", "trimmed:0.2"])
@pytest.mark.parametrize("name", ["reptile+metavd", "reptile+vd", "reptile+ensemblevd"])
def test_weighting_by_size_and_by_precision_agree_where_spreads_are_equal(name: str, rule: str) -> None:
    """Law: spreads that cannot move make both the same; where they move, answers do not speak equally loud."""
    pinned: dict[str, Any] = {"floor": -8.5, "ceiling": -8.5}
    free: dict[str, Any] = {**FREE, "lr": 0.5, "beta": 100.0, "ceiling": 8.0}
    for options, alike in ((pinned, True), (free, False)):
        one, two = (
            trained(setup_of(name, fields={"aggregate": rule}, weighting=word, **options)).params["fc1.weight"]
            for word in ("precision", "size")
        )
        assert torch.allclose(one, two, rtol=1e-8, atol=1e-8) == alike


# --- the range -------------------------------------------------------------------------------------------------------


def pushing(posterior: LogVariance, slopes: dict[str, float], lr: float) -> Local:
    """A stage whose every step goes down given slopes, projected."""

    def step(params: Params, batches: Any, received: Params, index: Any) -> tuple[Move, torch.Tensor]:  # noqa: ARG001
        return Move({name: torch.full_like(params[name], value) for name, value in slopes.items()}, {}), params["w"] * 0

    return local.projected(Local(step, lr), posterior, ["fc.logvar"])


def test_a_step_ends_inside_and_net_forces_decide() -> None:
    """Closed form: lambda <- min(max(lambda - lr slope, low), high), the bounds to the bit; nothing else is touched."""
    noise = LogVariance(("fc",), offset=-1.1, low=-3.3, high=-0.7, clamp="project")
    low, high = noise.bounds.ends
    start = {"fc.logvar": torch.tensor([low, -0.3, high]).double(), "w": torch.tensor(9.0).double()}
    batch = Batch(*[torch.zeros(1)] * 2, None, *[torch.zeros(())] * 3)
    for slope in (0.0, 0.1, -0.1, 100.0, -100.0):
        ended, _ = pushing(noise, {"fc.logvar": slope, "w": slope}, lr=0.5)(start, [batch])
        assert torch.equal(ended["fc.logvar"], (start["fc.logvar"] - 0.5 * slope).clamp(low, high))
        assert torch.equal(ended["w"], start["w"] - 0.5 * slope)


def test_opposite_slopes_at_the_ceiling_are_added_before_they_are_cut() -> None:
    """At the ceiling, +0.1 and -2.5 are a push of 2.4 against it: gated one by one, the 0.1 alone would pass."""
    ends = {"offset": 0.0, "low": -3.0, "high": 0.0}
    ended = {}
    for clamp in ("inward", "project"):
        noise = LogVariance(("fc",), clamp=clamp, **ends)

        def loss(params: Params, batch: Batch, anchor: Params, noise: LogVariance = noise) -> torch.Tensor:  # noqa: ARG001
            return 0.1 * noise.spread(params, "fc").sum() - 2.5 * noise.spread(params, "fc").sum()

        stage = local.sgd(loss, lr=0.1, clip=None)
        stage = local.projected(stage, noise, ["fc.logvar"]) if clamp == "project" else stage
        batch = Batch(*[torch.zeros(1)] * 2, None, *[torch.zeros(())] * 3)
        ended[clamp] = float(stage({"fc.logvar": torch.zeros(1).double()}, [batch])[0]["fc.logvar"])
    assert ended["project"] == 0.0, "the net force holds it at the ceiling"
    assert ended["inward"] == pytest.approx(-0.01), "a step against the net force"


@pytest.mark.parametrize("name", ["reptile+metavd", "maml+vd", "fedper+metavd", "ditto+ensemblevd"])
def test_no_client_ever_leaves_the_range(name: str) -> None:
    """A KL that pushes hard against a near ceiling: with `through` spreads leave their range, projected none does."""
    hard: dict[str, Any] = {**FREE, "beta": 3000.0, "ceiling": -2.5, "clip": 50.0}
    high = {}
    for clamp in ("through", "project"):
        setup = setup_of(name, **hard, clamp=clamp)
        state, noise = start(setup), setup.algorithm.posterior
        assert isinstance(noise, LogVariance)
        received = setup.algorithm.emit.apply(state.params, torch.tensor(0), state.round)
        kept = {} if setup.algorithm.keep is None else setup.algorithm.keep.init(state.key, torch.tensor(0))
        ended, _ = setup.algorithm.local(received | kept, batches_in(setup, state, 0))
        high[clamp] = float(ended["fc1.logvar"].max()) - noise.bounds.ends[1]
    assert high["through"] > 0
    assert high["project"] == 0.0


def test_inside_the_range_all_clamps_are_one() -> None:
    """Law: where no spread comes near an end, `project` is `inward`, to rounding."""
    wide = {"rate": 0.2, "floor": -60.0, "ceiling": 8.0}
    one, two = (trained(setup_of("reptile+metavd", **wide, clamp=clamp)) for clamp in ("inward", "project"))
    assert_same(one.params, two.params, within=1e-13)


# --- draws -----------------------------------------------------------------------------------------------------------


def test_one_draw_has_nothing_to_average() -> None:
    one, two = (trained(setup_of("reptile+metavd", draws=1, draws_average=word)) for word in ("logits", "loss"))
    assert_same(one.params, two.params, within=0)


def test_the_mean_of_losses_is_no_less_than_the_loss_of_the_mean() -> None:
    """Law: cross-entropy is convex in its logits."""
    setups = [setup_of("reptile+vd", rate=0.4, draws=4, beta=0.0, draws_average=word) for word in ("logits", "loss")]
    received = start(setups[0]).params
    batches = batches_in(setups[0], start(setups[0]), 0)
    for batch in batches:
        mean, each = (
            setup.algorithm.local.step(received, [batch], received, torch.tensor(0))[1].item() for setup in setups
        )
        assert each > mean


# --- newcomers -------------------------------------------------------------------------------------------------------


def known(setup: Setup, params: Params, name: str = "fc1.logvar") -> torch.Tensor:
    """Return what the known clients are sent, (N, ...)."""
    sent = [setup.algorithm.emit.apply(params, torch.tensor(client), torch.tensor(0.0)) for client in range(CLIENTS)]
    return torch.stack([each[name] for each in sent])


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_newcomer_has_the_mean_of_the_predictions(depth: int) -> None:
    """Closed form, while no prediction is cut; a linear network makes no difference between the two means."""
    setups = {word: setup_of("reptile+metavd", newcomer=word, hyper_depth=depth) for word in ("mean", "outputs")}
    state = trained(setups["outputs"])
    assert_same(trained(setups["mean"]).params, state.params, within=0)
    wanted = known(setups["outputs"], state.params).mean(0)
    received = {word: setup.algorithm.admit(state.params, state.round, ()) for word, setup in setups.items()}
    torch.testing.assert_close(received["outputs"]["fc1.logvar"], wanted, rtol=1e-12, atol=1e-12)
    apart = (received["mean"]["fc1.logvar"] - wanted).abs().max()
    assert apart > 1e-6 if depth else apart < 1e-12
    for entry, value in received["mean"].items():
        assert entry == "fc1.logvar" or torch.equal(received["outputs"][entry], value)


def test_known_clients_do_not_notice() -> None:
    one, two = (setup_of("fedavg+metavd", newcomer=word) for word in ("mean", "outputs"))
    state = trained(one)
    for mine, theirs in zip(answered(one, state)[:CLIENTS], answered(two, state)[:CLIENTS], strict=True):
        assert (mine == theirs).all()


def test_of_very_many_clients_some_are_averaged() -> None:
    """Law: the cost is bounded, the draw is the same at every call, and it is a fair one."""
    table = torch.arange(100_000.0).double()
    some = emit.some_rows(table)
    assert len(some) == 1024
    assert torch.equal(some, emit.some_rows(table))
    assert abs(float(some.mean() / table.mean()) - 1) < 0.1  # five standard errors
    few = torch.arange(1024.0)
    assert emit.some_rows(few) is few


# --- all of it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("reptile+metavd", {"clamp": "project", "draws_average": "loss", "newcomer": "outputs", "rate": 0.2}),
        ("maml+metavd", {"clamp": "project", "spread_step": "lr", "newcomer": "outputs", "ceiling": -3.0, "rate": 0.2}),
        ("perfedavg+vd", {"clamp": "project", "spread_step": "lr", "draws_average": "loss"}),
        ("reptile+vd", {**FREE, "clamp": "project", "beta": 3000.0, "ceiling": -2.5, "clip": 50.0}),
        ("fedavg+metavd+drop", {"newcomer": "outputs", "clamp": "project", "drop_from": 1, "threshold": 0.3}),
    ],
)
def test_schedules_agree(name: str, options: dict[str, Any]) -> None:
    assert_schedules_agree(setup_of(name, **options))


def test_runs_from_before_keep_their_names() -> None:
    """Law: an option that came later and is left alone does not change what a run is called."""
    for name in ("reptile+metavd", "reptile+vd", "reptile+ensemblevd"):
        plain = resolve(Experiment(method=name, data="digits"))
        told = resolve(
            Experiment(method=name, data="digits", options={"spread_step": "base", "draws_average": "logits"})
        )
        other = resolve(Experiment(method=name, data="digits", options={"spread_step": "lr"}))
        assert spec_hash(plain) == spec_hash(told) != spec_hash(other)


def test_rates_of_the_hypernetwork_are_searched_if_asked() -> None:
    """The default space is what it was; --search hyper_lr adds the values that the option offers."""
    e = Experiment(method="reptile+metavd")
    assert [one.name for one in space(e, {})] == ["lr", "server_lr", "beta"]
    more = space(e, {"hyper_lr": "", "embed_lr": ""})
    assert [str(one) for one in more[3:]] == ["0.03,0.1,0.3,0.9"] * 2
    assert dimension(e, "beta", "").values == methods.options_of("reptile+metavd")["beta"].search


# --- VD and EnsembleVD by MetaVD's step ------------------------------------------------------------------------------

HYPER: dict[str, Any] = {"spread_by": "hypernetwork"}
ALONE: dict[str, Any] = {"clients": 1, "unseen": 1, "cohort": 1}


@pytest.mark.parametrize("base", ["reptile", "maml"])
def test_of_one_client_vd_and_ensemblevd_are_metavd(base: str) -> None:
    """Law: where nobody else is there to share with, or not, the three take the same steps."""
    options: dict[str, Any] = {"rate": 0.2, "embedding": 3, "beta_ramp": 0.0}
    found = {}
    for name, more in (("metavd", {}), ("vd", HYPER), ("ensemblevd", HYPER)):
        setup = setup_of(f"{base}+{name}", fields=ALONE, **options, **more)
        state = trained(setup, cohort=1)
        found[name] = setup.algorithm.emit.apply(state.params, torch.tensor(0), state.round)
        first = setup.algorithm.emit.apply(start(setup).params, torch.tensor(0), state.round)
        assert (found[name]["fc1.logvar"] - first["fc1.logvar"]).abs().max() > 1e-3, "spreads move"
    for name in ("vd", "ensemblevd"):
        assert_same(found[name], found["metavd"], within=1e-12)


def test_vd_has_one_spread_for_all() -> None:
    setup = setup_of("reptile+vd", **HYPER)
    state = trained(setup)
    sent = known(setup, state.params)
    assert torch.equal(sent, sent[:1].expand_as(sent))
    assert torch.equal(setup.algorithm.admit(state.params, state.round, ())["fc1.logvar"], sent[0])


def test_vd_learns_by_the_whole_cohort() -> None:
    """Closed form: hypernetwork and embedding go down sum_i w_i J^T d_i, with MetaVD's rates."""
    setup = setup_of("fedavg+vd", **HYPER, **FREE, hyper_momentum=0.0, hyper_decay=0.0, embed_decay=0.0, hyper_lr=0.5)
    state = start(setup)
    after = trained(setup, rounds=1, cohort=CLIENTS)
    sent = setup.algorithm.emit.apply(state.params, torch.tensor(0), state.round)["fc1.logvar"]
    sizes = torch.tensor([float(len(rows)) for rows in setup.pool.federation.train[:CLIENTS]]).double()
    received = setup.algorithm.emit.apply(state.params, torch.tensor(0), state.round)
    turns = [setup.algorithm.local(received, batches_in(setup, state, client))[0] for client in range(CLIENTS)]
    ended = [each["fc1.logvar"] for each in turns]
    gap = torch.einsum("c,c...->...", sizes / sizes.sum(), sent - torch.stack(ended))
    mine = {name: value for name, value in state.params.items() if name.startswith("server.")}
    _, pull = torch.func.vjp(lambda some: emit.predicted(some, torch.tensor(0)), mine)
    for name, slope in pull(gap.flatten())[0].items():
        rate = 0.9 if name == emit.ONE_EMBEDDING else 0.5
        torch.testing.assert_close(after.params[name], mine[name] - rate * slope, rtol=1e-9, atol=1e-12)


def test_ensemblevd_learns_nothing_from_others() -> None:
    """Law: who did not take part has the spread that it had; a newcomer has the mean of all, as with tables."""
    setup = setup_of("reptile+ensemblevd", **HYPER)
    before, after = start(setup), trained(setup, rounds=1)
    old, new = known(setup, before.params), known(setup, after.params)
    still = [torch.equal(old[client], new[client]) for client in range(CLIENTS)]
    assert still.count(False) == 3
    received = setup.algorithm.admit(after.params, after.round, ())["fc1.logvar"]
    torch.testing.assert_close(received, new.mean(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["reptile+vd", "maml+ensemblevd", "fedavg+ensemblevd+drop", "fedavg+vd+dp"])
def test_schedules_agree_on_predicted_spreads(name: str) -> None:
    options = {"noise": 0.1, "answer_clip": 1.0} if name.endswith("+dp") else {}
    assert_schedules_agree(setup_of(name, **HYPER, rate=0.2, **options))


def test_what_other_parts_had_before_came_later_here() -> None:
    """Law: MetaVD's options, which its runs are named by, do not rename the runs of VD."""
    assert not methods.options_of("fedavg+metavd")["hyper_lr"].later
    assert all(methods.options_of(f"fedavg+{name}")[key].later
               for name in ("vd", "ensemblevd") for key in ("hyper_lr", "embedding", "spread_by"))  # fmt: skip


class Mine(LogVariance):
    """A posterior of a user's own."""


def test_a_posterior_of_the_session_is_a_spread_like_a_package_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: `POSTERIORS.add` in a script is all that `spread` needs; it is listed after ours."""
    monkeypatch.setattr(POSTERIORS, "_found", dict(POSTERIORS.own()))
    monkeypatch.setattr(POSTERIORS, "_homes", dict(POSTERIORS._homes))
    with pytest.raises(SpecError, match="spread is 'mine', but must be one of logvar, logalpha"):
        methods.resolve("fedavg+vd", {"spread": "mine"})
    POSTERIORS.add("mine", Mine, __name__)
    assert methods.options_of("fedavg+vd")["spread"].allowed == ("logvar", "logalpha", "mine")
    assert isinstance(setup_of("fedavg+vd", spread="mine").algorithm.posterior, Mine)


def test_a_spread_that_per_input_would_ignore_is_refused() -> None:
    with pytest.raises(SpecError, match="spread is 'logalpha', but per=input learns one log alpha per input unit"):
        setup_of("fedavg+vd", per="input", spread="logalpha")
