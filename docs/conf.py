"""How `make docs` builds the site: the pages that a forge shows too, notebooks run, nothing fetched."""

import re
from typing import Any

from sphinx.ext.napoleon import GoogleDocstring

from metavd.version import VERSION

project = "metavd"
author = "the authors of metavd"
release = version = VERSION
extensions = ["myst_nb", "sphinx.ext.autodoc"]

# Pages. Anchors are those of a forge, so that a link works in both places.
myst_heading_anchors = 4
templates_path = []
exclude_patterns = ["_build"]

# Notebooks are run in every build: what a page shows is what the code prints today.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
nb_render_markdown_format = "myst"

# The interface from its docstrings; a name in backticks is code there.
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = f"metavd {VERSION}"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = html_show_copyright = False


def within(app: Any, docname: str, source: list[str]) -> None:
    """Let links to pages beside docs/ lead to their copies on the site; `docs/` in those copies is the site itself."""
    if "/" not in docname:
        source[0] = re.sub(r"\]\(\.\./([A-Z]+)\.md", lambda found: f"](project/{found[1].lower()}.md", source[0])


def google(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Understand `Args:`. Napoleon itself would take the first words of a property, up to a colon, for its type."""
    if what in {"function", "method", "class"}:
        lines[:] = GoogleDocstring(list(lines), what=what, name=name, obj=thing).lines()


def setup(app: Any) -> None:
    """Tell Sphinx."""
    app.connect("autodoc-process-docstring", google)
    app.connect("source-read", within)
