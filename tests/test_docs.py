"""What the documentation says is true: its code runs, its commands and options exist, its links lead somewhere."""

import json
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from metavd import methods
from metavd.cli import cli, main
from metavd.cli.terminal import settings_of
from metavd.data import formats
from metavd.data.collection import parse
from metavd.errors import SpecError
from metavd.runs.settings import Experiment, with_settings

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "notebooks").glob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    """Return a page's fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_the_example_on_own_arrays_runs_and_has_ten_lines(tmp_path, monkeypatch, capsys):
    """README: the user's own arrays and module; it prints what the README says that it prints."""
    example = blocks(README, "python")[0]
    lines = [line for line in example.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) <= 10
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out.strip()
    # Rounding differs between machines, so that the figures may by 2 points; the sentence may not.
    said = re.search(r"It prints `(known people [^`]*)`", README.read_text(encoding="utf-8"))
    assert said is not None
    assert re.sub(r"\d+", "N", printed) == re.sub(r"\d+", "N", said[1])
    assert [int(n) for n in re.findall(r"\d+", printed)] == pytest.approx(
        [*map(int, re.findall(r"\d+", said[1]))], abs=2
    )
    assert not list(tmp_path.iterdir()), "a run without out= wrote files"


def test_fedrep_of_the_docs_runs_from_the_command_line_and_is_fedrep(tmp_path):
    """docs/private.md: the file as it stands, at most 30 lines, as a package of one's own; it has the bits of ours."""
    page = ROOT / "docs" / "private.md"
    code = blocks(page, "python")[0]
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 30
    (tmp_path / "my_rep.py").write_text(code)
    about = tmp_path / "mine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    points = tomllib.loads(blocks(page, "toml")[0])["project"]["entry-points"]["metavd.methods"]
    lines = [f"{name} = {module}" for name, module in points.items()]
    (about / "entry_points.txt").write_text("\n".join(["[metavd.methods]", *lines]))
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    hashes = []
    for method in ("myrep", "fedrep"):
        words = [method, "--rounds", "2", "--out", str(tmp_path / method), "--set", "model=mlp", "width=8",
                 "head_epochs=2", "local_epochs=1"]  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "metavd", "run", *words], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        result = json.loads((tmp_path / method / "result.json").read_text())
        hashes.append([result[name] for name in ("model_sha256", "kept_sha256", "test", "unseen")])
    assert hashes[0] == hashes[1]


def commands(page: Path) -> list[list[str]]:
    """Return the commands of a page's shell blocks."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("words", [w for p in PAGES for w in commands(p) if w[0] == "metavd"], ids=" ".join)
def test_every_metavd_command_in_the_docs_exists(words, monkeypatch, tmp_path):
    """The command, its options, its methods and its settings are all known; nothing is run."""
    monkeypatch.chdir(tmp_path)
    name, *arguments = words[1:]
    command = cli.get_command(click.Context(cli), name)
    if isinstance(command, click.Group):
        name, *arguments = arguments
        command = command.commands[name]
    given = command.make_context(name, arguments).params
    if given.get("data"):
        parse(given["data"])
    words = given.get("given_words", ())
    settings = settings_of(None, [*given.get("pairs", ()), *(word for word in words if "=" in word)], {})
    settings |= {"data": given["data"]} if given.get("data") else {}
    for method in [word for word in words if "=" not in word and word not in {"all", "best"}] or ["reptile+metavd"]:
        with_settings(with_settings(Experiment(), {"method": methods.check(method)}), settings)


def section(page: Path, heading: str) -> list[str]:
    """Return the shell lines below a heading of a page."""
    text = page.read_text(encoding="utf-8").split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines() if line]


def carry_out(lines, monkeypatch, capsys, rounds=1):
    """Run shell lines of a page with few rounds and seeds, at most five of them; return what they printed."""
    assert len(lines) <= 5
    monkeypatch.setattr(
        "metavd.report.page.publish", lambda picture, _: f"<svg>{picture.name}</svg>"
    )  # drawing is slow
    for line in lines:
        fewer = line.replace("--seeds 3", "--seeds 2")
        program, *arguments = shlex.split(re.sub(r"--rounds \d+", f"--rounds {rounds}", fewer))
        assert program == "metavd"
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        main()
    return capsys.readouterr().out


DOMAINS = ("art", "cartoon", "photo", "sketch")


def domains(folder: Path, rows: int = 160) -> None:
    """Write pictures of two classes in four domains, as PACS has them: folder/sketch/dog/1.png."""
    digits = load_digits()
    for row in range(rows):
        place = folder / DOMAINS[row % 4] / ("dog", "cat")[int(digits.target[row]) % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[row] * 15).astype(np.uint8)).save(place / f"{row}.png")


def reviews(path: Path) -> None:
    """Write short texts of two classes by four people, as JSON lines."""
    lines = [
        {"text": ("a dull film", "a great film")[row % 2], "label": ("bad", "good")[row % 2], "client": who}
        for row in range(48)
        for who in [("ann", "bob", "cid", "dan")[row // 2 % 4]]
    ]
    path.write_text("\n".join(map(json.dumps, lines)))


def check_report(folder: Path, *names: str) -> None:
    """A page is there that compares two methods or more and knows clients and classes by name."""
    text = (folder / "report.html").read_text()
    assert 'class="notes"' not in text, "something is missing from the page"
    assert text.count('class="chip"') >= 2
    known = text.split('id="clients-data">')[1].split("</script>")[0]
    assert all(name in known for name in names)


def test_the_example_on_own_pictures_runs(tmp_path, monkeypatch, capsys):
    """docs/data.md: from a folder of pictures, a client a domain, to a compared report; the very lines."""
    domains(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "data.md"
    printed = carry_out(section(page, "Your own pictures, from a folder to a report"), monkeypatch, capsys)
    assert "folder at photos: 160 rows of uint8 1 x 8 x 8; 2 classes" in printed
    assert (tmp_path / "clients.png").stat().st_size > 10_000
    assert all(f"│ {method}" in printed for method in ("fedavg", "reptile", "reptile+metavd"))
    check_report(tmp_path / "runs" / "photos", *DOMAINS, "cat (")


def test_the_example_on_named_networks_runs(tmp_path, monkeypatch, capsys):
    """docs/networks.md: a ResNet with GroupNorm and a transformer, from file to compared report; the very lines."""
    domains(tmp_path / "photos", 80)
    reviews(tmp_path / "reviews.jsonl")
    monkeypatch.chdir(tmp_path)
    carry_out(section(ROOT / "docs" / "networks.md", "By name"), monkeypatch, capsys)
    check_report(tmp_path / "runs" / "resnet", *DOMAINS)
    check_report(tmp_path / "runs" / "transformer", "ann", "dan", "good (")
    for name in ("resnet", "transformer"):
        assert f'model = "{name}' in (tmp_path / "runs" / name / "fedavg" / "seed-0" / "config.toml").read_text()


def test_the_example_with_names_runs(tmp_path, monkeypatch, capsys):
    """docs/data.md: named domains, one left out, one personalised, each left out in turn; the very lines."""
    domains(tmp_path / "pacs")
    monkeypatch.chdir(tmp_path)
    printed = carry_out(section(ROOT / "docs" / "data.md", "Names"), monkeypatch, capsys)
    assert "left out" in printed
    assert (tmp_path / "answers.csv").read_text().startswith("row,file,label,predicted")
    rows = json.loads((tmp_path / "runs" / "each" / "leave_out.json").read_text())["rows"]
    assert set(rows["reptile+metavd"]) == {"art", "cartoon", "photo", "sketch", "mean"}


def test_the_example_on_a_table_runs(tmp_path, monkeypatch, capsys):
    """docs/data.md: a CSV with gaps, categories and names, from file to comparison and answers; the very lines."""
    draw = np.random.RandomState(0)
    rows = ["age,city,note,diagnosis,hospital"]
    for row in range(160):
        age = draw.normal(60, 10)
        city, hospital = draw.choice(["Leeds", "York"]), ("north", "south", "east", "west")[row % 4]
        rows.append(f"{'' if draw.rand() < 0.1 else age},{city},n{row},{('benign', 'malignant')[age > 60]},{hospital}")
    (tmp_path / "ward.csv").write_text("\n".join(rows))
    monkeypatch.chdir(tmp_path)
    printed = carry_out(section(ROOT / "docs" / "data.md", "Tables"), monkeypatch, capsys)
    assert "north" in printed
    head, *lines = (tmp_path / "answers.csv").read_text().splitlines()
    assert head == "row,client,label,predicted,confidence,entropy,p_benign,p_malignant"
    assert len(lines) == 160
    found = json.loads((tmp_path / "runs" / "ward" / "comparison.json").read_text())["rows"]
    assert set(found) == {"fedavg", "reptile+metavd"}
    check_report(tmp_path / "runs" / "ward", "north", "west", "benign (")


def test_the_example_on_texts_runs(tmp_path, monkeypatch, capsys):
    """docs/data.md: reviews with labels, and speeches whose next characters are predicted; the very lines."""
    reviews(tmp_path / "reviews.jsonl")
    plays = [{"client": who, "text": "to be or not to be " * 4} for who in ("king", "queen", "page") for _ in range(2)]
    (tmp_path / "plays.jsonl").write_text("\n".join(map(json.dumps, plays)))
    monkeypatch.chdir(tmp_path)
    carry_out(section(ROOT / "docs" / "data.md", "Texts"), monkeypatch, capsys)
    head, *lines = (tmp_path / "answers.csv").read_text().splitlines()
    assert head.endswith("p_bad,p_good")
    assert len(lines) == 48
    check_report(tmp_path / "runs" / "reviews", "ann", "dan", "good (")
    assert json.loads((tmp_path / "runs" / "plays" / "result.json").read_text())["names"]["classes"][0] == "\n"


def test_every_make_target_in_the_docs_exists():
    """The commands make run, make test and the others are targets of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"(?:^ *|`)make ([a-z-]+)", text, re.MULTILINE))
    assert {"run", "test"} <= named
    assert named <= targets


def test_every_script_in_the_docs_exists():
    """Scripts are named by a path that is there."""
    named = {path for page in PAGES for path in re.findall(r"\bscripts/\w+\.\w+", page.read_text(encoding="utf-8"))}
    assert named
    assert not [path for path in named if not (ROOT / path).is_file()]


CODE = [path for part in ("src", "scripts", "tests") for path in (ROOT / part).rglob("*.py")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_in_the_docs_exists(page):
    """A Python file is named by the end of its path, and a dotted name can be imported."""
    text = page.read_text(encoding="utf-8")
    files = [f"/{path}" for path in re.findall(r"`([\w/]+/\w+\.py)`", text)]
    assert not [path for path in files if not any(each.as_posix().endswith(path) for each in CODE)]
    groups = {f"metavd.{name}" for name in ("aggregations", "datasets", "figures", "methods", "models", "partitions",
                                            "posteriors")}  # fmt: skip
    names = set(re.findall(r"`(metavd(?:\.[A-Za-z_]\w*)+)", text)) - groups
    for name in names:
        if re.match(r"metavd\.flower\b", name):
            pytest.importorskip("flwr")
        pkgutil.resolve_name(name)


def test_what_differences_says_of_files():
    """docs/differences.md: the last column's files are below src/metavd/, and have the functions named after them."""
    lines = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8").splitlines()
    points = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if re.match(r"\| \d+ \|", line)]
    assert [int(cells[0]) for cells in points] == list(range(1, 41))
    for number, *_, where in points:
        state = re.match(r"\w+", where)[0]
        assert state in {"done", "kept", "partly", "marked", "text"}, (number, state)
        file = None
        for name in re.findall(r"`([^`]+)`", where):
            if "/" in name or name.endswith(".py"):
                file = ROOT / (name if name.startswith("tests/") else f"src/metavd/{name}")
                assert file.exists(), (number, name)
            elif file is not None and file.is_file() and re.fullmatch(r"\w+", name):
                found = re.search(rf"^(?:def|class) {name}\b", file.read_text(encoding="utf-8"), re.MULTILINE)
                assert found, (number, file.name, name)


def taken(key: str, value: str) -> bool:
    """Whether some method, or a format of one's own files, takes a setting or option with that value."""
    for own in ("npz:f", "folder:f", "table:f", "text:f"):
        if key in formats.info(own.split(":")[0]).options:
            with_settings(Experiment(data=own), {key: value})
            return True
    for method in (*methods.NAMES, "fedavg+dp"):  # not listed, because it goes with most
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
