"""Folders as values: what is sound is read whole, what is spoilt is named and left out, and nothing else is raised."""

import json
import random
import shutil

import pytest

from metavd.evaluate.figures import number
from metavd.report.page import write_report
from metavd.report.read import ReportError, read_run, read_runs

FILES = ("config.toml", "rounds.jsonl", "clients.csv", "details.json")


def test_a_sound_run_has_all_its_parts(runs):
    """Nothing is noted; counts agree between the files."""
    run = read_run(runs / "reptile+metavd+drop" / "seed-1")
    assert run.notes == ()
    assert (run.method, run.data, run.seed) == ("reptile+metavd+drop", "digits", 1)
    assert len(run.clients) == 11
    assert [client.unseen for client in run.clients] == [False] * 8 + [True] * 3
    assert len(run.rounds) == 4
    assert run.details.embeddings is not None
    assert len(run.details.embeddings) == 8
    assert run.details.reliability["test"].count.sum() == run.number("test", "samples")


def test_labels_of_a_client_count_its_training_rows(runs):
    """The row of details.json that belongs to a client, seen or not, sums to its training size in clients.csv."""
    run = read_run(runs / "fedavg" / "seed-0")
    for client in run.clients:
        assert run.labels_of(client).sum() == client.train_size


def test_a_folder_of_runs_gives_every_run_once(runs):
    """Named by its parent and by itself, a run is still one run."""
    found, notes = read_runs([runs, runs / "fedavg", runs / "fedavg" / "seed-0"])
    assert notes == []
    assert len(found) == len({run.folder.resolve() for run in found}) == 6


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", FILES)
def test_a_missing_part_is_noted_and_the_rest_is_drawn(name, one, tmp_path):
    """An older or a trimmed folder still makes a page; the page says which file was not there."""
    (one / name).unlink()
    notes = write_report([one], tmp_path / "page.html")
    assert [note for note in notes if name in note and "is missing" in note]
    assert f"{name} is missing" in (tmp_path / "page.html").read_text()


def spoilt(content: bytes, source: random.Random) -> bytes:
    """Cut, overwrite or insert at random places."""
    made = bytearray(content)
    for _ in range(source.randint(1, 2)):
        place = source.randrange(len(made) + 1)
        kind = source.randrange(5)
        if kind == 0:
            del made[place:]
        elif kind == 1:
            made[place : place + 3] = bytes(source.randrange(256) for _ in range(3))
        else:
            made[place:place] = source.choice([b"[", b"NaN", b"null", b"-1e999", b'"x"', b"\x00", b"{}", b"0", b"-"])
    return bytes(made)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", [*FILES, "result.json"])
def test_random_damage_is_named_and_never_raises(name, one, tmp_path):
    """Whatever happened to a file, there is a page or one sentence that names the run; nothing else is raised."""
    content, source = (one / name).read_bytes(), random.Random(name)
    outcomes = set()
    for _ in range(6):
        (one / name).write_bytes(spoilt(content, source))
        try:
            outcomes.add(bool(write_report([one], tmp_path / "page.html")))
        except ReportError as error:
            outcomes.add("refused")
            if str(one) not in str(error):
                raise
    assert outcomes != {False}, "the damage was never noticed"


@pytest.mark.parametrize("change", [
    {"reliability": 5}, {"reliability": {"test": None}},
    {"entropy": {"test": {"edges": [1, 0], "right": [1], "wrong": [1]}, "unseen": None}},
    {"labels": [[1], [1, 2]]}, {"labels": [[-1.0]]}, {"rates": {"fc1": {"edges": [0, 1], "clients": [[1, 2]]}}},
    {"embeddings": [["a"]]}, {"embeddings": [1.0]},
], ids=str)  # fmt: skip
def test_details_of_a_wrong_shape_are_left_out(change, one, edited):
    """JSON that is sound but not what is drawn is damage too."""
    edited(one / "details.json", lambda value: value.update(change))
    run = read_run(one)
    assert len(run.notes) == 1
    assert "details.json is damaged" in run.notes[0]
    assert run.details.embeddings is None


@pytest.mark.usefixtures("undrawn")
def test_a_result_without_its_numbers_still_makes_a_page(one, edited, tmp_path):
    """Figures that are null, texts or not finite are shown as unknown."""

    def spoil(value):
        value["test"] = {"accuracy": float("nan"), "nll": "much", "intervals": 3}
        value["unseen"], value["bytes"], value["seconds"], value["sparsity"] = None, [], None, True

    edited(one / "result.json", spoil)
    write_report([one], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "nan" not in text.split("<main>")[1].split("Learning curves")[0].lower()


def test_unfinished_runs_are_noted_where_others_are_finished(one, tmp_path):
    """One finished run is enough for a page; the unfinished one is named with what to do."""
    shutil.copytree(one, tmp_path / "two")
    (tmp_path / "two" / "result.json").unlink()
    found, notes = read_runs([one, tmp_path / "two"])
    assert len(found) == 1
    assert notes == [f"there is no finished run in {tmp_path / 'two'}; run it to the end with --resume"]
    with pytest.raises(ReportError, match="no finished run"):
        read_runs([tmp_path / "two"])


def test_personalised_models_below_a_run_are_no_runs(one, tmp_path):
    """Where `metavd personalize` puts models by default, beside a configuration, nothing is to be run to its end."""
    run = shutil.copytree(one, tmp_path / "run")
    (run / "personal" / "client-1").mkdir(parents=True)
    for name in ("config.toml", "model.json"):
        (run / "personal" / "client-1" / name).write_text("")
    found, notes = read_runs([run])
    assert (len(found), notes) == (1, [])


def test_folders_that_hold_no_run_are_refused(tmp_path):
    """Nothing, an empty folder and a file are told apart from runs in one sentence."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, what in (("nowhere", "is no folder"), ("file", "is no folder"), ("empty", "holds no run")):
        with pytest.raises(ReportError, match=f"{name} {what}; name the --out folder"):
            read_runs([tmp_path / name])


def test_a_loop_of_links_ends(one):
    """A link to the folder above does not send the search round in circles."""
    (one / "again").symlink_to(one)
    assert len(read_runs([one])[0]) == 1


def test_numbers_are_finite_or_absent():
    """Truth values, texts and infinities are not figures; traffic is both directions."""
    result = {"a": {"b": True, "c": float("inf"), "d": 2, "e": 1e300}, "bytes": {"down": 3, "up": 4}}
    assert [number(result, "a", key) for key in "bcde"] == [None, None, 2.0, None]
    assert number(result, "bytes", "total") == 7.0
    assert number(json.loads('{"x": {"y": 1}}'), "x", "y", "z") is None
