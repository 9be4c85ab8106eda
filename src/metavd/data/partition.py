"""Who has what: from a dataset's rows to the rows of every client.

`federate` applies a partitioner (`partitioners`) to a source's train rows, deals the test rows, and sets rows aside for
validation and for the server. All of it is a function of the seed.

NumPy's `RandomState` is used throughout, although it is called legacy: its streams are frozen for ever, a partition
must be the same in ten years, and the paper's partition came from it. The global generator is never touched.

Shape letters: n rows, C clients (participating first, then unseen), K classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real

import numpy as np

from ..schema import nearest
from .partitioners import (
    PARTITIONS,
    Partitioner,
    PartitionError,
    PartitionKind,
    apportion,
    by_class,
    cut,
    iid,
    join,
    natural,
    owners,
    parse,
)  # fmt: skip
from .source import Source

__all__ = [
    "OWN", "PARTITIONS", "TEST_ROWS", "VALID_ROWS", "Federation", "PartitionError", "PartitionKind", "federate",
    "parse", "sealed",
]  # fmt: skip

TEST_ROWS = ("independent", "consistent", "uniform")
"""How official test rows reach the clients; see `federate`."""
OWN = "own"
VALID_ROWS = (OWN, *TEST_ROWS)
"""How validation rows reach the clients: out of each client's own train rows, or as test rows do."""

_SPLIT, _SERVER, _VALID = 1, 2, 3  # names of random streams beside the partition's own


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
    names: tuple[str, ...] = ()
    """The C clients' names; empty where they have numbers only."""

    def name(self, client: int) -> str:
        """Return how a client is called."""
        return self.names[client] if self.names else str(client)


def federate(
    source: Source, partition: str = "dirichlet:0.5", *, clients: int, unseen: int | str = 0,
    test_rows: str = "independent", valid: float = 0.0, valid_rows: str = OWN, valid_clients: int = 0,
    test_share: float = 0.2, server_share: float = 0.0, seed: int,
) -> Federation:  # fmt: skip
    """Decide who holds which row.

    Args:
        source: the rows.
        partition: see `parse`.
        clients: how many participate.
        unseen: how many more are kept out of training altogether; of a dataset whose owners have names, perhaps
            which ones: "sketch" or "sketch,photo", see `leaving_out`.
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
        server_share: share of each client's train rows, rounded down, that the server gets without labels.
        seed: everything random depends on it; 777 is the paper's.

    A test row is no train row of anybody, and no row is held twice. Every client has a train row; its test rows may
    be none. For "independent", clients without test rows are accepted only where `MAX_TRIES` draws gave no better.
    """
    _check_count("clients", clients, 1)
    left_out = leaving_out(unseen, source if partition == "natural" else None) if isinstance(unseen, str) else ()
    unseen = len(left_out) if isinstance(unseen, str) else unseen
    _check_count("unseen", unseen, 0)
    _check_given(seed, test_rows, valid=valid, test_share=test_share, server_share=server_share)
    _check_valid(partition, valid, valid_rows, valid_clients)
    counts, tests = (clients, unseen, valid_clients), clients + unseen
    rng, stream = np.random.RandomState(seed), _stream(seed, _VALID)
    held = np.empty(0, np.int64)
    names: tuple[str, ...] = ()
    if partition == "natural":
        train, test, names = _deal_natural(source, counts, left_out, test_share, rng)
    else:
        rows, tested = _split(source, test_share, _stream(seed, _SPLIT))
        if valid and valid_rows != OWN:
            rows, held = _set_apart(source.y, rows, valid, stream)
        train = _deal(parse(partition), source.y, rows, sum(counts), rng)
        test = _deal_test(source.y, tested, train[:tests], rng, partition=partition, test_rows=test_rows)
    test = [*test[:tests], *[held[:0]] * valid_clients]
    train, server = _donate(train, server_share, _stream(seed, _SERVER))
    watched = [*range(clients), *range(tests, sum(counts))]
    valids = dict.fromkeys(range(len(train)), held[:0])
    if valid_rows == OWN:
        for client in watched if valid else ():
            train[client], valids[client] = _hold_out(train[client], valid, stream)
    else:
        trained = [train[client] for client in watched]
        parts = _deal_test(source.y, held, trained, stream, partition=partition, test_rows=valid_rows)
        valids |= zip(watched, parts, strict=True)
    rows_of = (tuple(train), tuple(valids.values()), tuple(test))
    return Federation(source, *rows_of, clients, unseen, server, valid_clients, names)


NAMED = "client:"
"""Before the names of clients that are left out, where a name could be taken for a number."""


def leaving_out(text: str, source: Source | None) -> tuple[int, ...]:
    """Return the numbers of the owners that a text names, commas between: sketch,photo.

    A name that looks like a number needs client: before it. One that holds commas is found where it is the whole text.
    """
    known = () if source is None else source.client_names
    if not known:
        raise PartitionError(
            f"unseen is {text!r}, but only clients by nature have names, and these have none; give a number, such as 1."
        )
    wanted = text.removeprefix(NAMED)
    names = [wanted] if wanted in known else [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in known:
            there = nearest(name, known, f"the clients are {some(known)}.")
            raise PartitionError(f"unseen names {name!r}, but there is no such client; {there}")
    if len(set(names)) < len(names):
        raise PartitionError(f"unseen is {text!r}, which names a client twice; name each once.")
    if len(names) == len(known):
        raise PartitionError(f"unseen is {text!r}, which leaves nobody to train; leave at least one client in.")
    return tuple(sorted(known.index(name) for name in names))


def some(names: Sequence[str], most: int = 12) -> str:
    """Write names for a sentence, the first ones of many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def sealed(federation: Federation) -> Federation:
    """Return the federation without test rows and unseen clients; nobody in it holds the number of such a row."""
    known, tested = federation.num_clients, federation.num_clients + federation.num_unseen
    train, valid = (split[:known] + split[tested:] for split in (federation.train, federation.valid))
    names = federation.names[:known] + federation.names[tested:]
    none = (np.empty(0, np.int64),) * len(train)
    return replace(federation, train=train, valid=valid, test=none, num_unseen=0, names=names)


# Pieces of federate


def _stream(seed: int, *purpose: int) -> np.random.RandomState:
    """Return a generator of its own, so that one setting does not change what another one draws."""
    return np.random.RandomState([seed, *purpose])


def _hold_out(rows: np.ndarray, share: float, rng: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Split off the nearest whole number to share * n rows at random, but leave at least one."""
    count = min(math.floor(share * len(rows) + 0.5), len(rows) - 1)
    return _drawn(rows, count, rng) if count > 0 else (rows, rows[:0])


def _drawn(rows: np.ndarray, count: int, rng: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that stay and those that are drawn, both in their order."""
    out = np.zeros(len(rows), bool)
    out[rng.permutation(len(rows))[:count]] = True
    return rows[~out], rows[out]


def _split(source: Source, test_share: float, rng: np.random.RandomState) -> tuple[np.ndarray, np.ndarray]:
    """Return the train and the test rows, which the source names, or which are drawn where it names none."""
    if source.test is None:
        return _set_apart(source.y, np.arange(len(source.y)), test_share, rng)
    return np.flatnonzero(~source.test), np.flatnonzero(source.test)


def _set_apart(
    y: np.ndarray, rows: np.ndarray, share: float, rng: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Split off `share` of the rows of every class; a class never loses its last row."""
    flags = np.zeros(len(rows), bool)
    for group in by_class(y[rows]):
        flags[_hold_out(group, share, rng)[1]] = True
    return rows[~flags], rows[flags]


def _deal(
    partitioner: Partitioner, y: np.ndarray, rows: np.ndarray, num: int, rng: np.random.RandomState
) -> list[np.ndarray]:
    return [rows[part] for part in partitioner(y[rows], num, rng, None)]


def _deal_test(
    y: np.ndarray, rows: np.ndarray, train: Sequence[np.ndarray], rng: np.random.RandomState, *, partition: str,
    test_rows: str,
) -> list[np.ndarray]:  # fmt: skip
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
    counts = label_counts(y, int(y.max()) + 1, train)
    pieces = []
    for group in by_class(y[rows]):
        weight = counts[:, y[rows[group[0]]]]
        # A class that nobody trains on has no mix to follow and is dealt evenly.
        size = apportion(weight if weight.any() else np.ones(num, np.int64), len(group), rng)
        pieces.append(cut(rows[rng.permutation(group)], np.cumsum(size)[:-1]))
    return join(pieces, [None] * len(pieces), num, rng)


def _owners(
    source: Source, counts: tuple[int, int, int], left_out: Sequence[int], rng: np.random.RandomState
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Return the rows of natural owners, participating, unseen and validation clients in this order, and their names.

    The seed says who is what. Owners with names then stand in the order of their names, so that a client's number
    depends on the seed as little as it can; those without names stand as they were drawn.
    """
    clients, unseen, watched = counts
    num = sum(counts)
    if not source.client_names:
        return natural()(source.y, num, rng, source.client), ()
    assert source.client is not None
    owned = {int(source.client[rows[0]]): rows for rows in owners(source.client, num)}
    for owner in left_out:
        if owner not in owned:
            raise PartitionError(f"unseen names {source.client_names[owner]!r}, who has no row; name another client.")
    ids = list(owned)
    drawn = [ids[place] for place in rng.permutation(len(ids)) if ids[place] not in left_out]
    away = list(left_out) or drawn[clients : clients + unseen]
    after = clients + (0 if left_out else unseen)
    chosen = [*sorted(drawn[:clients]), *sorted(away), *sorted(drawn[after : after + watched])]
    return [owned[owner] for owner in chosen], tuple(source.client_names[owner] for owner in chosen)


def _deal_natural(
    source: Source, counts: tuple[int, int, int], left_out: Sequence[int], test_share: float, rng: np.random.RandomState
) -> tuple[list[np.ndarray], list[np.ndarray], tuple[str, ...]]:
    """Return train and test rows of natural owners, and their names."""
    rows_of, names = _owners(source, counts, left_out, rng)
    train, test = [], []
    for rows in rows_of:
        flags = np.zeros(len(rows), bool) if source.test is None else source.test[rows]
        # An owner whose rows all fell on one side of the official split (MNIST's writers) gets a split of its own.
        official = flags.any() and not flags.all()
        own, held = (rows[~flags], rows[flags]) if official else _hold_out(rows, test_share, rng)
        train.append(own)
        test.append(held)
    return train, test, names


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
    kept, given = zip(*(_drawn(rows, count, rng) for rows, count in zip(train, counts, strict=True)), strict=True)
    return list(kept), np.sort(np.concatenate(given))


# Checks


def _check_count(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        raise PartitionError(f"{name} is {value}, but it must be a whole number, at least {low}.")


def _check_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise PartitionError(f"{name} is {value!r}; {nearest(str(value), known)}")


def _check_given(seed: int, test_rows: str, **shares: float) -> None:
    for name, share in shares.items():
        if not isinstance(share, Real) or not 0 <= share < 1:  # also refuses nan
            raise PartitionError(f"{name} is {share}, but it must be a share, at least 0 and below 1.")
    _check_choice("test_rows", test_rows, TEST_ROWS)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise PartitionError(f"seed is {seed}, but it must be a whole number from 0 to 2^32 - 1.")


def _check_valid(partition: str, valid: float, valid_rows: str, valid_clients: int) -> None:
    _check_choice("valid_rows", valid_rows, VALID_ROWS)
    _check_count("valid_clients", valid_clients, 0)
    if valid_clients and not valid:
        raise PartitionError(
            f"valid_clients is {valid_clients}, but valid is 0; say which share they hold, such as 0.1."
        )
    if valid and valid_rows != OWN and partition == "natural":
        raise PartitionError(f"valid_rows is {valid_rows!r}, but a natural partition knows whose each row is; use own.")


def label_counts(y: np.ndarray, num_classes: int, clients: Sequence[np.ndarray]) -> np.ndarray:
    """Return (C, K): how many rows of each class each client holds."""
    return np.stack([np.bincount(y[rows], minlength=num_classes) for rows in clients])
