"""A server's whole state on disk: safetensors and JSON, atomic, the last two kept, no pickle.

    round-000050.safetensors    parameters, optimiser memory, round, key
    round-000050.json           written last: round, SHA-256 of the tensors, their order, what the caller adds, and
                                a SHA-256 of all that

A checkpoint exists once its JSON does. A damaged one is reported by name and the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ..core.types import ServerState

KEEP = 2


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that at any moment it is either whole or as it was before."""
    scratch = path.with_name(f".{path.name}.partial")
    with scratch.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _flat(state: ServerState) -> dict[str, torch.Tensor]:
    named = {f"params/{name}": value for name, value in state.params.items()}
    named |= {f"slots/{name}": value for name, value in state.slots.items()}
    named |= {"round": state.round, "key": state.key}
    return {name: value.detach().cpu().contiguous() for name, value in named.items()}


def state_hash(state: ServerState) -> str:
    """SHA-256 over names and bits: two states are the same exactly when their hashes are."""
    digest = hashlib.sha256()
    for name, value in sorted(_flat(state).items()):
        digest.update(f"{name}:{value.dtype}:{tuple(value.shape)}".encode())
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def save_checkpoint(folder: Path, state: ServerState, extra: Mapping[str, Any]) -> None:
    """Add a checkpoint and remove all but the last two."""
    folder.mkdir(parents=True, exist_ok=True)
    flat = _flat(state)
    data = save(flat)
    stem = f"round-{int(state.round):06d}"
    write_atomic(folder / f"{stem}.safetensors", data)
    # Dictionaries keep their order; sums over entries are taken in it, so a resumed run must have the same.
    about = {"round": int(state.round), "sha256": hashlib.sha256(data).hexdigest(), "order": list(flat), "extra": extra}
    write_atomic(folder / f"{stem}.json", json.dumps(about | {"check": digest(about)}).encode())
    for old in _stems(folder)[KEEP:]:
        (folder / f"{old}.json").unlink(missing_ok=True)
        (folder / f"{old}.safetensors").unlink(missing_ok=True)


def digest(about: Mapping[str, Any]) -> str:
    """SHA-256 of plain values, in their order."""
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def _stems(folder: Path) -> list[str]:
    """Checkpoints by name, newest first; tensors without their JSON count as none."""
    names = (re.fullmatch(r"(round-\d{6,})\.json", path.name) for path in folder.glob("round-*.json"))
    return sorted((match[1] for match in names if match), key=lambda stem: int(stem[6:]), reverse=True)


def load_checkpoint(
    folder: Path,
    device: torch.device | str = "cpu",
    report: Callable[[str], None] = lambda _: None,
    round: int | None = None,
) -> tuple[ServerState, dict[str, Any]] | None:
    """Return the newest sound checkpoint, or that of a round, and the caller's additions, or None.

    Each damaged one is named to `report`.
    """
    for stem in _stems(folder):
        if round is not None and int(stem[6:]) != round:
            continue
        try:
            about = json.loads((folder / f"{stem}.json").read_text())
            check = about.pop("check")
            data = (folder / f"{stem}.safetensors").read_bytes()
            if check != digest(about) or about["sha256"] != hashlib.sha256(data).hexdigest():
                raise ValueError("its checksum does not match")
            loaded = load(data)
            flat = {name: loaded[name].to(device) for name in about["order"]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            report(f"checkpoint {folder / stem} is damaged ({error}); trying the one before it")
            continue
        parts = {
            part: {name.partition("/")[2]: value for name, value in flat.items() if name.startswith(f"{part}/")}
            for part in ("params", "slots")
        }
        return ServerState(parts["params"], parts["slots"], flat["round"], flat["key"]), about["extra"]
    return None
