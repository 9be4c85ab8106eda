"""Who stands in which row, under which name, and whose clients may be compared."""

from dataclasses import replace

import numpy as np
import pytest

from metavd.evaluate.figures import Column
from metavd.evaluate.metrics import interval
from metavd.report.gains import table as table_of_clients
from metavd.report.groups import federation, gains, group, tasks
from metavd.report.read import ReportError, read_run, read_runs
from metavd.report.summary import away_rows, columns, domain_columns, estimate, headline_columns, rows
from metavd.runs.settings import RUNTIME, Experiment, spec_hash


@pytest.fixture
def found(runs):
    return read_runs([runs])[0]


VALUES = {
    "root": ("a", "b"), "device": ("cpu", "cuda"), "precision": ("exact", "bf16"), "backend": ("loop", "vmap"),
}  # fmt: skip


def changed(run, **config):
    return replace(run, folder=run.folder / "changed", config={**run.config, **config})


def test_runs_that_differ_only_in_the_seed_are_one_group(found):
    """One group a method, seeds ascending, in the catalogue's order whatever the order of folders."""
    groups, notes = group(list(reversed(found)))
    assert notes == []
    assert [each.name for each in groups] == ["fedavg", "reptile", "reptile+metavd+drop"]
    assert all([run.seed for run in each.runs] == [0, 1] for each in groups)
    assert len({each.look.colour for each in groups}) == 3


def test_a_setting_that_came_later_makes_a_group_only_where_it_is_used(found):
    """A run whose config does not know `aggregate` stands with those of the mean; another rule is another row."""
    old = replace(found[0], config={key: value for key, value in found[0].config.items() if key != "aggregate"})
    other = replace(changed(found[1], aggregate="median"), seed=7)
    assert found[0].method == found[1].method
    groups, _ = group([old, found[1], other])
    assert [each.name for each in groups] == ["fedavg", "fedavg (aggregate=median)"]


def test_how_a_run_was_carried_out_does_not_make_a_group(found):
    """Device, backend and the rhythm of evaluation are not part of what was computed."""
    elsewhere = [changed(run, device="cuda", backend="vmap", eval_every=1, root="/data") for run in found[:1]]
    groups, notes = group([*elsewhere, *found[1:]])
    assert len(groups) == 3
    assert notes == []


@pytest.mark.parametrize("setting", sorted(RUNTIME))
def test_no_runtime_setting_makes_a_group(found, setting):
    """Law: a setting that is no part of a run's identity, precision included, is none of its group's either."""
    name = {"method": "fedavg"} | {key: run.config[key] for run in found[:1] for key in ("clients", "rounds")}
    one, other = (Experiment(**name, **{setting: value}) for value in VALUES.get(setting, (1, 2)))
    assert spec_hash(one) == spec_hash(other)
    elsewhere = [changed(found[0], **{setting: "elsewhere"}), *found[1:]]
    assert len(group(elsewhere)[0]) == len(group(found)[0]) == 3


def test_one_method_with_two_settings_is_named_by_what_differs(found):
    """The setting that tells the two apart stands in both names."""
    other = [changed(run, lr=0.5) for run in found if run.method == "reptile"]
    groups, _ = group([*found, *other])
    assert {"reptile (lr=0.02)", "reptile (lr=0.5)", "fedavg"} <= {each.name for each in groups}


def test_names_are_never_shared(found):
    """Groups that differ only in what names do not show are numbered."""
    other = [changed(run, content="another") for run in found if run.method == "reptile"]
    names = [each.name for each in group([*found, *other])[0]]
    assert len(names) == len(set(names)) == 4


def test_the_same_run_in_two_folders_counts_once(found):
    """A copy would make an interval over seeds narrower than it is."""
    copy = replace(found[0], folder=found[0].folder / "copy")
    groups, notes = group([*found, copy])
    assert [len(each.runs) for each in groups] == [2, 2, 2]
    assert len(notes) == 1
    assert "repeats" in notes[0]


def test_twelve_methods_have_twelve_looks(found):
    """No two lines of a figure look alike, however many there are."""
    many = [
        replace(found[0], method=f"m{place}", config={**found[0].config, "method": f"m{place}"}) for place in range(30)
    ]
    looks = [(each.look.colour, each.look.dash) for each in group(many)[0]]
    assert len(set(looks)) == 30


@pytest.mark.parametrize(("key", "value"), [
    ("partition", "iid"), ("content", "another"), ("test_rows", "uniform"), ("unseen", 1), ("server_share", 0.1),
])  # fmt: skip
def test_clients_correspond_only_if_they_were_dealt_alike(found, key, value):
    """Same settings of the deal, same content, same seed; anything else is another set of people."""
    run = found[0]
    assert federation(run) == federation(changed(run, method="other", lr=3.0))
    assert federation(run) != federation(changed(run, **{key: value}))
    assert federation(run) != federation(replace(run, seed=7))
    assert federation(run) != federation(replace(run, clients=run.clients[1:]))
    assert federation(run) == federation(changed(run, content=f"{run.config['content']}/network"))


def test_gains_are_differences_client_by_client(found):
    """A gain is 100 (accuracy - the baseline's accuracy) of the same client under the same seed."""
    groups, _ = group(found)
    over, notes = gains(groups, "fedavg")
    assert notes == []
    assert [gain.group.name for gain in over] == ["reptile", "reptile+metavd+drop"]
    expected = []
    for seed in (0, 1):
        before, after = (groups[place].runs[seed].clients for place in (0, 1))
        expected += [100 * (b.figures["accuracy"] - a.figures["accuracy"]) for a, b in zip(before, after, strict=True)]
    assert over[0].points == pytest.approx(expected)
    assert over[0].unseen == ([False] * 8 + [True] * 3) * 2


def test_gains_over_other_clients_are_not_drawn(found):
    """Where the baseline's clients are others, the method is named and left out."""
    others = [changed(run, partition="iid") if run.method == "reptile" else run for run in found]
    over, notes = gains(group(others)[0], "fedavg")
    assert [gain.group.method for gain in over] == ["reptile+metavd+drop"]
    assert len(notes) == 1
    assert tasks(group(others)[0]) == 2
    assert tasks(group(found)[0]) == 1


def test_a_baseline_that_was_not_run_is_refused(found):
    """The sentence says which methods there are."""
    with pytest.raises(ReportError, match="no run here has that method; there are"):
        group(found, "maml")
    assert group(found, "reptile")[0][1].look == group(found)[0][0].look


def test_intervals_over_seeds_are_students(found):
    """Mean and half width are `evaluate.interval` of the runs' figures, in per cent."""
    each = group(found)[0][1]
    got = estimate(each, columns("test")[0])
    mean, half = interval([100 * run.result["test"]["accuracy"] for run in each.runs])
    assert got is not None
    assert half is not None
    assert (got.value, got.low, got.high, got.over) == pytest.approx((mean, mean - half, mean + half, "seeds"))


def test_one_seed_shows_the_interval_over_clients(runs):
    """Without a second seed, the run's own bootstrap interval is shown, and called that."""
    run = read_run(runs / "fedavg" / "seed-0")
    groups, _ = group([run])
    got = estimate(groups[0], columns("unseen")[2])
    assert got is not None
    assert [got.low, got.high] == pytest.approx(run.result["unseen"]["intervals"]["nll"])
    assert got.over == "clients"
    worst = estimate(groups[0], columns("test")[1])
    assert worst is not None
    assert worst.low is None


def test_the_best_of_a_column_is_marked_in_its_direction(found):
    """Highest accuracy, lowest NLL; nothing is best where a column has no direction or all look alike."""
    groups, _ = group(found)
    table = rows(groups, headline_columns(groups))
    for place, column in enumerate(headline_columns(groups)):
        values = np.array([float(row[place].value) for row in table])
        marked = [row[place].best for row in table]
        if column.better == 0 or len(set(values)) == 1:
            assert not any(marked)
        else:
            best = values.max() if column.better > 0 else values.min()
            assert marked == (values == best).tolist()


def test_domains_have_a_column_each(found):
    """Names of datasets may hold anything, a dot too; accuracies are per cent."""
    run = replace(found[0], result={**found[0].result, "domains": {"a.b": {"test": 0.25, "unseen": None}}})
    groups, _ = group([run])
    ((name, pair),) = domain_columns(groups)
    assert name == "a.b"
    cells = rows(groups, pair)[0]
    assert [cell.value for cell in cells] == ["25.0", "\N{EN DASH}"]
    assert domain_columns(group(found)[0]) == []
    assert isinstance(pair[0], Column)


def test_clients_that_are_left_out_in_turn_make_one_group(found):
    """Who is left out is like another seed: one row per method, the same task, a column of accuracy on each of them."""
    away = [
        replace(changed(run, unseen=unseen), folder=run.folder / unseen)
        for run in found
        if run.seed == 0 and run.method != "reptile"
        for unseen in ("client:north", "south")
    ]
    groups, notes = group(away)
    assert notes == []
    assert [(each.name, each.left_out) for each in groups] == [
        ("fedavg", ["north", "south"]), ("reptile+metavd+drop", ["north", "south"]),
    ]  # fmt: skip
    assert tasks(groups) == 1
    assert tasks([groups[0], group(away[2:3])[0][0]]) > 1  # one of them without south
    table = away_rows(groups)
    assert [[cell.value for cell in row] for row in table] == [
        [f"{100 * each.runs[0].number('unseen', 'accuracy'):.1f}"] * 2 for each in groups
    ]
    assert [one["name"] for one in table_of_clients(groups)["sets"]] == [
        "seed 0, without north",
        "seed 0, without south",
    ]
    assert away_rows(group(found)[0]) == []
    assert all(not each.left_out for each in group(away[::2])[0])  # the same one in all runs
