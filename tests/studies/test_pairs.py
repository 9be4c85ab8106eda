"""Paired comparison of two methods over the same clients: closed forms, a reference, and what cannot be compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from metavd.studies.pairs import pair


def line(seed: int, right: Any, train: Any = (10, 30, 60), rows: Any = (10, 20, 40)) -> dict[str, Any]:
    kept = {"train": list(train), "rows": list(rows), "right": list(right)}
    return {"seed": seed, "result": {"clients": {"test": kept, "unseen": kept}}}


def test_the_difference_is_that_of_the_headline_accuracies() -> None:
    """Closed form: clients differ by 0.1, 0.1 and -0.05 and weigh 10, 30 and 60, so d is 0.01."""
    found = pair([line(7, [6, 12, 10])], [line(7, [5, 10, 12])])
    assert found is not None
    assert found.difference == pytest.approx(0.01)
    assert found.low <= found.difference <= found.high
    assert (found.seeds, found.agree) == (1, 1)
    back = pair([line(7, [5, 10, 12])], [line(7, [6, 12, 10])])
    assert back is not None
    assert back.difference == -found.difference
    assert (back.low, back.high) == pytest.approx((-found.high, -found.low), abs=1e-12)
    assert back.p == found.p


def test_a_method_does_not_differ_from_itself() -> None:
    found = pair([line(7, [6, 12, 10])], [line(7, [6, 12, 10])])
    assert found is not None
    assert tuple(found)[:4] == (0.0, 0.0, 0.0, 1.0)
    assert not found.clear


def test_p_is_wilcoxons_over_the_clients_of_all_seeds() -> None:
    """Reference: SciPy's signed-rank test on the pooled differences; a third of the clients tie and are left out."""
    source = np.random.RandomState(0)
    rows = np.full(30, 50)
    one = {seed: source.binomial(50, 0.6, 30) for seed in (1, 2, 3)}
    two = {seed: np.where(np.arange(30) % 3, source.binomial(50, 0.55, 30), one[seed]) for seed in one}
    runs = [[line(seed, right.tolist(), rows.tolist(), rows.tolist()) for seed, right in each.items()]
            for each in (one, two)]  # fmt: skip
    found = pair(*runs)
    assert found is not None
    pooled = np.concatenate([(one[seed] - two[seed]) / 50 for seed in one])  # one division, so that ties are ties
    assert found.p == pytest.approx(stats.wilcoxon(pooled[pooled != 0]).pvalue)
    assert found.difference == pytest.approx(pooled.mean())
    means = [((one[seed] - two[seed]) / 50).mean() for seed in one]
    assert (found.seeds, found.agree) == (3, sum(mean * pooled.mean() > 0 for mean in means))


def test_the_interval_covers() -> None:
    """Of 200 comparisons of methods that differ by 0.05 in truth, the 95 % interval holds that in 90 % or more."""
    source, inside = np.random.RandomState(1), 0
    rows = np.full(60, 100)
    for _ in range(200):
        easy = source.uniform(0.3, 0.8, 60)
        runs = [[line(1, source.binomial(100, easy + more).tolist(), rows.tolist(), rows.tolist())]
                for more in (0.05, 0.0)]  # fmt: skip
        found = pair(*runs)
        assert found is not None
        inside += found.low <= 0.05 <= found.high
    assert inside >= 180


def test_only_the_same_clients_are_compared() -> None:
    """Another seed, other rows, a run that diverged or one that was stored without clients cannot be compared."""
    own = line(7, [6, 12, 10])
    for other in (
        line(8, [6, 12, 10]),
        line(7, [6, 12, 10], rows=(10, 20, 41)),
        line(7, [6, 12, 10], train=(10, 30, 61)),
        {"seed": 7, "failed": "it diverged"},
        {"seed": 7, "result": {"test": {}}},
    ):
        assert pair([own], [other]) is None
    assert pair([own, line(8, [1, 2, 3])], [line(8, [1, 2, 3])]) is not None


def test_seeds_that_disagree_are_told() -> None:
    found = pair([line(1, [9, 18, 36]), line(2, [4, 8, 16])], [line(1, [1, 2, 4]), line(2, [5, 10, 20])])
    assert found is not None
    assert (found.seeds, found.agree) == (2, 1)
    assert not found.clear
    assert str(found).endswith("1 of 2 seeds")
