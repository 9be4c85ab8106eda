"""Tuning: what is searched, what a trial may see, and a study that loses nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metavd import methods
from metavd.data import partition
from metavd.data.partition import Federation, sealed
from metavd.data.source import Source, arrays
from metavd.engine.rounds import InterruptedRun
from metavd.errors import UserError
from metavd.runs.run import run
from metavd.runs.settings import Experiment, from_toml, with_settings
from metavd.runs.setup import Setup, data_of
from metavd.studies import tune as module
from metavd.studies.plan import Dimension, Plan, Watcher, dimension, name_of, plan
from metavd.studies.tune import tune

pytest.importorskip("optuna")

BASE = Experiment(method="fedavg", data="own", rounds=3, clients=4, unseen=2, cohort=2, model="mlp", width=4,
                  eval_every=1, valid=0.25, partition="natural", options={"local_epochs": 1, "batch": 8})  # fmt: skip


def own() -> Source:
    """Six people's rows of four numbers in three classes, a third of each person's kept for testing."""
    draw = np.random.RandomState(0)
    y = draw.randint(0, 3, 180)
    x = draw.randn(180, 4).astype(np.float32) + np.eye(3, 4, dtype=np.float32)[y]
    client, test = np.arange(180) // 30, np.arange(180) % 30 >= 20
    return arrays(x, y, client=client, test=test, name="own", num_classes=3, mean=[0.0], std=[1.0])


@pytest.fixture
def source() -> Source:
    return own()


def asked(*, method: str = "fedavg", search: Mapping[str, str] | None = None, **more: Any) -> Plan:
    names = ("seeds", "metric", "by", "sampler", "prune")
    how = {key: more.pop(key) for key in names if key in more}
    return plan(with_settings(replace(BASE, method=method), more), search, **how)


def trials(history: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return what was tried and found, without the clock."""
    return [(line["state"], line["settings"], line["value"], line["curve"]) for line in history["trials"]]


Score = Callable[[Mapping[str, Any], int], float]


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Callable[[Score], None]:
    """Replace training by a function of a trial's options and the round."""

    def install(score: Score) -> None:
        def curve(_: Plan, setups: Sequence[Setup]) -> Iterator[tuple[int, float]]:
            e = setups[0].experiment
            for done in range(1, e.rounds + 1):
                yield done, score(e.options, done)

        monkeypatch.setattr(module, "curve", curve)

    return install


# --- what is searched ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", methods.NAMES)
def test_the_papers_space_is_the_default(method):
    """Every option that says what the paper searched is searched over just that; one that is set is not."""
    paper = {name: option.search for name, option in methods.options_of(method).items() if option.search}
    found = {one.name: one.values for one in plan(Experiment(method=method)).space}
    assert found == paper
    fixed = plan(Experiment(method=method, options={"lr": 0.5}), {"width": "8,16"})
    assert {one.name for one in fixed.space} == set(paper) - {"lr"} | {"width"}


@pytest.mark.parametrize(
    ("name", "text", "right"),
    [
        ("lr", "0.01..0.1", Dimension("lr", (), 0.01, 0.1)),
        ("lr", "1e-4..1:log", Dimension("lr", (), 1e-4, 1.0, True)),
        ("batch", "8..64:log", Dimension("batch", (), 8, 64, True)),
        ("floor", "-20..-5", Dimension("floor", (), -20.0, -5.0)),
        ("newcomer", "mean, fit", Dimension("newcomer", ("mean", "fit"))),
        ("cohort", "2,4,8", Dimension("cohort", (2, 4, 8))),
    ],
)
def test_spaces_are_read_in_the_settings_own_type(name, text, right):
    """A range or a list has the numbers that were written; whole numbers where the setting is one."""
    found = dimension(Experiment(), name, text)
    assert found == right
    assert [type(value) for value in (found.low, *found.values)] == [
        type(value) for value in (right.low, *right.values)
    ]


@pytest.mark.parametrize(
    ("search", "says"),
    [
        ({"lr": "0.1..0.01"}, "LOW < HIGH"),
        ({"lr": "0..1:log"}, "0 < LOW < HIGH"),
        ({"lr": "0.1..0.2:linear"}, "LOW..HIGH:log"),
        ({"lr": "-1..1"}, "at least 0"),
        ({"lr": "0.1"}, "at least two values"),
        ({"lr": "0.1,0.1"}, "each once"),
        ({"lr": "a..b"}, "must be a number"),
        ({"product": "exact..released"}, "no setting 'product'"),
        ({"variant": "default..released"}, "values with commas"),
        ({"leaning_rate": "0..1"}, "no setting 'leaning_rate'"),
        ({"seed": "0..5"}, "cannot be compared"),
        ({"valid": "0.1,0.2"}, "cannot be compared"),
    ],
)  # fmt: skip
def test_wrong_spaces_are_refused_by_name(search, says):
    """One sentence that names the setting and what would be right."""
    with pytest.raises(ValueError, match=says) as error:
        asked(search=search)
    assert next(iter(search)) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"metric": "loss"}, "metric is 'loss'"),
        ({"by": "row"}, "did you mean rows"),
        ({"sampler": "grid"}, "sampler is 'grid'; did you mean random"),
        ({"seeds": 0}, "at least 1"),
        ({"patience": 3}, "patience is 3"),
        ({"lr": 0.1}, "nothing is left to search"),
    ],
)
def test_wrong_plans_are_refused(settings, says):
    """One sentence, before any data is read."""
    with pytest.raises(UserError, match=says):
        asked(**settings)


def test_a_list_of_numbers_gives_its_very_values(source, tmp_path, by_hand):
    """An even list is searched in its order, and a trial's value is one of it to the last bit; words are words."""
    by_hand(lambda options, _: options["server_lr"])
    search = {"server_lr": "0.6,0.7,0.8,0.9,1.0", "batch": "8,9,10", "lr": "0.3,0.1,0.2", "variant": "default,released"}
    history = tune(asked(search=search, method="reptile"), out=tmp_path / "s", trials=8, source=source)
    for line in history["trials"]:
        assert line["settings"]["server_lr"] in (0.6, 0.7, 0.8, 0.9, 1.0)
        assert line["settings"]["batch"] in (8, 9, 10)
        assert isinstance(line["settings"]["batch"], int)
        assert line["settings"]["lr"] in (0.1, 0.2, 0.3)
        assert line["settings"]["variant"] in ("default", "released")
    assert len({line["settings"]["server_lr"] for line in history["trials"]}) > 2


# --- what a trial sees -----------------------------------------------------------------------------------------------


def poisoned(source: Source, rows: np.ndarray) -> Source:
    """Return the source with other numbers and other labels in some rows."""
    x, y = source.x.copy(), source.y.copy()
    x[rows], y[rows] = 1e6, (y[rows] + 1) % source.num_classes
    return replace(source, x=x, y=y)


def values_of(study: Plan, source: Source) -> list[float]:
    """Return what a trial with a certain lr finds at each evaluation."""
    setup = module._ready(study, {"lr": 0.1}, study.experiment.seed, data_of(study.experiment, source))
    return [value for _, value in module.curve(study, [setup])]


SMALL = {
    "fedavg": {},
    "fedprox+ft": {},
    "maml+metavd": {"hyper_width": 4, "newcomer": "fit"},
    "reptile+ensemblevd": {},
    "pfedgp": {"extra_points": 2, "chains": 2, "sweeps": 1},  # a client is given rows of others
}


def hidden_rows(study: Plan, source: Source) -> np.ndarray:
    """Return all test rows, and all rows of unseen clients, of the federation that a trial seals."""
    dealt: list[Federation] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "sealed", lambda whole: dealt.append(whole) or sealed(whole))
        module._ready(study, {"lr": 0.1}, study.experiment.seed, data_of(study.experiment, source))
    (whole,) = dealt
    unseen = slice(whole.num_clients, whole.num_clients + whole.num_unseen)
    return np.concatenate([*whole.test, *whole.train[unseen], *whole.valid[unseen]])


@pytest.mark.parametrize("by", ["rows", "clients"])
@pytest.mark.parametrize("method", list(SMALL))
def test_test_rows_and_unseen_clients_are_not_looked_at(source, method, by):
    """Poison in test rows and in all rows of unseen clients changes no bit of a trial; in validation rows it does."""
    study = plan(with_settings(replace(BASE, method=method, rounds=2, options={}), SMALL[method]), by=by)
    hidden = hidden_rows(study, source)
    assert len(hidden) == (6 if by == "rows" else 5) * 10 + 2 * 20
    found = values_of(study, source)
    assert values_of(study, poisoned(source, hidden)) == found
    setup = module._ready(study, {}, study.experiment.seed, data_of(study.experiment, source))
    assert values_of(study, poisoned(source, np.concatenate(setup.pool.federation.valid))) != found


def test_a_whole_study_does_not_look_at_hidden_rows(source, tmp_path):
    """All trials of a study with poisoned test rows and unseen clients are those of one without, bit by bit."""
    study = asked()
    hidden = hidden_rows(study, source)
    found = [
        trials(tune(study, out=tmp_path / name, trials=4, source=given))
        for name, given in (("a", source), ("b", poisoned(source, hidden)))
    ]
    assert found[0] == found[1]


def test_validation_clients_do_not_train(source):
    """Validation clients' training rows serve their own personalisation alone, of which fedavg has none.

    What is judged are their validation rows, and not those of the clients who train.
    """
    study = asked(by="clients", valid=0.5)
    found = values_of(study, source)
    held = module._ready(study, {}, study.experiment.seed, data_of(study.experiment, source)).pool.federation
    assert (held.num_clients, held.num_unseen, held.num_valid) == (2, 0, 2)
    for rows, matters in (
        (held.train[2:], False), (held.valid[2:], True), (held.train[:2], True), (held.valid[:2], False),
    ):  # fmt: skip
        assert (values_of(study, poisoned(source, np.concatenate(rows))) != found) is matters


def test_a_newcomer_has_no_row_at_the_server(source):
    """The server of a study by clients is built for those who train: per-client tables have that many rows."""
    study = asked(method="reptile+ensemblevd", by="clients")
    setup = module._ready(study, {}, 0, data_of(study.experiment, source))
    assert (setup.pool.federation.num_clients, setup.pool.federation.num_valid) == (3, 1)
    tables = [v for k, v in module.start(setup).params.items() if k.startswith("server.client.")]
    assert tables
    assert all(len(table) == 3 for table in tables)


def test_seeds_are_averaged(source):
    """A trial's value over two seeds is the mean of its values with each of them, at every evaluation."""
    data = data_of(BASE, source)

    def values(seed: int, seeds: int) -> np.ndarray:
        study = asked(seed=seed, seeds=seeds)
        setups = [module._ready(study, {"lr": 0.1}, seed + k, data) for k in range(seeds)]
        return np.array(list(module.curve(study, setups)))

    assert values(0, 1)[:, 1].tolist() != values(1, 1)[:, 1].tolist()
    np.testing.assert_allclose(values(0, 2), (values(0, 1) + values(1, 1)) / 2, rtol=1e-12)


def test_a_trial_ends_with_its_privacy_budget(source, tmp_path):
    """It is scored after the last round that fits, and that is said."""
    pytest.importorskip("dp_accounting")
    how = {"method": "fedavg+dp", "noise": 1.0, "rounds": 5, "search": {"lr": "0.01..0.1"}}
    free = asked(**how)
    setup = module._ready(free, {}, 0, data_of(free.experiment, source))
    epsilon = 1.001 * setup.algorithm.privacy.spent({1.0: 3})
    watcher, said = Watcher(), []
    watcher.note = said.append  # type: ignore[method-assign]
    history = tune(asked(**how, epsilon=epsilon), out=tmp_path, trials=2, source=source, watcher=watcher)
    assert [line["curve"][-1][0] for line in history["trials"]] == [3, 3]
    assert [line["value"] for line in history["trials"]] == [line["curve"][-1][1] for line in history["trials"]]
    assert [text for text in said if "budget" in text] == [
        f"  trial {number} ended early: its privacy budget was spent after round 3" for number in (0, 1)
    ]


@pytest.mark.parametrize("metric", ["nll", "accuracy"])
def test_the_best_configuration_repeats_its_trial(source, tmp_path, metric):
    """A run of best.toml has the very validation figure of the best trial, and is complete."""
    study = asked(method="reptile", metric=metric, search={"lr": "0.001..0.5:log", "server_lr": "0.5..1.5"})
    history = tune(study, out=tmp_path, trials=4, source=source)
    values = [line["value"] for line in history["trials"]]
    best = min(values) if metric == "nll" else max(values)
    assert history["trials"][history["best"]]["value"] == best
    settings = from_toml(tmp_path / "best.toml")
    assert settings["valid"] == 0.25
    assert set(methods.options_of("reptile")) < set(settings)
    assert run(source=source, **settings)["valid"][metric] == best


def test_validation_is_a_fifth_unless_asked():
    """Without validation rows nothing could be chosen, so that there always are some."""
    assert plan(Experiment()).experiment.valid == 0.2
    assert plan(Experiment(valid=0.5)).experiment.valid == 0.5


# --- a study ---------------------------------------------------------------------------------------------------------


class Stopper(Watcher):
    """Presses Ctrl-C in the middle of a trial."""

    def __init__(self, number: int) -> None:
        self.number = number

    def step(self, number: int, round: int, value: float) -> None:  # noqa: ARG002
        if number == self.number and round == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("sampler", "total", "stops"), [("tpe", 13, (3, 12)), ("random", 4, (0, 3))])
def test_an_interruption_changes_nothing(tmp_path, by_hand, sampler, total, stops):
    """A study that is stopped and continued twice tries just what an undisturbed one does; another seed does not.

    13 trials, as TPE begins to learn after 10.
    """
    source = own()
    by_hand(lambda options, done: (options["lr"] - 0.3) ** 2 + 1 / done)
    search = {"lr": "0.001..1:log", "batch": "4..32"}
    study = asked(search=search, sampler=sampler, prune=False)
    whole = trials(tune(study, out=tmp_path / "a", trials=total, source=source))
    for before, number in enumerate(stops):
        with pytest.raises(InterruptedRun, match=rf"stopped with {number - before} of {total} trials"):
            tune(study, out=tmp_path / "b", trials=total, source=source, watcher=Stopper(number))
    cut = tune(study, out=tmp_path / "b", trials=total, source=source)
    assert [line["number"] for line in cut["trials"] if line["state"] == "failed"] == list(stops)
    assert [line["again"] for line in cut["trials"] if "again" in line] == list(stops)
    assert [line for line in trials(cut) if line[0] != "failed"] == whole
    other = asked(search=search, sampler=sampler, prune=False, seed=1)
    assert trials(tune(other, out=tmp_path / "c", trials=2, source=source)) != whole[:2]


def test_more_trials_go_on_and_data_is_read_once(source, tmp_path, monkeypatch):
    """The number is that of all trials: 2, then 3, then 3 again runs 2, 1 and none; each time the data is read once."""
    read = []
    monkeypatch.setattr(module, "data_of", lambda *given: read.append(1) or data_of(*given))
    lengths = []
    for total in (2, 3, 3):
        ends: list[Any] = []
        watcher = Watcher()
        monkeypatch.setattr(watcher, "trial", ends.append)
        history = tune(asked(), out=tmp_path, trials=total, source=source, watcher=watcher)
        lengths.append((len(ends), len(history["trials"])))
    assert lengths == [(2, 2), (1, 3), (0, 3)]
    assert len(read) == 3
    kept = json.loads((tmp_path / "trials.json").read_text())
    assert kept["trials"] == history["trials"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "study.db", "best.toml", "trials.json", "importance.json", ".lock"
    }  # fmt: skip


def test_hopeless_trials_are_stopped(source, tmp_path, by_hand):
    """After five finished trials, one that is worse than their median is stopped; without pruning none is.

    In the first quarter of its rounds it is not.
    """
    by_hand(lambda options, _: options["lr"])
    search = {"lr": "0..1"}
    history = tune(asked(search=search, sampler="random", rounds=8), out=tmp_path / "a", trials=10, source=source)
    finished: list[float] = []
    for line in history["trials"]:
        lr = line["settings"]["lr"]
        hopeless = len(finished) >= 5 and lr > np.median(finished)
        assert line["state"] == ("stopped" if hopeless else "finished")
        if hopeless:
            assert line["reason"] == "worse than the median at round 2"
            assert line["value"] is None
            assert [done for done, _ in line["curve"]] == [1, 2]
        else:
            finished.append(lr)
    assert len(finished) < 10
    study = asked(search=search, sampler="random", rounds=8, prune=False)
    whole = tune(study, out=tmp_path / "b", trials=10, source=source)
    assert {line["state"] for line in whole["trials"]} == {"finished"}
    assert history["importance"] == {"lr": 1.0}


def test_a_diverged_trial_does_not_stop_the_study(source, tmp_path):
    """It is recorded with its reason; the others go on, and one of them is best. Where all diverge, that is said."""
    study = asked(search={"lr": "0.1,1e38"}, sampler="random")
    history = tune(study, out=tmp_path / "a", trials=6, source=source)
    states = {(line["settings"]["lr"], line["state"]) for line in history["trials"]}
    assert states == {(0.1, "finished"), (1e38, "stopped")}
    assert all("NaN" in line["reason"] for line in history["trials"] if line["state"] == "stopped")
    assert from_toml(tmp_path / "a" / "best.toml")["lr"] == 0.1
    with pytest.raises(UserError, match=r"none of 2 trials .* came to an end; the last one: round 1: .*NaN"):
        tune(asked(search={"lr": "1e37,1e38"}), out=tmp_path / "b", trials=2, source=source)
    assert not (tmp_path / "b" / "best.toml").exists()


def test_settings_are_not_tried_twice(source, tmp_path, by_hand):
    """A trial is a function of its settings, so that one with those of an earlier one takes over its course."""
    trained = []
    by_hand(lambda options, done: trained.append(options["lr"]) or options["lr"] * done)
    study = asked(search={"lr": "0.1,0.2"}, sampler="random")
    lines = tune(study, out=tmp_path, trials=6, source=source)["trials"]
    assert sorted(trained) == [0.1] * 3 + [0.2] * 3, "three rounds each"
    first = {line["settings"]["lr"]: line for line in reversed(lines)}
    for line in lines:
        one = first[line["settings"]["lr"]]
        assert line.get("same", line["number"]) == one["number"]
        assert (line["value"], line["curve"]) == (one["value"], one["curve"])


def test_importance_is_the_share_of_variance(source, tmp_path, by_hand):
    """A setting on which all depends has about all of it; where nothing varies, nothing is said."""
    by_hand(lambda options, _: options["lr"])
    study = asked(search={"lr": "0..1", "batch": "4..32"}, prune=False, sampler="random")
    found = tune(study, out=tmp_path / "a", trials=15, source=source)["importance"]
    assert found["lr"] > 0.8
    assert sum(found.values()) == pytest.approx(1)
    written = json.loads((tmp_path / "a" / "importance.json").read_text())
    assert written == {"metric": "nll", "evaluator": "fANOVA", "finished": 15, "importance": found}
    by_hand(lambda *_: 1.0)
    assert tune(study, out=tmp_path / "b", trials=3, source=source)["importance"] == {}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_another_study_is_refused(source, tmp_path):
    """Another method, content, space, metric or seed is not mixed in, and leaves every file as it was."""
    tune(asked(), out=tmp_path, trials=1, source=source)
    before = snapshot(tmp_path)
    for study, given, says in (
        (asked(method="reptile"), source, "method is 'fedavg' and not 'reptile'"),
        (asked(), poisoned(source, np.arange(3)), "content is"),
        (asked(search={"lr": "0.1,0.2"}), source, "space is"),
        (asked(metric="accuracy"), source, "metric is 'nll' and not 'accuracy'"),
        (asked(seed=1), source, "seed is 0 and not 1"),
    ):
        with pytest.raises(UserError, match=f"holds another study, where {says}"):
            tune(study, out=tmp_path, trials=2, source=given)
    assert snapshot(tmp_path) == before


def test_folders_that_cannot_be_a_study_are_refused(source, tmp_path):
    """A folder with other files, a file, a damaged database: one sentence, nothing changed."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    (tmp_path / "file").write_text("")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "study.db").write_bytes(b"no database, but long enough to be taken for one" * 100)
    before = snapshot(tmp_path)
    for name, says in (("mine", "holds no study"), ("file", "cannot write"), ("bad", "study.db cannot be read")):
        with pytest.raises(UserError, match=says):
            tune(asked(), out=tmp_path / name, trials=1, source=source)
    after = snapshot(tmp_path)
    assert {path: data for path, data in after.items() if not path.endswith(".lock")} == before


@pytest.mark.parametrize(
    ("settings", "how", "says"),
    [
        ({}, {"trials": 0}, "trials is 0"),
        ({}, {"jobs": -1}, "jobs is -1"),
        ({"valid": 0.01}, {}, "leaves nobody a validation row"),
        ({"by": "clients", "clients": 1, "cohort": 1}, {}, "clients is 1"),
        ({"search": {"cohort": "2,9"}}, {}, "cohort is 9"),
    ],
)
def test_wrong_input_leaves_no_folder(source, tmp_path, settings, how, says):
    """What is wrong is found before anything is written, each end of the space included."""
    with pytest.raises(ValueError, match=says):
        tune(asked(**settings), out=tmp_path / "s", source=source, **how)
    assert not list(tmp_path.iterdir())


def test_without_optuna_one_sentence_says_what_to_install(source, tmp_path, monkeypatch):
    """Optuna is an extra: tuning names it, writes nothing; the command line and this module load without it."""
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r"pip install 'metavd\[tune\]'"):
        tune(asked(), out=tmp_path / "s", source=source)
    assert not list(tmp_path.iterdir())
    code = "import sys; sys.modules.update(optuna=None, sqlalchemy=None); import metavd.cli, metavd.cli.tune"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_the_name_of_a_study_is_that_of_what_is_asked():
    """The same question has the same name; another space, seed or metric another one; the device does not matter."""
    names = [
        name_of(study)
        for study in (
            asked(),
            asked(metric="accuracy"),
            asked(seed=1),
            asked(by="clients"),
            asked(search={"lr": "1,2"}),
        )
    ]
    assert len(set(names)) == len(names)
    assert name_of(asked(device="cpu", sampler="random")) == names[0]


class Hanger(Watcher):
    """Stays in the middle of trial 3 for ever, and leaves a sign of it."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def step(self, number: int, round: int, value: float) -> None:  # noqa: ARG002
        if number == 3 and round == 2:
            self.sign.touch()
            time.sleep(1000)


def long_study() -> Plan:
    return asked(rounds=12, search={"lr": "0.01..0.5:log"}, prune=False)


def work(out: Path, trials: int, watcher: Watcher) -> None:
    tune(long_study(), out=out, trials=trials, source=own(), watcher=watcher)


@pytest.mark.processes
def test_killed_studies_lose_nothing_and_two_processes_share_one(source, tmp_path):
    """SIGKILL loses no finished trial, and the one in work is marked failed and run again with the same settings.

    Then this process and another one go on together: exactly as many trials as were asked for, no number twice, and
    no trial of the other is taken for dead.
    """
    out, sign = tmp_path / "study", tmp_path / "hangs"
    fork = multiprocessing.get_context("fork")  # starts at once; torch has one thread here
    killed = fork.Process(target=work, args=(out, 1000, Hanger(sign)))
    killed.start()
    deadline = time.monotonic() + 600
    while not sign.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sign.exists()
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    before = json.loads((out / "trials.json").read_text())["trials"]
    assert [line["state"] for line in before] == ["finished"] * 3

    total = 10
    other = fork.Process(target=work, args=(out, total, Watcher()))
    other.start()
    tune(long_study(), out=out, trials=total, source=source)
    other.join(600)
    assert other.exitcode == 0
    lines = tune(long_study(), out=out, trials=total, source=source)["trials"]
    assert lines[:3] == before
    assert [line["number"] for line in lines] == list(range(total + 1))
    assert [line["number"] for line in lines if line["state"] != "finished"] == [3]
    assert (lines[3]["state"], lines[3]["reason"]) == ("failed", "its process ended before it did")
    again = next(line for line in lines if line.get("again") == 3)
    assert again["settings"] == lines[3]["settings"]
    assert again["curve"][:2] == lines[3]["curve"]


@pytest.mark.processes
def test_jobs_run_side_by_side(source, tmp_path):
    """Two processes of one command give as many trials as one, and the one who started them is told of each."""
    told: list[Any] = []
    watcher = Watcher()
    watcher.trial = told.append  # type: ignore[method-assign]
    history = tune(asked(rounds=2, prune=False), out=tmp_path, trials=4, jobs=2, source=source, watcher=watcher)
    assert [line["state"] for line in history["trials"]] == ["finished"] * 4
    assert sorted(line["number"] for line in told) == list(range(4))
    assert (tmp_path / "best.toml").exists()
