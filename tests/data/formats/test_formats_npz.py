"""npz: the user's own arrays, the two shipped layouts, and headers that lie."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest

from metavd.data.formats import FileError, load
from metavd.data.source import SourceError


@pytest.mark.parametrize("kind", ["images", "features", "writer"])
@pytest.mark.parametrize("packed", [False, True])
def test_layouts_give_their_rows(*, make, rng, same, tmp_path, kind, packed):
    """Images with channels last, features, and mnist_by_writer.npz, compressed or not."""
    made = make.npz(tmp_path, rng, kind=kind, packed=packed)
    data = load("npz", made.files[0])
    same(data, made.oracle())
    assert data.name == made.files[0].stem
    assert load("npz", tmp_path, name="mine").name == "mine"


@pytest.mark.parametrize("keys", [("images", "label"), ("features", "labels"), ("x", "y")])
def test_every_key(tmp_path, keys):
    """Images, features or x; label, labels or y."""
    path = tmp_path / "a.npz"
    np.savez(path, **{keys[0]: np.arange(8.0).reshape(4, 2), keys[1]: [[0], [1], [0], [1]]})
    assert load("npz", path).y.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("split", "right"),
    [
        (np.array([0, 0, 1, 0]), [False, False, True, False]),
        (np.array([False, True, False, False]), [False, True, False, False]),
        (np.array(["train", "train", "train", "test"]), [False, False, False, True]),
        (np.array([b"train", b"test", b"train", b"test"]), [False, True, False, True]),
    ],
)
def test_every_kind_of_split(tmp_path, split, right):
    """0 and 1, bool, or words."""
    np.savez(tmp_path / "a.npz", x=np.eye(4), y=[0, 1, 0, 1], split=split)
    assert load("npz", tmp_path).test.tolist() == right


def test_channels(tmp_path):
    """Seen where it can be seen, asked where not."""
    path = tmp_path / "a.npz"
    x = np.arange(4 * 3 * 4 * 3, dtype=np.uint8).reshape(4, 3, 4, 3)
    np.savez(path, images=x, label=[0, 1, 0, 1])
    with pytest.raises(FileError, match=r"shape \(4, 3, 4, 3\), which does not tell where the channels are"):
        load("npz", path)
    np.testing.assert_array_equal(load("npz", path, channels="first").x, x)
    np.testing.assert_array_equal(load("npz", path, channels="last").x, x.transpose(0, 3, 1, 2))
    with pytest.raises(SourceError, match="channels is 'middle'"):
        load("npz", path, channels="middle")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x": np.eye(4), "y": [0, 0, 0, 0]}, "every row has label 0, but there must be at least 2 classes"),
        ({"x": np.array([[1.0], [np.nan]]), "y": [0, 1]}, "row 1 of x holds a value that is not a finite"),
        ({"x": np.eye(4), "y": [0, 1, 2]}, r"y has shape \(3,\), but x has 4 rows"),
        ({"x": np.eye(4), "y": [0, 1, 3, 3]}, "no row has label 2"),
        ({"x": np.eye(4), "y": [0, 1, 0, 1], "client": [0, 1, -1, 0]}, "row 2 has client -1"),
        (
            {"x": np.eye(4), "y": [0, 1, 0, 1], "split": [0, 1, 2, 0]},
            "row 2 of the split is '2', but it must be 0",
        ),
        ({"x": np.eye(4), "y": [0, 1, 0, 1], "test": [0.5] * 4}, "test has type float64, but it must be bool"),
        ({"x": np.eye(4)}, "it holds x, but it must hold label or labels or y"),
        ({"x": np.eye(4), "images": np.eye(4), "y": [0, 1, 0, 1]}, "it holds both 'images' and 'x'"),
        ({"x": np.array([None, 1]), "y": [0, 1]}, "type object, but only numbers .* and nothing pickled"),
        (
            {"x": np.eye(2), "y": np.array(["a", "b"], object)},
            r"y.npy .* type object, .*; save it with \.astype\(str\)",
        ),
        ({"x": np.zeros((0, 3)), "y": [0, 1]}, r"x.npy has shape \(0, 3\)"),
    ],
)
def test_faults_name_the_file(tmp_path, content, message):
    """One sentence that begins with the file."""
    path = tmp_path / "mine.npz"
    np.savez(path, **content)
    with pytest.raises(SourceError, match=message) as caught:
        load("npz", path)
    assert str(caught.value).startswith(str(path))


def test_damage_is_seen(make, rng, tmp_path):
    """A flipped bit breaks the archive's checksum; a cut takes its directory; another file is no archive."""
    made = make.npz(tmp_path, rng)
    path = made.files[0]
    whole = path.read_bytes()
    spoilt = bytearray(whole)
    spoilt[400] ^= 1
    path.write_bytes(spoilt)
    with pytest.raises(FileError, match=r"Bad CRC-32|cannot be read"):
        load("npz", path)
    path.write_bytes(whole[:-100])
    with pytest.raises(FileError, match=r"cannot be read \(File is not a zip file"):
        load("npz", path)
    np.save(tmp_path / "b.npy", np.eye(3))
    with pytest.raises(FileError, match="is not a zip file"):
        load("npz", tmp_path / "b.npy")


def test_one_of_several_must_be_named(make, rng, tmp_path):
    """A folder stands for the only .npz in it."""
    with pytest.raises(SourceError, match=r"no .npz file"):
        load("npz", tmp_path)
    make.npz(tmp_path, rng)
    make.npz(tmp_path, rng, kind="celeba")
    with pytest.raises(SourceError, match=r"2 .npz files, celeba32.npz first"):
        load("npz", tmp_path)


def test_size_that_a_file_cannot_have(tmp_path):
    """A header that declares more than the archive holds takes no memory."""
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        text = b"{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999,), }\n"
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
        archive.writestr("y.npy", b"")
    with pytest.raises(FileError, match="takes 79999999992 bytes, but it holds 0"):
        load("npz", path)
