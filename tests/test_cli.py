"""The command line: what it writes, what it says, its exit status; wrong input never leaves a trace."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from metavd import methods
from metavd.cli import cli, train
from metavd.cli.terminal import Reporter
from metavd.data.described import describe
from metavd.data.partition import federate
from metavd.data.source import digits
from metavd.engine.rounds import Record
from metavd.studies.compare import columns

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--set", "clients=4", "--set", "cohort=2", "--set", "width=8", "--set", "test_share=0.9"]
"""Few clients, few training rows."""
SHORT = ["--rounds", "3", *TINY]


Metavd = Callable[..., Any]
"""The fixture `metavd`: argv -> status, out, err."""


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Return every path below a folder with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def result_of(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


# --- run -------------------------------------------------------------------------------------------------------------

FIGURES = {
    "accuracy", "accuracy_pooled", "accuracy_uniform", "worst_client", "nll", "brier", "ece_top1", "ece_flat",
    "mce_top1", "mce_flat", "clients", "samples",
}  # fmt: skip


@pytest.mark.parametrize("method", ["fedavg", "reptile+metavd"])
def test_run_writes_all_that_the_issue_names(metavd: Metavd, tmp_path: Path, method: str) -> None:
    """DIR receives config.toml, rounds.jsonl, clients.csv, checkpoint/ and a result.json with every key."""
    outcome = metavd("run", method, "--out", "run", "--seed", "3", *SHORT, "eval_every=1")
    assert outcome.status == 0
    names = {path.name for path in (tmp_path / "run").iterdir()} - {".lock"}
    assert names == {"config.toml", "rounds.jsonl", "clients.csv", "details.json", "checkpoint", "result.json"}
    result = result_of(tmp_path / "run")
    assert (result["method"], result["data"], result["seed"], result["rounds"]) == (method, "digits", 3, 3)
    assert {"version", "device", "seconds", "gap", "diagnostics"} <= set(result)
    for part, clients in (("test", 4), ("unseen", 6)):
        assert set(result[part]) >= FIGURES
        assert result[part]["clients"] == clients
        assert 0 <= result[part]["accuracy"] <= 1
    assert result["gap"] == pytest.approx(result["unseen"]["accuracy"] - result["test"]["accuracy"])
    assert set(result["sparsity"]) == {"layer", "model"}
    assert {"down", "up", "dense_down", "dense_up"} <= set(result["bytes"])
    assert (result["diagnostics"] is None) == (method == "fedavg")
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert "test" in lines[0], "an evaluation was due after every round but the last, whose is in result.json"
    with (tmp_path / "run" / "clients.csv").open() as file:
        clients = list(csv.DictReader(file))
    assert [int(row["client"]) for row in clients] == list(range(10))
    assert [int(row["unseen"]) for row in clients] == [0] * 4 + [1] * 6
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert config["method"] == method
    assert set(config["options"]) == set(methods.options_of(method))


def test_run_prints_a_table_for_newcomers(metavd: Metavd) -> None:
    """Without METHOD: reptile+metavd beside fedavg; accuracy, calibration and traffic, for known and unseen clients."""
    outcome = metavd("run", "--out", "run", *SHORT)
    assert outcome.status == 0
    for text in ("reptile+metavd", "fedavg", "accuracy", "calibration", "traffic", "participating", "never seen"):
        assert text in outcome.out
    assert result_of(Path("run"))["method"] == "reptile+metavd"
    assert result_of(Path("run/baseline"))["method"] == "fedavg"


@pytest.mark.parametrize("method", ["fedavg", "reptile+metavd"])
def test_config_repeats_the_run(metavd: Metavd, method: str) -> None:
    """`metavd run --config DIR/config.toml` gives the same bits and the same configuration."""
    assert metavd("run", method, "--out", "one", "--seed", "5", "--set", "lr=0.03", *SHORT).status == 0
    outcome = metavd("run", "--config", "one/config.toml", "--out", "two")
    assert outcome.status == 0, outcome.err
    assert result_of(Path("one")) | {"seconds": 0} == result_of(Path("two")) | {"seconds": 0}
    for name in ("config.toml", "rounds.jsonl", "clients.csv"):
        assert Path("one", name).read_bytes() == Path("two", name).read_bytes()


def test_settings_override_in_order(metavd: Metavd) -> None:
    """The file is overridden by --set and by the command's own options; the two may not contradict each other."""
    Path("f.toml").write_text("rounds = 9\nseed = 9\nwidth = 9\n[options]\nlr = 0.009\nclip = 9.0\n")
    arguments = ["--config", "f.toml", "--set", "lr=0.01", "--seed", "7"]
    refused(
        metavd("run", "fedavg", "--out", "run", "--rounds", "3", "--set", "rounds=2"),
        ["rounds is given twice, as --rounds 3 and as rounds=2; say it once"],
    )
    assert metavd("run", "fedavg", "--out", "run", *TINY[:4], *arguments, "--rounds", "1").status == 0
    config = tomllib.loads(Path("run/config.toml").read_text())
    assert (config["rounds"], config["seed"], config["width"]) == (1, 7, 9)
    assert (config["options"]["lr"], config["options"]["clip"]) == (0.01, 9.0)


def test_settings_may_follow_one_set(metavd: Metavd) -> None:
    """`--set lr=0.1 clip=2` is two settings, for `run` and for `compare`."""
    assert metavd("run", "fedavg", "--out", "run", *SHORT, "--set", "lr=0.1", "clip=2", "eval_every=3").status == 0
    config = tomllib.loads(Path("run/config.toml").read_text())
    assert (config["options"]["lr"], config["options"]["clip"], config["eval_every"]) == (0.1, 2.0, 3)
    command = ["compare", "fedavg", "--seeds", "1", "--out", "c", "--rounds", "1", *TINY, "--set", "lr=0.1", "clip=2"]
    assert metavd(*command).status == 0
    config = tomllib.loads(Path("c/fedavg/seed-0/config.toml").read_text())
    assert (config["options"]["lr"], config["options"]["clip"]) == (0.1, 2.0)


def test_set_accepts_dashes(metavd: Metavd) -> None:
    assert metavd("run", "fedavg", "--out", "run", *SHORT, "--set", "local-epochs=2").status == 0
    assert tomllib.loads(Path("run/config.toml").read_text())["options"]["local_epochs"] == 2


@pytest.mark.parametrize("value", ["fit", "mean"])
def test_how_unseen_clients_are_embedded_can_be_chosen(metavd: Metavd, value: str) -> None:
    """The issue's option "embedding of an unseen client: mean, or fitted" can be reached by some --set."""
    assert metavd("run", "fedavg+metavd", "--out", "run", *SHORT, "--set", f"newcomer={value}").status == 0


def test_one_set_may_have_several_settings(metavd: Metavd) -> None:
    """`--set a=1 b=2` reads both, as the usage line shows it."""
    assert metavd("run", "fedavg", "--out", "run", *SHORT, "--set", "lr=0.03", "clip=4", "seed=3").status == 0
    stored = tomllib.loads(Path("run/config.toml").read_text())
    assert (stored["options"]["lr"], stored["options"]["clip"], stored["seed"]) == (0.03, 4.0, 3)


def test_baseline(metavd: Metavd) -> None:
    """--baseline runs a second method with the settings that it knows, and shows both."""
    outcome = metavd("run", "fedavg+vd", "--out", "run", "--baseline", "fedavg", *SHORT, "--set", "beta=3")
    assert outcome.status == 0
    assert "fedavg+vd" in outcome.out
    assert re.search(r"fedavg[^+]", outcome.out)
    one, two = (tomllib.loads(Path(name, "config.toml").read_text()) for name in ("run", "run/baseline"))
    assert (one["options"]["beta"], one["rounds"], two["rounds"], two["method"]) == (3.0, 3, 3, "fedavg")
    assert "beta" not in two["options"]


def test_default_folder_is_the_run_s_own(metavd: Metavd) -> None:
    """Without --out the folder is named after what is run; the same command finds its finished run there."""
    first = metavd("run", "fedavg", *SHORT)
    (folder,) = Path("runs").iterdir()
    before = snapshot(folder)
    second = metavd("run", "fedavg", *SHORT)
    assert (first.status, second.status) == (0, 0)
    assert snapshot(folder) == before
    assert "finished" in second.err
    assert metavd("run", "fedavg", *SHORT, "--seed", "1").status == 0
    assert len(list(Path("runs").iterdir())) == 2


def test_progress_is_plain_lines_off_a_terminal(metavd: Metavd) -> None:
    """Standard error has a line an evaluation: round, loss, accuracy, time left, and no control characters."""
    outcome = metavd("run", "fedavg", "--out", "run", *SHORT, "eval_every=1")
    assert re.search(r"round 1/3  loss \d+\.\d+  test \d+\.\d%  unseen \d+\.\d%  \d+ s left", outcome.err)
    assert "\x1b" not in outcome.err
    assert "\x1b" not in outcome.out


# --- methods, datasets, show, help -----------------------------------------------------------------------------------


def test_methods(metavd: Metavd) -> None:
    outcome = metavd("methods")
    assert outcome.status == 0
    rows = {line.split("│")[1].strip() for line in outcome.out.splitlines() if line.startswith("│")}
    assert set(methods.NAMES) <= rows
    described = json.loads(metavd("methods", "--json").out)
    assert [each["name"] for each in described] == list(methods.NAMES)
    for each in described:
        assert each["text"]
        assert each["paper"]
        assert {"name", "default", "help"} <= set(each["options"][0])


def test_methods_name(metavd: Metavd) -> None:
    """One method's options with defaults, ranges and the paper's search space."""
    outcome = metavd("methods", "reptile+metavd")
    assert outcome.status == 0
    for option in methods.options_of("reptile+metavd"):
        assert f"│ {option} " in outcome.out
    assert "0.005, 0.01" in outcome.out
    assert [each["name"] for each in json.loads(metavd("methods", "reptile", "--json").out)] == ["reptile"]


def test_datasets(metavd: Metavd) -> None:
    outcome = metavd("datasets")
    assert outcome.status == 0
    assert "digits" in outcome.out
    (row,) = (each for each in json.loads(metavd("datasets", "--json").out) if each["name"] == "digits")
    assert (row["defaults"]["clients"], row["defaults"]["unseen"]) == (24, 6)


def commands(group: click.Group, *path: str) -> Iterator[list[str]]:
    """Return the words of every command of a group, and of its groups."""
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        yield [*path, name]
        if isinstance(found, click.Group):
            yield from commands(found, *path, name)


def test_the_first_minute_does_not_wait() -> None:
    """Every --help, and the lists, import neither torch nor anything else that is slow; datasets alone needs NumPy."""
    every = list(commands(cli))
    assert {("federate", "rekey"), ("tune-all",), ("trust",)} <= set(map(tuple, every))
    lists = [["methods"], ["methods", "reptile+metavd"], ["methods", "--json"], ["datasets"]]
    asked = [[], *([*words, "--help"] for words in ([], *every)), *lists]
    code = (
        "import contextlib, io, json, sys\n"
        "from metavd.cli import cli\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):\n"
        "        cli.main(words, prog_name='metavd')\n"
        "    assert len(out.getvalue()) > 100, words\n"
        "    heavy = {'torch', 'scipy', 'sklearn', 'matplotlib', 'flwr', 'optuna', 'numpy', 'PIL'} & set(sys.modules)\n"
        "    if heavy - ({'numpy'} if words == ['datasets'] else set()):\n"
        "        sys.exit(f'{words} loaded {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(asked)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- data ------------------------------------------------------------------------------------------------------------


def photos(folder: Path, people: int = 5, each: int = 12) -> Path:
    """Write pictures of two classes: client/class/picture."""
    for person in range(people):
        for index in range(each):
            place = folder / f"person{person}" / ("dark", "light")[index % 2]
            place.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), 40 + 150 * (index % 2) + person + index).save(place / f"{index}.png")
    return folder


def test_data_check(metavd: Metavd, tmp_path: Path) -> None:
    """A sound folder is described; a damaged file is named, nothing is guessed, and the status is 2."""
    folder = photos(tmp_path / "photos")
    outcome = metavd("data", "check", folder)
    assert (outcome.status, outcome.err) == (0, "")
    assert "60 rows of uint8 1 x 8 x 8; 2 classes of 30 to 30 rows; 5 clients" in outcome.out
    (folder / "person1" / "dark" / "0.png").write_bytes(b"no picture")
    outcome = metavd("data", "check", folder)
    assert outcome.status == 2
    assert "person1/dark/0.png" in outcome.out
    outcome = metavd("data", "check", tmp_path / "nowhere")
    assert outcome.status == 2
    assert "nowhere: there is no such file or folder" in outcome.out


def test_data_show(metavd: Metavd, tmp_path: Path) -> None:
    """The statistics are those of the partition; the picture is of the kind that its ending names."""
    arguments = ["data", "show", "--data", "digits", "--partition", "dirichlet:0.5", "clients=8", "unseen=2"]
    about = json.loads(metavd(*arguments, "--json", "--out", "a.png").out)
    held = federate(digits(), "dirichlet:0.5", clients=8, unseen=2, test_rows="consistent", seed=0)
    assert about == json.loads(json.dumps(describe(held)))
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    outcome = metavd(*arguments, "--out", "b.svg")
    assert f"{about['train_rows']['participating']:,}" in outcome.out
    assert "<svg" in (tmp_path / "b.svg").read_text()
    before = snapshot(tmp_path)
    outcome = metavd(*arguments, "--out", "c.txt")
    assert (outcome.status, "c.txt has no ending of a picture; use .png" in outcome.err) == (2, True)
    assert metavd("data", "show", "fedavg").status == 2
    assert snapshot(tmp_path) == before


def test_data_fetch_says_what_cannot_be_fetched(metavd: Metavd, tmp_path: Path) -> None:
    """What has to be got by hand, and a wrong name, are answered at once and leave nothing behind."""
    for name, says in (("celeba", "accept its terms"), ("cifar", "did you mean cifar10")):
        outcome = metavd("data", "fetch", name)
        assert (outcome.status, says in outcome.err) == (2, True)
    assert snapshot(tmp_path) == {}


def test_run_on_own_files(metavd: Metavd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder and an npz beside it train as one; --root and METAVD_DATA say where copies go, --root louder."""
    photos(tmp_path / "photos")
    np.savez(tmp_path / "rows.npz", x=np.arange(60 * 36, dtype=np.uint8).reshape(60, 6, 6), y=np.arange(60) % 3)
    arguments = ["run", "fedavg", "--rounds", "2", "--set", "cohort=2", "--set", "width=8"]
    monkeypatch.setenv("METAVD_DATA", str(tmp_path / "env"))
    outcome = metavd(*arguments, "--data", "folder:photos+npz:rows.npz", "clients=4", "unseen=1", "--out", "both")
    assert outcome.status == 0, outcome.err
    assert "accuracy on photos" in outcome.out
    assert "accuracy on rows" in outcome.out
    assert len(list((tmp_path / "env" / ".cache").iterdir())) == 2
    assert tomllib.loads((tmp_path / "both" / "config.toml").read_text())["root"] == str(tmp_path / "env")
    outcome = metavd(*arguments, "--data", "folder:photos", "--root", "mine")
    assert outcome.status == 0, outcome.err
    assert (tmp_path / "mine" / ".cache").is_dir()
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("folder-photos-fedavg-s0-")
    again = metavd("run", "--resume", "--out", "both")
    assert again.status == 0, again.err
    assert "finished" in again.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--data", "cifar10"], "cifar10 is looked for below data"),
        (["--data", "cifa10"], "did you mean cifar10"),
        (["--data", "folder:nowhere"], "nowhere: there is no such file or folder"),
        (["--data", "npz:digits.txt"], "digits.txt"),
        (["--data", "mnist:writers=maybe", "--root", "."], "writers is 'maybe'"),
        (["--data", "digits+digits"], "names digits twice"),
        (["available=2"], "available is '2', but must be a probability"),
        (["lost=0.5,0.5"], "lost lists 2 probabilities, but 24 clients"),
        (["cohort=1.5"], "cohort is '1.5', but must be a whole number or a share below 1"),
        (["image_size=100000"], "image_size is 100000, but must lie between"),
        (["patience=2"], "set valid, such as 0.2"),
        (["domains=both"], "domains is 'both'"),
    ],
)
def test_wrong_data_leaves_no_trace(metavd: Metavd, tmp_path: Path, arguments: list[str], says: str) -> None:
    outcome = metavd("run", "fedavg", "--rounds", "1", *arguments)
    assert outcome.status == 2
    assert says in outcome.err
    assert outcome.err.count("\n") == 1
    assert snapshot(tmp_path) == {}


def test_show_prints_the_same_table(metavd: Metavd) -> None:
    table = metavd("run", "fedavg", "--out", "run", *SHORT).out.split("\n\n")[0].strip()
    outcome = metavd("show", "run")
    assert outcome.status == 0
    assert outcome.out.strip() == table
    both = metavd("show", "run", "run")
    assert both.out.count("fedavg") == 2


def test_version_and_help(metavd: Metavd) -> None:
    assert metavd("--version").out.startswith("metavd, version ")
    for arguments in (["--help"], ["-h"], ["run", "--help"], ["compare", "--help"], ["show", "-h"]):
        outcome = metavd(*arguments)
        assert outcome.status == 0
        assert outcome.out.startswith("Usage: metavd")
        assert outcome.err == ""


def test_help_keeps_the_examples_on_their_lines(metavd: Metavd) -> None:
    text = metavd("--help").out
    assert "\\b" not in text
    assert re.search(r"^ *metavd run  ", text, re.MULTILINE)
    assert re.search(r"^ *metavd show DIR  ", text, re.MULTILINE)


@pytest.mark.parametrize("words", [[], ["data"], ["federate"]], ids=" ".join)
def test_no_command_shows_the_help(metavd: Metavd, words: list[str]) -> None:
    """A bare `metavd` is not an error: the help is shown as `metavd --help` shows it."""
    outcome = metavd(*words)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out == metavd(*words, "--help").out
    assert not re.search(r"\.\.\.$", outcome.out.split("\nCommands:\n")[1], re.MULTILINE)  # no sentence is cut


# --- compare ---------------------------------------------------------------------------------------------------------


def test_compare_writes_a_table_and_resumes(metavd: Metavd, tmp_path: Path) -> None:
    """Mean ± interval over seeds; a second call runs only what is missing and gives the same table."""
    command = ["compare", "fedavg", "fedavg+ft", "--seeds", "2", "--out", "c", *SHORT]
    first = metavd(*command)
    assert first.status == 0
    assert re.search(r"fedavg \S* *│ +\d+\.\d ± \d+\.\d", first.out.replace("+ft", " "))
    assert {str(path.relative_to("c")) for path in Path("c").glob("*/*")} == {
        f"{method}/seed-{seed}" for method in ("fedavg", "fedavg+ft") for seed in (0, 1)
    }
    table = json.loads(Path("c/comparison.json").read_text())
    assert set(table["rows"]) == {"fedavg", "fedavg+ft"}
    assert len(table["runs"]) == 4
    mean, half = table["rows"]["fedavg"]["test accuracy %"]
    accuracies = [100 * result_of(tmp_path / f"c/fedavg/seed-{seed}")["test"]["accuracy"] for seed in (0, 1)]
    assert mean == pytest.approx(sum(accuracies) / 2)
    assert half == pytest.approx(12.7062 * abs(accuracies[0] - accuracies[1]) / 2, rel=1e-4)
    markdown = Path("c/comparison.md").read_text()
    assert markdown.startswith("| method | test accuracy %")
    assert f"| fedavg | {mean:.1f} ± {half:.1f} |" in markdown
    before = snapshot(tmp_path / "c")
    Path("c/fedavg/seed-1/result.json").unlink()
    second = metavd(*command)
    assert (second.status, second.out) == (0, first.out)
    assert second.err.count("finished") == 3
    after = snapshot(tmp_path / "c")
    changed = {name for name in before if before[name] != after.get(name)}
    assert changed <= {"fedavg/seed-1/result.json", "comparison.json"}, "only `seconds` may be new"


def test_compare_gives_options_to_the_methods_that_have_them(metavd: Metavd) -> None:
    arguments = ["--seeds", "1", "--out", "c", "--rounds", "1", *TINY, "--set", "mu=0.5", "--page", "page.md"]
    outcome = metavd("compare", "fedavg", "fedprox", *arguments)
    assert outcome.status == 0
    assert "one seed" in outcome.out
    assert "±" not in outcome.out.split("\n", 1)[1]
    assert tomllib.loads(Path("c/fedprox/seed-0/config.toml").read_text())["options"]["mu"] == 0.5
    page = Path("page.md").read_text()
    assert page.startswith("# Methods on digits")
    assert "| fedprox |" in page
    assert "metavd compare fedavg fedprox" in page


def test_compare_starts_at_the_given_seed(metavd: Metavd) -> None:
    assert metavd("compare", "fedavg", "--seeds", "1", "--seed", "4", "--out", "c", "--rounds", "1", *TINY).status == 0
    assert [path.name for path in Path("c/fedavg").iterdir()] == ["seed-4"]


def test_compare_with_a_run_s_config_runs_what_is_asked(metavd: Metavd) -> None:
    """The settings of a stored run can be used for a comparison, whatever its method was."""
    assert metavd("run", "fedavg", "--out", "run", "--rounds", "1", *TINY).status == 0
    outcome = metavd("compare", "fedavg", "fedprox", "--seeds", "1", "--out", "c", "--config", "run/config.toml")
    assert outcome.status == 0
    assert result_of(Path("c/fedprox/seed-0"))["method"] == "fedprox"


def test_compare_gives_every_method_the_same_clients(metavd: Metavd) -> None:
    arguments = ["--seeds", "1", "--out", "c", "--rounds", "1", *TINY, "--set", "unseen=2"]
    assert metavd("compare", "fedavg", "fedavg+metavd", *arguments).status == 0
    assert result_of(Path("c/fedavg/seed-0"))["unseen"]["clients"] == 2
    assert result_of(Path("c/fedavg+metavd/seed-0"))["unseen"]["clients"] == 2


def test_compare_all_names_every_method(metavd: Metavd, tmp_path: Path) -> None:
    """`all` stands for every method: only its settings are wrong here."""
    refused(metavd("compare", "all", "--set", "cohort=50", "--out", "c"), ["cohort is 50"])
    assert not (tmp_path / "c").exists()


# --- wrong input -----------------------------------------------------------------------------------------------------


def refused(outcome: Any, says: list[str], status: int = 2) -> None:
    """One line on standard error that begins with the program's name and says what is wrong; nothing else."""
    assert outcome.status == status, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("metavd: ")
    assert outcome.err.endswith("\n")
    assert outcome.err.count("\n") == 1, outcome.err
    assert "Traceback" not in outcome.err
    for part in says:
        assert part in outcome.err


WRONG: list[tuple[list[str], list[str]]] = [
    (["nonsense"], ["'nonsense'"]),
    (["run", "--roundz", "3"], ["--roundz", "--rounds"]),
    (["run", "--rounds", "many"], ["--rounds is 'many', but must be a whole number"]),
    (["run", "fedavg", "surplus"], ["surplus"]),
    (["run", "fedavgg"], ["'fedavgg'", "fedavg"]),
    (["run", "fedavg+metvd"], ["'metvd'", "metavd"]),
    (["run", "fedbe+drop"], ["fedbe+drop", "+metavd"]),
    (["run", "fedavg+dp", "--set", "answer_clip=0", "--set", "noise=1"], ["answer_clip is 0", "need a bound"]),
    (["run", "fedavg+dp", "--set", "noise=-3"], ["noise is -3", "between -1 and"]),
    (["run", "fedavg+dp", "--set", "aggregate=median"], ["aggregate is 'median'", "+dp adds noise to the sum"]),
    (["run", "fedavg+dp", "--set", "noise_from=sites"], ["needs all clients in every round", "cohort=24"]),
    (["run", "--data", "digts"], ["'digts'", "digits"]),
    (["run", "fedavg", "--set", "lrr=3"], ["'lrr'", "lr"]),
    (["run", "fedavg", "--set", "chort=3"], ["'chort'", "cohort"]),
    (["run", "fedavg", "--set", "beta=3"], ["'beta'", "fedavg"]),
    (["run", "fedavg", "--set", "lr=-1"], ["lr is -1", "at least 0"]),
    (["run", "fedavg", "--set", "lr=inf"], ["lr is inf, but must be a finite number"]),
    (["run", "fedavg", "--set", "lr=nan"], ["lr is nan, but must be a finite number"]),
    (["run", "fedavg", "learning_rate=0.1"], ["no setting 'learning_rate' for fedavg; did you mean lr?"]),
    (["run", "fedavg", "--learning-rate", "0.1"], ["no option --learning-rate; did you mean --set lr=VALUE?"]),
    (["run", "fedavg", "--lr", "0.1"], ["no option --lr; did you mean --set lr=VALUE?"]),
    (["run", "fedavg", "--num-rounds", "3"], ["no option --num-rounds; did you mean --rounds?"]),
    (["tune", "fedavg", "--search", "learning-rate=1,2"], ["'learning_rate' to search for fedavg; did you mean lr?"]),
    (["arena", "fedavg", "epochs=3"], ["is called 'epochs'; did you mean local_epochs?"]),
    (["run", "fedavg", "--set", "batch=x"], ["batch is 'x'", "a whole number"]),
    (["run", "--rounds", "0"], ["rounds is 0", "between 1 and"]),
    (["run", "--seed", "-1"], ["seed is -1", "between 0 and"]),
    (["run", "--set", "valid=2"], ["valid is 2", "and 0.9"]),
    (["run", "--set", "clients=2.5"], ["clients is '2.5'", "a whole number"]),
    (["run", "--set", "model=cnnn"], ["'cnnn'", "cnn"]),
    (["run", "--set", "dtype=half"], ["'half'", "float32"]),
    (["run", "--set", "backend=gpu"], ["'gpu'", "loop, threads, vmap"]),
    (["run", "--set", "partition=dirichlt:1"], ["'dirichlt:1'", "dirichlet:0.5"]),
    (["run", "--set", "partition=dirichlet:-1"], ["-1", "above 0"]),
    (["run", "--set", "partition=natural"], ["natural", "dirichlet:0.5"]),
    (["run", "fedavg", "--set", "cohort=30"], ["cohort is 30", "24 clients"]),
    (["run", "fedavg", "--set", "clients=5000"], ["5006 clients", "at most"]),
    (["run", "fedavg+vd", "--set", "layers=fc7"], ["'fc7'", "fc0, fc1, fc2"]),
    (["run", "fedbe", "--set", "server_share=0"], ["server_share"]),
    (["run", "--device", "tpu"], ["'tpu'", "auto, cpu or cuda"]),
    (["run", "--device", "mps"], ["'mps'", "auto, cpu or cuda"]),
    (["run", "--config", "missing.toml"], ["missing.toml", "No such file"]),
    (["run", "--config", "folder"], ["folder", "directory"]),
    (["run", "--config", "bad.toml"], ["bad.toml", "not TOML"]),
    (["run", "--config", "bytes.toml"], ["bytes.toml", "not TOML"]),
    (["run", "--config", "list.toml"], ["rounds", "list.toml"]),
    (["run", "--config", "empty.toml"], ["empty.toml holds no settings"]),
    (["run", "--config", "unknown.toml"], ["'colour'"]),
    (["run", "--set", "lr"], ["'lr'", "key=value"]),
    (["run", "--set", "=3"], ["'=3'", "key=value"]),
    (["run", "fedavg", "lr=0.1", "lr=0.2"], ["lr is given twice, as lr=0.1 and as lr=0.2; say it once"]),
    (["run", "fedavg", "--baseline", "fedavgg"], ["'fedavgg'", "fedavg"]),
    (["methods", "fedavgg"], ["'fedavgg'", "fedavg"]),
    (["rnu"], ["there is no command 'rnu'; did you mean run"]),
    (["show", "missing"], ["missing", "--out"]),
    (["show", "folder"], ["folder", "--out"]),
    (["data", "chek"], ["there is no command 'data chek'; did you mean check"]),
    (["federate", "nods"], ["there is no command 'federate nods'; did you mean nodes"]),
    (["data", "show", "fedavg"], ["data show takes settings such as clients=20, but got 'fedavg'"]),
    (["show"], ["DIR... is missing; metavd show --help"]),
    (["compare"], ["METHOD"]),
    (["federate", "node"], ["--superlink is missing; metavd federate node --help"]),
    (["run", "--round", "3"], ["there is no option --round; did you mean --rounds"]),
    (["run", ""], ["unknown method ''; metavd methods lists all"]),
    (["run", "fedavg+vd", "per=input", "spread=logalpha"], ["spread is 'logalpha'", "per=input"]),
    (["compare", "lr=1"], ["at least one method"]),
    (["run", "fedavg", "reptile"], ["fedavg and reptile", "metavd compare"]),
    (["compare", "fedavg", "fedavgg"], ["'fedavgg'", "fedavg"]),
    (["compare", "fedavg", "--seeds", "0"], ["--seeds is 0, but must be a whole number from 1 to 1000"]),
    (["paper", "T8", "--minutes", "x"], ["--minutes is 'x', but must be a number above 0"]),
    (["paper", "T8", "--minutes", "nan"], ["--minutes is 'nan', but must be a number above 0"]),
    (["paper", "T8", "--minutes", "inf"], ["--minutes is 'inf', but must be a number above 0"]),
    (["paper", "T8", "--minutes", "0"], ["--minutes is 0.0, but must be a number above 0"]),
    (["tune", "fedavg", "--trials", "0"], ["--trials is 0, but must be a whole number from 1 on"]),
    (["predict", "run", "--data", "x", "--coverage", "x"], ["--coverage is 'x', but must be a number"]),
    (["bench", "--device", "tpu"], ["--device is 'tpu', but must be one of auto, cpu, cuda"]),
    (["federate", "rows", "run", "north", "few"], ["ROWS is 'few', but must be a whole number from 1 to"]),
    (["report", "x", "--out"], ["option '--out' requires an argument; --help says what goes there"]),
    (["methods", "--json=x"], ["option '--json' does not take a value; "]),
    (["predict", "a", "b", "--data", "x"], ["got unexpected extra argument (b); metavd predict --help"]),
    (["report", "x", "--out", "folder"], ["--out: file 'folder' is a directory, but must be a file"]),
    (["compare", "fedavg", "fedprox", "--set", "lrr=3"], ["'lrr'", "lr"]),
    (["compare", "fedavg", "--set", "cohort=30"], ["cohort is 30", "24 clients"]),
]  # fmt: skip


def prepare_files() -> None:
    Path("folder").mkdir()
    Path("folder/notes.txt").write_text("mine")
    Path("file").write_text("mine")
    Path("bad.toml").write_text("rounds = [")
    Path("bytes.toml").write_bytes(b"\xff\xfe")
    Path("empty.toml").touch()
    Path("list.toml").write_text("rounds = [1, 2]")
    Path("unknown.toml").write_text('colour = "red"')
    Path("infinite.toml").write_text("rounds = inf")


@pytest.mark.parametrize(("arguments", "says"), WRONG, ids=" ".join)
def test_wrong_input_is_one_line_and_leaves_no_trace(
    metavd: Metavd, tmp_path: Path, arguments: list[str], says: list[str]
) -> None:
    """Exit status 2, one line that names what is wrong and what would be right, and no file created or changed."""
    prepare_files()
    before = snapshot(tmp_path)
    refused(metavd(*arguments), says)
    if arguments[0] in {"run", "compare"} and len(arguments) > 1:
        refused(metavd(*arguments, "--out", "new/run"), says)
    assert snapshot(tmp_path) == before


def test_infinite_number_in_a_file(metavd: Metavd) -> None:
    prepare_files()
    refused(metavd("run", "--config", "infinite.toml"), ["rounds is inf", "a whole number"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(metavd: Metavd, tmp_path: Path) -> None:
    refused(metavd("run", "--device", "cuda", "--out", "run"), ["cuda", "no CUDA GPU", "--device cpu"])
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ("folder", ["folder", "not empty", "name a new or empty one"]),
        ("file", ["file is a file", "name another --out"]),
        ("file/below", ["file/below", "Not a directory"]),
        ("/proc/nowhere", ["/proc/nowhere"]),
        pytest.param("closed/run", ["closed/run", "Permission denied"],
                     marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_folders_that_cannot_be_used(
    metavd: Metavd, tmp_path: Path, folder: str, says: list[str], resume: list[str]
) -> None:
    """A folder with other files, a file, and where nothing can be written: refused, and left as they were."""
    prepare_files()
    Path("closed").mkdir(mode=0o500)
    before = snapshot(tmp_path)
    if resume and not Path(folder).exists():
        says = [f"--resume, but there is no run in {folder}; leave --resume out to begin it"]
    refused(metavd("run", "fedavg", "--out", folder, *SHORT, *resume), says)
    assert snapshot(tmp_path) == before


def test_folder_of_another_run(metavd: Metavd, tmp_path: Path) -> None:
    """Another method, seed or option is another run; it is named and stays as it is, with --resume or without."""
    assert metavd("run", "fedavg", "--out", "run", *SHORT).status == 0
    before = snapshot(tmp_path)
    for change in (["reptile"], ["fedavg", "--seed", "1"], ["fedavg", "--set", "lr=0.5"]):
        for resume in ([], ["--resume"]):
            outcome = metavd("run", change[0], "--out", "run", *SHORT, *change[1:], *resume)
            refused(outcome, ["run holds another run", "fedavg on digits, seed 0", "another --out"])
    assert snapshot(tmp_path) == before


def test_an_emptied_configuration_is_called_that(metavd: Metavd, tmp_path: Path) -> None:
    """It is no other run, of all defaults."""
    assert metavd("run", "fedavg", "--out", "run", *SHORT).status == 0
    Path("run/config.toml").write_text("")
    before = snapshot(tmp_path)
    refused(metavd("run", "fedavg", "--out", "run", *SHORT, "--resume"), ["run/config.toml holds no settings"])
    assert snapshot(tmp_path) == before


def test_rounds_that_resuming_loses_are_told(metavd: Metavd) -> None:
    assert metavd("run", "fedavg", "--out", "run", *SHORT).status == 0
    Path("run/result.json").unlink()
    Path("run/rounds.jsonl").write_text("spoilt\n")
    outcome = metavd("run", "fedavg", "--out", "run", *SHORT, "--resume")
    assert outcome.status == 0
    assert "run/rounds.jsonl is damaged: it lacks 3 of 3 rounds, the first of them round 1" in outcome.err


def test_folder_of_an_unfinished_run(metavd: Metavd, tmp_path: Path) -> None:
    """Without --resume an unfinished run is neither continued nor overwritten; with it, it is finished."""
    assert metavd("run", "fedavg", "--out", "run", *SHORT).status == 0
    wanted = result_of(tmp_path / "run")
    Path("run/result.json").unlink()
    before = snapshot(tmp_path)
    refused(metavd("run", "fedavg", "--out", "run", *SHORT), ["run", "unfinished", "--resume"])
    refused(metavd("show", "run"), ["run", "--resume"])
    assert snapshot(tmp_path) == before
    assert metavd("run", "fedavg", "--out", "run", *SHORT, "--resume").status == 0
    assert result_of(tmp_path / "run") | {"seconds": 0} == wanted | {"seconds": 0}


def test_a_finished_run_goes_on_for_more_rounds(metavd: Metavd, tmp_path: Path) -> None:
    """`--resume --rounds 5` makes a finished run of 3 the run of 5; with fewer rounds it is refused, by name."""
    assert metavd("run", "fedavg", "--out", "run", *SHORT).status == 0
    outcome = metavd("run", "--resume", "--out", "run", "--rounds", "5")
    assert outcome.status == 0
    assert "the run of 3 rounds goes on to 5" in outcome.err
    assert metavd("run", "fedavg", "--out", "whole", "--rounds", "5", *TINY).status == 0
    assert result_of(tmp_path / "run")["model_sha256"] == result_of(tmp_path / "whole")["model_sha256"]
    refused(metavd("run", "--resume", "--out", "run", "--rounds", "4"), ["rounds is 5 there and 4 here"])


def test_a_diverged_run_is_no_silent_success(metavd: Metavd) -> None:
    arguments = ["run", "fedavg", "--out", "run", *SHORT, "lr=20", "clip=1e9"]
    assert "the run diverged: its last training loss is" in metavd(*arguments).err
    assert "the run diverged: its last training loss is" in metavd("show", "run").out


def test_weights_that_cannot_be_read(metavd: Metavd, tmp_path: Path) -> None:
    outcome = metavd("run", "fedavg", "--out", "run", *SHORT, "--weights", "nowhere.safetensors")
    refused(outcome, ["weights is 'nowhere.safetensors', which cannot be read: No such file"])
    assert snapshot(tmp_path) == {}


def test_folder_that_was_killed_at_birth(metavd: Metavd) -> None:
    """A kill -9 at any moment, also while config.toml is written for the first time: --resume starts the run."""
    Path("run").mkdir()
    Path("run/.lock").touch()
    Path("run/.config.toml.partial").write_text('method = "fed')
    outcome = metavd("run", "fedavg", "--out", "run", *SHORT, "--resume")
    assert outcome.status == 0, outcome.err


def test_damaged_checkpoint_is_named(metavd: Metavd, tmp_path: Path) -> None:
    """A damaged checkpoint is named on standard error, the one before it is used, and the result is the same."""
    assert metavd("run", "fedavg", "--out", "run", *SHORT).status == 0
    wanted = result_of(tmp_path / "run")
    Path("run/result.json").unlink()
    tensors = Path("run/checkpoint/round-000003.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x00")
    outcome = metavd("run", "fedavg", "--out", "run", *SHORT, "--resume")
    assert outcome.status == 0
    assert "round-000003" in outcome.err
    assert "going on after round 2" in outcome.err
    assert result_of(tmp_path / "run") | {"seconds": 0} == wanted | {"seconds": 0}


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "3", '"text"', "null"])
def test_show_of_a_damaged_result(metavd: Metavd, content: str) -> None:
    Path("run").mkdir()
    Path("run/result.json").write_text(content)
    refused(metavd("show", "run"), ["run/result.json", "damaged"])


def test_run_with_a_damaged_result_can_be_run_again(metavd: Metavd) -> None:
    """What `metavd show` says of a damaged result ("run it again") is possible: --resume writes it anew."""
    assert metavd("run", "fedavg", "--out", "run", *SHORT).status == 0
    Path("run/result.json").write_text("{")
    assert metavd("run", "fedavg", "--out", "run", *SHORT, "--resume").status == 0
    assert metavd("show", "run").status == 0


# --- NaN -------------------------------------------------------------------------------------------------------------


def test_nan_names_round_client_and_tensor(metavd: Metavd) -> None:
    """A NaN in the first round: exit status 1, and one last line that names the round, the client and the tensor."""
    outcome = metavd("run", "fedavg", "--out", "run", *SHORT, "--set", "lr=1e30", "--set", "clip=1e30")
    assert outcome.status == 1
    assert re.match(r"metavd: round 1: client \d+ made \S+ NaN or infinite", outcome.err.splitlines()[-1])
    assert "Traceback" not in outcome.err
    assert not Path("run/result.json").exists()


DIVERGES = ["--set", "server_lr=1e8", "--set", "server_clip=1e30", "--set", "clip=1e30", "--set", "local_epochs=1"]


def test_last_good_checkpoint_survives_a_nan(metavd: Metavd) -> None:
    """Rounds 1 and 2 are finite, round 3 is not: the checkpoint of round 2 is kept, and resuming fails alike."""
    arguments = ["run", "fedavg", "--out", "run", "--rounds", "9", *TINY, *DIVERGES]
    arguments += ["--set", "checkpoint_every=9", "--set", "eval_every=9"]
    outcome = metavd(*arguments)
    assert outcome.status == 1
    said = outcome.err.splitlines()[-1]
    found = re.match(r"metavd: round (\d): client \d+ made \S+ NaN or infinite.*checkpoint of round (\d) is kept", said)
    assert found is not None, said
    bad, good = map(int, found.groups())
    assert good == bad - 1 > 0
    assert [path.stem for path in Path("run/checkpoint").glob("*.safetensors")] == [f"round-{good:06d}"]
    assert len(Path("run/rounds.jsonl").read_text().splitlines()) == good
    again = metavd(*arguments, "--resume")
    assert again.status == 1
    assert f"round {bad}: client" in again.err.splitlines()[-1]
    assert Path(f"run/checkpoint/round-{good:06d}.safetensors").exists()


def test_nan_answers_stop_the_run(metavd: Metavd) -> None:
    """Weights may be finite and answers not: the run fails and names the round and the client."""
    outcome = metavd("run", "fedavg", "--out", "run", "--rounds", "2", *TINY, *DIVERGES, "--set", "eval_every=2")
    assert outcome.status == 1
    assert re.match(
        r"metavd: round 2: client \d+ answers .*NaN.*checkpoint of round 2 is kept", outcome.err.splitlines()[-1]
    )
    assert not Path("run/result.json").exists()


# --- signals and the real program ------------------------------------------------------------------------------------


def spawn(*arguments: str | Path) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "metavd", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_rounds(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    rounds = folder / "rounds.jsonl"
    until = time.monotonic() + 600
    while not (rounds.exists() and rounds.read_text().count("\n") >= count):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.processes
def test_interrupted_run_saves_and_says_how_to_resume(metavd: Metavd, tmp_path: Path) -> None:
    """SIGINT, then SIGTERM after resuming: exit status 1, a checkpoint of the last round, one line of advice."""
    command = ["run", "fedavg", "--out", str(tmp_path / "run"), "--rounds", "2000", *TINY]
    command += ["--set", "checkpoint_every=2000", "--set", "eval_every=2000"]
    done = 0
    for resume, number in (([], signal.SIGINT), (["--resume"], signal.SIGTERM)):
        process = spawn(*command, *resume)
        wait_for_rounds(process, tmp_path / "run", done + 3)
        process.send_signal(number)
        out, err = process.communicate(timeout=600)
        assert process.returncode == 1
        assert out == ""
        assert "Traceback" not in err
        found = re.fullmatch(r"metavd: stopped after round (\d+);.*--resume.*", err.splitlines()[-1])
        assert found is not None, err
        assert f"going on after round {done}" in err or not resume
        done = int(found[1])
        assert (tmp_path / "run" / "checkpoint" / f"round-{done:06d}.safetensors").exists()
        assert (tmp_path / "run" / "rounds.jsonl").read_text().count("\n") in {done, done + 1}
    refused(metavd(*command), ["unfinished", "--resume"])


def test_an_interrupt_that_python_drops_still_stops_the_run(metavd: Metavd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: an interrupt that was swallowed, as in a callback, ends the run at its next round, with a checkpoint."""
    rounds = []

    def swallowing(self: Reporter, record: Record) -> None:
        rounds.append(record.round)
        if record.round == 2:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        original(self, record)

    original = Reporter.round
    monkeypatch.setattr(Reporter, "round", swallowing)
    outcome = metavd("run", "fedavg", "--out", "run", "--rounds", "50", *TINY)
    assert (outcome.status, rounds) == (1, [1, 2])
    assert "stopped after round 1" in outcome.err


@pytest.mark.processes
def test_second_process_is_kept_out(metavd: Metavd, tmp_path: Path) -> None:
    """While a run is being written, a second process on the same folder is refused and changes nothing."""
    command = ["run", "fedavg", "--out", str(tmp_path / "run"), "--rounds", "2000", *TINY]
    process = spawn(*command)
    try:
        wait_for_rounds(process, tmp_path / "run", 1)
        refused(metavd(*command, "--resume"), ["another process", str(tmp_path / "run")])
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_module_and_script_give_the_exit_status() -> None:
    """`python -m metavd` and `metavd` are the same program."""
    assert (
        "fedavg"
        in subprocess.run(
            [sys.executable, "-m", "metavd", "methods"], capture_output=True, text=True, check=True
        ).stdout
    )
    script = Path(sys.executable).parent / "metavd"
    if script.exists():
        wrong = subprocess.run([script, "run", "fedavgg"], capture_output=True, text=True, check=False)
        refused(SimpleNamespace(status=wrong.returncode, out=wrong.stdout, err=wrong.stderr), ["'fedavgg'"])


@pytest.mark.parametrize("program", [["-m", "metavd"], ["-c", "from metavd.__main__ import main; main()"]])
def test_interrupted_while_torch_is_loaded(tmp_path: Path, program: list[str]) -> None:
    """Ctrl-C in the seconds before a run begins: exit status 1 and one line, as at any other time."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, *program, "run", "fedavg", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    refused(SimpleNamespace(status=done.returncode, out=done.stdout, err=done.stderr), ["stopped"], status=1)


def test_closed_pipe_is_no_error(tmp_path: Path) -> None:
    """`metavd methods | head -1`: the reader has seen enough, and no complaint follows."""
    command = f"{sys.executable} -m metavd methods --json | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("[", "")


@pytest.mark.processes
def test_kill_and_resume() -> None:
    """The short form of scripts/kill_and_resume.py: kill -9 at random moments leaves no trace in what comes out."""
    script = ROOT / "scripts" / "kill_and_resume.py"
    # The seed kills twice: in the middle of a checkpoint, and between the last one and the result.
    command = [sys.executable, str(script), "--trials", "1", "--rounds", "8", "--seed", "30"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert outcome.stdout.count(": identical") == 1


def test_resume_needs_no_more_than_the_folder(metavd: Metavd) -> None:
    """An unfinished run knows what it is: `metavd run --out DIR --resume` goes on with its settings."""
    assert metavd("run", "fedprox", "--out", "run", "--seed", "2", *SHORT).status == 0
    wanted = result_of(Path("run"))
    Path("run/result.json").unlink()
    assert metavd("run", "--out", "run", "--resume").status == 0
    assert result_of(Path("run")) | {"seconds": 0} == wanted | {"seconds": 0}


def test_few_clients_need_no_cohort(metavd: Metavd) -> None:
    """A dataset's default cohort shrinks to the clients there are; one that was asked for does not."""
    assert metavd("run", "fedavg", "--out", "run", "--rounds", "1", "--set", "clients=3", "test_share=0.9").status == 0
    assert tomllib.loads(Path("run/config.toml").read_text())["cohort"] == 3


@pytest.mark.parametrize(("width", "terminal"), [(80, True), (130, True), (80, False)])
def test_no_number_of_a_comparison_is_cut(width, terminal, monkeypatch):
    """A narrow terminal has intervals below their means, a wide one beside them; a file is as wide as it must be."""
    out = io.StringIO()
    monkeypatch.setattr(train, "console", lambda: Console(file=out, width=width, force_terminal=terminal))
    half = {"NLL": 1.061, "%": 52.9, "sent": 0.25}
    row = {each.title: (54.2, half[each.title.split()[-1]]) for each in columns() if each.title != "epsilon"}
    row |= {each.title: None for each in columns() if each.title not in row}
    train._print_compared({"fedavg": row, "reptile+metavd": row}, 3)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert "…" not in text
    assert text.count("± 52.9") == 2 * 4
    assert text.count("± 1.061") == 2 * 2
    assert text.count("± 0.25") == 2
    assert "reptile+metavd " in text
    assert ("54.2 ± 52.9" in text) == (not terminal or width > 100)
    assert not terminal or max(map(len, text.splitlines())) <= width
