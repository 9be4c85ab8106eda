"""How a personalised model answers: at the mean, and averaged over draws."""

from __future__ import annotations

import pytest
import torch
from torch.func import vmap
from torch.testing import assert_close

from metavd.core import rng
from metavd.core.model import attach
from metavd.core.predict import posterior_draws, posterior_mean
from metavd.core.variational import Noise

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
KEY = rng.key(3)


@pytest.fixture
def own(net):
    """A noisy model and parameters with a visible spread."""
    return attach(net, Noise(("fc1",), offset=0.0, low=-100.0)), net.init(rng.key(0)) | {
        "fc1.logvar": torch.zeros(3, 6).double()
    }


def test_mean_is_the_softmax_of_the_mean_weights(net, own):
    """One answer at theta, whatever the key and the spread."""
    noisy, params = own
    wanted = net.apply(params, X, None)[0].softmax(-1)
    for key in (KEY, rng.key(4)):
        assert_close(posterior_mean(noisy)(params, X, key), wanted, rtol=0, atol=0)
    assert_close(wanted.sum(-1), torch.ones(6).double())


@pytest.mark.parametrize("average", ["probs", "logits"])
def test_draws_without_variance_are_the_mean(own, average):
    """As the variance vanishes, any number of draws answers as the posterior mean does."""
    noisy, params = own
    still = params | {"fc1.logvar": torch.full((3, 6), -90.0).double()}
    found = posterior_draws(noisy, 4, average)(still, X, KEY)
    assert_close(found, posterior_mean(noisy)(still, X, KEY), rtol=0, atol=1e-4)
    assert (posterior_draws(noisy, 4, average)(params, X, KEY) - found).abs().max() > 1e-2


def test_what_is_averaged(own):
    """probs: mean of softmaxes; logits: softmax of the mean, as released; both over the S keys split from one key."""
    noisy, params = own
    logits = noisy.apply(params, X, rng.split(KEY, 5))
    probs = posterior_draws(noisy, 5)(params, X, KEY)
    mixed = posterior_draws(noisy, 5, "logits")(params, X, KEY)
    assert_close(probs, logits.softmax(-1).mean(0), rtol=0, atol=1e-14)
    assert_close(mixed, logits.mean(0).softmax(-1), rtol=0, atol=1e-14)
    assert (probs - mixed).abs().max() > 1e-3
    for answer in (probs, mixed):
        assert_close(answer.sum(-1), torch.ones(6).double())


def test_one_draw_makes_no_difference_between_averages(own):
    """With S = 1 there is nothing to average."""
    noisy, params = own
    assert_close(posterior_draws(noisy, 1)(params, X, KEY), posterior_draws(noisy, 1, "logits")(params, X, KEY))


def test_draws_converge(own):
    """Many draws settle: two keys differ by the Monte-Carlo error, few draws by more."""
    noisy, params = own
    gaps = []
    for samples in (4, 4000):
        one, other = (posterior_draws(noisy, samples)(params, X, rng.key(seed)) for seed in (0, 1))
        gaps.append((one - other).abs().max().item())
    assert gaps[1] < 0.03 < gaps[0]


def test_rows_that_follow_and_vmap_change_nothing(own):
    """A row's answer does not depend on the rows after it, and stacked clients answer as each alone."""
    noisy, params = own
    predict = posterior_draws(noisy, 3)
    assert_close(predict(params, X, KEY)[:4], predict(params, X[:4], KEY), rtol=0, atol=1e-12)
    both = {name: torch.stack([value, 1.2 * value]) for name, value in params.items()}
    keys = rng.split(KEY, 2)
    found = vmap(predict, (0, None, 0), randomness="error")(both, X, keys)
    alone = [predict({name: value[i] for name, value in both.items()}, X, keys[i]) for i in range(2)]
    assert_close(found, torch.stack(alone), rtol=0, atol=1e-12)
