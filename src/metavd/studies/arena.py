"""The arena: many methods on equal terms, where test rows are dealt apart from training rows and where they are not.

A run is one line in a store (see `lines`), so that slices of one machine and another come together, and the page is
written from the store alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from ..data.collection import parse
from ..data.formats import FORMATS
from ..errors import SpecError
from ..evaluate.conformal import METHODS
from ..evaluate.figures import SECONDS, SENT, Cell, Column, get
from ..methods import NAMES, options_of, resolve
from ..runs.settings import RUNTIME, SETTINGS, Experiment, with_settings
from ..schema import meant
from ..templates import filled
from .lines import Line, complete, read
from .many import Ended, carry_out
from .markdown import markdown_table
from .pairs import pair
from .paper.digest import digested
from .tuned import KEY, label, plain, with_chosen
from .tuned import read as tuned_files

SCOPE = "arena"
BEST = (
    "fedavg", "fedavg+dropout", "fedavg+metavd",
    "reptile", "reptile+dropout", "reptile+metavd", "reptile+prior", "reptile+dropout+prior",
    "maml", "maml+dropout", "maml+metavd",
    "pfedvem", "pfedfda", "ditto", "fedbabu", "feddbe",
)  # fmt: skip
"""The sixteen methods that matter most, `metavd arena best`: three bases plain, with fixed and with learned dropout
rates; what label shares add to the best base; and the rivals that gain where test rows have the client's own labels.
PerFedAvg is left out because it approximates MAML and stays below it."""
PUBLISHED = {
    "fedavg": "28.0", "perfedavg": "35.3", "fedrep": "29.7", "fedbabu": "39.4", "ditto": "26.3", "fedala": "44.2",
    "feddbe": "52.6",
}  # fmt: skip
"""Accuracies that others report for CIFAR-100, Dirichlet 0.5: PFLlib's board. Its setting is another one: 20 clients,
all in every round, 2,000 rounds of one pass with batches of 10, consistent rows, the best round on test rows."""


AUROC = Column("AUROC unknown", ("trust", "unknown", "test", "entropy", "auroc"), 1.0, 3, 1)


def size_of_sets(kind: str) -> Column:
    """Return how many classes the sets of one of `conformal.METHODS` hold."""
    return Column(f"{kind.upper()} size", ("trust", "sets", "test", kind, "size"), 1.0, 2, -1)


def columns() -> list[Column]:
    """Return the figures of the page."""
    accuracy, tenth = get("accuracy"), get("percentile_10")
    return [
        *(accuracy.column(part, heading=part) for part in ("test", "unseen")),
        *(Column(f"{part} last five %", ("last", f"{part}.accuracy"), 100.0) for part in ("test", "unseen")),
        *(tenth.column(part)._replace(title=f"{part} worst tenth %") for part in ("test", "unseen")),
        *(get(name).column("test", heading="test") for name in ("nll", "ece_top1")),
        Column("LAC covered %", ("trust", "sets", "test", "lac", "covered"), 100.0),
        *map(size_of_sets, METHODS),
        AUROC,
        Column("FPR95 unknown %", ("trust", "unknown", "test", "entropy", "fpr95"), 100.0, 1, -1),
        SENT,
        SECONDS,
    ]


_ASIDE = RUNTIME - {"weights"} | {
    "method", "seed", "content", "weights_content", "data", "partition", "test_rows", "rounds", "clients"
}  # fmt: skip
"""Settings that do not tell one table from another, and those that a table's title always names."""
Key = tuple[str, str, int]
"""Method, protocol and seed."""


class Lineup(NamedTuple):
    """What is to be run; `lineup` makes one and checks it."""

    tasks: dict[Key, dict[str, Any]]
    where: dict[str, Any]
    """Settings that say where runs are carried out, and change no number."""
    told: tuple[str, ...]
    """Where tuned settings come from, a sentence for each method and protocol."""


def lineup(
    names: Sequence[str],
    settings: Mapping[str, Any],
    *,
    protocols: Sequence[str],
    seeds: int = 1,
    unknown: str | None = None,
    tuned: str | Path | None = None,
) -> Lineup:
    """Return what is to be run, or say in one sentence what is wrong with it.

    Args:
        names: methods; the one word "all" or "best" stands for several.
        settings: of the experiment, and options of methods; what only some methods know is for those.
        protocols: how test rows are dealt; every method runs under each.
        seeds: how many of each, from the settings' seed on.
        unknown: another dataset, which clients are to know for unknown.
        tuned: a folder of tuned settings, see `tuned`.
    """
    several: dict[tuple[str, ...], Sequence[str]] = {("all",): NAMES, ("best",): BEST}
    names = several.get(tuple(names), names)
    _check(names, settings, unknown)
    chosen = None if tuned is None else tuned_files(tuned)
    where = {key: value for key, value in settings.items() if key in RUNTIME - {"weights"}}
    rest = {key: value for key, value in settings.items() if key not in {"method", "seed", *where}}
    first = int(settings.get("seed", 0))
    tasks: dict[Key, dict[str, Any]] = {}
    told: list[str] = []
    for name, protocol in product(names, protocols):
        own = {key: value for key, value in rest.items() if key in SETTINGS or key in options_of(name)}
        asked = with_settings(Experiment(), {**own, **where, "method": name, "test_rows": protocol})
        if chosen is not None:
            own, said = with_chosen(chosen, asked, own)
            told.append(said)
        whole = own | {"method": name, "test_rows": protocol}
        tasks |= {(name, protocol, seed): {**whole, "seed": seed} for seed in range(first, first + seeds)}
    return Lineup(tasks, where, tuple(told))


def _check(names: Sequence[str], settings: Mapping[str, Any], unknown: str | None) -> None:
    """Refuse data that there are not and what none of the methods knows."""
    for text in filter(None, (settings.get("data"), unknown)):
        parse(text)
    known = {**SETTINGS, **{key: each for name in names for key, each in options_of(name).items()}}
    for key in settings:
        if names and key not in known:
            raise SpecError(
                f"no setting and no option of {', '.join(names[:3])} is called {key!r}; {meant(key, known)}"
            )


def carry(
    wanted: Mapping[Key, Mapping[str, Any]],
    *,
    where: Mapping[str, Any],
    look: Callable[[Path], Mapping[str, Any]] | None = None,
    **how: Any,
) -> Iterator[Ended[Key]]:
    """Run what the store lacks; yield each run as it ends. See `many.carry_out` for `how`, `digested` for the rest."""
    work_of = partial(digested, where=where, look=look)
    return carry_out(wanted, work_of, scope=SCOPE, device=str(where.get("device", "auto")), **how)


def page(store: Path) -> str:
    """Write the tables of all that the store holds, one for every data, partition and protocol."""
    lines = list(read(store, SCOPE).values())
    tables = [
        (title, _table(methods, published=title.startswith("cifar100,"))) for title, methods in grouped(lines).items()
    ]
    return filled("arena.md", servers=told_servers(lines), tables=tables)


def grouped(lines: Iterable[Line]) -> dict[str, dict[str, list[Line]]]:
    """Return runs by what those of a table share, and by what tables call them."""
    groups: dict[str, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        groups[setting_of(line)][name_of(line)].append(line)
    return dict(sorted(groups.items()))


def told_servers(lines: Iterable[Line]) -> str:
    """Say of which bases the server has momentum, by the runs' own settings; nothing where all have the same."""
    bases: dict[float, set[str]] = defaultdict(set)
    for line in lines:
        settings = complete(plain(line["settings"]))
        bases[settings["server_momentum"]].add(settings["method"].split("+")[0])
    if len(bases) < 2:
        return ""
    *fewer, most = sorted(bases, key=lambda momentum: len(bases[momentum]))
    some = "; ".join(
        f"of {momentum:g}: {', '.join(f'`{name}`' for name in sorted(bases[momentum]))}" for momentum in fewer
    )
    return (
        f"Servers differ. Momentum {some} (with whatever is added to them); of {most:g}: all others. With momentum m "
        "the server's steps in a lasting direction grow up to 1/(1 - m) times, so that part of a difference between "
        "the two may be the server's, not the method's."
    )


def name_of(line: Line) -> str:
    """Return how tables call a run: its method, whether it is tuned, and else every option that is no default now."""
    settings = line["settings"]
    usual = {} if KEY in settings else resolve(str(settings["method"]))
    other = (f"{key}={settings[key]:g}" if isinstance(settings[key], float) else f"{key}={settings[key]}"
             for key, value in usual.items() if settings.get(key, value) != value)  # fmt: skip
    return " ".join([label(settings), *other])


def setting_of(line: Line) -> str:
    """Return what the runs of a table share, as its title; what has the dataset's default is not named."""
    e = with_settings(Experiment(), plain(line["settings"]))
    counts = [(e.rounds, "rounds"), (e.clients, "clients")]
    name = e.data.partition(":")[0]
    suits = FORMATS[name].defaults if name in FORMATS else {}
    usual = {key: (each.default, suits.get(key, each.from_data)) for key, each in SETTINGS.items()}
    rest = {key: getattr(e, key) for key in SETTINGS if key not in _ASIDE}
    words = [
        e.data, e.partition, e.test_rows, *(f"{count:g} {name}" for count, name in counts if count),
        *(f"{key} {value}" for key, value in rest.items() if value not in usual[key]),
    ]  # fmt: skip
    return ", ".join(filter(None, words))


def _table(methods: Mapping[str, Sequence[Line]], *, published: bool) -> str:
    found = {name: [line["result"] for line in lines if "result" in line] for name, lines in methods.items()}
    every = [result for results in found.values() for result in results]
    shown = [each for each in columns() if each.path[0] != "trust" or each.values(every)]
    rows = {method: [column.cell(results) for column in shown] for method, results in found.items()}
    best = [_best(column, [row[i] for row in rows.values()]) for i, column in enumerate(shown)]
    order = sorted(rows, key=lambda name: -(rows[name][0] or (-1.0, None))[0])
    to_first = {part: {name: pair(methods[name], methods[order[0]], part) for name in order[1:]}
                for part in ("test", "unseen")}  # fmt: skip
    compared = [part for part, found in to_first.items() if any(found.values())]
    more = [*(f"{part}, to the first row" for part in compared), *(["published"] if published else []), "seeds"]
    head = ["method", *(column.title for column in shown), *more]
    lines = []
    for method in order:
        cells = [_cell(*each) for each in zip(shown, rows[method], best, strict=True)]
        cells += [str(to_first[part].get(method) or "") for part in compared]
        cells += [PUBLISHED.get(method.split()[0], "")] if published else []
        used = [str(line["seed"]) for line in methods[method]]
        cells += [f"{'seeds' if len(used) > 1 else 'seed'} {', '.join(used)}"]
        lines.append([f"`{method}`", *cells])
    return "\n".join(markdown_table(head, lines))


def _best(column: Column, values: Sequence[Cell]) -> float | None:
    known = [value[0] for value in values if value is not None]
    if not known or not column.better:
        return None
    return max(known) if column.better > 0 else min(known)


def _cell(column: Column, value: Cell, best: float | None) -> str:
    text = column.text(value, "" if column.path[0] == "trust" else "diverged")
    return f"**{text}**" if value is not None and value[0] == best else text
