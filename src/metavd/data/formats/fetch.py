"""Downloads from the official places, with sizes and checksums.

Sizes and checksums are those that others have published (the authors' MD5 for CIFAR and what torchvision, TensorFlow
Datasets and Keras check); none was made up here, and a file of which only one is known is checked by that one. A
download that breaks off is kept as NAME.part and goes on from there the next time. Nothing is unpacked: the loaders
read the archives.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from ..source import SourceError
from .files import plain

Progress = Callable[[str, int, int | None], None]
"""(file, bytes so far, bytes in all if known), called now and then."""

_CHUNK = 1 << 20
TIMEOUT = 30.0


@dataclass(frozen=True)
class Remote:
    """A file, where it can be had, and how to know that it is the right one."""

    path: str
    """Where it goes, below the data folder."""
    urls: tuple[str, ...]
    size: int | None = None
    md5: str | None = None
    sha256: str | None = None


_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_MNIST = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
_FASHION = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)
_QMNIST = ("https://raw.githubusercontent.com/facebookresearch/qmnist/master/",)
_EMNIST = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"


def _at(folder: str, places: tuple[str, ...], name: str, *proof: Any) -> Remote:
    return Remote(folder + name, tuple(place + name for place in places), *proof)


# MD5 of CIFAR: the authors' page. SHA-256 of the binary versions: TensorFlow Datasets; of the python versions: Keras.
# MNIST, Fashion-MNIST and EMNIST: MD5 from torchvision, size and SHA-256 from TensorFlow Datasets. QMNIST: torchvision.
REMOTES: dict[str, tuple[Remote, ...]] = {
    "cifar10": (
        _at("", (_CIFAR,), "cifar-10-binary.tar.gz", 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530",
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),
    ),
    "cifar10-python": (
        _at("", (_CIFAR,), "cifar-10-python.tar.gz", 170_498_071, "c58f30108f718f92721af3b95e74349a",
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"),
    ),
    "cifar100": (
        _at("", (_CIFAR,), "cifar-100-binary.tar.gz", 168_513_733, "03b5dce01913d631647c71ecec9e9cb8",
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"),
    ),
    "cifar100-python": (
        _at("", (_CIFAR,), "cifar-100-python.tar.gz", 169_001_437, "eb9058c3a382ffc7106e4002c42a8d85",
            "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"),
    ),
    "mnist": (
        _at("MNIST/raw/", _MNIST, "train-images-idx3-ubyte.gz", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        _at("MNIST/raw/", _MNIST, "train-labels-idx1-ubyte.gz", 28_881, "d53e105ee54ea40749a09fcbcd1e9432",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        _at("MNIST/raw/", _MNIST, "t10k-images-idx3-ubyte.gz", 1_648_877, "9fb629c4189551a2d022fa330f9573f3",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        _at("MNIST/raw/", _MNIST, "t10k-labels-idx1-ubyte.gz", 4_542, "ec29112dd5afa0611ce80d1b7f02629c",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        _at("MNIST/raw/", _QMNIST, "qmnist-train-labels-idx2-int.gz", None, "0058f8dd561b90ffdd0f734c6a30e5e4", None),
        _at("MNIST/raw/", _QMNIST, "qmnist-test-labels-idx2-int.gz", None, "5b5b05890a5e13444e108efe57b788aa", None),
    ),
    "fashion-mnist": (
        _at("FashionMNIST/raw/", _FASHION, "train-images-idx3-ubyte.gz", 26_421_880,
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d", "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        _at("FashionMNIST/raw/", _FASHION, "train-labels-idx1-ubyte.gz", 29_515,
            "25c81989df183df01b3e8a0aad5dffbe", "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        _at("FashionMNIST/raw/", _FASHION, "t10k-images-idx3-ubyte.gz", 4_422_102,
            "bef4ecab320f06d8554ea6380940ec79", "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        _at("FashionMNIST/raw/", _FASHION, "t10k-labels-idx1-ubyte.gz", 5_148,
            "bb300cfdad3c16e7a12a480ee83cd310", "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    ),
    "emnist": (
        Remote("EMNIST/raw/gzip.zip", (_EMNIST,), 561_753_746, "58c8d27c78d21e728a6bc7b3cc06412e",
               "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e"),
    ),
}  # fmt: skip

BY_HAND = {
    "celeba": "CelebA is given to those who accept its terms: get img_align_celeba, identity_CelebA.txt and "
    "list_attr_celeba.txt from https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html and put them into celeba/.",
    "femnist": "FEMNIST is made by LEAF from NIST's forms: run data/femnist/preprocess.sh of "
    "https://github.com/TalwalkarLab/leaf and put its all_data/ into femnist/.",
}


def fetch(name: str, root: Path | str, *, progress: Progress | None = None, timeout: float = TIMEOUT) -> list[Path]:
    """Download a dataset's files into root and return their paths; files that are there and right are left alone."""
    if name in BY_HAND:
        raise SourceError(BY_HAND[name])
    if name not in REMOTES:
        raise SourceError(f"There is nothing to fetch for {name!r}; known are {', '.join(sorted(REMOTES))}.")
    return [download(remote, Path(root), progress=progress, timeout=timeout) for remote in REMOTES[name]]


def download(remote: Remote, root: Path, *, progress: Progress | None = None, timeout: float = TIMEOUT) -> Path:
    """Download one file, from where an earlier try broke off, and return its path once it is proven right."""
    target = root / remote.path
    if target.exists():
        _verify(remote, target, keep=True)
        return target
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_space(remote, part)
        with _alone(part) as file:
            _transfer(remote, file, progress, timeout)
            file.flush()
            os.fsync(file.fileno())
        _verify(remote, part, keep=False)
        part.replace(target)
    except OSError as error:
        raise SourceError(
            f"{target} cannot be written ({plain(error)}); free space or choose another folder."
        ) from None
    return target


def _check_space(remote: Remote, part: Path) -> None:
    have = part.stat().st_size if part.exists() else 0
    free = shutil.disk_usage(part.parent).free
    if remote.size is not None and free < remote.size - have:
        raise SourceError(
            f"{part.parent} has {free} bytes free, but {remote.size - have} are needed; free space or choose another "
            "folder."
        )


@contextlib.contextmanager
def _alone(part: Path) -> Iterator[BinaryIO]:
    """Open the partial file, for this process alone: two that append to it would ruin it."""
    with part.open("ab") as file:
        try:
            import fcntl  # noqa: PLC0415 (not on Windows, where a second writer cannot open the file at all)

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass
        except OSError:
            raise SourceError(f"{part} is being downloaded by another process; wait for it.") from None
        try:
            yield file
        finally:
            if os.fstat(file.fileno()).st_size == 0:  # nothing to go on from
                part.unlink()


def _transfer(remote: Remote, file: BinaryIO, progress: Progress | None, timeout: float) -> None:
    faults = []
    for url in remote.urls:
        try:
            _from(url, remote, file, progress, timeout)
            return
        except _UnreachableError as fault:
            faults.append(str(fault))
    have = os.fstat(file.fileno()).st_size
    kept = f" ({have} bytes are kept and the next try goes on from there)" if have else ""
    raise SourceError(
        f"{Path(remote.path).name} could not be fetched: {'; '.join(faults)}{kept}; without a network, download "
        f"{remote.urls[0]} elsewhere and put it at {remote.path} in the data folder."
    )


class _UnreachableError(Exception):
    """Why one place did not deliver."""


def _from(url: str, remote: Remote, file: BinaryIO, progress: Progress | None, timeout: float) -> None:
    host = urlsplit(url).netloc
    have = file.seek(0, os.SEEK_END)
    if remote.size is not None and have > remote.size:  # not a part of this file
        have = _restart(file)
    if remote.size is not None and have == remote.size:
        return
    headers = {"User-Agent": "metavd", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout) as answer:
            have = _begin(answer, have, file)
            total = _total(answer, have)
            if total is not None and remote.size is not None and total != remote.size:
                raise SourceError(
                    f"{url} offers {total} bytes, but {remote.path} has {remote.size}; the official file has changed "
                    "or something stands between."
                )
            while piece := _receive(answer, host):
                have += len(piece)
                if remote.size is not None and have > remote.size:
                    _restart(file)
                    raise SourceError(
                        f"{url} sends more than the {remote.size} bytes of {remote.path}; it is not the file."
                    )
                file.write(piece)
                if progress is not None:
                    progress(remote.path, have, remote.size or total)
            wanted = remote.size or total
            if wanted is not None and have < wanted:
                raise _UnreachableError(f"{host} broke off after {have} of {wanted} bytes")
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416 and have:  # what is kept is no beginning of what is there
                _restart(file)
                _from(url, remote, file, progress, timeout)
                return
            raise _UnreachableError(f"{host} answered {error.code} {plain(str(error.reason))}") from None
    except urllib.error.URLError as error:
        raise _UnreachableError(f"{host} cannot be reached ({plain(str(error.reason))})") from None
    except (http.client.HTTPException, TimeoutError, ConnectionError) as error:  # before the first byte
        raise _UnreachableError(f"{host} did not answer ({plain(error)})") from None


def _receive(answer: Any, host: str) -> bytes:
    """Return the next piece; a fault of the network must not look like one of the disk."""
    try:
        return bytes(answer.read(_CHUNK))
    except (OSError, http.client.HTTPException) as error:
        raise _UnreachableError(f"{host} broke off ({plain(error)})") from None


def _restart(file: BinaryIO) -> int:
    file.seek(0)
    file.truncate()
    return 0


def _begin(answer: Any, have: int, file: BinaryIO) -> int:
    """Return from where the answer goes on; a server that knows no ranges starts over."""
    if have and answer.status == 206:
        start = str(answer.headers.get("Content-Range", "")).removeprefix("bytes ").split("-")[0]
        if start == str(have):
            return have
        raise _UnreachableError("the server sent another range than was asked for")
    return _restart(file) if have else 0


def _total(answer: Any, have: int) -> int | None:
    length = answer.headers.get("Content-Length")
    return have + int(length) if length is not None and length.isdigit() else None


def _verify(remote: Remote, path: Path, *, keep: bool) -> None:
    """Compare size and checksums; a wrong file is removed if it was only just downloaded."""
    size = path.stat().st_size
    wrong = None
    if remote.size is not None and size != remote.size:
        wrong = f"has {size} bytes, but it must have {remote.size}"
    else:
        for kind in ("sha256", "md5"):
            expected = getattr(remote, kind)
            if expected is not None and (found := _hash(path, kind)) != expected:
                wrong = f"has {kind} {found}, but it must be {expected}"
                break
    if wrong is None:
        return
    if keep:
        raise SourceError(f"{path} {wrong}; remove it and fetch it again.")
    path.unlink()
    raise SourceError(f"The download of {remote.path} {wrong}; it was removed, fetch it again.")


def _hash(path: Path, kind: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()
