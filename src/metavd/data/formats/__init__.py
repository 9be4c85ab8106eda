"""Datasets in files that people have: each format is found, read, checked and cached in the same way.

`FORMATS` names them; `load(name, root, cache=..., **options)` reads one; `check(path)` says what a path holds;
`fetch(name, root)` downloads one. Every loader returns a `Source` that went through `source.arrays`, and every fault of
a file is a `SourceError` in one sentence with the file and the place.
"""

from .cache import cached
from .celeba import load_celeba
from .check import Finding, Problem, Report, check
from .cifar import load_cifar10, load_cifar100
from .external import from_huggingface, from_torchvision
from .fetch import BY_HAND, REMOTES, Remote, download, fetch
from .files import FileError, Plan
from .folder import load_folder
from .idx import load_emnist, load_fashion_mnist, load_mnist
from .leaf import load_femnist
from .npz import load_npz
from .registry import FORMATS, Info, Option, info, load, options

__all__ = [
    "BY_HAND",
    "FORMATS",
    "REMOTES",
    "FileError",
    "Finding",
    "Info",
    "Option",
    "Plan",
    "Problem",
    "Remote",
    "Report",
    "cached",
    "check",
    "download",
    "fetch",
    "from_huggingface",
    "from_torchvision",
    "info",
    "load",
    "load_celeba",
    "load_cifar10",
    "load_cifar100",
    "load_emnist",
    "load_fashion_mnist",
    "load_femnist",
    "load_folder",
    "load_mnist",
    "load_npz",
    "options",
]
