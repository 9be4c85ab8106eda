"""Who takes part and which rows a step sees: functions of a key, complete, disjoint, padded without a trace."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from metavd.core import rng
from metavd.core.types import Batch, Sampling
from metavd.data.cohort import (
    AVAILABLE,
    COHORT,
    LOST,
    PERSONAL,
    TEST,
    TRAIN,
    arriving,
    batch_positions,
    batches,
    choose,
    pad,
    pool,
    probabilities,
)
from metavd.data.partition import Federation, federate
from metavd.data.source import arrays
from metavd.errors import SpecError

KEY = rng.key(7)


def make_federation(augment: bool = False) -> Federation:
    generator = np.random.RandomState(0)
    x = generator.randint(0, 256, (120, 1, 8, 8)).astype(np.uint8)
    source = arrays(x, np.arange(120) % 4, augment=augment)
    return federate(source, "iid", clients=4, unseen=1, seed=3)


# --- choose ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clients", "cohort"),
    [(1, 1), (5, 1), (5, 5), (100, 10), (1000, 999), (20_000, 1), (20_000, 2_500), (20_000, 19_999)],
)
def test_cohort_is_distinct_ascending_and_in_range(clients: int, cohort: int) -> None:
    for round in range(5):
        ids = choose(KEY, round, clients, cohort).tolist()
        assert ids == sorted(set(ids))
        assert len(ids) == cohort
        assert 0 <= ids[0] <= ids[-1] < clients


def test_cohort_depends_on_key_and_round_only() -> None:
    """Law: the same key and round give the same cohort; others give others."""
    cohorts = {tuple(choose(rng.key(seed), round, 50, 5).tolist()) for seed in range(3) for round in range(20)}
    assert len(cohorts) == 60
    assert torch.equal(choose(KEY, 4, 50, 5), choose(KEY, 4, 50, 5))


def test_every_client_is_chosen_equally_often() -> None:
    """Closed form: over 2,000 rounds of 5 of 20, a client is in 500 of them, with a deviation of 19.4."""
    counts = torch.zeros(20)
    for round in range(2000):
        counts[choose(KEY, round, 20, 5)] += 1
    assert float((counts - 500).abs().max()) < 5 * 19.4


def test_of_a_crowd_every_client_is_chosen_equally_often() -> None:
    """Closed form: in 2,000 rounds of 100 of 20,000, a block of 1,000 clients is asked 10,000 times, deviation 97."""
    counts = torch.zeros(20)
    for round in range(2000):
        counts += torch.bincount(choose(KEY, round, 20_000, 100) // 1000, minlength=20)
    assert float((counts - 10_000).abs().max()) < 5 * 97.3


def test_of_a_crowd_only_those_who_are_there_are_asked() -> None:
    """Law: whoever is away is never asked, and all who are there are as likely; with few there, all of them are."""
    chance = torch.zeros(20_000, dtype=torch.float64)
    chance[::2] = 1.0
    counts = torch.zeros(10)
    for round in range(1000):
        asked = choose(KEY, round, 20_000, 100, chance)
        assert len(asked) == 100
        assert not (asked % 2).any()
        counts += torch.bincount(asked // 2000, minlength=10)
    assert float((counts - 10_000).abs().max()) < 5 * 94.6
    chance[100:] = 0.0
    assert torch.equal(choose(KEY, 0, 20_000, 100, chance), torch.arange(0, 100, 2))


def test_tags_of_keys_differ() -> None:
    """Law: training, personalisation, testing and the choice of cohorts never draw the same numbers."""
    assert len({TRAIN, PERSONAL, TEST, COHORT, AVAILABLE, LOST}) == 6
    assert len({int(rng.fold(KEY, tag, 0, 0)) for tag in (TRAIN, PERSONAL, TEST, COHORT, AVAILABLE, LOST)}) == 6


# --- batch_positions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 64, 65])
@pytest.mark.parametrize("epochs", [1, 3])
def test_passes_show_every_row_once(count: int, epochs: int) -> None:
    """Law: each pass is a permutation, cut into batches of which only the last may be short; passes differ."""
    found = batch_positions(Sampling(8, epochs), count, KEY)
    per_pass = -(-count // 8)
    assert len(found) == epochs * per_pass
    for epoch in range(epochs):
        part = found[epoch * per_pass : (epoch + 1) * per_pass]
        assert [len(batch) for batch in part[:-1]] == [8] * (per_pass - 1)
        assert sorted(torch.cat(part).tolist()) == list(range(count))
    if count > 6 and epochs > 1:
        assert not torch.equal(found[0], found[per_pass])


@pytest.mark.parametrize(("count", "size"), [(1, 1), (5, 5), (20, 8)])
def test_exact_number_of_steps(count: int, size: int) -> None:
    found = batch_positions(Sampling(8, steps=4), count, KEY)
    assert [len(batch) for batch in found] == [size] * 4
    for batch in found:
        assert len(set(batch.tolist())) == size
    assert batch_positions(Sampling(8, steps=0), count, KEY) == []


def test_full_batches_hold_every_row() -> None:
    found = batch_positions(Sampling(0, steps=2, full=True), 11, KEY)
    assert [sorted(batch.tolist()) for batch in found] == [list(range(11))] * 2


@pytest.mark.parametrize("count", [3, 4, 8, 23, 24, 25, 100])
def test_batches_of_one_meta_step_are_disjoint(count: int) -> None:
    """Law: support and query share no row while the client has a row for each; the step is three equal batches."""
    found = batch_positions(Sampling(8, 2, group=3), count, KEY)
    assert len(found) % 3 == 0
    for step in range(0, len(found), 3):
        rows = torch.cat(found[step : step + 3]).tolist()
        assert len(rows) == 3 * len(found[step])
        assert len(set(rows)) == len(rows)
    assert max(len(batch) for batch in found) == min(8, count // 3)


@pytest.mark.parametrize("count", [1, 2])
def test_tiny_clients_repeat_rows_in_a_meta_step(count: int) -> None:
    found = batch_positions(Sampling(8, group=3), count, KEY)
    assert [len(batch) for batch in found] == [1, 1, 1]
    assert {int(batch) for batch in found} == set(range(count))


def test_independent_meta_batches_are_drawn_from_all_rows() -> None:
    """The released code's rule: every batch is a fresh draw of min(batch, count) rows."""
    found = batch_positions(Sampling(8, group=3, independent=True), 20, KEY)
    assert len(found) == 3
    assert all(len(set(batch.tolist())) == 8 for batch in found)
    assert len(set(torch.cat(found).tolist())) < 24


@pytest.mark.parametrize("sampling", [Sampling(8), Sampling(8, group=3), Sampling(8, steps=2), Sampling(0, full=True)])
def test_no_rows_no_batches(sampling: Sampling) -> None:
    assert batch_positions(sampling, 0, KEY) == []


# --- batches ---------------------------------------------------------------------------------------------------------


def test_batches_are_the_client_s_own_rows() -> None:
    """Every row of a pass is the client's, with its label, normalised; each step has a key of its own."""
    federation = make_federation()
    data = pool(federation, dtype=torch.float64)
    for client in range(5):
        own = federation.train[client]
        found = batches(data, client, Sampling(7), KEY, torch.tensor(2.0))
        assert sum(len(batch.y) for batch in found) == len(own)
        wanted = (federation.source.x[own] / 255 - federation.source.mean[0]) / federation.source.std[0]
        seen = torch.cat([batch.x for batch in found]).flatten(1)
        rows = torch.from_numpy(wanted).flatten(1)
        assert torch.allclose(seen.sort(0).values, rows.sort(0).values, rtol=1e-12, atol=1e-12)
        assert sorted(torch.cat([batch.y for batch in found]).tolist()) == sorted(federation.source.y[own].tolist())
        assert len({int(batch.key) for batch in found}) == len(found)
        assert {float(batch.size) for batch in found} == {float(len(own))}
        assert all(batch.mask is None and batch.x.dtype == torch.float64 for batch in found)


def test_batches_are_a_function_of_the_key() -> None:
    data = pool(make_federation())
    one, two, other = (batches(data, 0, Sampling(4), key, torch.tensor(0.0)) for key in (KEY, KEY, rng.key(8)))
    assert all(torch.equal(a.x, b.x) and a.key == b.key for a, b in zip(one, two, strict=True))
    assert not all(torch.equal(a.x, b.x) for a, b in zip(one, other, strict=True))


def test_extra_rows_come_from_other_participants() -> None:
    """The protocol of pFedGP: so many rows of every class, none one's own, none of an unseen client, none tested."""
    federation = make_federation()
    data = pool(federation)
    for client in (0, 4):
        (batch,) = batches(data, client, Sampling(0, steps=1, full=True, extra=3), KEY, torch.tensor(0.0))
        count = len(federation.train[client])
        assert len(batch.y) == count + 3 * 4 == int(batch.size)
        plain = data.inputs(torch.arange(120)).flatten(1)
        rows = [int((plain == row).all(1).nonzero()[0]) for row in batch.x.flatten(1)]
        added = set(rows) - set(federation.train[client].tolist())
        assert len(added) == 12
        assert np.bincount(federation.source.y[list(added)]).tolist() == [3] * 4
        assert added <= set(np.concatenate(federation.train[:4]).tolist())


def test_augmentation_is_seeded_and_only_where_it_is_asked_for() -> None:
    """Law: only sources that allow it are cropped and mirrored, only where the stage wants it, by the step's key."""
    for augment in (False, True):
        data = pool(make_federation(augment))
        plain, first, again = (
            batches(data, 1, Sampling(0, steps=1, full=True, augment=asked), KEY, torch.tensor(0.0))[0].x
            for asked in (False, True, True)
        )
        assert torch.equal(first, again)
        assert torch.equal(plain, first) != augment


# --- pad -------------------------------------------------------------------------------------------------------------


def test_padding_is_masked_and_loses_nothing() -> None:
    """Law: T steps with a leading axis C; real rows first, masks of ones and zeros, missing steps all zeros."""
    data = pool(make_federation(), dtype=torch.float64)
    jobs = [batches(data, client, Sampling(size), KEY, torch.tensor(1.0).double()) for client, size in ((0, 5), (1, 9))]
    jobs.append([])
    padded = pad(jobs, jobs[0][0])
    assert len(padded) == max(len(job) for job in jobs)
    for step, batch in enumerate(padded):
        assert batch.mask is not None
        assert batch.x.shape[:2] == batch.y.shape == batch.mask.shape
        assert batch.key.shape == batch.round.shape == batch.size.shape == (3,)
        for client, job in enumerate(jobs):
            real = len(job[step].y) if step < len(job) else 0
            assert batch.mask[client].tolist() == [1.0] * real + [0.0] * (batch.y.shape[1] - real)
            assert not batch.x[client, real:].any()
            if real:
                assert torch.equal(batch.x[client, :real], job[step].x)
                assert torch.equal(batch.y[client, :real], job[step].y)
                assert batch.key[client] == job[step].key


def test_padding_of_nothing() -> None:
    scalar = torch.tensor(0.0)
    blank = Batch(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), None, KEY, scalar, scalar)
    assert pad([[], []], blank) == []
    assert pad([], blank) == []


# --- who is there, and whose answer arrives --------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [50, 20_000])
def test_everybody_available_changes_nothing(clients: int) -> None:
    """Law: a probability of 1 to be there, or of 0 to be lost, gives the very same clients."""
    always = torch.ones(clients, dtype=torch.float64)
    for round in range(20):
        asked = choose(KEY, round, clients, 5)
        assert torch.equal(choose(KEY, round, clients, 5, always), asked)
        assert torch.equal(arriving(KEY, round, asked, 0 * always), asked)
        assert arriving(KEY, round, asked, None) is asked
        assert len(arriving(KEY, round, asked, always)) == 0


def test_clients_are_there_as_often_as_their_probability_says() -> None:
    """Closed form: over 1,000 rounds that ask everybody, client i is asked 1,000 p_i times, within five deviations."""
    chance = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
    asked, answered = torch.zeros(5), torch.zeros(5)
    for round in range(1000):
        here = choose(KEY, round, 5, 5, chance)
        asked[here] += 1
        answered[arriving(KEY, round, torch.arange(5), chance)] += 1
    deviation = (1000 * chance * (1 - chance)).sqrt()
    assert ((asked - 1000 * chance).abs() <= 5 * deviation).all()
    assert ((answered - 1000 * (1 - chance)).abs() <= 5 * deviation).all()


def test_who_is_there_and_who_is_lost_are_unrelated() -> None:
    """Law: the two coins of a round are different draws."""
    half = torch.full((200,), 0.5, dtype=torch.float64)
    here = set(choose(KEY, 3, 200, 200, half).tolist())
    kept = set(arriving(KEY, 3, torch.arange(200), half).tolist())
    assert 60 < len(here & kept) + len(set(range(200)) - here - kept) < 140


def test_probabilities_from_text() -> None:
    """One for all, one each between two bounds, or a list; drawn from the key alone."""
    assert probabilities("0.25", 3, KEY, "lost").tolist() == [0.25] * 3
    assert probabilities("0.5,1,0", 3, KEY, "lost").tolist() == [0.5, 1, 0]
    drawn = probabilities("0.2..0.9", 1000, KEY, "available")
    assert torch.equal(drawn, probabilities("0.2..0.9", 1000, KEY, "available"))
    assert 0.2 <= drawn.min() < 0.21
    assert 0.89 < drawn.max() <= 0.9
    assert abs(float(drawn.mean()) - 0.55) < 0.03


@pytest.mark.parametrize("text", ["", "x", "-0.1", "1.5", "nan", "0.9..0.2", "0.1..", "0.1..2", "1,,1", "0.5,0.5"])
def test_wrong_probabilities_are_explained(text: str) -> None:
    with pytest.raises(SpecError, match="available"):
        probabilities(text, 3, KEY, "available")
