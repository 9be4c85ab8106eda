"""The registry of figures: one definition, and the figure is in every file, table and message; or it is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from metavd import compare
from metavd.cli.train import print_results
from metavd.errors import UserError
from metavd.evaluate import figures as registry
from metavd.evaluate.answers import Answers, ClientResult
from metavd.evaluate.figures import (
    LOWEST,
    ROWS,
    Binned,
    Column,
    Figure,
    Rows,
    Whole,
    by_client,
    figure,
    figures,
    get,
    headline,
    number,
    of_clients,
    percentile,
    register,
    together,
    weighted,
)
from metavd.evaluate.metrics import client_figures, summarize
from metavd.registry import Registry
from metavd.report.curves import learning
from metavd.report.gains import table
from metavd.report.groups import group
from metavd.report.read import read_runs
from metavd.report.summary import headline_columns

TINY = {"clients": 4, "unseen": 2, "cohort": 2, "rounds": 2, "eval_every": 1, "width": 8, "local_epochs": 1}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget afterwards what a test has registered."""
    before = registry._KNOWN
    own = Registry(registry.ENTRY_POINTS)
    for name, each in before.own().items():
        own.add(name, each, "metavd.evaluate.figures")
    monkeypatch.setattr(registry, "_KNOWN", own)


def clients(count: int = 5, seed: int = 0) -> list[ClientResult]:
    rng = np.random.RandomState(seed)
    return [
        ClientResult(
            i, i + 1, rng.dirichlet(np.ones(3), 4 + i), rng.randint(0, 3, 4 + i), np.array([True, False, True])
        )
        for i in range(count)
    ]


def sure(answers: Answers) -> np.ndarray:
    """Share of answers with a probability above 0.6."""
    return answers.probs.max(1) > 0.6


def add_sure(**about: Any) -> None:
    settings = {"help": "share of sure answers", "title": "sure", "unit": "%", "better": "higher", "digits": 1}
    figure(**settings | about)(sure)


# Taken and pooled


def test_a_figure_of_rows_is_their_mean() -> None:
    """Closed form: of all rows together, of each client, and weighted as the pool says."""
    results = clients()
    each = np.array([(result.probs.max(1) > 0.6).mean() for result in results])
    size = np.array([len(result.y) for result in results])
    for name, pool, expected in (
        ("rows", ROWS, (each * size).sum() / size.sum()),
        ("train", weighted("train_size"), (each * np.arange(1, 6)).sum() / 15),
        ("even", weighted("clients"), each.mean()),
        ("low", LOWEST, each.min()),
        ("tenth", percentile(10), np.percentile(each, 10)),
    ):
        register(Figure(name=name, take=Rows(sure), pool=pool, help=""), __name__)
        assert summarize(results)[name] == pytest.approx(expected), name


def test_a_figure_of_many_rows_is_taken_client_by_client_where_clients_are_pooled() -> None:
    """Law: the lowest client's ECE is the lowest of the clients' own; with one client both poolings agree."""
    error = get("ece_top1").take
    assert isinstance(error, Binned)
    register(Figure(name="best_ece", take=error, pool=LOWEST, help=""), __name__)
    results = clients()
    own = [client_figures(result)["ece_top1"] for result in results]
    assert summarize(results)["best_ece"] == pytest.approx(min(value for value in own if value is not None))
    assert summarize(results[:1])["best_ece"] == summarize(results[:1])["ece_top1"]


def test_what_one_client_lacks_the_group_lacks() -> None:
    """Law: a figure that is not defined for a client has no value for a pool over clients, and is not taken for 0."""
    take = Whole(lambda answers: None if len(answers.y) == 5 else 1.0)
    assert by_client(take, Answers(clients())) is None
    register(Figure(name="hole", take=take, pool=weighted("clients"), help=""), __name__)
    assert summarize(clients())["hole"] is None
    assert summarize(clients()[2:])["hole"] == 1.0
    assert together(Rows(lambda _: None), Answers(clients())) is None


def test_a_mean_may_have_an_interval() -> None:
    """Law: with interval=True the figure has bounds that hold it, and no other figure's bounds move."""
    before = summarize(clients(20))["intervals"]
    add_sure(interval=True)
    told = summarize(clients(20))
    low, high = told["intervals"]["sure"]
    assert low < told["sure"] < high
    for name, bounds in before.items():
        assert told["intervals"][name] == pytest.approx(bounds)


# One definition, every place


def test_one_definition_is_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: a figure that is registered is in every file, comparison, table and report."""
    add_sure(client=True, headline="always", interval=True)
    rows = compare(["fedavg"], seeds=1, out=tmp_path, **TINY)
    assert {"test sure %", "unseen sure %"} < set(rows["fedavg"])
    folder = tmp_path / "fedavg" / "seed-0"
    result = json.loads((folder / "result.json").read_text())
    assert 0 <= result["test"]["sure"] <= 1
    assert len(result["unseen"]["intervals"]["sure"]) == 2
    lines = list(csv.DictReader((folder / "clients.csv").open()))
    size = [int(line["test_size"]) for line in lines[:4]]
    own = [float(line["sure"] or 0) for line in lines[:4]]
    assert np.average(own, weights=size) == pytest.approx(result["test"]["sure"])
    first = json.loads((folder / "rounds.jsonl").read_text().splitlines()[0])
    assert "sure" in first["test"]
    print_results([result])
    assert f"{100 * result['test']['sure']:.1f} %" in capsys.readouterr().out
    groups, _ = group(read_runs([tmp_path])[0])
    assert ("test", "sure") in [column.path for column in headline_columns([])]
    assert {"key": "sure", "name": "sure %"} in table(groups)["figures"]
    assert "curve-sure-unseen" in {picture.name for picture in learning(groups)}


def test_a_site_sends_it_and_the_server_pools_it() -> None:
    """Parity: the figure from clients' own equals the figure from everybody's answers; the wrong ones are dropped."""
    sites = pytest.importorskip("metavd.flower.figures", exc_type=ImportError)
    add_sure(client=True, high=1.0)
    results = clients()
    sizes = [{"train_size": each.train_size, "test_size": len(each.y)} for each in results]
    reports = [
        sites.checked(size | sites.sent(each), sites.Most(1000, 1000))
        for size, each in zip(sizes, results, strict=True)
    ]
    pooled, whole = sites.pooled(reports), summarize(results)
    for name in ("accuracy", "accuracy_pooled", "worst_client", "percentile_10", "nll", "ece_top1", "entropy", "sure"):
        assert pooled[name] == pytest.approx(whole[name]), name
    assert pooled["ece_mass"] is pooled["auroc_wrong"] is None, "they need single answers"
    assert [name for name in pooled if name != "medians"] == list(whole)
    assert "sure" not in sites.checked(sizes[0] | sites.sent(results[0]) | {"sure": 1.5}, sites.Most(1000, 1000))
    assert "sure" in sites.line(0, reports[0], unseen=False)
    others = [reports[0], {name: value for name, value in reports[1].items() if name != "sure"}]
    assert sites.pooled(others)["sure"] == pytest.approx(reports[0]["sure"]), "one site cannot take it from all"


def test_a_required_figure_that_is_missing_makes_a_report_unbelievable() -> None:
    """Law: where a site lacks a figure that every client has, none of its figures counts."""
    sites = pytest.importorskip("metavd.flower.figures", exc_type=ImportError)
    good = {"train_size": 3, "test_size": 4} | sites.sent(clients()[0])
    needed = [each.name for each in of_clients() if each.always]
    assert needed == ["accuracy", "nll", "brier", "entropy"]
    for name in needed:
        kept = sites.checked(good | {name: float("nan")}, sites.Most(1000, 1000))
        assert not set(needed) & set(kept)


# Joining and being refused


def test_a_package_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours are there all the same; whoever asks for what is not there is told why."""

    def load() -> None:
        raise ImportError("no such module")

    broken = SimpleNamespace(load=load, dist=None, value="package.figures")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [broken])  # noqa: ARG005
    assert "nll" in figures()
    with pytest.raises(UserError, match=r"offers package.figures to metavd.figures, which fails: ImportError: no such"):
        get("sure")


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({"name": "nll"}, "'nll' of .* is taken by metavd.evaluate.figures"),
        ({"name": "intervals"}, "a figure 'intervals' already"),
        ({"name": "a b"}, "named 'a b', but a name is letters"),
        ({"per": "group", "interval": True}, "cannot have an interval"),
    ],
)
def test_a_figure_that_cannot_be_is_refused(about: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        add_sure(**about)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="no figure 'acuracy'; choose from accuracy, "):
        get("acuracy")


# How numbers are shown


def test_columns_and_texts() -> None:
    assert get("accuracy").column("test", heading="test") == Column("test accuracy %", ("test", "accuracy"), 100, 1, 1)
    assert get("nll").column("unseen") == Column("NLL", ("unseen", "nll"), 1, 3, -1)
    assert get("accuracy").text(0.9125) == "91.2 %"
    assert get("nll").text(0.25) == "0.250"
    assert get("nll").text(None) == "-"
    assert [each.name for each in headline()] == ["accuracy", "nll", "ece_top1"]
    assert [each.name for each in headline(wide=True)] == ["accuracy", "worst_client", "nll", "ece_top1"]


def test_numbers_of_a_result() -> None:
    """Law: traffic is both directions; what is missing, no number or infinite is None."""
    result = {"bytes": {"down": 2, "up": 3}, "test": {"accuracy": True, "nll": float("inf")}}
    assert number(result, "bytes", "total") == 5
    assert (
        number(result, "test", "accuracy") is number(result, "test", "nll") is number(result, "unseen", "nll") is None
    )
