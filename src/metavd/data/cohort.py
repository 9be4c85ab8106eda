"""What a round sees: who takes part, and each client's batches. The only place that draws which rows are used.

Everything is a function of a key (see `core.rng`), so it does not matter where or in which order clients are run.
Shape letters: B batch, T steps, C clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import tree
from ..core import rng
from ..core.types import LABELS, Batch, Sampling
from ..errors import SpecError
from ..ops import images
from ..ops.device import over
from ..ops.images import Look, crop_and_flip
from ..tree import Params
from .partition import Federation
from .source import Columns, transform

TRAIN, PERSONAL, TEST, COHORT, AVAILABLE, LOST, TESTED = 1, 2, 3, 4, 5, 6, 7
"""First tags of the keys of a run: what the random numbers are for."""


class Pool(NamedTuple):
    """A federation's rows on a device, and how raw rows become inputs."""

    federation: Federation
    x: Tensor
    y: Tensor
    domain: Tensor | None
    normalise: Callable[..., Tensor]
    dtype: torch.dtype
    layout: torch.memory_format
    """Of the images that a network sees."""
    train: Tensor
    """All clients' training rows, one client after another."""
    first: np.ndarray
    """(N + unseen,) where each client's begin in `train`."""
    look: Look | None
    """Scale, mean and deviation of images, where they are the same for all."""

    def inputs(self, rows: Tensor, key: Tensor | None = None) -> Tensor:
        """Return rows by number as a network sees them; with a key, photographs are cropped and mirrored at random."""
        return self._seen(rows, key).contiguous(memory_format=self.layout)

    def _seen(self, rows: Tensor, key: Tensor | None) -> Tensor:
        source, raw = self.federation.source, self.x[rows]
        domain = None if self.domain is None else self.domain[rows]
        if key is not None and source.augment:
            changed = crop_and_flip(raw, key)
            if domain is not None:
                augmented = torch.tensor([each.augment for each in source.domains], device=raw.device)
                changed = torch.where(augmented[domain][:, None, None, None], changed, raw)
            raw = changed
        return self.normalise(raw, domain)

    def many(self, rows: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return `inputs` and labels of many batches at once, rows (..., B), keys (...), one per batch.

        How they lie in memory is left to the device.
        """
        given = keys if self.federation.source.augment else None
        return images.batches(self.x, self.y, rows, given, self.look, self._seen)


def pool(
    federation: Federation,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    channels_last: bool = False,
) -> Pool:
    """Put the rows on a device, once, in the type that they are stored in."""
    source = federation.source
    if source.prepare is not None and not source.prepare.learnt and not isinstance(source.prepare, Columns):
        raise SpecError(f"the rows of {source.name} are not prepared for a network; data.prepare.prepared does that")
    x = torch.from_numpy(np.ascontiguousarray(source.x)).to(device)
    y = torch.from_numpy(source.y).to(device)
    domain = None if source.domain is None else torch.from_numpy(source.domain).to(device)
    layout = torch.channels_last if channels_last and x.ndim == 4 else torch.contiguous_format
    train = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *federation.train])).to(device)
    first = np.cumsum([0, *map(len, federation.train[:-1])])
    look = None
    if domain is None and x.ndim == 4:
        spread = [torch.tensor(values, dtype=dtype, device=device).expand(x.shape[1]).contiguous()
                  for values in (source.mean, source.std)]  # fmt: skip
        look = (source.scale, spread[0], spread[1])
    return Pool(federation, x, y, domain, transform(source, dtype, device), dtype, layout, train, first, look)


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
        raise SpecError(
            f"{what} is {text!r}, but must be a probability from 0 to 1, a range such as 0.2..0.9, "
            "or one for each client with commas between"
        )
    if dots:
        draw = rng.uniform(key.cpu(), [num_clients], torch.float64)
        return values[0] + (values[1] - values[0]) * draw
    if len(values) not in (1, num_clients):
        raise SpecError(f"{what} lists {len(values)} probabilities, but {num_clients} clients participate")
    return torch.tensor(values, dtype=torch.float64).expand(num_clients)


_ORDERED = 10_000
"""Most clients that are put in order to choose a cohort; of more than these a cohort is drawn."""
_POSITIVE = (1 << 63) - 1


def choose(key: Tensor, round: int, num_clients: int, cohort: int, available: Tensor | None = None) -> Tensor:
    """Return the ids of the clients that a round asks, ascending: `cohort` of `num_clients`, without replacement.

    `available` (N,) is each client's probability of being there to be asked; where fewer are, all of them are asked.
    """
    parent = rng.fold(key, COHORT, round).cpu()
    there = None if available is None else _happens(key, AVAILABLE, round, available)
    present = num_clients if there is None else int(there.sum())
    if num_clients > _ORDERED and 8 * cohort <= present:
        return _drawn(parent, num_clients, cohort, there)
    # The first of `rng.permutation`, without putting all the others in order too.
    place = rng.bits(parent, [num_clients])
    ids = torch.arange(num_clients) if there is None else there.nonzero()[:, 0]
    first = place[ids].topk(min(cohort, present), largest=False, sorted=False).indices
    return ids[first].sort().values


def sampled(key: Tensor, group: range, count: int) -> Sequence[int]:
    """Return the clients of a group that an evaluation tests, ascending: `count` of them, or all where it is 0.

    It hangs on the run's key alone, so that all rounds and all ranks test the same clients; a smaller sample is part
    of a larger one.
    """
    if not 0 < count < len(group):
        return group
    place = rng.bits(rng.fold(key, TESTED, group.start).cpu(), [len(group)])
    first = place.topk(count, largest=False, sorted=False).indices
    return (group.start + first.sort().values).tolist()


def tossed(key: Tensor, round: int, num_clients: int, rate: float, available: Tensor | None = None) -> Tensor:
    """Return the ids of the clients that a round asks, ascending, each drawn for itself with this probability.

    `available` as in `choose`; nobody may be drawn at all.
    """
    chosen = _happens(key, COHORT, round, torch.full((num_clients,), rate, dtype=torch.float64))
    return (chosen if available is None else chosen & _happens(key, AVAILABLE, round, available)).nonzero()[:, 0]


def _drawn(parent: Tensor, num_clients: int, cohort: int, there: Tensor | None) -> Tensor:
    """Draw clients until enough different ones are there, so that a round costs nothing for those it does not ask."""
    count = cohort
    while True:
        count *= 2
        drawn = (rng.bits(parent, [count]) & _POSITIVE) % num_clients
        ids = list(dict.fromkeys((drawn if there is None else drawn[there[drawn]]).tolist()))[:cohort]
        if len(ids) == cohort:
            return torch.tensor(ids).sort().values


def arriving(key: Tensor, round: int, asked: Tensor, lost: Tensor | None) -> Tensor:
    """Return those of the asked clients whose answers arrive; `lost` (N,) is each client's probability of failing."""
    return asked if lost is None else asked[~_happens(key, LOST, round, lost)[asked]]


def _happens(key: Tensor, tag: int, round: int, probability: Tensor) -> Tensor:
    """Throw every client's own coin for this round."""
    return rng.uniform(rng.fold(key, tag, round).cpu(), probability.shape, torch.float64) < probability


class Batches(NamedTuple):
    """Where the batches of clients come from: of which of its shuffles, from which place on, how many rows."""

    batches: np.ndarray
    """(C,) of each client."""
    shuffle: np.ndarray
    """(C, T), and so are the two below."""
    start: np.ndarray
    size: np.ndarray
    """0 where a client has no such batch."""


def layout(sampling: Sampling, counts: np.ndarray) -> Batches:
    """Return the batches of clients with so many rows, (C,).

    Whole passes are shuffled and cut; the last batch may be short. A group of batches that belong to one step is cut
    from one shuffled ring, so that they share no row while the client has a row for each.
    """
    passes = -(-counts // max(sampling.batch, 1))
    if sampling.steps is not None or sampling.full:
        batches, each = np.full_like(counts, sampling.steps or 0), np.ones_like(counts)
        size = counts if sampling.full else np.minimum(sampling.batch, counts)
    elif sampling.group == 1:
        batches, each, size = sampling.epochs * passes, passes, np.full_like(counts, sampling.batch)
    else:
        each = -(-passes // sampling.group) * sampling.group
        batches, size = sampling.epochs * each, np.minimum(sampling.batch, np.maximum(1, counts // sampling.group))
        if sampling.independent:
            each, size = np.ones_like(counts), np.minimum(sampling.batch, counts)
    batches = np.where(counts > 0, batches, 0)
    number = np.arange(max(batches, default=0))[None, :]
    shuffle, place = np.divmod(number, np.maximum(each, 1)[:, None])
    start = place * size[:, None]
    whole = np.broadcast_to(size[:, None], start.shape)
    if sampling.group == 1:  # no ring: a pass ends with the rows
        whole = np.minimum(whole, counts[:, None] - start)
    return Batches(batches, shuffle, start, np.where(number < batches[:, None], whole, 0))


def batch_positions(sampling: Sampling, count: int, key: Tensor) -> list[Tensor]:
    """Return the positions (in a client's `count` rows) of each batch."""
    made = layout(sampling, np.array([count]))
    shuffles = [rng.permutation(rng.fold(key, i), count) for i in range(int(made.shuffle.max(initial=-1)) + 1)]
    return [
        shuffles[shuffle][(start + torch.arange(size)) % count]
        for shuffle, start, size in zip(*(part[0].tolist() for part in made[1:]), strict=True)
    ]


def sizes_of(pool: Pool, clients: Iterable[int]) -> np.ndarray:
    """Return how many training rows each client has, (C,)."""
    return np.array([len(pool.federation.train[client]) for client in clients], dtype=np.int64)


def about(pool: Pool, clients: Iterable[int], sampling: Sampling) -> Params:
    """Return what batches are to say of clients, (C, ...): see `Batch.about`."""
    if not sampling.classes:
        return {}
    y, train = pool.federation.source.y, pool.federation.train
    counts = [np.bincount(y[train[client]], minlength=sampling.classes) for client in clients]
    return {LABELS: over(torch.from_numpy(np.stack(counts)), pool.x.device).to(pool.dtype)}


def draw(pool: Pool, clients: np.ndarray, made: Batches, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of the batches of clients, those of `batch_positions`, and which of them are real: (T, C, B).

    `keys` (C,) are those that `batch_positions` is given. All is done where the keys are, without a word to the host.
    """
    device = keys.device
    counts = sizes_of(pool, clients)
    longest, widest = int(counts.max(initial=1)), int(made.size.max(initial=1))
    shuffles = int(made.shuffle.max(initial=-1)) + 1
    bits = rng.bits(rng.fold(keys[:, None], torch.arange(shuffles, device=device)), [longest])
    sizes = over(torch.from_numpy(np.maximum(counts, 1)), device)
    # Places beyond a client's rows sort behind all of them; bits do not depend on how many follow.
    beyond = torch.arange(longest, device=device) >= sizes[:, None, None]
    orders = torch.argsort(bits.masked_fill(beyond, torch.iinfo(torch.int64).max), dim=-1, stable=True)
    lane = np.arange(len(clients))[:, None] * shuffles + np.minimum(made.shuffle, shuffles - 1)
    host = np.stack([lane * longest, made.start, made.size], -1).transpose(1, 0, 2)
    at, start, size = over(torch.from_numpy(np.ascontiguousarray(host)), device).unsqueeze(-2).unbind(-1)
    offset = torch.arange(widest, device=device)
    positions = orders.flatten()[at + (start + offset) % sizes[:, None]]
    rows = pool.train[over(torch.from_numpy(pool.first[clients]), device)[:, None] + positions]
    real = offset < size
    return torch.where(real, rows, 0), real


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
        given = _extra(pool, rows, sampling.extra, rng.fold(key, 2))
        rows = np.concatenate([rows, given]) if sampling.own else given
    device = pool.x.device
    table = torch.from_numpy(rows)
    size = torch.tensor(float(len(rows)), dtype=pool.dtype, device=device)
    told = {name: value[0] for name, value in about(pool, [client], sampling).items()}
    result = []
    for step, positions in enumerate(batch_positions(sampling, len(rows), rng.fold(key, 0))):
        chosen = table[positions].to(device)
        fresh = rng.fold(key, 3, step).to(device) if sampling.augment else None
        x, y = pool.inputs(chosen, fresh), pool.y[chosen]
        result.append(Batch(x, y, None, rng.fold(key, 1, step).to(device), round, size, told))
    return result


_LOT = 1 << 14
"""Rows that are drawn for several clients at once."""


def lots(pool: Pool, clients: Sequence[int], sampling: Sampling, keys: Tensor, round: Tensor) -> Iterator[list[Batch]]:
    """Yield the `batches` of one client after another, drawn for many at once; `keys` (C,) on the host."""
    if sampling.extra:
        yield from (batches(pool, client, sampling, key, round) for client, key in zip(clients, keys, strict=True))
        return
    ids = np.asarray(clients, dtype=np.int64)
    counts = sizes_of(pool, clients)
    whole = layout(sampling, counts)
    each = max(1, _LOT // max(1, int(whole.size.sum(1).max(initial=1))))
    for start in range(0, len(ids), each):
        lot = slice(start, start + each)
        longest = int(whole.batches[lot].max(initial=0))
        made = Batches(whole.batches[lot], *(part[lot, :longest] for part in whole[1:]))
        own = over(keys[lot], pool.x.device)
        rows, _ = draw(pool, ids[lot], made, rng.fold(own, 0))
        number = torch.arange(longest, device=own.device)[:, None]
        noise, fresh = (rng.fold(rng.fold(own, tag), number) for tag in (1, 3))
        x, y = pool.many(rows, fresh if sampling.augment else None)
        sizes = over(torch.from_numpy(counts[lot]), pool.x.device).to(pool.dtype)
        told = about(pool, ids[lot], sampling)
        for c, several in enumerate(made.batches.tolist()):
            real = made.size[c].tolist()
            yield [
                Batch(
                    x[t, c, : real[t]].contiguous(memory_format=pool.layout), y[t, c, : real[t]], None, noise[t, c],
                    round, sizes[c], {name: value[c] for name, value in told.items()},
                )
                for t in range(several)
            ]  # fmt: skip


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
    mask = torch.cat([batch.size.new_ones(real), batch.size.new_zeros(missing)])  # rows may be integers
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
        about=tree.stack([batch.about for batch in row]),
    )
