"""Checkpoints: bit for bit, atomic, the last two kept, damage named, no pickle."""

from __future__ import annotations

import ast
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import metavd.version
from metavd import container
from metavd.container import dump, seal
from metavd.core import rng
from metavd.core.types import ServerState
from metavd.engine.checkpoint import CHECKPOINT, KEEP, load_checkpoint, save_checkpoint, state_hash
from metavd.errors import UserError


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
    return {f"round-{round:06d}.safetensors" for round in rounds}


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


@pytest.mark.parametrize("survivors", range(5))
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
        patch.setattr(container.os, "fsync", dying(os.fsync))
        patch.setattr(container.Path, "replace", dying(Path.replace))
        patch.setattr(container.Path, "unlink", dying(Path.unlink))
        try:
            save_checkpoint(tmp_path, make_state(3), {"n": 3})
            crashed = False
        except Crash:
            crashed = True
    assert crashed == (survivors < 4), "3 calls for the file, 1 to remove the oldest"
    said: list[str] = []
    found = load_checkpoint(tmp_path, report=said.append)
    assert found is not None
    state, extra = found
    assert said == [], "a crash leaves no damage, only leftovers"
    assert extra["n"] == int(state.round) == (3 if survivors > 1 else 2)
    assert state_hash(state) == state_hash(make_state(extra["n"]))
    save_checkpoint(tmp_path, make_state(3), {"n": 3})
    save_checkpoint(tmp_path, make_state(4), {"n": 4})
    assert {name for name in files(tmp_path) if name.startswith("round-")} == names(3, 4)


# --- damage ----------------------------------------------------------------------------------------------------------

NEWEST = "round-000002.safetensors"


def write(folder: Path, change: Callable[[bytes], bytes]) -> None:
    path = folder / NEWEST
    path.write_bytes(change(path.read_bytes()))


def flip(folder: Path, at: int) -> None:
    write(folder, lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at:][1:])


def edit(folder: Path, change: Callable[[dict], object], *, honest: bool = False) -> None:
    """Change the header, and leave the checksum as it was or, if honest, make it that of what is there now."""

    def edited(data: bytes) -> bytes:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header, separators=(",", ":")).encode()
        rest = data[8 + length :]
        return seal(text, [rest]) if honest else struct.pack("<Q", len(text)) + text + rest

    write(folder, edited)


def words(header: dict) -> dict:
    return header["__metadata__"]


def turn(header: dict) -> None:
    entries = list(header.items())
    header.clear()
    header.update([entries[0], *reversed(entries[1:])])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda f: write(f, lambda data: data[:-7]),
    "empty": lambda f: write(f, lambda _: b""),
    "too long": lambda f: write(f, lambda data: data + b"\0"),
    "a folder": lambda f: ((f / NEWEST).unlink(), (f / NEWEST).mkdir()),
    "one bit of a tensor": lambda f: flip(f, -1),
    "one bit of the header": lambda f: flip(f, 200),
    "one bit of its length": lambda f: flip(f, 1),
    "one bit of the checksum": lambda f: flip(f, 40),
    "binary": lambda f: write(f, lambda _: b"\xff\xfe\x00" * 100),
    "a JSON list": lambda f: write(f, lambda _: b"\2\0\0\0\0\0\0\0[]"),
    "header truncated": lambda f: write(f, lambda data: data[:100]),
    "header without its checksum": lambda f: edit(f, lambda header: words(header).pop("sha256")),
    "header with another checksum": lambda f: edit(f, lambda header: words(header).update(sha256="0" * 64)),
    "header with a name too many": lambda f: edit(f, lambda header: header.update(x=header["key"])),
    "header with a name too few": lambda f: edit(f, lambda header: header.pop("params/scalar")),
    "header with another number": lambda f: edit(f, lambda header: words(header).update(extra='{"down": 0}')),
    "header with another order": lambda f: edit(f, turn),
    "header with another type": lambda f: edit(f, lambda header: header["round"].update(dtype="I32")),
    "written by another program": lambda f: save_file({"round": torch.ones(())}, f / NEWEST),
}
LIES: dict[str, Callable[[Path], object]] = {
    "without the caller's part": lambda f: edit(f, lambda header: words(header).pop("extra"), honest=True),
    "without the round": lambda f: (f / NEWEST).write_bytes(dump(CHECKPOINT, {"key": rng.key(0)}, {"extra": "{}"})),
    "with half of the caller's part": lambda f: edit(f, lambda header: words(header).update(extra="{"), honest=True),
    "of a later version": lambda f: edit(f, lambda header: words(header).update(version="99"), honest=True),
    "of another format": lambda f: edit(f, lambda header: words(header).update(format="metavd model"), honest=True),
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
    """The header holds the bytes sent so far and the order of the names, which decide the result too."""
    check_damage(tmp_path, damage)


@pytest.mark.parametrize("damage", LIES.values(), ids=LIES)
def test_a_sound_container_that_is_no_checkpoint(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    check_damage(tmp_path, damage)


def test_all_damaged(tmp_path: Path) -> None:
    """Each is named; then there is none, and the run starts anew."""
    for round in (1, 2):
        save_checkpoint(tmp_path, make_state(round), {})
        (tmp_path / f"round-{round:06d}.safetensors").write_text("{")
    said: list[str] = []
    assert load_checkpoint(tmp_path, report=said.append) is None
    assert [("round-000002" in text, "round-000001" in text) for text in said] == [(True, False), (False, True)]


def test_another_run_s_is_refused(tmp_path: Path) -> None:
    """It may be this run's and config.toml edited: the sentence says both."""
    save_checkpoint(tmp_path, make_state(), {}, spec="aa", seed=1)
    assert load_checkpoint(tmp_path, specs=["aa", "bb"], seed=1) is not None
    with pytest.raises(
        UserError, match=r"another run's \(spec aa, and this run has bb\), or the config.toml beside it"
    ):
        load_checkpoint(tmp_path, specs=["bb"], seed=1)


def test_a_file_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").touch()
    with pytest.raises(UserError, match="checkpoint is a file, but must be a folder of checkpoints"):
        load_checkpoint(tmp_path / "checkpoint")


def test_leftovers_are_no_checkpoints(tmp_path: Path) -> None:
    """Partial files and strangers are passed over without a word."""
    save_checkpoint(tmp_path, make_state(1), {})
    data = (tmp_path / "round-000001.safetensors").read_bytes()
    (tmp_path / ".round-000008.safetensors.partial").write_bytes(data)
    (tmp_path / "round-x.safetensors").write_bytes(data)
    (tmp_path / "round-000009.safetensors.old").write_bytes(data)
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


WHITELIST = PACKAGE / "data" / "formats" / "plainpickle.py"
"""The one reader of pickles, which lets arrays and plain values through; it has tests of its own."""


@pytest.mark.parametrize(
    "path", sorted({*PACKAGE.rglob("*.py")} - {WHITELIST}), ids=lambda path: str(path.relative_to(PACKAGE))
)
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


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    """Anyone can read a checkpoint with the library of that name, and see in its header which run it is of."""
    state = make_state()
    save_checkpoint(tmp_path, state, {"down": 1}, spec="0123abcd", seed=7)
    assert files(tmp_path) == names(3)
    path = tmp_path / "round-000003.safetensors"
    assert torch.equal(load_file(path)["params/a.weight"], state.params["a.weight"])
    with safe_open(path, "pt") as file:
        found = file.metadata()
    assert {name: found[name] for name in ("format", "round", "spec", "seed")} == {
        "format": "metavd checkpoint", "round": "3", "spec": "0123abcd", "seed": "7",
    }  # fmt: skip
    assert json.loads(found["extra"]) == {"down": 1}
