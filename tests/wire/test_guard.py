"""What a server refuses: every kind of bad answer by its name, and honest ones never."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from metavd.container import dump
from metavd.wire import Expected, Guard, Limits, Rejected, encode
from metavd.wire.codec import MESSAGE

MASK = torch.tensor([[1.0, 0, 1], [0, 1, 1]])


def received(client=3, round=5):
    gen = torch.Generator().manual_seed(0)
    weight, spread = torch.randn(2, 3, generator=gen), torch.randn(2, 3, generator=gen)
    params = {"fc.weight": weight, "fc.bias": torch.zeros(2), "fc.logvar": spread, "fc.mask": MASK}
    return Expected(client, round, params | {"steps": torch.tensor(7)})


def moved(expected, by=0.1):
    """An honest answer: trained weights somewhat off, masks and counters as they were."""
    return {
        name: value + by if value.is_floating_point() and name != "fc.mask" else value
        for name, value in expected.received.items()
    }


def ask(guard, expected=None, *, params=None, mask_known=True, **claims):
    expected = expected or received()
    payload = encode(moved(expected) if params is None else params, mask_known=mask_known)
    return guard.check(expected, **({"round": expected.round, "samples": 12, "payload": payload} | claims))


def answer(**changed):
    """An honest answer with some entries changed."""
    return moved(received()) | {name.replace("_", "."): value for name, value in changed.items()}


# --- honest ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask_known", [True, False])
def test_honest(mask_known):
    """The answer comes back in the order it was sent in; dropped places hold what was sent."""
    expected = received()
    shuffled = dict(reversed(moved(expected).items()))
    reply = ask(Guard(), expected, params=shuffled, mask_known=mask_known)
    assert (reply.client, reply.round, reply.samples) == (3, 5, 12.0)
    assert list(reply.params) == list(expected.received)
    for name in ("fc.weight", "fc.logvar"):
        sent = expected.received[name]
        assert torch.equal(reply.params[name], torch.where(MASK > 0, sent + 0.1, sent))


@pytest.mark.parametrize("samples", [1, 0.5, 10**9])
def test_counts_at_the_bounds(samples):
    """Any number above 0, at most max_samples."""
    assert ask(Guard(), samples=samples).samples == samples


# --- every kind of bad answer ----------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
WHOLE = encode(moved(received()), mask_known=True)
BAD = {
    "nan": ("nan", {"params": answer(fc_bias=torch.tensor([0.0, NAN]))}, "fc.bias holds NaN or infinity"),
    "nan in a spread": ("nan", {"params": answer(fc_logvar=torch.full((2, 3), NAN))}, "fc.logvar holds NaN"),
    "infinity": ("nan", {"params": answer(fc_bias=torch.tensor([0.0, -INF]))}, "fc.bias holds NaN or infinity"),
    "wrong name": (
        "name",
        {"params": {name.replace("bias", "base"): value for name, value in answer().items()}},
        "lacks fc.bias",
    ),
    "missing name": (
        "name", {"params": {n: v for n, v in answer().items() if n != "fc.bias"}}, "the message lacks fc.bias",
    ),
    "missing mask": ("name", {"params": {n: v for n, v in answer().items() if n != "fc.mask"}}, "lacks fc.mask"),
    "extra name": ("name", {"params": answer(server_key=torch.zeros(1))}, "server.key, which nobody asked for"),
    "wrong shape": ("shape", {"params": answer(fc_bias=torch.zeros(1))}, r"shape (1,) instead of (2,)"),
    "transposed": (
        "shape", {"params": {n: v.T if v.dim() == 2 else v for n, v in answer().items()}}, "(3, 2) instead of (2, 3)",
    ),
    "wrong dtype": ("dtype", {"params": answer(fc_bias=torch.zeros(2).double())}, "torch.float64 instead of"),
    "integers": ("dtype", {"params": answer(fc_bias=torch.zeros(2, dtype=torch.int32))}, "torch.int32 instead of"),
    "large": ("norm", {"params": answer(fc_bias=torch.tensor([1e4, 0]))}, "it moved the weights by 1e+04"),
    "huge": ("norm", {"params": answer(fc_bias=torch.tensor([3e38, 3e38]))}, "it moved the weights by 4.24e+38"),
    "counter": ("norm", {"params": answer(steps=torch.tensor(10**15))}, "it moved the weights by 1e+15"),
    "no samples": ("samples", {"samples": 0}, "it claims 0 samples"),
    "negative samples": ("samples", {"samples": -3}, "it claims -3 samples"),
    "nan samples": ("samples", {"samples": NAN}, "it claims nan samples"),
    "endless samples": ("samples", {"samples": INF}, "it claims inf samples"),
    "too many samples": ("samples", {"samples": 1e12}, "it claims 1000000000000.0 samples"),
    "giant samples": ("samples", {"samples": 10**5000}, "it claims too many samples"),
    "true samples": ("samples", {"samples": True}, "it claims True samples"),
    "text samples": ("samples", {"samples": "12"}, "it claims '12' samples"),
    "list of samples": ("samples", {"samples": [12]}, "it claims [12] samples"),
    "samples are missing": ("samples", {"samples": None}, "it claims None samples"),
    "other mask": (
        "mask", {"params": answer(fc_mask=1 - MASK), "mask_known": False}, "fc.mask is not the mask that was sent",
    ),
    "mask regrown": ("mask", {"params": answer(fc_mask=torch.ones(2, 3)), "mask_known": False}, "not the mask that"),
    "late": ("round", {"round": 4}, "the answer is for round 4; round 5 was asked"),
    "early": ("round", {"round": 6}, "the answer is for round 6; round 5 was asked"),
    "round is no integer": ("round", {"round": 5.0}, "the answer is for round 5.0"),
    "round is text": ("round", {"round": "5"}, "the answer is for round '5'"),
    "round is missing": ("round", {"round": None}, "the answer is for round None"),
    "truncated": ("damaged", {"payload": WHOLE[:-1]}, "its checksum does not match"),
    "cut short": ("damaged", {"payload": WHOLE[:10]}, "the message is truncated"),
    "nothing": ("damaged", {"payload": b""}, "the message is truncated"),
    "too long": ("damaged", {"payload": WHOLE + b"!"}, "its checksum does not match"),
    "damaged": ("damaged", {"payload": WHOLE[:-40] + b"?" + WHOLE[-39:]}, "its checksum does not match"),
    "no message": ("damaged", {"payload": b"\x80\x04" + WHOLE}, "this is not a message of metavd"),
    "no bytes": ("damaged", {"payload": None}, "the payload is no bytes but NoneType"),
    "oversized": ("oversized", {"payload": bytes(100_001)}, "has 100001 bytes; 100000 are allowed"),
    "other version": ("version", {"payload": dump(MESSAGE._replace(version=99), {})}, "the message has version 99"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_answers(case):
    """Refused with client, kind and reason, counted as one offence, and the answer leaves no trace in the memory."""
    kind, changed, reason = BAD[case]
    guard = Guard(Limits(max_bytes=100_000))
    with pytest.raises(Rejected) as caught:
        ask(guard, **changed)
    assert (caught.value.client, caught.value.kind) == (3, kind)
    assert reason in caught.value.reason
    assert str(caught.value) == f"client 3: {caught.value.reason}"
    assert "\n" not in str(caught.value)
    assert guard.offences == {3: 1}
    assert guard.changes == {}


def test_duplicates():
    """One answer a round is taken; another client's, the next round's and one after a refusal are no duplicates."""
    guard = Guard()
    ask(guard)
    for claims in ({}, {"samples": 13}):
        with pytest.raises(Rejected, match="client 3: it has answered round 5 already") as caught:
            ask(guard, **claims)
        assert caught.value.kind == "duplicate"
    ask(guard, received(client=4))
    ask(guard, received(round=6))
    fresh = Guard()
    with pytest.raises(Rejected, match="samples"):
        ask(fresh, samples=0)
    assert ask(fresh).client == 3


# --- norms -----------------------------------------------------------------------------------------------------------


def test_the_norm_is_measured_by_what_was_sent():
    """max_norm times 1 + ||received||: to the bound and no further; a model of zeros may start to move."""
    expected = Expected(0, 1, {"w": torch.tensor([3.0, 4.0], dtype=torch.float64)})
    for by, good in ((11.9, True), (12.1, False)):
        guard, params = Guard(Limits(max_norm=2.0)), {"w": expected.received["w"] + torch.tensor([by, 0.0])}
        if good:
            assert ask(guard, expected, params=params).client == 0
        else:
            with pytest.raises(Rejected, match=r"it moved the weights by 12\.1; 12 is allowed by what was sent"):
                ask(guard, expected, params=params)
    zeros = Expected(0, 1, {"w": torch.zeros(2)})
    assert ask(Guard(), zeros, params={"w": torch.ones(2)}).client == 0


def rounds_of(guard, changes, start=1):
    """One round a list; client i moves a unit model by its change."""
    for round, row in enumerate(changes, start):
        for client, by in enumerate(row):
            expected = Expected(client, round, {"w": torch.zeros(1)})
            ask(guard, expected, params={"w": torch.tensor([by])})


def test_the_norm_is_measured_by_earlier_rounds():
    """max_change times the median of the rounds before; those who did not move at all do not count."""
    guard = Guard(Limits(max_change=10.0, max_norm=math.inf))
    rounds_of(guard, [[1.0, 0.0, 0.0], [1.0, 1.2, 0.0]])
    rounds_of(guard, [[9.0]], start=3)
    with pytest.raises(Rejected, match="it moved the weights by 11; 10 is allowed by earlier rounds") as caught:
        ask(guard, Expected(1, 3, {"w": torch.zeros(1)}), params={"w": torch.tensor([11.0])})
    assert caught.value.kind == "norm"


def test_a_median_needs_three():
    """Two changes say too little about how far is too far."""
    guard = Guard(Limits(max_change=10.0, max_norm=math.inf))
    rounds_of(guard, [[1.0, 1.0], [1000.0]])


def test_refused_answers_do_not_move_the_median():
    """A crowd that is refused cannot make its own kind look usual."""
    guard = Guard(Limits(max_change=10.0, max_norm=math.inf, max_offences=100))
    rounds_of(guard, [[1.0, 1.0, 1.0]])
    for round in range(2, 12):
        for client in range(5):
            expected = Expected(client, round, {"w": torch.zeros(1)})
            with pytest.raises(Rejected, match="allowed by earlier rounds"):
                ask(guard, expected, params={"w": torch.tensor([500.0])})


def test_old_rounds_are_forgotten():
    """Ten rounds are remembered, however long a run is."""
    guard = Guard()
    rounds_of(guard, [[1.0, 2.0]] * 30)
    assert sorted(guard.changes) == list(range(21, 31))


def test_the_order_of_arrival_does_not_matter():
    """A round is judged by the rounds before it: the same answers pass, in whatever order they come."""
    changes = [[0.5, 1.0, 1.5, 2.0, 40.0], [0.2, 30.0, 5.0, 21.0, 19.0], [1.0, 11.0, 12.0, 90.0, 60.0]]
    outcomes = []
    for seed in range(6):
        guard, passed = Guard(Limits(max_change=10.0, max_norm=math.inf)), []
        for round, row in enumerate(changes, 1):
            for client, by in random.Random(seed).sample(list(enumerate(row)), len(row)):
                try:
                    ask(guard, Expected(client, round, {"w": torch.zeros(1)}), params={"w": torch.tensor([by])})
                    passed.append((round, client))
                except Rejected:
                    continue
        outcomes.append((sorted(passed), guard.state()))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert 3 < len(outcomes[0][0]) < 15


# --- offenders -------------------------------------------------------------------------------------------------------


def test_repeated_offenders_are_excluded():
    """After three refused answers a client is not asked again, and an answer of its is not looked at."""
    guard = Guard(Limits(max_offences=3))
    for round in range(1, 4):
        assert not guard.excluded(3)
        with pytest.raises(Rejected):
            ask(guard, received(round=round), samples=0)
    assert guard.excluded(3)
    assert not guard.excluded(4)
    with pytest.raises(Rejected, match="client 3: it is excluded after 3 refused answers") as caught:
        ask(guard, received(round=4))
    assert caught.value.kind == "excluded"
    assert guard.offences == {3: 3}


def test_the_caller_finds_offences_too():
    """What never came as far as a payload counts alike."""
    guard = Guard(Limits(max_offences=1))
    error = guard.reject(8, "empty", "its reply has no payload")
    assert (error.client, error.kind, str(error)) == (8, "empty", "client 8: its reply has no payload")
    assert guard.excluded(8)


def test_memory_survives_as_json():
    """A resumed guard judges as the old one: offences and the median are kept; a repeated round is no duplicate."""
    limits = Limits(max_change=10.0, max_norm=math.inf, max_offences=2)
    guard = Guard(limits)
    rounds_of(guard, [[1.0, 1.0, 1.1]])
    with pytest.raises(Rejected):
        ask(guard, Expected(7, 1, {"w": torch.zeros(1)}), params={"w": torch.zeros(1)}, samples=0)
    saved = json.loads(json.dumps(guard.state()))
    again = Guard.restored(limits, saved)
    assert again.state() == guard.state()
    with pytest.raises(Rejected, match="allowed by earlier rounds"):
        ask(again, Expected(7, 2, {"w": torch.zeros(1)}), params={"w": torch.tensor([11.0])})
    assert again.excluded(7)
    rounds_of(Guard.restored(limits, saved), [[1.0]])
    assert Guard.restored(limits, {}).state() == Guard(limits).state()
