"""Chosen settings as files of the repository, one for each method, data, partition and way to deal test rows.

    results/tuned/cifar100-dirichlet-0.5-independent/reptile+metavd.toml

`metavd tune-all --page` writes them from its store. A file says what was chosen and, in comments, by how much; it is
also a configuration that `metavd run --config` takes. Under `--tuned` its choices are settings of a run, beside the
file's name (`KEY`), so that the store tells a tuned run from one at the defaults even where both are the same numbers.
Where there is no file for what is run, the nearest one is taken (`find`), and whoever takes it says so (`told`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import methods
from ..container import write_atomic
from ..data.collection import parse
from ..data.source import SourceError
from ..errors import SpecError
from ..runs.settings import SETTINGS, Experiment, from_toml, resolve, toml_value, with_settings
from .halving import chosen, distinct, is_default, near, ranges
from .lines import Line

FOLDER = Path("results/tuned")
KEY = "tuned"
"""In the settings of a store's line: the file that the run's options come from."""
_ABOUT = ("method", "data", "partition", "test_rows", "rounds")
"""What a file says of its study; everything else in it was chosen."""


@dataclass(frozen=True)
class Tuned:
    """What was chosen for a method."""

    name: str
    """Its file below the folder, such as cifar100-dirichlet-0.5-independent/fedavg.toml."""
    method: str
    data: str
    partition: str
    test_rows: str
    settings: Mapping[str, Any]
    """What was chosen, checked."""


def study_folder(data: str, partition: str, test_rows: str) -> str:
    """Name the folder of a study; of data in a file of one's own, wherever that lies, its name counts.

    >>> study_folder("cifar100", "dirichlet:0.5", "independent")
    'cifar100-dirichlet-0.5-independent'
    >>> study_folder("npz:somewhere/digits.npz", "natural", "consistent")
    'npz-digits-natural-consistent'
    """
    return "-".join(re.sub(r"[^\w.+=]+", "-", text) for text in (_data_name(data), partition, test_rows))


def _data_name(data: str) -> str:
    try:
        parts = parse(data)
    except SourceError:
        return data
    return "+".join("-".join(filter(None, (each.name, Path(each.path or "").stem))) for each in parts)


def write(lines: Sequence[Line], folder: Path) -> list[Path]:
    """Write what was chosen for every study and method of a store; return the files."""
    written = []
    for (study, method), best_first in chosen(lines).items():
        data, partition, test_rows = study.rsplit(" ", 2)
        everything = [line for line in lines if (line["study"], line["method"]) == (study, method)]
        path = folder / study_folder(data, partition, test_rows) / f"{method}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, _text((data, partition, test_rows), best_first, everything).encode())
        written.append(path)
    return written


def _text(study: tuple[str, str, str], best_first: Sequence[Line], everything: Sequence[Line]) -> str:
    top = best_first[0]
    parts = [100 * top[part]["accuracy"] for part in ("valid", "valid_unseen")]
    trials = len(distinct(everything))
    close, usual = near(best_first), ", the defaults" if is_default(top, everything) else ""
    values = dict(zip(_ABOUT, (top["method"], *study, top["of"]), strict=True))
    fields = {key: value for key, value in top["settings"].items() if key in SETTINGS}
    options = {key: value for key, value in top["settings"].items() if key not in SETTINGS}
    lines = [
        "# Chosen on validation rows and validation clients alone; written by metavd tune-all --page.",
        f"# score {100 * top['score']:.2f} % (participating {parts[0]:.2f}, validation clients {parts[1]:.2f}), "
        f"seed {top['seed']}, commit {top['commit']}",
        f"# the best of {trials} settings{usual}; {len(close)} of the "
        f"{len(best_first)} that were trained to the end are within 1 point: {ranges(close)}",
        *(f"{key} = {toml_value(value)}" for key, value in {**values, **fields}.items()),
        "",
        "[options]",
        *(f"{key} = {toml_value(value)}" for key, value in options.items()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def read(folder: str | Path) -> tuple[Tuned, ...]:
    """Return all that was chosen, or say which file is none of `write`'s."""
    return tuple(_read(path) for path in sorted(Path(folder).glob("*/*.toml")))


def _read(path: Path) -> Tuned:
    values = from_toml(path)
    if any(key not in values for key in _ABOUT):
        raise SpecError(f"{path} says not all of {', '.join(_ABOUT)}; metavd tune-all --page writes such files")
    method, data, partition, test_rows, _ = (str(values[key]) for key in _ABOUT)
    named = {key: value for key, value in values.items() if key not in _ABOUT}
    checked = with_settings(with_settings(Experiment(), {"method": method}), named)
    own = {key: checked.options[key] if key in checked.options else getattr(checked, key) for key in named}
    return Tuned(f"{path.parent.name}/{path.name}", methods.check(method), data, partition, test_rows, own)


def relatives(method: str) -> list[str]:
    """Return a method and those whose choices it takes where it has none of its own, the nearest first.

    >>> relatives("reptile+vd+drop")
    ['reptile+vd+drop', 'reptile+vd', 'reptile+metavd']
    """
    known = {name: entry.tuned_as for name, entry in methods.entries().items()}
    parts, names = method.split("+"), [method]
    while place := next((place for place in range(len(parts) - 1, 0, -1) if known[parts[place]] is not None), 0):
        parts[place : place + 1] = known[parts[place]] or ()
        names.append("+".join(parts))
    return names


def find(known: Sequence[Tuned], method: str, data: str, partition: str, test_rows: str) -> Tuned | None:
    """Return the nearest choice to what is asked for; None: nothing that was chosen is near.

    What comes first is the method (else one of its `relatives`), then the data (else one of those that are mixed), the
    way to deal test rows (else another), and the partition (else the one whose Dirichlet parameter is nearest).
    Settings that the method does not have are left out.
    """
    names, here = relatives(method), _data_name(data)
    there = [each for each in known if each.method in names and _data_name(each.data) in {here, *here.split("+")}]

    def distance(each: Tuned) -> tuple[Any, ...]:
        other_data = _data_name(each.data) != here
        return (names.index(each.method), other_data, each.test_rows != test_rows, _apart(each.partition, partition))

    if not there:
        return None
    nearest = min(there, key=distance)
    own = {*methods.options_of(method), *SETTINGS}
    return replace(nearest, settings={key: value for key, value in nearest.settings.items() if key in own})


def _apart(one: str, other: str) -> float:
    """Return how far partitions are from each other: of two Dirichlet parameters the difference of their logarithms."""
    if one == other:
        return 0.0
    alphas = [text.removeprefix("dirichlet:") for text in (one, other) if text.startswith("dirichlet:")]
    return abs(math.log(float(alphas[0]) / float(alphas[1]))) if len(alphas) == 2 else math.inf


def with_chosen(
    known: Sequence[Tuned], experiment: Experiment, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """Return settings of an experiment with what was chosen for it and the file's name, and a sentence that says so.

    A setting that both name is refused.
    """
    e = resolve(experiment)
    found = find(known, e.method, e.data, e.partition, e.test_rows)
    said = told_of(e.method, e.data, [e.partition], e.test_rows, found)
    if found is None:
        return dict(settings), said
    for key in found.settings:
        if key in settings:
            raise SpecError(
                f"{key} is set to {settings[key]!r}, but --tuned takes {key}={found.settings[key]} from {found.name}; "
                "leave one of the two out"
            )
    return {**settings, **found.settings, KEY: found.name}, said


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run without the name of the file that some come from."""
    return {key: value for key, value in settings.items() if key != KEY}


def told_of(method: str, data: str, partitions: Sequence[str], test_rows: str, found: Tuned | None) -> str:
    """Say what a method's options come from, in one sentence, for some partitions."""
    if found is None:
        return f"{method} on {data}, test rows {test_rows}: nothing was tuned for these, so its defaults"
    what = " ".join(f"{key}={value}" for key, value in found.settings.items())
    other = [found.method] if found.method != method else []
    other += [found.data] if _data_name(found.data) != _data_name(data) else []
    other += [found.partition] if list(partitions) != [found.partition] else []
    other += [f"test rows {found.test_rows}"] if found.test_rows != test_rows else []
    chosen_for = f", chosen for {', '.join(other)}" if other else ""
    return f"{method} on {data}, {', '.join(partitions)}: {what} from {found.name}{chosen_for}"


def label(settings: Mapping[str, Any]) -> str:
    """Return how tables call a run: its method, and whether its settings are tuned ones."""
    return str(settings["method"]) + (" (tuned)" if KEY in settings else "")
