"""Carry out one experiment: build, train, evaluate, store; resume where it stopped."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from .. import wire
from ..core import rng
from ..core.types import Algorithm, Model, NonFiniteError, ServerState
from ..data import collection
from ..data.cohort import AVAILABLE, LOST, Pool, pool, probabilities
from ..data.collection import Collection
from ..data.formats.cache import Note, log
from ..data.partition import Federation
from ..data.source import Source
from ..engine.backend import Backend, loop, threads, vectorized
from ..engine.checkpoint import load_checkpoint, save_checkpoint, state_hash
from ..engine.choice import choice
from ..engine.graph import captured
from ..engine.machine import tuned
from ..engine.simulate import Record, simulate
from ..engine.stepped import Trainer, serves, stepped
from ..engine.task import Task, network, task
from ..engine.together import together
from ..evaluate.metrics import ClientResult, client_figures, gap_interval, of_classes, summarize, tempered
from ..evaluate.personal import answers, diagnose
from .details import details
from .provenance import provenance
from .settings import Experiment, SpecError, from_toml, resolve, spec_hash, to_toml, with_settings
from .store import Store, StoreError


class Listener(Protocol):
    """Whoever wants to know how a run goes on."""

    def start(self, experiment: Experiment, done: int) -> None:
        """A run begins, with `done` rounds behind it."""

    def round(self, record: Record) -> None:
        """A round is over."""

    def evaluation(self, round: int, summary: Mapping[str, Any]) -> None:
        """An evaluation is done."""

    def note(self, text: str) -> None:
        """Something happened that a person should know."""


class Silent:
    """A listener that does not listen."""

    def start(self, experiment: Experiment, done: int) -> None: ...  # noqa: D102
    def round(self, record: Record) -> None: ...  # noqa: D102
    def evaluation(self, round: int, summary: Mapping[str, Any]) -> None: ...  # noqa: D102
    def note(self, text: str) -> None: ...  # noqa: D102


class InterruptedRun(Exception):  # noqa: N818
    """The run was stopped by hand; its checkpoint is safe."""


@dataclass(frozen=True)
class Setup:
    """An experiment, ready to run."""

    experiment: Experiment
    defaults: Mapping[str, Any]
    """Settings that suit the data."""
    pool: Pool
    task: Task
    algorithm: Algorithm
    """The task's, with the server's update as it runs fastest here."""
    backend: Backend
    trainer: Trainer | None
    """Takes the backend's place in training, where there is a faster way."""

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
        clients=e.clients, unseen=e.unseen, test_rows=e.test_rows, valid=e.valid, test_share=e.test_share,
        server_share=float(e.options.get("server_share", 0.0)), seed=e.seed,
    )  # fmt: skip


def channels_last(e: Experiment) -> bool:
    """Whether images lie in memory with the channels of a pixel side by side: a loop over convolutions is faster so."""
    return e.device == "cpu" and e.backend != "vmap"


Data = Source | Sequence[Source] | Collection
"""What a user may hand over instead of a dataset's name."""


def data_of(experiment: Experiment, source: Data | None = None, note: Note = log) -> Collection:
    """Return the data that is given, or read what the experiment names."""
    return collection.load(experiment.data, experiment.root, note) if source is None else collection.collect(source)


_TOGETHER = 256
"""Clients that are evaluated at once under vmap, where the memory holds them."""


def prepare(experiment: Experiment, source: Data | None = None, module: nn.Module | Model | None = None) -> Setup:
    """Complete an experiment and build all its parts; wrong input is found here, before anything is written."""
    data = data_of(experiment, source)
    e = complete(experiment, data, module)
    federation = deal(e, data)
    if e.patience and not any(map(len, federation.valid)):
        raise SpecError(f"valid is {e.valid}, but leaves no client a validation row, which patience needs; raise it")
    model = network(e, federation.source, module)
    e = replace(e, backend=_backend_name(e, model, federation.source.x.shape[1:], own=isinstance(module, Model)))
    rows = pool(federation, e.device, getattr(torch, e.dtype), channels_last=channels_last(e))
    server_rows = torch.from_numpy(federation.server).to(e.device)
    held = (lambda key: rows.inputs(server_rows, key)) if len(federation.server) else None
    built = task(e, federation.source, model, server_rows=held)
    algorithm = built.algorithm
    if rows.x.is_cuda:
        server = algorithm.server
        algorithm = replace(algorithm, server=server._replace(update=captured(server.update)))
    trainer = None
    if e.backend == "vmap" and serves(algorithm):
        trainer = together(e.chunk) if e.device == "cpu" else stepped(capture=True, chunk=e.chunk)
    return Setup(e, data.defaults, rows, built, algorithm, _backend(e), trainer)


def _backend_name(e: Experiment, model: Model, shape: Sequence[int], *, own: bool) -> str:
    """Return the backend that a run takes on its device, where it was left open."""
    name = e.backend
    if name == "auto":
        name = choice(model, shape, int(e.options.get("batch", 0)), int(e.cohort)) if e.device == "cpu" else "vmap"
    # Of a user's own Model there is only this one, and one cannot be used by two threads at once.
    return "loop" if own and name == "threads" else name


def _backend(e: Experiment) -> Backend:
    if e.backend == "vmap":
        return vectorized(e.chunk or _TOGETHER)
    return loop if e.backend == "loop" else threads(torch.get_num_threads())


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
        for result, masks in answers(setup.algorithm, setup.pool, state, clients, setup.backend, split=split):
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
    if federation.source.domains:
        summary["domains"] = {
            domain.name: {
                name: summarize(of_classes(part, domain.first_class, domain.num_classes))["accuracy"]
                for name, part in zip(("test", "unseen"), parts, strict=True)
            }
            for domain in federation.source.domains
        }
    return Evaluation(results, summary)


def evaluate_valid(setup: Setup, state: ServerState, clients: Sequence[int] | None = None) -> dict[str, Any]:
    """Personalise clients, by default all participating ones, and sum up their answers on validation rows alone."""
    who = range(setup.pool.federation.num_clients) if clients is None else clients
    return summarize(_held(setup, state, who), released=setup.released)


def _held(setup: Setup, state: ServerState, clients: Sequence[int]) -> list[ClientResult]:
    return [each for each, _ in answers(setup.algorithm, setup.pool, state, clients, setup.backend, split="valid")]


_TRAFFIC = ("down", "up", "dense_down", "dense_up")


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
        return _train(setup, None, start(setup), {}, listener)
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
        return _train(setup, store, state, extra, listener)


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


@contextmanager
def _saving(store: Store | None, first: ServerState) -> Iterator[dict[str, Any]]:
    """Keep the last good state safe whatever ends the training."""
    last: dict[str, Any] = {}

    def save() -> None:
        if store is not None and last:
            save_checkpoint(store.checkpoint, last["state"], last["extra"])

    try:
        yield last
    except KeyboardInterrupt:
        save()
        done = int(last.get("state", first).round)
        where = f"; the checkpoint is in {store.folder}, go on with --resume" if store else ""
        raise InterruptedRun(f"stopped after round {done}{where}") from None
    except NonFiniteError as error:
        save()
        kept = f"; the checkpoint of round {int(last['state'].round)} is kept" if store and last else ""
        raise NonFiniteError(f"{error}{kept}") from None


@dataclass(frozen=True)
class Best:
    """The state with the smallest validation NLL so far, and for how many evaluations it has been that."""

    state: ServerState
    nll: float
    age: int = 0


def _better(best: Best | None, state: ServerState, nll: float) -> Best:
    return Best(state, nll) if best is None or nll < best.nll else replace(best, age=best.age + 1)


def _best_so_far(store: Store | None, extra: Mapping[str, Any], device: str) -> Best | None:
    """Return the best state of a run that is resumed."""
    if store is None or "best" not in extra:
        return None
    about = extra["best"]
    found = load_checkpoint(store.best, device, round=about["round"])
    if found is None:
        raise StoreError(f"the best state, of round {about['round']}, is missing or damaged in {store.best}")
    return Best(found[0], about["nll"], about["age"])


def _train(
    setup: Setup, store: Store | None, state: ServerState, extra: Mapping[str, Any], listener: Listener
) -> dict[str, Any]:
    e = setup.experiment
    extra = dict(extra)
    bytes_total = {key: int(extra.get(key, 0)) for key in _TRAFFIC}
    before, began = float(extra.get("seconds", 0.0)), time.monotonic()
    best = _best_so_far(store, extra, e.device)
    listener.start(e, int(state.round))
    with _saving(store, state) as last:
        stopped = best is not None and best.age >= e.patience
        for new, record in () if stopped else rounds_of(setup, state):
            state = new
            bytes_total = {key: bytes_total[key] + getattr(record, key) for key in _TRAFFIC}
            listener.round(record)
            line: dict[str, Any] = record._asdict()
            ends, known = record.round == e.rounds, best
            if record.round % e.eval_every == 0 and not ends:
                line |= evaluate(setup, state).summary
                listener.evaluation(record.round, line)
            if e.patience and (record.round % e.eval_every == 0 or ends):
                valid = line["valid"] if "valid" in line else evaluate_valid(setup, state)
                best = _better(best, state, valid["nll"])
            if store is not None:
                store.add_round(line)
            extra = {**bytes_total, "seconds": before + time.monotonic() - began}
            if best is not None:
                extra["best"] = {"round": int(best.state.round), "nll": best.nll, "age": best.age}
            last |= {"state": state, "extra": extra}
            if store is not None and best is not None and best is not known and best.state is state:
                save_checkpoint(store.best, state, {})
            if store is not None and (record.round % e.checkpoint_every == 0 or ends or best is not known):
                save_checkpoint(store.checkpoint, state, extra)
            if best is not None and best.age >= e.patience:
                break
        trained = int(state.round)
        if best is not None:
            state = best.state
            listener.note(f"  the state of round {int(state.round)} has the best validation NLL and is tested")
        final = evaluate(setup, state)
    listener.evaluation(trained, final.summary)
    result = {
        "method": e.method, "data": e.data, "seed": e.seed, "rounds": e.rounds, "device": e.device,
        "trained_rounds": trained, "tested_round": int(state.round),
        "seconds": round(before + time.monotonic() - began, 3),
        **final.summary,
        "bytes": bytes_total,
        "spec": spec_hash(e), "model_sha256": state_hash(state), "backend": e.backend,
        "precision": e.precision, **provenance(e.device),
    }  # fmt: skip
    if store is not None:
        more = details(setup.algorithm, state, setup.pool.federation, final.clients, released=setup.released)
        store.finish(result, [_client_line(each, setup) for each in final.clients], more)
    return result


def rounds_of(setup: Setup, state: ServerState) -> Iterator[tuple[ServerState, Record]]:
    """Train from a state on, with the clients that are there; yield the state and the record after each round."""
    e = setup.experiment
    key = rng.key(e.seed)
    # Probabilities of 1 and 0 are no event, and draw nothing.
    chances = {
        name: None if text == never else probabilities(text, e.clients, rng.fold(key, tag), name)
        for name, text, never, tag in (("available", e.available, "1", AVAILABLE), ("lost", e.lost, "0", LOST))
    }
    return simulate(
        setup.algorithm, setup.pool, state, rounds=e.rounds, cohort=int(e.cohort), backend=setup.backend,
        trainer=setup.trainer, **chances,
    )  # fmt: skip


def _client_line(result: ClientResult, setup: Setup) -> dict[str, Any]:
    figures = {name: "" if value is None else value for name, value in client_figures(result).items()}
    return {
        "client": result.client,
        "unseen": int(result.client >= setup.pool.federation.num_clients),
        "train_size": result.train_size,
        "test_size": len(result.y),
        **figures,
    }
