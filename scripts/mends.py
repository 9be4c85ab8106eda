"""What validation says of the mends of MetaVD: each option beside the rule that it would replace.

    python scripts/mends.py --root DIR [--jobs 4]        run what the store lacks, on a GPU
    python scripts/mends.py --page                       write docs/mends.md from the store

A run is one line of results/mends.jsonl: the tuned settings of a method (results/tuned), one option changed, trained on
a sealed federation, in which nobody holds a test row and there is no unseen client. Figures are those of `metavd
tune-all`: validation rows of clients that train, and clients that are only ever validated on.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tables import made_on, reading, stored

from metavd.engine.rounds import Listener
from metavd.runs.settings import Experiment, spec_hash, with_settings
from metavd.studies.halving import stretch
from metavd.studies.lines import Line, read
from metavd.studies.many import carry_out
from metavd.studies.markdown import markdown_table, write

STORE, PAGE, SCOPE = Path("results/mends.jsonl"), Path("docs/mends.md"), "validation"
SETTING: dict[str, Any] = {
    "data": "cifar100", "partition": "dirichlet:0.5", "test_rows": "independent", "clients": 100, "unseen": 30,
    "cohort": 10, "model": "cnn", "width": 64, "rounds": 1000, "valid": 0.2, "valid_clients": 10, "seed": 1002,
}  # fmt: skip
"""The setting of results/tuned, with a seed that neither tuning nor any result uses."""
TUNED: dict[str, dict[str, Any]] = {
    "reptile+metavd": {"lr": 0.03, "server_lr": 0.7, "beta": 5.0},
    "maml+metavd": {"lr": 0.005, "server_lr": 0.8, "outer_lr": 0.05, "beta": 3.0},
    "perfedavg+metavd": {"lr": 0.03, "server_lr": 0.8, "outer_lr": 0.08, "beta": 3.0},
}
"""Chosen on CIFAR-100 at 0.5; docs/tuned.md."""


class Case(NamedTuple):
    """A method and what is changed in its tuned settings."""

    method: str
    change: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of its run."""
        return SETTING | {"method": self.method} | TUNED[self.method] | self.change


CASES = tuple(
    Case(method, change)
    for method, changes in {
        "reptile+metavd": [
            {}, {"clamp": "project"}, {"draws_average": "loss"}, {"draws": 1}, {"newcomer": "outputs"}, {"kl": "elbo"},
            {"hyper_lr": 0.1, "embed_lr": 0.1},
        ],
        "maml+metavd": [{}, {"spread_step": "lr"}, {"beta": 10.0}, {"beta": 10.0, "spread_step": "lr"}],
        "perfedavg+metavd": [{}, {"spread_step": "lr"}],
    }.items()
    for change in changes
)  # fmt: skip
_HEADS = ("method", "changed", "participating %", "validation clients %", "their mean %", "NLL", "ECE %",
          "ECE % of validation clients")  # fmt: skip
TASKS = {number: case.settings for number, case in enumerate(CASES)}


def validated(
    settings: dict[str, Any], folder: Path, listener: Listener, *, where: Mapping[str, Any]
) -> dict[str, Any]:
    """Train one case on a sealed federation and score it; see `metavd.studies.many.Work`."""
    e = with_settings(Experiment(), settings | where)
    about = {"method": e.method, "settings": {}, "round": e.rounds}
    found = stretch(about, folder, listener, experiments={str(e.method): e}, first=0)["result"]
    kept = {key: found.get(key) for key in ("valid", "valid_unseen", "score", "seconds")}
    return {"device": e.device, "spec": spec_hash(e), "result": kept}


def main() -> None:
    """Read the command line, run what is missing, write the page."""
    parser = reading(__doc__)
    parser.add_argument("--root", help="folder with CIFAR-100's files; without it nothing is run")
    parser.add_argument("--jobs", type=int, default=0, help="runs at once; 0: what suits the device")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--store", type=Path, default=STORE)
    parser.add_argument("--page", type=Path, nargs="?", const=PAGE, help=f"document to write; {PAGE}")
    given = parser.parse_args()
    if given.root:
        work = partial(validated, where={"root": given.root, "device": given.device})
        for ended in carry_out(TASKS, work, store=given.store, scope=SCOPE, work=Path("runs/mends"), jobs=given.jobs,
                               device=given.device):  # fmt: skip
            print(ended.end, CASES[ended.key].method, CASES[ended.key].change, flush=True)
    if given.page is not None:
        write(given.page, page(read(given.store, SCOPE)))


def page(lines: Mapping[str, Line]) -> str:
    """Write the table of what the store holds."""
    made = [line for line in lines.values() if "result" in line]
    table = markdown_table(_HEADS, [_row(CASES[number], line) for number, line in stored(TASKS, lines, SCOPE).items()],
                           text=(0, 1))  # fmt: skip
    return f"""# The mends of MetaVD, judged on validation

Each option beside the rule that it would replace, all else as tuned ([tuned.md](tuned.md)): CIFAR-100,
`dirichlet:0.5`, independent rows, {SETTING["rounds"]:,} rounds, seed {SETTING["seed"]};
{made_on(made)}.

Made by

    python scripts/mends.py --page

*participating*, *validation clients*: accuracy on validation rows of clients that train, and of clients that
are only ever validated on, as for [tuning](tuning.md); test rows and unseen clients were taken out before.
One seed: a point is no more than noise. `kl=elbo` sums over weights and divides by rows, so that the same
beta weighs it far more, here too much; it wants a beta of its own.

{chr(10).join(table)}
"""


def _row(case: Case, line: Line) -> list[str]:
    change = " ".join(f"`{key}={value:g}`" if isinstance(value, float) else f"`{key}={value}`"
                      for key, value in case.change.items()) or "nothing"  # fmt: skip
    if line.get("result", {}).get("score") is None:
        return [f"`{case.method}`", change, "diverged", *[""] * (len(_HEADS) - 3)]
    own, apart = line["result"]["valid"], line["result"]["valid_unseen"]
    figures = [own["accuracy"], apart["accuracy"], line["result"]["score"]]
    shares = [f"{100 * value:.1f}" for value in figures]
    errors = [f"{100 * part['ece_top1']:.1f}" for part in (own, apart)]
    return [f"`{case.method}`", change, *shares, f"{own['nll']:.3f}", *errors]


if __name__ == "__main__":
    main()
