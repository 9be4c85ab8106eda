"""The nodes of pFedGP's tree: binary Gaussian-process classifiers with a logistic likelihood, sampled and asked.

Pólya-Gamma variables make the likelihood conjugate:

    f_j ~ N(0, K + jitter I),   P(left | f) = sigmoid(f),   kappa = +1/2 left, -1/2 right
    omega_i | f   ~ PG(1, f_i)
    f | omega, y  ~ N(Sigma kappa, Sigma),   Sigma = (K^-1 + Omega)^-1 = K - K S B^-1 S K
    S = Omega^1/2,   B = I + S K S

All nodes and chains of a client share one kernel matrix. A row that a node does not see (another branch, padding, a
point that is not in use) has omega = 0 there: its row of B is the identity's, and it drops out exactly. So it need not
be there at all: `gibbs` and `decide` take the nodes of all clients as one list of problems, each with its own rows
alone, sorted by their number, and problems of similar sizes are factorised together, padded to the largest of them.
In a balanced tree all nodes' factors together cost 4/3 of the root's. This asks the device for the rows of every node,
once per call. Randomness comes from one key per node and row, so neither padding nor packing moves a draw.

Shape letters: C clients, n rows, J nodes, S chains, B query rows, Q quadrature points; P problems of one size, m of
their rows, b of their query rows; M rows of all problems.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..ops import device
from ..ops.cholesky import factor
from . import rng

_OMEGA, _WHITE, _NOISE = range(3)  # tags that keep the draws of one sweep apart
_SMALL, _FINE = 16, 64
"""Rows up to which all nodes are padded alike; rows from which on padding costs more than another launch."""
_AT_ONCE = 1 << 26
"""Largest number of elements of the matrices that are factorised at once, or of what is integrated at once."""


class Inference(NamedTuple):
    """How trees are computed: their prior, their sampling, their integrals. What conditioned with one predicts so."""

    scale: float = 8.0
    """Prior variance of a node's function; pFedGP never trains the prior."""
    length: float = 1.0
    """Length scale, in units of L2-normalised features."""
    jitter: float = 1e-3
    """Variance added to every row, conditioning or query, so that every predictive variance is at least this."""
    chains: int = 20
    """Independent Gibbs chains of every node."""
    sweeps: int = 5
    """Of a chain."""
    terms: int = 20
    """Of a Pólya-Gamma draw's sum."""
    quadrature: int = 32
    """Points of the integral over a query's function."""
    log_average: bool = False
    """Whether branches are averaged as pFedGP's code does, see `branches`."""

    @property
    def variance(self) -> float:
        """Prior variance of a row's function."""
        return self.scale + self.jitter


# --- one node --------------------------------------------------------------------------------------------------------


def polya_gamma(key: Tensor, c: Tensor, terms: int = 20) -> Tensor:
    """Draw from PG(1, c), one draw per element of c, whose shape starts with the shape of `key`.

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


def latent(grams: Sequence[Tensor], omega: Tensor, kappa: Tensor, *, prior: Tensor, noise: Tensor) -> Tensor:
    """Draw f | omega, y of shape (M, S) by Matheron's rule from f0 = `prior` ~ N(0, K) and standard normals `noise`.

        f = f0 + K S B^-1 (S kappa / omega - S f0 - noise) ~ N(Sigma kappa, Sigma)

    The rows are those of all problems, whose kernel matrices `grams` are blocks (P, m, m). Nothing is divided by an
    omega of zero and no Sigma is factorised.
    """
    scale, target = _whitened(omega, kappa)
    moves = []
    shapes = [(gram.shape[0], gram.shape[1]) for gram in grams]
    parts = (_blocks(value, shapes) for value in (scale, target - scale * prior - noise))
    for gram, root, residual in zip(grams, *parts, strict=True):
        solved = torch.cholesky_solve(residual.mT[..., None], factor(gram, root.mT))[..., 0]
        moves.append((gram @ (root * solved.mT)).flatten(0, 1))
    return prior + torch.cat(moves)


def _reach(gram: Tensor, cross: Tensor, omega: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return S, the factor L of B, and L^-1 S k* (P, S, m, b + 1) with L^-1 S kappa / omega in the last column.

    K = `gram` (P, m, m), k* = `cross` (P, m, b); omega (P, S, m) and kappa (P, 1, m).
    """
    scale, target = _whitened(omega, kappa)
    lower = factor(gram, scale)
    wanted = torch.cat([scale[..., None] * cross[:, None], target[..., None]], -1)
    return scale, lower, torch.linalg.solve_triangular(lower, wanted, upper=False)


def _moments(reach: Tensor, variance: float) -> tuple[Tensor, Tensor]:
    """Mean and variance (P, S, b) of f* at the query rows from what `_reach` gives, `variance` being the prior's.

        mean = k*^T (K + Omega^-1)^-1 kappa / omega,   var = variance - k*^T (K + Omega^-1)^-1 k*

    with (K + Omega^-1)^-1 = S B^-1 S.
    """
    to_query, pull = reach[..., :-1], reach[..., -1:]
    return (to_query * pull).sum(-2), variance - to_query.square().sum(-2)


@cache
def _hermite(count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Points and weights (Q,) of the mean over a standard normal distribution, divided by sqrt(2)."""
    points, weights = np.polynomial.hermite.hermgauss(count)
    return tuple(torch.tensor(row, dtype=dtype, device=device) for row in (points, weights / math.sqrt(math.pi)))  # type: ignore[return-value]


def branches(mean: Tensor, variance: Tensor, *, log_average: bool = False, quadrature: int = 32) -> Tensor:
    """Log-probabilities (J, 2, B) of going left and right, averaged over chains: mean and variance are (J, S, B).

        P(left) = 1/S sum_s E[sigmoid(f)],  f ~ N(mean_s, variance_s),  by Gauss-Hermite quadrature

    pFedGP's code takes exp(E[log sigmoid(f)]) instead, which is smaller on both sides (Jensen); `log_average=True`
    does so and divides by the sum of both sides.
    """
    x, w = _hermite(quadrature, mean.dtype, mean.device)
    f = mean[..., None] + (2.0 * variance).sqrt()[..., None] * x
    logs = torch.stack([logsigmoid(f), logsigmoid(-f)], 1)
    inner = (logs * w).sum(-1) if log_average else torch.logsumexp(logs + w.log(), -1)
    return torch.log_softmax(torch.logsumexp(inner, 2), 1)


# --- all nodes of all clients ----------------------------------------------------------------------------------------


class _Packed(NamedTuple):
    """Those rows of every problem that a mask names: blocks of problems, each problem padded to its block's largest."""

    client: Tensor
    """(M,) Of a row."""
    node: Tensor
    """(M,)"""
    row: Tensor
    """(M,) Its place in the mask; in padding some other."""
    slot: Tensor
    """(M,) The same, but one past the last place in padding, so that what is written there can be cut off."""
    real: Tensor
    """(M, 1) Whether it is no padding."""
    shapes: list[tuple[int, int]]
    """(P, m) of every block."""
    nodes: int
    """Nodes of a client up to the last that is among the problems."""


def _sizes(counts: np.ndarray) -> np.ndarray:
    """Round numbers of rows up to one of few sizes: powers of two, and from 64 on those between two of them too.

    >>> _sizes(np.array([1, 16, 17, 65, 97, 250])).tolist()
    [16, 16, 32, 96, 128, 256]
    """
    power = 2.0 ** np.ceil(np.log2(np.maximum(counts, _SMALL)))
    return np.where((counts <= 0.75 * power) & (power > _FINE), 0.75 * power, power).astype(np.int64)


def _packed(mask: np.ndarray) -> np.ndarray:
    """Return the places (P, m) of every problem's rows in a mask (P, n), in their order; n stands for padding."""
    counts = mask.sum(-1)
    problem, row = np.nonzero(mask)
    places = np.full((len(mask), counts.max(initial=0)), mask.shape[-1])
    places[problem, np.arange(len(row)) - np.repeat(counts.cumsum() - counts, counts)] = row
    return places


def _pack(masks: Sequence[Tensor], elements: Callable[..., int]) -> list[_Packed]:
    """Pack what masks (C, J, n_1), (C, J, n_2), ... name at every node, for the nodes of all clients with rows in all.

    Problems come in the order of their rows in the first mask, from many to few. `elements` says how many numbers a
    problem with so many rows of each mask takes; a block takes `_AT_ONCE` at most. The device is asked once.
    """
    J = masks[0].shape[1]
    widths = [mask.shape[-1] for mask in masks]
    flags = torch.cat(list(masks), -1).flatten(0, 1).cpu().numpy()
    parts = np.split(flags, np.cumsum(widths)[:-1], axis=-1)
    counts = np.stack([part.sum(-1) for part in parts])
    order = np.argsort(-counts[0], kind="stable")
    order = order[counts[:, order].all(0)]
    sizes = _sizes(counts[0, order])
    found: list[list[np.ndarray]] = [[] for _ in masks]
    first = 0
    while first < len(order):
        alike = order[first : np.searchsorted(-sizes, -sizes[first], side="right")]
        these = alike[: max(1, _AT_ONCE // elements(*counts[:, alike].max(-1).tolist()))]
        for part, blocks in zip(parts, found, strict=True):
            blocks.append(np.stack(np.broadcast_arrays(these[:, None] // J, these[:, None] % J, _packed(part[these]))))
        first += len(these)
    packed = []
    for blocks, width in zip(found, widths, strict=True):
        flat = np.concatenate([np.zeros((3, 0), np.int64), *(block.reshape(3, -1) for block in blocks)], axis=-1)
        client, node, slot = device.over(torch.from_numpy(flat), masks[0].device)
        shapes = [(block.shape[1], block.shape[2]) for block in blocks]
        row, real = slot.clamp(max=width - 1), (slot < width)[:, None]
        packed.append(_Packed(client, node, row, slot, real, shapes, int((order % J).max(initial=-1)) + 1))
    return packed


def _blocks(values: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Take the rows (M, ...) of all problems apart into blocks (P, m, ...)."""
    parts = torch.split(values, [problems * rows for problems, rows in shapes])
    return [part.reshape(*shape, *values.shape[1:]) for part, shape in zip(parts, shapes, strict=True)]


def _between(matrix: Tensor, first: _Packed, second: _Packed) -> list[Tensor]:
    """Take the blocks (P, m, b) of the problems out of clients' matrices (C, n, B)."""
    places = zip(*(_blocks(value, each.shapes) for value, each in (
        (first.client, first), (first.row, first), (second.row, second)
    )), strict=True)  # fmt: skip
    return [matrix[client[:, :1, None], row[..., None], other[:, None]] for client, row, other in places]


def gibbs(gram: Tensor, kappa: Tensor, keys: Tensor, inference: Inference) -> Tensor:
    """Sample omega (J, S, n) given the branches kappa (J, n), from independent chains at every node.

    The first f is drawn from the prior and gives the first omega; each sweep then draws f | omega and omega | f.
    `gram` (n, n) is the prior covariance and `keys` (J, n) hold one key per node and row.
    """
    omega: Tensor = _Gibbs.apply(gram.detach(), kappa.detach(), keys, inference)  # type: ignore[no-untyped-call]
    return omega


def _sampled(gram: Tensor, kappa: Tensor, keys: Tensor, inference: Inference) -> Tensor:
    """Sample omega (C, J, S, n) of all clients."""
    (C, J, n), S, dtype, sweeps = kappa.shape, inference.chains, kappa.dtype, inference.sweeps + 1
    (rows,) = _pack([kappa != 0], lambda m: S * m * m)
    omegas = kappa.new_zeros(C, J, n + 1, S)
    if rows.shapes:
        sweep = torch.arange(sweeps, device=kappa.device)
        # Hundreds of nearly equal rows leave float32 (or TF32) too few digits for this factor at a jitter of 1e-3.
        # It is one for all nodes and chains, so float64 costs little.
        root = torch.linalg.cholesky_ex(gram.double()).L.to(dtype)
        # A draw from the prior of all of a client's rows; a node uses its own, so that rows elsewhere move them too.
        white = rng.normal(rng.fold(keys[:, : rows.nodes].mT[:, :, None], sweep[:, None], _WHITE), [S], dtype)
        prior = (root @ white.flatten(2)).unflatten(2, (sweeps, -1, S))[rows.client, rows.row, :, rows.node]
        own, branch = (
            keys[rows.client, rows.node, rows.row],
            kappa[rows.client, rows.node, rows.row][:, None] * rows.real,
        )
        noise = rng.normal(rng.fold(own[:, None], sweep, _NOISE), [S], dtype)
        grams = _between(gram.to(dtype), rows, rows)

        def augment(sweep: int, f: Tensor) -> Tensor:
            return torch.where(rows.real, polya_gamma(rng.fold(own, sweep, _OMEGA), f, inference.terms), 0.0)

        omega = augment(0, prior[:, 0])
        for number in range(1, sweeps):
            f = latent(grams, omega, branch, prior=prior[:, number], noise=noise[:, number])
            omega = augment(number, f)
        omegas[rows.client, rows.node, rows.slot] = omega
    return omegas[:, :, :n].mT.contiguous()


class _Gibbs(device.Constant):
    batched = staticmethod(_sampled)


class Question(NamedTuple):
    """What a tree's answers rest on: of one client; with an axis (C, ...) of all; or of one block of problems (P, ...).

    For omega and kappa see `gibbs`.
    """

    gram: Tensor
    """(n, n) Prior covariance of the rows."""
    cross: Tensor
    """(n, B) That of rows and query rows."""
    omega: Tensor
    """(J, S, n); in a block (P, S, m)."""
    kappa: Tensor
    """(J, n); in a block (P, 1, m)."""


class _Work(NamedTuple):
    """What asking has computed, and what its gradient starts from."""

    rows: _Packed
    queries: _Packed
    blocks: list[Question]
    reaches: list[tuple[Tensor, Tensor, Tensor]]
    """What `_reach` gives, for every block."""


class _Desk:
    """Where an operator leaves its work for its derivative: it has no axis of clients, so vmap cannot carry it."""

    def __init__(self) -> None:
        self.work: _Work | None = None


def decide(question: Question, wanted: Tensor, inference: Inference) -> Tensor:
    """Log-probabilities (J, 2, B) of going left and right, of query rows at the nodes where they are `wanted` (J, B).

    Elsewhere, and at nodes without rows, both sides are equally likely. Gradients reach gram and cross.
    """
    gram, cross, omega, kappa = question
    desk = _Desk() if torch.is_grad_enabled() and (gram.requires_grad or cross.requires_grad) else None
    logs: Tensor = _Decide.apply(gram, cross, omega.detach(), kappa.detach(), wanted > 0, inference, desk)  # type: ignore[no-untyped-call]
    return logs


def _asked(question: Question, wanted: Tensor, inference: Inference) -> tuple[_Packed, _Packed, list[Question]]:
    """Return rows and query rows of all problems, and their blocks."""
    gram, cross, omega, kappa = question
    S, Q = omega.shape[2], inference.quadrature
    rows, queries = _pack([kappa != 0, wanted], lambda m, b: S * max(m * (m + b + 1), 2 * b * Q))
    own = omega[rows.client, rows.node, :, rows.row] * rows.real
    branch = kappa[rows.client, rows.node, rows.row][:, None] * rows.real
    parts = (_blocks(own, rows.shapes), _blocks(branch, rows.shapes))
    grams, crosses = _between(gram, rows, rows), _between(cross, rows, queries)
    return rows, queries, [Question(g, x, o.mT, k.mT) for g, x, o, k in zip(grams, crosses, *parts, strict=True)]


def _logs(mean: Tensor, variance: Tensor, inference: Inference) -> Tensor:
    # At least the jitter in exact arithmetic; rounding must not make the square root's gradient explode.
    variance = torch.where(variance > inference.jitter, variance, inference.jitter)
    return branches(mean, variance, log_average=inference.log_average, quadrature=inference.quadrature)


def _decided(*given: Any) -> Tensor:
    """Log-probabilities (C, J, 2, B) of all clients; given as to `_Decide`."""
    question, (wanted, inference, desk) = Question(*given[:4]), given[4:]
    C, J, B = wanted.shape
    rows, queries, blocks = _asked(question, wanted, inference)
    found, reaches = [question.gram.new_zeros(0, 2)], []
    for block in blocks:
        reach = _reach(*block)
        found.append(_logs(*_moments(reach[2], inference.variance), inference).mT.flatten(0, 1))
        if desk is not None:
            reaches.append(reach)
    if desk is not None:
        desk.work = _Work(rows, queries, blocks, reaches)
    logs = question.gram.new_full((C, J, B + 1, 2), -math.log(2.0))
    logs[queries.client, queries.node, queries.slot] = torch.cat(found)
    return logs[:, :, :B].mT.contiguous()


def _slopes(g: Tensor, gram: Tensor, cross: Tensor, inference: Inference, desk: _Desk) -> tuple[Tensor, Tensor]:
    """Gradients by gram (C, n, n) and cross (C, n, B), given those by the log-probabilities."""
    assert desk.work is not None  # since `_decided` comes first
    rows, queries, blocks, reaches = desk.work
    totals = torch.zeros_like(gram), torch.zeros_like(cross)
    if not blocks:
        return totals
    sides = _blocks(g[queries.client, queries.node, :, queries.row] * queries.real, queries.shapes)
    slopes = [_block_slopes(reach, side.mT, inference) for reach, side in zip(reaches, sides, strict=True)]
    for total, second, parts in zip(totals, (rows, queries), zip(*slopes, strict=True), strict=True):
        place = torch.arange(total.numel(), device=total.device).view_as(total)
        index = torch.cat([each.flatten() for each in _between(place, rows, second)])
        device.add_at(total.view(-1), index, torch.cat([part.flatten() for part in parts]))
    return totals


def _block_slopes(known: tuple[Tensor, Tensor, Tensor], g: Tensor, inference: Inference) -> tuple[Tensor, Tensor]:
    """Gradients by gram (P, m, m) and cross (P, m, b) of a block, given those (P, 2, b) by the log-probabilities.

        d mean = alpha^T dk* - w^T dK alpha,   d var = w^T dK w - 2 w^T dk*

    with alpha = S B^-1 S kappa / omega and w = S B^-1 S k*.
    """
    scale, lower, reach = known
    with torch.enable_grad():
        mean, variance = (each.requires_grad_() for each in _moments(reach, inference.variance))
        by_mean, by_variance = torch.autograd.grad(_logs(mean, variance, inference), (mean, variance), g)
    solved = scale[..., None] * torch.linalg.solve_triangular(lower.mT, reach, upper=True)
    w, alpha = solved[..., :-1], solved[..., -1]
    weighed = w * by_variance[..., None, :]
    outer = weighed.transpose(1, 2).flatten(2) @ w.transpose(1, 2).flatten(2).mT
    by_gram = outer - (w @ by_mean[..., None])[..., 0].mT @ alpha
    return by_gram, alpha.mT @ by_mean - 2.0 * weighed.sum(1)


class _Decide(device.PerClient):
    batched = staticmethod(_decided)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs[:2])
        ctx.given = inputs[5:]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        slopes = _Slopes.apply(g, *ctx.saved_tensors, *ctx.given)  # type: ignore[no-untyped-call]
        return (*slopes, None, None, None, None, None)


class _Slopes(device.PerClient):
    batched = staticmethod(_slopes)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> None:
        raise NotImplementedError("a tree's answers have a first derivative alone")
