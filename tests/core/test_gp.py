"""Laws of the Gaussian-process tree: exact integrals, textbook Gaussians, and what masks may never change."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.testing import assert_close

from metavd.core import gp, gp_nodes, rng
from metavd.core.gp_nodes import Inference
from metavd.ops.class_tree import class_tree

SMALL = Inference(chains=4, sweeps=2, terms=8)
FEW = {"inference": SMALL}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def blobs(n: int, K: int, F: int = 4, *, spread: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float64):
    """Draw labels and features around K class centres; the first K rows hold every class once."""
    source = torch.Generator().manual_seed(seed)
    centres = 3.0 * torch.randn(K, F, generator=source, dtype=torch.float64)
    y = torch.cat([torch.arange(min(n, K)), torch.randint(0, K, (max(n - K, 0),), generator=source)])
    x = centres[y] + spread * torch.randn(n, F, generator=source, dtype=torch.float64)
    return x.to(dtype), y


def padded(x: Tensor, y: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pad rows to `size` with what would do harm if it were read."""
    extra = size - len(y)
    mask = torch.cat([torch.ones(len(y)), torch.zeros(extra)]).to(x.dtype)
    return torch.cat([x, x.new_full((extra, x.shape[1]), math.nan)]), torch.cat([y, y.new_full((extra,), 1)]), mask


def answer(x, y, mask, key, *, query, K, **options):
    return gp.predictive(gp.condition(x, y, mask, key, K, **FEW, **options), query, **FEW)


# --- Pólya-Gamma -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [0.0, 0.5, 3.0, 10.0, -3.0])
def test_polya_gamma_has_the_closed_form_moments(c):
    """E = tanh(c/2)/(2c), Var = (sinh c - c)/(4 c^3 cosh^2(c/2)), with limits 1/4 and 1/24; PG(1,-c) = PG(1,c)."""
    mean = math.tanh(c / 2) / (2 * c) if c else 1 / 4
    variance = (math.sinh(c) - c) / (4 * c**3 * math.cosh(c / 2) ** 2) if c else 1 / 24
    draws = gp_nodes.polya_gamma(rng.key(3), torch.full((200_000,), c, dtype=torch.float64), 20)
    assert draws.min() > 0
    assert abs(draws.mean() - mean) < 5 * math.sqrt(variance / len(draws))
    assert abs(draws.var() / variance - 1) < 0.03


def test_polya_gamma_is_continuous_at_zero():
    """One key, c -> 0: the branch near zero joins the general formula, with a finite gradient on both sides."""
    c = torch.tensor([0.0, 0.99e-4, 1.01e-4, 1e-3], dtype=torch.float64)
    keys = rng.key(0).expand(4)
    draws = gp_nodes.polya_gamma(keys, c)
    assert_close(draws, draws[:1].expand(4), rtol=0, atol=1e-6)
    assert grad(lambda c: gp_nodes.polya_gamma(keys, c).sum())(c).isfinite().all()


def test_truncation_leaves_the_mean_exact():
    """The mean of the cut tail is added: even one term keeps E = 1/4, though not the variance."""
    draws = gp_nodes.polya_gamma(rng.key(4), torch.zeros(200_000, dtype=torch.float64), 1)
    assert abs(draws.mean() - 0.25) < 5 * math.sqrt(1 / 24 / len(draws))


# --- kernel, conditional and predictive ------------------------------------------------------------------------------


def test_kernel_is_the_rbf_of_directions():
    """RBF: k = 8 exp(-|a/|a| - b/|b||^2 / 2): lengths do not matter, opposite directions are at distance 2."""
    a = torch.tensor([[2.0, 0.0], [0.0, 5.0]], dtype=torch.float64)
    b = torch.tensor([[0.1, 0.0], [-3.0, 0.0]], dtype=torch.float64)
    expected = 8 * torch.exp(-torch.tensor([[0.0, 4.0], [2.0, 2.0]], dtype=torch.float64) / 2)
    assert_close(gp.kernel(a, b), expected)
    assert_close(gp.kernel(a, b, scale=1.0, length=2.0), (expected / 8) ** 0.25)


def test_conditional_is_the_textbook_gaussian():
    """As f is affine in its noise, f(0) = Sigma kappa and A A^T = Sigma = (K^-1 + Omega)^-1 hold exactly."""
    source = torch.Generator().manual_seed(0)
    n = 4
    draw = torch.randn(n, n, generator=source, dtype=torch.float64)
    gram = draw @ draw.mT + torch.eye(n, dtype=torch.float64)
    root = torch.linalg.cholesky(gram)
    omega = torch.tensor([0.3, 0.05, 0.2, 1.5], dtype=torch.float64)
    kappa = torch.tensor([0.5, -0.5, -0.5, 0.5], dtype=torch.float64)

    def f(noise):
        prior, more = root @ noise[:n], noise[n:]
        column = {"prior": prior[:, None], "noise": more[:, None]}
        return gp_nodes.latent([gram[None]], omega[:, None], kappa[:, None], **column)[:, 0]

    zero = torch.zeros(2 * n, dtype=torch.float64)
    slope = torch.func.jacrev(f)(zero)
    sigma = torch.linalg.inv(torch.linalg.inv(gram) + torch.diag(omega))
    assert_close(f(zero), sigma @ kappa, rtol=0, atol=1e-10)
    assert_close(slope @ slope.mT, sigma, rtol=0, atol=1e-10)


def marginals_of(gram, cross, omega, kappa, variance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance (P, S, b) of f* at the query rows."""
    return gp_nodes._moments(gp_nodes._reach(gram, cross, omega, kappa)[2], variance)


def test_marginals_are_gp_regression_on_pseudo_targets():
    """Given omega the predictive is that of regression on kappa/omega with noise 1/omega; omega = 0 deletes a row."""
    x, _ = blobs(6, 3)
    query, _ = blobs(5, 3, seed=1)
    gram, cross = gp.kernel(x, x) + 1e-3 * torch.eye(6), gp.kernel(x, query)
    omega = torch.tensor([0.2, 0.0, 0.4, 0.1, 0.0, 0.3], dtype=torch.float64)
    kappa = 0.5 * torch.tensor([1, 0, -1, 1, 0, -1], dtype=torch.float64)
    mean, variance = marginals_of(gram[None], cross[None], omega[None, None], kappa[None, None], 8.001)
    keep = omega > 0
    inverse = torch.linalg.inv(gram[keep][:, keep] + torch.diag(1 / omega[keep]))
    assert_close(mean[0, 0], cross[keep].mT @ inverse @ (kappa / omega)[keep], rtol=0, atol=1e-10)
    assert_close(variance[0, 0], 8.001 - (cross[keep].mT @ inverse @ cross[keep]).diagonal(), rtol=0, atol=1e-10)


def test_branches_integrate_the_logistic():
    """P(left) = E[sigmoid(f)], or exp(E[log sigmoid]) normalised, against a dense grid; chains are averaged."""
    mean = torch.tensor([[[-4.0, 0.0, 1.0], [0.5, 0.0, 9.0]]], dtype=torch.float64)
    variance = torch.tensor([[[8.0, 8.0, 0.5], [1.0, 0.1, 2.0]]], dtype=torch.float64)
    z = torch.linspace(-12, 12, 20_001, dtype=torch.float64)
    weight = torch.softmax(-z.square() / 2, 0)
    f = mean[..., None] + variance.sqrt()[..., None] * z
    exact = (weight * torch.sigmoid(f)).sum(-1).mean(1)
    assert_close(gp_nodes.branches(mean, variance)[:, 0].exp(), exact, rtol=1e-4, atol=0)
    assert_close(gp_nodes.branches(mean, variance).exp().sum(1), torch.ones(1, 3, dtype=torch.float64))
    sides = [(weight * torch.nn.functional.logsigmoid(sign * f)).sum(-1).exp().mean(1) for sign in (1, -1)]
    jensen = gp_nodes.branches(mean, variance, log_average=True)[:, 0].exp()
    assert_close(jensen, sides[0] / (sides[0] + sides[1]), rtol=1e-3, atol=0)
    assert (jensen - exact).abs().max() > 1e-3


WIDE = [[1.0, 0.2], [0.1, 1.0], [-1.0, 0.6]]
NEAR = [[1.0, 0.2], [1.0, 0.3], [1.0, 0.0]]


def exact_left(x: Tensor, kappa: Tensor, query: Tensor, points: int = 40) -> tuple[Tensor, Tensor]:
    """Integrate over the rows' functions by tensor Gauss-Hermite quadrature, then over f*: P(left) and E[omega | y]."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(points)
    grid = torch.tensor(list(itertools.product(nodes, repeat=len(x))), dtype=torch.float64)
    mass = torch.tensor(list(itertools.product(weights, repeat=len(x))), dtype=torch.float64).prod(-1)
    eye = torch.eye(len(x), dtype=torch.float64)
    gram, cross = gp.kernel(x, x) + 1e-3 * eye, gp.kernel(x, query)
    f = grid @ torch.linalg.cholesky(gram).mT
    mass = mass * torch.sigmoid(2 * kappa * f).prod(-1)
    mass = mass / mass.sum()
    gain = torch.linalg.solve(gram, cross)
    spread = (8.001 - (cross * gain).sum(0)).sqrt()
    inner = [w * torch.sigmoid(f @ gain + spread * z) for z, w in zip(nodes, weights, strict=True)]
    star = torch.stack(inner).sum(0) / weights.sum()
    return mass @ star, mass @ (torch.tanh(f / 2) / (2 * f))


@pytest.mark.parametrize(
    ("rows", "y"), [(WIDE, [0]), (WIDE, [0, 1]), (WIDE, [0, 1, 1]), (NEAR, [1, 1, 1]), (NEAR, [0, 1, 0])]
)
def test_two_class_posterior_is_the_exact_integral(rows, y):
    """Many chains of the sampler agree with the integral over f of a GP classifier with a logistic likelihood.

    Rows that agree or contradict each other closely move omega away from its prior, where the chains start.
    """
    x = torch.tensor(rows, dtype=torch.float64)[: len(y)]
    query = torch.tensor([[1.0, 0.0], [0.7, 0.7], [-0.3, 1.0], [0.0, -1.0]], dtype=torch.float64)
    labels = torch.tensor(y)
    kappa = 0.5 - labels.double()
    gram = gp.kernel(x, x) + 1e-3 * torch.eye(len(y))
    keys = rng.split(rng.key(5), len(y))[None]
    many = Inference(chains=10_000, sweeps=12)
    omega = gp_nodes.gibbs(gram, kappa[None], keys, many)
    mean, variance = marginals_of(gram[None], gp.kernel(x, query)[None], omega, kappa[None, None], 8.001)
    left, expected_omega = exact_left(x, kappa, query)
    assert ((omega[0].mean(0) - expected_omega).abs() < 4 * omega[0].std(0) / 100).all()
    assert_close(gp_nodes.branches(mean, variance)[0, 0].exp(), left, rtol=0, atol=0.006)
    if len(set(y)) == 2:  # the whole way through, where the client's tree has a node
        posterior = gp.condition(x, labels, None, rng.key(6), 2, inference=many)
        probs = gp.predictive(posterior, query, novel="zero")
        assert_close(probs, torch.stack([left, 1 - left], 1), rtol=0, atol=0.006)


def test_predictive_uses_the_prior_it_is_given():
    """For two classes the answer is the node's own: rows' covariance K + jitter I, queries' variance scale + jitter."""
    x, y = blobs(6, 2)
    query, _ = blobs(5, 2, seed=1)
    inference = SMALL._replace(scale=3.0, length=0.5, jitter=0.01)
    posterior = gp.condition(x, y, None, rng.key(0), 2, inference=inference)
    gram, cross = gp.kernel(x, x, 3.0, 0.5) + 0.01 * torch.eye(6), gp.kernel(x, query, 3.0, 0.5)
    marginals = marginals_of(gram[None], cross[None], posterior["gp.omega"], posterior["gp.kappa"][None], 3.01)
    left, right = gp_nodes.branches(*marginals)[0].exp()
    probs = gp.predictive(posterior, query, novel="zero", inference=inference)
    assert_close(probs, torch.stack([left, right], 1), rtol=0, atol=1e-10)


def test_order_of_rows_does_not_matter_in_the_limit():
    """Rows are exchangeable: with many chains a permuted client predicts the same up to Monte-Carlo error."""
    x, y = blobs(8, 3, spread=3.0)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    query, _ = blobs(6, 3, seed=2)
    first, second = (
        gp.predictive(
            gp.condition(x[rows], y[rows], None, rng.key(8), 3, inference=Inference(chains=2000, sweeps=15)), query
        )
        for rows in (torch.arange(8), order)
    )
    assert_close(first, second, rtol=0, atol=0.02)


# --- tree ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", [2, 3, 7, 20])
@pytest.mark.parametrize("coincide", [False, True])
def test_every_present_class_has_its_own_leaf(K, coincide):
    """The k present classes use k - 1 nodes with no empty side, and any two of them part at exactly one node."""
    source = torch.Generator().manual_seed(K)
    present = torch.ones(K)
    present[2::4] = 0
    k = int(present.sum())
    means = torch.zeros(K, 3) if coincide else torch.randn(K, 3, generator=source)
    left, right = class_tree(means, present)
    assert left.shape == right.shape == (K - 1, K)
    used = (left + right).sum(-1) > 0
    assert used.tolist() == [True] * (k - 1) + [False] * (K - k)
    assert (left.sum(-1)[used] >= 1).all()
    assert (right.sum(-1)[used] >= 1).all()
    assert ((left + right) <= present).all()
    assert_close(left[0] + right[0], present)
    parts = left.mT @ right + right.mT @ left
    assert_close(parts, present[:, None] * present * (1 - torch.eye(K)))


def test_root_separates_super_clusters():
    """Classes around two far points part at the root, and at each side's node its own two pairs part."""
    means = torch.tensor([[10.0, 0], [-10, 0.5], [10, 6], [-10, 8], [10, 0.5], [-10, 8.5], [99, 99]])
    left, right = class_tree(means, torch.tensor([1.0, 1, 1, 1, 1, 1, 0]))
    splits = [{frozenset(side.nonzero().flatten().tolist()) for side in node} for node in zip(left, right, strict=True)]
    assert splits[0] == {frozenset({0, 2, 4}), frozenset({1, 3, 5})}
    for a, b in [({0, 4}, {2}), ({1}, {3, 5}), ({0}, {4}), ({3}, {5})]:
        assert {frozenset(a), frozenset(b)} in splits


def test_lloyd_reaches_a_local_optimum():
    """No single class of a split node is nearer to the other side's centre."""
    means = torch.randn(40, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, right = class_tree(means, torch.ones(40), iterations=30)
    for a, b in zip(left > 0, right > 0, strict=True):
        centres = torch.stack([means[a].mean(0), means[b].mean(0)])
        nearest = torch.cdist(means, centres).argmin(-1)
        assert (nearest[a] == 0).all()
        assert (nearest[b] == 1).all()


def test_tree_of_many_classes_vmaps():
    """K = 100 under vmap is the loop's tree, whoever is absent."""
    source = torch.Generator().manual_seed(3)
    means = torch.randn(2, 100, 8, generator=source, dtype=torch.float64)
    present = (torch.rand(2, 100, generator=source) < 0.6).double()
    batched = vmap(class_tree, randomness="error")(means, present)
    looped = [torch.stack(side) for side in zip(*map(class_tree, means, present), strict=True)]
    assert_close(batched, tuple(looped), rtol=0, atol=0)


# --- probabilities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("novel", ["laplace", "zero"])
@pytest.mark.parametrize("log_average", [False, True])
def test_probabilities_sum_to_one(novel, log_average):
    """A distribution over all K classes, whichever the client has seen."""
    x, y = blobs(12, 4)
    y = torch.tensor([1, 3, 4, 6])[y]
    inference = SMALL._replace(log_average=log_average)
    posterior = gp.condition(x, y, None, rng.key(0), 8, inference=inference)
    probs = gp.predictive(posterior, x, novel=novel, inference=inference)
    assert probs.shape == (12, 8)
    assert (probs >= 0).all()
    assert_close(probs.sum(-1), torch.ones(12, dtype=torch.float64))


def test_unseen_classes_share_laplace_mass():
    """With k of K classes in n rows: each unseen class has 1/(n + K), and the rest is the tree's, scaled."""
    x, y = blobs(9, 3)
    y = torch.tensor([0, 2, 5])[y]
    posterior = gp.condition(x, y, None, rng.key(0), 7, **FEW)
    probs, closed = gp.predictive(posterior, x), gp.predictive(posterior, x, novel="zero")
    unseen, seen = [1, 3, 4, 6], [0, 2, 5]
    assert_close(probs[:, unseen], torch.full((9, 4), 1 / 16, dtype=torch.float64))
    assert_close(probs[:, seen], closed[:, seen] * 12 / 16)
    assert_close(closed[:, unseen], torch.zeros(9, 4, dtype=torch.float64))


def test_absent_classes_change_nothing_but_the_mass():
    """Naming more classes adds unused nodes only: the tree's answer is the same number."""
    x, y = blobs(10, 3)
    posteriors = [gp.condition(x, y, None, rng.key(1), K, **FEW) for K in (3, 9)]
    small, large = (gp.predictive(posterior, x, novel="zero") for posterior in posteriors)
    assert_close(large[:, :3], small, rtol=0, atol=1e-10)


@pytest.mark.parametrize("novel", ["laplace", "zero"])
def test_clients_with_no_or_one_class(novel):
    """No rows: uniform. One class: all that is not kept for unseen classes. No nodes are used either way."""
    x, y = blobs(4, 1)
    K = 3
    empty = gp.condition(x, y, torch.zeros(4), rng.key(0), K, **FEW)
    assert_close(gp.predictive(empty, x, novel=novel), torch.full((4, K), 1 / K, dtype=torch.float64))
    single = gp.condition(x, y, None, rng.key(0), K, **FEW)
    share = 1 / (4 + K) if novel == "laplace" else 0.0
    expected = torch.tensor([1 - 2 * share, share, share], dtype=torch.float64).expand(4, K)
    assert_close(gp.predictive(single, x, novel=novel), expected)
    assert single["gp.left"].sum() == 0


def test_a_world_of_one_class():
    """K = 1: probability 1 and loss 0."""
    x, y = blobs(3, 1)
    assert_close(answer(x, y, None, rng.key(0), query=x, K=1), torch.ones(3, 1, dtype=torch.float64))
    assert gp.loss(x, y, None, rng.key(0), 1, **FEW) == 0


def test_separated_classes_are_recognised():
    """Well separated classes: more than 95 % of fresh rows are right, in float32 as used."""
    x, y = blobs(150, 6, F=8, spread=0.5, dtype=torch.float32)
    posterior = gp.condition(x[:60], y[:60], None, rng.key(0), 6)
    probs = gp.predictive(posterior, x[60:])
    assert probs.dtype == torch.float32
    assert (probs.argmax(-1) == y[60:]).double().mean() > 0.95


# --- loss ------------------------------------------------------------------------------------------------------------


def test_targets_are_half_of_every_class():
    """floor(n_c / 2) of every class, every row equally often, and never a padded one."""
    y = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 3, 3, 0, 1])
    mask = (torch.arange(14) < 12).double()

    def targets(key):
        return gp._targets(gp._own(torch.zeros(14, 2, dtype=torch.float64), y, mask, key, 5))

    chosen = vmap(targets, randomness="error")(rng.split(rng.key(0), 2000))
    labels = torch.nn.functional.one_hot(y, 5).double()
    assert_close(chosen @ labels, torch.tensor([2.0, 2, 0, 1, 0], dtype=torch.float64).expand(2000, 5))
    expected = torch.tensor([0.4] * 5 + [0.5] * 4 + [0] + [0.5] * 2 + [0] * 2, dtype=torch.float64)
    assert_close(chosen.mean(0), expected, rtol=0, atol=0.06)


@pytest.mark.parametrize("K", [2, 4])
def test_loss_is_the_predictive_likelihood_of_the_targets(K):
    """Sum over nodes of the targets' mean cross-entropy, from the class probabilities of a client with the other half.

    P(left at j) is the left classes' part of the probability of j's classes. Same keys, so the same samples, and
    classes tight enough that half of the rows have the tree of all.
    """
    x, y = blobs(17, K, spread=0.05)
    key = rng.key(2)
    chosen = gp._targets(gp._own(x, y, None, key, K)) > 0
    posterior = gp.condition(x, y, ~chosen, key, K, **FEW)
    assert_close(posterior["gp.left"], gp.condition(x, y, None, key, K, **FEW)["gp.left"])
    probs = gp.predictive(posterior, x[chosen])
    total = torch.zeros((), dtype=torch.float64)
    for left, right in zip(posterior["gp.left"], posterior["gp.right"], strict=True):
        taken = torch.stack([left, right])[:, y[chosen]]
        p = probs @ torch.stack([left, right], 1)
        p = p / p.sum(-1, keepdim=True)
        total = total - (taken.mT * p.log()).sum() / taken.sum()
    assert_close(gp.loss(x, y, None, key, K, **FEW), total, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("n", "real", "classes"),
    [(1, 1, 1), (1, 0, 1), (2, 2, 2), (5, 0, 1), (6, 6, 1), (6, 6, 6), (7, 4, 3)],
    ids=["one row", "one padded row", "one row per class", "all padded", "one class", "no targets", "ragged"],
)
@pytest.mark.parametrize("log_average", [False, True])
@pytest.mark.parametrize("points", [None, 2])
def test_loss_and_gradient_are_finite_at_the_edges(n, real, classes, log_average, points):
    """No targets: loss and gradient 0; never NaN, not even for zero features."""
    x, y = blobs(n, classes)
    x[0] = 0.0
    mask = (torch.arange(n) < real).double()
    inducing = None if points is None else 0.01 * blobs(6 * points, 6)[0].reshape(6, points, 4)

    def objective(x):
        inference = SMALL._replace(log_average=log_average)
        return gp.loss(x, y, mask, rng.key(0), 6, points=inducing, inference=inference)

    value, slope = objective(x), grad(objective)(x)
    assert value.isfinite()
    assert slope.isfinite().all()
    if real <= classes or classes == 1:
        assert value == 0
        assert (slope == 0).all()


def test_gradient_is_that_of_finite_differences():
    """The gradient to the features is exact, given the samples: omega is drawn once and then held."""
    x, y = blobs(8, 2)
    source = torch.Generator().manual_seed(0)
    direction = torch.randn(8, 4, generator=source, dtype=torch.float64)
    query, _ = blobs(3, 2, seed=4)
    posterior = gp.condition(x, y, None, rng.key(0), 2, **FEW)

    def value(t):
        return gp.predictive(posterior | {"gp.features": x + t * direction}, query)[:, 0].log().sum()

    zero, step = torch.zeros((), dtype=torch.float64), 1e-5
    assert_close(grad(value)(zero), (value(zero + step) - value(zero - step)) / (2 * step), rtol=1e-6, atol=1e-8)


def test_samples_carry_no_gradient():
    """The sample omega is a constant of the kernel matrix, so its gradient is zero."""
    x, _ = blobs(4, 2)
    kappa = torch.tensor([[0.5, -0.5, 0.5, -0.5]], dtype=torch.float64)
    gram = gp.kernel(x, x) + 1e-3 * torch.eye(4)
    slope = grad(
        lambda gram: gp_nodes.gibbs(gram, kappa, rng.split(rng.key(0), 4)[None], SMALL).sum() + 0 * gram.sum()
    )(gram)
    assert (slope == 0).all()


def test_float32_survives_equal_rows():
    """Two hundred nearly equal rows: the kernel matrix is singular but for the jitter, and float32 stays finite."""
    x = torch.ones(200, 4) + 1e-4 * blobs(200, 2)[0].float()
    y = torch.arange(200) % 2

    def objective(x):
        return gp.loss(x, y, None, rng.key(0), 2, **FEW)

    assert abs(objective(x) - math.log(2)) < 0.1
    assert grad(objective)(x).isfinite().all()
    probs = answer(x, y, None, rng.key(0), query=x, K=2)
    assert_close(probs, torch.full((200, 2), 0.5), rtol=0, atol=0.2)


def test_gradient_steps_learn_features():
    """SGD on a linear map of noisy inputs lowers the loss, also for keys that were not trained on."""
    source = torch.Generator().manual_seed(0)
    y = torch.arange(30) % 3
    x = 3.0 * torch.nn.functional.one_hot(y, 6) + torch.randn(30, 6, generator=source)
    x[:, 3:] *= 3.0
    weight = torch.randn(4, 6, generator=source)

    def objective(weight, key):
        return gp.loss(x @ weight.mT, y, None, key, 3, **FEW)

    fresh = rng.split(rng.key(9), 8)
    before = vmap(objective, (None, 0), randomness="error")(weight, fresh).mean()
    for key in rng.split(rng.key(1), 30):
        weight = weight - 0.5 * grad(objective)(weight, key)
    after = vmap(objective, (None, 0), randomness="error")(weight, fresh).mean()
    assert after < 0.8 * before


# --- masks, vmap and chunks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 11])
@pytest.mark.parametrize("points", [None, 2])
def test_padding_has_no_influence(limit, points):
    """Rows of mask 0, whatever they hold, change neither probabilities nor loss nor its gradient."""
    x, y = blobs(11, 4)
    query, _ = blobs(5, 4, seed=1)
    key = rng.key(3)
    options = {"limit": limit, "points": None if points is None else blobs(8, 4, seed=5)[0].reshape(4, points, 4)}
    x_more, y_more, mask = padded(x, y, 17)

    def objective(x, y, mask):
        return gp.loss(x, y, mask, key, 4, **FEW, **options)

    assert_close(
        answer(x_more, y_more, mask, key, query=query, K=4, borrow=1.0, **options),
        answer(x, y, None, key, query=query, K=4, borrow=1.0, **options),
        rtol=0,
        atol=1e-10,
    )
    assert_close(objective(x_more, y_more, mask), objective(x, y, None), rtol=0, atol=1e-10)
    slope = grad(objective)(x_more, y_more, mask)
    assert_close(slope[:11], grad(objective)(x, y, None), rtol=0, atol=1e-10)
    assert (slope[11:] == 0).all()


def test_padding_may_stand_anywhere():
    """Not only trailing rows: with the keys of the rows that remain, a hole is as if it were not there."""
    x, y = blobs(9, 3)
    mask = torch.ones(9)
    mask[[0, 4]] = 0
    keep = mask > 0
    labels = torch.nn.functional.one_hot(y, 3).double()
    keys = rng.split(rng.key(0), 9)
    left, right = class_tree(blobs(3, 3, seed=2)[0], torch.ones(3))
    holes, _ = gp._posterior(gp._Rows(x, labels * mask[:, None], keys), left, right, SMALL)
    whole, _ = gp._posterior(gp._Rows(x[keep], labels[keep], keys[keep]), left, right, SMALL)
    assert_close(holes[..., keep], whole, rtol=0, atol=1e-10)
    assert (holes[..., ~keep] == 0).all()


@pytest.fixture
def clients():
    """Ragged clients with different classes, borrow flags and keys, padded to one size."""
    sizes, C, n, K, F = [12, 7, 1, 0], 4, 12, 4, 4
    x, y = (torch.stack(part) for part in zip(*(blobs(n, K - c % 3, F, seed=c) for c in range(C)), strict=True))
    mask = (torch.arange(n) < torch.tensor(sizes)[:, None]).double()
    borrow = torch.tensor([0.0, 1.0, 1.0, 0.0])
    points = blobs(K * 2, K, F, seed=9)[0].reshape(K, 2, F)
    return x, y, mask, rng.split(rng.key(7), C), borrow, points


def looped(function, *batched):
    return torch.stack([function(*one) for one in zip(*batched, strict=True)])


def test_vmap_is_the_loop(clients):
    """Prediction, loss and its gradients are the same numbers for stacked clients, without any hidden randomness."""
    x, y, mask, key, borrow, points = clients

    def probs(x, y, mask, key, borrow):
        return answer(x, y, mask, key, query=x, K=4, points=points, borrow=borrow, limit=9)

    def objective(x, points, y, mask, key):
        return gp.loss(x, y, mask, key, 4, points=points, limit=9, **FEW)

    def both(x, y, mask, key):
        slopes = grad(objective, (0, 1))(x, points, y, mask, key)
        return torch.cat([part.flatten() for part in (objective(x, points, y, mask, key), *slopes)])

    for function, inputs in ((probs, (x, y, mask, key, borrow)), (both, (x, y, mask, key))):
        batched = vmap(function, randomness="error")(*inputs)
        assert_close(batched, looped(function, *inputs), rtol=0, atol=1e-10)


def dense_gibbs(gram, kappa, keys, inference):
    """Sample every node with all of a client's rows, used or not: what `gibbs` must give."""
    root, branch = torch.linalg.cholesky(gram), kappa[:, None]

    def normal(sweep, tag):
        return rng.normal(rng.fold(keys, sweep, tag), [inference.chains], kappa.dtype).mT

    def augment(sweep, f):
        drawn = gp_nodes.polya_gamma(rng.fold(keys, sweep, gp_nodes._OMEGA), f.mT, inference.terms).mT
        return torch.where(branch != 0, drawn, 0.0)

    omega = augment(0, normal(0, gp_nodes._WHITE) @ root.mT)
    for sweep in range(1, inference.sweeps + 1):
        prior = normal(sweep, gp_nodes._WHITE) @ root.mT
        scale, target = gp_nodes._whitened(omega, branch)
        inner = torch.eye(len(gram)) + scale[..., :, None] * gram * scale[..., None, :]
        residual = target - scale * prior - normal(sweep, gp_nodes._NOISE)
        omega = augment(sweep, prior + (scale * torch.linalg.solve(inner, residual)) @ gram)
    return omega


def dense_decide(gram, cross, omega, kappa, inference):
    """Ask every node about every query row, by an inverse: what `decide` must give, with autograd's derivative."""
    scale, target = gp_nodes._whitened(omega, kappa[:, None])
    inner = torch.eye(len(gram)) + scale[..., :, None] * gram * scale[..., None, :]
    solved = scale[..., None] * torch.linalg.solve(inner, torch.cat([scale[..., None] * cross, target[..., None]], -1))
    mean, spread = (cross * solved[..., -1:]).sum(-2), (cross * solved[..., :-1]).sum(-2)
    return gp_nodes.branches(mean, inference.variance - spread, log_average=inference.log_average)


@pytest.mark.parametrize("at_once", [1, 1 << 26])
def test_packed_nodes_are_the_dense_ones(clients, monkeypatch, at_once):
    """Parity: each node with its own rows, beside others of its size, draws and answers as with all rows.

    Also if every problem is a block of its own; gradients by both kernel matrices too.
    """
    monkeypatch.setattr(gp_nodes, "_AT_ONCE", at_once)
    x, y, mask, keys, *_ = clients
    query = blobs(5, 4, seed=11)[0]
    wanted = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1], [0, 1, 0, 0, 0]]) > 0
    weight = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def both(x, y, mask, key, *, packed):
        rows = gp._own(x, y, mask, key, 4)
        _, left, right = gp._grow(rows)
        kappa, cross = 0.5 * (left - right) @ rows.labels.mT, gp.kernel(rows.features, query)
        gram = gp.kernel(rows.features, rows.features) + 1e-3 * torch.eye(len(x))
        names = rng.fold(rows.keys, torch.arange(3)[:, None])
        omega = (gp_nodes.gibbs if packed else dense_gibbs)(gram, kappa, names, SMALL)

        def value(gram, cross):
            if packed:
                logs = gp_nodes.decide(gp_nodes.Question(gram, cross, omega, kappa), wanted, SMALL)
            else:
                logs = torch.where(wanted[:, None], dense_decide(gram, cross, omega, kappa, SMALL), -math.log(2))
            return (weight * logs).sum()

        by_gram, by_cross = grad(value, (0, 1))(gram, cross)
        return torch.cat([part.flatten() for part in (omega, value(gram, cross), by_gram + by_gram.mT, by_cross)])

    inputs = (x, y, mask, keys)
    dense = looped(lambda *one: both(*one, packed=False), *inputs)
    assert_close(looped(lambda *one: both(*one, packed=True), *inputs), dense, rtol=0, atol=1e-10)
    assert_close(vmap(lambda *one: both(*one, packed=True), randomness="error")(*inputs), dense, rtol=0, atol=1e-10)


# --- inducing points -------------------------------------------------------------------------------------------------


def test_points_join_when_borrowed_or_when_rows_were_cut():
    """Without borrowing and with n <= limit nothing changes; with borrowing, or with n > limit, they take part."""
    x, y = blobs(10, 3)
    query, _ = blobs(5, 3, seed=1)
    points = blobs(6, 3, seed=2)[0].reshape(3, 2, 4)
    key = rng.key(0)
    plain = answer(x, y, None, key, query=query, K=3)
    for borrow in (0.0, torch.tensor(0.0), torch.tensor(False)):
        idle = answer(x, y, None, key, query=query, K=3, points=points, borrow=borrow, limit=10)
        assert_close(idle, plain, rtol=0, atol=1e-10)
    lent = answer(x, y, None, key, query=query, K=3, points=points, borrow=torch.tensor(1.0), limit=10)
    assert (lent - plain).abs().max() > 1e-3
    cut = answer(x, y, None, key, query=query, K=3, limit=6)
    cut_and_lent = answer(x, y, None, key, query=query, K=3, points=points, limit=6)
    assert (cut_and_lent - cut).abs().max() > 1e-3


def test_points_are_rows_with_labels():
    """In distribution, a borrowed point is a row of its class: many chains agree with a client that owns it."""
    x, y = blobs(5, 2, spread=3.0)
    points = blobs(2, 2, seed=2)[0].reshape(2, 1, 4)
    query, _ = blobs(4, 2, seed=1)
    options = {"inference": Inference(chains=2000, sweeps=15)}
    lent = gp.condition(x, y, None, rng.key(0), 2, points=points, borrow=1.0, **options)
    rows, labels = torch.cat([x, points.flatten(0, 1)]), torch.cat([y, torch.arange(2)])
    owned = gp.condition(rows, labels, None, rng.key(1), 2, **options)
    answers = [gp.predictive(posterior, query, novel="zero") for posterior in (lent, owned)]
    assert_close(answers[0], answers[1], rtol=0, atol=0.02)


def test_limit_cuts_what_conditions_but_not_what_counts():
    """Rows after the limit give presence and counts only; the cost is limit + K M rows."""
    x, y = blobs(10, 2)
    points = blobs(10, 5, seed=2)[0].reshape(5, 2, 4)
    posterior = gp.condition(x, y, None, rng.key(0), 5, points=points, limit=6, **FEW)
    assert posterior["gp.omega"].shape == (4, SMALL.chains, 6 + 10)
    assert posterior["gp.counts"].sum() == 10
    moved = x.clone()
    moved[6:] += 1.0
    other = gp.condition(moved, y, None, rng.key(0), 5, points=points, limit=6, **FEW)
    assert_close(gp.predictive(other, x), gp.predictive(posterior, x), rtol=0, atol=1e-10)


def test_points_add_no_class_and_only_own_classes_learn():
    """Presence and counts are the client's own, and points of classes that it lacks neither condition nor learn."""
    x, y = blobs(10, 2)
    points = blobs(12, 4, seed=2)[0].reshape(4, 3, 4)
    posterior = gp.condition(x, y, None, rng.key(0), 4, points=points, borrow=1.0, **FEW)
    assert posterior["gp.present"].tolist() == [1, 1, 0, 0]
    assert posterior["gp.counts"].sum() == 10
    assert (posterior["gp.omega"][:, :, 10 + 6 :] == 0).all()
    slope = grad(lambda points: gp.loss(x, y, None, rng.key(0), 4, points=points, **FEW))(points)
    assert (slope[:2].abs().sum((1, 2)) > 0).all()
    assert (slope[2:] == 0).all()
