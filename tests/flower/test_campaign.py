"""The campaign: every fault there is, some of them with real processes.

    pytest -m campaign tests/flower                                             each fault once, some minutes
    pytest -m campaign tests/flower -k disk                                     faults by a word of their kind or name
    pytest -m campaign tests/flower --repeats 2 --processes 10 --page docs/faults.md

Every fault has a federation of its own: four clients, three rounds or more, real digits. Most federations live in this
process: the ServerApp, the ClientApp and all their files are the real ones, and a grid stands where Flower carries
messages, and does to them, and to the server, what the fault says. With --processes, federations of real SuperLinks
and SuperNodes with TLS and authentication follow, whose processes are killed, frozen or cut off. The counts stand at
the end of the output.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from .support import FAULTS
from .support.files import CASES, restart
from .support.lies import LOOKS
from .support.looks import lie
from .support.page import plain
from .support.processes import PROCESSES, Strike, perform
from .support.rehearsal import Outcome, Trial, can_mount, good, rehearse, trials

pytestmark = pytest.mark.campaign


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Spread the faults over methods, rounds and clients, as often as was asked."""
    option = metafunc.config.getoption
    seed = option("seed", 0)
    if "trial" in metafunc.fixturenames:
        found = list(trials(option("repeats", 1), seed, FAULTS))
        metafunc.parametrize("trial", found, ids=[f"{each.fault.kind}: {each.fault.name}" for each in found])
    if "strike" in metafunc.fixturenames:
        chosen = [(*PROCESSES[number % len(PROCESSES)], seed + number) for number in range(option("processes", 0))]
        metafunc.parametrize(
            ("kind", "name", "strike", "seed"), chosen, ids=[f"{kind}: {name}" for kind, name, _, _ in chosen]
        )


@pytest.fixture
def judge(record_property: Callable[[str, object], None]) -> Callable[[Outcome], None]:
    """Give the function that puts an outcome on record and then asks whether it is a good one."""

    def call(outcome: Outcome) -> None:
        record_property("outcome", plain(outcome))
        assert good(outcome), outcome

    return call


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Keep what a server says of a fault out of the output."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)


def test_a_fault_in_one_process(trial: Trial, judge: Callable[[Outcome], None]) -> None:
    """No hang, the right model, no lost round, and the client is named."""
    if "tmpfs" in dict(trial.fault.config) and not can_mount():
        pytest.skip("a small file system cannot be mounted here; full disks are played by failing writes alone")
    judge(rehearse(trial))


@pytest.mark.parametrize(("name", "how"), CASES, ids=[" ".join(each) for each in CASES])
def test_a_damaged_file(name: str, how: str, judge: Callable[[Outcome], None]) -> None:
    """A stopped run goes on to the right model, or refuses by the file's name and does so once the file is back."""
    judge(restart(name, how))


@pytest.mark.parametrize("name", LOOKS)
def test_a_lie_about_rows(name: str, judge: Callable[[Outcome], None]) -> None:
    """The liar is left out by name and reason, and the model is that of the others."""
    judge(lie(name))


def test_a_fault_with_processes(
    kind: str, name: str, strike: Strike, seed: int, judge: Callable[[Outcome], None]
) -> None:
    """The same, and the command that follows the run answers 0 only for a finished one."""
    judge(perform(kind, name, strike, seed))
