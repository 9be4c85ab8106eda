"""Keyed random numbers: kernels against the references."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.func import vmap

from metavd.core import rng
from metavd.ops import hashing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_kernels_give_the_same_numbers(kernels: Callable[[bool], None]) -> None:
    """Parity: hashes to the bit, normal numbers to rounding, also under two vmaps."""
    kernels(False)
    keys = rng.split(rng.split(rng.key(3), 4), 3)
    expected = hashing.normals(keys, 7, torch.float64)
    mixed, bits = hashing.mix(keys), hashing.bits(keys, 5)
    kernels(True)
    found = vmap(vmap(lambda key: hashing.normals(key, 7, torch.float32)))(keys.to(DEVICE))
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(vmap(vmap(hashing.mix))(keys.to(DEVICE)).cpu(), mixed)
    assert torch.equal(hashing.bits(keys.to(DEVICE), 5).cpu(), bits)
    assert torch.equal(rng.split(rng.split(rng.key(3, DEVICE), 4), 3).cpu(), keys)
