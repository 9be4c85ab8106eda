"""How the paper's cells are run and read: scale, seeds, test rows, and settings that were chosen by validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ... import methods
from ...data.partition import TEST_ROWS
from ...errors import SpecError
from ...runs.settings import RUNTIME, SETTINGS, Experiment, read_toml, with_settings
from ...schema import meant, nearest
from ..lines import Line, identity
from ..tuned import KEY, Tuned, find, read
from .tables import Cell

SEED = 777
"""The paper's."""
LAST = 5
"""Evaluations in the average that is stored beside the last one."""
SCALES = ("full", "smoke")

_FIXED = frozenset({"method", "data", "partition", "test_rows", "seed", "content", "patience", *RUNTIME})
"""Fields that overrides may not change: what a cell is about, the protocol's own, and those that compute nothing."""
_SMOKE_FIELDS = {"data": "digits", "model": "mlp", "width": 8, "clients": 4, "unseen": 2, "cohort": 2, "rounds": 2}
_SMOKE_OPTIONS = {
    "batch": 32, "local_epochs": 1, "hyper_width": 8, "drop_from": 1, "teachers": 2, "distill_steps": 4, "chains": 2,
    "sweeps": 1, "extra_points": 2,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Protocol:
    """How the cells are run and read; `protocol` makes one and checks it. What is here is the paper's way."""

    scale: str = "full"
    """smoke: every cell on the digits that come with the installation, in two rounds; only to see that it works."""
    seeds: tuple[int, ...] = (SEED,)
    test_rows: str = "independent"
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings chosen by validation, by METHOD[@DATA[@PARTITION]]; * stands for every method or dataset."""
    last: int = 1
    """Evaluations that a figure is the average of: 1, the paper's, or `LAST`."""
    rounds: int = 0
    """Rounds of training; 0: as many as the paper's, 1,000."""
    tuned: tuple[Tuned, ...] | None = None
    """What tuning chose, for the cells that have some; None: nothing is asked of it."""


PAPER = Protocol()


def protocol(
    *,
    scale: str = "full",
    seeds: int | Sequence[int] = 1,
    test_rows: str = "independent",
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    last: int = 1,
    rounds: int = 0,
    tuned: str | Path | None = None,
) -> Protocol:
    """Return a protocol, or say in one sentence what is wrong with it; `seeds` is how many from 777 on, or which.

    `tuned` is a folder of tuned settings, see `studies.tuned`.
    """
    if overrides and tuned is not None:
        raise SpecError("overrides and tuned settings both choose options; give one of the two")
    if scale not in SCALES:
        raise SpecError(f"scale is {scale!r}; {nearest(scale, SCALES)}")
    if test_rows not in TEST_ROWS:
        raise SpecError(f"test_rows is {test_rows!r}; {nearest(test_rows, TEST_ROWS)}")
    if last not in {1, LAST}:
        raise SpecError(f"last is {last}, but must be 1 (the last evaluation) or {LAST} (the average of as many)")
    chosen = tuple(range(SEED, SEED + seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not chosen or len(set(chosen)) < len(chosen):
        raise SpecError(f"seeds is {seeds!r}, but must be a number from 1 on, or different seeds")
    for seed in chosen:
        with_settings(Experiment(), {"seed": seed})
    if rounds:
        with_settings(Experiment(), {"rounds": rounds})
    files = None if tuned is None else read(tuned)
    return Protocol(scale, chosen, test_rows, _checked(overrides or {}), last, rounds, files)


def overrides_from(path: Path) -> dict[str, dict[str, Any]]:
    """Read overrides from a TOML file: ["reptile+metavd@cifar100"] and settings below it."""
    values = read_toml(path, "the overrides file")
    for key, value in values.items():
        if not isinstance(value, dict):
            raise SpecError(f'{key} in {path} is {value!r}, but must be a table such as ["reptile+metavd"]')
    return values


def _checked(overrides: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    every = {name: option for method in methods.NAMES for name, option in methods.options_of(method).items()}
    names = {name: each for name, each in SETTINGS.items() if name not in _FIXED}
    result: dict[str, dict[str, Any]] = {}
    for key, values in overrides.items():
        method, *rest = key.split("@")
        if len(rest) > 2:
            raise SpecError(f"the overrides name {key!r}, but a name is METHOD, METHOD@DATA or METHOD@DATA@PARTITION")
        known = every if method == "*" else methods.options_of(method)
        canonical = "@".join(["*" if method == "*" else methods.check(method), *rest])
        result[canonical] = {}
        for name, value in values.items():
            if name in names:
                result[canonical][name] = getattr(with_settings(Experiment(), {name: value}), name)
            elif name in known:
                result[canonical][name] = known[name].check(value)
            else:
                raise SpecError(f"the overrides for {key} set {name!r}; {meant(name, {**names, **known})}")
    return result


def settings_of(cell: Cell, seed: int = SEED, how: Protocol = PAPER) -> dict[str, Any]:
    """Return what is to be run for a cell: fields, and those options that are not left to their defaults."""
    settings = dict(cell.settings)
    if "method" not in settings:
        small = {key: value for key, value in _SMOKE_FIELDS.items() if key in settings and how.scale == "smoke"}
        return settings | small | {"seed": seed}
    settings |= {"test_rows": how.test_rows} | _chosen(settings, how.overrides)
    found = tuned_for(settings, how)
    if found is not None:
        settings |= {**found.settings, KEY: found.name}
    if how.scale == "smoke":
        settings = _smoke(settings)
    if how.rounds:
        settings["rounds"] = how.rounds
    return settings | {"seed": seed}


def name_of(cell: Cell, seed: int, how: Protocol) -> str:
    """Return what names a cell's run in a store."""
    return identity(settings_of(cell, seed, how), how.scale)


def runs_of(cell: Cell, lines: Mapping[str, Line], how: Protocol) -> dict[int, Line]:
    """Return a cell's finished runs by seed, of a store's lines."""
    found = {seed: lines.get(name_of(cell, seed, how), {}) for seed in how.seeds}
    return {seed: line for seed, line in found.items() if "result" in line}


def tuned_for(settings: Mapping[str, Any], how: Protocol) -> Tuned | None:
    """Return what tuning chose for a run under a protocol, where that is asked for and there is some.

    The released rules (`variant`) have their own values, which nothing is to change.
    """
    if how.tuned is None or "variant" in settings:
        return None
    return find(how.tuned, settings["method"], settings["data"], settings["partition"], settings["test_rows"])


def _chosen(settings: Mapping[str, Any], overrides: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the overrides say of a run; where two speak of the same setting, the one that names more wins."""
    place = [settings["method"], settings["data"], settings["partition"]]
    options = methods.options_of(settings["method"])
    names = {each.name for each in fields(Experiment)}
    result: dict[str, Any] = {}
    for key in sorted(overrides, key=lambda key: sum(word != "*" for word in key.split("@"))):
        if all(word in {"*", own} for word, own in zip(key.split("@"), place, strict=False)):
            result |= {name: value for name, value in overrides[key].items() if name in options or name in names}
    return result


def _smoke(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same cell on digits, as small as its method can be; only the Dirichlet alpha is left of the data."""
    known = methods.options_of(settings["method"])
    kept = {key: value for key, value in settings.items() if key in {"method", "test_rows", "partition", KEY, *known}}
    if kept["partition"] == "natural":
        kept["partition"] = "dirichlet:0.5"
    return kept | _SMOKE_FIELDS | {key: value for key, value in _SMOKE_OPTIONS.items() if key in known}
