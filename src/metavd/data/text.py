"""Texts as token ids: bytes, characters or words; the vocabulary is made of training rows.

    byte         a byte's value + 1
    character    its place among the characters of the training rows
    word         its place among the most frequent words and signs of the training rows, without regard to case

Id 0 is padding, before a text, so that its end is always at the end of a row. Where there is a vocabulary, id 1 stands
for whatever is not in it. A longer text loses its end, or in next-character prediction its beginning.

Shape letters: n rows, L tokens of a row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .source import Source, SourceError, named
from .table import classes_of

VOCABULARIES = ("word", "character", "byte")
LABEL, NEXT = "label", "next-character"
TASKS = (LABEL, NEXT)
LENGTHS = {"word": 64, "character": 80, "byte": 256}
"""Tokens of a row by default."""
WORDS = 10_000
"""Words of a vocabulary at most, the most frequent ones."""
LEAST = 2
"""Times that a word must occur in training rows."""
TEST_SHARE = 0.2
"""Of a client's text, its end, whose characters are for testing."""
PAD, UNKNOWN = 0, 1
_LONGEST = 1 << 16
"""Bytes of a text that are kept."""


@dataclass(frozen=True)
class Text:
    """How texts become token ids."""

    kind: str
    length: int
    known: tuple[str, ...] = ()
    """Characters or words by id, from 2 on; none of bytes, and none before they are learnt."""
    learnt: bool = False
    last: bool = False
    """Whether a longer text loses its beginning."""
    shrink: bool = False
    """Whether rows are made as short as the longest training row is."""

    @property
    def tokens(self) -> int:
        """How many ids there are."""
        return 257 if self.kind == "byte" else 2 + len(self.known)

    def learn(self, source: Source, rows: np.ndarray) -> Source:
        """Make the vocabulary of training rows, and return the source with all its rows as ids."""
        known: tuple[str, ...] = ()
        if self.kind != "byte":
            counts = Counter(token for row in rows for token in self._split(source.x[row]))
            least = LEAST if self.kind == "word" else 1
            frequent = sorted((-count, token) for token, count in counts.items() if count >= least)[:WORDS]
            known = tuple(sorted(token for _, token in frequent))
        length = self.length
        if self.shrink:
            length = min(length, max(1, *(len(self._split(source.x[row])) for row in rows)))
        found = replace(self, known=known, learnt=True, length=length)
        return replace(source, x=found._ids(source.x), tokens=found.tokens, prepare=found)

    def rows(self, content: Any) -> np.ndarray:
        """Return the ids of texts."""
        texts = [content] if isinstance(content, str) else list(content)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise SourceError("x must be texts, at least one, because the model was trained on texts.")
        return self._ids(stored(texts))

    def plain(self) -> dict[str, Any]:
        """Return the vocabulary in plain values."""
        return {"kind": "text", "tokens": self.kind, "length": self.length, "known": self.known, "last": self.last}

    @staticmethod
    def restored(values: Mapping[str, Any]) -> Text:
        """Return what `plain` wrote."""
        return Text(values["tokens"], values["length"], tuple(values["known"]), learnt=True, last=values["last"])

    def says(self) -> list[str]:
        """Say what the vocabulary is."""
        made = "all 256 bytes" if self.kind == "byte" else f"{len(self.known)} {self.kind}s of the training rows"
        return [f"text: rows of {self.length} tokens, {made}; vocabulary= and length= change it"]

    def _split(self, text: bytes) -> Any:
        """Return the tokens of a stored text."""
        if self.kind == "byte":
            return bytes(text)
        words = bytes(text).decode("utf-8", "ignore")
        return words if self.kind == "character" else _WORD.findall(words.lower())

    def _ids(self, texts: np.ndarray) -> np.ndarray:
        place = {token: number for number, token in enumerate(self.known, start=2)}
        ids = np.zeros((len(texts), self.length), np.uint8 if self.tokens <= 256 else np.int32)
        part = slice(-self.length, None) if self.last else slice(self.length)
        for row, text in enumerate(texts):
            tokens = self._split(text)[part]
            found: Any = [place.get(token, UNKNOWN) for token in tokens]
            if self.kind == "byte":
                found = np.frombuffer(tokens, np.uint8).astype(np.int32) + 1
            count = len(found)
            if count:
                ids[row, -count:] = found
        return ids


_WORD = re.compile(r"\w+|[^\w\s]")


def stored(texts: Sequence[str]) -> np.ndarray:
    """Return texts as (n,) bytes of UTF-8, without zeros, which NumPy would cut off."""
    return np.array([text.replace("\0", " ").encode("utf-8", "replace")[:_LONGEST] or b" " for text in texts])


def labelled(
    texts: Sequence[str],
    labels: Sequence[Any],
    clients: Sequence[str] | None = None,
    *,
    vocabulary: str = "word",
    length: int = 0,
    test: np.ndarray | None = None,
    name: str = "text",
) -> Source:
    """Return a source of texts and their classes."""
    classes, y = classes_of(labels, "label", name)
    prepare = Text(vocabulary, length or LENGTHS[vocabulary], shrink=not length)
    return _source(stored(texts), classes, y, clients, prepare=prepare, test=test, name=name)


def speeches(
    texts: Sequence[str],
    clients: Sequence[str] | None = None,
    *,
    vocabulary: str = "character",
    length: int = 0,
    stride: int = 1,
    name: str = "text",
) -> Source:
    """Return a source whose rows are the characters before a character, and whose classes are the characters.

    A client's texts are read one after another, a line's end between them; every `stride`-th character is a row. The
    last `TEST_SHARE` of a client's text are test rows: rows drawn at random would be found again inside training rows.
    """
    length = length or LENGTHS[vocabulary]
    held: dict[str, list[str]] = {}
    for text, spoken_by in zip(texts, clients or [""] * len(texts), strict=True):
        held.setdefault(spoken_by, []).append(text)
    rows: list[tuple[str, str, str, bool]] = []
    for owner, spoken in held.items():
        whole = "\n".join(spoken)
        places = range(1, len(whole), stride)
        first = len(places) - round(TEST_SHARE * len(places))
        for number, place in enumerate(places):
            rows.append((whole[max(0, place - length) : place], whole[place], owner, number >= first))
    if not rows:
        raise SourceError(f"{name}: the texts are too short to predict a character; each client needs two or more.")
    before, after, owners, test = zip(*rows, strict=True)
    flags = np.array(test) if any(test) else None
    who = owners if clients is not None else None
    return windows(before, after, who, vocabulary=vocabulary, length=length, test=flags, name=name)


def windows(
    before: Sequence[str],
    after: Sequence[str],
    clients: Sequence[str] | None = None,
    *,
    vocabulary: str = "character",
    length: int,
    test: np.ndarray | None = None,
    name: str = "text",
) -> Source:
    """Return a source of texts and the characters that follow them, of which those that occur are the classes."""
    known, y = named(after)
    if len(known) < 2:
        raise SourceError(f"{name}: every character is {known[0]!r}, but there must be at least 2 different ones.")
    prepare = Text(vocabulary, length, last=True)
    return _source(stored(before), known, y, clients, prepare=prepare, test=test, name=name)


def _source(
    x: np.ndarray, classes: tuple[str, ...], y: np.ndarray, clients: Sequence[str] | None, **more: Any
) -> Source:
    known, owner = ((), None) if clients is None else named(clients)
    return Source(
        x=x, y=y, num_classes=len(classes), client=owner, mean=(0.0,), std=(1.0,), scale=1.0, augment=False,
        classes=classes, client_names=known, **more,
    )  # fmt: skip
