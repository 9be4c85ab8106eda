"""Crops and flips against a plain loop over images; the kernel of a dataset's rows against its reference."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from metavd.core import rng
from metavd.ops.images import batches, crop_and_flip

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def plain(image, dy, dx, mirrored, pad):
    channels, height, width = image.shape
    framed = torch.zeros(channels, height + 2 * pad, width + 2 * pad, dtype=image.dtype)
    framed[:, pad : pad + height, pad : pad + width] = image
    cut = framed[:, dy : dy + height, dx : dx + width]
    return cut.flip(-1) if mirrored else cut


def test_every_image_is_one_of_the_crops():
    """Parity: each result is a crop, plain or mirrored, of its own padded image, and all crops occur."""
    images = torch.randint(1, 255, (400, 3, 5, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    out = crop_and_flip(images, rng.key(3), pad=1)
    seen = set()
    for before, after in zip(images, out, strict=True):
        fits = [
            (dy, dx, mirrored)
            for dy in range(3)
            for dx in range(3)
            for mirrored in (False, True)
            if torch.equal(plain(before, dy, dx, mirrored, 1), after)
        ]
        assert len(fits) == 1
        seen.add(fits[0])
    assert len(seen) == 18


def test_moments_of_shift_and_flip():
    """Closed form: shifts are uniform over 0..2 pad in each direction and half of the images are mirrored."""
    images = torch.zeros(20000, 1, 9, 9)
    images[:, 0, 4, 4] = 1.0  # a single bright pixel shows the shift
    images[:, 0, 4, 3] = 2.0  # and its neighbour the side
    out = crop_and_flip(images, rng.key(7))
    centre = (out[:, 0] == 1.0).flatten(1)
    position = centre.float().argmax(1)
    visible = centre.any(1)
    assert visible.float().mean() > 0.75
    rows = torch.bincount(position[visible] // 9, minlength=9).float()
    assert (rows / rows.sum() - 1 / 9).abs().max() < 0.01
    neighbour = (out[:, 0] == 2.0).flatten(1)
    both = visible & neighbour.any(1)
    left = (neighbour.float().argmax(1) < position)[both]
    assert abs(left.float().mean() - 0.5) < 0.02


def test_later_images_do_not_matter():
    """Law: an image's crop does not depend on how many images follow, so padding a batch changes nothing."""
    images = torch.arange(8 * 3 * 32 * 32).reshape(8, 3, 32, 32).float()
    assert torch.equal(crop_and_flip(images, rng.key(0))[:5], crop_and_flip(images[:5], rng.key(0)))


def test_seeded():
    """Law: the same key gives the same crops, another key others."""
    images = torch.rand(8, 3, 32, 32)
    assert torch.equal(crop_and_flip(images, rng.key(1)), crop_and_flip(images, rng.key(1)))
    assert not torch.equal(crop_and_flip(images, rng.key(1)), crop_and_flip(images, rng.key(2)))


@pytest.mark.parametrize("augmented", [False, True])
def test_the_kernel_crops_mirrors_and_normalises(augmented: bool, kernels: Callable[[bool], None]):
    """Parity with one batch after another, `crop_and_flip` and (x scale - mean) / std, to the last bit of float32."""
    x = torch.from_numpy(np.random.RandomState(0).randint(0, 256, (20, 3, 8, 8)).astype(np.uint8)).to(DEVICE)
    rows = torch.arange(12, device=DEVICE).reshape(2, 2, 3) + 5
    keys = rng.split(rng.split(rng.key(1, DEVICE), 2), 2) if augmented else None
    mean, std = torch.tensor([0.4, 0.5, 0.6], device=DEVICE), torch.tensor([0.2, 0.3, 0.4], device=DEVICE)
    y = torch.arange(20, device=DEVICE) % 7

    def each(rows, key):
        raw = x[rows] if key is None else crop_and_flip(x[rows], key)
        return (raw.float() * (1 / 255) - mean[:, None, None]) / std[:, None, None]

    found, labels = batches(x, y, rows, keys, (1 / 255, mean, std), each)
    kernels(False)
    expected, wanted = batches(x, y, rows, keys, (1 / 255, mean, std), each)
    assert torch.equal(labels, wanted)
    assert torch.equal(labels, y[rows])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for i in range(2):
        for j in range(2):
            assert torch.equal(expected[i, j], each(rows[i, j], None if keys is None else keys[i, j]))
