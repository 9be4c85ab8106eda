"""idx files: MNIST with writers, Fashion-MNIST, EMNIST; headers are believed only as far as the file goes."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from metavd.data.formats import FileError, load
from metavd.data.formats.idx import read_idx
from metavd.data.source import SourceError


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("writers", [False, True])
def test_mnist_gives_its_rows(*, make, rng, same, tmp_path, packed, writers):
    """Gzipped or not; with QMNIST's files the writers are the clients."""
    made = make.idx(tmp_path, rng, packed=packed, writers=writers)
    data = load("mnist", tmp_path)
    same(data, made.oracle())
    assert (data.num_classes, data.mean, data.std, data.augment) == (10, (0.1307,), (0.3081,), False)
    assert load("mnist", tmp_path, writers="no").client is None
    assert load("mnist", tmp_path / "MNIST/raw").y.tolist() == data.y.tolist()


def test_mnist_by_writer_npz(make, rng, same, tmp_path):
    """mnist_by_writer.npz is MNIST with writers, and its official test rows."""
    made = make.npz(tmp_path, rng, kind="writer")
    same(load("mnist", tmp_path), made.oracle())
    assert load("mnist", tmp_path, writers="no").client is None


def test_fashion_mnist(make, rng, same, tmp_path):
    """The same files in another folder, with 0.5 and 0.5; MNIST beside it is not mistaken for it."""
    made = make.idx(tmp_path, rng, name="fashion-mnist")
    make.idx(tmp_path, rng, name="mnist")
    data = load("fashion-mnist", tmp_path)
    same(data, made.oracle())
    assert (data.mean, data.std, data.num_classes) == ((0.5,), (0.5,), 10)


@pytest.mark.parametrize("archive", [False, True])
def test_emnist(make, rng, same, tmp_path, archive):
    """Letters are numbered from 1 and stored transposed; NIST's gzip.zip is read as it is."""
    made = make.idx(tmp_path, rng, name="emnist", archive=archive)
    data = load("emnist", tmp_path, split="letters")
    same(data, made.oracle())
    assert data.num_classes == 26
    lying = load("emnist", tmp_path, split="letters", upright=False)
    np.testing.assert_array_equal(lying.x.swapaxes(2, 3), data.x)
    with pytest.raises(SourceError, match="emnist-byclass"):
        load("emnist", tmp_path)
    with pytest.raises(SourceError, match="split is 'all', but it must be byclass or"):
        load("emnist", tmp_path, split="all")


def test_writers_of_other_images_are_refused(make, rng, tmp_path):
    """The digits stand in the writers' file, too: a file of other images is seen."""
    made = make.idx(tmp_path, rng, packed=False, writers=True)
    data = bytearray(made.files[4].read_bytes())
    data[12 + 32 * 3 + 3] ^= 1
    made.files[4].write_bytes(data)
    with pytest.raises(FileError, match=r"qmnist-train-labels-idx2-int, byte 108: row 3 is a \d, but the image is"):
        load("mnist", tmp_path)


def test_half_the_writers_are_refused(make, rng, tmp_path):
    """One of the two lists alone is a mistake; none at all is MNIST without writers, unless they are asked for."""
    made = make.idx(tmp_path, rng, writers=True)
    made.files[5].unlink()
    with pytest.raises(SourceError, match="no qmnist-test-labels-idx2-int"):
        load("mnist", tmp_path)
    made.files[4].unlink()
    assert load("mnist", tmp_path).client is None
    with pytest.raises(SourceError, match="the writers need both lists"):
        load("mnist", tmp_path, writers="yes")


@pytest.mark.parametrize("packed", [False, True])
def test_faults_name_file_and_byte(make, rng, tmp_path, packed):
    """Cut off, too long, another magic number, a wrong count, a wrong label."""
    made = make.idx(tmp_path, rng, packed=packed)
    pack = gzip.compress if packed else bytes
    images, labels = made.files[0], made.files[1]
    x = gzip.decompress(images.read_bytes()) if packed else images.read_bytes()
    y = gzip.decompress(labels.read_bytes()) if packed else labels.read_bytes()
    for file, data, message in (
        (images, x[:-1], r"byte 4: .* takes 7056 bytes, but 7055 follow"),
        (images, x + b"!", r"byte 4: .* takes 7056 bytes, but 7057 follow"),
        (images, x[:10], r"byte 10: the file ends inside its header"),
        (images, b"\1" + x[1:], r"byte 0: this is no idx file: it begins with 01 00 08 03"),
        (images, y, r"has 1 axes of type uint8, but it must have 3"),
        (images, b"\0\0\x08\x03" + b"\xff" * 12, r"byte 4: the header declares shape"),
        (labels, y[:7] + b"\x08" + y[8:-1], r"it has 8 labels, but train-images.* has 9 images"),
        (labels, y[:12] + b"\x0a" + y[13:], r"byte 12: row 4 has label 10, but labels must be 0 to 9"),
    ):
        before = file.read_bytes()
        file.write_bytes(pack(data))
        with pytest.raises(FileError, match=message):
            load("mnist", tmp_path)
        file.write_bytes(before)
    load("mnist", tmp_path)


def test_gzip_faults(make, rng, tmp_path):
    """A cut stream and a wrong checksum are told as gzip's."""
    made = make.idx(tmp_path, rng)
    whole = made.files[0].read_bytes()
    made.files[0].write_bytes(whole[:-9])
    with pytest.raises(FileError, match="file ended before the end"):
        load("mnist", tmp_path)
    made.files[0].write_bytes(whole[:-8] + b"\0\0\0\0" + whole[-4:])
    with pytest.raises(FileError, match="CRC check failed"):
        load("mnist", tmp_path)


def test_missing_file_is_named(make, rng, tmp_path):
    """One of four missing is told by its name; none at all with what to do."""
    made = make.idx(tmp_path, rng)
    made.files[3].unlink()
    with pytest.raises(FileError, match=r"t10k-labels-idx1-ubyte: there is no such file"):
        load("mnist", tmp_path)
    for name in ("fashion-mnist", "emnist"):
        with pytest.raises(SourceError, match="metavd data fetch"):
            load(name, tmp_path)


def test_big_endian_numbers(make, tmp_path):
    """Numbers of more than a byte are big-endian in the file and native in memory."""
    values = np.array([[1, -2], [300, 70000]], np.int32)
    (tmp_path / "a").write_bytes(make.idx_bytes(values))
    found = read_idx(tmp_path / "a")
    np.testing.assert_array_equal(found, values)
    assert found.dtype.isnative
