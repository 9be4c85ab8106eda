"""Every dataset that can be asked for by name: how to find its files, its options, and settings that suit it.

A dataset is one function that finds its files and returns an `Unread`, in one of the modules that `FORMATS` names; or
one in a file of your own, which a package names in the entry-point group `metavd.datasets`:

    @dataset("mine", "my measurements, 4 classes", options={"year": "which of them"})
    def find_mine(root, *, year: int = 2024) -> Unread: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...registry import Registry
from ...schema import nearest
from ..source import Source, SourceError
from .cache import Note, cached, log
from .files import Unread

Finder = TypeVar("Finder", bound=Callable[..., Unread])


@dataclass(frozen=True)
class DatasetOption:
    """One option of a dataset."""

    default: Any
    help: str
    parse: Callable[[str], Any]
    """From the text of a command line."""


@dataclass(frozen=True)
class Info:
    """A dataset or a format that can be asked for by name."""

    name: str
    description: str
    find: Callable[..., Unread]
    """Finds the files below a folder (of a user's own files: at a path) without reading them."""
    options: Mapping[str, DatasetOption]
    defaults: dict[str, Any]
    """Experiment settings that suit the dataset, by name; empty where they depend on what the files hold."""
    variants: tuple[dict[str, Any], ...] = ({},)
    """Options under which `check` looks for it; the first that finds something is enough."""
    files: bool = True
    """Whether there are files to look for."""


OWN = ("npz", "folder", "table", "text")
"""Formats of a user's own files: they need a path, and nothing is known of their content beforehand."""

_FAMILIES = ("digits", "cifar", "leaf_text", "leaf", "celeba", "idx", "npz", "folder", "table", "text")
FORMATS: Registry[Info] = Registry("metavd.datasets", [f"{__package__}.{family}" for family in _FAMILIES])

PHOTOS = {"clients": 100, "unseen": 30, "cohort": 10, "partition": "dirichlet:0.5", "test_rows": "independent",
          "rounds": 1000, "batch": 64, "model": "cnn"}  # fmt: skip
WRITERS = {**PHOTOS, "clients": 160, "unseen": 40, "cohort": 20, "partition": "natural"}


_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def dataset(
    name: str,
    description: str,
    *,
    options: Mapping[str, str | tuple[str, Callable[[str], Any]]] | None = None,
    defaults: Mapping[str, Any] | None = None,
    variants: tuple[dict[str, Any], ...] = ({},),
    files: bool = True,
) -> Callable[[Finder], Finder]:
    """Add the decorated function to the datasets; its keyword arguments are the options.

    `options` says what each of them means and, where its default's type does not say, how its text is read. The rest is
    described in `Info`.
    """

    def add(find: Finder) -> Finder:
        known = {}
        for key, told in (options or {}).items():
            default = inspect.signature(find).parameters[key].default
            kinds: dict[type, Callable[[str], Any]] = {bool: lambda text: _TRUTHS[text.lower()], int: int}
            by_type = kinds.get(type(default), str)
            text, parse = (told, by_type) if isinstance(told, str) else told
            known[key] = DatasetOption(default, text, parse)
        FORMATS.add(name, Info(name, description, find, known, dict(defaults or {}), variants, files), find.__module__)
        return find

    return add


def info(name: str) -> Info:
    """Return what is known of a format, before anything is read."""
    if name in FORMATS:
        return FORMATS[name]
    raise SourceError(
        "; ".join([f"There is no dataset {name!r}", nearest(str(name), sorted(FORMATS)), *FORMATS.broken])
    )


def options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a loader's options, checked by name and read from text where they are text."""
    known = info(name).options
    result = {}
    for key, value in given.items():
        if key not in known:
            raise SourceError(f"{name} has no option {key!r}; {nearest(key, known) if known else 'it takes none.'}")
        try:
            result[key] = known[key].parse(value) if isinstance(value, str) else value
        except (ValueError, KeyError):
            raise SourceError(f"{name}: {key} is {value!r}, but it must be: {known[key].help}.") from None
    return result


def load(name: str, root: Path | str = ".", /, *, cache: Path | None = None, note: Note = log, **given: Any) -> Source:
    """Return the dataset of that name from the files below root (for npz and folder: at root).

    Args:
        name: in `FORMATS`.
        root: the folder that holds the files as their authors name them, one of their folders, or their archive.
        cache: folder for the cached copy; None reads the files.
        note: told why a copy could not be kept.
        given: the dataset's options; `metavd datasets` lists them.
    """
    return cached(info(name).find(root, **options(name, given)), cache, note)
