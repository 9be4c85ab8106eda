"""Laws of texts: the vocabulary is of training rows, travels with the model, and next characters do not leak."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from metavd.data.collection import collect, deal
from metavd.data.formats import load
from metavd.data.prepare import restored
from metavd.data.text import PAD, UNKNOWN, labelled, speeches

TEXTS = ["Good film.", "bad film", "good", "bad bad"] * 10
LABELS = ["yes", "no", "yes", "no"] * 10
WHO = ["ann", "bob", "cid", "dan"] * 10


def test_words_are_of_training_rows() -> None:
    """Law: a word that only others use is unknown; ids are those of its sorted words, texts end at the end of a row."""
    texts = [text + (" zebra zebra" if who == "dan" else "") for text, who in zip(TEXTS, WHO, strict=True)]
    dealt = deal(collect(labelled(texts, LABELS, WHO)), partition="natural", clients=3, unseen="dan", seed=0)
    learnt = dealt.source.prepare
    assert learnt.known == (".", "bad", "film", "good")
    assert dealt.source.tokens == 6
    assert dealt.source.x.dtype == np.uint8
    assert learnt.length == 3  # as the longest training row
    rows = learnt.rows(["Good zebra", "good film ! bad"])
    assert rows.tolist() == [[PAD, 5, UNKNOWN], [5, 4, UNKNOWN]]


@pytest.mark.parametrize("kind", ["word", "character", "byte"])
def test_a_vocabulary_travels_as_plain_values(kind: str) -> None:
    """Law: written as JSON and read again, texts have the same ids."""
    source = labelled(TEXTS, LABELS, WHO, vocabulary=kind, length=7)
    learnt = source.prepare.learn(source, np.arange(20)).prepare
    again = restored(json.loads(json.dumps(learnt.plain())))
    new = ["Gööd film", "", "x" * 100]
    np.testing.assert_array_equal(again.rows(new), learnt.rows(new))
    assert again.rows(new).shape == (3, 7)
    assert again.rows(new).max() < again.tokens == learnt.tokens


def test_bytes_are_their_values() -> None:
    source = labelled(TEXTS, LABELS, vocabulary="byte", length=4)
    learnt = source.prepare.learn(source, np.arange(4)).prepare
    assert learnt.rows(["ab"]).tolist() == [[0, 0, 98, 99]]
    assert learnt.tokens == 257


def test_next_characters_are_those_of_the_speeches() -> None:
    """Closed form: the row before every character, of the client's own texts, the last fifth for testing."""
    source = speeches(["abc", "zz", "de"], ["x", "y", "x"], length=3)
    before = [bytes(text).decode() for text in source.x]
    after = [source.classes[label] for label in source.y]
    owners = [source.client_names[owner] for owner in source.client]  # type: ignore[union-attr]
    assert [pair for pair, who in zip(zip(before, after, strict=True), owners, strict=True) if who == "x"] == [
        ("a", "b"), ("ab", "c"), ("abc", "\n"), ("bc\n", "d"), ("c\nd", "e"),
    ]  # fmt: skip
    assert source.test.tolist()[:5] == [False] * 4 + [True]  # type: ignore[union-attr]


def test_no_test_character_is_in_a_training_row() -> None:
    """Law: what is to be predicted in a client's test rows comes after all of its training rows."""
    text = "".join(chr(0x4E00 + place) for place in range(100))
    source = speeches([text[:50], text[50:]], ["x", "x"], length=8)
    asked = {source.classes[label] for label in source.y[source.test]}
    seen = {letter for row in source.x[~source.test] for letter in bytes(row).decode()}  # type: ignore[operator]
    assert asked
    assert not asked & seen


def test_stride_and_least(tmp_path: Path) -> None:
    path = tmp_path / "plays.jsonl"
    path.write_text("\n".join(json.dumps({"client": who, "text": "to be or not " * times})
                              for who, times in (("king", 30), ("page", 1))))  # fmt: skip
    whole = load("text", path, task="next-character")
    some = load("text", path, task="next-character", stride=5, least=20)
    assert whole.client_names == ("king", "page")
    assert some.client_names == ("king",)
    assert len(some.y) == -(-(30 * 13 - 1) // 5)


@pytest.mark.parametrize("name", ["reviews.csv", "reviews.jsonl"])
def test_csv_and_json_lines_are_the_same_rows(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.suffix == ".csv":
        path.write_text("text,label,client\n" + "\n".join(map(",".join, zip(TEXTS, LABELS, WHO, strict=True))))
    else:
        lines = [{"text": t, "label": y, "client": w} for t, y, w in zip(TEXTS, LABELS, WHO, strict=True)]
        path.write_text("\n".join(map(json.dumps, lines)))
    assert load("text", path).fingerprint == labelled(TEXTS, LABELS, WHO, name="reviews").fingerprint
