"""What simulated clients keep between rounds: a table with one row per client, in memory or mapped from a file.

A row is all that a client keeps, as one vector. Only the rows of a cohort are ever touched. A table has versions: a
round makes a new one, and those of earlier rounds can still be read as long as somebody holds them, which is what a
checkpoint of the last finished round needs while a GPU is ahead of it, and what early stopping needs of its best round.
The newest version owns the rows; an older one holds the rows that the next one replaced.

Shape letters: C clients of a cohort, N all clients, P numbers that a client keeps.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.func import vmap

from .. import tree
from ..core.types import Algorithm, Keep, Kept, ServerState
from ..ops.device import over
from ..tree import Params

IN_MEMORY = 4 << 30
"""Bytes up to which a table is held in memory, on the device; a larger one is a file that is mapped, on the host."""
_FILE = "metavd-kept-"


@dataclass(eq=False)
class _Storage:
    """The rows of the newest version."""

    rows: Tensor
    """(N, P)."""
    visited: Tensor
    """(N,) bool on the host: who has kept something."""
    like: Params
    """What one client keeps: names, shapes, type and device; its values say nothing."""
    meet: Callable[[], object] = lambda: None
    """Waits for the other processes that share the rows."""
    writes: bool = True
    """Whether this process writes them."""
    first: Params | None = None
    """What everybody begins with, once somebody has asked; see `core.types.Keep.alike`."""


_NOTHING: tuple[list[int], Tensor, Tensor] = ([], torch.empty(0), torch.empty(0))


@dataclass(eq=False)
class KeptTable:
    """One version of what all clients keep; see `core.types.Kept`."""

    storage: _Storage
    newer: KeptTable | None = None
    """The next version; None: this one is the newest."""
    replaced: tuple[list[int], Tensor, Tensor] = _NOTHING
    """Of an older version: the clients whose rows the next one replaced, those rows, and whether they had any."""

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self.storage.visited)

    def rows(self, clients: Sequence[int]) -> Params:
        """Return what clients keep, (C, ...); zeros for one that has not kept anything yet."""
        return tree.part(self._flat(clients), self.storage.like)

    def has(self, clients: Sequence[int]) -> list[bool]:
        """Return of each client whether it has kept anything yet."""
        found: list[bool] = self._visited()[list(clients)].tolist()
        return found

    def first(self, make: Callable[[], Params]) -> Params:
        """Return what everybody begins with, which is made when it is first asked for."""
        if self.storage.first is None:
            self.storage.first = make()
        return self.storage.first

    def visited(self) -> list[int]:
        """Return the clients that have kept something, ascending."""
        found: list[int] = self._visited().nonzero()[:, 0].tolist()
        return found

    def everyone(self) -> Params:
        """Return what all clients keep, (N, ...); of the newest version to be read before there is a next one."""
        newest = self.newer is None and self.storage.rows.device == _kind(self.storage.like).device
        return tree.part(self.storage.rows, self.storage.like) if newest else self.rows(range(len(self)))

    def put(self, clients: Sequence[int], kept: Params) -> KeptTable:
        """Return the next version, in which clients keep something else (C, ...); this one stays as it is."""
        assert self.newer is None, "only the newest version has a next one"
        storage, ids = self.storage, list(clients)
        self.replaced = ids, self._flat(ids), storage.visited[ids]
        flat = [kept[name].reshape(len(ids), one.numel()) for name, one in storage.like.items()]
        new = torch.cat([_kind(storage.like).new_empty(len(ids), 0), *flat], 1).to(storage.rows.device)
        storage.meet()  # all have read the rows that are replaced now
        if storage.writes:
            storage.rows.index_copy_(0, over(torch.tensor(ids, dtype=torch.int64), storage.rows.device), new)
        storage.meet()  # and nobody reads on before they are
        storage.visited[ids] = True
        self.newer = KeptTable(storage)
        return self.newer

    def _flat(self, clients: Sequence[int]) -> Tensor:
        rows, device = self.storage.rows, _kind(self.storage.like).device
        found = rows[over(torch.tensor(clients, dtype=torch.int64), rows.device)].to(device)
        for version in self._later():
            where = {client: place for place, client in enumerate(version.replaced[0])}
            at = [(place, where[client]) for place, client in enumerate(clients) if client in where]
            if at:
                here, there = (torch.tensor(places, device=device) for places in zip(*at, strict=True))
                found[here] = version.replaced[1][there]
        return found

    def _visited(self) -> Tensor:
        flags = self.storage.visited.clone()
        for version in self._later():
            flags[version.replaced[0]] = version.replaced[2]
        return flags

    def _later(self) -> list[KeptTable]:
        """Return this version and those between it and the newest, the last of them first."""
        found: list[KeptTable] = []
        version = self
        while version.newer is not None:
            found.append(version)
            version = version.newer
        return found[::-1]


def _kind(like: Params) -> Tensor:
    """Return a tensor of the type and on the device of what a client keeps, if only of no entry at all."""
    return next(iter(like.values()), torch.empty(0))


def empty(clients: int, like: Params) -> KeptTable:
    """Return the table of clients that have kept nothing yet; `like` is what one of them keeps."""
    width, some = sum(value.numel() for value in like.values()), _kind(like)
    if clients * width * some.dtype.itemsize <= IN_MEMORY:
        rows = some.new_zeros(clients, width)
    else:
        # The file has no name: it goes with the process, and a checkpoint holds the rows that were written.
        with tempfile.NamedTemporaryFile(prefix=_FILE) as file:
            file.truncate(clients * width * some.dtype.itemsize)
            rows = _mapped(file.name, clients, width, some.dtype)
    return KeptTable(_Storage(rows, torch.zeros(clients, dtype=torch.bool), like))


def _mapped(path: str, clients: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return the rows in a file, which whoever maps it shares."""
    return torch.from_file(path, shared=True, size=clients * width, dtype=dtype).reshape(clients, width)


def once_per_host(table: KeptTable, tell: Callable[[str | None], str], *, first: bool, everyone: bool) -> KeptTable:
    """Return the table with its rows in one file that all processes of a host map; `table` is not used after that.

    All processes of a run call it at once, and put the same rows at once. `first`: this one makes and writes the file.
    `tell` hands its path to the others of its host and returns that of theirs, when all have called it. Rows of those
    who have kept something are taken over, or, with `everyone`, all.
    """
    old = table.storage
    clients, width = old.rows.shape
    path = None
    if first:
        descriptor, path = tempfile.mkstemp(prefix=_FILE)
        os.truncate(descriptor, old.rows.numel() * old.rows.dtype.itemsize)
        os.close(descriptor)
    rows = _mapped(tell(path), clients, width, old.rows.dtype)
    if first:
        who = slice(None) if everyone else table.visited()
        rows[who] = old.rows[who].to(rows.device)
    tell(None)
    if path is not None:
        Path(path).unlink()  # it lives on as long as somebody maps it
    return KeptTable(_Storage(rows, old.visited, old.like, lambda: tell(None), first))


def laid(kept: Params) -> KeptTable:
    """Return the table in which all clients keep something from the start, (N, ...); nobody has changed it yet."""
    clients = len(next(iter(kept.values())))
    table, first = empty(clients, {name: value[0] for name, value in kept.items()}), 0
    for value in kept.values():
        table.storage.rows[:, first : first + value[0].numel()] = value.reshape(clients, -1)
        first += value[0].numel()
    return table


def filled(clients: int, who: Sequence[int], kept: Params) -> KeptTable:
    """Return a table in which some clients keep something (C, ...), as a checkpoint holds it."""
    return empty(clients, {name: value.new_zeros(value.shape[1:]) for name, value in kept.items()}).put(who, kept)


def digest(kept: Kept) -> str:
    """SHA-256 over the clients and what they keep: two tables are the same exactly when these are."""
    found = hashlib.sha256()
    for client in kept.visited():
        for name, value in sorted(kept.rows([client]).items()):
            found.update(f"{client}:{name}:{tuple(value.shape)}".encode() + value.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


# --- a method's own view ---------------------------------------------------------------------------------------------


def first_of(keep: Keep, key: Tensor, client: int) -> Params:
    """Return what a client keeps before its first turn; `key` is the run's."""
    return keep.init(key, torch.tensor(client, device=key.device))


def started(algorithm: Algorithm, state: ServerState, clients: int) -> ServerState:
    """Return the state before the first round, with the table of what clients keep where the method has any."""
    if algorithm.keep is None:
        return state
    return state._replace(kept=empty(clients, first_of(algorithm.keep, state.key, 0)))


def _begun(keep: Keep, state: ServerState, clients: Sequence[int]) -> Params:
    """Return what clients keep before their first turn, (C, ...)."""
    if keep.alike and state.kept is not None:
        first = state.kept.first(lambda: first_of(keep, state.key, 0))
        return {name: value.expand(len(clients), *value.shape) for name, value in first.items()}
    ids = over(torch.tensor(clients), state.key.device)
    begun: Params = vmap(keep.init, (None, 0))(state.key, ids)
    return begun


def newcomers(algorithm: Algorithm, state: ServerState, clients: Sequence[int]) -> list[bool]:
    """Return of each client whether it has kept nothing yet; nobody is new to a method that keeps nothing."""
    if algorithm.keep is None:
        return [False] * len(clients)
    if state.kept is None:
        return [True] * len(clients)
    known = [client for client in clients if client < len(state.kept)]
    has = dict(zip(known, state.kept.has(known), strict=True))
    return [not has.get(client, False) for client in clients]


def held(algorithm: Algorithm, state: ServerState, clients: Sequence[int]) -> Params:
    """Return what clients keep, (C, ...); nothing where the method keeps nothing.

    Those that have kept nothing yet, unseen ones among them, have what they begin with.
    """
    if algorithm.keep is None or not len(clients):
        return {}
    new = newcomers(algorithm, state, clients)
    old = [client for client, is_new in zip(clients, new, strict=True) if not is_new]
    found = state.kept.rows(old) if state.kept is not None and old else {}
    if len(old) == len(clients):
        return found
    fresh = _begun(algorithm.keep, state, [client for client, is_new in zip(clients, new, strict=True) if is_new])
    if not old:
        return fresh
    order = torch.argsort(torch.tensor(new).int(), stable=True)  # those with a row first
    back = over(torch.argsort(order), state.key.device)
    return {name: torch.cat([found[name], value])[back] for name, value in fresh.items()}
