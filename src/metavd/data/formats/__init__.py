"""Datasets in files that people have: each format is found, read, checked and cached in the same way.

`FORMATS` names them; `load(name, root, cache=..., **options)` reads one; `check(path)` says what a path holds;
`fetch(name, root)` downloads one; `dataset` adds one. Every reader returns a `Source` that went through
`source.arrays`, and every fault of a file is a `SourceError` in one sentence with the file and the place.
"""

from .cache import cached
from .check import Finding, Report, check
from .external import from_huggingface, from_torchvision
from .fetch import BY_HAND, REMOTES, Remote, download, fetch
from .files import FileError, Unread
from .registry import FORMATS, DatasetOption, Info, dataset, info, load, options

__all__ = [
    "BY_HAND", "FORMATS", "REMOTES", "DatasetOption", "FileError", "Finding", "Info", "Remote", "Report", "Unread",
    "cached", "check", "dataset", "download", "fetch", "from_huggingface", "from_torchvision", "info", "load",
    "options",
]  # fmt: skip
