"""Which layer of a module makes the logits, and which one comes before it: found by following one forward pass.

Every linear or convolutional layer leaves its mark on what it returns. From the logits the pass is walked backwards,
as autograd would: the first mark on every way is an output layer, and the layer before it is the one with the longest
way of layers behind it, of several the one with the most weights. A shortcut beside a block is shorter than the block,
or as long and thinner, so it is never taken for the main road; the order in which a module registers its layers does
not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..compat import dropout_rate, is_batch_norm
from ..errors import UserError

_SQUASHES = ("SoftmaxBackward0", "SigmoidBackward0")
"""What autograd calls a last step that makes probabilities of logits."""


class Traced(NamedTuple):
    """What one forward pass tells of a module."""

    head: str
    """The layer whose output becomes the logits."""
    before: str
    """The deepest layer before it that is called once with weights of its own; the head itself where there is none."""
    num_classes: int
    """How many logits a row gets."""
    called: tuple[str, ...]
    """The layers in the order in which they are called, each where it is called last; the head ends them."""


def check_instance(module: Any) -> None:
    """Refuse what is no network, or a network that was not built yet."""
    if isinstance(module, type):
        raise UserError(f"module is the class {module.__name__}, but must be an instance of it: {module.__name__}(...)")
    if not isinstance(module, nn.Module):
        raise UserError(f"module is a {type(module).__name__}, but must be an nn.Module or what from_module returns")
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params():  # type: ignore[misc]
            kind = type(layer).__name__
            raise UserError(
                f"layer {name!r} ({kind}) has no weights yet; call the module once on rows, which makes them"
            )


def check_layers(module: nn.Module) -> None:
    """Refuse layers that mix the rows of clients, and those that draw random numbers of their own."""
    for name, layer in module.named_modules():
        kind = type(layer).__name__
        if is_batch_norm(layer) or getattr(layer, "running_mean", None) is not None:
            raise UserError(
                f"layer {name!r} ({kind}) mixes rows or keeps running statistics of them, which "
                "clients with different data cannot share; use GroupNorm or LayerNorm instead"
            )
        if dropout_rate(layer) > 0:
            raise UserError(
                f"layer {name!r} ({kind}) draws random numbers of its own, which no seed here governs; "
                "remove it and use a method with +dropout instead"
            )
        if isinstance(layer, nn.MultiheadAttention | nn.RNNBase) and layer.dropout > 0:
            raise UserError(
                f"layer {name!r} ({kind}) has dropout={layer.dropout:g} inside and draws random numbers of its own, "
                "which no seed here governs; build it with dropout=0 and use a method with +dropout instead"
            )


def trace(module: nn.Module, layers: Mapping[str, nn.Module], example: Tensor) -> Traced:
    """Follow rows (B, ...) through a module; `layers` are those that may carry a posterior, by name."""
    names: dict[Any, str] = {}
    order: list[Any] = []

    def mark(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            order.append(output.grad_fn)
            names[output.grad_fn] = name

        return hook

    hooks = [layer.register_forward_hook(mark(name)) for name, layer in layers.items()]
    try:
        logits = _logits(module, example)
    finally:
        for hook in hooks:
            hook.remove()
    # A layer that ran without gradients has no place in the graph; nothing before the head is looked for behind it.
    names.pop(None, None)
    calls = Counter(names[node] for node in order if node is not None)
    heads = list(dict.fromkeys(names[node] for node in _first(logits.grad_fn, names)))
    if len(heads) > 1:
        told = " and ".join(repr(name) for name in sorted(heads, key=list(layers).index))
        raise UserError(
            f"the module's logits come from {len(heads)} layers, {told}, but a network has one output layer; let it "
            "return the logits of one of them, or join them by one more nn.Linear"
        )
    units = [layers[name].weight.shape[0] for name in heads]  # type: ignore[index]
    if units != [logits.shape[1]]:
        last = f"the last layer called before them is {heads[0]!r} with {units[0]} units" if heads else "none is called"
        raise UserError(
            f"the module's {logits.shape[1]} logits are not the output of an nn.Linear or nn.Conv2d layer ({last}); "
            "let such a layer make them, called as a module and not by torch.nn.functional"
        )
    head = heads[0]
    if calls[head] > 1:
        raise UserError(
            f"the output layer {head!r} is called {calls[head]} times in one pass; give the output a layer of its own"
        )
    end = next(node for node, name in names.items() if name == head)
    depth = _depths(end, names)
    uses = Counter(id(layer.weight) for layer in layers.values())
    own = [
        node
        for node in order
        if node in depth and calls[names[node]] == 1 and uses[id(layers[names[node]].weight)] == 1
    ]
    sizes = {node: layers[names[node]].weight.numel() for node in own}  # type: ignore[operator]
    deepest = max(own, key=lambda node: (depth[node], sizes[node], order.index(node)), default=None)
    called = tuple(dict.fromkeys(names[node] for node in order[order.index(end) :: -1] if node is not None))[::-1]
    return Traced(head, head if deepest is None else names[deepest], logits.shape[1], called)


def _logits(module: nn.Module, example: Tensor) -> Tensor:
    """Run the module so that every parameter leaves a trace, and check what it returns."""
    given = {name: value.detach().requires_grad_() for name, value in module.named_parameters()}
    rows = tuple(example.shape[1:])
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        before = torch.random.get_rng_state()
        try:
            logits = functional_call(module, given, (example,))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            why = str(error).partition("\n")[0]
            if isinstance(error, IndexError) and not example.is_floating_point():
                most = int(example.max())
                need = f"an nn.Embedding of them needs {most + 1} entries"
                why = f"{why}; the data have token ids 0 to {most}, so that {need}"
            raise UserError(f"the module cannot take rows of shape {rows}: {why}") from error
        drew = not torch.equal(before, torch.random.get_rng_state())
    if not isinstance(logits, Tensor):
        what = f"a {type(logits).__name__}" + (f" of {len(logits)}" if isinstance(logits, tuple | list) else "")
        raise UserError(f"the module returns {what}, but must return the logits alone, a tensor (rows, classes)")
    if logits.dim() != 2 or len(logits) != len(example):
        raise UserError(
            f"the module returns shape {tuple(logits.shape)} for {len(example)} rows of shape {rows}, but must return "
            "logits (rows, classes)"
        )
    if type(logits.grad_fn).__name__ in _SQUASHES:
        raise UserError(
            "the module ends in a softmax or sigmoid and returns probabilities, but must return logits, of which the "
            "loss takes the softmax itself; remove that last step"
        )
    if drew:
        raise UserError(
            "the module draws random numbers in its forward pass, which no seed here governs (torch.nn.functional."
            "dropout does so); remove them and use a method with +dropout instead"
        )
    return logits


def _before(node: Any) -> Iterator[Any]:
    return (each for each, _ in node.next_functions if each is not None)


def _first(start: Any, marked: Mapping[Any, str]) -> list[Any]:
    """Return the marked nodes that can be reached backwards without passing another."""
    found, seen, waiting = [], {start}, [] if start is None else [start]
    while waiting:
        node = waiting.pop()
        if node in marked:
            found.append(node)
            continue
        new = [each for each in _before(node) if each not in seen]
        seen.update(new)
        waiting += new
    return found


def _depths(end: Any, marked: Mapping[Any, str]) -> dict[Any, int]:
    """Return, of everything that a node is made of, how many marked nodes lie on the longest way to it."""
    depth: dict[Any, int] = {}
    waiting = [end]
    while waiting:
        node = waiting[-1]
        missing = [each for each in _before(node) if each not in depth]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        depth[node] = max((depth[each] for each in _before(node)), default=0) + (node in marked)
    del depth[end]
    return depth
