"""What a run trains on as one text: read, found, joined, and dealt; and settings that suit it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from metavd.data.collection import CACHE, Part, collect, deal, load, parse
from metavd.data.source import Source, SourceError, arrays


def write(path: Path, *, people: int = 0, side: int = 8, rows: int = 120, classes: int = 3) -> None:
    """Write rows of one's own to an npz file."""
    draw = np.random.RandomState(0)
    x = draw.randint(0, 256, (rows, side, side)).astype(np.uint8)
    client = {"client": np.arange(rows) % people} if people else {}
    np.savez(path, x=x, y=np.arange(rows) // (people or 1) % classes, **client)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("digits", [Part("digits", "", {})]),
        ("cifar100:labels=coarse", [Part("cifar100", "", {"labels": "coarse"})]),
        ("celeba:size=64x48,attribute=Male", [Part("celeba", "", {"size": (64, 48), "attribute": "Male"})]),
        ("celeba+cifar100+mnist", [Part(name, "", {}) for name in ("celeba", "cifar100", "mnist")]),
        ("npz:a.npz", [Part("npz", "a.npz", {})]),
        ("npz:a,b+c.npz,augment=yes", [Part("npz", "a,b+c.npz", {"augment": True})]),
        ("folder:my+photos+mnist", [Part("folder", "my+photos", {}), Part("mnist", "", {})]),
        ("npz:one.npz+npz:two.npz", [Part("npz", "one.npz", {}), Part("npz", "two.npz", {})]),
        ("folder:C:/x", [Part("folder", "C:/x", {})]),
        ("fashion-mnist+mnist", [Part("fashion-mnist", "", {}), Part("mnist", "", {})]),
    ],
)
def test_texts(text: str, parts: list[Part]) -> None:
    """A plus or a comma belongs to a path unless a dataset's or an option's name follows."""
    assert list(parse(text)) == parts


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cifar", "no dataset 'cifar'; did you mean cifar10"),
        ("", "no dataset ''; choose from"),
        ("cifar10+", "no dataset 'cifar10+'"),
        ("mnist+mnist", "names mnist twice"),
        ("folder", "names no path; write folder:PATH"),
        ("npz:,augment=yes", "names no path"),
        ("cifar10:", "it takes subset=VALUE"),
        ("cifar10:labels=fine", "gives cifar10 'labels=fine' for an option, but it takes subset=VALUE"),
        ("digits:x", "it takes none"),
        ("celeba:size=big", "celeba: size is 'big'"),
        ("mine.npz", "write npz:mine.npz"),
    ],
)
def test_wrong_texts_are_explained(text: str, says: str) -> None:
    with pytest.raises(SourceError) as error:
        parse(text)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_path_alone_is_answered_with_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=f"write folder:{tmp_path}"):
        parse(str(tmp_path))


def test_a_missing_root_is_named_with_what_to_do(tmp_path: Path) -> None:
    """Only datasets that can be fetched are said to be."""
    with pytest.raises(SourceError, match=r"cifar10 is looked for below .*nowhere.*--root DIR.*data fetch cifar10"):
        load("cifar10", tmp_path / "nowhere")
    with pytest.raises(SourceError, match=r"celeba is looked for below .* METAVD_DATA\.$"):
        load("celeba", tmp_path / "nowhere")
    assert load("digits", tmp_path / "nowhere").name == "digits"
    assert not (tmp_path / "nowhere").exists()


def test_a_copy_is_kept_below_the_root(tmp_path: Path) -> None:
    """The second load comes from the copy, says the same, and notices a changed file."""
    path, root = tmp_path / "mine.npz", tmp_path / "root"
    write(path)
    first = load(f"npz:{path}", root)
    (copy,) = (root / CACHE).iterdir()
    again = load(f"npz:{path}", root)
    assert again.fingerprint == first.fingerprint
    assert isinstance(again.sources[0].x.base, np.memmap)
    write(path, classes=4)
    assert load(f"npz:{path}", root).fingerprint != first.fingerprint
    assert not copy.exists()


def test_the_fingerprint_names_the_content() -> None:
    """Law: one changed pixel, label, owner or order of rows is another dataset; another name is not."""
    x, y = np.arange(40, dtype=np.uint8).reshape(10, 1, 2, 2), np.arange(10) % 2
    base = arrays(x, y, client=np.arange(10) % 5)
    changed = x.copy()
    changed[3, 0, 1, 1] += 1
    others = [
        arrays(changed, y, client=np.arange(10) % 5), arrays(x, 1 - y, client=np.arange(10) % 5), arrays(x, y),
        arrays(x, y, client=np.arange(10) // 2), arrays(x[::-1], y[::-1], client=(np.arange(10) % 5)[::-1]),
        arrays(x, y, client=np.arange(10) % 5, augment=True),
    ]  # fmt: skip
    found = {source.fingerprint for source in others}
    assert len(found) == len(others)
    assert base.fingerprint not in found
    assert arrays(x, y, client=np.arange(10) % 5, name="other").fingerprint == base.fingerprint


def test_settings_suit_what_the_files_hold(tmp_path: Path) -> None:
    """One's own clients are used where there are some; several datasets take the fewest clients that all can give."""
    write(tmp_path / "people.npz", people=10)
    write(tmp_path / "rows.npz", rows=500)
    people = load(f"npz:{tmp_path / 'people.npz'}", tmp_path).defaults
    rows = load(f"npz:{tmp_path / 'rows.npz'}", tmp_path).defaults
    assert (people["partition"], people["clients"], people["unseen"]) == ("natural", 8, 2)
    assert (rows["partition"], rows["clients"], rows["unseen"]) == ("dirichlet:0.5", 8, 2)
    both = load(f"npz:{tmp_path / 'people.npz'}+npz:{tmp_path / 'rows.npz'}+digits", tmp_path).defaults
    assert (both["partition"], both["clients"], both["unseen"]) == ("dirichlet:0.5", 8, 2)


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        write(tmp_path / place / "mine.npz")
    data = load(f"npz:{tmp_path}/a/mine.npz+npz:{tmp_path}/b/mine.npz", tmp_path)
    assert [source.name for source in data.sources] == ["mine-0", "mine-1"]


def own(name: str, people: int | None, side: int = 6, grey: bool = True) -> Source:
    draw = np.random.RandomState(1)
    x = draw.randint(0, 256, (90, 1 if grey else 3, side, side)).astype(np.uint8)
    return arrays(x, np.arange(90) % 3, client=None if people is None else np.arange(90) // 3 % people, name=name)


def test_one_dataset_is_dealt_as_it_is_and_brought_to_a_size() -> None:
    """0 leaves images alone, to the byte; a size and channels change their shape only."""
    data = collect(own("mine", 10))
    plain = deal(data, partition="iid", clients=4, seed=0)
    assert plain.source is data.sources[0]
    wide = deal(data, partition="iid", clients=4, seed=0, image_size=12, channels=3)
    assert wide.source.x.shape == (90, 3, 12, 12)
    assert all(np.array_equal(one, two) for one, two in zip(plain.train, wide.train, strict=True))
    assert deal(data, partition="iid", clients=4, seed=0, channels=3).source.x.shape == (90, 3, 6, 6)
    with pytest.raises(SourceError, match="holds no uint8 images"):
        deal(collect(arrays(np.zeros((9, 4)), np.arange(9) % 2)), partition="iid", clients=2, seed=0, image_size=8)


def test_several_datasets_are_joined() -> None:
    """A list of sources is one collection: own clients by nature, the others dealt, labels side by side."""
    data = collect([own("faces", 10, grey=False), own("letters", None, side=4)])
    assert data.name == "faces+letters"
    held = deal(data, partition="iid", clients=6, unseen=2, seed=0)
    assert (held.source.num_classes, held.source.x.shape[1:]) == (6, (3, 6, 6))
    faces = [set(data.sources[0].client[rows[rows < 90]]) for rows in held.train]
    assert all(len(whose) == 1 for whose in faces)
    apart = deal(data, partition="iid", clients=6, unseen=2, seed=0, kind="separate")
    assert all((rows < 90).all() or (rows >= 90).all() for rows in apart.train)
    with pytest.raises(SourceError, match="at least one"):
        collect([])
