"""Large pictures: what a round costs is said, and sizes are brought down once, into the kept copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from metavd import run
from metavd.data.collection import CACHE, deal, load
from metavd.data.source import arrays


def said(**settings: object) -> list[str]:
    notes: list[str] = []

    class Heard:
        def start(self, experiment, done): ...
        def round(self, record): ...
        def evaluation(self, round, summary): ...
        def note(self, text):
            notes.append(text)

    run(method="fedavg", rounds=1, model="small-cnn", width=2, listener=Heard(), **settings)
    return notes


def pictures(side: int) -> tuple[np.ndarray, np.ndarray]:
    return np.random.RandomState(0).randint(0, 256, (24, side, side)).astype(np.uint8), np.arange(24) // 4 % 2


def test_only_large_pictures_are_told_of() -> None:
    """Above 64 pixels the size, the time and a smaller size are named; the number of rows is that of the round."""
    large = said(source=arrays(*pictures(80), client=np.arange(24) % 4), device="cpu", unseen=0, test_share=0.25)
    (text,) = [note for note in large if "pixels" in note]
    assert "80 x 80 pixels on a CPU" in text
    assert "image_size=64" in text
    assert "about 80 of them" in text  # four clients of six rows, two of them for testing, in five passes
    assert not [note for note in said(source=arrays(*pictures(64))) if "pixels" in note]


def test_sizes_are_brought_down_once(tmp_path: Path) -> None:
    """Law: the kept copy has the small size, and the pictures are those that resizing at every start gave."""
    x, y = pictures(90)
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    text, root = f"npz:{tmp_path / 'mine.npz'}", tmp_path / "root"
    first = load(text, root, image_size=32)
    assert first.sources[0].x.shape == (24, 1, 32, 32)
    assert np.load(next((root / CACHE).glob("*/x.npy"))).shape == (24, 1, 32, 32)
    again = load(text, root, image_size=32)
    assert isinstance(again.sources[0].x.base, np.memmap)
    settings = {"partition": "iid", "clients": 2, "seed": 0}
    late = deal(load(text, tmp_path / "other"), image_size=32, **settings)
    early = deal(again, image_size=32, **settings)
    np.testing.assert_array_equal(early.source.x, late.source.x)
    assert early.source.mean == late.source.mean
