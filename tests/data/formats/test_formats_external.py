"""Objects of other libraries, by what they can do; stand-ins have the same faces as the real ones."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from metavd.data.formats import from_huggingface, from_torchvision
from metavd.data.source import SourceError


class Column:
    """A `datasets.ClassLabel`."""

    def __init__(self, names):
        self.names = names


class Table:
    """A `datasets.Dataset`."""

    def __init__(self, rows, names=None):
        self.rows = rows
        self.column_names = list(rows[0])
        self.features = {key: Column(names) if key == "label" else None for key in rows[0]}

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


def grey(value, size=(5, 4)):
    return Image.fromarray(np.full(size, value, np.uint8))


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def test_huggingface_split_and_clients():
    """A DatasetDict's train and test become the split, a column of names the clients, a ClassLabel the classes."""
    rows = [{"image": grey(i), "label": i % 2, "writer": f"w{i % 3}"} for i in range(6)]
    data = from_huggingface({"train": Table(rows[:4], ["a", "b", "c"]), "test": Table(rows[4:])}, client="writer")
    assert data.x.shape == (6, 1, 5, 4)
    assert data.x[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert data.y.tolist() == [0, 1, 0, 1, 0, 1]
    assert data.test.tolist() == [False] * 4 + [True] * 2
    assert data.client.tolist() == [0, 1, 2, 0, 1, 2]
    assert (data.num_classes, data.name) == (3, "huggingface")


def test_huggingface_encoded_and_resized():
    """Undecoded images (bytes), other column names, another size."""
    rows = [{"img": png(grey(i, (8, 6))), "fine_label": i % 2} for i in range(4)]
    data = from_huggingface(Table(rows), size=2, channels=3, augment=True)
    assert data.x.shape == (4, 3, 2, 2)
    assert data.augment
    assert data.test is None


def test_huggingface_features():
    """Lists of numbers are features."""
    rows = [{"x": [float(i), 2.0], "y": i % 2} for i in range(4)]
    data = from_huggingface(Table(rows))
    assert (data.x.shape, data.x.dtype) == ((4, 2), np.float32)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"picture": 1, "label": 0}], {}, "no column for the image among the usual names; the columns are picture"),
        ([{"image": grey(1), "label": 0}], {"label": "class"}, "there is no column 'class'"),
        ([{"image": grey(1), "label": 0}], {"client": "who"}, "there is no column 'who'"),
        ([{"image": grey(1), "label": "cat"}], {}, "row 0 has label cat, but labels must be whole numbers"),
        ([{"image": "x", "label": 0}], {}, r"huggingface\[0\]: this row is str"),
        ([{"image": grey(1), "label": 0}, {"image": grey(1, (3, 3)), "label": 1}], {}, "pass a size"),
        ([{"image": grey(1), "label": 0}, {"image": [1.0, 2.0], "label": 1}], {}, "all rows must be pictures, or all"),
        ([{"x": [1.0, 2.0], "label": 0}, {"x": [1.0], "label": 1}], {}, "row 1 has shape"),
        ([{"image": {"bytes": b"no"}, "label": 0}], {}, "no readable picture"),
    ],
)
def test_huggingface_faults(rows, options, message):
    """One sentence with the row or the column."""
    with pytest.raises(SourceError, match=message):
        from_huggingface(Table(rows), **options)


def test_huggingface_without_train():
    """A DatasetDict must have train; a test split needs the same columns."""
    rows = [{"image": grey(i), "label": i % 2} for i in range(4)]
    with pytest.raises(SourceError, match="the splits are validation, but train must be there"):
        from_huggingface({"validation": Table(rows)})
    with pytest.raises(SourceError, match="test rows have no column 'image'"):
        from_huggingface(Table(rows), test=Table([{"img": grey(1), "label": 0}]))


class Raw:
    """torchvision's CIFAR10 (arrays, lists) and MNIST (tensors)."""

    def __init__(self, data, targets):
        self.data, self.targets = data, targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, number):
        raise AssertionError("the raw bytes are enough")


class Asked:
    """torchvision's ImageFolder: rows by number."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


def test_torchvision_raw_bytes(rng):
    """CIFAR's arrays are channels last and become channels first; MNIST's tensors get a channel."""
    x = rng.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    data = from_torchvision(Raw(x[:4], [0, 1, 0, 1]), Raw(x[4:], [1, 0]), augment=True, name="cifar10")
    np.testing.assert_array_equal(data.x, x.transpose(0, 3, 1, 2))
    assert data.test.tolist() == [False] * 4 + [True] * 2
    assert data.name == "cifar10"
    digits = torch.from_numpy(x[..., 0])
    data = from_torchvision(Raw(digits, torch.tensor([0, 1, 2, 0, 1, 2])), client=[5, 5, 6, 6, 7, 7])
    np.testing.assert_array_equal(data.x[:, 0], x[..., 0])
    assert data.client.tolist() == [5, 5, 6, 6, 7, 7]
    assert data.name == "raw"
    assert from_torchvision(Raw(x, [0, 1] * 3), size=4, channels=1).x.shape == (6, 1, 4, 4)


def test_torchvision_row_by_row():
    """Pictures, or tensors that a transform made."""
    data = from_torchvision(Asked([(grey(i), i % 2) for i in range(4)]), Asked([(grey(9), 1)]))
    assert data.x[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 9]
    assert data.y.tolist() == [0, 1, 0, 1, 1]
    rows = [(torch.full((3, 8, 8), i / 4), i % 2) for i in range(4)]
    data = from_torchvision(Asked(rows))
    assert (data.x.shape, data.x.dtype, data.scale) == ((4, 3, 8, 8), np.float32, 1.0)
    with pytest.raises(SourceError, match=r"row 0 must be \(picture, label\)"):
        from_torchvision(Asked([grey(1)]))


def test_neither_library_is_imported():
    """They are no dependency; and reading data needs neither torch nor Pillow nor TLS."""
    import subprocess
    import sys

    heavy = {"datasets", "torchvision", "PIL", "torch", "ssl", "sklearn"}
    code = f"import sys, metavd.data.formats; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
