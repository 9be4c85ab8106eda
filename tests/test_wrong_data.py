"""Wrong inputs of tables, texts, names, networks and runs that go on: one sentence, exit status 2, nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from metavd.cli import main

ROWS = 24


def csv(path: str, **columns: object) -> None:
    """Write a table; a column is a list, or one value for all rows."""
    full = {name: value if isinstance(value, list) else [value] * ROWS for name, value in columns.items()}
    lines = [",".join(full), *(",".join(map(str, row)) for row in zip(*full.values(), strict=True))]
    Path(path).write_text("\n".join(lines) + "\n")


def lines(path: str, *rows: object) -> None:
    Path(path).write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))


LABELS = ["a", "b"] * (ROWS // 2)
CLIENTS = ["north", "south", "east", "west"] * (ROWS // 4)
AGES = list(range(ROWS))
TABLE = {"age": AGES, "diagnosis": LABELS, "hospital": CLIENTS}
GOOD = ["--data", "table:f.csv", "--set", "label=diagnosis", "client=hospital"]
WRONG = [
    (lambda: csv("f.csv", **TABLE), ["--data", "table:f.csv"], "no column is called label or target or class or y"),
    (
        lambda: csv("f.csv", **TABLE),
        ["--data", "table:f.csv", "--set", "label=sick"],
        "there is no column 'sick'; the columns are age, diagnosis, hospital",
    ),
    (lambda: csv("f.csv", **TABLE), [*GOOD, "drop=weight"], "there is no column 'weight'"),
    (lambda: csv("f.csv", **TABLE), [*GOOD, "unseen=nort"], "no such client; did you mean north"),
    (lambda: csv("f.csv", **TABLE), [*GOOD, "unseen=9"], "cannot make"),
    (lambda: csv("f.csv", **TABLE), [*GOOD, "unseen=1,nobody"], "names '1', but there is no such client"),
    (lambda: csv("f.csv", **TABLE), [*GOOD, "partition=iid", "unseen=north"], "only clients by nature have names"),
    (lambda: csv("f.csv", **TABLE), [*GOOD, "model=lstm"], "it needs rows of token ids"),
    (lambda: csv("f.csv", **TABLE), [*GOOD, "image_size=32"], "holds no uint8 images"),
    (lambda: csv("f.csv", **TABLE), [*GOOD, "labels=diagnosis"], "there is no setting 'labels'"),
    (
        lambda: csv("f.csv", **(TABLE | {"diagnosis": "a"})),
        GOOD,
        "every row has label 'a', but there must be at least 2",
    ),
    (
        lambda: csv("f.csv", **(TABLE | {"diagnosis": AGES})),
        GOOD,
        "24 different values in 24 rows, which are no classes",
    ),
    (
        lambda: csv("f.csv", **(TABLE | {"hospital": ["", *CLIENTS[1:]]})),
        GOOD,
        "row 0 has no value in the column 'hospital'",
    ),
    (lambda: csv("f.csv", **(TABLE | {"age": 1})), GOOD, "alike in all training rows"),
    (lambda: csv("f.csv", **(TABLE | {"age": ["inf", *AGES[1:]]})), GOOD, "row 0 of the column 'age' is 'inf'"),
    (
        lambda: csv("f.csv", **(TABLE | {"split": "perhaps"})),
        GOOD,
        "row 0 of 'split' is 'perhaps', but it must be train or test",
    ),
    (lambda: csv("f.csv", diagnosis=LABELS, hospital=CLIENTS), GOOD, "there is no column to learn from"),
    (lambda: Path("f.csv").write_text(""), GOOD, "the file is empty"),
    (lambda: Path("f.csv").write_text("a,b\n"), GOOD, "has no row"),
    (lambda: Path("f.csv").write_text("a,b\n1,2\n1,2,3\n"), GOOD, "line 3 has 3 cells, but the first line names 2"),
    (lambda: Path("f.csv").write_text("a,a\n1,2\n"), GOOD, "each with a name of its own"),
    (lambda: Path("f.csv").write_bytes(b"a,b\n\xff,2\n"), GOOD, "no UTF-8"),
    (lambda: Path("f.parquet").write_bytes(b"PAR1"), ["--data", "table:f.parquet"], "f.parquet: it cannot be read"),
    (lambda: None, ["--data", "table:f.csv"], "there is no such file"),
    (lambda: Path("f.xls").write_bytes(b"x"), ["--data", "table:f.xls"], "must end in .csv, .tsv, .jsonl or .parquet"),
    (lambda: lines("f.jsonl", {"text": "a"}, {"text": "b"}), ["--data", "text:f.jsonl"], "no column is called label"),
    (lambda: lines("f.jsonl", {"label": 1}), ["--data", "text:f.jsonl"], "no column is called text"),
    (lambda: lines("f.jsonl", {"text": 3, "label": 1}), ["--data", "text:f.jsonl"], "row 0 of 'text' is int"),
    (
        lambda: lines("f.jsonl", {"text": "a", "label": 1}, {"text": "b"}),
        ["--data", "text:f.jsonl"],
        "line 2 must hold the keys",
    ),
    (lambda: lines("f.jsonl", "{not json"), ["--data", "text:f.jsonl"], "line 1 is no JSON"),
    (lambda: lines("f.jsonl", ""), ["--data", "text:f.jsonl"], "the file is empty"),
    (
        lambda: lines("f.jsonl", {"text": "a b"}),
        ["--data", "text:f.jsonl,task=translate"],
        "it must be label or next-character",
    ),
    (lambda: lines("f.jsonl", {"text": "a"}), ["--data", "text:f.jsonl,task=next-character"], "too short to predict"),
    (
        lambda: lines("f.jsonl", {"text": "aaaa"}),
        ["--data", "text:f.jsonl,task=next-character"],
        "every character is 'a'",
    ),
    (
        lambda: lines("f.jsonl", {"text": "ab ab", "label": 1}),
        ["--data", "text:f.jsonl,task=next-character,label=label"],
        "the next character is the label",
    ),
    (
        lambda: lines("f.jsonl", *({"text": f"t {i}", "label": i % 2, "client": i % 3} for i in range(30))),
        ["--data", "text:f.jsonl", "model=mlp"],
        "use lstm or transformer",
    ),
    (lambda: np.savez("f.npz", x=np.full((9, 3), -1), y=np.arange(9) % 2), ["--data", "npz:f.npz"], "token id"),
]


def table() -> None:
    csv("f.csv", **TABLE)


def texts() -> None:
    lines("f.jsonl", *({"text": f"t {i}", "label": i % 2, "client": f"c{i % 3}"} for i in range(30)))


def speeches() -> None:
    lines("f.jsonl", *({"text": "to be or not " * 4, "client": who} for who in ("king", "queen", "page")))


def images() -> None:
    np.savez("f.npz", x=np.random.RandomState(0).randint(0, 255, (60, 16, 16, 3), np.uint8), y=np.arange(60) % 2)


def ids() -> None:
    np.savez("f.npz", x=np.random.RandomState(0).randint(0, 50, (60, 6)), y=np.arange(60) % 2)


def spoilt_weights() -> None:
    table()
    Path("w.safetensors").write_bytes(b"not safetensors at all")


def other_weights() -> None:
    table()
    save_file({"fc9.weight": torch.zeros(2, 2)}, "w.safetensors")


def finished() -> None:
    """Leave a finished run of one round in out."""
    table()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["metavd", "run", "fedavg", *GOOD, "--rounds", "1", "--out", "out"])
        main()


TEXT, NEXT = ["--data", "text:f.jsonl"], ["--data", "text:f.jsonl,task=next-character"]
NPZ = ["--data", "npz:f.npz"]
COMMANDS = [
    (table, ["compare", "fedavg", *GOOD, "--leave-out", "nort"], "--leave-out names 'nort', but the clients are east,"),
    (table, ["compare", "fedavg", *GOOD, "--leave-out", "each", "unseen=1"], "--leave-out decides who is unseen"),
    (
        table,
        ["compare", "fedavg", *GOOD, "--leave-out", "each", "partition=iid"],
        "partition is 'iid', but --leave-out",
    ),
    (table, ["run", "fedavg", *GOOD, "unseen=north,south,east,west"], "which leaves nobody to train"),
    (table, ["run", "fedavg", *GOOD, "unseen=north,north"], "which names a client twice"),
    (
        table,
        ["run", "fedavg", *GOOD, "--weights", "none.safetensors"],
        "weights is 'none.safetensors', which cannot be",
    ),
    (spoilt_weights, ["run", "fedavg", *GOOD, "--weights", "w.safetensors"], "no safetensors file"),
    (other_weights, ["run", "fedavg", *GOOD, "--weights", "w.safetensors"], "has 'fc9.weight', but the network has no"),
    (table, ["run", "fedavg", *GOOD, "model=resnet8"], "needs images of at least 8x8 pixels and a row here is (1,)"),
    (table, ["run", "fedavg", *GOOD, "model=resnet9"], "model is 'resnet9'; did you mean resnet8 or resnet18"),
    (table, ["run", "reptile+metavd", *GOOD, "layers=fc7"], "names 'fc7', but the model's layers are fc0, fc1, fc2"),
    (table, ["run", "fedavg", *GOOD, "categories=weight"], "there is no column 'weight'"),
    (images, ["run", "fedavg", *NPZ, "image_size=5000"], "image_size is 5000, but must lie between 0 and 4096"),
    (images, ["run", "fedavg", *NPZ, "image_size=4", "model=lenet"], "needs images of at least 12x12 pixels"),
    (images, ["run", "fedavg", *NPZ, "model=transformer"], "needs rows of token ids and a row here is (3, 16, 16)"),
    (ids, ["run", "fedavg", *NPZ, "model=cnn"], "a row here is 50 token ids, 6 a row; use lstm or transformer"),
    (ids, ["run", "fedavg", "--data", "npz:f.npz,kind=words"], "kind is 'words', but it must be auto or tokens or"),
    (texts, ["run", "fedavg", *TEXT, "vocabulary=letters"], "'letters', but it must be word or character or byte"),
    (texts, ["run", "fedavg", *TEXT, "length=-1"], "length is -1, but it must be a whole number from 0 to 65536"),
    (texts, ["run", "fedavg", *TEXT, "label=mood"], "there is no column 'mood'; the columns are text, label, client"),
    (speeches, ["run", "fedavg", *NEXT, "stride=0"], "stride is 0, but it must be a whole number from 1"),
    (speeches, ["run", "fedavg", *NEXT, "least=999"], "no client has 999 rows; the largest has 51"),
    (speeches, ["run", "fedavg", *NEXT, "client=role"], "there is no column 'role'; the columns are text, client"),
    (table, ["run", "fedavg", *GOOD, "--resume"], "--resume, but there is no run in out"),
    (table, ["run", "fedavg", *GOOD, "rounds=2"], "rounds is given twice, as --rounds 3 and as rounds=2"),
    (finished, ["run", "fedavg", *GOOD], "rounds is 1 there and 3 here; go on with --resume, or name another --out"),
    (finished, ["run", "reptile", *GOOD, "--resume"], "method is fedavg there and reptile here"),
    (finished, ["run", "fedavg", *GOOD, "seed=3", "--resume"], "seed is 0 there and 3 here; name another --out"),
]
CASES = [(make, ["run", "fedavg", *words], says) for make, words, says in WRONG] + COMMANDS


@pytest.mark.parametrize("case", CASES, ids=[case[2][:40] for case in CASES])
def test_one_sentence_status_2_and_nothing_written(case, tmp_path, monkeypatch, capsys) -> None:
    make, words, says = case
    monkeypatch.chdir(tmp_path)
    make()
    before = sorted(tmp_path.rglob("*"))
    contents = {path: path.read_bytes() for path in before if path.is_file()}
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["metavd", *words, "--rounds", "3", "--out", "out"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert contents == {path: path.read_bytes() for path in before if path.is_file()}
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1, said
    assert said[0].startswith("metavd: ")
    assert says in said[0]
    assert [path for path in sorted(tmp_path.rglob("*")) if ".cache" not in str(path) and path.name != "data"] == before
