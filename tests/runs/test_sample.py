"""Evaluations of a sample of clients: who is in it, what it changes, and that the program says so."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metavd.cli import main
from metavd.core import rng
from metavd.data.cohort import sampled
from metavd.errors import UserError
from metavd.evaluate.metrics import intervals
from metavd.flower.config import run_config
from metavd.report.page import write_report
from metavd.runs import evaluation as module
from metavd.runs.evaluation import evaluate, whom
from metavd.runs.run import run
from metavd.runs.settings import Experiment, resolve, spec_hash
from metavd.runs.setup import prepare, start

SMALL: dict[str, Any] = {
    "method": "fedavg", "clients": 8, "unseen": 4, "cohort": 2, "rounds": 3, "width": 4, "eval_every": 1,
    "local_epochs": 1, "test_share": 0.9, "backend": "loop",
}  # fmt: skip
FIELDS = {key: value for key, value in SMALL.items() if key != "local_epochs"} | {"options": {"local_epochs": 1}}


def plain(result: Any) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != "seconds"}


def test_a_sample_is_fixed_by_the_seed_and_grows_by_adding() -> None:
    """Law: ascending clients of the group, part of every larger sample, all where there are no more."""
    key, group = rng.key(3), range(40, 60)
    found = [list(sampled(key, group, count)) for count in range(1, 25)]
    for small, large in pairwise(found):
        assert small == sorted(set(small) & set(large) & set(group))
    assert [len(each) for each in found[:20]] == list(range(1, 21))
    assert sampled(key, group, 0) == sampled(key, group, 20) == sampled(key, group, 99) == group
    assert sampled(rng.key(4), group, 5) != found[4]


def test_a_sample_as_large_as_the_groups_is_all_of_them_to_the_bit(tmp_path: Path) -> None:
    whole = run(out=tmp_path / "whole", **SMALL)
    also = run(out=tmp_path / "also", eval_clients=8, **SMALL)
    assert plain(whole) == plain(also)
    assert "curve_sampled" not in also
    assert whole.history == also.history
    assert (tmp_path / "whole" / "clients.csv").read_text() == (tmp_path / "also" / "clients.csv").read_text()


def test_every_round_tests_the_same_clients_and_the_last_evaluation_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is that of a run that tests all clients all the time."""
    asked = []
    real = module.answers
    monkeypatch.setattr(
        module, "answers", lambda a, p, s, clients, *rest, **more: (
            asked.append(list(clients)) or real(a, p, s, clients, *rest, **more)
        )
    )  # fmt: skip
    result = run(eval_clients=3, **SMALL)
    groups = whom(prepare(Experiment(**FIELDS)), 3)
    assert asked == [list(groups["test"]), list(groups["unseen"])] * 2 + [list(range(8)), list(range(8, 12))]
    assert result["curve_sampled"] == {"test": {"clients": 3, "of": 8}, "unseen": {"clients": 3, "of": 4}}
    assert [("sampled" in row) for row in result.history] == [True, True, False]
    monkeypatch.undo()
    whole = plain(run(**SMALL))
    assert {key: value for key, value in plain(result).items() if key != "curve_sampled"} == whole


def test_figures_of_a_sample_are_its_clients_own_with_their_interval() -> None:
    """Law: under a loop a client answers the same whoever else is asked; the interval is the bootstrap of these."""
    setup = prepare(Experiment(**FIELDS))
    state = start(setup)
    some, whole = (evaluate(setup, state, count=count) for count in (3, 0))
    known = {each.client: each for each in whole.clients}
    assert all((known[each.client].probs == each.probs).all() for each in some.clients)
    mine = [each for each in some.clients if each.client < 8]
    right = [(each.probs.argmax(1) == each.y).mean() for each in mine]
    weight = np.array([each.train_size for each in mine])
    wanted = intervals({"accuracy": (np.array(right), weight), "other": (np.array(right), weight)})["accuracy"]
    assert some.summary["test"]["intervals"]["accuracy"] == pytest.approx(wanted)
    assert some.summary["test"]["clients"] == 3


def test_a_sampled_run_goes_on_to_the_same_end(tmp_path: Path) -> None:
    """Law: fewer rounds and then the rest are the whole; early stopping watches the sample too."""
    settings = SMALL | {"eval_clients": 3, "final_clients": 2}
    whole = run(out=tmp_path / "whole", **settings)
    run(out=tmp_path / "parts", **settings | {"rounds": 2})
    parts = run(out=tmp_path / "parts", resume=True, **settings)
    assert plain(whole) == plain(parts)
    watched = Experiment(method="fedavg", valid=0.2, patience=2)
    hashes = {spec_hash(resolve(Experiment(**{**watched.__dict__, "eval_clients": count}))) for count in (0, 3)}
    assert len(hashes) == 2, "patience looks at what evaluations see"


def test_the_program_says_that_figures_rest_on_a_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the first round, in result.json and on the page."""
    words = [f"{key}={value}" for key, value in SMALL.items() if key != "method"]
    sets = [word for pair in [*words, "eval_clients=3", "final_clients=2"] for word in ("--set", pair)]
    main(["run", "fedavg", "--out", str(tmp_path / "run"), *sets])
    told = capsys.readouterr().err
    assert "evaluations before the last test a sample: 3 of 8 participating and 3 of 4 unseen clients" in told
    assert "the last evaluation, and so the result, tests a sample: 2 of 8 participating" in told
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["sampled"]["test"] == {"clients": 2, "of": 8}
    assert len((tmp_path / "run" / "clients.csv").read_text().splitlines()) == 5
    write_report([tmp_path / "run"], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "rest on a sample of clients that the seed draws: 2 of 8 participating, 2 of 4 unseen." in page
    assert "Evaluations before the last rest on a sample" in page
    assert "2 of 8 participating and 2 of 4 unseen clients" in page


@pytest.mark.parametrize("name", ["eval_clients", "final_clients"])
def test_wrong_numbers_are_refused_in_one_sentence(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value, says in (("-1", "must lie between 0 and"), ("some", "must be a whole number")):
        with pytest.raises(SystemExit) as ended:
            main(["run", "fedavg", "--set", f"{name}={value}"])
        assert ended.value.code == 2
        assert f"{name} is" in (told := capsys.readouterr().err)
        assert says in told
    with pytest.raises(UserError, match=f"set has {name}=3, but every site tests its own model"):
        run_config({"set": f"{name}=3"})
