"""Messages: every bit arrives, what is counted is what is sent, and no bytes break the reader.

What holds of every container is in tests/test_container.py.
"""

from __future__ import annotations

import json
import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metavd import container, methods, wire
from metavd.container import DTYPES, ContainerError, dump
from metavd.core import rng
from metavd.core.model import from_module, xavier
from metavd.core.types import Update
from metavd.data.cohort import TRAIN, batches, choose, pool
from metavd.data.formats import load
from metavd.data.partition import Federation
from metavd.engine.checkpoint import state_hash
from metavd.engine.schedule.loop import loop
from metavd.models.mlp import mlp
from metavd.tree import stack
from metavd.wire import codec, decode, encode
from metavd.wire.codec import MESSAGE
from simulated import simulate


def same(found, wanted):
    """Names in order, dtypes, shapes and bits; NaN equals itself."""
    assert dump(MESSAGE, found) == dump(MESSAGE, wanted)
    assert all(value.is_contiguous() for value in found.values())


def counted(data):
    """The bytes of a message's tensors, which is what `traffic` counts; the rest is its header."""
    return sum(value.nbytes for value in container.load(MESSAGE, data)[0].values())


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


@pytest.mark.parametrize("half", [False, True])
def test_round_trip(half):
    """Without masks everything arrives, whatever its dtype and shape; fp16 changes floats of 4 and 8 bytes alone."""
    sent = {
        f"{name}.{shape}": torch.ones(shape).to(dtype) for name, dtype in DTYPES.items() for shape in ((), (0, 2), 3)
    }
    same(decode(encode(sent, half=half)), sent)


def test_layouts():
    """A mask in another memory format drops the same weights."""
    base, mask = torch.randn(4, 3, 6, 5), (torch.rand(4, 3, 6, 5) > 0.5).float()
    last = torch.channels_last
    layer = {"c.weight": base.contiguous(memory_format=last), "c.mask": mask.contiguous(memory_format=last)}
    same(decode(encode(layer)), {"c.weight": base * mask + 0.0, "c.mask": mask})


def test_nothing_at_all():
    """A client may have nothing to send."""
    assert decode(encode({})) == {}


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
    with pytest.raises(ContainerError, match=r"fc\.mask did not travel, and the receiver does not have it"):
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
    zeros = {name: sent[name] if name == "c.mask" else torch.zeros_like(sent[name]) for name in sent}
    same(decode(data, like=zeros), wanted)


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
    with pytest.raises(ContainerError, match=r"fc\.mask is a mask and must hold zeros and ones"):
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
    # On the wire, half of a float is a float16.
    found = wire.traffic(
        {name: value.half() if half and value.is_floating_point() else value for name, value in params.items()}
    )
    down, up = encode(params, half=half), encode(params, half=half, mask_known=True)
    assert (counted(down), counted(up)) == (found.down, found.up)
    assert len(down) == 8 + int.from_bytes(down[:8], "little") + found.down
    dense = {name: value for name, value in params.items() if not name.endswith(("mask", "keep"))}
    assert counted(encode(dense, half=half)) == found.dense


def test_a_sparse_message_is_short_in_proportion():
    """80 % dropped of 32,768 weights with spreads: 52,424 bytes and 4,096 of mask instead of 262,144."""
    mask = first(6_553, (128, 256))
    layer = {"fc.weight": torch.randn(128, 256), "fc.logvar": torch.randn(128, 256), "fc.mask": mask}
    assert counted(encode(layer)) == 8 * 6_553 + 4_096
    assert counted(encode(layer, mask_known=True)) == 8 * 6_553
    assert len(encode(layer)) - counted(encode(layer)) < 600


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
    with pytest.raises(ContainerError, match=r"w holds 7e\+04, which float16 turns into infinity; send float32"):
        encode({"w": torch.tensor([1.0, 7e4, float("nan")], dtype=dtype)}, half=True)
    endless = {"w": torch.tensor([float("inf"), float("nan")], dtype=dtype)}
    found = decode(encode(endless, half=True))["w"]
    assert found[0] == float("inf")
    assert found[1].isnan()


# --- lies ------------------------------------------------------------------------------------------------------------


def sealed(held, packed=None):
    """A proper container of whatever packing is claimed: what a hostile client can make."""
    return dump(MESSAGE, held, {} if packed is None else {"packed": json.dumps(packed)})


def test_sealed_makes_messages():
    """The builder of the tests below agrees with the format, so that they fail for what they name alone."""
    mask, weight = torch.tensor([1], dtype=torch.int32), torch.ones(1)
    packed = {"a.mask": ["kept", "BOOL", [2]], "a.weight": ["sparse", "F32", [1, 2]]}
    found = decode(sealed({"a.mask": mask, "a.weight": weight}, packed))
    same(found, {"a.mask": torch.tensor([False, True]), "a.weight": torch.tensor([[0.0, 1.0]])})


NONE, ONE, BYTE = torch.zeros(0, dtype=torch.int32), torch.zeros(1), torch.ones(1, dtype=torch.uint8)


def places(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


HOSTILE = {
    "packing is no JSON": (dump(MESSAGE, {}, {"packed": "{"}), "in proper JSON"),
    "packing is deep": (dump(MESSAGE, {}, {"packed": "[" * 200_000}), "in proper JSON"),
    "packing is a list": (sealed({}, []), "by name"),
    "packing of a stranger": (sealed({}, {"b": ["half", "F32", [1]]}), "how 'b' is packed, which it does not hold"),
    "packing is short": (sealed({"a": ONE}, {"a": ["half", "F32"]}), "by \\[way, dtype, shape\\]"),
    "packing is a number": (sealed({"a": ONE}, {"a": 5}), "by \\[way, dtype, shape\\]"),
    "way": (sealed({"a": ONE}, {"a": ["pickle", "F32", [1]]}), "packed as 'pickle', which it cannot be"),
    "way is no text": (sealed({"a": ONE}, {"a": [{}, "F32", [1]]}), "which it cannot be"),
    "values as bits": (sealed({"a": BYTE}, {"a": ["bits", "F32", [8]]}), "packed as 'bits', which it cannot be"),
    "mask as values": (sealed({"a.mask": ONE}), "packed as 'dense', which it cannot be"),
    "dtype": (sealed({"a": ONE}, {"a": ["half", "C64", [1]]}), "unknown dtype 'C64'"),
    "dtype is no text": (sealed({"a": ONE}, {"a": ["half", [], [1]]}), "unknown dtype"),
    "shape is negative": (sealed({"a": ONE}, {"a": ["half", "F32", [-1]]}), "improper shape"),
    "shape is NaN": (sealed({"a": ONE}, {"a": ["half", "F32", [float("nan")]]}), "proper JSON"),
    "shape bomb": (sealed({"a": ONE}, {"a": ["dense", "F32", [2**40]]}), "would unfold to 4398046511104 bytes"),
    "shape bomb beside 0": (sealed({"a": ONE}, {"a": ["dense", "F32", [0, 2**61, 2**61]]}), "improper shape"),
    "mask bomb": (sealed({"a.mask": NONE}, {"a.mask": ["kept", "BOOL", [2**40]]}), "would unfold to 1099511627776 b"),
    "weight bomb": (
        sealed({"a.mask": NONE, "a.weight": ONE[:0]},
               {"a.mask": ["kept", "BOOL", [4]], "a.weight": ["sparse", "F32", [2**40, 4]]}), "would unfold",
    ),
    "many small bombs": (
        sealed({f"{i}.mask": NONE for i in range(1000)}, {f"{i}.mask": ["kept", "BOOL", [2**26]] for i in range(1000)}),
        "would unfold to 67108864000 bytes",
    ),
    "values are few": (sealed({"a": ONE}, {"a": ["dense", "F32", [2]]}), "shape \\(1,\\) instead of .* shape \\(2,\\)"),
    "values are others": (sealed({"a": ONE}, {"a": ["dense", "I32", [1]]}), "float32 .* instead of torch.int32"),
    "half is whole": (sealed({"a": ONE}, {"a": ["half", "F32", [1]]}), "float32 .* instead of torch.float16"),
    "integers as half": (sealed({"a": ONE.half()}, {"a": ["half", "I64", [1]]}), "cannot come as float16"),
    "sparse without a mask": (sealed({"a.weight": ONE}, {"a.weight": ["sparse", "F32", [1]]}), "no mask says which"),
    "mask does not fit": (
        sealed({"a.mask": NONE, "a.weight": torch.zeros(4)},
               {"a.mask": ["dropped", "BOOL", [3]], "a.weight": ["sparse", "F32", [2, 2]]}), "no mask says which",
    ),
    "dropped values": (
        sealed({"a.mask": places(0), "a.weight": torch.zeros(1, 2)}, {"a.mask": ["kept", "BOOL", [2]]}),
        "a.weight came with values that its mask drops",
    ),
    "too many values": (
        sealed({"a.mask": places(0), "a.weight": torch.zeros(2)},
               {"a.mask": ["kept", "BOOL", [2]], "a.weight": ["sparse", "F32", [1, 2]]}), "a.weight came as",
    ),
    "mask is unknown": (sealed({"a.mask": NONE}, {"a.mask": ["known", "BOOL", [3]]}), "receiver does not have it"),
    "bits are few": (sealed({"a.mask": BYTE}, {"a.mask": ["bits", "BOOL", [9]]}), "9 bits do not take 1 bytes"),
    "bits beyond the end": (sealed({"a.mask": 15 * BYTE}, {"a.mask": ["bits", "BOOL", [3]]}), "set beyond its end"),
    "bits are numbers": (sealed({"a.mask": ONE}, {"a.mask": ["bits", "BOOL", [3]]}), "float32 of shape .* its bits"),
    "bits in two axes": (sealed({"a.mask": BYTE[None]}, {"a.mask": ["bits", "BOOL", [3]]}), "cannot be its bits"),
    "positions outside": (sealed({"a.mask": places(3)}, {"a.mask": ["kept", "BOOL", [3]]}), "lie outside"),
    "positions below 0": (sealed({"a.mask": places(-1, 1)}, {"a.mask": ["kept", "BOOL", [3]]}), "lie outside"),
    "positions twice": (sealed({"a.mask": places(1, 1)}, {"a.mask": ["kept", "BOOL", [3]]}), "do not ascend"),
    "positions fall": (
        sealed({"a.mask": places(2, -(2**31), 2)}, {"a.mask": ["kept", "BOOL", [3]]}), "do not ascend",
    ),
    "positions are bytes": (sealed({"a.mask": BYTE}, {"a.mask": ["kept", "BOOL", [3]]}), "cannot be its kept"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_messages(case):
    """A well sealed lie is refused by one sentence, within 2 s and without unfolding: below 50 MB."""
    data, reason = HOSTILE[case]
    tracemalloc.start()
    begun = time.process_time()
    try:
        with pytest.raises(ContainerError, match=reason) as caught:
            decode(data)
        assert "\n" not in str(caught.value)
        assert tracemalloc.get_traced_memory()[1] < 50e6
        assert time.process_time() - begun < 2
    finally:
        tracemalloc.stop()


def test_limit():
    """A message may unfold to `limit` bytes, and to no more."""
    data = encode({"a": torch.zeros(100)})
    assert len(decode(data, limit=400)["a"]) == 100
    with pytest.raises(ContainerError, match="would unfold to 400 bytes; 399 are allowed"):
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
    with pytest.raises(ContainerError, match=reason) as caught:
        decode(encode(answer), like=sent)
    assert caught.value.kind == kind


def test_like_bounds_memory():
    """A bomb in place of an answer is refused by its shape, whatever the limit."""
    sent = {"a.mask": torch.ones(4), "a.weight": torch.ones(2, 4)}
    packed = {"a.mask": ["kept", "F32", [4]], "a.weight": ["sparse", "F32", [2**40, 4]]}
    bomb = sealed({"a.mask": NONE, "a.weight": ONE[:0]}, packed)
    with pytest.raises(ContainerError, match="has shape"):
        decode(bomb, like=sent, limit=2**62)


# --- fuzz ------------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
PACKED = st.dictionaries(
    st.sampled_from(["a.weight", "a.mask", "a.bias"]),
    st.tuples(
        st.sampled_from(sorted(codec._VALUES | codec._MASKS)) | JSON,
        st.sampled_from(["F32", "F64", "BOOL", "I64"]) | JSON,
        st.lists(st.integers(-1, 5) | st.sampled_from([2**31, 2**62, 2**64]), max_size=3) | JSON,
    ).map(list) | JSON,
)  # fmt: skip
HELD = st.tuples(st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 4), max_size=2), st.integers(0, 3))


def survives(data, **known):
    """Decoding gives parameters that make sense, or ContainerError: nothing else."""
    try:
        found = decode(data, limit=1 << 20, **known)
    except ContainerError:
        return
    assert all(value.nbytes <= 1 << 20 for value in found.values())
    same(decode(encode(found), **known), found)


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.sampled_from(["a.weight", "a.mask", "a.bias"]), HELD), PACKED | JSON)
def test_random_packing(held, packed):
    """Sound containers that were packed in ways that are almost right."""
    tensors = {name: torch.full(shape, value).to(dtype) for name, (dtype, shape, value) in held.items()}
    data = sealed(tensors, packed)
    survives(data)
    survives(data, like={"a.weight": torch.ones(2, 3), "a.mask": torch.ones(3)})


@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans())
def test_random_mutations(damaged, data, again):
    """Real messages with bytes changed, cut out or put in; sealed again, so that the checksum does not help."""
    sent = masked(first(data.draw(st.integers(0, 16)), (2, 8)), shape=(2, 8))
    body = damaged(data, encode(sent, half=data.draw(st.booleans()), mask_known=data.draw(st.booleans())), again)
    survives(body)
    survives(body, like=sent)


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
        "reptile+metavd+drop",
        "maml+metavd+drop",
        "perfedavg+metavd+drop",
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
    if name.endswith(("+drop", "+snip")):
        assert record.up < record.dense_up
