"""Shakespeare by role: predict the next character, roles as clients, an LSTM; beside two tables of counts.

    python scripts/shakespeare.py --file shakespeare_by_role.jsonl --page docs/shakespeare.md

The file has lines {"client": ROLE, "text": SPEECH}. Finished runs are kept in results/shakespeare.jsonl, one by one,
and not run again; without --file the page is written from them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tables import reading, stored

from metavd import run
from metavd.cli.terminal import Reporter
from metavd.data.partition import Federation
from metavd.engine.rounds import Listener
from metavd.evaluate.metrics import ClientResult, summarize
from metavd.runs.settings import Experiment, with_settings
from metavd.runs.setup import data_of, prepare
from metavd.studies.lines import Line, read
from metavd.studies.many import carry_out, taken
from metavd.studies.markdown import markdown_table, write

STORE, SCOPE = Path("results/shakespeare.jsonl"), "roles"
RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg"},
    "reptile": {"method": "reptile"},
    "reptile+metavd": {"method": "reptile+metavd", "variant": "paper"},
    "reptile+metavd beta=0.25": {"method": "reptile+metavd", "beta": 0.25},
}
"""The last has beta x lr as in the paper, 10 x 0.02."""
DATA = {"task": "next-character", "length": 20, "stride": 8, "least": 250}
SETTINGS = {"rounds": 30, "lr": 0.8, "batch": 16, "local_epochs": 1, "width": 48, "eval_every": 15}
"""The rate is LEAF's for this task; nothing was searched."""
WORDS = ",".join(f"{key}={value}" for key, value in DATA.items())
TASKS: dict[str, dict[str, Any]] = {
    name: {"data": f"text:shakespeare_by_role.jsonl,{WORDS}", "seed": 0, **settings}
    for name, settings in {
        "most frequent character": {"counted": "frequencies"},
        "table of pairs": {"counted": "pairs"},
        **{name: SETTINGS | own for name, own in RUNS.items()},
    }.items()
}
PARTS = ("test", "unseen")
_HEADS = ("", "accuracy %, participating", "unseen", "NLL, participating", "unseen", "worst role %, participating",
          "unseen", "CPU s")  # fmt: skip


def counted(federation: Federation, *, last: bool) -> dict[str, Any]:
    """Return the figures of a table of counts: the classes' frequencies, or (`last`) those after the last character.

    Counts are of all participating clients' training rows. A pair's counts begin with the frequencies, as if one more
    row had been seen after each character.
    """
    x, y, classes = np.asarray(federation.source.x), federation.source.y, federation.source.num_classes
    rows = np.concatenate(federation.train[: federation.num_clients])
    share = np.bincount(y[rows], minlength=classes) / len(rows)
    share = (share + 1e-6) / (share + 1e-6).sum()  # a character of test rows alone is no surprise without end
    counts = np.tile(share, (federation.source.tokens, 1))
    if last:
        np.add.at(counts, (x[rows, -1], y[rows]), 1.0)
    table = counts / counts.sum(1, keepdims=True)
    results = [
        ClientResult(client, len(federation.train[client]), table[x[test, -1]], y[test])
        for client, test in enumerate(federation.test)
    ]
    known = federation.num_clients
    return {"test": summarize(results[:known]), "unseen": summarize(results[known:])}


def measured(file: Path, settings: dict[str, Any], folder: Path, listener: Listener) -> dict[str, Any]:  # noqa: ARG001
    """Carry out one run, or count; see `metavd.studies.many.Work`. A run that was stopped begins anew, for its time."""
    what = settings.pop("counted", None)
    e = with_settings(Experiment(), settings | {"data": f"text:{file},{WORDS}"})
    data = data_of(e)
    federation = prepare(e, data).pool.federation
    sizes = [len(each) for each in federation.train]
    about = {"sizes": [min(sizes), int(np.median(sizes)), max(sizes)], "classes": federation.source.num_classes}
    if what is not None:
        return {"device": "cpu", "result": _row(counted(federation, last=what == "pairs")) | about}
    began = time.process_time()
    result = run(e, source=data, listener=listener)
    return taken(result, _row(dict(result) | {"cpu_seconds": time.process_time() - began}) | about)


def _row(found: dict[str, Any]) -> dict[str, Any]:
    figures = {
        part: {key: found[part][key] for key in ("clients", "accuracy", "nll", "worst_client")} for part in PARTS
    }
    return figures | {key: found.get(key) for key in ("seconds", "cpu_seconds", "model_sha256")}


def page(lines: Mapping[str, Line]) -> str:
    """Return the document."""
    rows, made = {name: line["result"] for name, line in lines.items()}, lines["fedavg"]
    (least, median, most), classes = rows["fedavg"]["sizes"], rows["fedavg"]["classes"]
    known, unseen = (rows["fedavg"][part]["clients"] for part in PARTS)
    spent = sum(row["cpu_seconds"] or 0 for row in rows.values())
    settings = " ".join(f"{key}={value}" for key, value in SETTINGS.items() if key != "rounds")

    def line(name: str) -> list[str]:
        row = rows[name]
        cells = [f"{100 * row[part]['accuracy']:.1f}" for part in PARTS] + [f"{row[part]['nll']:.2f}" for part in PARTS]
        cells += [f"{100 * row[part]['worst_client']:.1f}" for part in PARTS]
        cells.append("" if row["cpu_seconds"] is None else f"{row['cpu_seconds']:.0f}")
        return [f"`{name}`" if name in RUNS else name, *cells]

    table = "\n".join(markdown_table(_HEADS, [line(name) for name in rows]))
    options = " ".join(f"{key}={value}" for key, value in DATA.items())
    return f"""# Shakespeare by role

Predict the next of {classes} characters from the {DATA["length"]} before it. A client is a role of
the plays, with {least} to {most:,} training rows (median {median}): every {DATA["stride"]}th character of
its speeches, the last fifth of them for testing. {known} roles take part, ten in a round; {unseen} never
do. The network is `lstm`.

{table}

*Most frequent character* and *table of pairs* (how often a character follows another) are counted on the
training rows of all participating roles together: what a model must beat. One seed. The rate is LEAF's for
this task, forty times our default; nothing was searched. At it `reptile+metavd` does not learn: its NLL is
above that of the frequencies, with the paper's `beta=10` and with `beta=0.25`, which has beta times rate as
in the paper. Smaller rates were not tried.

```sh
python scripts/shakespeare.py --file shakespeare_by_role.jsonl --page docs/shakespeare.md
metavd compare fedavg reptile reptile+metavd --seeds 1 --out runs/roles --data text:shakespeare_by_role.jsonl \
--rounds {SETTINGS["rounds"]} --set variant=paper {settings} {options}
```

Written from `results/shakespeare.jsonl` by the first command; the second makes the first three runs, for
`metavd report runs/roles`. {spent:.0f} CPU seconds for all runs on one core, beside other work;
{made["machine"]}, torch {made["versions"]["torch"]}, commit {made["commit"]}.
"""


def main() -> None:
    """Run what is asked for, and write the page."""
    parser = reading(__doc__)
    parser.add_argument("--file", type=Path, help="the speeches; without it nothing is run")
    parser.add_argument("--page", type=Path, help="document to write")
    given = parser.parse_args()
    if given.file:
        work = partial(measured, given.file)
        for ended in carry_out(TASKS, work, store=STORE, scope=SCOPE, work=Path("runs/shakespeare"), strict=True,
                               listener=Reporter()):  # fmt: skip
            print(f"{ended.end}: {ended.key}")
    if given.page:
        lines = stored(TASKS, read(STORE, SCOPE, print), SCOPE)
        if len(lines) < len(TASKS):
            parser.error(f"{STORE} holds {len(lines)} of {len(TASKS)} runs; give --file for the rest")
        write(given.page, page(lines))


if __name__ == "__main__":
    main()
