"""What stands in a message: the one place that knows Flower's records.

    down   order    ConfigRecord: protocol, done, client, key, spec, half, whole
           params   ArrayRecord: one entry, the bytes of `wire.codec`
    up     reply    ConfigRecord: protocol, round
           metrics  MetricRecord: numbers
           params   as above, where something was trained

A client says neither who it is (the transport knows) nor anything of its rows but numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from ..container import read_json
from ..data.source import Source
from ..runs.settings import Experiment, content
from ..serve.samples import described, restored
from .config import FederationError

PROTOCOL = 2
_STYPE = "metavd.wire"
_ORDER, _REPLY, _PARAMS, _METRICS = "order", "reply", "params", "metrics"


@dataclass(frozen=True)
class Order:
    """What a client is asked to do."""

    done: int
    """Rounds that are finished."""
    client: int
    key: int
    """Of the run: every random number of the client comes from it, the round and the client."""
    spec: str
    """The run's description, see `spec`."""
    half: bool = False
    whole: bool = False
    """The parameters are the server's, for a client that fits its own embedding."""
    turn: int = 0
    """The last round of this client that is part of the server's state, from 1; 0: none."""
    params: bytes = b""


_WORDS = [each.name for each in fields(Order) if each.name != "params"]


def cleaned(text: object, most: int = 200) -> str:
    r"""Return what a client wrote, fit for a log: one line, without control codes, cut.

    >>> cleaned("north\n2026 INFO all is well\x1b[2J", 24)
    'north 2026 INFO all is w'
    """
    # Of a text of 9 MB only the beginning is looked at.
    return re.sub(r"\s+", " ", "".join(c if c.isprintable() else " " for c in str(text)[: 4 * most])).strip()[:most]


def spec(experiment: Experiment, takes: Source, classes: list[str]) -> str:
    """Write all that a client must know of a run."""
    return json.dumps({"experiment": content(experiment), "takes": described(takes), "classes": classes})


def read_spec(text: str) -> tuple[Experiment, Source, list[str]]:
    """Read what `spec` wrote."""
    try:
        values = read_json(text)
        return Experiment(**values["experiment"]), restored(values["takes"]), list(values["classes"])
    except (ValueError, KeyError, TypeError) as error:
        raise FederationError(
            f"the server's description of the run cannot be read ({error}); is its metavd newer?"
        ) from None


def write_order(order: Order) -> RecordDict:
    """Put an order into records."""
    config = ConfigRecord({"protocol": PROTOCOL} | {name: getattr(order, name) for name in _WORDS})
    return RecordDict({_ORDER: config, **_packed(order.params)})


def read_order(records: RecordDict) -> Order:
    """Read an order; one of another protocol is refused."""
    config = _config(records, _ORDER)
    known: dict[str, Any] = {name: config[name] for name in _WORDS}
    return Order(**known, params=payload(records))


def write_reply(round: int, metrics: Mapping[str, Any], params: bytes = b"", **about: Any) -> RecordDict:
    """Put an answer into records; figures that are not defined are left out."""
    known = {name: value for name, value in metrics.items() if value is not None}
    config = ConfigRecord({"protocol": PROTOCOL, "round": round} | about)
    return RecordDict({_REPLY: config, _METRICS: MetricRecord(known), **_packed(params)})


def read_reply(records: RecordDict) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what an answer says of itself, and its metrics."""
    config = dict(_config(records, _REPLY))
    found = records.get(_METRICS)
    if not isinstance(found, MetricRecord):
        raise FederationError("the answer has no metrics")
    return config, dict(found)


def payload(records: RecordDict) -> bytes:
    """Return the encoded parameters of a message; none where there are none."""
    found = records.get(_PARAMS)
    if found is None:
        return b""
    array = found.get(_PARAMS) if isinstance(found, ArrayRecord) else None
    if array is None or len(found) != 1 or array.stype != _STYPE:
        raise FederationError("the message has parameters in a form that is not metavd's")
    return bytes(array.data)


def _packed(params: bytes) -> dict[str, Any]:
    if not params:
        return {}
    return {_PARAMS: ArrayRecord({_PARAMS: Array("uint8", (len(params),), _STYPE, params)})}


def _config(records: RecordDict, name: str) -> ConfigRecord:
    found = records.get(name)
    if not isinstance(found, ConfigRecord) or "protocol" not in found:
        raise FederationError("the message is not metavd's; all nodes and the server must run the app of metavd")
    if found["protocol"] != PROTOCOL:
        raise FederationError(
            f"the message has protocol {found['protocol']!r}, but this metavd speaks {PROTOCOL}; install the same "
            "metavd everywhere"
        )
    return found
