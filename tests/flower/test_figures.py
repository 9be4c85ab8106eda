"""A group's figures from its clients' own: exact where they are honest, and not at one client's mercy."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from metavd.evaluate.calibration import BINS, expected_error, top1
from metavd.flower import figures

MOST = figures.Most(1000, 1000)


def report(seed: int, rows: int = 40) -> dict[str, Any]:
    """What a client with random answers says of them."""
    random = np.random.RandomState(seed)
    probs = random.dirichlet(np.ones(3), rows)
    y = random.randint(0, 3, rows)
    bins = top1(probs, y)
    return {
        "train_size": 10 + seed, "test_size": rows, "accuracy": float((probs.argmax(1) == y).mean()), "nll": 1.0,
        "brier": 0.5, "entropy": 0.9, "bin_count": bins.count.tolist(), "bin_confidence": bins.confidence.tolist(),
        "bin_accuracy": bins.accuracy.tolist(),
    }  # fmt: skip


def test_a_groups_calibration_is_that_of_all_its_rows() -> None:
    """Closed form: bins added up give the error of the pooled answers."""
    random = [np.random.RandomState(seed) for seed in (1, 2)]
    answers = [(each.dirichlet(np.ones(3), 40), each.randint(0, 3, 40)) for each in random]
    together = top1(np.concatenate([probs for probs, _ in answers]), np.concatenate([y for _, y in answers]))
    found = figures.pooled([figures.checked(report(seed), MOST) for seed in (1, 2)])
    assert found["ece_top1"] == pytest.approx(expected_error(together))


@pytest.mark.parametrize(
    "broken",
    [[1.0] * (BINS - 1), [1.0] * (BINS - 1) + [float("nan")], [-1.0] * BINS, "bins", 3.0, None, [[1.0]] * BINS],
)
def test_one_broken_diagram_takes_nobody_elses_away(broken: object) -> None:
    """Law: a client whose bins make no sense is left out of the diagram, and of nothing else."""
    good = [figures.checked(report(seed), MOST) for seed in (1, 2)]
    bad = figures.checked(report(3) | {"bin_count": broken}, MOST)
    assert figures.pooled([*good, bad])["ece_top1"] == figures.pooled(good)["ece_top1"]
    assert figures.pooled([*good, bad])["clients"] == 3


@pytest.mark.parametrize("size", ["train_size", "test_size"])
def test_rows_beyond_belief_are_refused(size: str) -> None:
    """Law: nobody decides a mean by claiming more rows than the operator thinks possible."""
    with pytest.raises(ValueError, match=r"claims a t\w+_size of 1001, but at most 1000 rows"):
        figures.checked(report(1) | {size: 1001}, MOST)


@pytest.mark.parametrize("value", [-3, 2.5, float("inf"), float("nan"), True, "40", [40], None])
@pytest.mark.parametrize("size", ["train_size", "test_size"])
def test_sizes_that_are_no_counts_are_refused(size: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"claims a {size} of .*whole number"):
        figures.checked(report(1) | {size: value}, MOST)


@pytest.mark.parametrize("name", ["bin_count", "bin_confidence", "bin_accuracy"])
def test_bins_of_any_size_end_nothing(name: str) -> None:
    """`[1e308] * 15` overflows in a sum: such a diagram is left out, and all that is written is finite."""
    bad = figures.checked(report(3) | {name: [1e308] * BINS}, MOST)
    assert name not in bad
    good = figures.checked(report(1), MOST)
    json.dumps([figures.pooled([good, bad]), figures.details({"test": [good, bad]})], allow_nan=False)


def test_one_client_cannot_lift_the_whole() -> None:
    """Law: whatever one of five claims of itself, the median stays among the others, and it weighs ten at most."""
    honest = [figures.checked(report(seed) | {"accuracy": 0.5 + seed / 100}, MOST) for seed in range(4)]
    most = figures.Most(1e9, 1e9)
    boast = {"accuracy": 1.0, "test_size": 10**8, "train_size": 10**8}
    found = figures.pooled([*honest, figures.checked(report(9) | boast, most)])
    assert 0.5 <= found["medians"]["accuracy"] <= 0.53
    assert found["accuracy"] < 0.9
    assert figures.loud(dict(enumerate([*honest, figures.checked(report(9) | boast, most)]))) == {4: (400, 10**8)}


def test_of_no_rows_there_are_no_figures() -> None:
    """A site that tested nothing has no accuracy either, whatever it claims."""
    assert figures.checked(report(1) | {"test_size": 0}, MOST).keys() == {"train_size", "test_size"}
