"""Laws of precision-weighted aggregation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from metavd.core import aggregate
from metavd.core.posterior import InputLogAlpha, LogAlpha, LogVariance

NOISE = LogVariance(("fc",), offset=0.0, low=-60.0, high=60.0)
C = 3


def answers(seed=0, shape=(4, 5), spread=1.0):
    """C clients' weights, log-variances, biases, and shares that sum to 1."""
    source = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(*size, generator=source, dtype=torch.float64)

    weight = torch.rand(C, generator=source, dtype=torch.float64) + 0.1
    params = {"fc.weight": draw(C, *shape), "fc.logvar": spread * draw(C, *shape), "fc.bias": draw(C, shape[0])}
    return params, weight / weight.sum()


def consensus(params, weight, noise=NOISE):
    targets = aggregate.precision(noise)(params, weight)["fc.weight"]
    assert_close(targets, targets[:1].expand_as(targets), rtol=0, atol=0)
    return targets[0]


def mean(params, weight):
    return torch.einsum("c,c...->...", weight, params["fc.weight"])


def test_mean_passes_everything_through():
    """Without a posterior each client's target is its own answer."""
    params, weight = answers()
    assert aggregate.mean(params, weight) is params


def test_precision_is_the_weighted_sum():
    """Consensus: mu = sum w_i s_i^-2 mu_i / sum w_i s_i^-2, element by element; other entries pass through."""
    params, weight = answers()
    votes = weight[:, None, None] * (-params["fc.logvar"]).exp()
    wanted = (votes * params["fc.weight"]).sum(0) / votes.sum(0)
    assert_close(consensus(params, weight), wanted, rtol=1e-8, atol=1e-8)
    targets = aggregate.precision(NOISE)(params, weight)
    assert targets["fc.bias"] is params["fc.bias"]
    assert targets["fc.logvar"] is params["fc.logvar"]


@settings(max_examples=25, deadline=None)
@given(logvar=st.floats(-17.0, 8.5), seed=st.integers(0, 100))
def test_equal_variances_give_the_mean(logvar, seed):
    """Whatever the common variance, equal ones give the data-weighted mean."""
    params, weight = answers(seed)
    params["fc.logvar"] = torch.full_like(params["fc.logvar"], logvar)
    assert_close(consensus(params, weight), mean(params, weight), rtol=1e-5, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(shift=st.floats(-8.0, 6.0), seed=st.integers(0, 100))
def test_common_scaling_changes_nothing(shift, seed):
    """Scaling all variances by one factor leaves the consensus alone."""
    params, weight = answers(seed)
    scaled = params | {"fc.logvar": params["fc.logvar"] + shift}
    assert_close(consensus(scaled, weight), consensus(params, weight), rtol=1e-5, atol=1e-6)


def test_weighting_by_size_is_the_mean_whatever_the_spreads():
    """The mean is sum w_i mu_i over those who keep a weight; precision agrees where spreads are equal, and else not."""
    params, weight = answers()
    by_size = aggregate.size(NOISE)
    assert_close(by_size(params, weight)["fc.weight"][0], mean(params, weight), rtol=0, atol=1e-9)
    assert (consensus(params, weight) - mean(params, weight)).abs().max() > 0.1
    mask = torch.ones(C, 4, 5).double()
    mask[1, 0], mask[:, 2] = 0.0, 0.0
    masked, share = params | {"fc.mask": mask}, weight[[0, 2]] / weight[[0, 2]].sum()
    found = by_size(masked, weight)["fc.weight"][0]
    assert_close(found[0], mean({"fc.weight": params["fc.weight"][[0, 2]]}, share)[0], rtol=0, atol=1e-9)
    assert_close(found[2], params["fc.weight"][0, 2], rtol=0, atol=0)
    now = {"fc.weight": params["fc.weight"][0]}
    assert_close(by_size.consensus(by_size.sums(masked, weight), now)["fc.weight"], found, rtol=0, atol=1e-12)
    equal = masked | {"fc.logvar": torch.full_like(params["fc.logvar"], -3.0)}
    assert_close(by_size(equal, weight)["fc.weight"][0], consensus(equal, weight), rtol=0, atol=1e-9)


def test_a_huge_variance_is_ignored():
    """A client whose variance goes to infinity has no say; one whose variance goes to 0 has all of it."""
    params, weight = answers()
    params["fc.logvar"][1] = 40.0
    others = {name: value[[0, 2]] for name, value in params.items()}
    share = weight[[0, 2]] / weight[[0, 2]].sum()
    assert_close(consensus(params, weight), consensus(others, share), rtol=0, atol=1e-8)
    params["fc.logvar"][1] = -40.0
    sure = params | {"fc.logvar": params["fc.logvar"].clone()}
    sure["fc.logvar"][[0, 2]] = 3.0
    assert_close(consensus(sure, weight), params["fc.weight"][1], rtol=0, atol=1e-6)


def test_order_and_splitting_of_clients_change_nothing():
    """Permuting clients, or splitting one into two halves, gives the same consensus."""
    params, weight = answers()
    order = torch.tensor([2, 0, 1])
    shuffled = {name: value[order] for name, value in params.items()}
    assert_close(consensus(shuffled, weight[order]), consensus(params, weight), rtol=0, atol=1e-12)
    twice = {name: torch.cat([value, value[:1]]) for name, value in params.items()}
    halves = torch.cat([weight[:1] / 2, weight[1:], weight[:1] / 2])
    assert_close(consensus(twice, halves), consensus(params, weight), rtol=0, atol=1e-12)


def test_masks_are_left_out_of_both_sums():
    """A client that drops a weight is as if absent there; the value it holds does not matter."""
    params, weight = answers()
    mask = torch.ones(C, 4, 5).double()
    mask[1, 0] = 0.0
    params["fc.mask"] = mask
    params["fc.weight"][1, 0] = 1e9
    found = consensus(params, weight)
    others = {name: value[[0, 2]] for name, value in params.items()}
    share = weight[[0, 2]] / weight[[0, 2]].sum()
    assert_close(found[0], consensus(others, share)[0], rtol=0, atol=1e-9)
    bare = {name: value for name, value in params.items() if name != "fc.mask"}
    assert_close(found[1:], consensus(bare, weight)[1:], rtol=0, atol=1e-12)


def test_what_everyone_drops_stays():
    """A weight that all clients mask has the value that all received as its target, so nothing moves it."""
    params, weight = answers()
    received = torch.arange(5.0).double()
    mask = torch.ones(C, 4, 5).double()
    mask[:, 2] = 0.0
    params["fc.weight"][:, 2] = received
    assert_close(consensus(params | {"fc.mask": mask}, weight)[2], received, rtol=0, atol=0)


def test_no_mask_is_a_mask_of_ones():
    """Masks of ones change nothing."""
    params, weight = answers()
    ones = params | {"fc.mask": torch.ones(C, 4, 5).double()}
    assert_close(consensus(ones, weight), consensus(params, weight), rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 3, 3)])
def test_relative_spreads_vote_by_alpha(shape):
    """s_i^2 = alpha_i theta^2 with one theta: votes go by 1/alpha_i, for a weight and for an input unit alike."""
    params, weight = answers(shape=shape)
    alphas = params.pop("fc.logvar")
    votes = weight.reshape(-1, *[1] * len(shape)) * (-alphas).exp()
    wanted = (votes * params["fc.weight"]).sum(0) / votes.sum(0)
    noise = LogAlpha(("fc",), offset=0.0)
    assert_close(consensus(params | {"fc.logalpha": alphas}, weight, noise), wanted, rtol=1e-8, atol=1e-8)
    units = alphas[(slice(None), 0, slice(None), *[0] * (len(shape) - 2))]
    noise = InputLogAlpha(("fc",), offset=0.0)
    votes = (weight[:, None] * (-units).exp()).reshape(C, 1, 5, *[1] * (len(shape) - 2))
    wanted = (votes * params["fc.weight"]).sum(0) / votes.sum(0)
    found = consensus(params | {"fc.logalpha": units}, weight, noise)
    assert_close(found, wanted, rtol=1e-8, atol=1e-8)
    mask = torch.ones(C, 5).double()
    mask[0, 1] = 0.0
    masked = consensus(params | {"fc.logalpha": units, "fc.mask": mask}, weight, noise)
    votes = votes * mask.reshape(votes.shape)
    assert_close(masked, (votes * params["fc.weight"]).sum(0) / votes.sum(0), rtol=1e-8, atol=1e-8)


def test_spreads_vote_after_the_clamp():
    """Precision is that of the clamped log-variance: below the floor all clients are equally sure."""
    params, weight = answers()
    params["fc.logvar"] = -20.0 - torch.rand(C, 4, 5).double()
    noise = LogVariance(("fc",), offset=0.0, low=-8.5, high=8.5, clamp="released")
    assert_close(consensus(params, weight, noise), mean(params, weight), rtol=0, atol=1e-9)
