"""Sites with rows of their own, one of which lies about them: it is left out by name, and the others go on."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message, MessageType

from metavd.data.source import digits
from metavd.flower import server
from metavd.flower.audit import FILE
from metavd.flower.config import FederationError, run_config

from .grid import FakeGrid, Node
from .lies import LOOKS
from .rehearsal import BOUND, NAMELESS, Hang, Outcome, Trial, alarm, forged
from .stage import Fault, never

LIAR = 3


@functools.lru_cache(maxsize=1)
def _rows() -> Path:
    folder, source = Path(tempfile.mkdtemp(prefix="metavd-looks-")), digits()
    for i in range(LIAR + 1):
        np.savez(folder / f"{i}.npz", images=source.x[i::8, 0], labels=source.y[i::8])
    return folder


def _run(folder: Path, field: str, value: Any, sites: int) -> tuple[str, list[str]]:
    """Return the model of a run of so many sites, and whom it left out and why."""
    nodes = {50 - i: Node({"data": f"npz:{_rows() / f'{i}.npz'}", "name": f"site {i}"}, key=b"abcd"[i : i + 1])
             for i in range(sites)}  # fmt: skip

    def tell(reply: Message, node: int) -> Message:
        if reply.metadata.message_type == MessageType.QUERY and node == 50 - LIAR:
            look = json.loads(reply.content["reply"]["look"])
            reply.content["reply"]["look"] = json.dumps(look | {field: value})
        return reply

    config = {"data": "", "clients": LIAR, "rounds": 1, "set": "model=mlp width=8", "join-timeout": 30,
              "method": "fedavg", "out": str(folder), "poll": 0.01}  # fmt: skip
    result = server.run(FakeGrid(nodes, tamper=tell), run_config(config))
    lines = map(json.loads, (folder / FILE).read_text().splitlines())
    return result["model_sha256"], [line["why"] for line in lines if line["event"] == "left out"]


@functools.lru_cache(maxsize=1)
def _honest() -> str:
    with tempfile.TemporaryDirectory() as scratch:
        return _run(Path(scratch) / "run", "", None, LIAR)[0]


def lie(name: str) -> Outcome:
    """Run a federation of four sites, of which one lies; the model must be that of the other three."""
    trial = Trial(Fault("lie about rows", name, lambda event: [event.reply], absent=never), "fedavg", 1, LIAR, 0)
    complaints: list[str] = []
    hang, found, began = False, "", time.monotonic()
    with tempfile.TemporaryDirectory(prefix="metavd-lie-") as scratch:
        folder = Path(scratch) / "run"
        try:
            with alarm(BOUND):
                found, out = _run(folder, *LOOKS[name], LIAR + 1)
            if len(out) != 1 or "site 3" not in out[0] or len(out[0]) > 300:
                complaints.append(f"{NAMELESS}: left out: {out!s:.300}")
            complaints += forged(folder)
        except Hang:
            hang = True
        except (FederationError, ArithmeticError, TypeError, ValueError, LookupError) as error:
            complaints.append(f"the server broke: {type(error).__name__}: {error!s:.200}")
    return Outcome(trial, True, hang, found != _honest(), 0, tuple(complaints), 1, time.monotonic() - began)
