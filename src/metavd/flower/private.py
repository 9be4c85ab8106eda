"""What a site keeps between rounds: files of its own, one per round, which never leave it.

    STATE/RUN/client-000003/round-000012.safetensors

STATE is the node's `state` in its node config, by default a folder beside what Flower keeps. A file names its run,
client and round, and is written whole before the answer is sent; it counts once the server says, with its next order,
that the answer of that round is part of its state. A round that the server has forgotten (it crashed before its
checkpoint) is forgotten here too, so that both go on from the same moment. A site that was away goes on from its own
last file; one whose file is lost begins anew, and says so.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..container import Format, dump, load, write_atomic
from ..core.types import Keep
from ..tree import Params
from .config import flower_home
from .message import Order

KEPT = Format("kept", 1)
_NAME = re.compile(r"round-(\d{6,})\.safetensors")


@dataclass(frozen=True)
class Shelf:
    """A client's own files of one run."""

    folder: Path
    run: str
    client: int
    device: str
    report: Callable[[str], None]

    def path(self, round: int) -> Path:
        """Return the file of a round."""
        return self.folder / f"round-{round:06d}.safetensors"

    def rounds(self) -> list[int]:
        """Return the rounds of which there are files, newest first."""
        names = (_NAME.fullmatch(path.name) for path in self.folder.glob("round-*.safetensors"))
        return sorted((int(match[1]) for match in names if match), reverse=True)

    def read(self, turn: int) -> Params | None:
        """Return what was kept after the client's last turn that the server knows of; None: there is nothing.

        Where that file is lost, an older one serves, and a sentence says so.
        """
        for round in (each for each in self.rounds() if each <= turn):
            try:
                found, words = load(KEPT, self.path(round).read_bytes())
                if (words["run"], words["client"], words["round"]) != (self.run, str(self.client), str(round)):
                    raise ValueError("it is another run's, client's or round's")
            except (OSError, ValueError, KeyError) as error:
                self.report(f"{self.path(round)} is damaged ({error}) and not used")
                continue
            if round < turn:
                self.report(f"what this client kept after round {turn} is lost; it goes on from round {round}")
            return {name: value.to(self.device) for name, value in found.items()}
        if turn:
            self.report(f"what this client kept after round {turn} is lost; it begins anew")
        return None

    def changed(self, rows: bytes) -> bool:
        """Remember the fingerprint of the site's rows, here alone; return whether it was another one before."""
        path = self.folder / "rows.sha256"
        before = path.read_bytes() if path.exists() else rows
        if before != rows or not path.exists():
            self.put(path, rows)
        if before != rows:
            self.report("the rows of this site are others than in its last turn of this run; the server is told so")
        return before != rows

    def put(self, path: Path, data: bytes) -> None:
        """Write a file in one of the folders, which are made, for this user alone."""
        for folder in (self.folder.parent.parent, self.folder.parent, self.folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(path, data)
        path.chmod(0o600)

    def write(self, round: int, turn: int, kept: Params) -> None:
        """Write what is kept after a round, and remove all but that and what the server knows of."""
        words = {"run": self.run, "client": str(self.client), "round": str(round)}
        flat = {name: value.detach().cpu().contiguous() for name, value in kept.items()}
        self.put(self.path(round), dump(KEPT, flat, words))
        known = max((each for each in self.rounds() if each <= turn), default=0)
        for old in self.rounds():
            if old not in {round, known}:
                self.path(old).unlink(missing_ok=True)


def shelf(node: Mapping[str, Any], order: Order, device: str, report: Callable[[str], None]) -> Shelf:
    """Return the files of the client that an order is for."""
    state = Path(str(node["state"])).expanduser() if "state" in node else flower_home() / "metavd"
    run = hashlib.sha256(f"{order.key}:{order.spec}".encode()).hexdigest()[:16]
    return Shelf(state / run / f"client-{order.client:06d}", run, order.client, device, report)


def kept_by(keep: Keep | None, own: Shelf, order: Order) -> tuple[Params, bool]:
    """Return what a client keeps, and whether it has kept nothing yet."""
    if keep is None:
        return {}, False
    found = own.read(order.turn)
    if found is not None:
        return found, False
    return keep.init(torch.tensor(order.key, device=own.device), torch.tensor(order.client, device=own.device)), True
