"""Carry out one experiment: build, train, evaluate, store; resume where it stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import methods, wire
from ..core import rng
from ..core.accountant import Mechanism
from ..core.owned import apart
from ..core.trace import check_instance
from ..core.types import Algorithm, Model, ServerState
from ..data import collection, partition
from ..data.cohort import AVAILABLE, LOST, Pool, pool, probabilities, sampled
from ..data.collection import Collection
from ..data.formats.cache import Note, log
from ..data.partition import OWN, Federation, some
from ..data.source import Source
from ..engine import attacks
from ..engine.checkpoint import load_checkpoint, save_checkpoint
from ..engine.cohorts import in_process
from ..engine.evaluation import answers
from ..engine.kept import laid, started
from ..engine.machine import tuned
from ..engine.ranks import Ranks, grain_of, joined, once_per_host, ranked, restarted, spread
from ..engine.rounds import Listener, Record, Run, ServerUpdate, Silent, Tested, Transport, carry_out, rounds
from ..engine.schedule import Schedule
from ..engine.schedule.capture import captured
from ..engine.schedule.choice import resolved, schedule
from ..engine.task import Task, network, task
from ..errors import FailedError, SpecError
from ..evaluate.diagnose import diagnose, diverged
from ..evaluate.metrics import ClientResult, client_figures, gap_interval, of_classes, summarize, tempered
from ..models import weights
from ..tree import Params
from . import cost, notebook
from .details import details
from .folder import check_folder, longer_told
from .provenance import provenance
from .result import Memory, Result, stored
from .settings import Experiment, resolve, spec_hash, to_toml, with_settings
from .store import Store


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
    notes: Sequence[str] = ()
    """What was chosen for the data, for people."""
    ranks: Ranks | None = None
    """The processes that share the work, where torchrun started them."""

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
    if not isinstance(module, Model):
        check_instance(module)
    digest = hashlib.sha256()
    digest.update(b"" if isinstance(module, Model) else str(module).encode())
    network = module.init(rng.key(0)) if isinstance(module, Model) else dict(module.named_parameters())
    for name, value in network.items():
        digest.update(f"{name}{tuple(value.shape)}".encode() + value.detach().double().cpu().numpy().tobytes())
    return f"{data.fingerprint}/{digest.hexdigest()[:12]}"


def complete(experiment: Experiment, data: Collection, module: nn.Module | Model | None = None) -> Experiment:
    """Return the experiment with everything filled in that the data and the network decide."""
    e = replace(experiment, data=data.name, content=_content(data, module))
    if e.weights:
        e = replace(e, weights_content=weights.fingerprint(e.weights))
    return resolve(e, collection.settled(data, clients=e.clients, unseen=e.unseen, partition=e.partition))


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
    if source is not None:
        return collection.collect(source)
    return collection.load(experiment.data, experiment.root, note, image_size=experiment.image_size)


def prepare(
    experiment: Experiment,
    source: Data | None = None,
    module: nn.Module | Model | None = None,
    *,
    sealed: bool = False,
    ranks: Ranks | None = None,
) -> Setup:
    """Complete an experiment and build all its parts; wrong input is found here, before anything is written.

    With `sealed` nobody holds the number of a test row, and there is no unseen client: nothing can be chosen by them.
    `ranks` are the processes that share its work.
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
    _check_privacy(e, built.algorithm.privacy)
    notes = collection.told(data, federation)
    if federation.names and e.cohort == e.clients:
        notes.append(f"all {e.clients} clients take part in every round (cohort={e.cohort})")
    if e.weights:
        notes.append(weights.told(built.model, e.weights, e.weights_content))
    if module is not None:
        notes.append(_layers_told(built))
    notes += cost.told(built.model, rows, built.algorithm.train_batches, int(e.cohort))
    notes += cost.parts_told(built.algorithm, built.num_weights, e)
    here = schedule(e.backend, e.device, 0 if ranks else e.chunk)
    if ranks is not None:
        grain = _grain(e)
        e, here = replace(e, chunk=grain if e.backend == "vmap" else e.chunk), ranked(here, ranks, grain)
        how = f"vmap in groups of {grain} (chunk={grain})" if grain else e.backend
        notes.append(f"{ranks.size} rank{'s share' if ranks.size > 1 else ' has'} every cohort of {e.cohort}, {how}")
    return Setup(e, data.defaults, rows, built, here, notes, ranks)


def _layers_told(built: Task) -> str:
    """Say which layers of a user's own network were chosen, and how to choose others."""
    model, noise = built.model, built.algorithm.posterior
    head = f"your network: its output layer is {', '.join(model.head)}"
    if noise is None:
        return head
    others = [name for name in model.layers if name not in noise.layers]
    among = f" of {some(others)}" if others else ""
    return f"{head}; the posterior is on {', '.join(noise.layers)} (choose another{among} with layers=NAME)"


def start(setup: Setup) -> ServerState:
    """Return the state before the first round."""
    with torch.no_grad():
        state = setup.algorithm.server.init(rng.key(setup.experiment.seed, setup.experiment.device))
        return _laid_out(setup, started(setup.algorithm, state, setup.pool.federation.num_clients))


def _laid_out(setup: Setup, state: ServerState) -> ServerState:
    """Lay rows of many clients aside, where a round moves those of its cohort alone; all ranks do so at once."""
    e = setup.experiment
    if not methods.traits(e.method, e.options).moves_all_rows:
        state = apart(state, laid)
    return state if setup.ranks is None else once_per_host(setup.ranks, state)


@dataclass(frozen=True)
class Evaluation:
    """Clients' answers at one state, participating ones first, and what they sum up to."""

    clients: list[ClientResult]
    summary: dict[str, Any]


def whom(setup: Setup, count: int) -> dict[str, Sequence[int]]:
    """Return the clients that an evaluation tests, by group: so many of each, 0 for all; the same in every round."""
    key = rng.key(setup.experiment.seed)
    return {name: sampled(key, group, count) for name, group in _groups(setup.pool.federation).items()}


def _groups(federation: Federation) -> dict[str, range]:
    known, new = federation.num_clients, federation.num_unseen
    groups = {"test": range(known), "unseen": range(known, known + new)}
    return groups | ({"valid_unseen": validation_clients(federation)} if federation.num_valid else {})


def _sampled(setup: Setup, count: int) -> dict[str, dict[str, int]]:
    """Return of each group that is not tested whole how many clients are, and how many there are."""
    groups = _groups(setup.pool.federation)
    return {name: {"clients": count, "of": len(group)} for name, group in groups.items() if 0 < count < len(group)}


def _samples_told(setup: Setup) -> list[str]:
    """Say which figures will rest on a sample of clients."""
    e, titles = setup.experiment, {"test": "participating", "unseen": "unseen", "valid_unseen": "validation"}
    last, said = _sampled(setup, e.final_clients), []
    for name, what, rest in (
        ("eval_clients", "evaluations before the last test", "" if last else "; the last tests all"),
        ("final_clients", "the last evaluation, and so the result, tests", ""),
    ):
        found = _sampled(setup, getattr(e, name))
        if found:
            parts = " and ".join(f"{each['clients']} of {each['of']} {titles[group]}" for group, each in found.items())
            said.append(f"{what} a sample: {parts} clients, always the same ({name}={getattr(e, name)}){rest}")
    return said


def evaluate(setup: Setup, state: ServerState, split: str = "test", *, count: int = 0) -> Evaluation:
    """Personalise and test clients at a state of the server: all, or a sample of `count` of each group."""
    federation = setup.pool.federation
    groups = whom(setup, count)
    known, unseen = groups["test"], groups["unseen"]
    shared = {name: value for name, value in state.params.items() if not name.startswith("server.")}
    results, sparsities = [], []
    for clients in (known, unseen):
        for result, masks in _answered(setup, state, clients, split):
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
            summary["valid_unseen"] = summarize(_held(setup, state, groups["valid_unseen"]), released=released)
    if federation.source.domains:
        summary["domains"] = {
            domain.name: {
                name: summarize(of_classes(part, domain.first_class, domain.num_classes))["accuracy"]
                for name, part in zip(("test", "unseen"), parts, strict=True)
            }
            for domain in federation.source.domains
        }
    found = _sampled(setup, count)
    return Evaluation(results, summary | ({"sampled": found} if found else {}))


def validation_clients(federation: Federation) -> range:
    """Return the clients that are only ever validated on: the last ones."""
    return range(len(federation.train) - federation.num_valid, len(federation.train))


def evaluate_valid(setup: Setup, state: ServerState, clients: Sequence[int] | None = None) -> dict[str, Any]:
    """Personalise clients, by default all participating ones, and sum up their answers on validation rows alone."""
    who = range(setup.pool.federation.num_clients) if clients is None else clients
    return summarize(_held(setup, state, who), released=setup.released)


def _held(setup: Setup, state: ServerState, clients: Sequence[int]) -> list[ClientResult]:
    return [each for each, _ in _answered(setup, state, clients, "valid")]


def _answered(
    setup: Setup, state: ServerState, clients: Sequence[int], split: str
) -> Iterable[tuple[ClientResult, Params]]:
    """Let clients answer their rows, each on one of the ranks."""
    e, ranks = setup.experiment, setup.ranks

    def answer(some: Sequence[int]) -> Iterator[tuple[ClientResult, Params]]:
        return answers(setup.algorithm, setup.pool, state, some, setup.schedule.map, split=split)

    if ranks is None:
        return answer(clients)
    return spread(ranks, state, clients, _grain(e), answer)


def _grain(e: Experiment) -> int:
    """Return how many clients are computed together where ranks share them, at most a part of a cohort."""
    return grain_of(e.backend, e.chunk, min(int(e.cohort), e.part or int(e.cohort)))


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
        listener: is told of every round and evaluation; by default a bar shows them in a notebook.
        settings: fields of `Experiment` and options of the method.
    """
    listener = listener or notebook.listener()
    experiment = with_settings(experiment or Experiment(), settings)
    ranks = joined()
    if ranks is not None and ranks.rank:
        listener = Silent()
    data = data_of(experiment, source, listener.note)
    setup = prepare(experiment, data, module, ranks=ranks)
    with using(setup):
        if out is not None and (ranks is None or ranks.rank == 0):
            resume = resume or restarted()
            return _run(setup, Store(Path(out)), listener, resume=resume, trained_on=data, module=module)
        memory = Memory(listener)
        plan = _as_run(setup, None, memory, memory.tested)
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
    found = load_checkpoint(store.checkpoint, e.device, round=round, spec=spec_hash(e), seed=e.seed)
    if found is None:
        raise FailedError(f"rank {ranks.rank} finds no checkpoint of round {round} in {store.folder}; "
                         "ranks on several machines need one folder that all of them see")  # fmt: skip
    return _laid_out(setup, found[0]), found[1]


def using(setup: Setup) -> AbstractContextManager[None]:
    """Return the use of the machine that suits a setup, for a `with` around its rounds."""
    e = setup.experiment
    # Of several ranks each has one thread, so that their number does not show in the bits.
    backend = "threads" if setup.ranks else e.backend
    return tuned(setup.task.num_weights, e.device, backend, e.precision)


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
        e, read = setup.experiment, partial(load_checkpoint, store.checkpoint, setup.experiment.device, listener.note)
        if longer and (short := read(seed=e.seed)) is not None:
            # Its checkpoint names the shorter run; from here on it is this one's, which is not finished.
            save_checkpoint(store.checkpoint, *short, spec=spec_hash(e), seed=e.seed)
            store.result.unlink(missing_ok=True)
            for text in longer_told(e, longer):
                listener.note(text)
        store.open(to_toml(e))
        found = read(spec=spec_hash(e), seed=e.seed) if resume else None
        if resume and known and found is None:
            listener.note(f"{store.folder} holds no checkpoint of this run; it begins anew")
        if setup.ranks is not None:
            setup.ranks.all(int(found[0].round) if found else None)
        state, extra = (_laid_out(setup, found[0]), found[1]) if found else (start(setup), {})
        store.cut_rounds(int(state.round))
        return stored(store, carry_out(_as_run(setup, store, listener), state, extra), **given)


def _as_run(
    setup: Setup,
    store: Store | None,
    listener: Listener,
    told: Callable[[ServerState, list[ClientResult]], None] = lambda *_: None,
) -> Run:
    e = setup.experiment
    curve = _sampled(setup, e.eval_clients)

    def test(state: ServerState, count: int = e.final_clients) -> Tested:
        found = evaluate(setup, state, count=count)
        told(state, found.clients)

        def files() -> tuple[list[dict[str, Any]], dict[str, Any]]:
            more = details(setup.algorithm, state, setup.pool.federation, found.clients, released=setup.released)
            return _client_lines(found.clients, setup), more

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
        warned=lambda loss, summary: diverged(loss, summary["test"], _labels(setup.pool.federation)),
        privacy=setup.algorithm.privacy,
        notes=[*setup.notes, *_samples_told(setup), *methods.notes(e.method, e.options, e.rounds), *_private(setup)],
        about=lambda: {
            "backend": e.backend,
            "precision": e.precision,
            **({"curve_sampled": curve} if curve else {}),
            **_names(setup.pool.federation),
            **provenance(e.device),
        },
    )


def _check_privacy(e: Experiment, privacy: Mechanism | None) -> None:
    """Refuse what epsilon could not be computed for."""
    if privacy is None:
        return
    privacy.check()
    if not privacy.poisson and privacy.rate < 1 and e.available != "1":
        raise SpecError(
            f"sampling is fixed and available is {e.available}, but of a varying number of clients a fixed one hides "
            "less than epsilon would say; use sampling=poisson"
        )


def _private(setup: Setup) -> Sequence[str]:
    return () if setup.algorithm.privacy is None else setup.algorithm.privacy.told()


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


def rounds_of(setup: Setup, state: ServerState) -> Iterator[tuple[ServerState, Record]]:
    """Train from a state on, with the clients that are there; yield the state and the record after each round."""
    return rounds(server_update(setup), transport(setup), state, setup.experiment.rounds)


def _names(federation: Federation) -> dict[str, Any]:
    """Return the names of clients, in their order, and of classes, where the data have names for them."""
    found = {"clients": federation.names, "classes": federation.source.classes}
    names = {key: list(value) for key, value in found.items() if value}
    return {"names": names} if names else {}


def _client_lines(results: Sequence[ClientResult], setup: Setup) -> list[dict[str, Any]]:
    return [_client_line(each, setup) for each in results]


def _client_line(result: ClientResult, setup: Setup) -> dict[str, Any]:
    figures = {name: "" if value is None else value for name, value in client_figures(result).items()}
    names = setup.pool.federation.names
    return {
        "client": result.client,
        **({"name": names[result.client]} if names else {}),
        "unseen": int(result.client >= setup.pool.federation.num_clients),
        "train_size": result.train_size,
        "test_size": len(result.y),
        **figures,
    }
