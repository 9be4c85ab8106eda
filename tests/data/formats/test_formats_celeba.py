"""CelebA: three layouts, any attribute, any size, and lists that are checked line by line."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from metavd.data.formats import load
from metavd.data.source import SourceError


@pytest.mark.parametrize("layout", ["original", "leaf"])
def test_layouts_give_their_rows(make, rng, same, tmp_path, layout):
    """Original lists and LEAF's shards give the pictures, resized once, with the celebrity as client."""
    made = make.celeba(tmp_path, rng, layout=layout)
    data = load("celeba", tmp_path, size=8, least=1)
    same(data, made.oracle())
    assert (data.num_classes, data.mean, data.std, data.augment) == (2, (0.5,), (0.5,), False)


def test_npz_layout(make, rng, same, tmp_path):
    """celeba32.npz holds channels last; it only knows Smiling."""
    made = make.npz(tmp_path, rng, kind="celeba")
    same(load("celeba", tmp_path, size=None), made.oracle())
    assert load("celeba", tmp_path, size=4).x.shape == (12, 3, 4, 4)
    with pytest.raises(SourceError, match="only knows Smiling"):
        load("celeba", tmp_path, attribute="Male")


def test_any_attribute_and_size(make, rng, tmp_path):
    """Another attribute is another column; None keeps the pictures' own size; a pair is (height, width)."""
    make.celeba(tmp_path, rng)
    path = tmp_path / "celeba/list_attr_celeba.txt"
    path.write_text(path.read_text().replace("000001.jpg -1", "000001.jpg  1"))
    bald = load("celeba", tmp_path, attribute="Bald", size=None, least=1)
    assert bald.y.tolist() == [1, 0, 0, 0, 0, 0]
    assert bald.x.shape == (6, 3, 22, 18)
    assert load("celeba", tmp_path, size=(5, 7), least=1).x.shape == (6, 3, 5, 7)
    with pytest.raises(SourceError, match="no attribute 'Smilling'; did you mean Smiling"):
        load("celeba", tmp_path, attribute="Smilling")


def test_few_pictures_are_left_out(make, rng, tmp_path):
    """Celebrities with fewer than `least` pictures are no clients (LEAF: 5)."""
    make.celeba(tmp_path, rng, people=2, each=5)
    path = tmp_path / "celeba/identity_CelebA.txt"
    path.write_text(path.read_text().replace("000001.jpg 7", "000001.jpg 99"))
    data = load("celeba", tmp_path, size=8)
    assert np.unique(data.client, return_counts=True)[1].tolist() == [5]
    with pytest.raises(SourceError, match="nobody has 50 pictures"):
        load("celeba", tmp_path, least=50)


def test_pixels_inside_the_shards(tmp_path, rng):
    """FederatedScope's shards hold 84 x 84 x 3 numbers per row instead of a name, channels last."""
    image = rng.integers(0, 256, (84, 84, 3))
    shard = {"users": ["1"], "num_samples": [2], "user_data": {"1": {"x": [image.ravel().tolist()] * 2, "y": [0, 1]}}}
    (tmp_path / "celeba" / "all_data").mkdir(parents=True)
    (tmp_path / "celeba" / "all_data" / "all_data_0.json").write_text(json.dumps(shard))
    data = load("celeba", tmp_path, size=None)
    np.testing.assert_array_equal(data.x[0], image.transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "list_attr_celeba.txt",
            "000003.jpg",
            "../../../x",
            r"list_attr_celeba.txt, byte \d+: line 5 names '../../../x'",
        ),
        ("list_attr_celeba.txt", "6\n", "8\n", r"line 1 says 8 pictures, but 6 are listed"),
        ("list_attr_celeba.txt", "000003.jpg -1", "000003.jpg", r"line 5 has 2 words, but it must have 3"),
        (
            "identity_CelebA.txt",
            "000002.jpg 8",
            "000002.jpg eight",
            r"identity_CelebA.txt, byte 13: line 2 has 'eight'",
        ),
        ("identity_CelebA.txt", "000002.jpg", "000001.jpg", r"line 2 lists 000001.jpg a second time"),
        ("identity_CelebA.txt", "000002.jpg", "000009.jpg", r"there is no identity for 000002.jpg"),
    ],
)
def test_faults_of_the_lists(*, make, rng, tmp_path, file, old, new, message):
    """One sentence with the file, the line and its byte."""
    make.celeba(tmp_path, rng)
    path = tmp_path / "celeba" / file
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(SourceError, match=message):
        load("celeba", tmp_path, size=8, least=1)


def test_faults_of_pictures(make, rng, tmp_path):
    """A missing picture, one that is none, and one of another shape are told by name."""
    made = make.celeba(tmp_path, rng)
    path = made.files[4]
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(path, "PNG")
    with pytest.raises(SourceError, match=r"000003.jpg: the picture has 9 x 9 pixels, but .*000001.jpg has 18 x 22"):
        load("celeba", tmp_path, size=None, least=1)
    path.write_bytes(b"no picture")
    with pytest.raises(SourceError, match=r"000003.jpg: this is no readable picture"):
        load("celeba", tmp_path, least=1)
    path.unlink()
    with pytest.raises(SourceError, match=r"000003.jpg: there is no such file"):
        load("celeba", tmp_path, least=1)


def test_leafs_names_stay_in_their_folder(make, rng, tmp_path):
    """A shard cannot name a file elsewhere."""
    made = make.celeba(tmp_path, rng, layout="leaf")
    made.files[0].write_text(made.files[0].read_text().replace("000001.jpg", "../all_data/all_data.json"))
    with pytest.raises(SourceError, match="must be a file in img_align_celeba"):
        load("celeba", tmp_path)


def test_nothing_there(tmp_path):
    """An empty folder is told where CelebA comes from; odd options are refused."""
    with pytest.raises(SourceError, match=r"mmlab.ie.cuhk.edu.hk"):
        load("celeba", tmp_path)
    for options, message in (
        ({"size": 0}, "size is 0"),
        ({"least": 0}, "least is 0"),
        ({"layout": "x"}, "layout is 'x'"),
    ):
        with pytest.raises(SourceError, match=message):
            load("celeba", tmp_path, **options)
