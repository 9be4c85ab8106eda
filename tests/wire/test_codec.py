"""The container: every bit arrives, what is counted is what is sent, and no bytes break the reader."""

from __future__ import annotations

import hashlib
import json
import struct
import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metavd import methods, wire
from metavd.core import rng
from metavd.core.model import from_module, mlp, xavier
from metavd.core.types import Update
from metavd.data.cohort import TRAIN, batches, choose, pool
from metavd.data.formats import load
from metavd.data.partition import Federation
from metavd.engine.checkpoint import state_hash
from metavd.engine.cohorts import simulate
from metavd.engine.schedule.loop import loop
from metavd.tree import stack
from metavd.wire import WireError, codec, counted, decode, encode

DTYPES = tuple(codec._DTYPES.values())


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


def some(shape, dtype, seed=0):
    """Random bits of a dtype: NaN, infinities and subnormals are among them."""
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.from_numpy(np.random.default_rng(seed).random(count) < 0.5).reshape(shape)
    data = np.random.default_rng(seed).bytes(count * dtype.itemsize)
    return torch.frombuffer(bytearray(data or b"\0" * 8), dtype=dtype)[:count].reshape(shape).clone()


def masked(mask, *, shape=(16, 8), dtype=torch.float32):
    """A layer with a mask, per weight or per input unit, and one without."""
    gen = torch.Generator().manual_seed(0)
    spread = shape if mask.dim() > 1 else (shape[1],)
    return {
        "fc.weight": torch.randn(shape, generator=gen, dtype=dtype),
        "fc.bias": torch.randn(shape[0], generator=gen, dtype=dtype),
        "fc.mask": mask.to(dtype),
        "fc.logvar": torch.randn(spread, generator=gen, dtype=dtype),
        "out.weight": torch.randn(3, 8, generator=gen, dtype=dtype),
    }


def first(count, shape=(16, 8)):
    return (torch.arange(torch.Size(shape).numel()) < count).reshape(shape).float()


# --- every bit arrives -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,), (4, 0, 2), (2, 3, 4, 5)], ids=str)
def test_round_trip(shape, dtype):
    """Whatever the bits are, NaN and infinities too, they come back: 0-d and empty tensors, every dtype."""
    sent = {"a": some(shape, dtype), "b.weight": some(shape, dtype, 1)}
    same(decode(encode(sent)), sent)


def test_layouts():
    """Slices, transposes, channels_last, expanded tensors and leaves that want gradients arrive by value."""
    base = torch.randn(4, 3, 6, 5)
    sent = {
        "sliced": base[::2, :, 1::2],
        "turned": base.permute(3, 1, 0, 2),
        "last": base.contiguous(memory_format=torch.channels_last),
        "wide": torch.randn(4, 1).expand(4, 7),
        "leaf": torch.randn(3, requires_grad=True),
        "one": torch.randn(9)[::3][:1],
    }
    same(decode(encode(sent)), sent)
    assert encode({"a": sent["last"]}) == encode({"a": base})
    mask = (torch.rand(4, 3, 6, 5) > 0.5).float()
    layer = {"c.weight": sent["last"], "c.mask": mask.contiguous(memory_format=torch.channels_last)}
    same(decode(encode(layer)), {"c.weight": base * mask + 0.0, "c.mask": mask})


def test_nothing_at_all():
    """A client may have nothing to send."""
    assert decode(encode({})) == {}


def test_the_same_parameters_make_the_same_bytes():
    """No clock, no memory garbage: a message is a function of its parameters."""
    assert encode(masked(first(40))) == encode({name: value.clone() for name, value in masked(first(40)).items()})


# --- masks -----------------------------------------------------------------------------------------------------------

MASKS = {"none": first(0), "few": first(3), "half": first(64), "most": first(126), "all": first(128),
         "units": torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 1]), "no unit": torch.zeros(8)}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("which", MASKS)
def test_dropped_values_come_back_as_zero(which, dtype):
    """Down: kept weights and spreads arrive to the bit, dropped ones are zero, bias and mask arrive whole."""
    sent = masked(MASKS[which], dtype=dtype)
    mask = sent["fc.mask"]
    same(decode(encode(sent)), sent | {name: sent[name] * mask + 0.0 for name in ("fc.weight", "fc.logvar")})


@pytest.mark.parametrize("which", MASKS)
def test_dropped_values_come_back_as_they_were_sent(which):
    """Up: the server fills them in with what it sent, so that they do not pull; the mask does not travel."""
    sent = masked(MASKS[which])
    answer = {name: value if name == "fc.mask" else value + 1 for name, value in sent.items()}
    mask = sent["fc.mask"]
    wanted = answer | {name: torch.where(mask > 0, answer[name], sent[name]) for name in ("fc.weight", "fc.logvar")}
    message = encode(answer, mask_known=True)
    same(decode(message, like=sent), wanted)
    same(decode(message, like=sent, masks={"fc.mask": mask}), wanted)
    zeros = {name: answer[name] * mask + 0.0 for name in ("fc.weight", "fc.logvar")}
    same(decode(message, masks={"fc.mask": mask}), answer | zeros)
    with pytest.raises(WireError, match=r"fc\.mask did not travel, and the receiver does not have it"):
        decode(message)


def test_a_mask_of_units_covers_convolutions():
    """A mask per input channel drops that channel's whole kernels."""
    mask = torch.tensor([1.0, 0, 1])
    sent = {"c.weight": torch.randn(5, 3, 2, 2), "c.bias": torch.randn(5), "c.mask": mask, "c.logalpha": torch.randn(3)}
    data = encode(sent, mask_known=True)
    assert counted(data) == 4 * (5 * 2 * 4 + 5 + 2)
    wanted = sent | {
        "c.weight": sent["c.weight"] * mask[None, :, None, None] + 0.0,
        "c.logalpha": sent["c.logalpha"] * mask + 0.0,
    }
    same(decode(data, masks=sent), wanted)


def test_a_mask_of_units_spares_biases():
    """In a square layer a bias has the shape of the mask, and is whole all the same."""
    sent = {"fc.weight": torch.randn(3, 3), "fc.bias": torch.randn(3), "fc.mask": torch.tensor([1.0, 0, 0])}
    assert counted(encode(sent, mask_known=True)) == 4 * (3 + 3) == wire.traffic(sent).up
    assert torch.equal(decode(encode(sent))["fc.bias"], sent["fc.bias"])


@pytest.mark.parametrize("bad", [0.5, 2.0, -1.0, float("nan"), float("inf")])
def test_a_mask_holds_zeros_and_ones(bad):
    """Anything else is refused by the sender."""
    mask = first(60)
    mask[0, 0] = bad
    with pytest.raises(WireError, match=r"fc\.mask is a mask and must hold zeros and ones"):
        encode(masked(mask))


# --- what is counted is what is sent ---------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.tuples(st.integers(0, 20), st.integers(0, 20)), st.floats(0, 1), st.booleans(), st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_traffic_counts_what_encode_sends(shape, share, units, half, dtype):
    """Law: the payload has exactly the counted bytes, in both directions, whatever the mask; the rest is header."""
    draw = np.random.default_rng(0)
    rows, columns = shape
    mask = torch.from_numpy(draw.random(columns if units else (rows, columns)) < share)
    params = {
        "fc.weight": torch.zeros(rows, columns, dtype=dtype),
        "fc.logvar": torch.zeros(mask.shape, dtype=dtype),
        "fc.bias": torch.zeros(rows, dtype=dtype),
        "fc.mask": mask.to(dtype),
        "fc.keep": torch.from_numpy(draw.random(columns) < share).to(dtype),
        "steps": torch.zeros((), dtype=torch.int64),
    }
    found = wire.traffic(params, half=half)
    down, up = encode(params, half=half), encode(params, half=half, mask_known=True)
    assert (counted(down), counted(up)) == (found.down, found.up)
    header = struct.unpack_from("<4sHIQ", down)[2]
    assert len(down) == 18 + header + found.down + 32
    dense = {name: value for name, value in params.items() if not name.endswith(("mask", "keep"))}
    assert counted(encode(dense, half=half)) == found.dense


def test_a_sparse_message_is_short_in_proportion():
    """80 % dropped of 32,768 weights with spreads: 52,424 bytes and 4,096 of mask instead of 262,144."""
    mask = first(6_553, (128, 256))
    layer = {"fc.weight": torch.randn(128, 256), "fc.logvar": torch.randn(128, 256), "fc.mask": mask}
    assert counted(encode(layer)) == 8 * 6_553 + 4_096
    assert counted(encode(layer, mask_known=True)) == 8 * 6_553
    assert len(encode(layer)) - counted(encode(layer)) < 250


# --- fp16 ------------------------------------------------------------------------------------------------------------


def test_half_rounds_values_and_nothing_else():
    """Floats take 2 bytes and come back rounded in their own dtype; integers, booleans and masks are untouched."""
    sent = masked(first(60)) | {
        "n": torch.tensor(2**60 + 1),
        "b": torch.tensor([True, False]),
        "d": torch.rand(3).double(),
    }
    found = decode(encode(sent, half=True))
    rounded = {
        name: value.half().to(value.dtype) if value.is_floating_point() else value for name, value in sent.items()
    }
    mask = sent["fc.mask"]
    same(found, rounded | {name: rounded[name] * mask + 0.0 for name in ("fc.weight", "fc.logvar")})
    assert counted(encode(sent, half=True)) == 2 * (60 + 60 + 16 + 24 + 3) + 16 + 8 + 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_half_refuses_what_it_cannot_hold(dtype):
    """65,504 is the largest; a larger one is refused by name, while an infinity that was there before may travel."""
    assert decode(encode({"w": torch.tensor([65504.0], dtype=dtype)}, half=True))["w"] == 65504
    with pytest.raises(WireError, match=r"w holds 7e\+04, which float16 turns into infinity; send float32"):
        encode({"w": torch.tensor([1.0, 7e4, float("nan")], dtype=dtype)}, half=True)
    endless = {"w": torch.tensor([float("inf"), float("nan")], dtype=dtype)}
    found = decode(encode(endless, half=True))["w"]
    assert found[0] == float("inf")
    assert found[1].isnan()


# --- what cannot be sent ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"": torch.zeros(1)}, "names have 1 to 256 printable characters"),
        ({"a\n": torch.zeros(1)}, "names have 1 to 256 printable characters"),
        ({"\ud800": torch.zeros(1)}, "names have 1 to 256 printable characters"),
        ({"a" * 257: torch.zeros(1)}, "names have 1 to 256 printable characters"),
        ({"a": torch.zeros(1, dtype=torch.complex64)}, "a is torch.complex64"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "layout torch.sparse_coo"),
        ({"a": torch.zeros(1).expand(1 << 32)}, "too large to be sent"),
        ({"a": torch.zeros([1] * 17)}, "too large to be sent"),
        ({f"{i:0250}": torch.zeros(()) for i in range(5000)}, "the header would take"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsendable(params, reason):
    """One sentence says what cannot be sent."""
    with pytest.raises(WireError, match=reason):
        encode(params)


# --- damage ----------------------------------------------------------------------------------------------------------


def sealed(entries, payload=b"", *, version=codec.VERSION, magic=codec.MAGIC, header=None, claim=None):
    """A message with a proper checksum around whatever it holds: what a hostile client can make."""
    text = json.dumps(entries).encode() if header is None else header
    body = struct.pack("<4sHIQ", magic, version, len(text), len(payload) if claim is None else claim) + text + payload
    return body + hashlib.sha256(body).digest()


def test_sealed_makes_messages():
    """The builder of the tests below agrees with the format, so that they fail for what they name alone."""
    assert decode(sealed([["a", "float32", [2], "dense", 8]], b"\0" * 8))["a"].tolist() == [0, 0]
    assert sealed([], header=b"[]") == encode({})


HOSTILE = {
    "magic": (sealed([], magic=b"PK\3\4"), "not a message of metavd"),
    "header is no JSON": (sealed([], header=b"{"), "not proper JSON"),
    "header is no text": (sealed([], header=b"\xff\xfe\xfd"), "not proper JSON"),
    "header is deep": (sealed([], header=b"[" * 200_000), "not proper JSON"),
    "header is an object": (sealed({"a": 1}), "not a list of entries"),
    "header holds NaN": (sealed([], header=b'[["a","float32",[NaN],"dense",4]]'), "not proper JSON"),
    "header holds Infinity": (sealed([], header=b'[["a","float32",[1],"dense",Infinity]]'), "not proper JSON"),
    "header holds a giant": (
        sealed([], header=b'[["a","float32",[1' + b"0" * 5000 + b'],"dense",4]]'), "not proper JSON",
    ),
    "header is long": (sealed([], header=b" " * ((1 << 20) + 1)), "claims a header"),
    "payload claim": (sealed([], claim=2**63), "truncated"),
    "entry is no list": (sealed([5]), "is not \\[name"),
    "entry is short": (sealed([["a", "float32", [1]]]), "is not \\[name"),
    "name is no text": (sealed([[5, "float32", [1], "dense", 4]], b"\0" * 4), "improper name 5"),
    "name is a surrogate": (sealed([], b"", header=b'[["\\ud800","float32",[0],"dense",0]]'), "improper name"),
    "dtype": (sealed([["a", "object", [1], "dense", 4]], b"\0" * 4), "unknown dtype 'object'"),
    "dtype is no text": (sealed([["a", [], [1], "dense", 4]], b"\0" * 4), "unknown dtype"),
    "shape is negative": (sealed([["a", "float32", [-1], "dense", 4]], b"\0" * 4), "improper shape"),
    "shape is a float": (sealed([["a", "float32", [1.0], "dense", 4]], b"\0" * 4), "improper shape"),
    "shape is a boolean": (sealed([["a", "float32", [True], "dense", 4]], b"\0" * 4), "improper shape"),
    "shape has 17 axes": (sealed([["a", "float32", [1] * 17, "dense", 4]], b"\0" * 4), "improper shape"),
    "shape bomb": (sealed([["a", "float32", [2**40], "dense", 4]], b"\0" * 4), "would unfold to 4398046511104 bytes"),
    "shape bomb beside 0": (sealed([["a", "float32", [0, 2**61, 2**61], "dense", 0]]), "would unfold"),
    "mask bomb": (sealed([["a.mask", "bool", [2**40], "kept", 0]]), "would unfold to 1099511627776 bytes"),
    "weight bomb": (
        sealed([["a.mask", "bool", [4], "kept", 0], ["a.weight", "float32", [2**40, 4], "sparse", 0]]),
        "would unfold",
    ),
    "many small bombs": (
        sealed([[f"{i}.mask", "bool", [2**26], "kept", 0] for i in range(1000)]), "would unfold to 67108864000 bytes",
    ),
    "size is negative": (
        sealed([["a", "float32", [1], "dense", -4], ["b", "float32", [2], "dense", 8]], b"\0" * 4), "improper length",
    ),
    "sizes overlap": (
        sealed([["a", "float32", [2], "dense", 8], ["b", "float32", [2], "dense", 8]], b"\0" * 12),
        "claim 16 bytes, and its payload has 12",
    ),
    "payload is left over": (sealed([["a", "float32", [1], "dense", 4]], b"\0" * 8), "claim 4 bytes"),
    "size and shape differ": (sealed([["a", "float32", [1], "dense", 8]], b"\0" * 8), "a has 8 bytes instead of 4"),
    "twice": (sealed([["a", "float32", [1], "dense", 4]] * 2, b"\0" * 8), "holds a twice"),
    "encoding": (sealed([["a", "float32", [1], "pickle", 4]], b"\0" * 4), "encoding 'pickle', which it cannot"),
    "encoding is no text": (sealed([["a", "float32", [1], {}, 4]], b"\0" * 4), "which it cannot have"),
    "values as bits": (sealed([["a", "float32", [8], "bits", 1]], b"\0"), "encoding 'bits', which it cannot"),
    "mask as values": (sealed([["a.mask", "float32", [1], "dense", 4]], b"\0" * 4), "encoding 'dense', which it"),
    "integers as half": (sealed([["a", "int64", [1], "half", 2]], b"\0" * 2), "cannot come as float16"),
    "sparse without a mask": (sealed([["a.weight", "float32", [1], "sparse", 4]], b"\0" * 4), "no mask says which"),
    "mask does not fit": (
        sealed([["a.mask", "bool", [3], "dropped", 0], ["a.weight", "float32", [2, 2], "sparse", 16]], b"\0" * 16),
        "no mask says which",
    ),
    "dropped values": (
        sealed([["a.mask", "bool", [2], "kept", 4], ["a.weight", "float32", [1, 2], "dense", 8]], b"\0" * 12),
        "a.weight came with values that its mask drops",
    ),
    "mask is unknown": (sealed([["a.mask", "bool", [3], "known", 0]]), "receiver does not have it"),
    "bits are few": (sealed([["a.mask", "bool", [9], "bits", 1]], b"\1"), "9 bits do not take 1 bytes"),
    "bits beyond the end": (sealed([["a.mask", "bool", [3], "bits", 1]], b"\x0f"), "bits are set beyond its end"),
    "positions outside": (sealed([["a.mask", "bool", [3], "kept", 4]], b"\3\0\0\0"), "lie outside"),
    "positions twice": (sealed([["a.mask", "bool", [3], "kept", 8]], b"\1\0\0\0" * 2), "do not ascend"),
    "half a position": (sealed([["a.mask", "bool", [3], "kept", 3]], b"\1\0\0"), "no whole number of positions"),
    "no booleans": (sealed([["a", "bool", [2], "dense", 2]], b"\1\2"), "no booleans"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_messages(case):
    """A well sealed lie is refused by one sentence, within 2 s and without unfolding: below 50 MB."""
    data, reason = HOSTILE[case]
    tracemalloc.start()
    begun = time.perf_counter()
    try:
        with pytest.raises(WireError, match=reason) as caught:
            decode(data)
        assert "\n" not in str(caught.value)
        assert tracemalloc.get_traced_memory()[1] < 50e6
        assert time.perf_counter() - begun < 2
    finally:
        tracemalloc.stop()


def test_many_entries_take_bounded_time():
    """The longest header of the shortest entries, the last one twice: nothing is quadratic."""
    entries = [[f"{i:x}", "bool", [], "dense", 0] for i in range(28_000)]
    data = sealed([], header=json.dumps([*entries, entries[-1]], separators=(",", ":")).encode())
    begun = time.perf_counter()
    with pytest.raises(WireError, match="twice"):
        decode(data)
    assert time.perf_counter() - begun < 5


@pytest.mark.parametrize(("version", "age"), [(0, "older"), (2, "newer"), (65_535, "newer")])
def test_other_versions(version, age):
    """Both versions are named."""
    with pytest.raises(WireError, match=f"the {age} wire version {version}, and this metavd reads version 1") as caught:
        decode(sealed([], version=version))
    assert caught.value.kind == "version"


def test_limit():
    """A message may unfold to `limit` bytes, and to no more."""
    data = encode({"a": torch.zeros(100)})
    assert len(decode(data, limit=400)["a"]) == 100
    with pytest.raises(WireError, match="would unfold to 400 bytes; 399 are allowed"):
        decode(data, limit=399)


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        (lambda p: p.pop("fc.bias"), "name", r"the message lacks fc\.bias"),
        (lambda p: p.update(extra=torch.zeros(1)), "name", "the message has extra, which nobody asked for"),
        (lambda p: p.update({"fc.bias": torch.zeros(1)}), "shape", r"fc\.bias has shape \(1,\) instead of \(16,\)"),
        (
            lambda p: p.update({"fc.bias": p["fc.bias"].double()}),
            "dtype",
            r"is torch\.float64 instead of torch\.float32",
        ),
    ],
)
def test_like_is_what_was_asked(change, kind, reason):
    """With `like`, names, shapes and dtypes are those that were sent, before anything is unfolded."""
    sent = masked(first(60))
    answer = dict(sent)
    change(answer)
    with pytest.raises(WireError, match=reason) as caught:
        decode(encode(answer), like=sent)
    assert caught.value.kind == kind


def test_like_bounds_memory():
    """A bomb in place of an answer is refused by its shape, whatever the limit."""
    sent = {"a.mask": torch.ones(4), "a.weight": torch.ones(2, 4)}
    bomb = sealed([["a.mask", "float32", [4], "kept", 0], ["a.weight", "float32", [2**40, 4], "sparse", 0]])
    with pytest.raises(WireError, match="has shape"):
        decode(bomb, like=sent, limit=2**62)


def test_every_truncation_and_every_flipped_bit():
    """No byte of a message is without a guard: any cut, any longer copy and any changed bit is refused."""
    data = encode(masked(first(6, (2, 8)), shape=(2, 8)))
    for length in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:length])
    with pytest.raises(WireError, match="too long"):
        decode(data + b"\0")
    for place in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(WireError):
            decode(bytes(flipped))


# --- fuzz ------------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
ENTRY = st.tuples(
    st.sampled_from(["a.weight", "a.mask", "a.bias", "b", "a.keep"]) | JSON,
    st.sampled_from(["float32", "float64", "bool", "int64"]) | JSON,
    st.lists(st.integers(-1, 5) | st.sampled_from([2**31, 2**62, 2**64]), max_size=3) | JSON,
    st.sampled_from(sorted(codec._VALUES | codec._MASKS)) | JSON,
    st.integers(-1, 40) | JSON,
).map(list)


def survives(data, **known):
    """Decoding gives parameters that make sense, or WireError: nothing else."""
    try:
        found = decode(data, limit=1 << 20, **known)
    except WireError:
        return
    for value in found.values():
        assert value.numel() * value.element_size() <= 1 << 20
    same(decode(encode(found), **known), found)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes(data):
    """Bytes that nobody wrote, bare, behind a proper start, and well sealed."""
    survives(data)
    survives(codec.MAGIC + struct.pack("<H", codec.VERSION) + data)
    survives(sealed([], header=data))
    survives(sealed([["a", "float32", [len(data) // 4], "dense", len(data)]], data))


@settings(max_examples=500, deadline=None)
@given(st.lists(ENTRY, max_size=4) | JSON, st.binary(max_size=60), st.booleans())
def test_random_headers(entries, payload, fit):
    """Well sealed messages whose headers are almost right."""
    if fit and isinstance(entries, list):
        sizes = [each[4] for each in entries if isinstance(each, list) and len(each) == 5]
        if all(type(size) is int and 0 <= size < 1000 for size in sizes):
            payload = (payload * 200)[: sum(sizes)].ljust(sum(sizes), b"\1")
    data = sealed(entries, payload)
    survives(data)
    survives(data, masks={"a.mask": torch.ones(3)})
    survives(data, like={"a.weight": torch.ones(2, 3), "a.mask": torch.ones(3)})


@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans())
def test_random_mutations(data, seal):
    """Real messages with bytes changed, cut out or put in; sealed again, so that the checksum does not help."""
    sent = masked(first(data.draw(st.integers(0, 16)), (2, 8)), shape=(2, 8))
    body = bytearray(encode(sent, half=data.draw(st.booleans()), mask_known=data.draw(st.booleans()))[:-32])
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, max(len(body) - 1, 0)))
        what = data.draw(st.sampled_from(["change", "cut", "put", "truncate"]))
        if what == "change" and body:
            body[at] = data.draw(st.integers(0, 255))
        elif what == "cut":
            del body[at : at + data.draw(st.integers(1, 9))]
        elif what == "put":
            body[at:at] = data.draw(st.binary(max_size=9))
        else:
            del body[at:]
    if seal and len(body) >= 18:
        header = struct.unpack_from("<I", body, 6)[0]
        if 18 + header <= len(body):
            struct.pack_into("<Q", body, 10, len(body) - 18 - header)
    message = bytes(body) + hashlib.sha256(body).digest()
    survives(message)
    survives(message, like=sent)


# --- a federation over the wire --------------------------------------------------------------------------------------


def over_the_wire(algorithm, data, state, rounds, cohort, *, order):
    """The simulator's rounds, each client behind bytes in both directions."""
    for done in range(rounds):
        asked = choose(state.key, done, data.federation.num_clients, cohort)
        answers, gave = {}, {}
        with torch.no_grad():
            for client in order(asked.tolist()):
                sent = gave[client] = algorithm.emit.apply(state.params, torch.tensor(client), state.round)
                received = decode(encode(sent))
                key = rng.fold(state.key, TRAIN, done, client)
                adapted, _ = algorithm.local(received, batches(data, client, algorithm.train_batches, key, state.round))
                answers[client] = decode(encode(adapted, mask_known=True), like=sent)
            weight = torch.tensor([len(data.federation.train[client]) for client in asked.tolist()], dtype=data.dtype)
            adapted, sent = (stack([each[client] for client in asked.tolist()]) for each in (answers, gave))
            update = Update(asked, adapted, weight, sent)
            state = algorithm.server.update(state, update)
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "fedavg",
        "reptile+metavd",
        "reptile+metavd+dp",
        "maml+metavd+dp",
        "perfedavg+metavd+dp",
        "fedavg+snip",
        "reptile+ensemblevd",
    ],
)
def test_a_federation_over_the_wire_is_the_simulation(name, dtype):
    """Four rounds, weights dropped from the second on, answers in any order: the same bits as the simulator.

    With zeros in place of what was dropped, as the client has them, the spreads would be pulled to 0.
    """
    source = load("digits")
    rows = np.random.RandomState(0).permutation(len(source.y))[: 5 * 12].reshape(5, 12)
    nobody = tuple(np.zeros(0, np.int64) for _ in rows)
    data = pool(Federation(source, tuple(rows), nobody, nobody, 5, 0, rows[0]), dtype=dtype)
    model = from_module(mlp((1, 8, 8), 10, width=6).to(dtype), init=xavier)
    options = {"batch": 4, "local_epochs": 1, "hyper_width": 6, "drop_from": 1, "threshold": 0.02}
    known = methods.options_of(name)
    setting = methods.Setting(5, 10, 4)
    chosen = {key: value for key, value in options.items() if key in known}
    algorithm = methods.algorithm(name, model, setting, chosen)
    with torch.no_grad():
        state = algorithm.server.init(rng.key(0))
    *_, (wanted, record) = simulate(algorithm, data, loop, state, rounds=4, cohort=3)
    found = over_the_wire(algorithm, data, state, 4, 3, order=lambda clients: clients[::-1])
    assert state_hash(found) == state_hash(wanted)
    if name.endswith(("+dp", "+snip")):
        assert record.up < record.dense_up
