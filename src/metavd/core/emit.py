"""What clients receive. Each builder adds entries to what another one emits.

Names that start with "server." stay on the server; those that start with "server.client." have one row a
participating client (N rows), and belong to that client alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional

from ..tree import Params
from . import rng
from .model import xavier
from .types import Admit, Batch, Emit, Model, Objective
from .variational import Noise, clamp, per_weight, rates

SERVER = "server."
OWNED = "server.client."
EMBEDDING = "server.client.embedding"


def shared(model: Model) -> Emit:
    """Everyone receives the model's parameters (and the masks that the server may have made for them)."""

    def apply(params: Params, client: Tensor, round: Tensor) -> Params:  # noqa: ARG001
        return {name: value for name, value in params.items() if not name.startswith(SERVER)}

    return Emit(model.init, apply)


def row(table: Tensor, client: Tensor) -> Tensor:
    """Return a client's row; a client that was never seen gets the mean of all rows."""
    return torch.where(client < 0, table.mean(0), table[client.clamp(min=0)])


def _bounded(noise: Noise, stored: Tensor) -> Tensor:
    return clamp(stored, noise.low - noise.offset, noise.high - noise.offset, through=noise.through)


def _start(model: Model, noise: Noise, layer: str, like: Params, *lead: int) -> Tensor:
    weight = like[f"{layer}.weight"]
    return weight.new_full((*lead, *noise.shape(model.layers[layer])), noise.start)


def one_for_all(base: Emit, model: Model, noise: Noise) -> Emit:
    """VD: one spread, learned like any other parameter, for all clients."""

    def init(key: Tensor) -> Params:
        params = base.init(key)
        return params | {noise.entry(layer): _start(model, noise, layer, params) for layer in noise.layers}

    def apply(params: Params, client: Tensor, round: Tensor) -> Params:
        received = base.apply(params, client, round)
        return received | {noise.entry(layer): _bounded(noise, params[noise.entry(layer)]) for layer in noise.layers}

    return Emit(init, apply)


def one_per_client(base: Emit, model: Model, noise: Noise, num_clients: int) -> Emit:
    """EnsembleVD: every participating client has a spread of its own."""

    def init(key: Tensor) -> Params:
        params = base.init(key)
        return params | {
            OWNED + noise.entry(layer): _start(model, noise, layer, params, num_clients) for layer in noise.layers
        }

    def apply(params: Params, client: Tensor, round: Tensor) -> Params:
        received = base.apply(params, client, round)
        for layer in noise.layers:
            received[noise.entry(layer)] = _bounded(noise, row(params[OWNED + noise.entry(layer)], client))
        return received

    return Emit(init, apply)


def embedding_size(num_clients: int) -> int:
    """1 + N/4 as in the paper, but at most 64, so that a round does not cost more with every client added."""
    return min(1 + num_clients // 4, 64)


def hypernetwork(params: Params, embedding: Tensor) -> Tensor:
    """Embedding (d,) -> one number a posterior: linear layers with LeakyReLU(0.1) between them."""
    depth = sum(name.startswith("server.hyper.") and name.endswith(".weight") for name in params)
    value = embedding
    for i in range(depth):
        value = functional.linear(value, params[f"server.hyper.{i}.weight"], params[f"server.hyper.{i}.bias"])
        value = value if i == depth - 1 else functional.leaky_relu(value, 0.1)
    return value


def meta(
    base: Emit,
    model: Model,
    noise: Noise,
    num_clients: int,
    *,
    size: int | None = None,
    width: int = 200,
    depth: int = 3,
    released: bool = False,
) -> Emit:
    """MetaVD: a hypernetwork predicts each client's spread from the client's learned embedding.

    The prediction is a distance from the initial spread, so at the start it is near 0 for everyone. released=True
    repeats the released code's second clamp: h is cut to +-8.5, and the half of that which lies below the layer's own
    floor gets no gradient there.
    """
    shapes = {layer: noise.shape(model.layers[layer]) for layer in noise.layers}
    outputs = sum(math.prod(shape) for shape in shapes.values())
    embedded = size or embedding_size(num_clients)
    widths = [embedded, *[width] * depth, outputs]

    def init(key: Tensor) -> Params:
        params = base.init(key)
        like = next(iter(params.values()))
        params[EMBEDDING] = rng.normal(rng.fold(key, 20_000), [num_clients, embedded], like.dtype)
        for i, (inputs, units) in enumerate(pairwise(widths)):
            for j, (part, shape) in enumerate((("weight", [units, inputs]), ("bias", [units]))):
                empty = torch.empty(shape, dtype=like.dtype, device=like.device)
                params[f"server.hyper.{i}.{part}"] = xavier(rng.fold(key, 20_001 + i, j), part, empty)
        return params

    def apply(params: Params, client: Tensor, round: Tensor) -> Params:
        received = base.apply(params, client, round)
        output = hypernetwork(params, row(params[EMBEDDING], client))
        pieces = torch.split(output, [math.prod(shape) for shape in shapes.values()])
        for (layer, shape), piece in zip(shapes.items(), pieces, strict=True):
            if released:
                value = noise.start + clamp(piece, -8.5, 8.5, through=False)
            else:
                value = _bounded(noise, noise.start + piece)
            received[noise.entry(layer)] = value.reshape(shape)
        return received

    return Emit(init, apply)


def constant(base: Emit, model: Model, noise: Noise, value: float) -> Emit:
    """Replace everyone's spread by one number: the released code's evaluation, where it is -8.5."""

    def apply(params: Params, client: Tensor, round: Tensor) -> Params:
        received = base.apply(params, client, round)
        for layer in noise.layers:
            shape = noise.shape(model.layers[layer])
            received[noise.entry(layer)] = received[f"{layer}.weight"].new_full(shape, value - noise.offset)
        return received

    return Emit(base.init, apply)


def dropping(base: Emit, noise: Noise, *, threshold: float = 0.9, start: int = 150, released: bool = False) -> Emit:
    """From round `start` on, weights whose dropout rate exceeds the threshold are masked for the client.

    A mask travels as an entry of its own. The layer reads its weight through the mask, so a masked weight is neither
    sent nor used nor moved. released=True repeats the released code, which sends zeros instead and lets them regrow.
    """
    # The released code takes the rate from the hypernetwork's output before the layer's clamp.
    judged = replace(noise, low=-17.0) if released else noise

    def apply(params: Params, client: Tensor, round: Tensor) -> Params:
        received = base.apply(params, client, round)
        for layer, rate in rates(judged, received).items():
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


def kept(base: Emit, layers: Sequence[str]) -> Emit:
    """Send zeros in place of masked weights, and "keep" for the mask: the released code's training under SNIP.

    The layer then reads its weight as it is, so the clip of a step still counts the gradients of masked weights.
    """

    def apply(params: Params, client: Tensor, round: Tensor) -> Params:
        received = base.apply(params, client, round)
        for layer in layers:
            received[f"{layer}.keep"] = received.pop(f"{layer}.mask")
            received[f"{layer}.weight"] = received[f"{layer}.weight"] * received[f"{layer}.keep"]
        return received

    return Emit(base.init, apply)


def zeroed(base: Emit, layers: Sequence[str]) -> Emit:
    """Send zeros in place of masked weights, and no mask: the released code's evaluation under SNIP."""

    def apply(params: Params, client: Tensor, round: Tensor) -> Params:
        received = base.apply(params, client, round)
        for layer in layers:
            mask = received.pop(f"{layer}.mask")
            received[f"{layer}.weight"] = received[f"{layer}.weight"] * mask
        return received

    return Emit(base.init, apply)


def fitted(emit: Emit, objective: Objective, *, steps: int, lr: float) -> Admit:
    """Admit an unseen client by fitting its embedding to its data, the hypernetwork held fixed.

    e <- e - lr J_e^T grad L(emit(e); batch)        from the mean of the known embeddings
    """

    def admit(params: Params, round: Tensor, batches: Sequence[Batch]) -> Params:
        only = torch.zeros((), dtype=torch.int64, device=round.device)

        def received(embedding: Tensor) -> Params:
            return emit.apply({**params, EMBEDDING: embedding[None]}, only, round)

        embedding = params[EMBEDDING].mean(0)
        for step in range(steps):
            for batch in batches[:1]:
                fresh = batch._replace(key=rng.fold(batch.key, 40_000 + step))

                def loss(value: Tensor, batch: Batch = fresh) -> Tensor:
                    sent = received(value)
                    return objective(sent, batch, sent)

                embedding = embedding - lr * grad(loss)(embedding)
        return received(embedding)

    return admit
