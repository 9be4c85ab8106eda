"""Write docs/methods.md, and the table in docs/figures.md, from what methods, settings and figures say of themselves.

With --check nothing is written, and the exit status is 1 if a page on disk differs.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from metavd import arrays, methods
from metavd.data.collection import collect
from metavd.errors import SpecError
from metavd.evaluate.figures import OWN
from metavd.runs import settings as spec
from metavd.schema import Option

ROOT = Path(__file__).resolve().parent.parent
PAGE, FIGURES = ROOT / "docs" / "methods.md", ROOT / "docs" / "figures.md"
MARKS = (
    "<!-- figures: written by scripts/write_docs.py from src/metavd/evaluate/figures.py -->\n",
    "<!-- end of figures -->",
)
"""What stands around the table of figures."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def shown(value: object) -> str:
    """Return a value as a person writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def allowed(option: Option) -> str:
    """Return what an option may be."""
    if option.allowed is not None:
        return " or ".join(option.allowed)
    if option.low is None:
        return "text" if isinstance(option.default, str) else ""
    return f"{option.low:g} to {option.high:g}" if option.high is not None else f"{option.low:g} or more"


def searched(option: Option) -> str:
    """Return the values that are searched, by default or where asked for; many even steps as a range."""
    if option.offered:
        return f"if asked: {', '.join(f'{value:g}' for value in option.offered)}"
    values = option.search or ()
    steps = {round(b - a, 9) for a, b in pairwise(values)}
    if len(values) > 6 and len(steps) == 1:
        return f"{values[0]:g} to {values[-1]:g}, step {steps.pop():g}"
    return ", ".join(f"{value:g}" for value in values)


def whose(names: Sequence[str], every: Sequence[str]) -> str:
    """Return who has an option, in few words."""
    others = [name for name in every if name not in names]
    if not others:
        return "all"
    return f"all but {', '.join(others)}" if len(others) < 3 and len(names) > 3 else ", ".join(names)


def options(*kinds: Any) -> str:
    """Return one row for each option and default, with the parts of methods that have it."""
    parts = [entry for kind in kinds for entry in methods.entries(kind).values()]
    rows: dict[tuple[str, ...], list[str]] = {}
    for part in parts:
        for option in part.options.values():
            key = (f"`{option.name}`", shown(option.default), option.help, allowed(option), searched(option))
            rows.setdefault(key, []).append(part.sign)
    every = [part.sign for part in parts]
    body = [[*key[:2], whose(names, every), *key[2:]] for key, names in rows.items()]
    return table(["option", "default", "of", "meaning", "may be", "searched"], body)


def presets() -> str:
    """Return what each variant changes."""
    variants = [variant for variant in methods.VARIANTS if variant != "default"]
    rows: dict[tuple[str, ...], list[str]] = {}
    for part in methods.entries().values():
        for option in part.options.values():
            if option.presets:
                given = (shown(option.presets.get(variant, option.default)) for variant in variants)
                rows.setdefault((f"`{option.name}`", shown(option.default), *given), []).append(part.sign)
    return table(["option", "default", *variants, "of"], [[*key, ", ".join(names)] for key, names in rows.items()])


def settings() -> str:
    """Return the settings of an experiment, with what they are if nobody says anything."""
    own = collect(arrays(np.zeros((2000, 1), np.float32), np.arange(2000) % 2))
    given = spec.Experiment(device="cpu")
    digits, mine = spec.resolve(given), spec.resolve(given, own.defaults)
    rows = []
    for name, setting in spec.SETTINGS.items():
        cells = [shown(getattr(e, name)) for e in (digits, mine)]
        if name in {"device", "backend"}:
            cells = ["auto", "auto"]
        elif name == "data":
            cells = ["digits", ""]
        rows.append([f"`{name}`", *cells, setting.help])
    return table(["setting", "on digits", "on 2,000 rows of your own", "meaning"], rows)


def listed() -> str:
    """Return all methods with what they are and where they come from."""
    about: list[dict[str, Any]] = [methods.describe(name) for name in methods.NAMES]
    papers = ("; ".join(dict.fromkeys(each["paper"].split("; "))) for each in about)
    rows = ([f"`{each['name']}`", each["text"], paper] for each, paper in zip(about, papers, strict=True))
    return table(["method", "what it is", "paper"], rows)


def with_trait(trait: str) -> str:
    """Return the parts that give what others need."""
    return ", ".join(f"`{entry.sign}`" for entry in methods.entries().values() if trait in entry.gives)


def together() -> str:
    """Return which parts go with which base, as the catalogue decides it, and what newcomers get."""
    parts = [each for kind in ("regulariser", "extra") for each in methods.entries(kind).values()]

    def goes(base: str, part: str) -> str:
        named = [base, part]
        needed = methods.entries()[part].needs
        if needed not in {"", *methods.entries()[base].gives} and needed != methods.REGULARISABLE:
            giver = next((each.name for each in methods.entries("regulariser").values() if needed in each.gives), None)
            named = [base, *([giver] if giver else []), part]
        try:
            methods.check("+".join(named))
        except SpecError:
            return ""
        return "yes"

    rows = [
        [f"`{each.name}`", *(goes(each.name, part.name) for part in parts), each.newcomer]
        for each in methods.entries("base").values()
    ]
    return table(["base", *(f"`{part.sign}`" for part in parts), "a client that never took part"], rows)


def parts() -> str:
    """Return the parts that names are made of, with what each is."""
    every = methods.entries().values()
    return table(["", "part", "what it is"], ([each.kind, f"`{each.sign}`", each.text] for each in every))


def page() -> str:
    """Return the whole page."""
    bases, regularisers, extras = (methods.entries(kind).values() for kind in ("base", "regulariser", "extra"))
    return f"""# Methods and their options

Written by `python scripts/write_docs.py` from what the methods in `src/metavd/methods/` and the settings in
`src/metavd/runs/settings.py` say of themselves; do not edit by hand. `metavd methods NAME` shows the options of one
method, `metavd methods --json` everything, for programs.

## The names

    base[+regulariser][+option]

- One base: {", ".join(f"`{each.name}`" for each in bases)}.
- At most one regulariser, {", ".join(f"`{each.sign}`" for each in regularisers)},
  on {with_trait(methods.REGULARISABLE)}.
{chr(10).join(f"- `{each.sign}` after {with_trait(each.needs)}." for each in extras)}

{parts()}
What goes with what, and what a client gets that never took part:

{together()}
The {len(methods.NAMES)} methods that are listed, and that the tests run by name:

{listed()}
## Options of the bases

Set one with `--set lr=0.01`, in a configuration file, or by name in Python: `metavd.run(method="reptile", lr=0.01)`.
A dataset may bring defaults of its own, see `metavd datasets`.

{options("base")}
## Options of the regularisers

{options("regulariser", "extra")}
## Presets: the paper's values, the released code's rules

`variant=paper` takes our rules with the values that the paper and its code state, where validation chose others for our
defaults ([tuned.md](tuned.md)); `variant=released` takes the released code's rules and values. Each sets the options
below, each method those that it has; an option that is given by name goes first. What stays different from the released
code is in [differences.md](differences.md).

{presets()}
## Settings of an experiment

Beside the method's options, every run has these settings, given in the same way.

{settings()}"""


def measured() -> str:
    """Return the figures of a result, with how they are taken over clients and how to read them."""
    rows = [
        [
            f"**`{each.name}`**" if each.client else f"`{each.name}`",
            each.unit,
            each.better,
            each.pool.says,
            each.help + (f"; {each.more}" if each.more else ""),
        ]
        for each in OWN
    ]
    return table(["figure", "unit", "better", "over clients", "how to read it"], rows)


def figures() -> str:
    """Return the page of figures with its table as the registry has it."""
    before, start, rest = FIGURES.read_text(encoding="utf-8").partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not end:
        raise SystemExit(f"docs/figures.md has lost the marks around its table: {' and '.join(MARKS)}")
    return before + start + measured() + end + after


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the pages; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    pages = {PAGE: page(), FIGURES: figures()}
    if not parser.parse_args(argv).check:
        for path, text in pages.items():
            path.write_text(text, encoding="utf-8")
        return 0
    status = 0
    for path, text in pages.items():
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        sides = old.splitlines(), text.splitlines()
        for line in difflib.unified_diff(*sides, "on disk", "from the code", lineterm="", n=0):
            print(line, file=sys.stderr)
        if old != text:
            name = path.relative_to(ROOT)
            print(f"{name} is out of date: run python scripts/write_docs.py", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
