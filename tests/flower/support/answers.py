"""Answers that no honest client gives: every kind that a server must refuse."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord

from metavd import container, wire
from metavd.flower.message import payload, read_order
from metavd.tree import Params
from metavd.wire.codec import MESSAGE

from .stage import Act, Event, Fault, ever, never

Change = Callable[[Params], Params]
BIG = 400_000
"""Bytes that an answer may have."""


def resent(reply: Message, data: bytes) -> list[Message]:
    """Put other bytes into a reply."""
    key = next(iter(reply.content.array_records))
    (array,) = reply.content.array_records[key].values()
    reply.content[key] = ArrayRecord({key: Array(array.dtype, (len(data),), array.stype, data)})
    return [reply]


def values(change: Change, *, mask_known: bool = True) -> Act:
    """Answer with other parameters."""

    def act(event: Event) -> list[Message]:
        received = wire.decode(read_order(event.order.content).params)
        answer = wire.decode(payload(event.reply.content), like=received)
        return resent(event.reply, wire.encode(change(answer), mask_known=mask_known))

    return act


def bytes_(change: Callable[[bytes], bytes]) -> Act:
    """Answer with other bytes."""

    def act(event: Event) -> list[Message]:
        return resent(event.reply, change(payload(event.reply.content)))

    return act


def repacked(change: Callable[[Params, dict[str, Any]], None]) -> Act:
    """Answer with a message that was packed in another way."""

    def forged(data: bytes) -> bytes:
        packed, words = container.load(MESSAGE, data)
        was = json.loads(words["packed"])
        change(packed, was)
        return container.dump(MESSAGE, packed, {"packed": json.dumps(was)})

    return bytes_(forged)


def header(change: Callable[[dict[str, Any]], str]) -> Act:
    """Answer with a message whose header lies, well sealed."""

    def forged(data: bytes) -> bytes:
        end = 8 + int.from_bytes(data[:8], "little")
        return container.seal(change(json.loads(data[8:end])).encode(), [data[end:]])

    return bytes_(forged)


def claims(record: str, **changed: Any) -> Act:
    """Answer with other claims; None leaves one out."""

    def act(event: Event) -> list[Message]:
        kind = MetricRecord if record == "metrics" else ConfigRecord
        found = dict(event.reply.content[record]) | changed
        event.reply.content[record] = kind({name: value for name, value in found.items() if value is not None})
        return [event.reply]

    return act


def rounds_off(by: int) -> Act:
    """Answer for another round."""

    def act(event: Event) -> list[Message]:
        return claims("reply", round=read_order(event.order.content).done + 1 + by)(event)

    return act


def without(record: str) -> Act:
    """Answer without a part."""

    def act(event: Event) -> list[Message]:
        del event.reply.content[record]
        return [event.reply]

    return act


def filled(part: str, value: float) -> Change:
    """Put one value into the first kept place of an entry of this kind."""

    def change(answer: Params) -> Params:
        name = next((name for name in answer if name.endswith(part)), next(iter(answer)))
        mask = answer.get(name.rpartition(".")[0] + ".mask")
        changed = answer[name].clone()
        place = 0 if mask is None or mask.shape != changed.shape else int(mask.reshape(-1).nonzero()[0])
        changed.reshape(-1)[place] = value
        return answer | {name: changed}

    return change


def scaled(by: float) -> Change:
    """Scale all weights."""
    return lambda answer: {name: value if name.endswith(".mask") else value * by for name, value in answer.items()}


def first_of(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Change the first entry of this kind."""

    def changed(answer: Params) -> Params:
        name = next(name for name in answer if name.endswith(part))
        return answer | {name: change(answer[name])}

    return changed


def renamed(old: str, new: str) -> Change:
    """Give entries other names."""
    return lambda answer: {name.replace(old, new): value for name, value in answer.items()}


def lacking(part: str) -> Change:
    """Leave out the first entry of this kind."""

    def changed(answer: Params) -> Params:
        gone = next(name for name in answer if name.endswith(part))
        return {name: value for name, value in answer.items() if name != gone}

    return changed


def dense_mask(packed: Params, was: dict[str, Any]) -> None:
    """Send a mask as numbers, which may be anything."""
    name = next(name for name in packed if name.endswith(".mask"))
    packed[name] = torch.full(was.pop(name)[2], 0.5)


def regrown(packed: Params, was: dict[str, Any]) -> None:
    """Send values at places that the mask drops."""
    name = next(name for name, (way, *_) in was.items() if way == "sparse")
    packed[name] = torch.zeros(was.pop(name)[2])


def _text(header: dict[str, Any]) -> str:
    return json.dumps(header, separators=(",", ":"))


def bomb(header: dict[str, Any]) -> str:
    """Claim a tensor of a terabyte."""
    list(header.values())[1]["shape"] = [1 << 19, 1 << 19]
    return _text(header)


def double(header: dict[str, Any]) -> str:
    """Name an entry twice."""
    name, entry = list(header.items())[1]
    return f"{_text(header)[:-1]},{_text({name: entry})[1:]}"


def negative(header: dict[str, Any]) -> str:
    """Claim a place before the beginning, so that entries overlap."""
    list(header.values())[1]["data_offsets"] = [-4, 0]
    return _text(header)


def twice(change: Act | None = None) -> Act:
    """Answer, and answer again at the next look."""

    def act(event: Event) -> list[Message]:
        second = Message(type(event.reply.content)(dict(event.reply.content)), reply_to=event.order)
        second.metadata.__dict__["_src_node_id"] = event.reply.metadata.src_node_id
        if change is not None:
            second = change(event._replace(reply=second))[0]
        return [event.reply, second]

    return act


def told(code: int, reason: str) -> Act:
    """Answer with Flower's error."""

    def act(event: Event) -> list[Message]:
        error = Message(Error(code, reason), reply_to=event.order)
        error.metadata.__dict__["_src_node_id"] = event.reply.metadata.src_node_id
        return [error]

    return act


def impostor(event: Event) -> list[Message]:
    """Answer from another node."""
    event.reply.metadata.__dict__["_src_node_id"] = 424242
    return [event.reply]


BAD_MASK = {"method": "maml+metavd+drop"}
NAN, INF = float("nan"), float("inf")
REPLIES = [
    *(Fault("not finite", name, values(filled(part, value))) for name, part, value in (
        ("NaN in a weight", ".weight", NAN), ("NaN in a bias", ".bias", NAN), ("NaN in a spread", ".logvar", NAN),
        ("infinity", ".weight", INF), ("minus infinity", ".bias", -INF))),
    Fault("not finite", "NaN everywhere", values(scaled(NAN))),
    Fault("wrong name", "renamed", values(renamed("weight", "weights"))),
    Fault("wrong name", "one lacks", values(lacking(".bias"))),
    Fault("wrong name", "one too many", values(lambda a: a | {"server.key": torch.zeros(3)})),
    Fault("wrong name", "nothing at all", values(lambda _: {})),
    Fault("wrong name", "one twice", header(double)),
    Fault("wrong shape", "transposed", values(first_of(".weight", lambda v: v.T.contiguous()))),
    Fault("wrong shape", "one number for all", values(first_of(".bias", lambda v: v[:1]))),
    Fault("wrong shape", "an axis too many", values(first_of(".bias", lambda v: v[None]))),
    Fault("wrong shape", "a terabyte", header(bomb)),
    Fault("wrong dtype", "float64", values(first_of(".bias", lambda v: v.double()))),
    Fault("wrong dtype", "float16", values(first_of(".weight", lambda v: v.half()))),
    Fault("wrong dtype", "int32", values(first_of(".bias", lambda v: v.int()))),
    Fault("norm", "a million times", values(scaled(1e6))),
    Fault("norm", "turned round and large", values(scaled(-1e3))),
    Fault("norm", "the largest float", values(filled(".weight", 3.4e38))),
    *(Fault("sample count", name, claims("metrics", rows=value)) for name, value in (
        ("zero", 0), ("negative", -5), ("NaN", NAN), ("infinite", INF), ("10^12", 10**12), ("missing", None),
        ("a list", [3, 4]))),
    Fault("bad mask", "the opposite", values(
        lambda a: {n: 1 - v if n.endswith(".mask") else v for n, v in a.items()}, mask_known=False), **BAD_MASK),
    Fault("bad mask", "everything kept", values(
        lambda a: {n: torch.ones_like(v) if n.endswith(".mask") else v for n, v in a.items()}, mask_known=False),
        **BAD_MASK),
    Fault("bad mask", "one half", repacked(dense_mask), **BAD_MASK),
    Fault("bad mask", "dropped values sent", repacked(regrown), **BAD_MASK),
    Fault("bad mask", "no mask", values(lacking(".mask")), **BAD_MASK),
    Fault("wrong round", "the one before", rounds_off(-1)),
    Fault("wrong round", "the next", rounds_off(1)),
    Fault("wrong round", "missing", claims("reply", round=None)),
    Fault("wrong round", "text", claims("reply", round="1")),
    Fault("duplicate", "the same twice", twice(), absent=never, named=False),
    Fault("duplicate", "a poisoned second", twice(values(scaled(NAN))), absent=never, named=False),
    Fault("duplicate", "a larger second", twice(claims("metrics", rows=10**6)), absent=never, named=False),
    Fault("oversized", "padded", bytes_(lambda data: data + bytes(BIG))),
    Fault("oversized", "zeros", bytes_(lambda _: bytes(2 * BIG))),
    Fault("oversized", "an entry too large", values(first_of(".bias", lambda _: torch.zeros(BIG // 4)))),
    Fault("truncated", "half", bytes_(lambda data: data[: len(data) // 2])),
    Fault("truncated", "one byte", bytes_(lambda data: data[:-1])),
    Fault("truncated", "the start alone", bytes_(lambda data: data[:8])),
    Fault("truncated", "empty", bytes_(lambda _: b"")),
    Fault("damaged", "a bit", bytes_(lambda data: data[:-50] + bytes([data[-50] ^ 4]) + data[-49:])),
    Fault("damaged", "noise", bytes_(lambda data: random.Random(0).randbytes(len(data)))),
    Fault("damaged", "a pickle", bytes_(lambda _: b"\x80\x04cposix\nsystem\n(S'false'\ntR.")),
    Fault("damaged", "another version", bytes_(lambda _: container.dump(MESSAGE._replace(version=99), {}))),
    Fault("damaged", "negative length", header(negative)),
    Fault("damaged", "no metrics", without("metrics")),
    Fault("damaged", "no reply", without("reply")),
    Fault("damaged", "no parameters", without("params")),
    Fault("damaged", "another protocol", claims("reply", protocol=99)),
    Fault("client error", "an exception", told(2, "<class 'ValueError'>:<'train failed'>")),
    Fault("client error", "another node answers", impostor),
    Fault("repeated offender", "NaN in every round", values(scaled(NAN)), absent=ever, lasting=True,
          config=(("max-offences", 2), ("rounds", 5))),
    Fault("repeated offender", "10^12 samples in every round", claims("metrics", rows=10**12), absent=ever,
          lasting=True, config=(("max-offences", 2), ("rounds", 5))),
]  # fmt: skip
