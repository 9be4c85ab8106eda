"""Laws of the accounting: another implementation on the same events, monotony, and noise found for a budget."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metavd.core import accountant
from metavd.core.accountant import ORDERS, Mechanism
from metavd.errors import SpecError

pytest.importorskip("dp_accounting")


def mechanism(**values) -> Mechanism:
    usual = {"clip": 1.0, "noise": 1.0, "epsilon": 0.0, "delta": 1e-5, "clients": 100, "cohort": 10, "rounds": 50}
    return Mechanism(**(usual | values))


@pytest.mark.parametrize(("noise", "cohort", "rounds"), [(1.0, 10, 50), (0.7, 40, 3), (3.0, 100, 200), (1.5, 1, 1000)])
def test_another_implementation_finds_the_same_epsilon(noise, cohort, rounds):
    """Opacus' RDP accountant, on the same events and orders."""
    rdp = pytest.importorskip("opacus.accountants.analysis.rdp")
    curve = rdp.compute_rdp(q=cohort / 100, noise_multiplier=noise, steps=rounds, orders=list(ORDERS))
    with np.errstate(all="ignore"):
        wanted, _ = rdp.get_privacy_spent(orders=list(ORDERS), rdp=curve, delta=1e-5)
    found = mechanism(noise=noise, cohort=cohort).spent({noise: rounds})
    assert found == pytest.approx(wanted, rel=1e-6)


def test_everybody_in_every_round_is_a_gaussian_mechanism():
    """Closed form: the Renyi divergence of order a is a T / (2 z^2), and epsilon its best conversion."""
    z, rounds, delta = 2.0, 10, 1e-5
    best = min(
        a * rounds / (2 * z * z) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in ORDERS
    )  # Canonne, Kamath, Steinke 2020
    assert mechanism(noise=z, cohort=100).spent({z: rounds}) == pytest.approx(best, rel=1e-9)


def test_the_divergence_of_a_sampled_round_is_its_integral():
    """Order a, rate q: log E_N(0,z^2) [(1 - q + q exp((2x - 1) / (2 z^2)))^a] / (a - 1), by summing up."""
    z, q, a = 1.3, 0.1, 8
    x = np.linspace(-40, 40, 400_001)
    density = np.exp(-x * x / (2 * z * z)) / (z * math.sqrt(2 * math.pi))
    ratio = 1 - q + q * np.exp((2 * x - 1) / (2 * z * z))
    wanted = math.log(np.sum(density * ratio**a) * (x[1] - x[0])) / (a - 1)
    found = accountant._curve(z, 100, 10, True)[ORDERS.index(a)]
    assert found == pytest.approx(wanted, rel=1e-6)


@settings(max_examples=6, deadline=None)
@given(st.floats(0.4, 5.0), st.integers(1, 100), st.sampled_from([1, 10, 60, 100]), st.booleans())
def test_epsilon_grows_with_rounds_and_shrinks_with_noise(noise, rounds, cohort, poisson):
    m = mechanism(cohort=cohort, poisson=poisson)
    here = m.spent({noise: rounds})
    assert m.spent({noise: rounds + 1}) > here
    assert m.spent({1.1 * noise: rounds}) < here
    assert m.spent({}) == 0.0


def test_without_noise_there_is_no_bound():
    assert mechanism(noise=0.0).spent({0.0: 1}) == math.inf


@pytest.mark.parametrize(
    ("epsilon", "cohort", "poisson"),
    [*((epsilon, cohort, True) for epsilon in (0.5, 3.0, 8.0, 50.0) for cohort in (10, 100)), (3.0, 10, False)],
)
def test_the_noise_that_is_found_spends_the_budget(epsilon, cohort, poisson):
    """No more than it, and with 0.1 % less noise more than it."""
    m = mechanism(noise=-1.0, epsilon=epsilon, cohort=cohort, poisson=poisson)
    assert 0.99 * epsilon < m.spent({m.multiplier: m.rounds}) <= epsilon
    assert m.spent({0.999 * m.multiplier: m.rounds}) > epsilon


def test_without_a_word_of_noise_or_budget_the_noise_is_one():
    assert mechanism(noise=-1.0).multiplier == 1.0
    assert mechanism(noise=0.0, epsilon=8.0).multiplier == 0.0


def test_a_client_in_anothers_place_is_told_from_one_more():
    """Cohorts of one size: twice the sensitivity, so never less than Poisson's."""
    poisson, fixed = mechanism(), mechanism(poisson=False)
    assert fixed.spent({1.0: 20}) > poisson.spent({1.0: 20})
    everyone = replace(fixed, cohort=100)
    assert everyone.spent({1.0: 20}) == replace(poisson, cohort=100).spent({1.0: 20})


@settings(max_examples=50, deadline=None)
@given(st.floats(0.05, 50.0), st.integers(1, 100))
def test_sum_and_count_together_have_the_noise_that_is_accounted(noise, cohort):
    """An adaptive clip: 1/z^2 = 1/z_sum^2 + 1/(2 count)^2, and the sum pays at most a sixth for the count."""
    m = mechanism(noise=noise, cohort=cohort, adaptive=True)
    assert m.sum_noise**-2 + (2 * m.count_noise) ** -2 == pytest.approx(noise**-2)
    assert noise < m.sum_noise < 1.16 * noise


def test_sites_that_do_not_answer_add_no_noise():
    m = mechanism(noise=2.0, cohort=100, sites=True)
    assert m.present(100) == 2.0
    assert m.present(25) == 1.0
    assert mechanism(noise=2.0).present(0) == 2.0
    assert m.seen_by_server(5) > m.spent({2.0: 5})


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"clip": math.inf}, "answer_clip is 0"),
        ({"clip": math.inf, "noise": 0.0, "adaptive": True}, "answer_clip is 0"),
        ({"sites": True, "cohort": 100, "adaptive": True}, "use clipping=fixed"),
        ({"sites": True}, "cohort is 10 of 100; use cohort=100"),
    ],
)
def test_what_cannot_be_is_said(values, says):
    with pytest.raises(SpecError, match=says):
        mechanism(**values)


def test_without_the_extra_a_budget_is_refused_and_noise_is_not(monkeypatch):
    monkeypatch.setattr(accountant, "known", lambda: False)
    with pytest.raises(SpecError, match=r"it takes dp-accounting to keep to it: pip install 'metavd\[privacy\]'"):
        mechanism(epsilon=8.0).check()
    with pytest.raises(SpecError, match="it takes dp-accounting"):
        _ = mechanism(noise=-1.0, epsilon=8.0).multiplier
    mechanism().check()
    assert "epsilon is not known without dp-accounting" in mechanism().told()[0]
