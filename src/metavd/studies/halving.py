"""Tune many methods on equal terms: the same trials, rounds and seeds for each, by successive halving.

    trials -> rung 1: train all a little -> keep the best third -> rung 2 -> ... -> the last rung's best is chosen

Every method gets the same number of trials, spread evenly over its own space by a scrambled Sobol sequence, and the
same rounds. No two trials have the same settings; a space that has fewer is searched whole. The first trial is the
method's defaults. A trial is scored on validation rows alone: the mean of the accuracies of clients that train and of
clients that are only ever validated on (`valid_clients`), averaged over the last few evaluations of a rung. Its
federation is sealed, so that nobody holds the number of a test row or of an unseen client's row. A run's options know
its full number of rounds from the start, so that a trial that is stopped at a rung goes on as if it had never been
stopped.

A trial whose privacy budget is spent ends there, and is scored by its last state in every rung.

Each rung of each trial is one line of a store, written as it ends; what is in the store is not computed again. A line
is known by its settings: the value of everything that is searched, in the defaults too, so that the defaults of another
day are another trial. `options` and `fields` are all that was fixed beside, which must be the same as well.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from scipy.stats import qmc

from .. import methods
from ..core.types import NonFiniteError, ServerState
from ..engine.checkpoint import load_checkpoint, save_checkpoint
from ..engine.ledger import Ledger
from ..engine.rounds import Listener
from ..runs.evaluation import evaluate_valid, validation_clients
from ..runs.provenance import provenance
from ..runs.run import ledger_of, rounds_of
from ..runs.settings import RUNTIME, Experiment, content, resolve, spec_hash, with_settings
from ..runs.setup import Setup, data_of, prepare, start, using
from ..templates import filled
from .lines import Line, append, rows
from .many import carry_out
from .markdown import markdown_table
from .plan import Dimension, check_patience, space

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


def points(dimensions: Sequence[Dimension], first: Mapping[str, Any], count: int, seed: int) -> list[dict[str, Any]]:
    """Spread trials evenly over a space, no two alike; one that has no more than `count` is taken whole.

    Args:
        dimensions: what is searched.
        first: the first trial, wherever it lies: the method's own defaults.
        count: how many trials, the first one included.
        seed: of the Sobol sequence.

    >>> lr = Dimension("lr", (0.01, 0.02, 0.05))
    >>> points((lr,), {"lr": 0.02}, 12, seed=0)
    [{'lr': 0.02}, {'lr': 0.01}, {'lr': 0.05}]
    """
    found = {tuple(first.values()): dict(first)}
    for values in _spread(dimensions, count, seed):
        if len(found) == count:
            break
        found.setdefault(values, dict(zip(first, values, strict=True)))
    return list(found.values())


_PATIENCE = 6
"""Places are drawn until there are enough, or 2^6 times as many as were asked for: a range has finitely many values."""


def _spread(dimensions: Sequence[Dimension], count: int, seed: int) -> Iterator[tuple[Any, ...]]:
    """Yield places of a space, perhaps one twice: all of a small one, else by a scrambled Sobol sequence."""
    if math.prod(len(one.values) or math.inf for one in dimensions) <= count:
        yield from product(*(one.values for one in dimensions))
        return
    sobol, power = qmc.Sobol(len(dimensions), scramble=True, seed=seed), max(1, math.ceil(math.log2(count)))
    for more in (power, *range(power, power + _PATIENCE)):  # 2^power, and then as many as there were so far
        for draw in sobol.random_base2(more):
            yield tuple(_at(one, float(x)) for one, x in zip(dimensions, draw, strict=True))


def _at(one: Dimension, x: float) -> Any:
    """Return the value at a place x in [0, 1) of a dimension."""
    if one.values:
        return one.values[min(int(x * len(one.values)), len(one.values) - 1)]
    low, high = (math.log(one.low), math.log(one.high)) if one.log else (one.low, one.high)
    value = low + x * (high - low)
    value = math.exp(value) if one.log else value
    return round(value) if isinstance(one.low, int) else float(f"{value:.3g}")


def name_of(line: Mapping[str, Any]) -> str:
    """Return what tells one line of a store from all others, but for what was fixed beside its settings."""
    return json.dumps([line[key] for key in ("study", "method", "settings", "round", "of", "seed")], sort_keys=True)


def study_of(experiment: Experiment) -> str:
    """Name what methods are tuned for: the data, how they are dealt, and how they are judged.

    >>> study_of(Experiment(data="digits"))
    'digits dirichlet:0.5 consistent'
    """
    e = resolve(experiment)
    return f"{e.data} {e.partition} {e.test_rows}"


def rung(
    about: Line, folder: Path, listener: Listener, *, store: Path, experiments: Mapping[str, Experiment], first: int
) -> Line:
    """Carry out a rung of a trial and store its line, unless another process did so meanwhile; see `many.Work`."""
    line = _known(read(store), about)
    if line is None:
        line = stretch(about, folder, listener, experiments=experiments, first=first)["result"]
        append(store, line)
    return {"result": line}


def stretch(about: Line, folder: Path, _: Listener, *, experiments: Mapping[str, Experiment], first: int) -> Line:
    """Train a trial from one rung to the next, and score it; the state is kept for the rung after that."""
    began = time.monotonic()
    e = with_settings(experiments[about["method"]], about["settings"])
    line = about | {"seconds": 0.0, **provenance(e.device)}
    try:
        setup = prepare(e, data_of(e), sealed=True)
        with using(setup):
            looks, spent = _looks(setup, first, about["round"], folder)
    except NonFiniteError as error:
        line |= {"score": None, "reason": str(error)}
    else:
        mean = {
            part: {name: sum(look[part][name] for look in looks) / len(looks) for name in FIGURES}
            for part in ("valid", "valid_unseen")
        }
        score = sum(mean[part]["accuracy"] for part in mean) / len(mean)
        line |= {"spec": spec_hash(setup.experiment), **mean, "score": score, **({"spent": spent} if spent else {})}
    return {"result": line | {"seconds": round(time.monotonic() - began, 1)}}


def _looks(setup: Setup, first: int, last: int, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Train up to a round, or until the privacy budget is spent.

    Returns the figures of validation rows at the last few evaluations, and where training ended before the round and
    why.
    """
    apart = validation_clients(setup.pool.federation)

    def look(state: ServerState) -> dict[str, Any]:
        return {"valid": evaluate_valid(setup, state), "valid_unseen": evaluate_valid(setup, state, apart)}

    state, ledger = _begun(setup, first, folder)
    wanted = {round for round in (last - _GAP * place for place in range(_LOOKS)) if round > first}  # this rung's own
    looks = []
    for state, record in rounds_of(setup, state, ledger):  # noqa: B020
        if record.round in wanted:
            looks.append(look(state))
        if record.round == last:
            break
    save_checkpoint(folder, state, ledger.state())
    done = int(state.round)
    if done == last:
        return looks, ""
    return [*looks, *([] if done in wanted else [look(state)])], f"after round {done}: {ledger.full()}"


def _begun(setup: Setup, first: int, folder: Path) -> tuple[ServerState, Ledger]:
    """Return where a trial goes on after a rung, on another machine anew, to the same bits; and what it revealed."""
    device = setup.experiment.device
    # Of a trial that had spent its privacy budget by then, the last state is of an earlier round.
    found = load_checkpoint(folder, device, round=first) or load_checkpoint(folder, device)
    if found is None or int(found[0].round) > first:
        return start(setup), ledger_of(setup)
    return found[0], ledger_of(setup, found[1])


def read(store: Path) -> dict[str, Line]:
    """Return the lines of a store by their names, the latest of each.

    In older lines the defaults have no settings, but options: of those what the method's other trials were searched in.
    Where they have neither, nobody knows what they were.
    """
    lines = [line for _, line in rows(store) if line is not None and (line["settings"] or "options" in line)]
    searched: dict[tuple[str, str], dict[str, None]] = {}
    for line in lines:
        searched.setdefault((line["study"], line["method"]), {}).update(dict.fromkeys(line["settings"]))
    found: dict[str, Line] = {}
    for line in lines:
        names = searched[line["study"], line["method"]]
        settings = line["settings"] or {name: line["options"][name] for name in names if name in line["options"]}
        whole = line | {"settings": settings}
        before = found.get(name_of(whole), whole)
        found[name_of(whole)] = whole | {"trial": min(before["trial"], whole["trial"])}  # 0, the defaults, stays 0
    return found


def _fixed(e: Experiment) -> Line:
    """Return what a trial's line says beside its settings: every option, and the fields that are not at their default.

    What a study or a line is known by already is not repeated, nor what does not change what is computed.
    """
    named = RUNTIME | {"method", "data", "partition", "test_rows", "rounds", "seed", "options"}
    usual = content(Experiment())
    fields = {key: value for key, value in content(e).items() if key not in named and value != usual[key]}
    return {"options": dict(resolve(e).options), "fields": fields}


def _same(line: Line, asked: Line) -> bool:
    """Whether a line's fixed options and fields are those that are asked for, as far as it says."""
    fixed = asked["options"]
    same_options = all(fixed[name] == value for name, value in line.get("options", {}).items() if name in fixed)
    return same_options and line.get("fields", asked["fields"]) == asked["fields"]


def best(lines: Iterable[Line], count: int) -> list[str]:
    """Return the names of the lines with the highest scores; one that diverged has none."""
    scored = [line for line in lines if line["score"] is not None]
    return [name_of(line) for line in sorted(scored, key=lambda line: (-line["score"], line["trial"]))[:count]]


def search(
    experiments: Sequence[Experiment],
    halving: Halving,
    *,
    store: Path,
    scratch: Path,
    jobs: int = 1,
    until: float | None = None,
    searched: Mapping[str, str] | None = None,
    note: Callable[[str], None] | None = None,
) -> Iterator[Line]:
    """Tune methods on equal terms; yield each rung of each trial as it ends.

    Args:
        experiments: one for each method, all else alike, with `valid` and `valid_clients`.
        halving: how many trials, and how they are thinned out.
        store: file of finished rungs; what it holds is not computed again.
        scratch: folder for the states of trials between rungs.
        jobs: processes side by side; 0: what suits the device.
        until: when all must be over, see `many.carry_out`; a method whose rung is not over does not go on to the next.
        searched: spaces, as text, that change or add to the methods' own.
        note: is told how many trials there was no time for, or are another command's, and whose budget is spent.
    """
    if not experiments:
        return
    for e in experiments:
        check_patience(e)
    tell = note or (lambda _: None)
    done, last = read(store), halving.rungs[-1]
    asked = {e.method: replace(e, rounds=last) for e in experiments}
    planned = {method: _trials(e, halving.trials, searched or {}) for method, e in asked.items()}

    def place(about: Mapping[str, Any]) -> str:
        trained = with_settings(asked[about["method"]], about["settings"])
        return f"{spec_hash(trained)}-{trained.seed}"

    for number, (first, round) in enumerate(pairwise((0, *halving.rungs))):
        tasks: dict[str, Line] = {}
        for method, trials in planned.items():
            if number:
                before = (_known(done, trial | {"round": first}) for trial in trials)
                over = [line for line in before if line is not None]
                going = best(over, halving.survivors(number)) if len(over) == len(trials) else []
                planned[method] = [trial for trial in trials if name_of(trial | {"round": first}) in going]
            here = [trial | {"round": round} for trial in planned[method]]
            tasks |= {name_of(trial): trial for trial in here if _known(done, trial) is None}
        work = partial(rung, store=store, experiments=asked, first=first)
        ends: Counter[str] = Counter()
        for ended in carry_out(tasks, work, work=scratch, place=place, keep=True, strict=True, jobs=jobs,
                               until=until, device=experiments[0].device):  # fmt: skip
            ends[ended.end] += 1
            if ended.line is not None:
                done[ended.key] = line = ended.line["result"]
                yield line
                if "spent" in line:
                    tell(f"  {line['method']}  trial {line['trial']} ended {line['spent']}")
        for end, why in _WHY.items():
            if ends[end]:
                tell(f"{ends[end]} trials {why}; the same command goes on with them")


_WHY = {"left": "were not begun, for want of time", "elsewhere": "are another command's at the moment"}
"""Why a trial has no line yet."""


def _known(lines: Mapping[str, Line], trial: Line) -> Line | None:
    """Return the line of a rung of a trial, where there is one with all that was fixed beside its settings."""
    line = lines.get(name_of(trial))
    return line if line is not None and _same(line, trial) else None


def _trials(e: Experiment, count: int, searched: Mapping[str, str]) -> list[Line]:
    """Return a method's trials, as their lines begin; the first one is its defaults."""
    dimensions = space(e, {key: text for key, text in searched.items() if key in methods.options_of(e.method)})
    usual = resolve(e)
    first = {one.name: usual.options.get(one.name, getattr(usual, one.name, None)) for one in dimensions}
    shared = {"study": study_of(e), "method": e.method, "seed": e.seed, "of": e.rounds}
    return [
        {**shared, "trial": number, "settings": point, **_fixed(with_settings(e, point))}
        for number, point in enumerate(points(dimensions, first, count, e.seed))
    ]


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


def is_default(line: Line, everything: Iterable[Line]) -> bool:
    """Whether a line has the settings that were the method's defaults when it was tuned last."""
    usual = [each["settings"] for each in everything if each["trial"] == 0]
    return bool(usual) and line["settings"] == usual[-1]


def distinct(lines: Iterable[Line]) -> set[str]:
    """Return the settings that some lines have, each once: the trials that there were."""
    return {json.dumps(line["settings"], sort_keys=True) for line in lines}


def ranges(lines: Sequence[Line]) -> str:
    """Say which values some trials have: "lr 0.01..0.03, beta 3.0"."""
    found: dict[str, set[Any]] = {}
    for line in lines:
        for name, value in line["settings"].items():
            found.setdefault(name, set()).add(value)

    def said(values: set[Any]) -> str:
        if len(values) > 1 and not any(isinstance(value, str | bool) for value in values):
            return f"{min(values)}..{max(values)}"
        return " or ".join(sorted(map(str, values)))

    return ", ".join(f"{name} {said(values)}" for name, values in found.items())


def page(lines: Sequence[Line], command: str) -> str:
    """Return what was chosen as a document: settings, figures, and how wide the optimum is."""
    found = chosen(lines)
    studies = []
    for study in dict.fromkeys(study for study, _ in found):
        made = [line for line in lines if line["study"] == study]
        machines = {f"{line['machine']}, torch {line['torch']}, commit {line['commit']}" for line in made}
        table = markdown_table(
            ["method", "settings", "score %", "participating %", "validation clients %", "ECE %", "trials",
             "defaults %", "within 1 point"],
            [_row(rows, [line for line in made if line["method"] == method])
             for (name, method), rows in found.items() if name == study],
            text=(0, 1, 8),
        )  # fmt: skip
        studies.append(
            {"name": study, "seeds": ", ".join(sorted({str(line["seed"]) for line in made})), "rungs": len(made),
             "where": "; ".join(sorted(machines)), "table": "\n".join(table)}
        )  # fmt: skip
    return filled("tuned.md", command=command, studies=studies)


def _row(best_first: Sequence[Line], everything: Sequence[Line]) -> list[str]:
    """Return one method's row of a table."""
    top = best_first[0]
    settings = " ".join(f"{key}={value}" for key, value in top["settings"].items())
    settings += " (the defaults)" if is_default(top, everything) else ""
    parts = [top[part]["accuracy"] for part in ("valid", "valid_unseen")]
    own = max((line for line in everything if is_default(line, everything)), key=lambda line: line["round"],
              default=None)  # fmt: skip
    defaults = "" if own is None else "diverged"
    if own is not None and own["score"] is not None:
        defaults = f"{100 * own['score']:.1f} ({own['round']})"
    close = near(best_first)
    shares = [f"{100 * value:.1f}" for value in (top["score"], *parts, top["valid"]["ece_top1"])]
    wide = f"{len(close)} of {len(best_first)}: {ranges(close)}"
    return [f"`{top['method']}`", settings, *shares, str(len(distinct(everything))), defaults, wide]
