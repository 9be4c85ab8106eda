"""What clients receive: rows, hypernetworks, constants, masks, and the fit of a client that was never seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional
from torch.testing import assert_close

from metavd.core import emit, objective, rng
from metavd.core.model import attach, from_module, xavier
from metavd.core.posterior import InputLogAlpha, LogAlpha, LogVariance
from metavd.core.types import NEW
from metavd.models.cnn import cnn
from metavd.models.small_cnn import small_cnn

NOISE = LogVariance(("fc1",), offset=-8.5, low=-17.0, high=0.0)
RELEASED = LogVariance(("fc1",), offset=0.0, first=-8.5, low=-8.5, high=8.5, clamp="released")
ROUND = torch.zeros(()).double()
N = 4


def client(number):
    return torch.tensor(number)


def make_meta(net, noise=NOISE, **options):
    return emit.meta(emit.shared(net), net, noise, N, size=3, width=5, **options)


def assert_same(found, wanted, atol=0.0):
    assert set(found) == set(wanted)
    for name in wanted:
        assert_close(found[name], wanted[name], rtol=0, atol=atol)


# --- shared, rows --------------------------------------------------------------------------------------------------


def test_shared_sends_all_but_the_servers_own(net):
    """Everyone receives the same entries, by name, and nothing that starts with "server."."""
    emits = emit.shared(net)
    params = emits.init(rng.key(0))
    assert_same(params, net.init(rng.key(0)))
    more = params | {"server.x": torch.ones(1), "server.client.y": torch.ones(1), "fc1.mask": torch.ones(1)}
    for number in (0, 3, NEW):
        assert_same(emits.apply(more, client(number), ROUND), params | {"fc1.mask": torch.ones(1)})


def test_row():
    """A client's own row; the mean of all rows for a client that was never seen; the same under vmap."""
    table = torch.arange(12.0).reshape(4, 3)
    assert emit.row(table, client(2)).tolist() == [6.0, 7.0, 8.0]
    assert emit.row(table, client(NEW)).tolist() == [4.5, 5.5, 6.5]
    assert vmap(emit.row, (None, 0))(table, torch.tensor([1, NEW])).tolist() == [[3.0, 4.0, 5.0], [4.5, 5.5, 6.5]]


def test_row_gradients_reach_the_right_rows():
    """A known client's gradient reaches its row alone, an unseen client's all rows equally."""
    table = torch.randn(4, 3).double()
    slope = grad(lambda t: emit.row(t, client(2)).sum())(table)
    assert slope.sum(1).tolist() == [0.0, 0.0, 3.0, 0.0]
    slope = grad(lambda t: emit.row(t, client(NEW)).sum())(table)
    assert_close(slope, torch.full_like(table, 0.25))


# --- one for all, one per client -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "first"), [(NOISE, 0.0), (RELEASED, -8.5)])
def test_one_for_all(net, noise, first):
    """One spread, stored and sent to everyone under its layer's name, first at log sigma^2 = -8.5."""
    emits = emit.learned(emit.shared(net), net, noise)
    params = emits.init(rng.key(0))
    assert_close(params["fc1.logvar"], torch.full((3, 6), first).double())
    for number in (0, NEW):
        assert_same(emits.apply(params, client(number), ROUND), params)


@pytest.mark.parametrize("owned", [False, True], ids=["VD", "EnsembleVD"])
def test_what_is_sent_is_clamped_already(net, owned):
    """Both send clamp(lambda); as released, the server's gradient stops at that clamp (section 14, point 2)."""
    ends = torch.tensor([-20.0, -8.5, -1.0, 20.0]).double()
    for noise, slopes in ((RELEASED, [0.0, 1.0, 1.0, 0.0]), (NOISE, [1.0] * 4)):
        base = emit.shared(net)
        emits = emit.learned(base, net, noise, N if owned else 0)
        params = emits.init(rng.key(0))
        name = "server.client.fc1.logvar" if owned else "fc1.logvar"
        stored = params[name].clone()
        stored[..., 0, :4] = ends - noise.offset

        def sent(value, emits=emits, params=params, name=name):
            return emits.apply(params | {name: value}, client(1), ROUND)["fc1.logvar"][0, :4]

        assert_close(sent(stored) + noise.offset, ends.clamp(noise.low, noise.high), rtol=0, atol=1e-12)
        slope = grad(lambda value, sent=sent: sent(value).sum())(stored)
        assert (slope[1] if owned else slope)[0, :4].tolist() == slopes


def test_one_per_client(net):
    """Each client has rows of its own under "server.client."; an unseen client gets their mean."""
    noise = LogVariance(("fc1", "fc2"), offset=-8.5, high=0.0)
    emits = emit.learned(emit.shared(net), net, noise, N)
    params = emits.init(rng.key(0))
    name = "server.client.fc1.logvar"
    assert params[name].shape == (N, 3, 6)
    assert params["server.client.fc2.logvar"].shape == (N, 3, 3)
    assert (params[name] == 0).all()
    params[name] = torch.randn(N, 3, 6).double()
    for number in range(N):
        received = emits.apply(params, client(number), ROUND)
        assert_close(received["fc1.logvar"], params[name][number], rtol=0, atol=1e-12)
        assert set(received) == {*net.init(rng.key(0)), "fc1.logvar", "fc2.logvar"}
    unseen = emits.apply(params, client(NEW), ROUND)
    assert_close(unseen["fc1.logvar"], params[name].mean(0), rtol=0, atol=1e-12)


# --- hypernetwork --------------------------------------------------------------------------------------------------


def by_hand(params, embedding, depth):
    """Linear layers with LeakyReLU(0.1) between them."""
    value = embedding
    for i in range(depth):
        value = params[f"server.hyper.{i}.weight"] @ value + params[f"server.hyper.{i}.bias"]
        value = value if i == depth - 1 else functional.leaky_relu(value, 0.1)
    return value


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_meta_is_its_hypernetwork(net, depth):
    """lambda_i = h(e_i), an MLP of `depth` hidden layers; an unseen client gets h at the mean embedding."""
    emits = make_meta(net, depth=depth)
    params = emits.init(rng.key(0))
    table = params["server.client.embedding"]
    assert table.shape == (N, 3)
    assert sum(name.startswith("server.hyper") and name.endswith("weight") for name in params) == depth + 1
    received = [emits.apply(params, client(i), ROUND)["fc1.logvar"] for i in (*range(N), NEW)]
    for row, value in zip((*table, table.mean(0)), received, strict=True):
        assert_close(value.flatten(), by_hand(params, row, depth + 1), rtol=0, atol=1e-12)
    if depth:
        assert (received[-1] - torch.stack(received[:-1]).mean(0)).abs().max() > 1e-6


def test_meta_splits_its_output_by_layer(net):
    """With several layers the output is cut in their order, each piece in its layer's shape, logalpha a unit too."""
    noise = InputLogAlpha(("fc2", "fc0"), offset=-1.0)
    emits = make_meta(net, noise)
    params = emits.init(rng.key(0))
    received = emits.apply(params, client(1), ROUND)
    output = emit.hypernetwork(params, params["server.client.embedding"][1])
    assert output.shape == (3 + 4,)
    assert_close(received["fc2.logalpha"], output[:3], rtol=0, atol=1e-12)
    assert_close(received["fc0.logalpha"], output[3:], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("noise", "released", "low", "high"), [(NOISE, False, -17.0, 0.0), (RELEASED, True, -17.0, 0.0)]
)
def test_meta_ranges(net, noise, released, low, high):
    """However large h, the lambda that is sent lies in [-17, 0], by default and as released."""
    emits = make_meta(net, noise, released=released)
    params = emits.init(rng.key(0))
    last = "server.hyper.3.weight"
    sent = emits.apply(params | {last: 1e4 * params[last]}, client(0), ROUND)["fc1.logvar"] + noise.offset
    assert sent.min().item() == pytest.approx(low, abs=1e-9)
    assert sent.max().item() == pytest.approx(high, abs=1e-9)
    assert sent.unique().numel() <= 4


@pytest.mark.parametrize(("noise", "released"), [(NOISE, False), (RELEASED, True)])
def test_meta_gradient_at_the_ends(net, noise, released):
    """|h| > 8.5 sends no gradient to the hypernetwork as released, and passes by default."""
    emits = make_meta(net, noise, released=released)
    params = emits.init(rng.key(0))
    h = torch.linspace(-12.0, 12.0, 18).double()
    params["server.hyper.3.weight"] = torch.zeros(18, 5).double()

    def sent(bias):
        return emits.apply(params | {"server.hyper.3.bias": bias}, client(0), ROUND)["fc1.logvar"].sum()

    wanted = (h.abs() <= 8.5).double() if released else torch.ones(18).double()
    assert_close(grad(sent)(h), wanted, rtol=0, atol=0)


def test_meta_starts_near_minus_eight_and_a_half():
    """The paper's hypernetwork starts at h ~ 0 +- 0.017, so released half of the spreads start in the dead zone."""
    model = from_module(cnn((3, 32, 32), 10))
    shares = []
    for noise, released in ((NOISE, False), (RELEASED, True)):
        emits = emit.meta(emit.shared(model), model, noise, 100, released=released)
        params = emits.init(rng.key(0))
        table = params["server.client.embedding"]
        assert table.std().item() == pytest.approx(1.0, abs=0.06)
        sent = emits.apply(params, client(0), ROUND.float())["fc1.logvar"]
        assert (sent + noise.offset).mean().item() == pytest.approx(-8.5, abs=0.005)
        assert 0.005 < sent.std().item() < 0.05
        shares.append(noise.stuck("", sent).double().mean().item())
    assert shares[0] == 0.0
    assert shares[1] == pytest.approx(0.5, abs=0.05)


def test_embedding_size():
    """1 + N/4 rounded down, as the paper's, but never above 64 (a deliberate difference from N = 256 on)."""
    assert [emit.embedding_size(n) for n in (1, 3, 4, 100, 160, 200, 252, 10_000)] == [1, 1, 2, 26, 41, 51, 64, 64]


@pytest.mark.parametrize("kind", ["shared", "one_for_all", "one_per_client", "meta", "dropping"])
def test_vmap_is_the_loop(net, kind):
    """Emitting to several clients at once gives what each receives alone."""
    base = emit.shared(net)
    emits = {
        "shared": base,
        "one_for_all": emit.learned(base, net, NOISE),
        "one_per_client": emit.learned(base, net, NOISE, N),
        "meta": make_meta(net),
        "dropping": emit.dropping(make_meta(net), NOISE, threshold=0.05, start=0),
    }[kind]
    params = emits.init(rng.key(0))
    ids = torch.tensor([2, 0, NEW])
    together = vmap(emits.apply, (None, 0, None), randomness="error")(params, ids, ROUND)
    for i, number in enumerate(ids):
        alone = emits.apply(params, number, ROUND)
        assert_same({name: value[i] for name, value in together.items()}, alone, atol=1e-12)


# --- constant ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [NOISE, RELEASED])
def test_constant(net, noise):
    """Everyone's log sigma^2 is -8.5, however it is stored and whatever was learned; all else as it was."""
    base = make_meta(net, noise)
    emits = emit.constant(base, net, noise, -8.5)
    params = emits.init(rng.key(0))
    params["server.hyper.3.bias"] += 2.0
    for number in (0, NEW):
        received = emits.apply(params, client(number), ROUND)
        assert_close(noise.offset + received["fc1.logvar"], torch.full((3, 6), -8.5).double())
        before = base.apply(params, client(number), ROUND)
        assert_same({**received, "fc1.logvar": before["fc1.logvar"]}, before)


# --- dropping ------------------------------------------------------------------------------------------------------


@pytest.fixture
def graded(net):
    """One spread for all, whose dropout rates are spread over (0, 1)."""
    noise = LogAlpha(("fc1",), offset=0.0)
    emits = emit.learned(emit.shared(net), net, noise)
    params = emits.init(rng.key(0))
    params["fc1.logalpha"] = torch.linspace(-4.0, 4.0, 18).double().reshape(3, 6)
    return emits, noise, params


def test_dropping_masks_rates_above_the_threshold(graded):
    """The mask is 1 where p <= threshold; all else is sent as it was; the mask carries no gradient."""
    base, noise, params = graded
    rate = torch.sigmoid(params["fc1.logalpha"])
    for threshold in (0.0, 0.3, rate.flatten()[7].item(), 0.9, 1.0):
        emits = emit.dropping(base, noise, threshold=threshold, start=0)
        received = emits.apply(params, client(0), ROUND)
        mask = received.pop("fc1.mask")
        assert torch.equal(mask, (rate <= threshold).double())
        assert_same(received, base.apply(params, client(0), ROUND))
    slope = grad(lambda p: emits.apply(p, client(0), ROUND)["fc1.mask"].sum())(params)
    assert all((value == 0).all() for value in slope.values())


def test_dropping_starts_at_its_round(graded):
    """Before round `start` the mask is all ones; from it on weights are dropped."""
    base, noise, params = graded
    emits = emit.dropping(base, noise, threshold=0.5, start=150)
    before, at = (emits.apply(params, client(0), torch.tensor(r).double())["fc1.mask"] for r in (149.0, 150.0))
    assert before.mean() == 1
    assert at.mean() == 0.5


def test_dropping_as_released_sends_zeros(graded):
    """Released: theta times mask is sent, dense and without a mask; the gradient passes through the mask."""
    base, noise, params = graded
    emits = emit.dropping(base, noise, threshold=0.5, start=0, released=True)
    received = emits.apply(params, client(0), ROUND)
    mask = (torch.sigmoid(params["fc1.logalpha"]) <= 0.5).double()
    assert set(received) == set(params)
    assert_close(received["fc1.weight"], params["fc1.weight"] * mask, rtol=0, atol=0)
    slope = grad(lambda p: emits.apply(p, client(0), ROUND)["fc1.weight"].sum())(params)["fc1.weight"]
    assert_close(slope, mask, rtol=0, atol=0)


def test_dropping_whole_units(net):
    """With one rate per input unit, the mask has one entry per unit."""
    noise = InputLogAlpha(("fc1",), offset=0.0)
    base = emit.learned(emit.shared(net), net, noise)
    params = base.init(rng.key(0)) | {"fc1.logalpha": torch.linspace(-3.0, 3.0, 6).double()}
    received = emit.dropping(base, noise, threshold=0.5, start=0).apply(params, client(0), ROUND)
    assert received["fc1.mask"].tolist() == [1, 1, 1, 0, 0, 0]
    released = emit.dropping(base, noise, threshold=0.5, start=0, released=True).apply(params, client(0), ROUND)
    assert (released["fc1.weight"][:, 3:] == 0).all()
    assert torch.equal(released["fc1.weight"][:, :3], params["fc1.weight"][:, :3])


def test_dropping_whole_channels_as_released():
    """With one rate per input channel of a convolution, released sends zeros in that channel's kernels."""
    model = from_module(nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 3)).double())
    noise = InputLogAlpha(("0",), offset=0.0)
    base = emit.learned(emit.shared(model), model, noise)
    params = base.init(rng.key(0)) | {"0.logalpha": torch.tensor([-1.0, 1.0, -1.0]).double()}
    sent = emit.dropping(base, noise, threshold=0.5, start=0, released=True).apply(params, client(0), ROUND)["0.weight"]
    assert (sent[:, 1] == 0).all()
    assert (sent[:, [0, 2]] != 0).all()


def test_released_dropping_uses_the_unclamped_spread(net):
    """At theta = 0.003 and lambda = -17, alpha = 0.0046 and the weight is kept; clamped to -8.5 it would be dropped."""
    emits = make_meta(net, RELEASED, released=True)
    params = emits.init(rng.key(0))
    params["fc1.weight"] = torch.full((3, 6), 0.003).double()
    params["server.hyper.3.weight"] = torch.zeros(18, 5).double()
    params["server.hyper.3.bias"] = torch.full((18,), -8.5).double()
    assert (emits.apply(params, client(0), ROUND)["fc1.logvar"] == -17.0).all()
    sent = emit.dropping(emits, RELEASED, threshold=0.9, start=0, released=True).apply(params, client(0), ROUND)
    assert torch.equal(sent["fc1.weight"], params["fc1.weight"])
    params["server.hyper.3.bias"] = torch.zeros(18).double()
    sent = emit.dropping(emits, RELEASED, threshold=0.9, start=0, released=True).apply(params, client(0), ROUND)
    assert (sent["fc1.weight"] == 0).all()


# --- SNIP's masks --------------------------------------------------------------------------------------------------


def test_masks_of_ones_at_first(net):
    """`unmasked` adds masks of ones to the server's parameters, and they are sent."""
    emits = emit.unmasked(emit.shared(net), ["fc1", "fc2"])
    params = emits.init(rng.key(0))
    assert torch.equal(params["fc1.mask"], torch.ones(3, 6).double())
    assert "fc2.mask" in emits.apply(params, client(0), ROUND)


def test_zeroed_and_kept(net):
    """Zeros are sent for masked weights: without a mask, or with `keep` and the mask under another name."""
    base = emit.unmasked(emit.shared(net), ["fc1"])
    params = base.init(rng.key(0))
    mask = (rng.uniform(rng.key(1), [3, 6]) > 0.5).double()
    params["fc1.mask"] = mask
    zeroed = emit.zeroed(base, ["fc1"], keep=False).apply(params, client(0), ROUND)
    kept = emit.zeroed(base, ["fc1"], keep=True).apply(params, client(0), ROUND)
    assert_close(zeroed["fc1.weight"], params["fc1.weight"] * mask, rtol=0, atol=0)
    assert torch.equal(kept.pop("fc1.keep"), mask)
    assert_same(kept, zeroed)
    assert "fc1.mask" not in zeroed
    assert "fc1.mask" in params


# --- a client that was never seen ------------------------------------------------------------------------------------


@pytest.fixture
def fit(net, make_batch):
    """A hypernetwork whose spreads matter, the objective, and a batch to fit."""
    noise = LogVariance(("fc1",), offset=-1.0, low=-17.0, high=8.5)
    emits = make_meta(net, noise)
    loss = objective.total(
        objective.cross_entropy(attach(net, noise), 3), objective.divergence(noise, lambda round: 3.0 + 0.0 * round)
    )
    return emits, loss, emits.init(rng.key(0)), make_batch(8, seed=4)


def embedding_loss(fit, embedding, batch, step):
    emits, loss, params, _ = fit
    sent = emits.apply({**params, emit.EMBEDDING: embedding[None]}, client(0), ROUND)
    return loss(sent, batch._replace(key=rng.fold(batch.key, 40_000 + step)), sent)


def test_fitted_is_gradient_descent_on_the_embedding(fit):
    """Steps e <- e - lr dL(emit(e))/de from the mean embedding, with fresh noise a step; the server keeps its own."""
    emits, loss, params, batch = fit
    kept = {name: value.clone() for name, value in params.items()}
    embedding = params[emit.EMBEDDING].mean(0)
    for step in range(3):
        embedding = embedding - 0.2 * grad(lambda e, step=step: embedding_loss(fit, e, batch, step))(embedding)
    wanted = emits.apply({**params, emit.EMBEDDING: embedding[None]}, client(0), ROUND)
    found = emit.fitted(emits, loss, steps=3, lr=0.2)(params, ROUND, [batch])
    assert_same(found, wanted, atol=1e-12)
    assert_same(params, kept)
    for name in net_entries(found):
        assert torch.equal(found[name], params[name])


def net_entries(received):
    return [name for name in received if not name.endswith("logvar")]


def test_fitted_lowers_its_objective(fit):
    """For a small rate, each step goes down on the batch and the noise that it saw."""
    emits, loss, params, batch = fit
    first = batch._replace(key=rng.fold(batch.key, 40_000))
    before = emits.apply(params, client(NEW), ROUND)
    after = emit.fitted(emits, loss, steps=1, lr=1e-2)(params, ROUND, [batch])
    slope = grad(lambda e: embedding_loss(fit, e, batch, 0))(params[emit.EMBEDDING].mean(0))
    gain = loss(before, first, before) - loss(after, first, after)
    assert gain > 0
    assert_close(gain, 1e-2 * slope.square().sum(), rtol=0.05, atol=0)
    many = emit.fitted(emits, loss, steps=30, lr=0.05)(params, ROUND, [batch])
    keys = [batch._replace(key=rng.fold(batch.key, 90_000 + i)) for i in range(20)]
    means = [torch.stack([loss(own, other, own) for other in keys]).mean() for own in (before, many)]
    assert means[1] < means[0]


def test_fitted_without_data_is_the_mean_embedding(fit):
    """No batch, no fit: what any unseen client receives."""
    emits, loss, params, _ = fit
    found = emit.fitted(emits, loss, steps=5, lr=0.1)(params, ROUND, [])
    assert_same(found, emits.apply(params, client(NEW), ROUND), atol=1e-12)


def test_rates_read_what_was_sent():
    """Diagnostics: the rates of what a client received follow its lambda and the weights."""
    model = from_module(small_cnn((1, 4, 4), 3, width=2).double(), init=xavier)
    emits = emit.learned(emit.shared(model), model, LogVariance(("conv1",), offset=-8.5))
    received = emits.apply(emits.init(rng.key(0)), client(0), ROUND)
    noise = LogVariance(("conv1",))
    assert_close(noise.rates(received)["conv1"], torch.sigmoid(noise.log_alpha(received, "conv1")))
    assert noise.rates(received)["conv1"].shape == (2, 1, 3, 3)
