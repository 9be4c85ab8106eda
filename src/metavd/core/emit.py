"""What clients receive. Each builder adds entries to what another one emits.

Names that start with "server." stay on the server; those that start with "server.client." have one row per
participating client (N rows), and belong to that client alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from .. import tree
from ..ops.posterior import clamp
from ..tree import Params
from . import rng
from .model import xavier
from .posterior import Posterior, entries, per_weight
from .types import NEW, Admit, Batch, Emit, Model, Objective

SERVER = "server."
OWNED = "server.client."
EMBEDDING = "server.client.embedding"
HYPER, OWN_HYPER = "server.hyper.", "server.client.hyper."
ONE_EMBEDDING = "server.embedding"
"""(1, d) in place of a table, where all clients share it."""
Shares = Literal["network", "all", "nothing"]
"""What clients share of what predicts their spreads: the network, its input too, or neither."""
_AVERAGED = 1024
"""Most known clients over which a newcomer's prediction is averaged."""
_AT_ONCE = 16
"""Networks of clients that are asked at once."""


def shared(model: Model) -> Emit:
    """Everyone receives the model's parameters (and the masks that the server may have made for them)."""

    def apply(params: Params, client: Tensor, round: Tensor) -> Params:  # noqa: ARG001
        return tree.without(params, SERVER)

    return Emit(model.init, apply)


def without(base: Emit, private: Callable[[str], bool]) -> Emit:
    """Leave out entries that clients keep for themselves: they are neither on the server nor in a message."""

    def shown(params: Params) -> Params:
        return tree.select(params, lambda name: not private(name))

    return Emit(
        lambda key: shown(base.init(key)), lambda params, client, round: shown(base.apply(params, client, round))
    )


def joined_by(base: Emit, first: Callable[[Tensor, Tensor], Params]) -> Emit:
    """Add entries of the server's own that everyone receives; `first(key, a parameter)` makes them, of its kind."""

    def init(key: Tensor) -> Params:
        params = base.init(key)
        return params | first(key, next(iter(params.values())))

    return Emit(init, base.apply)


def alike(base: Emit) -> Emit:
    """Everyone receives the same: of what each client would own, there is one row, which all share."""

    def init(key: Tensor) -> Params:
        return {name: value[:1] if name.startswith(OWNED) else value for name, value in base.init(key).items()}

    return Emit(init, lambda params, client, round: base.apply(params, torch.zeros_like(client), round))


def row(table: Tensor, client: Tensor) -> Tensor:
    """Return a client's row; a client that was never seen gets the mean of all rows."""
    return torch.where(client < 0, table.mean(0), table[client.clamp(min=0)])


def _filled(model: Model, posterior: Posterior, params: Params, value: Callable[[str], float], *lead: int) -> Params:
    """Return all entries of a posterior, each holding one number, with some leading axes."""
    return {
        name: params[f"{layer}.weight"].new_full((*lead, *shape), value(name))
        for layer, name, shape in entries(posterior, model.layers)
    }


def learned(base: Emit, model: Model, posterior: Posterior, owners: int = 0) -> Emit:
    """Learn spreads like any other parameter: one for all clients (VD), or one for each of `owners` (EnsembleVD)."""
    prefix, lead = (OWNED, (owners,)) if owners else ("", ())

    def init(key: Tensor) -> Params:
        params = base.init(key)
        first = _filled(model, posterior, params, posterior.start, *lead)
        return params | {prefix + name: value for name, value in first.items()}

    def apply(params: Params, client: Tensor, round: Tensor) -> Params:
        received = base.apply(params, client, round)
        for _, name, _ in entries(posterior, model.layers):
            stored = row(params[prefix + name], client) if owners else params[name]
            received[name] = posterior.bounded(name, stored)
        return received

    return Emit(init, apply)


def embedding_size(num_clients: int) -> int:
    """1 + N/4 as in the paper, but at most 64, so that a round does not cost more with every client added."""
    return min(1 + num_clients // 4, 64)


def hypernetwork(params: Params, embedding: Tensor) -> Tensor:
    """Embedding (d,) -> one number per spread: linear layers with LeakyReLU(0.1) between them."""
    return _layer(params, _depth(params), hidden_units(params, embedding))


def hidden_units(params: Params, embedding: Tensor) -> Tensor:
    """Embeddings (..., d) -> what the hypernetwork's last layer is given."""
    value = embedding
    for i in range(_depth(params)):
        value = functional.leaky_relu(_layer(params, i, value), 0.1)
    return value


def _depth(params: Params) -> int:
    """Return the number of the hypernetwork's last layer."""
    return sum(name.startswith(HYPER) and name.endswith(".weight") for name in params) - 1


def _layer(params: Params, i: int, value: Tensor) -> Tensor:
    return functional.linear(value, params[f"{HYPER}{i}.weight"], params[f"{HYPER}{i}.bias"])


def meta(
    base: Emit,
    model: Model,
    posterior: Posterior,
    num_clients: int,
    *,
    size: int | None = None,
    width: int = 200,
    depth: int = 3,
    released: bool = False,
    shares: Shares = "network",
) -> Emit:
    """MetaVD: a hypernetwork predicts each client's spread from the client's learned embedding.

        network    lambda_i = h(e_i)      MetaVD
        all        lambda_i = h(e)        VD, learned by MetaVD's step: one spread for all
        nothing    lambda_i = h_i(e_i)    EnsembleVD, learned by MetaVD's step: nothing is learned from other clients

    The prediction is a distance from the initial spread, so at the start it is near 0 for everyone. released=True
    repeats the released code's second clamp: h is cut to +-8.5, and the half of that which lies below the layer's own
    floor gets no gradient there.
    """
    shapes = {name: shape for _, name, shape in entries(posterior, model.layers)}
    outputs = sum(math.prod(shape) for shape in shapes.values())
    embedded = size or embedding_size(num_clients)
    widths = [embedded, *[width] * depth, outputs]

    def init(key: Tensor) -> Params:
        params = base.init(key)
        like = next(iter(params.values()))
        drawn = rng.normal(rng.fold(key, 20_000), [num_clients, embedded], like.dtype)
        params |= {ONE_EMBEDDING: drawn[:1].clone()} if shares == "all" else {EMBEDDING: drawn}
        for i, (inputs, units) in enumerate(pairwise(widths)):
            for j, (part, shape) in enumerate((("weight", [units, inputs]), ("bias", [units]))):
                empty = torch.empty(shape, dtype=like.dtype, device=like.device)
                first = xavier(rng.fold(key, 20_001 + i, j), part, empty)
                if shares == "nothing":
                    params[f"{OWN_HYPER}{i}.{part}"] = first.expand(num_clients, *shape).contiguous()
                else:
                    params[f"{HYPER}{i}.{part}"] = first
        return params

    def apply(params: Params, client: Tensor, round: Tensor) -> Params:
        received = base.apply(params, client, round)
        output = predicted(params, client)
        pieces = torch.split(output, [math.prod(shape) for shape in shapes.values()])
        for (name, shape), piece in zip(shapes.items(), pieces, strict=True):
            if released:
                value = posterior.start(name) + clamp(piece, -8.5, 8.5, "released")
            else:
                value = posterior.bounded(name, posterior.start(name) + piece)
            received[name] = value.reshape(shape)
        return received

    return Emit(init, apply)


def predicted(params: Params, client: Tensor) -> Tensor:
    """Return what the hypernetwork, the client's own or everyone's, predicts for a client."""
    own = {HYPER + name: row(table, client) for name, table in tree.under(params, OWN_HYPER).items()}
    given = params[ONE_EMBEDDING][0] if ONE_EMBEDDING in params else row(params[EMBEDDING], client)
    return hypernetwork(own or params, given)


def constant(base: Emit, model: Model, posterior: Posterior, value: float) -> Emit:
    """Replace everyone's spread by one number: the released code's evaluation, where it is -8.5."""

    def apply(params: Params, client: Tensor, round: Tensor) -> Params:
        received = base.apply(params, client, round)
        return received | _filled(model, posterior, received, lambda name: posterior.stored(name, value))

    return Emit(base.init, apply)


def dropping(
    base: Emit, posterior: Posterior, *, threshold: float = 0.9, start: int = 150, released: bool = False
) -> Emit:
    """From round `start` on, weights whose dropout rate exceeds the threshold are masked for the client.

    A mask travels as an entry of its own. The layer reads its weight through the mask, so a masked weight is neither
    sent nor used nor moved. released=True repeats the released code, which sends zeros instead and lets them regrow.
    """

    def apply(params: Params, client: Tensor, round: Tensor) -> Params:
        received = base.apply(params, client, round)
        # The released code takes the rate from the hypernetwork's output before the layer's clamp.
        for layer, rate in posterior.rates(received, clamped=not released).items():
            mask = ((rate <= threshold) | (round < start)).to(rate.dtype).detach()
            if released:
                weight = received[f"{layer}.weight"]
                received[f"{layer}.weight"] = weight * per_weight(mask, weight)
            else:
                received[f"{layer}.mask"] = mask
        return received

    return Emit(base.init, apply)


def unmasked(base: Emit, layers: Sequence[str]) -> Emit:
    """Add masks of ones for the server to change later (SNIP)."""

    def init(key: Tensor) -> Params:
        params = base.init(key)
        return params | {f"{layer}.mask": torch.ones_like(params[f"{layer}.weight"]) for layer in layers}

    return Emit(init, base.apply)


def zeroed(base: Emit, layers: Sequence[str], *, keep: bool) -> Emit:
    """Send zeros in place of masked weights, and no mask: the released code's evaluation under SNIP.

    With `keep`, its training: the mask is sent as "keep". The layer then reads its weight as it is, so the clip of a
    step still counts the gradients of masked weights.
    """

    def apply(params: Params, client: Tensor, round: Tensor) -> Params:
        received = base.apply(params, client, round)
        for layer in layers:
            mask = received.pop(f"{layer}.mask")
            received[f"{layer}.weight"] = received[f"{layer}.weight"] * mask
            if keep:
                received[f"{layer}.keep"] = mask
        return received

    return Emit(base.init, apply)


def as_newcomer(emit: Emit) -> Admit:
    """Admit an unseen client with what is emitted for one: of what clients own it gets the mean."""

    def admit(params: Params, round: Tensor, batches: Sequence[Batch]) -> Params:  # noqa: ARG001
        return emit.apply(params, torch.full((), NEW, dtype=torch.int64, device=round.device), round)

    return admit


def averaged(emit: Emit) -> Admit:
    """Admit an unseen client with the mean of what the hypernetwork predicts for the known ones.

        h = mean_i h(e_i) = W mean_i a(e_i) + b        a: the hidden units before the last layer

    The mean embedding is shorter than any client's, so h(mean_i e_i) asks the network far from where it learned. The
    last layer is linear, so hidden units are averaged in place of outputs, and the cost is that of small layers. Of
    more than 1,024 clients the mean is over 1,024 draws of them, always the same.
    """

    def admit(params: Params, round: Tensor, batches: Sequence[Batch]) -> Params:  # noqa: ARG001
        only = torch.zeros((), dtype=torch.int64, device=round.device)
        last = _depth(params)
        units = hidden_units(params, some_rows(params[EMBEDDING])).mean(0, keepdim=True)
        layer = {f"{HYPER}0.{part}": params[f"{HYPER}{last}.{part}"] for part in ("weight", "bias")}
        return emit.apply(tree.without(params, HYPER) | layer | {EMBEDDING: units}, only, round)

    return admit


def averaged_apart(emit: Emit) -> Admit:
    """Admit an unseen client with the mean of what the known ones' own networks predict for them; see `averaged`."""

    def admit(params: Params, round: Tensor, batches: Sequence[Batch]) -> Params:  # noqa: ARG001
        only = torch.zeros((), dtype=torch.int64, device=round.device)
        clients = some_rows(torch.arange(len(params[EMBEDDING]), device=round.device))
        each = vmap(predicted, (None, 0), chunk_size=_AT_ONCE)(params, clients)
        mean = each.mean(0, keepdim=True)
        told = {f"{OWN_HYPER}0.weight": mean.new_zeros(1, mean.shape[1], 1), f"{OWN_HYPER}0.bias": mean}
        return emit.apply(tree.without(params, OWN_HYPER) | told | {EMBEDDING: mean.new_zeros(1, 1)}, only, round)

    return admit


def some_rows(table: Tensor) -> Tensor:
    """Return the rows of a table, or of a long one 1,024 that are drawn, the same ones at every call."""
    if len(table) <= _AVERAGED:
        return table
    drawn = rng.bits(rng.key(20_100, table.device), [_AVERAGED]) & (1 << 62) - 1
    return table[drawn % len(table)]


def fitted(emit: Emit, objective: Objective, *, steps: int, lr: float) -> Admit:
    """Admit an unseen client by fitting its embedding to its data, the hypernetwork held fixed.

    e <- e - lr J_e^T grad L(emit(e); batch)        from the mean of the known embeddings
    """

    def admit(params: Params, round: Tensor, batches: Sequence[Batch]) -> Params:
        only = torch.zeros((), dtype=torch.int64, device=round.device)

        def received(embedding: Tensor) -> Params:
            return emit.apply({**params, EMBEDDING: embedding[None]}, only, round)

        embedding = params[EMBEDDING].mean(0)
        for step in range(steps if batches else 0):
            fresh = batches[0]._replace(key=rng.fold(batches[0].key, 40_000 + step))

            def loss(value: Tensor, batch: Batch = fresh) -> Tensor:
                sent = received(value)
                return objective(sent, batch, sent)

            embedding = embedding - lr * grad(loss)(embedding)
        return received(embedding)

    return admit
