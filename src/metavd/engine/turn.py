"""All that one client does, as pure functions: train on its rows, or make its own model and answer rows with it.

    train   sent, kept', loss = local(received, kept, batches)
    test    received = serve(server, client), or admit(server, batches) of a client that was never seen
            own      = personalize(received, kept, batches), or the newcomer's stage of one that has kept nothing yet
            answer   = predict(own, rows)

The simulator under every schedule, a federation's client, evaluation and `personalize` run these and nothing else. All
random numbers of a turn come from (run, stage, round, client), see `Moment`; batches are drawn apart from the turn,
because some schedules draw them for many clients at once, and others ahead of time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import tree
from ..compat import absolute_sums
from ..core import rng
from ..core.types import Algorithm, Answer, Batch, NonFiniteError, Predict, Sampling, ServerState
from ..data.cohort import PERSONAL, TEST, TRAIN, Pool, batches
from ..ops.device import over
from ..tree import Params

VEIL = 7
"""First tag of the keys of what hides an answer, beside those of `data.cohort`."""
ROWS = 256
"""Rows answered at once: bounds memory, and fixes which draws a row gets."""


class Moment(NamedTuple):
    """When a turn takes place: all that its random numbers and schedules depend on, beside the client."""

    key: Tensor
    """() int64 on the host: the run's."""
    done: int
    """Rounds that are finished."""
    round: Tensor
    """() the same number where the client computes, for schedules."""

    def keys(self, tag: int, clients: Tensor | int) -> Tensor:
        """Return the key of a stage for a client, or for many at once."""
        return rng.fold(self.key, tag, self.done, clients)


def moment(state: ServerState) -> Moment:
    """Return the moment at which a server's state is sent."""
    return Moment(state.key.cpu(), int(state.round), state.round)


def train_batches(algorithm: Algorithm, pool: Pool, place: int, now: Moment, client: int) -> list[Batch]:
    """Draw what a client trains on; its rows are those of number `place` in the pool."""
    return batches(pool, place, algorithm.train_batches, now.keys(TRAIN, client), now.round)


def personal_sampling(algorithm: Algorithm, *, new: bool) -> Sampling:
    """Return which batches a client personalises its model with; `new`: it has kept nothing yet."""
    return algorithm.newcomer.batches if new and algorithm.newcomer is not None else algorithm.personal_batches


def personal_batches(
    algorithm: Algorithm, pool: Pool, place: int, now: Moment, client: int, *, new: bool
) -> list[Batch]:
    """Draw what a client personalises its model with."""
    return batches(pool, place, personal_sampling(algorithm, new=new), now.keys(PERSONAL, client), now.round)


def answer_key(now: Moment, clients: Tensor | int) -> Tensor:
    """Return what the draws of a client's answers come from."""
    return now.keys(TEST, clients)


def train_turn(
    algorithm: Algorithm, received: Params, kept: Params, batches: Sequence[Batch]
) -> tuple[Params, Params, Tensor]:
    """Train; return what the client sends, what it keeps, and the mean loss of the steps."""
    adapted, loss = algorithm.local(received | kept, batches)
    return *split(adapted, kept), loss


def veiled(algorithm: Algorithm, received: Params, answer: Params, now: Moment, client: int) -> Params:
    """Hide what a client sends, where the method lets clients do that themselves."""
    if algorithm.veil is None:
        return answer
    return algorithm.veil(received, answer, over(now.keys(VEIL, client), now.round.device))


def split(params: Params, kept: Iterable[str]) -> tuple[Params, Params]:
    """Divide what a client ends with into what it sends and what it keeps."""
    names = set(kept)
    return tree.select(params, lambda name: name not in names), tree.select(params, names.__contains__)


def received_for_test(
    algorithm: Algorithm, params: Params, round: Tensor, client: Tensor, batches: Sequence[Batch], *, unseen: bool
) -> Params:
    """Return what a client receives from the server's parameters when it is to be used or tested."""
    return algorithm.admit(params, round, batches) if unseen else algorithm.serve(params, client, round)


def own_model(algorithm: Algorithm, received: Params, kept: Params, batches: Sequence[Batch], *, new: bool) -> Params:
    """Return a client's own model, made of what it received and keeps; `new`: it has kept nothing yet."""
    stage = algorithm.newcomer.stage if new and algorithm.newcomer is not None else algorithm.personalize
    return stage(received | kept, batches)[0]


def respond(predict: Predict, own: Params, parts: Iterable[Tensor], key: Tensor) -> Answer:
    """Answer rows, in parts of at most `ROWS`, with a client's own model; at least one part."""
    answers = [predict(own, part, rng.fold(key, i)) for i, part in enumerate(parts)]
    return Answer(torch.cat([each.probs for each in answers]), tree.concatenated([each.drawn for each in answers]))


def test_turn(
    algorithm: Algorithm, received: Params, kept: Params, batches: Sequence[Batch], *, rows: Tensor, key: Tensor,
    new: bool,
) -> tuple[Answer, Params]:  # fmt: skip
    """Make the client's own model and answer rows with it, at least one; return both."""
    own = own_model(algorithm, received, kept, batches, new=new)
    return respond(algorithm.predict, own, torch.split(rows, ROWS), key), own


def checked(answer: Answer, count: int, who: str) -> np.ndarray:
    """Return the probabilities (B, K) of the first `count` rows on the host, in float64; stop where one is NaN."""
    probs: np.ndarray = answer.probs[:count].double().cpu().numpy()
    if not np.isfinite(probs).all():
        raise NonFiniteError(f"{who} answers with probabilities that are NaN")
    return probs


def magnitudes(values: list[Tensor]) -> list[Tensor]:
    """Return each tensor's sum of magnitudes: quick, and not finite where a summand is not; it may overflow."""
    return [size.to(values[0].dtype) for size in absolute_sums(values)]


def check_finite(params: Params, round: int, who: str | Sequence[int]) -> None:
    """Stop at the first tensor that is not finite and say whose it is; many ids are those of stacked clients."""
    if torch.isfinite(torch.stack(magnitudes(list(params.values())))).all():  # one question to the device
        return
    for name, value in params.items():
        if torch.isfinite(value).all():
            continue
        blamed = who
        if not isinstance(who, str):
            bad = ~torch.isfinite(value).reshape(len(who), -1).all(1)
            blamed = f"client {who[int(bad.nonzero()[0])]}"
        raise NonFiniteError(f"round {round}: {blamed} made {name} NaN or infinite; a smaller lr or clip may help")
