"""Who is which client, across restarts of nodes, server and SuperLink: a JSON file beside the checkpoint.

A client's number is its row in the server's tables and a part of the keys of its random numbers, so it must never be
given to another. The identity is the fingerprint of the node's registered key; where nodes have no key of their own
(the simulation engine, and insecure mode) it is the name that a node gives itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ..container import read_json, write_atomic
from ..core.emit import OWNED
from ..core.types import ServerState
from ..tree import Params
from .config import FederationError

FILE = "registry.json"
OFFENCES = "offences.json"
GUESTS = 1 << 20
"""Numbers of clients that never train begin here; they have no row."""
_VERSION = 1


@dataclass(frozen=True)
class Member:
    """One client of the federation."""

    number: int
    identity: str
    name: str
    trains: bool
    joined: int
    """Rounds that were finished when it came."""
    rows: int = 0
    """Rows up to which its claims may grow, as an operator registered; 0: nobody did."""


@dataclass(frozen=True)
class Roster:
    """All members, in the order of their joining."""

    members: tuple[Member, ...] = ()

    def find(self, identity: str) -> Member | None:
        """Return the member with an identity."""
        return next((each for each in self.members if each.identity == identity), None)

    def called(self, name: str) -> list[Member]:
        """Return the members with a name or a number."""
        return [each for each in self.members if name in {each.name, str(each.number)}]

    def listed(self) -> str:
        """Write who there is, for a sentence."""
        return ", ".join(f"{each.number} ({each.name})" for each in self.members) or "none"

    @property
    def rows(self) -> int:
        """How many numbers of training clients are given away."""
        return sum(each.trains for each in self.members)


@dataclass(frozen=True)
class Candidate:
    """A node that asks to take part."""

    identity: str
    name: str
    trains: bool
    order: tuple[int, str]
    """Newcomers that come together are numbered in this order."""


def admit(registry: Roster, candidates: Sequence[Candidate], done: int) -> Roster:
    """Give numbers to those that have none: rows in the order of joining, and for those who never train a guest's.

    >>> both = [Candidate("b", "", True, (1, "")), Candidate("a", "", True, (0, ""))]
    >>> [(each.identity, each.number) for each in admit(Roster(), both, 0).members]
    [('a', 0), ('b', 1)]
    """
    for each in sorted(candidates, key=lambda one: (one.order, one.identity)):
        if registry.find(each.identity) is not None:
            continue
        number = registry.rows if each.trains else GUESTS + len(registry.members) - registry.rows
        member = Member(number, each.identity, each.name, each.trains, done)
        registry = replace(registry, members=(*registry.members, member))
    return registry


def by_key(fingerprint: str) -> str:
    """Return the identity of a node that is known by its key."""
    return f"key {fingerprint}"


def with_rows(registry: Roster, name: str, rows: int) -> Roster:
    """Register that a client has more rows than it had, so that it may claim them.

    >>> with_rows(Roster((Member(0, "a", "north", True, 0),)), "north", 500).members[0].rows
    500
    """
    found = registry.called(name)
    if not found:
        raise FederationError(f"there is no client {name!r}; the registry has {registry.listed()}")
    return Roster(tuple(replace(each, rows=rows) if each in found else each for each in registry.members))


def rekeyed(registry: Roster, name: str, identity: str) -> Roster:
    """Let a client go on under another identity, and forget what that identity has been so far.

    >>> one = Roster((Member(0, "a", "north", True, 0), Member(1, "b", "north", True, 7)))
    >>> [(each.number, each.identity) for each in rekeyed(one, "0", "b").members]
    [(0, 'b')]
    """
    old = next((each for each in registry.called(name) if each.identity != identity), None)
    if old is None:
        raise FederationError(f"there is no other client {name!r}; the registry has {registry.listed()}")
    others = [each for each in registry.members if each.identity != identity]
    last = max((each.number for each in registry.members if each.trains), default=0)
    if any(each.identity == identity and each.trains and each.number < last for each in registry.members):
        raise FederationError("the new key has a row of its own and others came after it; put back your copy of OUT")
    return Roster(tuple(replace(each, identity=identity) if each is old else each for each in others))


def load(path: Path) -> Roster:
    """Read a registry; a file that is not there is an empty one."""
    if not path.exists():
        return Roster()
    try:
        values = read_json(path.read_text())
        if values["version"] != _VERSION:
            raise ValueError(f"it has version {values['version']}")
        members = tuple(Member(**each) for each in values["members"])
        if len({each.number for each in members}) < len(members) or len({m.identity for m in members}) < len(members):
            raise ValueError("a number or an identity stands in it twice")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FederationError(f"the registry {path} is damaged ({error}); put back your copy of it") from None
    return Roster(members)


def save(path: Path, registry: Roster) -> None:
    """Write a registry, whole or not at all."""
    values = {"version": _VERSION, "members": [asdict(each) for each in registry.members]}
    write_atomic(path, (json.dumps(values, indent=1, allow_nan=False) + "\n").encode())


def save_offences(folder: Path, offences: Mapping[int, int]) -> None:
    """Write how often each client was refused."""
    write_atomic(folder / OFFENCES, json.dumps({str(client): n for client, n in sorted(offences.items())}).encode())


def load_offences(folder: Path) -> dict[int, int]:
    """Read how often each client was refused; a file that is not there says nobody was."""
    path = folder / OFFENCES
    try:
        return {int(client): int(n) for client, n in read_json(path.read_text()).items()} if path.exists() else {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise FederationError(f"{path} is damaged ({error}); put back your copy of it, or remove it") from None


def widened(state: ServerState, rows: int) -> ServerState:
    """Give newcomers rows in every table with one row per client: the mean of the others' rows, and no momentum.

    What a newcomer then receives is what `emit` gives a client that it has never seen.
    """

    def grown(params: Params, *, rest: bool) -> Params:
        found = dict(params)
        for name, table in params.items():
            missing = rows - len(table) if name.startswith(OWNED) else 0
            if missing > 0:
                row = torch.zeros_like(table[:1]) if rest else table.mean(0, keepdim=True)
                found[name] = torch.cat([table, row.expand(missing, *table.shape[1:])])
        return found

    return state._replace(params=grown(state.params, rest=False), slots=grown(state.slots, rest=True))
