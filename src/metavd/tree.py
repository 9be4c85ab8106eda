"""Algebra on dictionaries of tensors.

A `Params` maps names to tensors: "fc1.weight", "fc1.logvar", "hyper.0.bias". All
mathematics of the package addresses tensors by name, never by position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Params = dict[str, Tensor]


def map(function: Callable[..., Tensor], *trees: Params) -> Params:
    """Apply a function to the entries that share a name, over the names of the first tree.

    >>> map(torch.add, {"a": torch.tensor(1)}, {"a": torch.tensor(2)})
    {'a': tensor(3)}
    """
    first, *others = trees
    return {name: function(value, *(tree[name] for tree in others)) for name, value in first.items()}


def axpy(scale: float | Tensor, x: Params, y: Params) -> Params:
    """Return y + scale * x for the names of y; entries that x lacks are kept."""
    return {name: value + scale * x[name] if name in x else value for name, value in y.items()}


def join(tree: Params) -> Tensor:
    """Return all entries as one vector: a small network's algebra costs calls, not arithmetic, and so only a few."""
    return torch.cat([value.flatten() for value in tree.values()])


def part(vectors: Tensor, like: Params) -> Params:
    """Undo `join`: cut a vector, or many (..., P), into entries of the names and shapes of a tree."""
    pieces = torch.split(vectors, [value.numel() for value in like.values()], -1)
    lead = vectors.shape[:-1]
    return {name: piece.reshape(lead + value.shape) for (name, value), piece in zip(like.items(), pieces, strict=True)}


def squared_norm(tree: Params) -> Tensor:
    """Sum of squares over all entries."""
    return join(tree).square().sum()


def clip_scale(vector: Tensor, limit: float) -> Tensor:
    """Return what brings a vector's L2 norm down to `limit`: min(1, limit / (norm + 1e-6)).

    The scale stays in the graph, so a meta-gradient sees it.
    """
    return (limit / (torch.linalg.vector_norm(vector) + 1e-6)).clamp(max=1.0)


def clip(tree: Params, limit: float | None) -> Params:
    """Scale all entries jointly so that their L2 norm is at most `limit`, see `clip_scale`."""
    if limit is None:
        return dict(tree)
    scale = clip_scale(join(tree), limit)
    return {name: value * scale for name, value in tree.items()}


def select(tree: Params, keep: Callable[[str], bool]) -> Params:
    """Return the entries whose name is kept."""
    return {name: value for name, value in tree.items() if keep(name)}


def without(tree: Params, *prefixes: str) -> Params:
    """Return the entries whose name begins with none of these.

    >>> without({"own.a": 1, "a": 2, "work.a": 3}, "own.", "work.")
    {'a': 2}
    """
    return select(tree, lambda name: not name.startswith(prefixes))


def under(tree: Params, prefix: str) -> Params:
    """Return the entries whose name begins with a prefix, by what follows it.

    >>> under({"own.a": 1, "a": 2}, "own.")
    {'a': 1}
    """
    return {name.removeprefix(prefix): value for name, value in tree.items() if name.startswith(prefix)}


def per_client(values: Tensor, like: Tensor) -> Tensor:
    """Give numbers of clients (C,) axes of 1, as many as something of theirs (C, ...) has."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


def scaled(tree: Params, factors: Tensor) -> Params:
    """Multiply each client's tree (C, ...) by a number of its own (C,)."""
    return {name: value * per_client(factors, value) for name, value in tree.items()}


def norms(tree: Params, dtype: torch.dtype | None = None) -> Tensor:
    """Return the L2 norm of each client's whole tree, (C, ...) -> (C,)."""
    parts = [torch.linalg.vector_norm(value.flatten(1), dim=1, dtype=dtype) for value in tree.values()]
    return torch.linalg.vector_norm(torch.stack(parts), dim=0)


def stack(trees: Sequence[Params]) -> Params:
    """Join the trees of C clients into one tree whose entries have a leading axis C."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def gather(trees: Sequence[Params]) -> Params:
    """Stack trees and empty them entry by entry, so that a cohort's weights are not in memory twice.

    An entry that all trees share, the very same tensor, is expanded and not copied.
    """

    def joined(values: list[Tensor]) -> Tensor:
        first = values[0]
        shared = all(value is first for value in values)
        return first.expand(len(values), *first.shape) if shared else torch.stack(values)

    return {name: joined([tree.pop(name) for tree in trees]) for name in list(trees[0])}


def concatenated(trees: Sequence[Params]) -> Params:
    """Join trees of several clients each (n, ...) into one of all of them (C, ...)."""
    return {name: torch.cat([tree[name] for tree in trees]) for name in trees[0]}


def unstack(tree: Params, index: int | slice) -> Params:
    """Return one client's tree of a stacked one, or that of some clients."""
    return {name: value[index] for name, value in tree.items()}


def where(condition: Tensor, new: Params, old: Params) -> Params:
    """Return new where the scalar condition holds, else old; entries that both share, or that old lacks, are new's."""
    return {
        name: value if value is old.get(name, value) else torch.where(condition, value, old[name])
        for name, value in new.items()
    }
