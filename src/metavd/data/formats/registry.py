"""Every dataset that can be asked for by name: how to find its files, its options, and settings that suit it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..source import Source, SourceError, digits
from .cache import Note, cached, log
from .celeba import LAYOUTS, plan_celeba
from .cifar import plan_cifar10, plan_cifar100
from .files import Plan
from .folder import plan_folder
from .idx import SPLITS, WRITERS, plan_emnist, plan_fashion_mnist, plan_mnist
from .leaf import plan_femnist
from .npz import CHANNELS, plan_npz


@dataclass(frozen=True)
class Option:
    """One option of a loader."""

    default: Any
    help: str
    parse: Callable[[str], Any] = str
    """From the text of a command line."""


@dataclass(frozen=True)
class Info:
    """A dataset or a format that can be asked for by name."""

    name: str
    description: str
    plan: Callable[..., Plan]
    """Finds the files below a folder (for npz and folder: at a path) without reading them."""
    options: Mapping[str, Option]
    defaults: dict[str, Any]
    """Experiment settings that suit the dataset, by name; empty where they depend on what the files hold."""
    variants: tuple[dict[str, Any], ...] = ({},)
    """Options under which `check` looks for it; the first that finds something is enough."""
    files: bool = True
    """Whether there are files to look for."""


OWN = ("npz", "folder")
"""Formats of a user's own files: they need a path, and nothing is known of their content beforehand."""


def _flag(text: str) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


def _size(text: str) -> int | tuple[int, int] | None:
    """Read 32, 64x48 (height x width) or none.

    >>> _size("64x48")
    (64, 48)
    """
    if text.lower() == "none":
        return None
    height, cross, width = text.lower().partition("x")
    return (int(height), int(width)) if cross else int(height)


def _maybe(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


_SUBSET = Option(False, "accept another number of records than the official one", _flag)
_SIZE = "side of the square images in pixels, HEIGHTxWIDTH, or none to keep them as they are"
_PHOTOS = {"clients": 100, "unseen": 30, "cohort": 10, "partition": "dirichlet:0.5", "test_rows": "independent",
           "rounds": 1000, "batch": 64, "model": "cnn"}  # fmt: skip
_WRITERS = {**_PHOTOS, "clients": 160, "unseen": 40, "cohort": 20, "partition": "natural"}
_DIGITS = {"clients": 24, "unseen": 6, "cohort": 6, "partition": "dirichlet:0.5", "test_rows": "consistent",
           "rounds": 60, "batch": 32, "drop_from": 30, "model": "mlp"}  # fmt: skip
_AUGMENT = Option(False, "whether crops and flips leave the label as it is", _flag)


def _plan_digits(root: Path | str) -> Plan:
    return Plan("digits", Path(root), (), lambda _: digits())


FORMATS: dict[str, Info] = {
    info.name: info
    for info in (
        Info(
            "digits",
            "1,797 handwritten digits, 8 x 8 pixels, 10 classes; part of the installation, no download",
            _plan_digits,
            {},
            dict(_DIGITS),
            files=False,
        ),
        Info(
            "cifar10",
            "60,000 photographs, 32 x 32 pixels, 10 classes; binary or python version, folder or archive",
            plan_cifar10,
            {"subset": _SUBSET},
            dict(_PHOTOS),
        ),
        Info(
            "cifar100",
            "60,000 photographs, 32 x 32 pixels, 100 classes; binary or python version, folder or archive",
            plan_cifar100,
            {"labels": Option("fine", "fine (100 classes) or coarse (20)"), "subset": _SUBSET},
            dict(_PHOTOS),
        ),
        Info(
            "femnist",
            "handwriting of 3,550 writers, 28 x 28 pixels, 62 classes; LEAF's JSON shards",
            plan_femnist,
            {"split": Option(False, "read LEAF's own train/ and test/ even beside all_data/", _flag)},
            dict(_WRITERS),
        ),
        Info(
            "celeba",
            "faces of celebrities, an attribute as label; original layout, LEAF's lists or celeba32.npz",
            plan_celeba,
            {
                "attribute": Option("Smiling", "which of the 40 attributes is the label"),
                "size": Option(32, _SIZE, _size),
                "least": Option(5, "celebrities with fewer images are left out", int),
                "layout": Option("auto", " or ".join(LAYOUTS)),
            },
            {**_PHOTOS, "partition": "natural"},
            ({"least": 1},),
        ),
        Info(
            "mnist",
            "70,000 handwritten digits, 28 x 28 pixels; idx files with QMNIST's writers, or mnist_by_writer.npz",
            plan_mnist,
            {"writers": Option("auto", " or ".join(WRITERS))},
            dict(_WRITERS),
        ),
        Info(
            "fashion-mnist",
            "70,000 articles of clothing, 28 x 28 pixels, 10 classes; idx files",
            plan_fashion_mnist,
            {},
            dict(_PHOTOS),
        ),
        Info(
            "emnist",
            "handwritten letters and digits, 28 x 28 pixels, 10 to 62 classes by split; idx files or NIST's gzip.zip",
            plan_emnist,
            {
                "split": Option("byclass", " or ".join(SPLITS)),
                "upright": Option(True, "turn the images, which NIST stores transposed", _flag),
            },
            dict(_PHOTOS),
            tuple({"split": split} for split in SPLITS),
        ),
        Info(
            "npz",
            "your own arrays: images or features, label, and perhaps client and split, in one .npz",
            plan_npz,
            {
                "channels": Option("auto", " or ".join(CHANNELS)),
                "name": Option(None, "what the dataset is called; the file's name if not given"),
                "augment": _AUGMENT,
            },
            {},
        ),
        Info(
            "folder",
            "your own pictures: class/picture or client/class/picture, perhaps below train/ and test/",
            plan_folder,
            {
                "size": Option(None, _SIZE, _size),
                "channels": Option(None, "1 for grey, 3 for colour, none to see which", _maybe),
                "name": Option(None, "what the dataset is called; the folder's name if not given"),
                "augment": _AUGMENT,
            },
            {},
        ),
    )
}


def info(name: str) -> Info:
    """Return what is known of a format, before anything is read."""
    if name not in FORMATS:
        close = difflib.get_close_matches(str(name).lower(), FORMATS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(sorted(FORMATS))}."
        raise SourceError(f"There is no dataset {name!r}; {hint}")
    return FORMATS[name]


def options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a loader's options, checked by name and read from text where they are text."""
    known = info(name).options
    result = {}
    for key, value in given.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.4) or sorted(known)
            takes = f"did you mean {close[0]}" if len(close) == 1 else f"it takes {' or '.join(close) or 'none'}"
            raise SourceError(f"{name} has no option {key!r}; {takes}.")
        option = known[key]
        try:
            result[key] = option.parse(value) if isinstance(value, str) else value
        except ValueError:
            raise SourceError(f"{name}: {key} is {value!r}, but it must be: {option.help}.") from None
    return result


def load(name: str, root: Path | str = ".", *, cache: Path | None = None, note: Note = log, **given: Any) -> Source:
    """Return the dataset of that name from the files below root (for npz and folder: at root)."""
    return cached(info(name).plan(root, **options(name, given)), cache, note)
