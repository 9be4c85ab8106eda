"""A server's whole state on disk: one container per checkpoint, written whole or not at all, the last two kept.

    round-000050.safetensors    parameters, optimiser memory, round and key, and what simulated clients keep; in its
                                header the round, the run's spec and seed where they are given, and what the caller
                                adds

A damaged checkpoint is reported by name and the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import tree
from ..container import Format, dump, load, write_atomic
from ..core.owned import whole
from ..core.types import ServerState
from ..errors import UserError
from ..tree import Params
from .kept import digest, filled

CHECKPOINT = Format("checkpoint", 2)
KEEP = 2


def _flat(state: ServerState) -> Params:
    """Return all that a server knows, by name."""
    state = whole(state)
    named = {f"params/{name}": value for name, value in state.params.items()}
    named |= {f"slots/{name}": value for name, value in state.slots.items()}
    named |= {"round": state.round, "key": state.key}
    return {name: value.detach().cpu().contiguous() for name, value in named.items()}


def _private(state: ServerState) -> Params:
    """Return what those simulated clients keep that have kept something, by name, and who they are."""
    if state.kept is None:
        return {}
    who = state.kept.visited()
    rows = {f"kept/{name}": value.cpu().contiguous() for name, value in state.kept.rows(who).items()}
    return rows | {"clients": torch.tensor(who, dtype=torch.int64), "of": torch.tensor(len(state.kept))}


def _state(flat: Params) -> ServerState:
    params, slots, kept = (tree.under(flat, part) for part in ("params/", "slots/", "kept/"))
    table = filled(int(flat["of"]), flat["clients"].tolist(), kept) if "of" in flat else None
    return ServerState(params, slots, flat["round"], flat["key"], table)


def state_hash(state: ServerState) -> str:
    """SHA-256 over names and bits: two servers know the same exactly when their hashes are the same."""
    digest = hashlib.sha256()
    for name, value in sorted(_flat(state).items()):
        digest.update(f"{name}:{value.dtype}:{tuple(value.shape)}".encode())
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def hashes(state: ServerState) -> dict[str, str]:
    """Return what stands in a result of the state that it tested: of the server, and of what clients keep if any."""
    kept = {} if state.kept is None else {"kept_sha256": digest(state.kept)}
    return {"model_sha256": state_hash(state), **kept}


def save_checkpoint(
    folder: Path, state: ServerState, extra: Mapping[str, Any], *, spec: str | None = None, seed: int | None = None
) -> None:
    """Add a checkpoint and remove all but the last two.

    Args:
        folder: where checkpoints of one run are.
        state: all that the run needs to go on.
        extra: plain values that come back with it.
        spec: hash of the run's settings, for whoever finds the file.
        seed: of the run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    named = {"round": int(state.round), "spec": spec, "seed": seed}
    words = {name: str(value) for name, value in named.items() if value is not None}
    write_atomic(
        _path(folder, int(state.round)),
        dump(CHECKPOINT, _flat(state) | _private(state), words | {"extra": json.dumps(extra)}),
    )
    for old in _rounds(folder)[KEEP:]:
        _path(folder, old).unlink(missing_ok=True)


def _path(folder: Path, round: int) -> Path:
    return folder / f"round-{round:06d}.safetensors"


def _rounds(folder: Path) -> list[int]:
    """Rounds of which there are checkpoints, newest first."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, but must be a folder of checkpoints; put back your copy, or take it away")
    names = (re.fullmatch(r"round-(\d{6,})\.safetensors", path.name) for path in folder.glob("round-*.safetensors"))
    return sorted((int(match[1]) for match in names if match), reverse=True)


def _check_run(path: Path, words: Mapping[str, str], specs: Sequence[str], seed: int | None) -> None:
    for name, wanted in (("seed", [] if seed is None else [str(seed)]), ("spec", specs)):
        there = words.get(name)
        if wanted and there is not None and there not in wanted:
            raise UserError(
                f"the checkpoint {path} is another run's ({name} {there}, and this run has {wanted[0]}), or the "
                "config.toml beside it was edited; put back your copy of what is not this run's, or take the "
                "checkpoint away"
            )


def load_checkpoint(
    folder: Path,
    device: torch.device | str = "cpu",
    report: Callable[[str], None] = lambda _: None,
    round: int | None = None,
    *,
    specs: Sequence[str] = (),
    seed: int | None = None,
) -> tuple[ServerState, dict[str, Any]] | None:
    """Return the newest sound checkpoint, or that of a round, and the caller's additions, or None.

    Each damaged one is named to `report`. One of another `seed`, or of none of these `specs` (empty: any), is another
    run's, and refused.
    """
    for found in _rounds(folder) if round is None else [each for each in _rounds(folder) if each == round]:
        path = _path(folder, found)
        try:
            flat, words = load(CHECKPOINT, path.read_bytes())
            _check_run(path, words, specs, seed)
            if int(flat["round"]) != found:
                raise ValueError(f"it is of round {int(flat['round'])}")
            return _state({name: value.to(device) for name, value in flat.items()}), json.loads(words["extra"])
        except UserError:
            raise
        except (OSError, ValueError, KeyError) as error:
            report(f"checkpoint {path} is damaged ({error}); trying the one before it")
    return None
