"""LEAF's shards: both scales of pixels, users as clients, and faults told with the user's name."""

from __future__ import annotations

import json

import numpy as np
import pytest

from metavd.data.formats import load
from metavd.data.source import SourceError


@pytest.mark.parametrize("scale", ["unit", "byte"])
@pytest.mark.parametrize("split", [False, True])
def test_femnist_gives_its_rows(*, make, rng, same, tmp_path, scale, split):
    """Floats 0 to 1 and bytes 0 to 255 give the same bytes; train/ and test/ become the split."""
    made = make.femnist(tmp_path, rng, scale=scale, split=split)
    data = load("femnist", tmp_path)
    same(data, made.oracle())
    assert (data.num_classes, data.mean, data.std, data.augment) == (62, (0.1307,), (0.3081,), False)
    assert data.x.shape[1:] == (1, 28, 28)


def write(tmp_path, users, name="all_data_0.json", folder="femnist/all_data"):
    place = tmp_path / folder
    place.mkdir(parents=True, exist_ok=True)
    counts = [len(rows["y"]) for rows in users.values()]
    text = json.dumps({"users": list(users), "num_samples": counts, "user_data": users})
    (place / name).write_text(text)


def test_unit_floats_are_not_cast_to_black(tmp_path):
    """The released code casts LEAF's floats to bytes, which leaves 0 and 1; here 0.5 is 128 of 255."""
    write(tmp_path, {"a": {"x": [[0.5] * 784, [1.0] * 784], "y": [0, 1]}})
    assert np.unique(load("femnist", tmp_path).x).tolist() == [128, 255]


@pytest.mark.parametrize(("other", "white"), [(0.5, 255), (200, 1)])
def test_user_of_zeros_and_ones_follows_the_others(tmp_path, other, white):
    """A user whose pixels are all 0 or 1 says nothing about the scale, so the dataset's decides."""
    write(tmp_path, {"a": {"x": [[other] * 784], "y": [0]}, "b": {"x": [[1] * 784], "y": [1]}})
    assert load("femnist", tmp_path).x[1].max() == white


def test_ids_follow_names_and_not_shards(tmp_path):
    """A client's id is the place of its name among all names, whatever shard it stands in."""
    write(tmp_path, {"zoe": {"x": [[0.5] * 784], "y": [0]}}, "all_data_0.json")
    write(tmp_path, {"amy": {"x": [[0.5] * 784], "y": [1]}}, "all_data_1.json")
    assert load("femnist", tmp_path).client.tolist() == [1, 0]


def test_all_data_comes_before_leafs_split(tmp_path):
    """LEAF leaves all_data/ beside its train/ and test/; `split` chooses the latter."""
    rows = {"x": [[0.5] * 784] * 2, "y": [0, 1]}
    write(tmp_path, {"a": {"x": rows["x"] * 2, "y": [0, 1, 0, 1]}})
    write(tmp_path, {"a": rows}, "t.json", "femnist/train")
    write(tmp_path, {"a": rows, "dropped": {"x": [], "y": []}}, "t.json", "femnist/test")
    assert load("femnist", tmp_path).test is None
    assert load("femnist", tmp_path, split=True).test.tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"x": [[0.5] * 783 + [1.5]], "y": [0]}, r"user 'a': pixel 0 of row 0 is 0.5, but pixels must be 0 to 1, or"),
        ({"x": [[0.5] * 783 + [-1]], "y": [0]}, r"user 'a': pixel 783 of row 0 is -1"),
        ({"x": [[3] * 783 + [256]], "y": [0]}, r"pixel 783 of row 0 is 256"),
        ({"x": [[0.5] * 783 + [float("nan")]], "y": [0]}, r"pixel 783 of row 0 is nan"),
        ({"x": [[0.5] * 783], "y": [0]}, r"a row of user 'a' holds 783 numbers"),
        ({"x": [[0.5] * 784, [0.5] * 783], "y": [0, 1]}, r"user 'a': its rows differ in length"),
        ({"x": [[0.5] * 784], "y": [62]}, r"row 0 has label 62, but labels must run from 0 to 61"),
        ({"x": [[0.5] * 784], "y": ["7"]}, r"user 'a': row 0 has label 7, but labels must be whole numbers"),
        ({"x": [[0.5] * 784], "y": []}, r"user 'a': x and y must be lists .* but they are 1 and 0"),
        ({"x": ["a.jpg"], "y": [1]}, r"a row of user 'a' holds names of files"),
    ],
)
def test_faults_name_the_user(tmp_path, rows, message):
    """One sentence with the file, the user and the row."""
    write(tmp_path, {"a": rows})
    with pytest.raises(SourceError, match=message) as caught:
        load("femnist", tmp_path)
    assert "all_data" in str(caught.value)


def test_bad_json_names_the_byte(tmp_path):
    """A shard that is cut off, or is no JSON, is told with the byte."""
    write(tmp_path, {"é": {"x": [[0.5] * 784], "y": [0]}})
    path = tmp_path / "femnist/all_data/all_data_0.json"
    text = path.read_text()
    path.write_text(text[:200])
    with pytest.raises(SourceError, match=r"all_data_0.json, byte \d+: this is no JSON"):
        load("femnist", tmp_path)
    path.write_text('{"users": "é" ?')
    with pytest.raises(SourceError, match="byte 15: this is no JSON"):
        load("femnist", tmp_path)
    path.write_text('{"users": NaN}')
    with pytest.raises(SourceError, match="this is no LEAF shard"):
        load("femnist", tmp_path)


def test_user_in_two_shards_is_refused(tmp_path):
    """A shard that was copied would put the same rows on both sides of a split."""
    rows = {"x": [[0.5] * 784] * 2, "y": [0, 1]}
    write(tmp_path, {"a": rows}, "all_data_0.json")
    write(tmp_path, {"a": rows}, "all_data_0 (copy).json")
    with pytest.raises(SourceError, match=r"user 'a' already stands in all_data_0 \(copy\).json"):
        load("femnist", tmp_path)


def test_no_shards(tmp_path):
    """An empty folder is told what to do."""
    with pytest.raises(SourceError, match="no LEAF shards"):
        load("femnist", tmp_path)
