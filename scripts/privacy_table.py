#!/usr/bin/env python3
"""Write a table of accuracy and ECE against epsilon, of methods with `+dp` at several clips and without it.

    scripts/privacy_table.py --out runs/privacy [--epsilons 2,4,8] [--clips 0.3,1] [--seeds 3] [KEY=VALUE ...]

Every cell is `metavd compare` in a folder of OUT; what is there already is read, not run again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from metavd.studies.compare import Cell, compare

METHODS = ("fedavg", "reptile", "reptile+metavd")


def cell(row: dict[str, Cell]) -> str:
    """Write "81.2 ± 1.0 / 7.3": accuracy and ECE, in percent."""
    (accuracy, half), (ece, _) = row["test accuracy %"] or (0.0, None), row["test ECE %"] or (0.0, None)
    return f"{accuracy:.1f}" + ("" if half is None else f" ± {half:.1f}") + f" / {ece:.1f}"


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epsilons", default="2,4,8", help="with commas")
    parser.add_argument("--clips", default="0.3,1", help="values of answer_clip, with commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", default=",".join(METHODS), help="with commas, without +dp")
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    settings = dict(word.partition("=")[::2] for word in given.settings)
    how = {"seeds": given.seeds, "jobs": given.jobs, **settings}
    names, epsilons = given.methods.split(","), given.epsilons.split(",")
    plain = compare(names, out=given.out / "plain", **how)
    print("| method | answer_clip | " + " | ".join(f"epsilon {each}" for each in epsilons) + " | without `+dp` |")
    print("|---|---:|" + "---:|" * (len(epsilons) + 1))
    for clip in given.clips.split(","):
        found = {
            epsilon: compare(
                [f"{name}+dp" for name in names], out=given.out / f"epsilon-{epsilon}-clip-{clip}", epsilon=epsilon,
                answer_clip=clip, **how,
            )
            for epsilon in epsilons
        }  # fmt: skip
        for name in names:
            cells = [cell(found[epsilon][f"{name}+dp"]) for epsilon in epsilons]
            print(f"| `{name}` | {clip} | " + " | ".join([*cells, cell(plain[name])]) + " |", flush=True)


if __name__ == "__main__":
    main()
