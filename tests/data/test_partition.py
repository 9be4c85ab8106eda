"""Laws of `data.partition`: every row exactly once, the paper's clients to the digit, and clear refusals."""

from __future__ import annotations

import os
import time
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from metavd.data.collection import load
from metavd.data.described import describe
from metavd.data.partition import Federation, PartitionError, federate, parse, sealed
from metavd.data.partitioners import dirichlet, iid, natural, quantity, shards
from metavd.data.source import Source, arrays, digits

RNG = np.random.RandomState


def make(y, **options) -> Source:
    """Return a source with one feature, which is the row's number."""
    y = np.asarray(y)
    return arrays(np.arange(len(y), dtype=np.float32)[:, None], y, **options)


def cifar(classes: int, *, order: int | None = None) -> Source:
    """Return a source with CIFAR's class counts: 50,000 train and 10,000 test rows, in sorted or random order."""
    y = np.concatenate(
        [np.repeat(np.arange(classes), 50000 // classes), np.repeat(np.arange(classes), 10000 // classes)]
    )
    test = np.arange(60000) >= 50000
    if order is not None:
        mixed = RNG(order).permutation(60000)
        y, test = y[mixed], test[mixed]
    return make(y, test=test)


def everything(federation: Federation) -> list[int]:
    """Return all row numbers that anybody holds, sorted, repeats included."""
    held = [*federation.train, *federation.valid, *federation.test, federation.server]
    return sorted(np.concatenate(held).tolist())


def sizes(parts) -> list[int]:
    return [len(part) for part in parts]


# The paper's partition: section 7.1's table, row by row. Percentages are rounded to one digit, TV to two.
PAPER = [
    # classes, alpha, train classes mean and sd, test classes, train min/max/sd, test min/max,
    # train rows, test rows, absent labels in %, TV, first train sizes, first test sizes
    (100, 5.0, 99.78, 0.52, 71.1, (319, 455, 19.4), (24, 118), (38516, 11484), (7634, 2366), (0.2, 0.1), 0.34,
     [319, 401, 379, 382, 407], [24, 87, 67, 75, 82]),
    (100, 0.5, 73.18, 5.21, 46.3, (241, 510, 50.7), (41, 150), (38293, 11707), (7623, 2377), (27.7, 23.1), 0.68,
     [301, 486, 269, 407, 372], [41, 49, 78, 78, 83]),
    (100, 0.1, 33.78, 7.33, 23.0, (156, 895, 117.5), (26, 146), (37630, 12370), (7506, 2494), (69.1, 63.8), 0.89,
     [333, 354, 495, 284, 523], [54, 40, 49, 51, 101]),
    (10, 5.0, 10.00, 0.00, 10.0, (256, 511, 51.4), (52, 107), (38652, 11348), (7657, 2343), (0.0, 0.0), 0.23,
     [391, 411, 396, 503, 320], [66, 90, 107, 73, 100]),
    (10, 0.5, 9.10, 0.94, 8.3, (87, 796, 160.6), (20, 206), (37984, 12016), (7697, 2303), (10.0, 10.9), 0.60,
     [191, 127, 278, 234, 522], [95, 86, 163, 68, 53]),
    (10, 0.1, 4.65, 1.49, 4.1, (3, 2511, 382.7), (2, 294), (39241, 10759), (7777, 2223), (57.7, 56.3), 0.83,
     [365, 659, 327, 103, 2511], [11, 15, 125, 28, 52]),
]  # fmt: skip


@pytest.mark.parametrize("order", [None, 5], ids=["sorted", "mixed"])
@pytest.mark.parametrize("row", PAPER, ids=[f"cifar{row[0]}-{row[1]}" for row in PAPER])
def test_paper_partition_to_the_digit(row, order):
    """Seed 777, 100 + 30 clients and CIFAR's class counts give T9 and section 7.1's table, in any order of rows."""
    _is_the_papers(row, cifar(row[0], order=order))


@pytest.mark.skipif("METAVD_DATA" not in os.environ, reason="METAVD_DATA is not set")
@pytest.mark.parametrize("row", PAPER, ids=[f"cifar{row[0]}-{row[1]}" for row in PAPER])
def test_paper_partition_of_the_real_files(row):
    """The same from the files themselves."""
    _is_the_papers(row, load(f"cifar{row[0]}", os.environ["METAVD_DATA"]).sources[0])


def _is_the_papers(row, source):
    classes, alpha, mean, sd, test_classes, train_size, test_size, train_rows, test_rows, absent, tv, first, second = (
        row
    )
    assert source.num_classes == classes
    federation = federate(source, f"dirichlet:{alpha}", clients=100, unseen=30, seed=777)
    told = describe(federation)
    assert (round(told["train_classes"]["mean"], 2), round(told["train_classes"]["sd"], 2)) == (mean, sd)
    assert round(told["test_classes"]["mean"], 1) == test_classes
    size = told["train_size"]
    assert (size["min"], size["max"], round(size["sd"], 1), round(size["mean"], 1)) == (*train_size, 384.6)
    assert (told["test_size"]["min"], told["test_size"]["max"]) == test_size
    assert tuple(told["train_rows"].values()) == train_rows
    assert tuple(told["test_rows"].values()) == test_rows
    assert tuple(round(100 * share, 1) for share in told["absent"].values()) == absent
    assert round(told["total_variation"], 2) == tv
    assert sizes(federation.train)[:5] == first
    assert sizes(federation.test)[:5] == second
    assert everything(federation) == list(range(60000))


def test_paper_has_twenty_small_clients():
    """Section 7.1: at CIFAR-10, alpha 0.1, twenty clients have fewer rows than a batch of 64."""
    federation = federate(cifar(10), "dirichlet:0.1", clients=100, unseen=30, seed=777)
    assert sum(size < 64 for size in sizes(federation.train)) == 20


def test_dirichlet_is_the_released_routine_row_by_row():
    """Parity with the routine of section 7.1 written out plainly, not only in sizes but in rows and their order."""
    y = RNG(3).randint(0, 4, 200)
    rng = RNG(9)
    while True:
        expected: list[list[int]] = [[] for _ in range(15)]
        for label in range(4):
            rows = np.flatnonzero(y == label)
            rng.shuffle(rows)
            cuts = (np.cumsum(rng.dirichlet(np.repeat(0.2, 15))) * len(rows)).astype(int)[:-1]
            for client, piece in enumerate(np.split(rows, cuts)):
                expected[client] += piece.tolist()
        if min(map(len, expected)) >= 1:
            break
    for rows in expected:
        rng.shuffle(rows)
    used = RNG(9)
    assert [part.tolist() for part in dirichlet(0.2)(y, 15, used, None)] == expected
    assert used.randint(2**31) == rng.randint(2**31), "the generator continues from the same place"


def test_dirichlet_above_400_clients_permutes_pieces():
    """Flooring starves the first client below 401 clients; above, pieces are dealt in random order and nobody is."""
    y = np.tile(np.arange(100), 400)
    starved = dirichlet(50.0)(y, 400, RNG(0), None)
    fair = dirichlet(50.0)(y, 401, RNG(0), None)
    assert len(starved[0]) < 70
    assert len(starved[-1]) > 130
    assert len(fair[0]) > 80
    assert len(fair[-1]) < 120
    for parts in (starved, fair):
        assert sorted(np.concatenate(parts).tolist()) == list(range(40000))
    # Most draws here have an empty client, so a wrong count of permuted pieces would let one through.
    for seed in range(12):
        assert min(sizes(dirichlet(0.3)(y[y < 10], 401, RNG(seed), None))) >= 1


def test_global_generator_is_left_alone():
    """No call reads or moves NumPy's global state."""
    before = np.random.get_state()[1].copy()  # type: ignore[index,union-attr]  # noqa: NPY002
    federate(digits(), clients=10, unseen=2, seed=0)
    assert (np.random.get_state()[1] == before).all()  # type: ignore[index]  # noqa: NPY002


@settings(max_examples=150, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    spec=st.sampled_from(
        ["dirichlet:5", "dirichlet:0.5", "dirichlet:1e-7", "iid", "shards:1", "shards:2", "quantity:2"]
    ),
    num=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
    least=st.sampled_from([0, 1]),
)
def test_partitions_are_partitions(labels, spec, num, seed, least):
    """Every position exactly once, everybody has `least` rows, the seed decides; or a refusal, and only a refusal."""
    y = np.array(labels)
    try:
        parts = parse(spec, least=least)(y, num, RNG(seed), None)
    except PartitionError:
        assert least == 1 or spec.startswith("shards")
        return
    assert len(parts) == num
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(y)))
    assert min(sizes(parts)) >= least
    again = parse(spec, least=least)(y, num, RNG(seed), None)
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))


def test_dirichlet_limits():
    """A huge alpha gives every client the same mix, a tiny one gives every class to one client."""
    y = np.tile(np.arange(4), 250)
    even = dirichlet(1e6)(y, 5, RNG(0), None)
    assert all(abs((y[part] == k).sum() - 50) <= 1 for part in even for k in range(4))
    lonely = dirichlet(1e-300, least=0)(y, 5, RNG(0), None)
    assert all(sum((y[part] == k).any() for part in lonely) == 1 for k in range(4))


def test_iid_sizes():
    """Sizes of iid clients differ by at most one."""
    assert sorted(sizes(iid()(np.zeros(17), 5, RNG(0), None))) == [3, 3, 3, 4, 4]


@pytest.mark.parametrize(("k", "num"), [(1, 10), (2, 5), (2, 13), (3, 20), (10, 7)])
def test_shards_hold_exactly_k_classes(k, num):
    """Every client has exactly k classes; with equal classes, shards of one class differ by at most one row."""
    y = np.tile(np.arange(10), 100)
    parts = shards(k)(y, num, RNG(1), None)
    counts = np.stack([np.bincount(y[part], minlength=10) for part in parts])
    assert ((counts > 0).sum(1) == k).all()
    for column in counts.T:
        assert np.ptp(column[column > 0]) <= 1
    assert sorted(np.concatenate(parts).tolist()) == list(range(1000))


def test_shards_follow_class_sizes():
    """A class with six times the rows gets six times the shards, so that clients' sizes are alike."""
    y = np.repeat([0, 1, 2], [600, 300, 100])
    parts = shards(1)(y, 10, RNG(0), None)
    assert sizes(parts) == [100] * 10
    assert sorted(int(y[part[0]]) for part in parts) == [0] * 6 + [1] * 3 + [2]


def test_quantity_is_log_normal():
    """The log size is normal with deviation sigma; sigma 0 is even; the label mix does not depend on the client."""
    many = sizes(quantity(1.0)(np.zeros(2_000_000), 2000, RNG(0), None))
    assert np.std(np.log(many)) == pytest.approx(1.0, rel=0.05)
    assert sorted(sizes(quantity(0.0)(np.zeros(17), 5, RNG(0), None))) == [3, 3, 3, 4, 4]
    assert min(sizes(quantity(10.0)(np.zeros(50), 30, RNG(0), None))) == 1


def test_natural_keeps_owners_whole():
    """A client has all rows of one owner and of nobody else; owners are drawn at random, none twice."""
    ids = np.array([5, 9, 5, 2, 9, 9, 2, 7])
    parts = natural()(np.zeros(8), 3, RNG(0), ids)
    owners = [set(ids[part].tolist()) for part in parts]
    assert all(len(owner) == 1 for owner in owners)
    assert len(set.union(*owners)) == 3
    for part in parts:
        assert len(part) == (ids == ids[part[0]]).sum()
    assert len({tuple(ids[p[0]] for p in natural()(np.zeros(8), 3, RNG(s), ids)) for s in range(20)}) > 3
    assert sizes(natural(least=3)(np.zeros(8), 1, RNG(0), ids)) == [3]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dirichelt:0.5", "did you mean dirichlet:0.5"),
        ("Dirichlet:0.5", "did you mean dirichlet:0.5"),
        ("zzz", "choose from dirichlet:0.5, iid, shards:2, quantity:1.0, natural"),
        ("", "There is no partition ''"),
        ("shard:2", "did you mean shards:2"),
        ("dirichlet", "'dirichlet' needs a number after the colon, such as dirichlet:0.5"),
        ("dirichlet:", "needs a number"),
        ("dirichlet:x", "needs a number"),
        ("dirichlet:0", "alpha 0, but alpha must be above 0 and at most 1e\\+06"),
        ("dirichlet:-1", "alpha -1"),
        ("dirichlet:nan", "alpha nan"),
        ("dirichlet:inf", "alpha inf"),
        ("shards:2.5", "needs a whole number"),
        ("shards:0", "k 0, but k must be a whole number of classes, at least 1"),
        ("quantity:-0.1", "sigma -0.1, but sigma must be at least 0 and at most 10"),
        ("iid:3", "iid takes no value"),
        ("natural:", "natural takes no value"),
    ],
)
def test_parse_refuses_in_one_sentence(spec, message):
    """A wrong text is answered with its value, the range, or the nearest right name."""
    with pytest.raises(PartitionError, match=message) as caught:
        parse(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["dirichlet:0.5", "iid", "shards:2", "quantity:1.0"])
def test_more_clients_than_rows(spec):
    """Nobody can get a row each from too few rows; the sentence names clients and rows, and comes at once."""
    with pytest.raises(PartitionError, match="50 clients a row each from 40 rows; use at most 40 clients"):
        parse(spec)(np.tile([0, 1], 20), 50, RNG(0), None)


def test_hopeless_dirichlet_ends():
    """The repetition is bounded and ends in a sentence that names alpha, clients and rows."""
    start = time.process_time()
    with pytest.raises(PartitionError, match=r"alpha 0\.01 .* of 20 clients .* 1000 draws over 100 rows"):
        dirichlet(0.01)(np.tile([0, 1], 50), 20, RNG(0), None)
    with pytest.raises(PartitionError, match=r"alpha 0\.1 .* of 5000 clients .* 11 draws over 10000 rows"):
        dirichlet(0.1)(np.tile(np.arange(10), 1000), 5000, RNG(0), None)
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("k", "num", "labels", "message"),
    [
        (2, 4, np.tile(np.arange(10), 50), "use shards:3"),
        (11, 4, np.tile(np.arange(10), 50), "use shards:10"),
        (2, 3, [0] * 50 + [1], "use shards:1"),
        (1, 2, [0, 1, 2], "use fewer clients or more rows"),
    ],
)
def test_impossible_shards_say_what_is_possible(k, num, labels, message):
    """Too few shards would leave a class over, too many would leave a shard empty."""
    with pytest.raises(PartitionError, match=message):
        shards(k)(np.asarray(labels), num, RNG(0), None)


def test_natural_refusals():
    """Without owners, or with fewer than asked for, there is no natural partition."""
    with pytest.raises(PartitionError, match="whose each row is"):
        federate(digits(), "natural", clients=2, seed=0)
    with pytest.raises(PartitionError, match=r"3 clients .* 4 rows that come from 2; use at most 2"):
        federate(make([0, 1, 0, 1], client=[4, 4, 8, 8]), "natural", clients=2, unseen=1, seed=0)


# federate


@settings(max_examples=60, deadline=None)
@given(
    spec=st.sampled_from(["dirichlet:1.0", "iid", "shards:2", "quantity:1.0", "natural"]),
    test_rows=st.sampled_from(["independent", "consistent", "uniform"]),
    official=st.booleans(),
    clients=st.integers(2, 6),
    unseen=st.integers(0, 3),
    valid=st.sampled_from([0.0, 0.1, 0.9]),
    test_share=st.sampled_from([0.0, 0.2, 0.9]),
    server_share=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(0, 1000),
)
@example(spec="natural", test_rows="uniform", official=False, clients=2, unseen=0, valid=0.0, test_share=0.9,
         server_share=0.5, seed=90)  # fmt: skip
def test_federation_holds_every_row_once(  # noqa: PLR0917 - hypothesis passes by name
    spec, test_rows, official, clients, unseen, valid, test_share, server_share, seed
):
    """No row twice; none lost (but other owners' rows); everybody can train; unseen clients validate nothing."""
    rng = RNG(seed)
    y = np.concatenate([np.arange(3), rng.randint(0, 3, 197)])
    owner = rng.randint(0, 9, 200)
    test = rng.rand(200) < 0.3
    source = make(y, client=owner, test=test if official else None)
    whole = partial(
        federate, source, spec, clients=clients, unseen=unseen, test_rows=test_rows, valid=valid, test_share=test_share,
        seed=seed,
    )  # fmt: skip
    try:
        federation = whole(server_share=server_share)
    except PartitionError:  # there is a row for the server only where a client has two
        assert max(map(len, whole().train)) == 1
        return
    held = everything(federation)
    assert len(set(held)) == len(held)
    if spec != "natural":
        assert held == list(range(200))
    assert len(federation.train) == len(federation.valid) == len(federation.test) == clients + unseen
    assert min(sizes(federation.train)) >= 1
    assert sum(sizes(federation.valid)[clients:]) == 0
    assert (len(federation.server) > 0) == (server_share > 0)
    if official:
        for rows in (*federation.train, *federation.valid, federation.server):
            assert spec == "natural" or not test[rows].any()
        for rows in federation.test:
            assert spec == "natural" or test[rows].all()


def test_settings_do_not_disturb_each_other():
    """Holding rows out, for validation or the server, leaves the partition as it was; and a seed is a partition."""
    plain = federate(digits(), clients=10, unseen=2, seed=3)
    held = federate(digits(), clients=10, unseen=2, seed=3, valid=0.2, server_share=0.1)
    for a, b, c in zip(plain.train, held.train, held.valid, strict=True):
        assert set(b.tolist()) | set(c.tolist()) <= set(a.tolist())
    assert all((a == b).all() for a, b in zip(plain.test, held.test, strict=True))
    other = federate(digits(), clients=10, unseen=2, seed=4)
    assert sizes(other.train) != sizes(plain.train)


def test_split_of_a_source_without_one_is_stratified():
    """Every class gives the nearest whole number to its share of test rows, and keeps a train row."""
    y = np.repeat([0, 1, 2], [100, 13, 1])
    federation = federate(make(y), "iid", clients=3, seed=0)
    rows = np.concatenate(federation.test)
    assert np.bincount(y[rows], minlength=3).tolist() == [20, 3, 0]
    other = np.concatenate(federate(make(y), "iid", clients=3, seed=1).test)
    assert set(other.tolist()) != set(rows.tolist())


def test_consistent_follows_the_train_mix():
    """Each class's test rows go by largest remainder: within one row of n_k c_ik / c_k for every client."""
    source = cifar(10)
    federation = federate(source, "dirichlet:0.1", clients=100, unseen=30, test_rows="consistent", seed=777)
    train = np.stack([np.bincount(source.y[rows], minlength=10) for rows in federation.train])
    test = np.stack([np.bincount(source.y[rows], minlength=10) for rows in federation.test])
    quota = 1000 * train / 5000
    assert np.abs(test - quota).max() < 1
    assert (test.sum(0) == 1000).all()
    told = describe(federation)
    assert told["absent"] == {"participating": 0.0, "unseen": 0.0}
    assert told["total_variation"] < 0.06


def test_consistent_breaks_ties_by_seed():
    """Ten clients with one train row of each class share five test rows of each; who gets them is the seed's choice."""
    y = np.array([0] * 10 + [0] * 5 + [1] * 10 + [1] * 5)
    test = np.tile([False] * 10 + [True] * 5, 2)
    source = make(y, test=test)
    chosen = [
        tuple(sizes(federate(source, "shards:2", clients=10, test_rows="consistent", seed=seed).test))
        for seed in range(12)
    ]
    assert len(set(chosen)) > 6
    assert all(sum(each) == 10 for each in chosen)


def test_consistent_deals_untrained_classes_evenly():
    """A class without train rows has no mix to follow."""
    y = np.array([0] * 8 + [1] * 8 + [2] * 8)
    source = make(y, test=y == 2)
    federation = federate(source, "shards:1", clients=4, test_rows="consistent", seed=0)
    assert sizes(federation.test) == [2, 2, 2, 2]


def test_uniform_test_rows_are_even():
    """Test rows are dealt evenly whatever the train rows do."""
    federation = federate(digits(), "dirichlet:0.1", clients=10, unseen=3, test_rows="uniform", seed=1)
    assert np.ptp(sizes(federation.test)) <= 1


def test_few_test_rows_leave_some_clients_without():
    """A client without test rows is allowed: more clients than test rows is no error, in any way to deal them."""
    source = make(np.tile([0, 1], 20), test=np.arange(40) < 3)
    for spec in ("dirichlet:0.5", "iid", "shards:1", "shards:2", "quantity:1.0"):
        for test_rows in ("independent", "consistent", "uniform"):
            federation = federate(source, spec, clients=6, test_rows=test_rows, seed=0)
            assert sum(sizes(federation.test)) == 3
            assert min(sizes(federation.test)) == 0
    none = federate(make(np.tile([0, 1], 20)), clients=4, test_share=0.0, seed=0)
    assert sizes(none.test) == [0] * 4
    assert describe(none)["absent"] == {"participating": None, "unseen": None}
    assert describe(none)["total_variation"] is None


def test_natural_split_is_the_owners_own():
    """The official split rules where an owner has rows on both sides; else test_share of its rows is held out."""
    owner = np.repeat([0, 1, 2, 3], 10)
    test = np.zeros(40, bool)
    test[[3, 4]] = True  # owner 0 has both
    test[10:20] = True  # owner 1 has only test rows
    source = make(np.tile([0, 1], 20), client=owner, test=test)
    federation = federate(source, "natural", clients=3, unseen=1, test_share=0.3, seed=0)
    by_owner = {int(owner[rows[0]]): index for index, rows in enumerate(federation.train)}
    assert sorted(by_owner) == [0, 1, 2, 3]
    assert sorted(federation.test[by_owner[0]].tolist()) == [3, 4]
    for who in (1, 2, 3):
        assert len(federation.test[by_owner[who]]) == 3
        assert set(owner[federation.test[by_owner[who]]]) == {who}
    assert everything(federation) == list(range(40))


def test_natural_draws_unseen_owners_at_random():
    """Who is unseen depends on the seed, not on the order of the ids."""
    source = make(np.tile([0, 1], 20), client=np.repeat(np.arange(10), 4))
    unseen = {int(federate(source, "natural", clients=9, unseen=1, seed=s).train[9][0]) // 4 for s in range(30)}
    assert len(unseen) > 5


@pytest.mark.parametrize("valid_rows", ["independent", "consistent", "uniform"])
def test_validation_rows_are_dealt_as_test_rows(valid_rows):
    """A tenth of every class is taken before anybody has a row, and reaches the clients by the rule of test rows.

    Consistent rows follow a client's own mix of labels, as far as whole rows can; uniform and independent ones do not.
    """
    source = make(np.repeat(np.arange(10), 600), test=np.tile(np.arange(6) == 0, 1000))
    asked = {"clients": 20, "unseen": 5, "seed": 3, "valid": 0.1, "valid_rows": valid_rows, "valid_clients": 5}
    federation = federate(source, "dirichlet:0.5", **asked)
    watched = [*range(20), *range(25, 30)]
    assert sum(sizes(federation.valid)) == 500
    assert sum(len(federation.valid[client]) for client in watched) == 500
    assert np.bincount(source.y[np.concatenate(federation.valid)]).tolist() == [50] * 10
    assert sum(sizes(federation.test[25:])) == 0
    assert sum(sizes(federation.test)) == 1000
    every = np.concatenate([*federation.train, *federation.valid, *federation.test])
    assert len(np.unique(every)) == len(every) == 6000

    def gap(client: int) -> float:
        mixes = [np.bincount(source.y[part[client]], minlength=10) for part in (federation.train, federation.valid)]
        return float(np.abs(mixes[0] / mixes[0].sum() - mixes[1] / mixes[1].sum()).sum() / 2)

    gaps = [gap(client) for client in watched if len(federation.valid[client])]
    assert (np.mean(gaps) < 0.15) == (valid_rows == "consistent")
    if valid_rows == "uniform":
        assert {len(federation.valid[client]) for client in watched} == {20}


def test_validation_rows_leave_the_test_rows_alone():
    """Who tests on what is the same with validation rows or without, where test rows are dealt evenly."""
    source = make(np.repeat(np.arange(10), 600), test=np.tile(np.arange(6) == 0, 1000))
    plain = federate(source, "iid", clients=10, unseen=2, test_rows="uniform", seed=3)
    held = federate(source, "iid", clients=10, unseen=2, test_rows="uniform", seed=3, valid=0.1, valid_rows="uniform")
    assert np.array_equal(np.sort(np.concatenate(plain.test)), np.sort(np.concatenate(held.test)))
    assert sum(sizes(plain.train)) == sum(sizes(held.train)) + sum(sizes(held.valid))


def test_sealed_holds_no_hidden_row():
    """Nobody holds a test row or a row of an unseen client; every other row is held by whom it was."""
    source = make(np.repeat(np.arange(5), 60))
    whole = federate(source, "iid", clients=6, unseen=3, valid=0.2, valid_rows="uniform", valid_clients=2, seed=0)
    shut = sealed(whole)
    assert not any(map(len, shut.test))
    assert (shut.num_clients, shut.num_unseen, shut.num_valid) == (6, 0, 2)
    for new, old in enumerate([*range(6), 9, 10]):
        np.testing.assert_array_equal(shut.train[new], whole.train[old])
        np.testing.assert_array_equal(shut.valid[new], whole.valid[old])


def test_valid_takes_its_share_and_leaves_one():
    """A participating client gives the nearest whole number of its rows, but never its last one."""
    federation = federate(make(np.tile([0, 1], 20)), "iid", clients=3, unseen=1, test_share=0.0, valid=0.2, seed=0)
    assert sizes(federation.valid) == [2, 2, 2, 0]
    assert sizes(federation.train) == [8, 8, 8, 10]
    greedy = federate(make([0, 1, 0, 1]), "iid", clients=4, test_share=0.0, valid=0.9, seed=0)
    assert sizes(greedy.train) == [1, 1, 1, 1]


def test_server_gets_the_floor_of_each_client():
    """floor(share n) rows of every client, unseen included, counted in decimals; never nothing, if asked."""
    source = make(np.tile([0, 1], 200))
    federation = federate(source, "iid", clients=3, unseen=1, test_share=0.0, server_share=0.29, seed=0)
    assert sizes(federation.train) == [71] * 4  # 0.29 x 100 is 28.999999999999996 in binary
    assert len(federation.server) == 116
    assert sizes(federate(source, "iid", clients=4, seed=0).server.reshape(1, -1)) == [0]
    little = federate(source, "iid", clients=4, test_share=0.0, server_share=0.001, seed=0)
    assert len(little.server) == 1
    with pytest.raises(PartitionError, match=r"server_share is 0\.5, but no client has a train row to spare"):
        federate(make([0, 1, 0, 1]), "iid", clients=4, test_share=0.0, server_share=0.5, seed=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 0}, "clients is 0, but it must be a whole number, at least 1"),
        ({"clients": 2.5}, "clients is 2.5"),
        ({"clients": True}, "clients is True"),
        ({"unseen": -1}, "unseen is -1, but it must be a whole number, at least 0"),
        ({"valid": 1.0}, "valid is 1.0, but it must be a share, at least 0 and below 1"),
        ({"valid": float("nan")}, "valid is nan"),
        ({"valid": "0.1"}, "valid is 0.1"),
        ({"valid": 0.1, "valid_rows": "unifrom"}, "valid_rows is 'unifrom'; did you mean uniform"),
        ({"valid_clients": 3}, "valid_clients is 3, but valid is 0"),
        ({"valid": 0.1, "valid_clients": -1}, "valid_clients is -1, but it must be a whole number, at least 0"),
        ({"test_share": -0.1}, "test_share is -0.1"),
        ({"server_share": 2}, "server_share is 2"),
        ({"test_rows": "consistant"}, "test_rows is 'consistant'; did you mean consistent"),
        ({"test_rows": "zzz"}, "choose from independent, consistent, uniform"),
        ({"seed": -1}, "seed is -1, but it must be a whole number from 0"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"partition": "iidd"}, "did you mean iid"),
        ({"clients": 5000}, "5000 clients a row each from 1438 rows"),
    ],
)
def test_federate_refuses_in_one_sentence(options, message):
    """A wrong setting is named with its value and what would be right."""
    with pytest.raises(PartitionError, match=message) as caught:
        federate(digits(), **{"clients": 4, "seed": 0, **options})
    assert "\n" not in str(caught.value)


def test_describe_by_hand():
    """Two clients whose figures can be counted on fingers."""
    y = np.array([0, 0, 1, 1, 1, 0, 1, 2])
    source = make(y)
    parts = [np.array(rows) for rows in ([0, 1], [2, 3, 4], [5, 6], [7])]
    federation = Federation(
        source=source,
        train=(parts[0], parts[1]),
        valid=(np.empty(0, np.int64),) * 2,
        test=(parts[2], parts[3]),
        num_clients=1,
        num_unseen=1,
        server=np.empty(0, np.int64),
    )
    told = describe(federation)
    assert told["train_size"] == {"min": 2, "mean": 2.5, "max": 3, "sd": 0.5}
    assert told["test_size"] == {"min": 1, "mean": 1.5, "max": 2, "sd": 0.5}
    assert told["train_classes"]["mean"] == 1.0
    assert told["test_classes"]["mean"] == 1.5
    assert told["absent"] == {"participating": 0.5, "unseen": 1.0}
    assert told["total_variation"] == pytest.approx((0.5 + 1.0) / 2)
    assert told["train_rows"] == {"participating": 2, "unseen": 3}


def test_many_clients_are_quick():
    """10,000 natural clients over 60,000 rows are dealt and described in a moment."""
    source = make(np.tile(np.arange(10), 6000), client=RNG(0).permutation(60000) % 10000)
    start = time.process_time()
    describe(federate(source, "natural", clients=9000, unseen=1000, seed=0))
    describe(federate(source, "iid", clients=9000, unseen=1000, test_rows="consistent", seed=0))
    assert time.process_time() - start < 10
