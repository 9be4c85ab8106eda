"""Join what several machines have run: stores of JSON lines, or folders of runs.

The same run has the same figures wherever it was made, but for the seconds that it took; a pair that differs is named
and left as it is.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError
from ..runs.settings import Experiment, from_toml, spec_hash, with_settings
from ..runs.store import Store
from .lines import Line, append, rows

_MADE = frozenset({"date", "device", "machine", "commit", "versions", "version", "torch", "python", "seconds", "spec"})
"""What may differ between two lines, or results, of one run: where, when and in what time it was made."""
_ASKED = ("id", "scope", "study", "method", "trial", "settings", "options", "fields", "round", "of", "seed")
"""What names a line: its id, or, of a rung of tuning, what was tried."""
_OTHER_FIGURES, _OTHER_RUN = "the same run, other figures", "another run is at that place"


class Merged(NamedTuple):
    """What came of it."""

    added: int
    same: int
    differ: list[str]
    """What `into` kept as it was, each with the reason."""


def merge(into: Path, others: Sequence[Path]) -> Merged:
    """Add to one store, or folder of runs, what others hold."""
    for other in others:
        if not other.exists():
            raise UserError(f"{other} is not there; name stores (files of JSON lines) or folders of runs")
    kinds = {path.is_dir() for path in (into, *others) if path.exists()}
    if len(kinds) > 1:
        raise UserError(f"{into} and {', '.join(map(str, others))} are files and folders; merge one kind")
    return _folders(into, others) if others[0].is_dir() else _stores(into, others)


def _joined(
    there: dict[str, Any], new: Iterable[tuple[str, Any]], add: Callable[[str, Any], None],
    reason: Callable[[Any, Any], str] = lambda *_: _OTHER_FIGURES,
) -> Merged:  # fmt: skip
    """Add what is new; `there` and `new` are what must agree of a run, by name, and `reason` says why they do not."""
    added = same = 0
    differ = []
    for name, what in new:
        if name not in there:
            add(name, what)
            there[name] = what
            added += 1
        elif _figures(there[name]) == _figures(what):
            same += 1
        else:
            differ.append(f"{name}: {reason(there[name], what)}")
    return Merged(added, same, differ)


def _figures(value: Any) -> Any:
    """Return what two makings of one run have in common."""
    if isinstance(value, Mapping):
        return {key: _figures(each) for key, each in value.items() if key not in _MADE}
    return [_figures(each) for each in value] if isinstance(value, list) else value


def _stores(into: Path, others: Sequence[Path]) -> Merged:
    def lines(path: Path) -> list[tuple[str, Line]]:
        return [(_name(line), line) for _, line in rows(path) if isinstance(line, dict)]

    there = dict(lines(into)) if into.exists() else {}
    new = [line for other in others for line in lines(other)]
    return _joined(there, new, lambda _, line: append(into, line))


def _name(line: Line) -> str:
    asked = {key: line[key] for key in _ASKED if key in line}
    method = asked.get("method") or asked.get("settings", {}).get("method", "a run")
    return f"{method}, seed {asked.get('seed')}, {asked.get('id') or json.dumps(asked, sort_keys=True)}"


def _folders(into: Path, others: Sequence[Path]) -> Merged:
    ours = _runs(into)
    there = {name: _held(store) for name, store in ours.items() if store.result.exists()}
    sources: dict[str, Path] = {}
    new, foreign = [], []
    for other in others:
        for name, store in _runs(other).items():
            if not store.result.exists():
                continue
            what = _held(store)
            if name in ours and name not in there and _spec(ours[name]) != what[0]:
                foreign.append(f"{name}: {_OTHER_RUN}")
                continue
            sources.setdefault(name, store.folder)
            new.append((name, what))
    merged = _joined(
        there, new, lambda name, _: _copy(sources[name], into / name),
        lambda mine, theirs: _OTHER_FIGURES if mine[0] == theirs[0] else _OTHER_RUN,
    )  # fmt: skip
    return merged._replace(differ=[*foreign, *merged.differ])


def _runs(root: Path) -> dict[str, Store]:
    """Return the runs below a folder, finished or not, by their place."""
    return {str(path.parent.relative_to(root)): Store(path.parent) for path in root.rglob("config.toml")}


def _held(store: Store) -> list[Any]:
    """Return the spec and the result of a finished run."""
    result = store.read_result()
    return [result["spec"], result]


def _spec(store: Store) -> str:
    """Return the spec of a run that has only begun."""
    return spec_hash(with_settings(Experiment(), from_toml(store.config)))


def _copy(folder: Path, to: Path) -> None:
    """Copy a run's folder as a whole; an unfinished one of the same run gives way."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent, prefix=".merge-") as scratch:
        copy = Path(scratch) / "run"
        shutil.copytree(folder, copy)
        if to.exists():
            to.rename(Path(scratch) / "unfinished")
        copy.rename(to)
