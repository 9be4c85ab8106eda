"""Laws of `data.source`: what is accepted is kept as it was, what is not is refused in one sentence."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from metavd.data.source import DIGITS_MEAN, DIGITS_STD, Source, SourceError, arrays, digits, transform


def test_digits_are_the_whole_dataset():
    """All 1,797 images, one channel of bytes 0..16, ten classes, no split and no owners of their own."""
    data = digits()
    assert (data.x.shape, data.x.dtype, data.x.min(), data.x.max()) == ((1797, 1, 8, 8), np.uint8, 0, 16)
    assert (data.y.dtype, data.num_classes, data.test, data.client) == (np.int64, 10, None, None)
    assert (data.scale, data.augment) == (1 / 16, False)


def test_digits_are_normalised():
    """The stated constants are the moments: transformed pixels have mean 0 and standard deviation 1."""
    data = digits()
    rows = transform(data, torch.float64)(torch.from_numpy(data.x))
    assert abs(rows.mean()) < 1e-4
    assert abs(rows.std() - 1) < 1e-4
    assert (data.mean, data.std) == ((DIGITS_MEAN,), (DIGITS_STD,))


def test_images_keep_their_bytes():
    """uint8 images are not copied; the scale takes them to [0, 1]."""
    x = np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4)
    data = arrays(x, [0, 1])
    assert data.x is x
    assert data.scale == 1 / 255
    assert len(data.mean) == len(data.std) == 3


def test_grey_images_get_a_channel():
    """(n, h, w) becomes (n, 1, h, w)."""
    assert arrays(np.zeros((2, 5, 6), np.uint8), [0, 1]).x.shape == (2, 1, 5, 6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_features_become_float32(dtype):
    """(n, d) features stay (n, d), in float32, with scale 1 and a mean and deviation for each column."""
    data = arrays(np.array([[0, 2], [4, 6]], dtype), [0, 1])
    assert (data.x.dtype, data.x.shape, data.scale) == (np.float32, (2, 2), 1.0)
    assert data.mean == (2.0, 4.0)
    assert data.std == pytest.approx((2.0, 2.0))


def test_moments_leave_test_rows_out():
    """What is measured on the data is measured on the rows that may be trained on."""
    x = np.array([[1.0], [3.0], [1000.0]])
    assert arrays(x, [0, 1, 0], test=[False, False, True]).mean == (2.0,)


def test_moments_of_bytes_are_exact():
    """The histogram's mean and deviation equal NumPy's, channel by channel; a constant channel is only centred."""
    x = np.random.RandomState(0).randint(0, 256, (20, 3, 4, 4)).astype(np.uint8)
    x[:, 2] = 7
    data = arrays(x, np.arange(20) % 2)
    scaled = x / 255
    assert data.mean == pytest.approx(scaled.mean((0, 2, 3)))
    assert data.std == pytest.approx([scaled[:, 0].std(), scaled[:, 1].std(), 1.0])


def test_options_pass_through():
    """Ids, flags and stated normalisation arrive as given, in their canonical types."""
    data = arrays(
        np.zeros((4, 2), np.float32),
        np.array([0, 1, 1, 0], np.int8),
        client=np.array([7, 7, 3, 3], np.uint8),
        test=np.array([True, False, False, False]),
        name="mine",
        num_classes=5,
        mean=[0.5, 1.5],
        std=[2.0, 4.0],
        scale=0.1,
        augment=True,
    )
    assert (data.name, data.num_classes, data.scale, data.augment) == ("mine", 5, 0.1, True)
    assert (data.mean, data.std) == ((0.5, 1.5), (2.0, 4.0))
    assert data.client is not None
    assert (data.y.dtype, data.client.dtype, data.client.tolist()) == (np.int64, np.int64, [7, 7, 3, 3])
    assert data.test is not None
    assert data.test.tolist() == [True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3, 4)])
def test_transform_is_affine_per_channel(dtype, lead):
    """(x * scale - mean) / std on the channel axis, whatever leading axes there are, in the asked type."""
    data = arrays(np.zeros((2, 3, 2, 2), np.uint8), [0, 1], mean=[0.1, 0.2, 0.3], std=[1, 2, 4], scale=0.5)
    rows = torch.full((*lead, 3, 2, 2), 3, dtype=torch.uint8)
    out = transform(data, dtype)(rows)
    assert (out.dtype, out.shape) == (dtype, rows.shape)
    expected = torch.tensor([1.4, 0.65, 0.3], dtype=dtype).reshape(3, 1, 1).expand_as(out)
    torch.testing.assert_close(out, expected)


def test_transform_of_features():
    """Features are normalised along their own axis, by one number or by one each."""
    x = np.array([[1.0, 2.0], [3.0, 4.0]])
    one = transform(arrays(x, [0, 1], mean=[1], std=[2]))(torch.tensor(x))
    each = transform(arrays(x, [0, 1], mean=[1, 2], std=[2, 1]))(torch.tensor(x))
    torch.testing.assert_close(one, torch.tensor([[0.0, 0.5], [1.0, 1.5]]))
    torch.testing.assert_close(each, torch.tensor([[0.0, 0.0], [1.0, 2.0]]))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64])
def test_token_ids_are_kept_as_integers(dtype):
    """Law: (n, L) integers reach the network as they are, in int64; declared as numbers they are features."""
    x = np.array([[0, 7, 200 % 128], [3, 1, 2]], dtype)
    ids = arrays(x, [0, 1])
    assert (ids.tokens, ids.scale) == (int(x.max()) + 1, 1.0)
    assert torch.equal(transform(ids)(torch.from_numpy(ids.x)), torch.from_numpy(x.astype(np.int64)))
    numbers = arrays(x, [0, 1], kind="numbers")
    assert (numbers.tokens, numbers.x.dtype) == (0, np.float32)


def test_transform_under_vmap():
    """The engine may map it over clients."""
    data = arrays(np.zeros((2, 3, 2, 2), np.uint8), [0, 1], mean=[0.1, 0.2, 0.3], std=[1, 2, 4])
    rows = torch.randint(0, 256, (5, 4, 3, 2, 2), dtype=torch.uint8)
    normalise = transform(data)
    torch.testing.assert_close(torch.func.vmap(normalise)(rows), normalise(rows))


GOOD = np.zeros((3, 2), np.float32)
LABELS = np.array([0, 1, 1])
WRONG = [
    pytest.param(
        np.zeros((3, 2, 2), np.int64), LABELS, {}, "type int64, but it must be uint8 or a float", id="x int64"
    ),
    pytest.param(np.full((3, 2), -1), LABELS, {}, "row 0 of x holds a token id", id="negative token"),
    pytest.param(np.full((3, 2), 9), LABELS, {"tokens": 9}, "none of 0 to 8", id="large token"),
    pytest.param(GOOD, LABELS, {"kind": "tokens"}, "tokens are .rows, length. integers", id="float tokens"),
    pytest.param(GOOD, LABELS, {"kind": "words"}, "auto or tokens or numbers", id="kind"),
    pytest.param(GOOD.astype(bool), LABELS, {}, "type bool", id="x bool"),
    pytest.param(np.array([["a"], ["b"], ["c"]]), LABELS, {}, "uint8 or a float type", id="x text"),
    pytest.param([[1.0], [1.0, 2.0], [0.0]], LABELS, {}, "rows of different shapes", id="x ragged"),
    pytest.param(GOOD[:, 0], LABELS, {}, r"shape \(3,\)", id="x flat"),
    pytest.param(np.zeros((3, 1, 1, 1, 1), np.float32), LABELS, {}, "shape", id="x five axes"),
    pytest.param(GOOD[:0], LABELS[:0], {}, "empty", id="no rows"),
    pytest.param(np.zeros((3, 0), np.float32), LABELS, {}, "empty", id="no features"),
    pytest.param(np.zeros((3, 8, 8, 3), np.uint8), LABELS, {}, "channels last", id="channels last"),
    pytest.param(np.array([[0.0], [np.nan], [0.0]]), LABELS, {}, "row 1 of x", id="nan"),
    pytest.param(np.array([[0.0], [0.0], [np.inf]]), LABELS, {}, "row 2 of x", id="inf"),
    pytest.param(np.array([[1e300], [0.0], [0.0]]), LABELS, {}, "row 0 of x", id="beyond float32"),
    pytest.param(GOOD, [0, 1], {}, r"y has shape \(2,\).*3 rows", id="y short"),
    pytest.param(GOOD, [[0], [1], [1]], {}, r"y has shape \(3, 1\)", id="y column"),
    pytest.param(GOOD, [0.0, 1.0, 1.0], {}, r"float64.*y\.astype\(int\)", id="y float"),
    pytest.param(GOOD, np.array(["a", 1, "b"], object), {}, "np.unique", id="y text and number"),
    pytest.param(GOOD, ["a", "a", "a"], {}, "every row has label 'a'", id="one name"),
    pytest.param(GOOD, LABELS, {"classes": ["cat"]}, "every row has label 'cat'", id="one class name"),
    pytest.param(GOOD, LABELS, {"classes": ["cat", "cat"]}, "different texts", id="class names twice"),
    pytest.param(GOOD, LABELS, {"client": [0, 1, 2], "client_names": ["a", "b"]}, "2 names, but 3", id="few names"),
    pytest.param(GOOD, [False, True, True], {}, "type bool", id="y bool"),
    pytest.param(GOOD, [0, -1, 1], {}, "row 1 has label -1, but labels must run from 0;", id="y negative"),
    pytest.param(GOOD, [0, 1, 2], {"num_classes": 2}, "row 2 has label 2.* from 0 to 1;", id="y too large"),
    pytest.param(GOOD, [1, 2, 2], {}, "row 0 has label 1, but no row has label 0", id="y from 1"),
    pytest.param(GOOD, [0, 1, 10**12], {}, "row 2 has label 1000000000000, but no row has label 2", id="y gap"),
    pytest.param(GOOD, [0, 0, 0], {}, "every row has label 0.*at least 2 classes", id="one class"),
    pytest.param(GOOD, [0, 0, 0], {"num_classes": 1}, "num_classes is 1", id="num_classes 1"),
    pytest.param(GOOD, LABELS, {"client": [0, 1]}, "client has shape", id="client short"),
    pytest.param(GOOD, LABELS, {"client": [0, 1, -2]}, "row 2 has client -2", id="client negative"),
    pytest.param(GOOD, LABELS, {"client": np.array(["ann", 1, None], object)}, "np.unique", id="client text"),
    pytest.param(GOOD, LABELS, {"test": [0, 1, 0]}, "bool", id="test integers"),
    pytest.param(GOOD, LABELS, {"test": [True]}, "test has shape", id="test short"),
    pytest.param(GOOD, LABELS, {"test": [True, True, True]}, "every row is a test row", id="test all"),
    pytest.param(GOOD, LABELS, {"scale": 0.0}, "scale is 0.0", id="scale"),
    pytest.param(GOOD, LABELS, {"mean": [0, 0, 0]}, "mean has 3 numbers.*1 or 2", id="mean long"),
    pytest.param(GOOD, LABELS, {"mean": [np.nan]}, "mean holds nan", id="mean nan"),
    pytest.param(GOOD, LABELS, {"std": [0.0]}, "std holds 0.0, but it must be positive", id="std zero"),
]


@pytest.mark.parametrize(("x", "y", "options", "message"), WRONG)
def test_wrong_arrays_are_refused_in_one_sentence(x, y, options, message):
    """Every problem is one line that starts with the dataset's name and names value or row."""
    with pytest.raises(SourceError, match=message) as caught:
        arrays(x, y, name="mine", **options)
    text = str(caught.value)
    assert text.startswith("mine: ")
    assert text.endswith(".")
    assert "\n" not in text


@given(st.lists(st.integers(-2, 5), min_size=1, max_size=8))
def test_labels_are_kept_or_refused(labels):
    """Labels pass exactly when they are 0..K-1 without gaps and K >= 2, and then unchanged."""
    x = np.zeros((len(labels), 1), np.float32)
    right = sorted(set(labels)) == list(range(len(set(labels)))) and len(set(labels)) >= 2
    if right:
        assert arrays(x, labels).y.tolist() == labels
    else:
        with pytest.raises(SourceError):
            arrays(x, labels)


def test_source_is_a_value():
    """A source cannot be changed and can be a key."""
    data = arrays(GOOD, LABELS)
    with pytest.raises(AttributeError):
        data.name = "other"  # type: ignore[misc]
    assert {data: 1}[data] == 1
    assert isinstance(data, Source)


def test_digits_are_scikit_learns(monkeypatch):
    """The file is read without scikit-learn, which is asked where there is no such file."""
    wanted = load_digits()
    ours = digits()
    monkeypatch.setattr("metavd.data.source.find_spec", lambda _: None)
    for found in (ours, digits()):
        assert np.array_equal(found.x, wanted.images[:, None].astype(np.uint8))
        assert np.array_equal(found.y, wanted.target)
        assert (found.x.dtype, found.y.dtype) == (np.uint8, np.int64)


def test_digits_need_no_scikit_learn():
    """Law: a run of digits starts without scikit-learn, and without scipy's statistics, a second of imports."""
    code = "import sys, metavd.runs.run, metavd.runs.evaluation; from metavd.data.source import digits; digits()\n"
    code += "print(sorted({'sklearn', 'scipy.stats'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
