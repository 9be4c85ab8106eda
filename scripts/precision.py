"""Whether shorter products cost accuracy: the same runs in every precision, over seeds. Needs a GPU and CIFAR-10.

    python scripts/precision.py --root DIR --rounds 100 --seeds 8 --page docs/precision.md

A seed deals the data, starts the network and draws the batches; runs of one seed differ in their products alone. The
figures go to results/precision.json, and --render writes the page from them without a run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from metavd.bench.whole import SETTING
from metavd.core.fused import EXACT, PRECISIONS
from metavd.experiment.compare import compare
from metavd.experiment.provenance import provenance
from metavd.experiment.side import jobs_for

METHODS = ("fedavg", "reptile+metavd")
STORE = Path("results/precision.json")


def measured(root: str, rounds: int, seeds: int) -> dict[str, Any]:
    """Run everything; return accuracies (in percent) and seconds by method and precision, one a seed."""
    found: dict[str, Any] = {method: {} for method in METHODS}
    with tempfile.TemporaryDirectory() as folder:
        for precision in PRECISIONS:
            out = Path(folder) / precision
            settings = SETTING | {"rounds": rounds, "eval_every": rounds, "precision": precision, "device": "cuda"}
            compare(METHODS, seeds=seeds, jobs=jobs_for("cuda"), out=out, root=root, **settings)
            for method in METHODS:
                results = [
                    json.loads((out / method / f"seed-{SETTING['seed'] + i}" / "result.json").read_text())
                    for i in range(seeds)
                ]
                found[method][precision] = [
                    {"test": 100 * each["test"]["accuracy"], "unseen": 100 * each["unseen"]["accuracy"],
                     "nll": each["test"]["nll"]}
                    for each in results
                ]  # fmt: skip
    return {"rounds": rounds, "seeds": seeds, "date": time.strftime("%Y-%m-%d", time.gmtime()), "figures": found,
            **provenance("cuda")}  # fmt: skip


def page(found: dict[str, Any]) -> str:
    """Return the document."""
    lines = [
        "# Precision",
        "",
        f"Written by `python scripts/precision.py --root DIR --rounds {found['rounds']} --seeds {found['seeds']} "
        "--page docs/precision.md`:",
        f"CIFAR-10, dirichlet:0.5, 10 of 100 clients a round, 64 filters, {found['rounds']} rounds, {found['seeds']} "
        f"seeds from {SETTING['seed']};",
        f"{found['machine']}, torch {found['torch']}, commit {found['commit']}, {found['date']}. A seed deals the",
        "data, starts the network and draws the batches, so runs of one seed differ in their products alone. *Gap* is",
        "the mean over seeds of a run's difference from the exact one, with the standard error of that mean; *noise*",
        "is the standard deviation of the exact runs over seeds.",
        "",
        "| method | precision | accuracy | gap | noise | unseen clients | gap | noise | NLL |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for method, precisions in found["figures"].items():
        exact = precisions[EXACT]
        for precision, runs in precisions.items():
            cells = [method, precision]
            for what in ("test", "unseen"):
                gaps = [one[what] - other[what] for one, other in zip(runs, exact, strict=True)]
                gap = f"{mean(gaps):+.2f} ± {stdev(gaps) / len(gaps) ** 0.5:.2f}" if precision != EXACT else ""
                cells += [f"{mean(one[what] for one in runs):.2f}", gap, f"{stdev(one[what] for one in exact):.2f}"]
            cells.append(f"{mean(one['nll'] for one in runs):.4f}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, store, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder with CIFAR-10's files")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--store", type=Path, default=STORE)
    parser.add_argument("--page", type=Path, help="document to write")
    parser.add_argument("--render", action="store_true", help="run nothing")
    given = parser.parse_args()
    if not given.render:
        if given.root is None:
            parser.error("--root is missing; it names the folder with CIFAR-10's files")
        given.store.parent.mkdir(parents=True, exist_ok=True)
        given.store.write_text(json.dumps(measured(given.root, given.rounds, given.seeds), indent=1) + "\n")
    if given.page is not None:
        given.page.write_text(page(json.loads(given.store.read_text())))


if __name__ == "__main__":
    main()
