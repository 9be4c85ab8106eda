"""Laws of the cache: the same rows, found again by what they were read from, and never an error of its own."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import textwrap
import threading
import warnings

import numpy as np
import pytest
import torch

from metavd.data.formats import cache as module
from metavd.data.formats import load
from metavd.data.source import SourceError


def equal(a, b):
    for field in ("name", "num_classes", "mean", "std", "scale", "augment"):
        assert getattr(a, field) == getattr(b, field)
    for field in ("x", "y", "test", "client"):
        first, second = getattr(a, field), getattr(b, field)
        assert (first is None) == (second is None)
        if first is not None:
            assert first.dtype == second.dtype
            np.testing.assert_array_equal(first, second)


def mapped(array):
    """Whether the array lies in a file."""
    while array is not None and not isinstance(array, np.memmap):
        array = getattr(array, "base", None)
    return array is not None


def quiet(message):
    raise AssertionError(message)


@pytest.mark.parametrize("kind", ["cifar100 tar", "mnist writers", "npz", "npz features", "femnist split", "folder"])
def test_copy_equals_the_files(make, rng, tmp_path, kind):
    """The first load, the second and one without a cache give the same source; nothing is read the second time."""
    place = tmp_path / "data"
    place.mkdir()
    made = make.MAKERS[kind](place, rng)
    kept = tmp_path / "cache"
    plain = load(made.name, made.root, **made.options)
    first = load(made.name, made.root, cache=kept, note=quiet, **made.options)
    files = list(kept.iterdir())
    second = load(made.name, made.root, cache=kept, note=quiet, **made.options)
    equal(plain, first)
    equal(plain, second)
    (folder,) = files
    assert {path.name for path in folder.iterdir()} == {
        module.ABOUT, *(f"{field}.npy" for field in ("x", "y", "test", "client") if getattr(plain, field) is not None)
    }  # fmt: skip
    np.testing.assert_array_equal(np.load(folder / "x.npy", allow_pickle=False), plain.x)
    assert mapped(second.x)


def test_second_load_does_not_read_the_files(make, rng, tmp_path, monkeypatch):
    """With a good copy the reader is not called."""
    made = make.npz(tmp_path, rng)
    kept = tmp_path / "cache"
    load("npz", made.files[0], cache=kept)
    monkeypatch.setattr(module, "_read", lambda _: pytest.fail("read again"))
    load("npz", made.files[0], cache=kept)


def test_mapped_rows_can_be_used_and_changed(make, rng, tmp_path):
    """Torch takes them without a warning, and a change in memory does not reach the file."""
    made = make.npz(tmp_path, rng)
    kept = tmp_path / "cache"
    load("npz", made.files[0], cache=kept)
    data = load("npz", made.files[0], cache=kept)
    before = data.x.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.from_numpy(data.x).zero_()
    assert data.x.max() == 0
    np.testing.assert_array_equal(load("npz", made.files[0], cache=kept).x, before)


def test_changed_file_is_read_anew(make, rng, tmp_path):
    """Another size or time is another key, even with the modification time set back; the old copy goes."""
    made = make.npz(tmp_path, rng)
    kept = tmp_path / "cache"
    path = made.files[0]
    first = load("npz", path, cache=kept)
    status = path.stat()
    with np.load(path) as content:
        arrays = dict(content)
    arrays["images"] = 255 - arrays["images"]
    np.savez(path, **arrays)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    while path.stat().st_ctime_ns == status.st_ctime_ns:  # some systems' clocks of files tick 250 times a second
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = load("npz", path, cache=kept)
    np.testing.assert_array_equal(second.x, 255 - first.x)
    assert len(list(kept.iterdir())) == 1


def test_options_are_part_of_the_key(make, rng, tmp_path):
    """Other options make another copy beside the first."""
    made = make.celeba(tmp_path, rng)
    kept = tmp_path / "cache"
    assert load("celeba", tmp_path, cache=kept, size=8, least=1).x.shape[2] == 8
    assert load("celeba", tmp_path, cache=kept, size=4, least=1).x.shape[2] == 4
    assert load("celeba", tmp_path, cache=kept, size=8, least=1).x.shape[2] == 8
    assert len(list(kept.iterdir())) == 2
    assert made.name == "celeba"


@pytest.mark.parametrize("name", ["x.npy", "y.npy", module.ABOUT])
@pytest.mark.parametrize("how", ["truncated", "flipped", "empty", "other", "long"])
def test_damaged_copy_is_noted_and_replaced(make, rng, tmp_path, name, how):
    """A copy that is not as it was written is never used, whichever of its files it is."""
    made = make.npz(tmp_path, rng)
    kept = tmp_path / "cache"
    right = load("npz", made.files[0])
    load("npz", made.files[0], cache=kept)
    (folder,) = kept.iterdir()
    data = bytearray((folder / name).read_bytes())
    data[-7] ^= 1
    other = {"truncated": data[:-7], "empty": b"", "other": b"hello" * 100, "long": (folder / name).read_bytes() + b"0"}
    (folder / name).write_bytes(other.get(how, data))
    notes = []
    equal(right, load("npz", made.files[0], cache=kept, note=notes.append))
    assert len(notes) == 1
    assert "damaged" in notes[0]
    equal(right, load("npz", made.files[0], cache=kept, note=quiet))


def test_changed_number_is_noted(make, rng, tmp_path):
    """Numbers that normalise the rows are under a checksum as the rows are."""
    made = make.npz(tmp_path, rng)
    kept = tmp_path / "cache"
    right = load("npz", made.files[0], cache=kept)
    (path,) = kept.glob(f"*/{module.ABOUT}")
    about = json.loads(path.read_text())
    path.write_text(json.dumps(about | {"scale": 2 * about["scale"]}))
    notes = []
    equal(right, load("npz", made.files[0], cache=kept, note=notes.append))
    assert "the checksum of source.json is wrong" in notes[0]


@pytest.mark.parametrize("gone", ["x.npy", module.ABOUT])
def test_copy_that_is_half_removed_is_written_again(make, rng, tmp_path, gone):
    """Who removes a folder by hand may be stopped in the middle of it."""
    made = make.npz(tmp_path, rng)
    kept = tmp_path / "cache"
    load("npz", made.files[0], cache=kept)
    (folder,) = kept.iterdir()
    (folder / gone).unlink()
    equal(load("npz", made.files[0]), load("npz", made.files[0], cache=kept, note=quiet))
    assert (folder / gone).exists()


def test_folder_that_cannot_be_written(make, rng, tmp_path):
    """A cache that cannot be is noted; the data is there."""
    made = make.npz(tmp_path, rng)
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    notes = []
    data = load("npz", made.files[0], cache=blocked / "cache", note=notes.append)
    equal(load("npz", made.files[0]), data)
    assert "cannot keep a copy" in notes[0]


def test_full_disk(make, rng, tmp_path):
    """A write that fails half way leaves nothing behind, costs a note, and the data is there.

    The limit on the size of a file makes the kernel refuse the write, as a full disk does.
    """
    made = make.npz(tmp_path, rng)
    notes, limit = [], resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (800, limit[1]))
    try:
        data = load("npz", made.files[0], cache=tmp_path / "cache", note=notes.append)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    equal(load("npz", made.files[0]), data)
    assert len(notes) == 1
    assert "cannot keep a copy" in notes[0]
    assert not list((tmp_path / "cache").iterdir())


def test_many_writers_at_once(make, rng, tmp_path):
    """Whoever writes last has written the same; every reader sees a whole file."""
    made = make.npz(tmp_path, rng, n=400)
    kept = tmp_path / "cache"
    right = load("npz", made.files[0])
    faults = []

    def work():
        try:
            for _ in range(5):
                for path in kept.glob(f"*/{module.ABOUT}"):
                    path.unlink(missing_ok=True)  # so that it is written again
                equal(right, load("npz", made.files[0], cache=kept, note=quiet))
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert not list(kept.glob("*.part"))


@pytest.mark.processes
def test_two_processes_at_once(make, rng, tmp_path):
    """Two processes fill an empty cache together and both succeed."""
    made = make.npz(tmp_path, rng, n=400)
    code = f"""
        from pathlib import Path
        from metavd.data.formats import load
        def note(text): raise SystemExit(text)
        for _ in range(10):
            for path in Path({str(tmp_path / "cache")!r}).glob("*/{module.ABOUT}"): path.unlink(missing_ok=True)
            data = load("npz", Path({str(made.files[0])!r}), cache=Path({str(tmp_path / "cache")!r}), note=note)
            assert len(data.y) == 400
    """
    running = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)]) for _ in range(2)]
    assert [process.wait(timeout=600) for process in running] == [0, 0]


def test_file_that_changes_while_it_is_read(make, rng, tmp_path):
    """Rows of two states of a file are not kept under the name of one."""
    made = make.npz(tmp_path, rng)
    unread = module.Unread("x", made.files[0], (made.files[0],), lambda _: None, {})

    def read(_):
        made.files[0].write_bytes(b"other")
        return right

    right = load("npz", made.files[0])
    notes = []
    data = module.cached(
        module.Unread(unread.name, unread.place, unread.files, read, {}), tmp_path / "cache", notes.append
    )
    assert data is right
    assert "changed while it was read" in notes[0]
    assert not (tmp_path / "cache").exists()


def test_faults_of_the_data_stay_faults(tmp_path):
    """The cache swallows its own faults only."""
    (tmp_path / "a.npz").write_bytes(b"no")
    with pytest.raises(SourceError):
        load("npz", tmp_path / "a.npz", cache=tmp_path / "cache")
