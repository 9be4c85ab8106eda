"""CIFAR: every version holds the same rows, and every fault names file and byte."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile

import numpy as np
import pytest

from metavd.data.formats import FileError, cifar, load
from metavd.data.formats.cifar import find_cifar10
from metavd.data.source import SourceError


@pytest.mark.parametrize("kind", [10, 100])
@pytest.mark.parametrize("version", ["binary", "python"])
@pytest.mark.parametrize("packed", ["", "tar", "tar.gz"])
def test_every_version_gives_its_rows(*, make, rng, same, tmp_path, kind, version, packed):
    """Binary and pickled, folder and archive: rows in the order of the files, the last file's are test rows."""
    made = make.cifar(tmp_path, rng, kind=kind, version=version, packed=packed)
    data = load(f"cifar{kind}", tmp_path, subset=True)
    same(data, made.oracle())
    assert (data.name, data.num_classes, data.x.dtype) == (f"cifar{kind}", kind, np.uint8)
    assert (data.scale, data.augment, data.client) == (1 / 255, True, None)


def test_planes_are_red_green_blue(tmp_path):
    """A record's first 1,024 bytes are red, then green, then blue, row by row."""
    record = bytes([1]) + bytes([9] * 1024) + bytes(range(256)) * 4 + bytes([200] * 1024)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]:
        (folder / name).write_bytes(record + bytes([0]) + record[1:])
    image = load("cifar10", tmp_path, subset=True).x[0]
    assert image[0].min() == image[0].max() == 9
    assert image[1, 0].tolist() == list(range(32))
    assert image[2].min() == 200


def test_normalisation_is_the_papers(make, rng, tmp_path):
    """ImageNet's constants for CIFAR-10, its own for CIFAR-100 (facts, 7.2)."""
    make.cifar(tmp_path, rng, kind=10, version="binary")
    make.cifar(tmp_path, rng, kind=100, version="binary")
    ten, hundred = load("cifar10", tmp_path, subset=True), load("cifar100", tmp_path, subset=True)
    assert (ten.mean, ten.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert (hundred.mean, hundred.std) == ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276))


@pytest.mark.parametrize("version", ["binary", "python"])
def test_coarse_labels(make, rng, tmp_path, version):
    """CIFAR-100 also has 20 coarse classes, in the first byte or under their own key."""
    make.cifar(tmp_path, rng, kind=100, version=version)
    data = load("cifar100", tmp_path, labels="coarse", subset=True)
    assert data.num_classes == 20
    folder = next(tmp_path.iterdir())
    if version == "binary":
        right = np.frombuffer((folder / "train.bin").read_bytes(), np.uint8).reshape(-1, 3074)[:, 0]
    else:
        right = pickle.loads((folder / "train").read_bytes())[b"coarse_labels"]
    assert data.y[: len(right)].tolist() == list(right)


def test_official_counts_are_asked_for(make, rng, tmp_path):
    """A binary file that was cut between two records looks whole, so its count is compared with the official one."""
    make.cifar(tmp_path, rng, kind=10, version="binary")
    with pytest.raises(FileError, match=r"data_batch_1.bin: .* holds 6 records, but the official file has 10000"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize(("at", "value", "row", "byte"), [(0, 10, 0, 0), (3073 * 4, 255, 4, 12292)])
def test_wrong_label_names_record_and_byte(*, make, rng, tmp_path, at, value, row, byte):
    """A label byte above 9 is refused where it stands."""
    made = make.cifar(tmp_path, rng, kind=10, version="binary")
    data = bytearray(made.files[3].read_bytes())
    data[at] = value
    made.files[3].write_bytes(data)
    with pytest.raises(FileError, match=rf"data_batch_4.bin, byte {byte}: row {row} has label {value}") as caught:
        load("cifar10", tmp_path, subset=True)
    assert (caught.value.path, caught.value.offset) == (made.files[3], byte)


def test_truncated_file_names_the_record(make, rng, tmp_path):
    """A record that is cut off is told by its number and its first byte."""
    made = make.cifar(tmp_path, rng, kind=100, version="binary")
    made.files[1].write_bytes(made.files[1].read_bytes()[:-10])
    with pytest.raises(FileError, match=r"test.bin, byte 15370: the file ends inside record 5, after 3064 of its 3074"):
        load("cifar100", tmp_path, subset=True)


def test_missing_things_are_named(make, rng, tmp_path):
    """A missing folder, a missing file and a path that is not there are three different sentences."""
    with pytest.raises(SourceError, match=r"there is no cifar-10-batches-bin/ or .*metavd data fetch cifar10"):
        load("cifar10", tmp_path)
    with pytest.raises(SourceError, match="no such file or folder"):
        load("cifar10", tmp_path / "nowhere")
    made = make.cifar(tmp_path, rng, kind=10, version="binary")
    made.files[5].unlink()
    with pytest.raises(FileError, match=r"test_batch.bin: there is no such file"):
        load("cifar10", tmp_path)


def test_root_may_be_the_folder_or_the_archive(make, rng, tmp_path):
    """The dataset's own folder, or its archive, is as good a root as the folder around it."""
    made = make.cifar(tmp_path, rng, kind=10, version="python", packed="tar.gz")
    assert find_cifar10(made.files[0]).place == made.files[0]
    other = tmp_path / "other"
    other.mkdir()
    made = make.cifar(other, rng, kind=10, version="python")
    moved = made.files[0].parent.rename(tmp_path / "renamed")
    assert len(load("cifar10", moved, subset=True).y) == 36


def test_archive_faults(make, rng, tmp_path):
    """A flipped bit is seen by gzip's checksum, a cut by its end, a missing member by its name."""
    made = make.cifar(tmp_path, rng, kind=10, version="binary", packed="tar.gz")
    whole = made.files[0].read_bytes()
    spoilt = bytearray(whole)
    spoilt[len(whole) // 2] ^= 4
    made.files[0].write_bytes(spoilt)
    with pytest.raises(FileError, match=r"tar.gz.*(cannot be read|label)"):
        load("cifar10", tmp_path, subset=True)
    made.files[0].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileError, match="file ended before the end"):
        load("cifar10", tmp_path, subset=True)
    with tarfile.open(made.files[0], "w:gz") as archive:
        make.add_member(archive, "cifar-10-batches-bin/readme.html", b"hello")
    with pytest.raises(FileError, match=r"no readable data_batch_1.bin"):
        load("cifar10", tmp_path, subset=True)


def _member(name, data=b"evil", kind=tarfile.REGTYPE, link="", count=1):
    def add(archive):
        for number in range(count):
            info = tarfile.TarInfo(name.format(number))
            info.type, info.linkname, info.size = kind, link, len(data) if kind == tarfile.REGTYPE else 0
            archive.addfile(info, io.BytesIO(data))

    return add


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (_member("../../evil"), r"cannot be read \('../../evil' would be extracted"),
        (_member("x/../../evil"), r"outside the destination.*; do not trust it"),
        (_member("x", kind=tarfile.SYMTYPE, link="/etc/passwd"), "is a link to an absolute path"),
        (_member("x", kind=tarfile.CHRTYPE), "is a special file"),
        (_member("y/test_batch.bin"), "'y/test_batch.bin' stands in the archive twice"),
        (_member("y/test_batch.bin", kind=tarfile.SYMTYPE, link="x"), "is a link or a device, but must be a plain"),
        (_member("x{}", b"", count=1000), "more than 1000 members"),
    ],
)
def test_archives_that_nobody_should_trust(*, make, rng, tmp_path, add, message):
    """Whole and right but for one member: the archive is refused all the same."""
    made = make.cifar(tmp_path, rng, kind=10, version="binary")
    with tarfile.open(tmp_path / "cifar-10-binary.tar", "w") as archive:
        for path in made.files:
            archive.add(path, f"cifar-10-batches-bin/{path.name}")
        add(archive)
    with pytest.raises(FileError, match=message):
        load("cifar10", tmp_path / "cifar-10-binary.tar", subset=True)


def test_checksum_at_the_very_end(make, rng, tmp_path):
    """Gzip's checksum is compared although the members end long before it."""
    made = make.cifar(tmp_path, rng, kind=10, version="binary", packed="tar")
    whole = gzip.compress(made.files[0].read_bytes() + bytes(3 << 20))
    path = made.files[0].with_suffix(".tar.gz")
    path.write_bytes(whole)
    assert len(load("cifar10", path, subset=True).y) == 36
    path.write_bytes(whole[:-8] + bytes(4) + whole[-4:])
    with pytest.raises(FileError, match="CRC check failed"):
        load("cifar10", path, subset=True)


def test_member_that_is_too_large(make, rng, tmp_path, monkeypatch):
    """A member is not read if it declares more than any such file has."""
    made = make.cifar(tmp_path, rng, kind=10, version="binary", packed="tar")
    monkeypatch.setattr(cifar, "MAX_BATCH", 18437)
    with pytest.raises(FileError, match="declares 18438 bytes, but may have 18437"):
        load("cifar10", made.files[0], subset=True)


def test_archive_of_macs_and_of_pax(make, rng, same, tmp_path):
    """Extended headers, other files and ./ before the names are passed over."""
    made = make.cifar(tmp_path, rng, kind=100, version="binary")
    rows = made.oracle()
    with tarfile.open(tmp_path / "cifar-100-binary.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as archive:
        make.add_member(archive, "./._x", b"apple")
        for path in made.files:
            info = tarfile.TarInfo(f"./cifar-100-binary/{path.name}")
            info.size, info.pax_headers = path.stat().st_size, {"comment": "é" * 300}
            archive.addfile(info, io.BytesIO(path.read_bytes()))
    for path in made.files:
        path.unlink()
    made.files[0].parent.rmdir()
    same(load("cifar100", tmp_path, subset=True), rows)
