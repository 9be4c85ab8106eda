"""A client's label shares in its loss, so that what it shares need not learn them; and in its answers, or not.

    loss      cross-entropy of z + log pi_i        pi_ik = (n_ik + smoothing) / (n_i + K smoothing)
    answer    softmax(z + log pi_i) for rows with the client's own mix of labels, softmax(z) for others

The head is linear, so log pi_i is a shift of its bias, which no network has to know about. A constant in log pi_i
changes no softmax: we take the one that makes the largest 0, so that equal shares shift nothing, to the bit. n_ik come
with a client's batches (`Batch.about`); nothing of them is sent, and no gradient goes there.

Shape letters: K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .. import tree
from ..tree import Params
from .local import unchanged
from .types import LABELS, Batch, Local, Move, Objective, Sampling

_SHIFT = "work.prior"
"""(K,) what a stage remembers of the batches it saw."""


def log_shares(counts: Tensor, smoothing: float) -> Tensor:
    """Return log pi - max log pi (K,) of numbers of rows (K,).

    >>> log_shares(torch.tensor([3.0, 3.0, 3.0]), 0.5)
    tensor([0., 0., 0.])
    """
    shares = (counts + smoothing).log()
    return shares - shares.amax()


def _shift(params: Params, bias: str, by: Tensor) -> Params:
    return params | {bias: params[bias] + by}


def shifted(objective: Objective, bias: str, smoothing: float) -> Objective:
    """Return an objective of the network whose logits are shifted by the batch's log pi; `bias` is the head's."""

    def adjusted(params: Params, batch: Batch, anchor: Params) -> Tensor:
        return objective(_shift(params, bias, log_shares(batch.about[LABELS], smoothing)), batch, anchor)

    return adjusted


def answering(stage: Local, sampling: Sampling, bias: str, smoothing: float) -> tuple[Local, Sampling]:
    """Let a stage before use end with log pi in the head's bias; return it and the batches it then wants.

    One that wants no batch gets a single row, which moves nothing: it brings the numbers. A client without rows has
    nothing to shift by.
    """
    if sampling.steps == 0 or (sampling.steps is None and sampling.epochs == 0):
        stage = replace(stage, step=unchanged.step, group=1)
        sampling = replace(sampling, batch=1, steps=1, group=1, augment=False)
    init, step, final = stage.init, stage.step, stage.final

    def begin(received: Params) -> Params:
        start = received if init is None else init(received)
        return start | {_SHIFT: torch.zeros_like(received[bias])}

    def go(params: Params, batches: Sequence[Batch], received: Params, index: Tensor) -> tuple[Move, Tensor]:
        move, loss = step(tree.without(params, _SHIFT), batches, received, index)
        shift = log_shares(batches[0].about[LABELS], smoothing)
        return Move(move.slope, move.put | {_SHIFT: shift}), loss

    def end(params: Params) -> Params:
        ended = tree.without(params, _SHIFT)
        return _shift(ended if final is None else final(ended), bias, params[_SHIFT])

    return replace(stage, init=begin, step=go, final=end), sampling
