"""Simulated liars: a fixed share of the participating clients sends falsified answers, or trains on false labels.

An attack works on a cohort's answers, after whoever trained them and before the server, so that no schedule knows of
it; false labels are those of a pool that only training sees. What a liar is tested and personalised with is honest.

Shape letters: C clients of a cohort, N participating clients, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import tree
from ..core import rng
from ..core.local import movable
from ..core.types import Update
from ..data.cohort import Pool
from ..errors import SpecError
from ..ops.device import over
from ..schema import nearest, numbers
from ..tree import Params
from .turn import Moment

NONE = "none"
_LIARS, _NOISE = 70, 71
"""First tags of the keys of a run, beside those of `data.cohort`."""

Falsify = Callable[[Params, Params, Tensor], Params]
"""(sent (C, ...), answers (C, ...), one key per client (C,)) -> what liars send instead."""


class Attack(NamedTuple):
    """What liars do; answers or labels may be left as they are."""

    share: float
    """Of the participating clients."""
    falsify: Falsify | None = None
    labels: Callable[[Tensor, int], Tensor] | None = None
    """(labels, K) -> those that liars train on."""


def sign_flip(share: float) -> Attack:
    """Go as far in the opposite direction: sent - (answer - sent)."""
    return scale(share, -1.0)


def scale(share: float, factor: float = 10.0) -> Attack:
    """Go farther: sent + factor (answer - sent)."""

    def falsify(sent: Params, answers: Params, keys: Tensor) -> Params:  # noqa: ARG001
        return {name: sent[name] + factor * (value - sent[name]) for name, value in answers.items()}

    return Attack(share, falsify)


def noise(share: float, std: float = 1.0) -> Attack:
    """Add noise to every weight: answer + std e, e ~ N(0, 1)."""

    def falsify(sent: Params, answers: Params, keys: Tensor) -> Params:  # noqa: ARG001
        return {
            name: value + std * rng.normal(rng.fold(keys, i), value.shape[1:], value.dtype)
            for i, (name, value) in enumerate(answers.items())
        }

    return Attack(share, falsify)


def label_flip(share: float) -> Attack:
    """Train on K - 1 - y in place of y."""
    return Attack(share, labels=lambda y, classes: classes - 1 - y)


ATTACKS: dict[str, Callable[..., Attack]] = {
    "sign-flip": sign_flip, "scale": scale, "noise": noise, "label-flip": label_flip,
}  # fmt: skip


def parse(text: str) -> Attack | None:
    """Return the attack that a text names, such as sign-flip:0.3 or scale:0.2:10; None for none."""
    name = text.partition(":")[0]
    if text == NONE:
        return None
    if name not in ATTACKS:
        raise SpecError(f"attack is {text!r}, but there is no such attack; {nearest(name, [NONE, *ATTACKS])}")
    build = ATTACKS[name]
    attack = build(*numbers(text, build, f"attack is {text!r}", f"{name}:0.3"))
    if not 0 < attack.share <= 1:
        raise SpecError(f"attack is {text!r}, but the share of liars must be above 0 and at most 1, such as {name}:0.3")
    return attack


def check(text: str) -> str:
    """Return an attack's text, or say in one sentence what is wrong with it."""
    parse(text)
    return text


def liars(key: Tensor, num_clients: int, share: float) -> np.ndarray:
    """Return who lies, (N,) truth values: the same clients in all rounds, as many as the share of all rounds to."""
    chosen = np.zeros(num_clients, dtype=bool)
    chosen[rng.permutation(rng.fold(key.cpu(), _LIARS), num_clients)[: round(share * num_clients)].numpy()] = True
    return chosen


def deceived(attack: Attack, pool: Pool, who: np.ndarray) -> Pool:
    """Return what clients train on: the pool, the labels of the liars' training rows falsified where that is asked."""
    if attack.labels is None:
        return pool
    train = pool.federation.train
    rows = torch.from_numpy(np.concatenate([train[client] for client in np.flatnonzero(who)])).to(pool.y.device)
    return pool._replace(y=pool.y.index_copy(0, rows, attack.labels(pool.y[rows], pool.federation.source.num_classes)))


def falsified(attack: Attack, who: np.ndarray, update: Update, cohort: list[int], now: Moment) -> Update:
    """Return a cohort's answers, those of its liars falsified; masks stay as they are."""
    lying = who[cohort]
    if attack.falsify is None or not lying.any():
        return update
    answers = movable(update.params)
    device = update.weight.device
    told = attack.falsify(update.sent, answers, over(now.keys(_NOISE, torch.tensor(cohort)), device))
    chosen = over(torch.from_numpy(lying), device)
    false = {name: torch.where(tree.per_client(chosen, value), told[name], value) for name, value in answers.items()}
    return update._replace(params=update.params | false)
