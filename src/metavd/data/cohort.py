"""What a round sees: who takes part, and each client's batches. The only place that draws which rows are used.

Everything is a function of a key (see `core.rng`), so it does not matter where or in which order clients are run.
Shape letters: B batch, T steps, C clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core import rng
from ..core.types import Batch, Sampling
from .augment import crop_and_flip
from .partition import Federation
from .source import transform

TRAIN, PERSONAL, TEST, COHORT, AVAILABLE, LOST = 1, 2, 3, 4, 5, 6
"""First tags of the keys of a run: what the random numbers are for."""


class ParticipationError(ValueError):
    """Why clients cannot take part as asked, in one sentence that says what would be right."""


class Pool(NamedTuple):
    """A federation's rows on a device, and how raw rows become inputs."""

    federation: Federation
    x: Tensor
    y: Tensor
    domain: Tensor | None
    normalise: Callable[..., Tensor]
    dtype: torch.dtype
    layout: torch.memory_format = torch.contiguous_format
    """Of the images that a network sees."""

    def inputs(self, rows: Tensor, key: Tensor | None = None) -> Tensor:
        """Return rows by number as a network sees them; with a key, photographs are cropped and mirrored at random."""
        source, raw = self.federation.source, self.x[rows]
        domain = None if self.domain is None else self.domain[rows]
        if key is not None and source.augment:
            changed = crop_and_flip(raw, key)
            if domain is not None:
                augmented = torch.tensor([each.augment for each in source.domains], device=raw.device)
                changed = torch.where(augmented[domain][:, None, None, None], changed, raw)
            raw = changed
        return self.normalise(raw, domain).contiguous(memory_format=self.layout)


def pool(
    federation: Federation,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    channels_last: bool = False,
) -> Pool:
    """Put the rows on a device, once, in the type that they are stored in."""
    source = federation.source
    x = torch.from_numpy(np.ascontiguousarray(source.x)).to(device)
    y = torch.from_numpy(source.y).to(device)
    domain = None if source.domain is None else torch.from_numpy(source.domain).to(device)
    layout = torch.channels_last if channels_last and x.ndim == 4 else torch.contiguous_format
    return Pool(federation, x, y, domain, transform(source, dtype, device), dtype, layout)


def probabilities(text: str, num_clients: int, key: Tensor, what: str) -> Tensor:
    """Return each client's own probability (N,): one number for all, LOW..HIGH to draw one each, or a list.

    >>> probabilities("0.5,1,0", 3, rng.key(0), "available")
    tensor([0.5000, 1.0000, 0.0000], dtype=torch.float64)
    """
    low, dots, high = text.partition("..")
    try:
        values = [float(word) for word in ((low, high) if dots else text.split(","))]
    except ValueError:
        values = []
    if not values or not all(0 <= value <= 1 for value in values) or (dots and values[0] > values[1]):
        raise ParticipationError(
            f"{what} is {text!r}, but must be a probability from 0 to 1, a range such as 0.2..0.9, "
            "or one for each client with commas between"
        )
    if dots:
        draw = rng.uniform(key.cpu(), [num_clients], torch.float64)
        return values[0] + (values[1] - values[0]) * draw
    if len(values) not in (1, num_clients):
        raise ParticipationError(f"{what} lists {len(values)} probabilities, but {num_clients} clients participate")
    return torch.tensor(values, dtype=torch.float64).expand(num_clients)


def choose(key: Tensor, round: int, num_clients: int, cohort: int, available: Tensor | None = None) -> Tensor:
    """Return the ids of the clients that a round asks, ascending: `cohort` of `num_clients`, without replacement.

    `available` (N,) is each client's probability of being there to be asked; where fewer are, all of them are asked.
    """
    order = rng.permutation(rng.fold(key, COHORT, round).cpu(), num_clients)
    if available is not None:
        order = order[_happens(key, AVAILABLE, round, available)[order]]
    return order[:cohort].sort().values


def arriving(key: Tensor, round: int, asked: Tensor, lost: Tensor | None) -> Tensor:
    """Return those of the asked clients whose answers arrive; `lost` (N,) is each client's probability of failing."""
    return asked if lost is None else asked[~_happens(key, LOST, round, lost)[asked]]


def _happens(key: Tensor, tag: int, round: int, probability: Tensor) -> Tensor:
    """Throw every client's own coin for this round."""
    return rng.uniform(rng.fold(key, tag, round).cpu(), probability.shape, torch.float64) < probability


def plan(sampling: Sampling, count: int, key: Tensor) -> list[Tensor]:
    """Return the positions (in a client's `count` rows) of each batch.

    Whole passes are shuffled and cut; the last batch may be short. A group of batches that belong to one step is cut
    from one shuffled ring, so that they share no row while the client has a row for each.
    """
    if count == 0:
        return []
    if sampling.steps is not None or sampling.full:
        size = count if sampling.full else min(sampling.batch, count)
        return [rng.permutation(rng.fold(key, s), count)[:size] for s in range(sampling.steps or 0)]
    per_pass = math.ceil(count / sampling.batch)
    if sampling.group == 1:
        passes = (rng.permutation(rng.fold(key, epoch), count) for epoch in range(sampling.epochs))
        return [batch for order in passes for batch in torch.split(order, sampling.batch)]
    batches = math.ceil(per_pass / sampling.group) * sampling.group
    if sampling.independent:
        size = min(sampling.batch, count)
        return [rng.permutation(rng.fold(key, i), count)[:size] for i in range(sampling.epochs * batches)]
    size = min(sampling.batch, max(1, count // sampling.group))
    rings = (rng.permutation(rng.fold(key, epoch), count) for epoch in range(sampling.epochs))
    steps = torch.arange(batches)[:, None] * size + torch.arange(size)[None, :]
    return [ring[positions % count] for ring in rings for positions in steps]


def _extra(pool: Pool, own: np.ndarray, each: int, key: Tensor) -> np.ndarray:
    """Rows of every class from other participating clients' training rows."""
    federation = pool.federation
    pooled = np.setdiff1d(np.concatenate(federation.train[: federation.num_clients]), own)
    pooled = pooled[rng.permutation(key, len(pooled)).numpy()]
    labels = federation.source.y[pooled]
    return np.concatenate([pooled[labels == label][:each] for label in range(federation.source.num_classes)])


def batches(pool: Pool, client: int, sampling: Sampling, key: Tensor, round: Tensor) -> list[Batch]:
    """Return a client's batches for one stage of one round, none of them padded."""
    key = key.cpu()
    rows = pool.federation.train[client]
    if sampling.extra:
        rows = np.concatenate([rows, _extra(pool, rows, sampling.extra, rng.fold(key, 2))])
    device = pool.x.device
    table = torch.from_numpy(rows)
    size = torch.tensor(float(len(rows)), dtype=pool.dtype, device=device)
    result = []
    for step, positions in enumerate(plan(sampling, len(rows), rng.fold(key, 0))):
        chosen = table[positions].to(device)
        fresh = rng.fold(key, 3, step).to(device) if sampling.augment else None
        x, y = pool.inputs(chosen, fresh), pool.y[chosen]
        result.append(Batch(x, y, None, rng.fold(key, 1, step).to(device), round, size))
    return result


def pad(jobs: Sequence[Sequence[Batch]], blank: Batch) -> list[Batch]:
    """Stack C clients' ragged batches into T batches with a leading axis C, padded rows and steps masked.

    `blank` is a batch that shows the shape and the type of what is missing where a client has no batch.
    """
    steps = max((len(job) for job in jobs), default=0)
    padded = []
    for step in range(steps):
        row = [job[step] if step < len(job) else None for job in jobs]
        width = max(len(batch.y) for batch in row if batch is not None)
        padded.append(_stack([_widen(batch, width, blank) for batch in row]))
    return padded


def _widen(batch: Batch | None, width: int, blank: Batch) -> Batch:
    real = 0 if batch is None else len(batch.y)
    batch = blank._replace(x=blank.x[:0], y=blank.y[:0]) if batch is None else batch
    missing = width - real
    mask = torch.cat([batch.x.new_ones(real), batch.x.new_zeros(missing)])
    x = torch.cat([batch.x, batch.x.new_zeros(missing, *batch.x.shape[1:])])
    return batch._replace(x=x, y=torch.cat([batch.y, batch.y.new_zeros(missing)]), mask=mask)


def _stack(row: Sequence[Batch]) -> Batch:
    masks = [batch.mask for batch in row if batch.mask is not None]
    return Batch(
        x=torch.stack([batch.x for batch in row]),
        y=torch.stack([batch.y for batch in row]),
        mask=torch.stack(masks),
        key=torch.stack([batch.key for batch in row]),
        round=torch.stack([batch.round for batch in row]),
        size=torch.stack([batch.size for batch in row]),
    )
