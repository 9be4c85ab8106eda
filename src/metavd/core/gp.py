"""Gaussian-process classification on a tree of classes (pFedGP), for one client, as pure functions of tensors.

A client's classes are the leaves of a binary tree (`ops.class_tree`); every inner node is a binary GP classifier,
sampled and asked in `gp_nodes`. A row that a node does not see takes no part there, and padding takes part nowhere, so
shapes never depend on data. Randomness comes from keys folded per row, so padding moves no other row's draw. The
samples carry no gradient; features learn through the kernel matrices alone.

Cost for one client: `sweeps` + 1 Cholesky factors for each node's own rows and chain, and one more for the gradient;
4/3 S n^3 / 3 operations each for all nodes of a balanced tree. `limit` bounds n.

Shape letters: n rows, F features, K classes, J = K - 1 nodes, S chains, B query rows, M inducing points per class.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..ops.class_tree import class_tree
from ..tree import Params
from . import rng
from .gp_nodes import Inference, Question, decide, gibbs

PLAIN = Inference()


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


def _gram(features: Tensor, inference: Inference) -> Tensor:
    """Prior covariance (n, n) of the function at the rows."""
    eye = torch.eye(features.shape[0], dtype=features.dtype, device=features.device)
    return kernel(features, features, inference.scale, inference.length) + inference.jitter * eye


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


def _posterior(rows: _Rows, left: Tensor, right: Tensor, inference: Inference) -> tuple[Tensor, Tensor]:
    """Sample omega (J, S, n) and give kappa (J, n) for the rows on a tree."""
    kappa = 0.5 * (left - right) @ rows.labels.mT
    # In float64 for the sake of the prior's factor, see `gibbs`. Rows out of use are uncorrelated with all others, so
    # that they do not enter the others' draws from the prior.
    real = rows.labels.sum(-1).double()
    gram = _gram(rows.features.detach().double(), inference) * real[:, None] * real + torch.diag(1.0 - real)
    keys = rng.fold(rows.keys, torch.arange(kappa.shape[0], device=kappa.device)[:, None])
    return gibbs(gram, kappa, keys, inference), kappa


def _decide(posterior: Params, features: Tensor, wanted: Tensor, inference: Inference) -> Tensor:
    """Log-probabilities (J, 2, B) of going left and right at every node where a row is wanted (J, B)."""
    rows = posterior["gp.features"]
    # Rows out of use need no care here: their omega is 0 at every node.
    gram = _gram(rows, inference)
    cross = kernel(rows, features, inference.scale, inference.length)
    return decide(Question(gram, cross, posterior["gp.omega"], posterior["gp.kappa"]), wanted, inference)


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
    inference: Inference = PLAIN,
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
    omega, kappa = _posterior(rows, left, right, inference)
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
    inference: Inference = PLAIN,
) -> Tensor:
    """Class probabilities (B, K) of query features (B, F): the product of the branches' probabilities along the path.

        p(class) = prod_j P_j(left)^left_j P_j(right)^right_j

    `inference` is the one that conditioned. The tree knows only the k classes that the client has seen in its n rows.
    With `novel="laplace"` the others share the mass (K - k) / (n + K), Laplace's rule with one pseudo-count a class;
    with `novel="zero"`, as in pFedGP, they get none. A client without rows answers uniformly in both cases.
    """
    used = (posterior["gp.left"] + posterior["gp.right"]).sum(-1, keepdim=True)
    logs = _decide(posterior, features, used.expand(-1, len(features)), inference)
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
    inference: Inference = PLAIN,
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
    omega, kappa = _posterior(given, left, right, inference)
    posterior = {"gp.features": given.features, "gp.omega": omega, "gp.kappa": kappa}
    taken = torch.stack([left, right], 1) @ targets.labels.mT
    logs = _decide(posterior, targets.features, taken.sum(1), inference)
    reached = taken.sum((1, 2)).clamp(min=1.0)
    return -((taken * logs).sum((1, 2)) / reached).sum()
