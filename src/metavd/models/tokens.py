"""Networks for rows of token ids: an LSTM and a small transformer.

Both are written with products and sums alone, in a loop over places where there must be one: torch's own LSTM and
attention have no rule for vmap over weights, or draw random numbers. Id 0 is padding, before a text, so that the last
place always holds a token.

Shape letters: B rows, L tokens of a row, E width, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .blocks import Layers, sequential
from .catalogue import network

_IDS = "rows of token ids"


class Lstm(nn.Module):
    """(B, L) ids -> (B, E): what a long short-term memory knows after the last token.

    i, f, o = sigmoid(W x + U h),  g = tanh(W x + U h);   c' = f c + i g,   h' = o tanh(c')
    """

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.embed = nn.Embedding(tokens, width)
        self.inputs = nn.Linear(width, 4 * width)
        self.hidden = nn.Linear(width, 4 * width, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Read the tokens one after another; padding leaves the memory as it is."""
        ids = ids.to(torch.int64)
        width = self.width
        given = self.inputs(self.embed(ids))
        # A forget gate that starts open keeps what came first.
        given = given + torch.arange(4 * width, device=given.device).div(width, rounding_mode="floor").eq(1)
        real = (ids != 0)[..., None]
        state = cell = torch.zeros_like(given[:, 0, :width])
        for place in range(ids.shape[1]):
            drawn = given[:, place] + self.hidden(state)
            gate, keep, show = torch.sigmoid(drawn[:, : 3 * width]).chunk(3, -1)
            cell = torch.where(real[:, place], keep * cell + gate * torch.tanh(drawn[:, 3 * width :]), cell)
            state = show * torch.tanh(cell)
        return state


class Block(nn.Module):
    """One layer of a transformer, norms first: x + attention(norm x), then x + network(norm x)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.all = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, ignored: Tensor) -> Tensor:
        """(B, L, E), and (B, 1, 1, L) a large negative number where a place is padding."""
        rows, length, width = x.shape
        parts = self.all(self.norm1(x)).reshape(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        score = query @ key.transpose(-1, -2) / math.sqrt(width // self.heads) + ignored
        mixed = (torch.softmax(score, -1) @ value).transpose(1, 2).reshape(rows, length, width)
        x = x + self.joined(mixed)
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm2(x))))


class Transformer(nn.Module):
    """(B, L) ids -> (B, E): what the last place knows after attending to all others."""

    def __init__(self, tokens: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        """Read all tokens at once."""
        ids = ids.to(torch.int64)
        x = self.embed(ids) + self.place.weight
        ignored = (ids == 0).to(x.dtype)[:, None, None, :] * -1e9
        for block in self.blocks:
            x = block(x, ignored)
        return self.norm(x)[:, -1]


def _answer(width: int, num_classes: int) -> Layers:
    return [("fc1", nn.Linear(width, width)), ("act1", nn.LeakyReLU(0.1)), ("fc2", nn.Linear(width, num_classes))]


@network("lstm", needs=_IDS, tokens=True, suits=lambda _: True)
def lstm(shape: Sequence[int], num_classes: int, width: int = 64, *, tokens: int) -> nn.Sequential:  # noqa: ARG001
    """Return an embedding and an LSTM of `width` units, then width and K units."""
    return sequential([("encode", Lstm(tokens, width)), *_answer(width, num_classes)])


@network("transformer", needs=_IDS, tokens=True)
def transformer(shape: Sequence[int], num_classes: int, width: int = 64, *, tokens: int) -> nn.Sequential:
    """Return two layers of attention with four heads, then width and K units; the width is a multiple of four."""
    width = 4 * max(1, width // 4)
    return sequential([("encode", Transformer(tokens, shape[0], width, 2, 4)), *_answer(width, num_classes)])
