"""Gaussian-process classification on a tree of classes (pFedGP), for one client, as pure functions of tensors.

A client's classes are the leaves of a binary tree; every inner node is a binary GP classifier with a logistic
likelihood, made conjugate by Pólya-Gamma variables:

    f_j ~ N(0, K + jitter I),   P(left | f) = sigmoid(f),   kappa = +1/2 left, -1/2 right
    omega_i | f   ~ PG(1, f_i)
    f | omega, y  ~ N(Sigma kappa, Sigma),   Sigma = (K^-1 + Omega)^-1 = K - K S B^-1 S K
    S = Omega^1/2,   B = I + S K S

All nodes and chains share one kernel matrix. A row that a node does not see (another branch, padding, a point that is
not in use) has omega = 0 there: its row of B is the identity's and it drops out exactly, so shapes never depend on
data. Randomness comes from keys folded per row, so padding moves no other row's draw. The samples carry no gradient;
features learn through the kernel matrices alone.

Cost for one client: `sweeps` + 1 batched Cholesky factors (J, S, n, n). With J = 99, S = 20, n = 500 one such tensor
takes 2 GB in float32, and about three are alive at once; `chunk` bounds the nodes treated together (the numbers do not
change), `limit` bounds n, and an outer vmap multiplies by its width. Gradients of `loss` keep all chunks alive, but its
conditioning rows are packed into (n + K) / 2 places, about an eighth of the work for few classes.

Shape letters: n rows, F features, K classes, J = K - 1 nodes, S chains, B query rows, M inducing points per class,
Q quadrature points.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..tree import Params
from . import rng


class Prior(NamedTuple):
    """The latent function's prior; pFedGP never trains it. What conditioned with one must predict with the same."""

    scale: float = 8.0
    """Variance of the function."""
    length: float = 1.0
    """Length scale, in units of L2-normalised features."""
    jitter: float = 1e-3
    """Variance added to every row, conditioning or query, so that every predictive variance is at least this."""


PRIOR = Prior()

_OMEGA, _WHITE, _NOISE = range(3)  # tags that keep the draws of one sweep apart


def normalized(a: Tensor) -> Tensor:
    """Return rows of unit L2 norm; a zero row stays zero, with a finite gradient."""
    square = a.square().sum(-1, keepdim=True)
    # A row below rounding (a dead ReLU layer, padding) has no direction; dividing it by its norm would blow it up.
    return a / torch.where(square > torch.finfo(a.dtype).eps ** 2, square, 1.0).sqrt()


def kernel(a: Tensor, b: Tensor, scale: float = 8.0, length: float = 1.0) -> Tensor:
    """RBF kernel of L2-normalised features (n, F), (B, F) -> (n, B).

    k(a, b) = scale exp(-|a/|a| - b/|b||^2 / (2 length^2))
    """
    a, b = normalized(a), normalized(b)
    # The distance may round to -1e-16; exp does not mind, so no clamp (and no clamp's gradient) is needed.
    distance = a.square().sum(-1)[..., :, None] + b.square().sum(-1)[..., None, :] - 2.0 * a @ b.mT
    return scale * torch.exp(-distance / (2.0 * length**2))


def _gram(features: Tensor, prior: Prior) -> Tensor:
    """Prior covariance (n, n) of the function at the rows."""
    eye = torch.eye(features.shape[0], dtype=features.dtype, device=features.device)
    return kernel(features, features, prior.scale, prior.length) + prior.jitter * eye


def _bisect(square: Tensor, member: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Split one node's classes (K,) by 2-means, given squared distances (K, K); two zero masks below two classes.

    |x - mean(A)|^2 = mean_a |x - a|^2 - 1/2 mean_aa' |a - a'|^2, so Lloyd's iterations need the distances alone.
    """
    K = member.shape[0]
    index = torch.arange(K, device=member.device)
    pairs = (member[:, None] * member[None, :] > 0) & (index[:, None] < index[None, :])
    farthest = torch.where(pairs, square, -1.0).flatten().argmax()  # the first of equals
    first = (index == farthest // K).to(member)
    second = (index == farthest % K).to(member)
    nearer = (first @ square <= second @ square).to(member)
    # The two seeds are placed by hand: where class means coincide, all classes are as near to one as to the other.
    left = member * torch.where(first > 0, 1.0, torch.where(second > 0, 0.0, nearer))
    for _ in range(iterations):
        sides = torch.stack([left, member - left])
        weights = sides / sides.sum(-1, keepdim=True).clamp(min=1.0)
        reach = weights @ square
        to_left, to_right = reach - 0.5 * (reach * weights).sum(-1, keepdim=True)
        moved = member * (to_left <= to_right)
        valid = (moved.sum() > 0) & (moved.sum() < member.sum())
        left = torch.where(valid, moved, left)
    used = (member.sum() >= 2).to(member)
    return left * used, (member - left) * used


def class_tree(means: Tensor, present: Tensor, iterations: int = 10) -> tuple[Tensor, Tensor]:
    """Build the binary tree of the present classes (K,) from their mean features (K, F): left, right (J, K).

    Row j holds 1 for the classes that go left (right) at node j. The root comes first and parents before children;
    unused nodes are rows of zeros at the end. A node is split by 2-means from its farthest pair of classes (pFedGP
    starts scikit-learn's 2-means 50 times at random; here it is deterministic), and no side is ever empty. k present
    classes use k - 1 nodes. One class alone (K = 1) still gets one, unused, node, so that no tensor is empty.
    """
    whole = (present > 0).to(means.dtype)
    K = whole.shape[0]
    J = max(K - 1, 1)
    means = torch.where(whole[:, None] > 0, means, 0.0)
    square = (means[:, None] - means[None, :]).square().sum(-1)
    slots = torch.arange(J, device=means.device)
    queue = (slots == 0).to(means.dtype)[:, None] * whole
    tail = torch.ones((), dtype=torch.int64, device=means.device)
    lefts, rights = [], []
    for j in range(J):
        sides = _bisect(square, queue[j], iterations)
        for side in sides:
            inner = side.sum() >= 2
            queue = queue + ((slots == tail) & inner)[:, None] * side
            tail = tail + inner
        lefts.append(sides[0])
        rights.append(sides[1])
    return torch.stack(lefts), torch.stack(rights)


def polya_gamma(key: Tensor, c: Tensor, terms: int = 20) -> Tensor:
    """Draw from PG(1, c), one draw an element of c, whose shape starts with the shape of `key`.

        omega = 1/(2 pi^2) sum_k g_k / d_k,   g_k ~ Exp(1),   d_k = (k - 1/2)^2 + c^2 / (4 pi^2)
        E[omega] = tanh(c/2) / (2c),  1/4 at c = 0

    The sum is cut after `terms` and the mean of what was cut is added, so the mean is exact and the variance lacks
    less than 1 / (12 pi^4 terms^3), a millionth of the variance at c = 0 for 20 terms.
    """
    small = c.abs() < 1e-4
    safe = torch.where(small, 1.0, c)
    mean = torch.where(small, 0.25 - c.square() / 48.0, torch.tanh(safe / 2.0) / (2.0 * safe))
    odd = torch.arange(terms, dtype=c.dtype, device=c.device) + 0.5
    denominator = odd.square() + c[..., None].square() / (4.0 * math.pi**2)
    gamma = rng.exponential(key, [*c.shape[key.dim() :], terms], c.dtype)
    return mean + ((gamma - 1.0) / denominator).sum(-1) / (2.0 * math.pi**2)


def _whitened(omega: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
    """Return S = omega^1/2 and the whitened pseudo-targets S (kappa / omega), 0 for rows that the node does not see."""
    seen = omega > 0
    root = torch.where(seen, omega, 0.0).sqrt()
    return root, torch.where(seen, kappa / torch.where(seen, root, 1.0), 0.0)


def _factor(gram: Tensor, root_omega: Tensor) -> Tensor:
    """Cholesky factor of B = I + S K S. All eigenvalues are at least 1, so float32 is safe and no check is needed."""
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factor: Tensor = torch.linalg.cholesky_ex(eye + root_omega[..., :, None] * gram * root_omega[..., None, :]).L
    return factor


def latent(gram: Tensor, root: Tensor, omega: Tensor, kappa: Tensor, *, white: Tensor, noise: Tensor) -> Tensor:
    """Draw f | omega, y of shape (..., n) by Matheron's rule from standard normals `white`, `noise` (..., n).

        f0 = root white ~ N(0, K),   f = f0 + K S B^-1 (S kappa / omega - S f0 - noise) ~ N(Sigma kappa, Sigma)

    `root` is any matrix with root root^T = gram. Nothing is divided by an omega of zero and no Sigma is factorised.
    """
    scale, target = _whitened(omega, kappa)
    prior = white @ root.mT
    residual = (target - scale * prior - noise)[..., None]
    return prior + (scale * torch.cholesky_solve(residual, _factor(gram, scale))[..., 0]) @ gram


def gibbs(gram: Tensor, kappa: Tensor, keys: Tensor, *, chains: int = 20, sweeps: int = 5, terms: int = 20) -> Tensor:
    """Sample omega (J, S, n) given the branches kappa (J, n), from `chains` independent chains at every node.

    The first f is drawn from the prior and gives the first omega; each sweep then draws f | omega and omega | f.
    `gram` (n, n) is the prior covariance and `keys` (J, n) hold one key per node and row.
    """
    dtype, gram, branch = kappa.dtype, gram.detach(), kappa.detach()[:, None]
    # Hundreds of nearly equal rows leave float32 (or TF32) too few digits for this factor at a jitter of 1e-3.
    # It is one for all nodes and chains, so float64 costs nothing.
    root = torch.linalg.cholesky_ex(gram.double()).L.to(dtype)
    gram = gram.to(dtype)

    def normal(sweep: int, tag: int) -> Tensor:
        return rng.normal(rng.fold(keys, sweep, tag), [chains], dtype).mT

    def augment(sweep: int, f: Tensor) -> Tensor:
        return torch.where(branch != 0, polya_gamma(rng.fold(keys, sweep, _OMEGA), f.mT, terms).mT, 0.0)

    omega = augment(0, normal(0, _WHITE) @ root.mT)
    for sweep in range(1, sweeps + 1):
        white, noise = normal(sweep, _WHITE), normal(sweep, _NOISE)
        omega = augment(sweep, latent(gram, root, omega, branch, white=white, noise=noise))
    return omega


def marginals(gram: Tensor, cross: Tensor, omega: Tensor, kappa: Tensor, variance: float) -> tuple[Tensor, Tensor]:
    """Mean and variance (J, S, B) of f* at the query rows, given omega (J, S, n) and kappa (J, n).

        mean = k*^T (K + Omega^-1)^-1 kappa / omega,   var = variance - k*^T (K + Omega^-1)^-1 k*

    with (K + Omega^-1)^-1 = S B^-1 S, `cross` = k* (n, B) and `variance` the prior variance of f*.
    """
    scale, target = _whitened(omega, kappa[:, None])
    factor = _factor(gram, scale)
    reach = torch.linalg.solve_triangular(factor, scale[..., None] * cross, upper=False)
    pull = torch.linalg.solve_triangular(factor, target[..., None], upper=False)
    return (reach * pull).sum(-2), variance - reach.square().sum(-2)


def branches(mean: Tensor, variance: Tensor, *, log_average: bool = False, quadrature: int = 32) -> Tensor:
    """Log-probabilities (J, 2, B) of going left and right, averaged over chains: mean and variance are (J, S, B).

        P(left) = 1/S sum_s E[sigmoid(f)],  f ~ N(mean_s, variance_s),  by Gauss-Hermite quadrature

    pFedGP's code takes exp(E[log sigmoid(f)]) instead, which is smaller on both sides (Jensen); `log_average=True`
    does so and divides by the sum of both sides.
    """
    points, weights = np.polynomial.hermite.hermgauss(quadrature)
    # Filled in on the device: a copy from the host would wait for it, and may not stand in a captured CUDA graph.
    x, w = (torch.stack([mean.new_full((), value) for value in row]) for row in (points, weights / math.sqrt(math.pi)))
    f = mean[..., None] + (2.0 * variance).sqrt()[..., None] * x
    logs = torch.stack([logsigmoid(f), logsigmoid(-f)], 1)
    inner = (logs * w).sum(-1) if log_average else torch.logsumexp(logs + w.log(), -1)
    return torch.log_softmax(torch.logsumexp(inner, 2), 1)


def _nodewise(function: Callable[..., Tensor], chunk: int | None, *tensors: Tensor) -> Tensor:
    """Apply a function to tensors with a leading node axis, `chunk` nodes at a time."""
    if chunk is None:
        return function(*tensors)
    parts = zip(*(torch.split(tensor, chunk) for tensor in tensors), strict=True)
    return torch.cat([function(*part) for part in parts])


class _Rows(NamedTuple):
    """Labelled rows in feature space."""

    features: Tensor
    """(n, F)"""
    labels: Tensor
    """(n, K) one-hot; all zero for a row that takes no part."""
    keys: Tensor
    """(n,) the row's own key, whatever its place among the others."""


def _own(features: Tensor, y: Tensor, mask: Tensor | None, key: Tensor, num_classes: int) -> _Rows:
    """A client's rows; what stands in a padded row, even a NaN, is wiped out."""
    labels = (y[:, None] == torch.arange(num_classes, device=y.device)).to(features.dtype)
    if mask is not None:
        real = mask[:, None] > 0
        features, labels = torch.where(real, features, 0.0), torch.where(real, labels, 0.0)
    return _Rows(features, labels, rng.fold(key, torch.arange(y.shape[0], device=y.device)))


def _cut(rows: _Rows, limit: int | None) -> _Rows:
    return _Rows(*(part[:limit] for part in rows))


def _pack(rows: _Rows, chosen: Tensor, size: int) -> _Rows:
    """The chosen (n,) rows first, in their order, and only `size` rows of all; the others take no part."""
    order = torch.argsort((chosen <= 0).to(torch.int64), dim=-1, stable=True)[:size]
    return _Rows(rows.features[order], rows.labels[order] * chosen[order][:, None], rows.keys[order])


def _with_points(rows: _Rows, points: Tensor, use: Tensor | float, key: Tensor) -> _Rows:
    """Append the inducing points (K, M, F), each labelled with its class, for `use` = 1; they take no part for 0.

    No node of the tree splits a class that the client lacks, so such a class's points never take part.
    """
    K, M, _ = points.shape
    labels = use * torch.eye(K, dtype=points.dtype, device=points.device).repeat_interleave(M, 0)
    keys = rng.fold(key, -1 - torch.arange(K * M, device=points.device))  # own rows count up from 0
    return _Rows(
        torch.cat([rows.features, points.flatten(0, 1)]),
        torch.cat([rows.labels, labels]),
        torch.cat([rows.keys, keys]),
    )


def _grow(rows: _Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Class counts (K,) of a client's rows and the tree of its classes."""
    counts = rows.labels.sum(0)
    means = rows.labels.mT @ rows.features / counts.clamp(min=1.0)[:, None]
    return counts, *class_tree(means.detach(), counts)


def _posterior(
    rows: _Rows, left: Tensor, right: Tensor, *, prior: Prior, chunk: int | None, chains: int, sweeps: int, terms: int
) -> tuple[Tensor, Tensor]:
    """Sample omega (J, S, n) and give kappa (J, n) for the rows on a tree."""
    kappa = 0.5 * (left - right) @ rows.labels.mT
    # In float64 for the sake of the prior's factor, see `gibbs`. Rows out of use are uncorrelated with all others, so
    # that they do not enter the others' draws from the prior.
    real = rows.labels.sum(-1).double()
    gram = _gram(rows.features.detach().double(), prior) * real[:, None] * real + torch.diag(1.0 - real)
    keys = rng.fold(rows.keys, torch.arange(kappa.shape[0], device=kappa.device)[:, None])

    def sample(kappa: Tensor, keys: Tensor) -> Tensor:
        return gibbs(gram, kappa, keys, chains=chains, sweeps=sweeps, terms=terms)

    return _nodewise(sample, chunk, kappa, keys), kappa


def _decide(
    posterior: Params, features: Tensor, *, prior: Prior, chunk: int | None, log_average: bool, quadrature: int
) -> Tensor:
    """Log-probabilities (J, 2, B) of going left and right at every node."""
    rows = posterior["gp.features"]
    # Rows out of use need no care here: their omega is 0 at every node.
    gram = _gram(rows, prior)
    cross = kernel(rows, features, prior.scale, prior.length)

    def decide(omega: Tensor, kappa: Tensor) -> Tensor:
        mean, variance = marginals(gram, cross, omega, kappa, prior.scale + prior.jitter)
        # At least the jitter in exact arithmetic; rounding must not make the square root's gradient explode.
        variance = torch.where(variance > prior.jitter, variance, prior.jitter)
        return branches(mean, variance, log_average=log_average, quadrature=quadrature)

    return _nodewise(decide, chunk, posterior["gp.omega"], posterior["gp.kappa"])


def condition(
    features: Tensor,
    y: Tensor,
    mask: Tensor | None,
    key: Tensor,
    num_classes: int,
    *,
    points: Tensor | None = None,
    borrow: Tensor | float = 0.0,
    limit: int | None = None,
    prior: Prior = PRIOR,
    chains: int = 20,
    sweeps: int = 5,
    terms: int = 20,
    chunk: int | None = None,
) -> Params:
    """Condition the tree of GPs on a client's rows (n, F), labels (n,) and mask (n,): all that `predictive` needs.

    With a `limit`, only the first so many rows condition (they come shuffled), while presence, counts and the tree
    still use all. Inducing `points` (K, M, F) of the classes that the client has join the conditioning rows where
    `borrow` is set or rows were cut; they never add a class or a count.

    Returns, with n' = min(n, limit) [+ K M]:
        gp.features (n', F), gp.omega (J, S, n'), gp.kappa (J, n'), gp.left (J, K), gp.right (J, K), gp.present (K,),
        gp.counts (K,)
    """
    rows = _own(features, y, mask, key, num_classes)
    counts, left, right = _grow(rows)
    present = (counts > 0).to(features.dtype)
    rows = _cut(rows, limit)
    if points is not None:
        short = counts.sum() > (math.inf if limit is None else limit)
        rows = _with_points(rows, points, (short | (borrow > 0)).to(points.dtype), key)
    omega, kappa = _posterior(rows, left, right, prior=prior, chunk=chunk, chains=chains, sweeps=sweeps, terms=terms)
    return {
        "gp.features": rows.features,
        "gp.omega": omega,
        "gp.kappa": kappa,
        "gp.left": left,
        "gp.right": right,
        "gp.present": present,
        "gp.counts": counts,
    }


def predictive(
    posterior: Params,
    features: Tensor,
    *,
    novel: Literal["laplace", "zero"] = "laplace",
    log_average: bool = False,
    quadrature: int = 32,
    prior: Prior = PRIOR,
    chunk: int | None = None,
) -> Tensor:
    """Class probabilities (B, K) of query features (B, F): the product of the branches' probabilities along the path.

        p(class) = prod_j P_j(left)^left_j P_j(right)^right_j

    The default averages E[sigmoid(f*)] over chains; `log_average=True` is pFedGP's exp(E[log sigmoid(f*)]), see
    `branches`. The tree knows only the k classes that the client has seen in its n rows. With `novel="laplace"` the
    others share the mass (K - k) / (n + K), Laplace's rule with one pseudo-count a class; with `novel="zero"`, as in
    pFedGP, they get none. A client without rows answers uniformly in both cases.
    """
    logs = _decide(posterior, features, prior=prior, chunk=chunk, log_average=log_average, quadrature=quadrature)
    path = logs[:, 0].mT @ posterior["gp.left"] + logs[:, 1].mT @ posterior["gp.right"]
    present, counts = posterior["gp.present"], posterior["gp.counts"]
    K = present.shape[0]
    seen = path.exp() * present
    share = 1.0 / (counts.sum() + K) if novel == "laplace" else torch.zeros_like(counts.sum())
    probs = seen * (1.0 - share * (K - present.sum())) + share * (1.0 - present)
    return torch.where(present.sum() > 0, probs, 1.0 / K)


def _targets(rows: _Rows) -> Tensor:
    """Choose floor(n_c / 2) rows of every class at random: (n,) 1 for a target."""
    lot = rng.bits(rng.fold(rows.keys, -1), [])  # nodes count up from 0
    same = rows.labels @ rows.labels.mT
    rank = (same * (lot[None, :] < lot[:, None])).sum(-1)
    return (rank < (same.sum(-1) / 2.0).floor()).to(rows.features.dtype)


def loss(
    features: Tensor,
    y: Tensor,
    mask: Tensor | None,
    key: Tensor,
    num_classes: int,
    *,
    points: Tensor | None = None,
    limit: int | None = None,
    prior: Prior = PRIOR,
    chains: int = 20,
    sweeps: int = 5,
    terms: int = 20,
    log_average: bool = False,
    quadrature: int = 32,
    chunk: int | None = None,
) -> Tensor:
    """Predictive likelihood of half of a client's rows given the other half: a scalar.

        loss = sum_j 1/|T_j| sum_{t in T_j} -log P_j(branch of t | conditioning rows),   T_j the targets that reach j

    Of every class, floor(n_c / 2) rows chosen by the key are targets and the rest condition. A node that no target
    reaches adds nothing, so the loss of a client with one class, one row or padding alone is 0. Inducing `points`
    (K, M, F) of the client's classes always condition here, since this is how they are learned. The gradient reaches
    features and points through the kernel matrices; omega and the tree are constants.
    """
    rows = _cut(_own(features, y, mask, key, num_classes), limit)
    n = rows.labels.shape[0]
    _, left, right = _grow(rows)
    chosen = _targets(rows)
    # Sizes that hold for any labels: at most n/2 targets, and a class keeps at most half a row more than its half.
    targets = _pack(rows, chosen, max(n // 2, 1))
    given = _pack(rows, rows.labels.sum(-1) * (1.0 - chosen), (n + min(n, num_classes)) // 2)
    if points is not None:
        given = _with_points(given, points, 1.0, key)
    omega, kappa = _posterior(given, left, right, prior=prior, chunk=chunk, chains=chains, sweeps=sweeps, terms=terms)
    posterior = {"gp.features": given.features, "gp.omega": omega, "gp.kappa": kappa}
    logs = _decide(
        posterior, targets.features, prior=prior, chunk=chunk, log_average=log_average, quadrature=quadrature
    )
    taken = torch.stack([left, right], 1) @ targets.labels.mT
    reached = taken.sum((1, 2)).clamp(min=1.0)
    return -((taken * logs).sum((1, 2)) / reached).sum()
