"""Which run a folder holds: another one is refused, a shorter one goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..core.objective import ramp
from ..data.partition import some
from .settings import RUNTIME, SETTINGS, Experiment, content, from_toml, resolve, spec_hash, with_settings
from .store import Store, StoreError


def check_folder(
    store: Store, e: Experiment, defaults: Mapping[str, Any], *, resume: bool, longer: bool = False
) -> int:
    """Refuse to mix two different runs in one folder, or to overwrite one by accident.

    `defaults` are the settings that suit the data. With `longer` the run there may be this one but for fewer rounds:
    their number is returned, else 0.
    """
    if not store.is_run():
        return 0
    there = resolve(with_settings(Experiment(), from_toml(store.config)), defaults)
    if spec_hash(there) != spec_hash(e):
        shorter = there.rounds < e.rounds and spec_hash(replace(there, rounds=e.rounds)) == spec_hash(e)
        if longer and shorter:
            return there.rounds
        right = "go on with --resume, or name another --out" if shorter and not resume else "name another --out"
        about = f"{there.method} on {there.data}, seed {there.seed}"
        raise StoreError(f"the folder {store.folder} holds another run ({about}): {_differs(there, e)}; {right}")
    if not resume and not store.is_finished():
        raise StoreError(
            f"the folder {store.folder} holds an unfinished run; go on with --resume, or name another --out"
        )
    return 0


def _differs(there: Experiment, here: Experiment) -> str:
    """Say in which settings two runs differ."""

    def told(names: Iterable[str], old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
        pairs = ((name, old.get(name, "not there"), new.get(name, "not there")) for name in names)
        return [f"{name} is {a} there and {b} here" for name, a, b in pairs if a != b]

    fields = content(there), content(here)
    found = told((name for name in SETTINGS if name not in RUNTIME | {"content", "weights_content"}), *fields)
    if there.method == here.method:
        found += told(dict.fromkeys([*there.options, *here.options]), there.options, here.options)
    found += ["the data or the network are others"] if there.content != here.content else []
    found += ["the weights to begin with are others"] if there.weights_content != here.weights_content else []
    return some(found, 4) or f"{some(told(('eval_every', 'eval_clients'), *fields))}, on which patience depends"


def longer_told(e: Experiment, before: int) -> list[str]:
    """Say that a run goes on for more rounds, and whether that is the same as having asked for them at once."""
    said = [f"the run of {before} rounds goes on to {e.rounds}"]
    share = e.options.get("beta_ramp")  # the one schedule that is a share of all rounds
    if share:
        rounds = torch.arange(before, dtype=torch.float32)
        short, long = (ramp(float(e.options["beta"]), count, float(share))(rounds) for count in (before, e.rounds))
        if not torch.equal(short, long):
            said.append(
                f"it is not the run of {e.rounds} rounds from the start: beta_ramp={share:g} is a share of all rounds, "
                f"and beta rose over {share * before:g} of them in place of {share * e.rounds:g}"
            )
    if e.patience:
        said.append("where patience has stopped it already, it stays stopped")
    return said
