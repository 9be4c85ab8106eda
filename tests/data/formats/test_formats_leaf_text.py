"""LEAF's texts: Shakespeare and Sent140 as their preprocessing writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metavd.data.collection import collect, deal
from metavd.data.formats import load
from metavd.data.source import SourceError

TEXT = "To be, or not to be, that is the question: whether it is nobler in the mind to suffer, or to take arms."


def shard(path: Path, users: dict[str, tuple[list, list]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {name: {"x": x, "y": y} for name, (x, y) in users.items()}
    path.write_text(json.dumps({"users": list(users), "num_samples": [len(y) for _, y in users.values()],
                                "user_data": rows}))  # fmt: skip


def speeches(first: int) -> tuple[list[str], list[str]]:
    places = range(first, first + 20)
    return [TEXT[place : place + 40] for place in places], [TEXT[place + 40] for place in places]


def test_shakespeare_is_read(tmp_path: Path) -> None:
    """Roles keep their names, classes are the characters that follow, the last fifth is for testing."""
    shard(tmp_path / "all_data" / "all_data.json", {"HAMLET": speeches(0), "OPHELIA": speeches(30)})
    source = load("shakespeare", tmp_path)
    assert source.client_names == ("HAMLET", "OPHELIA")
    assert [source.classes[label] for label in source.y[:20]] == speeches(0)[1]
    assert source.test.tolist() == ([False] * 16 + [True] * 4) * 2  # type: ignore[union-attr]
    dealt = deal(collect(source), partition="natural", clients=1, unseen="OPHELIA", seed=0)
    assert dealt.source.x.shape == (40, 40)
    assert dealt.source.tokens == 2 + len(set("".join(speeches(0)[0][:16])))


def test_sent140_is_read(tmp_path: Path) -> None:
    """The text is the fifth entry of a row; 0 is negative, 1 and 4 positive; LEAF's own split is kept."""

    def tweet(text: str) -> list[str]:
        return ["0", "Mon", "NO_QUERY", "ann", text, ""]

    rows = ([tweet("so sad"), tweet("so glad so glad")], [0, 4])
    shard(tmp_path / "train" / "a.json", {"ann": rows, "bob": rows})
    shard(tmp_path / "test" / "a.json", {"ann": ([tweet("glad")], [1])})
    source = load("sent140", tmp_path)
    assert source.classes == ("negative", "positive")
    assert [bytes(text).decode() for text in source.x[:2]] == ["so sad", "so glad so glad"]
    assert source.test.tolist() == [False] * 4 + [True]  # type: ignore[union-attr]
    assert source.client_names == ("ann", "bob")


@pytest.mark.parametrize(
    ("name", "rows", "says"),
    [
        ("shakespeare", ([[0.5] * 784], [3]), "hold other rows than those of shakespeare"),
        ("femnist", speeches(0), "holds speeches, but it must hold 784 pixels"),
        ("shakespeare", (["abc"], ["ab"]), "labels must be whole numbers"),
        ("sent140", ([["0", "d", "q", "u", "text", ""]], [7]), "has label 7, but moods are"),
    ],
)
def test_other_rows_are_named(tmp_path: Path, name: str, rows: tuple[list, list], says: str) -> None:
    shard(tmp_path / "all_data" / "all.json", {"ann": rows})
    with pytest.raises(SourceError, match=says):
        load(name, tmp_path)
