"""Cohorts whose answers are added up part by part: the same sums, with one part's answers in memory."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import metavd
from metavd import methods
from metavd.core import owned
from metavd.core.types import NonFiniteError, ServerState
from metavd.engine.checkpoint import hashes
from metavd.engine.schedule import Trained
from metavd.runs.run import rounds_of
from metavd.runs.settings import Experiment
from metavd.runs.setup import Setup, prepare, start


def blobs() -> Any:
    """Four noisy clusters in five dimensions."""
    draw = np.random.default_rng(0)
    y = np.arange(120) % 4
    return metavd.arrays((draw.normal(size=(120, 5)) + 2.0 * np.eye(5)[y]).astype(np.float32), y, name="blobs")


def setup_of(method: str, part: int, **more: Any) -> Setup:
    fields: dict[str, Any] = {"clients": 10, "cohort": 8, "rounds": 2, "model": "mlp", "width": 4, "backend": "loop",
                              "dtype": "float64", "partition": "quantity:0.5", **more}  # fmt: skip
    return prepare(Experiment(method=method, unseen=0, seed=1, device="cpu", part=part, **fields), blobs())


def trained(setup: Setup) -> tuple[ServerState, list[Any]]:
    found = list(rounds_of(setup, start(setup)))
    return found[-1][0], [record for _, record in found]


DROP = {"drop_from": 1, "threshold": 0.2}


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", {"max_share": 1.5}),
        ("reptile+metavd+drop", {"options": DROP, "lost": "0.2"}),
        ("maml+ensemblevd", {}),
        ("fedavg+snip", {}),
        ("scaffold", {}),
        ("feddbe", {}),
        ("pfedvem", {}),
        ("fedavg+dp", {"options": {"noise": 0.5, "clipping": "adaptive"}}),
        ("local", {}),
    ],
)
def test_parts_add_up_to_the_whole(method: str, more: dict[str, Any]) -> None:
    """Law, in float64: sums of parts are the sum to rounding: weights, memory, what clients keep, traffic and loss."""
    (whole, before), (added, after) = (trained(setup_of(method, part, **more)) for part in (0, 3))
    for name in ("params", "slots"):
        assert_close(getattr(added, name), getattr(whole, name), rtol=1e-11, atol=1e-12)
    if whole.kept is not None and added.kept is not None:
        assert_close(added.kept.everyone(), whole.kept.everyone(), rtol=1e-11, atol=1e-12)
    assert [record._replace(loss=None) for record in after] == [record._replace(loss=None) for record in before]
    assert [record.loss for record in after] == pytest.approx([record.loss for record in before])


def test_rows_that_lie_apart_are_moved_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: parts of a cohort move the rows of theirs, wherever these lie."""
    wanted = owned.whole(trained(setup_of("reptile+metavd", 3))[0]).params
    monkeypatch.setattr(owned, "MANY", 5)
    state, _ = trained(setup_of("reptile+metavd", 3))
    assert state.rows is not None
    assert_close(owned.whole(state).params, wanted, rtol=0, atol=0)


def test_a_cohort_that_is_one_part_has_the_bits_it_always_had() -> None:
    """Law: adding up begins beyond one part."""
    assert hashes(trained(setup_of("reptile+metavd", 8))[0]) == hashes(trained(setup_of("reptile+metavd", 0))[0])


def counting(setup: Setup) -> tuple[Setup, list[int]]:
    """Return the setup with a schedule that notes how many clients' answers are alive when a part is trained."""
    alive: list[weakref.ref[Tensor]] = []
    counts: list[int] = []
    inner = setup.schedule.train

    def train(*given: Any) -> Trained:
        found = inner(*given)
        alive.append(weakref.ref(found.adapted["fc1.weight"]))
        there = [ref() for ref in alive]
        counts.append(sum(len(value) for value in there if value is not None))
        return found

    return replace(setup, schedule=setup.schedule._replace(train=train)), counts


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_no_more_models_are_alive_than_a_part_has_clients(backend: str) -> None:
    """Law of memory, counted: with parts of 3 never more than 3 clients' models, however large the cohort."""
    setup, counts = counting(setup_of("reptile+metavd", 3, cohort=10, backend=backend))
    trained(setup)
    assert counts == [3, 3, 3, 1] * 2
    setup, counts = counting(setup_of("reptile+metavd", 0, cohort=10, backend=backend))
    trained(setup)
    assert max(counts) >= 10


@pytest.mark.parametrize(
    ("method", "more", "why"),
    [
        ("fedavg", {"aggregate": "median"}, "aggregate=median needs all answers of a round together"),
        ("fedbe", {}, "fedbe needs all answers of a round together"),
        ("fedavg", {"attack": "sign-flip:0.2"}, "the attack looks at all answers"),
    ],
)
def test_what_needs_all_answers_says_so_and_has_them(method: str, more: dict[str, Any], why: str) -> None:
    """One sentence that says how much memory that is; the bits are those without parts."""
    setup = setup_of(method, 3, rounds=1, **more)
    assert any(text.startswith(f"{why}: 8 clients' weights are in memory at once, 0 MB") for text in setup.notes)
    assert hashes(trained(setup)[0]) == hashes(trained(setup_of(method, 0, rounds=1, **more))[0])


def test_parts_are_told() -> None:
    said = "the server adds up the answers of 8 clients in parts of 3 (part=3)"
    assert said in setup_of("fedavg", 3).notes
    assert not any("adds up" in text for text in setup_of("fedavg", 8).notes)


def test_a_client_that_diverges_is_named_although_its_answer_is_gone() -> None:
    """A NaN in a part's sums would name nobody; each client's magnitude stays."""
    setup = setup_of("fedavg", 3, cohort=10)
    inner = setup.schedule.train

    def train(*given: Any) -> Trained:
        found = inner(*given)
        bad = (given[3] == 7)[:, None, None]
        weight = torch.where(bad, torch.nan, found.adapted["fc1.weight"])
        return found._replace(adapted=found.adapted | {"fc1.weight": weight})

    with pytest.raises(NonFiniteError, match="client 7 made its answer NaN"):
        trained(replace(setup, schedule=setup.schedule._replace(train=train)))


def test_all_methods_but_fedbe_add_up() -> None:
    """Every base for which sums suffice."""
    assert "fedbe" in methods.NAMES
    for method in ("fedavg", "pfedgp", "pfedfda", "lrbpfl", "ditto", "perfedavg+vd", "fedavg+snip"):
        assert setup_of(method, 3).algorithm.server.take is not None
