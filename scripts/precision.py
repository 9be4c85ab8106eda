"""Whether shorter products cost accuracy: the same runs in every precision, over seeds. Needs a GPU and CIFAR-10.

    python scripts/precision.py --root DIR --rounds 100 --seeds 3 --page docs/precision.md

A seed deals the data, starts the network and draws the batches; runs of one seed differ in their products alone.
Finished runs are kept in results/precision.jsonl and not run again; --render writes the page from them.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from statistics import mean, stdev

from study import SETTING, Case, Changes, main
from tables import made_on

from metavd.ops.precision import EXACT, PRECISIONS
from metavd.studies.markdown import markdown_table

METHODS: dict[str, Changes] = {"fedavg": {}, "reptile+metavd": {"beta": 10.0}}
"""And the options that they were run with; beta is the paper's."""


def changes(given: Namespace) -> list[Changes]:
    """Return every method in every precision over the seeds."""
    length = {"rounds": given.rounds, "eval_every": given.rounds}
    seeds = range(SETTING["seed"], SETTING["seed"] + given.seeds)
    return [
        {"method": method, "precision": precision, "seed": seed, **own, **length}
        for method, own in METHODS.items()
        for seed in seeds
        for precision in PRECISIONS
    ]


def page(given: Namespace, cases: list[Case]) -> str:
    """Return the document."""
    ends: dict[tuple[str, str], list[dict[str, float]]] = {}
    for case in cases:
        ends.setdefault((case.changes["method"], case.changes["precision"]), []).append(case.curve[-1])
    rows = []
    for (method, precision), runs in ends.items():
        exact, cells = ends[method, EXACT], [method, precision]
        for what in ("test", "unseen"):
            gaps = [one[what] - other[what] for one, other in zip(runs, exact, strict=True)]
            gap = f"{mean(gaps):+.2f} ± {stdev(gaps) / len(gaps) ** 0.5:.2f}" if precision != EXACT else ""
            cells += [f"{mean(one[what] for one in runs):.2f}", gap, f"{stdev(one[what] for one in exact):.2f}"]
        rows.append([*cells, f"{mean(one['nll'] for one in runs):.4f}"])
    heads = ["method", "precision", "accuracy", "gap", "noise", "unseen clients", "gap", "noise", "NLL"]
    table = "\n".join(markdown_table(heads, rows, text=(0, 1)))
    command = (
        f"python scripts/precision.py --root DIR --rounds {given.rounds} --seeds {given.seeds} --page docs/precision.md"
    )
    where = f"CIFAR-10, dirichlet:0.5, 10 of 100 clients per round, 64 filters, {given.rounds} rounds"
    return f"""# Precision

Written by `{command}`:
{where}, {given.seeds} seeds from {SETTING["seed"]};
{made_on([case.line for case in cases])}. A seed deals the
data, starts the network and draws the batches, so runs of one seed differ in their products alone. *Gap* is
the mean over seeds of a run's difference from the exact one, with the standard error of that mean; *noise*
is the standard deviation of the exact runs over seeds.

{table}
"""


if __name__ == "__main__":
    main(__doc__ or "", changes, page, Path("results/precision.jsonl"), rounds=100, seeds=3)
