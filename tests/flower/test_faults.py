"""One fault of every kind, and proof that the campaign (test_campaign.py) notices when nobody guards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metavd.container import ContainerError
from metavd.wire import Expected, Guard, Reply, decode

from .support import FAULTS
from .support.rehearsal import Trial, good, rehearse, trials

PLAIN = [fault for fault in FAULTS if not fault.config or fault.kind == "repeated offender"]
"""Those that need nothing of the machine: CI may not mount a disk of its own."""
KINDS = {fault.kind: fault for fault in reversed(PLAIN)}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_fault_leaves_no_trace(kind: str) -> None:
    """The run ends, its model is that of a run without the failed answers, and no other round is lost."""
    (trial,) = trials(1, 0, [KINDS[kind]])
    outcome = rehearse(trial)
    assert outcome.struck
    assert good(outcome), outcome


@pytest.mark.parametrize("kind", ["not finite", "norm", "sample count"])
def test_the_campaign_notices_a_blind_guard(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where everything that can be read is taken, the same faults give another model, or none."""

    def blind(guard: Guard, expected: Expected, *, round: object, samples: object, payload: bytes) -> Reply:  # noqa: ARG001
        try:
            return Reply(expected.client, expected.round, decode(payload, like=expected.received), float(samples))  # type: ignore[arg-type]
        except ContainerError as error:
            raise guard.reject(expected.client, error.kind, str(error)) from error

    monkeypatch.setattr(Guard, "check", blind)
    fault = next(
        each for each in FAULTS if each.kind == kind and each.name in {"NaN in a weight", "a million times", "10^12"}
    )
    assert not good(rehearse(Trial(fault, "fedavg", 2, 1, 0)))


@pytest.mark.parametrize("kind", ["client killed", "truncated"])
def test_the_campaign_notices_a_client_too_many(kind: str) -> None:
    """A model in which the failed answer counts is not taken for the right one."""
    (trial,) = trials(1, 0, [replace(KINDS[kind], absent=lambda at, rounds: set())])  # noqa: ARG005
    assert rehearse(trial).wrong_model
