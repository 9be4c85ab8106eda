"""How far a trained run's answers can be trusted: sets of classes, and inputs of a kind that it was never shown.

Sets: a client's test rows, which its model has not learnt from, are dealt into halves by chance; each half calibrates
the sets of the other (`evaluate.conformal`). So every client's coverage is measured on rows that did not calibrate it.

Unknown inputs: every client's own model answers rows of another dataset, brought to the shape that it takes, and its
own test rows. A model that knows when it does not know is less sure of the former:

    AUROC    the chance that an unknown input has more entropy (or mutual information) than a known one
    FPR95    the share of unknown inputs that pass for known where 95 % of the known ones do
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..container import finite, write_atomic
from ..data import collection
from ..data.cohort import pool
from ..data.formats.cache import Note, log
from ..data.source import Source
from ..engine.evaluation import answers
from ..errors import UserError
from ..evaluate import conformal
from ..evaluate.answers import Answers, ClientResult
from ..evaluate.uncertainty import auroc, fpr95
from ..runs.evaluation import whom
from ..runs.setup import Data, channels_last, using
from .personal import TrainedRun, opened
from .samples import Given, blank, fit

COVERAGE = 0.9
ROWS = 200
"""Unknown inputs that every client is shown, where there are so many."""
_GROUPS = {"test": "participating", "unseen": "unseen"}
_DOUBTS = {"entropy": "entropy", "information": "mutual information"}


def trust(
    run: str | Path | TrainedRun,
    *,
    coverage: float = COVERAGE,
    unknown: Given | None = None,
    rows: int = ROWS,
    root: str | Path | None = None,
    device: str | None = None,
    trained_on: Data | None = None,
    note: Note = log,
) -> dict[str, Any]:
    """Return coverage and size of every client's sets and, where a dataset is given, how well unknown inputs are told.

    Args:
        run: folder of a finished run, or what `open_run` returned.
        coverage: how often the right class is to be in a set.
        unknown: another dataset as text (mnist, npz:PATH), as a source, or arrays (x, None); its labels do not matter.
        rows: how many of its rows every client is shown, the same ones, spread evenly over the dataset.
        root: where the files of datasets are; by default where the run found them.
        device: by default the run's.
        trained_on: the data that were handed to the run in Python, if they were.
        note: told what a person should know.
    """
    conformal.check(coverage, "lac")
    trained = opened(run, trained_on=trained_on, root=root, device=device, note=note)
    if rows < 1:
        raise UserError(f"rows is {rows}, but at least one unknown input must be shown")
    foreign = None if unknown is None else _foreign(unknown, trained, rows, root, note)
    own = _answered(trained, None)
    found: dict[str, Any] = {
        "coverage": coverage,
        "sets": {part: _sets(results, coverage) for part, results in own.items()},
    }
    for part, made in found["sets"].items():
        if made and made["lac"]["enough"] < 1:
            short = f"{1 - made['lac']['enough']:.0%} of the {_GROUPS[part]} clients"
            note(f"{short} have too few test rows for halves with coverage {coverage}, so that their sets are whole")
    if foreign is not None:
        name, x = foreign
        shown = _answered(trained, x)
        parts = {part: _told(own[part], shown[part]) for part in own}
        found["unknown"] = {"data": name, "rows": len(x), **parts}
    return found


def _answered(trained: TrainedRun, foreign: np.ndarray | None) -> dict[str, list[ClientResult]]:
    """Let every client's own model answer its test rows, or the same foreign rows, by group."""
    setup = trained.setup
    e, rows = setup.experiment, setup.pool
    if foreign is not None:
        source = rows.federation.source
        joined = replace(
            source, x=np.concatenate([source.x, foreign]), y=np.append(source.y, np.zeros(len(foreign), np.int64)),
            test=None, client=None, client_names=(),
        )  # fmt: skip
        numbers = np.arange(len(source.x), len(joined.x))
        shown = replace(rows.federation, source=joined, test=tuple(numbers for _ in rows.federation.test))
        rows = pool(shown, e.device, rows.dtype, channels_last=channels_last(e))
    groups = whom(setup, 0)
    with using(setup):
        return {
            part: [each for each, _ in answers(setup.algorithm, rows, trained.state, clients, setup.schedule.map)]
            for part, clients in groups.items()
            if part in _GROUPS
        }


def _foreign(
    given: Given, trained: TrainedRun, rows: int, root: str | Path | None, note: Note
) -> tuple[str, np.ndarray]:
    """Return the name and some rows of another dataset, as the run's network takes them."""
    e, source = trained.setup.experiment, trained.setup.pool.federation.source
    if source.domains:
        raise UserError("the run knows several datasets, but unknown inputs can be shown to a run of one alone")
    if isinstance(given, str):
        if given == e.data:
            raise UserError(f"unknown is {given!r}, which the run was trained on; name another dataset")
        name, x = given, collection.load(given, root or e.root, note).sources[0].x
    elif isinstance(given, Source):
        name, x = given.name, given.x
    else:
        name, x = "the arrays", np.asarray(given[0])
    chosen = np.unique(np.linspace(0, len(x) - 1, min(rows, len(x))).round().astype(np.int64))
    return name, fit(x[chosen], blank(source), name)


def _sets(results: Sequence[ClientResult], coverage: float) -> dict[str, Any] | None:
    """Return what sets of each kind cover and how large they are, over all test rows and client by client."""
    tested = [each for each in results if len(each.y) > 1]
    return {kind: _kind(tested, coverage, kind) for kind in conformal.METHODS} if tested else None


def _kind(tested: Sequence[ClientResult], coverage: float, kind: str) -> dict[str, float]:
    """Return the share of labels in their sets, that of the worst tenth of clients, and the mean size of a set.

    `enough` is the share of clients whose halves suffice for the coverage; the others' sets are whole.
    """
    made = [conformal.crossed(each.probs, each.y, coverage, kind, seed=each.client) for each in tested]
    each_client = np.array([inside.mean() for inside, _ in made])
    enough = [len(each.y) // 2 >= conformal.needed(coverage) for each in tested]
    return {
        "covered": float(np.concatenate([inside for inside, _ in made]).mean()),
        "covered_tenth": float(np.percentile(each_client, 10)),
        "size": float(np.concatenate([size for _, size in made]).mean()),
        "enough": float(np.mean(enough)),
    }


def _told(known: Sequence[ClientResult], shown: Sequence[ClientResult]) -> dict[str, Any] | None:
    """Return how well uncertainty tells the foreign rows from clients' own, by kind of uncertainty."""
    both = [Answers([each for each in results if len(each.y)]) for results in (known, shown)]
    if not all(part.clients for part in both):
        return None
    found: dict[str, Any] = {}
    for doubt in _DOUBTS:
        scores = [getattr(part, doubt) for part in both]
        if any(score is None for score in scores):
            continue
        positive = np.repeat([False, True], [len(score) for score in scores])
        score = np.concatenate(scores)
        found[doubt] = {"auroc": auroc(score, positive), "fpr95": fpr95(score, positive)}
    return found


def write(found: Mapping[str, Any], path: Path) -> None:
    """Write what `trust` found as JSON."""
    write_atomic(path, (json.dumps(finite(found), indent=2, allow_nan=False) + "\n").encode())


def lines(found: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return a table for people: what, kind, and the figures of participating and of unseen clients."""
    table = []
    for title, key in (("label in set", "covered"), ("the worst tenth of clients below", "covered_tenth"),
                       ("classes in a set", "size")):  # fmt: skip
        for kind in conformal.METHODS:
            values = [(found["sets"][part] or {}).get(kind, {}).get(key) for part in ("test", "unseen")]
            table.append((title, kind.upper(), *(_shown(value, share=key != "size") for value in values)))
    for doubt, name in _DOUBTS.items():
        for key, title in (("auroc", "AUROC of unknown inputs"), ("fpr95", "unknown inputs taken for known (FPR95)")):
            parts = [(found.get("unknown", {}).get(part) or {}).get(doubt, {}) for part in ("test", "unseen")]
            if any(parts):
                table.append((title, name, *(_shown(part.get(key), share=key == "fpr95") for part in parts)))
    return [(a, b, c, d) for a, b, c, d in table]


def _shown(value: float | None, *, share: bool) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if share else f"{value:.3f}"
