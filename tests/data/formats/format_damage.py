"""Ways to spoil a dataset: damage that happens to files, and files that somebody made to do harm."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import shutil
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from format_samples import Made, celeba, cifar, femnist, folder, idx_bytes, pictures
from PIL import Image

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


def replace_file(made: Made, rng: np.random.Generator, how: str) -> None:
    """Take one of the files away, or put something else in its place."""
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
        "hash for ever, hidden by a version": b"\x80\x02)" + b"\x80\x02q\x00h\x00\x86" * 60 + b"q\x00}h\x00K\x01s.",
        "hash for ever, hidden by a state": b"\x80\x02)" + b"Nbq\x00h\x00\x86" * 60 + b"q\x00}h\x00K\x01s.",
        "colliding tuples": b"\x80\x02}(" + b"".join(
            b"(" + b"".join(b"J" + struct.pack("<i", -1 - (i >> bit & 1)) for bit in range(15)) + b"tN"
            for i in range(20_000)) + b"u.",
        "hash too deep": b"\x80\x02}N" + b"\x85" * 400_000 + b"K\x01s.",
        "colliding keys, singly": b"}" + b"".join(f"L{i * (2**61 - 1)}L\nI1\ns".encode() for i in range(40_000)) + b".",
        "memo index in text": b"Np2000000000\n.",
        "state for a function": b"\x80\x02cnumpy\ndtype\n}U\x08functionK\x01sb.",
        "state for a list": b"\x80\x02]}b.",
        "call of a value": b"\x80\x02]q\x00)R.",
        "bare array": b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nJ\xff\xff\xff\x7f\x85U\x01b\x87"
        b"R.",
        "array filled again": pickle.dumps(np.zeros(9, np.uint8), 2)[:-1] + b")K\x01s" * 10 + b".",
        "long of 250 bytes": b"\x80\x02\x8a\xfa" + b"\x7f" * 250 + b".",
        "no dict": pickle.dumps([1, 2, 3], 2),
        "labels of text": pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": ["a", "b"]}, 2),
        "labels too large": pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [2**70, 0]}, 2),
        "labels nested": pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [[0], [1]]}, 2),
        "floats": pickle.dumps({b"data": np.zeros((2, 3072)), b"labels": [0, 1]}, 2),
        "short labels": pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]}, 2),
    }  # fmt: skip


def tar_bombs() -> Iterator[tuple[str, bytes]]:
    """Yield (what, .tar.gz) of archives that must be refused."""
    inside = "cifar-10-batches-bin/data_batch_1.bin"

    def header(name: str = inside, kind: bytes = tarfile.REGTYPE, size: int = 0, link: str = "") -> bytes:
        info = tarfile.TarInfo(name)
        info.type, info.size, info.linkname = kind, size, link
        return info.tobuf(tarfile.GNU_FORMAT)

    def packed(*pieces: bytes, zeros: int = 0) -> bytes:
        buffer = io.BytesIO()
        with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=9 if zeros else 1) as file:
            for piece in (*pieces, *(bytes(1 << 20) for _ in range(zeros >> 20))):
                file.write(piece)
        return buffer.getvalue()

    yield "tar bomb", packed(header(size=1 << 33), zeros=300 << 20)
    yield "tar bomb in an extended header", packed(header("pax", tarfile.XHDTYPE, 1 << 30), zeros=300 << 20)
    yield "tar bomb in a long name", packed(header("long", tarfile.GNUTYPE_LONGNAME, 1 << 30), zeros=300 << 20)
    yield "tar of many members", packed(header("x") * 5_000)
    yield "tar of many extended headers", packed(header("x", tarfile.XHDTYPE) * 5_000)
    yield (
        "tar with a size below 0",
        packed(tarfile.TarInfo.create_pax_global_header({"size": "-5000"}), header(size=512), bytes(512)),
    )
    yield "tar with a sparse file", packed(header(kind=tarfile.GNUTYPE_SPARSE, size=1 << 40), bytes(2048))
    for name in ("../../evil", "/etc/passwd", "cifar-10-batches-bin/../../a"):
        yield f"tar with {name}", packed(header(name, size=4), b"evil".ljust(512), bytes(1024))
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
        yield f"tar with a file of type {kind!r}", packed(header(kind=kind, link="/etc/passwd"), bytes(1024))


def bombs(root: Path, rng: np.random.Generator) -> Iterator[tuple[str, str, Path, dict[str, Any]]]:
    """Yield (what, format, root, options) of archives that must be refused; each in a folder of its own."""
    numbers = iter(range(1_000))

    def place() -> Path:
        folder = root / f"bomb-{next(numbers)}"
        folder.mkdir()
        return folder

    zeros = 300 << 20
    for what, data in tar_bombs():
        path = place() / "cifar-10-binary.tar.gz"
        path.write_bytes(data)
        yield what, "cifar10", path.parent, {"subset": True}
    top = place()
    raw = top / "MNIST/raw"
    raw.mkdir(parents=True)
    for half in ("train", "t10k"):
        with gzip.open(raw / f"{half}-images-idx3-ubyte.gz", "wb", 9) as file:
            file.write(struct.pack(">HBBIII", 0, 8, 3, 400_000, 28, 28))
            for _ in range(zeros >> 20):
                file.write(bytes(1 << 20))
        (raw / f"{half}-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(400_000, np.uint8)))
    yield "gzip bomb", "mnist", top, {}
    path = place() / "own.npz"
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
        text = header.encode() + b"\n"
        magic = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text))
        yield f"npz header: {name}", "npz", _zip(place(), ("images", magic + text + bytes(64)), ("label", b"")), {}
    path = place() / "own.npz"
    np.savez(path, images=pictures(rng, 4, 5, 5), label=np.array([_Evil(os.system, f"touch {MARK}")], object))
    yield "npz with a pickle", "npz", path, {}
    yield "zip with ../", "npz", _zip(place(), ("../images", b"evil")), {}
    yield "zip with a name twice", "npz", _zip(place(), ("x", b"a"), ("x", b"b")), {}
    body = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", body), (b"IDAT", zlib.compress(bytes(1 << 20))), (b"IEND", b""))
    )
    top = place()
    for label in ("a", "b"):
        (top / label).mkdir()
        (top / label / "1.png").write_bytes(png)
    yield "picture of 60,000 x 60,000", "folder", top, {}


def _zip(place: Path, *members: tuple[str, bytes]) -> Path:
    with zipfile.ZipFile(place / "own.npz", "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, data in members:
            archive.writestr(f"{name}.npy", data)
    return place / "own.npz"


X, Y = np.random.default_rng(0).standard_normal((6, 4)), np.arange(6) % 2
ARRAYS: dict[str, dict[str, Any]] = {
    "NaN features": {"x": np.where(np.arange(4) == 2, np.nan, X), "y": Y},
    "infinite features": {"x": np.where(np.arange(4) == 2, np.inf, X), "y": Y},
    "features beyond float32": {"x": X * 1e300, "y": Y},
    "one class": {"x": X, "y": np.zeros(6, int)},
    "one sample": {"x": X[:1], "y": Y[:1]},
    "negative label": {"x": X, "y": Y - 1},
    "labels with a gap": {"x": X, "y": Y * 3},
    "float labels": {"x": X, "y": Y * 1.0},
    "labels too short": {"x": X, "y": Y[:5]},
    "one text label": {"x": X, "y": np.array(list("aaaaaa"))},
    "negative client": {"x": X, "y": Y, "client": Y - 1},
    "all rows test rows": {"x": X, "y": Y, "test": np.ones(6, bool)},
    "strange split": {"x": X, "y": Y, "split": np.array(["train"] * 5 + ["val"])},
    "two kinds of images": {"x": X, "images": X, "y": Y},
    "no labels": {"x": X},
    "five axes": {"x": np.zeros((6, 1, 2, 2, 2), np.uint8), "y": Y},
    "no telling channels": {"x": np.zeros((6, 3, 3, 3), np.uint8), "y": Y},
    "complex features": {"x": X * 1j, "y": Y},
}
GOOD_ARRAYS: dict[str, dict[str, Any]] = {
    "clients doubled in both halves": {"x": X, "y": Y, "client": Y, "test": np.arange(6) > 3},
    "split as text": {"x": X, "y": Y, "split": np.array(["train"] * 5 + ["test"])},
    "big-endian, by columns": {"x": np.asfortranarray(X.astype(">f8")), "y": Y.astype(">i2")},
}

Change = Callable[[Any], Any]


def _first(shard: dict[str, Any], key: str) -> list[Any]:
    return shard["user_data"][shard["users"][0]][key]


def _pixel(value: Any) -> Change:
    return lambda shard: _first(shard, "x")[0].__setitem__(5, value)


LEAF: dict[str, Change] = {
    "user twice": lambda s: s["users"].append(s["users"][0]),
    "user in two shards": lambda _: None,
    "count wrong": lambda s: s["num_samples"].__setitem__(0, 99),
    "user without rows": lambda s: s["user_data"].pop(s["users"][0]),
    "rows without user": lambda s: (s["users"].pop(), s["num_samples"].pop()),
    **{f"pixel {value}": _pixel(value) for value in (256, -0.1, 1.5, float("nan"), None)},
    "short row": lambda s: _first(s, "x")[0].pop(),
    "label 62": lambda s: _first(s, "y").__setitem__(0, 62),
    "label 1.5": lambda s: _first(s, "y").__setitem__(0, 1.5),
    "label missing": lambda s: _first(s, "y").pop(),
    "both scales": lambda s: _first(s, "x").__setitem__(slice(None), [[200] * 784] * len(_first(s, "y"))),
    "names among zeros and ones": lambda s: (
        _first(s, "x").__setitem__(slice(None), ["a.jpg"] * len(_first(s, "y"))),
        [s["user_data"][user].update(x=[[1] * 784] * len(s["user_data"][user]["y"])) for user in s["users"][1:]],
    ),
}
JSON = {
    "deep": "[" * 200_000,
    "digits": '{"users": [' + "9" * 10_000 + "]}",
    "list": "[1, 2]",
    "keys": '{"users": [], "users": []}',
    "huge": '{"users":["a"],"num_samples":[1],"user_data":{"a":{"x":[[1e999]],"y":[1]}}}',
    "none": '{"users":[],"num_samples":[],"user_data":{}}',
}


def _edit(name: str, old: str, new: str) -> Change:
    def edit(place: Path) -> None:
        path = place / "celeba" / name
        path.write_text(path.read_text().replace(old, new, 1))

    return edit


CELEBA: dict[str, Change] = {
    "traversal": _edit("list_attr_celeba.txt", "000001.jpg", "../../x.jpg"),
    "attribute 2": _edit("list_attr_celeba.txt", "-1  1", "-1  2"),
    "identity missing": _edit("identity_CelebA.txt", "000001.jpg", "999999.jpg"),
    "identity no number": _edit("identity_CelebA.txt", "000001.jpg ", "000001.jpg x"),
    "listed twice": _edit("identity_CelebA.txt", "000001.jpg", "000002.jpg"),
    "count": _edit("list_attr_celeba.txt", "6\n", "7\n"),
    "picture missing": lambda p: (p / "celeba/img_align_celeba/000003.jpg").unlink(),
}


def _picture(path: Path, shape: tuple[int, ...], dtype: Any = np.uint8) -> None:
    Image.fromarray(np.full(shape, 7, dtype)).save(path)


FOLDER: dict[str, Change] = {
    "stray picture": lambda p: shutil.copy(next(p.rglob("0.*")), p / "photos" / "stray.png"),
    "too deep": lambda p: (p / "photos/cat/x/y").mkdir(parents=True),
    "empty class": lambda p: (p / "photos/empty").mkdir(),
    "unknown file": lambda p: (p / "photos/cat/a.heic").write_bytes(b"x"),
    "case": lambda p: shutil.copytree(p / "photos/cat", p / "photos/CAT"),
    "one class": lambda p: shutil.rmtree(p / "photos/cat"),
    "nothing": lambda p: (shutil.rmtree(p / "photos"), (p / "photos").mkdir()),
    "another size": lambda p: _picture(p / "photos/cat/9.png", (9, 9, 3)),
    "16 bits": lambda p: _picture(p / "photos/cat/9.png", (7, 6), np.uint16),
}


def _poke(path: Path, at: int, value: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] = value
    path.write_bytes(bytes(data))


CIFAR: dict[str, Change] = {
    "label 10": lambda p: _poke(p / "data_batch_2.bin", 3073 * 2, 10),
    "label 255": lambda p: _poke(p / "test_batch.bin", 0, 255),
    "half a record": lambda p: (p / "test_batch.bin").write_bytes((p / "test_batch.bin").read_bytes()[:-1000]),
    "one class": lambda p: [_poke(file, 3073 * i, 3) for file in sorted(p.iterdir()) for i in range(6)],
}


def odd(root: Path, rng: np.random.Generator) -> Iterator[tuple[str, str, Path, dict[str, Any], bool]]:
    """Yield (what, format, root, options, whether it must load) of whole files with unusual content."""
    numbers = iter(range(1_000))

    def place() -> Path:
        folder = root / f"odd-{next(numbers)}"
        folder.mkdir()
        return folder

    for table, must in ((ARRAYS, False), (GOOD_ARRAYS, True)):
        for what, content in table.items():
            path = place() / "own.npz"
            np.savez(path, **content)
            yield what, "npz", path, {}, must
    for what, change in LEAF.items():
        made = femnist(top := place(), rng)
        content = json.loads(made.files[0].read_text())
        change(content)
        made.files[0].write_text(json.dumps(content))
        if what == "user in two shards":
            shutil.copy(made.files[0], made.files[0].with_name("copy.json"))
        yield f"LEAF: {what}", "femnist", top, {}, False
    for what, text in JSON.items():
        shards = (top := place()) / "femnist" / "all_data"
        shards.mkdir(parents=True)
        (shards / "all_data_0.json").write_text(text)
        yield f"JSON: {what}", "femnist", top, {}, False
    for what, change in CELEBA.items():
        celeba(top := place(), rng)
        change(top)
        yield f"CelebA: {what}", "celeba", top, {"size": 8, "least": 1}, False
    made = celeba(top := place(), rng, layout="leaf")
    made.files[0].write_text(made.files[0].read_text().replace("000001.jpg", "../../../etc/passwd"))
    yield "LEAF: traversal", "celeba", top, {"size": 8}, False
    for what, change in FOLDER.items():
        folder(top := place(), rng)
        change(top)
        yield f"folder: {what}", "folder", top / "photos", {}, False
    for what, change in CIFAR.items():
        made = cifar(top := place(), rng, kind=10, version="binary")
        change(made.files[0].parent)
        yield f"CIFAR: {what}", "cifar10", top, {"subset": True}, False
    cifar(top := place(), rng, kind=100, version="binary")
    yield "CIFAR: not the official number of records", "cifar100", top, {}, False
