"""Tune many methods on equal terms: the same trials, rounds and seeds for each, by successive halving.

    trials -> rung 1: train all a little -> keep the best third -> rung 2 -> ... -> the last rung's best is chosen

Every method gets the same number of trials, spread evenly over its own space by a scrambled Sobol sequence, and the
same rounds. A trial is scored on validation rows alone: the mean of the accuracies of clients that train and of clients
that are only ever validated on (`valid_clients`), averaged over the last few evaluations of a rung. Its federation is
sealed, so that nobody holds the number of a test row or of an unseen client's row. A run's options know its full number
of rounds from the start, so that a trial that is stopped at a rung goes on as if it had never been stopped.

Each rung of each trial is one line of a store, written as it ends; what is in the store is not computed again.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from scipy.stats import qmc

from .. import methods
from ..core.types import NonFiniteError
from ..engine.checkpoint import load_checkpoint, save_checkpoint
from ..engine.rounds import Listener
from ..runs.evaluation import evaluate_valid, validation_clients
from ..runs.provenance import provenance
from ..runs.run import rounds_of
from ..runs.settings import Experiment, resolve, spec_hash, with_settings
from ..runs.setup import Setup, data_of, prepare, start, using
from .lines import append, rows
from .many import carry_out
from .plan import Dimension, space

FIGURES = ("accuracy", "nll", "ece_top1")
_GAP = 10
"""Rounds between the evaluations that a rung's score is the mean of."""
_LOOKS = 3


@dataclass(frozen=True)
class Halving:
    """How trials are thinned out."""

    trials: int = 12
    rungs: tuple[int, ...] = (300, 1000)
    """Rounds after which trials are compared; the last is what they are tuned for."""
    keep: int = 3
    """One in so many goes on, at least two."""

    def survivors(self, rung: int) -> int:
        """Return how many trials take part in a rung."""
        count = self.trials
        for _ in range(rung):
            count = max(2, math.ceil(count / self.keep))
        return min(count, self.trials)


def points(dimensions: Sequence[Dimension], count: int, seed: int) -> list[dict[str, Any]]:
    """Spread trials evenly over a space; the first is the method's own defaults, where nothing is set.

    >>> [sorted(point) for point in points((Dimension("lr", (), 0.001, 0.1, True),), 3, seed=0)]
    [[], ['lr'], ['lr']]
    """
    sobol = qmc.Sobol(len(dimensions), scramble=True, seed=seed)
    draws = sobol.random_base2(max(1, math.ceil(math.log2(count))))[: count - 1]
    return [{}, *({one.name: _at(one, float(x)) for one, x in zip(dimensions, draw, strict=True)} for draw in draws)]


def _at(one: Dimension, x: float) -> Any:
    """Return the value at a place x in [0, 1) of a dimension."""
    if one.values:
        return one.values[min(int(x * len(one.values)), len(one.values) - 1)]
    low, high = (math.log(one.low), math.log(one.high)) if one.log else (one.low, one.high)
    value = low + x * (high - low)
    value = math.exp(value) if one.log else value
    return round(value) if isinstance(one.low, int) else float(f"{value:.3g}")


Line = dict[str, Any]
"""A rung of a trial: what it is, what it scored, where it was made."""


def name_of(line: Mapping[str, Any]) -> str:
    """Return what tells one line of a store from all others."""
    return json.dumps([line[key] for key in ("study", "method", "trial", "settings", "round", "seed")], sort_keys=True)


def study_of(experiment: Experiment) -> str:
    """Name what methods are tuned for: the data, how they are dealt, and how they are judged.

    >>> study_of(Experiment(data="digits"))
    'digits dirichlet:0.5 consistent'
    """
    e = resolve(experiment)
    return f"{e.data} {e.partition} {e.test_rows}"


def stretch(about: Line, folder: Path, _: Listener, *, experiments: Mapping[str, Experiment], first: int) -> Line:
    """Train a trial from one rung to the next, and score it; the state is kept for the rung after that."""
    began = time.monotonic()
    e = with_settings(experiments[about["method"]], about["settings"])
    line = about | {"seconds": 0.0, **provenance(e.device)}
    try:
        setup = prepare(e, data_of(e), sealed=True)
        with using(setup):
            looks = _looks(setup, first, about["round"], folder)
    except NonFiniteError as error:
        line |= {"score": None, "reason": str(error)}
    else:
        mean = {
            part: {name: sum(look[part][name] for look in looks) / len(looks) for name in FIGURES}
            for part in ("valid", "valid_unseen")
        }
        score = sum(mean[part]["accuracy"] for part in mean) / len(mean)
        line |= {"spec": spec_hash(setup.experiment), **mean, "score": score}
        line |= {} if about["settings"] else {"options": dict(setup.experiment.options)}  # defaults may change
    return {"result": line | {"seconds": round(time.monotonic() - began, 1)}}


def _looks(setup: Setup, first: int, last: int, folder: Path) -> list[dict[str, Any]]:
    """Train up to a round; return the figures of validation rows at the last few evaluations."""
    found = load_checkpoint(folder, setup.experiment.device, round=first) if first else None
    state = found[0] if found else start(setup)  # on another machine: anew, to the same bits
    wanted = {last - _GAP * look for look in range(_LOOKS)}  # those before `first` are none of this rung's
    looks = []
    for state, record in rounds_of(setup, state):  # noqa: B020
        if record.round in wanted:
            apart = validation_clients(setup.pool.federation)
            looks.append({"valid": evaluate_valid(setup, state), "valid_unseen": evaluate_valid(setup, state, apart)})
        if record.round == last:
            break
    save_checkpoint(folder, state, {})
    return looks


def read(store: Path) -> dict[str, Line]:
    """Return the lines of a store by their names."""
    return {name_of(line): line for _, line in rows(store) if line is not None}


def best(lines: Iterable[Line], count: int) -> list[int]:
    """Return the numbers of the trials with the highest scores; one that diverged has none."""
    scored = [line for line in lines if line["score"] is not None]
    return [line["trial"] for line in sorted(scored, key=lambda line: (-line["score"], line["trial"]))[:count]]


def search(
    experiments: Sequence[Experiment],
    halving: Halving,
    *,
    store: Path,
    scratch: Path,
    jobs: int = 1,
    searched: Mapping[str, str] | None = None,
) -> Iterator[Line]:
    """Tune methods on equal terms; yield each rung of each trial as it ends.

    Args:
        experiments: one for each method, all else alike, with `valid` and `valid_clients`.
        halving: how many trials, and how they are thinned out.
        store: file of finished rungs; what it holds is not computed again.
        scratch: folder for the states of trials between rungs.
        jobs: processes side by side; 0: what suits the device.
        searched: spaces, as text, that change or add to the methods' own.
    """
    if not experiments:
        return
    done, last = read(store), halving.rungs[-1]
    asked = {e.method: replace(e, rounds=last) for e in experiments}
    spaces = {
        method: space(e, {key: text for key, text in (searched or {}).items() if key in methods.options_of(method)})
        for method, e in asked.items()
    }

    def place(about: Mapping[str, Any]) -> str:
        trained = with_settings(asked[about["method"]], about["settings"])
        return f"{spec_hash(trained)}-{trained.seed}"

    for rung, (first, round) in enumerate(pairwise((0, *halving.rungs))):
        tasks: dict[str, Line] = {}
        for method, e in asked.items():
            shared = {"study": study_of(e), "method": method, "seed": e.seed, "round": round, "of": last}
            given = points(spaces[method], halving.trials, e.seed)
            trials: list[Line] = [{**shared, "trial": n, "settings": point} for n, point in enumerate(given)]
            if rung:
                names = (name_of(trial | {"round": first}) for trial in trials)
                before = [done[name] for name in names if name in done]
                trials = [trials[number] for number in best(before, halving.survivors(rung))]
            tasks |= {name_of(trial): trial for trial in trials if name_of(trial) not in done}
        work = partial(stretch, experiments=asked, first=first)
        for ended in carry_out(tasks, work, work=scratch, place=place, keep=True, fails=(), refuses=(), jobs=jobs,
                               device=experiments[0].device):  # fmt: skip
            assert ended.line is not None
            done[ended.key] = ended.line["result"]
            append(store, done[ended.key])
            yield done[ended.key]


def chosen(lines: Iterable[Line]) -> dict[tuple[str, str], list[Line]]:
    """Return the trials of every study and method that came to the last rung, the best one first.

    Where a method was tuned for several numbers of rounds, the largest counts.
    """
    found: dict[tuple[str, str], list[Line]] = {}
    for line in sorted(lines, key=lambda line: -int(line["of"])):
        if line["round"] == line["of"] and line["score"] is not None:
            rows = found.setdefault((line["study"], line["method"]), [])
            if not rows or rows[0]["of"] == line["of"]:
                rows.append(line)
    return {key: sorted(rows, key=lambda line: -line["score"]) for key, rows in sorted(found.items())}


NEAR = 0.01
"""Scores that differ by less are alike: one seed's noise is no smaller."""


def near(best_first: Sequence[Line]) -> list[Line]:
    """Return those of a method's trials at the last rung that are within a point of the best."""
    return [line for line in best_first if best_first[0]["score"] - line["score"] <= NEAR]


def values_of(line: Line, everything: Iterable[Line]) -> dict[str, Any]:
    """Return what a trial had of the settings that the method's trials differ in, also where it had the defaults."""
    if line["settings"]:
        return dict(line["settings"])
    options = line.get("options") or methods.resolve(line["method"], {})
    searched = dict.fromkeys(name for each in everything for name in each["settings"])
    return {name: options[name] for name in searched if name in options}


def ranges(lines: Sequence[Line], everything: Sequence[Line]) -> str:
    """Say which values some trials have: "lr 0.01..0.03, beta 3.0"."""
    found: dict[str, set[Any]] = {}
    for line in lines:
        for name, value in values_of(line, everything).items():
            found.setdefault(name, set()).add(value)

    def said(values: set[Any]) -> str:
        if len(values) > 1 and not any(isinstance(value, str | bool) for value in values):
            return f"{min(values)}..{max(values)}"
        return " or ".join(sorted(map(str, values)))

    return ", ".join(f"{name} {said(values)}" for name, values in found.items())


def page(lines: Sequence[Line], command: str) -> str:
    """Return what was chosen as a document: settings, figures, and how wide the optimum is."""
    text = [
        "# Tuned settings", "",
        "What successive halving chose for each method, on validation rows and validation clients alone; made by", "",
        f"    {command}", "",
        "*score*: mean of the two accuracies, averaged over the last three evaluations. *defaults*: the score of the",
        "method's defaults at the last rung that they reached, and its round. *within 1 point*: of the trials that",
        "reached the last rung, how many score within one point of the best, and which values those have: how wide the",
        "optimum is, as far as so few trials show it. One seed: a difference of a point between two trials is no more",
        "than noise. The choices are also files, `results/tuned/DATA-PARTITION-TESTROWS/METHOD.toml`, for `--tuned` of",
        "`metavd compare`, `arena` and `paper`, and for `metavd run --config`.", "",
    ]  # fmt: skip
    found = chosen(lines)
    for study in dict.fromkeys(study for study, _ in found):
        made = [line for line in lines if line["study"] == study]
        where = "; ".join(
            sorted({f"{line['machine']}, torch {line['torch']}, commit {line['commit']}" for line in made})
        )
        seeds = ", ".join(sorted({str(line["seed"]) for line in made}))
        text += [
            f"## {study}", "", f"Seed {seeds}; {where}; {len(made)} rungs.", "",
            "| method | settings | score % | participating % | validation clients % | ECE % | trials | defaults % | "
            "within 1 point |",
            "|---|---|---:|---:|---:|---:|---:|---:|---|",
        ]  # fmt: skip
        text += [_row(rows, [line for line in made if line["method"] == method])
                 for (name, method), rows in found.items() if name == study]  # fmt: skip
        text.append("")
    return "\n".join(text)


def _row(best_first: Sequence[Line], everything: Sequence[Line]) -> str:
    """Return one method's row of a table."""
    top = best_first[0]
    settings = " ".join(f"{key}={value}" for key, value in top["settings"].items()) or "defaults"
    parts = [top[part]["accuracy"] for part in ("valid", "valid_unseen")]
    own = max((line for line in everything if line["trial"] == 0), key=lambda line: line["round"])
    defaults = "diverged" if own["score"] is None else f"{100 * own['score']:.1f} ({own['round']})"
    close = near(best_first)
    trials = len({line["trial"] for line in everything})
    shares = " | ".join(f"{100 * value:.1f}" for value in (top["score"], *parts, top["valid"]["ece_top1"]))
    return (
        f"| `{top['method']}` | {settings} | {shares} | {trials} | {defaults} | "
        f"{len(close)} of {len(best_first)}: {ranges(close, everything)} |"
    )
