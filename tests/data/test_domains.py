"""Several datasets as one: labels side by side, every domain with its own look, nobody's row lost."""

import numpy as np
import pytest
import torch

from metavd.data.cohort import pool
from metavd.data.domains import federate_domains, merge, resize
from metavd.data.partition import PartitionError
from metavd.data.source import SourceError, arrays


def photos(rows=120, side=6):
    draw = np.random.RandomState(0)
    x = draw.randint(0, 256, (rows, 3, side, side)).astype(np.uint8)
    return arrays(x, np.arange(rows) % 4, name="photos", mean=[0.5], std=[0.25], augment=True)


def letters(rows=90, side=4):
    draw = np.random.RandomState(1)
    x = draw.randint(0, 256, (rows, side, side)).astype(np.uint8)
    return arrays(x, np.arange(rows) % 3, client=np.arange(rows) // 6, name="letters", mean=[0.1], std=[0.3])


def test_labels_stand_side_by_side():
    """Law: labels are offset in the order of the list, images have one shape, domains know their classes."""
    merged = merge([photos(), letters()])
    assert (merged.name, merged.num_classes, merged.x.shape) == ("photos+letters", 7, (210, 3, 6, 6))
    assert [(d.name, d.first_class, d.num_classes) for d in merged.domains] == [("photos", 0, 4), ("letters", 4, 3)]
    assert set(merged.y[merged.domain == 0]) == {0, 1, 2, 3}
    assert set(merged.y[merged.domain == 1]) == {4, 5, 6}
    assert np.array_equal(merged.x[:120], photos().x)


@pytest.mark.parametrize("kind", ["mixed", "separate"])
def test_every_row_is_held_once(kind):
    """Law: a partition of several datasets holds no row twice; mixed clients have every domain, separate ones one."""
    held = federate_domains([photos(), letters()], clients=6, unseen=2, kind=kind, seed=0)
    rows = np.concatenate([*held.train, *held.test])
    assert len(rows) == len(set(rows.tolist()))
    assert len(held.train) == held.num_clients + held.num_unseen == 8
    kinds = [set(held.source.domain[own].tolist()) for own in held.train]
    assert all(k == {0, 1} for k in kinds) if kind == "mixed" else all(len(k) == 1 for k in kinds)
    if kind == "separate":
        assert [k == {0} for k in kinds] == [True] * 3 + [False] * 3 + [True, False]


def test_each_domain_has_its_own_look():
    """Closed form: (x / 255 - mean) / std with the row's own domain's numbers; only photographs are augmented."""
    held = federate_domains([photos(), letters()], clients=6, unseen=0, seed=0)
    rows = pool(held, dtype=torch.float64)
    chosen = torch.tensor([3, 150])
    raw = torch.from_numpy(held.source.x[[3, 150]]).double() / 255
    expected = torch.stack([(raw[0] - 0.5) / 0.25, (raw[1] - 0.1) / 0.3])
    torch.testing.assert_close(rows.inputs(chosen), expected, rtol=0, atol=1e-12)
    many = torch.tensor([3] * 8 + [150] * 8)
    changed = rows.inputs(many, torch.tensor(5)) != rows.inputs(many)
    assert changed[:8].any()
    assert not changed[8:].any()


def test_resize_keeps_constants_and_repeats_grey():
    """Law: a constant image stays constant at any size; grey becomes equal channels."""
    grey = np.full((2, 1, 5, 7), 93, np.uint8)
    assert (resize(grey, 3, 11, 4) == 93).all()
    assert resize(grey, 3, 11, 4).shape == (2, 3, 11, 4)


def test_what_cannot_be_merged():
    """Wrong input is one sentence that names it."""
    with pytest.raises(SourceError, match="no uint8 images"):
        merge([photos(), arrays(np.random.rand(9, 4), np.arange(9) % 2, name="features")])  # noqa: NPY002
    with pytest.raises(SourceError, match="twice"):
        merge([photos(), photos()])
    with pytest.raises(PartitionError, match="cannot be divided"):
        federate_domains([photos(), letters()], clients=1, kind="separate", seed=0)
