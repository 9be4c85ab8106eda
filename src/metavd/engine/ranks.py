"""One run over several processes that torchrun started, on one machine or many.

Every rank holds the whole state of the server and draws the same cohort. The cohort is cut into groups that do not
depend on the number of ranks; each rank trains some of them, the largest first onto the rank that has least to do. What
was trained is gathered on all ranks, in the order of clients, and every rank takes the same step of the server. So the
bits are those of any other number of ranks. Evaluation is shared out alike. What clients keep lies once on every host,
in a file that its ranks map and the first of them writes. Rank 0 alone writes files and speaks.

Shape letters: C clients of the cohort, n those of one rank.
"""

from __future__ import annotations

import atexit
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from .. import tree
from ..core.types import Algorithm, ServerState
from ..data.cohort import Pool, sizes_of
from ..errors import FailedError
from ..tree import Params
from . import kept
from .checkpoint import state_hash
from .schedule import Schedule, Trained

Item = TypeVar("Item")
_LOOK = 0.05
"""Seconds between two looks for ranks that have not come yet."""
_GROUPS = 8
"""Groups that a cohort is cut into under vmap, where `chunk` says nothing: up to so many ranks have work."""


class Ranks(NamedTuple):
    """The processes of a run, and which of them this is."""

    rank: int
    size: int
    attempt: int = 1
    """Counts how often torchrun has started them, since one of them had died."""

    def all(self, value: Item) -> list[Item]:
        """Return what every rank gives, in their order."""
        found: list[Any] = [None] * self.size
        _met(lambda: dist.all_gather_object(found, value))
        return found

    def rows(self, values: Params, counts: Sequence[int]) -> Params:
        """Return the rows (n, ...) of all ranks, one rank after another; `counts` are their numbers."""
        about = {name: (value.shape[1:], value.dtype) for name, value in values.items()}
        about = next((each for each in self.all(about) if each), {})
        if not about:
            return {}
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        widths = [prod(shape) * dtype.itemsize for shape, dtype in about.values()]
        mine = torch.zeros(max(counts), sum(widths), dtype=torch.uint8, device=device)
        if values:
            flat = [values[name].reshape(counts[self.rank], -1).contiguous().view(torch.uint8) for name in about]
            mine[: counts[self.rank]] = torch.cat(flat, 1).to(device)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        _met(lambda: dist.all_gather(parts, mine))
        whole = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        pieces = zip(about.items(), torch.split(whole, widths, 1), strict=True)
        return {name: piece.contiguous().view(dtype).reshape(-1, *shape) for (name, (shape, dtype)), piece in pieces}


def once_per_host(ranks: Ranks, state: ServerState) -> ServerState:
    """Return the state with tables of rows, of what clients keep and of what they own, that ranks of a host share."""
    if ranks.size == 1:
        return state
    host, first = os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"] == "0"

    def tell(path: str | None) -> str:
        said = {where: each for where, each in ranks.all((host, path)) if each is not None}
        return said.get(host, "")

    share = partial(kept.once_per_host, tell=tell, first=first)
    return state._replace(
        kept=share(state.kept, everyone=False) if isinstance(state.kept, kept.KeptTable) else state.kept,
        rows=share(state.rows, everyone=True) if isinstance(state.rows, kept.KeptTable) else state.rows,
    )


def _met(call: Callable[[], object]) -> None:
    """Meet the other ranks; one that is gone ends the run with a sentence."""
    try:
        call()
    except RuntimeError as error:  # torch's own class for it is one of these
        raise FailedError(f"another rank of this run is gone ({_reason(error)}); go on with --resume") from None


def _reason(error: RuntimeError) -> str:
    """Return what torch says of a meeting that failed, without its source's path and its advice.

    >>> _reason(RuntimeError("[/a/b/pair.cc:537] Read error [10.0.0.2]:17: Connection reset by peer. This is due to"))
    'Read error [10.0.0.2]:17: Connection reset by peer'
    """
    first = str(error).strip().partition("\n")[0]
    if "timed out" in first.lower() or "timeout" in first.lower():
        return "no word from it within rank_wait; raise that where ranks are slow"
    return re.sub(r"^\[\S+:\d+\] ", "", first).partition(". ")[0]


def joined(wait: float) -> Ranks | None:
    """Meet the other processes that torchrun started, for as long as this one lives; None where it started none.

    Where another one is not heard of for `wait` seconds when they meet, now or later, the run ends: a host whose link
    is cut closes no connection.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    if not dist.is_initialized():
        gpu = torch.cuda.is_available()
        if gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        # NCCL wants a device for each rank.
        several = gpu and int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count()
        _met(lambda: _meet_first("nccl" if several else "gloo", wait))
        atexit.register(dist.destroy_process_group)
    return Ranks(dist.get_rank(), dist.get_world_size(), *_attempts)


_attempts: list[int] = []
"""The number of this attempt, once the ranks have met."""


def _meet_first(backend: str, wait: float) -> None:
    """Find the other ranks."""
    limit = timedelta(seconds=wait)
    store, rank, size = next(iter(rendezvous("env://", timeout=limit)))
    number = numbered(store, rank, size, wait)
    named = PrefixStore(f"attempt {number}", store)
    dist.init_process_group(backend, store=named, rank=rank, world_size=size, timeout=limit)
    _attempts.append(number)


def numbered(store: Store, rank: int, size: int, wait: float) -> int:
    """Agree on the number of this attempt to run, from 1 on, by which its names in the store differ from earlier ones.

    torchrun's store outlives a restart, and every host counts its own restarts alone. So rank 0 counts, and answers
    words that no earlier attempt can have said.
    """
    if rank:
        word = uuid4().hex
        store.set(f"rank {rank}", word)
        number = int(store.get(word))
        store.add(f"heard {number}", 1)
        return number
    number, until = int(store.add("attempts", 1)), time.monotonic() + wait
    while store.add(f"heard {number}", 0) < size - 1:
        if time.monotonic() > until:
            raise RuntimeError("timed out")
        for other in range(1, size):
            if store.check([f"rank {other}"]):
                store.set(store.get(f"rank {other}").decode(), str(number))
        time.sleep(_LOOK)
    return number


# --- who trains whom -------------------------------------------------------------------------------------------------


def shares(sizes: Sequence[int], grain: int, ranks: int) -> list[list[list[int]]]:
    """Cut places into groups of `grain` of like size, and deal them out; return each rank's groups.

    With a grain of 0, where clients do not touch each other, all that a rank has is one group.

    >>> shares([5, 1, 9, 1], 1, 2)
    [[[2]], [[0], [1], [3]]]
    >>> shares([5, 1, 9, 1], 0, 2)
    [[[2]], [[0, 1, 3]]]
    """
    if not grain:
        alone = shares(sizes, 1, ranks)
        return [[sorted(place for group in groups for place in group)] if groups else [] for groups in alone]
    order = sorted(range(len(sizes)), key=lambda place: -sizes[place])
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for first in range(0, len(order), grain):
        group = sorted(order[first : first + grain])
        least = load.index(min(load))
        dealt[least].append(group)
        load[least] += sum(sizes[place] for place in group)
    return dealt


def grain_of(backend: str, chunk: int, cohort: int) -> int:
    """Return how many clients are computed together; 0 where a client's bits depend on nobody else's."""
    return 0 if backend != "vmap" else chunk or -(-cohort // _GROUPS)


_PARTS = ("sent", "adapted", "kept")


def _labelled(trained: Trained) -> Params:
    """Return all that a group made as one tree."""
    parts = {f"{part}/{name}": value for part in _PARTS for name, value in getattr(trained, part).items()}
    return parts | {"losses": trained.losses}


def _trained(labelled: Params) -> Trained:
    """Undo `_labelled`."""
    return Trained(**{part: tree.under(labelled, f"{part}/") for part in _PARTS}, losses=labelled["losses"])


def ranked(schedule: Schedule, ranks: Ranks, grain: int) -> Schedule:
    """Return the schedule that trains a part of every cohort here and the rest on the other ranks."""

    def train(algorithm: Algorithm, pool: Pool, state: ServerState, cohort: Tensor) -> Trained:
        dealt = shares(sizes_of(pool, cohort.tolist()).tolist(), grain, ranks.size)
        own = [schedule.train(algorithm, pool, state, cohort[group]) for group in dealt[ranks.rank]]
        places = [[place for group in groups for place in group] for groups in dealt]
        back = torch.argsort(torch.tensor([place for each in places for place in each]))
        counts = [len(each) for each in places]

        parts = [_labelled(each) for each in own]
        mine = tree.concatenated(parts) if parts else {}
        gathered = ranks.rows(mine, counts)
        device = pool.x.device
        return _trained({name: value.to(device)[back.to(device)] for name, value in gathered.items()})

    return Schedule(schedule.name, train, schedule.map)


def spread(
    ranks: Ranks, state: ServerState, clients: Sequence[int], grain: int, answer: Callable[[list[int]], Iterable[Item]]
) -> list[Item]:
    """Let every rank answer for some clients; return all answers in the order of clients, the same on every rank.

    Ranks whose servers have drifted apart, which only unlike machines can do, end here.
    """
    # Of many owned rows, those that somebody has moved.
    rows = "" if state.rows is None else kept.digest(state.rows)
    if len(set(ranks.all(state_hash(state._replace(rows=None)) + rows))) > 1:
        raise FailedError(
            f"the ranks' models differ after round {int(state.round)}: their machines compute differently; "
            "use ranks of one kind, and precision=exact on GPUs"
        )
    dealt = shares([1] * len(clients), grain, ranks.size)
    mine = [
        pair
        for group in dealt[ranks.rank]
        for pair in zip(group, answer([clients[place] for place in group]), strict=True)
    ]
    found = dict(pair for part in ranks.all(mine) for pair in part)
    return [found[place] for place in range(len(clients))]
