"""Laws of `plainpickle`: it reads what pickle reads of plain data, and does nothing else."""

from __future__ import annotations

import pickle
from pathlib import Path

import format_damage
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metavd.data.formats import FileError, load, plainpickle
from metavd.data.formats.plainpickle import PickleError, loads

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


@given(plain, st.integers(1, 5))
def test_equals_pickle_on_plain_data(value, protocol):
    """What pickle wrote of plain containers comes back equal, in every binary protocol."""
    assert loads(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("dtype", ["u1", "<i4", ">i2", "f8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_come_back(protocol, dtype, order):
    """Arrays of numbers in every protocol, byte order and axis order."""
    array = np.arange(12).reshape(3, 4).astype(dtype, order=order)
    found = loads(pickle.dumps({"data": array}, protocol))["data"]
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("protocol", range(6))
def test_scalars_of_numpy(protocol):
    """Labels that are numpy's numbers become numbers."""
    assert loads(pickle.dumps([np.int64(3), np.uint8(200)], protocol)) == [3, 200]


def test_hostile_pickles_are_refused_and_not_run(make, rng, tmp_path, monkeypatch):
    """Imports, calls, extensions, bombs of memo, hash and size: one sentence each, and nothing happened."""
    monkeypatch.chdir(tmp_path)
    made = make.cifar(tmp_path, rng, kind=10, version="python")
    for name, data in format_damage.hostile_pickles().items():
        made.files[1].write_bytes(data)
        with pytest.raises(FileError, match=r"data_batch_2") as caught:
            load("cifar10", tmp_path, subset=True)
        assert "\n" not in str(caught.value), name
        assert not Path(format_damage.MARK).exists(), name


def test_refusal_names_what_was_wanted():
    """The sentence says what the pickle wants to import, and at which byte."""
    with pytest.raises(PickleError, match=r"byte 2: the pickle wants to import os.system") as caught:
        loads(b"\x80\x02cos\nsystem\nU\x04evil\x85R.")
    assert caught.value.offset == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("inst", "uses INST"),
        ("obj", "wants to import os.system"),
        ("extension", "uses EXT1"),
        ("persistent", "uses BINPERSID"),
        ("memo index", "a number that is too large"),
        ("memo index in text", "a number that is too large"),
        ("colliding keys", "a number that is too large"),
        ("hash for ever", "holds a tuple twice"),
        ("hash for ever, hidden by a version", "holds a tuple twice"),
        ("hash for ever, hidden by a state", "holds a tuple twice"),
        ("hash too deep", "or 1000 tuples"),
        ("colliding tuples", "or 1000 tuples"),
        ("text again", "far more bytes than it has"),
        ("huge array", "needs 4611686014132420609 bytes, but has 4"),
        ("state for a function", "AttributeError"),
        ("array filled again", "TypeError"),
    ],
)
def test_each_harm_is_refused_for_its_own_reason(name, message):
    """What another check would stop by accident is stopped by the check that was made for it."""
    with pytest.raises(PickleError, match=message):
        loads(format_damage.hostile_pickles()[name])


@pytest.mark.parametrize("size", range(0, 60, 7))
def test_cut_off_anywhere(size):
    """A pickle that is cut off is refused wherever it is cut."""
    data = pickle.dumps({b"data": np.zeros(40, np.uint8), b"labels": [1, 2, 3]}, 2)
    with pytest.raises(PickleError):
        loads(data[:size])


def test_work_is_bounded(monkeypatch):
    """A pickle of more instructions than any dataset needs is refused, not obeyed."""
    monkeypatch.setattr(plainpickle, "MAX_STEPS", 100)
    with pytest.raises(PickleError, match="more than 100 instructions"):
        loads(b"\x80\x02" + b"]" * 200 + b".")
