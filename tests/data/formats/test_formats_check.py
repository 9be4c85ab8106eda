"""`check`, the table of formats, and settings for data of one's own."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

from metavd.data.collection import suggest
from metavd.data.formats import FORMATS, check, info, load, options
from metavd.data.source import SourceError, arrays


@pytest.mark.parametrize("kind", ["cifar10 python", "cifar100 tar", "femnist", "celeba", "mnist writers", "emnist zip",
                                  "fashion-mnist", "npz", "npz writer", "npz celeba", "folder clients"])  # fmt: skip
def test_check_recognises_every_format(make, rng, tmp_path, kind):
    """The format's name, the counts and the range of a folder or a file; nothing is wrong but the number of rows."""
    made = make.MAKERS[kind](tmp_path, rng)
    data = load(made.name, made.root, **made.options)
    report = check(made.root)
    (found,) = report.findings
    assert (found.name, found.rows) == (made.name if kind != "npz" else "npz", len(data.y))
    people = "no clients of their own" if data.client is None else f"{len(np.unique(data.client))} clients"
    said = re.search(rf"; {len(np.unique(data.y))} classes of .*; {people}; values (\S+) to ([\d.e+-]+\d)", str(found))
    assert said
    assert 0 <= float(said[1]) < float(said[2]) <= 255
    assert str(found.place) in str(report)
    assert all("official" in str(problem) for problem in report.problems)


def test_check_of_a_folder_with_several(make, rng, tmp_path):
    """Every dataset of a data folder is found."""
    for kind in ("cifar10 binary", "cifar100 binary", "mnist", "fashion-mnist", "npz celeba", "femnist"):
        make.MAKERS[kind](tmp_path, rng)
    names = [finding.name for finding in check(tmp_path).findings]
    assert names == ["cifar10", "cifar100", "femnist", "celeba", "mnist", "fashion-mnist"]


def test_check_goes_on_after_a_fault(make, rng, tmp_path):
    """Every faulty file is named, with its byte, not the first alone."""
    made = make.cifar(tmp_path, rng, kind=10, version="binary")
    for number, at in ((1, 3073), (4, 0)):
        data = bytearray(made.files[number].read_bytes())
        data[at] = 77
        made.files[number].write_bytes(data)
    made.files[5].unlink()
    report = check(tmp_path)
    assert not report.ok
    assert [(problem.path, problem.offset) for problem in report.problems] == [
        (made.files[1], 3073),
        (made.files[4], 0),
        (made.files[5], None),
    ]
    assert str(report).count("wrong: ") == 3


def test_check_of_many_bad_pictures(make, rng, tmp_path):
    """All bad pictures are counted, some are written out."""
    made = make.folder(tmp_path, rng)
    for number in range(30):
        (made.root / "cat" / f"x{number}.png").write_bytes(b"no")
    report = check(made.root)
    assert len(report.problems) == 30
    assert "and 10 more faults" in str(report)


def test_check_of_single_files(make, rng, tmp_path):
    """One file of a dataset is recognised by its name and its beginning."""
    for kind, number, name in (
        ("cifar10 binary", 2, "a file of cifar10"),
        ("cifar100 python", 0, "a file of cifar100"),
        ("cifar100 tar", 0, "cifar100"),
        ("emnist zip", 0, "emnist"),
        ("mnist", 0, "an idx file"),
        ("femnist", 0, "a LEAF shard"),
        ("npz", 0, "npz"),
        ("folder", 0, "a picture"),
    ):
        place = tmp_path / kind
        place.mkdir()
        made = make.MAKERS[kind](place, rng)
        report = check(made.files[number])
        assert [finding.name for finding in report.findings] == [name], report
        assert str(made.files[number]) in str(report)
    (tmp_path / "x.bin").write_bytes(b"hello")
    assert "no file of a known format" in str(check(tmp_path / "x.bin"))
    assert "no such file" in str(check(tmp_path / "nowhere"))
    (tmp_path / "x.tar.gz").write_bytes(b"hello")
    assert "none of a known dataset" in str(check(tmp_path / "x.tar.gz"))


def test_check_notes(make, rng, tmp_path):
    """What is no fault but good to know: unread arrays, clients of one row, missing shards."""
    np.savez(tmp_path / "a.npz", x=np.eye(4), y=[0, 1, 0, 1], client=[0, 0, 0, 1], names=["a"])
    notes = " ".join(check(tmp_path / "a.npz").notes)
    assert "names in it is not read" in notes
    assert "1 clients have one row only" in notes
    made = make.femnist(tmp_path, rng)
    made.files[0].unlink()
    assert "all_data_0.json is missing" in " ".join(check(tmp_path / "femnist").notes)


def test_table_of_datasets():
    """Every argument of a finder is an option with a help text, and nothing else is; settings are complete."""
    assert set(FORMATS) == {
        "digits", "cifar10", "cifar100", "femnist", "celeba", "mnist", "fashion-mnist", "emnist", "npz", "folder",
        "shakespeare", "sent140", "table", "text",
    }  # fmt: skip
    for name, entry in FORMATS.items():
        assert entry.name == name
        assert "\n" not in entry.description
        if name in ("npz", "folder", "table", "text", "shakespeare", "sent140"):  # by what they hold
            assert not entry.defaults
        else:
            assert set(entry.defaults) - {"drop_from"} == {
                "clients", "unseen", "cohort", "partition", "test_rows", "rounds", "batch", "model",
            }  # fmt: skip
        assert set(inspect.signature(entry.find).parameters) == {"root", *entry.options}
        assert all(option.help for option in entry.options.values())


def test_defaults_are_the_papers():
    """100 + 30 clients for CIFAR and CelebA, 160 + 40 writers for handwriting (facts, 7)."""
    for name in ("cifar10", "cifar100"):
        assert FORMATS[name].defaults == {
            "clients": 100, "unseen": 30, "cohort": 10, "partition": "dirichlet:0.5", "test_rows": "independent",
            "rounds": 1000, "batch": 64, "model": "cnn",
        }  # fmt: skip
    for name in ("femnist", "mnist"):
        found = FORMATS[name].defaults
        assert [found[key] for key in ("clients", "unseen", "cohort", "partition")] == [160, 40, 20, "natural"]
    found = FORMATS["celeba"].defaults
    assert [found[key] for key in ("clients", "unseen", "cohort", "partition")] == [100, 30, 10, "natural"]


def test_options_from_text():
    """A command line's text becomes the loader's types; what is not known is answered with what is."""
    assert options("celeba", {"size": "64x48", "least": "3", "attribute": "Male"}) == {
        "size": (64, 48), "least": 3, "attribute": "Male",
    }  # fmt: skip
    assert options("folder", {"size": "none", "channels": "1", "augment": "yes"}) == {
        "size": None, "channels": 1, "augment": True,
    }  # fmt: skip
    for name, given, message in (
        ("celeba", {"sise": "3"}, "celeba has no option 'sise'; did you mean size"),
        ("fashion-mnist", {"size": "3"}, "fashion-mnist has no option 'size'; it takes none"),
        ("celeba", {"size": "big"}, "celeba: size is 'big', but it must be: side of"),
        ("emnist", {"upright": "maybe"}, "upright is 'maybe'"),
    ):
        with pytest.raises(SourceError, match=message):
            options(name, given)
    with pytest.raises(SourceError, match="did you mean cifar10"):
        info("cifar-10")
    with pytest.raises(SourceError, match="choose from celeba, cifar10"):
        info("?????")


def test_suggested_settings_fit_the_data():
    """Own clients are used, a fifth of them unseen; else the rows decide how many there are."""
    x, y = np.zeros((1000, 3)), np.arange(1000) % 2
    found = suggest(arrays(x, y, client=np.arange(1000) % 10))
    assert (found["clients"], found["unseen"], found["partition"]) == (8, 2, "natural")
    found = suggest(arrays(x, y))
    assert (found["clients"], found["unseen"], found["partition"]) == (16, 4, "dirichlet:0.5")
    assert found["cohort"] <= found["clients"]
    assert suggest(arrays(x[:4], y[:4]))["clients"] == 2


def test_check_takes_train_and_test_folders_of_pictures_for_what_they_are(make, rng, tmp_path):
    """CIFAR-100's python version has files that are called train and test, not folders."""
    report = check(make.folder(tmp_path, rng, split=True).root)
    assert [finding.name for finding in report.findings] == ["folder"]
    assert report.ok, str(report)


def test_check_of_a_table_describes_its_columns(tmp_path):
    """Numbers by their range, texts by how many there are, what is missing, and how a run takes the file."""
    (tmp_path / "ward.csv").write_text("age,sex,sick\n20,m,yes\n,f,no\n89.5,f,yes\n")
    said = str(check(tmp_path / "ward.csv"))
    assert "3 rows; columns age (20 to 89.5, 1 missing), sex (2 different texts), sick (2 different texts)" in said
    assert said.endswith(f"--data table:{tmp_path / 'ward.csv'} --set label=COLUMN client=COLUMN.")
    (tmp_path / "talk.jsonl").write_text('{"text": "a b", "label": 1}\n{"text": "b", "label": 2}\n')
    assert str(check(tmp_path / "talk.jsonl")).endswith(f"--data text:{tmp_path / 'talk.jsonl'}.")
