"""Laws of random numbers that are functions of a key: their distributions, and what may not change them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.func import vmap
from torch.testing import assert_close

from metavd.core import rng

N = 40_000
DRAWS = {
    "uniform": (rng.uniform, stats.uniform, 1 / 2, 1 / 12),
    "normal": (rng.normal, stats.norm, 0.0, 1.0),
    "exponential": (rng.exponential, stats.expon, 1.0, 1.0),
}


@pytest.fixture(params=DRAWS)
def law(request):
    return DRAWS[request.param]


def along(draw, keys):
    """One draw from each of many keys."""
    return draw(keys, [], torch.float64)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("across", [False, True], ids=["one key", "one draw a key"])
def test_distribution(law, seed, across):
    """Mean, variance and Kolmogorov-Smirnov test, along one key's stream and across folded keys' first draws."""
    draw, target, mean, variance = law
    key = rng.fold(rng.key(seed), 5)
    values = along(draw, rng.split(key, N)) if across else draw(key, [N], torch.float64)
    kurtosis = float(target.stats(moments="k")) + 3.0
    assert abs(values.mean() - mean) < 4 * math.sqrt(variance / N)
    assert abs(values.var() / variance - 1) < 4 * math.sqrt((kurtosis - 1) / N)
    assert stats.kstest(values.numpy(), target.cdf).pvalue > 1e-3


def test_uniform_is_open_and_on_its_grid():
    """Every draw is an odd multiple of 2^-24 inside (0, 1), so float32 holds it exactly and its log is finite."""
    for dtype in (torch.float32, torch.float64):
        draws = rng.uniform(rng.key(3), [N], dtype)
        assert draws.min() > 0
        assert draws.max() < 1
        assert (draws.double() * 2**24 % 2 == 1).all()


def test_bits_are_splitmix64():
    """The stream of key 0 is SplitMix64 seeded with 0, whose first outputs are published."""
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B]
    assert [int(value) % 2**64 for value in rng.bits(torch.tensor(0), [5])] == known


def test_each_bit_is_fair():
    """All 64 bits are ones half of the time, and no two of them go together."""
    words = rng.bits(rng.key(2), [N])
    bits = torch.stack([(words >> i) & 1 for i in range(64)]).double().numpy()
    assert np.abs(bits.mean(1) - 0.5).max() < 5 * 0.5 / math.sqrt(N)
    correlation = np.corrcoef(bits) - np.eye(64)
    assert np.abs(correlation).max() < 5.5 / math.sqrt(N)


def test_folded_keys_are_unrelated():
    """Streams of a parent, its descendants, neighbouring seeds and lags do not correlate, nor do their squares."""
    root = rng.key(0)
    keys = [root, rng.fold(root, 0), rng.fold(root, 1), rng.fold(root, -1), rng.fold(root, 0, 0), rng.fold(root, 0, 1),
            rng.fold(root, 1, 0), rng.key(1), rng.key(2)]  # fmt: skip
    streams = torch.stack([rng.normal(key, [N], torch.float64) for key in keys])
    rows = torch.cat([streams, streams[:1].roll(1, 1), streams[:1].roll(2, 1)]).numpy()
    for table in (rows, rows**2, np.abs(rows)):
        off = np.corrcoef(table) - np.eye(len(table))
        assert np.abs(off).max() < 4.5 / math.sqrt(N)


def test_keys_of_a_run_do_not_collide():
    """(seed, round, client, step) give as many different keys as there are tuples, whatever the order of the tags."""
    tags = torch.tensor(list(itertools.product(range(30), repeat=3)))
    keys = torch.cat([rng.fold(rng.key(seed), *tags.T) for seed in (0, 1)])
    assert len(keys.unique()) == len(keys)


def test_fold_takes_numbers_and_tensors_alike():
    """An integer tag, however large or negative, and a tensor tag give one key; tags fold one after another."""
    key = rng.key(7)
    for tag in (0, 1, -1, 40_000, 2**31, 2**62, -(2**40)):
        assert rng.fold(key, tag) == rng.fold(key, torch.tensor(tag))
    assert rng.fold(key, 3, 4) == rng.fold(rng.fold(key, 3), 4)
    assert rng.fold(key, 3, 4) != rng.fold(key, 4, 3)


def test_split_is_fold():
    """Key i of a split is the key folded with i, for one key and for many."""
    keys = rng.split(rng.key(1), 4)
    assert keys.tolist() == [int(rng.fold(rng.key(1), i)) for i in range(4)]
    assert_close(rng.split(keys, 3), torch.stack([rng.split(key, 3) for key in keys]), rtol=0, atol=0)


FUNCTIONS = {
    "bits": lambda key: rng.bits(key, [3, 5]),
    "uniform": lambda key: rng.uniform(key, [3, 5], torch.float64),
    "normal": lambda key: rng.normal(key, [3, 5], torch.float64),
    "exponential": lambda key: rng.exponential(key, [3, 5], torch.float64),
    "permutation": lambda key: rng.permutation(key, 9),
    "fold": lambda key: rng.fold(key, 2, -3),
    "split": lambda key: rng.split(key, 4),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_is_the_loop_is_a_batch_of_keys(name):
    """One key at a time, vmap over keys and a tensor of keys give the same bits."""
    function = FUNCTIONS[name]
    keys = rng.split(rng.key(5), 6)
    one_by_one = torch.stack([function(key) for key in keys])
    assert torch.equal(vmap(function, randomness="error")(keys), one_by_one)
    assert torch.equal(function(keys), one_by_one)
    assert torch.equal(function(keys.reshape(2, 3)), one_by_one.reshape(2, 3, *one_by_one.shape[1:]))


@pytest.mark.parametrize(("name", "tolerance"), [("uniform", 0.0), ("exponential", 1e-6), ("normal", 2e-5)])
def test_float32_and_float64_agree(name, tolerance):
    """One key gives the same draws in both types, up to float32's rounding."""
    draw = DRAWS[name][0]
    small, large = draw(rng.key(4), [N]), draw(rng.key(4), [N], torch.float64)
    assert small.dtype == torch.float32
    assert (small.double() - large).abs().max() <= tolerance
    assert (small.double() - large).abs().mean() < 2e-7


@pytest.mark.parametrize(("rows", "units"), [(1, 1), (4, 3), (5, 3), (7, 1)])
@pytest.mark.parametrize("pad", [0, 1, 2, 5])
def test_prefix(rows, units, pad):
    """Rows that follow move no row's draw: normal(key, [B + pad, U])[:B] == normal(key, [B, U]), odd sizes too."""
    for draw in (rng.normal, rng.uniform, rng.exponential):
        key = rng.key(6)
        assert torch.equal(draw(key, [rows + pad, units])[:rows], draw(key, [rows, units]))


@pytest.mark.parametrize("count", [0, 1, 2, 17, 100])
def test_permutation_is_one(count):
    """Each number occurs once."""
    assert rng.permutation(rng.key(8), count).sort().values.tolist() == list(range(count))


def test_permutations_are_equally_likely():
    """Over many keys, the 24 orders of four things occur equally often (chi-square)."""
    orders = rng.permutation(rng.split(rng.key(9), 12_000), 4)
    _, counts = torch.unique(orders, dim=0, return_counts=True)
    assert len(counts) == 24
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_normal_fills_any_shape():
    """Shapes come out as asked for, the empty one included, after the shape of the keys."""
    for shape in ([0], [3], [2, 0, 3], [2, 3, 1]):
        assert rng.normal(rng.key(0), shape).shape == torch.Size(shape)
        assert rng.normal(rng.split(rng.key(0), 2), shape).shape == torch.Size([2, *shape])
    assert rng.normal(rng.split(rng.key(0), 2), []).shape == (2,)


@pytest.mark.parametrize("draw", [rng.bits, rng.normal, rng.uniform])
def test_one_key_gives_a_scalar(draw):
    """The shape () of one key is a scalar, as the legend (*key.shape, *shape) says."""
    assert draw(rng.key(0), []).shape == ()


GOLDEN = {
    "key": -5414281315512073941,
    "fold": 8806972705070792047,
    "uniform": [0.8762304186820984, 0.5953479409217834, 0.4846746325492859],
    "normal": [-0.4858537616848759, -0.16792422804704335, -0.34887832109964634],
    "exponential": [0.13212618760816636, 0.5186092696921207, 0.7242774738955225],
    "permutation": [3, 7, 1, 0, 4, 5, 6, 2],
}


def test_golden():
    """Frozen values: a change here changes every published run. Made by printing the left-hand sides."""
    key = rng.key(123)
    assert int(key) == GOLDEN["key"]
    assert int(rng.fold(key, 1, 2)) == GOLDEN["fold"]
    assert_close(rng.uniform(key, [3], torch.float64).tolist(), GOLDEN["uniform"], rtol=0, atol=0)
    assert_close(rng.normal(key, [3], torch.float64).tolist(), GOLDEN["normal"], rtol=0, atol=1e-14)
    assert_close(rng.exponential(key, [3], torch.float64).tolist(), GOLDEN["exponential"], rtol=0, atol=1e-14)
    assert rng.permutation(key, 8).tolist() == GOLDEN["permutation"]
