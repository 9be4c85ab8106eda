"""Carry out one experiment: build, train, evaluate, store; resume where it stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import methods, wire
from ..core import rng
from ..core.types import Algorithm, Model, ServerState
from ..data import collection, partition
from ..data.cohort import AVAILABLE, LOST, Pool, pool, probabilities
from ..data.collection import Collection
from ..data.formats.cache import Note, log
from ..data.partition import OWN, Federation
from ..data.source import Source
from ..engine.checkpoint import load_checkpoint
from ..engine.cohorts import in_process
from ..engine.evaluation import answers
from ..engine.machine import tuned
from ..engine.rounds import Listener, Record, Run, ServerUpdate, Silent, Tested, Transport, carry_out, rounds
from ..engine.schedule import Schedule
from ..engine.schedule.capture import captured
from ..engine.schedule.choice import resolved, schedule
from ..engine.task import Task, network, task
from ..errors import SpecError
from ..evaluate.diagnose import diagnose
from ..evaluate.metrics import ClientResult, client_figures, gap_interval, of_classes, summarize, tempered
from .details import details
from .provenance import provenance
from .settings import Experiment, from_toml, resolve, spec_hash, to_toml, with_settings
from .store import Store, StoreError


@dataclass(frozen=True)
class Setup:
    """An experiment, ready to run."""

    experiment: Experiment
    defaults: Mapping[str, Any]
    """Settings that suit the data."""
    pool: Pool
    task: Task
    schedule: Schedule
    """Who calls the clients' turns."""

    @property
    def algorithm(self) -> Algorithm:
        """The method."""
        return self.task.algorithm

    @property
    def released(self) -> bool:
        """Whether figures are taken as the released code takes them."""
        return bool(self.experiment.options["variant"] == "released")


def _content(data: Collection, module: nn.Module | Model | None) -> str:
    """Return a fingerprint of the data and of a user's own network, so that two are never mixed up in one folder."""
    if module is None:
        return data.fingerprint
    digest = hashlib.sha256()
    digest.update(b"" if isinstance(module, Model) else str(module).encode())
    network = module.init(rng.key(0)) if isinstance(module, Model) else dict(module.named_parameters())
    for name, value in network.items():
        digest.update(f"{name}{tuple(value.shape)}".encode() + value.detach().double().cpu().numpy().tobytes())
    return f"{data.fingerprint}/{digest.hexdigest()[:12]}"


def complete(experiment: Experiment, data: Collection, module: nn.Module | Model | None = None) -> Experiment:
    """Return the experiment with everything filled in that the data and the network decide."""
    return resolve(replace(experiment, data=data.name, content=_content(data, module)), data.defaults)


def deal(e: Experiment, data: Collection) -> Federation:
    """Return who holds which row in a complete experiment."""
    return collection.deal(
        data, kind=e.domains, image_size=e.image_size, channels=e.channels, partition=e.partition,
        clients=e.clients, unseen=e.unseen, test_rows=e.test_rows, valid=e.valid,
        valid_rows=e.valid_rows or OWN, valid_clients=e.valid_clients, test_share=e.test_share,
        server_share=methods.traits(e.method, e.options).server_rows_share or 0.0, seed=e.seed,
    )  # fmt: skip


def channels_last(e: Experiment) -> bool:
    """Whether images lie in memory with the channels of a pixel side by side: a loop over convolutions is faster so."""
    return e.device == "cpu" and e.backend != "vmap"


Data = Source | Sequence[Source] | Collection
"""What a user may hand over instead of a dataset's name."""


def data_of(experiment: Experiment, source: Data | None = None, note: Note = log) -> Collection:
    """Return the data that is given, or read what the experiment names."""
    return collection.load(experiment.data, experiment.root, note) if source is None else collection.collect(source)


def prepare(
    experiment: Experiment,
    source: Data | None = None,
    module: nn.Module | Model | None = None,
    *,
    sealed: bool = False,
) -> Setup:
    """Complete an experiment and build all its parts; wrong input is found here, before anything is written.

    With `sealed` nobody holds the number of a test row, and there is no unseen client: nothing can be chosen by them.
    """
    data = data_of(experiment, source)
    e = complete(experiment, data, module)
    federation = partition.sealed(deal(e, data)) if sealed else deal(e, data)
    if e.patience and not any(map(len, federation.valid)):
        raise SpecError(f"valid is {e.valid}, but leaves no client a validation row, which patience needs; raise it")
    model = network(e, federation.source, module)
    backend = resolved(
        e.backend, e.device, model, federation.source.x.shape[1:], batch=int(e.options.get("batch", 0)),
        cohort=int(e.cohort), one=isinstance(module, Model),
    )  # fmt: skip
    e = replace(e, backend=backend)
    rows = pool(federation, e.device, getattr(torch, e.dtype), channels_last=channels_last(e))
    server_rows = torch.from_numpy(federation.server).to(e.device)
    held = (lambda key: rows.inputs(server_rows, key)) if len(federation.server) else None
    built = task(e, federation.source, model, server_rows=held)
    return Setup(e, data.defaults, rows, built, schedule(e.backend, e.device, e.chunk))


def start(setup: Setup) -> ServerState:
    """Return the state before the first round."""
    with torch.no_grad():
        return setup.algorithm.server.init(rng.key(setup.experiment.seed, setup.experiment.device))


@dataclass(frozen=True)
class Evaluation:
    """All clients' answers at one state, and what they sum up to."""

    clients: list[ClientResult]
    summary: dict[str, Any]


def evaluate(setup: Setup, state: ServerState, split: str = "test") -> Evaluation:
    """Personalise and test every client at a state of the server."""
    federation = setup.pool.federation
    known = range(federation.num_clients)
    unseen = range(federation.num_clients, federation.num_clients + federation.num_unseen)
    shared = {name: value for name, value in state.params.items() if not name.startswith("server.")}
    results, sparsities = [], []
    for clients in (known, unseen):
        for result, masks in answers(setup.algorithm, setup.pool, state, clients, setup.schedule.map, split=split):
            results.append(result)
            if clients is known:
                sparsities.append(wire.sparsity(shared | masks))
    released = setup.released
    parts = (results[: len(known)], results[len(known) :])
    test, new = (summarize(part, released=released) for part in parts)
    both = test["accuracy"] is not None and new["accuracy"] is not None
    summary = {
        "test": test,
        "unseen": new,
        "gap": new["accuracy"] - test["accuracy"] if both else None,
        "gap_interval": gap_interval(*parts, released=released),
        "sparsity": {key: sum(each[key] for each in sparsities) / len(sparsities) for key in ("layer", "model")},
        "diagnostics": diagnose(setup.algorithm, state, federation.num_clients),
    }
    if setup.experiment.valid and split == "test":
        held = _held(setup, state, known)
        summary["valid"] = summarize(held, released=released)
        summary["tempered"] = summarize(tempered(parts[0], held), released=released)
        if federation.num_valid:
            summary["valid_unseen"] = summarize(_held(setup, state, validation_clients(federation)), released=released)
    if federation.source.domains:
        summary["domains"] = {
            domain.name: {
                name: summarize(of_classes(part, domain.first_class, domain.num_classes))["accuracy"]
                for name, part in zip(("test", "unseen"), parts, strict=True)
            }
            for domain in federation.source.domains
        }
    return Evaluation(results, summary)


def validation_clients(federation: Federation) -> range:
    """Return the clients that are only ever validated on: the last ones."""
    return range(len(federation.train) - federation.num_valid, len(federation.train))


def evaluate_valid(setup: Setup, state: ServerState, clients: Sequence[int] | None = None) -> dict[str, Any]:
    """Personalise clients, by default all participating ones, and sum up their answers on validation rows alone."""
    who = range(setup.pool.federation.num_clients) if clients is None else clients
    return summarize(_held(setup, state, who), released=setup.released)


def _held(setup: Setup, state: ServerState, clients: Sequence[int]) -> list[ClientResult]:
    return [each for each, _ in answers(setup.algorithm, setup.pool, state, clients, setup.schedule.map, split="valid")]


def run(
    experiment: Experiment | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    source: Data | None = None,
    module: nn.Module | Model | None = None,
    listener: Listener | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Run an experiment and return its result, the content of `result.json`.

    Args:
        experiment: what to run; fields and options may also be given by name, `run(method="fedavg", rounds=20)`.
        out: folder for the run's files; none are written without it.
        resume: go on from the last checkpoint in `out`; a finished run is only read.
        source: your own data, see `metavd.arrays`, or several datasets; by default `data` is read from its files.
        module: your own network, an `nn.Module` or what `from_module` made of one.
        listener: is told of every round and evaluation.
        settings: fields of `Experiment` and options of the method.
    """
    listener = listener or Silent()
    experiment = with_settings(experiment or Experiment(), settings)
    data = data_of(experiment, source, listener.note)
    setup = prepare(experiment, data, module)
    with using(setup):
        return _run(setup, Path(out) if out is not None else None, listener, resume=resume)


def using(setup: Setup) -> AbstractContextManager[None]:
    """Return the use of the machine that suits a setup, for a `with` around its rounds."""
    e = setup.experiment
    clients = e.chunk or int(e.cohort) if e.backend == "vmap" else 1
    return tuned(setup.task.num_weights * clients, e.device, e.backend, e.precision)


def _run(setup: Setup, out: Path | None, listener: Listener, *, resume: bool) -> dict[str, Any]:
    if out is None:
        return carry_out(_as_run(setup, None, listener), start(setup), {})
    store = Store(out)
    check_folder(store, setup, resume=resume)
    if store.is_run() and store.is_finished():
        listener.note(f"{store.folder} holds this run, finished; its result is read, not computed again")
        return store.read_result()
    with store.lock():
        store.open(to_toml(setup.experiment))
        found = load_checkpoint(store.checkpoint, setup.experiment.device, listener.note) if resume else None
        state, extra = found or (start(setup), {})
        store.cut_rounds(int(state.round))
        return carry_out(_as_run(setup, store, listener), state, extra)


def check_folder(store: Store, setup: Setup, *, resume: bool) -> None:
    """Refuse to mix two different runs in one folder, or to overwrite one by accident."""
    if not store.is_run():
        return
    there = resolve(with_settings(Experiment(), from_toml(store.config)), setup.defaults)
    if spec_hash(there) != spec_hash(setup.experiment):
        other = f"{there.method} on {there.data}, seed {there.seed}; other settings, data or network"
        raise StoreError(f"the folder {store.folder} holds another run ({other}); name another --out")
    if not resume and not store.is_finished():
        raise StoreError(
            f"the folder {store.folder} holds an unfinished run; go on with --resume, or name another --out"
        )


def _as_run(setup: Setup, store: Store | None, listener: Listener) -> Run:
    e = setup.experiment

    def test(state: ServerState) -> Tested:
        found = evaluate(setup, state)

        def files() -> tuple[list[dict[str, Any]], dict[str, Any]]:
            more = details(setup.algorithm, state, setup.pool.federation, found.clients, released=setup.released)
            return [_client_line(each, setup) for each in found.clients], more

        return Tested(found.summary, files)

    return Run(
        spec=e,
        spec_hash=spec_hash(e),
        update=server_update(setup),
        transport=transport(setup),
        test=test,
        valid=(lambda state: evaluate_valid(setup, state)) if e.patience else None,
        journal=store,
        listener=listener,
        notes=methods.notes(e.method, e.options, e.rounds),
        about=lambda: {"backend": e.backend, "precision": e.precision, **provenance(e.device)},
    )


def server_update(setup: Setup) -> ServerUpdate:
    """Return the server's update, on a GPU as a CUDA graph."""
    update = setup.algorithm.server.update
    return captured(update) if setup.pool.x.is_cuda else update


def transport(setup: Setup) -> Transport:
    """Return how rounds reach the simulated clients, of whom some may be away or fail."""
    e = setup.experiment
    key = rng.key(e.seed)
    # Probabilities of 1 and 0 are no event, and draw nothing.
    chances = {
        name: None if text == never else probabilities(text, e.clients, rng.fold(key, tag), name)
        for name, text, never, tag in (("available", e.available, "1", AVAILABLE), ("lost", e.lost, "0", LOST))
    }
    return in_process(setup.algorithm, setup.pool, setup.schedule, cohort=int(e.cohort), **chances)


def rounds_of(setup: Setup, state: ServerState) -> Iterator[tuple[ServerState, Record]]:
    """Train from a state on, with the clients that are there; yield the state and the record after each round."""
    return rounds(server_update(setup), transport(setup), state, setup.experiment.rounds)


def _client_line(result: ClientResult, setup: Setup) -> dict[str, Any]:
    figures = {name: "" if value is None else value for name, value in client_figures(result).items()}
    return {
        "client": result.client,
        "unseen": int(result.client >= setup.pool.federation.num_clients),
        "train_size": result.train_size,
        "test_size": len(result.y),
        **figures,
    }
