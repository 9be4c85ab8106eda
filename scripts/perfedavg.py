"""Where PerFedAvg's distance from the paper comes from: its rules, its rate, its seeds. Needs a GPU and CIFAR-10.

    python scripts/perfedavg.py --root DIR --page docs/perfedavg.md

Finished runs are kept in results/perfedavg.jsonl, one by one, and not run again; --render writes the page from them.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from statistics import mean, median, stdev

from study import SETTING, Case, Changes, main
from tables import made_on

from metavd.studies.markdown import markdown_table
from metavd.studies.paper.tables import cells

PAPER = {f.name.partition(".")[0]: f.value for f in cells("T8", ["PerFedAvg"], ["0.5"])[0].figures if f.name != "gap"}
"""Test and unseen clients of CIFAR-10 at Dirichlet 0.5, in percent: one run, its last round."""
RATES = (0.1, 0.07, 0.05, 0.03, 0.02, 0.01)
CHANGES: tuple[Changes, ...] = (
    {"variant": "released"},
    {"product": "released"},
    {"seed": 778},
    {"seed": 779},
    *({"valid": 0.1, "outer_lr": rate} for rate in RATES),
)
"""What differs from the defaults and seed 777."""
_LAST = 5
"""Evaluations, 100 rounds apart, whose scatter is that of the last one."""


_HEADS = ("options", "seed", "held out", "test: last", "mean ± sd", "unseen: last", "mean ± sd", "validation: last")


def _last(case: Case, what: str) -> list[float]:
    return [point[what] for point in case.curve[-_LAST:]]


def _cells(case: Case) -> list[str]:
    changes = case.changes
    options = ", ".join(f"{k}={v}" for k, v in changes.items() if k not in ("method", "seed", "valid")) or "defaults"
    cells = [options, str(changes.get("seed", SETTING["seed"])), f"{100 * changes.get('valid', 0):.0f} %"]
    for what in ("test", "unseen"):
        values = _last(case, what)
        cells += [f"{values[-1]:.2f}", f"{mean(values):.2f} ± {stdev(values):.2f}"]
    return [*cells, f"{_last(case, 'valid')[-1]:.2f}" if changes.get("valid") else ""]


def page(_: Namespace, cases: list[Case]) -> str:
    """Return the document."""
    test, unseen = (median(stdev(_last(case, what)) for case in cases) for what in PAPER)
    released = next(case for case in cases if "variant" in case.changes)
    theirs = " and ".join(f"{_last(released, what)[-1] - PAPER[what]:+.2f}" for what in PAPER)
    by_rate = {case.changes["outer_lr"]: case for case in cases if "outer_lr" in case.changes}
    best = max(by_rate, key=lambda rate: _last(by_rate[rate], "valid")[-1])
    worst = min(by_rate, key=lambda rate: _last(by_rate[rate], "test")[-1])
    table = "\n".join(markdown_table(_HEADS, [_cells(case) for case in cases]))
    return f"""# PerFedAvg beside the paper's

The paper has {PAPER["test"]} % for participating and {PAPER["unseen"]} % for unseen clients on CIFAR-10 at
Dirichlet 0.5: one run with seed 777, its last round. Ours at the defaults is in [paper.md](paper.md). These
runs look for the cause of the difference.

Written by `python scripts/perfedavg.py --root DIR --page docs/perfedavg.md`; 1,000 rounds, 10 of 100 clients
a round, 64 filters; {made_on([case.line for case in cases])}. *Last* is after round 1,000; mean and standard
deviation are of the last {_LAST} evaluations, 100 rounds apart. *Held out* is the share of a client's
training rows that validation takes.

{table}

- One run's last round is a draw: evaluations 100 rounds apart have a standard deviation of {test:.1f} points for
  participating and {unseen:.1f} for unseen clients (median over these runs); the difference of
  two single runs, about {2**0.5 * test:.1f}. Another seed, which deals data anew, adds to it.
- Under the released code's rules our engine ends {theirs} points from the paper.
- The rate cannot be chosen on these validation rows: they are taken out of each client's own rows and share
  its mix of classes, which the paper's test rows do not; to deal them as those (`valid_rows=independent`)
  came after these runs. They prefer `outer_lr={best}`; the test is worst at {worst}. The paper's rates were
  searched without validation rows and are not published; ours stays at the released one.
"""


if __name__ == "__main__":
    runs = [{"method": "perfedavg"} | changes for changes in CHANGES]
    main(__doc__ or "", lambda _: runs, page, Path("results/perfedavg.jsonl"))
