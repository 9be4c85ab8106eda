"""A pure function of tensors as a CUDA graph: hundreds of small launches become one.

A call with shapes that were not seen before runs the function as it is, the next one captures it, and those after
replay the graph. Inputs are copied to where the graph reads them, and outputs away from where it writes. What cannot
be captured, because it asks the device for a number on its way, is run as it is for ever.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ... import compat
from ...compat import copy_each


def flatten(value: Any) -> tuple[list[Tensor], Any]:
    """Take a tree of tensors apart; what is None in it is a part of its shape."""
    leaves, shape = compat.flatten(value)
    return [leaf for leaf in leaves if leaf is not None], (shape, tuple(leaf is None for leaf in leaves))


def unflatten(tensors: list[Tensor], form: Any) -> Any:
    """Undo `flatten`."""
    shape, missing = form
    rest = iter(tensors)
    return compat.unflatten([None if hole else next(rest) for hole in missing], shape)


def captured(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, replayed from a graph where its arguments are trees of tensors on a GPU."""
    seen: dict[Any, Callable[[list[Tensor]], Any] | None] = {}

    def call(*arguments: Any) -> Any:
        leaves, shape = flatten(arguments)
        kind = (shape, tuple((leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves))
        if kind not in seen:
            seen[kind] = None
            return function(*arguments)
        made = seen[kind]
        if made is None:
            try:
                made = _record(function, leaves, shape)
            except RuntimeError:  # the device was asked for a number
                made = lambda values: function(*unflatten(values, shape))  # noqa: E731
            seen[kind] = made
        return made(leaves)

    return call


@contextmanager
def _no_questions() -> Iterator[None]:
    """Refuse to wait for the device: within a capture that would fail, and leave torch's generators unusable."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # it may not find all; a capture finds the rest
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _stored(leaf: Tensor) -> Tensor:
    """Return a tensor without its copies along axes on which it repeats itself (see `expand`)."""
    for axis, (size, stride) in enumerate(zip(leaf.shape, leaf.stride(), strict=True)):
        if stride == 0 and size > 1:
            leaf = leaf.narrow(axis, 0, 1)
    return leaf


def _record(function: Callable[..., Any], leaves: list[Tensor], shape: Any) -> Callable[[list[Tensor]], Any]:
    """Capture the function; return its replay as a function of the flat arguments."""
    inputs = [_stored(leaf).clone() for leaf in leaves]
    given = [place.expand(leaf.shape) for place, leaf in zip(inputs, leaves, strict=True)]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), _no_questions():
        function(*unflatten(given, shape))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs, form = flatten(function(*unflatten(given, shape)))

    def replay(values: list[Tensor]) -> Any:
        copy_each(inputs, [_stored(value) for value in values])
        graph.replay()
        return unflatten([output.clone() for output in outputs], form)

    return replay
