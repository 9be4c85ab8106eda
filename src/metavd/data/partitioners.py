"""Ways to deal rows to clients, by name: Dirichlet mixes, evenly, shards, log-normal amounts, natural owners.

A partitioner is a function `(y, num, rng, client_ids) -> list of num arrays of positions in y`. It draws from NumPy's
`RandomState`, see `partition`.

Shape letters: n rows, C clients, K classes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import SpecError
from ..registry import Registry
from ..schema import nearest

Partitioner = Callable[[np.ndarray, int, np.random.RandomState, np.ndarray | None], list[np.ndarray]]
"""(labels (n,), number of clients, generator, natural client ids (n,) or None) -> each client's positions in y."""

MAX_TRIES = 1000
_PERMUTE_ABOVE = 400


class PartitionError(SpecError):
    """Why the rows cannot be dealt as asked, in one sentence that says what would be right."""


def dirichlet(alpha: float, *, least: int = 1) -> Partitioner:
    """Deal every class in random proportions over the clients (section 7.1 of the facts; FedML, FederatedScope).

        p_k ~ Dirichlet(alpha 1_C) for every class k;  cut its shuffled rows at floor(n_k cumsum(p_k))

    The whole draw is repeated until every client has `least` rows; then every client's rows are shuffled. Small alpha:
    few classes per client, sizes far apart. Flooring costs the first client about half a row per class and gives it to
    the last one: kept, because the paper's partition has it.

    The use of the generator depends on the class sizes alone, not on the order of the rows: with
    `RandomState(777)`, 130 clients and CIFAR's class sizes, a first call on the train rows and a second call on the
    test rows *with the same generator* (the shuffles at the end of the first call included) give the paper's clients.
    """
    _check_range("dirichlet", "alpha", alpha, low=0.0, high=1e6, open_low=True)

    def deal(y: np.ndarray, num: int, rng: np.random.RandomState, _: np.ndarray | None = None) -> list[np.ndarray]:
        _check_enough(f"dirichlet with alpha {alpha:g}", len(y), num, least)
        classes = by_class(y)
        fewest = num
        for attempt in range(MAX_TRIES):
            draw = [_cut(rows, num, alpha, rng) for rows in classes]
            sizes = sum((piece.size for piece in draw), np.zeros(num, np.int64))
            if sizes.min() >= least:
                return join([cut(piece.rows, piece.cuts) for piece in draw], [p.owner for p in draw], num, rng)
            fewest = min(fewest, int((sizes < least).sum()))
            # The number of clients left short is nearly Poisson: where eleven draws left more than 30 short, none
            # of a thousand will leave nobody, and with 10,000 clients a draw is no longer cheap.
            if attempt >= 10 and fewest > 30:
                break
        raise PartitionError(
            f"dirichlet with alpha {alpha:g} left at least {fewest} of {num} clients without a row in every one of "
            f"{attempt + 1} draws over {len(y)} rows; use a larger alpha, fewer clients or more rows."
        )

    return deal


def iid(*, least: int = 1) -> Partitioner:
    """Deal shuffled rows evenly: sizes differ by at most one."""

    def deal(y: np.ndarray, num: int, rng: np.random.RandomState, _: np.ndarray | None = None) -> list[np.ndarray]:
        _check_enough("iid", len(y), num, least)
        return evenly(rng.permutation(len(y)), num)

    return deal


def shards(k: int, *, least: int = 1) -> Partitioner:
    """Give every client one shard of each of exactly k classes, all shards of about one size.

    There are C k shards. Each goes to the class whose shards would be largest (D'Hondt's rule: shards in proportion
    to rows), and a class deals its shards to the clients that still lack most, ties at random. Their lacks then never
    differ by more than one, so that the deal always comes out even. Unlike cutting label-sorted rows (McMahan et al.),
    no shard holds two classes and no client two shards of one class. With `least` 0 a shard may be empty.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise PartitionError(f"shards has k {k}, but k must be a whole number of classes, at least 1.")

    def deal(y: np.ndarray, num: int, rng: np.random.RandomState, _: np.ndarray | None = None) -> list[np.ndarray]:
        _check_enough(f"shards:{k}", len(y), num, least)
        classes = by_class(y)
        # Where shards may be empty, so may be some of a client's classes.
        limit = [min(num, len(rows)) if least else num for rows in classes]
        wanted = k if least else min(k, len(classes))
        low, high = -(-len(classes) // num), sum(limit) // num
        if not low <= wanted <= high:
            right = f"use shards:{min(max(k, low), high)}" if low <= high else "use fewer clients or more rows"
            raise PartitionError(
                f"shards:{k} cannot deal {len(y)} rows of {len(classes)} classes to {num} clients so that each has "
                f"exactly {k} classes and no row is left over; {right}."
            )
        counts = _shard_counts([len(rows) for rows in classes], limit, num * wanted)
        lack = np.full(num, wanted)
        pieces, owners = [], []
        for index in rng.permutation(len(classes)):
            holders = np.lexsort((rng.permutation(num), -lack))[: counts[index]]
            lack[holders] -= 1
            pieces.append(evenly(rng.permutation(classes[index]), counts[index]))
            owners.append(holders)
        return join(pieces, owners, num, rng)

    return deal


def quantity(sigma: float, *, least: int = 1) -> Partitioner:
    """Deal shuffled rows in log-normal amounts: size_i proportional to exp(sigma z_i), z_i ~ N(0, 1).

    `least` rows are dealt to everybody first and only the rest in proportion, so that no draw has to be repeated;
    sigma = 0 is `iid`.
    """
    _check_range("quantity", "sigma", sigma, low=0.0, high=10.0)

    def deal(y: np.ndarray, num: int, rng: np.random.RandomState, _: np.ndarray | None = None) -> list[np.ndarray]:
        _check_enough(f"quantity with sigma {sigma:g}", len(y), num, least)
        weight = np.exp(sigma * rng.standard_normal(num))
        size = least + apportion(weight, len(y) - least * num, rng)
        return cut(rng.permutation(len(y)), np.cumsum(size)[:-1])

    return deal


def natural(*, least: int = 1) -> Partitioner:
    """Give each client the rows of one natural owner; `num` owners are drawn at random from all with `least` rows."""

    def deal(
        _: np.ndarray, num: int, rng: np.random.RandomState, client_ids: np.ndarray | None = None
    ) -> list[np.ndarray]:
        owned = owners(client_ids, num, least)
        return [owned[index] for index in rng.permutation(len(owned))[:num]]

    return deal


def owners(client_ids: np.ndarray | None, num: int, least: int = 1) -> list[np.ndarray]:
    """Return the rows of every natural owner with `least` of them, owners by their ids; at least `num` are needed."""
    if client_ids is None:
        raise PartitionError(
            "The partition natural needs a dataset that says whose each row is; "
            "use dirichlet:0.5, or pass client ids with your arrays."
        )
    owned = [rows for rows in by_class(client_ids) if len(rows) >= least]
    if num > len(owned):
        raise PartitionError(
            f"The partition natural cannot make {num} clients of {len(client_ids)} rows that come from {len(owned)}; "
            f"use at most {len(owned)}, unseen ones included."
        )
    return owned


class PartitionKind(NamedTuple):
    """A partition that can be asked for by name."""

    build: Callable[..., Partitioner]
    """build(value, least=...), or build(least=...) where there is no value."""
    value: type | None
    """The type of the value after the colon; None if there is none."""
    example: str


PARTITIONS: Registry[PartitionKind] = Registry("metavd.partitions")
"""Every partition by name; `PARTITIONS.add(name, PartitionKind(...), __name__)` in a file of your own adds one."""
PARTITIONS.add("dirichlet", PartitionKind(dirichlet, float, "dirichlet:0.5"), __name__)
PARTITIONS.add("iid", PartitionKind(iid, None, "iid"), __name__)
PARTITIONS.add("shards", PartitionKind(shards, int, "shards:2"), __name__)
PARTITIONS.add("quantity", PartitionKind(quantity, float, "quantity:1.0"), __name__)
PARTITIONS.add("natural", PartitionKind(natural, None, "natural"), __name__)


def parse(spec: str, *, least: int = 1) -> Partitioner:
    """Return the partitioner that a text names: dirichlet:0.5, iid, shards:2, quantity:1.0, natural or one added.

    `least` is the number of rows that every client must get.
    """
    name, colon, text = str(spec).partition(":")
    if name not in PARTITIONS:
        hint = nearest(str(spec), (kind.example for kind in PARTITIONS.values()))
        raise PartitionError("; ".join([f"There is no partition {spec!r}", hint, *PARTITIONS.broken]))
    kind = PARTITIONS[name]
    if kind.value is None:
        if colon:
            raise PartitionError(f"The partition {name} takes no value, but {spec!r} gives one; write {name}.")
        return kind.build(least=least)
    try:
        value = kind.value(text)
    except ValueError:
        number = "a whole number" if kind.value is int else "a number"
        raise PartitionError(
            f"The partition {spec!r} needs {number} after the colon, such as {kind.example}."
        ) from None
    return kind.build(value, least=least)


# Pieces of the partitioners


class _Draw(NamedTuple):
    rows: np.ndarray
    cuts: np.ndarray
    owner: np.ndarray | None
    size: np.ndarray


def _cut(rows: np.ndarray, num: int, alpha: float, rng: np.random.RandomState) -> _Draw:
    """Shuffle one class and draw where it is cut; the pieces are only made once all sizes are good."""
    shuffled = rows.copy()
    rng.shuffle(shuffled)
    share = rng.dirichlet(np.full(num, alpha))
    if not np.isfinite(share).all():
        # All gamma draws underflow for a tiny alpha; the limit is the whole class for one client.
        share = np.eye(1, num, rng.randint(num))[0]
    cuts = (np.cumsum(share) * len(rows)).astype(np.int64)[:-1]
    size = np.diff(cuts, prepend=0, append=len(rows))
    if num <= _PERMUTE_ABOVE:
        return _Draw(shuffled, cuts, None, size)
    # Flooring starves the first clients of many; the released routine then deals the pieces in random order.
    order = rng.permutation(num)
    return _Draw(shuffled, cuts, np.argsort(order), size[order])


def cut(rows: np.ndarray, cuts: np.ndarray) -> list[np.ndarray]:
    """Cut rows before these places, as `np.split` does, in a third of its time where there are a million pieces."""
    ends = [*cuts.tolist(), len(rows)]
    return [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def evenly(rows: np.ndarray, num: int) -> list[np.ndarray]:
    """Cut rows into so many pieces whose sizes differ by at most one, the larger ones first."""
    each, more = divmod(len(rows), num)
    return cut(rows, np.cumsum(np.full(num, each) + (np.arange(num) < more))[:-1])


def join(
    pieces: Sequence[Sequence[np.ndarray]],
    owners: Sequence[np.ndarray | None],
    num: int,
    rng: np.random.RandomState,
) -> list[np.ndarray]:
    """Collect each client's pieces of every class and shuffle them; piece j goes to owner[j], or to client j."""
    held: list[list[np.ndarray]] = [[] for _ in range(num)]
    for parts, owner in zip(pieces, owners, strict=True):
        for part, client in zip(parts, range(num) if owner is None else owner, strict=True):
            held[client].append(part)
    joined = [np.concatenate(parts) if parts else np.empty(0, np.int64) for parts in held]
    for rows in joined:
        rng.shuffle(rows)
    return joined


def by_class(y: np.ndarray) -> list[np.ndarray]:
    """Return the positions of each class, or owner, that occurs, ascending."""
    order = np.argsort(y, kind="stable")
    starts = np.unique(y[order], return_index=True)[1]
    return cut(order, starts[1:]) if len(y) else []


def _shard_counts(sizes: Sequence[int], limit: Sequence[int], total: int) -> list[int]:
    """Return D'Hondt's seats: one each, then always one to the largest size / (seats + 1) below its limit."""
    counts = [1] * len(sizes)
    queue = [(-size / 2, index) for index, size in enumerate(sizes) if limit[index] > 1]
    heapq.heapify(queue)
    for _ in range(total - len(sizes)):
        _, index = heapq.heappop(queue)
        counts[index] += 1
        if counts[index] < limit[index]:
            heapq.heappush(queue, (-sizes[index] / (counts[index] + 1), index))
    return counts


def apportion(weight: np.ndarray, total: int, rng: np.random.RandomState) -> np.ndarray:
    """Return whole numbers in proportion to the weights that sum to `total`: largest remainders, ties at random.

    Whole-number weights are computed in whole numbers, so that a tie is one.
    """
    share, remainder = np.divmod(weight * total, weight.sum())
    share = share.astype(np.int64)
    order = np.lexsort((rng.permutation(len(weight)), -remainder))
    share[order[: total - share.sum()]] += 1
    return share


# Checks


def _check_range(partition: str, name: str, value: float, *, low: float, high: float, open_low: bool = False) -> None:
    if not (low < value <= high or (value == low and not open_low)):  # also refuses nan
        above = "above" if open_low else "at least"
        raise PartitionError(
            f"{partition} has {name} {value:g}, but {name} must be {above} {low:g} and at most {high:g}."
        )


def _check_enough(what: str, rows: int, num: int, least: int) -> None:
    if rows < least * num:
        raise PartitionError(
            f"{what} cannot give {num} clients a row each from {rows} rows; use at most {rows} clients."
        )
