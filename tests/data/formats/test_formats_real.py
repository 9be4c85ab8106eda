"""The real files, where METAVD_DATA names the folder that unpack.py wrote; counts are those of its README."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from metavd.data.formats import check, load

ROOT = Path(os.environ.get("METAVD_DATA", ""))
pytestmark = pytest.mark.skipif("METAVD_DATA" not in os.environ, reason="METAVD_DATA is not set")


def present(name):
    if not (ROOT / name).exists():
        pytest.skip(f"{name} is not in METAVD_DATA")


@pytest.mark.parametrize(
    ("name", "folder", "each", "means"),
    [
        ("cifar10", "cifar-10-batches-bin", (5000, 1000), (0.4914, 0.4822, 0.4465)),
        ("cifar100", "cifar-100-binary", (500, 100), (0.5071, 0.4865, 0.4409)),
    ],
)
def test_cifar(tmp_path, name, folder, each, means):
    """50,000 + 10,000 rows, all classes alike, the known channel means, and a second load under a second."""
    present(folder)
    data = load(name, ROOT, cache=tmp_path)
    assert data.x.shape == (60000, 3, 32, 32)
    for flag, count in zip((False, True), each, strict=True):
        assert set(np.bincount(data.y[data.test == flag]).tolist()) == {count}
    found = data.x[~data.test].mean((0, 2, 3)) / 255
    np.testing.assert_allclose(found, means, atol=1e-4)
    begin = time.perf_counter()
    again = load(name, ROOT, cache=tmp_path)
    assert time.perf_counter() - begin < 1
    np.testing.assert_array_equal(again.x, data.x)


def test_celeba(tmp_path):
    """17,192 faces of 895 celebrities, 52 % of them smiling."""
    present("celeba32.npz")
    data = load("celeba", ROOT, cache=tmp_path)
    assert data.x.shape == (17192, 3, 32, 32)
    count = np.unique(data.client, return_counts=True)[1]
    assert (len(count), count.min(), np.median(count)) == (895, 5, 20)
    assert round(float(data.y.mean()), 2) == 0.52


def test_mnist(tmp_path):
    """70,000 digits of 836 writers, of whom the test half's are nobody of the train half's."""
    present("mnist_by_writer.npz")
    data = load("mnist", ROOT, cache=tmp_path)
    assert (data.x.shape, int(data.test.sum())) == ((70000, 1, 28, 28), 10000)
    count = np.unique(data.client, return_counts=True)[1]
    assert (len(count), int((count >= 50).sum())) == (836, 583)
    assert not set(data.client[data.test]) & set(data.client[~data.test])
    assert abs(data.x[~data.test].mean() / 255 - 0.1307) < 1e-4


def test_check_finds_nothing_wrong():
    """The whole folder is recognised."""
    report = check(ROOT)
    assert report.ok, str(report)
