"""Pages as templates: what stays of them stands in the files of this folder, and what differs is put in."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def _pages() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415 (few commands write pages)

    # Markdown for people, of names that were checked when they came in: nothing is escaped.
    return Environment(
        loader=PackageLoader("metavd"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip


def filled(name: str, **values: Any) -> str:
    """Return a template's page; a value that is missing is an error."""
    return _pages().get_template(name).render(values)
