"""Which rows each step of a cohort uses, for schedules in which all clients take each step together.

Clients are sorted by their number of steps, most first, so that those who still train are always the first ones, and a
client that is done costs nothing.

Shape letters: C clients of the cohort, S steps, G batches per step, B rows per batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import tree
from ...core import rng
from ...core.types import Batch, Sampling, ServerState
from ...data.cohort import TRAIN, Batches, Pool, about, draw, layout, sizes_of
from ...ops.device import over
from ...tree import Params


class StepTable(NamedTuple):
    """Which rows each client's steps use, clients sorted by their number of steps, most first."""

    order: Tensor
    """(C,) places in the cohort."""
    steps: list[int]
    """Of each client, in that order."""
    rows: Tensor
    """(S, C, G, B) row numbers, 0 where there is none."""
    mask: Tensor
    """(S, C, G, B) 1 for a row, 0 for padding."""
    keys: Tensor
    """(S, C, G, 2) of noise and of augmentation."""
    size: Tensor
    """(C,) training rows of each client."""
    about: Params
    """(C, ...) see `Batch.about`."""


def tabled(sampling: Sampling) -> bool:
    """Whether batches have a bounded number of rows, all of the client's own, so that a table can hold them."""
    return not sampling.full and not sampling.extra


def table(pool: Pool, sampling: Sampling, group: int, state: ServerState, cohort: Tensor) -> StepTable:
    """Draw a round's batches, the very ones of `turn.train_batches`, as numbers of rows."""
    ids = cohort.numpy()
    counts = sizes_of(pool, ids)
    made = layout(sampling, counts)
    order = np.argsort(-made.batches, kind="stable")
    made = Batches(*(part[order] for part in made))
    device = pool.x.device
    base = rng.fold(state.key, TRAIN, state.round.to(torch.int64), over(torch.from_numpy(ids[order]), device))
    rows, real = draw(pool, ids[order], made, rng.fold(base, 0))
    number = torch.arange(len(rows), device=device)[:, None]
    keys = torch.stack([rng.fold(rng.fold(base, tag), number) for tag in (1, 3)], -1)

    def grouped(values: Tensor) -> Tensor:
        """(S G, C, ...) -> (S, C, G, ...)."""
        return values.reshape(-1, group, *values.shape[1:]).transpose(1, 2)

    return StepTable(
        order=torch.from_numpy(order),
        steps=(made.batches // group).tolist(),
        rows=grouped(rows),
        mask=grouped(real.to(pool.dtype)),
        keys=grouped(keys),
        size=over(torch.from_numpy(counts[order]), device).to(pool.dtype),
        about=about(pool, ids[order], sampling),
    )


def part_of(drawn: StepTable, part: slice) -> StepTable:
    """Return the table of some of the clients, which are neighbours in its order."""
    steps = drawn.steps[part]
    rows, mask, keys = (value[: steps[0], part] for value in (drawn.rows, drawn.mask, drawn.keys))
    return StepTable(drawn.order[part], steps, rows, mask, keys, drawn.size[part], tree.unstack(drawn.about, part))


def ordered(sent: Params, order: Tensor) -> Params:
    """Put what was sent to a cohort (C, ...) into a table's order; what all clients share is not copied."""
    if _ascending(order):
        return sent
    place = over(order, next(iter(sent.values())).device)
    return {name: value if value.stride(0) == 0 else value[place] for name, value in sent.items()}


def rejoined(parts: list[tuple[Params, Tensor]], order: Tensor) -> tuple[Params, Tensor]:
    """Put parts of a cohort in a table's order together in the cohort's own; what is in it already is not copied.

    A part is what its clients end with, and a number of each.
    """
    device = parts[0][1].device
    back = None if _ascending(order) else over(torch.argsort(order), device)

    def joined(values: list[Tensor]) -> Tensor:
        whole = values[0] if len(values) == 1 else torch.cat(values)
        return whole if back is None else whole[back]

    adapted = {name: joined([params[name] for params, _ in parts]) for name in parts[0][0]}
    return adapted, joined([each for _, each in parts])


def _ascending(order: Tensor) -> bool:
    return bool((order[1:] > order[:-1]).all())


def batches_of(
    pool: Pool,
    sampling: Sampling,
    drawn: tuple[Tensor, Tensor, Tensor],
    round: Tensor,
    *,
    size: Tensor,
    told: Params,
) -> list[Batch]:
    """Return one step's G batches of C clients, from that step's rows, mask and keys of a `Table`.

    `size` and `told` are the table's `size` and `about`, perhaps of more clients, of which these are the first.
    """
    rows, mask, keys = drawn
    # Batch by batch, not client by client: then each is one piece of memory.
    rows, mask, keys = (value.transpose(0, 1) for value in (rows, mask, keys))
    x, y = pool.many(rows, keys[..., 1] if sampling.augment else None)
    if not x.is_cuda:  # second derivatives of convolutions ask how images lie in memory, and vmap knows one answer
        x = x.contiguous()
    active = rows.shape[1]
    rounds, size = round.expand(active), size[:active]
    known = tree.unstack(told, slice(active))
    return [Batch(x[j], y[j], mask[j], keys[j, :, 0], rounds, size, known) for j in range(len(rows))]
