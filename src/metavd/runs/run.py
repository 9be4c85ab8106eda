"""Carry out one experiment: train, evaluate, store; resume where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ..core import rng
from ..core.types import Model, ServerState
from ..data.cohort import AVAILABLE, LOST, probabilities
from ..data.partition import Federation
from ..engine import attacks
from ..engine.checkpoint import load_checkpoint, save_checkpoint
from ..engine.cohorts import in_process
from ..engine.ledger import Ledger
from ..engine.ranks import Ranks, joined
from ..engine.rounds import Listener, Record, Run, ServerUpdate, Silent, Tested, Transport, carry_out, rounds
from ..engine.schedule.capture import captured
from ..engine.task import notes
from ..errors import FailedError
from ..evaluate.diagnose import diverged
from ..evaluate.metrics import ClientResult, client_figures
from . import notebook
from .details import details
from .evaluation import evaluate, evaluate_valid, partly_tested, samples_told, whom
from .folder import check_folder, longer_told
from .provenance import provenance
from .result import Memory, Result, stored
from .settings import Experiment, spec_hash, to_toml, with_settings
from .setup import Data, Setup, data_of, laid_out, prepare, start, using
from .store import Store
from .track import both


def run(
    experiment: Experiment | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    source: Data | None = None,
    module: nn.Module | Model | None = None,
    listener: Listener | None = None,
    **settings: Any,
) -> Result:
    """Run an experiment and return its result: the content of `result.json`, and what `Result` adds to it.

    Args:
        experiment: what to run; fields and options may also be given by name, `run(method="fedavg", rounds=20)`.
        out: folder for the run's files; none are written without it.
        resume: go on from the last checkpoint in `out`; a finished run is only read, or goes on where `rounds` is more.
        source: your own data, see `metavd.arrays`, or several datasets; by default `data` is read from its files.
        module: your own network, an `nn.Module` or what `from_module` made of one.
        listener: is told of every round, evaluation and choice. By default a bar shows them in a notebook; elsewhere
            choices and warnings go to standard error, and with `engine.rounds.Silent()` nowhere.
        settings: fields of `Experiment` and options of the method.
    """
    listener = listener or notebook.listener()
    experiment = with_settings(experiment or Experiment(), settings)
    ranks = joined(experiment.rank_wait)
    if ranks is not None and ranks.rank:
        listener = Silent()
    data = data_of(experiment, source, listener.note)
    setup = prepare(experiment, data, module, ranks=ranks)
    with using(setup):
        if out is not None and (ranks is None or ranks.rank == 0):
            resume = resume or (ranks is not None and ranks.attempt > 1)  # torchrun has started it anew
            return _run(setup, Store(Path(out)), listener, resume=resume, trained_on=data, module=module)
        memory = Memory()
        plan = _as_run(setup, None, both(memory, listener), memory.tested)
        if out is None or ranks is None:
            return memory.result(carry_out(plan, start(setup), {}), setup, module, _client_lines)
        store = Store(Path(out))
        begun = _followed(setup, ranks, store)
        if isinstance(begun, dict):
            return stored(store, begun, trained_on=data, module=module)
        return memory.result(carry_out(replace(plan, written=store), *begun), setup, module, _client_lines)


_Begun = tuple[ServerState, Mapping[str, Any]]


def _followed(setup: Setup, ranks: Ranks, store: Store) -> _Begun | dict[str, Any]:
    """Return where a run begins, as rank 0 says: anew, or from a checkpoint in a folder that all ranks see.

    Of a finished run it says the result.
    """
    round, *_ = ranks.all(None)
    if round is None:
        return start(setup), {}
    if isinstance(round, dict):
        return round
    e = setup.experiment
    found = load_checkpoint(store.checkpoint, e.device, round=round, specs=[spec_hash(e)], seed=e.seed)
    if found is None:
        raise FailedError(f"rank {ranks.rank} finds no checkpoint of round {round} in {store.folder}; "
                         "ranks on several machines need one folder that all of them see")  # fmt: skip
    return laid_out(setup, found[0]), found[1]


def _run(setup: Setup, store: Store, listener: Listener, *, resume: bool, **given: Any) -> Result:
    longer = check_folder(store, setup.experiment, setup.defaults, resume=resume, longer=resume)
    if store.is_run() and store.is_finished() and not longer:
        listener.note(f"{store.folder} holds this run, finished; its result is read, not computed again")
        value = store.read_result()
        for text in value.get("warnings", ()):
            listener.note(text)
        if setup.ranks is not None:
            setup.ranks.all(dict(value))
        return stored(store, value, **given)
    with store.lock():
        known = store.is_run()
        e, spec = setup.experiment, spec_hash(setup.experiment)
        read = partial(load_checkpoint, store.checkpoint, e.device, listener.note, seed=e.seed)
        # The checkpoint names the shorter run, or already this one, where a process was killed in the next lines.
        if longer and (short := read(specs=[spec_hash(replace(e, rounds=longer)), spec])) is not None:
            # From here on it is this one's, which is not finished.
            save_checkpoint(store.checkpoint, *short, spec=spec, seed=e.seed)
            store.result.unlink(missing_ok=True)
            for text in longer_told(e, longer):
                listener.note(text)
        store.open(to_toml(e))
        found = read(specs=[spec]) if resume else None
        if resume and known and found is None:
            listener.note(f"{store.folder} holds no checkpoint of this run; it begins anew")
        if setup.ranks is not None:
            setup.ranks.all(int(found[0].round) if found else None)
        state, extra = (laid_out(setup, found[0]), found[1]) if found else (start(setup), {})
        store.cut_rounds(int(state.round), listener.note)
        return stored(store, carry_out(_as_run(setup, store, listener), state, extra), **given)


def _as_run(
    setup: Setup,
    store: Store | None,
    listener: Listener,
    told: Callable[[ServerState, list[ClientResult]], None] = lambda *_: None,
) -> Run:
    e, federation = setup.experiment, setup.pool.federation
    curve = partly_tested(setup, e.eval_clients)

    def test(state: ServerState, count: int = e.final_clients) -> Tested:
        found = evaluate(setup, state, count=count)
        told(state, found.clients)

        def files() -> tuple[list[dict[str, Any]], dict[str, Any]]:
            more = details(setup.algorithm, state, federation, found.clients, released=setup.released)
            return _client_lines(found.clients, federation), more

        return Tested(found.summary, files)

    return Run(
        spec=e,
        spec_hash=spec_hash(e),
        update=server_update(setup),
        transport=transport(setup),
        test=test,
        look=partial(test, count=e.eval_clients),
        valid=partial(evaluate_valid, setup, clients=whom(setup, e.eval_clients)["test"]) if e.patience else None,
        journal=store,
        listener=listener,
        warned=lambda loss, summary: diverged(loss, summary["test"], _labels(federation)),
        privacy=setup.algorithm.privacy,
        notes=[*setup.notes, *samples_told(setup), *notes(e, setup.algorithm)],
        about=lambda: {
            "backend": e.backend,
            "precision": e.precision,
            **({"curve_sampled": curve} if curve else {}),
            **_names(federation),
            **provenance(e.device),
        },
    )


def _labels(federation: Federation) -> np.ndarray:
    """Count the test rows of participating clients by class, (K,)."""
    rows = np.concatenate([*federation.test[: federation.num_clients], np.zeros(0, np.int64)])
    return np.bincount(federation.source.y[rows], minlength=federation.source.num_classes)


def server_update(setup: Setup) -> ServerUpdate:
    """Return the server's update, on a GPU as a CUDA graph; for cohorts of many sizes there would be many of those."""
    update, privacy = setup.algorithm.server.update, setup.algorithm.privacy
    varies = privacy is not None and privacy.poisson and privacy.rate < 1
    return captured(update) if setup.pool.x.is_cuda and not varies else update


def transport(setup: Setup) -> Transport:
    """Return how rounds reach the simulated clients, of whom some may be away or fail."""
    e = setup.experiment
    key = rng.key(e.seed)
    # Probabilities of 1 and 0 are no event, and draw nothing.
    chances = {
        name: None if text == never else probabilities(text, e.clients, rng.fold(key, tag), name)
        for name, text, never, tag in (("available", e.available, "1", AVAILABLE), ("lost", e.lost, "0", LOST))
    }
    attack = attacks.parse(e.attack)
    return in_process(
        setup.algorithm, setup.pool, setup.schedule, cohort=int(e.cohort), part=e.part, attack=attack,
        liars=None if attack is None else attacks.liars(key, int(e.clients), attack.share), **chances,
    )  # fmt: skip


def rounds_of(setup: Setup, state: ServerState, ledger: Ledger | None = None) -> Iterator[tuple[ServerState, Record]]:
    """Train from a state on, with the clients that are there; yield the state and the record after each round.

    `ledger` is the one of the rounds before; None: there were none that reveal anything.
    """
    ledger = ledger or ledger_of(setup)
    return rounds(server_update(setup), transport(setup), state, setup.experiment.rounds, ledger)


def ledger_of(setup: Setup, extra: Mapping[str, Any] | None = None) -> Ledger:
    """Return the ledger of a run that begins, or goes on from a checkpoint that says this beside the state."""
    return Ledger.opened(setup.algorithm.privacy, extra or {})


def _names(federation: Federation) -> dict[str, Any]:
    """Return the names of clients, in their order, and of classes, where the data have names for them."""
    found = {"clients": federation.names, "classes": federation.source.classes}
    names = {key: list(value) for key, value in found.items() if value}
    return {"names": names} if names else {}


def _client_lines(results: Sequence[ClientResult], federation: Federation) -> list[dict[str, Any]]:
    """Return the lines of clients.csv."""
    names = federation.names
    return [
        {
            "client": result.client,
            **({"name": names[result.client]} if names else {}),
            "unseen": int(result.client >= federation.num_clients),
            "train_size": result.train_size,
            "test_size": len(result.y),
            **{name: "" if value is None else value for name, value in client_figures(result).items()},
        }
        for result in results
    ]
