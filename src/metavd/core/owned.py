"""Rows of the server that belong to one client each, where there are too many to copy in every round.

Names that start with `server.client.` are tables with one row per participating client: an embedding, a spread. Up to
`MANY` clients they lie among the server's parameters, and a round makes new ones. Beyond that their rows lie in a table
of their own, `ServerState.rows`, with what the optimiser remembers of them, and a round fetches, moves and puts back
the rows of its cohort alone. A state with some clients' rows is a state of so many clients, numbered from 0: no
function of a server or of a client knows the difference.

Shape letters: C clients that are fetched, N all participating clients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import tree
from ..tree import Params
from .emit import OWNED
from .types import Kept, ServerState

MANY = 10_000
"""Clients up to which their rows lie among the server's parameters."""
_PARAMS, _SLOTS = "params/", "slots/"


def _split(state: ServerState) -> tuple[ServerState, Params]:
    """Take the tables of owned rows out of a state; return them as one tree."""
    tables: Params = {}
    for prefix, values in ((_PARAMS, state.params), (_SLOTS, state.slots)):
        tables |= {prefix + name: value for name, value in values.items() if name.startswith(OWNED)}
    return state._replace(params=tree.without(state.params, OWNED), slots=tree.without(state.slots, OWNED)), tables


def _with(state: ServerState, tables: Params) -> ServerState:
    """Undo `_split`."""
    params, slots = state.params | tree.under(tables, _PARAMS), state.slots | tree.under(tables, _SLOTS)
    return state._replace(params=params, slots=slots, rows=None)


def apart(state: ServerState, lay: Callable[[Params], Kept]) -> ServerState:
    """Put rows that clients own into a table of their own, which `lay` makes of them, where there are many."""
    rest, tables = _split(state)
    many = max((len(value) for value in tables.values()), default=0) > MANY
    return rest._replace(rows=lay(tables)) if many else state


def whole(state: ServerState) -> ServerState:
    """Return the state with all rows among the parameters; to be read before the next round changes them."""
    return state if state.rows is None else _with(state, state.rows.everyone())


def fetched(state: ServerState, clients: Tensor) -> tuple[ServerState, Tensor]:
    """Return the state with these clients' rows alone (C,), and the clients' numbers in it."""
    if state.rows is None:
        return state, clients
    places = torch.arange(len(clients), device=clients.device)
    return _with(state, state.rows.rows(clients.tolist())), places


def shown_to(state: ServerState, clients: Tensor, *, unseen: bool) -> tuple[ServerState, Tensor]:
    """Return the state that clients are used or tested with, and their numbers in it.

    `unseen`: they never train, and are shown one row in every table, the mean of all.
    """
    if state.rows is None or not unseen:
        return fetched(state, clients)
    means = {name: value.mean(0, keepdim=True) for name, value in state.rows.everyone().items()}
    return _with(state, means), clients


def moved(state: ServerState, clients: Tensor, update: Callable[[ServerState, Tensor], ServerState]) -> ServerState:
    """Return the state after an update (state, the clients' numbers in it) -> state, whose rows are put back."""
    new = update(*fetched(state, clients))
    if state.rows is None:
        return new
    rest, tables = _split(new)
    return rest._replace(rows=state.rows.put(clients.tolist(), tables))
