"""What a run is asked to train on: one dataset or several, as one text.

    digits    cifar100:labels=coarse    npz:mine.npz    folder:photos,size=32    celeba+cifar100:labels=coarse+mnist

A text is dataset[+dataset]..., a dataset is NAME[:[PATH][,OPTION=VALUE]...]. A plus sign or a comma inside a path is
part of it unless the name of a dataset, or of an option and an equals sign, follows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import formats
from .domains import federate_domains, reshape
from .formats.cache import Note, log
from .formats.files import Report
from .formats.registry import OWN
from .partition import Federation, PartitionError, federate, leaving_out, some
from .prepare import prepared
from .source import Source, SourceError

CACHE = ".cache"
"""Folder below the data's for copies that load fast."""


class Part(NamedTuple):
    """One dataset of a text."""

    name: str
    path: str
    options: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Collection:
    """Datasets in memory, as a run uses them."""

    name: str
    """As it was asked for."""
    sources: tuple[Source, ...]
    defaults: Mapping[str, Any]
    """Settings that suit it, by the names of the experiment's fields and options."""

    @cached_property
    def fingerprint(self) -> str:
        """Name the content of all sources."""
        return "+".join(source.fingerprint for source in self.sources)


def parse(text: str) -> tuple[Part, ...]:
    """Read a text, without looking at any file.

    >>> parse("celeba:attribute=Male+folder:my+photos,size=32")[1]
    Part(name='folder', path='my+photos', options={'size': 32})
    """
    names = "|".join(sorted((re.escape(name) for name in formats.FORMATS), key=len, reverse=True))
    words = re.split(rf"\+(?=(?:{names})(?:[:+]|$))", text)
    parts = tuple(_part(word) for word in words)
    seen = [part.name for part in parts if part.name not in OWN]
    for name in seen:
        if seen.count(name) > 1:
            raise SourceError(f"The data {text!r} names {name} twice; each dataset may stand once.")
    return parts


def _part(word: str) -> Part:
    name, colon, rest = word.partition(":")
    if name not in formats.FORMATS and ((word and Path(word).is_dir()) or word.endswith(".npz")):
        kind = "npz" if word.endswith(".npz") else "folder"
        raise SourceError(f"There is no dataset {word!r}; for your own files write {kind}:{word}.")
    known = formats.info(name).options
    path, *pairs = re.split(rf"(?:^|,)(?=(?:{'|'.join(known)})=)", rest) if known else [rest]
    if name in OWN and not path:
        raise SourceError(f"The data {word!r} names no path; write {name}:PATH.")
    if name not in OWN and (path or (colon and not pairs)):
        takes = f"it takes {' or '.join(f'{key}=VALUE' for key in known)}" if known else "it takes none"
        raise SourceError(f"The data {word!r} gives {name} {path or 'nothing'!r} for an option, but {takes}.")
    return Part(name, path, formats.options(name, dict(pair.split("=", 1) for pair in pairs)))


def find(text: str, root: Path | str = "data") -> list[formats.Unread]:
    """Find the files of a text's datasets without reading them: your own at their paths, the others below `root`."""
    found = []
    for name, path, options in parse(text):
        place = Path(path or root).expanduser()
        if not path and formats.info(name).files and not place.exists():
            fetch = f", or get them with metavd data fetch {name}" if name in formats.REMOTES else ""
            raise SourceError(
                f"{name} is looked for below {place}, but there is no such folder; "
                f"say where its files are with --root DIR or METAVD_DATA{fetch}."
            )
        found.append(formats.info(name).find(place, **options))
    return found


def load(text: str, root: Path | str = "data", note: Note = log, *, image_size: int = 0) -> Collection:
    """Return the datasets of a text, see `find`.

    Larger pictures of one dataset are brought to `image_size` here, so that the copy that is kept is small too.
    """
    found = find(text, root)
    if image_size and len(found) == 1 and found[0].keep:
        found = [_shrunk(found[0], image_size)]
    sources = [formats.cached(unread, Path(root).expanduser() / CACHE, note) for unread in found]
    return Collection(text, tuple(_told_apart(sources)), _settings_of_all(sources, [part.name for part in parse(text)]))


def _shrunk(unread: formats.Unread, side: int) -> formats.Unread:
    """Return a dataset whose pictures are brought down to so many pixels a side before they are kept."""

    def read(report: Report) -> Source:
        found = unread.read(report)
        small = found.x.ndim != 4 or max(found.x.shape[2:]) <= max(side, _SMALL)
        return found if small else reshape(found, side)

    return replace(unread, read=read, options={**unread.options, "image_size": side})


_SMALL = 64
"""Pixels a side up to which pictures are kept as they are, and resized when they are dealt."""


def collect(own: Source | Sequence[Source] | Collection) -> Collection:
    """Return a user's own dataset or datasets as a collection."""
    if isinstance(own, Collection):
        return own
    sources = [own] if isinstance(own, Source) else list(own)
    if not sources:
        raise SourceError("No dataset was given; give at least one.")
    return Collection("+".join(source.name for source in sources), tuple(sources), _settings_of_all(sources))


def deal(
    data: Collection,
    *,
    kind: str = "mixed",
    image_size: int = 0,
    channels: int = 0,
    **settings: Any,
) -> Federation:
    """Decide who holds which row; see `partition.federate` and, for several datasets, `domains.federate_domains`."""
    if len(data.sources) > 1:
        if isinstance(settings.get("unseen"), str):
            raise PartitionError(
                f"unseen is {settings['unseen']!r}, but clients of several datasets have no names; give a number."
            )
        return federate_domains(data.sources, kind=kind, size=image_size, channels=channels, **settings)
    source = reshape(data.sources[0], image_size, channels)
    return prepared(federate(source, **settings))


# Settings that suit


def suggest(source: Source) -> dict[str, Any]:
    """Return settings for a dataset that nobody has chosen any for.

    Its own clients if it has some, a fifth of them unseen, and of few of them at least one, who then all take part in
    every round; else as many as leaves each about 50 rows, at most 25.
    """
    train = len(source.y) if source.test is None else int((~source.test).sum())
    if source.client is not None:
        owners = min(int((np.unique(source.client, return_counts=True)[1] > 1).sum()), 130)
    else:
        owners = min(max(train // 50, 2), 25)
    own = {} if source.client is None else {"owners": owners}
    unseen = owners // 5
    if own and owners >= 3:
        unseen = max(unseen, 1)
    clients = max(owners - unseen, 1)
    return {
        "clients": clients,
        "unseen": unseen,
        "cohort": _cohort(clients, few=bool(own)),
        **own,
        "partition": "dirichlet:0.5" if source.client is None else "natural",
        "test_rows": "consistent",
        "rounds": 100,
        "batch": 32,
        "model": "auto",
    }


FEW = 10
"""Clients by nature up to which all take part in every round."""


def _cohort(clients: int, *, few: bool) -> int:
    return clients if few and clients <= FEW else max(min(clients, 2), clients // 8)


def settled(data: Collection, *, clients: int, unseen: float | str, partition: str) -> dict[str, Any]:
    """Return the settings that suit the data beside those that somebody chose; `clients` 0 and `unseen` -1 are open.

    Where clients are the data's own, those who are left out are some of them, not some more.
    """
    suits = dict(data.defaults)
    owners = suits.get("owners", 0)
    if not owners or (partition or suits["partition"]) != "natural":
        return suits
    chosen = clients > 0
    if isinstance(unseen, str):
        away = len(leaving_out(unseen, data.sources[0] if len(data.sources) == 1 else None))
    elif 0 < unseen < 1:
        away = 0 if chosen else max(round(unseen * owners), 1)
    else:
        away = int(unseen) if unseen >= 0 else min(suits["unseen"], max(owners - clients, 0))
    if not chosen:
        clients = max(owners - away, 1)
    return suits | {"clients": clients, "unseen": away, "cohort": _cohort(clients, few=True)}


def told(data: Collection, federation: Federation) -> list[str]:
    """Say what was learnt of the rows, and who takes part where clients are the data's own and few enough to name."""
    known, new = federation.num_clients, federation.num_unseen
    source = federation.source
    learnt = [] if source.prepare is None else source.prepare.says()
    if source.tokens and source.prepare is None:
        learnt.append(f"rows hold integers: {source.tokens} token ids, kept as they are (kind=numbers: features)")
    if "owners" not in data.defaults or not federation.names or len(federation.names) > SHOWN:
        return learnt
    away = federation.names[known : known + new]
    never = f"{some(away, SHOWN)} {'is' if new == 1 else 'are'} left out of training and only tested" if new else ""
    left = never or "nobody is left out (unseen=NAME leaves a client out)"
    return [f"clients: {some(federation.names[:known], SHOWN)}; {left}", *learnt]


SHOWN = 30
"""Clients up to which tables, figures and sentences name them."""


def _suits(source: Source, name: str | None) -> dict[str, Any]:
    known = formats.info(name).defaults if name else {}
    if known.get("partition") == "natural" and source.client is None:  # MNIST without its list of writers
        return {**known, "partition": "dirichlet:0.5"}
    return dict(known) or suggest(source)


def _settings_of_all(sources: Sequence[Source], names: Sequence[str | None] | None = None) -> dict[str, Any]:
    """Settings for all at once: the first one's, no more clients than each can give."""
    each = [_suits(source, name) for source, name in zip(sources, names or (None,) * len(sources), strict=True)]
    if len(each) == 1:
        return each[0]
    dealt = [settings["partition"] for settings in each if settings["partition"] != "natural"]
    fewest = {key: min(settings[key] for settings in each) for key in ("clients", "unseen", "cohort")}
    most = {"rounds": max(settings["rounds"] for settings in each)}
    return {**each[0], **fewest, **most, "partition": dealt[0] if dealt else "natural", "model": "auto"}


def _told_apart(sources: Sequence[Source]) -> list[Source]:
    """Number the names of your own files where two are called alike."""
    names = [source.name for source in sources]
    return [
        replace(source, name=f"{source.name}-{index}") if names.count(source.name) > 1 else source
        for index, source in enumerate(sources)
    ]
