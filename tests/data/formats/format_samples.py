"""Small datasets of every format, each with an independent reader of what its files hold (NumPy, json, Pillow, ...).

The tests of the formats and `scripts/fuzz_data.py` make their files here.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image


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


def pictures(rng: np.random.Generator, n: int, *shape: int) -> np.ndarray:
    """Return random bytes."""
    return rng.integers(0, 256, (n, *shape), dtype=np.uint8)


def labels(rng: np.random.Generator, n: int, classes: int) -> np.ndarray:
    """Return labels of which at least two differ."""
    y = rng.integers(0, classes, n)
    y[:2] = 0, 1
    return y


def cifar(root: Path, rng: np.random.Generator, *, kind: int, version: str, packed: str = "", n: int = 6) -> Made:
    """CIFAR-10 or -100 (kind), binary or python version, as a folder or packed as tar or tar.gz."""
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
            both = {b"fine_labels": y.tolist(), b"coarse_labels": coarse.tolist()}
            keys = {b"labels": y.tolist()} if kind == 10 else both
            batch = {b"batch_label": b"a batch", b"data": x, b"filenames": [b"a.png"] * n, **keys}
            content[name] = pickle.dumps(batch, protocol=int(rng.integers(0, 6)))
        else:
            columns = [y[:, None]] if kind == 10 else [coarse[:, None], y[:, None]]
            content[name] = np.concatenate([*columns, x], 1).astype(np.uint8).tobytes()
    if packed:
        path = root / f"cifar-{kind}-{version}.{packed}"
        with tarfile.open(path, "w:gz" if packed == "tar.gz" else "w") as archive:
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
    "cifar10 binary": partial(cifar, kind=10, version="binary"),
    "cifar10 python": partial(cifar, kind=10, version="python"),
    "cifar10 tar": partial(cifar, kind=10, version="binary", packed="tar.gz"),
    "cifar10 plain tar": partial(cifar, kind=10, version="binary", packed="tar"),
    "cifar100 binary": partial(cifar, kind=100, version="binary"),
    "cifar100 python": partial(cifar, kind=100, version="python"),
    "cifar100 tar": partial(cifar, kind=100, version="python", packed="tar.gz"),
    "femnist": femnist,
    "femnist bytes": partial(femnist, scale="byte"),
    "femnist split": partial(femnist, split=True),
    "celeba": celeba,
    "celeba leaf": partial(celeba, layout="leaf"),
    "mnist": partial(idx, packed=False),
    "mnist writers": partial(idx, writers=True),
    "fashion-mnist": partial(idx, name="fashion-mnist"),
    "emnist": partial(idx, name="emnist"),
    "emnist zip": partial(idx, name="emnist", archive=True),
    "npz": npz,
    "npz packed": partial(npz, packed=True),
    "npz features": partial(npz, kind="features"),
    "npz celeba": partial(npz, kind="celeba"),
    "npz writer": partial(npz, kind="writer"),
    "folder": folder,
    "folder clients": partial(folder, clients=True),
    "folder split": partial(folder, split=True),
}
