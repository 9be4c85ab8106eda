"""What a trained model is for: adapt it to a client, or to one who was never seen.

own   = personalize(received, batches)     what evaluation computes for a client, here for one who asks
probs = predict(own, x)                    what evaluation scores, here for rows without a score; see `model`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import tree
from ..core.owned import shown_to
from ..core.types import Model, ServerState
from ..data import collection
from ..data.cohort import Pool
from ..data.cohort import pool as pool_of
from ..data.collection import SHOWN
from ..data.formats.cache import Note, log
from ..data.partition import Federation, some
from ..data.source import SourceError
from ..engine import turn
from ..engine.checkpoint import hashes, load_checkpoint, state_hash
from ..engine.kept import held as held_by
from ..engine.kept import newcomers
from ..errors import UserError
from ..runs.settings import Experiment, from_toml, spec_hash, with_settings
from ..runs.setup import Data, Setup, data_of, prepare, using
from ..runs.store import Store
from ..version import VERSION
from .model import ABOUT, OWN_MODULE, Held, Personal, noise_of
from .samples import Given, Samples, blank, class_names, domain_number, samples


@dataclass(frozen=True)
class TrainedRun:
    """A run's folder, opened."""

    folder: Path | None
    """None of a run that wrote no files."""
    setup: Setup
    state: ServerState
    result: dict[str, Any] | None
    """The content of result.json; None while the run is not finished."""
    module: nn.Module | Model | None


def open_run(
    folder: str | Path,
    *,
    trained_on: Data | None = None,
    module: nn.Module | Model | None = None,
    root: str | Path | None = None,
    device: str | None = None,
    note: Note = log,
) -> TrainedRun:
    """Build a run's parts again and load the state that it tested, once it is known to be just that.

    Args:
        folder: of a run, finished or not.
        trained_on: the data that were handed to `run` as `source`; by default they are read as the run did.
        module: the network that was handed to `run`, if one was.
        root: where the files of datasets are; by default where the run found them.
        device: by default the run's, or the CPU where that is not there.
        note: told what a person should know.
    """
    store = Store(Path(folder))
    if not store.is_run():
        raise UserError(f"{folder} holds no run and no personalised model; name the --out folder of one")
    given = with_settings(Experiment(), from_toml(store.config))
    if module is None and "/" in given.content:
        raise UserError(f"the run in {folder} {OWN_MODULE}")
    if trained_on is None:
        _check_readable(given, folder)
    # The state holds all weights by now; whoever uses it need not have the file that training began with.
    given = replace(given, weights="", device=device or (given.device if torch.cuda.is_available() else "cpu"))
    given = given if root is None else replace(given, root=str(root))
    setup = prepare(given, data_of(given, trained_on, note), module)
    if setup.experiment.content != given.content:
        now = f"content {setup.experiment.content} in place of {given.content}"
        raise UserError(f"the data or the network are not those that the run in {folder} was trained with ({now})")
    result = store.read_result() if store.result.exists() else None
    state = _tested(store, setup, result, note)
    return TrainedRun(store.folder, setup, state, result, module)


def _check_readable(given: Experiment, folder: str | Path) -> None:
    try:
        collection.parse(given.data)
    except SourceError:
        raise UserError(
            f"the run in {folder} was trained on {given.data!r}, which is no dataset's name but data handed over in "
            "Python; use Python and pass them as trained_on="
        ) from None


def _tested(store: Store, setup: Setup, result: Mapping[str, Any] | None, note: Note) -> ServerState:
    """Return the state that the run tested, or would test if it ended now."""
    e = setup.experiment
    found = load_checkpoint(store.checkpoint, e.device, note, specs=[spec_hash(e)], seed=e.seed)
    if found is not None and "best" in found[1]:
        found = load_checkpoint(store.best, e.device, note, round=found[1]["best"]["round"])
    if found is None:
        raise UserError(f"the run in {store.folder} has no sound checkpoint; train it with metavd run --resume")
    if result is None:
        note(f"the run in {store.folder} is not finished; its state of round {int(found[0].round)} is used")
    elif any(result[name] != value for name, value in hashes(found[0]).items()):
        raise UserError(
            f"the state of round {result['tested_round']} that the run in {store.folder} tested is missing or damaged; "
            "run it again into another folder"
        )
    return found[0]


def personalize(
    run: str | Path | TrainedRun,
    source: Given | None = None,
    *,
    client: str | int | None = None,
    domain: str | None = None,
    trained_on: Data | None = None,
    module: nn.Module | Model | None = None,
    root: str | Path | None = None,
    device: str | None = None,
    note: Note = log,
) -> Personal:
    """Return the model of one client, adapted exactly as evaluation adapts it.

    Args:
        run: a run's folder, or what `open_run` made of it.
        source: labelled rows of a client that was never seen, see `samples.samples`. Without it, `client` is one of the
            run's own; without both, the model is what a new client receives, before any adaptation.
        client: which of the clients in `source`, or the number of one of the run's clients, unseen ones included.
        domain: of a run on several datasets, which of them `source` is like.
        trained_on: see `open_run`, as the arguments that follow.
        module: your own network.
        root: where the files of datasets are.
        device: where to compute.
        note: told what a person should know.
    """
    trained = opened(run, trained_on=trained_on, module=module, root=root, device=device, note=note)
    found = personalize_each(trained, source, client=client, domain=domain, root=root, note=note)
    if len(found) > 1:
        raise UserError(f"the data hold {len(found)} clients ({some(list(found), 8)}), but one is wanted; name it")
    return next(iter(found.values()))


def personalize_each(
    run: str | Path | TrainedRun,
    source: Given | None = None,
    *,
    client: str | int | None = None,
    domain: str | None = None,
    root: str | Path | None = None,
    note: Note = log,
    **how: Any,
) -> dict[str, Personal]:
    """Return, by name, the models of all clients in `source`, or of the one that is named; see `personalize`."""
    trained = opened(run, root=root, note=note, **how)
    if source is None:
        number = None if client is None else _number(trained, client)
        called = "new" if number is None else trained.setup.pool.federation.name(number)
        return {called: _participating(trained, number, domain)}
    e, held = trained.setup.experiment, trained.setup.pool.federation.source
    takes, classes = blank(held), class_names(held)
    rows = samples(source, takes, classes, data=e.data, domain=domain, root=root or e.root, note=note)
    if rows.y is None:
        raise UserError(
            f"{rows.name} has no labels, but a model is adapted to labelled rows; metavd predict needs none"
        )
    return _new(trained, rows, None if client is None else str(client), classes)


def opened(run: str | Path | TrainedRun, **how: Any) -> TrainedRun:
    """Return a run that is open already, or open it."""
    return run if isinstance(run, TrainedRun) else open_run(run, **how)


def _number(trained: TrainedRun, client: str | int) -> int:
    """Return the number of one of the run's clients."""
    federation = trained.setup.pool.federation
    known, everyone = federation.num_clients, federation.num_clients + federation.num_unseen
    if str(client) in federation.names[:everyone]:
        return federation.names.index(str(client))
    if federation.names:
        there = some(federation.names[:everyone], SHOWN)
        raise UserError(f"client is {client!r}, but the run has the clients {there}")
    if not str(client).isdecimal() or int(client) >= everyone:
        unseen = f", and {known} to {everyone - 1} that never took part" if everyone > known else ""
        raise UserError(f"client is {client!r}, but the run has the clients 0 to {known - 1}{unseen}")
    return int(client)


def _participating(trained: TrainedRun, number: int | None, domain: str | None) -> Personal:
    """Give one of the run's clients its model, or a new one what it would receive."""
    pool = trained.setup.pool
    if domain is not None:
        domain_number(pool.federation.source, domain)
    if number is None:
        return _model(trained, None, pool.federation.num_clients, kind="new", client=None, domain=domain)
    kind = "unseen" if number >= pool.federation.num_clients else "participating"
    return _model(trained, pool, number, kind=kind, client=pool.federation.name(number), domain=domain)


def _new(trained: TrainedRun, rows: Samples, client: str | None, classes: list[str]) -> dict[str, Personal]:
    """Give clients that the run has never seen their models.

    The first of them has the number, and so the random numbers, of the run's first unseen client, and so on: whoever
    brings an unseen client's rows gets exactly the model that the run evaluated.
    """
    names = rows.clients() or ["new"]
    if client is not None and client not in names:
        raise UserError(f"client is {client!r}, but the data hold {some(names, 8) if rows.client else 'no clients'}")
    setup, held = trained.setup, trained.setup.pool.federation
    usable = np.ones(len(rows.x), bool) if rows.test is None else ~rows.test
    owner = np.array(rows.client or ["new"] * len(rows.x), object)
    # pFedGP may be told to lend new clients labelled rows of the others, which must then be there.
    kept = len(held.source.y) if setup.algorithm.personal_batches.extra else 0
    none = np.empty(0, np.int64)
    blocks = tuple(kept + np.flatnonzero((owner == name) & usable) for name in names)
    known = tuple(held.train[number] if kept else none for number in range(held.num_clients))
    assert rows.y is not None
    of = held.source.domain
    source = replace(
        held.source, test=None, client=None,
        x=np.concatenate([held.source.x[:kept], rows.x]), y=np.concatenate([held.source.y[:kept], rows.y]),
        domain=None if of is None else np.concatenate([of[:kept], np.full(len(rows.x), rows.domain)]),
    )  # fmt: skip
    federation = Federation(source, (*known, *blocks), (), (), held.num_clients, len(names), none)
    pool = pool_of(federation, setup.experiment.device, setup.pool.dtype)._replace(layout=setup.pool.layout)
    about = {"kind": "new", "adapted_on": rows.name, "classes": classes,
             "domain": None if rows.domain is None else source.domains[rows.domain].name}  # fmt: skip
    return {
        name: _model(trained, pool, held.num_clients + i, client=name if rows.client else None, **about)
        for i, name in enumerate(names)
        if client in (None, name)
    }


def _model(trained: TrainedRun, pool: Pool | None, number: int, **about: Any) -> Personal:
    """Do for one client what evaluation does for all; without a pool the client has nothing to adapt to."""
    setup, state = trained.setup, trained.state
    e, held = setup.experiment, setup.pool.federation
    algorithm, now, client = setup.algorithm, turn.moment(state), torch.tensor(number, device=e.device)
    with torch.no_grad(), using(setup):
        (new,) = newcomers(algorithm, state, [number])
        own = [] if pool is None else turn.personal_batches(algorithm, pool, number, now, number, new=new)
        unseen = number >= held.num_clients
        shown, place = shown_to(state, client[None], unseen=unseen)
        received = turn.received_for_test(algorithm, shown.params, state.round, place[0], own, unseen=unseen)
        kept = tree.unstack(held_by(algorithm, state, [number]), 0)
        params = turn.own_model(algorithm, received, kept, own, new=new)
    described = {
        "metavd": VERSION, "method": e.method, "data": e.data,
        "run": None if trained.folder is None else str(trained.folder.resolve()),
        "spec": spec_hash(e), "model_sha256": state_hash(state), "round": now.done,
        "adapted_on": "nothing" if pool is None else "rows of the run",
        "samples": 0 if pool is None else len(pool.federation.train[number]),
        "classes": about.pop("classes", None) or class_names(held.source),
        "key": int(turn.answer_key(now, number)), "noise": noise_of(algorithm), "result": trained.result,
        **about,
    }  # fmt: skip
    return Personal(params, blank(held.source), e, described, trained.module, _held(pool, number))


def _held(pool: Pool | None, number: int) -> Held | None:
    """Return a client's validation rows; rows of new clients are dealt none."""
    if pool is None or number >= len(pool.federation.valid):
        return None
    source, rows = pool.federation.source, pool.federation.valid[number]
    domain = None if source.domain is None else source.domain[rows]
    return Held(f"validation rows of client {pool.federation.name(number)}", source.x[rows], source.y[rows], domain)


def open_model(
    place: str | Path, *, client: str | None = None, domain: str | None = None, device: str | None = None, **how: Any
) -> Personal:
    """Return the model of a personalised folder, or of a run's client, or what a run has for a new client."""
    if (Path(place) / ABOUT).exists():
        if client is not None:
            raise UserError(f"client is {client!r}, but {place} is one client's model already; leave it out")
        return Personal.load(place, device=_usable(device or "cpu"))
    return personalize(place, client=client, domain=domain, device=device, **how)


def _usable(device: str) -> str:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise UserError(f"device is {device!r}, but torch has no such device here; use cpu") from None
    return device
