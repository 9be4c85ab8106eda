"""The look of all figures; and a figure as files and as a part of the page.

A figure is small, one panel, so that a page sets as many side by side as the screen has room for. It is drawn in the
colours of the light page. As a part of the page, ink and paper become CSS variables, so that a dark page needs no
second figure; the colours of methods are of middle lightness and show on both.
"""

from __future__ import annotations

import io
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from ..container import write_atomic
from .groups import Group

INK, MUTED, RULE, PAPER = "#1f2430", "#667080", "#e1e4e9", "#fffffe"
_VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", RULE: "var(--rule)", PAPER: "var(--card)"}
RIGHT, WRONG, TOO_SURE = "#3b7dd8", "#e07b2a", "#d1495b"
WIDTH = 4.0
"""Inches. A panel on the page is about as wide as a phone, so that 8.5 points are readable there."""
_DPI = 160
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"

_RC: dict[Any, Any] = {
    "font.size": 8.5, "font.family": "sans-serif", "axes.titlesize": 9.5, "axes.titlelocation": "left",
    "axes.titleweight": "bold", "axes.titlepad": 8, "axes.labelsize": 8.5, "legend.fontsize": 8,
    "xtick.labelsize": 8, "ytick.labelsize": 8, "text.color": INK, "axes.labelcolor": MUTED, "axes.titlecolor": INK,
    "xtick.color": MUTED, "ytick.color": MUTED, "axes.edgecolor": MUTED, "axes.linewidth": 0.7,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": RULE, "grid.linewidth": 0.7,
    "axes.axisbelow": True, "axes.facecolor": "none", "figure.facecolor": PAPER, "lines.linewidth": 1.6,
    "lines.markersize": 4, "legend.frameon": False, "svg.fonttype": "none", "svg.hashsalt": "metavd",
    "hatch.linewidth": 0.6,
    # A dollar sign in somebody's name of a dataset is a dollar sign, not a formula.
    "text.parse_math": False,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure, its file name without ending, and what it shows in words, for those who cannot see it."""

    name: str
    alt: str
    figure: Figure
    legend: tuple[Group, ...] = ()
    """Groups that the files need a legend for; the page has one for all its figures."""


@contextmanager
def looking_alike() -> Iterator[None]:
    """Give figures that are made and written inside the look of this report."""
    with mpl.rc_context(_RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the page's own fonts have what matplotlib's lack
        yield


def panel(title: str, *, height: float = 2.7, width: float = WIDTH) -> tuple[Figure, Axes]:
    """Return an empty figure of one panel."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    return figure, axes


def logarithmic(axes: Axes, which: Literal["x", "y"], written: str = "{x:g}") -> None:
    """Make one axis of a panel logarithmic, with ticks in plain numbers."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 50 * low else (1.0,)))
    axis.set_major_formatter(written)
    axis.set_minor_formatter(NullFormatter())


def short(name: str, length: int = 30) -> str:
    """Cut a name that a figure has no room for.

    >>> short("reptile+metavd", 8)
    'reptile…'
    """
    return name if len(name) <= length else name[: length - 1] + "…"


def marked(artist: Artist, group: Group, place: int) -> None:
    """Let the page know whose a drawn thing is, so that it can show one method alone."""
    artist.set_gid(f"group-{group.index}-{place}")


def slug(text: str) -> str:
    """Return a text as part of a file's name.

    >>> slug("reptile+metavd (beta=2.0)")
    'reptile+metavd-beta=2.0'
    """
    return re.sub(r"[^\w.+=]+", "-", text).strip("-.")[:60] or "unnamed"


def tag(group: Group) -> str:
    """Return a group's part of file names; numbered, because two names may have the same letters."""
    return f"{group.index + 1:02d}-{slug(group.name)}"


_UNSAID: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""What a file would say of the day and of the library's version: the same picture shall be the same bytes."""


def save(figure: Figure, path: Path, dpi: int) -> None:
    """Write a figure in the form that the file's ending names, the same bytes every time."""
    with mpl.rc_context({"svg.hashsalt": "metavd"}):
        figure.savefig(path, dpi=dpi, metadata=_UNSAID[path.suffix.lower()])


def publish(picture: Picture, folder: Path) -> str:
    """Write a figure to FOLDER/NAME.svg and NAME.png, and return it as SVG for the page."""
    _lay_out(picture.figure)
    plain = _svg(picture.figure)
    if picture.legend:
        _add_legend(picture.figure, picture.legend)
        _lay_out(picture.figure)
        write_atomic(folder / f"{picture.name}.svg", _svg(picture.figure))
    else:
        write_atomic(folder / f"{picture.name}.svg", plain)
    image = io.BytesIO()
    picture.figure.savefig(image, format="png", dpi=_DPI, metadata=_UNSAID[".png"])
    write_atomic(folder / f"{picture.name}.png", image.getvalue())
    return inline(plain, picture.name, picture.alt)


def _lay_out(figure: Figure) -> None:
    """Give every part its place now, once, instead of at each of the times that the figure is written."""
    figure.set_layout_engine("constrained")
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def _svg(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata=_UNSAID[".svg"])
    return out.getvalue()


def _add_legend(figure: Figure, groups: Sequence[Group]) -> None:
    handles = [
        Line2D([], [], color=g.look.colour, marker=g.look.marker, linestyle=g.look.dash, label=short(g.name, 24))
        for g in groups
    ]
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.2 * ((len(handles) + 1) // 2) + 0.1)
    figure.legend(handles=handles, loc="outside lower left", ncols=2)


def inline(svg: bytes, name: str, alt: str) -> str:
    """Return a figure as an SVG element of a page: own ids, the page's colours, no size but its proportions."""
    root = ET.fromstring(svg)
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _XLINK)
    used = set(re.findall(rb'(?:url\(|href=")#([^)"]+)', svg))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in {f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"}:
                parent.remove(child)
    for element in root.iter():
        identity = element.attrib.pop("id", "")
        if owner := re.fullmatch(r"group-(\d+)-\d+", identity):
            element.set("data-group", owner[1])
        elif identity.encode() in used:
            element.set("id", f"{name}-{identity}")
        for key, value in element.attrib.items():
            if key == f"{{{_XLINK}}}href" and value.startswith("#"):
                element.set(key, f"#{name}-{value[1:]}")
            elif key != f"{{{_XLINK}}}href":
                element.set(key, _here(value, name))
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib.update({"role": "img", "aria-label": alt, "class": "figure"})
    return ET.tostring(root, encoding="unicode")


def _here(value: str, name: str) -> str:
    """Translate one attribute: references to the new ids, colours of the theme to its variables."""
    value = value.replace("url(#", f"url(#{name}-")
    for colour, variable in _VARIABLES.items():
        value = value.replace(colour, variable)
    return value
