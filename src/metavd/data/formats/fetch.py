"""Downloads from the official places, with sizes and checksums.

Sizes and checksums are those that others have published (the authors' MD5 for CIFAR and what torchvision, TensorFlow
Datasets and Keras check); none was made up here, and a file of which only one is known is checked by that one. A file
is downloaded under another name and renamed once it is proven right. Nothing is unpacked: readers read the archives.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from ...schema import nearest
from ..source import SourceError
from .files import plain

Progress = Callable[[str, int, int | None], None]
"""(file, bytes so far, bytes in all if known), called now and then."""

_CHUNK = 1 << 20
_LARGEST = 1 << 30
TIMEOUT = 30.0


@dataclass(frozen=True)
class Remote:
    """A file, where it can be had, and how to know that it is the right one."""

    path: str
    """Where it goes, below the data folder."""
    urls: tuple[str, ...]
    size: int | None
    checksum: str
    """SHA-256, or MD5 where nobody has published that."""


def _files(folder: str, places: tuple[str, ...], *files: tuple[str, int | None, str]) -> tuple[Remote, ...]:
    return tuple(
        Remote(folder + name, tuple(place + name for place in places), size, checksum) for name, size, checksum in files
    )


_CIFAR = ("https://www.cs.toronto.edu/~kriz/",)
_MNIST = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
_FASHION = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)
_QMNIST = ("https://raw.githubusercontent.com/facebookresearch/qmnist/master/",)

# SHA-256 of CIFAR's binary versions: TensorFlow Datasets; of its python versions: Keras. MNIST, Fashion-MNIST and
# EMNIST: TensorFlow Datasets. QMNIST: torchvision's MD5.
REMOTES: dict[str, tuple[Remote, ...]] = {
    "cifar10": _files("", _CIFAR, (
        "cifar-10-binary.tar.gz", 170_052_171, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd")),
    "cifar10-python": _files("", _CIFAR, (
        "cifar-10-python.tar.gz", 170_498_071, "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce")),
    "cifar100": _files("", _CIFAR, (
        "cifar-100-binary.tar.gz", 168_513_733, "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec")),
    "cifar100-python": _files("", _CIFAR, (
        "cifar-100-python.tar.gz", 169_001_437, "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7")),
    "mnist": _files(
        "MNIST/raw/", _MNIST,
        ("train-images-idx3-ubyte.gz", 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        ("train-labels-idx1-ubyte.gz", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        ("t10k-images-idx3-ubyte.gz", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        ("t10k-labels-idx1-ubyte.gz", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ) + _files(
        "MNIST/raw/", _QMNIST,
        ("qmnist-train-labels-idx2-int.gz", None, "0058f8dd561b90ffdd0f734c6a30e5e4"),
        ("qmnist-test-labels-idx2-int.gz", None, "5b5b05890a5e13444e108efe57b788aa"),
    ),
    "fashion-mnist": _files(
        "FashionMNIST/raw/", _FASHION,
        ("train-images-idx3-ubyte.gz", 26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        ("train-labels-idx1-ubyte.gz", 29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        ("t10k-images-idx3-ubyte.gz", 4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        ("t10k-labels-idx1-ubyte.gz", 5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    ),
    "emnist": _files("EMNIST/raw/", ("https://biometrics.nist.gov/cs_links/EMNIST/",), (
        "gzip.zip", 561_753_746, "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e")),
}  # fmt: skip

BY_HAND = {
    "celeba": "CelebA is given to those who accept its terms: get img_align_celeba, identity_CelebA.txt and "
    "list_attr_celeba.txt from https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html and put them into celeba/.",
    "femnist": "FEMNIST is made by LEAF from NIST's forms: run data/femnist/preprocess.sh of "
    "https://github.com/TalwalkarLab/leaf and put its all_data/ into femnist/.",
}


def fetch(name: str, root: Path | str, *, progress: Progress | None = None) -> list[Path]:
    """Download a dataset's files into root and return their paths; files that are there and right are left alone."""
    if name in BY_HAND:
        raise SourceError(BY_HAND[name])
    if name not in REMOTES:
        raise SourceError(f"There is nothing to fetch for {name!r}; {nearest(name, sorted(REMOTES))}")
    return [download(remote, Path(root), progress=progress) for remote in REMOTES[name]]


def download(remote: Remote, root: Path, *, progress: Progress | None = None, timeout: float = TIMEOUT) -> Path:
    """Download one file from the first place that delivers it, and return its path once it is proven right."""
    target = root / remote.path
    if target.exists():
        if wrong := _wrong(remote, target):
            raise SourceError(f"{target} {wrong}; remove it and fetch it again.")
        return target
    part = target.with_name(f"{target.name}.{os.getpid()}.part")  # two processes do not write into one file
    faults = []
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if remote.size is not None and free < remote.size:
            raise OSError(f"{free} bytes free, but {remote.size} are needed")
        for url in remote.urls:
            try:
                with part.open("wb") as file:
                    _transfer(url, remote, file, progress, timeout)
                    os.fsync(file.fileno())
            except _UnreachableError as fault:
                faults.append(f"{urlsplit(url).netloc} {fault}")
            else:
                if wrong := _wrong(remote, part):
                    raise SourceError(f"The download of {remote.path} {wrong}; it was removed, fetch it again.")
                part.replace(target)
                return target
    except OSError as error:
        raise SourceError(
            f"{target} cannot be written ({plain(error)}); free space or choose another folder."
        ) from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    raise SourceError(
        f"{target.name} could not be fetched: {'; '.join(faults)}; without a network, download {remote.urls[0]} "
        f"elsewhere and put it at {remote.path} in the data folder."
    )


class _UnreachableError(Exception):
    """Why one place did not deliver; a fault of the network must not look like one of the disk."""


def _transfer(url: str, remote: Remote, file: BinaryIO, progress: Progress | None, timeout: float) -> None:
    # They bring TLS and the email package with them, which nobody needs who only reads data.
    import http.client  # noqa: PLC0415
    import urllib.error  # noqa: PLC0415
    import urllib.request  # noqa: PLC0415

    @contextlib.contextmanager
    def network(verb: str) -> Iterator[None]:
        try:
            yield
        except urllib.error.HTTPError as error:
            error.close()
            raise _UnreachableError(f"answered {error.code} {plain(str(error.reason))}") from None
        except (http.client.HTTPException, OSError) as error:
            raise _UnreachableError(f"{verb} ({plain(getattr(error, 'reason', error))})") from None

    request = urllib.request.Request(url, headers={"User-Agent": "metavd", "Accept-Encoding": "identity"})
    with network("cannot be reached"):
        answer = urllib.request.urlopen(request, timeout=timeout)
    with answer:
        length = answer.headers.get("Content-Length") or ""
        wanted, have = int(length) if length.isdecimal() else remote.size, 0
        if remote.size not in (None, wanted):
            what = f"{url} offers {wanted} bytes, but {remote.path} has {remote.size}"
            raise SourceError(f"{what}; the official file has changed or something stands between.")
        while True:
            with network("broke off"):
                piece = answer.read(_CHUNK)
            if not piece:
                break
            have += len(piece)
            if have > (wanted or _LARGEST):
                what = f"{url} sends more than the {wanted or _LARGEST} bytes of {remote.path}"
                raise SourceError(f"{what}; it is not the file.")
            file.write(piece)
            if progress is not None:
                progress(remote.path, have, wanted)
    if wanted is not None and have < wanted:
        raise _UnreachableError(f"broke off after {have} of {wanted} bytes")


def _wrong(remote: Remote, path: Path) -> str | None:
    """Say how a file differs from the right one, or return None."""
    size = path.stat().st_size
    if remote.size not in (None, size):
        return f"has {size} bytes, but it must have {remote.size}"
    kind = "md5" if len(remote.checksum) == 32 else "sha256"
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()
    return None if found == remote.checksum else f"has {kind} {found}, but it must be {remote.checksum}"
