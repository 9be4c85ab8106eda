"""Differential privacy of clients: what a server is told is a clipped sum with noise on it, and nothing else.

    x_i <- (answer_i - sent) min(1, clip / |answer_i - sent|)       over the whole answer
    m    = (sum_i x_i + z clip e) / cohort,   e ~ N(0, I)           cohort: the expected number of clients

The method's own server then takes sent + m as the answer of one client that does not exist, so that all it does is
post-processing of m. Everyone must be sent the same, see `emit.alike`.

Shape letters: C clients.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import vmap

from .. import tree
from ..tree import Params
from . import rng
from .accountant import Mechanism
from .local import movable
from .types import Emit, Server, ServerState, Update, Veil

CLIP = "server.dp.clip"
"""An adaptive clip, among the server's parameters."""
NOISE, COUNT = 80_000, 80_001
"""Tags of keys: of the noise on a sum, and of that on the count of short answers."""
_ROOM = 2.0
"""Honest answers with noise are never so many times as long as expected."""

Normal = Callable[[Tensor, Sequence[int], torch.dtype], Tensor]
"""(key, shape, dtype) -> standard normal numbers, as `rng.normal`."""


def secret(key: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return standard normal numbers that nobody can draw again: from the operating system, whatever the key.

    Box-Muller on 53 bits each.
    """
    count = math.prod(shape)
    drawn = torch.frombuffer(bytearray(os.urandom(16 * max(count, 1))), dtype=torch.int64)[: 2 * count]
    uniform = (((drawn >> 11) & ((1 << 53) - 1)).to(torch.float64) + 0.5) * 2.0**-53
    radius, angle = uniform.reshape(2, -1)
    made = torch.sqrt(-2.0 * torch.log(radius)) * torch.cos(2.0 * math.pi * angle)
    return made.reshape(tuple(shape)).to(dtype).to(key.device)


def lengths(moves: Params) -> Tensor:
    """Return the length of each client's whole answer, (C,)."""
    return tree.norms(moves, torch.float64)


def shortened(moves: Params, length: Tensor, limit: float | Tensor) -> Params:
    """Return moves (C, ...) of at most this length; one that is not finite moves nothing.

    Nor does one so long that its scale is below the smallest normal number: that has too few digits to bound a length.
    """
    scale = (limit / length).clamp(max=1.0)  # a move of length 0 has an infinite one before the clamp
    finite = torch.isfinite(length)

    def cut(value: Tensor) -> Tensor:
        sound = finite & (scale >= torch.finfo(value.dtype).tiny)
        return torch.where(tree.per_client(sound, value), value * tree.per_client(scale.to(value.dtype), value), 0.0)

    return tree.map(cut, moves)


def released(base: Server, emit: Emit, mechanism: Mechanism, normal: Normal = rng.normal) -> Server:
    """Let a server learn from the noisy mean alone.

    An adaptive clip follows a quantile of the lengths (Andrew et al., NeurIPS 2021):

        clip <- clip exp(-rate (b - quantile)),   b = 1/2 + (sum_i (1[|x_i| <= clip] - 1/2) + noise) / cohort

    Where clients add the noise, the server only adds up, and cuts what no honest client sends.
    """
    m = mechanism

    def init(key: Tensor) -> ServerState:
        state = base.init(key)
        return state._replace(params=state.params | {CLIP: state.round.new_tensor(m.clip)}) if m.adaptive else state

    def limit_of(state: ServerState, like: Params) -> Tensor | float:
        if m.sites:
            weights = sum(value.numel() for value in like.values())
            return m.clip * (1.0 + _ROOM * m.multiplier * math.sqrt(weights / m.cohort))
        return state.params[CLIP] if m.adaptive else m.clip

    def added(moves: Params, limit: Tensor | float, state: ServerState) -> Params:
        """Return the part of the mean that these clients are, their moves cut; and who stayed within the clip."""
        length = lengths(moves)
        share = torch.ones_like(length) / length.new_full((), float(m.cohort))
        found = {
            f"mean/{name}": torch.einsum("c,c...->c...", share.to(value.dtype), value).sum(0)
            for name, value in shortened(moves, length, limit).items()
        }
        if not m.adaptive:
            return found
        clip = state.params[CLIP]
        return found | {"within": ((length <= clip).to(clip.dtype) - 0.5).sum()}

    def update(state: ServerState, update: Update) -> ServerState:
        before = state._replace(params=tree.select(state.params, lambda name: name != CLIP))
        nobody = torch.zeros(1, dtype=torch.int64, device=state.round.device)
        sent = vmap(emit.apply, (None, 0, None))(before.params, nobody, state.round)
        like = movable(sent)
        # Of a round without an answer there is nothing but the noise.
        answered = {name: update.params[name] - update.sent[name] for name in like if name in update.params}
        limit = limit_of(state, like)
        sums = update.sums or added(answered or tree.unstack(like, slice(0)), limit, state)
        key = rng.fold(state.key, NOISE, state.round.to(torch.int64))
        mean = {}
        for i, name in enumerate(like):
            mean[name] = sums[f"mean/{name}"]
            if m.multiplier and not m.sites:
                drawn = normal(rng.fold(key, i), mean[name].shape, mean[name].dtype)
                mean[name] = mean[name] + (m.sum_noise * limit / m.cohort) * drawn
        moved = {name: value[None] for name, value in mean.items()}
        told = Update(nobody, sent | tree.map(torch.add, like, moved), state.round.new_ones(1), sent, moved)
        new = base.update(before, told)
        if not m.adaptive:
            return new
        clip = state.params[CLIP]
        count = sums["within"]
        if m.multiplier:
            count = count + m.count_noise * normal(rng.fold(key, COUNT), (), clip.dtype)
        follows = clip * torch.exp(-m.clip_rate * (0.5 + count / m.cohort - m.quantile))
        return new._replace(params=new.params | {CLIP: follows})

    def take(state: ServerState, update: Update, weight: Tensor) -> Params:  # noqa: ARG001
        moves = {name: value - update.sent[name] for name, value in movable(update.params).items()}
        return added(moves, limit_of(state, tree.unstack(moves, slice(1))), state)

    return Server(init, update, take)


def veiled(mechanism: Mechanism, normal: Normal = rng.normal) -> Veil:
    """Let a client clip its answer and add its part of the noise: of n clients, a variance of 1/n each."""
    m = mechanism

    def veil(received: Params, answer: Params, key: Tensor) -> Params:
        moves = {name: (answer[name] - value)[None] for name, value in movable(received).items()}
        std = m.multiplier * m.clip / math.sqrt(m.cohort) if m.multiplier else 0.0
        sent = dict(answer)
        for i, (name, value) in enumerate(shortened(moves, lengths(moves), m.clip).items()):
            noise = std * normal(rng.fold(key, i), value.shape[1:], value.dtype) if std else 0.0
            sent[name] = received[name] + (value[0] + noise)
        return sent

    return veil
