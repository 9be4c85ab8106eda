#!/usr/bin/env python3
"""Feed damaged and hostile files to the dataset readers.

    python scripts/fuzz_data.py [--cases 600] [--seed 0]

Every case makes a small dataset in one of the formats, spoils it in one way, and loads it. It passes if loading raises
a `SourceError` of one sentence, or returns exactly what an independent reader (NumPy, json, pickle behind a list of
allowed names, Pillow, tarfile, gzip) finds in the spoilt files. Another exception, a hang, a memory that grows, or
content that differs fails. `check` must agree and must never raise. Cases run in a process of their own, so that a
crash of it is seen, too; case i of seed s is always the same: `--only i` repeats it.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SECONDS = 10.0
"""A case may take so long."""
MEMORY = 700 << 20
"""The process may grow by so much."""


class Rows(NamedTuple):
    """What a dataset holds, as the independent reader sees it."""

    x: np.ndarray
    y: np.ndarray
    client: np.ndarray | None = None
    test: np.ndarray | None = None


class Made(NamedTuple):
    """A small dataset on disk."""

    name: str
    """In FORMATS."""
    root: Path
    files: list[Path]
    """Those that may be spoilt."""
    oracle: Callable[[], Rows]
    options: dict[str, Any]


# Making small files of each canonical format


def pictures(rng: np.random.Generator, n: int, *shape: int) -> np.ndarray:
    """Return random bytes."""
    return rng.integers(0, 256, (n, *shape), dtype=np.uint8)


def labels(rng: np.random.Generator, n: int, classes: int) -> np.ndarray:
    """Return labels of which at least two differ."""
    y = rng.integers(0, classes, n)
    y[:2] = 0, 1
    return y


def cifar(root: Path, rng: np.random.Generator, *, kind: int, version: str, packed: bool, n: int = 6) -> Made:
    """CIFAR-10 or -100 (kind), binary or python version, as a folder or packed."""
    classes, label_bytes = (10, 1) if kind == 10 else (100, 2)
    python = version == "python"
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"] if kind == 10 else ["train", "test"]
    names = names if python else [f"{name}.bin" for name in names]
    folder = {(10, False): "cifar-10-batches-bin", (10, True): "cifar-10-batches-py",
              (100, False): "cifar-100-binary", (100, True): "cifar-100-python"}[kind, python]  # fmt: skip
    content = {}
    for name in names:
        x, y, coarse = pictures(rng, n, 3072), labels(rng, n, classes), rng.integers(0, 20, n)
        if python:
            keys = (
                {b"labels": y.tolist()}
                if kind == 10
                else {b"fine_labels": y.tolist(), b"coarse_labels": coarse.tolist()}
            )
            batch = {b"batch_label": b"a batch", b"data": x, b"filenames": [b"a.png"] * n, **keys}
            content[name] = pickle.dumps(batch, protocol=int(rng.integers(0, 6)))
        else:
            columns = [y[:, None]] if kind == 10 else [coarse[:, None], y[:, None]]
            content[name] = np.concatenate([*columns, x], 1).astype(np.uint8).tobytes()
    if packed:
        path = root / f"cifar-{kind}-{version}.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name, data in content.items():
                add_member(archive, f"{folder}/{name}", data)
        files = [path]
    else:
        (root / folder).mkdir()
        files = []
        for name, data in content.items():
            (root / folder / name).write_bytes(data)
            files.append(root / folder / name)

    def oracle() -> Rows:
        data = {}
        if packed:
            with tarfile.open(files[0]) as archive:
                for member in archive:
                    base = member.name.rsplit("/")[-1]
                    if member.isreg() and base in names:
                        data[base] = archive.extractfile(member).read()  # type: ignore[union-attr]
        else:
            data = {path.name: path.read_bytes() for path in files}
        parts = [_python_batch(data[n], kind) if python else _binary_batch(data[n], label_bytes) for n in names]
        x = np.concatenate([part[0] for part in parts]).reshape(-1, 3, 32, 32)
        test = np.repeat([False] * (len(names) - 1) + [True], [len(part[1]) for part in parts])
        return Rows(x, np.concatenate([part[1] for part in parts]), None, test)

    return Made(f"cifar{kind}", root, files, oracle, {"subset": True})


def add_member(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a file to a tar archive."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def _binary_batch(data: bytes, label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    table = np.frombuffer(data, np.uint8).reshape(-1, label_bytes + 3072)
    return table[:, label_bytes:], table[:, label_bytes - 1].astype(np.int64)


class _Careful(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in ("_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer") and module.startswith("numpy"):
            return super().find_class(module, name)
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(name)


def _python_batch(data: bytes, kind: int) -> tuple[np.ndarray, np.ndarray]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        content = _Careful(io.BytesIO(data), encoding="bytes").load()
    content = {key if isinstance(key, bytes) else str(key).encode(): value for key, value in content.items()}
    return np.asarray(content[b"data"]), np.asarray(content[b"labels" if kind == 10 else b"fine_labels"])


def femnist(root: Path, rng: np.random.Generator, *, scale: str = "unit", split: bool = False, users: int = 4) -> Made:
    """LEAF's shards, two of them."""
    folder = root / "femnist"
    parts = [folder / "train", folder / "test"] if split else [folder / "all_data"]
    files = []
    for part in parts:
        part.mkdir(parents=True)
        for shard in range(2):
            names = [f"f{user:04d}_{user}" for user in range(shard, users, 2)]
            data = {}
            for name in names:
                n = int(rng.integers(2, 5))
                x = pictures(rng, n, 784)
                values = (x / 255).tolist() if scale == "unit" else x.tolist()
                data[name] = {"x": values, "y": labels(rng, n, 62).tolist()}
            counts = [len(data[name]["y"]) for name in names]
            path = part / f"all_data_{shard}.json"
            path.write_text(json.dumps({"users": names, "num_samples": counts, "user_data": data}))
            files.append(path)

    def oracle() -> Rows:
        xs, ys, who, flags = [], [], [], []
        for path in (path for path in files if path.exists()):  # nobody can see that a shard was left out
            content = json.loads(path.read_text())
            for name in content["users"]:
                rows = content["user_data"][name]
                if rows["y"]:
                    xs.append(np.array(rows["x"], float))
                    ys += rows["y"]
                    who += [name] * len(rows["y"])
                    flags += [path.parent.name == "test"] * len(rows["y"])
        values = np.concatenate(xs)
        values = np.rint(values * 255) if values.max() <= 1 else values
        order = sorted(set(who))
        client = np.array([order.index(name) for name in who])
        return Rows(values.reshape(-1, 1, 28, 28).astype(np.uint8), np.array(ys).astype(int), client,
                    np.array(flags) if split else None)  # fmt: skip

    return Made("femnist", root, files, oracle, {})


def celeba(root: Path, rng: np.random.Generator, *, layout: str = "original", people: int = 3, each: int = 2) -> Made:
    """CelebA's pictures (as PNG under their usual names, so that bytes can be compared) and lists."""
    from PIL import Image  # noqa: PLC0415

    folder = root / "celeba" / "img_align_celeba"
    folder.mkdir(parents=True)
    names = [f"{i + 1:06d}.jpg" for i in range(people * each)]
    y = labels(rng, len(names), 2)
    who = np.arange(len(names)) % people + 7
    for name in names:
        Image.fromarray(pictures(rng, 1, 22, 18, 3)[0]).save(folder / name, "PNG")
    if layout == "original":
        attributes = ["Bald", "Smiling"]
        lines = [str(len(names)), " ".join(attributes)]
        lines += [f"{name} {'-1':>2} {1 if y[i] else -1:>2}" for i, name in enumerate(names)]
        (root / "celeba" / "list_attr_celeba.txt").write_text("\n".join(lines) + "\n")
        text = "".join(f"{name} {who[i]}\n" for i, name in enumerate(names))
        (root / "celeba" / "identity_CelebA.txt").write_text(text)
        lists = [root / "celeba" / "list_attr_celeba.txt", root / "celeba" / "identity_CelebA.txt"]
    else:
        (root / "celeba" / "all_data").mkdir()
        users = [str(person) for person in sorted(set(who.tolist()))]
        data: dict[str, dict[str, list[Any]]] = {user: {"x": [], "y": []} for user in users}
        for name, person, label in zip(names, who, y, strict=True):
            data[str(person)]["x"].append(name)
            data[str(person)]["y"].append(float(label))  # as LEAF writes them
        shard = {"users": users, "num_samples": [len(data[u]["y"]) for u in users], "user_data": data}
        lists = [root / "celeba" / "all_data" / "all_data.json"]
        lists[0].write_text(json.dumps(shard))

    def decode(name: str) -> np.ndarray:
        picture = Image.open(folder / name).convert("RGB").resize((8, 8), Image.Resampling.BILINEAR)
        return np.asarray(picture).transpose(2, 0, 1)

    def oracle() -> Rows:
        if layout == "original":
            identity = dict(line.split() for line in lists[1].read_text().splitlines() if line.split())
            table = [line.split() for line in lists[0].read_text().splitlines()[1:] if line.split()]
            column = table[0].index("Smiling") + 1
            rows = sorted((row[0], int(row[column]) == 1, int(identity[row[0]])) for row in table[1:])
        else:
            content = json.loads(lists[0].read_text())
            order = sorted(u for u in content["users"] if content["user_data"][u]["y"])
            rows = [
                (name, bool(label), order.index(user))
                for user in content["users"]
                for name, label in zip(*(content["user_data"][user][key] for key in "xy"), strict=True)
            ]
        x = np.stack([decode(row[0]) for row in rows])
        return Rows(x, np.array([row[1] for row in rows], int), np.array([row[2] for row in rows]))

    files = [*lists, *(folder / name for name in names)]
    return Made("celeba", root, files, oracle, {"size": 8, "least": 1})


def idx_bytes(values: np.ndarray) -> bytes:
    """Return an idx file."""
    code = {"uint8": 8, "int32": 12}[values.dtype.name]
    head = struct.pack(">HBB", 0, code, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    return head + values.astype(values.dtype.newbyteorder(">")).tobytes()


def idx(root: Path, rng: np.random.Generator, *, name: str = "mnist", packed: bool = True, writers: bool = False,
        archive: bool = False) -> Made:  # fmt: skip
    """MNIST, Fashion-MNIST or EMNIST (letters)."""
    folder = root / {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw", "emnist": "EMNIST/raw"}[name]
    folder.mkdir(parents=True)
    halves = {"mnist": ("train-", "t10k-"), "fashion-mnist": ("train-", "t10k-"),
              "emnist": ("emnist-letters-train-", "emnist-letters-test-")}[name]  # fmt: skip
    content, who = {}, []
    base = 1 if name == "emnist" else 0
    for half, count in zip(halves, (9, 5), strict=True):
        y = labels(rng, count, 10) + base
        content[f"{half}images-idx3-ubyte"] = idx_bytes(pictures(rng, count, 28, 28))
        content[f"{half}labels-idx1-ubyte"] = idx_bytes(y.astype(np.uint8))
        table = rng.integers(0, 9, (count + (3 if half == "t10k-" else 0), 8)).astype(np.int32)
        table[:count, 0] = y
        who.append(table)
    if writers:
        for half, table in zip(("train", "test"), who, strict=True):
            content[f"qmnist-{half}-labels-idx2-int"] = idx_bytes(table)
    if archive:
        files = [folder / "gzip.zip"]
        with zipfile.ZipFile(files[0], "w") as target:
            for key, data in content.items():
                target.writestr(f"gzip/{key}.gz", gzip.compress(data))
    else:
        files = [folder / (f"{key}.gz" if packed else key) for key in content]
        for path, data in zip(files, content.values(), strict=True):
            path.write_bytes(gzip.compress(data) if packed else data)

    def plain(key: str) -> np.ndarray:
        if archive:
            with zipfile.ZipFile(files[0]) as source:
                data = gzip.decompress(source.read(f"gzip/{key}.gz"))
        elif packed:
            data = gzip.decompress((folder / f"{key}.gz").read_bytes())
        else:
            data = (folder / key).read_bytes()
        axes = data[3]
        shape = struct.unpack(f">{axes}I", data[4 : 4 + 4 * axes])
        return np.frombuffer(data[4 + 4 * axes :], {8: ">u1", 12: ">i4"}[data[2]]).reshape(shape)

    def oracle() -> Rows:
        xs = [plain(f"{half}images-idx3-ubyte") for half in halves]
        ys = [plain(f"{half}labels-idx1-ubyte") for half in halves]
        x, y = np.concatenate(xs), np.concatenate(ys).astype(int) - base
        lists = ["qmnist-train-labels-idx2-int", "qmnist-test-labels-idx2-int"] if writers else []
        tables = [plain(key)[: len(half), 2] for key, half in zip(lists, ys, strict=False)]
        x = x.transpose(0, 2, 1) if name == "emnist" else x
        test = np.repeat([False, True], [len(part) for part in ys])
        return Rows(x[:, None], y, np.concatenate(tables) if tables else None, test)

    return Made(name, root, files, oracle, {"split": "letters"} if name == "emnist" else {})


def npz(root: Path, rng: np.random.Generator, *, kind: str = "images", packed: bool = False, n: int = 12) -> Made:
    """An .npz: images, features, or the layouts of celeba32 and mnist_by_writer."""
    y = labels(rng, n, 2 if kind == "celeba" else 3)
    y[2] = y.max() if kind in ("celeba",) else 2
    client = rng.integers(0, 4, n).astype(np.int32)
    if kind == "images":
        content = {"images": pictures(rng, n, 9, 9, 3), "label": y, "client": client, "split": np.arange(n) % 2}
    elif kind == "features":
        content = {"features": rng.standard_normal((n, 5)), "y": y, "test": np.arange(n) % 3 == 0}
    elif kind == "celeba":
        content = {"images": pictures(rng, n, 8, 8, 3), "label": y.astype(np.uint8), "client": client}
    else:
        content = {"images": pictures(rng, n, 28, 28), "label": y.astype(np.uint8), "client": client,
                   "official_test": np.arange(n) >= n - 3}  # fmt: skip
    path = root / {"celeba": "celeba32.npz", "writer": "mnist_by_writer.npz"}.get(kind, "own.npz")
    (np.savez_compressed if packed else np.savez)(path, **content)

    def oracle() -> Rows:
        with np.load(path, allow_pickle=False) as loaded:
            x = loaded[next(key for key in ("images", "features", "x") if key in loaded)]
            y = loaded[next(key for key in ("label", "labels", "y") if key in loaded)]
            who = loaded.get("client")
            flags = next((loaded[key] for key in ("split", "test", "official_test") if key in loaded), None)
        if x.ndim == 4:
            x = x.transpose(0, 3, 1, 2)
        elif x.ndim == 3:
            x = x[:, None]
        return Rows(x if x.dtype == np.uint8 else x.astype(np.float32), y.reshape(-1), who,
                    None if flags is None else flags == 1)  # fmt: skip

    name = {"celeba": "celeba", "writer": "mnist"}.get(kind, "npz")
    options: dict[str, Any] = {"size": 8} if kind == "celeba" else {}
    return Made(name, root if name != "npz" else path, [path], oracle, options)


def folder(root: Path, rng: np.random.Generator, *, clients: bool = False, split: bool = False) -> Made:
    """Pictures in folders."""
    from PIL import Image  # noqa: PLC0415

    top = root / "photos"
    bases = [top / "train", top / "test"] if split else [top]
    files = []
    for base in bases:
        for outer in ("ann", "bob") if clients else ("",):
            for label in ("cat", "dog"):
                place = base / outer / label
                place.mkdir(parents=True)
                for number in range(2):
                    suffix, form = [("png", "PNG"), ("bmp", "BMP"), ("jpg", "JPEG")][int(rng.integers(0, 3))]
                    path = place / f"{number}.{suffix}"
                    Image.fromarray(pictures(rng, 1, 7, 6, 3)[0]).save(path, form)
                    files.append(path)

    def oracle() -> Rows:
        found = sorted(path for path in top.rglob("*") if path.is_file())
        if split:
            found = sorted(found, key=lambda path: path.relative_to(top).parts[0] == "test")
        x = np.stack([np.asarray(Image.open(path).convert("RGB")).transpose(2, 0, 1) for path in found])
        y = [path.parent.name == "dog" for path in found]
        who = [path.parent.parent.name == "bob" for path in found] if clients else None
        test = [path.relative_to(top).parts[0] == "test" for path in found] if split else None
        return Rows(x, np.array(y, int), None if who is None else np.array(who, int),
                    None if test is None else np.array(test))  # fmt: skip

    return Made("folder", top, files, oracle, {"channels": 3})


MAKERS: dict[str, Callable[[Path, np.random.Generator], Made]] = {
    "cifar10 binary": lambda root, rng: cifar(root, rng, kind=10, version="binary", packed=False),
    "cifar10 python": lambda root, rng: cifar(root, rng, kind=10, version="python", packed=False),
    "cifar10 tar": lambda root, rng: cifar(root, rng, kind=10, version="binary", packed=True),
    "cifar100 binary": lambda root, rng: cifar(root, rng, kind=100, version="binary", packed=False),
    "cifar100 python": lambda root, rng: cifar(root, rng, kind=100, version="python", packed=False),
    "cifar100 tar": lambda root, rng: cifar(root, rng, kind=100, version="python", packed=True),
    "femnist": femnist,
    "femnist bytes": lambda root, rng: femnist(root, rng, scale="byte"),
    "femnist split": lambda root, rng: femnist(root, rng, split=True),
    "celeba": celeba,
    "celeba leaf": lambda root, rng: celeba(root, rng, layout="leaf"),
    "mnist": lambda root, rng: idx(root, rng, packed=False),
    "mnist writers": lambda root, rng: idx(root, rng, writers=True),
    "fashion-mnist": lambda root, rng: idx(root, rng, name="fashion-mnist"),
    "emnist": lambda root, rng: idx(root, rng, name="emnist"),
    "emnist zip": lambda root, rng: idx(root, rng, name="emnist", archive=True),
    "npz": npz,
    "npz packed": lambda root, rng: npz(root, rng, packed=True),
    "npz features": lambda root, rng: npz(root, rng, kind="features"),
    "npz celeba": lambda root, rng: npz(root, rng, kind="celeba"),
    "npz writer": lambda root, rng: npz(root, rng, kind="writer"),
    "folder": folder,
    "folder clients": lambda root, rng: folder(root, rng, clients=True),
    "folder split": lambda root, rng: folder(root, rng, split=True),
}


# Spoiling any file


def _truncate(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: int(rng.integers(0, len(data)))] if data else data


def _flip(data: bytes, rng: np.random.Generator, at: Callable[[int], int] | None = None) -> bytes:
    spoilt = bytearray(data)
    for _ in range(int(rng.integers(1, 9))):
        where = int(rng.integers(0, len(spoilt))) if at is None else at(len(spoilt))
        spoilt[where] ^= 1 << int(rng.integers(0, 8))
    return bytes(spoilt)


def _flip_head(data: bytes, rng: np.random.Generator) -> bytes:
    return _flip(data, rng, lambda size: int(rng.integers(0, min(size, 64))))


def _flip_tail(data: bytes, rng: np.random.Generator) -> bytes:
    return _flip(data, rng, lambda size: size - 1 - int(rng.integers(0, min(size, 200))))


def _header(data: bytes, rng: np.random.Generator) -> bytes:
    return rng.bytes(min(16, len(data))) + data[16:]


def _insert(data: bytes, rng: np.random.Generator) -> bytes:
    at = int(rng.integers(0, len(data) + 1))
    return data[:at] + rng.bytes(int(rng.integers(1, 600))) + data[at:]


def _cut_out(data: bytes, rng: np.random.Generator) -> bytes:
    at = int(rng.integers(0, len(data)))
    return data[:at] + data[at + int(rng.integers(1, 600)) :]


def _zeros(data: bytes, rng: np.random.Generator) -> bytes:
    at = int(rng.integers(0, len(data)))
    count = min(int(rng.integers(1, 600)), len(data) - at)
    return data[:at] + bytes(count) + data[at + count :]


def _number(data: bytes, rng: np.random.Generator) -> bytes:
    """Put an extreme 32-bit number somewhere near the front, where sizes stand."""
    value = random.Random(int(rng.integers(0, 2**31))).choice([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 30])
    at = int(rng.integers(0, min(len(data), 200)))
    return data[:at] + struct.pack(str(rng.choice(["<I", ">I"])), value) + data[at + 4 :]


BYTES: dict[str, Callable[[bytes, np.random.Generator], bytes]] = {
    "truncated": _truncate,
    "bits flipped": _flip,
    "bits flipped in the head": _flip_head,
    "bits flipped in the tail": _flip_tail,
    "wrong header": _header,
    "bytes inserted": _insert,
    "bytes removed": _cut_out,
    "bytes zeroed": _zeros,
    "extreme number": _number,
    "garbage appended": lambda data, rng: data + rng.bytes(int(rng.integers(1, 900))),
    "empty": lambda data, rng: b"",  # noqa: ARG005
    "random": lambda data, rng: rng.bytes(len(data)),
    "doubled": lambda data, rng: data + data,  # noqa: ARG005
}


def _whole(made: Made, rng: np.random.Generator, how: str) -> None:
    path = made.files[int(rng.integers(0, len(made.files)))]
    path.unlink()
    if how == "a folder instead":
        path.mkdir()
    elif how == "a pipe instead":
        os.mkfifo(path)
    elif how == "a link to nothing":
        path.symlink_to(path.parent / "nothing")
    elif how == "a link to itself":
        path.symlink_to(path)


WHOLE = ("missing", "a folder instead", "a pipe instead", "a link to nothing", "a link to itself")


# Hostile and odd datasets


class _Evil:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


MARK = "metavd-fuzz-was-here"


def hostile_pickles() -> dict[str, bytes]:
    """Return pickles that would run something, hang or grow; none may be obeyed."""
    touch = f"open({MARK!r}, 'w').close()"
    evil = _Evil(os.system, f"touch {MARK}")
    nested = b"\x80\x02)" + b"q\x00h\x00\x86" * 60
    good = pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 1]}, 2)
    return {
        "os.system": pickle.dumps(_Evil(os.system, f"touch {MARK}")),
        "exec": pickle.dumps(_Evil(exec, touch), 0),
        "eval in a list": pickle.dumps({b"data": [_Evil(eval, touch)], b"labels": [0]}, 2),
        "nested pickle": pickle.dumps(_Evil(pickle.loads, pickle.dumps(_Evil(os.system, f"touch {MARK}")))),
        "inst": b"(S'touch " + MARK.encode() + b"'\nios\nsystem\n.",
        "obj": b"(cos\nsystem\nS'touch " + MARK.encode() + b"'\no.",
        "getattr": b"\x80\x02c__builtin__\ngetattr\ncnumpy\ndtype\nU\x04load\x86R.",
        "numpy.load": b"\x80\x02cnumpy\nload\nU\x04evil\x85R.",
        "numpy.f2py": b"\x80\x02cnumpy.f2py.crackfortran\nmyeval\nU\x04evil\x85R.",
        "numpy.testing": b"\x80\x04\x8c\x1dnumpy.testing._private.utils\x8c\x09runstring\x93.",
        "extension": b"\x80\x02\x82\x01.",
        "persistent": b"\x80\x02U\x01aQ.",
        "memo index": b"\x80\x02Nr\xff\xff\xff\x7f.",
        "long string": b"\x80\x02T\xff\xff\xff\x7fabc.",
        "huge bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b".",
        "huge long": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "hash for ever": nested + b"q\x00}h\x00K\x01s.",
        "many lists": b"\x80\x02" + b"]" * 2_000_000 + b".",
        "colliding keys": b"(" + b"".join(f"L{i * (2**61 - 1)}L\nI1\n".encode() for i in range(40_000)) + b"d.",
        "many marks": b"\x80\x02" + b"(" * 1_500_000 + b".",
        "wrong shape": good.replace(b"M\x00\x0c\x86", b"M\x00\x0d\x86"),
        "object array": pickle.dumps({b"data": np.array([evil], object), b"labels": [0]}, 2),
        "huge array": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R\x89U\x04abcdtb.",
        "text again": b"\x80\x02X" + struct.pack("<I", 1 << 20) + b"a" * (1 << 20) + b"q\x00"
        + b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R" * 2000 + b".",
        "no dict": pickle.dumps([1, 2, 3], 2),
        "labels of text": pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": ["a", "b"]}, 2),
        "labels too large": pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [2**70, 0]}, 2),
        "labels nested": pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [[0], [1]]}, 2),
        "floats": pickle.dumps({b"data": np.zeros((2, 3072)), b"labels": [0, 1]}, 2),
        "short labels": pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]}, 2),
    }  # fmt: skip


def bombs(  # noqa: PLR0915 (a list of cases)
    root: Path, rng: np.random.Generator
) -> Iterator[tuple[str, str, Path, dict[str, Any]]]:
    """Yield (what, format, root, options) of archives that must be refused; each in a folder of its own."""

    def place(name: str) -> Path:
        folder = root / name
        folder.mkdir()
        return folder

    zeros = 300 << 20
    with gzip.open(place("gzip") / "cifar-10-binary.tar.gz", "wb", 9) as file:
        block = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        block.size = 1 << 33
        file.write(block.tobuf(tarfile.GNU_FORMAT))
        for _ in range(zeros >> 20):
            file.write(bytes(1 << 20))
    yield "tar bomb", "cifar10", root / "gzip", {"subset": True}
    with gzip.open(place("pax") / "cifar-10-binary.tar.gz", "wb", 9) as file:
        block = tarfile.TarInfo("pax")
        block.type, block.size = tarfile.XHDTYPE, 1 << 30
        file.write(block.tobuf(tarfile.GNU_FORMAT))
        for _ in range(zeros >> 20):
            file.write(bytes(1 << 20))
    yield "tar bomb in an extended header", "cifar10", root / "pax", {"subset": True}
    with gzip.open(place("members") / "cifar-10-binary.tar.gz", "wb", 1) as file:
        block = tarfile.TarInfo("x").tobuf(tarfile.USTAR_FORMAT)
        file.write(block * 5_000)
    yield "tar of many members", "cifar10", root / "members", {"subset": True}
    for name, member in (
        ("dots", "../../evil"),
        ("absolute", "/etc/passwd"),
        ("inner", "cifar-10-batches-bin/../../a"),
    ):
        with tarfile.open(place(name) / "cifar-10-binary.tar.gz", "w:gz") as archive:
            add_member(archive, member, b"evil")
        yield f"tar with {member}", "cifar10", root / name, {"subset": True}
    with tarfile.open(place("link") / "cifar-10-binary.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    yield "tar with a link", "cifar10", root / "link", {"subset": True}
    raw = place("idx") / "MNIST/raw"
    raw.mkdir(parents=True)
    for half in ("train", "t10k"):
        with gzip.open(raw / f"{half}-images-idx3-ubyte.gz", "wb", 9) as file:
            file.write(struct.pack(">HBBIII", 0, 8, 3, 400_000, 28, 28))
            for _ in range(zeros >> 20):
                file.write(bytes(1 << 20))
        (raw / f"{half}-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(400_000, np.uint8)))
    yield "gzip bomb", "mnist", root / "idx", {}
    path = place("npz") / "own.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("images.npy", "w") as member:
        buffer = io.BytesIO()
        np.lib.format.write_array_header_1_0(buffer, {"descr": "|u1", "fortran_order": False, "shape": (zeros, 1)})
        member.write(buffer.getvalue())
        for _ in range(zeros >> 20):
            member.write(bytes(1 << 20))
    yield "zip bomb", "npz", path, {}
    for name, header in (("lies", "{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999, 28, 28), }"),
                         ("objects", "{'descr': '|O', 'fortran_order': False, 'shape': (4,), }"),
                         ("negative", "{'descr': '|u1', 'fortran_order': False, 'shape': (-4, 3), }"),
                         ("deep", "(" * 3000 + ")" * 3000),
                         ("structure", "{'descr': [('a', '<U999999999')], 'fortran_order': False, 'shape': (1,), }"),
                         ("code", "__import__('os').system('touch " + MARK + "')")):  # fmt: skip
        path = place(name) / "own.npz"
        text = header.encode() + b"\n"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("images.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(64))
            archive.writestr("label.npy", b"")
        yield f"npz header: {name}", "npz", path, {}
    path = place("pickled") / "own.npz"
    np.savez(path, images=pictures(rng, 4, 5, 5), label=np.array([_Evil(os.system, f"touch {MARK}")], object))
    yield "npz with a pickle", "npz", path, {}
    path = place("outside") / "own.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../images.npy", b"evil")
    yield "zip with ../", "npz", path, {}
    path = place("many") / "own.npz"
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr("x.npy", b"a")
        archive.writestr("x.npy", b"b")
    yield "zip with a name twice", "npz", path, {}
    picture = place("picture") / "a"
    picture.mkdir()
    (root / "picture" / "b").mkdir()
    body = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", body), (b"IDAT", zlib.compress(bytes(1 << 20))), (b"IEND", b""))
    )
    for label in ("a", "b"):
        (root / "picture" / label / "1.png").write_bytes(png)
    yield "picture of 60,000 x 60,000", "folder", root / "picture", {}


def odd(  # noqa: PLR0915 (a list of cases)
    root: Path, rng: np.random.Generator
) -> Iterator[tuple[str, str, Path, dict[str, Any], bool]]:
    """Yield (what, format, root, options, whether it must load) of whole files with unusual content."""

    def save(name: str, **arrays: Any) -> Path:
        path = root / f"{name}.npz"
        np.savez(path, **arrays)
        return path

    x, y = rng.standard_normal((6, 4)), np.arange(6) % 2
    bad = x.copy()
    bad[3, 2] = np.nan
    yield "NaN features", "npz", save("nan", x=bad, y=y), {}, False
    yield "infinite features", "npz", save("inf", x=np.where(np.isnan(bad), np.inf, x), y=y), {}, False
    yield "features beyond float32", "npz", save("wide", x=x * 1e300, y=y), {}, False
    yield "one class", "npz", save("one", x=x, y=np.zeros(6, int)), {}, False
    yield "one sample", "npz", save("sample", x=x[:1], y=y[:1]), {}, False
    yield "negative label", "npz", save("negative", x=x, y=y - 1), {}, False
    yield "labels with a gap", "npz", save("gap", x=x, y=y * 3), {}, False
    yield "float labels", "npz", save("float", x=x, y=y * 1.0), {}, False
    yield "labels too short", "npz", save("short", x=x, y=y[:5]), {}, False
    yield "text labels", "npz", save("text", x=x, y=np.array(list("ababab"))), {}, False
    yield "negative client", "npz", save("who", x=x, y=y, client=y - 1), {}, False
    yield "clients doubled in both halves", "npz", save("twice", x=x, y=y, client=y, test=np.arange(6) > 3), {}, True
    yield "all rows test rows", "npz", save("all", x=x, y=y, test=np.ones(6, bool)), {}, False
    yield "strange split", "npz", save("split", x=x, y=y, split=np.array(["train"] * 5 + ["val"])), {}, False
    yield "split as text", "npz", save("words", x=x, y=y, split=np.array(["train"] * 5 + ["test"])), {}, True
    yield "two kinds of images", "npz", save("both", x=x, images=x, y=y), {}, False
    yield "no labels", "npz", save("none", x=x), {}, False
    yield "five axes", "npz", save("five", x=np.zeros((6, 1, 2, 2, 2), np.uint8), y=y), {}, False
    yield "no telling channels", "npz", save("square", x=np.zeros((6, 3, 3, 3), np.uint8), y=y), {}, False
    yield "complex features", "npz", save("complex", x=x * 1j, y=y), {}, False
    yield (
        "big-endian, by columns",
        "npz",
        save("order", x=np.asfortranarray(x.astype(">f8")), y=y.astype(">i2")),
        {},
        True,
    )
    for name, change in (
        ("user twice", lambda s: s["users"].append(s["users"][0])),
        ("user in two shards", lambda _: None),
        ("count wrong", lambda s: s["num_samples"].__setitem__(0, 99)),
        ("user without rows", lambda s: s["user_data"].pop(s["users"][0])),
        ("rows without user", lambda s: (s["users"].pop(), s["num_samples"].pop())),
        ("pixel 256", lambda s: s["user_data"][s["users"][0]]["x"][0].__setitem__(5, 256)),
        ("pixel -0.1", lambda s: s["user_data"][s["users"][0]]["x"][0].__setitem__(5, -0.1)),
        ("pixel 1.5", lambda s: s["user_data"][s["users"][0]]["x"][0].__setitem__(5, 1.5)),
        ("pixel NaN", lambda s: s["user_data"][s["users"][0]]["x"][0].__setitem__(5, float("nan"))),
        ("pixel null", lambda s: s["user_data"][s["users"][0]]["x"][0].__setitem__(5, None)),
        ("short row", lambda s: s["user_data"][s["users"][0]]["x"][0].pop()),
        ("label 62", lambda s: s["user_data"][s["users"][0]]["y"].__setitem__(0, 62)),
        ("label 1.5", lambda s: s["user_data"][s["users"][0]]["y"].__setitem__(0, 1.5)),
        ("label missing", lambda s: s["user_data"][s["users"][0]]["y"].pop()),
        ("both scales", lambda s: s["user_data"][s["users"][0]].__setitem__("x", [[200] * 784] * len(
            s["user_data"][s["users"][0]]["y"]))),
    ):  # fmt: skip
        place = root / f"leaf-{name.replace(' ', '-')}"
        place.mkdir()
        made = femnist(place, rng)
        content = json.loads(made.files[0].read_text())
        change(content)
        made.files[0].write_text(json.dumps(content))
        if name == "user in two shards":
            shutil.copy(made.files[0], made.files[0].with_name("copy.json"))
        yield f"LEAF: {name}", "femnist", place, {}, False
    for name, text in (
        ("deep", "[" * 200_000),
        ("digits", '{"users": [' + "9" * 10_000 + "]}"),
        ("list", "[1, 2]"),
        ("keys", '{"users": [], "users": []}'),
        ("huge", '{"users":["a"],"num_samples":[1],"user_data":{"a":{"x":[[1e999]],"y":[1]}}}'),
        ("none", '{"users":[],"num_samples":[],"user_data":{}}'),
    ):
        place = root / f"json-{name}"
        (place / "femnist" / "all_data").mkdir(parents=True)
        (place / "femnist" / "all_data" / "all_data_0.json").write_text(text)
        yield f"JSON: {name}", "femnist", place, {}, False
    for name, write in (
        ("traversal", lambda p: _edit(p, "list_attr_celeba.txt", "000001.jpg", "../../x.jpg")),
        ("attribute 2", lambda p: _edit(p, "list_attr_celeba.txt", "-1  1", "-1  2")),
        ("identity missing", lambda p: _edit(p, "identity_CelebA.txt", "000001.jpg", "999999.jpg")),
        ("identity no number", lambda p: _edit(p, "identity_CelebA.txt", "000001.jpg ", "000001.jpg x")),
        ("listed twice", lambda p: _edit(p, "identity_CelebA.txt", "000001.jpg", "000002.jpg")),
        ("count", lambda p: _edit(p, "list_attr_celeba.txt", "6\n", "7\n")),
        ("picture missing", lambda p: (p / "celeba/img_align_celeba/000003.jpg").unlink()),
    ):
        place = root / f"celeba-{name.replace(' ', '-')}"
        place.mkdir()
        celeba(place, rng)
        write(place)
        yield f"CelebA: {name}", "celeba", place, {"size": 8, "least": 1}, False
    place = root / "leaf-traversal"
    place.mkdir()
    made = celeba(place, rng, layout="leaf")
    made.files[0].write_text(made.files[0].read_text().replace("000001.jpg", "../../../etc/passwd"))
    yield "LEAF: traversal", "celeba", place, {"size": 8}, False
    for name, change in (
        ("stray picture", lambda p: shutil.copy(next(p.rglob("0.*")), p / "photos" / "stray.png")),
        ("too deep", lambda p: (p / "photos/cat/x/y").mkdir(parents=True)),
        ("empty class", lambda p: (p / "photos/empty").mkdir()),
        ("unknown file", lambda p: (p / "photos/cat/a.heic").write_bytes(b"x")),
        ("case", lambda p: shutil.copytree(p / "photos/cat", p / "photos/CAT")),
        ("one class", lambda p: shutil.rmtree(p / "photos/cat")),
        ("nothing", lambda p: (shutil.rmtree(p / "photos"), (p / "photos").mkdir())),
        ("another size", lambda p: _picture(p / "photos/cat/9.png", rng, (9, 9, 3))),
        ("16 bits", lambda p: _picture(p / "photos/cat/9.png", rng, (7, 6), np.uint16)),
    ):
        place = root / f"folder-{name.replace(' ', '-')}"
        place.mkdir()
        folder(place, rng)
        change(place)
        yield f"folder: {name}", "folder", place / "photos", {}, False
    for name, change in (
        ("label 10", lambda p: _poke(p / "data_batch_2.bin", 3073 * 2, 10)),
        ("label 255", lambda p: _poke(p / "test_batch.bin", 0, 255)),
        ("half a record", lambda p: (p / "test_batch.bin").write_bytes((p / "test_batch.bin").read_bytes()[:-1000])),
        ("one class", lambda p: [_poke(f, 3073 * i, 3) for f in sorted(p.iterdir()) for i in range(6)]),
    ):
        place = root / f"cifar-{name.replace(' ', '-')}"
        place.mkdir()
        made = cifar(place, rng, kind=10, version="binary", packed=False)
        change(made.files[0].parent)
        yield f"CIFAR: {name}", "cifar10", place, {"subset": True}, False
    place = root / "cifar-official"
    place.mkdir()
    cifar(place, rng, kind=100, version="binary", packed=False)
    yield "CIFAR: not the official number of records", "cifar100", place, {}, False


def _edit(place: Path, name: str, old: str, new: str) -> None:
    path = place / "celeba" / name
    path.write_text(path.read_text().replace(old, new, 1))


def _picture(path: Path, rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.uint8) -> None:
    from PIL import Image  # noqa: PLC0415

    Image.fromarray(rng.integers(0, 256, shape).astype(dtype)).save(path)


def _poke(path: Path, at: int, value: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] = value
    path.write_bytes(bytes(data))


# Judging


class Failed(Exception):  # noqa: N818 (a verdict, not an error)
    """A case that did not pass."""


def judge(name: str, root: Path, options: dict[str, Any], oracle: Callable[[], Rows] | None, must: bool | None) -> str:
    """Load; return "refused" or "loaded", or raise `Failed`."""
    from metavd.data import formats  # noqa: PLC0415
    from metavd.data.source import SourceError  # noqa: PLC0415

    try:
        data = formats.load(name, root, **options)
    except SourceError as error:
        text = str(error)
        if (
            "\n" in text
            or not text.endswith((".", "?"))
            or len(text) > 900
            or "fit into memory" in text
            or "is no path" in text
            or str(root) not in text
        ):
            raise Failed(f"not one good sentence: {text!r}") from None
        if must:
            raise Failed(f"refused a good file: {text}") from None
        verdict = "refused"
    else:
        if must is False:
            raise Failed("loaded what should be refused")
        verdict = "loaded"
        if oracle is not None:
            _same(data, oracle())
    report = formats.check(root)  # must not raise, whatever it finds
    if verdict == "refused" and report.ok and not options and name not in ("npz", "folder"):
        raise Failed("refused by load, but check finds nothing wrong")
    str(report)
    return verdict


def _same(data: Any, rows: Rows) -> None:
    for what, got, right in (("x", data.x, rows.x), ("y", data.y, rows.y), ("client", data.client, rows.client),
                             ("test", data.test, rows.test)):  # fmt: skip
        if (got is None) != (right is None):
            raise Failed(f"{what} is {got}, but the files hold {right}")
        if got is not None and (got.shape != right.shape or not np.array_equal(got, right)):
            raise Failed(f"{what} is not what the files hold")


def run_case(number: int, seed: int, scratch: Path) -> tuple[str, str]:
    """Run one case; return (what it was, verdict)."""
    rng = np.random.default_rng([seed, number])
    kinds = list(MAKERS)
    pick = int(rng.integers(0, 100))
    if pick < 12:
        return _hostile(rng, scratch)
    maker = kinds[number % len(kinds)]
    made = MAKERS[maker](scratch, rng)
    if pick < 18:
        how = WHOLE[int(rng.integers(0, len(WHOLE)))]
        _whole(made, rng, how)
        oracle = None if made.name in ("folder", "celeba") and how == "missing" else made.oracle
        return f"{maker}, {how}", judge(made.name, made.root, made.options, oracle, None)
    if pick < 21:
        return f"{maker}, whole", judge(made.name, made.root, made.options, made.oracle, True)
    how = list(BYTES)[int(rng.integers(0, len(BYTES)))]
    path = made.files[int(rng.integers(0, len(made.files)))]
    path.write_bytes(BYTES[how](path.read_bytes(), rng))
    return f"{maker}, {path.name} {how}", judge(made.name, made.root, made.options, made.oracle, None)


def _hostile(rng: np.random.Generator, scratch: Path) -> tuple[str, str]:
    pickles = hostile_pickles()
    name = list(pickles)[int(rng.integers(0, len(pickles)))]
    made = cifar(scratch, rng, kind=10, version="python", packed=False)
    made.files[int(rng.integers(0, 6))].write_bytes(pickles[name])
    return f"pickle: {name}", judge(made.name, made.root, made.options, None, False)


def run_fixed(scratch: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the cases that do not depend on chance: every bomb, every hostile pickle, every odd dataset."""
    rng = np.random.default_rng(0)
    for name, data in hostile_pickles().items():
        place = Path(tempfile.mkdtemp(dir=scratch))
        made = cifar(place, rng, kind=10, version="python", packed=False)
        made.files[2].write_bytes(data)
        yield f"pickle: {name}", lambda made=made: judge(made.name, made.root, made.options, None, False)
    place = Path(tempfile.mkdtemp(dir=scratch))
    for what, name, root, options in bombs(place, rng):
        yield what, lambda name=name, root=root, options=options: judge(name, root, options, None, False)
    place = Path(tempfile.mkdtemp(dir=scratch))
    for what, name, root, options, must in odd(place, rng):
        yield what, lambda name=name, root=root, options=options, must=must: judge(name, root, options, None, must)


# Running


class Hang(BaseException):
    """Beyond every `except Exception`."""


def _alarm(*_: Any) -> None:
    raise Hang


def guarded(case: Callable[[], Any]) -> tuple[Any, str | None]:
    """Run a case; return (result, None) or (None, what failed)."""
    signal.signal(signal.SIGALRM, _alarm)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        result = case()
    except Failed as failure:
        return None, str(failure)
    except Hang:
        return None, f"took more than {SECONDS} s at\n{traceback.format_exc()}"
    except Exception:
        return None, traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if grown > MEMORY:
        return None, f"the process grew by {grown >> 20} MiB"
    if Path(MARK).exists():
        Path(MARK).unlink()
        return None, "hostile code was run"
    return result, None


def worker(first: int, last: int, seed: int, fixed: bool) -> int:
    """Run cases here; print a line of JSON for each."""
    from metavd.data import formats  # noqa: F401, PLC0415 (its memory is not the cases')

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (3 << 30), resource.RLIM_INFINITY))
    scratch = Path(tempfile.mkdtemp(prefix="metavd-fuzz-"))
    os.chdir(scratch)
    try:
        for number in range(first, last):
            place = scratch / str(number)
            place.mkdir()
            print(json.dumps({"start": number}), flush=True)
            begin = time.perf_counter()
            result, fault = guarded(lambda number=number, place=place: run_case(number, seed, place))
            what, verdict = result or ("", "")
            print(json.dumps({"case": number, "what": what, "verdict": verdict, "fault": fault,
                              "seconds": time.perf_counter() - begin}), flush=True)  # fmt: skip
            shutil.rmtree(place)
        for what, case in run_fixed(scratch) if fixed else ():
            print(json.dumps({"start": what}), flush=True)
            begin = time.perf_counter()
            verdict, fault = guarded(case)
            print(json.dumps({"case": what, "what": what, "verdict": verdict, "fault": fault,
                              "seconds": time.perf_counter() - begin}), flush=True)  # fmt: skip
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run all cases in processes of their own and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=600, help="how many seeded mutations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="repeat this case alone")
    parser.add_argument("--no-fixed", action="store_true", help="leave out the bombs and the odd datasets")
    parser.add_argument("--worker", nargs=3, type=int, metavar=("FIRST", "LAST", "FIXED"), help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.worker:
        return worker(given.worker[0], given.worker[1], given.seed, bool(given.worker[2]))
    chunks = [(first, min(first + 100, given.cases), 0) for first in range(0, given.cases, 100)]
    if given.only is not None:
        chunks = [(given.only, given.only + 1, 0)]
    elif not given.no_fixed:
        chunks.append((0, 0, 1))
    counts: Counter[str] = Counter()
    faults, slowest = [], 0.0
    for first, last, fixed in chunks:
        command = [sys.executable, __file__, "--seed", str(given.seed), "--worker", str(first), str(last), str(fixed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            timer = time.monotonic() + (last - first + 150) * SECONDS
            running = None
            for line in process.stdout or ():
                entry = json.loads(line)
                if "start" in entry:
                    running = entry["start"]
                    continue
                running = None
                slowest = max(slowest, entry["seconds"])
                counts[entry["verdict"] if entry["fault"] is None else "failed"] += 1
                if entry["fault"] is not None:
                    faults.append(f"case {entry['case']} ({entry['what']}): {entry['fault']}")
                if time.monotonic() > timer:
                    process.kill()
                    faults.append(f"cases {first} to {last} took too long")
        if process.returncode != 0:
            faults.append(f"case {running}: the process ended with {process.returncode}")
    for fault in faults:
        print(fault)
    total = sum(counts.values())
    print(f"{total} cases: {counts['refused']} refused, {counts['loaded']} loaded and compared, {len(faults)} failed; "
          f"slowest {slowest:.2f} s.")  # fmt: skip
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
