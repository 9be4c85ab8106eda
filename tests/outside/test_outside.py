"""A package outside of ours adds one of everything, by entry points alone; a broken one is named and left out.

`package/` is the package, docs/extend.md shows its files. Every test runs the command line in a process of its own.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parent / "package"
PAGE = Path(__file__).parents[2] / "docs" / "extend.md"
MODULES = sorted((PACKAGE / "metavd_outside").glob("[!_]*.py"))


class Done(NamedTuple):
    status: int
    out: str
    err: str


def install(folder: Path, package: str, points: str) -> None:
    """Write what an installer writes of a package, beside its modules, so that Python finds its entry points."""
    about = folder / f"{package}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(points)


def add(folder: Path, package: str, text: str, *groups: str) -> None:
    """Install a package of one module."""
    (folder / f"{package}.py").write_text(text)
    install(folder, package, "".join(f"[metavd.{group}]\n{package} = {package}\n" for group in groups))


def python(folder: Path, *words: str) -> Done:
    """Run Python in a process that finds the folder's packages."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def metavd(folder: Path, *words: str) -> Done:
    return python(folder, "-m", "metavd", *words)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder in which the package is installed, as its pyproject.toml says."""
    shutil.copytree(PACKAGE / "metavd_outside", tmp_path / "metavd_outside")
    about = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    points = [
        f"[{group}]\n" + "".join(f"{name} = {module}\n" for name, module in entries.items())
        for group, entries in about["entry-points"].items()
    ]
    install(tmp_path, about["name"].replace("-", "_"), "\n".join(points))
    return tmp_path


# --- one of everything -----------------------------------------------------------------------------------------------


def console() -> list[str]:
    """Return the commands of the page."""
    (block,) = re.findall(r"^```console\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return block.splitlines()


def test_the_page_s_commands_list_run_and_report_all_seven(theirs: Path) -> None:
    """docs/extend.md: method, posterior, network, dataset, partition, figure and rule in one run, typed as shown."""
    said = {}
    for line in console():
        program, *words = shlex.split(line)
        assert program == "metavd"
        done = metavd(theirs, *words)
        assert (done.status, "the package" in done.err) == (0, False), done.err
        said[words[0]] = done.out
    assert "│ half " in said["methods"]
    assert "│ half+vd " in said["methods"]
    assert "│ stripes " in said["datasets"]
    assert "│ alike " in said["aggregations"]
    assert "sure" in said["run"]
    result = json.loads((theirs / "mine" / "result.json").read_text())
    assert 0 <= result["test"]["sure"] <= 1
    assert result["test"]["samples"] == 18
    assert 0 < result["diagnostics"]["rate_mean"] < 1
    with (theirs / "mine" / "clients.csv").open() as lines:
        assert all(0 <= float(line["sure"]) <= 1 for line in csv.DictReader(lines) if line["sure"])
    config = tomllib.loads((theirs / "mine" / "config.toml").read_text())
    used = [config[name] for name in ("method", "data", "partition", "model", "aggregate")]
    assert used == ["half+vd", "stripes:rows=90", "turns:1", "line", "alike"]
    page = (theirs / "mine" / "report.html").read_text()
    assert "share of answers with a probability above 0.6" in page


def test_the_page_shows_the_package() -> None:
    """docs/extend.md holds every file of the package, to the letter, and a section for each."""
    text = PAGE.read_text()
    shown = re.findall(r"^```(?:python|toml)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    files = [PACKAGE / "pyproject.toml", *MODULES]
    assert sorted(shown) == sorted(each.read_text() for each in files)
    for module in MODULES:
        assert f"metavd_outside/{module.name}" in text
    groups = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]["entry-points"]
    assert {module for entries in groups.values() for module in entries.values()} == {
        f"metavd_outside.{module.stem}" for module in MODULES
    }


# --- each by itself --------------------------------------------------------------------------------------------------


def found(folder: Path, *settings: dict[str, object]) -> list[dict[str, object]]:
    """Return the results of several runs, of one process."""
    lines = f"import json, metavd; print(json.dumps([metavd.run(**each) for each in {list(settings)}]))"
    done = python(folder, "-c", lines)
    assert done.status == 0, done.err
    return json.loads(done.out)


def test_their_method_is_listed_with_every_regulariser_and_obeys_its_law(theirs: Path) -> None:
    """Law: with factor = 1 it is FedAvg, bit for bit; with its default it is another one."""
    names = [each["name"] for each in json.loads(metavd(theirs, "methods", "--json").out)]
    assert {"half", "half+metavd", "half+vd", "half+metavd+drop", "half+snip"} <= set(names)
    common = {"model": "line", "width": 3, "rounds": 2}
    methods = ({"method": "fedavg"}, {"method": "half", "factor": 1.0}, {"method": "half"})
    plain, same, other = (run["model_sha256"] for run in found(theirs, *(common | each for each in methods)))
    assert plain == same != other


def test_their_rule_is_the_mean_of_equal_clients(theirs: Path) -> None:
    """Law: where all clients have as many rows it is the mean to rounding, and where they do not it is another one."""
    common = {"method": "fedavg", "data": "stripes:rows=100", "rounds": 2, "dtype": "float64", "clients": 4,
              "unseen": 0, "cohort": 4}  # fmt: skip
    dealt = [(partition, rule) for partition in ("turns:1", "dirichlet:1") for rule in ("mean", "alike")]
    runs = found(theirs, *(common | {"partition": partition, "aggregate": rule} for partition, rule in dealt))
    even, even_alike, uneven, uneven_alike = (run["test"]["nll"] for run in runs)
    assert even_alike == pytest.approx(even, rel=1e-9)
    assert uneven_alike != pytest.approx(uneven, rel=1e-3)
    wrong = metavd(theirs, "run", "aggregate=alike:2")
    assert (wrong.status, "alike takes no number; write alike" in wrong.err) == (2, True)


def test_a_wrong_value_of_their_partition_is_named(theirs: Path) -> None:
    wrong = metavd(theirs, "run", "fedavg", "partition=turns:x", "clients=3", "unseen=0")
    assert (wrong.status, "such as turns:1" in wrong.err) == (2, True)


POSTERIOR = """
import sys, metavd
from metavd import methods
from metavd.serve.export import plain_weights
named = methods.options_of("fedavg+vd")["spread"].allowed
assert "crossed" in named and "metavd_outside.posterior" not in sys.modules
common = dict(spread="crossed", clients=6, unseen=2, cohort=3, rounds=2, width=8, local_epochs=1)
for method in ("maml+vd", "reptile+ensemblevd", "reptile+metavd"):
    result = metavd.run(method=method, out=method, **common)
    assert 0 < result["diagnostics"]["rate_mean"] < 1, result["diagnostics"]
own = metavd.personalize("reptile+metavd", client="1")
assert own.params["fc1.rows"].shape == (4,) and own.params["fc1.columns"].shape == (8,)
own.save("own")
again = type(own).load("own")
assert again.about["noise"] == {"layers": ["fc1"]}
plain = plain_weights(again)
assert plain["fc1.variance"].shape == (4, 8) and not {"fc1.rows", "fc1.columns"} & set(plain)
"""


def test_their_posterior_is_trained_personalised_saved_and_exported(theirs: Path) -> None:
    """Law: one file and one entry point are all that it takes; it is imported only when it is chosen."""
    done = python(theirs, "-c", POSTERIOR)
    assert done.status == 0, done.err


# --- what can be wrong with a package --------------------------------------------------------------------------------


def test_a_broken_package_is_named_in_one_sentence(theirs: Path) -> None:
    """What is ours and what is sound still works; whoever lists, or asks for what is not there, is told why."""
    add(theirs, "ruin", "raise RuntimeError('no\\nluck')", "methods", "models", "aggregations")
    sentence = "the package ruin offers ruin to metavd.{}, which fails: RuntimeError: no"
    for listing, sound in (("methods", "half"), ("aggregations", "alike")):
        listed = metavd(theirs, listing)
        assert (listed.status, listed.err) == (0, f"metavd: {sentence.format(listing)}\n")
        assert f"│ {sound} " in listed.out
    for group, words in {"methods": ["fedavg+ruin"], "models": ["model=ruin"], "aggregations": ["aggregate=r"]}.items():
        unknown = metavd(theirs, "run", *words)
        assert (unknown.status, unknown.err.count("\n")) == (2, 1)
        assert sentence.format(group) in unknown.err
    ours = metavd(theirs, "methods", "fedavg")
    assert (ours.status, ours.err) == (0, ""), "one of ours needs no package"


def test_a_package_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    """What it registered before it failed cannot be relied on."""
    text = (PACKAGE / "metavd_outside" / "method.py").read_text() + "raise OSError('and no further')"
    add(tmp_path, "half_way", text, "methods")
    listed = metavd(tmp_path, "methods", "--json")
    assert "which fails: OSError: and no further" in listed.err
    assert not [each["name"] for each in json.loads(listed.out) if "half" in each["name"]]


def test_a_package_cannot_take_a_name_of_ours(tmp_path: Path) -> None:
    text = (PACKAGE / "metavd_outside" / "method.py").read_text()
    add(tmp_path, "thief", text.replace('"half"', '"fedavg"'), "methods")
    listed = metavd(tmp_path, "methods")
    assert listed.status == 0
    assert "'fedavg' of thief is taken by metavd.methods.averaging" in listed.err
    assert "local SGD, averaged by data size" in listed.out, "ours is still there"
