"""The site can be built: every page has its place, notebooks run, the interface is complete. `make docs` builds it."""

import ast
import importlib
import logging
import re
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import metavd
from metavd import methods

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.md"))
COPIED = {"CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"}
"""Pages beside docs/ that the site has too."""


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def cells(page: Path) -> list[str]:
    """The code cells of a notebook."""
    return re.findall(r"^```\{code-cell\} python\n(.*?)^```$", text(page), re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[str]:
    """Where a page leads to within the repository."""
    return re.findall(r"\]\((?!https?:)([^)#\s]+)(?:#[^)\s]*)?\)", text(page))


def test_every_page_has_one_place_in_the_index():
    """Sphinx takes a page without a place for a mistake, and so is a page in two."""
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```$", text(DOCS / "index.md"), re.DOTALL | re.MULTILINE)
    lines = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    places = Counter(re.sub(r".*<(.*)>", r"\1", line) for line in lines)
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")}
    assert places == Counter(pages - {"index"})


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_links_stay_on_the_site(page):
    """What the site lacks, a reader of the site cannot follow; `conf.py` leads links beside docs/ to the copies."""
    away = [path for path in links(page) if not (page.parent / path).resolve().is_relative_to(DOCS)]
    assert {Path(path).name for path in away} <= COPIED
    assert not away or page.parent == DOCS


@pytest.mark.parametrize("name", sorted(COPIED))
def test_a_copied_page_leads_to_the_docs_alone(name):
    """The copy lies elsewhere: only links that begin with docs/ are led right."""
    assert text(DOCS / "project" / name.lower()).startswith(f"```{{include}} ../../{name}\n:relative-docs: docs/\n")
    assert all(path.startswith("docs/") for path in links(ROOT / name))


@pytest.mark.parametrize("page", NOTEBOOKS, ids=lambda page: page.stem)
def test_a_notebook_is_one_and_its_cells_are_python(page):
    """Without the header it would be a page; every fenced block of Python is a cell; lines fit the site's column."""
    assert text(page).startswith("---\nfile_format: mystnb\nkernelspec:\n  name: python3\n")
    assert "```python" not in text(page)
    assert cells(page)
    for cell in cells(page):
        ast.parse(cell)
        assert max(map(len, cell.splitlines())) <= 90


@pytest.fixture
def _forgetting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what a notebook registers and sets, and nothing else: what is there is known first."""
    methods.entries()
    for part in ("_found", "_homes"):
        monkeypatch.setattr(methods.REGISTRY, part, dict(getattr(methods.REGISTRY, part)))
    logger = logging.getLogger("flwr")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.usefixtures("_forgetting")
@pytest.mark.parametrize("page", NOTEBOOKS, ids=lambda page: page.stem)
def test_a_notebook_runs(page, tmp_path, monkeypatch):
    """Up to the first cell that shows something by IPython, which only `make docs` installs; and its laws hold."""
    if page.stem == "three-sites":
        pytest.importorskip("flwr")
        pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {"__name__": "notebook"}
    ran = 0
    for cell in cells(page):
        if "IPython" in cell:
            break
        exec(compile(cell, page.name, "exec"), space)
        ran += 1
    assert ran >= 3
    if page.stem == "own-method":
        assert {f"{base}+l2" for base in ("fedavg", "reptile", "maml", "perfedavg")} <= set(methods.NAMES)
    if page.stem == "three-sites":
        assert space["same"]["model_sha256"] == space["result"]["model_sha256"]


def test_the_interface_is_all_there():
    """Every name of `metavd` stands in docs/api.md, every name there exists and says what it is."""
    named = re.findall(r"^\.\. auto(?:function|class):: (\S+)$", text(DOCS / "api.md"), re.MULTILINE)
    assert len(named) == len(set(named))
    for name in named:
        home, _, own = name.rpartition(".")
        try:
            thing = getattr(importlib.import_module(home), own)
        except ModuleNotFoundError as error:
            assert error.name == "flwr"  # noqa: PT017 (an extra)
            continue
        assert thing.__doc__
    offered = {name for name in metavd.__all__ if not isinstance(getattr(metavd, name), (str, types.ModuleType))}
    assert {f"metavd.{name}" for name in offered} <= set(named)


def test_the_readme_is_short():
    """What it is, two commands, a picture, ten lines, a table, where to go; everything else is in docs/."""
    assert len(text(ROOT / "README.md").splitlines()) <= 150
