"""What the documentation says is true: its code runs, its commands and options exist, its links lead somewhere."""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from metavd import methods
from metavd.cli import cli, main
from metavd.cli.terminal import settings_of
from metavd.data.collection import parse
from metavd.errors import SpecError
from metavd.runs.settings import Experiment, with_settings

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    """Return a page's fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.fixture
def tables(monkeypatch) -> None:
    """Forget what a test registers."""
    for part in ("_found", "_homes"):
        monkeypatch.setattr(methods.REGISTRY, part, dict(getattr(methods.REGISTRY, part)))


def test_the_example_on_own_arrays_runs_and_has_ten_lines(tmp_path, monkeypatch, capsys):
    """README: the user's own arrays and module; it prints what the README says that it prints."""
    example = blocks(README, "python")[0]
    lines = [line for line in example.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) <= 10
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out.strip()
    # Rounding differs between machines, so that the figures may; the sentence may not.
    said = re.search(r"It prints `(known people [^`]*)`", README.read_text(encoding="utf-8"))
    assert said is not None
    assert re.sub(r"\d+", "N", printed) == re.sub(r"\d+", "N", said[1])
    assert not list(tmp_path.iterdir()), "a run without out= wrote files"


@pytest.mark.usefixtures("tables")
def test_the_new_method_of_the_readme_works_and_obeys_its_law():
    """README: options, one function, one law test; the very text is run, on every base that takes a regulariser."""
    space: dict[str, object] = {}
    exec(compile(blocks(README, "python")[1], "README.md", "exec"), space)
    for base in ("fedavg", "reptile", "maml", "perfedavg"):
        assert f"{base}+l2" in methods.NAMES
        assert "decay" in methods.options_of(f"{base}+l2")
    laws = [value for name, value in space.items() if name.startswith("test_")]
    assert len(laws) == 1
    laws[0]()


def commands(page: Path) -> list[list[str]]:
    """Return the commands of a page's shell blocks."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("words", [w for p in PAGES for w in commands(p) if w[0] == "metavd"], ids=" ".join)
def test_every_metavd_command_in_the_docs_exists(words, monkeypatch, tmp_path):
    """The command, its options, its methods and its settings are all known; nothing is run."""
    monkeypatch.chdir(tmp_path)
    name, *arguments = words[1:]
    command = cli.commands[name]
    if isinstance(command, click.Group):
        name, *arguments = arguments
        command = command.commands[name]
    given = command.make_context(name, arguments).params
    if given.get("data"):
        parse(given["data"])
    words = given.get("given_words", ())
    settings = settings_of(None, [*given.get("pairs", ()), *(word for word in words if "=" in word)], {})
    for method in [word for word in words if "=" not in word] or ["reptile+metavd"]:
        with_settings(with_settings(Experiment(), {"method": methods.check(method)}), settings)


def test_the_example_on_own_pictures_runs_and_has_under_ten_lines(tmp_path, monkeypatch, capsys):
    """docs/data.md: from a folder of pictures to a compared result, the very lines; the table names every method."""
    digits = load_digits()
    for row in range(300):
        place = tmp_path / "photos" / f"person{row % 6}" / f"digit{digits.target[row] % 3}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[row] * 15).astype(np.uint8)).save(place / f"{row}.png")
    lines = [line for line in blocks(ROOT / "docs" / "data.md", "sh")[0].splitlines() if line]
    assert len(lines) < 10
    monkeypatch.chdir(tmp_path)
    for line in lines:
        program, *arguments = shlex.split(line.replace("--rounds 20", "--rounds 2"))
        assert program == "metavd"
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        main()
    printed = capsys.readouterr().out
    assert "folder at photos: 300 rows of uint8 1 x 8 x 8; 3 classes" in printed
    assert "6 clients" in printed
    assert (tmp_path / "clients.png").stat().st_size > 10_000
    assert all(f"│ {method}" in printed for method in ("fedavg", "reptile", "reptile+metavd"))
    rows = json.loads((tmp_path / "runs" / "photos" / "comparison.json").read_text())["rows"]
    assert set(rows) == {"fedavg", "reptile", "reptile+metavd"}


def test_every_make_target_in_the_docs_exists():
    """The commands make run, make test and the others are targets of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"(?:^ *|`)make ([a-z]+)", text, re.MULTILINE))
    assert {"run", "test"} <= named
    assert named <= targets


def test_every_script_in_the_docs_exists():
    """Scripts are named by a path that is there."""
    named = {path for page in PAGES for path in re.findall(r"\bscripts/\w+\.\w+", page.read_text(encoding="utf-8"))}
    assert named
    assert not [path for path in named if not (ROOT / path).is_file()]


def taken(key: str, value: str) -> bool:
    """Whether some method takes a setting or option with that value."""
    for method in methods.NAMES:
        try:
            with_settings(Experiment(method=method), {key: value})
        except SpecError:
            continue
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_in_the_docs_exists(page):
    """`key=value` in a text is a setting or an option, and the value is allowed."""
    pairs = set(re.findall(r"`([a-z_]+)=([\w.:-]+)`", page.read_text(encoding="utf-8")))
    assert not [f"{key}={value}" for key, value in pairs if not taken(key, value)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page):
    """The file is there, and so is the heading where the link names one."""
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8"))
    for path, heading in links:
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), f"{path} leads out of the repository"
        assert target.exists(), f"{path} is not there"
        assert not heading or heading in anchors(target), f"{path} has no heading #{heading}"


def test_the_page_of_methods_is_up_to_date(monkeypatch):
    """docs/methods.md is what scripts/write_docs.py writes from the code."""
    monkeypatch.setattr(sys, "argv", ["write_docs.py", "--check"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(ROOT / "scripts" / "write_docs.py"), run_name="__main__")
    assert exit_.value.code == 0


def test_the_picture_is_small():
    """A clone stays light."""
    assert (ROOT / "docs" / "picture.png").stat().st_size < 150_000
