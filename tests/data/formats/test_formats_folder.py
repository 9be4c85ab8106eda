"""Folders of pictures: names are classes and clients, and nothing is left out in silence."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from PIL import Image

from metavd.data.formats import load
from metavd.data.source import SourceError


@pytest.mark.parametrize("clients", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_layouts_give_their_rows(*, make, rng, same, tmp_path, clients, split):
    """class/picture and client/class/picture, also below train/ and test/."""
    made = make.folder(tmp_path, rng, clients=clients, split=split)
    data = load("folder", made.root)
    same(data, made.oracle())
    assert (data.name, data.num_classes) == ("photos", 2)


def picture(path, shape=(4, 4), value=7, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full(shape, value, np.uint8)).save(path, **options)


def test_classes_in_the_order_of_their_names(tmp_path):
    """Sorted by name, not by the file system's order."""
    for name, value in (("b", 2), ("a", 1), ("c", 3)):
        picture(tmp_path / name / "x.png", value=value)
    data = load("folder", tmp_path)
    assert data.y.tolist() == [0, 1, 2]
    assert data.x[:, 0, 0, 0].tolist() == [1, 2, 3]


def test_grey_colour_and_transparent(tmp_path):
    """All grey: one channel. Mixed: three. Transparent: on white. `channels` decides otherwise."""
    picture(tmp_path / "a" / "1.png")
    picture(tmp_path / "b" / "1.png")
    assert load("folder", tmp_path).x.shape == (2, 1, 4, 4)
    assert load("folder", tmp_path, channels=3).x.shape == (2, 3, 4, 4)
    picture(tmp_path / "b" / "2.png", (4, 4, 3), 9)
    data = load("folder", tmp_path)
    assert data.x.shape == (3, 3, 4, 4)
    assert data.x[0].tolist() == np.full((3, 4, 4), 7).tolist()
    assert load("folder", tmp_path, channels=1).x.shape == (3, 1, 4, 4)
    picture(tmp_path / "b" / "3.png", (4, 4, 4), 0)
    assert load("folder", tmp_path).x[3].min() == 255


def test_sizes(tmp_path):
    """Pictures of different sizes need one; a pair is (height, width)."""
    picture(tmp_path / "a" / "1.png", (4, 6))
    picture(tmp_path / "b" / "1.png", (5, 5))
    with pytest.raises(
        SourceError, match=r"b/1.png: the picture has 5 x 5 pixels, but .*a/1.png has 6 x 4; pass a size"
    ):
        load("folder", tmp_path)
    assert load("folder", tmp_path, size=3).x.shape == (2, 1, 3, 3)
    assert load("folder", tmp_path, size=(3, 2)).x.shape == (2, 1, 3, 2)


def test_notes_and_hidden_files_are_passed_over(tmp_path):
    """Text beside the pictures is no fault; another kind of picture is."""
    for label in "ab":
        picture(tmp_path / label / "1.png")
        (tmp_path / label / "notes.txt").write_text("hello")
        (tmp_path / label / ".DS_Store").write_bytes(b"x")
    assert len(load("folder", tmp_path).y) == 2
    (tmp_path / "a" / "2.heic").write_bytes(b"x")
    with pytest.raises(SourceError, match=r"a/2.heic: files of type .heic are not read"):
        load("folder", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: shutil.copy(p / "cat/1.png", p / "1.png"), r"1.png: this picture is in no class"),
        (lambda p: (p / "empty").mkdir(), r"empty: there is no picture in this folder"),
        (lambda p: shutil.copytree(p / "cat", p / "deep/cat"), r"deep: it holds folders, but .*cat does not"),
        (lambda p: shutil.copytree(p / "cat", p / "cat/cat"), r"lies beside the folder cat"),
        (lambda p: shutil.copytree(p / "cat", p / "CAT"), r"'CAT' and 'cat' differ only in case"),
        (lambda p: shutil.rmtree(p / "cat"), r"every row has label 'dog'"),
        (lambda p: (p / "cat/2.png").write_bytes(b""), r"cat/2.png, byte 0: the file is empty"),
        (lambda p: (p / "cat/2.png").write_bytes(b"PNG?"), r"cat/2.png: this is no readable picture"),
        (lambda p: [(p / d).mkdir() for d in ("train", "val")], r"there is val beside train"),
    ],
)
def test_faults_name_the_place(tmp_path, change, message):
    """One sentence with the folder or the file."""
    for label in ("cat", "dog"):
        picture(tmp_path / label / "1.png")
    change(tmp_path)
    with pytest.raises(SourceError, match=message):
        load("folder", tmp_path)


def test_damaged_png_is_seen(tmp_path):
    """PNG has checksums, and they are looked at."""
    for label in ("cat", "dog"):
        picture(tmp_path / label / "1.png", (40, 40), 9)
    path = tmp_path / "dog/1.png"
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"dog/1.png: this is no readable picture"):
        load("folder", tmp_path)


def test_sixteen_bits_are_refused(tmp_path):
    """Pillow would cut 16 bits off at 255."""
    picture(tmp_path / "a/1.png")
    (tmp_path / "b").mkdir()
    Image.fromarray(np.full((4, 4), 5000, np.uint16)).save(tmp_path / "b/1.png")
    with pytest.raises(SourceError, match="more than 8 bits"):
        load("folder", tmp_path)


def test_no_folder(tmp_path):
    """A file, nothing, and a folder without pictures."""
    (tmp_path / "a").write_text("x")
    for root, message in ((tmp_path / "a", "a folder of pictures is needed"), (tmp_path / "b", "no such file"),
                          (tmp_path, "there is no picture at")):  # fmt: skip
        with pytest.raises(SourceError, match=message):
            load("folder", root)
