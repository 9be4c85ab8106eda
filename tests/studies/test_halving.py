"""Successive halving: equal terms for all methods, rungs that can be stopped, and nothing hidden is looked at."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from metavd.data import partition
from metavd.engine.checkpoint import load_checkpoint
from metavd.engine.rounds import Silent
from metavd.errors import UserError
from metavd.runs import setup as runs
from metavd.runs.settings import Experiment, resolve, spec_hash, with_settings
from metavd.studies import halving
from metavd.studies.halving import Halving, points, search
from metavd.studies.lines import append
from metavd.studies.many import Ended
from metavd.studies.plan import Dimension, space

SETTINGS = {
    "data": "digits", "clients": 6, "unseen": 2, "cohort": 3, "valid": 0.2, "valid_clients": 3, "model": "mlp",
    "width": 8, "seed": 1001, "device": "cpu", "local_epochs": 1,
}  # fmt: skip


def asked(method: str) -> Experiment:
    return with_settings(Experiment(), {"method": method, **SETTINGS})


def found(tmp_path, *names: str, rungs: tuple[int, ...] = (2, 4), trials: int = 4) -> list[halving.Line]:
    return list(
        search([asked(name) for name in names], Halving(trials, rungs), store=tmp_path / "s.jsonl", scratch=tmp_path)
    )


def test_every_method_has_the_same_trials_and_rounds(tmp_path):
    """Methods with spaces of different sizes take part in every rung with the same number of trials."""
    lines = found(tmp_path, "fedavg", "reptile+dropout")
    for method in ("fedavg", "reptile+dropout"):
        counts = [sum(line["method"] == method and line["round"] == rung for line in lines) for rung in (2, 4)]
        assert counts == [4, 2]


def test_the_best_go_on(tmp_path):
    """Those with the highest scores of a rung are in the next one."""
    lines = found(tmp_path, "reptile")
    first = {line["trial"]: line["score"] for line in lines if line["round"] == 2}
    second = {line["trial"] for line in lines if line["round"] == 4}
    assert second == set(sorted(first, key=lambda trial: -first[trial])[:2])


def test_a_rung_does_not_change_what_comes_after_it(tmp_path):
    """A trial that was stopped at a rung scores what it scores when it is trained in one go; so without its state."""
    stopped = {(line["trial"], line["round"]): line for line in found(tmp_path / "a", "reptile+metavd")}
    whole = {(line["trial"], line["round"]): line for line in found(tmp_path / "b", "reptile+metavd", rungs=(4,))}
    for trial in {trial for trial, round in stopped if round == 4}:
        both = [{part: each[trial, 4][part] for part in ("valid", "valid_unseen")} for each in (stopped, whole)]
        assert both[0] == both[1]


def test_what_is_in_the_store_is_not_computed_again(tmp_path):
    """A second search over the same store has nothing to do, and a new method only its own."""
    assert len(found(tmp_path, "fedavg")) == 6
    assert found(tmp_path, "fedavg") == []
    assert {line["method"] for line in found(tmp_path, "fedavg", "reptile")} == {"reptile"}


def test_another_space_is_another_trial(tmp_path):
    """A trial's number means nothing: with another space only what has the same settings is there already."""
    found(tmp_path, "fedavg", rungs=(2,))
    again = search([asked("fedavg")], Halving(4, (2,)), store=tmp_path / "s.jsonl", scratch=tmp_path,
                   searched={"lr": "0.2..0.4"})  # fmt: skip
    assert [line["trial"] for line in again] == [1, 2, 3]


def test_no_hidden_row_is_looked_at(tmp_path, monkeypatch):
    """With other values in test rows and in all rows of unseen clients every line is the same."""
    before = found(tmp_path / "a", "reptile+metavd")
    deal = runs.deal

    def poisoned(e, data):
        whole = deal(e, data)
        unseen = slice(whole.num_clients, whole.num_clients + whole.num_unseen)
        rows = np.concatenate([*whole.test, *whole.train[unseen]])
        assert len(rows) > 300
        x = whole.source.x.copy()
        x[rows] = 255 - x[rows]
        return replace(whole, source=replace(whole.source, x=x))

    monkeypatch.setattr(runs, "deal", poisoned)
    after = found(tmp_path / "b", "reptile+metavd")
    keys = ("method", "trial", "round", "score", "valid", "valid_unseen")
    assert [[line[key] for key in keys] for line in before] == [[line[key] for key in keys] for line in after]
    assert partition.sealed(deal(runs.complete(asked("fedavg"), runs.data_of(asked("fedavg"))),
                                 runs.data_of(asked("fedavg")))).num_unseen == 0  # fmt: skip


def test_a_trial_that_diverges_is_told_and_does_not_go_on(tmp_path):
    """Its line has no score but a reason, and the others fill its place."""
    e = with_settings(asked("fedavg"), {"clip": 1e30})
    lines = list(search([e], Halving(4, (2, 4)), store=tmp_path / "s.jsonl", scratch=tmp_path,
                        searched={"lr": "1e18,1e19,1e20"}))  # fmt: skip
    told = [line for line in lines if line["score"] is None]
    assert told
    assert all("NaN" in line["reason"] for line in told)
    assert not {line["trial"] for line in told} & {line["trial"] for line in lines if line["round"] == 4}


def test_what_was_fixed_beside_is_part_of_a_trial(tmp_path, monkeypatch):
    """The defaults of another day, another fixed option, field or number of rounds are trials that were not yet run."""
    store = tmp_path / "s.jsonl"

    def missing(settings, rungs=(2,)) -> list[dict]:
        e = with_settings(asked("fedavg"), settings)
        tasks = []
        monkeypatch.setattr(halving, "carry_out", lambda asked, *_, **__: tasks.extend(asked.values()) or [])
        list(search([e], Halving(3, rungs), store=store, scratch=tmp_path, searched={"lr": "0.02,0.1,0.3"}))
        return [task["settings"] for task in tasks]

    def done(**line) -> None:
        about = {"study": halving.study_of(asked("fedavg")), "method": "fedavg", "seed": 1001, "round": 2, "of": 2}
        append(store, {**about, "trial": 0, "score": 0.5, **line})

    assert missing({}) == [{"lr": 0.02}, {"lr": 0.1}, {"lr": 0.3}]
    options, fields = dict(resolve(asked("fedavg")).options), {**SETTINGS, "valid_rows": ""}
    done(settings={"lr": 0.1})  # an older line, known by its settings alone
    assert missing({}) == [{"lr": 0.02}, {"lr": 0.3}]
    done(settings={}, options=options | {"lr": 0.07})  # older defaults
    assert missing({}) == [{"lr": 0.02}, {"lr": 0.3}]
    done(settings={}, options=options)
    assert missing({}) == [{"lr": 0.3}]
    assert {"lr": 0.02} in missing({"batch": 9})
    assert missing({}, rungs=(3,)) == [{"lr": 0.02}, {"lr": 0.1}, {"lr": 0.3}]
    given = {key: fields[key] for key in ("clients", "unseen", "cohort", "valid", "valid_clients", "model", "width")}
    done(settings={"lr": 0.3}, options=options | {"lr": 0.3}, fields=given)
    assert missing({}) == []
    assert missing({"clients": 7}) == [{"lr": 0.3}]


def test_a_rung_that_is_not_over_is_gone_on_with_first(tmp_path, monkeypatch):
    """Of a method whose first rung lacks trials for want of time, nothing is in the second; the others go on."""
    whole = halving.carry_out

    def hurried(tasks, *words, **more):
        late = {key for key, task in tasks.items() if task["method"] == "fedavg" and task["trial"] == 3}
        yield from whole({key: task for key, task in tasks.items() if key not in late}, *words, **more)
        yield from (Ended(key, "left") for key in late)

    monkeypatch.setattr(halving, "carry_out", hurried)
    lines, said = [], []
    e = [asked("fedavg"), asked("reptile")]
    where = {"store": tmp_path / "s.jsonl", "scratch": tmp_path}
    lines += search(e, Halving(4, (1, 2)), **where, note=said.append)
    counts = Counter((line["method"], line["round"]) for line in lines)
    assert counts == {("fedavg", 1): 3, ("reptile", 1): 4, ("reptile", 2): 2}
    assert said == ["1 trials were not begun, for want of time; the same command goes on with them"]
    monkeypatch.undo()
    again = Counter((line["method"], line["round"]) for line in search(e, Halving(4, (1, 2)), **where))
    assert again == {("fedavg", 1): 1, ("fedavg", 2): 2}


def test_no_trial_goes_past_its_privacy_budget(tmp_path):
    """Rounds of earlier rungs count; a trial whose budget is over is scored where it ended, and that is said."""
    pytest.importorskip("dp_accounting")
    noisy = with_settings(asked("fedavg+dp"), {"noise": 1.0})
    usual = runs.prepare(noisy, runs.data_of(noisy), sealed=True).algorithm.privacy
    budget = 1.001 * usual.spent({1.0: 3})
    e, how = with_settings(noisy, {"epsilon": budget}), {"searched": {"lr": "0.1,0.2,0.3"}}

    def tuned(folder, *rungs):
        said = []
        lines = search([e], Halving(3, rungs), store=folder / "s.jsonl", scratch=folder, note=said.append, **how)
        return {(line["trial"], line["round"]): line for line in lines}, said

    lines, said = tuned(tmp_path / "a", 2, 5, 8)
    over = {key for key, line in lines.items() if "spent" in line}
    assert over == {key for key in lines if key[1] > 2}
    assert len(over) == len(said) == 4
    assert "ended after round 3: the privacy budget is spent: 3 rounds took" in said[0]
    states = [load_checkpoint(folder) for folder in (tmp_path / "a").iterdir() if folder.is_dir()]
    counted = [(int(state.round), extra["privacy"]["spent"]) for state, extra in states]
    assert sorted(counted) == [(2, [[1.0, 2]]), (3, [[1.0, 3]]), (3, [[1.0, 3]])]
    whole, _ = tuned(tmp_path / "b", 8)
    for trial, _ in over:
        assert lines[trial, 5]["valid"] == lines[trial, 8]["valid"] == whole[trial, 8]["valid"]


def test_early_stopping_is_refused(tmp_path):
    with pytest.raises(UserError, match="patience is 3, but a trial is scored after all its rounds"):
        list(
            search([with_settings(asked("fedavg"), {"patience": 3})], Halving(), store=tmp_path / "s", scratch=tmp_path)
        )


@pytest.mark.processes
def test_a_trial_that_another_command_is_at_is_left_to_it(tmp_path, busy):
    """Its rung is not over; once it is, what that command stored is not computed again."""
    (e, lr), said = (asked("fedavg"), {"lr": "0.1,0.2,0.3"}), []
    how = {"store": tmp_path / "s.jsonl", "scratch": tmp_path, "searched": lr, "note": said.append}
    place = f"{spec_hash(with_settings(replace(e, rounds=2), {'lr': 0.2}))}-{e.seed}"
    with busy(tmp_path, place):
        ours = list(search([e], Halving(3, (1, 2)), **how))
    assert [line["round"] for line in ours] == [1, 1]
    assert said == ["1 trials are another command's at the moment; the same command goes on with them"]
    assert Counter(line["round"] for line in search([e], Halving(3, (1, 2)), **how)) == {1: 1, 2: 2}


def test_what_another_command_stored_meanwhile_is_taken(tmp_path, monkeypatch):
    """Two commands that began together: the later one to come to a trial finds it done."""
    lines = found(tmp_path, "fedavg", rungs=(1,))
    monkeypatch.setattr(halving, "stretch", None)
    about = {key: lines[2][key] for key in ("study", "method", "seed", "of", "round", "trial", "settings", "options",
                                            "fields")}  # fmt: skip
    ended = halving.rung(about, tmp_path, Silent(), store=tmp_path / "s.jsonl", experiments={}, first=0)
    assert ended == {"result": lines[2]}
    assert len((tmp_path / "s.jsonl").read_text().splitlines()) == len(lines)


def test_points_cover_a_space_evenly():
    """The first trial is the defaults; of a hundred others a tenth lies in every tenth of a dimension."""
    dimensions = (Dimension("a", (), 0.0, 1.0), Dimension("b", (1, 2, 3, 4)))
    drawn = points(dimensions, {"a": 7.0, "b": 1}, 129, seed=3)
    assert drawn[0] == {"a": 7.0, "b": 1}
    assert np.histogram([point["a"] for point in drawn[1:]], 8, (0, 1))[0].tolist() == [16] * 8
    assert [sum(point["b"] == value for point in drawn[1:]) for value in (1, 2, 3, 4)] == [32] * 4
    assert drawn == points(dimensions, {"a": 7.0, "b": 1}, 129, seed=3)


@pytest.mark.parametrize("count", [2, 12, 23, 24, 25, 100])
@pytest.mark.parametrize("first", [{"a": 0.1, "b": 2}, {"a": 9.0, "b": 2}])
def test_points_are_distinct_and_as_many_as_the_space_has(count, first):
    """A grid of 24, with the defaults in it or beside it: no point twice, and none left out while trials are left."""
    grid = (Dimension("a", (0.1, 0.2, 0.3, 0.4)), Dimension("b", (1, 2, 3, 4, 5, 6)))
    drawn = points(grid, first, count, seed=1)
    assert drawn[0] == first
    assert len({tuple(point.items()) for point in drawn}) == len(drawn) == min(count, 24 + (first["a"] == 9.0))


def test_a_range_that_has_fewer_values_than_trials_ends():
    """Three digits of 1.00 to 1.02 are three values, and the defaults."""
    drawn = points((Dimension("a", (), 1.0, 1.02),), {"a": 5.0}, 10, seed=0)
    assert sorted(point["a"] for point in drawn) == [1.0, 1.01, 1.02, 5.0]


def test_a_method_without_a_space_is_refused():
    """Where every option is fixed there is nothing to search, and that is said."""
    with pytest.raises(UserError, match="nothing is left to search"):
        space(with_settings(asked("fedavg"), {"lr": 0.1}), {})
