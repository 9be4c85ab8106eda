"""LEAF's texts: Shakespeare, whose next characters are predicted, and Sent140's tweets with their moods.

    shakespeare    {"x": ["eighty characters before ...", ...], "y": ["t", ...]}
    sent140        {"x": [["4", "date", "NO_QUERY", "user", "the tweet", ...], ...], "y": [1, ...]}

Users are clients and keep their names. Where LEAF was not asked to split, the last fifth of a role's characters is for
testing: rows overlap, so that rows drawn at random would be found again inside training rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..source import Source, SourceError
from ..text import TEST_SHARE, VOCABULARIES, labelled, windows
from .files import MIB, Report, Unread, choice, open_stream, refuse
from .leaf import SPEECH, SPLIT, TWEET, Shards, Users, need_shards, read_shards
from .registry import dataset

_MOODS = {0: "negative", 1: "positive", 4: "positive"}


@dataset("shakespeare", "speeches by role, the next of 80 characters; LEAF's JSON shards", options=SPLIT)
def find_shakespeare(root: Path | str, *, split: bool = False) -> Unread:
    """Find Shakespeare's shards."""
    return _found("shakespeare", root, split, SPEECH, _speeches)


@dataset(
    "sent140",
    "tweets by user, negative or positive; LEAF's JSON shards",
    options={
        **SPLIT,
        "vocabulary": " or ".join(VOCABULARIES),
        "length": "tokens of a row; 0: as many as the longest tweet, at most 64 words",
    },
)
def find_sent140(root: Path | str, *, split: bool = False, vocabulary: str = "word", length: int = 0) -> Unread:
    """Find Sent140's shards."""
    choice("vocabulary", vocabulary, VOCABULARIES)

    def made(users: Users) -> Source:
        for path, user in users.rows:
            odd = set(user.y.tolist()) - set(_MOODS)
            refuse(odd, path, f"user {user.name!r} has label {min(odd, default=0)}, but moods are 0, and 1 or 4.")
        texts = [text for _, user in users.rows for text in user.x]
        moods = [_MOODS[label] for label in users.labels().tolist()]
        return labelled(
            texts, moods, users.names(), vocabulary=vocabulary, length=length, test=users.test, name="sent140"
        )

    return _found("sent140", root, split, TWEET, made)


def _found(name: str, root: Path | str, split: bool, kind: str, made: Callable[[Users], Source]) -> Unread:
    shards = need_shards(root, name, split)
    if _looks(shards) != kind:
        raise SourceError(f"{shards.folder}: these LEAF shards hold other rows than those of {name}.")

    def read(report: Report) -> Source:
        users = read_shards(shards, report)
        path, user = users.rows[0]
        refuse(user.kind != kind, path, f"user {user.name!r} has {user.kind}, but {name} has {kind}.")
        return made(users)

    return Unread(name, shards.folder, shards.files, read, keep=False)


def _looks(shards: Shards) -> str | None:
    """Return what the first row of the first shard is, by its beginning; None if it is no text."""
    with open_stream(shards.files[0]) as stream:
        found = re.search(rb'"x"\s*:\s*\[\s*(\[\s*"|"[^"]*")', stream.read(MIB))
    if found is None or re.search(rb"\.\w{3,4}\"$", found[1]):  # pixels, or the name of a picture
        return None
    return TWEET if found[1].startswith(b"[") else SPEECH


def _speeches(users: Users) -> Source:
    before = [text for _, user in users.rows for text in user.x]
    after = [letter for _, user in users.rows for letter in user.y.tolist()]
    test = users.test
    if test is None:
        counts = [len(user.y) for _, user in users.rows]
        test = np.concatenate([np.arange(count) >= count - round(TEST_SHARE * count) for count in counts])
    return windows(before, after, users.names(), length=max(map(len, before)), test=test, name="shakespeare")
