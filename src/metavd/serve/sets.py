"""Which rows calibrate a client's sets of classes, and the rule that they give; see `evaluate.conformal`.

The rows must be the client's own and such as its model was not adapted to: the promise of a coverage holds for rows
like them, and rows that the model has learnt look easier than they are.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..data.formats.cache import Note, log
from ..data.partition import some
from ..errors import UserError
from ..evaluate import conformal
from ..evaluate.conformal import Rule
from .model import Held, Personal
from .samples import Given, Samples, domain_number, samples


def calibrated(
    own: Personal,
    coverage: float,
    method: str = "lac",
    *,
    source: Given | None = None,
    penalty: float | None = None,
    free: int | None = None,
    samples: int | None = None,
    domain: str | None = None,
    root: str | Path | None = None,
    note: Note = log,
) -> Rule:
    """Return the rule for a client's sets, which `evaluate.conformal.sets` makes of its model's probabilities.

    Args:
        own: the client's model.
        coverage: how often the right class is to be in a set, above 0 and below 1.
        method: lac, aps or raps, the last two without random numbers.
        source: labelled rows of the client that its model was not adapted to, see `samples.samples`. Where some are
            marked as test rows, only those are used; where clients are named, only the model's client. By default the
            client's validation rows in the run, which a model that was read from a folder does not have.
        penalty: what raps adds to the score for every rank beyond `free`; by default 0.01.
        free: how many ranks cost nothing; by default 5.
        samples: posterior draws, as many as the rows to come are answered with.
        domain: of a model of several datasets, which of them the rows to come are like.
        root: where the files of datasets are.
        note: told what a person should know.
    """
    conformal.check(coverage, method, penalty, free)
    wanted = domain or own.about["domain"]
    rows = _held(own, coverage, wanted) if source is None else _given(own, source, wanted, root, note)
    said = own.predict(rows.x, samples=samples, domain=wanted)
    rule = conformal.calibrate(
        said.probs, rows.y, coverage, method, penalty=conformal.PENALTY if penalty is None else penalty,
        free=conformal.FREE if free is None else free,
    )  # fmt: skip
    _tell(own, rule, rows.name, note)
    return rule


def _held(own: Personal, coverage: float, domain: str | None) -> Held:
    """Return the rows that the model came with, or say how to get some."""
    rows = own.held
    number = domain_number(own.takes, domain)
    if rows is not None and rows.domain is not None:
        alike = rows.domain == number
        rows = Held(rows.name, rows.x[alike], rows.y[alike], rows.domain[alike])
    if rows is None or not len(rows.y):
        raise UserError(
            f"coverage is {coverage}, but there are no calibration rows: the model comes without validation rows; name "
            "labelled rows that it was not adapted to (--calibrate ROWS, source= in Python), or name a client of a run "
            "with valid=0.2"
        )
    return rows


def _given(own: Personal, source: Given, domain: str | None, root: str | Path | None, note: Note) -> Held:
    """Return those of the given rows that may calibrate the model."""
    found: Samples = samples(
        source, own.takes, own.about["classes"], data=own.experiment.data, domain=domain,
        root=root or own.experiment.root, note=note,
    )  # fmt: skip
    if found.y is None:
        raise UserError(f"{found.name} has no labels, but calibration needs labelled rows")
    if found.test is None and isinstance(source, str) and source in (own.about["adapted_on"], own.experiment.data):
        raise UserError(f"the model has learnt from rows of {source}, which cannot calibrate it; give other rows")
    usable = np.ones(len(found.y), bool) if found.test is None else found.test
    name, client, there = found.name, own.about["client"], found.clients()
    if there and client is not None:
        if client not in there:
            raise UserError(f"{name} has rows of {some(there)}, but the model is that of client {client}; give its own")
        usable = usable & (np.array(found.client, object) == client)
        name = f"{name}, client {client}"
    if not usable.any():
        raise UserError(f"{name} marks no row as a test row, but only those may calibrate; mark some, or no row at all")
    return Held(name, found.x[usable], found.y[usable], None)


def _tell(own: Personal, rule: Rule, rows: str, note: Note) -> None:
    """Say what the sets rest on, and what the program chose."""
    how = {
        "lac": "LAC",
        "aps": "APS without random numbers",
        "raps": f"RAPS without random numbers, penalty {rule.penalty} for each rank beyond {rule.free}",
    }[rule.method]
    note(f"sets for coverage {rule.coverage}: {how}, calibrated on {rule.rows} rows ({rows})")
    if not rule.enough:
        fewest = conformal.needed(rule.coverage)
        note(f"{rule.rows} rows are too few for coverage {rule.coverage}, which needs {fewest}: every set is whole")
    e = own.experiment
    if own.held is None or rows != own.held.name:
        return
    if e.valid_rows in ("independent", "uniform"):
        note(
            f"the run dealt validation rows apart from training rows (valid_rows={e.valid_rows}), so that the coverage "
            "holds for their mix of classes; valid_rows=own keeps the client's"
        )
    if e.patience:
        note("the run chose its state by validation rows (patience), so that the coverage may be a little too small")
