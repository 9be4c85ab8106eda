"""The container: every bit comes back, safetensors' own library reads it, and no bytes break the reader."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metavd import container
from metavd.container import DTYPES, ContainerError, Format, dump, load, load_foreign, seal, write_atomic

NOTE = Format("note", 3, max_header=1 << 20)


def same(found, wanted):
    """Names in order, dtypes, shapes and bits; NaN equals itself."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert found[name].is_contiguous()
        assert torch.equal(raw(found[name]), raw(value)), name


def raw(value):
    return value.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def payload_size(data):
    """How many bytes of a container are not its header's."""
    return len(data) - 8 - int.from_bytes(data[:8], "little")


def some(shape, dtype, seed=0):
    """Random bits of a dtype: NaN, infinities and subnormals are among them."""
    count = math.prod(shape)
    if dtype == torch.bool:
        return torch.from_numpy(np.random.default_rng(seed).random(count) < 0.5).reshape(shape)
    data = np.random.default_rng(seed).bytes(count * dtype.itemsize)
    return torch.frombuffer(bytearray(data or b"\0" * 8), dtype=dtype)[:count].reshape(shape).clone()


def mixed():
    """Every dtype, in an order that is neither alphabetical nor by size."""
    return {f"{'zya'[i % 3]}.{name}": some((i % 4, 3), dtype, i) for i, (name, dtype) in enumerate(DTYPES.items())}


# --- every bit comes back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,), (4, 0, 2), (2, 3, 4, 5)], ids=str)
def test_round_trip(shape, dtype):
    """Whatever the bits are, NaN and infinities too, they come back: 0-d and empty tensors, every dtype."""
    held = {"b.weight": some(shape, dtype, 1), "a": some(shape, dtype)}
    found, about = load(NOTE, dump(NOTE, held, {"text": 'ü "quoted"\n'}))
    same(found, held)
    assert about == {"text": 'ü "quoted"\n'}


def test_order_is_kept():
    """Sums over entries are taken in their order, so it is part of a state."""
    for held in (mixed(), dict(reversed(mixed().items()))):
        same(load(NOTE, dump(NOTE, held))[0], held)


def test_layouts():
    """Slices, transposes, channels_last, expanded tensors and leaves that want gradients are held by value."""
    base = torch.randn(4, 3, 6, 5)
    held = {
        "sliced": base[::2, :, 1::2],
        "turned": base.permute(3, 1, 0, 2),
        "last": base.contiguous(memory_format=torch.channels_last),
        "wide": torch.randn(4, 1).expand(4, 7),
        "leaf": torch.randn(3, requires_grad=True),
        "one": torch.randn(9)[::3][:1],
    }
    same(load(NOTE, dump(NOTE, held))[0], held)
    assert dump(NOTE, {"a": held["last"]}) == dump(NOTE, {"a": base})


def test_nothing_at_all():
    assert load(NOTE, dump(NOTE, {})) == ({}, {})
    assert payload_size(dump(NOTE, {})) == 0


def test_equal_values_make_equal_bytes():
    """No clock, no memory garbage, no order of a hash table."""
    assert dump(NOTE, mixed(), {"b": "1", "a": "2"}) == dump(
        NOTE, {name: value.clone() for name, value in mixed().items()}, {"b": "1", "a": "2"}
    )


def test_the_payload_is_the_tensors_bytes():
    held = mixed()
    assert payload_size(dump(NOTE, held)) == sum(value.nbytes for value in held.values())


def test_safetensors_reads_it(tmp_path):
    """The library opens the file, mapped, with all tensors aligned and the words as metadata."""
    held = mixed()
    path = tmp_path / "note.safetensors"
    path.write_bytes(dump(NOTE, held, {"by": "me"}))
    found = safetensors.torch.load_file(path)
    assert set(found) == set(held)
    same({name: found[name] for name in held}, held)
    with safetensors.safe_open(path, framework="pt") as file:
        words = file.metadata()
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    for name, value in held.items():
        assert header[name]["data_offsets"][0] % value.itemsize == 0, "a mapped tensor is aligned"
    assert int.from_bytes(data[:8], "little") % 8 == 0
    assert words.pop("sha256")
    assert words == {"format": "metavd note", "version": "3", "by": "me"}


def test_a_file_of_others_is_refused():
    """What safetensors writes by itself has neither order nor checksum, as an old checkpoint: one sentence says so."""
    with pytest.raises(ContainerError, match="this is not a note of metavd, or one of a version before 3"):
        load(NOTE, safetensors.torch.save(mixed()))


@pytest.mark.parametrize(
    ("params", "kind", "reason"),
    [
        ({"": torch.zeros(1)}, "name", "names have 1 to 256 printable characters"),
        ({"a\n": torch.zeros(1)}, "name", "names have 1 to 256 printable characters"),
        ({"\ud800": torch.zeros(1)}, "name", "names have 1 to 256 printable characters"),
        ({"a" * 257: torch.zeros(1)}, "name", "names have 1 to 256 printable characters"),
        ({"__metadata__": torch.zeros(1)}, "name", "an entry cannot be named '__metadata__'"),
        ({"a": torch.zeros(1, dtype=torch.complex64)}, "dtype", "a is torch.complex64"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "dtype", "layout torch.sparse_coo"),
        ({"a": torch.zeros(1).expand(1 << 32)}, "shape", "too large"),
        ({"a": torch.zeros([1] * 17)}, "shape", "too large"),
        ({f"{i:0250}": torch.zeros(()) for i in range(5000)}, "oversized", "the header would take"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_held(params, kind, reason):
    """One sentence says what cannot be held, and why."""
    with pytest.raises(ContainerError, match=reason) as caught:
        dump(NOTE, params)
    assert caught.value.kind == kind


# --- damage and lies -------------------------------------------------------------------------------------------------


def text(entries, **words):
    """A header around whatever the entries are."""
    words = {"sha256": "0" * 64, "format": "metavd note", "version": "3"} | words
    body = json.dumps({"__metadata__": words}, separators=(",", ":"))
    return (body[:-1] + "".join(f",{json.dumps(name)}:{json.dumps(each)}" for name, each in entries) + "}").encode()


def entry(dtype="F32", shape=(1,), begin=0, end=4):
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


def sealed(*entries, payload=b"\0" * 4, **words):
    """A container with a proper checksum around whatever it holds: what a hostile client can make."""
    return seal(text(entries, **words), [payload])


def replaced(old, new, payload=b"\0" * 4):
    header = text([("a", entry())])
    assert old in header
    return seal(header.replace(old, new), [payload])


def test_sealed_makes_containers():
    """The builder of the tests below agrees with the format, so that they fail for what they name alone."""
    assert load(NOTE, sealed(("a", entry(shape=(2,), end=8)), payload=b"\0" * 8))[0]["a"].tolist() == [0, 0]


HOSTILE = {
    "start": (b"\x10\0\0\0\0\0\0\0" + b"PK\3\4" * 30, "not a note of metavd"),
    "header is no JSON": (seal(text([])[:-1], []), "not proper JSON"),
    "header is no text": (seal(text([])[:-1] + b"\xff\xfe\xfd}", []), "not proper JSON"),
    "header is deep": (seal(text([])[:-1] + b',"a":' + b"[" * 200_000, []), "not proper JSON"),
    "header goes on": (seal(text([]) + b"{}", []), "not proper JSON"),
    "header holds NaN": (replaced(b"[1]", b"[NaN]"), "not proper JSON"),
    "header holds Infinity": (replaced(b"[0, 4]", b"[0,Infinity]"), "not proper JSON"),
    "header holds a giant": (replaced(b"[1]", b"[1" + b"0" * 5000 + b"]"), "not proper JSON"),
    "header is long": (seal(text([]) + b" " * (1 << 20), []), "claims a header"),
    "header claim": (b"\xff" * 7 + b"\x7f" + dump(NOTE, {})[8:], "claims a header"),
    "header beyond the end": (b"\0\0\1\0\0\0\0\0" + dump(NOTE, {})[8:], "truncated"),
    "metadata are numbers": (sealed(round=5, payload=b""), "are not texts"),
    "metadata twice": (seal(text([])[:-1] + b',"__metadata__":{}}', []), "holds '__metadata__' twice"),
    "another format": (sealed(format="metavd message", payload=b""), "calls itself 'metavd message'"),
    "entry is no object": (sealed(("a", 5)), "not described by dtype, shape and data_offsets"),
    "entry is short": (sealed(("a", {"dtype": "F32", "shape": [1]})), "not described by"),
    "entry is long": (sealed(("a", entry() | {"more": 1})), "not described by"),
    "name is long": (sealed(("a" * 257, entry())), "improper name"),
    "name is a surrogate": (sealed(("\ud800", entry())), "improper name"),
    "dtype": (sealed(("a", entry("C64"))), "unknown dtype 'C64'"),
    "dtype is no text": (sealed(("a", entry([]))), "unknown dtype"),
    "shape is negative": (sealed(("a", entry(shape=(-1,)))), "improper shape"),
    "shape is a float": (sealed(("a", entry(shape=(1.0,)))), "improper shape"),
    "shape is a boolean": (sealed(("a", entry(shape=(True,)))), "improper shape"),
    "shape is a number": (sealed(("a", entry(shape=1))), "improper shape"),
    "shape has 17 axes": (sealed(("a", entry(shape=(1,) * 17))), "improper shape"),
    "shape bomb": (sealed(("a", entry(shape=(2**40,)))), "a takes 4 bytes instead of 4398046511104"),
    "shape bomb beside 0": (sealed(("a", entry(shape=(0, 2**61, 2**61), end=0)), payload=b""), "improper shape"),
    "place is negative": (sealed(("a", entry(begin=-4, end=0))), "improper place"),
    "place is one number": (sealed(("a", entry() | {"data_offsets": [4]})), "improper place"),
    "place is too long": (sealed(("a", entry(end=8)), payload=b"\0" * 8), "a takes 8 bytes instead of 4"),
    "place is turned round": (sealed(("a", entry(begin=4, end=0))), "a takes -4 bytes instead of 4"),
    "tensors overlap": (sealed(("a", entry()), ("b", entry(begin=2, end=6)), payload=b"\0" * 6), "byte 4 is next"),
    "tensors share bytes": (sealed(("a", entry()), ("b", entry())), "b begins at byte 0, where byte 4 is next"),
    "a hole": (sealed(("a", entry()), ("b", entry(begin=8, end=12)), payload=b"\0" * 12), "byte 4 is next"),
    "a hole at the start": (sealed(("a", entry(begin=4, end=8)), payload=b"\0" * 8), "where byte 0 is next"),
    "bytes are missing": (sealed(("a", entry()), payload=b"\0" * 3), "claim 4 bytes, and it has 3"),
    "bytes are left over": (sealed(("a", entry()), payload=b"\0" * 8), "claim 4 bytes, and it has 8"),
    "twice": (sealed(("a", entry()), ("a", entry(begin=4, end=8)), payload=b"\0" * 8), "holds 'a' twice"),
    "no booleans": (sealed(("a", entry("BOOL", (2,), 0, 2)), payload=b"\1\2"), "no booleans"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_bytes(case):
    """A well sealed lie is refused by one sentence, within 2 s and below 50 MB."""
    data, reason = HOSTILE[case]
    tracemalloc.start()
    begun = time.process_time()
    try:
        with pytest.raises(ContainerError, match=reason) as caught:
            load(NOTE, data)
        assert "\n" not in str(caught.value)
        assert tracemalloc.get_traced_memory()[1] < 50e6
        assert time.process_time() - begun < 2
    finally:
        tracemalloc.stop()


def test_many_entries_take_bounded_time():
    """The longest header of the shortest entries, the last one twice: nothing is quadratic."""
    names = [f"{i:x}" for i in range(16_000)]
    data = sealed(*((name, entry("BOOL", (0,), 0, 0)) for name in [*names, names[-1]]), payload=b"")
    begun = time.process_time()
    with pytest.raises(ContainerError, match="twice"):
        load(NOTE._replace(max_header=1 << 21), data)
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("version", ["0", "2", "4", "65535", "3.0", ""])
def test_other_versions(version):
    """Both versions are named."""
    with pytest.raises(ContainerError, match=f"the note has version {version}, and .* reads version 3") as caught:
        load(NOTE, sealed(version=version, payload=b""))
    assert caught.value.kind == "version"


def test_every_truncation_and_every_flipped_bit():
    """No byte is without a guard: any cut, any longer copy and any changed bit is refused."""
    data = dump(NOTE, {"a": torch.arange(3), "b": torch.tensor([True])}, {"by": "me"})
    for length in range(len(data)):
        with pytest.raises(ContainerError):
            load(NOTE, data[:length])
    with pytest.raises(ContainerError, match="checksum"):
        load(NOTE, data + b"\0")
    for place in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(ContainerError):
            load(NOTE, bytes(flipped))


# --- fuzz ------------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
LENGTH = st.integers(-1, 9) | st.sampled_from([2**31, 2**62, 2**64])
ENTRY = st.fixed_dictionaries({
    "dtype": st.sampled_from(sorted(DTYPES)) | JSON,
    "shape": st.lists(LENGTH, max_size=3) | JSON,
    "data_offsets": st.lists(LENGTH, min_size=2, max_size=2) | JSON,
})  # fmt: skip


@pytest.mark.parametrize("about", [None, {}, {"by": "them", "format": "pt"}], ids=str)
def test_files_of_the_library_are_read(about, tmp_path):
    """Every dtype, 0-d and empty tensors, with and without words, whatever the length of the header."""
    for length in range(1, 10):
        held = mixed() | {"n" * length: some((), torch.float32), "empty": some((0, 3), torch.float16)}
        safetensors.torch.save_file(held, tmp_path / "theirs", about)
        found = load_foreign((tmp_path / "theirs").read_bytes())
        same(dict(sorted(found.items())), dict(sorted(held.items())))
        assert all(value.data_ptr() % value.itemsize == 0 for value in found.values())
    assert load_foreign(safetensors.torch.save({})) == {}


def test_a_header_of_another_writer_is_read():
    """Without words and without padding, so that the tensors' bytes are not aligned."""
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    values = torch.tensor([1.5, -2.0])
    found = load_foreign(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    assert torch.equal(found["a"], values)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda _: b"", "it has 0 bytes"),
        (lambda _: b"no tensors here", "claims a header of"),
        (lambda data: data[:40], "truncated"),
        (lambda data: data[:-1], "claim 24 bytes, and it has 23"),
        (lambda data: data + b" ", "claim 24 bytes, and it has 25"),
        (lambda data: data.replace(b'"F32"', b'"F4 "'), "unknown dtype 'F4 '"),
        (lambda data: data.replace(b"[2,3]", b"[2,4]"), "takes 24 bytes instead of 32"),
        (lambda data: data.replace(b"{", b"[", 1), "not proper JSON"),
        (lambda _: (4).to_bytes(8, "little") + b"[[]]", "not a JSON object"),
        (lambda _: (2).to_bytes(8, "little") + b"[" * 2, "not proper JSON"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(spoil, says):
    """In one sentence, and before memory is taken."""
    with pytest.raises(ContainerError, match=says):
        load_foreign(spoil(safetensors.torch.save({"a": torch.ones(2, 3)})))


@given(st.binary(max_size=200), st.integers(0, 120))
def test_no_foreign_bytes_break_the_reader(junk, at):
    """Junk in the middle of a file is refused, or the library reads the same."""
    data = safetensors.torch.save({"a": torch.ones(2, 3), "b": torch.ones(1, dtype=torch.bool)})
    data = data[:at] + junk + data[at + len(junk) :]
    try:
        found = load_foreign(data)
    except ContainerError:
        return
    theirs = safetensors.torch.load(data)
    same(found, {name: theirs[name] for name in found})


def survives(data):
    """Reading gives tensors that make sense, which the library agrees with, or ContainerError: nothing else."""
    try:
        found, about = load(NOTE, data)
    except ContainerError:
        return
    assert sum(value.nbytes for value in found.values()) == payload_size(data) < len(data)
    again, words = load(NOTE, dump(NOTE, found, about))
    same(again, found)
    assert words == about
    theirs = safetensors.torch.load(data)
    same(load_foreign(data), found)
    same({name: theirs[name].contiguous() for name in found}, found)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes(data):
    """Bytes that nobody wrote, bare, as a header, and as a tensor."""
    survives(data)
    survives(seal(data, []))
    survives(seal(text([])[:-1] + data + b"}", []))
    survives(sealed(("a", entry("U8", (len(data),), 0, len(data))), payload=data))


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), ENTRY | JSON), max_size=3), st.binary(max_size=40))
def test_random_headers(entries, payload):
    """Well sealed containers whose headers are almost right."""
    survives(sealed(*entries, payload=payload))


@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans())
def test_random_mutations(damaged, data, again):
    """Real containers with bytes changed, cut out or put in; sealed again, so that the checksum does not help."""
    body = damaged(data, dump(NOTE, {"a": torch.arange(3), "b.c": torch.ones(2, 1)}, {"by": "me"}), again)
    survives(body)


# --- files -----------------------------------------------------------------------------------------------------------


def test_write_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a file is as it was until it is whole."""
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(container.os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"new and longer")
    assert path.read_bytes() == b"old"
    monkeypatch.undo()
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
