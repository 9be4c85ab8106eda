"""What a server checks of an answer before it may touch the model.

An answer is refused as a whole, with the client and the reason in one sentence; the round goes on without it. A
client that offends too often is asked no more. Nothing here depends on the order in which answers arrive: each answer
is judged by the rounds before it (`check`), and then all of a round together, each against the others (`judge`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ..container import ContainerError
from ..schema import option
from ..tree import Params
from .codec import decode
from .masks import is_mask
from .round import standings

_MEMORY = 10
"""Rounds whose changes are remembered."""
_ENOUGH = 3
"""Changes that a median needs before it bounds anything."""
_COUNTABLE = 2.0**53
"""Above it float64 does not count by ones."""


@dataclass(frozen=True)
class Limits:
    """What a server puts up with. The defaults stop what would destroy a model, not what is unusual.

    A bound of math.inf is none.
    """

    max_bytes: int = option(1 << 30, "longest answer", low=1)
    max_norm: float = option(10.0, "largest change of a client's weights, relative to 1 + their norm", low=0)
    """||answer - received|| over 1 + ||received||. The 1 is for models that start at zero."""
    max_change: float = option(100.0, "largest change of weights, relative to the median of rounds before", low=0)
    """||answer - received|| over the median of that in the ten rounds before."""
    max_size: float = option(
        10.0, "largest change of weights, relative to the median of the others in the round", low=0
    )
    max_against: float = option(4.0, "the same, of an answer that points away from the others of the round", low=0)
    """An honest one may do so, but not go far."""
    max_samples: float = option(1e9, "most rows that a client may claim", low=1)
    """Below the bound it is believed, and weighs in the average by its claim: give the rows of the largest site."""
    max_offences: int = option(3, "refused answers after which a client is asked no more", low=1)


@dataclass(frozen=True)
class Expected:
    """What a server asked of one client in one round."""

    client: int
    round: int
    """Counted as in `Record`, from 1; any count will do that both sides share."""
    received: Params
    """What the client was sent: names, shapes, dtypes and masks of the answer, and the norm it is measured by."""
    said: float = math.inf
    """Rows that the client has, as it said before the first round."""
    registered: float = 0.0
    """Rows up to which the operator lets its claims grow."""


@dataclass(frozen=True)
class Reply:
    """An answer that passed: it can be aggregated."""

    client: int
    round: int
    params: Params
    """In the order of what was sent; dropped weights and spreads hold what was sent, so that they do not pull."""
    samples: float
    change: float = 0.0
    """||answer - received||."""


class Rejected(Exception):  # noqa: N818
    """An answer that must not touch the model; `client` and `reason` say whose and why, `kind` in one word.

    The kinds: damaged, version, oversized, name, shape, dtype, mask, nan, norm, samples, round, duplicate, excluded,
    direction, and what a caller of `Guard.reject` adds.
    """

    def __init__(self, client: int, kind: str, reason: str) -> None:
        super().__init__(f"client {client}: {reason}")
        self.client = client
        self.kind = kind
        self.reason = reason


class _FaultError(Exception):
    """What is wrong with an answer: kind and reason."""


def _shown(claimed: object) -> str:
    try:
        return repr(claimed)[:40]
    except ValueError:  # an integer of more digits than Python writes
        return "too many"


def _params(limits: Limits, expected: Expected, payload: object) -> Params:
    if not isinstance(payload, bytes):
        raise _FaultError("damaged", f"the payload is no bytes but {type(payload).__name__}")
    if len(payload) > limits.max_bytes:
        raise _FaultError("oversized", f"the answer has {len(payload)} bytes; {limits.max_bytes} are allowed")
    try:
        params = decode(payload, like=expected.received)
    except ContainerError as error:
        raise _FaultError(error.kind, str(error)) from error
    for name, value in params.items():
        if not torch.isfinite(value).all():
            raise _FaultError("nan", f"{name} holds NaN or infinity")
        if is_mask(name) and not torch.equal(value, expected.received[name].detach().cpu()):
            raise _FaultError("mask", f"{name} is not the mask that was sent")
    return {name: params[name] for name in expected.received}


def norm(values: Iterable[Tensor]) -> float:
    """Return the norm of all values together; in float64, whose squares of float32 do not overflow."""
    return math.sqrt(sum(float(value.to(torch.float64).square().sum()) for value in values))


@dataclass
class Guard:
    """The checks, and the memory they need: offences by client, and how far honest clients move.

    `state()` is plain JSON; a run that resumes passes it to `Guard.restored`, together with the checkpoint that it
    was saved with, and judges as if nothing had happened.
    """

    limits: Limits = field(default_factory=Limits)
    offences: dict[int, int] = field(default_factory=dict)
    changes: dict[int, list[float]] = field(default_factory=dict)
    """By round, how far its accepted answers moved."""
    heard: dict[int, int] = field(default_factory=dict)
    """By client, the round of its last answer that was taken."""
    rows: dict[int, float] = field(default_factory=dict)
    """By client, the most rows that an answer of its that was taken claimed."""

    def check(self, expected: Expected, *, round: object, samples: object, payload: object) -> Reply:
        """Return an answer that can be aggregated, or raise `Rejected` and count the offence.

        `round` and `samples` are what the client claims, of whatever type they came; `payload` is the `encode`d
        answer, with mask_known=True or with the very masks that were sent. The client itself is not asked who it is:
        `expected` belongs to the node that the transport has identified. Once an answer to a round is taken, another
        one is a duplicate; one that was refused may be followed by a better one, where the server asks again.
        """
        client = expected.client
        if self.excluded(client):
            raise Rejected(client, "excluded", f"it is excluded after {self.offences[client]} refused answers")
        try:
            if self.heard.get(client) == expected.round:
                raise _FaultError("duplicate", f"it has answered round {expected.round} already")
            if type(round) is not int or round != expected.round:
                raise _FaultError("round", f"the answer is for round {_shown(round)}; round {expected.round} was asked")
            claimed = self._claim(expected, samples)
            params = _params(self.limits, expected, payload)
            change = self._bounded(expected, params)
        except _FaultError as fault:
            raise self.reject(client, *fault.args) from fault
        self.heard[client] = expected.round
        self.rows[client] = max(claimed, self.rows.get(client, 0.0))
        self.changes.setdefault(expected.round, []).append(change)
        self.changes = {each: norms for each, norms in self.changes.items() if each > expected.round - _MEMORY}
        return Reply(client, expected.round, params, claimed, change)

    def _claim(self, expected: Expected, samples: object) -> float:
        """Return the rows that a client claims, if they are no more than before."""
        most = min(self.limits.max_samples, _COUNTABLE)
        if isinstance(samples, bool) or not isinstance(samples, (int, float)) or not 0 < samples <= most:
            why = f"it claims {_shown(samples)} samples; a number above 0, at most {most:g}, can be"
            raise _FaultError("samples", why)
        claimed = float(samples)
        if claimed > expected.said:
            raise _FaultError("samples", f"it claims {claimed:g} samples, and said hello with {expected.said:g} rows")
        before = self.rows.get(expected.client, math.inf)
        if claimed > max(before, expected.registered):
            raise _FaultError(
                "samples", f"it claims {claimed:g} samples after {before:g}; metavd federate rows registers more"
            )
        return claimed

    def judge(self, answers: Sequence[tuple[Expected, Reply]]) -> list[Rejected]:
        """Return those answers to one round, all of which passed `check`, that stand out from the others.

        An offence is counted for each, and it is as if it had never been taken: the client may be asked again.
        """
        found = []
        for (expected, reply), (size, along) in zip(
            answers, standings([(expected.received, reply.params) for expected, reply in answers]), strict=True
        ):
            if size > self.limits.max_size:
                why = f"it moved the weights {size:.3g} times as far as the others of its round do"
                fault = self.reject(reply.client, "norm", f"{why}; {self.limits.max_size:g} is allowed")
            elif along < 0 and size > self.limits.max_against:
                why = f"it moved the weights away from where the others of its round go, {size:.3g} times as far"
                fault = self.reject(reply.client, "direction", f"{why}; {self.limits.max_against:g} is allowed")
            else:
                continue
            found.append(fault)
            del self.heard[reply.client]
            self.changes[expected.round].remove(reply.change)
        return found

    def _bounded(self, expected: Expected, params: Params) -> float:
        """Return how far the answer moved, if that is not too far."""
        received = {name: value for name, value in expected.received.items() if not is_mask(name)}
        change = norm(params[name].to(torch.float64) - value.detach().cpu() for name, value in received.items())
        bound = self.limits.max_norm * (1.0 + norm(value.detach() for value in received.values()))
        if not change <= bound:
            raise _FaultError("norm", f"it moved the weights by {change:.3g}; {bound:.3g} is allowed by what was sent")
        # Clients that did not move at all say nothing about how far is too far.
        earlier = [
            norm for round, norms in self.changes.items() if round < expected.round for norm in norms if norm > 0
        ]
        if len(earlier) >= _ENOUGH and not change <= self.limits.max_change * median(earlier):
            allowed = self.limits.max_change * median(earlier)
            raise _FaultError(
                "norm", f"it moved the weights by {change:.3g}; {allowed:.3g} is allowed by earlier rounds"
            )
        return change

    def reject(self, client: int, kind: str, reason: str) -> Rejected:
        """Count an offence that the caller found, such as a reply without a payload; return what to raise or to log."""
        self.offences[client] = self.offences.get(client, 0) + 1
        return Rejected(client, kind, reason)

    def excluded(self, client: int) -> bool:
        """Return whether a client has offended too often to be asked again."""
        return self.offences.get(client, 0) >= self.limits.max_offences

    def state(self) -> dict[str, Any]:
        """Return the memory as plain JSON: what a checkpoint after a whole round needs."""
        return {
            "offences": {str(client): count for client, count in self.offences.items()},
            "changes": {str(round): sorted(norms) for round, norms in self.changes.items()},
            "rows": {str(client): rows for client, rows in self.rows.items()},
        }

    @classmethod
    def restored(cls, limits: Limits, state: Mapping[str, Any]) -> Guard:
        """Return a guard with the memory that `state` gave; an empty mapping is a fresh one."""
        return cls(
            limits,
            {int(client): int(count) for client, count in state.get("offences", {}).items()},
            {int(round): [float(norm) for norm in norms] for round, norms in state.get("changes", {}).items()},
            rows={int(client): float(rows) for client, rows in state.get("rows", {}).items()},
        )
