"""Who has what: from a dataset's rows to the rows of every client.

A partitioner is a function `(y, num, rng, client_ids) -> list of num arrays of positions in y`. `federate` applies one
to a source's train rows, deals the test rows, and sets rows aside for validation and for the server. All of it is a
function of the seed.

NumPy's `RandomState` is used throughout, although it is called legacy: its streams are frozen for ever, a partition
must be the same in ten years, and the paper's partition came from it. The global generator is never touched.

Shape letters: n rows, C clients (participating first, then unseen), K classes.
"""

from __future__ import annotations

import difflib
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from ..errors import SpecError
from ..registry import Registry
from .source import Source

Partitioner = Callable[[np.ndarray, int, np.random.RandomState, np.ndarray | None], list[np.ndarray]]
"""(labels (n,), number of clients, generator, natural client ids (n,) or None) -> each client's positions in y."""

TEST_ROWS = ("independent", "consistent", "uniform")
"""How official test rows reach the clients; see `federate`."""
OWN = "own"
VALID_ROWS = (OWN, *TEST_ROWS)
"""How validation rows reach the clients: out of each client's own train rows, or as test rows do."""

MAX_TRIES = 1000
_PERMUTE_ABOVE = 400
_SPLIT, _SERVER, _VALID = 1, 2, 3  # names of random streams beside the partition's own


class PartitionError(SpecError):
    """Why the rows cannot be dealt as asked, in one sentence that says what would be right."""


@dataclass(frozen=True, eq=False)  # equality of arrays has no truth value, so a federation equals only itself
class Federation:
    """A source and who holds its rows: clients 0..num_clients-1 participate, the num_unseen after them never train."""

    source: Source
    train: tuple[np.ndarray, ...]
    """C arrays of row numbers."""
    valid: tuple[np.ndarray, ...]
    """C arrays; an unseen client's is empty, because nothing may be chosen by looking at it."""
    test: tuple[np.ndarray, ...]
    """C arrays, some perhaps empty; a validation client's is."""
    num_clients: int
    num_unseen: int
    server: np.ndarray
    """Rows whose images, without labels, the server may use."""
    num_valid: int = 0
    """Validation clients, the last ones: they never train, and choices about unseen clients are made on them."""


def dirichlet(alpha: float, *, least: int = 1) -> Partitioner:
    """Deal every class in random proportions over the clients (section 7.1 of the facts; FedML, FederatedScope).

        p_k ~ Dirichlet(alpha 1_C) for every class k;  cut its shuffled rows at floor(n_k cumsum(p_k))

    The whole draw is repeated until every client has `least` rows; then every client's rows are shuffled. Small alpha:
    few classes a client, sizes far apart. Flooring costs the first client about half a row a class and gives it to
    the last one: kept, because the paper's partition has it.

    The use of the generator depends on the class sizes alone, not on the order of the rows: with
    `RandomState(777)`, 130 clients and CIFAR's class sizes, a first call on the train rows and a second call on the
    test rows *with the same generator* (the shuffles at the end of the first call included) give the paper's clients.
    """
    _check_range("dirichlet", "alpha", alpha, low=0.0, high=1e6, open_low=True)

    def deal(y: np.ndarray, num: int, rng: np.random.RandomState, _: np.ndarray | None = None) -> list[np.ndarray]:
        _check_enough(f"dirichlet with alpha {alpha:g}", len(y), num, least)
        classes = _by_class(y)
        fewest = num
        for attempt in range(MAX_TRIES):
            draw = [_cut(rows, num, alpha, rng) for rows in classes]
            sizes = sum((piece.size for piece in draw), np.zeros(num, np.int64))
            if sizes.min() >= least:
                return _join([np.split(piece.rows, piece.cuts) for piece in draw], [p.owner for p in draw], num, rng)
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
        return np.array_split(rng.permutation(len(y)), num)

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
        classes = _by_class(y)
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
            pieces.append(np.array_split(rng.permutation(classes[index]), counts[index]))
            owners.append(holders)
        return _join(pieces, owners, num, rng)

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
        size = least + _apportion(weight, len(y) - least * num, rng)
        return np.split(rng.permutation(len(y)), np.cumsum(size)[:-1])

    return deal


def natural(*, least: int = 1) -> Partitioner:
    """Give each client the rows of one natural owner; `num` owners are drawn at random from all with `least` rows."""

    def deal(
        y: np.ndarray, num: int, rng: np.random.RandomState, client_ids: np.ndarray | None = None
    ) -> list[np.ndarray]:
        if client_ids is None:
            raise PartitionError(
                "The partition natural needs a dataset that says whose each row is; "
                "use dirichlet:0.5, or pass client ids with your arrays."
            )
        order = np.argsort(client_ids, kind="stable")
        starts = np.unique(client_ids[order], return_index=True)[1]
        owned = [rows for rows in np.split(order, starts[1:]) if len(rows) >= least]
        if num > len(owned):
            raise PartitionError(
                f"The partition natural cannot make {num} clients of {len(y)} rows that come from {len(owned)}; "
                f"use at most {len(owned)}, unseen ones included."
            )
        return [owned[index] for index in rng.permutation(len(owned))[:num]]

    return deal


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
        close = difflib.get_close_matches(name.strip().lower(), PARTITIONS, n=2, cutoff=0.5) or list(PARTITIONS)
        examples = " or ".join(PARTITIONS[other].example for other in close)
        raise PartitionError(
            "; ".join([f"There is no partition {spec!r}", f"did you mean {examples}?", *PARTITIONS.broken])
        )
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


def federate(
    source: Source,
    partition: str = "dirichlet:0.5",
    *,
    clients: int,
    unseen: int = 0,
    test_rows: str = "independent",
    valid: float = 0.0,
    valid_rows: str = OWN,
    valid_clients: int = 0,
    test_share: float = 0.2,
    server_share: float = 0.0,
    seed: int,
) -> Federation:
    """Decide who holds which row.

    Args:
        source: the rows.
        partition: see `parse`.
        clients: how many participate.
        unseen: how many more are kept out of training altogether.
        test_rows: where the test rows go. "independent": dealt by a second run of the partition, as in the paper, so
            that a client's test labels say nothing about its train labels. "consistent": each class in proportion to
            the clients' train rows of it. "uniform": evenly. A natural partition knows whose each row is and ignores
            this.
        valid: share of the train rows that are held out for choosing.
        valid_rows: where those go. "own": each participating client keeps its share of its own train rows. Otherwise
            they are taken from every class before any client has a row, and reach the clients as test rows do under
            that name. A natural partition knows "own" alone.
        valid_clients: how many clients more are never trained with and hold validation rows in place of test rows.
        test_share: share of test rows where the source names none, of every class (of every client if natural).
        server_share: share of every client's train rows that the server gets without labels, rounded down a client.
        seed: everything random depends on it; 777 is the paper's.

    A test row is no train row of anybody, and no row is held twice. Every client has a train row; its test rows may
    be none. For "independent", clients without test rows are accepted only where `MAX_TRIES` draws gave no better.
    """
    _check_count("clients", clients, 1)
    _check_count("unseen", unseen, 0)
    for name, share in (("valid", valid), ("test_share", test_share), ("server_share", server_share)):
        if not isinstance(share, Real) or not 0 <= share < 1:  # also refuses nan
            raise PartitionError(f"{name} is {share}, but it must be a share, at least 0 and below 1.")
    if test_rows not in TEST_ROWS:
        close = difflib.get_close_matches(str(test_rows), TEST_ROWS, n=1) or TEST_ROWS
        raise PartitionError(f"test_rows is {test_rows!r}, but it must be {' or '.join(close)}.")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise PartitionError(f"seed is {seed}, but it must be a whole number from 0 to 2^32 - 1.")
    _check_valid(partition, valid, valid_rows, valid_clients)
    tested = clients + unseen
    num = tested + valid_clients
    rng, stream = np.random.RandomState(seed), _stream(seed, _VALID)
    none = np.empty(0, np.int64)
    held = none
    if partition == "natural":
        train, test = _deal_natural(source, num, test_share, rng)
    else:
        flags = source.test
        if flags is None:
            flags = _stratified(source.y, test_share, _stream(seed, _SPLIT))
        rows = np.flatnonzero(~flags)
        if valid and valid_rows != OWN:
            apart = _stratified(source.y[rows], valid, stream)
            rows, held = rows[~apart], rows[apart]
        train = _deal(parse(partition), source.y, rows, num, rng)
        test = _deal_test(
            source.y, np.flatnonzero(flags), train[:tested], rng, partition=partition, test_rows=test_rows
        )
    test = [*test[:tested], *[none] * valid_clients]
    train, server = _donate(train, server_share, _stream(seed, _SERVER))
    watched = [*range(clients), *range(tested, num)]
    valids = [none] * num
    if valid_rows == OWN:
        for client in watched:
            train[client], valids[client] = _hold_out(train[client], valid, stream)
    elif len(held):
        parts = _deal_test(
            source.y, held, [train[client] for client in watched], stream, partition=partition, test_rows=valid_rows
        )
        for client, part in zip(watched, parts, strict=True):
            valids[client] = part
    return Federation(
        source=source,
        train=tuple(train),
        valid=tuple(valids),
        test=tuple(test),
        num_clients=clients,
        num_unseen=unseen,
        server=server,
        num_valid=valid_clients,
    )


def sealed(federation: Federation) -> Federation:
    """Return the federation without test rows and unseen clients; nobody in it holds the number of such a row."""
    known, tested = federation.num_clients, federation.num_clients + federation.num_unseen
    train, valid = (split[:known] + split[tested:] for split in (federation.train, federation.valid))
    return replace(federation, train=train, valid=valid, test=(np.empty(0, np.int64),) * len(train), num_unseen=0)


def describe(federation: Federation) -> dict[str, Any]:
    """Return what decides how much personalisation can do, as plain numbers.

    `absent` is the share of test rows whose label the client has no train row of. `total_variation` is the mean over
    clients (with test rows) of sum_k |p_k - q_k| / 2 between the label mixes p of its train and q of its test rows.
    Standard deviations are the population's, as in the paper's table of classes per client. A share of nothing is
    None.
    """
    y, num_classes = federation.source.y, federation.source.num_classes
    train, test = (_label_counts(y, num_classes, rows) for rows in (federation.train, federation.test))
    absent = np.where(train == 0, test, 0).sum(1)
    sizes = test.sum(1)
    seen = slice(None, federation.num_clients)
    unseen = slice(federation.num_clients, None)
    both = (train.sum(1) > 0) & (sizes > 0)
    mixes = [counts[both] / counts[both].sum(1, keepdims=True) for counts in (train, test)]
    return {
        "clients": federation.num_clients,
        "unseen": federation.num_unseen,
        "train_size": _spread(train.sum(1)),
        "valid_size": _spread(np.array([len(rows) for rows in federation.valid[seen]])),
        "test_size": _spread(sizes),
        "train_rows": {"participating": int(train[seen].sum()), "unseen": int(train[unseen].sum())},
        "test_rows": {"participating": int(test[seen].sum()), "unseen": int(test[unseen].sum())},
        "server_rows": len(federation.server),
        "train_classes": _spread((train > 0).sum(1)),
        "test_classes": _spread((test > 0).sum(1)),
        "absent": {
            "participating": _ratio(absent[seen].sum(), sizes[seen].sum()),
            "unseen": _ratio(absent[unseen].sum(), sizes[unseen].sum()),
        },
        "total_variation": _ratio(np.abs(mixes[0] - mixes[1]).sum() / 2, both.sum()),
    }


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


def _join(
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


def _by_class(y: np.ndarray) -> list[np.ndarray]:
    """Return the positions of each class that occurs, classes ascending."""
    order = np.argsort(y, kind="stable")
    starts = np.unique(y[order], return_index=True)[1]
    return np.split(order, starts[1:]) if len(y) else []


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


def _apportion(weight: np.ndarray, total: int, rng: np.random.RandomState) -> np.ndarray:
    """Return whole numbers in proportion to the weights that sum to `total`: largest remainders, ties at random.

    Whole-number weights are computed in whole numbers, so that a tie is one.
    """
    share, remainder = np.divmod(weight * total, weight.sum())
    share = share.astype(np.int64)
    order = np.lexsort((rng.permutation(len(weight)), -remainder))
    share[order[: total - share.sum()]] += 1
    return share


# Pieces of federate


def _stream(seed: int, *purpose: int) -> np.random.RandomState:
    """Return a generator of its own, so that one setting does not change what another one draws."""
    return np.random.RandomState([seed, *purpose])


def _hold_out(rows: np.ndarray, share: float, rng: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Split off the nearest whole number to share * n rows at random, but leave at least one."""
    count = min(math.floor(share * len(rows) + 0.5), len(rows) - 1)
    if count <= 0:
        return rows, rows[:0]
    out = np.zeros(len(rows), bool)
    out[rng.permutation(len(rows))[:count]] = True
    return rows[~out], rows[out]


def _stratified(y: np.ndarray, share: float, rng: np.random.RandomState) -> np.ndarray:
    """Flag `share` of every class as test rows; a class never loses its last train row."""
    flags = np.zeros(len(y), bool)
    for rows in _by_class(y):
        flags[_hold_out(rows, share, rng)[1]] = True
    return flags


def _deal(
    partitioner: Partitioner, y: np.ndarray, rows: np.ndarray, num: int, rng: np.random.RandomState
) -> list[np.ndarray]:
    return [rows[part] for part in partitioner(y[rows], num, rng, None)]


def _deal_test(
    y: np.ndarray,
    rows: np.ndarray,
    train: Sequence[np.ndarray],
    rng: np.random.RandomState,
    *,
    partition: str,
    test_rows: str,
) -> list[np.ndarray]:
    num = len(train)
    if len(rows) == 0:
        return [rows] * num
    if test_rows == "uniform":
        return _deal(iid(least=0), y, rows, num, rng)
    if test_rows == "consistent":
        return _deal_consistent(y, rows, train, rng)
    try:
        return _deal(parse(partition), y, rows, num, rng)
    except PartitionError:
        return _deal(parse(partition, least=0), y, rows, num, rng)


def _deal_consistent(
    y: np.ndarray, rows: np.ndarray, train: Sequence[np.ndarray], rng: np.random.RandomState
) -> list[np.ndarray]:
    num = len(train)
    counts = _label_counts(y, int(y.max()) + 1, train)
    pieces = []
    for group in _by_class(y[rows]):
        weight = counts[:, y[rows[group[0]]]]
        # A class that nobody trains on has no mix to follow and is dealt evenly.
        size = _apportion(weight if weight.any() else np.ones(num, np.int64), len(group), rng)
        pieces.append(np.split(rows[rng.permutation(group)], np.cumsum(size)[:-1]))
    return _join(pieces, [None] * len(pieces), num, rng)


def _deal_natural(
    source: Source, num: int, test_share: float, rng: np.random.RandomState
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    train, test = [], []
    for rows in natural()(source.y, num, rng, source.client):
        flags = np.zeros(len(rows), bool) if source.test is None else source.test[rows]
        # An owner whose rows all fell on one side of the official split (MNIST's writers) gets a split of its own.
        official = flags.any() and not flags.all()
        own, held = (rows[~flags], rows[flags]) if official else _hold_out(rows, test_share, rng)
        train.append(own)
        test.append(held)
    return train, test


def _donate(train: list[np.ndarray], share: float, rng: np.random.RandomState) -> tuple[list[np.ndarray], np.ndarray]:
    """Move floor(share * n) rows of every client to the server, and one of the largest client's if that is nothing."""
    if share == 0:
        return train, np.empty(0, np.int64)
    # 0.29 x 100 is 28.999999999999996 in binary, and means 29.
    counts = [math.floor(share * len(rows) + 1e-9) for rows in train]
    if not any(counts):
        largest = int(np.argmax([len(rows) for rows in train]))
        if len(train[largest]) < 2:
            raise PartitionError(
                f"server_share is {share}, but no client has a train row to spare; use 0 or fewer clients."
            )
        counts[largest] = 1
    kept, given = [], []
    for rows, count in zip(train, counts, strict=True):
        out = np.zeros(len(rows), bool)
        out[rng.permutation(len(rows))[:count]] = True
        kept.append(rows[~out])
        given.append(rows[out])
    return kept, np.sort(np.concatenate(given))


# Pieces of describe


def _label_counts(y: np.ndarray, num_classes: int, clients: Sequence[np.ndarray]) -> np.ndarray:
    """Return (C, K): how many rows of each class each client holds."""
    return np.stack([np.bincount(y[rows], minlength=num_classes) for rows in clients])


def _spread(values: np.ndarray) -> dict[str, float]:
    return {
        "min": int(values.min()),
        "mean": float(values.mean()),
        "max": int(values.max()),
        "sd": float(values.std()),
    }


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None


# Checks


def _check_range(partition: str, name: str, value: float, *, low: float, high: float, open_low: bool = False) -> None:
    if not (low < value <= high or (value == low and not open_low)):  # also refuses nan
        above = "above" if open_low else "at least"
        raise PartitionError(
            f"{partition} has {name} {value:g}, but {name} must be {above} {low:g} and at most {high:g}."
        )


def _check_count(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        raise PartitionError(f"{name} is {value}, but it must be a whole number, at least {low}.")


def _check_valid(partition: str, valid: float, valid_rows: str, valid_clients: int) -> None:
    if valid_rows not in VALID_ROWS:
        close = difflib.get_close_matches(str(valid_rows), VALID_ROWS, n=1) or VALID_ROWS
        raise PartitionError(f"valid_rows is {valid_rows!r}, but it must be {' or '.join(close)}.")
    _check_count("valid_clients", valid_clients, 0)
    if valid_clients and not valid:
        raise PartitionError(
            f"valid_clients is {valid_clients}, but valid is 0; say which share they hold, such as 0.1."
        )
    if valid and valid_rows != OWN and partition == "natural":
        raise PartitionError(f"valid_rows is {valid_rows!r}, but a natural partition knows whose each row is; use own.")


def _check_enough(what: str, rows: int, num: int, least: int) -> None:
    if rows < least * num:
        raise PartitionError(
            f"{what} cannot give {num} clients a row each from {rows} rows; use at most {rows} clients."
        )
