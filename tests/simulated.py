"""Rounds of simulated clients, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from metavd.core.types import Algorithm, ServerState
from metavd.data.cohort import Pool
from metavd.engine.cohorts import in_process
from metavd.engine.ledger import Ledger
from metavd.engine.rounds import Record
from metavd.engine.rounds import rounds as every
from metavd.engine.schedule import Schedule


def simulate(
    algorithm: Algorithm,
    pool: Pool,
    schedule: Schedule,
    state: ServerState,
    *,
    rounds: int,
    cohort: int,
    **chances: Any,
) -> Iterator[tuple[ServerState, Record]]:
    """Go on from a state until so many rounds are finished; see `in_process`."""
    transport = in_process(algorithm, pool, schedule, cohort=cohort, **chances)
    return every(algorithm.server.update, transport, state, rounds, Ledger(None))
