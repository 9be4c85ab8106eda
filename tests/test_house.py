"""One word means one thing, and imports point one way: laws of the house that no single module can keep."""

from __future__ import annotations

import ast
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

import metavd

PACKAGE = Path(metavd.__file__).parent


def _defined(kind: type[ast.stmt] | tuple[type[ast.stmt], ...]) -> dict[str, set[str]]:
    """Return where each name is defined at the root of a module."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, kind):
                found[node.name].add(str(path.relative_to(PACKAGE)))  # type: ignore[attr-defined]
    return found


def test_a_public_class_has_a_name_of_its_own() -> None:
    classes = {name: places for name, places in _defined(ast.ClassDef).items() if not name.startswith("_")}
    assert len(classes) > 200
    assert {name: places for name, places in classes.items() if len(places) > 1} == {}


def test_words_that_once_meant_several_things_mean_one() -> None:
    functions = _defined(ast.FunctionDef)
    for word, least in (("pull", 1), ("_together", 0), ("plan", 1)):
        assert len(functions.get(word, ())) == least, (word, functions[word])


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports for types count too: what needs the other to be read cannot be read alone."""
    graph = grimp.build_graph("metavd", cache_dir=None)
    TopologicalSorter(
        {each: graph.find_modules_directly_imported_by(each) - {each} for each in graph.modules}
    ).prepare()
