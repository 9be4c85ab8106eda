"""What the store keeps of a run's result: every figure, and what each client got right, in some three kilobytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...engine.rounds import Listener
from ...evaluate.figures import Column, figures, number
from ...runs.run import run
from ...runs.store import Store
from ..many import taken
from ..tuned import plain
from .protocol import LAST
from .tables import MEASURES

NORMAL = 1.96
"""Half the width of a 95 % interval of the standard normal distribution."""


def digested(
    settings: dict[str, Any],
    folder: Path,
    listener: Listener,
    *,
    where: Mapping[str, Any],
    look: Callable[[Path], Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Carry out one run and keep its digest; see `many.Work`.

    Args:
        settings: of the run. It is evaluated twenty times, so that `last` averages over the last quarter of its rounds.
        folder: where it lives.
        listener: is told how it goes on.
        where: settings that do not change figures, such as the device.
        look: what is measured of the finished run's folder beside its result, see `serve.trust`; importable by name.
    """
    often = {"eval_every": max(1, int(settings["rounds"]) // 20)} if "rounds" in settings else {}
    result = run(**plain(settings), **(often | dict(where)), out=folder, resume=True, listener=listener)
    more = {} if look is None else {"trust": rounded(look(folder))}
    return taken(result, digest(result, Store(folder)) | more)


def digest(result: Mapping[str, Any], store: Store) -> dict[str, Any]:
    """Return what is kept of a result and of its run's folder; six significant digits, and null for what is no number.

    `error` is the accuracy's standard error over clients, `last` the average of the last evaluations, `bins` the
    paper's reliability diagram of unseen clients; `clients` are, client by client, training rows, test rows, and how
    many of those were answered rightly, so that methods can be compared in pairs.
    """
    names = (*figures(), "clients", "samples")
    parts = {part: {name: result[part].get(name) for name in names} for part in ("test", "unseen")}
    kept = {key: result[key] for key in ("gap", "sparsity", "bytes", "seconds", "domains") if key in result}
    if result.get("diagnostics"):
        kept["rates"] = result["diagnostics"]  # of the dropout rates
    if "valid" in result:
        kept["valid"] = {key: result["valid"][key] for key in ("accuracy", "nll")}
    whole: dict[str, Any] = rounded({
        **parts,
        **kept,
        "model": result["model_sha256"][:12],
        "error": {part: _standard_error(result[part]) for part in parts},
        "last": _average(store.evaluations(result)[-LAST:]),
        "bins": _bins(store),
        "clients": _clients(store),
    })  # fmt: skip
    return whole


def dotted(column: Column) -> str:
    """Return the key of a figure in `last`: "test.accuracy"."""
    return ".".join(column.path)


_MOST = 1000
"""Clients that a line keeps."""


def _clients(store: Store) -> dict[str, dict[str, list[int]]] | None:
    """Return lists over clients for both groups; None where there are too many for a line, or no file of them."""
    try:
        lines = store.read_clients()
    except OSError:
        return None
    if len(lines) > _MOST:
        return None
    parts = {"test": [line for line in lines if line["unseen"] == "0"],
             "unseen": [line for line in lines if line["unseen"] == "1"]}  # fmt: skip
    return {
        name: {
            "train": [int(line["train_size"]) for line in part],
            "rows": [int(line["test_size"]) for line in part],
            "right": [round(float(line["accuracy"] or 0) * int(line["test_size"])) for line in part],
        }
        for name, part in parts.items()
    }


def _bins(store: Store) -> dict[str, Any] | None:
    try:
        unseen = json.loads(store.details.read_text())["reliability"]["unseen"]
    except (OSError, ValueError, KeyError):
        return None
    return unseen and {name: unseen["flat"][name] for name in ("count", "confidence", "accuracy")}


def _standard_error(part: Mapping[str, Any]) -> float | None:
    """Return what the width of the accuracy's bootstrap interval would be for a normal distribution."""
    bounds = (part.get("intervals") or {}).get("accuracy")
    return None if bounds is None else (bounds[1] - bounds[0]) / (2 * NORMAL)


def _average(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Average the tables' figures over some evaluations, and say of which rounds."""
    mean: dict[str, Any] = {"rounds": [each["round"] for each in evaluations]}
    for measure in MEASURES.values():
        if measure.path[0] == "classes":
            continue
        values = [number(each, *measure.path) for each in evaluations]
        known = [value for value in values if value is not None]
        mean[dotted(measure)] = sum(known) / len(known) if len(known) == len(values) else None
    return mean


def rounded(value: Any) -> Any:
    """Return plain values with six significant digits, and null for what is no number."""
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
