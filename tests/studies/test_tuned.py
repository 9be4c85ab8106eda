"""Tuned settings as files: written from the store, found by data and protocol, used and told apart in every study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from metavd.cli import main
from metavd.errors import SpecError
from metavd.runs.settings import Experiment, from_toml, with_settings
from metavd.studies import halving, tuned
from metavd.studies.arena import name_of, page
from metavd.studies.lines import append, complete, identity
from metavd.studies.paper.page import report
from metavd.studies.paper.plan import tuned_told
from metavd.studies.paper.protocol import protocol, settings_of
from metavd.studies.paper.tables import cells

ROOT = Path(__file__).resolve().parents[2]
QUICK = {"rounds": "2", "local_epochs": "1", "model": "mlp", "width": "8", "clients": "4", "unseen": "2"}


def chosen(folder: Path, method: str, data: str = "digits", partition: str = "dirichlet:0.5",
           test_rows: str = "independent", **options: Any) -> None:  # fmt: skip
    """Write a file as `write` does."""
    about = {"method": method, "data": data, "partition": partition, "test_rows": test_rows, "rounds": 2}
    lines = [f"{key} = {json.dumps(value)}" for key, value in about.items()]
    lines += ["[options]", *(f"{key} = {json.dumps(value)}" for key, value in options.items())]
    path = folder / tuned.study_folder(data, partition, test_rows) / f"{method}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))


def words() -> list[str]:
    return [f"{key}={value}" for key, value in QUICK.items()]


def test_files_and_page_of_the_repository_are_written_from_its_store(tmp_path: Path) -> None:
    lines = list(halving.read(ROOT / "results" / "tuning.jsonl").values())
    made = {path.relative_to(tmp_path): path.read_text() for path in tuned.write(lines, tmp_path)}
    kept = {path.relative_to(ROOT / tuned.FOLDER): path.read_text() for path in (ROOT / tuned.FOLDER).glob("*/*.toml")}
    assert made == kept
    assert halving.page(lines, "metavd tune-all --page docs/tuned.md") == (ROOT / "docs" / "tuned.md").read_text()


def test_a_file_is_a_configuration_and_holds_what_the_best_trial_had(tmp_path: Path) -> None:
    """Law: written and read back, every study's best trial is there, and `metavd run --config` would take the file."""
    lines = list(halving.read(ROOT / "results" / "tuning.jsonl").values())
    tuned.write(lines, tmp_path)
    best = {key: rows[0] for key, rows in halving.chosen(lines).items()}
    read = {(f"{each.data} {each.partition} {each.test_rows}", each.method): each for each in tuned.read(tmp_path)}
    assert best.keys() == read.keys()
    for key, line in best.items():
        assert read[key].settings == line["settings"]
        whole = with_settings(Experiment(), from_toml(tmp_path / read[key].name))
        assert (whole.method, whole.rounds) == (line["method"], line["of"])


def test_defaults_that_won_are_written_as_they_were(tmp_path: Path) -> None:
    """An older line of the defaults has options alone; its file has what it had then, whatever the defaults are now."""
    line = {"study": "digits iid uniform", "method": "fedavg", "seed": 1, "round": 2, "of": 2, "commit": "c",
            "valid": {"accuracy": 0.5}, "valid_unseen": {"accuracy": 0.5}}  # fmt: skip
    store = tmp_path / "s.jsonl"
    for more in (
        {"trial": 0, "settings": {}, "score": 0.6, "options": {"lr": 0.123, "batch": 9}},
        {"trial": 1, "settings": {"lr": 0.3}, "score": 0.595},
        {"trial": 2, "settings": {"lr": 0.7}, "score": 0.3},
        {"trial": 3, "settings": {"lr": 0.7}, "score": 0.3},
        {"trial": 4, "settings": {}, "score": 0.9},
    ):
        append(store, line | more)
    (file,) = tuned.write(list(halving.read(store).values()), tmp_path)
    assert tuned.read(tmp_path)[0].settings == {"lr": 0.123}
    text = file.read_text()
    assert "the best of 3 settings, the defaults; 2 of the 3 that were trained to the end" in text
    assert "are within 1 point: lr 0.123..0.3" in text


def test_the_nearest_choice_is_taken(tmp_path: Path) -> None:
    """Method before data before test rows before partition; what is added to a method leaves it its choice."""
    chosen(tmp_path, "fedavg", "cifar10", "dirichlet:0.1", lr=0.1)
    chosen(tmp_path, "fedavg", "cifar10", "dirichlet:0.5", lr=0.5)
    chosen(tmp_path, "fedavg", "cifar10", "dirichlet:0.5", "consistent", lr=0.6)
    chosen(tmp_path, "fedavg", "npz:somewhere/cifar10.npz", "dirichlet:0.5", lr=0.7)
    chosen(tmp_path, "reptile+metavd", "cifar10", "dirichlet:0.5", lr=0.8, beta=3.0)
    known = tuned.read(tmp_path)

    def rate(data: str, partition: str, test_rows: str = "independent", method: str = "fedavg") -> Any:
        found = tuned.find(known, method, data, partition, test_rows)
        return found and found.settings["lr"]

    assert rate("cifar10", "dirichlet:0.5") == 0.5
    assert rate("cifar10", "dirichlet:5") == 0.5
    assert rate("cifar10", "dirichlet:0.2") == 0.1
    assert rate("cifar10", "dirichlet:0.1", "consistent") == 0.6
    assert rate("cifar10", "dirichlet:0.1", "uniform") == 0.1
    assert rate("celeba+cifar10", "dirichlet:5") == 0.5
    assert rate("npz:elsewhere/cifar10.npz", "iid") == 0.7
    assert rate("cifar100", "dirichlet:0.5") is None
    assert rate("cifar10", "dirichlet:0.5", method="reptile") is None
    assert rate("cifar10", "dirichlet:0.5", method="fedavg+metavd") is None
    for method in ("fedavg+ft", "fedavg+snip", "fedavg+prior"):
        assert rate("cifar10", "dirichlet:0.5", method=method) == 0.5
    for method in ("reptile+metavd+drop", "reptile+vd", "reptile+ensemblevd+prior"):
        found = tuned.find(known, method, "cifar10", "dirichlet:5", "independent")
        assert found is not None
        assert found.settings == {"lr": 0.8, "beta": 3.0}
        said = tuned.told_of(method, "cifar10", ["dirichlet:5"], "independent", found)
        assert said.endswith("from cifar10-dirichlet-0.5-independent/reptile+metavd.toml, chosen for reptile+metavd, "
                             "dirichlet:0.5")  # fmt: skip


def test_compare_takes_them_and_says_so(tmp_path: Path, capsys: Any) -> None:
    """The tuned row has the figures of a run with those options; the folder keeps both, and what is missing is told."""
    chosen(tmp_path / "tuned", "fedavg", test_rows="consistent", lr=0.3)
    out = ["--out", str(tmp_path / "out"), "--seeds", "1", *words()]
    main(["compare", "fedavg", "reptile", "--tuned-from", str(tmp_path / "tuned"), *out])
    said = capsys.readouterr().err
    name = "digits-dirichlet-0.5-consistent/fedavg.toml"
    assert f"fedavg on digits, dirichlet:0.5: lr=0.3 from {name}" in said
    assert "reptile on digits, test rows consistent: nothing was tuned for these, so its defaults" in said
    rows = json.loads((tmp_path / "out" / "comparison.json").read_text())["rows"]
    assert list(rows) == ["fedavg (tuned)", "reptile"]
    main(["compare", "fedavg", "lr=0.3", "--out", str(tmp_path / "same"), "--seeds", "1", *words()])
    same = json.loads((tmp_path / "same" / "comparison.json").read_text())["rows"]
    assert same["fedavg"] == rows["fedavg (tuned)"]
    main(["compare", "fedavg", *out])
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == {
        "fedavg",
        "fedavg-tuned",
        "reptile",
    }


def test_the_arena_has_two_rows_even_where_the_defaults_were_chosen(tmp_path: Path, capsys: Any) -> None:
    """Law: tuned and untuned runs are two lines; the tuned one names its file."""
    chosen(tmp_path / "tuned", "fedavg", lr=0.02)  # the default
    store = ["--store", str(tmp_path / "s.jsonl"), "--out", str(tmp_path / "w"), "--test-rows", "independent"]
    main(["arena", "fedavg", *store, *words()])
    main(["arena", "fedavg", "--tuned-from", str(tmp_path / "tuned"), *store, *words()])
    assert "lr=0.02 from digits-dirichlet-0.5-independent/fedavg.toml" in capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [line["settings"].get(tuned.KEY) for line in lines] == [
        None,
        "digits-dirichlet-0.5-independent/fedavg.toml",
    ]
    assert lines[0]["result"]["model"] == lines[1]["result"]["model"]
    text = page(tmp_path / "s.jsonl")
    assert f"| `{name_of(lines[0])}` |" in text
    assert "| `fedavg (tuned)` |" in text


def test_the_paper_takes_them(tmp_path: Path) -> None:
    """A cell with a file has its options and another identity; one without is the run that it was."""
    chosen(tmp_path, "reptile+metavd", "cifar10", "dirichlet:0.5", beta=3.0, lr=0.01)
    how = protocol(tuned=tmp_path)
    own, other, without = (
        cells("T8", [row], [column])[0]
        for row, column in (("Reptile+MetaVD", "0.5"), ("Reptile+MetaVD", "5"), ("FedAvg", "0.5"))
    )
    for cell in (own, other):
        settings = settings_of(cell, how=how)
        assert (settings["beta"], settings["lr"]) == (3.0, 0.01)
        assert settings[tuned.KEY] == "cifar10-dirichlet-0.5-independent/reptile+metavd.toml"
        assert identity(settings) != identity(settings_of(cell))
    assert settings_of(without, how=how) == settings_of(without)
    said = tuned_told(["T8"], how=how, rows=["Reptile+MetaVD", "FedAvg"], columns=["5"])
    assert any("chosen for dirichlet:0.5" in text for text in said)
    assert any("nothing was tuned" in text for text in said)
    assert tuned_told(["T8"]) == []
    with pytest.raises(SpecError, match="give one of the two"):
        protocol(tuned=tmp_path, overrides={"fedavg": {"lr": 0.1}})


def test_the_paper_shows_the_last_five_and_the_untuned_beside(tmp_path: Path) -> None:
    """The page of tuned runs has four numbers of a cell: ours, the last five, untuned, the paper's."""
    chosen(tmp_path, "fedavg", "cifar10", "dirichlet:0.5", lr=0.03)
    store = tmp_path / "s.jsonl"
    how, cell = protocol(tuned=tmp_path), cells("T8", ["FedAvg"], ["0.5"])[0]
    made = {"commit": "c", "device": "cpu", "machine": "m", "versions": {"metavd": "0", "torch": "2"}, "scope": "full"}
    for which, value in ((how, 0.7), (protocol(), 0.6)):
        part = {"accuracy": value}
        kept = {"test": part, "unseen": part, "gap": 0.0, "last": {"test.accuracy": value + 0.05}}
        append(store, made | {"seed": 777, "settings": complete(settings_of(cell, how=which)), "result": kept})
    text = report(store, names=["T8"], how=how)
    assert "| test accuracy %: ours | last five | untuned | paper | difference |" in text
    assert "| FedAvg | 70.00 | 75.00 | 60.00 | 78.28 |" in text
    assert "fedavg.toml, chosen for dirichlet:0.5.\n- fedavg+ft on cifar10, dirichlet:5, dirichlet:0.5" in text
    assert "- reptile on cifar10, test rows independent: nothing was tuned for these, so its defaults.\n" in text
    before = report(store, names=["T8"])
    assert "untuned" not in before
    assert "| FedAvg | 60.00 | 65.00 | 78.28 |" in before


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["lr=0.1"], "lr is set to '0.1', but --tuned takes lr=0.3 from"),
        (["--tuned-from", "nowhere"], "there are no tuned settings in nowhere"),
    ],
)
def test_wrong_input_is_one_sentence(more: list[str], sentence: str, tmp_path: Path, capsys: Any) -> None:
    chosen(tmp_path / "tuned", "fedavg", test_rows="consistent", lr=0.3)
    with pytest.raises(SystemExit) as ended:
        main(["compare", "fedavg", "--tuned-from", str(tmp_path / "tuned"), "--out", str(tmp_path / "o"), *more])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "fedavg.toml").write_text("lr = 0.1\n")
    with pytest.raises(SpecError, match=r"fedavg.toml says not all of method, data"):
        tuned.read(tmp_path)
