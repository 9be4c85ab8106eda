"""What a newcomer gains by adapting: writers of MNIST who were not in the run, with and without rows of their own.

    python scripts/newcomers.py --file mnist_by_writer.npz --page docs/newcomers.md

The file has images (N, 28, 28), label and client (the writer). What was found is kept in results/newcomers.json;
without --file the page is written from it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tables import reading

from metavd import run
from metavd.cli.terminal import Reporter
from metavd.container import write_atomic
from metavd.data.source import arrays
from metavd.evaluate.intervals import interval
from metavd.evaluate.uncertainty import auroc
from metavd.serve.model import Personal
from metavd.serve.personal import open_run, personalize
from metavd.studies.markdown import markdown_table, write

STORE = Path("results/newcomers.json")
SETTINGS = {
    "method": "reptile+metavd", "variant": "paper", "rounds": 15, "model": "small-cnn", "width": 16,
    "predict": "draws", "unseen": 0,
}  # fmt: skip
TRAINED, ASKED, LEAST = 60, 200, 40
"""Writers in the run, writers who come later, and rows that each of them has at least."""

_SHOWN = ("accuracy", "nll", "entropy", "information")
_HEADS = ("", "accuracy %, mean over writers", "NLL", "AUROC of entropy", "AUROC of mutual information")


def answers(own: Personal, x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    """Return, for each row, whether it was answered rightly, its NLL and both kinds of uncertainty."""
    found = own.predict(x)
    assert found.mutual_information is not None
    return {
        "right": found.probs.argmax(1) == y,
        "nll": -np.log(np.maximum(found.probs[np.arange(len(y)), y], 1e-12)),
        "entropy": found.entropy,
        "information": found.mutual_information,
    }


def figures(by_writer: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """Return means over writers, and over all rows the chance that a wrong answer is less certain than a right one."""
    rows = {key: np.concatenate([each[key] for each in by_writer]) for key in by_writer[0]}
    return {
        "accuracy": float(np.mean([each["right"].mean() for each in by_writer])),
        "nll": float(np.mean([each["nll"].mean() for each in by_writer])),
        **{key: auroc(rows[key], ~rows["right"]) for key in ("entropy", "information")},
    }


def measured(file: Path, folder: Path) -> dict[str, Any]:
    """Train on some writers, and answer rows of others as they come and after they adapted."""
    stored = np.load(file)
    x, y, writer = stored["images"], stored["label"].astype(np.int64), stored["client"]
    names, counts = np.unique(writer, return_counts=True)
    chosen = np.random.default_rng(0).permutation(names[counts >= LEAST])[: TRAINED + ASKED]
    inside = np.isin(writer, chosen[:TRAINED])
    source = arrays(x[inside], y[inside], client=writer[inside])
    result = run(source=source, listener=Reporter(), out=folder, device="cpu", **SETTINGS)
    trained = open_run(folder, trained_on=source)
    received = personalize(trained)
    before, after, halves = [], [], []
    for each in chosen[TRAINED:]:
        rows = np.flatnonzero(writer == each)
        half = len(rows) // 2
        adapted = personalize(trained, (x[rows[:half]], y[rows[:half]]))
        before.append(answers(received, x[rows[half:]], y[rows[half:]]))
        after.append(answers(adapted, x[rows[half:]], y[rows[half:]]))
        halves.append(half)
    gains = [float(b["right"].mean() - a["right"].mean()) for a, b in zip(before, after, strict=True)]
    return {
        "rows": {"as received": figures(before), "adapted": figures(after)},
        "gain": interval(gains),
        "half": float(np.mean(halves)),
        **{key: result[key] for key in ("commit", "machine", "torch", "version", "model_sha256")},
    }


def page(found: dict[str, Any]) -> str:
    """Return the document."""
    middle, half_width = found["gain"]
    rows = [
        [name, *(f"{100 * row[key]:.1f}" if key == "accuracy" else f"{row[key]:.2f}" for key in _SHOWN)]
        for name, row in found["rows"].items()
    ]
    settings = " ".join(f"{key}={value}" for key, value in SETTINGS.items() if key not in ("method", "rounds"))
    table = "\n".join(markdown_table(_HEADS, rows))
    span = f"{100 * (middle - half_width):.1f} to {100 * (middle + half_width):.1f}"
    return f"""# What newcomers gain

MNIST by writer: {SETTINGS["rounds"]} rounds of `{SETTINGS["method"]}` with {TRAINED} writers
(`{settings}`), then {ASKED} writers who were not in the run.
Each has half of its rows ({found["half"]:.0f} on average) to adapt to, and half to answer.

{table}

A writer's accuracy changes by {100 * middle:.1f} points on average (95 % interval over writers {span}).
AUROC is the chance that a wrong answer is less certain than a right one. One seed, nothing tuned.

Written by `python scripts/newcomers.py --file mnist_by_writer.npz --page docs/newcomers.md`;
{found["machine"]}, torch {found["torch"]}, commit {found["commit"]}.
"""


def main() -> None:
    """Run if asked to, and write the page."""
    parser = reading(__doc__)
    parser.add_argument("--file", type=Path, help="the pictures; without it nothing is run")
    parser.add_argument("--out", type=Path, default=Path("runs/newcomers"), help="the run's folder")
    parser.add_argument("--page", type=Path, help="document to write")
    given = parser.parse_args()
    if given.file:
        found = measured(given.file, given.out)
        write_atomic(STORE, (json.dumps(found, indent=1) + "\n").encode())
    if given.page:
        write(given.page, page(json.loads(STORE.read_text())))


if __name__ == "__main__":
    main()
