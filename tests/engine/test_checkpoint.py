"""Checkpoints: bit for bit, atomic, the last two kept, damage named, no pickle."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

import metavd.version
from metavd.core import rng
from metavd.core.types import ServerState
from metavd.engine import checkpoint
from metavd.engine.checkpoint import KEEP, load_checkpoint, save_checkpoint, state_hash, write_atomic


def make_state(round: int = 3) -> ServerState:
    """All kinds of tensors, in an order that is not alphabetical."""
    special = torch.tensor([0.0, -0.0, 1e-310, 1.0 / 3.0, 1e308], dtype=torch.float64)
    params = {
        "z.weight": special + 0.0 * round,
        "a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
        "server.client.embedding": torch.randn(4, 2, generator=torch.Generator().manual_seed(round)),
        "a.mask": torch.tensor([1.0, 0.0]),
        "scalar": torch.tensor(0.1),
    }
    slots = {"z.weight": -special, "a.weight": torch.ones(3, 2)}
    return ServerState(params, slots, torch.tensor(float(round)), rng.key(round))


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def names(*rounds: int) -> set[str]:
    return {f"round-{round:06d}.{ending}" for round in rounds for ending in ("json", "safetensors")}


def test_round_trip_is_exact(tmp_path: Path) -> None:
    """Law: every bit, type, shape and the order of the names come back, and so does what the caller adds."""
    state = make_state()
    save_checkpoint(tmp_path, state, {"down": 2**53 + 1, "seconds": 0.1, "text": "ü"})
    found = load_checkpoint(tmp_path)
    assert found is not None
    again, extra = found
    assert extra == {"down": 2**53 + 1, "seconds": 0.1, "text": "ü"}
    assert list(again.params) == list(state.params), "sums run in this order"
    assert list(again.slots) == list(state.slots)
    for mine, right in ((again.params, state.params), (again.slots, state.slots)):
        for name, value in right.items():
            assert mine[name].dtype == value.dtype
            assert mine[name].shape == value.shape
            assert mine[name].contiguous().numpy().tobytes() == value.contiguous().numpy().tobytes()
    assert (again.round, again.key) == (state.round, state.key)
    assert again.round.dtype == state.round.dtype
    assert again.key.dtype == torch.int64
    assert state_hash(again) == state_hash(state)


def test_hash_knows_names_types_shapes_and_bits() -> None:
    """Law: two states have one hash exactly when they are the same, whatever the order of their names."""
    state = make_state()
    turned = state._replace(params=dict(reversed(state.params.items())))
    assert state_hash(turned) == state_hash(state)
    changes: list[dict[str, torch.Tensor]] = [
        {"scalar": torch.tensor(0.1).nextafter(torch.tensor(1.0))},
        {"scalar": torch.tensor(0.1).double()},
        {"scalar": torch.tensor([0.1])},
        {"a.mask": torch.tensor([1.0, -0.0])},
        {"new": torch.zeros(0)},
    ]
    hashes = {state_hash(state._replace(params=state.params | change)) for change in changes}
    hashes |= {state_hash(state._replace(round=torch.tensor(4.0))), state_hash(state._replace(key=rng.key(9)))}
    hashes |= {state_hash(state._replace(slots={})), state_hash(state)}
    assert len(hashes) == len(changes) + 4


def test_last_two_are_kept(tmp_path: Path) -> None:
    assert KEEP == 2
    for round in (1, 2, 5, 9):
        save_checkpoint(tmp_path, make_state(round), {})
    assert files(tmp_path) == names(5, 9)


def test_order_is_by_number(tmp_path: Path) -> None:
    """Round 1,000,000 comes after round 999,999."""
    for round in (999_999, 1_000_000):
        save_checkpoint(tmp_path, make_state(round), {})
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert int(found[0].round) == 1_000_000


def test_no_folder_no_checkpoint(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "missing") is None
    assert load_checkpoint(tmp_path) is None


# --- crashes ---------------------------------------------------------------------------------------------------------


class Crash(Exception):  # noqa: N818
    pass


@pytest.mark.parametrize("survivors", range(9))
def test_crash_at_any_step_of_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survivors: int) -> None:
    """Law: whichever call to the file system is the last, a sound checkpoint is found, and saving again succeeds."""
    save_checkpoint(tmp_path, make_state(1), {"n": 1})
    save_checkpoint(tmp_path, make_state(2), {"n": 2})
    left = survivors

    def dying(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **more: object) -> object:
            nonlocal left
            if left == 0:
                raise Crash
            left -= 1
            return function(*arguments, **more)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "fsync", dying(os.fsync))
        patch.setattr(checkpoint.Path, "replace", dying(Path.replace))
        patch.setattr(checkpoint.Path, "unlink", dying(Path.unlink))
        try:
            save_checkpoint(tmp_path, make_state(3), {"n": 3})
            crashed = False
        except Crash:
            crashed = True
    assert crashed == (survivors < 8), "3 calls for the tensors, 3 for the JSON, 2 to remove the oldest"
    said: list[str] = []
    found = load_checkpoint(tmp_path, report=said.append)
    assert found is not None
    state, extra = found
    assert said == [], "a crash leaves no damage, only leftovers"
    assert extra["n"] == int(state.round) == (3 if survivors > 4 else 2)
    assert state_hash(state) == state_hash(make_state(extra["n"]))
    save_checkpoint(tmp_path, make_state(3), {"n": 3})
    save_checkpoint(tmp_path, make_state(4), {"n": 4})
    assert {name for name in files(tmp_path) if name.endswith(".json")} == {"round-000003.json", "round-000004.json"}


def test_write_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: a file is as it was until it is whole."""
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"new and longer")
    assert path.read_bytes() == b"old"
    monkeypatch.undo()
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert files(tmp_path) == {"file"}


# --- damage ----------------------------------------------------------------------------------------------------------

TENSORS, ABOUT = "round-000002.safetensors", "round-000002.json"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def edit(path: Path, change: Callable[[dict], object]) -> None:
    about = json.loads(path.read_text())
    change(about)
    path.write_text(json.dumps(about))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "tensors truncated": lambda f: (f / TENSORS).write_bytes((f / TENSORS).read_bytes()[:-7]),
    "tensors empty": lambda f: (f / TENSORS).write_bytes(b""),
    "tensors too long": lambda f: (f / TENSORS).write_bytes((f / TENSORS).read_bytes() + b"\0"),
    "tensors missing": lambda f: (f / TENSORS).unlink(),
    "one bit of a tensor": lambda f: flip(f / TENSORS, -1),
    "one bit of the header": lambda f: flip(f / TENSORS, 3),
    "JSON truncated": lambda f: (f / ABOUT).write_text((f / ABOUT).read_text()[:-1]),
    "JSON empty": lambda f: (f / ABOUT).write_text(""),
    "JSON binary": lambda f: (f / ABOUT).write_bytes(b"\xff\xfe\x00"),
    "JSON a list": lambda f: (f / ABOUT).write_text("[]"),
    "JSON without its checksum": lambda f: edit(f / ABOUT, lambda about: about.pop("sha256")),
    "JSON without its order": lambda f: edit(f / ABOUT, lambda about: about.pop("order")),
    "JSON with another checksum": lambda f: edit(f / ABOUT, lambda about: about.update(sha256="0" * 64)),
    "JSON with a name too many": lambda f: edit(f / ABOUT, lambda about: about["order"].append("params/x")),
}
JSON_DAMAGE: dict[str, Callable[[Path], object]] = {
    "JSON without the caller's part": lambda f: edit(f / ABOUT, lambda about: about.pop("extra")),
    "JSON without the round in its order": lambda f: edit(f / ABOUT, lambda about: about["order"].remove("round")),
    "JSON with a name too few": lambda f: edit(f / ABOUT, lambda about: about["order"].remove("params/scalar")),
    "JSON with another number": lambda f: edit(f / ABOUT, lambda about: about["extra"].update(down=0)),
    "JSON with another order": lambda f: edit(f / ABOUT, lambda about: about["order"].reverse()),
}


def check_damage(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    save_checkpoint(tmp_path, make_state(1), {"down": 10})
    save_checkpoint(tmp_path, make_state(2), {"down": 20})
    damage(tmp_path)
    said: list[str] = []
    found = load_checkpoint(tmp_path, report=said.append)
    assert found is not None
    assert state_hash(found[0]) == state_hash(make_state(1))
    assert found[1] == {"down": 10}
    assert len(said) == 1
    assert "round-000002" in said[0]
    assert "damaged" in said[0]
    assert "\n" not in said[0]


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named_and_the_one_before_is_used(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    check_damage(tmp_path, damage)


@pytest.mark.parametrize("damage", JSON_DAMAGE.values(), ids=JSON_DAMAGE)
def test_damage_inside_the_json(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    """The JSON holds the bytes sent so far and the order of the names, which decide the result too."""
    check_damage(tmp_path, damage)


def test_all_damaged(tmp_path: Path) -> None:
    """Each is named; then there is none, and the run starts anew."""
    for round in (1, 2):
        save_checkpoint(tmp_path, make_state(round), {})
        (tmp_path / f"round-{round:06d}.json").write_text("{")
    said: list[str] = []
    assert load_checkpoint(tmp_path, report=said.append) is None
    assert [("round-000002" in text, "round-000001" in text) for text in said] == [(True, False), (False, True)]


def test_leftovers_are_no_checkpoints(tmp_path: Path) -> None:
    """Tensors without JSON, partial files and strangers are passed over without a word."""
    save_checkpoint(tmp_path, make_state(1), {})
    tensors = (tmp_path / "round-000001.safetensors").read_bytes()
    (tmp_path / "round-000007.safetensors").write_bytes(tensors)
    (tmp_path / ".round-000008.json.partial").write_text("{")
    (tmp_path / "round-x.json").write_text("{}")
    (tmp_path / "notes.json").write_text("{}")
    said: list[str] = []
    found = load_checkpoint(tmp_path, report=said.append)
    assert found is not None
    assert int(found[0].round) == 1
    assert said == []


# --- no pickle -------------------------------------------------------------------------------------------------------

PACKAGE = Path(metavd.version.__file__).parent
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
UNSAFE_CALLS = {"torch.save", "torch.load", "np.save", "numpy.save"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_pickle_anywhere(path: Path) -> None:
    """Law: no module imports pickle or its kin, none calls what pickles behind one's back."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.partition(".")[0] for alias in node.names} & UNSAFE_MODULES
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in UNSAFE_MODULES
            assert not (node.module == "torch" and {alias.name for alias in node.names} & {"save", "load"})
        elif isinstance(node, ast.Attribute):
            assert ast.unparse(node) not in UNSAFE_CALLS
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is False


def test_files_are_plain_safetensors_and_json(tmp_path: Path) -> None:
    """Anyone can read a checkpoint with the two libraries it names."""
    save_checkpoint(tmp_path, make_state(), {"down": 1})
    assert files(tmp_path) == names(3)
    about = json.loads((tmp_path / "round-000003.json").read_text())
    assert set(load((tmp_path / "round-000003.safetensors").read_bytes())) == set(about["order"])
    assert (about["round"], about["extra"]) == (3, {"down": 1})
