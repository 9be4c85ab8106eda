"""The commands personalize, predict and export: what they write and print, and what they say of wrong input."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from metavd.cli import cli
from metavd.cli.use import export_command, personalize_command, predict_command
from metavd.data.source import digits
from metavd.evaluate.conformal import calibrate, covered, sets
from metavd.runs.run import run
from metavd.serve.model import Personal
from metavd.serve.personal import personalize

for command in (personalize_command, predict_command, export_command):
    cli.add_command(command)


Metavd = Callable[..., Any]
"""The fixture `metavd`: argv -> status, out, err."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run with a posterior."""
    folder = tmp_path_factory.mktemp("run") / "run"
    run(
        method="reptile+metavd",
        clients=4,
        unseen=2,
        cohort=2,
        rounds=2,
        width=8,
        predict="draws",
        samples=3,
        device="cpu",
        out=folder,
    )
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Forty labelled rows of two people."""
    np.savez(tmp_path / "new.npz", x=digits().x[:40], y=digits().y[:40], client=np.arange(40) % 2)
    return tmp_path / "new.npz"


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_from_a_run_to_answers(metavd: Metavd, trained: Path, rows: Path) -> None:
    """Personalise to a new person's rows, answer them: the file has what Python computes, one line per row."""
    done = metavd("personalize", trained, "--data", f"npz:{rows}", "--client", "1", "--out", "mine")
    assert (done.status, done.out) == (0, f"mine: adapted to 20 rows (npz:{rows})\n")
    done = metavd("predict", "mine", "--data", f"npz:{rows}", "--out", "answers.csv")
    assert done.status == 0
    assert "40 rows, accuracy" in done.err
    table = read(Path("answers.csv").read_text())
    said = Personal.load("mine").predict(digits().x[:40])
    assert said.mutual_information is not None
    first = ["row", "client", "label", "predicted", "confidence", "entropy", "mutual_information"]
    assert list(table[0]) == [*first, *(f"p_{label}" for label in range(10))]
    assert [row["label"] for row in table] == [str(label) for label in digits().y[:40]]
    assert [row["client"] for row in table[:3]] == ["0", "1", "0"]
    assert [int(row["predicted"]) for row in table] == said.probs.argmax(1).tolist()
    for name, values in (("entropy", said.entropy), ("p_7", said.probs[:, 7]), ("confidence", said.probs.max(1)),
                         ("mutual_information", said.mutual_information)):  # fmt: skip
        np.testing.assert_allclose([float(row[name]) for row in table], values, rtol=1e-6)


def test_text_labels_and_names_of_clients_are_found_by_name(metavd: Metavd) -> None:
    """What a run was trained on can be personalised to and answered, in the same words."""
    x = np.random.default_rng(0).normal(size=(60, 3))
    np.savez(
        "words.npz", x=x, y=np.where(x[:, 0] > 0, "yes", "no"), client=np.array(["ann", "bob", "cy"])[np.arange(60) % 3]
    )
    run(method="fedavg", data="npz:words.npz", rounds=1, out="words")
    assert metavd("personalize", "words", "--data", "npz:words.npz", "--client", "bob", "--out", "bob").status == 0
    done = metavd("predict", "bob", "--data", "npz:words.npz")
    assert (done.status, [row["label"] for row in read(done.out)]) == (0, np.load("words.npz")["y"].tolist())
    np.savez("other.npz", x=x, y=np.full(60, "maybe"))
    done = metavd("predict", "bob", "--data", "npz:other.npz")
    assert (done.status, "has a class 'maybe', but the model knows no, yes" in done.err) == (2, True)


def test_every_person_of_the_rows_gets_a_model(metavd: Metavd, trained: Path, rows: Path) -> None:
    """DIR/client-ID each; without --out below the run, and never over another."""
    assert metavd("personalize", trained, "--data", f"npz:{rows}", "--out", "all").status == 0
    assert sorted(path.name for path in Path("all").iterdir()) == ["client-0", "client-1"]
    assert metavd("personalize", trained, "--client", "5").status == 0
    again = metavd("personalize", trained, "--client", "5")
    assert (again.status, "is there already and not empty" in again.err) == (2, True)
    place = trained / "personal" / "client-5"
    np.testing.assert_array_equal(
        Personal.load(place).predict(digits().x[:4]).probs, personalize(trained, client=5).predict(digits().x[:4]).probs
    )


def test_a_run_answers_for_its_clients_and_for_newcomers(metavd: Metavd, trained: Path, tmp_path: Path) -> None:
    """Without --out the table is printed; rows without labels have no label; --top shortens it."""
    np.savez(tmp_path / "rows.npz", x=digits().x[:5])
    new = metavd("predict", trained, "--data", "npz:rows.npz", "--top", "2", "--samples", "5")
    known = metavd("predict", trained, "--data", "npz:rows.npz", "--top", "2", "--samples", "5", "--client", "0")
    assert (new.status, known.status) == (0, 0)
    assert new.out != known.out
    table = read(new.out)
    assert list(table[0])[-4:] == ["top_1", "p_1", "top_2", "p_2"]
    assert not {"label", "client"} & set(table[0])
    said = personalize(trained).predict(digits().x[:5], samples=5)
    np.testing.assert_allclose([float(row["p_2"]) for row in table], np.sort(said.probs, 1)[:, -2], rtol=1e-6)


def test_parquet_has_the_same_columns(metavd: Metavd, trained: Path, rows: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert metavd("predict", trained, "--data", f"npz:{rows}", "--out", "answers.parquet").status == 0
    table = parquet.read_table("answers.parquet").to_pydict()
    assert list(table)[:4] == ["row", "client", "label", "predicted"]
    np.testing.assert_array_equal(table["entropy"], personalize(trained).predict(digits().x[:40]).entropy)


def test_export_writes_the_model_and_its_card(metavd: Metavd, trained: Path) -> None:
    done = metavd("export", trained, "--client", "0", "--out", "m.safetensors", "--licence", "CC-BY-4.0")
    assert (done.status, done.out) == (0, "m.safetensors and m.safetensors.md\n")
    text = Path("m.safetensors.md").read_text()
    assert "client 0, who took part in training" in text
    assert "CC-BY-4.0" in text
    result = json.loads((trained / "result.json").read_text())
    assert f"| ece_top1 | {result['test']['ece_top1']:.4f} | {result['unseen']['ece_top1']:.4f} |" in text


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run whose clients keep half of their rows for validation."""
    folder = tmp_path_factory.mktemp("held") / "run"
    run(method="fedavg", clients=4, cohort=2, rounds=2, width=8, partition="iid", valid=0.5, valid_rows="own",
        device="cpu", out=folder)  # fmt: skip
    return folder


@pytest.mark.parametrize("kind", [None, "aps", "raps"])
def test_sets_of_a_run_s_client(metavd: Metavd, held: Path, rows: Path, kind: str | None) -> None:
    """The columns are what Python makes of the client's validation rows; what was chosen is said."""
    chosen = [] if kind is None else ["--conformal", kind]
    done = metavd("predict", held, "--client", "0", "--data", f"npz:{rows}", "--coverage", "0.8", *chosen)
    assert done.status == 0
    own = personalize(held, client=0)
    assert own.held is not None
    assert len(own.held.y) > 50
    said = own.predict(digits().x[:40]).probs
    rule = calibrate(own.predict(own.held.x).probs, own.held.y, 0.8, kind or "lac")
    inside = sets(said, rule)
    table = read(done.out)
    assert [set(row["set"].split(";")) for row in table] == [set(np.flatnonzero(row).astype(str)) for row in inside]
    assert [int(row["set_size"]) for row in table] == inside.sum(1).tolist()
    assert all(row["set"].split(";")[0] == row["predicted"] for row in table)
    assert f"calibrated on {len(own.held.y)} rows (validation rows of client 0)" in done.err
    assert ("LAC," if kind is None else f"{kind.upper()} without random numbers") in done.err
    assert f"label in set {covered(inside, digits().y[:40]):.1%}, mean set size {inside.sum(1).mean():.2f}" in done.err


def test_sets_of_a_folder_from_rows_that_are_named(metavd: Metavd, trained: Path, tmp_path: Path) -> None:
    """Of rows that mark test rows and clients, those of the model's client that it was not adapted to calibrate."""
    x, y, number = digits().x[:200], digits().y[:200], np.arange(200)
    np.savez(tmp_path / "marked.npz", x=x, y=y, client=number % 2, test=number >= 100)
    np.savez(tmp_path / "rows.npz", x=digits().x[300:310])
    assert metavd("personalize", trained, "--data", "npz:marked.npz", "--client", "1", "--out", "mine").status == 0
    asked = ("predict", "mine", "--data", "npz:rows.npz", "--calibrate", "npz:marked.npz")
    done = metavd(*asked, "--coverage", "0.9", "--top", "1", "--out", "answers.csv")
    assert done.status == 0
    assert "calibrated on 50 rows (npz:marked.npz, client 1)" in done.err
    own = Personal.load("mine")
    used = (number >= 100) & (number % 2 == 1)
    inside = sets(own.predict(digits().x[300:310]).probs, calibrate(own.predict(x[used]).probs, y[used], 0.9))
    table = read(Path("answers.csv").read_text())
    assert [int(row["set_size"]) for row in table] == inside.sum(1).tolist()
    few = metavd(*asked, "--coverage", "0.99")
    assert "50 rows are too few for coverage 0.99, which needs 99: every set is whole" in few.err
    assert {row["set_size"] for row in read(few.out)} == {"10"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"client": np.arange(9)},
            "has rows of 0, 1, 2, 3, 4, 5, 6, 7, 8, but the model is that of client 9; give its",
        ),
        ({"test": np.zeros(9, bool)}, "marks no row as a test row, but only those may calibrate"),
        ({"y": None}, "has no labels, but calibration needs labelled rows"),
        (None, "the model has learnt from rows of npz:anna.npz, which cannot calibrate it; give other rows"),
    ],
)
def test_rows_that_cannot_calibrate(
    metavd: Metavd, trained: Path, tmp_path: Path, given: dict[str, Any] | None, says: str
) -> None:
    """Of somebody else, adapted to, without labels: refused in a sentence, and no file."""
    few = {"x": digits().x[:9], "y": digits().y[:9]}
    np.savez(tmp_path / "anna.npz", **few, client=np.full(9, 9))
    assert metavd("personalize", trained, "--data", "npz:anna.npz", "--out", "mine").status == 0
    asked = "npz:anna.npz"
    if given is not None:
        np.savez(tmp_path / "held.npz", **{name: value for name, value in (few | given).items() if value is not None})
        asked = "npz:held.npz"
    done = metavd("predict", "mine", "--data", "digits", "--coverage", "0.9", "--calibrate", asked, "--out", "a.csv")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert says in done.err
    assert not Path("a.csv").exists()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["personalize", "nowhere"], "nowhere holds no run and no personalised model"),
        (["personalize", "RUN", "--client", "9"], "client is '9', but the run has the clients 0 to 3"),
        (["personalize", "RUN", "--data", "npz:none.npz"], "none.npz: there is no such file or folder"),
        (["personalize", "RUN", "--data", "nonsense"], "There is no dataset 'nonsense'"),
        (["predict", "RUN", "--data", "digits", "--out", "a.txt"], "must end in .csv or .parquet"),
        (["predict", "RUN", "--data", "digits", "--out", "no/a.csv"], "a folder that does not exist"),
        (["predict", "RUN", "--data", "digits", "--samples", "0"], "samples is 0, but must be at least 1"),
        (["predict", "RUN", "--data", "digits", "--top", "11"], "top is 11, but must lie between 1 and the 10 classes"),
        (["predict", "RUN", "--data", "digits", "--device", "cuda:99"], "device is"),
        (["predict", "RUN", "--data", "digits", "--coverage", "1.5"], "coverage is 1.5, but must lie between 0 and 1"),
        (
            ["predict", "RUN", "--data", "digits", "--coverage", "0.9", "--client", "0", "--out", "a.csv"],
            "coverage is 0.9, but there are no calibration rows",
        ),
        (["predict", "RUN", "--data", "digits", "--free", "2"], "free is 2, but sets are made only for a coverage"),
        (
            ["predict", "RUN", "--data", "digits", "--coverage", "0.9", "--penalty", "0.1"],
            "penalty is 0.1, but only raps has one; conformal is lac",
        ),
        (
            ["predict", "RUN", "--data", "digits", "--coverage", "0.9", "--conformal", "raps", "--penalty", "-1"],
            "penalty is -1.0, but must be a number from 0",
        ),
        (
            ["predict", "RUN", "--data", "digits", "--coverage", "0.9", "--conformal", "raps", "--free", "-1"],
            "free is -1, but must be a whole number from 0",
        ),
        (
            ["predict", "RUN", "--data", "digits", "--coverage", "0.9", "--conformal", "top"],
            "conformal is 'top', but must be lac or aps or raps",
        ),
        (
            ["predict", "RUN", "--data", "digits", "--conformal", "aps"],
            "conformal is 'aps', but sets are made only for a coverage; add --coverage 0.9",
        ),
        (["export", "RUN", "--out", "m.bin"], "must end in .safetensors or .onnx"),
        (["export", "RUN", "--format", "onnx", "--out", "m.safetensors"], "must end in .onnx"),
    ],
    ids=" ".join,
)
def test_wrong_input_is_one_sentence_and_no_file(
    metavd: Metavd, trained: Path, tmp_path: Path, argv: list[str], says: str
) -> None:
    """Exit status 2, a sentence that names the value, and a folder as empty as before."""
    done = metavd(*(trained if word == "RUN" else word for word in argv))
    assert done.status == 2
    assert says in done.err
    assert done.err.startswith("metavd: ")
    assert done.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
