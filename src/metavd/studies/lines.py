"""A file of finished runs, one JSON line each: what was asked, what came out, and where it was made.

    id         16 hex digits that name what was asked, see `identity`
    scope      under which rules the result was taken; lines of another scope are not read
    seed, settings
               what was asked, every option of the method included
    date, device, precision, machine, commit, spec, versions
               where the line was made; what is not known of an old line is missing or null
    result     the figures that are kept, or, in their place,
    failed     the sentence with which the run ended, for a run that diverged

A crash may leave half a line behind. It stays by itself: neither the lines before it nor those after it are lost.
Several processes may append to one file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import methods
from ..runs.settings import SETTINGS
from ..runs.store import StoreError

Line = dict[str, Any]


def complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add the default of every option, so that neither a dataset's presets nor a later default goes unnoticed.

    Fields have their own types, so that 100 clients of a command line are 100 clients.

    Settings without a method have no options: they are about data alone.
    """
    if "method" not in settings:
        return dict(settings)
    known = methods.options_of(settings["method"])
    given = {key: value for key, value in settings.items() if key in known}
    fields = {
        key: SETTINGS[key].check(value) if key in SETTINGS else value
        for key, value in settings.items()
        if key not in known
    }
    return fields | methods.resolve(settings["method"], given)


def identity(settings: Mapping[str, Any], scope: str = "") -> str:
    """Return 16 hex digits that name what a run computes, and under which rules its result is taken."""
    what = {"scope": scope, "settings": complete(settings)}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def rows(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each line of a file; None where a line is no JSON, such as half of one.

    A file none of whose lines even begins like one of ours is somebody's other file, which must not be added to.
    """
    file = Path(path)
    try:
        found = file.read_bytes().split(b"\n") if file.exists() else []
    except OSError as error:
        raise StoreError(f"cannot read the store {file}: {error.strerror}") from None
    if any(map(bytes.strip, found)) and not any(row.startswith(b"{") for row in found):
        raise StoreError(f"{file} holds no JSON line; name stores of metavd, such as results/arena.jsonl")
    for number, row in enumerate(found, 1):
        if row.strip():
            try:
                value = json.loads(row)
            except ValueError:
                value = None
            yield number, value


def read(path: str | Path, scope: str = "", note: Callable[[str], None] | None = None) -> dict[str, Line]:
    """Return the lines of a scope by identity, the latest of each; what cannot be used is noted and left out.

    The identity is computed anew: a line holds the value of every option there was when it was made. A changed default
    is therefore another run, while an option that was added since counts at its default, which by the rule of this
    project changes no number.
    """
    lines: dict[str, Line] = {}
    for number, line in rows(path):
        try:
            whole = line["scope"] == scope and ("failed" in line) != ("result" in line) and bool(line["settings"])
            name = identity(line["settings"], scope) if whole else ""
        except (ValueError, TypeError, KeyError, AttributeError):  # a UserError is a ValueError
            name = ""
        if name:
            lines[name] = line
        elif note is not None:
            rules = f" of scope {scope}" if scope else ""
            note(f"line {number} of {path} is not a whole result{rules} and is left out")
    return lines


def stands(line: Line | None, *, retry: bool) -> bool:
    """Whether a store's line makes it needless to carry out its run; `retry` counts those that failed as lacking."""
    return line is not None and not (retry and "failed" in line)


def append(path: str | Path, line: Mapping[str, Any]) -> None:
    """Add one line, which is safe on the disk when this returns."""
    file = Path(path)
    data = json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab+") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)  # another process's half-written line must not pass for a broken one
            end = opened.seek(0, os.SEEK_END)
            if end:
                opened.seek(end - 1)
                data = data if opened.read(1) == b"\n" else b"\n" + data
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        raise StoreError(f"cannot write to the store {file}: {error.strerror}") from None
