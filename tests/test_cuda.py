"""The same on a GPU: random numbers and augmented rows to the bit, every method to rounding in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import metavd
from metavd import methods
from metavd.core import rng
from metavd.data.augment import crop_and_flip
from metavd.data.source import arrays

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

TINY = {"clients": 4, "unseen": 2, "cohort": 3, "rounds": 3, "width": 8, "test_share": 0.5, "dtype": "float64"}
CHEAP = {"batch": 16, "local_epochs": 1, "hyper_width": 8, "drop_from": 1, "teachers": 2, "distill_steps": 4,
         "chains": 2, "sweeps": 2, "extra_points": 2}  # fmt: skip


def test_keys_give_the_same_numbers() -> None:
    """Law: integers, uniform numbers and orders are the same bits on both; normal ones agree to rounding."""
    here, there = rng.fold(rng.key(5), 3, 1), rng.fold(rng.key(5, "cuda"), 3, 1)
    assert torch.equal(here, there.cpu())
    for draw in (rng.bits, rng.uniform):
        assert torch.equal(draw(here, [1000]), draw(there, [1000]).cpu())
    assert torch.equal(rng.permutation(here, 1000), rng.permutation(there, 1000).cpu())
    torch.testing.assert_close(rng.normal(here, [1000], torch.float64), rng.normal(there, [1000], torch.float64).cpu())


def test_crops_and_flips_are_the_same_bits() -> None:
    """Law: an augmented row depends on its key, not on where it is made."""
    rows = torch.from_numpy(np.random.RandomState(0).randint(0, 256, (64, 3, 32, 32)).astype(np.uint8))
    key = rng.fold(rng.key(1), 2)
    assert torch.equal(crop_and_flip(rows, key), crop_and_flip(rows.cuda(), key.cuda()).cpu())


@pytest.mark.parametrize("method", methods.NAMES)
def test_every_method_agrees(method: str) -> None:
    """Parity: three rounds on the CPU's loop, the GPU's loop and the GPU's vmap give the same answers to 1e-9."""
    known = methods.options_of(method)
    options = {key: value for key, value in CHEAP.items() if key in known}
    found = [
        metavd.run(method=method, device=device, backend=backend, **TINY, **options)
        for device, backend in (("cpu", "loop"), ("cuda", "loop"), ("cuda", "vmap"))
    ]
    for other in found[1:]:
        for part in ("test", "unseen"):
            assert other[part]["nll"] == pytest.approx(found[0][part]["nll"], rel=1e-9)
            assert other[part]["brier"] == pytest.approx(found[0][part]["brier"], rel=1e-9)


@pytest.mark.parametrize("method", ["fedavg", "reptile+metavd", "maml+metavd+dp"])
def test_convolutions_and_augmentation_agree(method: str) -> None:
    """Parity on pictures: convolutions, crops and flips included."""
    y = np.arange(240) % 4
    noise = np.random.RandomState(0).randint(0, 60, (240, 3, 16, 16))
    data = arrays((noise + 40 * y[:, None, None, None]).astype(np.uint8), y, name="squares", augment=True)
    settings = TINY | {"source": data, "partition": "iid", "model": "small-cnn", "batch": 16, "method": method}
    found = [metavd.run(device=device, **settings) for device in ("cpu", "cuda")]
    assert found[1]["test"]["nll"] == pytest.approx(found[0]["test"]["nll"], rel=1e-8)


def test_a_run_on_the_gpu_repeats_itself() -> None:
    """Law: the same run gives the same bits again."""
    settings = TINY | {"method": "reptile+metavd", "dtype": "float32", "device": "cuda"}
    assert metavd.run(**settings)["model_sha256"] == metavd.run(**settings)["model_sha256"]
