"""What a site keeps: files of its own, which hold for the rounds that the server knows of, and never leave the site."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest

from metavd import methods
from metavd.container import load
from metavd.flower.private import KEPT

from .support.grid import SMALL, FakeGrid, shares
from .test_parity import simulated
from .test_site import bytes_of

KEEPS = {"method": "fedrep", "set": f"{SMALL} head_epochs=1"}
FILES = "flwr/metavd/*/client-*/round-*.safetensors"


class Crash(Exception):  # noqa: N818
    """The server is gone."""


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(FILES))


def test_private_state_gives_the_simulators_bits(federate, tmp_path: Path):
    """Parity: server and figures after three rounds of two clients of three are the simulator's."""
    result = federate(FakeGrid(shares(3)), rounds=3, cohort=2, **KEEPS)
    wanted = simulated("fedrep", KEEPS["set"], rounds=3, cohort=2)
    assert result["model_sha256"] == wanted["model_sha256"]
    assert result["test"]["nll"] == pytest.approx(wanted["test"]["nll"], abs=1e-12)
    assert len(files(tmp_path)) >= 3


HEAD = ["fc2.weight", "fc2.bias"]
LAYERS = [f"fc{layer}" for layer in range(3)]
NEVER_SENT = {
    "fedrep": HEAD,
    "ditto": [f"own.{layer}.{part}" for layer in LAYERS for part in ("weight", "bias")],
    "pfedvem": ["own.begun", *(f"own.{name}.log_sigma" for name in HEAD)],
    "lrbpfl": [
        f"{layer}.{part}" for layer in LAYERS for part in ("in_mean", "in_log_sigma", "out_mean", "out_log_sigma")
    ],
}
"""What a site keeps and the method sends in no form."""
SENT = {"pfedvem": [f"own.{name}" for name in HEAD]}
"""What it keeps and sends as well, under another name: by these it is seen that values would be found."""


@pytest.mark.parametrize("method", NEVER_SENT)
def test_what_is_kept_stays_at_the_site(federate, tmp_path: Path, method: str):
    """Every byte that left the sites, read: nothing of what they keep, by name or value; files are private."""
    nodes = shares(3)
    more = " head_epochs=1" if "head_epochs" in methods.options_of(method) else ""
    federate(FakeGrid(nodes), rounds=2, method=method, set=SMALL + more)
    sent = b"".join(bytes_of(message) for node in nodes.values() for message in node.sent)
    for path in files(tmp_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        kept, words = load(KEPT, path.read_bytes())
        told = SENT.get(method, [])
        assert set(kept) == {*NEVER_SENT[method], *told}
        for name, value in kept.items():
            assert name.encode() not in sent
            if value.numel() > 1:  # four bytes alone may be there by chance
                assert (value.numpy().tobytes()[:64] in sent) == (name in told)
        assert words["round"] in path.name
    assert len({path.parent for path in files(tmp_path)}) == 3


def crashing(after: int) -> FakeGrid:
    """Return a grid whose server dies when it asks for the round after so many."""

    def before(message) -> None:
        if message.content["order"]["done"] >= after and message.metadata.message_type == "train":
            raise Crash

    return FakeGrid(shares(3), before=before)


def test_a_round_that_the_server_forgot_is_forgotten_by_the_sites(federate, tmp_path: Path, monkeypatch):
    """The server dies after the sites' answers and before its checkpoint; what they wrote then does not count."""
    from metavd.engine import rounds

    whole = federate(FakeGrid(shares(3)), rounds=4, out=str(tmp_path / "whole"), **KEEPS)
    shutil.rmtree(tmp_path / "flwr")
    save, saved = rounds.save_checkpoint, []

    def dying(folder, state, extra, **how):
        if int(state.round) == 3 and not saved:
            saved.append(3)
            raise Crash
        save(folder, state, extra, **how)

    monkeypatch.setattr(rounds, "save_checkpoint", dying)
    with pytest.raises(Crash):
        federate(FakeGrid(shares(3)), rounds=4, **KEEPS)
    assert any("round-000003" in path.name for path in files(tmp_path))
    again = federate(FakeGrid(shares(3)), rounds=4, **KEEPS)
    assert again["model_sha256"] == whole["model_sha256"]
    assert again["test"]["nll"] == whole["test"]["nll"]


@pytest.mark.parametrize("damage", ["lost", "damaged", "another client's", "older"])
def test_a_site_that_lost_its_file_begins_anew_and_says_so(federate, tmp_path: Path, caplog, damage):
    """Killed and restarted it goes on; without its file it begins anew, with an older one it goes on from that."""
    whole = federate(FakeGrid(shares(3)), rounds=4, out=str(tmp_path / "whole"), **KEEPS)
    shutil.rmtree(tmp_path / "flwr")
    with pytest.raises(Crash):
        federate(crashing(after=2), rounds=4, **KEEPS)
    mine, theirs = (sorted(files(tmp_path))[-1], sorted(files(tmp_path))[0])
    older = mine.with_name("round-000001.safetensors").read_bytes()
    for path in mine.parent.glob("round-*"):
        path.unlink()
    if damage == "damaged":
        mine.write_bytes(older[:-9])
    elif damage == "another client's":
        mine.write_bytes(theirs.read_bytes())
    elif damage == "older":
        mine.with_name("round-000001.safetensors").write_bytes(older)
    caplog.clear()
    result = federate(FakeGrid(shares(3)), rounds=4, **KEEPS)
    assert result["trained_rounds"] == 4
    assert result["model_sha256"] != whole["model_sha256"]
    told = "it goes on from round 1" if damage == "older" else "is lost; it begins anew"
    assert told in caplog.text
    assert ("has lost what it kept after round 2 and began anew" in caplog.text) == (damage != "older")


def test_a_restart_with_the_files_in_place_changes_nothing(federate, tmp_path: Path):
    """Law: stopped between two rounds and started again, sites and server give the bits of a run without a stop."""
    whole = federate(FakeGrid(shares(3)), rounds=4, out=str(tmp_path / "whole"), **KEEPS)
    shutil.rmtree(tmp_path / "flwr")
    with pytest.raises(Crash):
        federate(crashing(after=2), rounds=4, **KEEPS)
    again = federate(FakeGrid(shares(3)), rounds=4, **KEEPS)
    assert (again["model_sha256"], again["test"]["nll"]) == (whole["model_sha256"], whole["test"]["nll"])


def test_a_second_run_of_the_same_config_begins_anew(federate, tmp_path: Path):
    """Law: files of a finished run of the same settings do not leak into the next one."""
    one, two = (federate(FakeGrid(shares(3)), rounds=3, out=str(tmp_path / name), **KEEPS) for name in ("one", "two"))
    assert one["model_sha256"] == two["model_sha256"]
    assert one["test"] == two["test"]
