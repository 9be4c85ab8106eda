"""How a personalised model answers: at the mean, and averaged over draws, which also tell how much they disagree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.func import vmap
from torch.testing import assert_close

from metavd.core import rng
from metavd.core.model import attach
from metavd.core.posterior import LogVariance
from metavd.core.predict import mutual_information, posterior_draws, posterior_mean

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
KEY = rng.key(3)


@pytest.fixture
def own(net):
    """A noisy model and parameters with a visible spread."""
    return attach(net, LogVariance(("fc1",), offset=0.0, low=-100.0)), net.init(rng.key(0)) | {
        "fc1.logvar": torch.zeros(3, 6).double()
    }


def test_mean_is_the_softmax_of_the_mean_weights(net, own):
    """One answer at theta, whatever the key and the spread."""
    noisy, params = own
    wanted = net.apply(params, X, None)[0].softmax(-1)
    for key in (KEY, rng.key(4)):
        answer = posterior_mean(noisy)(params, X, key)
        assert_close(answer.probs, wanted, rtol=0, atol=0)
        assert answer.drawn == {}, "one answer cannot disagree with itself"
    assert_close(wanted.sum(-1), torch.ones(6).double())


@pytest.mark.parametrize("average", ["probs", "logits"])
def test_draws_without_variance_are_the_mean(own, average):
    """As the variance vanishes, any number of draws answers as the posterior mean does."""
    noisy, params = own
    still = params | {"fc1.logvar": torch.full((3, 6), -90.0).double()}
    found = posterior_draws(noisy, 4, average)(still, X, KEY).probs
    assert_close(found, posterior_mean(noisy)(still, X, KEY).probs, rtol=0, atol=1e-4)
    assert (posterior_draws(noisy, 4, average)(params, X, KEY).probs - found).abs().max() > 1e-2


def test_what_is_averaged(own):
    """probs: mean of softmaxes; logits: softmax of the mean, as released; both over the S keys split from one key."""
    noisy, params = own
    logits = noisy.apply(params, X, rng.split(KEY, 5))
    probs = posterior_draws(noisy, 5)(params, X, KEY).probs
    mixed = posterior_draws(noisy, 5, "logits")(params, X, KEY).probs
    # To the bit: the figures of runs that are stored must not move because the draws also tell something else.
    assert_close(probs, logits.softmax(-1).mean(0), rtol=0, atol=0)
    assert_close(mixed, logits.mean(0).softmax(-1), rtol=0, atol=0)
    assert (probs - mixed).abs().max() > 1e-3
    for answer in (probs, mixed):
        assert_close(answer.sum(-1), torch.ones(6).double())


def test_one_draw_makes_no_difference_between_averages(own):
    """With S = 1 there is nothing to average."""
    noisy, params = own
    one, other = (posterior_draws(noisy, 1, average)(params, X, KEY) for average in ("probs", "logits"))
    assert_close(one, other)
    assert not one.drawn["information"].any()


def test_draws_converge(own):
    """Many draws settle: two keys differ by the Monte-Carlo error, few draws by more."""
    noisy, params = own
    gaps = []
    for samples in (4, 4000):
        one, other = (posterior_draws(noisy, samples)(params, X, rng.key(seed)).probs for seed in (0, 1))
        gaps.append((one - other).abs().max().item())
    assert gaps[1] < 0.03 < gaps[0]


def test_rows_that_follow_and_vmap_change_nothing(own):
    """A row's answer does not depend on the rows after it, and stacked clients answer as each alone."""
    noisy, params = own
    predict = posterior_draws(noisy, 3)
    whole, part = predict(params, X, KEY), predict(params, X[:4], KEY)
    assert_close(whole.probs[:4], part.probs, rtol=0, atol=1e-12)
    assert_close(whole.drawn["information"][:4], part.drawn["information"], rtol=0, atol=1e-12)
    both = {name: torch.stack([value, 1.2 * value]) for name, value in params.items()}
    keys = rng.split(KEY, 2)
    for predict in (posterior_draws(noisy, 3), posterior_mean(noisy)):
        found = vmap(predict, (0, None, 0), randomness="error")(both, X, keys)
        alone = [predict({name: value[i] for name, value in both.items()}, X, keys[i]) for i in range(2)]
        assert_close(found.probs, torch.stack([one.probs for one in alone]), rtol=0, atol=1e-12)
        for name, value in found.drawn.items():
            assert_close(value, torch.stack([one.drawn[name] for one in alone]), rtol=0, atol=1e-12)


# --- what draws tell -------------------------------------------------------------------------------------------------


def test_information_is_entropy_of_the_mean_less_mean_entropy(own):
    """Closed form with SciPy's entropies, also where logits are averaged: the draws are the same."""
    noisy, params = own
    draws = noisy.apply(params, X, rng.split(KEY, 5)).softmax(-1).numpy()
    wanted = stats.entropy(draws.mean(0), axis=-1) - stats.entropy(draws, axis=-1).mean(0)
    assert wanted.min() > 1e-4
    for average in ("probs", "logits"):
        found = posterior_draws(noisy, 5, average)(params, X, KEY).drawn["information"]
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_information_of_extremes(dtype):
    """S sure draws that all differ: log S; draws that agree, or only one: exactly 0; at most log S and log K."""
    sure = 1000.0 * torch.eye(4, dtype=dtype)[:, None, :]
    assert_close(mutual_information(sure), torch.tensor([math.log(4)]).double())
    drawn = 5 * torch.randn(7, 20, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = mutual_information(drawn)
    assert found.dtype == torch.float64
    assert ((found > 0) & (found <= math.log(4))).all()
    assert not mutual_information(drawn[:1].expand(7, -1, -1)).any()
    assert not mutual_information(drawn[:1]).any()
    assert (mutual_information(drawn[:1] + 1e-7 * drawn) >= 0).all()


def test_information_ignores_what_softmax_ignores():
    """Law: a constant added to all logits of a row, and the order of draws, change nothing."""
    source = torch.Generator().manual_seed(1)
    drawn = torch.randn(5, 8, 3, generator=source, dtype=torch.float64)
    moved = drawn + 50 * torch.randn(5, 8, 1, generator=source, dtype=torch.float64)
    assert_close(mutual_information(moved.flip(0)), mutual_information(drawn), rtol=1e-9, atol=1e-13)
