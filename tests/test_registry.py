"""Packages join by entry points: their methods and networks are listed and run as ours are; a broken one is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from metavd.errors import UserError
from metavd.registry import Registry

METHOD = """
from dataclasses import dataclass, replace
from metavd import methods
from metavd.methods import Options, option

@dataclass(frozen=True)
class HalfOptions(Options):
    factor: float = option(0.5, "what the loss is multiplied by", low=0)

@methods.regulariser("half", "a smaller loss", paper="nobody", options=HalfOptions)
def half(parts, o):
    loss = parts.outer
    return replace(parts, outer=lambda *given: o.factor * loss(*given))
"""
NETWORK = """
from torch import nn
from metavd.models import network

@network("line")
def line(shape, num_classes, width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, num_classes))
"""


def install(folder: Path, package: str, modules: dict[str, str], points: str) -> None:
    """Put a package where Python finds it, as pip would."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    about = folder / f"{package}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(points)


def metavd(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own that finds the folder's packages."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "metavd", *argv]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder with a package that adds one method and one network."""
    points = "[metavd.methods]\nhalf = their_method\n[metavd.models]\nline = their_network\n"
    install(tmp_path, "theirs", {"their_method": METHOD, "their_network": NETWORK}, points)
    return tmp_path


def test_a_package_s_method_and_network_are_listed_and_run(theirs: Path) -> None:
    """Law: with factor = 1 their method is the base, bit for bit; with their default it is another one."""
    described = json.loads(metavd(theirs, "methods", "--json").stdout)
    names = [each["name"] for each in described]
    assert [name for name in names if "half" in name] == [
        f"{b}+half" for b in ("fedavg", "reptile", "maml", "perfedavg")
    ]
    assert "│ +half" in metavd(theirs, "methods").stdout
    hashes = {}
    for words in (("fedavg",), ("fedavg+half", "factor=1"), ("fedavg+half",)):
        done = metavd(theirs, "run", *words, "model=line", "width=3", "--rounds", "2", "--out", "-".join(words))
        assert done.returncode == 0, done.stderr
        result = json.loads((theirs / "-".join(words) / "result.json").read_text())
        hashes["-".join(words)] = result["model_sha256"]
    assert hashes["fedavg"] == hashes["fedavg+half-factor=1"] != hashes["fedavg+half"]


def test_a_broken_package_is_named_in_one_sentence(theirs: Path) -> None:
    """What is ours and what is sound still works; whoever lists, or asks for what is not there, is told why."""
    install(
        theirs,
        "ruin",
        {"ruin": "raise RuntimeError('no\\nluck')"},
        "[metavd.methods]\nr = ruin\n[metavd.models]\nr = ruin\n",
    )
    listed = metavd(theirs, "methods")
    sentence = "the package ruin offers ruin to metavd.methods, which fails: RuntimeError: no"
    assert (listed.returncode, listed.stderr) == (0, f"metavd: {sentence}\n")
    assert "fedavg+half" in listed.stdout
    unknown = metavd(theirs, "run", "fedavg+ruin")
    assert unknown.returncode == 2
    assert unknown.stderr.count("\n") == 1
    assert sentence in unknown.stderr
    unknown = metavd(theirs, "run", "fedavg", "model=ruin")
    assert (unknown.returncode, "the package ruin offers ruin to metavd.models" in unknown.stderr) == (2, True)
    ours = metavd(theirs, "methods", "fedavg")
    assert (ours.returncode, ours.stderr) == (0, ""), "one of ours needs no package"


def test_a_package_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    """What it registered before it failed cannot be relied on."""
    text = METHOD + "raise OSError('and no further')"
    install(tmp_path, "half", {"half_way": text}, "[metavd.methods]\nh = half_way\n")
    listed = metavd(tmp_path, "methods", "--json")
    assert "which fails: OSError: and no further" in listed.stderr
    assert not [each["name"] for each in json.loads(listed.stdout) if "half" in each["name"]]


def test_a_package_cannot_take_a_name_of_ours(theirs: Path) -> None:
    install(theirs, "thief", {"thief": METHOD.replace('"half"', '"metavd"')}, "[metavd.methods]\nt = thief\n")
    listed = metavd(theirs, "methods")
    assert listed.returncode == 0
    assert "'metavd' of thief is taken by metavd.methods.variational" in listed.stderr
    assert "hyper_width=200" in listed.stdout, "ours is still there"


def test_a_module_may_define_its_own_entry_anew() -> None:
    """A notebook's cell can be run twice."""
    registry: Registry[Any] = Registry("none.at.all", [])
    registry.add("a", 1, "here")
    registry.add("a", 2, "here")
    assert registry.all() == {"a": 2}
    with pytest.raises(UserError, match="'a' of there is taken by here"):
        registry.add("a", 3, "there")


DATASET = """
from pathlib import Path
import numpy as np
from metavd.data.formats import Plan, dataset
from metavd.data.source import arrays

@dataset("stripes", "stripes that lie or stand", options={"rows": "how many"}, files=False)
def plan_stripes(root, *, rows: int = 60) -> Plan:
    y = np.arange(rows) % 2
    x = np.zeros((rows, 8, 8), np.uint8)
    x[y == 0, ::2], x[y == 1, :, ::2] = 255, 255
    return Plan("stripes", Path(root), (), lambda _: arrays(x, y, name="stripes"))
"""
PARTITION = """
import numpy as np
from metavd.data.partition import PARTITIONS, PartitionKind

def by_turns(step: int, *, least: int = 1):
    return lambda y, num, rng, client_ids=None: [np.arange(k, len(y), num)[::step] for k in range(num)]

PARTITIONS.add("turns", PartitionKind(by_turns, int, "turns:1"), __name__)
"""


def test_a_dataset_and_a_partition_of_another_package(tmp_path: Path) -> None:
    """Each is one file; the command line lists the dataset, and a run deals it by the partition."""
    points = "[metavd.datasets]\nstripes = their_data\n[metavd.partitions]\nturns = their_deal\n"
    install(tmp_path, "theirs", {"their_data": DATASET, "their_deal": PARTITION}, points)
    assert '"stripes"' in metavd(tmp_path, "datasets", "--json").stdout
    words = ["fedavg", "--data", "stripes:rows=90", "--rounds", "1", "--out", "run"]
    done = metavd(tmp_path, "run", *words, "partition=turns:1", "clients=3", "unseen=0", "cohort=2")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["test"]["samples"] == 18
    wrong = metavd(tmp_path, "run", *words, "partition=turns:x", "clients=3", "unseen=0")
    assert (wrong.returncode, "such as turns:1" in wrong.stderr) == (2, True)
