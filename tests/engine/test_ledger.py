"""What was revealed of clients, over the end of a process."""

from __future__ import annotations

import pytest

from metavd.core.accountant import Mechanism
from metavd.engine.ledger import Ledger


@pytest.mark.parametrize("sites", [False, True])
def test_a_checkpoint_forgets_nothing_that_was_revealed(sites: bool) -> None:
    """Law: with what a checkpoint keeps a ledger goes on, with its rounds and with how often sites were asked."""
    mechanism = Mechanism(clip=1.0, noise=2.0, epsilon=0.0, delta=1e-5, clients=3, cohort=3, rounds=4, sites=sites)
    ledger = Ledger(mechanism)
    for answers in (None, 3, None, 2):  # None: a round that comes to nothing
        ledger.asking()
        if answers is not None:
            ledger.add(answers)
    again = Ledger.opened(mechanism, ledger.state())
    assert again == ledger
    assert sum(again.rounds.values()) == 2
    assert again.asked == (4 if sites else 0)
