"""Accuracy and ECE against epsilon, of methods with `+dp` and without it.

    python scripts/privacy_table.py digits                      81 short runs on a CPU
    python scripts/privacy_table.py cifar10 --root DIR          18 runs, for a GPU
    python scripts/privacy_table.py --page                      writes docs/privacy.md from the store

Finished runs are kept in results/privacy.jsonl and not run again. Runs are given their noise, so that the machine that
trains needs no accountant; what epsilon that is the page works out (`pip install 'metavd[privacy]'`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from tables import Found, Table, made_on, main, markdown, percent

from metavd.core.accountant import Mechanism

Method = tuple[str, dict[str, Any]]
"""A name without `+dp`, and its options."""
SLOW = {"hyper_lr": 0.1, "embed_lr": 0.1}
"""The hypernetwork's usual rates make large steps of noise."""
STATED = {"beta": 10.0}
"""The paper's, and the default when these were run."""
METHODS: tuple[Method, ...] = (
    ("fedavg", {}), ("reptile", {}), ("reptile+metavd", STATED), ("reptile+metavd", {**STATED, **SLOW}),
)  # fmt: skip
EPSILONS = (2.0, 4.0, 8.0, 16.0)
NOISES = {"digits": (3.538, 2.0692, 1.2842, 0.84402), "cifar10": (3.2384, 1.8859, 1.2161, 0.85098)}
"""With which all rounds of a setting spend these epsilons, as `Mechanism.found` says; tests compare."""
DELTA = 1e-5
DIGITS: dict[str, Any] = {
    "data": "digits", "partition": "dirichlet:0.5", "clients": 300, "unseen": 20, "cohort": 100, "rounds": 20,
    "batch": 32, "model": "mlp", "width": 16, "lr": 0.1, "backend": "vmap",
}  # fmt: skip
CIFAR10: dict[str, Any] = {
    "data": "cifar10", "partition": "dirichlet:0.5", "clients": 5000, "unseen": 0, "cohort": 500, "rounds": 200,
    "batch": 10, "local_epochs": 5, "model": "cnn", "width": 16, "eval_every": 200,
}  # fmt: skip
"""Single clients can be hidden where there are many: the noise on the mean of D weights is as long as
noise clip sqrt(D) / cohort. With 5,000 clients of ten rows each, a tenth of them in a round and a network of 24,000
weights that is 0.38 of the longest answer at epsilon 8; with the paper's 100 clients, 10 in a round and 372,000 weights
it would be 74 times as long as any answer."""


def epsilon(setting: Mapping[str, Any], noise: float) -> float:
    """Return what all rounds of a setting spend."""
    counts = {key: setting[key] for key in ("clients", "cohort", "rounds")}
    return Mechanism(clip=1.0, noise=noise, epsilon=0.0, delta=DELTA, **counts).spent({noise: setting["rounds"]})


def table(
    setting: Mapping[str, Any], noises: Sequence[float], *, clips: Sequence[dict[str, Any]],
    methods: Sequence[Method], seeds: Sequence[int], caption: str,
) -> Table:  # fmt: skip
    """Return methods x clips in rows; in columns each noise, no noise, and no `+dp`."""
    levels = (*noises, 0.0)
    tasks: dict[Any, dict[str, Any]] = {}
    for (name, own), seed in product(methods, seeds):
        who = (name, _words(own))
        tasks[*who, "", None, seed] = {**setting, **own, "method": name, "seed": seed}
        for clip, noise in product(clips, levels):
            hidden = {"method": f"{name}+dp", "noise": noise, "delta": DELTA, "seed": seed}
            tasks[*who, _words(clip), noise, seed] = {**setting, **own, **clip, **hidden}

    def cell(found: Found, *key: Any) -> str:
        lines = [found[*key, seed] for seed in seeds]
        return f"{percent(lines, 'accuracy', half=True)} / {percent(lines, 'ece_top1')}"

    def write(found: Found) -> str:
        spent = [f"epsilon {epsilon(setting, noise):.3g}" for noise in noises]
        rows = [
            [f"`{name}` {_words(own)}".strip(), _words(clip),
             *(cell(found, name, _words(own), _words(clip), noise) for noise in levels),
             cell(found, name, _words(own), "", None)]
            for clip, (name, own) in product(clips, methods)
        ]  # fmt: skip
        heads = ["method", "clip", *spent, "clip alone", "without `+dp`"]
        return markdown(f"{caption}; {made_on(found.values())}.", heads, rows)

    return Table(tasks, write)


def _words(options: Mapping[str, Any]) -> str:
    return " ".join(f"`{key}={value}`" for key, value in options.items())


TABLES = {
    "digits": table(
        DIGITS, NOISES["digits"], clips=[{"answer_clip": clip} for clip in (0.3, 1.0)], methods=METHODS, seeds=range(3),
        caption="Handwritten digits, accuracy / ECE in %: 300 clients of about five training rows (`dirichlet:0.5`), "
        "of whom a third takes part in each of 20 rounds; `model=mlp width=16 lr=0.1`; mean ± half width of the 95 % "
        "interval over three seeds",
    ),
    "cifar10": table(
        CIFAR10, NOISES["cifar10"], clips=[{"clipping": "adaptive"}], seeds=[777],
        methods=[
            ("fedavg", {"lr": 0.15}), ("reptile", {"lr": 0.05}), ("reptile+metavd", {"lr": 0.05, **STATED, **SLOW}),
        ],
        caption="CIFAR-10, accuracy / ECE in %: 5,000 clients of ten training rows on average (`dirichlet:0.5`), of "
        "whom a tenth takes part in each of 200 rounds; `model=cnn width=16 batch=10 local_epochs=5`; the clip follows "
        "the median length; one seed",
    ),
}  # fmt: skip

if __name__ == "__main__":
    main(__doc__ or "", TABLES, store=Path("results/privacy.jsonl"), page=Path("docs/privacy.md"), word="privacy")
