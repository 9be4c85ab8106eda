"""Gaussian classes that share a covariance, in the space of the features: their statistics, and the head they give.

    theta_k = S^-1 m_k,    b_k = -1/2 m_k . S^-1 m_k + log pi_k        linear discriminant analysis

Statistics are sums over rows, which a client's steps add up pass by pass. How far a client's own statistics take the
place of the received ones is chosen by cross-validation: the first half of a pass is fitted, the other half is answered
under every mixture of a grid. A pass shuffles the rows anew, so that no row is known to be the same in two passes, and
the halves of two passes are two splits of the rows, not the two sides of one.

Shape letters: B rows, K classes, F features, G values of a mixing weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..ops.loss import cross_entropy
from ..tree import Params
from . import rng
from .diff import grad_and_value
from .emit import joined_by
from .types import Batch, Emit, Local, Model, Move, Sampling

MEANS, COVARIANCE = "lda.means", "lda.covariance"
"""(K, F) and (F, F): what travels."""
_OWN = "lda."
_COUNTS, _RISK, _WEIGHT, _BIAS = "lda.counts", "lda.risk", "lda.weight", "lda.bias"
COUNTING, SPLITS = 1, 2
"""Passes in which labels are counted, and in which statistics are gathered."""


@dataclass(frozen=True)
class Fit:
    """How classes are fitted."""

    num_classes: int
    layer: str
    """The output layer, whose weights the statistics give."""
    grid: int
    """G."""
    ridge: float
    """Added to the diagonal of a client's own covariance: few rows leave it singular."""
    shrinkage: float
    """Share of its mean variance that a covariance takes before it is inverted."""
    least: int
    """Rows of a class below which its mean is the received one."""
    floor: float
    """Added to the share of every class in a client's rows."""


class _Sums(NamedTuple):
    """Over rows, of their differences d to the received mean of their class."""

    number: Tensor
    """(K,)."""
    first: Tensor
    """(K, F) sum of d by class."""
    second: Tensor
    """(F, F) sum of d d^T."""


def with_classes(base: Emit, model: Model, num_classes: int) -> Emit:
    """Add the classes: at first standard normal means, and the unit matrix."""
    width = model.layers[model.head[-1]][1]

    def classes(key: Tensor, like: Tensor) -> Params:
        means = rng.normal(rng.fold(key, 60_000), [num_classes, width], like.dtype)
        return {MEANS: means, COVARIANCE: torch.eye(width, dtype=like.dtype, device=like.device)}

    return joined_by(base, classes)


def log_prior(counts: Tensor, floor: float) -> Tensor:
    """Return the log share of each class (K,); a class without a row has the floor's, no rows at all equal shares."""
    share = counts / counts.sum().clamp(min=1.0) + floor
    return (share / share.sum()).log()


def _factor(covariance: Tensor, shrinkage: float) -> Tensor:
    """Return the Cholesky factor of (..., F, F), shrunk towards its mean variance."""
    width = covariance.shape[-1]
    eye = torch.eye(width, dtype=covariance.dtype, device=covariance.device)
    variance = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    lower: Tensor = torch.linalg.cholesky_ex((1.0 - shrinkage) * covariance + shrinkage * variance * eye).L
    return lower


def _solved(factor: Tensor, right: Tensor) -> Tensor:
    """Return (L L^T)^-1 B: two triangular systems, which a CUDA graph can hold."""
    half = torch.linalg.solve_triangular(factor, right, upper=False)
    return torch.linalg.solve_triangular(factor.mT, half, upper=True)


def head(means: Tensor, covariance: Tensor, shrinkage: float) -> tuple[Tensor, Tensor]:
    """Return weights (K, F) and biases (K,) without the prior."""
    weight = _solved(_factor(covariance, shrinkage), means.mT).mT
    return weight, -0.5 * (means * weight).sum(-1)


def _differences(sums: _Sums, covariance: Tensor, fit: Fit) -> tuple[Tensor, Tensor]:
    """Return a client's own means and covariance as differences to the received ones; 0 where it has no rows."""
    own = (sums.number >= fit.least)[:, None]
    means = torch.where(own, sums.first / sums.number.clamp(min=1.0)[:, None], torch.zeros_like(sums.first))
    rows = sums.number.sum()
    scatter = sums.second - torch.einsum("kf,kg->fg", torch.where(own, sums.first, torch.zeros_like(means)), means)
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    found = scatter / rows.clamp(min=1.0) + fit.ridge * eye - covariance
    return means, torch.where(rows > 0, found, torch.zeros_like(found))


def _grid(fit: Fit, like: Tensor) -> Tensor:
    return torch.linspace(0.0, 1.0, fit.grid, dtype=like.dtype, device=like.device)


def _risks(rows: tuple[Tensor, Tensor], half: _Sums, params: Params, prior: Tensor, fit: Fit) -> Tensor:
    """Return the negative log likelihood of rows, summed, under every mixture: (G, G), covariance first.

    Rows are features (B, F), and labels (B, K): 1 at a row's class, and 0 throughout for a row that does not count.
    """
    z, labels = rows
    means, covariance = params[MEANS], params[COVARIANCE]
    shift, spread = _differences(half, covariance, fit)
    mix = _grid(fit, z)
    factor = _factor(covariance + mix[:, None, None] * spread, fit.shrinkage)
    both = torch.cat([means, shift]).mT.expand(fit.grid, -1, -1)
    base, change = _solved(factor, both).mT.chunk(2, 1)  # (G, K, F) each
    weight = base[:, None] + mix[:, None, None] * change[:, None]  # (G, G, K, F)
    bias = -0.5 * ((means + mix[:, None, None] * shift) * weight).sum(-1) + prior
    logits = torch.einsum("bf,cmkf->cmbk", z, weight) + bias[:, :, None]
    return -(logits.log_softmax(-1) * labels).sum((-2, -1))


def _mixed(params: Params, fit: Fit) -> tuple[Tensor, Tensor]:
    """Return means and covariance of a client, mixed as the smallest risk says; a mixture that failed has none."""
    risk = params[_RISK].flatten()
    best = torch.where(risk.isfinite(), risk, torch.full_like(risk, torch.inf)).argmin()
    mix = _grid(fit, risk)
    shift, spread = _differences(_read(params, "whole"), params[COVARIANCE], fit)
    at = torch.stack([best // fit.grid, best % fit.grid])
    chosen = ((torch.arange(fit.grid, device=at.device) == at[:, None]) * mix).sum(-1)
    return params[MEANS] + chosen[1] * shift, params[COVARIANCE] + chosen[0] * spread


def _read(params: Params, which: str) -> _Sums:
    return _Sums(*(params[f"{_OWN}{which}.{part}"] for part in _Sums._fields))


def _written(which: str, sums: _Sums) -> Params:
    return {f"{_OWN}{which}.{part}": value for part, value in sums._asdict().items()}


def _added(sums: _Sums, labels: Tensor, gap: Tensor) -> _Sums:
    """Add rows with these labels (B, K), 0 throughout for one that does not count, and differences (B, F)."""
    return _Sums(
        sums.number + labels.sum(0),
        sums.first + labels.mT @ gap,
        sums.second + (labels.sum(1)[:, None] * gap).mT @ gap,
    )


def stage(model: Model, sampling: Sampling, fit: Fit, *, lr: float, clip: float | None, personal: bool) -> Local:
    """What a client does, in passes over its rows: count labels, train the features under a fixed head, fit classes.

    It ends with the features and its classes, or, `personal`, with the features and the head that its classes give.
    """
    training = sampling.epochs - COUNTING - SPLITS

    def init(received: Params) -> Params:
        means, covariance = received[MEANS], received[COVARIANCE]
        weight, bias = head(means, covariance, fit.shrinkage)
        nothing = _Sums(torch.zeros_like(bias), torch.zeros_like(means), torch.zeros_like(covariance))
        work = _written("whole", nothing) | _written("half", nothing)
        risk = bias.new_zeros(fit.grid, fit.grid)
        return received | work | {_COUNTS: torch.zeros_like(bias), _RISK: risk, _WEIGHT: weight, _BIAS: bias}

    def step(params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Move, Tensor]:  # noqa: ARG001
        batch = batches[0]
        real, labels = batch.real(), batch.labels(fit.num_classes)
        epoch = sampling.epoch(index, batch)
        counts = params[_COUNTS] + (epoch < COUNTING) * labels.sum(0)
        prior = log_prior(counts, fit.floor)

        def objective(moving: Params) -> Tensor:
            logits = model.features(params | moving, batch.x) @ params[_WEIGHT].mT + params[_BIAS] + prior
            return cross_entropy(logits[None], batch.y, batch.mask)

        features = tree.without(params, _OWN)
        if training:
            slope, loss = grad_and_value(objective)(features)
            moves = ((epoch >= COUNTING) & (epoch < COUNTING + training)).to(loss.dtype)
            slope = tree.map(lambda value: value * moves, slope)
        else:
            slope, loss = {}, objective({})

        fitting = (epoch >= COUNTING + training).to(loss.dtype)
        z = model.features(params, batch.x)
        gap = z - labels @ params[MEANS]
        before = sampling.seen(index, batch)
        early = (before + real.cumsum(0) - real < torch.floor(batch.size / 2.0)).to(loss.dtype)[:, None] * labels
        whole = _added(_read(params, "whole"), fitting * labels, gap)
        goes_on = (before > 0).to(loss.dtype)
        half = _added(_Sums(*(goes_on * part for part in _read(params, "half"))), early, gap)
        risk = params[_RISK] + fitting * _risks((z, labels - early), half, params, prior, fit)
        return Move(slope, _written("whole", whole) | _written("half", half) | {_COUNTS: counts, _RISK: risk}), loss

    def final(params: Params) -> Params:
        means, covariance = _mixed(params, fit)
        features = tree.without(params, _OWN)
        if not personal:
            return features | {MEANS: means, COVARIANCE: covariance}
        weight, bias = head(means, covariance, fit.shrinkage)
        own = {f"{fit.layer}.weight": weight, f"{fit.layer}.bias": bias + log_prior(params[_COUNTS], fit.floor)}
        return features | own

    return Local(step, lr, clip, init=init, final=final)
